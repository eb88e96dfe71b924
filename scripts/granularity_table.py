"""Write the two tables of docs/granularity.md: `python scripts/granularity_table.py [--check]`.

The grid comes from docs/granularity.json (tests/runs/test_granularity_grid.py), the counted table from the models'
own operations (`remat compare policies`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from remat.config import compose  # noqa: E402
from remat.planning import policies  # noqa: E402
from scripts.generated import between, table, update  # noqa: E402

PAGE = ROOT / "docs" / "granularity.md"
GRID = ROOT / "docs" / "granularity.json"
COUNTED_ON = ["recipe=llama8b_zero3_offload_optimizer", "train.seq_len=4096", "data.packing=stream"]
MARKS = {
    "grid": "<!-- grid: written by scripts/granularity_table.py -->",
    "counted": "<!-- counted: written by scripts/granularity_table.py -->",
}
END = "<!-- end of table -->"


def grid(results: dict[str, dict[str, str]]) -> str:
    """Modes down, strategies across; a refusal is a number, its text stands below."""
    columns = list(next(iter(results.values())))
    reasons: list[str] = []
    rows = [(mode, *(_cell(row[column], reasons) for column in columns)) for mode, row in results.items()]
    notes = [f"{index}. {text}" for index, text in enumerate(reasons, 1)]
    return "\n".join([table(["`checkpointing=`", *columns], rows), "", *notes])


def _cell(text: str, reasons: list[str]) -> str:
    refused, _, reason = text.partition("refused: ")
    if not reason:
        return "equal" if refused == "bit-equal" else refused
    if reason not in reasons:
        reasons.append(reason)
    return f"refused ({reasons.index(reason) + 1})"


def counted() -> str:
    """Every policy on Llama 3.1 8B at 4096 tokens."""
    rows = [policies.cells(row) for row in policies.rows(COUNTED_ON)]
    width = len(policies.HEADINGS)
    filled = ([*row, *[""] * (width - len(row))] for row in rows)
    caption = policies.caption(compose.compose_run(COUNTED_ON).run).replace("\n", " ")
    return "\n".join([table(policies.HEADINGS, filled, range(1, width)), "", caption])


def renewed(page: str) -> str:
    """`page` with both tables replaced."""
    for mark, text in ((MARKS["grid"], grid(json.loads(GRID.read_text()))), (MARKS["counted"], counted())):
        page = between(page, mark, END, text)
    return page


if __name__ == "__main__":
    sys.exit(update(PAGE, renewed))
