"""The accuracy benchmark: its points, how it reads a run, and a page that never shows a plan as a measurement."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import environment
from benchmarks import plan_accuracy as accuracy
from remat.config import compose
from remat.config.options import ConfigError
from remat.config.units import GIB

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
    ],
)
def test_how_a_run_ended(code: int, out: str, expected: str) -> None:
    assert accuracy.status(code, out) == expected


def test_only_failures_and_changed_runs_are_measured_again(tmp_path: Path) -> None:
    path, words = tmp_path / "p.json", ["train.steps=4", "output_dir=/here"]
    assert not accuracy.is_done(path, words)
    path.write_text(json.dumps({"words": ["train.steps=4"], "status": "out of memory", "exit_code": 70}))
    assert accuracy.is_done(path, words) and not accuracy.is_done(path, ["train.steps=5"])
    for status in ("failed", "time was over"):
        path.write_text(json.dumps({"words": ["train.steps=4"], "status": status, "exit_code": -1}))
        assert not accuracy.is_done(path, words)


QLORA = "llama-8b-4L_zero2_full_b2_s2048_peft-qlora"
FIRST = "gpt2-medium_zero2_none_b8_s1024"


@pytest.fixture
def no_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise ConfigError("peft.method=qlora needs bitsandbytes\nmore of it")

    monkeypatch.setattr("remat.model.adapters._bitsandbytes", missing)


def accuracy_main(monkeypatch: pytest.MonkeyPatch, work: Path, *words: str) -> list[dict[str, Any]]:
    """The rows that the script writes, on a CPU."""
    monkeypatch.setattr("sys.argv", ["plan_accuracy", "--device", "cpu", "--work", str(work), *words])
    accuracy.main()
    return list(json.loads((work / "plan_accuracy_cpu.json").read_text())["points"])


def test_a_run_that_this_machine_cannot_plan_is_a_row_that_says_why(
    no_bitsandbytes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for minutes in ("1", "0"):  # measured (not launched), and not measured
        (row,) = accuracy_main(monkeypatch, tmp_path / minutes, "--only", QLORA, "--minutes", minutes)
        assert row["status"] == "refused" and row["said"] == "peft.method=qlora needs bitsandbytes"
        assert row["planned_allocated_bytes"] is row["allocated_bytes"] is None
        assert row["said"] in accuracy.line(row)
        assert "1 of 2 runs" in accuracy.summarize([ROW, row])


def test_an_interrupt_loses_nothing_that_is_finished_and_plans_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = accuracy.POINTS[0]
    args = accuracy.parse_args(["--device", "cpu", "--work", str(tmp_path)])
    before = ROW | {"name": kept.name, "words": accuracy.portable(accuracy.overrides(kept, args))}
    changed = ROW | {"name": accuracy.POINTS[1].name, "words": ["train.steps=5"]}
    result = {"environment": environment.environment("cpu"), "points": [before, changed]}
    (tmp_path / "plan_accuracy_cpu.json").write_text(json.dumps(result))

    def measure(point: accuracy.Point, args: Any) -> dict[str, Any]:
        if point.name != FIRST:
            raise KeyboardInterrupt
        words = accuracy.portable(accuracy.overrides(point, args))
        return ROW | {"name": point.name, "words": words, "exit_code": 0, "wall_s": 1.0}

    monkeypatch.setattr(accuracy, "measure", measure)
    monkeypatch.setattr(accuracy, "plan", None)
    monkeypatch.setattr(accuracy, "POINTS", [accuracy.POINTS[2], accuracy.POINTS[1], kept])
    assert accuracy.POINTS[0].name == FIRST
    rows = accuracy_main(monkeypatch, tmp_path)
    assert [row["name"] for row in rows] == [FIRST, kept.name] and rows[1] == before


def test_figures_of_another_machine_are_not_put_beside_new_ones() -> None:
    here = dict.fromkeys(accuracy.MUST_AGREE, "A") | {"commit": "1", "host_bytes": 1}
    assert accuracy.on_the_same(here, here | {"commit": "2", "host_bytes": 2})
    assert not accuracy.on_the_same(here, here | {"gpu": "B"}) and not accuracy.on_the_same(None, here)
    row = accuracy.only_planned(ROW | {"words": [], "exit_code": 0})
    assert row["status"] == "not yet measured" and row["device_bytes"] is None
    assert row["planned_total_bytes"] == ROW["planned_total_bytes"]


def test_torch_names_the_kernel_of_its_attention() -> None:
    assert environment.attention_kernel("cpu") in ("FLASH_ATTENTION", "MATH")


def test_the_summary_says_what_was_missed_and_what_was_not_measured() -> None:
    bad = ROW | {"name": "q", "planned_allocated_bytes": 60 * GIB}
    out = ROW | {"name": "r", "status": "out of memory", "allocated_bytes": 70 * GIB}
    text = accuracy.summarize([ROW, ROW | {"name": "s"}, bad, out])
    assert "median error 2.0%, worst 20.0% (q)" in text and "Missed" in text and "r: out of memory" in text
    assert "Met" in accuracy.summarize([ROW])
    assert "None of 1 runs was measured" in accuracy.summarize([ROW | {"status": "not yet measured"}])


def test_the_page_has_the_plans_of_the_result_file() -> None:
    page = (accuracy.ROOT / "docs" / "plan-accuracy.md").read_text()
    shown = re.findall(r"^\| `(\S+)` \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    rows = json.loads(accuracy.RESULT.read_text())["points"]
    sizes = ("planned_allocated_bytes", "planned_total_bytes")
    assert shown == [(row["name"], *(f"{row[size] / GIB:.2f}" for size in sizes)) for row in rows]
    assert all(row["allocated_bytes"] is None for row in rows) == ("Nothing is measured yet" in page)
