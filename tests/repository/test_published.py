"""Plans beside published figures: the table is that of the result file, which has today's plan; known rows are met."""

from __future__ import annotations

import json

import pytest

from benchmarks import published
from remat.config import compose

SOURCES, ROWS = published.read()
FOUND = json.loads(published.RESULT.read_text())


def test_every_row_is_a_run_of_a_source_and_is_in_the_table() -> None:
    assert len(ROWS) == len(FOUND) >= 30 and {row.key for row in ROWS} == set(FOUND)
    for row in ROWS:
        compose.compose_run(row.command)
        assert row.source in SOURCES and (row.known or row.note), "an unknown setting says what is not known"
    page = published.PAGE.read_text()
    assert published.renewed(page) == page, "run python benchmarks/published.py"


def test_where_the_setting_is_known_allocated_is_within_the_bar() -> None:
    known = [row for row in ROWS if row.known]
    assert len(known) >= 3
    for row in known:
        assert FOUND[row.key]["allocated"] == pytest.approx(row.gib, rel=published.BAR), row.key


IN_MAKE_TEST = "G: ZeRO-3, optimizer offload, recomputed, 2 x 4096"
CASES = [
    pytest.param(row, id=row.key, marks=[] if row.key == IN_MAKE_TEST else pytest.mark.exhaustive)
    for row in ROWS
]


@pytest.mark.parametrize("row", CASES)
def test_a_row_is_planned_as_the_file_says(row: published.Row) -> None:
    assert published.plan(row) == pytest.approx(FOUND[row.key], rel=0.01), "run benchmarks/published.py --plan"


@pytest.mark.parametrize(
    ("kind", "gib", "expected"),
    [
        ("allocated", 9.5, "+5.3%"),
        ("reserved", 11.0, "inside"),
        ("reserved", 9.0, "below, by 10.0%"),
        ("reserved", 15.0, "above, by 25.0%"),
        ("device", 12.9, "inside"),
    ],
)
def test_a_miss_is_called_a_miss(kind: str, gib: float, expected: str) -> None:
    row = published.Row("X", "a run", gib, kind, "", "")
    planned = {"allocated": 10.0, "reserved_at_most": 12.0, "device_at_most": 13.0}
    assert published.verdict(row, planned) == expected
