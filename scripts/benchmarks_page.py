"""Write the tables of docs/benchmarks.md from the committed results: `python scripts/benchmarks_page.py [--check]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import environment  # noqa: E402
from benchmarks.suite.points import POINTS, Point  # noqa: E402
from scripts.generated import between, update  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
MARK, END = "<!-- results: written by scripts/benchmarks_page.py -->", "<!-- end of results -->"
GIB = 1024**3
NOT_YET = "not yet measured"
TITLES = {
    "mfu": "Model FLOPs utilisation",
    "peers": "The same run in other software",
    "offload": "What offload costs",
    "longest": "Longest sequence",
    "tests": "Tests that need a GPU",
}
NOTES = {
    "mfu": "One GPU, sequences of 4096 tokens, random weights. HFU counts what is recomputed, MFU does not.",
    "peers": "Llama of 1B parameters, 4 sequences of 4096 tokens a step, bf16 with fp32 master weights, SDPA, "
    "AdamW, the same DeepSpeed config unless said. A peer that did not run is a row with its error.",
    "offload": "Llama of 1B parameters, 4 sequences of 4096 tokens. Time is relative to everything on the GPU.",
    "tests": "The files of `tests/gpu`, as pytest sums them up.",
    "longest": "Two steps at the longest sequence that is planned to fit with room and to end in time, then at "
    "twice as many tokens, until memory runs out or four minutes are over; one sequence a step. What ended it is what "
    "became of the next length, twice as long: where that is *time was over*, a longer sequence may still fit.",
}


def text(results: Path = RESULTS) -> str:
    """Every section of the suite: a table of what is committed, and what is not yet measured."""
    parts = []
    for section, title in TITLES.items():
        rows = _read(results / "gpu" / f"{section}.json") or []
        points = [point for point in POINTS if point.section == section]
        table = {"longest": longest, "peers": peers, "offload": offload, "mfu": mfu, "tests": tests}[section]
        parts += [f"## {title}", "", NOTES[section], "", *table(points, {row["name"]: row for row in rows}), ""]
        parts += [*measured_on(rows), ""] if rows else []
    return "\n".join([*parts, *policies(results), "", *overhead(results)])


def mfu(points: list[Point], rows: dict[str, Any]) -> list[str]:
    lines = header("run", "step s", "tokens/s", "TFLOP/s", "MFU", "HFU", "peak GiB", "planned peak GiB")
    for point in points:
        row = rows.get(point.name)
        cells = [_number(row, "step_s", 3), _number(row, "tokens_per_s", 0), _number(row, "tflops_per_gpu", 0),
                 _percent(row, "mfu"), _percent(row, "hfu"), _gib(row, "allocated_bytes"),
                 _gib(row, "planned_allocated_bytes")]  # fmt: skip
        lines.append(_line(point.name, row, cells))
    return lines


def tests(points: list[Point], rows: dict[str, Any]) -> list[str]:
    lines = header("file", "outcome")
    for point in points:
        said = rows.get(point.name, {}).get("summary", NOT_YET).strip("= ")
        lines.append(f"| `{point.words[0]}` | {said} |")
    return lines


def peers(points: list[Point], rows: dict[str, Any]) -> list[str]:
    lines = header("run", "step s", "tokens/s", "peak GiB", "reserved GiB", "differs in")
    for point in points:
        row = rows.get(point.name)
        cells = [_number(row, "step_s", 3), _number(row, "tokens_per_s", 0), _gib(row, "allocated_bytes"),
                 _gib(row, "reserved_bytes"), (row or {}).get("differs", "")]  # fmt: skip
        lines.append(_line(point.name, row, cells))
    return lines


def offload(points: list[Point], rows: dict[str, Any]) -> list[str]:
    lines = header("where", "step s", "times as long", "peak GiB", "planned peak GiB")
    first = rows.get(points[0].name, {}).get("step_s")
    for point in points:
        row = rows.get(point.name)
        ratio = f"{row['step_s'] / first:.2f}" if row and first and "step_s" in row else NOT_YET
        cells = [
            _number(row, "step_s", 3),
            ratio,
            _gib(row, "allocated_bytes"),
            _gib(row, "planned_allocated_bytes"),
        ]
        lines.append(_line(point.name, row, cells))
    return lines


def longest(points: list[Point], rows: dict[str, Any]) -> list[str]:
    lines = header("activation checkpointing", "longest that ran, tokens", "peak GiB there", "what ended it")
    for point in points:
        row = rows.get(point.name)
        ran = [rung for rung in (row or {}).get("rungs", []) if rung["status"] == "ran"]
        cells = [f"{row['longest_seq_len']:,}" if row else NOT_YET, _gib(ran[-1] if ran else None, "allocated_bytes"),
                 row["ended"] if row else NOT_YET]  # fmt: skip
        lines.append(_line(point.name, row, cells))
    return lines


def policies(results: Path) -> list[str]:
    lines = ["## Every policy, 8 layers of 8B", "", "Forward and backward of 4096 tokens in bf16, without an engine, "
             "policies interleaved (`benchmarks/policies.py`).", ""]  # fmt: skip
    found = _read(results / "policies_cuda.json")
    if found is None:
        return [*lines, f"{NOT_YET.capitalize()}."]
    lines += header("policy", "peak GiB", "kept GiB", "moved GiB", "recomputed", "times as long as none")
    for row in found["points"]:
        if "error" in row:
            lines.append(f"| {row['name']} | {row['error']} | | | | |")
            continue
        sizes = " | ".join(f"{row[key] / GIB:.2f}" for key in ("peak_bytes", "kept_bytes", "moved_bytes"))
        again, ratio = f"{row['recomputed_of_forward']:.0%}", f"{row.get('time_of_none', float('nan')):.2f}"
        lines.append(f"| {row['name']} | {sizes} | {again} | {ratio} |")
    where = found["machine"]
    said = f"{where['device']}, torch {where['torch']}, commit {where['commit'][:12]}, {where['date']}."
    return [*lines, "", f"Measured on {said}"]


def overhead(results: Path) -> list[str]:
    lines = ["## What the loop costs", "", "A tiny model, so that the loop shows; steps of all three are interleaved "
             "in one process (`benchmarks/loop_overhead.py`).", ""]  # fmt: skip
    lines += header("device", "against", "ratio of step times: median", "lowest", "highest")
    for name, device in (("loop_overhead.json", "2 CPU ranks"), ("loop_overhead_cuda.json", "1 GPU")):
        found = _read(results / name)
        if found is None:
            lines.append(f"| {device} | {NOT_YET} | | | |")
            continue
        for against, r in found["ratio"].items():
            other = against.partition("/")[2]
            lines.append(f"| {device} | {other} | {r['median']:.3f} | {r['lowest']:.3f} | {r['highest']:.3f} |")
    return lines


def header(*names: str) -> list[str]:
    return [f"| {' | '.join(names)} |", "|---" + "|---:" * (len(names) - 1) + "|"]


def measured_on(rows: list[dict[str, Any]]) -> list[str]:
    """Hardware, versions, commit and date, once for each that differs."""
    return list(dict.fromkeys(environment.measured_on(row["environment"]) for row in rows))


def _line(name: str, row: dict[str, Any] | None, cells: list[str]) -> str:
    if row is None:
        return f"| {name} | {' | '.join([NOT_YET, *[''] * (len(cells) - 1)])} |"
    if row["status"] != "ran":
        said = (row.get("said") or "").strip().splitlines()
        why = f"{row['status']}: {said[-1][:160]}" if said else row["status"]
        return f"| {name} | {why.replace('|', '/')} |{' |' * (len(cells) - 1)}"
    return f"| {name} | {' | '.join(cells)} |"


def _number(row: dict[str, Any] | None, key: str, digits: int) -> str:
    return f"{row[key]:,.{digits}f}" if row and key in row else "-"


def _percent(row: dict[str, Any] | None, key: str) -> str:
    return f"{row[key]:.1%}" if row and key in row else "-"


def _gib(row: dict[str, Any] | None, key: str) -> str:
    return f"{row[key] / GIB:.2f}" if row and row.get(key) else "-"


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def renewed(page: str) -> str:
    """`page` with what lies between its marks replaced."""
    return between(page, MARK, END, text())


if __name__ == "__main__":
    sys.exit(update(PAGE, renewed))
