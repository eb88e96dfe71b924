"""Draw a plan and a sweep in the style of the report. Some functions compute what is drawn, the others draw it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from remat.config.options import ConfigError
from remat.config.units import GIB, format_count
from remat.planning.plan import GPU_MEMORY, HOST_MEMORY, Planned, needed_bytes
from remat.planning.simulation.peaks import Instant
from remat.planning.simulation.simulate import Recording
from remat.planning.simulation.types import Category, Phase, ZeroSettings
from remat.planning.sweep import Point, is_timed
from remat.report.charts import DPI, LIGHT, WIDTH_IN, style
from remat.report.plan import split_by_cause

COLORS = (
    "#2f6fc4",
    "#e6a93a",
    "#1f8a70",
    "#7a55b3",
    "#d9691f",
    "#b86fa6",
    "#7fb2e5",
    "#c8323c",
    "#8a6d3b",
    "#c9d1da",
)
COLOR_OF = dict(zip(Category, COLORS, strict=True))


@dataclass(frozen=True)
class Bar:
    """One place: GiB by name, largest first, and the machine's capacity there (None: unknown)."""

    title: str
    parts: list[tuple[str, float]]
    found_gib: float | None

    @property
    def total_gib(self) -> float:
        return sum(size for _, size in self.parts)


def bars(planned: Planned) -> list[Bar]:
    """Return the bars: GPU memory of one rank, and host memory and NVMe of one node.

    Pinned host memory has its own bar.
    """
    plan = planned.plan
    found = {r.name: None if r.found_bytes is None else r.found_bytes / GIB for r in plan.resources}
    places: list[tuple[str, Mapping[str, int], int, str]] = [
        ("GPU, one rank", {str(name): size for name, size in plan.gpu.items()}, 1, GPU_MEMORY),
        ("pinned host, node", plan.pinned, plan.ranks_per_node, HOST_MEMORY),
        ("host, node", plan.host, plan.ranks_per_node, HOST_MEMORY),
        ("NVMe, node", plan.nvme, plan.ranks_per_node, "NVMe per node"),
    ]
    return [
        Bar(title, _largest_first(rows, ranks), found.get(resource))
        for title, rows, ranks, resource in places
        if sum(rows.values())
    ]


def times(planned: Planned) -> list[tuple[str, float]]:
    """Return the seconds of a step by cause, leaving out zeros."""
    return [part for part in split_by_cause(planned.time).items() if part[1] > 0]


def curve(planned: Planned, recording: Recording) -> list[Instant]:
    """Return the planned GPU bytes of tensors at each moment of one micro-batch, model states included."""
    zero = ZeroSettings.of(planned.strategy.ds, planned.world_size)
    base = planned.plan.states_bytes
    return [instant._replace(total_bytes=instant.total_bytes + base) for instant in recording.curve(zero)]


def scatter(points: Sequence[Point]) -> list[tuple[float, float, Point]]:
    """Return (GiB per GPU, seconds per step, point) for the points that have both figures."""
    return [
        (needed_bytes(point.planned, GPU_MEMORY) / GIB, point.planned.time.total_s, point)
        for point in points
        if point.planned is not None and is_timed(point.planned)
    ]


def draw_plan(planned: Planned, recording: Recording, path: Path) -> None:
    """Draw bytes by place, GPU memory over a micro-batch, and the step's seconds."""
    places = bars(planned)
    heights = [*(1.05 for _ in places), 3.6, 1.05]
    with matplotlib.rc_context(style(LIGHT)):
        figure = Figure(figsize=(WIDTH_IN, 0.6 + 1.1 * sum(heights)), layout="constrained")
        panels = figure.subplots(len(heights), 1, height_ratios=heights)
        figure.suptitle(
            f"{planned.cfg.name} on {planned.cfg.hardware.name}, "
            f"{format_count(planned.world_size, 'rank')}: planned, not measured",
            x=0.01,
            ha="left",
            fontsize=12,
            fontweight="bold",
            color=LIGHT.text,
        )
        for axes, bar in zip(panels, places, strict=False):
            _draw_bar(axes, bar)
        _draw_curve(panels[-2], curve(planned, recording), planned)
        _draw_times(panels[-1], planned)
        figure.savefig(path, dpi=DPI)


