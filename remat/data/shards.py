"""Encode batches of documents on all cores, and keep each result on disk until the cache is complete.

What a batch becomes depends on nothing but its documents, so neither the number of processes nor their order changes
the cache. A shard is the result of one batch. A build that follows one that was killed finds its shards, checks each
by its digest, and encodes only what is missing.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from remat.config.options import BadRows, DataConfig
from remat.data.formats import Example, encode
from remat.data.rows import BadRowLog, Document
from remat.machine.start_up import available_cores

DIGEST_BYTES = 32
LOOK_FOR_PARENT_S = 1.0
AHEAD = 2  # batches of each process that are read before the first is written
_work: tuple[DataConfig, PreTrainedTokenizerBase, Path]  # of a process of the pool
Batch = list[tuple[str, Document]]  # the half of each document, and the document


def processes_of(cfg: DataConfig) -> int:
    """Return how many processes encode: `data.processes`, or one for each core that this process may use."""
    return cfg.processes or available_cores()


def encoded(
    batches: Iterator[Batch],
    cfg: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    bad_rows: BadRowLog,
) -> Iterator[tuple[Batch, list[list[Example]]]]:
    """Yield the batches in order, each with the examples of those of its documents that are not empty.

    The shards are kept in `folder`. Rows that a template refuses go to `bad_rows`. Raises what `encode` raises.
    """
    folder.mkdir(parents=True, exist_ok=True)
    count = processes_of(cfg)
    waiting: deque[tuple[int, Batch, Future[None] | None]] = deque()
    with ExitStack() as stack:
        pool: ProcessPoolExecutor | None = None
        for index, batch in enumerate(batches):
            future = None
            if _read(folder, index, batch) is None:
                if pool is None:
                    arguments = (cfg, tokenizer, folder, os.getpid())
                    # Forked: a new process would import torch and transformers once more.
                    pool = ProcessPoolExecutor(count, get_context("fork"), _begin, arguments)
                    stack.callback(pool.shutdown, cancel_futures=True)
                future = pool.submit(_encode, index, _filled(batch))
            waiting.append((index, batch, future))
            if len(waiting) > AHEAD * count:
                yield _finished(folder, *waiting.popleft(), bad_rows)
        while waiting:
            yield _finished(folder, *waiting.popleft(), bad_rows)


def _filled(batch: Batch) -> list[Document]:
    return [document for _, document in batch if document.content]


def _finished(
    folder: Path, index: int, batch: Batch, future: Future[None] | None, bad_rows: BadRowLog
) -> tuple[Batch, list[list[Example]]]:
    if future is not None:
        future.result()
    found = _read(folder, index, batch)
    if found is None:
        raise OSError(f"{_path(folder, index)} is damaged or gone directly after it was written")
    examples, refused = found
    for origin, reason in refused:
        bad_rows.bad(origin, reason)
    return batch, examples


def _begin(cfg: DataConfig, tokenizer: PreTrainedTokenizerBase, folder: Path, parent: int) -> None:
    """Make this process one that encodes: alone on its core, and gone when its parent is."""
    global _work
    _work = (cfg, tokenizer, folder)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_FOR_PARENT_S)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


class _Refused(BadRowLog):
    """Keep every row that a template refuses: whether it stops the build is for the parent to say."""

    def __init__(self) -> None:
        super().__init__(BadRows.skip)
        self.all: list[tuple[str, str]] = []

    def bad(self, origin: str, reason: str) -> None:
        self.all.append((origin, reason))


def _encode(index: int, documents: list[Document]) -> None:
    cfg, tokenizer, folder = _work
    refused = _Refused()
    _write(folder, index, documents, encode(documents, cfg, tokenizer, refused), refused.all)


def _path(folder: Path, index: int) -> Path:
    return folder / f"{index:08d}.npz"


def _write(
    folder: Path,
    index: int,
    documents: list[Document],
    examples: list[list[Example]],
    refused: list[tuple[str, str]],
) -> None:
    each = [example for own in examples for example in own]
    trained = [e.trained for e in each if e.trained is not None]
    arrays: dict[str, Any] = {
        "documents": np.frombuffer(_name(documents), dtype=np.uint8),
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
    path = _path(folder, index)
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
    part.write_bytes(hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest() + content)
    part.replace(path)


def _read(folder: Path, index: int, batch: Batch) -> tuple[list[list[Example]], list[tuple[str, str]]] | None:
    """Return the examples of a shard and its refused rows; None where it is not there, damaged or of other rows."""
    try:
        content = _path(folder, index).read_bytes()
    except FileNotFoundError:
        return None
    digest, content = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    if digest != hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest():
        return None
    with np.load(io.BytesIO(content)) as arrays:
        found = {name: arrays[name] for name in arrays.files}
    if found["documents"].tobytes() != _name(_filled(batch)):
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


def _name(documents: list[Document]) -> bytes:
    """Return a digest of which documents a shard is of; what is in them is part of the cache's key."""
    names = json.dumps([[d.unit, d.starts, d.ends] for d in documents])
    return hashlib.blake2b(names.encode(), digest_size=DIGEST_BYTES).digest()
