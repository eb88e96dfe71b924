"""Draw docs/figures/ and the table of docs/concepts.md from plans: `python scripts/concept_figures.py`.

Every figure is the planner's own record of a run on 8 x H100-80, or the packer's own blocks; none is drawn by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from remat.config import compose  # noqa: E402
from remat.config.units import GIB  # noqa: E402
from remat.data.blocks import best_fit  # noqa: E402
from remat.planning.plan import Planned, Recordings, make_plan  # noqa: E402
from remat.planning.simulation.peaks import Instant  # noqa: E402
from remat.planning.simulation.types import Category, Phase  # noqa: E402
from remat.report import plan_charts  # noqa: E402
from remat.report.charts import LIGHT, WIDTH_IN, style  # noqa: E402
from remat.report.plan import split_by_cause  # noqa: E402
from scripts.generated import between, update  # noqa: E402

PAGE, FIGURES = ROOT / "docs" / "concepts.md", ROOT / "docs" / "figures"
MARK, END = "<!-- runs: written by scripts/concept_figures.py -->", "<!-- end of runs -->"
BASE = [
    "recipe=finetune", "model=llama8b", "data.path=rows.jsonl", "hardware=8xh100-80", "train.seq_len=4096",
    "train.micro_batch_size=2", "train.global_batch_size=16", "deepspeed.config=zero3",
]  # fmt: skip
RUNS = {
    "none": ["checkpointing=none"],
    "full": ["checkpointing=full"],
    "discard_output": ["checkpointing=discard_output"],
    "offload": ["checkpointing=offload"],
    "full, all logits at once": ["checkpointing=full", "train.loss=full"],
    "full, zero2": ["checkpointing=full", "deepspeed.config=zero2"],
    "full, zero2_offload": ["checkpointing=full", "deepspeed.config=zero2_offload"],
    "full, zero3_offload_optimizer": ["checkpointing=full", "deepspeed.config=zero3_offload_optimizer"],
    "full, zero3_offload": ["checkpointing=full", "deepspeed.config=zero3_offload"],
}
STATES = (Category.weights, Category.gradients, Category.optimizer_state, Category.buckets)


def plan(name: str, recordings: Recordings) -> Planned:
    """Plan one of RUNS."""
    return make_plan(compose.compose_run([*BASE, *RUNS[name]]).run, recordings=recordings)


def row(name: str, planned: Planned) -> str:
    """Return the line of a run in the page's table."""
    time, plan = planned.time, planned.plan
    host = sum(plan.pinned.values()) + sum(plan.host.values())
    cells = (
        f"{sum(plan.gpu.values()) / GIB:.1f}",
        f"{plan.states_bytes / GIB:.1f}",
        f"{sum(planned.simulation.kept_bytes) / GIB:.2f}",
        f"{host / GIB:.1f}",
        f"{time.recompute_s:.2f}",
        f"{time.total_s:.2f}",
    )
    return f"| `{' '.join(RUNS[name])}` | {' | '.join(cells)} |"


def draw_steps(names: Sequence[str], path: Path, found: dict[str, Planned], known: Recordings) -> None:
    """Draw the memory of one GPU over a micro-batch, a panel for each run, on one scale."""
    curves = {
        name: plan_charts.curve(found[name], known.get(found[name].cfg, found[name].strategy)) for name in names
    }
    top = max(instant.total_bytes for curve in curves.values() for instant in curve) / GIB
    figure = Figure(figsize=(WIDTH_IN, 0.5 + 1.9 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), 1, squeeze=False)[:, 0]
    for axes, (name, curve) in zip(panels, curves.items(), strict=True):
        _draw_curve(axes, curve, found[name].plan.states_bytes / GIB)
        axes.set_ylim(0, 1.1 * top)
        axes.set_title(f"{name}: highest {max(i.total_bytes for i in curve) / GIB:.1f} GiB")
    panels[0].legend(loc="upper right", ncols=2, bbox_to_anchor=(1.0, 1.24), borderaxespad=0.0)
    figure.savefig(path, dpi=120)


def _draw_curve(axes: Axes, curve: list[Instant], states: float) -> None:
    gib = [instant.total_bytes / GIB for instant in curve]
    half = next(i for i, instant in enumerate(curve) if instant.phase is Phase.backward)
    places, border = [place / len(gib) for place in range(len(gib))], half / len(gib)
    axes.fill_between(places, 0, states, color=LIGHT.phases[-1], linewidth=0, label="model states")
    axes.fill_between(places, states, gib, color=LIGHT.blue, alpha=0.35, linewidth=0, label="all else")
    axes.plot(places, gib, color=LIGHT.blue, linewidth=0.9)
    axes.axvline(border, color=LIGHT.text, linewidth=0.8, linestyle=(0, (2, 2)))
    axes.set_xlim(0, 1)
    axes.set_xticks([border / 2, (border + 1) / 2], ["forward", "backward"])
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("GiB")


