"""`saves_on_the_way.py FOLDER`: runs that rehearse or save in the background, most with a fault, in one launch.

FOLDER/runs.json is a list of {"name", "words", "fault"}; the last run goes through train.main. FOLDER/seen.json tells
how each of the others ended and what was seen on the way. Faults:
- `slow POINT`: rank 1 flushes its first state only once training has come to POINT: `step N` (its first forward),
  `stop` (W&B is told to finish, before anything is saved) or `failed` (a NaN in step 3 has ended the run);
- `flush`: rank 1 cannot flush its first state;
- `leftover`: a rehearsal of this run that was killed has left its folder;
- `nan`, `other`, `drop`: the final norm is exported as NaN, with other values, or not at all.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from remat import train
from remat.machine.start_up import hide_gpus_from_cpu_ranks, share_cores

share_cores()
hide_gpus_from_cpu_ranks()

from remat.config import compose  # noqa: E402
from remat.launch import signals  # noqa: E402
from remat.machine import distributed  # noqa: E402
from remat.saving import manifest  # noqa: E402
from remat.saving.exports import hf_files  # noqa: E402
from remat.training import build, loop, saves  # noqa: E402
from tests.support import recordings  # noqa: E402
from tests.support.pool import leave_groups  # noqa: E402

FOLDER, RANK = Path(sys.argv[-1]), int(os.environ["RANK"])
NORM, LONGEST_S = "model.norm.weight", 240.0
real_describe, real_save_file, real_wait = manifest.describe, hf_files.save_file, saves.wait_for_save


class Fault:
    def __init__(self, text: str | None) -> None:
        self.what, _, self.point = (text or "").partition(" ")
        self.go, self.calls = threading.Event(), 0
        self.seen: list[str] = []

    def put_into(self, parts: Any) -> None:
        manifest.describe, hf_files.save_file, saves.wait_for_save = real_describe, real_save_file, real_wait
        if self.what in ("slow", "flush"):
            manifest.describe = self._describe
        if self.what in ("nan", "other", "drop"):
            hf_files.save_file = self._save_file
        if self.what == "leftover" and RANK == 0:
            (parts.folder / saves.FOLDER / "saved").mkdir(parents=True)
        if parts is not None and self.what == "slow":
            self._watch(parts)

    def _describe(self, folder: Path, names: list[str]) -> Any:
        self.calls += "rehearsal" not in str(folder)
        if self.calls == 1 and RANK == 1:
            if self.what == "flush":
                raise OSError(28, "No space left on device")
            assert self.go.wait(LONGEST_S)
        return real_describe(folder, names)

    def _save_file(self, tensors: dict[str, Any], *args: Any, **more: Any) -> None:
        if self.what == "drop":
            tensors = {name: value for name, value in tensors.items() if name != NORM}
        else:
            tensors |= {NORM: tensors[NORM] * (float("nan") if self.what == "nan" else 2)}
        real_save_file(tensors, *args, **more)

    def _watch(self, parts: Any) -> None:
        """Look at the folder when training has come to the point, then let the flush go on."""

        def come() -> None:
            self.seen = sorted(path.name for path in (parts.folder / "saved").iterdir())
            self.go.set()

        original, finish, forwards = parts.token_loss, parts.tracker.finish_wandb_soon, 0
        per_step = parts.strategy.ds["gradient_accumulation_steps"]

        def token_loss(engine: Any, inputs: Any) -> Any:
            nonlocal forwards
            step, first = divmod(forwards, per_step)
            forwards += 1
            if self.point == f"step {step + 1}" and not first:
                come()
            if self.point == "stop" and step == 2 and not first:
                os.kill(os.getpid(), signal.SIGTERM)
            loss = original(engine, inputs)
            return loss * float("nan") if self.point == "failed" and step == 2 else loss

        def finish_wandb_soon() -> None:
            come()
            finish()

        def wait(*args: Any, may_fail: bool = False) -> None:
            if self.point == "failed" and may_fail:
                come()
            real_wait(*args, may_fail=may_fail)

        parts.token_loss, parts.tracker.finish_wandb_soon, saves.wait_for_save = (
            token_loss,
            finish_wandb_soon,
            wait,
        )


def one(run: dict[str, Any]) -> dict[str, Any]:
    composed = compose.compose_run(run["words"])
    fault, error = Fault(run["fault"]), None
    parts = build.build(composed)
    fault.put_into(parts)
    try:
        loop.train(parts)
    except loop.FAILURES as caught:
        error = str(caught)
    parts.engine.destroy()
    found = {"errors": distributed.gather(error), "seen": distributed.gather(fault.seen)[1]}
    del parts
    leave_groups()
    return found


def main(argv: list[str]) -> int:
    recordings.share()
    *runs, last = json.loads((FOLDER / "runs.json").read_text())
    seen = {run["name"]: one(run) for run in runs}
    if RANK == 0:
        (FOLDER / "seen.json").write_text(json.dumps(seen))
    Fault(last["fault"]).put_into(None)
    return train.main(last["words"])


if __name__ == "__main__":
    sys.exit(signals.around(main, sys.argv[1:]))
