"""A sequence longer than a model's table of positions is refused; where positions are computed it is a warning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from remat.config import compose
from remat.config.options import Attention, ConfigError, ModelConfig, ModelInit, RopeScaling
from remat.model import hf_model, positions
from remat.planning import strategy

SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64},
    "opt": {"max_position_embeddings": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "ffn_dim": 64, "word_embed_proj_dim": 32, "vocab_size": 64},
    "gpt_neo": {"max_position_embeddings": 64, "hidden_size": 32, "num_layers": 1, "num_heads": 2,
                "attention_types": [[["global"], 1]], "vocab_size": 64},
    "gptj": {"n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "rotary_dim": 8, "vocab_size": 64},
    "codegen": {"n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "vocab_size": 64},
    "gpt_bigcode": {"n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64},
    "llama": {"max_position_embeddings": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 64},
    "qwen3": {"max_position_embeddings": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
              "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 64, "vocab_size": 64},
    "phi": {"max_position_embeddings": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 64, "vocab_size": 64},
}  # fmt: skip
TABLES = ("gpt2", "opt", "gpt_neo", "gptj", "codegen", "gpt_bigcode")


def check(family: str, seq_len: int, *, pretrained: bool = True, **more: Any) -> str:
    config = AutoConfig.for_model(family, **SMALL[family], **more)
    skeleton = hf_model.skeleton(config, ModelConfig(attention=Attention.eager))
    init = ModelInit.pretrained if pretrained else ModelInit.random
    return positions.check_length(skeleton, config, seq_len, ModelConfig(init=init))


@pytest.mark.parametrize("family", SMALL)
def test_the_models_own_length_is_fine(family: str) -> None:
    assert check(family, 64) == check(family, 8) == ""


@pytest.mark.parametrize("family", TABLES)
@pytest.mark.parametrize("pretrained", [True, False])
def test_what_would_be_looked_up_beyond_a_table_is_refused(family: str, pretrained: bool) -> None:
    with pytest.raises(ConfigError, match=r"train\.seq_len=65: .* table of 64 positions .* train\.seq_len=64"):
        check(family, 65, pretrained=pretrained)


@pytest.mark.parametrize("family", [name for name in SMALL if name not in TABLES])
def test_what_is_computed_is_a_warning_for_weights_that_have_not_met_it(family: str) -> None:
    text = check(family, 65)
    assert "train.seq_len=65" in text and "64 positions" in text
    assert check(family, 65, pretrained=False) == ""


def test_rope_scaling_is_taken_by_the_length_that_the_config_names() -> None:
    scaled = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}
    assert "64 positions" in check("llama", 65, **scaled)
    long = {**SMALL["llama"], "max_position_embeddings": 256} | scaled
    config = AutoConfig.for_model("llama", **long)
    skeleton = hf_model.skeleton(config, ModelConfig(attention=Attention.eager))
    assert positions.check_length(skeleton, config, 256, ModelConfig(init=ModelInit.pretrained)) == ""


def test_a_run_and_a_plan_meet_the_same_refusal_before_weights_are_read() -> None:
    cfg = compose.compose_run(["recipe=tiny_zero3_offload", "model=gpt2_small", "train.seq_len=2048"]).run
    with pytest.raises(ConfigError, match=r"table of 1024 positions \(transformer\.wpe\)"):
        strategy.decide(cfg, world_size=1, can_pin=False)


OWN = {"theta": 20_000.0, "length": 64}


def stretched(kind: str, factor: float, family: str = "llama", **more: Any) -> Any:
    fields = {**SMALL[family], "rope_parameters": {"rope_type": "default", "rope_theta": OWN["theta"]}} | more
    cfg = ModelConfig(rope_scaling=RopeScaling(kind), rope_factor=factor)
    return positions.stretch(AutoConfig.for_model(family, **fields), cfg)


@pytest.mark.parametrize("kind", RopeScaling)
def test_positions_are_those_of_transformers_with_the_same_parameters(kind: str) -> None:
    config = stretched(kind, 4.0)
    theirs: dict[str, Any] = {"rope_type": kind, "rope_theta": OWN["theta"], "factor": 4.0}
    if kind != "linear":
        theirs["original_max_position_embeddings"] = OWN["length"]
    if kind == "llama3":
        theirs |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    asked = SMALL["llama"] | {"max_position_embeddings": 256, "rope_parameters": theirs}
    expected = AutoConfig.for_model("llama", **asked)
    nets = [LlamaRotaryEmbedding(each) for each in (config, expected)]
    assert torch.equal(nets[0].inv_freq, nets[1].inv_freq)
    assert nets[0].attention_scaling == nets[1].attention_scaling
    assert not torch.equal(nets[0].inv_freq, LlamaRotaryEmbedding(AutoConfig.for_model("llama")).inv_freq)
    assert config.max_position_embeddings == 256
    assert LlamaConfig.from_dict(config.to_dict()).rope_parameters == config.rope_parameters


def test_layers_with_a_window_keep_their_positions() -> None:
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = AutoConfig.for_model("gemma3_text", max_position_embeddings=64, rope_parameters=rope)
    cfg = ModelConfig(rope_scaling=RopeScaling.linear, rope_factor=8.0)
    found = positions.stretch(config, cfg).rope_parameters
    assert found["sliding_attention"] == rope["sliding_attention"]
    assert (found["full_attention"]["rope_type"], found["full_attention"]["factor"]) == ("linear", 8.0)


LLAMA_3_1 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def test_what_is_stretched_already_goes_on_in_the_same_way_alone() -> None:
    more = {"max_position_embeddings": 128, "rope_parameters": LLAMA_3_1}
    config = stretched("llama3", 16.0, **more)
    assert config.rope_parameters == LLAMA_3_1 | {"factor": 16.0}
    assert config.max_position_embeddings == 256
    for kind, factor in (("yarn", 16.0), ("llama3", 8.0)):
        with pytest.raises(ConfigError, match=r"stretched by llama3 x 8 already; .*larger factor of llama3"):
            stretched(kind, factor, **more)


DEEPSEEK_V2 = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.5,
    "truncate": False,
    "original_max_position_embeddings": 64,
}


def test_a_model_of_yarn_keeps_its_other_parameters_and_gets_the_attention_of_the_new_factor() -> None:
    rope = DEEPSEEK_V2 | {"attention_factor": 1.5}
    config = stretched("yarn", 8.0, max_position_embeddings=256, rope_parameters=rope)
    assert config.rope_parameters == DEEPSEEK_V2 | {"factor": 8.0}
    assert config.max_position_embeddings == 512
    plain = LlamaRotaryEmbedding(stretched("yarn", 8.0))
    assert not torch.equal(LlamaRotaryEmbedding(config).inv_freq, plain.inv_freq)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_model_without_rotary_positions_is_not_stretched(family: str) -> None:
    cfg = ModelConfig(rope_scaling=RopeScaling.yarn, rope_factor=4.0)
    with pytest.raises(ConfigError, match=f"{family} has no rotary positions"):
        positions.stretch(AutoConfig.for_model(family, **SMALL[family]), cfg)


def test_a_length_beyond_the_stretched_one_names_the_factor() -> None:
    cfg = ModelConfig(init=ModelInit.pretrained, rope_scaling=RopeScaling.yarn, rope_factor=4.0)
    config = stretched("yarn", 4.0)
    skeleton = hf_model.skeleton(config, ModelConfig(attention=Attention.eager))
    assert positions.check_length(skeleton, config, 256, cfg) == ""
    with pytest.raises(ConfigError, match=r"set model\.rope_factor=5"):
        positions.check_length(skeleton, config, 257, cfg)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["model.rope_factor=4"], "without model.rope_scaling"),
        (["model.rope_scaling=yarn"], "for example model.rope_factor=4"),
    ],
)
def test_one_half_of_it_is_refused(words: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        compose.compose_run(["recipe=tiny_zero3_offload", *words])
