"""Two launches of one run: the second is refused while the first lives, and goes on from it once it is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from remat.report import run_dir, run_report
from remat.saving import load
from tests.support import tiny
from tests.support.launcher import deepspeed

RUN = ["deepspeed.config=zero2", "train.steps=6", "save.every=2", "save.keep=3"]
HANGS = {"what": "sleep", "rank": 0, "at": "step 5"}


def states(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "saved").iterdir())


@pytest.mark.launch
def test_one_launch_owns_a_run(tmp_path: Path) -> None:
    """The first hangs in step 5, and is the owner all the same: it may yet write."""
    workshop = tiny.make_workshop(tmp_path)
    words, run = tiny.words(workshop, "owned", *RUN), workshop / "out" / "owned" / "run"
    spec = workshop / "spec.json"
    spec.write_text(json.dumps([{"name": "owned", "words": words, "fault": HANGS}]))
    with ThreadPoolExecutor() as beside:
        first = beside.submit(deepspeed, str(spec), script="tests/support/faulty_runs.py", timeout_s=240)
        hung = spec.with_suffix(".fault.json")
        while not (hung.exists() or first.done()):
            time.sleep(0.05)
        assert not first.done(), first.result().out[-4000:]
        owner = json.loads((run / run_dir.OWNER).read_text())
        saved, rows = states(run), (run / "metrics.jsonl").read_bytes()

        second = deepspeed(*words, "resume=auto", "train.global_batch_size=8")
        assert second.code == 2, second.out[-4000:]
        assert f"process {owner['pid']} on {owner['host']}, since {owner['since']}" in second.out
        assert "Traceback" not in second.out
        assert states(run) == saved == ["step-000002", "step-000004"]
        assert (run / "metrics.jsonl").read_bytes() == rows
        assert json.loads((run / run_dir.OWNER).read_text())["token"] == owner["token"]
        assert run_report.draw(run), "who only reads needs not own it"
        found = load.find_newest(run)
        assert found.state is not None and found.state.step == 4

        os.kill(owner["pid"], signal.SIGKILL)
        assert first.result().code == -signal.SIGKILL & 0xFF, first.result().out[-4000:]
    assert (run / run_dir.OWNER).exists(), "nobody was left to remove it"
    third = deepspeed(*words, "resume=auto")
    assert third.code == 0, third.out[-4000:]
    assert [row["step"] for row in tiny.rows(run)] == [1, 2, 3, 4, 5, 6]
    assert states(run) == ["step-000002", "step-000004", "step-000006"]
    assert not list(run.glob(f"{run_dir.OWNER}*"))
