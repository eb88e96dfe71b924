"""What the pictures of plans and sweeps show are the plans' own figures."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from remat import cli
from remat.config import compose, units
from remat.config.command_line import check_picture
from remat.config.options import ConfigError
from remat.planning import plan, sweep
from remat.planning.simulation.types import Phase
from remat.report import plan as plan_text
from remat.report import plan_charts

BASE = ["recipe=tiny_zero3_offload", "hardware=2x4090", "model.architecture.num_hidden_layers=2"]
PNG = b"\x89PNG"


def test_bars_times_and_the_curve_are_those_of_the_plan() -> None:
    known = plan.Recordings()
    planned = plan.make_plan(compose.from_command_line(BASE).run, recordings=known)
    bars = plan_charts.bars(planned)
    assert bars[0].total_gib * units.GIB == pytest.approx(planned.plan.resources[0].needed_bytes)
    host = sum(bar.total_gib for bar in bars if "host" in bar.title)
    assert host * units.GIB == pytest.approx(planned.plan.resources[1].needed_bytes)
    assert bars[0].found_gib == pytest.approx(23.5)
    assert [size for _, size in bars[0].parts] == sorted((size for _, size in bars[0].parts), reverse=True)
    assert sum(seconds for _, seconds in plan_charts.times(planned)) == pytest.approx(planned.time.total_s)
    curve = plan_charts.curve(planned, known.get(planned.cfg, planned.strategy))
    assert max(instant.total_bytes for instant in curve) == planned.plan.peak_bytes
    assert {instant.phase for instant in curve} == {Phase.forward, Phase.backward}


def test_a_plan_and_a_sweep_are_drawn(tmp_path: Path) -> None:
    runner = CliRunner()
    for name, words in (
        ("plan.png", ["train.seq_len=128"]),
        ("sweep.png", ["--sweep", "train.seq_len=128,256"]),
    ):
        result = runner.invoke(cli.app, ["plan", "--no-advice", *BASE, *words, "--plot", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
        assert (tmp_path / name).read_bytes().startswith(PNG)


def test_the_scatter_has_each_point_that_was_planned() -> None:
    points = sweep.run([*BASE, "train.micro_batch_size=1,3,4"])
    shown = plan_charts.scatter(points)
    assert [point.overrides for _, _, point in shown] == [p.overrides for p in points if p.planned]
    for gib, seconds, point in shown:
        assert point.planned is not None
        assert gib * units.GIB == pytest.approx(point.planned.plan.resources[0].needed_bytes)
        assert seconds == point.planned.time.total_s


@pytest.mark.parametrize("path", ["plan.txt", "nowhere/plan.png"])
def test_a_file_that_cannot_be_drawn_is_refused_first(path: str) -> None:
    with pytest.raises(ConfigError, match="--plot"):
        check_picture(Path(path))


def test_forward_is_wide_enough_to_be_seen_however_few_moments_it_has() -> None:
    places, border = plan_charts._spread(1000, 2)
    assert border == pytest.approx(1 / 3) and places[:2] == [0, border / 2]
    assert places == sorted(places) and places[-1] == 1 and len(places) == 1000
    assert plan_charts._spread(10, 5)[1] == 0.5


def test_the_verdict_comes_first_and_nothing_in_it_is_coloured_by_guess() -> None:
    out = io.StringIO()
    console = Console(file=out, width=110, highlight=False, force_terminal=True, color_system="standard")
    plan_text.show(plan.make_plan(compose.from_command_line(BASE).run), console)
    title, verdict, *_ = out.getvalue().splitlines()
    assert "fits: tiny_zero3_offload on 2x4090, 2 ranks" in title and "GPU memory" in verdict
    assert verdict.count("\x1b[") == 2, "one colour for the line, and its end"
