"""Fixed blocks of tokens on disk: written once, front to back, then memory-mapped by every process.

A split is `<name>.tokens.bin` (int32 [blocks, seq_len]). For packed text two more files say where documents start:
`.starts.bin` (one bit per token, numpy.packbits along each block) and `.restarts.bin` (int32 [blocks], how many start
after position 0). For instruction data there are `.trained.bin` (bool, same shape as the tokens),
`.trained_tokens.bin` and `.lengths.bin` (int32 [blocks]).
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np


class Blocks:
    """Blocks of `seq_len` tokens each; `len` says how many.

    `trained_tokens` int32 [blocks]: targets that carry loss after the causal shift. The token at i is predicted from
    i-1, so position 0 never counts. `lengths` int32 [blocks]: tokens before the padding.

    Padding needs no attention mask: it is on the right, and under causal attention no token sees what follows it.
    `apart`: each document of a block has its own positions, and its first token is not a target.
    """

    apart = False

    def __init__(
        self,
        tokens: np.ndarray,
        trained: np.ndarray | None = None,
        *,
        trained_tokens: np.ndarray | None = None,
        lengths: np.ndarray | None = None,
        starts: np.ndarray | None = None,
        restarts: np.ndarray | None = None,
    ) -> None:
        """Keep `tokens` int32 [blocks, seq_len] and `trained`, bool of that shape or None for every token.

        `trained_tokens` and `lengths` are derived where they are not given. `starts` uint8 [blocks, ceil(seq_len / 8)]
        has a bit set where a document starts; `restarts` int32 [blocks] counts the documents that start after position
        0. Both are None when no block holds more than one document.
        """
        count, self.seq_len = tokens.shape
        self._tokens, self._trained = tokens, trained
        self._starts, self._restarts = starts, restarts
        if trained_tokens is None:
            whole = np.full(count, self.seq_len - 1, dtype=np.int32)
            trained_tokens = whole if trained is None else trained[:, 1:].sum(axis=1, dtype=np.int32)
        self.trained_tokens = trained_tokens
        self.lengths = np.full(count, self.seq_len, dtype=np.int32) if lengths is None else lengths

    @classmethod
    def open(cls, folder: Path, name: str, seq_len: int) -> Blocks:
        """Open the split that a BlockWriter wrote to `folder` under `name`."""
        tokens = np.memmap(folder / f"{name}.tokens.bin", dtype=np.int32, mode="r").reshape(-1, seq_len)
        if not (folder / f"{name}.trained.bin").exists():
            starts = np.memmap(folder / f"{name}.starts.bin", dtype=np.uint8, mode="r")
            restarts = np.fromfile(folder / f"{name}.restarts.bin", dtype=np.int32)
            return cls(tokens, starts=starts.reshape(len(tokens), -1), restarts=restarts)
        trained = np.memmap(folder / f"{name}.trained.bin", dtype=np.bool_, mode="r").reshape(-1, seq_len)
        counts = {
            part: np.fromfile(folder / f"{name}.{part}.bin", dtype=np.int32)
            for part in ("trained_tokens", "lengths")
        }
        return cls(tokens, trained, **counts)

    def __len__(self) -> int:
        return len(self._tokens)

    def tokens(self, indices: np.ndarray) -> np.ndarray:
        """Return the tokens of the blocks `indices`, int32 [n, seq_len]."""
        return np.asarray(self._tokens[indices], dtype=np.int32)

    def documents_apart(self) -> Blocks:
        """Return the same blocks with `apart` set; blocks of one document each are returned as they are."""
        if self._starts is None or self._restarts is None:
            return self
        found = Blocks(
            self._tokens,
            trained_tokens=self.trained_tokens - self._restarts,
            lengths=self.lengths,
            starts=self._starts,
            restarts=self._restarts,
        )
        found.apart = True
        return found

    def starts(self, indices: np.ndarray) -> np.ndarray:
        """Return bool [n, seq_len]: whether a token is the first of a document.

        At position 0 a document may continue from the block before.
        """
        if self._starts is None:
            return np.broadcast_to(np.arange(self.seq_len) == 0, (len(indices), self.seq_len))
        return np.unpackbits(self._starts[indices], axis=1, count=self.seq_len).astype(bool)

    def positions(self, indices: np.ndarray) -> np.ndarray:
        """Return int64 [n, seq_len]: tokens since the start of the document, or of the block where that is later."""
        places = np.arange(self.seq_len)
        return places - np.maximum.accumulate(np.where(self.starts(indices), places, 0), axis=1)

    def trained(self, indices: np.ndarray) -> np.ndarray:
        """Return bool [n, seq_len]: whether a token is a target that carries loss (unshifted, as labels are).

        The first token of a document that is kept apart is no target: what comes before it is another document.
        """
        if self._trained is not None:
            return np.asarray(self._trained[indices])
        if not self.apart:
            return np.ones((len(indices), self.seq_len), dtype=bool)
        return ~self.starts(indices) | (np.arange(self.seq_len) == 0)


@dataclass
class BlockCounts:
    """Counts of the documents, blocks and tokens of one split."""

    documents: int = 0  # counted where they end, so a text in pieces counts once; cut and dropped ones included
    blocks: int = 0
    tokens: int = 0  # in blocks, padding left out
    trained_tokens: int = 0  # targets that carry loss; for packed text, as if documents were not kept apart
    restarts: int = 0  # documents that start within a block; kept apart, there are so many targets fewer
    truncated_documents: int = 0  # longer than a block
    truncated_tokens: int = 0
    dropped_documents: int = 0  # nothing left to train on
    dropped_tokens: int = 0  # the last, partial block of packed text

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class BlockWriter:
    """Writer that appends to the files of one split.

    With `packed` documents follow one another; otherwise each has its own padded block.
    """

    def __init__(self, folder: Path, name: str, *, seq_len: int, packed: bool, pad_id: int) -> None:
        examples = ("tokens", "trained", "trained_tokens", "lengths")
        parts = ("tokens", "starts", "restarts") if packed else examples
        self._files: dict[str, BinaryIO] = {part: (folder / f"{name}.{part}.bin").open("wb") for part in parts}
        self.seq_len, self.packed, self._pad_id = seq_len, packed, pad_id
        self._waiting: list[np.ndarray] = []
        self._waiting_starts: list[np.ndarray] = []
        self._starts_next = False  # a document began, and has no token yet
        self.counts = BlockCounts()

    def begin(self) -> None:
        """Mark the next token that is added as the first of a document."""
        self._starts_next = True

    def add(self, ids: np.ndarray, trained: np.ndarray | None = None, *, ends: bool = True) -> None:
        """Add tokens: `ids` int32 [length], `trained` bool [length] or None for all.

        `ends`: they complete a document, which is then counted.
        """
        starts = np.zeros(len(ids), dtype=bool)
        starts[:1] = self._starts_next
        self._starts_next &= not len(ids)
        self.counts.documents += ends
        if self.packed:
            self.add_packed(ids, starts)
        else:
            self._add_example(ids, np.ones(len(ids), dtype=bool) if trained is None else trained)

    def add_packed(self, ids: np.ndarray, starts: np.ndarray) -> None:
        """Add tokens of any documents, int32 [length]; `starts` bool [length] marks the first of each document."""
        self._waiting.append(ids)
        self._waiting_starts.append(starts)

    def flush(self) -> None:
        """Write the packed tokens that fill whole blocks; keep the rest for the next flush."""
        if not self.packed:
            return
        waiting = np.concatenate([np.empty(0, dtype=np.int32), *self._waiting])
        waiting_starts = np.concatenate([np.empty(0, dtype=bool), *self._waiting_starts])
        blocks = len(waiting) // self.seq_len
        used = blocks * self.seq_len
        starts = waiting_starts[:used].reshape(blocks, self.seq_len)
        restarts = starts[:, 1:].sum(axis=1, dtype=np.int32)
        self._files["tokens"].write(waiting[:used].tobytes())
        self._files["starts"].write(np.packbits(starts, axis=1).tobytes())
        self._files["restarts"].write(restarts.tobytes())
        self._waiting, self._waiting_starts = [waiting[used:]], [waiting_starts[used:]]
        self.counts.blocks += blocks
        self.counts.tokens += used
        self.counts.trained_tokens += blocks * (self.seq_len - 1)
        self.counts.restarts += int(restarts.sum())

    def close(self) -> BlockCounts:
        """Flush, sync and close the files; return the counts."""
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
    """Copy the blocks of split `name` to the writers of the two halves; `held_out` bool [blocks] says to which.

    Only blocks of instruction data are counted as documents again: a block of packed text is not a document.
    """
    blocks = Blocks.open(folder, name, writers[True].seq_len)
    for index in range(len(blocks)):
        row, length = np.array([index]), blocks.lengths[index]
        writer = writers[bool(held_out[index])]
        tokens = blocks.tokens(row)[0, :length]
        if writer.packed:
            writer.add_packed(tokens, blocks.starts(row)[0])
            writer.flush()
        else:
            writer.add(tokens, blocks.trained(row)[0, :length])
