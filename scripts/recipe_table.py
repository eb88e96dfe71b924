"""Write the recipe table of README.md from the recipes themselves: `python scripts/recipe_table.py [--check]`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from remat.config import compose  # noqa: E402
from remat.report import recipes  # noqa: E402
from scripts import generated  # noqa: E402

BEGIN, END = "<!-- recipes: written by scripts/recipe_table.py -->", "<!-- end of recipes -->"


STARTS = ("starting point", "what", "strategy where `auto` cannot choose", "optim.lr")
RECIPES = ("recipe", "what", "machine", "strategy", "GPU GiB", "tokens/s", "status")


def table() -> str:
    """The starting points for any model; then one row per recipe: what it is, its machine, strategy and status."""
    starts = []
    for name in compose.starting_points():
        run = compose.compose_run([f"recipe={name}", "model.path=FOLDER_OR_HUB_NAME"]).run
        strategy = f"`{run.deepspeed.config}`, `checkpointing={run.checkpointing.policy}`"
        starts.append((f"`{name}`", run.meta.summary, strategy, f"{run.optim.lr:g}"))
    rows = [(f"`{row.name}`", *row[1:]) for row in recipes.rows()]
    return f"{generated.table(STARTS, starts)}\n\n{generated.table(RECIPES, rows, right=(4, 5))}"


def renewed(readme: str) -> str:
    """`readme` with the table between its two marks replaced."""
    return generated.between(readme, BEGIN, END, table())


if __name__ == "__main__":
    sys.exit(generated.update(ROOT / "README.md", renewed))
