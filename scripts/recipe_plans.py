"""Write what recipes are planned to need into their files: `python scripts/recipe_plans.py [RECIPE ...]`.

Without names it does all recipes, about half a minute each. README's table is made from them: scripts/recipe_table.py.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from remat.config import compose  # noqa: E402
from remat.config.units import GIB  # noqa: E402
from remat.planning.plan import GPU_MEMORY, Planned, make_plan, needed_bytes  # noqa: E402
from remat.planning.sweep import is_timed  # noqa: E402

PLANNED = re.compile(r"(?<=\n)  planned:\n(?:    .*\n)+")


def figures(planned: Planned) -> dict[str, float]:
    """GiB of a rank's GPU at its peak, and tokens/s of all ranks to four digits; nothing without a GPU."""
    if planned.cfg.hardware.gpu is None:
        return {}
    found = {"gpu_gib": round(needed_bytes(planned, GPU_MEMORY) / GIB, 1)}
    speed = planned.time.tokens_per_s
    if is_timed(planned) and speed is not None:
        found["tokens_per_s"] = round(speed) if speed >= 1000 else round(speed, 1)
    return found


def renewed(text: str, found: dict[str, float]) -> str:
    """`text` of a recipe with its planned figures replaced."""
    if not found:
        return text
    block = "  planned:\n" + "".join(f"    {name}: {value}\n" for name, value in found.items())
    assert PLANNED.search(text), "a recipe has meta.planned"
    return PLANNED.sub(block, text, count=1)


def with_figures() -> list[str]:
    """The recipes that are for one model; starting points are for any."""
    texts = {name: (compose.RECIPE_DIR / f"{name}.yaml").read_text() for name in compose.recipe_names()}
    return [name for name, text in texts.items() if PLANNED.search(text)]


def main(names: list[str]) -> None:
    for name in names or with_figures():
        planned = make_plan(compose.compose_run([f"recipe={name}"]).run)
        assert planned.plan.fits, f"{name} does not fit its machine"
        found = figures(planned)
        path = compose.RECIPE_DIR / f"{name}.yaml"
        path.write_text(renewed(path.read_text(), found))
        print(name, found, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
