"""Count the bytes of each optimizer's state on the device of the model, from the tensors that the optimizer is given.

Without ZeRO these are the weights; ZeRO gives flat pieces of them. tests/model/test_optimizer_state.py counts the same
bytes in the optimizers themselves. AdamW keeps 8 bytes per parameter, whatever the shapes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from remat.config.options import OptimName, OptimStates
from remat.model.optimizer import IN_8_BIT

Shape = Sequence[int]
FP32 = 4
IN_8_BIT_FROM = 4096  # elements; a smaller tensor keeps its state in fp32: bitsandbytes/optim/optimizer.py:502
BLOCK = 256  # elements that share an fp32 constant
TABLES_BYTES = 2 * 256 * FP32  # of two tables of 8-bit values, once per process
PAGED_FROM = 100_000  # elements from which a state is paged: bitsandbytes/optim/optimizer.py:383
STREAMED_BYTES = {  # read and written in a step per parameter: fp32 weight twice, gradient once, state twice
    OptimName.adamw: 28,
    OptimName.adamw_8bit: 16,
    OptimName.paged_adamw_8bit: 16,
    OptimName.lion: 20,
    OptimName.adafactor: 92,  # the step's operations read 14 and write 9 tensors of the weight's size
}
SOURCE = {
    OptimName.adamw: "torch.optim.AdamW",
    OptimName.adamw_8bit: "bitsandbytes/optim/optimizer.py:518",
    OptimName.paged_adamw_8bit: "bitsandbytes/optim/optimizer.py:383",
    OptimName.lion: "bitsandbytes/optim/optimizer.py:681",
    OptimName.adafactor: "transformers/optimization.py:1237",
}


@dataclass(frozen=True)
class StateBytes:
    """Bytes on the device, and bytes in paged memory, which the driver moves between device and host on demand."""

    on_device: int
    paged: int = 0


def streamed_bytes(name: OptimName, states: OptimStates) -> int:
    """Return the bytes that a step reads and writes on a GPU per parameter. With 16-bit states AdamW needs half."""
    return STREAMED_BYTES[name] // (2 if states is OptimStates.bf16 else 1)


def count_state(name: OptimName, tensors: Sequence[Shape]) -> StateBytes:
    """Return the state for one rank's `tensors` (shapes in elements) after a step was taken."""
    sizes = [math.prod(shape) for shape in tensors]
    if name is OptimName.adafactor:  # Shazeer and Stern 2018: the means of a matrix's rows and columns
        means = [
            math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1] if len(shape) > 1 else size
            for shape, size in zip(tensors, sizes, strict=True)
        ]
        return StateBytes(FP32 * (sum(means) + len(tensors)))  # and the norm of each weight
    if name is OptimName.lion:
        return StateBytes(FP32 * sum(sizes))
    if name not in IN_8_BIT:
        return StateBytes(2 * FP32 * sum(sizes))
    small = [size for size in sizes if size < IN_8_BIT_FROM]
    large = [size for size in sizes if size >= IN_8_BIT_FROM]
    paged = [size for size in sizes if size >= PAGED_FROM and name is OptimName.paged_adamw_8bit]
    constants = 2 * FP32 * sum(math.ceil(size / BLOCK) for size in large) + TABLES_BYTES * bool(large)
    return StateBytes(2 * FP32 * sum(small) + 2 * (sum(large) - sum(paged)) + constants, 2 * sum(paged))


def shard(shapes: Sequence[Shape], *, zero_stage: int, ranks: int, sub_group_size: int) -> list[Shape]:
    """Return the tensors that DeepSpeed gives the optimizer of one rank, for the trained weights of `shapes`.

    Matrices and vectors are separate groups. Below stage 3 a rank has one piece of each group (stage_1_and_2.py:535).
    At stage 3 it has a piece of each weight, joined into sub-groups (stage3.py:1210).
    """
    groups = _by_dimensions(shapes)
    if zero_stage == 0:
        return [shape for group in groups for shape in group]
    if zero_stage == 3:
        return [[sum(pieces)] for pieces in sub_groups(shapes, ranks=ranks, size=sub_group_size)]
    sizes = (sum(math.prod(shape) for shape in group) for group in groups)
    return [[2 * math.ceil(size / (2 * ranks))] for size in sizes]


def sub_groups(shapes: Sequence[Shape], *, ranks: int, size: int) -> list[list[int]]:
    """Return the elements of one rank's pieces of the trained weights at stage 3, by sub-group (stage3.py:1210).

    The weight that reaches `size` elements closes a sub-group.
    """
    found: list[list[int]] = []
    for group in _by_dimensions(shapes):
        pieces: list[int] = []
        for shape in group:
            pieces.append(math.ceil(math.prod(shape) / ranks))
            if sum(pieces) >= size:
                found.append(pieces)
                pieces = []
        found += [pieces] if pieces else []
    return found


def _by_dimensions(shapes: Sequence[Shape]) -> list[list[Shape]]:
    """Return the groups that are not empty: matrices, then vectors, which have no weight decay."""
    groups = [[s for s in shapes if len(s) > 1], [s for s in shapes if len(s) < 2]]
    return [group for group in groups if group]
