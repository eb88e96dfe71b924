"""Check that all nodes see the same folder: each looks for a file that rank 0 wrote there."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from remat.config import paths
from remat.config.options import ConfigError
from remat.machine import distributed

LOCAL = {  # file systems on this node's own disks and memory: no other node writes to them, and writes show at once
    "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "bcachefs", "tmpfs", "ramfs", "overlay",
    "aufs",
}  # fmt: skip
LATE_S = 90.0  # time for a network file system to show another node's file: NFS caches folders for 60 s
LOCAL_S = 2.0  # the same for a disk of this node, where files show at once
ASK_EVERY_S = 0.5


def is_local(folder: Path) -> bool:
    """Return whether only this node can see `folder`. Network file systems may show other nodes' files late."""
    path = paths.nearest(folder).resolve()
    # of two mounts on one folder the later one counts
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    kinds = (mounts[str(parent)] for parent in (path, *path.parents) if str(parent) in mounts)
    return next(kinds, "unknown") in LOCAL


def check(folder: Path, option: str) -> None:
    """Raise ConfigError on every rank when another node does not see the `folder` that rank 0 has made. Collective."""
    if distributed.local_size_from_env() >= distributed.world_size_from_env():
        return
    with _token(folder) as (name, problem):
        written = distributed.broadcast(name if problem is None else None)
        if written and not _seen(folder / written):
            problem = f"{folder} is not the folder that rank 0 has made"
        _refuse(problem, option)


def check_newest(folder: Path, patterns: Sequence[str], option: str) -> None:
    """Check as `check` does without writing to `folder`. Collective.

    Every node must see the newest file of `patterns` that rank 0 finds there. Raises ConfigError on every rank.
    """
    if distributed.local_size_from_env() >= distributed.world_size_from_env():
        return
    found: tuple[Path, int] | None = None
    if distributed.rank_from_env() == 0:
        path, stat = max(_with_stat(folder, patterns), key=lambda each: each[1].st_mtime, default=(None, None))
        found = (path.absolute(), stat.st_size) if path and stat else None
    found = distributed.broadcast(found)
    lacks = found is not None and not _seen(*found)
    _refuse(f"{found[0]}, which rank 0 found, is not there" if found and lacks else None, option)


def _with_stat(folder: Path, patterns: Sequence[str]) -> Iterator[tuple[Path, os.stat_result]]:
    for pattern in patterns:
        for path in folder.glob(pattern):
            with suppress(FileNotFoundError):  # a saved state that another run of this folder removes
                yield path, path.stat()


def _refuse(problem: str | None, option: str) -> None:
    where = f"on {socket.gethostname()} (rank {distributed.rank_from_env()})"
    problems = [text for text in distributed.gather(f"{where}: {problem}" if problem else None) if text]
    if problems:
        raise ConfigError(
            f"{option}: the folder must be shared by all nodes, at the same path; {'; '.join(problems[:4])}. Choose a "
            "folder on a shared file system"
        )


@contextmanager
def _token(folder: Path) -> Iterator[tuple[str, str | None]]:
    """Yield (name, problem) of a file that rank 0 writes, with a name no other launch uses; delete it at the end.

    `problem` is only known on rank 0.
    """
    token, problem = folder / f".shared-{uuid.uuid4().hex}", None
    if distributed.rank_from_env() == 0:
        try:
            token.touch()
        except OSError as error:
            problem = f"{folder} cannot be written to ({error.strerror})"
    try:
        yield token.name, problem
    finally:
        if distributed.rank_from_env() == 0:
            token.unlink(missing_ok=True)


def _seen(path: Path, size: int | None = None) -> bool:
    """Return whether this node's first rank finds the file. It retries, because other nodes' files may show late."""
    if distributed.local_rank_from_env() != 0:
        return True
    end = time.monotonic() + (LOCAL_S if is_local(path.parent) else LATE_S)
    while True:
        # listing the folder asks the server anew; looking up the name may give a cached "no such file"
        listed = path.parent.is_dir() and path.name in {entry.name for entry in path.parent.iterdir()}
        if listed and (size is None or path.stat().st_size == size):
            return True
        if time.monotonic() > end:
            return False
        time.sleep(ASK_EVERY_S)
