"""FLOPs per token: against torch's own count of a real forward, sums done by hand, and published active parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from remat.config import compose
from remat.config.options import ConfigError
from remat.model import flops
from remat.planning import strategy
from remat.training import build

SEQ = 640  # more than what is extrapolated from, and no whole number of the larger chunks
LAYERS, WIDTH, WINDOW = 4, 64, 48
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": WIDTH,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
}
HEADS = {"head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GATED_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 32,
}
LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 24,
    "v_head_dim": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"n_positions": 1024},
    "gemma": HEADS,
    "bloom": {},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": EXPERTS | HEADS | {"decoder_sparse_step": 2},
    "qwen3_next": EXPERTS | HEADS | GATED_DELTA,
    "deepseek_v3": LATENT,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
    "llama4_text": HEADS
    | {"num_local_experts": 4, "intermediate_size_mlp": 128, "attention_chunk_size": WINDOW}
    | {"interleave_moe_layer_step": 2},
    "gpt_oss": HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "gemma3_text": HEADS | {"sliding_window": WINDOW, "sliding_window_pattern": 2},
    "mistral": {"sliding_window": WINDOW},
    "jamba": EXPERTS
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    | {"mamba_d_state": 8, "mamba_expand": 2, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "falcon_h1": HEADS
    | {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1},
    "hrm_text": {},
}


def _windowed(layers: int) -> int:
    """What torch counts beyond the windows: 2 s (s - w) (d_q + d_v), over all heads of that many layers."""
    return layers * 2 * SEQ * (SEQ - WINDOW) * (64 + 64)


BY_HAND: dict[str, int] = {  # what torch's counter counts besides: keys beyond a window, experts that get zeros
    "mistral": _windowed(4),
    "gpt_oss": _windowed(2),
    "gemma3_text": _windowed(2),
    "llama4_text": _windowed(3) + 2 * 2 * SEQ * (4 - 1) * 3 * WIDTH * 128,  # two layers with experts
}


def built(family: str, device: str = "meta", **more: Any) -> Any:
    config = AutoConfig.for_model(family, **(SIZES | FAMILIES.get(family, {}) | more))
    config.use_cache = False
    with torch.device(device):
        net = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        )
    return net.to(device).eval()


def counted_by_torch(family: str) -> int:
    """Of one forward of SEQ real tokens, in code that computes only what is needed of experts."""
    net = built(family, "cpu")
    ids = torch.randint(1, 96, (1, SEQ), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        net(input_ids=ids, use_cache=False)
    return int(counter.get_total_flops())


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_forward_is_what_torch_counts(family: str) -> None:
    expected = counted_by_torch(family) - BY_HAND.get(family, 0)
    found = flops.count(built(family), SEQ)
    forward = SEQ * (found.weights + found.attention + found.mixing)
    assert forward == pytest.approx(expected, rel=0.01)
    assert 0 < found.num_params_active <= found.num_params
    everything_trained = 3 * (found.weights + found.attention + found.mixing)
    assert found.model_flops_per_token == pytest.approx(
        everything_trained, rel=1e-4
    )  # a router's bias is frozen
    assert found.output_layer == 2 * WIDTH * 96


def test_layers_that_run_twice_count_twice() -> None:
    """hrm_text runs its stacks several times: 6 N of its weights would be too few."""
    found = flops.count(built("hrm_text"), SEQ)
    assert found.weights > 2 * 2 * found.num_params_active


LLAMA2_7B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}


def of(fields: dict[str, Any], seq_len: int = 4096) -> flops.ModelFlops:
    fields = dict(fields)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        net = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return flops.count(net, seq_len)


def test_model_flops_of_llama_2_7b() -> None:
    """6 N + 12 L h s with the numbers of the paper, norms included, to the last one."""
    found = of(LLAMA2_7B)
    in_products = 6_738_415_616 - 32000 * 4096
    assert found.num_params == found.num_params_active == 6_738_415_616
    assert found.model_flops_per_token == 6 * in_products + 12 * 32 * 4096 * 4096 == 46_086_512_640
    in_layers = in_products - 32000 * 4096
    assert found.layers_forward_flops_per_token == 2 * in_layers + 4 * 32 * 4096 * 4096
    assert found.output_layer == 2 * 32000 * 4096


def test_a_tied_embedding_is_the_head_and_counts() -> None:
    small = {**LLAMA2_7B, "num_hidden_layers": 2}
    tied, untied = of({**small, "tie_word_embeddings": True}), of(small)
    assert tied.model_flops_per_token == untied.model_flops_per_token
    assert tied.num_params == untied.num_params - 32000 * 4096


def test_latent_attention_counts_both_widths() -> None:
    """Four layers of DeepSeek-V3: 128 heads of 192 for query and key, 128 for value, at 4096 tokens."""
    found = of({"model_type": "deepseek_v3", "num_hidden_layers": 4})
    assert 3 * found.attention == 3 * 4 * 2 * 4096 * 128 * (192 + 128)


PUBLISHED: dict[str, tuple[dict[str, Any], float, float]] = {  # billions: all, and active per token
    "DeepSeek-V3": ({"model_type": "deepseek_v3"}, 671.0, 37.6),  # 37 without the embedding's 0.9
    "Llama-4-Maverick": (
        {"model_type": "llama4_text", "num_local_experts": 128, "interleave_moe_layer_step": 2},
        400.7,
        17.2,
    ),
    "Llama-4-Scout": ({"model_type": "llama4_text", "interleave_moe_layer_step": 1}, 107.8, 17.2),
    "Mixtral-8x7B": ({"model_type": "mixtral"}, 46.7, 12.9),
    "ERNIE-4.5-21B-A3B": ({"model_type": "ernie4_5_moe"}, 21.8, 3.3),  # 3.0 without the embedding's 0.3
    "Qwen3-Next-80B-A3B": ({"model_type": "qwen3_next"}, 80.0, 3.9),
    "gpt-oss-120b": ({"model_type": "gpt_oss"}, 116.8, 5.7),  # 5.1 without the embedding's 0.6
    "Jamba": ({"model_type": "jamba"}, 51.6, 12.1),
}


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("name", list(PUBLISHED))
def test_active_parameters_are_the_published_ones(name: str) -> None:
    fields, total, active = PUBLISHED[name]
    found = of(fields, seq_len=64)
    assert found.num_params / 1e9 == pytest.approx(total, rel=0.01)
    assert found.num_params_active / 1e9 == pytest.approx(active, rel=0.05)
    assert found.model_flops_per_token > 4 * found.num_params_active


def test_frozen_weights_have_no_gradient_of_their_own() -> None:
    net = built("llama")
    whole = flops.count(net, SEQ)
    net.requires_grad_(False)
    frozen = flops.count(net, SEQ)
    assert whole.model_flops_per_token - frozen.model_flops_per_token == frozen.weights


def test_the_model_that_is_counted_has_its_adapters() -> None:
    cfg = compose.compose_run(["peft=lora", "peft.r=4"]).run
    plain = replace(cfg, peft=compose.compose_run([]).run.peft)
    adapted, whole = (flops.count(strategy.counted_model(c), 128) for c in (cfg, plain))
    added = adapted.num_params - whole.num_params
    assert added > 0 and adapted.trained_weights == pytest.approx(2 * added)
    assert adapted.weights == pytest.approx(whole.weights + 2 * added)


def _forgets_its_experts(net: Any) -> None:
    for module in net.modules():
        if hasattr(module, "num_experts"):
            module.num_experts = 3  # not what the weights say: whose are they?


@pytest.mark.parametrize(
    ("family", "more", "change", "reason"),
    [
        ("gpt_neo", {"attention_types": [[["global", "local"], 2]], "num_layers": 4}, None, "code of its own"),
        ("llama4_text", {}, _forgets_its_experts, "chooses experts"),
        ("doge", {}, None, "mask of its own"),
        ("jetmoe", {}, None, "cannot be counted"),
    ],
)
def test_what_cannot_be_counted_is_refused(
    family: str, more: dict[str, Any], change: Callable[[nn.Module], None] | None, reason: str
) -> None:
    net = built(family, **more)
    if change is not None:
        change(net)
    with pytest.raises(ConfigError, match=reason):
        flops.count(net, SEQ)


def test_no_figures_where_the_model_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ConfigError("the FLOPs of X cannot be counted: why")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(flops, "count", refuse)
    warnings: list[str] = []
    assert build.throughput_figures(compose.compose_run([]).run, 512, warnings.append) == {}
    assert warnings == ["no TFLOP/s, MFU and HFU: the FLOPs of X cannot be counted: why"]


def test_the_formula_is_stated() -> None:
    text = flops.formula_text()
    for word in ("6*N", "12*L*h*s", "MFU", "HFU", "causal", "window"):
        assert word in text
