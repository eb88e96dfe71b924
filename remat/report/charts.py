"""Draw a run with matplotlib: four charts from `metrics.jsonl`, memory snapshots, and samples of the GPU driver.

Needs no display and keeps no global state.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from remat.config.metrics import (
    GPU_ALLOCATED_PEAK_GIB,
    GPU_RESERVED_PEAK_GIB,
    GRAD_NORM,
    HFU,
    HOST_PINNED_GIB,
    HOST_RSS_GIB,
    LEARNING_RATE,
    LOSS_EVAL,
    LOSS_TRAIN,
    MFU,
    PLANNED_GPU_PEAK_GIB,
    STEP_S,
    TOKENS_PER_S,
    TRAINED_TOKENS_PER_S,
    lowest,
    phase_s,
    read_rows,
)
from remat.config.units import GIB

BARS = {  # key -> name in the legend, colour of the theme
    "gpu_reserved_bytes": ("GPU reserved", "purple"),
    "gpu_allocated_bytes": ("GPU allocated", "blue"),
    "host_resident_bytes": ("host resident", "green"),
}
AFTER = {"load": "after load", "engine": "engine built", "forward": "after forward", "backward": "after backward",
         "step": "after step"}  # fmt: skip
ALT = {
    "loss": "Training and evaluation loss, gradient norm and learning rate over steps",
    "step_time": "Seconds per step, split into data, forward, backward, optimizer and the rest",
    "memory": "Peak GPU and host memory over steps, highest and lowest rank",
    "throughput": "Tokens per second and FLOPs utilisation over steps",
    "snapshots": "Memory after loading, building the engine, the first forward, backward and step",
    "nvml": "Memory in use on the GPU, load and power over time, as the driver says",
}

Rows = list[dict[str, float]]

WIDTH_IN = 9.2
DPI = 200
PHASES = ("data", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class Theme:
    """Colours that keep their contrast on one background; hues can be told apart without red-green vision."""

    background: str
    text: str
    grid: str
    blue: str
    orange: str
    green: str
    purple: str
    red: str
    phases: tuple[str, ...]  # data, forward, backward, optimizer, other


LIGHT = Theme(
    background="#ffffff",
    text="#27313f",
    grid="#e3e7ec",
    blue="#2f6fc4",
    orange="#d9691f",
    green="#1f8a70",
    purple="#7a55b3",
    red="#c8323c",
    phases=("#e6a93a", "#7fb2e5", "#2f6fc4", "#1f8a70", "#c9d1da"),
)
DARK = Theme(
    background="#171c23",
    text="#d5dbe3",
    grid="#303843",
    blue="#6ea8f2",
    orange="#f19a58",
    green="#4fc2a4",
    purple="#b79be8",
    red="#f2727a",
    phases=("#e8b656", "#a5cdf5", "#5b96e0", "#3fae91", "#56616f"),
)


def charts(rows: Rows, theme: Theme, resumed: Sequence[int] = ()) -> dict[str, bytes]:
    """Return PNG bytes by name for those of loss, step_time, memory and throughput whose metrics were logged.

    Every panel marks the steps at which the run was `resumed`.
    """
    makers: dict[str, Callable[[Rows, Theme], Figure | None]] = {
        "loss": _loss,
        "step_time": _step_time,
        "memory": _memory,
        "throughput": _throughput,
    }
    images: dict[str, bytes] = {}
    with matplotlib.rc_context(style(theme)):
        for name, make in makers.items():
            figure = make(rows, theme)
            if figure is not None:
                _mark_resumes(figure, resumed, theme)
                images[name] = _png(figure)
    return images


def _png(figure: Figure) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=DPI)
    return image.getvalue()


def _mark_resumes(figure: Figure, steps: Sequence[int], theme: Theme) -> None:
    """Draw a dashed line at each step of `steps`. The legend of the first panel names it."""
    for place, axes in enumerate(figure.axes):
        for number, step in enumerate(steps):
            label = "resumed" if place == number == 0 else None
            axes.axvline(
                step, color=theme.text, alpha=0.6, linewidth=1.0, linestyle=(0, (2, 3)), label=label, zorder=1
            )
        if steps and place == 0:
            _legend(axes)


def _begin_at_zero(axes: Axes) -> None:
    """Begin the y axis at 0 and leave 6 % of its height above the data."""
    axes.set_ylim(0, 1.06 * axes.get_ylim()[1])


def series(rows: Rows, name: str) -> tuple[list[float], list[float]]:
    """Return steps and values of the rows that hold `name`."""
    kept = [row for row in rows if name in row]
    return [row["step"] for row in kept], [row[name] for row in kept]


def style(theme: Theme) -> Any:
    """Return matplotlib's rc parameters for every picture of the project."""
    return {
        "figure.constrained_layout.w_pad": 0.1,
        "figure.constrained_layout.h_pad": 0.1,
        "figure.facecolor": theme.background,
        "savefig.facecolor": theme.background,
        "axes.facecolor": theme.background,
        "axes.edgecolor": theme.grid,
        "axes.labelcolor": theme.text,
        "axes.titlecolor": theme.text,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 10,
        "axes.labelsize": 9.5,
        "axes.xmargin": 0.015,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": theme.grid,
        "grid.linewidth": 0.8,
        "xtick.color": theme.text,
        "ytick.color": theme.text,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "legend.labelcolor": theme.text,
        "lines.linewidth": 1.8,
        "lines.solid_capstyle": "round",
    }


