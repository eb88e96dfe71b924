"""A sequence longer than a model's table of positions is refused; where positions are computed it is a warning."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from remat.config import compose
from remat.config.options import Attention, ConfigError, ModelConfig
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
    return positions.check_length(skeleton, config, seq_len, pretrained=pretrained)


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
    assert positions.check_length(skeleton, config, 256, pretrained=True) == ""


def test_a_run_and_a_plan_meet_the_same_refusal_before_weights_are_read() -> None:
    cfg = compose.compose_run(["recipe=tiny_zero3_offload", "model=gpt2_small", "train.seq_len=2048"]).run
    with pytest.raises(ConfigError, match=r"table of 1024 positions \(transformer\.wpe\)"):
        strategy.decide(cfg, world_size=1, can_pin=False)
