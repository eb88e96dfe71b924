"""What this process and this machine hold in memory. Reading only; nothing here allocates or synchronises.

GiB is 1024**3 bytes. GPU figures are those of torch's caching allocator on one device.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

GIB = 1024**3


@dataclass(frozen=True)
class HostMemory:
    """Host memory of this node as this process may use it.

    `total_bytes` is physical; `limit_bytes` the smallest control-group limit above this process, or the total;
    `available_bytes` what can still be allocated without swapping or being killed.
    """

    total_bytes: int
    available_bytes: int
    limit_bytes: int


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Host memory under the control-group limit (v1 or v2), which `free` and psutil do not see."""
    machine = psutil.virtual_memory()
    limit, available = machine.total, machine.available
    for group_limit, group_used in _control_groups(root):
        if group_limit < machine.total:
            limit = min(limit, group_limit)
            available = min(available, max(0, group_limit - group_used))
    return HostMemory(total_bytes=machine.total, available_bytes=available, limit_bytes=limit)


class MemoryMonitor:
    """Samples this rank's memory under the metric names of `metrics.jsonl`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process = psutil.Process()

    def sample(self) -> dict[str, float]:
        """This rank's figures in GiB. The same keys on every rank of a run; GPU keys only on a GPU.

        GPU peaks count since the last `reset_peak()`; the host peak counts since the process began, loading
        included, because the kernel's high-water mark cannot be reset everywhere.
        """
        rss_bytes = self._process.memory_info().rss
        figures = {
            "memory/host_rss_gib": rss_bytes / GIB,
            "memory/host_rss_peak_gib": max(rss_bytes, _peak_rss_bytes()) / GIB,
            "memory/host_available_gib": host_memory().available_bytes / GIB,
        }
        if self._device.type == "cuda":
            pinned = torch.cuda.host_memory_stats()
            gpu = torch.cuda.memory_stats(self._device)
            figures["memory/host_pinned_gib"] = pinned.get("allocated_bytes.current", 0) / GIB
            figures["memory/gpu_allocated_peak_gib"] = gpu.get("allocated_bytes.all.peak", 0) / GIB
            figures["memory/gpu_reserved_peak_gib"] = gpu.get("reserved_bytes.all.peak", 0) / GIB
            figures["memory/gpu_alloc_retries"] = float(gpu.get("num_alloc_retries", 0))
        return figures

    def reset_peak(self) -> None:
        """Start a new GPU peak; a no-op without a GPU."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)


def _peak_rss_bytes() -> int:
    """The kernel's high-water mark. VmHWM is preferred: ru_maxrss survives exec, so it can be the launcher's."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _control_groups(root: Path) -> list[tuple[int, int]]:
    """(limit, used) in bytes of each control group above this process that limits memory, v1 and v2.

    Reclaimable page cache does not count as used: the kernel drops it before it kills.
    """
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[int, int]] = []
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        found += [pair for folder in _lineage(base, path) if (pair := _limit_and_use(folder, names))]
    return found


def _lineage(base: Path, path: str) -> list[Path]:
    """The group's folder and all its ancestors; a limit on any of them holds."""
    leaf = base / path.strip("/")
    return [folder for folder in (leaf, *leaf.parents) if folder == base or base in folder.parents]


def _limit_and_use(folder: Path, names: tuple[str, str, str]) -> tuple[int, int] | None:
    limit_name, usage_name, cache_name = names
    try:
        limit = (folder / limit_name).read_text().strip()
        if limit == "max":
            return None
        used = int((folder / usage_name).read_text())
        stat = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    cache = next((int(line.split()[1]) for line in stat if line.split()[0] == cache_name), 0)
    return int(limit), max(0, used - cache)
