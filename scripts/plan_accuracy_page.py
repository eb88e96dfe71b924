"""Write the table of docs/plan-accuracy.md from its result file: `python scripts/plan_accuracy_page.py [--check]`."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.environment import measured_on  # noqa: E402
from scripts.generated import between, update  # noqa: E402

PAGE = ROOT / "docs" / "plan-accuracy.md"
RESULT = ROOT / "benchmarks" / "results" / "plan_accuracy.json"
MARK, END = "<!-- points: written by scripts/plan_accuracy_page.py -->", "<!-- end of points -->"
GIB = 1024**3
MEDIAN_BAR, WORST_BAR = 0.03, 0.08
NOT_YET = "not yet measured"
HEADINGS = [
    "run", "planned allocated", "measured allocated", "error", "planned total", "measured reserved",
    "measured on device",
]  # fmt: skip


def text(result: dict[str, Any]) -> str:
    """The verdict, where it was measured, and a row for each point. GiB = 2**30 bytes."""
    rows = result["points"]
    table = [f"| {' | '.join(HEADINGS)} |", "|---" + "|---:" * (len(HEADINGS) - 1) + "|"]
    table += [f"| {' | '.join(cells(row))} |" for row in rows]
    return "\n".join([verdict(rows), "", where(result["environment"]), "", *table])


def error_of(row: dict[str, Any]) -> float | None:
    """Of the planned peak, as a share of the measured one. None where the run did not reach its end on a GPU."""
    if row["status"] != "ran" or None in (row["allocated_bytes"], row["planned_allocated_bytes"]):
        return None
    return float(row["planned_allocated_bytes"] / row["allocated_bytes"] - 1)


def verdict(rows: list[dict[str, Any]]) -> str:
    """Median and worst error against the bar, and how many of the runs could not be compared."""
    bar = f"The bar: median error at most {MEDIAN_BAR:.0%}, worst at most {WORST_BAR:.0%}."
    errors = {row["name"]: abs(error) for row in rows if (error := error_of(row)) is not None}
    if not errors:
        planned = sum(row["planned_allocated_bytes"] is not None for row in rows)
        return f"{planned} runs are planned, none was measured: nothing is known of the error yet. {bar}"
    median, worst = statistics.median(errors.values()), max(errors, key=lambda name: errors[name])
    met = "Met" if median <= MEDIAN_BAR and errors[worst] <= WORST_BAR else "Missed"
    other = [f"{row['name']}: {why(row)}" for row in rows if row["name"] not in errors]
    found = (
        f"{len(errors)} of {len(rows)} runs measured: median error {median:.1%}, "
        f"worst {errors[worst]:.1%} (`{worst}`). {bar} {met}, on what was measured."
    )
    return found + (f" Not compared: {'; '.join(other)}." if other else "")


def why(row: dict[str, Any]) -> str:
    """What became of it, and for a run that cannot be planned the reason."""
    unplanned = row["planned_allocated_bytes"] is None and "said" in row
    return f"{row['status']} ({row['said']})" if unplanned else str(row["status"])


def where(environment: dict[str, Any] | None) -> str:
    if environment is None:
        return "Planned for one GPU, on a machine without one."
    return measured_on(environment)


def cells(row: dict[str, Any]) -> list[str]:
    error = error_of(row)
    status = row["status"]
    missing = NOT_YET if status == NOT_YET else "" if status == "ran" else status
    return [
        f"`{row['name']}`",
        _gib(row["planned_allocated_bytes"]),
        _gib(row["allocated_bytes"]) if status == "ran" and row["allocated_bytes"] else missing,
        f"{error:+.1%}" if error is not None else missing,
        _gib(row["planned_total_bytes"]),
        _gib(row["reserved_bytes"]) if row["reserved_bytes"] else missing,
        _gib(row["device_bytes"]) if row["device_bytes"] else missing or "unknown",
    ]


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.2f}"


def renewed(page: str) -> str:
    """`page` with what lies between its marks replaced."""
    return between(page, MARK, END, text(json.loads(RESULT.read_text())))


if __name__ == "__main__":
    sys.exit(update(PAGE, renewed))
