"""Reduce tensors over the ranks of a group, in forward or in backward.

On meta tensors nothing is sent and no group is asked for: a plan sees the operation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the collectives as operations
from torch import Tensor

OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def reduce(value: Tensor, group: Any, operation: str = "sum") -> Tensor:
    """Return `value`, in place of which is now the sum or the "max" of the ranks' values."""
    if value.is_meta:
        torch.ops._c10d_functional.all_reduce_(value, operation, "")
    else:
        dist.all_reduce(value, OPERATIONS[operation], group=group)
    return value


class SumInForward(torch.autograd.Function):
    """The sum of the ranks' tensors, in place; its gradient goes to each rank as it is."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        return reduce(value, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class SumInBackward(torch.autograd.Function):
    """A tensor that each rank goes on with by itself: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return reduce(gradients[0].contiguous(), ctx.group), None
