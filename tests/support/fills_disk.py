"""`fills_disk.py FOLDER`: runs whose saves meet a disk that is full, or fills while they write. FOLDER/disk is small.

The runs of FOLDER/runs.json, in order: `continue`, whose saves of steps 2, 3 and 5 fail and whose others succeed;
`large`, which asks for more states than the disk can hold; `stop`, whose second save fails. FOLDER/seen.json tells
what was in the folder of saved states after each save, and how it failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from remat import train
from remat.machine.start_up import hide_gpus_from_cpu_ranks, share_cores

share_cores()
hide_gpus_from_cpu_ranks()

from remat.config import compose  # noqa: E402
from remat.machine import distributed  # noqa: E402
from remat.planning.preflight import DoesNotFit  # noqa: E402
from remat.saving import manifest  # noqa: E402
from remat.saving import save as saving  # noqa: E402
from remat.training import build, loop  # noqa: E402

FOLDER = Path(sys.argv[-1])
BALLAST = FOLDER / "disk" / f"ballast-{os.environ['RANK']}"
BEFORE = {("continue", 2), ("stop", 2)}  # the disk is full before the save begins
WITHIN = {("continue", 3): 1, ("continue", 5): 0}  # and here while this rank writes
seen: dict[str, dict[str, Any]] = {}


def fill() -> None:
    """Write until the disk takes no more."""
    with contextlib.suppress(OSError), BALLAST.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@contextlib.contextmanager
def faults(run: str, step: int, engine: Any) -> Iterator[None]:
    original = engine.checkpoint_engine.save

    def save(*content: Any, **more: Any) -> None:
        fill()
        original(*content, **more)

    rank = distributed.rank_from_env()
    if (run, step) in BEFORE and rank == 0:
        fill()
    if WITHIN.get((run, step)) == rank:
        engine.checkpoint_engine.save = save
    distributed.barrier()
    try:
        yield
    finally:
        engine.checkpoint_engine.save = original
        BALLAST.unlink(missing_ok=True)
        distributed.barrier()


def watch_saves() -> None:
    real = saving.save

    def save(engine: Any, run_dir: Path, *, step: int, **more: Any) -> Any:
        error, began = None, time.monotonic()
        try:
            with faults(run_dir.parent.name, step, engine):
                return real(engine, run_dir, step=step, **more)
        except manifest.SaveError as caught:
            error = str(caught)
            raise
        finally:
            texts = distributed.gather(error)
            left = sorted(path.name for path in (run_dir / "saved").iterdir())
            whole = [name for name in left if not manifest.verify(run_dir / "saved" / name)]
            found = {"errors": texts, "left": left, "whole": whole, "monotonic_s": began}
            note(f"{run_dir.parent.name} {step}", found)

    saving.save = save


def note(what: str, content: dict[str, Any]) -> None:
    seen[what] = content
    if distributed.rank_from_env() == 0:
        (FOLDER / "seen.json").write_text(json.dumps(seen))


def main() -> int:
    proceeding, large, stopping = json.loads((FOLDER / "runs.json").read_text())
    watch_saves()
    composed = compose.compose_run(proceeding)
    parts = build.build(composed)
    loop.train(parts)
    parts.engine.destroy()
    composed = compose.compose_run(large)
    try:
        build.build(composed)
    except DoesNotFit as error:
        note("large", {"error": str(error)})
    return train.main(stopping)


if __name__ == "__main__":
    sys.exit(main())
