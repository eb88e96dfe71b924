"""Reduce tensors over the ranks of a group, in forward or in backward.

On meta tensors nothing is sent and no group is needed; a plan still sees the operation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the collectives as operations
from torch import Tensor

OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def reduce(value: Tensor, group: Any, operation: str = "sum") -> Tensor:
    """Replace `value` in place by the "sum" or "max" of the ranks' values, and return it. Collective."""
    if value.is_meta:
        torch.ops._c10d_functional.all_reduce_(value, operation, "")
    else:
        dist.all_reduce(value, OPERATIONS[operation], group=group)
    return value


class SumInForward(torch.autograd.Function):
    """Sum the ranks' tensors in place. In backward each rank gets the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        return reduce(value, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class SumInBackward(torch.autograd.Function):
    """Return the tensor unchanged. In backward sum the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return reduce(gradients[0].contiguous(), ctx.group), None
