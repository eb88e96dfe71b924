"""The same run under many W&Bs in one launch: `deepspeed services.py SPEC.json`, spec {"name": [option=value, ...]}.

A run named `raises-CALL` or `blocks-CALL` gets a W&B that fails or never returns in that call; any other has none.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.support import many_runs  # noqa: I001 (first: it settles what this rank may see)

from remat.config.compose import Composed
from remat.training import build as setup
from remat.report import tracking
from remat.training.run import Run


class Wandb:
    """Stands in for the module and for the run that its `init` returns."""

    def __init__(self, fault: str, call: str) -> None:
        self.fault, self.call = fault, call
        self.summary = SimpleNamespace(update=lambda figures: None)

    def reach(self, call: str) -> None:
        if call == self.call and self.fault == "raises":
            raise ConnectionError(f"{call}: unreachable")
        if call == self.call:
            threading.Event().wait()  # never set: slower than any patience

    def Settings(self, **settings: Any) -> SimpleNamespace:
        return SimpleNamespace(**settings)

    def setup(self, settings: object) -> None: ...

    def init(self, **arguments: Any) -> Wandb:
        self.reach("init")
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.reach("log")

    def finish(self, exit_code: int) -> None:
        self.reach("finish")

    def teardown(self, exit_code: int) -> None: ...


def build(composed: Composed) -> Run:
    fault, _, call = composed.run.name.partition("-")
    sys.modules["wandb"] = Wandb(fault, call)  # type: ignore[assignment]
    return built(composed)


if __name__ == "__main__":
    tracking.FINISH_TIMEOUT_S = 1.0  # one that only raises has done so long before
    built, setup.build = setup.build, build
    many_runs.main(Path(sys.argv[-1]))
