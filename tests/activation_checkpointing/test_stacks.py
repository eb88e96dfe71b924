"""Which layers of a model a policy treats: all stacks for text, in order, and no tower without a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from remat.activation_checkpointing import apply, policy, validation, verification
from remat.activation_checkpointing.mechanisms import recompute
from remat.activation_checkpointing.mechanisms.mechanism import KEEP, Setting
from remat.config.options import Attention, CheckpointingConfig, ConfigError, OffloadConfig, Policy
from remat.model import layers
from tests.support import small_models, watched

HRM = {"num_layers_per_stack": 4, "H_cycles": 1, "L_cycles": 2, "head_dim": 16}
TOWERS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": small_models.SIZES | {"head_dim": 16},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 7,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        "mm_tokens_per_image": 4,
    },
    "git": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 7,
            "num_attention_heads": 2,
        }
    },
}


def skeleton(model_type: str, **more: Any) -> Any:
    config = AutoConfig.for_model(model_type, **more)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def hrm() -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model("hrm_text", **(small_models.SIZES | HRM))
    return AutoModelForCausalLM.from_config(config).train()


@pytest.mark.parametrize(
    "cfg",
    [
        CheckpointingConfig(),
        CheckpointingConfig(policy=Policy.sqrt),
        CheckpointingConfig(layers={"4-7": Policy.none}),
        CheckpointingConfig(policy=Policy.discard_output),
        CheckpointingConfig(offload=OffloadConfig(enabled=True, min_bytes=0)),
    ],
    ids=["full", "sqrt", "one stack", "discard_output", "offload"],
)
def test_two_stacks_are_treated_and_proven(cfg: CheckpointingConfig) -> None:
    net = hrm()
    found = layers.find_stacks(net)
    decisions = policy.decide_layers(cfg, 8, stacks=found.depths)
    result, kept = watched.run(net, cfg), watched.run(net, watched.NONE)
    assert watched.differences(result, kept) == []
    assert verification.unmet_expectations(result.applied, result.watch, cfg) == []
    again = [counts.recomputations > 0 for counts in result.applied.counts]
    assert again == [decision.mechanism != KEEP for decision in decisions]
    assert "layers 0-3 are model.L_module.layers, 4-7 are model.H_module.layers" in verification.line(
        result.applied, result.watch
    )


@pytest.mark.parametrize(
    ("cfg", "calls"),
    [
        (CheckpointingConfig(policy=Policy.uniform, segment_layers=3), ["0-2", "3-3", "4-6", "7-7"]),
        (CheckpointingConfig(policy=Policy.sqrt), ["0-1", "2-3", "4-5", "6-7"]),
        (CheckpointingConfig(policy=Policy.none, layers={"2-6": Policy.uniform}), ["2-3", "4-5", "6-6"]),
    ],
)
def test_no_segment_crosses_from_one_stack_into_the_next(cfg: CheckpointingConfig, calls: list[str]) -> None:
    decisions = policy.decide_layers(cfg, 8, stacks=[4, 4])
    found = {f"{d.first}-{d.last}" for d in decisions if d.mechanism == recompute.MECHANISM}
    assert sorted(found) == calls


def test_a_segment_longer_than_the_longest_stack_is_refused() -> None:
    net = hrm()
    setting = Setting(
        zero_stage=0,
        tensor_parallel_size=1,
        has_gpu=False,
        attention=Attention.sdpa,
        lora_dropout=0.0,
        fields={},
        activation_elements=1024,
        element_bytes=4,
        stacks=[4, 4],
    )
    cfg = CheckpointingConfig(policy=Policy.uniform, segment_layers=5)
    (text,) = validation.problems(cfg, list(layers.decoder_layers(net)), setting)
    assert text == "checkpointing.segment_layers=5: its longest stack of layers has 4 layers; give at most that"


@pytest.mark.parametrize("model_type", list(TOWERS))
def test_a_tower_is_left_alone_and_named_however_deep(model_type: str) -> None:
    net = skeleton(model_type, **TOWERS[model_type])
    found = layers.find_stacks(net)
    (treated,), (tower,) = found.treated, found.left_alone
    assert (
        "Vision" not in treated.kinds and len(treated.layers) == net.config.get_text_config().num_hidden_layers
    )
    assert found.describe() == f"not treated: {tower.name} ({len(tower.layers)} {tower.kinds})"
    assert "vision" in tower.name or "image" in tower.name
    applied = apply.apply(
        net, policy.decide_layers(CheckpointingConfig(), len(treated.layers)), CheckpointingConfig()
    )
    assert all(layer.gradient_checkpointing for layer in treated.layers)
    assert not any(layer.gradient_checkpointing for layer in tower.layers)
    applied.remove()


def test_a_deeper_vision_tower_does_not_take_the_policy_of_the_text() -> None:
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3", **TOWERS["gemma3"])).train()
    result, kept = watched.run(net, CheckpointingConfig()), watched.run(net, watched.NONE)
    assert watched.differences(result, kept) == []
    assert [counts.recomputations for counts in result.applied.counts] == [1, 1, 1]
    assert verification.unmet_expectations(result.applied, result.watch, CheckpointingConfig()) == []
    assert "not treated: model.vision_tower" in verification.line(result.applied, result.watch)


class _Layer(GradientCheckpointingLayer):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(2, 2), inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden)


class _Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = _Layer()


def test_layers_that_are_held_one_by_one_are_found_and_those_inside_a_layer_are_not() -> None:
    net = nn.Module()
    nested = _Layer(inner=nn.ModuleList([_Layer()]))
    net.layers = nn.ModuleList([nested, _Layer(), nested])
    net.mtp = nn.ModuleList([_Holder(), _Holder()])
    net.last = _Layer()
    found = layers.find_stacks(net)
    assert [(stack.name, len(stack.layers)) for stack in found.treated] == [
        ("layers", 2),
        ("mtp.*.block", 2),
        ("last", 1),
    ]


def test_a_stack_with_layers_that_cannot_be_checkpointed_is_refused() -> None:
    net = nn.Module()
    net.layers = nn.ModuleList([_Layer(), nn.Linear(2, 2), nn.Identity()])
    with pytest.raises(ConfigError, match=r"members 1 of layers \(Linear\) do not support"):
        layers.find_stacks(net)
