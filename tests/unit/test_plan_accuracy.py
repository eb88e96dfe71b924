"""The accuracy benchmark: its points, how it reads a run, and a page that never shows a plan as a measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plan_accuracy as accuracy
from remat import compose
from scripts import memory_model_tables, plan_accuracy_page

GIB = 2**30
ROW: dict[str, Any] = {
    "name": "p", "status": "ran", "planned_allocated_bytes": 51 * GIB, "allocated_bytes": 50 * GIB,
    "planned_total_bytes": 55 * GIB, "reserved_bytes": 53 * GIB, "device_bytes": 54 * GIB,
}  # fmt: skip


def test_every_point_is_a_run_that_can_be_composed() -> None:
    args = accuracy.parse_args([])
    assert len({point.name for point in accuracy.POINTS}) == len(accuracy.POINTS) >= 24
    for point in accuracy.POINTS:
        compose.compose_run(accuracy.overrides(point, args))


def test_the_result_file_has_every_point_with_todays_plan() -> None:
    rows = {row["name"]: row for row in json.loads(accuracy.RESULT.read_text())["points"]}
    assert list(rows) == [point.name for point in accuracy.POINTS], (
        "run benchmarks/plan_accuracy.py --plan-only"
    )
    args = accuracy.parse_args([])
    for point in accuracy.POINTS:
        if point.name in ("gpt2-medium_zero2_full_b8_s1024", "llama-1b_zero3_offload_full_b8_s512"):
            found = accuracy.plan(point, args)["planned_allocated_bytes"]
            assert found == rows[point.name]["planned_allocated_bytes"], "run plan_accuracy.py --plan-only"


def test_a_run_is_read_from_its_record(tmp_path: Path) -> None:
    rows = [
        {"loss/train": 1.0, accuracy.ALLOCATED: peak, accuracy.RESERVED: peak + 1} for peak in (3.0, 5.0, 4.0)
    ]
    (tmp_path / accuracy.RECORD).write_text("\n".join(json.dumps(row) for row in [*rows, {"loss/eval": 1.0}]))
    found = accuracy.read(tmp_path)
    assert (found["steps"], found["allocated_bytes"], found["reserved_bytes"]) == (3, 5 * GIB, 6 * GIB)
    assert accuracy.read(tmp_path / "none")["allocated_bytes"] is None


@pytest.mark.parametrize(
    ("code", "out", "expected"),
    [
        (0, "", "ran"),
        (3, "does not fit", "refused"),
        (70, "remat: out of GPU memory in backward, layer 3 on rank 0", "out of memory"),
        (70, "the loss is not finite", "failed"),
        (-1, "took longer", "failed"),
    ],
)
def test_how_a_run_ended(code: int, out: str, expected: str) -> None:
    assert accuracy.status(code, out) == expected


def test_only_failures_and_changed_runs_are_measured_again(tmp_path: Path) -> None:
    path, words = tmp_path / "p.json", ["train.steps=4", "output_dir=/here"]
    assert not accuracy.is_done(path, words)
    path.write_text(json.dumps({"words": ["train.steps=4"], "status": "out of memory"}))
    assert accuracy.is_done(path, words) and not accuracy.is_done(path, ["train.steps=5"])
    path.write_text(json.dumps({"words": ["train.steps=4"], "status": "failed"}))
    assert not accuracy.is_done(path, words)


def test_the_page_says_what_was_missed_and_what_was_not_measured() -> None:
    bad = ROW | {"name": "q", "planned_allocated_bytes": 60 * GIB}
    out = ROW | {"name": "r", "status": "out of memory", "allocated_bytes": 70 * GIB}
    text = plan_accuracy_page.verdict([ROW, ROW | {"name": "s"}, bad, out])
    assert "median error 2.0%, worst 20.0% (`q`)" in text and "Missed" in text and "r: out of memory" in text
    assert "Met" in plan_accuracy_page.verdict([ROW])
    not_yet = ROW | {
        "status": "not yet measured",
        "allocated_bytes": None,
        "reserved_bytes": None,
        "device_bytes": None,
    }
    assert plan_accuracy_page.cells(not_yet).count("not yet measured") == 4
    assert "none was measured" in plan_accuracy_page.verdict([not_yet])
    assert plan_accuracy_page.cells(out)[2:4] == ["out of memory", "out of memory"]


def test_the_accuracy_page_is_up_to_date() -> None:
    page = plan_accuracy_page.PAGE.read_text()
    assert plan_accuracy_page.renewed(page) == page, "run python scripts/plan_accuracy_page.py"


def test_the_memory_model_page_is_up_to_date() -> None:
    page = memory_model_tables.PAGE.read_text()
    assert memory_model_tables.renewed(page) == page, "run python scripts/memory_model_tables.py"
