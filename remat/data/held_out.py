"""Choose the documents to hold out by hashes of the seed and of names, so that every machine chooses the same."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable

from remat.data.rows import Document

PLANNED_UNITS = 2000  # with more units, a random choice is close to the fraction: 100 +- 10 units at 5%


def never(unit: str) -> bool:
    return False


def rule(documents: Iterable[Document], *, seed: int, fraction: float) -> Callable[[str], bool]:
    """Return the function that says whether a unit is held out. Reads `documents` until PLANNED_UNITS are exceeded.

    Few units are chosen together, so that their share is near `fraction` (see `choose`). With many, each unit is
    decided by itself, so that documents added later change nothing for the others.
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


def bound(
    fraction: float, most_tokens: int, sample: Iterable[tuple[Document, int]], total: int
) -> tuple[float, float]:
    """Return the share of the documents, and the number of characters, that may be held out at most.

    These are `fraction` of the data, but at most about `most_tokens` tokens (0: no limit). `sample` are the first
    documents and their numbers of tokens, `total` the size of all (`Corpus.total`). So the bound depends on the content
    of the data, not on its location.
    """
    size = tokens = characters = 0
    for document, length in sample:
        size += document.size
        tokens += length
        characters += characters_of(document)
    if not (most_tokens and tokens):
        return fraction, math.inf
    # rows of compressed files and of Arrow tables have no size: only the characters bound them
    share = most_tokens * size / (tokens * total) if size and total else fraction
    return min(fraction, share), most_tokens * characters / tokens


class Chooser:
    """Decides for one document after another whether it is held out. All pieces of a unit get the same answer.

    `is_held_out` decides until `characters` characters are held out; the rest is for training. This limit matters only
    where the first documents were a poor sample of the others.
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
    """Return the characters of a text, or of a row as a string."""
    return len(str(document.content))


def choose(weights: dict[str, int], *, seed: int, fraction: float) -> frozenset[str]:
    """Return the units to hold out: in the order of their hashes, each that brings the sum nearer to `fraction` of all.

    Of two units or more, at least one is held out and never all. At most twice `fraction` of the number of units are
    held out; otherwise all small units beside a few large ones could be missing from training.
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
