"""Choose which documents are held out, by hashes of the seed and of names, so every machine chooses the same."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable

from remat.data.rows import Document

PLANNED_UNITS = 2000  # with more units, chance alone comes close to the fraction: 100 +- 10 units at 5%


def never(unit: str) -> bool:
    return False


def rule(documents: Iterable[Document], *, seed: int, fraction: float) -> Callable[[str], bool]:
    """Return the function that says whether a unit is held out. Reads `documents` until PLANNED_UNITS are exceeded.

    With few units they are chosen together, so that the share is near `fraction` (see `choose`). With many, each unit
    is decided alone, so that documents added later change nothing for the others.
    """
    weights: dict[str, int] = {}
    for document in documents:
        if document.content:
            # A text counts by its length; an instruction example is one block, whatever its length.
            weight = len(document.content) if isinstance(document.content, str) else 1
            weights[document.unit] = weights.get(document.unit, 0) + weight
        if len(weights) > PLANNED_UNITS:
            return lambda unit: _hash(unit, seed) < fraction * 2**64
    return choose(weights, seed=seed, fraction=fraction).__contains__


def choose(weights: dict[str, int], *, seed: int, fraction: float) -> frozenset[str]:
    """Return the units to hold out: in the order of their hashes, those that bring the sum nearer to `fraction` of all.

    Where there are two units or more, at least one is held out and never all. At most twice `fraction` of the units
    are held out by number: otherwise, beside a few large units, all the small ones could leave training.
    """
    order = sorted(weights, key=lambda unit: _hash(unit, seed))
    most = min(math.ceil(2 * fraction * len(order)), len(order) - 1)
    missing = fraction * sum(weights.values())
    chosen: list[str] = []
    for unit in order:
        if len(chosen) < most and weights[unit] <= 2 * missing:
            chosen.append(unit)
            missing -= weights[unit]
    if most > 0 and not chosen:
        chosen.append(min(order, key=lambda unit: weights[unit]))
    return frozenset(chosen)


def _hash(unit: str, seed: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {unit}".encode(), digest_size=8).digest(), "big")
