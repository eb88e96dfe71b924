"""Plan and write a cache of blocks: its sources, the key that names it, and its files.

Batches of documents are encoded on all cores. The result of a batch depends only on its documents, so the number of
processes and their order do not change the cache. The result of one batch is a shard, which stays on disk until the
cache is complete. After a killed build, the next build checks each shard by its digest and encodes only what is
missing.
"""

from __future__ import annotations

import gc
import hashlib
import io
import json
import os
import shutil
import signal
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain, pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from transformers import PreTrainedTokenizerBase

from remat.config.options import BadRows, ConfigError, DataConfig, DataFormat, DataSource, LongRows, Packing
from remat.config.redact import redact
from remat.config.units import MIB, format_size
from remat.data.blocks import BlockCounts, BlockWriter, LongRowLog, divide, join_long_rows, open_writer
from remat.data.files import Hashes
from remat.data.formats import Example, describe, encode, what_is_read
from remat.data.held_out import Chooser, bound, characters_of, choose, never, rule
from remat.data.rows import BadRowLog, Document
from remat.data.sources import Corpus, open_corpus, refuse_options, refuse_trained, synthetic_blocks
from remat.machine.start_up import available_cores

CACHE_VERSION = 5  # raise it when the same data and settings would give other blocks or another report
BATCH_CHARACTERS = 256 * 1024  # a tokenizer needs about 100 bytes per token while it works, in each process
BATCH_DOCUMENTS = 4096
SYNTHETIC_BATCH = 256
SHARDED_FROM = 16 * MIB  # from so many bytes on, several processes encode: about 4 M tokens
SHARD_BYTES_PER_TOKEN = 4.2
TOLD_EVERY_S = 15.0
SAMPLE_CHARACTERS = 128 * 1024  # of the first documents, which are tokenised to estimate the tokens of all
SURE = 0.8  # share of the estimated bytes that must be free: other documents may be shorter
HALVES = ("train", "held_out")


class NoRoom(ConfigError):
    """Raised when the disk has no room for the cache."""


@dataclass(frozen=True)
class Plan:
    """A cache to be written. With `held_out` None, the share `cfg.eval_fraction` of `corpus` is held out.

    Rows are packed where `cfg.packing` is documents; otherwise each has its own block.
    """

    cfg: DataConfig
    tokenizer: PreTrainedTokenizerBase
    seq_len: int
    seed: int
    corpus: Corpus | None  # None: synthetic
    held_out: Corpus | None
    hashes: Hashes  # of the files of `corpus` and `held_out`
    key: str

    @property
    def evaluates(self) -> bool:
        return self.held_out is not None or self.cfg.eval_fraction > 0

    @property
    def divides(self) -> bool:
        """Return whether both halves come from `corpus`."""
        return self.corpus is not None and self.held_out is None and self.cfg.eval_fraction > 0


def make_plan(
    cfg: DataConfig, *, tokenizer: PreTrainedTokenizerBase, seq_len: int, seed: int, hashes: Hashes
) -> Plan:
    """Find the data, hash it and return the plan. Raises ConfigError for no data and for data that is also held out."""
    corpus = held_out = None
    settings: dict[str, Any] = {"version": CACHE_VERSION, "source": str(cfg.source), "seq_len": seq_len}
    if cfg.source == DataSource.synthetic:
        for path, option in ((cfg.path, "data.path"), (cfg.eval_path, "data.eval_path")):
            refuse_options(cfg, path, option)
        cfg = replace(cfg, format=DataFormat.plain)
        settings |= {"blocks": cfg.synthetic_blocks, "eval_fraction": cfg.eval_fraction, "seed": seed}
        settings["eval_tokens"] = cfg.eval_tokens
    else:
        corpus = open_corpus(cfg, cfg.path, hashes=hashes)
        cfg = replace(cfg, format=corpus.data_format)
        settings |= {"source": corpus.kind, "format": str(cfg.format), "content": corpus.identity()}
        settings |= what_is_read(cfg, tokenizer)
        if cfg.eval_path:
            held_out = open_corpus(cfg, cfg.eval_path, "data.eval_path", hashes)
            refuse_trained(cfg, corpus, held_out)
            settings["held_out"] = held_out.identity()
        elif cfg.eval_fraction > 0:
            settings["held_out"] = [f"fraction {cfg.eval_fraction} tokens {cfg.eval_tokens} seed {seed}"]
    if cfg.has_rows:
        settings["packed"] = cfg.packing is Packing.documents
        settings["drops_long_rows"] = cfg.long_rows is LongRows.drop
    settings["tokenizer"] = tokenizer_identity(tokenizer)
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return Plan(cfg, tokenizer, seq_len, seed, corpus, held_out, hashes, key)


