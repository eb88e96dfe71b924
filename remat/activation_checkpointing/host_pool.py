"""Host buffers that are used again: page-locked for a GPU, ordinary memory where a CPU computes, nothing on `meta`.

torch rounds every page-locked allocation up to a power of two, so asking it for each buffer would waste up to half.
Buffers are therefore cut from slabs that are powers of two themselves, large enough that at most an eighth is left.
"""

from __future__ import annotations

import torch

SMALLEST_SLAB_BYTES = 32 << 20
ALIGNMENT_BYTES = 512
LARGEST_SLAB_IN_BUFFERS = 16


class HostPool:
    """`take(nbytes)` a uint8 buffer and `give` it back. The memory stays until the pool is dropped."""

    def __init__(self, device: torch.device) -> None:
        """`device` is where the model computes."""
        self._pinned = device.type == "cuda"
        self._device = torch.device("meta" if device.type == "meta" else "cpu")
        self._slabs: list[torch.Tensor] = []
        self._rest: list[tuple[torch.Tensor, int]] = []  # slab, where its unused end begins
        self._free: dict[int, list[torch.Tensor]] = {}  # by the bytes a buffer really has
        self.taken_bytes = 0

    @property
    def slab_bytes(self) -> int:
        return sum(slab.numel() for slab in self._slabs)

    def storages(self) -> list[torch.UntypedStorage]:
        return [slab.untyped_storage() for slab in self._slabs]

    def take(self, nbytes: int) -> torch.Tensor:
        """A buffer of at least `nbytes` bytes, aligned to 512: one that fits closely, or a new one."""
        size = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        fitting = [n for n, buffers in list(self._free.items()) if buffers and size <= n <= size + size // 4]
        buffer = self._free[min(fitting)].pop() if fitting else self._cut(size)
        self.taken_bytes += buffer.numel()
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        self.taken_bytes -= buffer.numel()
        self._free.setdefault(buffer.numel(), []).append(buffer)

    def _cut(self, size: int) -> torch.Tensor:
        for place, (slab, start) in enumerate(self._rest):
            if slab.numel() - start >= size:
                self._rest[place] = (slab, start + size)
                return slab[start : start + size]
        slab = torch.empty(slab_bytes(size), dtype=torch.uint8, device=self._device, pin_memory=self._pinned)
        self._slabs.append(slab)
        self._rest.append((slab, size))
        return slab[:size]


def slab_bytes(size: int) -> int:
    """The smallest power of two of which buffers of `size` bytes fill at least seven eighths."""
    slab = max(SMALLEST_SLAB_BYTES, 1 << (size - 1).bit_length())
    while slab % size > slab // 8 and slab < LARGEST_SLAB_IN_BUFFERS * size:
        slab *= 2
    return slab
