"""What this process and this machine hold in memory. Reading only; nothing here allocates or synchronises.

GiB is 1024**3 bytes. GPU figures are those of torch's caching allocator on one device.
"""

from __future__ import annotations

import resource
from pathlib import Path

import psutil
import torch

from remat.config.units import GIB
from remat.machine.host_memory import HostMemory, host_memory

__all__ = ["GIB", "HostMemory", "MemoryMonitor", "host_memory"]


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
