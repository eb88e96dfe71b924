"""ZeRO-3's last product is put off, and computed when anything needs it: also when backward itself is what needs it."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from remat.activation_checkpointing import apply, policy
from remat.activation_checkpointing.mechanisms import lazy_matmul
from remat.config.options import CheckpointingConfig, Policy
from remat.model import meta_kernels

WIDTH = 16


class Unseen(torch.autograd.Function):
    """Copies by address, as a kernel does that is launched without torch's knowledge."""

    @staticmethod
    def forward(ctx: Any, product: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        ctypes.memmove(memory.data_ptr(), product.data_ptr(), product.nbytes)
        ctx.mark_dirty(memory)
        return memory

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class Mlp(nn.Module):
    """Ends in a learned gate: backward needs the last product."""

    unseen = False  # a kernel that allocates nothing reads the product

    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.up, self.down_proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.gate = nn.Parameter(torch.randn(WIDTH)) if gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(x.shape)
        product = self.down_proj(nn.functional.silu(self.up(x)))
        if self.unseen:
            product = Unseen.apply(product, memory)
        return product if self.gate is None else self.gate * product


class Layer(GradientCheckpointingLayer):
    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp(gated)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x[:, None]
        attended = nn.functional.scaled_dot_product_attention(heads, heads, heads)[:, 0]
        return x + self.mlp(self.norm(x + attended))


class Model(nn.Module):
    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.layers = nn.ModuleList(Layer(gated) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def run(kind: Policy, zero_stage: int, gated: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients and recomputed FLOPs, with ZeRO-3's Linear where that is asked for."""
    torch.manual_seed(0)
    net: Any = Model(gated).train()
    cfg = CheckpointingConfig(policy=kind)
    applied = apply.apply(net, policy.decide_layers(cfg, 2, zero_stage=zero_stage), cfg, zero_stage=zero_stage)
    dirty = [torch.full((14, WIDTH), 1e3) for _ in range(50)]  # so that memory that is never written is noticed
    del dirty
    watch = applied.watch(torch.device("cpu"))
    with meta_kernels.linear_of(zero_stage), applied.micro_batch(), watch:
        (net(torch.arange(14).view(2, 7) % 10) ** 2).sum().backward()
    applied.remove()
    assert not any(module._forward_pre_hooks for module in net.modules())
    return {name: p.grad for name, p in net.named_parameters()}, watch.total_flops("recompute")


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("zero_stage", [0, 3])
@pytest.mark.parametrize("kind", [Policy.full, Policy.selective_ops, Policy.selective_modules])
def test_gradients_are_those_of_none(kind: Policy, zero_stage: int, gated: bool) -> None:
    expected, _ = run(Policy.none, zero_stage, gated)
    found, _ = run(kind, zero_stage, gated)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("kind", [Policy.full, Policy.selective_ops, Policy.selective_modules])
def test_a_kernel_that_allocates_nothing_reads_the_product(
    kind: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mlp, "unseen", True)
    expected, _ = run(Policy.none, 3, gated=True)
    found, _ = run(kind, 3, gated=True)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_product_of_another_type_than_its_matrices_is_not_put_off() -> None:
    half = torch.empty(2, 2, dtype=torch.bfloat16, device="meta")
    with lazy_matmul._DeferMode() as mode:
        assert torch.ops.aten.mm.dtype(half, half, torch.float32).dtype == torch.float32
        assert mode.postponed._compute is None
        assert torch.mm(half, half).dtype == torch.bfloat16
        assert mode.postponed._compute is not None


@pytest.mark.parametrize("kind", [Policy.full, Policy.selective_ops, Policy.selective_modules])
def test_the_product_is_computed_only_when_it_is_needed(kind: Policy) -> None:
    product = 2 * 2 * 14 * 2 * WIDTH * WIDTH  # of both layers
    spared, needed = run(kind, 3, gated=False)[1], run(kind, 3, gated=True)[1]
    assert needed - spared == product


def test_a_linear_that_replaced_another_after_the_policy_was_in_place_is_spared_too() -> None:
    torch.manual_seed(0)
    region = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    spared = lazy_matmul.SkipLastMatmul(region)
    old, region[2] = region[2], nn.Linear(WIDTH, WIDTH)
    spared.contexts()
    spared.contexts()
    assert [len(module._forward_pre_hooks) for module in (region[0], old, region[2])] == [1, 0, 1]
    spared.close()
    assert not any(module._forward_pre_hooks for module in region.modules())


def test_a_layer_that_takes_a_gradient_inside_is_recomputed_more_than_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class TakesGradient(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            probe = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.mlp(self.norm(probe)).sum(), probe)
            return x + self.mlp(self.norm(x + 0.1 * slope))

    monkeypatch.setattr(sys.modules[__name__], "Layer", TakesGradient)
    expected, _ = run(Policy.none, 3, False)
    found, _ = run(Policy.full, 3, False)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
