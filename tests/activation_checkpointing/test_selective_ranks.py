"""Kept results of layers that are shared between ranks, whose products are summed in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from remat.activation_checkpointing.mechanisms import operators
from remat.activation_checkpointing.mechanisms.counters import LayerCounters
from remat.activation_checkpointing.mechanisms.recompute import Recompute
from remat.activation_checkpointing.mechanisms.selective_ops import SelectiveCheckpoint
from remat.config.options import CheckpointingConfig, SelectiveOpsConfig
from tests.support.pool import RankPool

WIDTH = 8


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    ranks = RankPool(2)
    yield ranks
    ranks.close()


class SumInPlace(torch.autograd.Function):
    """As RowParallel in deepspeed/module_inject/layers.py."""

    @staticmethod
    def forward(ctx: Any, product: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(product)
        return product

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def gradient(save: list[str] | None) -> tuple[torch.Tensor, LayerCounters]:
    """Of the input of a layer whose product, not inside any Linear, is summed over the ranks."""
    torch.manual_seed(0)
    x, weight = torch.randn(4, WIDTH, requires_grad=True), torch.randn(WIDTH, WIDTH)
    counts = LayerCounters()
    kept = SelectiveCheckpoint(nn.Identity(), SelectiveOpsConfig(save=save), counts) if save else None

    def layer(hidden: torch.Tensor) -> torch.Tensor:
        return SumInPlace.apply(hidden.sin() @ weight).exp().sin()

    Recompute(CheckpointingConfig(), context_fn=kept.contexts if kept else None)(layer, x).sum().backward()
    assert x.grad is not None
    return x.grad, counts


def gradients(save: list[str]) -> tuple[torch.Tensor, torch.Tensor, LayerCounters]:
    expected, _ = gradient(None)
    found, counts = gradient(save)
    return expected, found, counts


@pytest.mark.parametrize("save", ["matmul", "every_other_matmul", "aten::mm"])
def test_a_product_that_is_summed_in_place_outside_a_linear_is_not_handed_back(
    save: str, pool: RankPool
) -> None:
    for expected, found, counts in pool.run(gradients, save=[save]):
        assert torch.equal(expected, found)
        assert (counts.kept_outputs, counts.reused_outputs) == (0, 0)


class SharedLinear(nn.Linear):
    """Row-parallel: its bias comes after the sum. `peek` looks at the product before."""

    peek = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = torch.matmul(x, self.weight.transpose(-1, -2))
        seen = product.detach().exp().sum() if self.peek else 0.0
        return SumInPlace.apply(product) + self.bias + seen


def shared_layer(kept_linear: bool, peek: bool) -> tuple[torch.Tensor, LayerCounters, int]:
    """Gradient of the input, what was counted, and how many sums over the ranks forward and backward made."""
    torch.manual_seed(dist.get_rank())
    layer = nn.Sequential(SharedLinear(WIDTH, WIDTH))
    layer[0].peek = peek  # type: ignore[assignment]
    x = torch.randn(2, 4, WIDTH, requires_grad=True)
    counts = LayerCounters()
    results = (
        SelectiveCheckpoint(layer, SelectiveOpsConfig(save=[], save_linears=["0"]), counts)
        if kept_linear
        else None
    )
    recompute = Recompute(CheckpointingConfig(), context_fn=results.contexts if results else None)
    with Sums() as sums:
        recompute(lambda hidden: layer(hidden.sin()).exp().sin(), x).sum().backward()
    assert x.grad is not None
    return x.grad, counts, sums.found


class Sums(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += func is torch.ops.c10d.allreduce_.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("peek", [False, True])
def test_a_sum_inside_a_named_linear_is_part_of_its_result_and_not_made_again(
    peek: bool, pool: RankPool
) -> None:
    plain = pool.run(shared_layer, kept_linear=False, peek=peek)
    kept = pool.run(shared_layer, kept_linear=True, peek=peek)
    for (expected, _, sums), (found, counts, sums_with_kept) in zip(plain, kept, strict=True):
        assert torch.equal(expected, found)
        assert counts.reused_outputs == (0 if peek else 1)  # what was looked at half-way is computed again
        assert (sums, sums_with_kept) == (2, 2 if peek else 1)


@pytest.mark.parametrize(
    ("name", "positions"),
    [("allreduce_", [0, 3]), ("_allgather_base_", [0, 1]), ("broadcast_", [0]), ("alltoall_", [0, 1])],
)
def test_collectives_write_though_their_schemas_do_not_say_so(name: str, positions: list[int]) -> None:
    described = operators.describe(getattr(torch.ops.c10d, name).default)
    assert [position for position, _ in described.writes] == positions
