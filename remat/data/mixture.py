"""Mix several sources: how many blocks of each an epoch has, and in which order.

An epoch of a mixture ends when one of its sources has been seen once. The weights, in tokens, give the number of blocks
of the other sources. The next epoch continues in each source where this one stopped, so over a run all blocks of a
source are seen about equally often. Each source has its own order, which does not depend on the others.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from remat.data.blocks import Blocks, epoch_order

# counts of a report that depend on the weights
OF_AN_EPOCH = "blocks", "tokens", "trained_tokens", "restarts", "squared_lengths"


class Joined(Blocks):
    """Blocks of several parts, numbered through: those of the first part, then those of the next."""

    def __init__(self, parts: Sequence[Blocks]) -> None:
        """Join parts of the same length.

        Raises ValueError when only some keep documents apart, or only some have one row per block.
        """
        first = parts[0]
        if any((each.apart, each.one_each) != (first.apart, first.one_each) for each in parts):
            raise ValueError("blocks that are packed in different ways cannot be joined")
        self._joined = list(parts)
        self.seq_len, self.apart, self.one_each = first.seq_len, first.apart, first.one_each
        self.of_rows = any(each.of_rows for each in parts)
        self.lengths = np.concatenate([each.lengths for each in parts])
        self.trained_tokens = np.concatenate([each.trained_tokens for each in parts])
        self._ends = np.cumsum([len(each) for each in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def tokens(self, indices: np.ndarray, begin: int = 0, end: int | None = None) -> np.ndarray:
        return self._gathered(indices, lambda part, own: part.tokens(own, begin, end))

    def packed_starts(self, indices: np.ndarray) -> np.ndarray:
        return self._gathered(indices, lambda part, own: part.packed_starts(own))

    def trained(self, indices: np.ndarray, begin: int = 0, end: int | None = None) -> np.ndarray:
        return self._gathered(indices, lambda part, own: part.trained(own, begin, end))

    def _owners(self, indices: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._ends, indices, side="right")

    def _gathered(self, indices: np.ndarray, read: Callable[[Blocks, np.ndarray], np.ndarray]) -> np.ndarray:
        owners, found = self._owners(indices), None
        for place, part in enumerate(self._joined):
            mine = owners == place
            if mine.any():
                values = read(part, indices[mine] - (self._ends[place] - len(part)))
                if found is None:
                    found = np.empty((len(indices), *values.shape[1:]), dtype=values.dtype)
                found[mine] = values
        assert found is not None, "no block was asked for"
        return found


class Mixture(Joined):
    """The blocks of several sources, and how an epoch chooses among them."""

    def __init__(self, parts: Mapping[str, Blocks], weights: Mapping[str, float] | None = None) -> None:
        """Mix `parts` by weights in tokens; None: an epoch has every block once. Raises what `Joined` raises."""
        super().__init__(list(parts.values()))
        self._parts = dict(parts)
        sizes = np.array([len(each) for each in parts.values()])
        self.blocks_of = dict(zip(parts, sizes.tolist(), strict=True))  # of each source in one epoch
        if weights is not None:
            wanted = np.array([weights[name] / each.lengths.mean() for name, each in parts.items()])
            rounds = float((sizes / wanted).min())  # until the first source is exhausted
            counts = np.clip(np.round(rounds * wanted).astype(np.int64), 1, sizes)
            self.blocks_of = dict(zip(parts, counts.tolist(), strict=True))

    @property
    def epoch_length(self) -> int:
        return sum(self.blocks_of.values())

    def order(self, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
        found, places = [], []
        for (name, count), end in zip(self.blocks_of.items(), self._ends, strict=True):
            size = len(self._parts[name])
            taken = np.arange(epoch * count, (epoch + 1) * count)  # counted since the start of training
            ids = np.empty(count, dtype=np.int64)
            for own_epoch in np.unique(taken // size):
                now = taken // size == own_epoch
                own = epoch_order(size, seed, int(own_epoch), shuffle, zlib.crc32(name.encode()))
                ids[now] = own[taken[now] % size]
            found.append(end - size + ids)
            places.append((np.arange(count) + 0.5) / count)
        ids = np.concatenate(found)
        # Without shuffling the sources alternate as evenly as their shares let them.
        even = np.argsort(np.concatenate(places), kind="stable")
        return ids[epoch_order(len(ids), seed, epoch, True) if shuffle else even]

    def seen_of(self, indices: np.ndarray) -> dict[str, int]:
        owners = self._owners(indices)
        return {
            name: int(self.lengths[indices[owners == place]].sum(dtype=np.int64))
            for place, name in enumerate(self._parts)
        }

    def shares(self) -> dict[str, float]:
        """Return the share of each source in the tokens of an epoch."""
        tokens = {
            name: count * float(self._parts[name].lengths.mean()) for name, count in self.blocks_of.items()
        }
        return {name: value / sum(tokens.values()) for name, value in tokens.items()}

    def passes(self) -> dict[str, float]:
        """Return how often an epoch has a block of each source, as a mean; at most 1."""
        return {name: count / len(self._parts[name]) for name, count in self.blocks_of.items()}


def mixed_report(reports: Mapping[str, dict[str, Any]], train: Mixture) -> dict[str, Any]:
    """Return a report like that of one source, with the reports of all sources under "sources".

    Training's blocks and tokens are counted over one epoch of the mixture, everything else over all data.
    """
    shares, passes = train.shares(), train.passes()
    halves: dict[str, dict[str, int] | None] = {}
    for half in ("train", "held_out"):
        given = {name: report[half] for name, report in reports.items() if report[half]}
        names = next(iter(given.values())) if given else {}
        halves[half] = {name: sum(counts[name] for counts in given.values()) for name in names} or None
    train_counts = halves["train"] or {}
    for name in OF_AN_EPOCH:
        train_counts[name] = round(sum(passes[each] * reports[each]["train"][name] for each in reports))
    some = next(iter(reports.values()))
    return {
        **some,
        **halves,
        "source": "mix",
        "path": None,
        "format": "+".join(sorted({str(report["format"]) for report in reports.values()})),
        "found": "",
        "held_out_by": None,
        "sources": {
            name: {**report, "share": shares[name], "passes_per_epoch": passes[name]}
            for name, report in reports.items()
        },
    }