def draw_states(names: Sequence[str], path: Path, found: dict[str, Planned]) -> None:
    """Draw what of the model states each rank holds, on its GPU and in host memory."""
    figure = Figure(figsize=(WIDTH_IN, 3.4), layout="constrained")
    gpu, host = figure.subplots(1, 2, sharey=True)
    for place, name in enumerate(names):
        plan, left = found[name].plan, 0.0
        for category in STATES:
            size = plan.gpu.get(category, 0) / GIB
            color = plan_charts.COLOR_OF[category]
            gpu.barh(place, size, left=left, color=color, label=None if place else str(category))
            left += size
        there = sum(plan.pinned.values()) + sum(v for k, v in plan.host.items() if "processes" not in k)
        host.barh(place, there / GIB, color=LIGHT.phases[1])
        for axes, end in ((gpu, left), (host, there / GIB)):
            axes.text(end, place, f" {end:.1f}", va="center", fontsize=8.5, color=LIGHT.text)
    gpu.set_yticks(range(len(names)), [name.removeprefix("full, ").replace("full", "zero3") for name in names])
    gpu.invert_yaxis()
    for axes, title in ((gpu, "On the GPU at the peak, GiB a rank"), (host, "In host memory, GiB a rank")):
        axes.set_title(title)
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, 1.2 * axes.get_xlim()[1])
    gpu.legend(loc="upper left", ncols=2, bbox_to_anchor=(0.0, -0.1), borderaxespad=0.0)
    figure.savefig(path, dpi=120)


def draw_times(names: Sequence[str], path: Path, found: dict[str, Planned]) -> None:
    """Draw the seconds of a step by cause."""
    figure = Figure(figsize=(WIDTH_IN, 0.9 + 0.42 * len(names)), layout="constrained")
    axes = figure.subplots()
    for place, name in enumerate(names):
        left = 0.0
        causes = split_by_cause(found[name].time).items()
        for (cause, seconds), color in zip(causes, plan_charts.COLORS, strict=False):
            axes.barh(place, seconds, left=left, color=color, label=cause if place == 0 else None)
            left += seconds
        axes.text(left, place, f" {left:.2f} s", va="center", fontsize=8.5, color=LIGHT.text)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * axes.get_xlim()[1])
    axes.grid(axis="y", visible=False)
    axes.set_title("Seconds of a step at best, by cause: planned")
    axes.legend(loc="upper left", ncols=6, bbox_to_anchor=(0.0, -0.12), borderaxespad=0.0)
    figure.savefig(path, dpi=120)


def draw_packing(path: Path) -> None:
    """Draw 28 rows of varied lengths padded to the longest, and packed into blocks by the packer."""
    lengths = np.clip(np.exp(np.random.Generator(np.random.PCG64(3)).normal(5.6, 0.8, 28)), 40, 1024).astype(
        int
    )
    blocks = best_fit(lengths, 1024)
    padded = [[index] for index in range(len(lengths))]
    figure = Figure(figsize=(WIDTH_IN, 4.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, rows, title in zip(panels, (padded, blocks), ("One row a block", "Packed"), strict=True):
        for place, block in enumerate(rows):
            axes.barh(place, 1024, color=LIGHT.phases[-1])
            left = 0
            for index in block:
                color = plan_charts.COLORS[index % 6]
                axes.barh(
                    place, lengths[index], left=left, color=color, edgecolor=LIGHT.background, linewidth=0.6
                )
                left += lengths[index]
        share = lengths.sum() / (1024 * len(rows))
        axes.set_title(f"{title}: {len(rows)} blocks, {1 - share:.0%} padding")
        axes.set_xlabel("positions of a block of 1024 tokens (grey: padding)")
        axes.grid(visible=False)
        axes.set_yticks([])
    panels[0].invert_yaxis()
    figure.savefig(path, dpi=120)


def main() -> int:
    """Draw all figures and write the table."""
    known = Recordings()
    found = {name: plan(name, known) for name in RUNS}
    FIGURES.mkdir(exist_ok=True)
    strategies = [
        "full, zero2",
        "full, zero2_offload",
        "full",
        "full, zero3_offload_optimizer",
        "full, zero3_offload",
    ]
    with matplotlib.rc_context(style(LIGHT)):
        draw_steps(["none", "discard_output", "full", "offload"], FIGURES / "kept.png", found, known)
        draw_steps(["full, all logits at once", "full"], FIGURES / "loss.png", found, known)
        draw_states(strategies, FIGURES / "states.png", found)
        draw_times(["none", "discard_output", "full", "offload", *strategies[1:2], strategies[-1]],
                   FIGURES / "times.png", found)  # fmt: skip
        draw_packing(FIGURES / "packing.png")
    head = "| added to the command | GPU GiB | model states | kept | host GiB | recomputing s | step s |"
    lines = [head, "|---|---:|---:|---:|---:|---:|---:|"]
    text = "\n".join([*lines, *(row(name, planned) for name, planned in found.items())])
    return update(PAGE, lambda page: between(page, MARK, END, text))


if __name__ == "__main__":
    sys.exit(main())
