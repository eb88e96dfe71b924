"""Every policy on a GPU: the gradients of none within bf16 rounding, in effect, and less memory where promised."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from remat.activation_checkpointing import apply, policy, verification
from remat.activation_checkpointing.mechanisms import tiles
from remat.activation_checkpointing.mechanisms.mechanism import LayerDecision
from remat.config import compose
from remat.config.options import CheckpointingConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch sees none"),
]
LAYERS, WIDTH, TOKENS = 6, 512, 2048
NEEDS_PROCESS_GROUP = {"deepspeed"}
OFFLOAD = ["checkpointing.offload.enabled=true"]
MODES = {name: [f"checkpointing={name}"] for name in compose.group_choices()["checkpointing"]}
MODES |= {f"{name} + offload": [*MODES[name], *OFFLOAD] for name in ("none", "uniform", "selective_linears")}
MODES |= {"full, tiles=8": ["checkpointing=full", "checkpointing.tiles=8"]}
NAMES = sorted(set(MODES) - NEEDS_PROCESS_GROUP)


def configuration(name: str) -> CheckpointingConfig:
    return compose.compose_run(MODES[name]).run.checkpointing


@pytest.fixture(scope="module")
def net() -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=1024,
        use_cache=False,
    )
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def decide(net: Any, cfg: CheckpointingConfig) -> list[LayerDecision]:
    ids = torch.zeros(1, 8, dtype=torch.long, device="cuda")
    return tiles.find_tilings(
        net, policy.decide_layers(cfg, LAYERS), lambda: net(input_ids=ids, use_cache=False)
    )


def step(net: Any, applied: apply.Applied) -> torch.Tensor:
    ids = torch.arange(2 * TOKENS, device="cuda").view(2, TOKENS) % 1024
    with applied.micro_batch():
        loss = net(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    return loss.detach()


def run(net: Any, cfg: CheckpointingConfig) -> tuple[torch.Tensor, list[torch.Tensor], int, list[str]]:
    """Loss, gradients, peak above the weights, broken promises."""
    applied = apply.apply(net, decide(net, cfg), cfg, device=torch.device("cuda"))
    net.zero_grad()
    ids = torch.arange(2 * TOKENS, device="cuda").view(2, TOKENS) % 1024
    watch = applied.watch(torch.device("cuda"))
    with applied.micro_batch(), watch:
        hidden = net.model(input_ids=ids, use_cache=False).last_hidden_state
        watch.forward_done()
        hidden.sum().backward()
    broken = verification.unmet_expectations(applied, watch, cfg)
    net.zero_grad()
    gc.collect()  # what is freed later would hide a part of the peak
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    loss = step(net, applied)
    peak = torch.cuda.max_memory_allocated() - base
    applied.remove()
    return loss, [p.grad.clone() for p in net.parameters()], peak, broken


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_none_and_the_policy_is_in_effect(name: str, net: Any) -> None:
    loss, kept, _, _ = run(net, configuration("none"))
    again, recomputed, _, broken = run(net, configuration(name))
    assert broken == []
    assert again.item() == pytest.approx(loss.item(), rel=1e-3)
    for one, other in zip(kept, recomputed, strict=True):
        assert (one - other).float().norm() <= 2e-2 * one.float().norm()


def test_peaks_fall_in_the_order_of_what_is_kept(net: Any) -> None:
    peak = {name: run(net, configuration(name))[2] for name in NAMES}
    assert peak["offload"] <= peak["full"] < peak["selective_linears"] < peak["none"]
    assert peak["none + offload"] < peak["none"]
    assert peak["full, tiles=8"] < peak["full"]
    assert peak["selective_linears + offload"] < peak["selective_linears"]
    assert peak["discard_output"] < peak["none"]


@pytest.mark.parametrize("name", NAMES)
def test_fifty_steps_hold_allocated_memory_flat(name: str, net: Any) -> None:
    cfg = configuration(name)
    applied = apply.apply(net, decide(net, cfg), cfg, device=torch.device("cuda"))
    for _ in range(3):
        step(net, applied)
        net.zero_grad()
    torch.cuda.synchronize()
    gc.collect()
    allocated = torch.cuda.memory_allocated()
    for _ in range(50):
        step(net, applied)
        net.zero_grad()
    torch.cuda.synchronize()
    gc.collect()
    after = torch.cuda.memory_allocated()
    applied.remove()
    assert after == allocated
