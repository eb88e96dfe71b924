"""Policies change what is kept, never what is computed; and the counters tell the truth."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from remat.activation_checkpointing import layers, policy, recompute
from remat.config import CheckpointingConfig, ConfigError, Policy
from tests.live_bytes import LiveBytes

SMALL = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "gpt2": {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "gemma": {"num_key_value_heads": 2, "head_dim": 16},
    "phi": {},
}


def build(model_type: str) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    }
    config = AutoConfig.for_model(model_type, use_cache=False, **(sizes | SMALL[model_type]))
    net = AutoModelForCausalLM.from_config(config)
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):  # zero biases hide wrong gradients
            torch.nn.init.normal_(parameter, std=0.02)
    return net.train()


def gradients(net: torch.nn.Module, kind: Policy) -> tuple[torch.Tensor, list[torch.Tensor], recompute.Applied]:
    applied = recompute.apply(net, policy.plan(CheckpointingConfig(policy=kind), 3))
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(3))
    net.zero_grad()
    torch.manual_seed(7)
    loss = net(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in net.parameters() if p.grad is not None], applied


@pytest.mark.parametrize("model_type", list(SMALL))
def test_full_is_bit_equal_to_none(model_type: str) -> None:
    net = build(model_type)
    loss, kept, none = gradients(net, Policy.none)
    again, recomputed, full = gradients(net, Policy.full)
    assert torch.equal(loss, again)
    assert len(kept) == len(recomputed) > 0
    assert all(torch.equal(a, b) for a, b in zip(kept, recomputed, strict=True))
    assert none.recomputations == [0, 0, 0]
    assert full.recomputations == full.forwards == [1, 1, 1]
    none.verify()
    full.verify()


def test_full_keeps_one_hidden_state_per_layer() -> None:
    kept = {}
    for kind in Policy:
        net = build("llama")
        recompute.apply(net, policy.plan(CheckpointingConfig(policy=kind), 3))
        ids = torch.randint(0, 64, (2, 16))
        with LiveBytes() as live:
            output = net.model(input_ids=ids, use_cache=False).last_hidden_state
        kept[kind] = live.live_bytes
        assert output.requires_grad
    hidden = 2 * 16 * 32 * 4
    assert kept[Policy.none] > 3 * 15 * hidden
    assert kept[Policy.full] < (3 + 8) * hidden


def test_a_policy_that_does_not_run_is_found_out() -> None:
    net = build("llama")
    _, _, applied = gradients(net, Policy.full)
    applied.recomputations[1] = 0
    with pytest.raises(recompute.NotInEffect, match=r"layers \[1\]"):
        applied.verify()
    applied.reset()
    with pytest.raises(recompute.NotInEffect, match="no layer ran"):
        applied.verify()


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="checkpointing=none"):
        layers.decoder_layers(torch.nn.Linear(2, 2))


def test_none_asks_nothing_of_the_model() -> None:
    applied = recompute.apply(torch.nn.Linear(2, 2), policy.plan(CheckpointingConfig(policy=Policy.none), 0))
    applied.verify()
    assert applied.proven


def test_the_header_says_what_the_policy_does() -> None:
    assert (
        policy.describe(CheckpointingConfig(policy=Policy.full), 3)
        == "full (3 of 3 layers recomputed in backward)"
    )
