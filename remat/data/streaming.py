"""Stream data: read, tokenise and pack it during training, without a cache and without disk space for it.

Every rank reads all data, so the order is the same for any number of ranks. The data is divided into windows of
WINDOW_TOKENS, each packed and shuffled by itself. So the place where a window begins determines its blocks, and is all
that a saved state needs to resume at any step.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from remat.config.options import ConfigError, DataConfig, Packing
from remat.config.redact import redact
from remat.data.batches import GlobalBatches, StepBatch
from remat.data.blocks import (
    BlockCounts,
    Blocks,
    BlockWriter,
    LongRowLog,
    epoch_order,
    join_long_rows,
    open_writer,
    refuse_long,
)
from remat.data.build import CACHE_VERSION, report_source, tokenizer_identity
from remat.data.files import Sketches
from remat.data.formats import encode, what_is_read
from remat.data.held_out import characters_of
from remat.data.mixture import Joined
from remat.data.rows import BadRowLog, Document
from remat.data.sources import Corpus, open_corpus, refuse_trained

WINDOW_TOKENS, WINDOW_BLOCKS = 1024**2, 64  # at least both: larger windows are packed and shuffled better
BATCH_CHARACTERS, BATCH_DOCUMENTS = 256 * 1024, 256


@dataclass(frozen=True)
class Place:
    """Where a window begins.

    `epoch` counts complete passes over the data. `part` and `document` are the place in this pass. `tokens` of the
    document are in earlier blocks. `block` and `window` count blocks and windows since the start of training, and
    `lost` the rows since then that were cut, left out as too long, dropped, or unusable.
    """

    epoch: int = 0
    part: int = 0
    document: int = 0
    tokens: int = 0
    block: int = 0
    window: int = 0
    lost: dict[str, int] = field(default_factory=dict)


class _Read(NamedTuple):
    """A document, its place, and how many unusable rows were read before it."""

    place: Place
    document: Document
    bad_rows: int = 0


class _Reading(NamedTuple):
    """Documents from `place` on, and the log of unusable rows among them; windows before have counted `counted`."""

    place: Place
    documents: Iterator[_Read]
    bad_rows: BadRowLog
    counted: int


class Window(NamedTuple):
    """Blocks packed together, their order int64 [blocks], the place after them, and counts of rows and tokens."""

    blocks: Blocks
    order: np.ndarray
    following: Place
    counts: BlockCounts
    long_rows: LongRowLog


class HeldOut(NamedTuple):
    """Held-out blocks, counts of their rows and tokens, and the log of rows that were too long."""

    blocks: Blocks
    counts: BlockCounts
    long_rows: LongRowLog


class Stream:
    """The windows of a corpus, by their place. Training begins at `first`; documents before it are held out."""

    def __init__(
        self, cfg: DataConfig, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, seq_len: int, seed: int
    ) -> None:
        self.cfg, self.seed, self.first = cfg, seed, Place()
        self._corpus, self._tokenizer, self._seq_len = corpus, tokenizer, seq_len
        self._reading: _Reading | None = None

    def held_out(self, rows: int, tokens: int) -> HeldOut:
        """Return the first documents as blocks, at most `rows` and about `tokens` (0: no limit). Moves `first`.

        Raises ConfigError for data that cannot be used, and where none is left to train on.
        """
        writer, bad_rows, count = self._writer(), BadRowLog(self.cfg.on_bad_row), 0
        after = None
        for read in self._documents(self.first, bad_rows):
            if read.place.epoch:
                break
            if count == rows or (tokens and writer.added >= tokens):
                after = read.place
                break
            self._add_batch(writer, [_Read(Place(), replace(read.document, ends=True))], [], bad_rows)
            count += 1
        if after is None:
            raise ConfigError(
                f"data.eval_rows={rows}: data.path={redact(self.cfg.path)} has {count} rows, which leaves none to "
                "train on: lower data.eval_rows or data.eval_tokens, name data.eval_path, or set data.eval_fraction=0"
            )
        self.first = after
        return HeldOut(self._finished(writer, bad_rows), writer.counts, writer.long_rows)

    def everything(self, tokens: int) -> HeldOut:
        """Return all documents of held-out data as blocks, or the first ones with about `tokens` (0: no limit).

        Raises ConfigError for data that cannot be used.
        """
        writer, bad_rows = self._writer(), BadRowLog(self.cfg.on_bad_row)
        for document in self._corpus.read(bad_rows):
            if tokens and writer.added >= tokens:
                break
            if document.content:
                self._add_batch(writer, [_Read(Place(), document)], [], bad_rows)
        return HeldOut(self._finished(writer, bad_rows), writer.counts, writer.long_rows)

    def window(self, place: Place) -> Window:
        """Return the window that begins at `place`. Raises ConfigError for data that cannot be used."""
        writer, least = self._writer(), max(WINDOW_TOKENS, WINDOW_BLOCKS * self._seq_len)
        _, documents, bad_rows, counted = self._going_on(place)
        begun: list[tuple[_Read, int]] = []  # for plain text: each document, and the tokens before it
        batch: list[_Read] = []
        characters = 0
        for read in documents:
            if read.place.epoch != place.epoch or writer.added >= least:
                break
            batch.append(read)
            characters += characters_of(read.document)
            if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
                self._add_batch(writer, batch, begun, bad_rows)
                batch, characters = [], 0
        self._add_batch(writer, batch, begun, bad_rows)
        blocks, counts, again = self._finished(writer, bad_rows), writer.counts, [read]
        following, bad = read.place, bad_rows.count
        # tokens that do not fill a block: the next window begins with them
        if counts.dropped_tokens and following.epoch == place.epoch:
            left = writer.added - counts.dropped_tokens
            index = max(index for index, (_, before) in enumerate(begun) if before <= left)
            here, before = begun[index]
            following, bad = replace(here.place, tokens=here.place.tokens + left - before), here.bad_rows
            again = [here._replace(place=following), *(each for each, _ in begun[index + 1 :]), *again]
            counts.dropped_tokens = 0
        lost = dict(place.lost)
        for name, count in {
            "rows_cut": counts.truncated_documents,
            "rows_left_out": counts.long_documents,
            "rows_dropped": counts.dropped_documents,
            "bad_rows": bad - counted,
        }.items():
            lost |= {name: lost.get(name, 0) + count} if count else {}
        following = replace(following, block=place.block + len(blocks), window=place.window + 1, lost=lost)
        self._reading = _Reading(following, chain(again, documents), bad_rows, bad)
        order = epoch_order(len(blocks), self.seed, place.window, self.cfg.shuffle)
        return Window(blocks, order, following, counts, writer.long_rows)

    def _writer(self) -> BlockWriter:
        return open_writer(self.cfg, None, "", seq_len=self._seq_len, pad_id=self._tokenizer.pad_token_id)

    def _finished(self, writer: BlockWriter, bad_rows: BadRowLog) -> Blocks:
        """Return the blocks of `writer`. Raises ConfigError for rows that data.on_bad_row or data.long_rows refuses."""
        bad_rows.check()
        refuse_long(self.cfg, writer.long_rows, writer.counts.truncated_documents, self._seq_len)
        blocks = writer.in_memory()
        return blocks.documents_apart() if self.cfg.packing is Packing.documents else blocks

    def _going_on(self, place: Place) -> _Reading:
        """Return the documents from `place` on. If the last window ended there, its reading continues."""
        reading, self._reading = self._reading, None
        if reading is not None and reading.place == place:
            return reading
        bad_rows = BadRowLog(self.cfg.on_bad_row)
        documents = self._documents(place, bad_rows)
        first = next(documents)
        counted = first.bad_rows if place.window else 0  # by earlier windows
        return _Reading(place, chain([first], documents), bad_rows, counted)

    def _documents(self, place: Place, bad_rows: BadRowLog) -> Iterator[_Read]:
        """Yield the documents from `place` on with their places, epoch after epoch, without held-out ones."""
        epoch, begin = place.epoch, place
        while True:
            tokens, found = begin.tokens, False
            for part in range(begin.part, len(self._corpus.parts)):
                skipped = begin.document if part == begin.part else 0
                for number, document in islice(enumerate(self._corpus.parts[part](bad_rows)), skipped, None):
                    if document.content:
                        found = True
                        yield _Read(Place(epoch, part, number, tokens), document, bad_rows.count)
                        tokens = 0
            if not found and epoch > place.epoch:
                raise ConfigError(f"data.path={redact(self.cfg.path)} has no row to train on: give more data")
            epoch, begin = epoch + 1, self.first

    def _add_batch(
        self,
        writer: BlockWriter,
        batch: list[_Read],
        begun: list[tuple[_Read, int]],
        bad_rows: BadRowLog,
    ) -> None:
        encoded = encode([read.document for read in batch], self.cfg, self._tokenizer, bad_rows)
        for read, examples in zip(batch, encoded, strict=True):
            document, tokens = read.document, read.place.tokens
            if not self.cfg.has_rows:
                begun.append((read, writer.added))
            if tokens:  # plain text whose first tokens are in the window before
                examples = [example._replace(ids=example.ids[tokens:]) for example in examples]
            elif document.starts:
                writer.begin()
            writer.add_all(examples, document.ends, document.origin)


class FirstWindow(Joined):
    """The blocks of a stream's first window. Before the stream is read, figures are estimated from them."""

    def __init__(self, stream: Stream, window: Window) -> None:
        super().__init__([window.blocks])
        self.stream, self.window = stream, window

    @property
    def epoch_length(self) -> int:
        """Return 0, because the number of blocks in an epoch is unknown."""
        return 0


