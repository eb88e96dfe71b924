"""A loss or gradient of one rank that is not finite: no rank applies the step, and what it was is written down."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from remat.saving import manifest
from tests.support import tiny
from tests.support.grids import cases, chosen
from tests.support.launcher import deepspeed

pytestmark = pytest.mark.launch

RUN = ["train.steps=3", "train.micro_batch_size=1"]  # two micro-batches a step, of which the first is bad
BF16 = "train.precision=bf16"
LOSS, GRADIENT = "nan loss", "inf gradient"
HIDDEN = "inf loss, finite gradient"
RUNS: dict[str, tuple[list[str], str]] = {
    "zero1": (["deepspeed.config=zero1"], LOSS),
    "zero2": (["deepspeed.config=zero2"], LOSS),
    "zero2_gradient": (["deepspeed.config=zero2"], GRADIENT),
    "zero2_offload": (["deepspeed.config=zero2_offload"], LOSS),
    "zero2_offload_gradient": (["deepspeed.config=zero2_offload"], GRADIENT),
    "zero3": (["deepspeed.config=zero3"], LOSS),
    "zero3_hidden": (["deepspeed.config=zero3"], HIDDEN),
    "zero3_offload": (["deepspeed.config=zero3_offload"], LOSS),
    "zero3_offload_gradient": (["deepspeed.config=zero3_offload"], GRADIENT),
    "bf16_zero2": (["deepspeed.config=zero2", BF16], GRADIENT),
    "bf16_zero2_offload": (["deepspeed.config=zero2_offload", BF16], LOSS),
    "bf16_zero3_offload": (["deepspeed.config=zero3_offload", BF16], HIDDEN),
}
# Each stage, each fault and each precision are among the others, with offload and without.
REST = {"zero2", "zero2_offload", "zero2_offload_gradient", "zero3", "zero3_offload", "zero3_offload_gradient"}
REST |= {"bf16_zero2", "bf16_zero2_offload"}
ZERO0 = ["deepspeed.config=zero1", "deepspeed.overrides.zero_optimization.stage=0"]
STAGES = ["train.pipeline_parallel_size=2", "checkpointing=none"]
ENDED: dict[str, tuple[list[str], str]] = {
    "zero0": ([*ZERO0, "save.every=1"], LOSS),
    "zero0_stages": ([*ZERO0, *STAGES, "save.every=1"], LOSS),
    "too_many": (["deepspeed.config=zero2", "save.every=1", "train.max_skipped_steps=1"], LOSS),
}
Ran = tuple[Path, dict[str, dict[str, Any]], str]


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """One launch of them all, each with a bad first micro-batch on rank 1 in step 2."""
    workshop = tiny.make_workshop(tmp_path_factory.mktemp("numbers"))
    left_out = REST - chosen(request)
    spec = [
        {
            "name": name,
            "words": tiny.words(workshop, name, *RUN, *more),
            "fault": {"what": what, "rank": 1, "at": "step 2"},
        }
        for name, (more, what) in (RUNS | ENDED).items()
        if name not in left_out
    ]
    path = workshop / "spec.json"
    path.write_text(json.dumps(spec))
    done = deepspeed(str(path), script="tests/support/faulty_runs.py")
    assert done.code == 0, done.out[-6000:]
    found = {run["name"]: run for run in json.loads((workshop / "spec.done.json").read_text())}
    return workshop / "out", found, done.out


def skips(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "nonfinite.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", cases(RUNS, REST))
def test_no_rank_applies_a_step_that_is_not_finite_on_one(ran: Ran, name: str) -> None:
    out, found, _ = ran
    folder, what = out / name / "run", RUNS[name][1]
    assert [found[name][key] for key in ("finished", "error", "finite")] == [True, None, True]
    first, skipped, last = tiny.rows(folder)
    assert math.isnan(float(skipped["loss/train"])) and skipped["optim/skipped_steps"] == 1
    assert math.isfinite(first["loss/train"]) and last["loss/train"] < first["loss/train"]
    (row,) = skips(folder)
    assert row["step"] == 2 and len(row["sample_ids"]) == 4
    own = {"rank": 1, "micro_batch": 0, "sample_ids": row["sample_ids"][1:2]}
    assert row["non_finite_losses"] == ([] if what == GRADIENT else [own])


def test_what_a_skipped_step_leaves_is_the_same_whatever_the_strategy(ran: Ran) -> None:
    out, found, _ = ran
    ran_here = [name for name in RUNS if name in found]
    for names in ([n for n in ran_here if "bf16" not in n], [n for n in ran_here if "bf16" in n]):
        after = [tiny.rows(out / name / "run")[-1]["loss/train"] for name in names]
        assert after == pytest.approx([after[0]] * len(after), rel=1e-3 if "bf16" in names[0] else 1e-5), names


@pytest.mark.parametrize("name", ENDED)
def test_a_run_that_cannot_skip_any_more_ends_and_keeps_its_last_good_state(ran: Ran, name: str) -> None:
    out, found, _ = ran
    folder = out / name / "run"
    assert found[name]["finished"] is None and found[name]["finite"]
    assert "nonfinite.jsonl" in found[name]["error"]
    (state,) = (folder / "saved").iterdir()
    assert state.name == "step-000001" and manifest.verify(state) == []
    assert [row["step"] for row in skips(folder)] == [2]