def _axes(height_in: float, ratios: tuple[float, ...] = (1.0,)) -> tuple[Figure, list[Axes]]:
    """Make panels one below the other with a shared step axis. Only the last panel shows its labels."""
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    grid = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)
    panels = [axes for row in grid for axes in row]
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, steps=[1, 2, 2.5, 5, 10]))
    panels[-1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    return figure, panels


def _legend(axes: Axes) -> None:
    """Put the legend on one line at the top right, above the plot, where it hides no data."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        axes.legend(
            handles,
            labels,
            loc="lower right",
            bbox_to_anchor=(1.0, 1.0),
            ncols=len(labels),
            borderaxespad=0.55,
            handlelength=1.4,
            columnspacing=1.4,
        )


def _plot(axes: Axes, rows: Rows, name: str, color: str, label: str) -> None:
    """Draw a line. Where there are few rows, mark each."""
    steps, values = series(rows, name)
    if values:
        marker = "o" if len(values) <= 25 else ""
        axes.plot(steps, values, color=color, label=label, marker=marker, markersize=3.5)


def _band(axes: Axes, rows: Rows, name: str, color: str) -> None:
    """Fill the range from the lowest to the highest rank."""
    kept = [row for row in rows if name in row and lowest(name) in row]
    if kept:
        low, high = [row[lowest(name)] for row in kept], [row[name] for row in kept]
        axes.fill_between([row["step"] for row in kept], low, high, color=color, alpha=0.22, linewidth=0)


def _loss(rows: Rows, theme: Theme) -> Figure | None:
    extras = [name for name in (GRAD_NORM, LEARNING_RATE) if series(rows, name)[1]]
    if not series(rows, LOSS_TRAIN)[1] and not series(rows, LOSS_EVAL)[1]:
        return None
    figure, panels = _axes(3.5 + 1.25 * len(extras), (2.8, *(1.0 for _ in extras)))
    loss = panels[0]
    _plot(loss, rows, LOSS_TRAIN, theme.blue, "train")
    steps, values = series(rows, LOSS_EVAL)
    if values:
        loss.plot(
            steps,
            values,
            color=theme.orange,
            label="eval",
            linewidth=1.0,
            marker="D",
            markersize=5.5,
            markeredgecolor=theme.background,
            zorder=5,
        )
    broken = [row["step"] for row in rows if LOSS_TRAIN in row and not math.isfinite(row[LOSS_TRAIN])]
    for index, step in enumerate(broken):
        loss.axvline(step, color=theme.red, linewidth=1.0, label="not finite" if index == 0 else None)
    loss.set_title("Loss")
    loss.set_ylabel("nats per token")
    _legend(loss)
    for axes, name in zip(panels[1:], extras, strict=True):
        label = {GRAD_NORM: "gradient norm", LEARNING_RATE: "learning rate"}[name]
        _plot(axes, rows, name, theme.purple if name == GRAD_NORM else theme.green, label)
        axes.set_ylabel(label)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=3))
        _begin_at_zero(axes)
        if name == LEARNING_RATE:
            axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    figure.align_ylabels(panels)
    return figure


def _step_time(rows: Rows, theme: Theme) -> Figure | None:
    kept = [row for row in rows if STEP_S in row]
    if not kept:
        return None
    figure, (axes,) = _axes(3.5)
    steps = [row["step"] for row in kept]
    layers = [[row.get(phase_s(phase), 0.0) for row in kept] for phase in PHASES]
    # Maxima over ranks may sum to more than the step; then `other` is 0.
    layers.append(
        [max(0.0, row[STEP_S] - sum(parts)) for row, parts in zip(kept, zip(*layers, strict=True), strict=True)]
    )
    names = (*PHASES, "other")
    if len(kept) <= 40:
        gaps = [after - before for before, after in itertools.pairwise(steps)]
        base = [0.0] * len(kept)
        for name, layer, color in zip(names, layers, theme.phases, strict=True):
            axes.bar(steps, layer, bottom=base, width=0.82 * min(gaps, default=1.0), color=color, label=name)
            base = [below + value for below, value in zip(base, layer, strict=True)]
    else:
        axes.stackplot(steps, layers, labels=names, colors=theme.phases, linewidth=0)
    axes.grid(axis="x", visible=False)
    axes.set_title("Step time")
    axes.set_ylabel("seconds per step")
    _cut_warm_up(axes, [row[STEP_S] for row in kept], steps, theme)
    _legend(axes)
    return figure


def _cut_warm_up(axes: Axes, values: list[float], steps: list[float], theme: Theme) -> None:
    """Cut off the first row, which includes first allocations, where it would flatten the rest.

    A note in the picture gives its value.
    """
    rest = values[1:]
    if len(rest) >= 3 and values[0] > 2 * max(rest):
        top = 1.25 * max(rest)
        axes.set_ylim(0, top)
        axes.annotate(
            f"first row (warm-up): {values[0]:.3g} s",
            (steps[0], top),
            xytext=(14, -10),
            textcoords="offset points",
            color=theme.text,
            fontsize=9,
            va="top",
            bbox={"facecolor": theme.background, "edgecolor": theme.grid, "boxstyle": "round,pad=0.35"},
        )
    else:
        _begin_at_zero(axes)


def _memory(rows: Rows, theme: Theme) -> Figure | None:
    groups = {
        "GPU memory per rank": (
            (GPU_RESERVED_PEAK_GIB, "peak reserved", theme.purple),
            (GPU_ALLOCATED_PEAK_GIB, "peak allocated", theme.blue),
        ),
        "Host memory per rank": (
            (HOST_RSS_GIB, "resident", theme.green),
            (HOST_PINNED_GIB, "pinned", theme.orange),
        ),
    }
    present = {
        title: shown
        for title, lines in groups.items()
        if (shown := [line for line in lines if series(rows, line[0])[1]])
    }
    if not present:
        return None
    figure, panels = _axes(0.5 + 2.6 * len(present), (1.0,) * len(present))
    for axes, (title, lines) in zip(panels, present.items(), strict=True):
        for name, label, color in lines:
            _band(axes, rows, name, color)
            _plot(axes, rows, name, color, label)
        planned = series(rows, PLANNED_GPU_PEAK_GIB)[1]
        if planned and title.startswith("GPU"):
            axes.axhline(
                planned[-1], color=theme.text, linestyle=(0, (4, 3)), linewidth=1.2, label="planned peak"
            )
        axes.set_title(title)
        axes.set_ylabel("GiB")
        axes.set_ylim(0, 1.15 * max(axes.get_ylim()[1], 1e-3))
        banded = [color for name, _, color in lines if any(lowest(name) in row for row in rows)]
        if banded:
            axes.fill_between([], [], color=banded[0], alpha=0.22, linewidth=0, label="down to the lowest rank")
        _legend(axes)
    return figure


def _throughput(rows: Rows, theme: Theme) -> Figure | None:
    if not series(rows, TOKENS_PER_S)[1]:
        return None
    utilisation = [name for name in (MFU, HFU) if series(rows, name)[1]]
    figure, panels = _axes(5.0 if utilisation else 3.2, (1.4, 1.0) if utilisation else (1.0,))
    speed = panels[0]
    _plot(speed, rows, TOKENS_PER_S, theme.blue, "all tokens")
    seen, trained = (series(rows, name)[1] for name in (TOKENS_PER_S, TRAINED_TOKENS_PER_S))
    if trained and statistics.fmean(trained) < 0.995 * statistics.fmean(seen):
        _plot(speed, rows, TRAINED_TOKENS_PER_S, theme.orange, "tokens in the loss")
    speed.set_title("Throughput, all ranks together")
    speed.set_ylabel("tokens per second")
    _begin_at_zero(speed)
    speed.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _legend(speed)
    if utilisation:
        _plot(panels[1], rows, HFU, theme.purple, "HFU (with recomputation)")
        _plot(panels[1], rows, MFU, theme.green, "MFU")
        panels[1].set_title("FLOPs utilisation")
        panels[1].set_ylabel("of dense peak")
        _begin_at_zero(panels[1])
        panels[1].yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
        _legend(panels[1])
        figure.align_ylabels(panels)
    return figure


def draw_snapshots(run_dir: Path, theme: Theme) -> dict[str, bytes]:
    """Return PNG bytes of those of `snapshots` and `nvml` for which the run has files."""
    images: dict[str, bytes] = {}
    path, rows = run_dir / "snapshots.json", samples(run_dir / "profile" / "nvml-rank-0.jsonl")
    with matplotlib.rc_context(style(theme)):
        if path.exists():
            images["snapshots"] = _png(_bars(json.loads(path.read_text()), theme))
        if len(rows) > 1:
            images["nvml"] = _png(_over_time(rows, theme))
    return images


def samples(path: Path) -> list[dict[str, float]]:
    """Return the rows of the driver's samples. Leaves out an incomplete last row and rows with driver errors."""
    return [row for row in read_rows(path) if "used_bytes" in row] if path.exists() else []


def _bars(content: dict[str, Any], theme: Theme) -> Figure:
    moments = content["snapshots"]
    kinds = [key for key in BARS if any(key in moment for moment in moments)]
    figure = Figure(figsize=(WIDTH_IN, 3.4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(kinds)
    for index, key in enumerate(kinds):
        label, color = BARS[key]
        places = [place + (index - (len(kinds) - 1) / 2) * width for place in range(len(moments))]
        sizes = [moment.get(key, 0) / GIB for moment in moments]
        bars = axes.bar(places, sizes, 0.92 * width, label=label, color=getattr(theme, color))
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=8.5, color=theme.text)
    axes.set_xticks(range(len(moments)), [AFTER[moment["label"]] for moment in moments])
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.14)
    axes.set_title("Memory of the highest rank")
    axes.set_ylabel("GiB")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(kinds), borderaxespad=0.55)
    return figure


def _over_time(rows: list[dict[str, float]], theme: Theme) -> Figure:
    seconds = [row["time_unix_s"] - rows[0]["time_unix_s"] for row in rows]
    figure = Figure(figsize=(WIDTH_IN, 5.4), layout="constrained")
    memory, busy, power = figure.subplots(3, 1, sharex=True, height_ratios=(1.6, 1.0, 1.0))
    memory.plot(seconds, [row["used_bytes"] / GIB for row in rows], color=theme.blue)
    memory.set_title("The GPU of rank 0, as the driver says (NVML)")
    memory.set_ylabel("GiB in use")
    busy.plot(seconds, [row["busy_percent"] / 100 for row in rows], color=theme.green)
    busy.set_ylabel("busy")
    busy.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
    power.plot(seconds, [row["power_w"] for row in rows], color=theme.orange)
    power.set_ylabel("watts")
    power.set_xlabel("seconds")
    for axes in (memory, busy, power):
        _begin_at_zero(axes)
    figure.align_ylabels([memory, busy, power])
    return figure
