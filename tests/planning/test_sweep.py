"""Sweeps: which words are swept, that a refused point is a row, and which points are on the front."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from remat import cli
from remat.config import compose
from remat.config.command_line import read_values, split_points
from remat.config.options import ConfigError
from remat.planning import budget, plan, sweep

BASE = ["recipe=tiny_zero3_offload", "hardware=1x4090", "model.architecture.num_hidden_layers=2"]
SWEPT = [*BASE, "checkpointing=none,full", "train.micro_batch_size=1,3,8"]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("a=1,2,4", ["1", "2", "4"]),
        ("peft.target_modules=[q_proj,v_proj]", ["[q_proj,v_proj]"]),
        ("a=[q,v],[o]", ["[q,v]", "[o]"]),
        ("checkpointing.layers={0-7: none, 31: full}", ["{0-7: none, 31: full}"]),
        ("data.path='a,b'", ["'a,b'"]),
        ("a=x", ["x"]),
    ],
)
def test_commas_inside_a_value_do_not_split_it(word: str, expected: list[str]) -> None:
    assert read_values(word) == expected


def test_words_without_commas_stay() -> None:
    fixed, points = split_points(SWEPT)
    assert fixed == BASE
    assert len(points) == 6 and points[0] == ("checkpointing=none", "train.micro_batch_size=1")


@pytest.mark.parametrize("args", [BASE, [*BASE, "train.micro_batch_size=1,,2"]])
def test_nothing_to_sweep_and_empty_values_are_refused(args: list[str]) -> None:
    with pytest.raises(ConfigError, match="--sweep"):
        split_points(args)


def test_a_sweep_is_its_single_plans_and_a_refused_point_a_row() -> None:
    seen: list[int] = []
    points = sweep.run(SWEPT, lambda done, total: seen.append(done))
    assert seen == list(range(7))
    for point in points:
        if "train.micro_batch_size=3" in point.overrides:
            assert point.planned is None and "train.global_batch_size" in point.refused
        else:
            alone = plan.make_plan(compose.from_command_line([*BASE, *point.overrides]).run)
            assert point.planned is not None and point.planned.plan == alone.plan
    costs = {
        p.overrides: (plan.needed_bytes(p.planned, "GPU memory"), p.planned.time.total_s)
        for p in points
        if p.planned
    }
    for point in points:
        if point.planned is None:
            assert not point.on_pareto_front
            continue
        mine = costs[point.overrides]
        better = [
            other
            for other in costs.values()
            if other != mine and all(a <= b for a, b in zip(other, mine, strict=True))
        ]
        assert point.on_pareto_front == (not better)


def test_all_refused_is_an_error() -> None:
    with pytest.raises(ConfigError, match="every combination is refused"):
        sweep.run([*BASE, "train.micro_batch_size=3,5"])


def test_the_command_prints_a_table_or_a_list() -> None:
    table = CliRunner().invoke(cli.app, ["plan", "--sweep", *SWEPT])
    assert table.exit_code == 0
    assert "refused (1)" in table.output and "fits, Pareto front" in table.output
    listed = CliRunner().invoke(cli.app, ["plan", "--sweep", "--json", *SWEPT])
    data = json.loads(listed.output)
    assert len(data) == 6
    assert {entry["refused"] is None for entry in data} == {True, False}
    assert data[0]["plan"]["gpu_allocated_peak_bytes"] > 0


def test_the_exit_code_says_when_none_fits() -> None:
    words = ["plan", "--sweep", *BASE, "hardware.gpu_memory_gib=0.1", "checkpointing=none,full"]
    assert CliRunner().invoke(cli.app, words).exit_code == 3


CURVE = [*BASE, "train.seq_len=2048", "train.micro_batch_size=2"]


@pytest.fixture(scope="module")
def points() -> list[sweep.Point]:
    seen: list[int] = []
    found = sweep.curve(CURVE, lambda done, total: seen.append(done))
    assert seen[-1] == sweep.CURVE_PARTS + 1 + len(sweep.NAMED)
    return found


def test_a_curve_falls_from_the_least_to_keeping_all_which_is_the_policy_none(
    points: list[sweep.Point],
) -> None:
    tables = [
        (plan.needed_bytes(p.planned, "GPU memory"), p.planned) for p in points if p.is_budget and p.planned
    ]
    assert len(tables) > 5
    for (fewer, slower), (more, faster) in itertools.pairwise(tables):
        # recomputed values and their recomputation's workspace are in memory together, which shows in a small model
        assert fewer <= 1.02 * more and slower.time.total_s >= faster.time.total_s
    named = {p.overrides[0]: p.planned for p in points if not p.is_budget and p.planned}
    assert tables[-1][1].simulation == named["checkpointing=none"].simulation


def test_each_point_of_a_curve_can_be_asked_for_by_its_overrides(points: list[sweep.Point]) -> None:
    middle = next(p for p in points[3:] if p.is_budget and p.planned)
    assert middle.planned is not None
    again = plan.make_plan(compose.compose_run([*CURVE, *middle.overrides]).run)
    assert sweep.gpu_bytes(again) <= 1.001 * sweep.gpu_bytes(middle.planned)
    assert again.time.total_s <= 1.01 * middle.planned.time.total_s


def test_the_command_prints_a_curve_and_draws_it(
    tmp_path: Path, points: list[sweep.Point], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def curve(args: list[str], progress: Callable[[int, int], None]) -> list[sweep.Point]:
        asked.append(list(args))
        progress(1, 1)
        return points

    monkeypatch.setattr(sweep, "curve", curve)
    picture = tmp_path / "curve.png"
    done = CliRunner().invoke(cli.app, ["plan", "--curve", "--json", "--plot", str(picture), *CURVE])
    assert done.exit_code == 0 and picture.stat().st_size > 10_000 and asked == [CURVE]
    found = json.loads(done.stdout)
    assert found[0]["overrides"][0] == budget.CHOICE and found[0]["plan"]["checkpointing_table"]["layers"]
    assert {entry["overrides"][0] for entry in found} >= {f"checkpointing={name}" for name in sweep.NAMED}
    table = CliRunner().invoke(cli.app, ["plan", "--curve", *CURVE])
    assert table.exit_code == 0 and "fits, Pareto front" in table.output and asked == [CURVE] * 2
    both = CliRunner().invoke(cli.app, ["plan", "--curve", "--sweep", *BASE])
    assert isinstance(both.exception, ConfigError) and "--sweep and --curve" in str(both.exception)
