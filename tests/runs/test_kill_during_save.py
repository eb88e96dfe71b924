"""kill -9 of a rank while it writes its part of a saved state, and the run that goes on from there."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from remat.saving import load, manifest
from tests.support import tiny
from tests.support.launcher import ROOT, deepspeed
from tests.support.supervised import supervised

pytestmark = pytest.mark.launch
SAVING = ["deepspeed.config=zero2", "train.steps=6", "save.every=2", "save.keep=3"]


def names(saved: Path) -> list[str]:
    return sorted(path.name for path in saved.iterdir())


@pytest.mark.slow_fault
def test_a_kill_within_a_save_costs_only_that_save(tmp_path: Path) -> None:
    workshop = tiny.make_workshop(tmp_path)
    runs = [tiny.words(workshop, "whole", *SAVING[:2]), tiny.words(workshop, "killed", *SAVING)]
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    halted, run = tmp_path / "halted", workshop / "out" / "killed" / "run"
    with supervised(tmp_path, str(ROOT / "tests/support/stops_in_save.py"), str(tmp_path)) as launch:
        launch.until(lambda: halted.exists() or launch.process.poll() is not None, "rank within a save")
        assert halted.exists(), launch.out[-4000:]
        launch.watch()
        os.kill(int(halted.read_text()), signal.SIGKILL)
        assert launch.finish() not in (0, 75), launch.out[-4000:]
        assert launch.left() == []
    assert names(run / "saved") == ["step-000002", "step-000004", "tmp-step-000006"]
    for step in (2, 4):
        assert manifest.verify(run / "saved" / f"step-{step:06d}") == []
    found = load.find_newest(run)
    assert found.state is not None and found.state.step == 4
    assert found.notes == ["tmp-step-000006: unfinished"]

    resumed = deepspeed(*tiny.words(workshop, "killed", *SAVING, "resume=auto"))
    assert resumed.code == 0, resumed.out[-4000:]
    assert "run/tmp-step-000006: unfinished" in resumed.out
    assert names(run / "saved") == ["step-000002", "step-000004", "step-000006"]
    whole = [row["loss/train"] for row in tiny.rows(workshop / "out" / "whole" / "run")]
    assert [row["loss/train"] for row in tiny.rows(run)] == whole
    assert len(whole) == 6
