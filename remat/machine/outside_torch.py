"""What a process holds on a GPU outside of torch's allocator: the CUDA context and NCCL's channels."""

from __future__ import annotations

import importlib.metadata

from remat.config.units import GIB, MIB
from remat.machine.node import CONTEXT_BYTES
from remat.machine.versions import numbers

# By the first version that they hold for: bytes of one communicator on each GPU, of two ranks and of more. Others
# measured: 544 and 688 MiB on 4 x A100 with NVLink (August 2023, github.com/NVIDIA/nccl/issues/964); 1.06 GB with the
# CUDA context on 8 x H100 (April 2025, github.com/NVIDIA/nccl/issues/1685); 484 MiB with the context for one rank on
# an RTX 3090 (CUDA 13.0, NVIDIA/nccl pull request 2366).
NCCL_BYTES = {"0": (544 * MIB, 688 * MIB), "2.19": (GIB // 2, GIB // 2)}
NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


def outside_torch_bytes(ranks: int, version: str | None = None) -> int:
    """Return the bytes on each GPU of a run of `ranks` ranks, under this NCCL; None: the one that is installed."""
    return CONTEXT_BYTES + nccl_bytes(ranks, version or nccl_version())


def nccl_bytes(ranks: int, version: str) -> int:
    """Return what NCCL takes on each GPU; nothing with one rank."""
    if ranks < 2:
        return 0
    known = max((since for since in NCCL_BYTES if numbers(since) <= numbers(version)), key=numbers)
    return NCCL_BYTES[known][ranks > 2]


def nccl_version() -> str:
    """Return the version of NCCL that is installed; the newest that is known where none is."""
    for name in NCCL_PACKAGES:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return max(NCCL_BYTES, key=numbers)
