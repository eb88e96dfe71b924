"""kill -9 of a rank while it cuts a saved state for another number of ranks, and the launch after it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from remat.saving import load, manifest, reshard
from tests.support import tiny
from tests.support.launcher import Launched, deepspeed

pytestmark = [pytest.mark.launch, pytest.mark.slow_fault]
WORDS = ["deepspeed.config=zero3_offload", "train.steps=6"]


def test_a_kill_while_a_state_is_cut_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop = tiny.make_workshop(tmp_path)
    run = workshop / "out" / "cut" / "run"

    def launch(ranks: int, *runs: list[str]) -> Launched:
        (tmp_path / "spec.json").write_text(json.dumps({f"{index}": words for index, words in enumerate(runs)}))
        killed = "KILL_IN_RESHARD" in os.environ
        script = "tests/support/reshard_runs.py"
        return deepspeed(str(tmp_path / "spec.json"), ranks=ranks, script=script, real=killed)

    first = [tiny.words(workshop, "whole", *WORDS), tiny.words(workshop, "cut", *WORDS, "train.stop_at=3")]
    done = launch(2, *first)
    assert done.code == 0, done.out[-4000:]
    resume = tiny.words(workshop, "cut", *WORDS, "resume=auto")
    monkeypatch.setenv("KILL_IN_RESHARD", "30")
    killed = launch(1, resume)
    assert killed.code not in (0, 75), killed.out[-4000:]
    left = run / "saved" / reshard.UNIVERSAL
    written = [path.stat().st_mtime for path in left.rglob("*") if path.is_file()]
    assert len(written) > 20, "it was killed within"
    assert manifest.verify(run / "saved" / "step-000003") == []
    found = load.find_newest(run)
    assert found.state is not None and found.state.step == 3
    assert found.notes == [f"{reshard.UNIVERSAL}: unfinished"]

    monkeypatch.delenv("KILL_IN_RESHARD")
    done = launch(1, resume)
    assert done.code == 0, done.out[-4000:]
    assert not left.exists()
    whole = [row["loss/train"] for row in tiny.rows(workshop / "out" / "whole" / "run")]
    assert [row["loss/train"] for row in tiny.rows(run)] == pytest.approx(whole, rel=1e-6)
    assert len(whole) == 6