def draw_sweep(points: Sequence[Point], path: Path) -> None:
    """Draw memory against time, with the Pareto front and a line through the points of checkpointing=budget.

    Raises ConfigError when no time is known.
    """
    known = scatter(points)
    if not known:
        raise ConfigError("--plot: no step time is known on this machine; choose hardware=NAME")
    with matplotlib.rc_context(style(LIGHT)):
        figure = Figure(figsize=(1.35 * WIDTH_IN, 5.6), layout="constrained")
        axes = figure.subplots()
        fitting = [(x, y) for x, y, point in known if point.fits]
        others = [(x, y) for x, y, point in known if not point.fits]
        front = sorted((x, y) for x, y, point in known if point.on_pareto_front)
        # the front is one of seconds per token, which is the drawn one where all steps have as many tokens
        if front and len({point.planned.time.tokens for _, _, point in known if point.planned}) == 1:
            axes.plot(
                *zip(*front, strict=True), color=LIGHT.green, drawstyle="steps-post", label="front", zorder=2
            )
        tables = sorted((x, y) for x, y, point in known if point.is_budget)
        if len(tables) > 1:
            axes.plot(*zip(*tables, strict=True), color=LIGHT.blue, label="checkpointing=budget", zorder=2)
        for spots, color, marker, name in (
            (fitting, LIGHT.blue, "o", "fits"),
            (others, LIGHT.red, "x", "does not fit"),
        ):
            if spots:
                across, up = zip(*spots, strict=True)
                axes.scatter(across, up, color=color, marker=marker, s=34, label=name, zorder=3)
        _name_front(axes, known)
        _mark_capacity(axes, known)
        axes.set_title("Memory and step time of every combination: planned, not measured")
        axes.set_xlabel("GPU memory needed, GiB")
        axes.set_ylabel("seconds per step, at best")
        axes.margins(x=0.06, y=0.12)
        axes.legend(loc="upper left", ncols=4, bbox_to_anchor=(0.0, -0.13), borderaxespad=0.0)
        figure.savefig(path, dpi=DPI)


def _largest_first(rows: Mapping[str, int], ranks: int) -> list[tuple[str, float]]:
    return [(name, ranks * size / GIB) for name, size in sorted(rows.items(), key=lambda r: -r[1]) if size]


def _stack(axes: Axes, parts: Sequence[tuple[str, float, str]], unit: str) -> float:
    """Draw one horizontal bar of `parts` (name, size, colour) with a legend below it; return its length."""
    left = 0.0
    for _, size, color in parts:
        axes.barh(0, size, left=left, color=color, height=0.8, edgecolor=LIGHT.background, linewidth=0.6)
        left += size
    axes.set_yticks([])
    axes.set_ylim(-0.5, 0.5)
    axes.grid(axis="y", visible=False)
    handles = [Patch(color=color, label=f"{name} {size:,.3g} {unit}") for name, size, color in parts]
    axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.0, -0.32),
        ncols=3,
        fontsize=8,
        handlelength=0.9,
        columnspacing=1.1,
        borderaxespad=0.0,
    )
    return left


def _draw_bar(axes: Axes, bar: Bar) -> None:
    """Draw a bar and mark the machine's capacity where it is known."""
    parts = [(name, size, _color(name, place)) for place, (name, size) in enumerate(bar.parts)]
    length = _stack(axes, parts, "GiB")
    has = f" of {bar.found_gib:,.1f} GiB" if bar.found_gib is not None else " GiB (the machine's is not known)"
    axes.set_title(f"{bar.title}: {bar.total_gib:,.1f}{has}")
    if bar.found_gib is not None:
        axes.axvline(bar.found_gib, color=LIGHT.red, linewidth=1.6, linestyle=(0, (4, 3)))
    axes.set_xlim(0, 1.03 * max(length, bar.found_gib or 0.0))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.4g}")


