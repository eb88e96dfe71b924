"""Write the tables of docs/strategies.md: `python scripts/strategy_table.py [--check]`.

For each model, card and number of cards the fastest settings that fit, as `remat plan --best` finds them. They and
their figures are kept in docs/strategies.json, because planning all of them takes hours; `--plan` plans those that it
lacks.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from remat.config import compose  # noqa: E402
from remat.config.units import GIB  # noqa: E402
from remat.planning.plan import Planned, Recordings, needed_bytes  # noqa: E402
from remat.planning.settings.search import Search  # noqa: E402
from scripts.generated import between, table, update  # noqa: E402

PAGE, FOUND = ROOT / "docs" / "strategies.md", ROOT / "docs" / "strategies.json"
MARK, END = "<!-- strategies: written by scripts/strategy_table.py -->", "<!-- end of strategies -->"
MODELS = {
    "1B": "llama1b",
    "4B": "qwen3_4b",
    "8B": "llama8b",
    "14B": "qwen3_14b",
    "32B": "qwen3_32b",
    "70B": "llama70b",
}
COUNTS = (1, 2, 4, 8)
METHODS = {"all weights": "finetune", "LoRA": "lora", "QLoRA": "qlora"}


@dataclass(frozen=True)
class Card:
    """A GPU, a machine with one, a machine with several, and the host memory that each number of them has."""

    gib: int
    name: str
    one: str
    several: str
    host_gib: tuple[int, ...]

    def words(self, count: int) -> list[str]:
        """Return the overrides that choose a machine with `count` of this card."""
        host_gib = self.host_gib[COUNTS.index(count)]
        named = (
            [f"hardware={self.one}"]
            if count == 1
            else [f"hardware={self.several}", f"hardware.gpus_per_node={count}"]
        )
        return [*named, f"hardware.host_memory_gib={host_gib}"]


CARDS = (
    Card(24, "RTX 4090", "1x4090", "4x4090", (125, 125, 250, 500)),
    Card(48, "L40S", "1xl40s", "4xl40s", (125, 188, 376, 752)),
    Card(80, "H100", "1xh100-80", "8xh100-80", (200, 500, 1000, 2000)),
    Card(141, "H200", "1xh200", "8xh200", (125, 500, 1000, 2000)),
)


def fixed(model: str, method: str, card: Card, count: int) -> list[str]:
    """Return the words that name what is trained, and where."""
    named = [f"recipe={METHODS[method]}", f"model={MODELS[model]}", "data.path=rows.jsonl"]
    return [*named, "train.global_batch_size=32", *card.words(count)]


def figures(planned: Planned) -> dict[str, float]:
    """Return what the tables show of a plan: GiB of a GPU and of the machine's host memory, and tokens per second."""
    return {
        "gpu_gib": round(needed_bytes(planned, "GPU memory") / GIB, 1),
        "host_gib": round(needed_bytes(planned, "host memory per node") / GIB, 1),
        "tokens_per_s": round(planned.time.tokens_per_s or 0.0),
    }


def plan_missing() -> None:
    """Search every cell that docs/strategies.json lacks, plan its answer whole, and add it; a minute for each."""
    cells = json.loads(FOUND.read_text()) if FOUND.exists() else []
    known = {_key(cell): cell for cell in cells}
    for model, method in itertools.product(MODELS, METHODS):
        recordings = Recordings()
        for card, count in itertools.product(CARDS, COUNTS):
            cell: dict[str, Any] = {"model": model, "method": method, "card_gib": card.gib, "cards": count}
            if _key(cell) in known:
                continue
            words = fixed(model, method, card, count)
            for found in Search(words, compose.compose_run(words).run, recordings).fastest(1):
                cell |= {"fits": True, "overrides": found.overrides, **figures(found.planned)}
            known[_key(cell)] = cell
            print(json.dumps(cell), flush=True)
            _write(list(known.values()))


def _key(cell: dict[str, Any]) -> tuple[str, str, int, int]:
    return cell["model"], cell["method"], cell["card_gib"], cell["cards"]


def _write(cells: list[dict[str, Any]]) -> None:
    order = list(itertools.product(MODELS, METHODS, [card.gib for card in CARDS], COUNTS))
    lines = ",\n".join(json.dumps(cell) for cell in sorted(cells, key=lambda cell: order.index(_key(cell))))
    FOUND.write_text(f"[\n{lines}\n]\n")


def tables() -> str:
    """Return what fits at most for every model and machine, then a table of choices for each card."""
    cells = json.loads(FOUND.read_text())
    parts = [_overview(cells)]
    for card in CARDS:
        parts += [f"## {card.gib} GB: {card.name}", _of_card([c for c in cells if c["card_gib"] == card.gib])]
    return "\n\n".join(parts)


def _overview(cells: list[dict[str, Any]]) -> str:
    """Return a table of machines against models: the first method of METHODS that fits."""
    rows = []
    for card, count in itertools.product(CARDS, COUNTS):
        row = [f"{count} x {card.gib} GB"]
        for model in MODELS:
            fits = {
                c["method"]: c.get("fits", False)
                for c in cells
                if (c["model"], c["card_gib"], c["cards"]) == (model, card.gib, count)
            }
            first = next((method for method in METHODS if fits.get(method, True)), "-")
            row.append(first if first in fits or first == "-" else "?")
        rows.append(row)
    return table(["machine", *MODELS], rows)


def _of_card(cells: list[dict[str, Any]]) -> str:
    head = ("model", "cards", "trained", "add to the command", "GPU GiB", "host GiB", "tokens/s")
    rows = []
    for cell in cells:
        if not cell.get("fits"):
            continue
        named = f"`recipe={METHODS[cell['method']]} {' '.join(cell['overrides'])}`"
        sizes = (cell["gpu_gib"], cell["host_gib"], f"{cell['tokens_per_s']:,}")
        rows.append((cell["model"], cell["cards"], cell["method"], named, *sizes))
    return table(head, rows, right=(1, 4, 5, 6))


def renewed(page: str) -> str:
    """Return `page` with the tables replaced."""
    return between(page, MARK, END, tables())


if __name__ == "__main__":
    if "--plan" in sys.argv:
        plan_missing()
    sys.exit(update(PAGE, renewed))
