"""Choose which documents are held out, by hashes of the seed and of names, so every machine chooses the same."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Bound:
    """The most that is held out: a share of the documents, and of their characters."""

    fraction: float
    characters: float


def bound(fraction: float, most_tokens: int, sample: Iterable[tuple[Document, int]], total: int) -> Bound:
    """Return the bound that holds out `fraction` of the data, but about `most_tokens` tokens at most (0: no bound).

    `sample` are the first documents and their tokens, `total` the size of all (`Corpus.total`). So the bound follows
    from what the data is, never from where it lies.
    """
    size = tokens = characters = 0
    for document, length in sample:
        size += document.size
        tokens += length
        characters += characters_of(document)
    if not (most_tokens and size and tokens and total):
        return Bound(fraction, math.inf)
    return Bound(min(fraction, most_tokens * size / (tokens * total)), most_tokens * characters / tokens)


class Chooser:
    """Say of one document after another whether it is held out; the pieces of a unit go together.

    `is_held_out` decides, until `characters` of held-out documents were seen: then the rest is for training. This
    matters only where the first documents were a poor sample of the others.
    """

    def __init__(self, is_held_out: Callable[[str], bool], characters: float = math.inf) -> None:
        self._is_held_out, self._left = is_held_out, characters
        self._unit: tuple[str, bool] | None = None

    def __call__(self, document: Document) -> bool:
        if self._unit is None or self._unit[0] != document.unit:
            self._unit = (document.unit, self._left > 0 and self._is_held_out(document.unit))
        if self._unit[1]:
            self._left -= characters_of(document)
        return self._unit[1]


def characters_of(document: Document) -> int:
    """Return the length of a text, or of a row written out."""
    content = document.content
    return len(content) if isinstance(content, str) else len(str(content))


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
