"""`faulty_runs.py SPEC.json`: runs one after another in one launch, each with a fault of its own at a known point.

The spec is a list of {"name", "words", "fault"}. A fault is null or {"what", "rank", "at"}: what happens, on which rank
(null: on each), and where: "built" (before the run is), "step N" and "evaluate N" (in the first micro-batch of the
Nth optimizer step of the launch, in its Nth micro-batch of evaluations), "save" (in its first). Rank 0 writes
SPEC.done.json: what became of each run.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from remat import stop_signals
from remat.cores import hide_gpus_from_cpu_ranks, share_cores

share_cores()
hide_gpus_from_cpu_ranks()

RANK = int(os.environ["RANK"])


def main(argv: list[str]) -> int:
    import cpuinfo
    import torch

    from remat import compose, console, distributed, ops, setup, trainer

    ops.use_environment_folder()
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    console.quiet_libraries(debug=False)
    spec = Path(argv[-1])
    done: list[dict[str, Any]] = []
    for run in json.loads(spec.read_text()):
        composed = compose.compose_run(run["words"])
        fault = Fault(**run["fault"]) if run["fault"] else None
        if fault and fault.at == "built":
            fault.happen(Path())
        parts = setup.build(composed.run, composed.yaml, composed.words)
        if fault:
            fault.put_into(parts)
        finished, error = None, None
        try:
            finished = trainer.train(parts).finished
        except trainer.FAILURES as found:
            error = str(found)
        own = [getattr(p, "ds_tensor", p) for p in parts.engine.module.parameters()]
        finite = all(distributed.gather(all(bool(torch.isfinite(p).all()) for p in own)))
        done.append({"name": run["name"], "finished": finished, "error": error, "finite": finite})
        parts.engine.destroy()
    if RANK == 0:
        spec.with_suffix(".done.json").write_text(json.dumps(done))
    distributed.shut_down()
    return 0


class Fault:
    def __init__(self, what: str, rank: int | None, at: str) -> None:
        self.what, self.at = what, at
        self.mine = rank in (None, RANK)

    def put_into(self, parts: Any) -> None:
        point, _, number = self.at.partition(" ")
        if point == "save":
            self._before_save(parts)
        elif point in ("step", "evaluate"):
            per_step = parts.strategy.ds["gradient_accumulation_steps"] if point == "step" else 1
            self._in_forward(parts, training=point == "step", index=(int(number) - 1) * per_step)

    def happen(self, folder: Path, loss: Any = None) -> Any:
        """The fault, on a rank that it is meant for; `loss` as it leaves it."""
        if not self.mine:
            return loss
        if self.what.startswith("SIG"):
            for name in self.what.split():
                os.kill(os.getpid(), signal.Signals[name])
        elif self.what == "stop file":
            (folder / "stop").touch()
        elif self.what == "sleep":
            threading.Event().wait()
        elif self.what == "nan loss":
            return loss * float("nan")
        elif self.what == "inf loss, finite gradient":
            return loss + float("inf")
        elif self.what == "inf gradient":
            loss.register_hook(lambda gradient: gradient * float("inf"))
        else:
            raise ValueError(self.what)
        return loss

    def _in_forward(self, parts: Any, *, training: bool, index: int) -> None:
        original, count = parts.token_loss, 0

        def token_loss(engine: Any, inputs: Any) -> Any:
            nonlocal count
            loss = original(engine, inputs)
            if engine.module.training is not training:
                return loss
            count += 1
            return self.happen(parts.folder, loss) if count == index + 1 else loss

        parts.token_loss = token_loss

    def _before_save(self, parts: Any) -> None:
        original, saves = parts.engine.save_checkpoint, 0

        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            nonlocal saves
            saves += 1
            if saves == 1:
                self.happen(parts.folder)
            return original(*args, **kwargs)

        parts.engine.save_checkpoint = save_checkpoint


if __name__ == "__main__":
    sys.exit(stop_signals.around(main, sys.argv[1:]))
