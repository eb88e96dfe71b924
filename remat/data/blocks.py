"""Store fixed blocks of tokens on disk: written once, front to back, then memory-mapped by every process.

A split is `<name>.tokens.bin` (int32 [blocks, seq_len]). Where a block may hold several documents, two more files give
their starts: `.starts.bin` (one bit per token, numpy.packbits along each block) and `.restarts.bin` (int32 [blocks],
the number that start after position 0). Instruction data, packed or not, also has `.trained.bin` (bool, same shape as
the tokens), `.trained_tokens.bin` and `.lengths.bin` (int32 [blocks]).
"""

from __future__ import annotations

import io
import os
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from remat.config.options import ConfigError, DataConfig, LongRows, Packing
from remat.data.formats import Example


def best_fit(lengths: np.ndarray, room: int) -> list[list[int]]:
    """Pack examples into blocks of `room` tokens. Return the indices into `lengths` int [examples] of each block.

    This is best-fit decreasing (Johnson 1974): take the longest example first, and put it into the block with the least
    room that still holds it. No example is divided; each has at most `room` tokens.

    The result depends on `lengths` and `room` alone. Examples stay in the given order within a block, and blocks are in
    the order of their first examples. Takes O(examples x log(room)) steps.
    """
    if len(lengths) and int(np.max(lengths)) > room:
        raise ValueError(f"an example of {int(np.max(lengths))} tokens does not fit a block of {room}")
    blocks: list[list[int]] = []
    left: list[int] = []  # the different amounts of room that blocks still have, ascending
    with_room: dict[int, list[int]] = {}
    for index in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = int(lengths[index])
        place = bisect_left(left, length)
        if place == len(left):
            block, rest = len(blocks), room - length
            blocks.append([index])
        else:
            found = with_room[left[place]]
            block, rest = found.pop(), left[place] - length
            if not found:
                del with_room[left.pop(place)]
            blocks[block].append(index)
        if rest:
            if rest not in with_room:
                with_room[rest] = []
                insort(left, rest)
            with_room[rest].append(block)
    return sorted(sorted(block) for block in blocks)


# tokens of the rows that are packed together: 20 MB; the last, partly empty block matters little
WINDOW_TOKENS = 4 * 1024**2
WINDOW_BLOCKS = 128  # with long blocks a window has at least so many
FIRST_LONG_ROWS = 5  # listed in the cache's report
PER_BLOCK = ("trained_tokens", "lengths", "restarts")  # parts with one number per block, kept in memory
STEP_OF_WIDTHS = 8  # widths are multiples of it: matrix products are slow at odd sizes


