"""Rehearsed saves and exports, and states that are completed while training goes on; with and without faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from remat.saving import manifest
from tests.support import tiny
from tests.support.launcher import Launched, deepspeed

pytestmark = pytest.mark.launch
RUN = ["train.steps=6", "save.every=2", "save.keep=9", "save.at_end=true", "deepspeed.config=zero2"]
ZERO3_BF16 = ["train.steps=3", "deepspeed.config=zero3_offload", "train.precision=bf16"]
BACKGROUND, REHEARSED = "save.in_background=true", "save.rehearse=true"
RUNS: dict[str, tuple[list[str], str | None]] = {
    "plain": (RUN, None),
    "background": ([*RUN, BACKGROUND, REHEARSED], "slow step 4"),
    "fails": ([*RUN, BACKGROUND, "save.on_error=continue"], "flush"),
    "ends": ([*RUN, BACKGROUND], "flush"),
    "stops": ([*RUN, BACKGROUND], "slow stop"),
    "stops resumed": ([*RUN, BACKGROUND, REHEARSED, "resume=auto"], None),
    "breaks": ([*RUN, BACKGROUND, "train.max_skipped_steps=1"], "slow failed"),
    "bf16": (ZERO3_BF16, "leftover"),
    "bf16_rehearsed": ([*ZERO3_BF16, REHEARSED], None),
    "lora": ([*ZERO3_BF16, "deepspeed.config=zero3", "peft=lora", REHEARSED], None),
    "nan": ([*ZERO3_BF16, REHEARSED], "nan"),
    "other": ([*RUN, REHEARSED], "other"),
    "drop": ([*RUN, REHEARSED], "drop"),
}
MORE = {"bf16", "bf16_rehearsed", "lora", "other"}  # each has a fault or a rehearsal in common with another
Done = tuple[Path, dict[str, Any], Launched]


@pytest.fixture(
    scope="module", params=[MORE, pytest.param(set(), marks=pytest.mark.exhaustive)], ids=["sample", "all"]
)
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """(folder of the runs, how each but the last ended, the launch): all in one, but for those of the parameter."""
    workshop = tiny.make_workshop(tmp_path_factory.mktemp("on_the_way"))
    spec = [
        {"name": name, "words": tiny.words(workshop, name.split()[0], *more), "fault": fault}
        for name, (more, fault) in RUNS.items()
        if name not in request.param
    ]
    (workshop / "runs.json").write_text(json.dumps(spec))
    launched = deepspeed(str(workshop), script="tests/support/saves_on_the_way.py")
    assert (workshop / "seen.json").exists(), launched.out[-6000:]
    return workshop / "out", json.loads((workshop / "seen.json").read_text()), launched


def steps(losses_of: Path) -> list[tuple[float, float, float]]:
    return [(row["step"], row["loss/train"], row["optim/grad_norm"]) for row in tiny.rows(losses_of / "run")]


def states(run: Path) -> list[str]:
    """Every one of them whole."""
    saved = run / "run" / "saved"
    assert [problem for state in saved.iterdir() for problem in manifest.verify(state)] == []
    return sorted(state.name for state in saved.iterdir())


def named(*numbers: int) -> list[str]:
    return [f"step-{number:06d}" for number in numbers]


def test_training_goes_on_while_a_state_is_flushed(done: Done) -> None:
    out, seen, _ = done
    assert seen["background"]["errors"] == [None, None]
    assert seen["background"]["seen"] == ["tmp-step-000002"]  # in step 4
    assert states(out / "background") == states(out / "plain") == named(2, 4, 6)
    assert steps(out / "background") == steps(out / "plain")
    assert len(steps(out / "plain")) == 6


def test_the_stall_is_a_metric_of_its_own(done: Done) -> None:
    out, _, _ = done
    for row in tiny.rows(out / "plain" / "run", "time/save_s"):
        assert row["time/save_stall_s"] == row["time/save_s"] > 0
    first, *others = tiny.rows(out / "background" / "run", "time/save_s")
    # the state of step 2 is complete in step 4
    assert first["step"] == 4 and 0 < first["time/save_stall_s"] < first["time/save_s"]
    assert len(others) == 2 and others[-1]["step"] == 6


def test_a_failure_in_the_background_is_found_by_all_ranks(done: Done) -> None:
    out, seen, launched = done
    assert seen["fails"]["errors"] == [None, None]
    assert states(out / "fails") == named(4, 6)
    text = " ".join(launched.out.split())
    assert "failed on rank 1: OSError: [Errno 28] No space left on device. Training goes on" in text
    assert seen["ends"]["errors"][0] == seen["ends"]["errors"][1]
    assert "failed on rank 1: OSError: [Errno 28]" in seen["ends"]["errors"][0]
    assert states(out / "ends") == [] and len(steps(out / "ends")) <= 4


def test_a_stop_waits_for_the_state_on_its_way(done: Done) -> None:
    out, seen, launched = done
    assert seen["stops"] == {"errors": [None, None], "seen": ["tmp-step-000002"]}
    assert seen["stops resumed"]["errors"] == [None, None]
    assert states(out / "stops") == named(2, 3, 4, 6)  # of the stopped run: 2 and 3
    assert steps(out / "stops") == steps(out / "plain")
    assert "stopping after step 3 (SIGTERM on all ranks): saving" in launched.out


def test_a_run_that_fails_still_completes_the_state_on_its_way(done: Done) -> None:
    out, seen, _ = done
    assert seen["breaks"]["seen"] == ["tmp-step-000002"]
    assert all("1 steps in a row had a non-finite" in error for error in seen["breaks"]["errors"])
    assert states(out / "breaks") == named(2)


def test_a_rehearsal_changes_nothing_and_leaves_nothing(done: Done) -> None:
    out, seen, launched = done
    rehearsed = [name for name in ("background", "bf16_rehearsed", "lora") if name in seen]
    for name in rehearsed:
        assert seen[name]["errors"] == [None, None]
        assert not [path.name for path in (out / name / "run").iterdir() if "tmp" in path.name]
        (row,) = tiny.rows(out / name / "run", "time/rehearsal_s")
        assert row["step"] == 1 and row["time/rehearsal_s"] > 0
    (row,) = tiny.rows(out / "stops" / "run", "time/rehearsal_s")
    assert row["step"] == 4  # the first of the launch that resumed
    assert launched.out.count("read back and the same") == len(rehearsed) + 1
    if "bf16" in seen:
        assert steps(out / "bf16_rehearsed") == steps(out / "bf16")
        assert not [path.name for path in (out / "bf16" / "run").iterdir() if "tmp" in path.name]
    assert "a save, an export and their reload after the first step" in launched.out
    assert tiny.rows(out / "plain" / "run", "time/rehearsal_s") == []


def test_a_damaged_export_ends_the_run_at_its_first_step(done: Done) -> None:
    out, seen, launched = done
    found = {
        "nan": "model.norm.weight was exported with numbers that are not finite",
        "other": "model.norm.weight is not the same in the saved state and in the export",
    }
    for name, text in found.items():
        for error in seen[name]["errors"] if name in seen else ():
            assert error.startswith("rehearsal after step 1: ") and text in error
            assert "save.rehearse=false" in error
    assert launched.code == 70, launched.out[-4000:]
    text = launched.out[launched.out.rindex("remat: rehearsal after step 1") :]
    assert "model.norm.weight was written as None, expected (32,)" in text and "save.rehearse=false" in text
    for name in (*(found.keys() & seen), "drop"):
        assert not [path.name for path in (out / name / "run").iterdir() if "tmp" in path.name]
