"""Configure torch's allocators of GPU memory and of pinned host memory, before torch starts in a rank.

torch reads one variable, the first that is set: PYTORCH_CUDA_ALLOC_CONF, then PYTORCH_ALLOC_CONF
(c10/cuda/CUDAAllocatorConfig.h:136). A variable that the user set is left as it is. Loads no torch.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from remat.config.options import AllocatorConfig
from remat.config.units import MIB
from remat.machine.versions import numbers

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
EXACT_SINCE = "2.13"  # torch refuses keys that it does not know
# Larger pinned buffers have their exact size and are returned to the system when freed. A batch of tokens is smaller:
# pinning it anew at every step would stop the GPU.
EXACT_ABOVE_MIB = 16
PINNED_KEYS = ("pinned_max_round_threshold_mb", "pinned_max_cached_size_mb")


@dataclass(frozen=True)
class Allocators:
    """Settings of torch's allocators.

    Pinned buffers of up to `exact_above_bytes` are rounded up to a power of two; None: all of them are.
    """

    expandable_segments: bool = False
    exact_above_bytes: int | None = None

    def pinned_bytes(self, size: int) -> int:
        """Return the bytes that a pinned buffer of `size` bytes takes (ATen/core/CachingHostAllocator.h:302)."""
        if size <= 0 or (self.exact_above_bytes is not None and size > self.exact_above_bytes):
            return max(0, size)
        return 1 << (size - 1).bit_length()


TORCH_DEFAULT = Allocators()


def settle(cfg: AllocatorConfig, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set PYTORCH_ALLOC_CONF as `cfg` asks, unless the user set one of VARIABLES. Call it before torch starts."""
    value = _composed(cfg)
    if value and not any(name in environ for name in VARIABLES):
        environ[VARIABLES[-1]] = value


def in_effect(cfg: AllocatorConfig, environ: Mapping[str, str] = os.environ) -> Allocators:
    """Return the allocators' settings for a run with `cfg` in this environment."""
    value = next((environ[name] for name in VARIABLES if name in environ), None)
    return _parsed(_composed(cfg) if value is None else value)


@functools.cache  # a search asks hundreds of times, and each answer is read from files
def torch_version() -> str:
    """Return the version of the torch that is installed, without importing it."""
    return importlib.metadata.version("torch")


def _composed(cfg: AllocatorConfig) -> str:
    words = []
    if cfg.expandable_segments:
        words.append("expandable_segments:True")
    if cfg.exact_pinned and numbers(torch_version()) >= numbers(EXACT_SINCE):
        # Set both: torch finds a cached block by its power of two alone, and one of exact size may be too small then
        # (CachingHostAllocator.h, get_free_block). Blocks larger than cached_size are not cached.
        words += [f"{key}:{EXACT_ABOVE_MIB}" for key in PINNED_KEYS]
    return ",".join(words)


def _parsed(value: str) -> Allocators:
    """Read the two settings from a variable's value, `key:value` with commas between."""
    found = dict(re.findall(r"(\w+)\s*:\s*([\w.]+)", value))
    limits = [int(found[key]) for key in PINNED_KEYS if found.get(key, "").isdigit()]
    return Allocators(
        expandable_segments=found.get("expandable_segments", "False").lower() == "true",
        exact_above_bytes=min(limits) * MIB if limits else None,
    )
