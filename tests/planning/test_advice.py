"""Advice: what is listed fits when it is planned from nothing, no part of it does, and the cheapest comes first."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from remat import cli
from remat.config import compose, units
from remat.config.options import ConfigError
from remat.planning import plan as plan_module
from remat.planning.plan import Planned, Recordings, make_plan
from remat.planning.settings import choices, screening, search
from tests.support import tiny

BASE = [*tiny.ON_A_4090, "train.loss=chunked"]
SMALL_GPU = [*BASE, "hardware.gpu_memory_gib=0.9"]
NO_HOST = [*BASE, "hardware.host_memory_gib=0.5"]


def plan(args: list[str]) -> Planned:
    return make_plan(compose.from_command_line(args).run)


@pytest.fixture(scope="module")
def known() -> Recordings:
    """What searches of this file have recorded of the same model."""
    return Recordings()


@pytest.fixture(scope="module")
def found(known: Recordings) -> search.Advice:
    return search.advise(SMALL_GPU, plan(SMALL_GPU), recordings=known)


def test_the_run_without_advice_does_not_fit() -> None:
    assert not plan(SMALL_GPU).plan.fits


def test_what_is_listed_fits_when_planned_from_nothing(found: search.Advice) -> None:
    assert found.changes and found.closest is None
    for change in (found.changes[0], found.changes[-1]):
        again = plan([*SMALL_GPU, *change.overrides])
        assert again.plan.fits
        assert again.plan.resources == change.planned.plan.resources
        assert again.time.total_s == pytest.approx(change.planned.time.total_s)


def test_the_same_training_comes_first_and_the_cheapest_of_it(found: search.Advice) -> None:
    marks = [change.changes_training for change in found.changes]
    assert marks == sorted(marks) and True in marks
    same = [change.planned.time.total_s for change in found.changes if not change.changes_training]
    assert same == sorted(same) and len(same) == 3
    first = found.changes[0].planned.cfg.train
    assert first.global_batch_size == compose.from_command_line(SMALL_GPU).run.train.global_batch_size


@pytest.mark.parametrize("moving", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_no_other_single_change_is_faster(found: search.Advice, known: Recordings, moving: bool) -> None:
    """Tables that move values are two plans in one, which tests/planning/test_search.py compares too."""
    cfg = compose.from_command_line(SMALL_GPU).run
    singles = [o for values in choices.same_training(SMALL_GPU, cfg).values() for o in values if o is not None]
    assert len(singles) > 10
    moves = [option for option in singles if list(option.words) == f"checkpointing={choices.MOVING}".split()]
    assert len(moves) == 1
    for option in moves if moving else (option for option in singles if option not in moves):
        try:
            single = make_plan(compose.from_command_line([*SMALL_GPU, *option.words]).run, recordings=known)
        except ConfigError:
            continue
        if single.plan.fits:
            assert single.time.total_s >= 0.99 * found.changes[0].planned.time.total_s


def test_a_run_that_fits_is_told_what_is_faster_and_fits_too(
    known: Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = [*BASE, "checkpointing=full", "train.micro_batch_size=1", "deepspeed.config=zero2"]
    planned = plan(slow)
    found = search.advise(slow, planned, limit=2, recordings=known)
    assert planned.plan.fits and len(found.changes) == 2 and found.closest is None and found.remedies == []
    for change in found.changes:
        assert change.planned.plan.fits and not change.changes_training
        assert change.planned.time.total_s <= (1 - search.FASTER) * planned.time.total_s
    fastest = [*slow, *found.changes[0].overrides]
    assert search.advise(fastest, plan(fastest), recordings=known).changes == []
    monkeypatch.setattr(search, "advise", lambda *_, **__: found)
    said = CliRunner().invoke(cli.app, ["plan", *slow])
    assert said.exit_code == 0 and "faster settings that fit (--no-advice: not)" in said.stderr
    assert "faster, fits, and trains the same; add one line to the command" in said.stdout
    assert all(word in said.stdout for change in found.changes for word in change.overrides)


def test_a_run_on_a_machine_of_unknown_speed_is_told_nothing_of_it() -> None:
    words = [word for word in BASE if "hardware" not in word]
    said = CliRunner().invoke(cli.app, ["plan", *words])
    assert said.exit_code == 0 and "looking up to" not in said.stderr and "faster" not in said.stdout


def test_where_nothing_fits_the_closest_says_what_is_missing(
    known: Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "Recordings", lambda: known)  # both commands plan the same
    result = CliRunner().invoke(cli.app, ["plan", *NO_HOST, "--json"])
    assert result.exit_code == 3
    data = json.loads(result.stdout)
    assert data["advice"] == [] and data["closest"]["fits"] is False
    assert data["closest"]["missing_bytes"]["host memory per node"] >= 2 * units.GIB
    text = CliRunner().invoke(cli.app, ["plan", *NO_HOST]).output
    assert "nothing found that fits on this machine; closest:" in text


def test_the_json_of_advice_is_complete(found: search.Advice) -> None:
    data: dict[str, Any] = json.loads(json.dumps(search.advice_as_json(found)))
    assert data["closest"] is None and len(data["advice"]) == len(found.changes)
    for entry in data["advice"]:
        assert set(entry) == {
            "overrides",
            "changes_training",
            "fits",
            "step_time_s",
            "is_cut_short",
            "tokens_per_s",
            "unknown_times",
            "gpu_needed_bytes",
            "host_needed_bytes",
            "missing_bytes",
        }
        assert entry["fits"] and not entry["missing_bytes"] and entry["gpu_needed_bytes"] <= 0.9 * units.GIB


@pytest.mark.exhaustive
def test_settings_whose_times_are_unknown_come_last(known: Recordings) -> None:
    args = [
        *(word for word in SMALL_GPU if word != "hardware=1x4090"),
        "hardware.gpus_per_node=1",
    ]
    changes = search.advise(args, plan(args), recordings=known).changes
    same = [change for change in changes if not change.changes_training]
    assert len(same) > 1 and all(change.planned.time.unknown for change in same)


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize("policy", ["full", "interval", "sqrt"])
def test_an_estimate_is_the_plan_without_the_replay_of_the_allocator(policy: str) -> None:
    words = [f"checkpointing={policy}", "model.architecture.num_hidden_layers=30", "train.seq_len=512"]
    cfg = compose.from_command_line([*BASE, *words]).run
    whole, known = make_plan(cfg), Recordings()
    estimate = screening.Screen(known).estimate(cfg)
    assert known.made == 1
    assert estimate.plan.peak_bytes == whole.plan.peak_bytes
    assert estimate.time.total_s == whole.time.total_s
    assert [r.needed_bytes for r in estimate.plan.resources][1:] == [
        r.needed_bytes for r in whole.plan.resources
    ][1:]


def test_plans_that_differ_in_sizes_of_zero_share_a_recording() -> None:
    known = Recordings()
    for words in (["deepspeed.config=zero1"], ["deepspeed.config=zero2"], ["train.global_batch_size=32"]):
        cfg = compose.from_command_line([*BASE, *words]).run
        shared = make_plan(cfg, recordings=known)
        assert shared.plan == make_plan(cfg).plan
    assert known.made == 1
