"""Activations in 8 bits: bounded error, exact zeros, and nothing that is no number becomes one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from remat.activation_checkpointing import validation
from remat.activation_checkpointing.mechanisms import offload
from remat.activation_checkpointing.mechanisms.mechanism import Setting
from remat.config.options import Attention, CheckpointingConfig, Policy, StorageDtype
from tests.support import small_models, watched

EIGHT_BITS = [StorageDtype.fp8, StorageDtype.int8]


def there_and_back(tensor: torch.Tensor, dtype: StorageDtype) -> torch.Tensor:
    return offload.decode(*offload.encode(tensor, dtype), tensor.dtype)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_error_bounds(stored: torch.dtype) -> None:
    torch.manual_seed(0)
    values = (torch.randn(64, 256) * torch.logspace(-3, 3, 64)[:, None]).to(stored)
    largest = values.float().abs().amax(-1, keepdim=True)
    rounding = torch.finfo(stored).eps  # of the type it comes back in
    error = (there_and_back(values, StorageDtype.int8).float() - values.float()).abs()
    assert (error <= largest * (1 / 254 + rounding)).all()
    error = (there_and_back(values, StorageDtype.fp8).float() - values.float()).abs()
    smallest_normal = largest / 448 / 64
    assert (error <= torch.maximum(values.float().abs(), smallest_normal) * (1 / 16 + rounding)).all()


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_what_is_stored(dtype: StorageDtype) -> None:
    payload, scales = offload.encode(torch.randn(3, 4, 32), dtype)
    assert payload.shape == (3, 4, 32)
    assert payload.element_size() == 1
    assert scales.shape == (3, 4, 1)
    assert scales.dtype == torch.float32


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_exact_values(dtype: StorageDtype) -> None:
    values = torch.zeros(3, 32)
    values[1, 5], values[2] = -3.5, 1e-45
    back = there_and_back(values, dtype)
    assert torch.equal(back[:2], values[:2])  # zeros, and the largest of a row
    assert torch.isfinite(back).all()


@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so_and_spares_its_row(dtype: StorageDtype, bad: float) -> None:
    torch.manual_seed(0)
    values = torch.randn(2, 32)
    clean = there_and_back(values, dtype)
    values[0, 3] = bad
    back = there_and_back(values, dtype)
    assert not torch.isfinite(back[0, 3])
    assert torch.isfinite(back).sum() == 63
    assert torch.allclose(back[1], clean[1])
    assert torch.allclose(back[0, 4:], values[0, 4:], rtol=1 / 15, atol=0.02)


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_a_model_with_stored_inputs_in_8_bits(dtype: StorageDtype) -> None:
    """The loss is not touched, gradients are close, and a quarter of fp32 plus the scales is moved."""
    net = small_models.build("llama")
    kept = watched.run(net, watched.NONE)
    result = watched.run(net, CheckpointingConfig(offload=watched.offload_all(dtype=dtype)))
    assert torch.equal(result.loss, kept.loss)
    flat = torch.cat([g.flatten() for g in result.gradients.values()])
    exact = torch.cat([g.flatten() for g in kept.gradients.values()])
    error = (flat - exact).norm() / exact.norm()
    assert 0 < error < {StorageDtype.fp8: 0.05, StorageDtype.int8: 0.01}[dtype]
    tokens = 2 * 16
    assert [c.moved_bytes for c in result.applied.counts] == [tokens * 32 + tokens * 4] * 3


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_a_nan_in_an_activation_reaches_the_gradient(dtype: StorageDtype) -> None:
    net = small_models.build("llama")
    with torch.no_grad():
        net.model.embed_tokens.weight[3, 0] = torch.nan
    ids = torch.full((1, 4), 3)
    result = watched.run(net, CheckpointingConfig(offload=watched.offload_all(dtype=dtype)), ids)
    assert result.gradients["model.layers.0.mlp.up_proj.weight"].isnan().any()


@pytest.mark.parametrize(
    "policies", [{}, {"policy": Policy.selective_ops}, {"layers": {1: Policy.selective_ops}}]
)
def test_results_that_an_operator_list_keeps_stay_exact(policies: dict[str, Any]) -> None:
    net = small_models.build("llama")
    setting = Setting(
        zero_stage=0,
        tensor_parallel_size=1,
        has_gpu=True,
        attention=Attention.sdpa,
        lora_dropout=0.0,
        fields={},
        activation_elements=1 << 20,
        element_bytes=2,
    )
    cfg = CheckpointingConfig(offload=watched.offload_all(dtype=StorageDtype.fp8), **policies)
    found = validation.problems(cfg, list(net.model.layers), setting)
    assert [text.split(":")[0] for text in found] == (
        ["checkpointing.offload.dtype=fp8 with checkpointing=selective_ops"] if policies else []
    )
