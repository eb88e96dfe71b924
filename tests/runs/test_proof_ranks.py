"""A promise that one rank does not keep ends the run with exit code 70, rank and promise named, and a proof.json."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support import tiny
from tests.support.launcher import deepspeed

pytestmark = pytest.mark.launch
UNKEPT = {
    "recomputation": "rank 1: checkpointing is not in effect: layers 0-1 ",
    "placement": "rank 1: zero_optimization.stage=3 is not in effect: 21 of 21 parameters are whole on every rank",
}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_workshop(tmp_path_factory.mktemp("proof"))


@pytest.mark.parametrize("which", UNKEPT)
def test_a_promise_that_is_not_kept_ends_the_run(workshop: Path, which: str) -> None:
    # under ZeRO-3 a layer that is not replayed would not gather, and the other rank wait for it
    config = "zero2" if which == "recomputation" else "zero3"
    words = tiny.words(workshop, which, f"deepspeed.config={config}", "checkpointing=full", "train.steps=3")
    done = deepspeed(which, *words, script="tests/support/unkept.py", timeout_s=300)
    assert done.code == 70, done.out[-4000:]
    assert re.search(UNKEPT[which], done.out), done.out[-4000:]
    assert "proven:" not in done.out and "Traceback" not in done.out
    run = workshop / "out" / which / "run"
    assert len(tiny.rows(run)) <= 1, "the first step shows it"
    proof = json.loads((run / "proof.json").read_text())
    assert len(proof["placement_by_rank"]) == 2 and len(proof["layers"]) == 2
