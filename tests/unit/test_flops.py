"""FLOPs per token against sums done by hand."""

from __future__ import annotations

from typing import Any

import pytest

from remat import flops
from remat.config import ConfigError

LLAMA2_7B: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
LLAMA3_8B = {**LLAMA2_7B, "intermediate_size": 14336, "vocab_size": 128256, "num_key_value_heads": 8}
# embedding and head + per layer (4 attention matrices, 3 MLP matrices, 2 norms) + final norm
LLAMA2_7B_PARAMS = 2 * 32000 * 4096 + 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 4096


def test_the_shape_of_llama_2_7b() -> None:
    shape = flops.shape_from_config(LLAMA2_7B, num_params=LLAMA2_7B_PARAMS)
    assert shape.num_params == 6_738_415_616
    assert shape.num_params_active == 6_738_415_616
    assert shape.num_params_embedding == 131_072_000
    assert shape.num_params_matmul == 6_607_343_616
    assert (shape.head_dim, shape.num_kv_heads) == (128, 32)
    assert shape.largest_param == 32000 * 4096


def test_model_flops_of_llama_2_7b() -> None:
    shape = flops.shape_from_config(LLAMA2_7B, num_params=LLAMA2_7B_PARAMS)
    matrices = 6 * 6_607_343_616  # 39.6 G
    attention = 12 * 32 * 4096 * 4096  # 6.4 G
    assert flops.model_flops_per_token(shape, 4096) == matrices + attention == 46_086_512_640


def test_one_forward_of_the_layers_of_llama_2_7b() -> None:
    shape = flops.shape_from_config(LLAMA2_7B, num_params=LLAMA2_7B_PARAMS)
    in_layers = 6_607_343_616 - 131_072_000
    expected = 2 * in_layers + 4 * 32 * 4096 * 4096
    assert flops.layers_forward_flops_per_token(shape, 4096) == expected


def test_llama_3_8b_against_counted_operations() -> None:
    """A run of the real model on meta tensors counted 70.3 TFLOP forward."""
    shape = flops.shape_from_config(LLAMA3_8B, num_params=8_030_261_248)
    assert flops.model_flops_per_token(shape, 4096) / 3 * 4096 == pytest.approx(70.3e12, rel=1e-3)


def test_a_tied_embedding_is_the_head_and_counts() -> None:
    untied = flops.shape_from_config(LLAMA2_7B, num_params=LLAMA2_7B_PARAMS)
    tied = flops.shape_from_config(
        {**LLAMA2_7B, "tie_word_embeddings": True}, num_params=LLAMA2_7B_PARAMS - 32000 * 4096
    )
    assert tied.num_params_matmul == untied.num_params_matmul
    assert tied.num_params_in_layers == untied.num_params_in_layers


def test_only_active_experts_count() -> None:
    mixtral = {**LLAMA2_7B, "model_type": "mixtral", "intermediate_size": 14336, "num_key_value_heads": 8}
    mixtral |= {"num_local_experts": 8, "num_experts_per_tok": 2}
    shape = flops.shape_from_config(mixtral, num_params=46_702_792_704)
    assert shape.num_params_active == 12_879_925_248
    assert shape.largest_param == 8 * 2 * 14336 * 4096
    qwen = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    }
    shape = flops.shape_from_config(qwen, num_params=30_532_122_624)
    assert shape.num_params_active == 3_353_032_704
    irregular = {**qwen, "decoder_sparse_step": 2}
    with pytest.raises(ConfigError, match="active parameters must be given"):
        flops.shape_from_config(irregular, num_params=30_532_122_624)
    assert flops.shape_from_config(irregular, num_params=9, num_params_active=5).num_params_active == 5


def test_dense_first_layers_have_no_experts() -> None:
    config = {**LLAMA2_7B, "num_hidden_layers": 5, "n_routed_experts": 4, "num_experts_per_tok": 1}
    config |= {"moe_intermediate_size": 64, "first_k_dense_replace": 2}
    shape = flops.shape_from_config(config, num_params=10**10)
    assert shape.num_params_active == 10**10 - 3 * 3 * 3 * 64 * 4096


def test_other_spellings_and_wide_heads() -> None:
    gpt2 = {
        "n_layer": 2,
        "n_embd": 64,
        "n_head": 4,
        "n_inner": None,
        "vocab_size": 100,
        "tie_word_embeddings": True,
    }
    shape = flops.shape_from_config(gpt2, num_params=1000_000, num_params_embedding=6400, largest_param=7)
    assert (shape.num_layers, shape.hidden_size, shape.intermediate_size, shape.head_dim) == (2, 64, 256, 16)
    assert shape.largest_param == 7
    wide = flops.shape_from_config({**LLAMA2_7B, "head_dim": 256}, num_params=LLAMA2_7B_PARAMS)
    narrow = flops.shape_from_config(LLAMA2_7B, num_params=LLAMA2_7B_PARAMS)
    extra = flops.model_flops_per_token(wide, 10) - flops.model_flops_per_token(narrow, 10)
    assert extra == 12 * 32 * 32 * 128 * 10
    nested = {"text_config": LLAMA2_7B, "model_type": "some_multimodal"}
    assert flops.shape_from_config(nested, num_params=LLAMA2_7B_PARAMS) == narrow


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "vocab_size", "tie_word_embeddings"])
def test_a_missing_field_is_named(field: str) -> None:
    config = {key: value for key, value in LLAMA2_7B.items() if key != field}
    with pytest.raises(ConfigError, match=field):
        flops.shape_from_config(config, num_params=1)


def test_the_formula_is_stated() -> None:
    text = flops.formula_text()
    for word in ("6*N", "12*L*h*s", "MFU", "HFU", "causal"):
        assert word in text