@dataclass
class _Written:
    """Result of writing both halves.

    `held_out_by` is "data.eval_path", "documents" (for text: files or pieces) or "blocks". It is None when nothing is
    held out or the data is synthetic.
    """

    counts: dict[str, BlockCounts]
    empty_documents: int
    bad_rows: BadRowLog
    held_out_by: str | None
    long_rows: LongRowLog


def write_blocks(plan: Plan, folder: Path, shards: Path, *, show_progress: bool) -> None:
    """Write both halves and report.json into `folder` and sync them. Memory use does not grow with the data.

    Large data is encoded by several processes, whose results stay in `shards` for the next try. Raises ConfigError when
    the data has changed since the plan's key was computed, NoRoom when the disk has no room.
    """
    started = time.perf_counter()
    blocks_bytes, shards_bytes = _estimate(plan)
    sharded = shards_bytes >= SHARDED_FROM
    there = sum(shard.stat().st_size for shard in shards.glob("*.npz"))  # of a build that was stopped
    _check_room(plan, folder, blocks_bytes + max(0, shards_bytes - there) * sharded)
    written = _write_halves(plan, folder, show_progress, shards if sharded else None)
    if plan.divides and not all(half.blocks for half in written.counts.values()):
        written = _write_divided(plan, folder, show_progress, shards if sharded else None)
    plan.hashes.refuse_changed()
    counts = {name: asdict(half) for name, half in written.counts.items()}
    _check_not_empty(plan, counts, written.bad_rows)
    report = report_source(plan.corpus, plan.cfg, plan.tokenizer, plan.seq_len) | {
        "train": counts["train"],
        "held_out": counts.get("held_out"),
        "held_out_by": written.held_out_by,
        "empty_documents": written.empty_documents,
        "long_rows": asdict(written.long_rows),
        "bad_rows": {"count": written.bad_rows.count, "first": written.bad_rows.first},
        "build_s": round(time.perf_counter() - started, 3),
    }
    with (folder / "report.json").open("w") as file:
        json.dump(report, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def report_source(
    corpus: Corpus | None, cfg: DataConfig, tokenizer: PreTrainedTokenizerBase, seq_len: int
) -> dict[str, Any]:
    """Return the part of a report that tells the data and how its rows become blocks. `cfg` has the format found."""
    found = [corpus.found, describe(cfg, tokenizer)] if corpus else []
    return {
        "version": CACHE_VERSION,
        "source": str(cfg.source),
        "path": redact(cfg.path),
        "format": str(cfg.format),
        "packed": not cfg.has_rows or cfg.packing is Packing.documents,
        "found": "; ".join(part for part in found if part),
        "seq_len": seq_len,
    }


def _write_halves(plan: Plan, folder: Path, show_progress: bool, shards: Path | None) -> _Written:
    names = HALVES if plan.evaluates else HALVES[:1]
    held_out_by = "documents" if plan.divides else "data.eval_path" if plan.held_out else None
    bad_rows, empty = BadRowLog(plan.cfg.on_bad_row), 0
    is_held_out = Chooser(never)
    if plan.divides and plan.corpus is not None:
        sample = _sample(plan, plan.corpus)
        fraction, characters = bound(plan.cfg.eval_fraction, plan.cfg.eval_tokens, sample, plan.corpus.total)
        beforehand = plan.corpus.read(BadRowLog(plan.cfg.on_bad_row))
        chosen = rule(_advancing(beforehand, plan), seed=plan.seed, fraction=fraction)
        is_held_out = Chooser(chosen, characters)
    with _writers(plan, folder, {name: name for name in names}) as writers:
        if plan.corpus is None:
            _write_synthetic(plan, writers)
        else:
            empty = _write_documents(plan, plan.corpus, is_held_out, writers, bad_rows, show_progress, shards)
        counts = {name: writer.close() for name, writer in writers.items()}
        long_rows = join_long_rows(writer.long_rows for writer in writers.values())
        return _Written(counts, empty, bad_rows, held_out_by, long_rows)


def _sample(plan: Plan, corpus: Corpus) -> list[tuple[Document, int]]:
    """Return the first documents of `corpus` and their numbers of tokens, to estimate the tokens of all."""
    bad_rows = BadRowLog(plan.cfg.on_bad_row)  # a log of its own: these rows are read again later
    first: list[Document] = []
    characters = 0
    for document in _advancing(corpus.read(bad_rows), plan):
        if document.content:
            first.append(document)
            characters += characters_of(document)
        if characters >= SAMPLE_CHARACTERS:
            break
    examples = encode(first, plan.cfg, plan.tokenizer, bad_rows)
    return [(d, sum(len(one.ids) for one in each)) for d, each in zip(first, examples, strict=True)]


def _estimate(plan: Plan) -> tuple[float, float]:
    """Estimate the bytes of the blocks and of the shards on the disk, from the first documents."""
    blocks = shards = 0.0
    for corpus in filter(None, (plan.corpus, plan.held_out)):
        sample = _sample(plan, corpus)
        size = sum(document.size for document, _ in sample)
        if size:
            times = corpus.total / size
            blocks += times * sum(_bytes_of(plan, length) for _, length in sample)
            shards += times * SHARD_BYTES_PER_TOKEN * sum(length for _, length in sample)
    return blocks, shards


def _check_room(plan: Plan, folder: Path, needed: float) -> None:
    """Raise NoRoom when the disk of `folder` has far too little room."""
    free = shutil.disk_usage(folder).free
    if SURE * needed > free:
        raise NoRoom(
            f"data.cache_dir={plan.cfg.cache_dir} has {format_size(free)} free, and the blocks of "
            f"data.path={redact(plan.cfg.path)} need about {format_size(needed)} while they are written: free some, or "
            "name a cache folder on a disk with more room"
        )


def _bytes_of(plan: Plan, length: int) -> float:
    """Return the bytes on disk of a document of `length` tokens: int32 ids, flags of rows, bits of starts."""
    if not plan.cfg.has_rows:
        return 4.2 * length
    if plan.cfg.packing is Packing.documents:
        return 5.2 * min(length, plan.seq_len)
    return 5.0 * plan.seq_len


def _write_divided(plan: Plan, folder: Path, show_progress: bool, shards: Path | None) -> _Written:
    """Write the halves by holding out blocks, where documents are too few or too unequal to give both halves a block.

    Rows have a block each until then, so they are held out one by one. Cut and dropped documents count to training,
    because they were cut before the blocks were divided. Of `shards` those are encoded anew in which documents begin or
    end otherwise, because their text was in both halves.
    """
    assert plan.corpus is not None
    bad_rows = BadRowLog(plan.cfg.on_bad_row)
    unpacked = replace(plan, cfg=replace(plan.cfg, packing=Packing.none))
    with _writers(unpacked, folder, {"train": "whole"}) as writers:
        empty = _write_documents(plan, plan.corpus, Chooser(never), writers, bad_rows, show_progress, shards)
        whole = writers["train"].close()
        long_rows = writers["train"].long_rows
    with _writers(plan, folder, {name: name for name in HALVES}) as writers:
        names = [f"block {index}" for index in range(whole.blocks)]
        fraction = plan.cfg.eval_fraction
        if plan.cfg.eval_tokens and whole.tokens:
            fraction = min(fraction, plan.cfg.eval_tokens / whole.tokens)
        chosen = choose(dict.fromkeys(names, 1), seed=plan.seed, fraction=fraction)
        if whole.blocks:
            halves = {False: writers["train"], True: writers["held_out"]}
            divide(folder, "whole", halves, np.array([name in chosen for name in names]))
        train, held_out = (writers[name].close() for name in HALVES)
    for file in folder.glob("whole.*"):
        file.unlink()
    train = replace(
        whole,
        documents=whole.documents - held_out.documents,
        blocks=train.blocks,
        tokens=train.tokens,
        trained_tokens=train.trained_tokens,
        restarts=train.restarts,
        squared_lengths=train.squared_lengths,
    )
    return _Written({"train": train, "held_out": held_out}, empty, bad_rows, "blocks", long_rows)


@contextmanager
def _writers(plan: Plan, folder: Path, file_names: dict[str, str]) -> Iterator[dict[str, BlockWriter]]:
    """Yield a writer for each half, with the given file names. All are closed at the end, also after an error."""
    writers = {
        half: open_writer(plan.cfg, folder, name, seq_len=plan.seq_len, pad_id=plan.tokenizer.pad_token_id)
        for half, name in file_names.items()
    }
    try:
        yield writers
    finally:
        for writer in writers.values():
            writer.abandon()


def _write_documents(
    plan: Plan,
    corpus: Corpus,
    is_held_out: Chooser,
    writers: dict[str, BlockWriter],
    bad_rows: BadRowLog,
    show_progress: bool,
    shards: Path | None,
) -> int:
    """Encode and write all documents; return how many were empty. With `shards` several processes encode."""
    empty = 0
    total = corpus.total + (plan.held_out.total if plan.held_out else 0)
    with _Progress(total, in_bytes=corpus.kind != "hub", shown=show_progress) as progress:
        batches = _batches(chain(_from_corpus(corpus, is_held_out, bad_rows), _from_held_out(plan, bad_rows)))
        for batch, found in (
            _encoded(batches, plan, bad_rows)
            if shards is None
            else _encoded_by_processes(batches, plan, shards, bad_rows)
        ):
            empty += sum(not document.content for _, document in batch)
            examples = iter(found)
            for half, document in batch:
                if document.starts:  # also for an empty piece: the next piece must not join the document before
                    writers[half].begin()
                ends = document.ends and not document.goes_on
                writers[half].add_all(next(examples) if document.content else [], ends, document.origin)
            for writer in writers.values():
                writer.flush()
            plan.hashes.advance()
            progress.advance(sum(document.size for _, document in batch))
        bad_rows.check()
    return empty


def _encoded(
    batches: Iterator[Batch], plan: Plan, bad_rows: BadRowLog
) -> Iterator[tuple[Batch, list[list[Example]]]]:
    """Yield each batch with the examples of its documents that are not empty, encoded in this process."""
    for batch in batches:
        yield batch, encode(_without_empty(batch), plan.cfg, plan.tokenizer, bad_rows)


class _Progress:
    """A bar with rate and time left on a terminal; elsewhere a line every TOLD_EVERY_S."""

    def __init__(self, total: int, *, in_bytes: bool, shown: bool) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._shown, self._total, self._in_bytes = shown, total, in_bytes
        rate = TransferSpeedColumn() if in_bytes else TextColumn("{task.completed:,.0f} rows")
        left = (TextColumn("left:"), TimeRemainingColumn())
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), rate, *left)
        self._bar = Progress(*columns, console=self._console, disable=not (shown and self._console.is_terminal))
        self._task = self._bar.add_task("tokenising", total=total)
        self._started = self._told = time.monotonic()
        self._done = 0

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._bar.update(self._task, completed=self._total)
        self._bar.stop()

    def advance(self, count: int) -> None:
        self._done += count
        self._bar.advance(self._task, count)
        now = time.monotonic()
        if self._shown and not self._console.is_terminal and now - self._told >= TOLD_EVERY_S and self._done:
            self._told, rate = now, self._done / (now - self._started)
            speed = f"{format_size(rate)}/s" if self._in_bytes else f"{rate:,.0f} rows/s"
            left = (self._total - self._done) / rate
            self._console.print(f"tokenising: {self._done / self._total:.0%}, {speed}, {left:,.0f} s left")


