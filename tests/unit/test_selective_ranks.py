"""Kept results of layers that are shared between ranks, whose products are summed in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from remat.activation_checkpointing import operators
from remat.activation_checkpointing.counts import Counts
from remat.activation_checkpointing.recompute import Recompute
from remat.activation_checkpointing.selective import KeptResults
from remat.config import CheckpointingConfig, SelectiveOpsConfig
from tests.pool import RankPool

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


def gradient(save: list[str] | None) -> tuple[torch.Tensor, Counts]:
    """Of the input of a layer whose product, not inside any Linear, is summed over the ranks."""
    torch.manual_seed(0)
    x, weight = torch.randn(4, WIDTH, requires_grad=True), torch.randn(WIDTH, WIDTH)
    counts = Counts()
    kept = KeptResults(nn.Identity(), SelectiveOpsConfig(save=save), counts) if save else None

    def layer(hidden: torch.Tensor) -> torch.Tensor:
        return SumInPlace.apply(hidden.sin() @ weight).exp().sin()

    Recompute(CheckpointingConfig(), context_fn=kept.contexts if kept else None)(layer, x).sum().backward()
    assert x.grad is not None
    return x.grad, counts


def gradients(save: list[str]) -> tuple[torch.Tensor, torch.Tensor, Counts]:
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


@pytest.mark.parametrize(
    ("name", "positions"),
    [("allreduce_", [0, 3]), ("_allgather_base_", [0, 1]), ("broadcast_", [0]), ("alltoall_", [0, 1])],
)
def test_collectives_write_though_their_schemas_do_not_say_so(name: str, positions: list[int]) -> None:
    described = operators.describe(getattr(torch.ops.c10d, name).default)
    assert [position for position, _ in described.writes] == positions
