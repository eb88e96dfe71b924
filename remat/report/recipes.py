"""List what a run can start from: recipes for named machines with planned figures, and starting points."""

from __future__ import annotations

import re
from typing import NamedTuple

import yaml
from rich.console import Console
from rich.table import Table

from remat.config import compose
from remat.config.options import DeepSpeedConfig, MetaConfig


class Row(NamedTuple):
    """A row of the table. `gpu_gib` and `tokens_per_s` are planned figures, "-" where the plan has none."""

    name: str
    summary: str
    machine: str
    strategy: str
    gpu_gib: str
    tokens_per_s: str
    status: str


def rows() -> list[Row]:
    """Return the recipes for named machines, sorted by name."""
    return [_row(name, (compose.RECIPE_DIR / f"{name}.yaml").read_text()) for name in compose.recipe_names()]


def _row(name: str, text: str) -> Row:
    """Return the row of a recipe from the text of its file; composing it would take a hundred times as long."""
    recipe = yaml.safe_load(text)
    meta, deepspeed = MetaConfig(**recipe["meta"]), DeepSpeedConfig(**recipe["deepspeed"])
    planned, chosen = meta.planned, re.search(r"override /checkpointing: (\S+)", text)
    return Row(
        name,
        meta.summary,
        meta.machine,
        f"{deepspeed.config}, {chosen[1] if chosen else 'full'}",
        f"{planned['gpu_gib']:.1f}" if "gpu_gib" in planned else "-",
        f"{planned['tokens_per_s']:,.0f}" if "tokens_per_s" in planned else "-",
        str(meta.status),
    )


def show(console: Console) -> None:
    """Print the table of recipes, and how to start from the user's own model."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("recipe", no_wrap=True)
    for title in ("machine", "strategy"):
        table.add_column(title, overflow="fold")
    table.add_column("GPU GiB", justify="right")
    table.add_column("tokens/s", justify="right")
    for row in rows():
        table.add_row(row.name, row.machine, row.strategy, row.gpu_gib, row.tokens_per_s)
    console.print(table)
    console.print("\nPlanned: GPU memory of a rank at its peak, tokens of all ranks. None was measured yet.")
    console.print(
        f"For a model of your own: {', '.join(compose.starting_points())} (with model.path and data.path)."
    )
    console.print("Where every GiB of one goes: remat plan recipe=NAME")
