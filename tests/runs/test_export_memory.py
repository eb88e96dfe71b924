"""An export never holds more than a shard above what its process held before, whatever the size of the model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support import export_memory
from tests.support.export_memory import SHARD_BYTES, WINDOW_BYTES
from tests.support.launcher import ROOT, run
from tests.support.pool import RankPool

MARGIN_BYTES = 10 * 10**6  # libraries, file names, what the allocator rounds
CLEAR = Path("/proc/self/clear_refs")
pytestmark = pytest.mark.skipif(not CLEAR.exists(), reason="the peak of a process cannot be reset here")


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_export_of_a_saved_state(tmp_path: Path, zero_stage: int) -> None:
    script = str(ROOT / "tests/support/export_memory.py")
    done = run([sys.executable, script, str(zero_stage), str(tmp_path)])
    assert done.code == 0, done.out[-4000:]
    found = json.loads(done.out.splitlines()[-1])
    weight = found["largest"] * 3 // 2  # the largest weight in fp32 and in bf16
    allowed = SHARD_BYTES + WINDOW_BYTES + weight + MARGIN_BYTES
    assert found["above"] < allowed < found["exported"] // 2


def test_export_of_a_live_engine(two_ranks: RankPool, tmp_path: Path) -> None:
    """Each rank also holds a weight while it is gathered, and while the gathered parts are put together."""
    for rank in two_ranks.run(export_memory.live_case, folder=tmp_path / "out"):
        largest = export_memory.SHAPE["vocab_size"] * export_memory.SHAPE["hidden_size"] * 4
        allowed = SHARD_BYTES + 4 * largest + MARGIN_BYTES
        assert rank["above"] < allowed < rank["exported"] // 2, rank