class Blocks:
    """Blocks of `seq_len` tokens each; `len` says how many.

    `trained_tokens` int32 [blocks]: targets that carry loss after the causal shift. The token at i is predicted from
    i-1, so position 0 never counts. `lengths` int32 [blocks]: tokens before the padding.

    Padding needs no attention mask: it is on the right, and under causal attention no token sees what follows it.
    `apart`: each document of a block has its own positions, and its first token is not a target. `one_each`: a block
    is one row and padding, and a batch is only as wide as its longest row.
    """

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
        0. Both are None when no block holds more than one document. With both `trained` and `starts`, documents
        are kept apart, and the first token of each must not be in `trained`.
        """
        count, self.seq_len = tokens.shape
        self._tokens, self._trained = tokens, trained
        self._starts, self._restarts = starts, restarts
        self.of_rows, self.one_each = trained is not None, trained is not None and starts is None
        self.apart = self.of_rows and not self.one_each
        if trained_tokens is None:
            whole = np.full(count, self.seq_len - 1, dtype=np.int32)
            trained_tokens = whole if trained is None else trained[:, 1:].sum(axis=1, dtype=np.int32)
        self.trained_tokens = trained_tokens
        self.lengths = np.full(count, self.seq_len, dtype=np.int32) if lengths is None else lengths

    @classmethod
    def open(cls, folder: Path, name: str, seq_len: int) -> Blocks:
        """Open the split that a writer wrote to `folder` under `name`."""

        def part(each: str, dtype: type) -> np.ndarray | None:
            path = folder / f"{name}.{each}.bin"
            if not path.exists():
                return None
            in_memory = each in PER_BLOCK
            return np.fromfile(path, dtype=dtype) if in_memory else np.memmap(path, dtype=dtype, mode="r")

        return cls._of_parts(part, seq_len)

    @classmethod
    def _of_parts(cls, part: Callable[[str, type], np.ndarray | None], seq_len: int) -> Blocks:
        """Return a writer's blocks. `part` returns a flat array by the part's name, None if it was not written."""
        tokens, trained, starts = part("tokens", np.int32), part("trained", np.bool_), part("starts", np.uint8)
        assert tokens is not None
        tokens = tokens.reshape(-1, seq_len)
        own = {name: part(name, np.int32) for name in PER_BLOCK}
        return cls(
            tokens,
            None if trained is None else trained.reshape(-1, seq_len),
            starts=None if starts is None else starts.reshape(len(tokens), -(-seq_len // 8)),
            **own,
        )

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def epoch_length(self) -> int:
        """Return the number of blocks in an epoch."""
        return len(self)

    def order(self, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
        """Return the order of the blocks in an epoch, int64 [epoch_length]."""
        return epoch_order(len(self), seed, epoch, shuffle)

    def seen_of(self, indices: np.ndarray) -> dict[str, int]:
        """Return the tokens of the blocks `indices` by source of a mixture; {} without a mixture."""
        return {}

    def width(self, indices: np.ndarray) -> int:
        """Return the width of a batch of the blocks `indices`: seq_len, or the longest row rounded up."""
        return int(self.widths(indices[None])[0])

    def widths(self, groups: np.ndarray) -> np.ndarray:
        """Return `width` of each batch, int [batches]; `groups` int [batches, n] are the blocks of each."""
        if not self.one_each:
            return np.full(len(groups), self.seq_len)
        longest = self.lengths[groups].max(axis=1)
        return np.minimum(-(-longest // STEP_OF_WIDTHS) * STEP_OF_WIDTHS, self.seq_len)

    def tokens(self, indices: np.ndarray, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Return the tokens from `begin` to `end` (None: the last) of the blocks `indices`, int32 [n, end - begin].

        No other tokens are read.
        """
        return np.asarray(self._tokens[indices, begin:end], dtype=np.int32)

    def documents_apart(self) -> Blocks:
        """Return the same blocks with `apart` set.

        Blocks of one document each, and blocks of packed rows, are returned unchanged.
        """
        if self._starts is None or self._restarts is None or self.of_rows:
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

    def packed_starts(self, indices: np.ndarray) -> np.ndarray:
        """Return uint8 [n, ceil(seq_len / 8)] with one bit per token, set where a document starts."""
        if self._starts is not None:
            return np.asarray(self._starts[indices])
        found = np.zeros((len(indices), -(-self.seq_len // 8)), dtype=np.uint8)
        found[:, 0] = np.packbits([True])
        return found

    def starts(self, indices: np.ndarray) -> np.ndarray:
        """Return bool [n, seq_len]: whether a token is the first of a document.

        The document at position 0 may continue from the block before.
        """
        return np.unpackbits(self.packed_starts(indices), axis=1, count=self.seq_len).astype(bool)

    def bounds(self, indices: np.ndarray, width: int | None = None) -> np.ndarray:
        """Return the starts of documents and the end, int64 [documents + 1], in rows of `width` laid end to end.

        Each row starts a document. Its padding starts another, so that no kernel computes attention between them.
        Only the bits of `packed_starts` are read, one per token.
        """
        width, rows = width or self.seq_len, len(indices)
        begins = np.arange(rows, dtype=np.int64) * width
        bits = self.packed_starts(indices)
        row, byte = np.nonzero(bits)
        found, bit = np.nonzero(np.unpackbits(bits[row, byte][:, None], axis=1))
        padding = [begins + self.lengths[indices], begins + self.seq_len]
        inside = [place[place < begins + width] for place in padding]
        return np.unique(
            np.concatenate([begins, begins[row[found]] + 8 * byte[found] + bit, *inside, [rows * width]])
        )

    def positions(self, indices: np.ndarray) -> np.ndarray:
        """Return int64 [n, seq_len]: tokens since the start of the document or of the block, whichever is later."""
        return positions_within(self.bounds(indices), 0, len(indices) * self.seq_len).reshape(-1, self.seq_len)

    def trained(self, indices: np.ndarray, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Return bool [n, end - begin]: whether a token is a target that carries loss (not shifted, like labels).

        Where documents are kept apart, the first token of each is no target: it follows another document.
        """
        if self._trained is not None:
            return np.asarray(self._trained[indices, begin:end])
        places = np.arange(self.seq_len)[begin:end]
        found = np.ones((len(indices), len(places)), dtype=bool)
        if self.apart:
            row, place = np.divmod(self.bounds(indices)[:-1], self.seq_len)
            inside = (place > 0) & (place >= begin) & (place < begin + len(places))
            found[row[inside], place[inside] - begin] = False
        return found


def positions_within(bounds: np.ndarray, begin: int, end: int) -> np.ndarray:
    """Return how far each place from begin to end is from the last of the ascending `bounds`, int64 [end - begin]."""
    lengths = np.diff(np.clip(bounds, begin, end))
    return np.arange(begin, end) - np.repeat(bounds[:-1], lengths)


def epoch_order(count: int, seed: int, epoch: int, shuffle: bool, *more: int) -> np.ndarray:
    """Return an order of `count` blocks, int64 [count], that depends only on the seed, the epoch and `more`.

    It sorts raw bits. NumPy never changes their stream (NEP 19) but may change `permutation`, and a run resumed under
    another version of NumPy must see the same order.
    """
    if not shuffle:
        return np.arange(count, dtype=np.int64)
    bits = np.random.PCG64([seed, epoch, *more]).random_raw(count)
    return np.argsort(bits, kind="stable").astype(np.int64)


@dataclass
class BlockCounts:
    """Counts of the documents, blocks and tokens of one split."""

    documents: int = 0  # cut and dropped ones included; a text in pieces counts once, where it ends
    rows_more: int = 0  # rows beyond one per document, of chats whose template rewrites earlier turns
    turns_left_out: int = 0  # turns of such chats that data.rewritten_turns=last does not train
    blocks: int = 0
    tokens: int = 0  # in blocks, padding left out
    trained_tokens: int = 0  # targets that carry loss; for packed text, as if documents were not kept apart
    restarts: int = 0  # documents that start after position 0; kept apart, each is one target less
    squared_lengths: int = 0  # summed over documents in blocks: the cost of attention within documents
    truncated_documents: int = 0  # longer than a block, cut at its end
    truncated_tokens: int = 0  # cut off from these documents
    truncated_trained_tokens: int = 0  # those of them that would have carried loss
    dropped_documents: int = 0  # documents without a trained token
    dropped_tokens: int = 0  # the last, partial block of packed text
    long_documents: int = 0  # left out because they are longer than a block
    long_tokens: int = 0
    long_trained_tokens: int = 0


@dataclass
class LongRowLog:
    """The rows of a split that are longer than a block: the first of them, and the tokens of the longest."""

    first: list[str] = field(default_factory=list)  # "file:line: 812 tokens"
    longest: int = 0

    def add(self, origin: str, length: int) -> None:
        if len(self.first) < FIRST_LONG_ROWS:
            self.first.append(f"{origin}: {length} tokens")
        self.longest = max(self.longest, length)


def join_long_rows(logs: Iterable[LongRowLog]) -> LongRowLog:
    """Return one log of the rows in `logs`, which has at least one."""
    found = list(logs)
    first = [text for log in found for text in log.first]
    return LongRowLog(first[:FIRST_LONG_ROWS], max(log.longest for log in found))


def refuse_long(cfg: DataConfig, log: LongRowLog, count: int, seq_len: int) -> None:
    """Raise ConfigError for the `count` rows of `log`, longer than `seq_len`, where data.long_rows is refuse."""
    if log.first and cfg.long_rows is LongRows.refuse:
        listed = "\n".join(f"  {row}" for row in log.first)
        raise ConfigError(
            f"data.long_rows=refuse, and {count} rows are longer than train.seq_len={seq_len}:\n{listed}\n"
            f"All fit with train.seq_len={log.longest}. Or set data.long_rows=cut or drop, which count and show what "
            "is lost"
        )


class BlockWriter:
    """Appends tokens to the files of one split, or to memory. Base of the writers for text and for rows."""

    def __init__(self, folder: Path | None, name: str, parts: tuple[str, ...], *, seq_len: int) -> None:
        """Write to `folder`, or with None to memory for `in_memory`."""
        self._files: dict[str, BinaryIO] = {
            part: io.BytesIO() if folder is None else (folder / f"{name}.{part}.bin").open("wb")
            for part in parts
        }
        self.seq_len = seq_len
        self.counts, self.long_rows = BlockCounts(), LongRowLog()
        self.added = 0  # tokens so far, including those that do not fill a block yet

    def begin(self) -> None:
        """Mark the next token as the first of a document."""

    def add(
        self, ids: np.ndarray, trained: np.ndarray | None = None, *, ends: bool = True, origin: str = ""
    ) -> None:
        """Add tokens: `ids` int32 [length], `trained` bool [length] or None for all.

        With `ends` the tokens complete a document, which is then counted. `origin` names the document.
        """
        raise NotImplementedError

    def add_all(self, examples: Sequence[Example], ends: bool, origin: str) -> None:
        """Add the examples of one document or of a piece of it. `ends` says whether the document ends here."""
        for place, example in enumerate(examples, 1):
            self.add(example.ids, example.trained, ends=ends and place == len(examples), origin=origin)
            self.counts.turns_left_out += example.turns_left_out
        self.counts.rows_more += max(0, len(examples) - 1)

    def flush(self) -> None:
        """Write whole blocks; keep the rest for the next flush."""
        raise NotImplementedError

    def finish(self) -> None:
        """Write the rest."""
        raise NotImplementedError

    def close(self) -> BlockCounts:
        """Write, sync and close the files; return the counts."""
        self.finish()
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        return self.counts

    def in_memory(self) -> Blocks:
        """Return the blocks written to memory. Nothing can be added afterwards."""
        self.finish()

        def part(name: str, dtype: type) -> np.ndarray | None:
            file = self._files.get(name)
            return None if file is None else np.frombuffer(cast(io.BytesIO, file).getvalue(), dtype=dtype)

        return Blocks._of_parts(part, self.seq_len)

    def abandon(self) -> None:
        for file in self._files.values():
            file.close()

    def _write_starts(self, starts: np.ndarray) -> None:
        """Write the starts of documents, bool [blocks, seq_len], and count those after position 0."""
        restarts = starts[:, 1:].sum(axis=1, dtype=np.int32)
        self._files["starts"].write(np.packbits(starts, axis=1).tobytes())
        self._files["restarts"].write(restarts.tobytes())
        self.counts.restarts += int(restarts.sum())


class TextWriter(BlockWriter):
    """Writes plain text: documents follow one another, and a block ends when it is full."""

    def __init__(self, folder: Path | None, name: str, *, seq_len: int) -> None:
        super().__init__(folder, name, ("tokens", "starts", "restarts"), seq_len=seq_len)
        self._waiting: list[np.ndarray] = []
        self._waiting_starts: list[np.ndarray] = []
        self._starts_next = False  # a document began and has no token yet

    def begin(self) -> None:
        self._starts_next = True

    def add(
        self, ids: np.ndarray, trained: np.ndarray | None = None, *, ends: bool = True, origin: str = ""
    ) -> None:
        starts = np.zeros(len(ids), dtype=bool)
        starts[:1] = self._starts_next
        self._starts_next &= not len(ids)
        self.counts.documents += ends
        self.add_packed(ids, starts)

    def add_packed(self, ids: np.ndarray, starts: np.ndarray) -> None:
        """Add tokens of several documents, int32 [length]; `starts` bool [length] marks the first token of each."""
        self.added += len(ids)
        self._waiting.append(ids)
        self._waiting_starts.append(starts)

    def flush(self) -> None:
        waiting = np.concatenate([np.empty(0, dtype=np.int32), *self._waiting])
        waiting_starts = np.concatenate([np.empty(0, dtype=bool), *self._waiting_starts])
        blocks = len(waiting) // self.seq_len
        used = blocks * self.seq_len
        starts = waiting_starts[:used].reshape(blocks, self.seq_len)
        self._files["tokens"].write(waiting[:used].tobytes())
        self._write_starts(starts)
        self._waiting, self._waiting_starts = [waiting[used:]], [waiting_starts[used:]]
        self.counts.blocks += blocks
        self.counts.tokens += used
        self.counts.trained_tokens += blocks * (self.seq_len - 1)
        self.counts.squared_lengths += _squared_lengths(starts)

    def finish(self) -> None:
        self.flush()
        self.counts.dropped_tokens = len(self._waiting[0])


class RowWriter(BlockWriter):
    """Writes instruction data: rows are never divided between blocks.

    With `packed` a block holds as many rows as fit (`best_fit`), otherwise one. Rows are packed within windows of
    WINDOW_TOKENS, so that memory does not grow with the data. A row longer than a block is cut, or with `drop_long`
    left out.
    """

    def __init__(
        self,
        folder: Path | None,
        name: str,
        *,
        seq_len: int,
        packed: bool,
        pad_id: int,
        drop_long: bool = False,
    ) -> None:
        parts = ("tokens", "trained", "trained_tokens", "lengths")
        super().__init__(folder, name, (*parts, "starts", "restarts") if packed else parts, seq_len=seq_len)
        self._packed, self._pad_id, self._drop_long = packed, pad_id, drop_long
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []
        self._waiting_tokens = 0

    def add(
        self, ids: np.ndarray, trained: np.ndarray | None = None, *, ends: bool = True, origin: str = ""
    ) -> None:
        trained = np.ones(len(ids), dtype=bool) if trained is None else trained
        counts = self.counts
        counts.documents += ends
        lost = len(ids) - self.seq_len
        if lost > 0:
            self.long_rows.add(origin, len(ids))
            if self._drop_long:
                counts.long_documents += 1
                counts.long_tokens += len(ids)
                counts.long_trained_tokens += int(trained[1:].sum())
                return
            counts.truncated_documents += 1
            counts.truncated_tokens += lost
            counts.truncated_trained_tokens += int(trained[self.seq_len :].sum())
            ids, trained = ids[: self.seq_len], trained[: self.seq_len]
        if not trained[1:].any():
            counts.dropped_documents += 1
            return
        self._waiting.append((ids, trained))
        self._waiting_tokens += len(ids)
        self.added += len(ids)

    def flush(self) -> None:
        if not self._packed or self._waiting_tokens >= max(WINDOW_TOKENS, WINDOW_BLOCKS * self.seq_len):
            self.finish()

    def finish(self) -> None:
        rows, self._waiting, self._waiting_tokens = self._waiting, [], 0
        lengths = np.array([len(ids) for ids, _ in rows], dtype=np.int64)
        chosen = best_fit(lengths, self.seq_len) if self._packed else [[index] for index in range(len(rows))]
        for block in chosen:
            self._write([rows[index] for index in block])
        self.counts.squared_lengths += int((lengths**2).sum())

    def _write(self, rows: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """Write a block of these rows, one after another, with padding. The first token of a row is no target."""
        tokens = np.full(self.seq_len, self._pad_id, dtype=np.int32)
        trained, starts = np.zeros(self.seq_len, dtype=bool), np.zeros(self.seq_len, dtype=bool)
        used = 0
        for ids, targets in rows:
            end = used + len(ids)
            tokens[used:end], trained[used:end] = ids, targets
            trained[used], starts[used] = trained[used] and not self._packed, True
            used = end
        trained_tokens = int(trained[1:].sum())
        self._files["tokens"].write(tokens.tobytes())
        self._files["trained"].write(trained.tobytes())
        self._files["trained_tokens"].write(np.int32(trained_tokens).tobytes())
        self._files["lengths"].write(np.int32(used).tobytes())
        if self._packed:
            self._write_starts(starts[None])
        self.counts.blocks += 1
        self.counts.tokens += used
        self.counts.trained_tokens += trained_tokens


def open_writer(
    cfg: DataConfig, folder: Path | None, name: str, *, seq_len: int, pad_id: int | None
) -> BlockWriter:
    """Return the writer of one split for data of `cfg`. `pad_id` is the tokenizer's padding token, if it has one."""
    if not cfg.has_rows:
        return TextWriter(folder, name, seq_len=seq_len)
    return RowWriter(
        folder,
        name,
        seq_len=seq_len,
        packed=cfg.packing is Packing.documents,
        pad_id=pad_id or 0,
        drop_long=cfg.long_rows is LongRows.drop,
    )


def _squared_lengths(starts: np.ndarray) -> int:
    """Sum the squared lengths of the documents in each block; `starts` bool [blocks, seq_len]."""
    blocks, seq_len = starts.shape
    first = starts.copy()
    first[:, :1] = True
    bounds = np.append(np.flatnonzero(first), blocks * seq_len)
    return int((np.diff(bounds).astype(np.int64) ** 2).sum())


def divide(folder: Path, name: str, writers: dict[bool, BlockWriter], held_out: np.ndarray) -> None:
    """Copy the blocks of split `name` to the writers of the two halves, chosen by `held_out` bool [blocks].

    Blocks of instruction data hold one row each, which the writer counts as a document. A block of text is no document.
    """
    blocks = Blocks.open(folder, name, writers[True].seq_len)
    for index in range(len(blocks)):
        row, length = np.array([index]), blocks.lengths[index]
        writer = writers[bool(held_out[index])]
        tokens = blocks.tokens(row)[0, :length]
        if isinstance(writer, TextWriter):
            writer.add_packed(tokens, blocks.starts(row)[0])
        else:
            writer.add(tokens, blocks.trained(row)[0, :length])
        writer.flush()
