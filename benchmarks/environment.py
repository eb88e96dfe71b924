"""Hardware, versions, commit and date: what a figure needs beside it."""

from __future__ import annotations

import os
import platform
import time
from typing import Any

from remat.machine.host_memory import host_memory
from remat.report import run_dir


def environment(device: str) -> dict[str, Any]:
    """Of this machine; None where a CPU has no such thing. On a GPU this process gets a context on it."""
    import deepspeed
    import torch
    import transformers

    on_gpu = device == "cuda"
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "gpu_bytes": torch.cuda.get_device_properties(0).total_memory if on_gpu else None,
        "cuda": torch.version.cuda if on_gpu else None,
        "driver": driver() if on_gpu else None,
        "attention": attention_kernel(device) if on_gpu else None,
        "host_bytes": host_memory().limit_bytes,
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "deepspeed": deepspeed.__version__,
        "transformers": transformers.__version__,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def attention_kernel(device: str) -> str:
    """The kernel that torch chooses for causal attention in training: bf16, 8 heads of 128, 256 tokens."""
    import torch
    from torch.nn.attention import SDPBackend

    query, key, value = (
        torch.zeros(1, 8, 256, 128, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    return SDPBackend(torch._fused_sdp_choice(query, key, value, None, 0.0, True)).name


def driver() -> str | None:
    """The version of NVIDIA's driver; None where NVML does not answer, as in some containers."""
    import pynvml

    try:
        pynvml.nvmlInit()
        found = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError:
        return None
    return found.decode() if isinstance(found, bytes) else str(found)


def commit() -> str:
    return run_dir.commit() or "unknown"
