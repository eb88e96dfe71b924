"""Fixed blocks of tokens on disk: written once, front to back, then memory-mapped by every process.

A split is `<name>.tokens.bin` (int32 [blocks, seq_len]); instruction data adds `.trained.bin` (bool, same shape),
`.trained_tokens.bin` and `.lengths.bin` (int32 [blocks]).
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np


class Blocks:
    """`len` blocks of `seq_len` tokens.

    `trained_tokens` int32 [blocks]: targets that carry loss after the causal shift. The token at i is predicted from
    i-1, so position 0 never counts. `lengths` int32 [blocks]: tokens before the padding.

    Blocks need no attention mask: padding is on the right, and under causal attention no token sees what follows it.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        trained: np.ndarray | None = None,
        *,
        trained_tokens: np.ndarray | None = None,
        lengths: np.ndarray | None = None,
    ) -> None:
        """`tokens` int32 [blocks, seq_len]; `trained` bool of that shape, None: every token. The rest follows."""
        count, self.seq_len = tokens.shape
        self._tokens, self._trained = tokens, trained
        if trained_tokens is None:
            whole = np.full(count, self.seq_len - 1, dtype=np.int32)
            trained_tokens = whole if trained is None else trained[:, 1:].sum(axis=1, dtype=np.int32)
        self.trained_tokens = trained_tokens
        self.lengths = np.full(count, self.seq_len, dtype=np.int32) if lengths is None else lengths

    @classmethod
    def open(cls, folder: Path, name: str, seq_len: int) -> Blocks:
        """The split that a BlockWriter wrote to `folder` under `name`."""
        tokens = np.memmap(folder / f"{name}.tokens.bin", dtype=np.int32, mode="r").reshape(-1, seq_len)
        if not (folder / f"{name}.trained.bin").exists():
            return cls(tokens)
        trained = np.memmap(folder / f"{name}.trained.bin", dtype=np.bool_, mode="r").reshape(-1, seq_len)
        counts = {
            part: np.fromfile(folder / f"{name}.{part}.bin", dtype=np.int32)
            for part in ("trained_tokens", "lengths")
        }
        return cls(tokens, trained, **counts)

    def __len__(self) -> int:
        return len(self._tokens)

    def tokens(self, indices: np.ndarray) -> np.ndarray:
        """int32 [n, seq_len]"""
        return np.asarray(self._tokens[indices], dtype=np.int32)

    def trained(self, indices: np.ndarray) -> np.ndarray:
        """bool [n, seq_len]: unshifted, so a token is marked where it is a target."""
        if self._trained is None:
            return np.ones((len(indices), self.seq_len), dtype=bool)
        return np.asarray(self._trained[indices])


@dataclass
class BlockCounts:
    """What became of the documents of one split."""

    documents: int = 0  # those that end here, and so not every piece of a text; cut and dropped ones among them
    blocks: int = 0
    tokens: int = 0  # in blocks, padding left out
    trained_tokens: int = 0  # targets that carry loss
    truncated_documents: int = 0  # longer than a block
    truncated_tokens: int = 0
    dropped_documents: int = 0  # nothing left to train on
    dropped_tokens: int = 0  # the last, partial block of packed text

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class BlockWriter:
    """Appends to the files of one split. `packed`: documents follow one another; else one per block, padded."""

    def __init__(self, folder: Path, name: str, *, seq_len: int, packed: bool, pad_id: int) -> None:
        parts = ("tokens",) if packed else ("tokens", "trained", "trained_tokens", "lengths")
        self._files: dict[str, BinaryIO] = {part: (folder / f"{name}.{part}.bin").open("wb") for part in parts}
        self.seq_len, self.packed, self._pad_id = seq_len, packed, pad_id
        self._waiting: list[np.ndarray] = []
        self.counts = BlockCounts()

    def add(self, ids: np.ndarray, trained: np.ndarray | None = None, *, ends: bool = True) -> None:
        """ids int32 [length]; trained bool [length], None: all. `ends`: a document is complete with it, and counts."""
        self.counts.documents += ends
        if self.packed:
            self._waiting.append(ids)
        else:
            self._add_example(ids, np.ones(len(ids), dtype=bool) if trained is None else trained)

    def flush(self) -> None:
        """Write the whole blocks among the packed tokens that wait; keep the rest for the next ones."""
        waiting = np.concatenate([np.empty(0, dtype=np.int32), *self._waiting])
        blocks = len(waiting) // self.seq_len
        used = blocks * self.seq_len
        self._files["tokens"].write(waiting[:used].tobytes())
        self._waiting = [waiting[used:]]
        self.counts.blocks += blocks
        self.counts.tokens += used
        self.counts.trained_tokens += blocks * (self.seq_len - 1)

    def close(self) -> BlockCounts:
        """Make the files durable."""
        if self.packed:
            self.flush()
            self.counts.dropped_tokens = len(self._waiting[0])
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        return self.counts

    def abandon(self) -> None:
        for file in self._files.values():
            file.close()

    def _add_example(self, ids: np.ndarray, trained: np.ndarray) -> None:
        if len(ids) > self.seq_len:
            self.counts.truncated_documents += 1
            self.counts.truncated_tokens += len(ids) - self.seq_len
            ids, trained = ids[: self.seq_len], trained[: self.seq_len]
        targets = int(trained[1:].sum())
        if not targets:
            self.counts.dropped_documents += 1
            return
        padding = self.seq_len - len(ids)
        self._files["tokens"].write(np.pad(ids, (0, padding), constant_values=self._pad_id).tobytes())
        self._files["trained"].write(np.pad(trained, (0, padding)).tobytes())
        self._files["trained_tokens"].write(np.int32(targets).tobytes())
        self._files["lengths"].write(np.int32(len(ids)).tobytes())
        self.counts.blocks += 1
        self.counts.tokens += len(ids)
        self.counts.trained_tokens += targets


def divide(folder: Path, name: str, writers: dict[bool, BlockWriter], held_out: np.ndarray) -> None:
    """Copy the blocks of split `name` to the writers of the two halves; `held_out` bool [blocks] tells which.

    A block of packed text is no document, so only the blocks of instruction data count as documents again.
    """
    blocks = Blocks.open(folder, name, writers[True].seq_len)
    for index in range(len(blocks)):
        row, length = np.array([index]), blocks.lengths[index]
        writer = writers[bool(held_out[index])]
        writer.add(blocks.tokens(row)[0, :length], blocks.trained(row)[0, :length], ends=not writer.packed)
        writer.flush()