def _color(name: str, place: int) -> str:
    return COLOR_OF[Category(name)] if name in set(Category) else COLORS[place % len(COLORS)]


def _draw_curve(axes: Axes, instants: list[Instant], planned: Planned) -> None:
    """Draw allocated memory from moment to moment. Forward gets at least a third of the width."""
    gib = [instant.total_bytes / GIB for instant in instants]
    half = next((i for i, instant in enumerate(instants) if instant.phase is Phase.backward), len(instants))
    across, border = _spread(len(gib), half)
    top = max(range(len(gib)), key=gib.__getitem__)
    states = planned.plan.states_bytes / GIB
    axes.fill_between(across, states, gib, color=LIGHT.blue, alpha=0.25, linewidth=0)
    axes.fill_between(across, 0, states, color=LIGHT.phases[-1], linewidth=0, label="model states")
    axes.plot(across, gib, color=LIGHT.blue, linewidth=1.2, label="allocated")
    axes.plot(
        [across[top]], [gib[top]], "o", color=LIGHT.red, markersize=5, label=f"highest: {gib[top]:.1f} GiB"
    )
    axes.axvline(border, color=LIGHT.text, linewidth=0.8, linestyle=(0, (2, 2)))
    axes.set_ylim(0, 1.12 * max(gib))
    axes.set_xlim(0, 1)
    axes.set_xticks([border / 2, (border + 1) / 2], ["forward", "backward"])
    axes.tick_params(axis="x", pad=7)
    axes.set_xlabel(f"recorded moments in their order: {half:,} in forward, {len(gib) - half:,} in backward")
    axes.grid(axis="x", visible=False)
    axes.set_title("Memory that tensors take over one micro-batch, one GPU (without allocator and context)")
    axes.set_ylabel("GiB")
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.2), ncols=3, borderaxespad=0.0)


def _spread(count: int, half: int) -> tuple[list[float], float]:
    """Return the x position (0 to 1) of each of `count` instants, and of the start of backward after `half` of them."""
    border = min(max(half / count, 1 / 3), 2 / 3) if 0 < half < count else half / count
    before = [border * place / max(1, half) for place in range(half)]
    after = [border + (1 - border) * place / max(1, count - half - 1) for place in range(count - half)]
    return before + after, border


def _draw_times(axes: Axes, planned: Planned) -> None:
    parts = [(name, seconds, color) for (name, seconds), color in zip(times(planned), COLORS, strict=False)]
    length = _stack(axes, parts, "s")
    unknown = f" without {len(planned.time.unknown)} rates that are not known" if planned.time.unknown else ""
    axes.set_title(f"Step time at best: {planned.time.total_s:.3g} s{unknown}")
    axes.set_xlim(0, max(length, 1e-6) * 1.03)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.4g} s")


def _name_front(axes: Axes, known: list[tuple[float, float, Point]]) -> None:
    """Number the points of the Pareto front from the smallest, and list beside the picture what each number means."""
    front = sorted((entry for entry in known if entry[2].on_pareto_front), key=lambda entry: entry[0])
    lines = []
    for number, (x, y, point) in enumerate(front, start=1):
        axes.annotate(
            str(number),
            (x, y),
            xytext=(-8, -12),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=LIGHT.text,
        )
        lines.append(f"{number}  {' '.join(point.overrides)}\n    {x:.1f} GiB, {y:.3g} s")
    if lines:
        axes.text(1.02, 1.0, "\n".join(lines), transform=axes.transAxes, va="top", fontsize=8, color=LIGHT.text)


def _mark_capacity(axes: Axes, known: list[tuple[float, float, Point]]) -> None:
    """Draw the machine's GPU memory as a line, if it is the same for all points and near them."""
    sizes = {
        r.found_bytes
        for _, _, point in known
        if point.planned
        for r in point.planned.plan.resources
        if r.name == GPU_MEMORY
    }
    size = sizes.pop() if len(sizes) == 1 else None
    if size is not None and size / GIB <= 1.5 * max(x for x, _, _ in known):
        axes.axvline(size / GIB, color=LIGHT.red, linewidth=1.2, linestyle=(0, (4, 3)), label="the GPU has")
