"""Build a small model with the same classes and kinds of layers, to test on a CPU how the large one behaves."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from remat.config.options import Attention, ModelConfig

VOCABULARY = 128
INNER = 64
EXPERTS = 4
WINDOW = 4
STATE = 16
MOST_ELEMENTS = 1e8  # 400 MB, used for a second or two
# names of the same size in different models
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
WIDTHS = ("hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim", "n_embed", "dim", "lru_width")
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
LARGEST = {
    **dict.fromkeys(
        (
            "intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size",
            "ffn_hidden_size", "shared_intermediate_size", "intermediate_size_mlp", "decoder_ffn_dim",
            "moe_shared_expert_intermediate_size", "vocab_size_per_layer_input",
        ),
        INNER,
    ),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "linear_num_key_heads"), 2
    ),
    **dict.fromkeys(("linear_num_value_heads", "mamba_n_groups", "n_groups"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "mamba_d_state", "ssm_state_size", "state_size"), STATE),
    "vocab_size": VOCABULARY,
}  # fmt: skip

_ANSWERS: dict[tuple[Any, ...], Any] = {}


def ask(
    question: Callable[..., Any],
    config: PretrainedConfig,
    skeleton: PreTrainedModel,
    cfg: ModelConfig,
    *about: Any,
) -> Any:
    """Return `question(net, *about)` of a small copy of the model, or as text why there is no copy.

    Each question is asked once about each configuration. The copy's attention is eager where `cfg` asks for it or the
    model has no sdpa, else sdpa. No gradient is recorded, and the caller's random state stays as it is.
    """
    text = json.dumps(config.to_dict(), sort_keys=True, default=str)
    key = (question, text, cfg.attention, cfg.trust_remote_code, about)
    if key not in _ANSWERS:
        on_a_cpu = "eager" if cfg.attention is Attention.eager or not skeleton._supports_sdpa else "sdpa"
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            try:
                net = build(config, skeleton, attention=on_a_cpu, trust_remote_code=cfg.trust_remote_code)
            except Exception as error:  # sizes that do not fit each other can raise any error in the library
                _ANSWERS[key] = f"a small copy of it, to try it out, cannot be built ({first_line(error)})"
            else:
                _ANSWERS[key] = question(net, *about)
    return _ANSWERS[key]


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def build(
    config: PretrainedConfig, skeleton: nn.Module, *, attention: str, trust_remote_code: bool
) -> PreTrainedModel:
    """Build a small copy of the first layers of `skeleton`, enough to have every kind; float32, no dropout.

    `skeleton` is the model of `config` on meta. Weights are drawn from torch's global generator, large enough that
    every layer changes the logits. Several ways to reduce sizes are tried. Raises the library's error for sizes that do
    not fit each other, and ValueError for a model that stays too large.
    """
    problem: Exception | None = None
    depth = kinds_within(skeleton, _depth(config))
    for widths in (True, False):
        for layers in dict.fromkeys((depth, max(2, depth), _depth(config))):
            try:
                return _built(_reduced(config, widths, layers), attention, trust_remote_code)
            except Exception as error:  # sizes that do not fit each other can raise any error in the library
                problem = problem or error
    assert problem is not None
    raise problem


def kinds_within(skeleton: nn.Module, depth: int) -> int:
    """Return the number of first layers that include every kind of layer in a stack of `depth`.

    A kind is given by the classes within a layer and their settings.
    """
    most = min(depth, 1)
    for stack in (m for m in skeleton.modules() if isinstance(m, nn.ModuleList) and len(m) == depth):
        kinds = [_kind(layer) for layer in stack]
        most = max(most, 1 + max(kinds.index(kind) for kind in kinds))
    return most


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """Return the classes within a layer, with their attributes that are strings or booleans."""
    return tuple(
        (
            name,
            type(module).__name__,
            *sorted((k, v) for k, v in vars(module).items() if type(v) in (str, bool)),
        )
        for name, module in layer.named_modules()
    )


def _built(config: PretrainedConfig, attention: str, trust_remote_code: bool) -> PreTrainedModel:
    def create() -> PreTrainedModel:
        return AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
            dtype=torch.float32,
        )

    with torch.device("meta"):
        elements = sum(p.numel() for p in create().parameters())
    if elements > MOST_ELEMENTS:
        raise ValueError(f"a small copy of it would still have {elements:.1e} parameters")
    net = create().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1 / math.sqrt(parameter.shape[-1]))
    return net


def _depth(config: PretrainedConfig) -> int:
    text = config.get_text_config()
    return next((value for name in DEPTHS if (value := _size(text, name))), 1)


def _reduced(config: PretrainedConfig, widths: bool, layers: int) -> PretrainedConfig:
    config, depth = copy.deepcopy(config), _depth(config)
    for part in _parts(config):
        if widths:
            _narrow(part)
        for name in LARGEST:
            if (size := _size(part, name)) and size > LARGEST[name]:
                setattr(part, name, LARGEST[name])
        for name, value in list(vars(part).items()):
            if name.endswith("token_id") and isinstance(value, int) and value >= VOCABULARY:
                setattr(part, name, 0)
            if isinstance(value, list) and len(value) == depth > 1:  # a list with one entry per layer
                setattr(part, name, value[:layers])
            if name == "compress_rates" and isinstance(value, dict):  # tokens that each kind of layer merges
                setattr(part, name, {kind: min(rate, WINDOW) for kind, rate in value.items()})
        for name in DEPTHS:
            if _size(part, name) == depth:
                setattr(part, name, layers)
        if (heads := _size(part, "mamba_n_heads")) and (each := _size(part, "mamba_d_head")):
            inner = (_size(part, "mamba_expand") or 2) * (_size(part, "hidden_size") or heads * each)
            part.mamba_n_heads = max(1, inner // each)
    return config


def _parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            yield from _parts(value)


def _narrow(config: PretrainedConfig) -> None:
    """Reduce to at most two groups of heads of the same size, and to the width that they need.

    The width of a head is rounded up to a multiple of 8, because torch's grouped product of experts needs rows of a
    multiple of 16 bytes.
    """
    heads = next((size for name in HEADS if (size := _size(config, name))), None)
    width = next((size for name in WIDTHS if (size := _size(config, name))), None)
    if not heads or not width:
        return
    groups = next((size for name in KEY_VALUE_HEADS if (size := _size(config, name))), heads)
    few_groups = min(groups, 2)
    few, each = few_groups * min(max(1, heads // groups), 2), 8 * math.ceil(width // heads / 8)
    for names, was, now in ((HEADS, heads, few), (WIDTHS, width, few * each)):
        for name in names:
            if _size(config, name) == was:
                setattr(config, name, now)
    for name in KEY_VALUE_HEADS:
        if (size := _size(config, name)) and size > few_groups:
            setattr(config, name, few_groups)


def _size(config: PretrainedConfig, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if type(value) is int and value > 0 else None
