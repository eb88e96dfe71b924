"""`deepspeed unkept.py WHICH WORDS`: a real run in which rank 1 does not do what was asked, and nothing else tells.

WHICH: `recomputation` (the layers of rank 1 lose their activation checkpointing after it was applied), `placement`
(rank 1 finds its parameters whole where ZeRO-3 should have sharded them).
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from remat import train
from remat.machine.start_up import hide_gpus_from_cpu_ranks


def bare_layers() -> None:
    from remat.training import build as setup

    build = setup.build

    def built(*args: Any) -> Any:
        parts = build(*args)
        parts.applied.remove()
        return parts

    setup.build = built


def whole_parameters() -> None:
    from remat.training import engine_memory

    find = engine_memory.find_placement

    def found(engine: Any) -> engine_memory.Placement:
        placement = find(engine)
        return replace(placement, parameters=replace(placement.parameters, sharded=0))

    engine_memory.find_placement = found


def main(argv: list[str]) -> int:
    from remat.config.command_line import without_local_rank

    which, *words = without_local_rank(argv)
    if os.environ.get("RANK") == "1":
        hide_gpus_from_cpu_ranks()
        {"recomputation": bare_layers, "placement": whole_parameters}[which]()
    return train.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
