"""Draw a comparison: four panels (loss, peak memory, step time, trade-off), and memory against time."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import Bbox

from remat.lab import table
from remat.lab.experiment import Experiment
from remat.lab.figures import Row
from remat.planning.sweep import is_dominated
from remat.report.charts import DARK, DPI, LIGHT, WIDTH_IN, Theme, style
from remat.report.page import Picture

COLORS = ("blue", "orange", "green", "purple", "red")
DASHES = ("-", (0, (4, 2)), (0, (1, 1.4)), (0, (6, 2, 1, 2)))
MARKERS = "os^Dv"
MEMORY_NAMES = {
    "peak": "peak memory",
    "kept": "kept activations",
    "micro_batch": "peak of a micro-batch without model states",
}
LABEL_WIDTH = 32
OFFSETS = [  # from a point to its number, in typographic points; the first free one is used
    (8, 5), (8, -14), (-20, 5), (-20, -14), (10, -4), (-24, -4), (24, 5), (24, -14), (-36, 5), (-36, -14), (40, -4),
]  # fmt: skip


def draw(experiment: Experiment, rows: Sequence[Row]) -> dict[str, Picture]:
    """Return the pictures by name; none when no point finished."""
    if not any(row.step for row in rows):
        return {}
    makers: dict[str, tuple[str, Callable[[Sequence[Row], Theme], Figure]]] = {
        "panels": (
            "Loss curves, peak memory, step time and the trade-off of every point",
            partial(_panels, experiment),
        ),
        "pareto": (
            "Peak memory against step time, with the Pareto front: the points that nothing beats in both",
            _pareto,
        ),
    }
    if not any(row.step and row.peak_bytes is not None for row in rows):
        del makers["pareto"]
    found = {}
    for name, (alt, make) in makers.items():
        light, dark = (_png(make, rows, theme) for theme in (LIGHT, DARK))
        found[name] = Picture(name, alt, light, dark)
    return found


def fronts(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the memory-time Pareto front of the points that share a baseline, one front per baseline.

    Points with the same baseline do the same work.
    """
    return [
        _front([row for row in rows if row.baseline == name])
        for name in dict.fromkeys(r.baseline for r in rows)
    ]


def _front(rows: Sequence[Row]) -> list[Row]:
    """Return the Pareto front, the point with least memory first."""
    timed = [row for row in rows if row.step and row.peak_bytes is not None]
    costs = [_cost(row) for row in timed]
    return sorted((row for row in timed if not is_dominated(_cost(row), costs)), key=_cost)


def tradeoff(rows: Sequence[Row], which: str) -> list[tuple[Row, float, float]]:
    """Return (point, % of its baseline's bytes saved, % more time than its baseline) for all but the baselines."""
    by_name = {row.name: row for row in rows}
    found = []
    for row in rows:
        mine, base = row.memory(which), by_name[row.baseline].memory(which)
        if row.baseline != row.name and row.ratio is not None and mine is not None and base:
            found.append((row, 100 * (1 - mine / base), 100 * (row.ratio.median - 1)))
    return found


def _cost(row: Row) -> tuple[float, float]:
    assert row.step is not None and row.peak_bytes is not None
    return row.peak_bytes, row.step.median


def _png(make: Callable[[Sequence[Row], Theme], Figure], rows: Sequence[Row], theme: Theme) -> bytes:
    image = io.BytesIO()
    with matplotlib.rc_context(style(theme)):
        make(rows, theme).savefig(image, format="png", dpi=DPI)
    return image.getvalue()


