"""Measure memory: of torch's caching allocator, of this process on the host, and of the whole GPU from the driver.

Nothing here allocates or synchronises. GiB is 1024**3 bytes. The driver is read through NVML (nvidia-ml-py), in a
thread beside training: it sees what the allocator does not, such as the CUDA context, NCCL's buffers and other
processes on the GPU.
"""

from __future__ import annotations

import json
import resource
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from remat.config.metrics import (
    GPU_ALLOC_RETRIES,
    GPU_ALLOCATED_PEAK_GIB,
    GPU_RESERVED_PEAK_GIB,
    HOST_AVAILABLE_GIB,
    HOST_PINNED_GIB,
    HOST_RSS_GIB,
    HOST_RSS_PEAK_GIB,
)
from remat.config.options import ConfigError
from remat.config.units import GIB
from remat.machine.host_memory import host_memory, peak_rss_bytes

OPTION = "profile.nvml_interval_s"


class NvmlSampler:
    """A thread that appends a row to `nvml-rank-N.jsonl` every `interval_s` seconds until `close`."""

    def __init__(self, path: Path, handle: Any, interval_s: float) -> None:
        self._path, self._handle, self._interval_s = path, handle, interval_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="remat-nvml", daemon=True)
        path.parent.mkdir(exist_ok=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(5)

    def _run(self) -> None:
        import pynvml

        with self._path.open("a", encoding="utf-8") as out:
            while True:
                try:
                    row = read_nvml(self._handle)
                except pynvml.NVMLError as error:
                    out.write(json.dumps({"time_unix_s": round(time.time(), 3), "error": str(error)}) + "\n")
                    return
                out.write(json.dumps(row) + "\n")
                out.flush()
                if self._over.wait(self._interval_s):
                    return


def read_nvml(handle: Any) -> dict[str, float]:
    """Return one row: bytes in use on the whole GPU, percent of time in which a kernel ran, watts."""
    import pynvml

    return {
        "time_unix_s": round(time.time(), 3),
        "used_bytes": pynvml.nvmlDeviceGetMemoryInfo(handle).used,
        "busy_percent": pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
    }


def find_nvml(device: torch.device) -> Any:
    """Return NVML's handle of torch's device, found by UUID. Raises ConfigError without a GPU or the driver's NVML."""
    if device.type != "cuda":
        raise ConfigError(f"{OPTION} samples an NVIDIA GPU and torch sees none: set {OPTION}=0")
    import pynvml

    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError as error:
        raise ConfigError(f"{OPTION}: NVML cannot be read ({error}): set {OPTION}=0") from error


class MemoryMonitor:
    """This rank's memory figures, under the metric names of `metrics.jsonl`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def sample(self) -> dict[str, float]:
        """Return this rank's figures in GiB. Every rank of a run has the same keys; GPU keys only with a GPU.

        GPU peaks are since the last `reset_peak()`. The host peak is since the process began, loading included,
        because the kernel's high-water mark cannot be reset everywhere.
        """
        rss_bytes = psutil.Process().memory_info().rss
        # not ru_maxrss where there is another: it survives exec, so it can be the launcher's
        peak_bytes = peak_rss_bytes() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        figures = {
            HOST_RSS_GIB: rss_bytes / GIB,
            HOST_RSS_PEAK_GIB: max(rss_bytes, peak_bytes) / GIB,
            HOST_AVAILABLE_GIB: host_memory().available_bytes / GIB,
        }
        if self._device.type == "cuda":
            pinned = torch.cuda.host_memory_stats()
            gpu = torch.cuda.memory_stats(self._device)
            figures[HOST_PINNED_GIB] = pinned.get("allocated_bytes.current", 0) / GIB
            figures[GPU_ALLOCATED_PEAK_GIB] = gpu.get("allocated_bytes.all.peak", 0) / GIB
            figures[GPU_RESERVED_PEAK_GIB] = gpu.get("reserved_bytes.all.peak", 0) / GIB
            figures[GPU_ALLOC_RETRIES] = float(gpu.get("num_alloc_retries", 0))
        return figures

    def reset_peak(self) -> None:
        """Start a new GPU peak; a no-op without a GPU."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
