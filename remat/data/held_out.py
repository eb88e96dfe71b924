"""Which documents are held out. Only hashes of the seed and of names decide, so every machine decides the same."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable

from remat.data.rows import Document

PLANNED_UNITS = 2000  # with more of them, chance alone comes close: 100 +- 10 units at 5%


def never(unit: str) -> bool:
    return False


def rule(documents: Iterable[Document], *, seed: int, fraction: float) -> Callable[[str], bool]:
    """Whether a unit is held out. Reads `documents` until it knows that they are many.

    Few units are chosen so that the share is near `fraction` (see `choose`). Of many, each is held out by itself, so
    that documents added later change nothing for the others.
    """
    weights: dict[str, int] = {}
    for document in documents:
        if document.content:
            # A text counts by its length, an instruction example is one block whatever its length.
            weight = len(document.content) if isinstance(document.content, str) else 1
            weights[document.unit] = weights.get(document.unit, 0) + weight
        if len(weights) > PLANNED_UNITS:
            return lambda unit: _hash(unit, seed) < fraction * 2**64
    return choose(weights, seed=seed, fraction=fraction).__contains__


def choose(weights: dict[str, int], *, seed: int, fraction: float) -> frozenset[str]:
    """In the order of their hashes, the units that bring the sum nearer to `fraction` of all weights.

    At least one and never all of them, where there are two; at most twice `fraction` of them by number, so that a
    few large units do not push all the small ones out of training.
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
