"""What the driver says of this rank's GPU, sampled in a thread beside training: memory of all processes, load, power.

NVML is read through NVIDIA's own binding (nvidia-ml-py). It sees what torch's allocator does not: the CUDA context,
NCCL's buffers, other processes on the GPU.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import torch

from remat.config.options import ConfigError

OPTION = "profile.nvml_interval_s"


class NvmlSampler:
    """Appends a row to `nvml-rank-N.jsonl` every `interval_s` seconds until `close`."""

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
                    row = read(self._handle)
                except pynvml.NVMLError as error:
                    out.write(json.dumps({"time_unix_s": round(time.time(), 3), "error": str(error)}) + "\n")
                    return
                out.write(json.dumps(row) + "\n")
                out.flush()
                if self._over.wait(self._interval_s):
                    return


def read(handle: Any) -> dict[str, float]:
    """One row: bytes in use on the whole GPU, percent of time in which a kernel ran, watts."""
    import pynvml

    return {
        "time_unix_s": round(time.time(), 3),
        "used_bytes": pynvml.nvmlDeviceGetMemoryInfo(handle).used,
        "busy_percent": pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
    }


def find(device: torch.device) -> Any:
    """NVML's handle of torch's device, by its UUID. Raises ConfigError without a GPU or without a driver's NVML."""
    if device.type != "cuda":
        raise ConfigError(f"{OPTION} samples an NVIDIA GPU and torch sees none: set {OPTION}=0")
    import pynvml

    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError as error:
        raise ConfigError(f"{OPTION}: NVML cannot be read ({error}): set {OPTION}=0") from error