def _panels(experiment: Experiment, rows: Sequence[Row], theme: Theme) -> Figure:
    names = ["\n".join(textwrap.wrap(row.name, LABEL_WIDTH, max_lines=3, placeholder=" ...")) for row in rows]
    bars = 1.1 + sum(0.24 + 0.15 * (name.count("\n") + 1) for name in names)
    legend = [textwrap.shorten(row.name, 70) for row in rows if row.loss]
    columns = max(1, min(5, 150 // (max(map(len, legend), default=1) + 12)))
    height = 4.4 + max(2.4, bars) + 0.2 * len(legend) / columns
    figure = Figure(figsize=(1.35 * WIDTH_IN, height), layout="constrained")
    figure.suptitle(_heading(experiment), x=0.01, ha="left", fontsize=12, fontweight="bold", color=theme.text)
    (memory, times), (losses, trade) = figure.subplots(2, 2, height_ratios=(max(2.4, bars), 3.4))
    styles = {row.name: _line(place, theme) for place, row in enumerate(rows)}
    _losses(losses, rows, styles)
    _trade(trade, experiment, rows, styles, theme)
    _bars(memory, rows, styles, theme, of="memory")
    _bars(times, rows, styles, theme, of="time")
    memory.set_yticks(range(len(rows)), names)
    times.set_yticks([])  # same order as in the panel beside it
    handles, _ = losses.get_legend_handles_labels()
    figure.legend(handles, legend, loc="outside lower left", ncols=columns, fontsize=8.5, handlelength=3)
    return figure


def _heading(experiment: Experiment) -> str:
    text = f"{experiment.title}, {experiment.where}" + ": reduced size" * bool(experiment.reduction)
    return "\n".join(textwrap.wrap(text, 120))


def _line(place: int, theme: Theme) -> dict[str, Any]:
    """Give every point its own colour, line and marker, even with more points than colours."""
    turn = place // len(COLORS)
    return {
        "color": getattr(theme, COLORS[place % len(COLORS)]),
        "linestyle": DASHES[turn % len(DASHES)],
        "marker": MARKERS[turn % len(MARKERS)],
    }


def _losses(axes: Axes, rows: Sequence[Row], styles: dict[str, dict[str, Any]]) -> None:
    """Draw the loss curves. Earlier points get wider lines, so that equal curves stay visible."""
    for place, row in enumerate(rows):
        if row.loss:
            steps, values = zip(*row.loss, strict=True)
            width = max(1.2, 4.2 - 0.8 * place)
            axes.plot(steps, values, label=row.name, markersize=4, **styles[row.name] | {"linewidth": width})
    axes.set_title("Training loss (equal curves lie on each other)")
    axes.set_xlabel("step")
    axes.set_ylabel("nats per token")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def _bars(axes: Axes, rows: Sequence[Row], styles: dict[str, dict[str, Any]], theme: Theme, *, of: str) -> None:
    """Draw a bar for each point; a point without a figure shows its status in words."""
    unit, scale = table.unit(rows) if of == "memory" else ("s", 1)
    values = [_value(row, of) for row in rows]
    longest = max((value / scale for value in values if value is not None), default=1.0)
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        if value is None:
            words = row.status if row.step is None else "not counted"
            axes.text(0, place, f" {words}", va="center", color=theme.red, fontsize=9, fontweight="bold")
            continue
        size = value / scale
        spread = [[size - row.step.low], [row.step.high - size]] if of == "time" and row.step else None
        axes.barh(place, size, color=styles[row.name]["color"], height=0.66, xerr=spread, ecolor=theme.text)
        end = row.step.high if of == "time" and row.step else size
        axes.text(
            end + 0.015 * longest, place, _beside(row, size, of), va="center", fontsize=8.5, color=theme.text
        )
        if of == "memory" and row.kept_bytes is not None:
            axes.barh(place, row.kept_bytes / scale, color=theme.text, alpha=0.35, height=0.66)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    ends = [
        row.step.high if of == "time" and row.step else (value or 0) / scale
        for row, value in zip(rows, values, strict=True)
    ]
    axes.set_xlim(0, 1.28 * max(ends) or 1)
    axes.grid(axis="y", visible=False)
    if of == "memory":
        axes.set_title("Peak memory of a rank (dark: kept activations)")
        axes.set_xlabel(unit)
    else:
        axes.set_title("Time of a step: median, quartiles, x baseline")
        axes.set_xlabel("seconds")


def _value(row: Row, of: str) -> float | None:
    if of == "memory":
        return row.peak_bytes
    return row.step.median if row.step else None


def _beside(row: Row, size: float, of: str) -> str:
    if of == "memory":
        return f"{size:,.2f}" if size < 100 else f"{size:,.1f}"  # as in the table
    times = "" if row.ratio is None or row.baseline == row.name else f"  x {row.ratio.median:.2f}"
    return f"{size:.3g}{times}"


def _trade(
    axes: Axes, experiment: Experiment, rows: Sequence[Row], styles: dict[str, dict[str, Any]], theme: Theme
) -> None:
    """Draw each point relative to its baseline, which lies at zero."""
    found = tradeoff(rows, experiment.tradeoff)
    axes.set_title("Trade-off against each point's baseline")
    if not found:
        axes.set_axis_off()
        axes.text(
            0, 0.9, "No point has figures beside its baseline's.", transform=axes.transAxes, color=theme.text
        )
        return
    percent = FuncFormatter(lambda value, _: f"{value:+.0f}%" if value else "0%")
    axes.axhline(0, color=theme.text, linewidth=0.8)
    axes.axvline(0, color=theme.text, linewidth=0.8)
    axes.plot([0], [0], "x", color=theme.text, markersize=8, markeredgewidth=2)
    axes.annotate("baseline", (0, 0), (6, 6), textcoords="offset points", fontsize=8.5, color=theme.text)
    for row, saved, slower in found:
        assert row.ratio is not None
        low, high = 100 * (row.ratio.low - 1), 100 * (row.ratio.high - 1)
        _point(axes, (saved, slower), (low, high), styles[row.name], markersize=8)
    axes.margins(0.14)
    if max(abs(saved) for _, saved, _ in found) < 1:  # nothing saved: do not zoom in on fractions of a percent
        axes.set_xlim(-20, 20)
    axes.set_xlabel(f"{MEMORY_NAMES[experiment.tradeoff]} saved")
    axes.set_ylabel("more time per step")
    axes.xaxis.set_major_formatter(percent)
    axes.yaxis.set_major_formatter(percent)


def _point(
    axes: Axes, at: tuple[float, float], spread: tuple[float, float], look: dict[str, Any], **more: Any
) -> None:
    """Draw a point at (x, y) with a line from the lowest to the highest y of its spread."""
    (x, y), (low, high) = at, spread
    axes.errorbar(
        [x],
        [y],
        yerr=[[y - low], [high - y]],
        color=look["color"],
        marker=look["marker"],
        elinewidth=1,
        linestyle="",
        **more,
    )


def _pareto(rows: Sequence[Row], theme: Theme) -> Figure:
    """Draw memory against time. Points are numbered and explained beside the picture, so names of any length fit."""
    best = [front for front in fronts(rows) if front]
    timed = [row for row in rows if row.step and row.peak_bytes is not None]
    unit, scale = table.unit(rows)
    key, lines = _key(rows, {row.name for front in best for row in front}, scale, unit)
    figure = Figure(figsize=(1.35 * WIDTH_IN, 4.6 + 0.175 * lines), layout="constrained")
    axes, words = figure.subplots(2, 1, height_ratios=(4.6, 0.175 * lines))
    for front in best:
        across, up = zip(*((_cost(row)[0] / scale, _cost(row)[1]) for row in front), strict=True)
        axes.plot(across, up, color=theme.text, alpha=0.55, drawstyle="steps-post", linewidth=1.2, zorder=1)
    numbers = {row.name: number for number, row in enumerate(rows, start=1)}
    places = {row.name: (_cost(row)[0] / scale, _cost(row)[1]) for row in timed}
    for row in timed:
        assert row.step is not None
        look = _line(numbers[row.name] - 1, theme)
        _point(axes, places[row.name], (row.step.low, row.step.high), look, markersize=9, zorder=3)
    axes.set_title("Memory and time; the line joins the Pareto front")
    axes.set_xlabel(f"peak memory of a rank, {unit}")
    axes.set_ylabel("seconds per step, median and quartiles")
    axes.margins(0.12)
    words.set_axis_off()
    for place, text in zip((0.0, 0.5), key, strict=True):
        words.text(place, 1, text, transform=words.transAxes, va="top", fontsize=8.5, color=theme.text)
    for name, offset in _free_spots(figure, axes, places).items():
        axes.annotate(
            str(numbers[name]),
            places[name],
            offset,
            textcoords="offset points",
            fontsize=9.5,
            fontweight="bold",
            color=theme.text,
        )
    return figure


def _free_spots(
    figure: Figure, axes: Axes, places: Mapping[str, tuple[float, float]]
) -> dict[str, tuple[int, int]]:
    """Return where to print the number of each point, as an offset in typographic points.

    `places` are in data coordinates of the finished axes. Each number takes the first of OFFSETS at which it overlaps
    no point and no other number, or the last where none is free.
    """
    figure.draw_without_rendering()  # data coordinates are final only after layout
    at = {name: axes.transData.transform(place) * 72 / figure.dpi for name, place in places.items()}
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in at.values()]
    found: dict[str, tuple[int, int]] = {}
    for name, (x, y) in sorted(at.items(), key=lambda item: -item[1][1]):  # from the top downwards
        for offset in OFFSETS:
            box = Bbox.from_bounds(x + offset[0], y + offset[1], 14, 10)  # the size of two digits
            if not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)
        found[name] = offset
    return found


def _key(rows: Sequence[Row], best: set[str], scale: int, unit: str) -> tuple[list[str], int]:
    """Return the legend of the numbers as two columns of text, and the number of lines of the longer one."""
    entries = []
    for number, row in enumerate(rows, start=1):
        name = textwrap.fill(f"{number}  {row.name}", 72, subsequent_indent="    ")
        if row.step is None or row.peak_bytes is None:
            entries.append(f"{name}\n    {row.status}")
            continue
        mark = ", on the Pareto front" if row.name in best else ""
        entries.append(f"{name}\n    {row.peak_bytes / scale:,.4g} {unit}, {row.step.median:.3g} s{mark}")
    half = (len(entries) + 1) // 2
    columns = ["\n".join(entries[:half]), "\n".join(entries[half:])]
    return columns, max(text.count("\n") + 1 for text in columns)
