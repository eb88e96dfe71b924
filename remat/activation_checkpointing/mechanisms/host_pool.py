"""Host buffers that are used again: page-locked for a GPU, ordinary memory where a CPU computes, nothing on `meta`.

torch rounds every page-locked allocation up to a power of two, so asking it for each buffer would waste up to half.
Buffers are therefore cut from slabs that are powers of two themselves, large enough that at most an eighth is left.
What comes back is joined with what is free beside it, and slabs that nothing uses make room for one that is larger:
with sequences of many lengths the pool would else keep the buffers of each of them.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

import torch

SMALLEST_SLAB_BYTES = 32 << 20
ALIGNMENT_BYTES = 512
LARGEST_SLAB_IN_BUFFERS = 16


@dataclass
class _Slab:
    memory: torch.Tensor
    free: list[tuple[int, int]] = field(init=False)  # (start, end), in order, none touches the next

    def __post_init__(self) -> None:
        self.free = [(0, self.memory.numel())]

    @property
    def is_unused(self) -> bool:
        return self.free == [(0, self.memory.numel())]

    def cut(self, place: int, size: int) -> torch.Tensor:
        """A buffer from the start of the free range at `place`."""
        start, end = self.free.pop(place)
        if start + size < end:
            self.free.insert(place, (start + size, end))
        return self.memory[start : start + size]

    def give(self, start: int, end: int) -> None:
        place = bisect.bisect(self.free, (start, end))
        if place < len(self.free) and self.free[place][0] == end:
            end = self.free.pop(place)[1]
        if place and self.free[place - 1][1] == start:
            place -= 1
            start = self.free.pop(place)[0]
        self.free.insert(place, (start, end))


class HostPool:
    """`take(nbytes)` a uint8 buffer and `give` it back."""

    def __init__(self, device: torch.device) -> None:
        """`device` is where the model computes."""
        self._pinned = device.type == "cuda"
        self._device = torch.device("meta" if device.type == "meta" else "cpu")
        self._slabs: dict[int, _Slab] = {}  # by the identity of their memory
        self.taken_bytes = 0

    @property
    def slab_bytes(self) -> int:
        return sum(slab.memory.numel() for slab in self._slabs.values())

    def storages(self) -> list[torch.UntypedStorage]:
        return [slab.memory.untyped_storage() for slab in self._slabs.values()]

    def take(self, nbytes: int) -> torch.Tensor:
        """A buffer of at least `nbytes` bytes, aligned to 512: from the smallest free range that holds it."""
        size = max(1, -(-nbytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
        fitting = [
            (end - start, key, place)
            for key, slab in self._slabs.items()
            for place, (start, end) in enumerate(slab.free)
            if end - start >= size
        ]
        _, key, place = min(fitting) if fitting else (size, self._add(size), 0)
        self.taken_bytes += size
        return self._slabs[key].cut(place, size)

    def give(self, buffer: torch.Tensor) -> None:
        start = int(buffer.storage_offset())
        self._slabs[buffer.untyped_storage()._cdata].give(start, start + buffer.numel())
        self.taken_bytes -= buffer.numel()

    def _add(self, size: int) -> int:
        """A slab for buffers of `size` bytes, in place of those that are not in use: each of them is too small."""
        unused = [key for key, slab in self._slabs.items() if slab.is_unused]
        for key in unused:
            del self._slabs[key]
        if unused and self._pinned:
            torch.accelerator.empty_host_cache()  # else torch keeps the page-locked memory for itself
        memory = torch.empty(slab_bytes(size), dtype=torch.uint8, device=self._device, pin_memory=self._pinned)
        key = memory.untyped_storage()._cdata
        self._slabs[key] = _Slab(memory)
        return key


def slab_bytes(size: int) -> int:
    """The smallest power of two of which buffers of `size` bytes fill at least seven eighths."""
    slab = max(SMALLEST_SLAB_BYTES, 1 << (size - 1).bit_length())
    while slab % size > slab // 8 and slab < LARGEST_SLAB_IN_BUFFERS * size:
        slab *= 2
    return slab
