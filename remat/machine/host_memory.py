"""Host memory that this process may use: the machine's, within the control-group limits (v1 and v2).

GiB is 1024**3 bytes. Imports neither torch nor anything else heavy, so that a supervisor can import it.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil

SAMPLED_EVERY_S = 0.01


@dataclass(frozen=True)
class HostMemory:
    """Host memory of this node that this process may use.

    `total_bytes` is physical memory. `limit_bytes` is the smallest control-group limit above this process, or the
    total. `available_bytes` is what can still be allocated without swapping or being killed.
    """

    total_bytes: int
    available_bytes: int
    limit_bytes: int


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Return host memory within the control-group limit (v1 or v2), which `free` and psutil do not see."""
    machine = psutil.virtual_memory()
    limit, available = machine.total, machine.available
    for group_limit, group_used in _control_groups(root):
        if group_limit < machine.total:
            limit = min(limit, group_limit)
            available = min(available, max(0, group_limit - group_used))
    return HostMemory(total_bytes=machine.total, available_bytes=available, limit_bytes=limit)


class HostPeak:
    """Context in which a thread samples this process's host memory, for its peak above the amount at the start.

    `peak_bytes` counts anonymous and shared memory, which the kernel cannot drop. Pages of mapped files do not count:
    they belong to the page cache.
    """

    def __init__(self) -> None:
        self._before_bytes = self.peak_bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="remat-host-peak", daemon=True)

    def __enter__(self) -> HostPeak:
        self._before_bytes = held_bytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLED_EVERY_S):
            self._look()

    def _look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, held_bytes() - self._before_bytes)


def held_bytes() -> int:
    """Return this process's resident anonymous and shared memory; without /proc, all resident memory."""
    status = Path("/proc/self/status")
    if not status.exists():
        return int(psutil.Process().memory_info().rss)
    sizes = dict(line.split(":", 1) for line in status.read_text().splitlines() if line.startswith("Rss"))
    return sum(int(sizes[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024


def peak_rss_bytes(pid: int | str = "self") -> int:
    """Return the peak resident memory of a process, the kernel's VmHWM; 0 where it is gone or there is no /proc."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def oom_kills(root: Path = Path("/")) -> int | None:
    """Return how many processes the kernel has killed for memory in this process's control groups; None if unknown."""
    counts: list[int] = []
    for base, leaf, controllers in _memberships(root):
        name = "memory.events" if controllers == "" else "memory.oom_control"
        for folder in _lineage(base, leaf):
            try:
                lines = (folder / name).read_text().splitlines()
            except OSError:
                continue
            counts += [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
    return max(counts, default=None)


def _memberships(root: Path) -> list[tuple[Path, str, str]]:
    """Return (mount, path of the group, controllers) of each hierarchy that counts this process's memory."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found.append((root / "sys/fs/cgroup", path, controllers))
        elif "memory" in controllers.split(","):
            found.append((root / "sys/fs/cgroup/memory", path, controllers))
    return found


def _control_groups(root: Path) -> list[tuple[int, int]]:
    """Return (limit, used) in bytes of each control group above this process that limits memory, v1 and v2.

    Reclaimable page cache does not count as used: the kernel drops it before it kills.
    """
    found: list[tuple[int, int]] = []
    for base, path, controllers in _memberships(root):
        names = ("memory.max", "memory.current", "inactive_file")
        if controllers:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        found += [pair for folder in _lineage(base, path) if (pair := _limit_and_use(folder, names))]
    return found


def _lineage(base: Path, path: str) -> list[Path]:
    """Return the group's folder and all its ancestors: a limit on any of them applies."""
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
