"""The tests' own ground: GPUs stay hidden from CPU tests, and collecting them touches no CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from tests.conftest import LONGEST, place_in_queue
from tests.support.pool import RankPool

ROOT = Path(__file__).resolve().parent.parent.parent


def device_seen() -> tuple[bool, str]:
    from deepspeed.accelerator import get_accelerator

    return torch.cuda.is_available(), get_accelerator().device_name()


def test_persistent_ranks_are_on_the_cpu(two_ranks: RankPool) -> None:
    assert two_ranks.run(device_seen) == [(False, "cpu")] * 2


def test_conftest_does_not_load_torch() -> None:
    code = "import tests.conftest, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_queue_begins_with_files_that_are_there() -> None:
    assert [file for file in LONGEST if not (ROOT / "tests" / file).is_file()] == []
    places = [place_in_queue(file) for file in (*LONGEST, "runs/test_x.py", "config/test_x.py")]
    assert places == sorted(set(places))
