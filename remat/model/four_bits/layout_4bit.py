"""Lay out the parts of a matrix in 4-bit NF4 in one flat parameter of bytes, which ZeRO-3 shards like any weight.

The parts are those of bitsandbytes 0.50.2 with doubly quantised constants (functional.py:884). Each begins at a
multiple of 16 bytes, as the kernels of bitsandbytes need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch

BLOCK, BLOCK_OF_CONSTANTS = 64, 256  # weights that share an 8-bit constant, constants that share an fp32 one
ALIGNED_BYTES = 16


@dataclass(frozen=True)
class Layout:
    """The parts of a matrix of `shape` [out, in] whose products are in `dtype`."""

    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def num_blocks(self) -> int:
        return math.ceil(math.prod(self.shape) / BLOCK)

    @property
    def part_bytes(self) -> tuple[int, int, int, int]:
        """Return the bytes of the packed weights, their 8-bit constants, the fp32 constants of these, and the mean."""
        packed = math.ceil(math.prod(self.shape) / 2)
        return packed, self.num_blocks, 4 * math.ceil(self.num_blocks / BLOCK_OF_CONSTANTS), 4

    @property
    def starts(self) -> list[int]:
        """Return the offset of each part in bytes, and as the last entry the bytes of all parts."""
        aligned = (-(-size // ALIGNED_BYTES) * ALIGNED_BYTES for size in self.part_bytes)
        return list(accumulate(aligned, initial=0))

    @property
    def flat_bytes(self) -> int:
        return self.starts[-1]

    def cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views, as bytes, of the four parts of a gathered `flat` parameter [flat_bytes]."""
        return [
            flat[start : start + size] for start, size in zip(self.starts[:-1], self.part_bytes, strict=True)
        ]


def flat_bytes(elements: int) -> int:
    """Return the bytes of the flat parameter for a matrix of `elements` weights."""
    return Layout((1, elements), torch.float32).flat_bytes
