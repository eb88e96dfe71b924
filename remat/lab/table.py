"""Print a comparison on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from remat.config.units import GIB, MIB
from remat.lab.experiment import Experiment
from remat.lab.figures import Row, Spread

HEADINGS = (
    "point",
    "peak memory",
    "planned",
    "kept activations",
    "s/step",
    "x baseline",
    "tokens/s",
    "loss",
    "eval",
)


def show(experiment: Experiment, rows: Sequence[Row], console: Console) -> None:
    """Print the table, with notes below it."""
    title = f"{experiment.name}: {experiment.title} ({experiment.where}, {experiment.repeats} x each)"
    console.print(title, style="bold")
    for text in (experiment.question, experiment.reduction):
        if text:
            console.print(text)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for number, heading in enumerate(headings(rows)):
        table.add_column(heading, justify="right" if number else "left", no_wrap=number > 0, overflow="fold")
    for row in rows:
        table.add_row(*cells(row, rows), style=None if row.step else "red")
    console.print(table)
    for text in notes(rows):
        console.print(text)


def headings(rows: Sequence[Row]) -> list[str]:
    """Return the headings, with the unit of bytes."""
    name, _ = unit(rows)
    return [f"{text}, {name}" if text in ("peak memory", "kept activations") else text for text in HEADINGS]


def unit(rows: Sequence[Row]) -> tuple[str, int]:
    """Return the unit of bytes and its size: GiB where a peak is that large, else MiB."""
    return ("GiB", GIB) if max((row.peak_bytes or 0 for row in rows), default=0) >= GIB else ("MiB", MIB)


def cells(row: Row, rows: Sequence[Row]) -> list[str]:
    """Return the cells of a row. A point without results shows its status in the peak column."""
    if row.step is None and row.peak_bytes is None:
        return [row.name, row.status, *[""] * (len(HEADINGS) - 2)]
    _, scale = unit(rows)
    return [
        row.name,
        _bytes(row.peak_bytes, scale),
        error(row.counted_planned_bytes, row.counted_bytes),
        _bytes(row.kept_bytes, scale),
        _seconds(row.step),
        _ratio(row),
        f"{row.tokens_per_s.median:,.0f}" if row.tokens_per_s else "",
        "" if row.final_loss is None else f"{row.final_loss:.4f}",
        "" if row.eval_loss is None else f"{row.eval_loss:.4f}",
    ]


def error(planned: float | None, measured: float | None) -> str:
    """Return the plan's error relative to the measured value: `-0.3%` where it planned too little."""
    return f"{planned / measured - 1:+.1%}" if planned and measured else ""


def notes(rows: Sequence[Row]) -> list[str]:
    """Return notes below the table: which points did not finish and why, and remarks on figures."""
    found = [f"{row.name}: {row.status}: {row.words}" for row in rows if row.status != "finished"]
    found += [f"{row.name}: {row.words}" for row in rows if row.status == "finished" and row.words]
    found += [
        f"{row.name}: bytes differ between repeats; the most is shown" for row in rows if not row.same_bytes
    ]
    found += [
        f"{row.name}: the peak is in the optimizer step, as planned; counted in a micro-batch: "
        f"{(row.counted_bytes or 0) / MIB:,.1f} MiB"
        for row in rows
        if row.peak_in_update
    ]
    return found


def _bytes(size: int | None, scale: int) -> str:
    return "" if size is None else f"{size / scale:,.2f}" if size / scale < 100 else f"{size / scale:,.1f}"


def _seconds(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.median:.3g} ({spread.low:.3g}-{spread.high:.3g})"


def _ratio(row: Row) -> str:
    if row.ratio is None:
        return ""
    if row.baseline == row.name:
        return "1"
    return f"{row.ratio.median:.2f} ({row.ratio.low:.2f}-{row.ratio.high:.2f})"
