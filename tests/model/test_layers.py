"""Parts of a layer are found by what they do, on 17 architectures, before a weight exists."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from remat.activation_checkpointing import validation
from remat.activation_checkpointing.policy import decide_layers
from remat.config.options import CheckpointingConfig, ConfigError, Policy, SelectiveOpsConfig
from remat.model import layers
from remat.model.layers import decoder_layers
from tests.support.small_models import ARCHITECTURES, build

GATED_MLP = {"gate": ["mlp.gate_proj"], "up": ["mlp.up_proj"], "down": ["mlp.down_proj"]}
QKVO = {part: [f"self_attn.{part}_proj"] for part in "qkvo"}
NORMS = ["input_layernorm", "post_attention_layernorm"]
GEMMA_NORMS = [*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm"]
QK_NORMS = ["self_attn.q_norm", "self_attn.k_norm"]
LLAMA = {"attention": ["self_attn"], "mlp": ["mlp"], "norm": NORMS, "activation": ["mlp.act_fn"]}
MOE = {"moe": ["mlp"], "router": ["mlp.gate"], "experts": ["mlp.experts"], "activation": ["mlp.experts.act_fn"]}
PARTS: dict[str, dict[str, list[str]]] = {
    "llama": LLAMA | QKVO | GATED_MLP,
    "qwen2": LLAMA | QKVO | GATED_MLP,
    "mistral": LLAMA | QKVO | GATED_MLP,
    "gemma": LLAMA | QKVO | GATED_MLP,
    "gemma2": LLAMA | {"norm": GEMMA_NORMS} | QKVO | GATED_MLP,
    "gemma3_text": LLAMA | {"norm": [*QK_NORMS, *GEMMA_NORMS]} | QKVO | GATED_MLP,
    "qwen3": LLAMA | {"norm": [*QK_NORMS, *NORMS]} | QKVO | GATED_MLP,
    "mixtral": LLAMA | MOE | QKVO,
    "qwen3_moe": LLAMA | MOE | {"norm": [*QK_NORMS, *NORMS]} | QKVO,
    "qwen2_moe": LLAMA
    | MOE
    | QKVO
    | {
        "shared_experts": ["mlp.shared_expert"],
        "activation": ["mlp.experts.act_fn", "mlp.shared_expert.act_fn"],
        "gate": ["mlp.shared_expert.gate_proj"],
        "up": ["mlp.shared_expert.up_proj"],
        "down": ["mlp.shared_expert.down_proj"],
        "shared_expert_gate": ["mlp.shared_expert_gate"],
    },
    "deepseek_v3": LLAMA
    | MOE
    | {
        "shared_experts": ["mlp.shared_experts"],
        "activation": ["mlp.experts.act_fn", "mlp.shared_experts.act_fn"],
        "norm": ["self_attn.q_a_layernorm", "self_attn.kv_a_layernorm", *NORMS],
        "q": ["self_attn.q_a_proj", "self_attn.q_b_proj"],
        "k": ["self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"],
        "v": ["self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"],
        "o": ["self_attn.o_proj"],
        "down": ["mlp.shared_experts.down_proj"],
    },
    "gpt2": {
        "attention": ["attn"],
        "mlp": ["mlp"],
        "norm": ["ln_1", "ln_2"],
        "activation": ["mlp.act"],
        "q": ["attn.c_attn"],
        "k": ["attn.c_attn"],
        "v": ["attn.c_attn"],
        "o": ["attn.c_proj"],
        "up": ["mlp.c_fc"],
        "down": ["mlp.c_proj"],
        "c_proj": ["attn.c_proj", "mlp.c_proj"],
        "mlp.c_proj": ["mlp.c_proj"],
    },
    "phi": {"mlp": ["mlp"], "norm": ["input_layernorm"], "o": ["self_attn.dense"], "up": ["mlp.fc1"]},
    "phi3": {"q": ["self_attn.qkv_proj"], "gate": ["mlp.gate_up_proj"], "up": ["mlp.gate_up_proj"], **LLAMA}
    | {"activation": ["mlp.activation_fn"]},
    "gpt_neox": {
        "attention": ["attention"],
        "mlp": ["mlp"],
        "norm": NORMS,
        "activation": ["mlp.act"],
        "v": ["attention.query_key_value"],
        "o": ["attention.dense"],
        "up": ["mlp.dense_h_to_4h"],
        "down": ["mlp.dense_4h_to_h"],
    },
    "opt": {
        "attention": ["self_attn"],
        "norm": ["self_attn_layer_norm", "final_layer_norm"],
        "activation": ["activation_fn"],
        "o": ["self_attn.out_proj"],
        "up": ["fc1"],
        "down": ["fc2"],
    },
    "falcon": {
        "attention": ["self_attention"],
        "mlp": ["mlp"],
        "norm": ["input_layernorm"],
        "activation": ["mlp.act"],
        "k": ["self_attention.query_key_value"],
        "up": ["mlp.dense_h_to_4h"],
    },
}
MISSING = {
    "llama": ["moe", "router", "experts", "shared_experts"],
    "mixtral": ["shared_experts", "gate", "up", "down"],
    "gpt2": ["gate", "moe"],
    "opt": ["mlp", "gate"],
    "falcon": ["core_attention"],
}


def last_layer(model_type: str) -> Any:
    with torch.device("meta"):
        return decoder_layers(build(model_type))[-1]


def search(layer: Any, name: str) -> list[str]:
    found = layers.find_modules(layer, name) if name in layers.ROLES else layers.find_linears(layer, name)
    assert all(layer.get_submodule(path) is module for path, module in found)
    return [path for path, _ in found]


@pytest.mark.parametrize("model_type", list(ARCHITECTURES))
def test_parts(model_type: str) -> None:
    layer = last_layer(model_type)
    found = {name: search(layer, name) for name in PARTS[model_type]}
    assert {name: sorted(paths) for name, paths in found.items()} == {
        name: sorted(paths) for name, paths in PARTS[model_type].items()
    }
    if model_type != "falcon":
        assert search(layer, "core_attention") == search(layer, "attention")


@pytest.mark.parametrize(("model_type", "name"), [(m, name) for m, names in MISSING.items() for name in names])
def test_what_is_missing(model_type: str, name: str) -> None:
    layer = last_layer(model_type)
    with pytest.raises(ConfigError, match=name):
        search(layer, name)


def test_the_text_says_what_there_is() -> None:
    layer = last_layer("qwen2_moe")
    with pytest.raises(ConfigError) as error:
        layers.find_modules(last_layer("llama"), "moe", "checkpointing.recompute_modules")
    assert str(error.value) == (
        "checkpointing.recompute_modules: LlamaDecoderLayer has no moe; it has attention (self_attn), mlp (mlp), "
        "norm (input_layernorm, post_attention_layernorm), activation (mlp.act_fn); leave it out, or give such layers "
        "another policy with checkpointing.layers"
    )
    with pytest.raises(
        ConfigError, match=r"there is no|mlpp is no role; choose from attention, core_attention, mlp"
    ):
        layers.find_modules(layer, "mlpp")
    with pytest.raises(
        ConfigError, match=r"has no Linear w9; its Linears are self_attn.q_proj.*\(q k v o gate up down\)"
    ):
        layers.find_linears(layer, "w9")
    with pytest.raises(ConfigError, match="FalconAttention does not call its attention through"):
        layers.find_modules(last_layer("falcon"), "core_attention")


def test_problems_are_those_of_the_policies_asked_for() -> None:
    layer = last_layer("opt")
    cfg = CheckpointingConfig(
        recompute_modules=["mlp", "norm", "nonsense"],
        discard_modules=["norm", "experts"],
        selective_ops=SelectiveOpsConfig(save_linears=["q", "gate"]),
    )

    def missing(policy: Policy) -> list[str]:
        return validation.missing_parts(cfg, decide_layers(replace(cfg, policy=policy), 1), [layer])

    assert missing(Policy.full) == missing(Policy.none) == []
    assert [text.split(":")[0] for text in missing(Policy.selective_modules)] == [
        "checkpointing.recompute_modules"
    ] * 2
    (text,) = missing(Policy.discard_output)
    assert text.startswith("checkpointing.discard_modules: OPTDecoderLayer has no experts")
    (text,) = missing(Policy.selective_ops)
    assert text.startswith("checkpointing.selective_ops.save_linears: OPTDecoderLayer has no Linear gate")
    assert sum(len(missing(policy)) for policy in Policy) == 4


def test_a_layer_of_another_kind_in_the_same_model() -> None:
    with torch.device("meta"):
        first, *_, last = decoder_layers(build("deepseek_v3"))
    assert search(last, "moe") == ["mlp"] and search(first, "mlp") == ["mlp"]
    with pytest.raises(ConfigError, match=r"has no moe.*checkpointing.layers"):
        layers.find_modules(first, "moe")


def test_under_lora_the_frozen_base_is_the_linear() -> None:
    net = get_peft_model(build("llama"), LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    layer = decoder_layers(net)[0]
    assert search(layer, "q") == ["self_attn.q_proj.base_layer"] == search(layer, "q_proj")
    assert search(layer, "k") == ["self_attn.k_proj"]
    assert search(layer, "up") == ["mlp.up_proj.base_layer"]


def test_experts_in_a_list_are_each_a_module() -> None:
    block = torch.nn.Module()
    block.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    block.gate = torch.nn.Linear(2, 2)
    layer = torch.nn.Module()
    layer.block_sparse_moe = block
    assert search(layer, "experts") == ["block_sparse_moe.experts.0", "block_sparse_moe.experts.1"]
    assert search(layer, "router") == ["block_sparse_moe.gate"]
    assert search(layer, "moe") == search(layer, "mlp") == ["block_sparse_moe"]


def test_of_nested_modules_the_outer_one_stays() -> None:
    layer = last_layer("qwen2_moe")
    found = [
        *layers.find_modules(layer, "activation"),
        *layers.find_modules(layer, "shared_experts"),
        *layers.find_modules(layer, "activation"),
    ]
    assert [name for name, _ in layers.outermost(found)] == ["mlp.experts.act_fn", "mlp.shared_expert"]


def test_a_block_that_is_named_after_its_norms_is_no_norm() -> None:
    """DBRX calls two norms and the attention between them, dropout included, DbrxNormAttentionNorm."""
    attention = {"kv_n_heads": 2, "rope_theta": 10000.0}
    config = AutoConfig.for_model(
        "dbrx", d_model=64, n_heads=4, n_layers=1, vocab_size=32, attn_config=attention
    )
    with torch.device("meta"):
        net = AutoModelForCausalLM.from_config(config)
    names = [f"norm_attn_norm.norm_{number}" for number in (1, 2)]
    assert [name for name, _ in layers.find_modules(decoder_layers(net)[0], "norm")] == names


class WithAList(torch.nn.Module):
    """A layer whose experts are numbered, one of which knows its path in the model."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(2, width) for _ in range(3))
        self.experts[2].path = f"model.layers.{number}.experts.2"  # type: ignore[assignment]


def test_layers_that_differ_in_their_number_alone_have_one_description() -> None:
    told = [layers.describe(WithAList(number, 2), number) for number in range(4)]
    assert told == [told[0]] * 4
    assert layers.describe(WithAList(1, 3), 1) != told[0]
