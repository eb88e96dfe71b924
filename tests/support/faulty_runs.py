"""`faulty_runs.py SPEC.json`: runs one after another in one launch, each with a fault of its own at a known point.

The spec is a list of {"name", "words", "fault"}. A fault is null, {"what", "rank", "at"} or a list of such: what
happens, on which rank (null: on each), and where: "built" (before the run is), "step N M" (in the forward of the Mth
micro-batch, by default the first, of the launch's Nth optimizer step), "backward N M" (where its backward enters its
first collective), "evaluate N" (in the launch's Nth micro-batch of evaluations), "save" (in its first).
SPEC.fault.json tells when and where the last fault happened. Rank 0 writes SPEC.done.json: what became of each run,
which data it computed on, and a digest of its weights.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from remat.launch import signals
from remat.machine.start_up import hide_gpus_from_cpu_ranks, share_cores

share_cores()
hide_gpus_from_cpu_ranks()

RANK = int(os.environ["RANK"])


def main(argv: list[str]) -> int:
    import cpuinfo
    import torch

    from remat.config import compose
    from remat.machine import distributed, ops
    from remat.report import console
    from remat.training import build, loop
    from tests.support import recordings
    from tests.support.pool import leave_groups

    recordings.share()
    ops.use_environment_folder()
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    console.quiet_libraries(debug=False)
    spec = Path(argv[-1])
    done: list[dict[str, Any]] = []
    for run in json.loads(spec.read_text()):
        composed = compose.compose_run(run["words"])
        asked = run["fault"] or []
        faults = [Fault(spec, **fault) for fault in ([asked] if isinstance(asked, dict) else asked)]
        for fault in faults:
            if fault.at == "built":
                fault.happen(Path())
        parts = build.build(composed)
        data = Data(parts)
        for fault in faults:
            fault.put_into(parts)
        finished, error = None, None
        try:
            finished = loop.train(parts).finished
        except loop.FAILURES as found:
            error = str(found)
        own = [getattr(p, "ds_tensor", p) for p in parts.engine.module.parameters()]
        finite = all(distributed.gather(all(bool(torch.isfinite(p).all()) for p in own)))
        done.append({"name": run["name"], "finished": finished, "error": error, "finite": finite})
        done[-1] |= {
            "sample_ids": data.sample_ids,
            "micro_batches": distributed.gather(data.micro_batches),
            "weights": distributed.gather(digest(own)),
        }
        parts.engine.destroy()
        del parts, data, faults, own
        leave_groups()
    if RANK == 0:
        spec.with_suffix(".done.json").write_text(json.dumps(done))
    distributed.shut_down()
    return 0


def digest(tensors: list[Any]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().float().cpu().numpy().tobytes())
    return sha.hexdigest()


class Data:
    """What a run trains on: the sample ids of each global batch, a checksum of each micro-batch of this rank."""

    def __init__(self, parts: Any) -> None:
        self.sample_ids: list[list[int]] = []
        self.micro_batches: list[int] = []
        next_step, original = parts.batches.next_step, parts.token_loss

        def noted_step() -> Any:
            batch = next_step()
            self.sample_ids.append(batch.sample_ids.tolist())
            return batch

        def token_loss(engine: Any, inputs: Any) -> Any:
            if engine.module.training:
                self.micro_batches.append(zlib.crc32(inputs["input_ids"].cpu().numpy().tobytes()))
            return original(engine, inputs)

        parts.batches.next_step, parts.token_loss = noted_step, token_loss


class Fault:
    def __init__(self, spec: Path, what: str, rank: int | None, at: str) -> None:
        self.spec, self.what, self.at = spec, what, at
        self.mine = rank in (None, RANK)

    def put_into(self, parts: Any) -> None:
        point, *numbers = self.at.split()
        first, micro_batch = (*map(int, numbers), 1, 1)[:2]
        per_step = parts.strategy.ds["gradient_accumulation_steps"]
        if point == "save":
            self._before_save(parts)
        elif point == "evaluate":
            self._in_forward(parts, training=False, index=first - 1)
        elif point == "step":
            self._in_forward(parts, training=True, index=(first - 1) * per_step + micro_batch - 1)
        elif point == "backward":
            self._in_backward(parts, index=(first - 1) * per_step + micro_batch - 1)

    def happen(self, folder: Path, loss: Any = None, where: str = "") -> Any:
        """The fault, on a rank that it is meant for; `loss` as it leaves it."""
        if not self.mine:
            return loss
        noted = {"monotonic_s": time.monotonic(), "rank": RANK, "where": where or self.at}
        self.spec.with_suffix(".fault.json").write_text(json.dumps(noted))
        if self.what.startswith("SIG"):
            for name in self.what.split():
                os.kill(os.getpid(), signal.Signals[name])
        elif self.what == "node launcher killed":
            kill_node_launcher()
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
        owner = parts.pipeline or parts  # of stages, only the last one has a loss
        original, count = owner.token_loss, 0

        def token_loss(called: Any, inputs: Any) -> Any:
            nonlocal count
            loss = original(called, inputs)
            if getattr(called, "module", called).training is not training:
                return loss
            count += 1
            return self.happen(parts.folder, loss) if count == index + 1 else loss

        if original is not None:
            owner.token_loss = token_loss

    def _in_backward(self, parts: Any, index: int) -> None:
        """Where the backward of that micro-batch calls its first collective: other ranks wait in it for this one."""
        from deepspeed.comm import comm

        original, count = parts.engine.backward, 0

        def backward(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count != index + 1 or not self.mine:
                return original(*args, **kwargs)
            backend = comm.cdb
            comm.cdb = AtCollective(backend, lambda name: self.happen(parts.folder, where=name))
            try:
                return original(*args, **kwargs)
            finally:
                comm.cdb = backend

        parts.engine.backward = backward

    def _before_save(self, parts: Any) -> None:
        original, saves = parts.engine.save_checkpoint, 0

        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            nonlocal saves
            saves += 1
            if saves == 1:
                self.happen(parts.folder)
            return original(*args, **kwargs)

        parts.engine.save_checkpoint = save_checkpoint


class AtCollective:
    """DeepSpeed's communication backend; `happens` is told the name of a collective as it is called."""

    def __init__(self, backend: Any, happens: Callable[[str], Any]) -> None:
        self._backend, self._happens = backend, happens

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if name.startswith("has_") or not any(word in name for word in ("reduce", "gather", "broadcast")):
            return found

        def collective(*args: Any, **kwargs: Any) -> Any:
            self._happens(name)
            return found(*args, **kwargs)

        return collective


def kill_node_launcher() -> None:
    """SIGKILL to the process that started this rank's node; then the micro-batch waits for what comes of it."""
    import psutil

    (node,) = (p for p in psutil.Process().parents() if "deepspeed.launcher.launch" in p.cmdline())
    node.kill()
    while not signals.noted():
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(signals.around(main, sys.argv[1:]))
