"""Plans beside memory that others measured and published: `python benchmarks/published.py [--check]`.

Writes the table of docs/plan-accuracy.md from results/published.json. With `--plan` it first plans the rows of
published.yaml that this file lacks.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from remat.config import compose  # noqa: E402
from remat.config.units import GIB  # noqa: E402
from remat.planning.plan import FRAGMENTATION, Planned, make_plan  # noqa: E402
from scripts import generated  # noqa: E402

ROWS, RESULT = ROOT / "benchmarks" / "published.yaml", ROOT / "benchmarks" / "results" / "published.json"
PAGE = ROOT / "docs" / "plan-accuracy.md"
MARK, END = "<!-- published: written by benchmarks/published.py -->", "<!-- end of published -->"
ALWAYS = "data=synthetic train.loss=full"
BAR = 0.05  # of allocated, where the setting is known


@dataclass(frozen=True)
class Row:
    """One published figure; see the head of published.yaml."""

    source: str
    what: str
    gib: float
    kind: str
    zero: str
    words: str
    known: bool = False
    before_update: bool = False
    least: float = 0.0
    note: str = ""

    @property
    def command(self) -> list[str]:
        return f"{ALWAYS} {self.zero} {self.words}".split()

    @property
    def key(self) -> str:
        return f"{self.source}: {self.what}"


def read() -> tuple[dict[str, dict[str, str]], list[Row]]:
    """Return the sources by their letter, and the rows."""
    found = yaml.safe_load(ROWS.read_text())
    return found["sources"], [Row(**row) for row in found["rows"]]


def plan(row: Row) -> dict[str, float]:
    """Plan a row; return GiB: allocated, and the most that is reserved, and taken of the device."""
    return figures(make_plan(compose.compose_run(row.command).run), row)


def figures(planned: Planned, row: Row) -> dict[str, float]:
    found = planned.plan
    allocated = found.peak_bytes
    if row.before_update:
        moments = sum(
            item.bytes_per_rank
            for item in planned.strategy.model_states(
                data_ranks=planned.world_size, ranks_per_node=1, can_pin=True
            )
            if item.name == "moments" and item.place == "gpu"
        )
        allocated = max(peak.total_bytes for name, peak in found.peaks.items() if name != "update") - moments
    gaps = FRAGMENTATION[False]  # no source says that its allocator had other than torch's fixed segments
    reserved = max([*found.reserved_by_segments.values(), int((1 + gaps) * allocated)])
    sizes = {
        "allocated": allocated,
        "reserved_at_most": reserved,
        "device_at_most": reserved + found.outside_bytes,
    }
    return {name: round(size / GIB, 2) for name, size in sizes.items()}


def plan_missing() -> None:
    """Plan the rows that the result file lacks, and write each as it is done."""
    found: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for row in read()[1]:
        if row.key not in found:
            found[row.key] = plan(row)
            print(row.key, found[row.key], flush=True)
            RESULT.write_text(json.dumps(found, indent=1) + "\n")


def verdict(row: Row, planned: dict[str, float]) -> str:
    """Say how far a plan of an allocated figure is off, or whether another figure is inside the band that it states."""
    if row.kind == "allocated":
        return f"{planned['allocated'] / row.gib - 1:+.1%}"
    most = planned[f"{row.kind}_at_most"]
    if 0 < row.least <= most < row.gib:
        return f"inside if it means {row.least:.2f} GiB, else above, by {row.gib / most - 1:.1%}"
    if row.gib > most:
        return f"above, by {row.gib / most - 1:.1%}"
    return (
        "inside" if row.gib >= planned["allocated"] else f"below, by {1 - row.gib / planned['allocated']:.1%}"
    )


def table() -> str:
    sources, rows = read()
    found = json.loads(RESULT.read_text())
    head = (
        *("source", "run", "published", "what", "planned allocated", "planned at most"),
        *("error, or place in the band", "why"),
    )
    lines = []
    for row in rows:
        planned, source = found[row.key], sources[row.source]
        most = "" if row.kind == "allocated" else f"{planned[f'{row.kind}_at_most']:.2f}"
        why = "the setting is known" if row.known else row.note
        where, allocated = f"[{source['where']}]({source['url']})", f"{planned['allocated']:.2f}"
        lines.append((where, row.what, f"{row.gib:.2f}", row.kind, allocated, most, verdict(row, planned), why))
    known = [abs(found[row.key]["allocated"] / row.gib - 1) for row in rows if row.known]
    others = [row for row in rows if row.kind != "allocated"]
    verdicts = [verdict(row, found[row.key]) for row in others]
    inside, perhaps = verdicts.count("inside"), sum(each.startswith("inside if") for each in verdicts)
    within = sum(error <= BAR for error in known)
    closing = (
        f"Where the setting is known, {within} of {len(known)} allocated figures are within {BAR:.0%}; the worst is "
        f"{max(known):.1%} off. {inside} of {len(others)} reserved and device figures lie inside the band"
        + (f"; {perhaps} do if their GB are 1e9 bytes." if perhaps else ".")
    )
    return "\n".join([generated.table(head, lines, right=(2, 4, 5)), "", closing])


def renewed(page: str) -> str:
    """Return `page` with the table replaced."""
    return generated.between(page, MARK, END, table())


if __name__ == "__main__":
    if "--plan" in sys.argv:
        plan_missing()
    sys.exit(generated.update(PAGE, renewed))
