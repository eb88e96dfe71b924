"""The figures, pictures and page of a comparison, from results made up here: two points, eight, and out of memory."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import re
import struct
from dataclasses import replace

import pytest
from rich.console import Console

from remat.config.units import MIB
from remat.lab import charts, experiment, figures, page, table
from remat.lab.experiment import Experiment
from remat.lab.figures import Row, Spread
from remat.lab.launch import Result
from remat.lab.measure import PEAK_CPU, TIMES, Measured
from remat.report.charts import LIGHT
from tests.lab.test_command import CPU

LONG = "selective operations with a name that nobody would call short"
POLICIES = ["none", "full", "selective_ops", LONG, "uniform", "block", "interval", "sqrt"]


def measured(place: int, repeat: int) -> Measured:
    """Less memory and more time with each place; the second repeat is slower."""
    steps = [(1 + place / 4) * (1 + 0.1 * repeat) + 0.01 * number for number in range(4)]
    return Measured(
        peak_bytes=(900 - 100 * place) * MIB,
        counted_bytes=(900 - 100 * place) * MIB,
        counted_planned_bytes=(909 - 101 * place) * MIB,
        peak_how=PEAK_CPU,
        kept_bytes=(500 - 60 * place) * MIB,
        micro_batch_bytes=400 * MIB,
        states_bytes={"weights in host memory": 100 * MIB},
        recomputed_percent=10.0 * place,
        steps={name: steps if name == "step" else [value / 4 for value in steps] for name in TIMES},
        first_steady_step=2,
        tokens_per_s=[512 / value for value in steps],
        loss=[(step, 9 - step / 10) for step in range(1, 7)],
        eval_loss=8.5,
        ledger=[{"category": "weights", "planned": 1.0, "measured": 2.0}],
    )


def results(made: Experiment, *without: str) -> list[Result]:
    """Two repeats of each; the points `without` run out of memory."""
    found = []
    for repeat in (1, 2):
        for place, point in enumerate(made.points):
            lost = point.name in without
            found.append(
                Result(
                    key="",
                    point=point.name,
                    repeat=repeat,
                    status="out of memory" if lost else "finished",
                    words="out of GPU memory in backward, layer 3 on rank 0" if lost else "",
                    command=f"remat launch {' '.join(point.words)}",
                    env={"commit": "abc", "started": "2026-01-31T00:00:00+00:00", "torch": "2.13"},
                    measured=None if lost else measured(place, repeat),
                )
            )
    return found


def compared(*policies: str, without: tuple[str, ...] = ()) -> tuple[Experiment, list[Result], list[Row]]:
    expanded = [(name, [f"checkpointing={name}"], list[str]()) for name in policies]
    points = experiment._points(expanded, ["recipe=tiny_zero3_offload"], [], "", [])
    made = Experiment(
        "policies", "Several policies", "Which?", ("B0",), "Half the width.", "cpu", points, 2, 1, "peak"
    )
    found = results(made, *without)
    return made, found, figures.rows(made, found)


# Figures


def test_medians_and_quartiles() -> None:
    assert figures.spread([]) is None
    assert figures.spread([3.0]) == Spread(3.0, 3.0, 3.0, 1)
    assert figures.spread([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(3.0, 2.0, 4.0, 5)


def test_a_ratio_spans_from_quartile_against_quartile() -> None:
    found = figures.ratio(Spread(6.0, 4.0, 8.0, 5), Spread(2.0, 1.0, 4.0, 5))
    assert (found.median, found.low, found.high) == (3.0, 1.0, 8.0)


def test_rows_pool_all_repeats() -> None:
    _, _, (none, full) = compared("none", "full")
    assert none.step is not None and none.step.count == 8 and full.repeats == 2
    assert none.ratio is not None and none.ratio.median == 1.0
    assert full.ratio is not None and full.step is not None
    assert full.ratio.median == pytest.approx(full.step.median / none.step.median)
    assert full.ratio.low < full.ratio.median < full.ratio.high
    assert full.same_bytes and full.final_loss == pytest.approx(8.4)


def test_bytes_that_differ_between_repeats_are_told() -> None:
    made, found, _ = compared("none", "full")
    assert found[3].measured is not None
    larger = dataclasses.replace(found[3].measured, peak_bytes=10**9)
    rows = figures.rows(made, [*found[:3], dataclasses.replace(found[3], measured=larger)])
    assert (rows[0].same_bytes, rows[1].same_bytes, rows[1].peak_bytes) == (True, False, 10**9)
    assert table.notes(rows) == ["full: bytes differ between repeats; the most is shown"]


def test_a_peak_that_was_not_counted_is_told() -> None:
    _, _, rows = compared("none", "full")
    assert table.notes([dataclasses.replace(rows[1], peak_in_update=True)]) == [
        "full: the peak is in the optimizer step, as planned; counted in a micro-batch: 800.0 MiB"
    ]


def test_out_of_memory_is_a_row_with_its_words() -> None:
    _, _, (none, full) = compared("none", "full", without=("none",))
    assert (none.status, none.words) == ("out of memory", "out of GPU memory in backward, layer 3 on rank 0")
    assert full.ratio is None, "its baseline has no time"
    assert table.cells(none, [none, full])[:2] == ["none", "out of memory"]


def test_a_repeat_that_failed_is_told_beside_the_others() -> None:
    made, found, _ = compared("none", "full")
    lost = dataclasses.replace(found[2], status="failed", words="exit code 1", measured=None)
    rows = figures.rows(made, [*found[:2], lost, found[3]])
    assert (rows[0].repeats, rows[0].status) == (1, "finished")
    assert table.notes(rows) == ["none: 1 of 2 launches: failed: exit code 1"]


def test_one_line_of_csv_per_launch() -> None:
    _, found, _ = compared("none", "full", without=("full",))
    lines = list(csv.DictReader(io.StringIO(figures.as_csv(found))))
    assert [line["status"] for line in lines] == ["finished", "out of memory"] * 2
    assert lines[0]["peak_bytes"] == str(900 * MIB) and lines[1]["peak_bytes"] == ""
    assert float(lines[0]["step_s"]) == pytest.approx(1.115)


def test_the_table_holds_everything_in_120_columns() -> None:
    made, _, rows = compared("none", "full", "sqrt", without=("sqrt",))
    console = Console(width=120, file=io.StringIO(), record=True)
    table.show(made, rows, console)
    text = console.export_text()
    for piece in ("peak memory, MiB", "900.0", "+1.0%", "x baseline", "Half the width.", "out of memory"):
        assert piece in text, piece
    assert "sqrt: out of memory: out of GPU memory in backward, layer 3 on rank 0" in text


# Pictures and page


def test_the_front_is_that_of_one_baseline() -> None:
    rows = compared("none", "full", "sqrt")[2]
    assert [[row.name for row in front] for front in charts.fronts(rows)] == [["sqrt", "full", "none"]]
    worse = dataclasses.replace(rows[1], peak_bytes=1000 * MIB)
    assert [[row.name for row in front] for front in charts.fronts([rows[0], worse, rows[2]])] == [
        ["sqrt", "none"]
    ]
    alone = dataclasses.replace(worse, baseline="full")
    assert [row.name for front in charts.fronts([rows[0], alone]) for row in front] == ["none", "full"]


def test_numbers_of_points_that_lie_close_by_stand_apart() -> None:
    """As of variants that save the same and take nearly the same time."""
    _, _, rows = compared("none", "full", "sqrt")
    peak = rows[1].peak_bytes or 0
    close = [replace(rows[1], name=f"as full {n}", peak_bytes=peak + n) for n in range(4)]
    figure = charts._pareto([*rows, *close], LIGHT)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == 7
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_the_trade_off_is_against_the_baseline() -> None:
    rows = compared("none", "full")[2]
    ((row, saved, slower),) = charts.tradeoff(rows, "peak")
    assert row.name == "full" and saved == pytest.approx(100 / 9)
    assert rows[1].ratio is not None and slower == pytest.approx(100 * (rows[1].ratio.median - 1))
    assert charts.tradeoff(rows, "kept")[0][1] == pytest.approx(12.0)


@pytest.mark.parametrize(
    ("policies", "without"),
    [
        (POLICIES[:2], ()),
        (POLICIES, ("block",)),
        pytest.param(POLICIES[:3], ("none",), marks=pytest.mark.exhaustive),
    ],
)
def test_pictures_and_a_page_that_refers_to_nothing(policies: list[str], without: tuple[str, ...]) -> None:
    made, found, rows = compared(*policies, without=without)
    drawn = charts.draw(made, rows)
    assert set(drawn) == {"panels", "pareto"}
    for picture in drawn.values():
        width, height = struct.unpack(">II", picture.light[16:24])
        assert width > 2000 and 800 < height < 3000 and picture.light != picture.dark
    content = figures.as_json(made, found, rows, CPU)
    text = page.render(content, made, rows, list(drawn.values()))
    assert not re.search(r"(src|href)=\"(?!data:)", text) and "http" not in re.sub(r"base64,[^\"]*", "", text)
    for piece in ("Half the width.", "counted peak, CPU", "claims B0", "Side by side", *policies):
        assert piece in text, piece
    assert ("What did not finish" in text) == bool(without)


def test_nothing_finished_draws_nothing() -> None:
    made, found, rows = compared("none", "full", without=("none", "full"))
    assert charts.draw(made, rows) == {}
    assert "out of GPU memory" in page.render(figures.as_json(made, found, rows, CPU), made, rows, [])


def test_points_without_a_counted_peak_are_still_drawn() -> None:
    made, _, rows = compared("none", "full")
    bare = [replace(row, peak_bytes=None, kept_bytes=None) for row in rows]
    assert set(charts.draw(made, bare)) == {"panels"}
