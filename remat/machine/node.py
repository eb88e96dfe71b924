"""Read what a node has for a run: available memory, limits, disks. Changes nothing."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import psutil

from remat.config import paths
from remat.config.units import GIB
from remat.machine.host_memory import host_memory

# CUDA context and loaded kernels, outside torch's allocator; 0.3-0.6 GiB is usual
CONTEXT_BYTES = int(0.6 * GIB)

ALL_USERS = "4294967295"  # mapped to themselves: in the first user namespace
CAP_IPC_LOCK = 14  # linux/capability.h: a process with this capability locks memory without limit


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Resources of this node in bytes. `gpu_bytes` is what this rank can use of its GPU, None without one.

    `host_available_bytes` is what can still be allocated within the control-group limit; `host_limit_bytes` is that
    limit or the physical memory. `memlock_bytes` is None when locking is unlimited. A disk is named by the folder
    that was asked for and carries the id of its filesystem.
    """

    local_size: int
    host_available_bytes: int
    host_limit_bytes: int
    host_total_bytes: int
    shm_bytes: int | None = None  # free in /dev/shm; None: not looked at
    resident_bytes: int = 0  # host memory that this rank already uses
    gpu_bytes: int | None
    memlock_bytes: int | None
    output: Disk
    nvme: Disk | None
    download: Disk


@dataclass(frozen=True)
class Disk:
    folder: str
    free_bytes: int
    filesystem: int


def found(
    *, local_size: int, output_dir: str, nvme_path: str | None, cache: Path, root: Path = Path("/")
) -> Machine:
    """Read this node's resources. `cache` is where weights would be downloaded to; `root` is / except in tests."""
    import torch

    host = host_memory(root)
    return Machine(
        local_size=local_size,
        host_available_bytes=host.available_bytes,
        host_limit_bytes=host.limit_bytes,
        host_total_bytes=host.total_bytes,
        shm_bytes=shm_bytes(root),
        resident_bytes=psutil.Process().memory_info().rss,
        gpu_bytes=_gpu_bytes() if torch.cuda.is_available() else None,
        memlock_bytes=memlock_bytes(root),
        output=disk(output_dir),
        nvme=disk(nvme_path) if nvme_path else None,
        download=disk(str(cache)),
    )


def smallest(machines: Sequence[Machine]) -> Machine:
    """Return the minimum over ranks of every resource, as one Machine: a run that fits it fits every node."""
    least: dict[str, Any] = {}
    for name in (item.name for item in fields(Machine) if item.name != "local_size"):
        known = [value for machine in machines if (value := getattr(machine, name)) is not None]
        least[name] = min(known, key=lambda value: getattr(value, "free_bytes", value), default=None)
    return replace(machines[0], **least)


def disk(folder: str) -> Disk:
    """Return the Disk that `folder` is on, or will be made on: that of its nearest parent that exists."""
    path = paths.nearest(folder)
    return Disk(folder, shutil.disk_usage(path).free, path.stat().st_dev)


def shm_bytes(root: Path = Path("/")) -> int:
    """Return the free bytes in /dev/shm, which containers keep small unless told otherwise."""
    folder = root / "dev/shm"
    return shutil.disk_usage(folder).free if folder.is_dir() else 0


def hub_cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _gpu_bytes() -> int:
    """Return the free bytes of this rank's GPU, plus the CUDA context that this very query creates."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return min(total, free + CONTEXT_BYTES)


def memlock_bytes(root: Path) -> int | None:
    """Return the limit on memory that a process may lock; None when there is none or the process may ignore it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return None
    status = root / "proc/self/status"
    spaces = root / "proc/self/uid_map"
    if spaces.exists() and spaces.read_text().split() != ["0", "0", ALL_USERS]:
        return soft  # capabilities in a user namespace (a rootless container) do not lift the system's limit
    effective = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("CapEff:")]
    return None if effective and int(effective[0], 16) >> CAP_IPC_LOCK & 1 else soft