def _advancing(documents: Iterator[Document], plan: Plan) -> Iterator[Document]:
    for document in documents:
        plan.hashes.advance()
        yield document


def _from_corpus(corpus: Corpus, is_held_out: Chooser, bad_rows: BadRowLog) -> Iterator[tuple[str, Document]]:
    """Yield each document with its half. Where a file continues in the other half, a new document starts."""
    chosen = ((HALVES[is_held_out(d)], d) for d in corpus.read(bad_rows))
    half_before = None
    for (half, document), following in pairwise(chain(chosen, [(None, None)])):
        assert document is not None and half is not None
        yield (
            half,
            replace(
                document,
                starts=document.starts or half != half_before,
                ends=document.ends or half != following[0],
                goes_on=not document.ends and half != following[0],
            ),
        )
        half_before = half


def _from_held_out(plan: Plan, bad_rows: BadRowLog) -> Iterator[tuple[str, Document]]:
    if plan.held_out:
        yield from (("held_out", document) for document in plan.held_out.read(bad_rows))


def _batches(items: Iterator[tuple[str, Document]]) -> Iterator[Batch]:
    batch: Batch = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += characters_of(item[1])
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _write_synthetic(plan: Plan, writers: dict[str, BlockWriter]) -> None:
    """Write `data.synthetic_blocks` blocks for training, and further blocks to hold out as data.eval_* say."""
    held_out = max(1, round(plan.cfg.eval_fraction * plan.cfg.synthetic_blocks))
    if plan.cfg.eval_tokens:
        held_out = min(held_out, max(1, plan.cfg.eval_tokens // plan.seq_len))
    start = 0
    for name, writer in writers.items():
        end = start + (plan.cfg.synthetic_blocks if name == "train" else held_out)
        while start < end:
            count = min(SYNTHETIC_BATCH, end - start)
            blocks = synthetic_blocks(
                start, count, tokenizer=plan.tokenizer, seq_len=plan.seq_len, seed=plan.seed
            )
            for block in blocks:
                writer.begin()
                writer.add(block)
            writer.flush()
            plan.hashes.advance()
            start += count


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    ids = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    identity: dict[str, Any] = {"ids": ids, "chat_template": tokenizer.chat_template}
    if tokenizer.is_fast:
        serialized = json.loads(tokenizer.backend_tokenizer.to_str())
        # Truncation and padding are left over from the last call and no property of the tokenizer.
        return identity | {"json": {k: v for k, v in serialized.items() if k not in ("truncation", "padding")}}
    return identity | {"class": type(tokenizer).__name__, "vocab": sorted(tokenizer.get_vocab().items())}


def _check_not_empty(plan: Plan, counts: dict[str, dict[str, int]], bad_rows: BadRowLog) -> None:
    empty = [name for name in counts if not counts[name]["blocks"]]
    if not empty:
        return
    found = counts[empty[0]]
    too_long = f"{found['long_documents']} longer than a block, " * bool(found["long_documents"])
    option, remedy = f"data.path={plan.cfg.path}", "give more data or a smaller train.seq_len"
    if plan.cfg.format != DataFormat.plain:  # a block may end before the answer
        remedy = "give more examples, or a larger train.seq_len that does not cut answers off"
    if empty == ["held_out"] and plan.held_out:
        option, purpose = f"data.eval_path={plan.cfg.eval_path}", "evaluation"
    elif empty == ["held_out"]:  # there is one block, which went to training
        found, purpose = counts["train"], "evaluation beside the one for training"
        remedy += ", set data.eval_fraction=0 to hold nothing out, or name data.eval_path"
    else:
        purpose = "training"
    raise ConfigError(
        f"{option} leaves no block of train.seq_len={plan.seq_len} tokens for {purpose}: "
        f"{found['documents']} documents, {found['dropped_tokens']} tokens too few for a block, "
        f"{too_long}{found['dropped_documents']} with nothing to train on, {bad_rows.count} bad rows skipped. "
        f"To change that, {remedy}"
    )


DIGEST_BYTES = 32
LOOK_FOR_PARENT_S = 1.0
AHEAD = 2  # batches read per process before the first result is written
_work: tuple[DataConfig, PreTrainedTokenizerBase, Path]  # set in each process of the pool
Batch = list[tuple[str, Document]]  # (half, document)


def _encoded_by_processes(
    batches: Iterator[Batch], plan: Plan, folder: Path, bad_rows: BadRowLog
) -> Iterator[tuple[Batch, list[list[Example]]]]:
    """Yield as `_encoded` does, in the order of the batches. Several processes encode, and keep shards in `folder`.

    Rows that a template refuses go to `bad_rows`. Raises what `encode` raises.
    """
    folder.mkdir(parents=True, exist_ok=True)
    count = plan.cfg.processes or available_cores()
    waiting: deque[tuple[int, Batch, Future[None] | None]] = deque()
    arguments = (plan.cfg, plan.tokenizer, folder, os.getpid())
    # Forked: a spawned process would import torch and transformers again.
    pool = ProcessPoolExecutor(count, get_context("fork"), _begin_worker, arguments)
    try:
        for index, batch in enumerate(batches):
            future = None
            if _read_shard(folder, index, batch) is None:
                future = pool.submit(_encode_batch, index, _without_empty(batch))
            waiting.append((index, batch, future))
            if len(waiting) > AHEAD * count:
                yield _finished_shards(folder, *waiting.popleft(), bad_rows)
        while waiting:
            yield _finished_shards(folder, *waiting.popleft(), bad_rows)
    finally:
        pool.shutdown(cancel_futures=True)


def _without_empty(batch: Batch) -> list[Document]:
    return [document for _, document in batch if document.content]


def _finished_shards(
    folder: Path, index: int, batch: Batch, future: Future[None] | None, bad_rows: BadRowLog
) -> tuple[Batch, list[list[Example]]]:
    if future is not None:
        future.result()
    found = _read_shard(folder, index, batch)
    if found is None:
        raise OSError(f"{_shard_path(folder, index)} is damaged or gone directly after it was written")
    examples, refused = found
    for origin, reason in refused:
        bad_rows.bad(origin, reason)
    return batch, examples


def _begin_worker(cfg: DataConfig, tokenizer: PreTrainedTokenizerBase, folder: Path, parent: int) -> None:
    """Initialise a process of the pool: it uses one core and ends when its parent ends."""
    global _work
    _work = (cfg, tokenizer, folder)
    gc.freeze()  # a collection would touch all objects of the parent, and so copy their memory
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_FOR_PARENT_S)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


class _Refused(BadRowLog):
    """Collects every row that a template refuses. The parent decides whether it stops the build."""

    def __init__(self) -> None:
        super().__init__(BadRows.skip)
        self.all: list[tuple[str, str]] = []

    def bad(self, origin: str, reason: str) -> None:
        self.all.append((origin, reason))


def _encode_batch(index: int, documents: list[Document]) -> None:
    cfg, tokenizer, folder = _work
    refused = _Refused()
    _write_shard(folder, index, documents, encode(documents, cfg, tokenizer, refused), refused.all)


def _shard_path(folder: Path, index: int) -> Path:
    return folder / f"{index:08d}.npz"


def _write_shard(
    folder: Path,
    index: int,
    documents: list[Document],
    examples: list[list[Example]],
    refused: list[tuple[str, str]],
) -> None:
    each = [example for own in examples for example in own]
    trained = [e.trained for e in each if e.trained is not None]
    arrays: dict[str, Any] = {
        "documents": np.frombuffer(_digest_of(documents), dtype=np.uint8),
        "examples": np.array([len(own) for own in examples], dtype=np.int32),
        "lengths": np.array([len(e.ids) for e in each], dtype=np.int64),
        "left_out": np.array([e.turns_left_out for e in each], dtype=np.int32),
        "ids": np.concatenate([np.empty(0, dtype=np.int32), *(e.ids for e in each)]),
        "refused": np.frombuffer(json.dumps(refused).encode(), dtype=np.uint8),
    }
    if trained:
        arrays["trained"] = np.packbits(np.concatenate(trained))
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    content = buffer.getvalue()
    path = _shard_path(folder, index)
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
    part.write_bytes(hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest() + content)
    part.replace(path)


def _read_shard(
    folder: Path, index: int, batch: Batch
) -> tuple[list[list[Example]], list[tuple[str, str]]] | None:
    """Return the examples and the refused rows of a shard; None where it is missing, damaged or of other documents."""
    try:
        content = _shard_path(folder, index).read_bytes()
    except FileNotFoundError:
        return None
    digest, content = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    if digest != hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest():
        return None
    with np.load(io.BytesIO(content)) as arrays:
        found = {name: arrays[name] for name in arrays.files}
    if found["documents"].tobytes() != _digest_of(_without_empty(batch)):
        return None
    bounds = np.cumsum(found["lengths"])
    ids = np.split(found["ids"], bounds[:-1])
    masks: list[Any] = [None] * len(bounds)
    if "trained" in found:
        total = int(bounds[-1])
        masks = np.split(np.unpackbits(found["trained"], count=total).astype(bool), bounds[:-1])
    each = iter(map(Example, ids, masks, found["left_out"].tolist()))
    examples = [[next(each) for _ in range(count)] for count in found["examples"]]
    return examples, [tuple(pair) for pair in json.loads(found["refused"].tobytes())]


def _digest_of(documents: list[Document]) -> bytes:
    """Return a digest of the identity of a shard's documents. Their content is part of the cache's key."""
    names = json.dumps([[d.unit, d.starts, d.ends] for d in documents])
    return hashlib.blake2b(names.encode(), digest_size=DIGEST_BYTES).digest()
