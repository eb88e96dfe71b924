"""What one operation costs: FLOPs, bytes moved, and memory that its GPU kernel allocates within."""

from __future__ import annotations

from typing import Any

import torch

from remat.model import op_flops
from remat.planning.simulation.types import OpCost, Phase

aten = torch.ops.aten
UNSHARED = 4  # what _use_count() says of a gradient that only autograd has, while an operation on it is watched


def op_cost(
    func: Any,
    args: Any,
    kwargs: Any,
    result: Any,
    given: list[torch.Tensor],
    made: list[torch.Tensor],
    phase: Phase,
) -> OpCost | None:
    """None for what runs nothing: views, and memory that is only allocated."""
    if _is_free(func, given, made):
        return None
    formula = op_flops.flop_formula(func)
    flops = int(formula(*args, **kwargs, out_val=result)) if formula else 0
    name = str(func)
    kind = "elementwise" if formula is None else "attention" if "attention" in name else "matmul"
    return OpCost(kind, flops, sum(t.nbytes for t in given) + sum(t.nbytes for t in made), phase)


def dequantisation(func: Any, args: Any, phase: Phase) -> OpCost | None:
    """That copy is written, and read by the product."""
    size = op_flops.dequantised_bytes(func, args)
    return OpCost("elementwise", 0, 2 * size + args[1].nbytes, phase) if size else None


def _is_free(func: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
    if not isinstance(func, torch._ops.OpOverload):
        return False
    if not made or "empty" in func.name():
        return True
    if func._schema.is_mutable:
        return False
    owners = {tensor.untyped_storage()._cdata for tensor in given}
    return all(tensor.untyped_storage()._cdata in owners for tensor in made)


def workspace_bytes(func: Any, args: Any) -> int:
    """Scratch of attention's backward, below what a dispatcher sees.

    Flash (torch 2.13, flash_attn/flash_api.cpp, mha_bwd): an fp32 copy of the query's gradient, padded to 128 rows
    and 32 columns, and one number per row; grouped heads get whole gradients of key and value first. Efficient
    (transformers/cuda/attention_backward.cu): one number per row, and fp32 accumulators. And what a GPU's product with
    a 4-bit weight holds on top of `dequantised_bytes`: its constants before their mean is added.
    """
    if (dequantised := op_flops.dequantised_bytes(func, args)) > 0:
        return dequantised - int(args[0].element_size()) * args[2][0] * args[2][1]  # the constants once more
    if func is aten._scaled_dot_product_flash_attention_backward.default:
        query, key = args[1], args[2]
        batch, heads, rows, width = query.shape
        padded = batch * heads * (-(-rows // 128) * 128)
        expanded = 2 * batch * heads * key.shape[2] * width * query.element_size()
        return int(4 * padded * (-(-width // 32) * 32 + 1) + (expanded if key.shape[1] != heads else 0))
    if func is aten._scaled_dot_product_efficient_attention_backward.default:
        batch, heads, rows, width = args[1].shape
        return int(4 * batch * heads * rows * (width + 1))
    return 0


def summed_in_place_bytes(func: Any, args: Any) -> int:
    """Bytes of a sum that autograd would have written over one of its terms, were there no dispatch mode.

    torch/csrc/autograd/input_buffer.cpp: two gradients of one tensor are added in place when nobody else has one of
    them, but never under a mode. `func` runs in backward.
    """
    if func is not aten.add.Tensor or not all(isinstance(term, torch.Tensor) for term in args[:2]):
        return 0
    first, second = args[0], args[1]
    if first.shape != second.shape or first.dtype != second.dtype:
        return 0
    return int(first.nbytes) if min(first._use_count(), second._use_count()) <= UNSHARED else 0
