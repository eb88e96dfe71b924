"""Tokenised once: a folder of memory-mapped blocks, named by a hash of everything its content depends on.

One process builds, in a temporary folder that is renamed when complete; the others wait on a file lock and then
open the result. No collective is held open meanwhile, so a slow build cannot time out a process group. If the
builder dies, the system frees its lock and the next process builds.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from remat.choices import BadRows, DataFormat, DataSource
from remat.config import ConfigError, DataConfig
from remat.data.blocks import Blocks
from remat.data.build import Plan, make_plan, write_blocks
from remat.data.rows import STOP_AFTER_BAD_ROWS, stop_text
from remat.redact import redact_text

log = logging.getLogger(__name__)


class Splits(NamedTuple):
    train: Blocks
    held_out: Blocks | None
    report: dict[str, Any]

    def documents_apart(self) -> Splits:
        """Both halves with `Blocks.documents_apart`."""
        held_out = None if self.held_out is None else self.held_out.documents_apart()
        return self._replace(train=self.train.documents_apart(), held_out=held_out)


def open_blocks(
    cfg: DataConfig, *, tokenizer: PreTrainedTokenizerBase, seq_len: int, seed: int, show_progress: bool
) -> Splits:
    """Blocks of `seq_len` tokens for training and, unless `data.eval_fraction` is 0, for evaluation.

    Every process calls this; whichever gets the lock builds and, with `show_progress`, draws the bar. The seed
    chooses what is held out (and the tokens of `synthetic`); it does not shuffle. `report` is `report.json` of the
    cache with its folder added. Raises ConfigError for data that cannot be used and a cache that cannot be written.
    """
    root = Path(cfg.cache_dir).expanduser()
    try:
        plan = make_plan(cfg, tokenizer=tokenizer, seq_len=seq_len, seed=seed)
        folder = root / plan.key
        root.mkdir(parents=True, exist_ok=True)
        if not folder.exists():
            _build_once(folder, lambda temporary: write_blocks(plan, temporary, show_progress=show_progress))
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir={cfg.cache_dir} could not be filled from data.path={cfg.path}: {error}\n"
            "Make the data readable, and name a cache folder on a disk that is writable and has room"
        ) from error
    return _open(folder, cfg, plan)


def summary(report: dict[str, Any]) -> str:
    """What became of the documents, for `Splits.report`: "40 documents, 3 cut at train.seq_len, 1 dropped (...)"."""
    halves = [half for half in (report["train"], report["held_out"]) if half]
    documents, cut, dropped = (
        sum(half[name] for half in halves) for name in ("documents", "truncated_documents", "dropped_documents")
    )
    empty, bad = report["empty_documents"], report["bad_rows"]["count"]
    synthetic = report["source"] == DataSource.synthetic  # blocks of nothing but tokens
    by_blocks = report["held_out_by"] == "blocks" and report["format"] == DataFormat.plain
    parts = [
        f"{documents} document{'s' * (documents != 1)}" * (not synthetic),
        f"{cut} cut at train.seq_len" * bool(cut),
        f"{dropped} dropped (no trained token left)" * bool(dropped),
        f"{empty} empty" * bool(empty),
        f"{bad} bad row{'s' * (bad != 1)} skipped, listed in {report['folder']}/report.json" * bool(bad),
        "too few to hold out whole ones, so single blocks are" * by_blocks,
    ]
    return ", ".join(part for part in parts if part)


def _open(folder: Path, cfg: DataConfig, plan: Plan) -> Splits:
    report = json.loads((folder / "report.json").read_text())
    bad_rows = report["bad_rows"]
    if bad_rows["count"] and cfg.on_bad_row == BadRows.stop:
        raise ConfigError(stop_text(bad_rows["first"][:STOP_AFTER_BAD_ROWS]))
    held_out = Blocks.open(folder, "held_out", plan.seq_len) if report["held_out"] else None
    return Splits(Blocks.open(folder, "train", plan.seq_len), held_out, {**report, "folder": str(folder)})


def _build_once(folder: Path, build: Callable[[Path], None]) -> None:
    """Build `folder` unless another process does so first; wait for it then.

    A ConfigError reaches those who waited as well: they would only run into it themselves, one after another.
    """
    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    failure = folder.with_name(f"{folder.name}.error.json")
    earlier = _read(failure)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.info("waiting for another process to prepare the data in %s", folder)
        lock.acquire()
    try:
        if folder.exists():
            return
        latest = _read(failure)
        if latest and latest != earlier:  # written while this process waited
            raise ConfigError(json.loads(latest)["error"])
        for abandoned in folder.parent.glob(f"{folder.name}.tmp-*"):  # by a builder that was killed
            shutil.rmtree(abandoned)
        temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
        temporary.mkdir()
        try:
            build(temporary)
            _fsync_folder(temporary)
            temporary.rename(folder)
            _fsync_folder(folder.parent)
        except ConfigError as error:
            # The random id tells this failure from an equal one of an earlier run.
            failure.write_text(json.dumps({"id": uuid.uuid4().hex, "error": redact_text(str(error))}))
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        failure.unlink(missing_ok=True)
    finally:
        lock.release()


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
