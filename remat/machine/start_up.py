"""Set up a process before torch is imported: its share of the cores, no GPU on request, fast imports.

Standard library only.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def available_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many cores this process may use: its affinity mask, cut by the control group's quota (v1 or v2)."""
    mask = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = len(mask)
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()[:2]
        else:
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text().strip()
    except OSError:
        return cores
    if quota in ("max", "-1"):
        return cores
    return max(1, min(cores, math.floor(int(quota) / int(period))))


def share_cores() -> None:
    """Set OMP_NUM_THREADS to this rank's share unless the user or the launcher set it.

    Without it every rank starts one thread per core, and the ranks slow each other down. DeepSpeed's CPU Adam
    reads it too.
    """
    sizes = (os.environ.get(name) for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    local = int(next(filter(None, sizes), 1))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // local)))


def hide_gpus_from_cpu_ranks() -> None:
    """Hide all GPUs from torch when DS_ACCELERATOR=cpu.

    DeepSpeed's launcher sets CUDA_VISIBLE_DEVICES to the ranks' numbers even then (launcher/launch.py). On a machine
    with GPUs the ranks would mix CUDA tensors with DeepSpeed's CPU engine.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@contextmanager
def without_garbage() -> Iterator[None]:
    """Pause the garbage collector during imports, and exempt the imported objects from it afterwards.

    These objects are never freed, and scanning them again and again costs a sixth of the CPU time of the imports.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
