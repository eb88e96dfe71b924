"""Which file system a folder is on, and whether other nodes may see it. Reading only."""

from __future__ import annotations

from pathlib import Path

import psutil

LOCAL = {  # of this node's own disks and memory: nothing else writes to them, and what is written is seen at once
    "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "bcachefs", "tmpfs", "ramfs", "overlay",
    "aufs",
}  # fmt: skip


def kind(folder: Path) -> str:
    """The type of the file system that `folder` is on, or will be made on: ext4, nfs4, lustre."""
    path = folder.expanduser().absolute()
    while not path.exists():
        path = path.parent
    path = path.resolve()
    # of two mounts on one folder the later one counts
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    for parent in (path, *path.parents):
        if str(parent) in mounts:
            return mounts[str(parent)]
    return "unknown"


def is_local(folder: Path) -> bool:
    """Whether nothing but this node can see `folder`. A network file system may show what others did a minute late."""
    return kind(folder) in LOCAL
