"""Cache tokenised data: a folder of memory-mapped blocks, named by a hash of everything its content depends on.

Rank 0 reads the data, and so does the first rank of each node that does not see rank 0's cache folder. It builds a
missing cache in a temporary folder, which is renamed when complete. The other ranks wait without a collective that
could time out, and open the result. A launch waits for another launch that builds the same cache, and takes over if
that one has died (remat/machine/owner_lock.py). Two launches may still build at once, for example on hosts that do not
see each other's lock. Then both use the cache that was complete first.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from remat.config import paths
from remat.config.options import BadRows, ConfigError, DataConfig, DataFormat, DataSource, Packing
from remat.config.redact import redact_text
from remat.config.units import format_count
from remat.config.validation import of_source
from remat.data.blocks import Blocks, LongRowLog, refuse_long
from remat.data.build import NoRoom, Plan, make_plan, write_blocks
from remat.data.files import Hashes
from remat.data.mixture import Mixture, mixed_report
from remat.data.rows import stop_text
from remat.data.streaming import open_stream
from remat.machine import distributed
from remat.machine.owner_lock import OwnerLock, current_process, holder_of, labelled

LOOK_AGAIN_S = 0.5
SHARDS = ".shards"  # suffix of the folder with the shards of a cache that is not complete yet
OLD_SHARDS_S = 7 * 24 * 3600.0
FULL = (errno.ENOSPC, errno.EDQUOT)
log = logging.getLogger(__name__)


class Splits(NamedTuple):
    train: Blocks
    held_out: Blocks | None
    report: dict[str, Any]

    @property
    def key(self) -> str:
        """Return the key, a hash of the data, the tokenizer, the block length and the options that change blocks."""
        return str(self.report["key"])

    @property
    def tokens_per_block(self) -> float:
        """Return the mean number of tokens in a training block, without padding."""
        counts = self.report["train"]
        return float(counts["tokens"] / counts["blocks"])

    @property
    def context(self) -> int:
        """Return the mean length of attention over the training tokens, from which FLOPs are counted.

        It is the block length where documents of a block see each other, else the mean length of a token's document.
        """
        if not (self.train.apart or self.train.one_each):
            return self.train.seq_len
        counts = self.report["train"]
        return max(1, round(counts["squared_lengths"] / max(1, counts["tokens"])))


def open_blocks(
    cfg: DataConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    seed: int,
    show_progress: bool,
    on_progress: Callable[[], None] = lambda: None,
) -> Splits:
    """Return blocks of `seq_len` tokens for training and, unless nothing is held out, for evaluation.

    Builds the cache if it is missing. Collective. `cfg.packing` is already resolved for the model: with `documents`,
    several documents share a block and are kept apart. `show_progress` draws a bar while blocks are built.
    `on_progress` is called on every rank while any rank makes progress. The seed chooses what is held out (and the
    tokens of `synthetic`); it does not shuffle. `report` is the cache's `report.json` with its folder added.

    Raises ConfigError on every rank for unusable data, rows refused as too long, a cache that cannot be written, and
    nodes with other data than rank 0's. Without room on the disk raises NoRoom on rank 0 and ConfigError elsewhere.
    """
    options: dict[str, Any] = {"tokenizer": tokenizer, "seq_len": seq_len, "seed": seed}
    options |= {"show_progress": show_progress, "on_progress": on_progress}
    if cfg.streaming:
        return _open_stream(cfg, tokenizer, seq_len, seed, on_progress)
    return _open_mixture(cfg, options) if cfg.mix else _open_source(cfg, **options)


def _open_stream(
    cfg: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    seed: int,
    on_progress: Callable[[], None],
) -> Splits:
    """Open a stream on every rank. Raises ConfigError on all ranks if one sees other data. Collective."""
    found: list[Splits] = []

    def prepare(advance: Callable[[], None]) -> str:
        found.append(Splits(*open_stream(cfg, tokenizer=tokenizer, seq_len=seq_len, seed=seed)))
        return found[0].key

    keys = distributed.while_some_work(prepare, on_progress)
    if len(set(keys)) > 1:
        other = next(rank for rank, key in enumerate(keys) if key != keys[0])
        raise ConfigError(
            f"data.path={cfg.path} is other data on rank {other} than on rank 0: give every node the same"
        )
    return found[0]


def _open_mixture(cfg: DataConfig, options: dict[str, Any]) -> Splits:
    """Open the sources one after another, each with its own cache, and mix them."""
    found: dict[str, Splits] = {}
    for name, source in cfg.sources().items():
        try:
            found[name] = _open_source(source, **options)
        except ConfigError as error:
            kind = NoRoom if isinstance(error, NoRoom) else ConfigError
            raise kind(of_source(name, f"data.mix.{name}: {error}")) from error
    weights = {name: given.weight for name, given in cfg.mix.items()}
    try:
        train = Mixture({name: splits.train for name, splits in found.items()}, weights)
    except ValueError as error:
        raise ConfigError(
            "data.mix joins plain text and rows, whose blocks only data.packing=documents makes alike, and this model "
            "cannot keep documents apart: mix sources of one kind, or choose another model"
        ) from error
    halves = {name: splits.held_out for name, splits in found.items() if splits.held_out is not None}
    held_out = Mixture(halves) if halves else None
    parts = {name: [splits.key, weights[name]] for name, splits in found.items()}
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    report = mixed_report({name: splits.report for name, splits in found.items()}, train)
    return Splits(train, held_out, report | {"key": key})


def _open_source(
    cfg: DataConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    seed: int,
    show_progress: bool,
    on_progress: Callable[[], None],
) -> Splits:
    root = paths.expand(cfg.cache_dir)

    def prepare(advance: Callable[[], None]) -> tuple[str, str]:
        hashes = Hashes(root, advance)
        try:
            plan = make_plan(cfg, tokenizer=tokenizer, seq_len=seq_len, seed=seed, hashes=hashes)
            root.mkdir(parents=True, exist_ok=True)
            folder = root / plan.key
            if not _is_there(folder):
                _build_once(folder, plan, show_progress)
        except OSError as error:
            kind = NoRoom if error.errno in FULL else ConfigError
            raise kind(
                f"data.cache_dir={cfg.cache_dir} could not be filled from data.path={cfg.path}: {error}\n"
                "Make the data readable, and name a cache folder on a disk that is writable and has room"
            ) from error
        return plan.key, socket.gethostname()

    prepared = distributed.while_some_work(prepare if _looks(root) else None, on_progress)
    found = {rank: result for rank, result in enumerate(prepared) if result is not None}
    key, host = found[min(found)]
    for rank, (other, where) in found.items():
        if other != key:
            raise ConfigError(
                f"data.path={cfg.path} on {where} (rank {rank}) is other data than on {host}, or other tokens "
                f"({other[:12]} and {key[:12]}): give every node the same"
            )
    return _open(root / key, cfg, seq_len)


def _looks(root: Path) -> bool:
    """Return whether this rank reads the data: rank 0, and the first of each node that does not see rank 0's folder.

    Collective.
    """
    rank, size = distributed.place()
    if size in (1, distributed.local_size_from_env()):
        return rank == 0
    name = f".seen-{uuid.uuid4().hex}"
    if rank == 0:
        try:
            root.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        except OSError:  # read-only: if the cache is complete, the first rank of each node finds it
            name = ""
    name = distributed.broadcast(name)
    first_of_node = distributed.local_rank_from_env() == 0
    looks = rank == 0 or (first_of_node and not (name and (root / name).exists()))
    distributed.gather(None)  # wait until all ranks have looked
    if rank == 0 and name:
        (root / name).unlink(missing_ok=True)
    return looks


def summary(report: dict[str, Any]) -> str:
    """Describe the documents of a `Splits.report`: "40 documents, 3 cut at train.seq_len (...), 1 dropped (...)"."""
    if sources := report.get("sources"):
        return "; ".join(f"{name}: {summary(source)}" for name, source in sources.items())
    total = _total(report)
    documents, cut, dropped = (
        total[name] for name in ("documents", "truncated_documents", "dropped_documents")
    )
    empty, bad = report["empty_documents"], report["bad_rows"]["count"]
    synthetic = report["source"] == DataSource.synthetic  # synthetic data has no documents
    by_blocks = report["held_out_by"] == "blocks" and report["format"] == DataFormat.plain
    parts = [
        "of the first window and what is held out:" * report.get("streamed", False),
        format_count(documents, "document") * (not synthetic),
        f"{total['rows_more']} rows more, because the chat template rewrites earlier turns: each turn that it rewrites "
        "is trained in a row of its own (data.rewritten_turns=each)" * bool(total["rows_more"]),
        f"{total['turns_left_out']} turns not trained, which the chat template rewrites (data.rewritten_turns=last)"
        * bool(total["turns_left_out"]),
        f"{cut} cut at train.seq_len" * bool(cut),
        f"{total['long_documents']} left out as longer than train.seq_len" * bool(total["long_documents"]),
        f"{dropped} dropped (no trained token left)" * bool(dropped),
        f"{empty} empty" * bool(empty),
        f"{format_count(bad, 'bad row')} skipped, listed in {report['folder']}/report.json" * bool(bad),
        "too few to hold out whole ones, so single blocks are" * by_blocks,
    ]
    return ", ".join(part for part in parts if part)


def loss_of_tokens(report: dict[str, Any]) -> str:
    """Describe the rows of a `Splits.report` that were too long, and the tokens lost; "" when there are none."""
    if sources := report.get("sources"):
        lost = {name: loss_of_tokens(source) for name, source in sources.items()}
        return "\n".join(of_source(name, f"data.mix.{name}: {text}") for name, text in lost.items() if text)
    total = _total(report)
    cut, left_out = total["truncated_documents"], total["long_documents"]
    if not cut + left_out:
        return ""
    count, done, what = (cut, "cut", "truncated") if cut else (left_out, "left out", "long")
    tokens, trained = total[f"{what}_tokens"], total[f"{what}_trained_tokens"]
    return (
        f"{count} of {total['documents']} rows are longer than train.seq_len={report['seq_len']} and were {done} "
        f"(data.long_rows={'cut' if cut else 'drop'}): {tokens:,} tokens are missing, {trained:,} of them trained "
        f"ones. The longest has {report['long_rows']['longest']:,} tokens; the first: {report['long_rows']['first'][0]}"
    )


def _total(report: dict[str, Any]) -> dict[str, int]:
    halves = [half for half in (report["train"], report["held_out"]) if half]
    return {name: sum(half[name] for half in halves) for name in halves[0]}


def _open(folder: Path, cfg: DataConfig, seq_len: int) -> Splits:
    report = json.loads((folder / "report.json").read_text())
    bad_rows = report["bad_rows"]
    if bad_rows["count"] and cfg.on_bad_row == BadRows.stop:
        raise ConfigError(stop_text(bad_rows["first"]))
    too_long = LongRowLog(**report["long_rows"])
    refuse_long(cfg, too_long, _total(report)["truncated_documents"], seq_len)

    def half(name: str) -> Blocks:
        blocks = Blocks.open(folder, name, seq_len)
        return blocks.documents_apart() if cfg.packing is Packing.documents else blocks

    held_out = half("held_out") if report["held_out"] else None
    return Splits(half("train"), held_out, {**report, "folder": str(folder), "key": folder.name})


def _build_once(folder: Path, plan: Plan, show_progress: bool) -> None:
    """Build `folder`, or wait for another process that builds it.

    A ConfigError of the builder is also raised in the processes that wait, which would otherwise repeat the build.
    """
    lock = OwnerLock(folder.with_name(f"{folder.name}.lock"))
    failure = folder.with_name(f"{folder.name}.error.json")
    earlier = _read(failure)
    advance = plan.hashes.advance
    _wait_for(lock, folder, advance)
    if not lock.token:
        return

    def counted() -> None:
        lock.progress += 1  # waiting launches read it
        advance()

    plan.hashes.advance = counted
    try:
        latest = _read(failure)
        if latest and latest != earlier:  # the error was written while this process waited
            told = json.loads(latest)
            raise (NoRoom if told.get("no_room") else ConfigError)(told["error"])
        _remove_dead(folder)
        _remove_old_shards(folder)
        temporary = folder.with_name(f"{folder.name}.tmp-{current_process().label()}-{uuid.uuid4().hex[:8]}")
        temporary.mkdir()
        shards = folder.with_name(f"{folder.name}{SHARDS}")
        try:
            write_blocks(plan, temporary, shards, show_progress=show_progress)
            _publish(temporary, folder)
            shutil.rmtree(shards, ignore_errors=True)
        except ConfigError as error:
            if not isinstance(error, NoRoom):  # another remedy changes data or options
                shutil.rmtree(shards, ignore_errors=True)
            # The random id tells this failure from the same one in an earlier run.
            told = {"id": uuid.uuid4().hex, "error": redact_text(str(error))}
            failure.write_text(json.dumps(told | {"no_room": isinstance(error, NoRoom)}))
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        failure.unlink(missing_ok=True)
    finally:
        lock.release()


def _wait_for(lock: OwnerLock, folder: Path, advance: Callable[[], None]) -> None:
    """Wait until this process has the lock or the folder exists. Calls `advance` when another builder progresses."""
    before = None
    while not _is_there(folder):
        holder = lock.take()
        if holder is None:
            if _is_there(folder):  # the other builder has just finished
                lock.release()
            return
        if before is None:
            log.info("waiting for another process to prepare the data in %s: %s", folder, holder.in_words())
        if (holder.token, holder.progress) != before:
            before = (holder.token, holder.progress)
            advance()
        time.sleep(LOOK_AGAIN_S)


def _publish(temporary: Path, folder: Path) -> None:
    """Rename the finished folder to its final name, unless a builder whose lock was not seen here was first."""
    _fsync_folder(temporary)
    try:
        temporary.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    _fsync_folder(folder.parent)


def _remove_dead(folder: Path) -> None:
    """Remove the temporary folders of killed builders on this host. Builders on other hosts may still live."""
    start = f"{folder.name}.tmp-"
    for left in folder.parent.glob(f"{start}*"):
        process = labelled(left.name.removeprefix(start))
        if process is not None and process.lives() is False:
            shutil.rmtree(left, ignore_errors=True)
        else:
            log.warning("%s is another builder's: delete it if that is gone", left)


def _remove_old_shards(folder: Path) -> None:
    """Remove shards of killed builds of other data that nobody has resumed for OLD_SHARDS_S."""
    for left in folder.parent.glob(f"*{SHARDS}"):
        lock = left.with_name(f"{left.name.removesuffix(SHARDS)}.lock")
        with contextlib.suppress(OSError):  # another launch may remove it too
            old = time.time() - left.stat().st_mtime > OLD_SHARDS_S
            if old and left.name.removesuffix(SHARDS) != folder.name and holder_of(lock) is None:
                log.info("removing %s, which a build that was killed left", left)
                shutil.rmtree(left, ignore_errors=True)


def _is_there(folder: Path) -> bool:
    """Return whether `folder` exists, by listing its parent.

    NFS caches for a minute that a name does not exist, but not the listing of a folder.
    """
    try:
        return folder.name in os.listdir(folder.parent)  # noqa: PTH208 - only names are needed
    except FileNotFoundError:
        return False


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