class StreamedBatches(GlobalBatches):
    """The steps of a stream. As with a cache, the position counts blocks since the start of training."""

    def __init__(
        self, blocks: FirstWindow, *, position: int = 0, place: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Continue at `position`, in the window that began at `place`. Both are from an earlier `state()`."""
        super().__init__(blocks, position=position, **options)
        self._stream = blocks.stream
        self._places, self._windows = [self._stream.first, blocks.window.following], {0: blocks.window}
        if place is not None:
            self._places, self._windows = [Place(**place)], {}

    def read(self, position: int) -> StepBatch:
        at = self._place_of(position)
        epoch, used = self._places[at].epoch, list[tuple[Blocks, np.ndarray, int]]()
        missing, first = self._global_batch_size, at
        while missing:
            window = self._window(at)
            begin = max(0, position - self._places[at].block)
            taken = window.order[begin : begin + missing]
            if len(taken):
                used.append((window.blocks, taken, self._places[at].block))
            missing -= len(taken)
            at += 1
        self._windows = {index: window for index, window in self._windows.items() if index >= first}
        joined = Joined([blocks for blocks, _, _ in used])
        starts = np.cumsum([0, *(len(blocks) for blocks, _, _ in used)])
        ids = np.concatenate([start + own for start, (_, own, _) in zip(starts, used, strict=False)])
        sample_ids = np.concatenate([block + own for _, own, block in used])
        if joined.one_each:
            longest_first = np.argsort(-joined.lengths[ids], kind="stable")
            ids, sample_ids = ids[longest_first], sample_ids[longest_first]
        return self._step(joined, ids, sample_ids, epoch)

    def padding_share(self) -> float:
        """Return the share of padding in the first window's whole micro-batches."""
        blocks = self._blocks
        whole = len(blocks) // self._micro_batch_size * self._micro_batch_size
        ids = np.arange(whole) if whole else np.zeros(self._micro_batch_size, dtype=np.int64)
        if blocks.one_each:
            ids = ids[np.argsort(-blocks.lengths[ids], kind="stable")]
        positions = int(blocks.widths(ids.reshape(-1, self._micro_batch_size)).sum()) * self._micro_batch_size
        return 1 - int(blocks.lengths[ids].sum(dtype=np.int64)) / positions

    def state(self) -> dict[str, Any]:
        """Return the stream's state for a saved state: the position, and the place where its window begins."""
        place = self._places[self._place_of(self.position)]
        return {
            "epoch": place.epoch,
            "index": self.position - place.block,
            "position": self.position,
            "place": asdict(place),
            "num_blocks": 0,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "documents_apart": self._blocks.apart,
        }

    def lost(self) -> dict[str, int]:
        return self._places[self._place_of(self.position)].lost

    def _place_of(self, position: int) -> int:
        return bisect_right([place.block for place in self._places], position) - 1

    def _window(self, index: int) -> Window:
        if index not in self._windows:
            self._windows[index] = self._stream.window(self._places[index])
            if index + 1 == len(self._places):
                self._places.append(self._windows[index].following)
        return self._windows[index]


def open_stream(
    cfg: DataConfig, *, tokenizer: PreTrainedTokenizerBase, seq_len: int, seed: int
) -> tuple[FirstWindow, Blocks | None, dict[str, Any]]:
    """Return the first window, the held-out blocks if any, and a report like a cache's, of that window.

    Raises ConfigError when there is no data, or none is left to train on.
    """
    sketches = Sketches()
    corpus = open_corpus(cfg, cfg.path, hashes=sketches)
    cfg = replace(cfg, format=corpus.data_format)
    identity: dict[str, Any] = {
        "version": CACHE_VERSION,
        "streaming": [WINDOW_TOKENS, WINDOW_BLOCKS, BATCH_CHARACTERS, BATCH_DOCUMENTS],
        "source": [corpus.kind, str(cfg.format)],
        "content": corpus.identity(),
        "seq_len": seq_len,
        "rows": [str(cfg.packing), str(cfg.long_rows)] if cfg.has_rows else [],
        "held_out": [cfg.eval_rows, cfg.eval_tokens, cfg.eval_fraction > 0],
        "tokenizer": tokenizer_identity(tokenizer),
    } | what_is_read(cfg, tokenizer)
    stream = Stream(cfg, corpus, tokenizer, seq_len, seed)
    held: HeldOut | None = None
    if cfg.eval_path:
        other = open_corpus(cfg, cfg.eval_path, "data.eval_path", sketches)
        refuse_trained(cfg, corpus, other)
        identity["eval_path"] = other.identity()
        held = Stream(cfg, other, tokenizer, seq_len, seed).everything(cfg.eval_tokens)
    elif not cfg.holds_nothing_out():
        held = stream.held_out(cfg.eval_rows, cfg.eval_tokens)
    window = stream.window(stream.first)
    if not len(window.blocks) or (held is not None and not len(held.blocks)):
        option = "data.eval_rows, data.eval_tokens or data.eval_path" if len(window.blocks) else "data.path"
        raise ConfigError(
            f"{option} leaves no block of train.seq_len={seq_len} tokens: give more data or a smaller train.seq_len"
        )
    report = report_source(corpus, cfg, tokenizer, seq_len) | {
        "train": asdict(window.counts),
        "held_out": held and asdict(held.counts),
        "held_out_by": held and ("data.eval_path" if cfg.eval_path else "data.eval_rows"),
        "empty_documents": 0,
        "long_rows": asdict(join_long_rows([window.long_rows, *([held.long_rows] if held else [])])),
        "bad_rows": {"count": window.following.lost.get("bad_rows", 0), "first": []},
        "folder": "",
        "key": hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest(),
        "streamed": True,
    }
    return FirstWindow(stream, window), held and held.blocks, report
