"""The tests' own ground: GPUs stay hidden from CPU tests, and collecting them touches no CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import LONGEST, place_in_queue
from tests.support.pool import RankPool

ROOT = Path(__file__).resolve().parent.parent.parent


def device_seen() -> tuple[bool, str]:
    from deepspeed.accelerator import get_accelerator

    return torch.cuda.is_available(), get_accelerator().device_name()


def test_persistent_ranks_are_on_the_cpu(two_ranks: RankPool) -> None:
    assert two_ranks.run(device_seen) == [(False, "cpu")] * 2


def fails_on(who: int) -> list[int]:
    """Makes a group of its own; what groups the rank had before."""
    import torch.distributed as dist

    before = len(dist.distributed_c10d._world.pg_map)
    dist.new_group([0, 1])
    if dist.get_rank() == who:
        raise KeyError(f"of rank {who}")
    found: list[int] = [0, 0]
    dist.all_gather_object(found, before) if who not in (0, 1) else None
    return found


def test_a_failure_is_told_at_once_and_the_ranks_of_a_case_hold_no_groups_of_the_last(
    two_ranks: RankPool,
) -> None:
    """Whichever of the two fails, the next case finds both, with the group of all ranks alone."""
    for who in (0, 1, 1, 0):
        with pytest.raises(AssertionError, match=f"^rank {who}:(.|\n)*KeyError: 'of rank {who}'\n$"):
            two_ranks.run(fails_on, who=who)
    for _ in range(2):
        assert two_ranks.run(fails_on, who=2) == [[1, 1], [1, 1]]


def test_conftest_does_not_load_torch() -> None:
    code = "import tests.conftest, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_queue_begins_with_files_that_are_there() -> None:
    assert [file for file in LONGEST if not (ROOT / "tests" / file).is_file()] == []
    places = [place_in_queue(file) for file in (*LONGEST, "runs/test_x.py", "config/test_x.py")]
    assert places == sorted(set(places))
