"""Check how long a model's sequences may be, and stretch rotary positions to longer ones (`model.rope_scaling`).

Some models look positions up in a table of fixed length; the others compute them for any length.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from remat.config.options import ConfigError, ModelConfig, ModelInit, RopeScaling

LARGEST_OFFSET = 2  # OPT's table has two rows more than positions
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # values of Llama 3.1
LAYER_TYPES = {"full_attention", "sliding_attention"}  # may have their own rotary positions


def stretch(config: Any, cfg: ModelConfig) -> Any:
    """Return `config` with rotary positions stretched as `cfg` asks, to `model.rope_factor` times the model's length.

    The model's length is its length before any stretching. Layers with a window keep their positions. Raises
    ConfigError for a model without rotary positions, and for one that is already stretched in another way or as far.
    """
    if cfg.rope_scaling is None:
        return config
    asked = f"model.rope_scaling={cfg.rope_scaling} model.rope_factor={cfg.rope_factor:g}"
    text = config.get_text_config()
    found = getattr(text, "rope_parameters", None) or {}
    nested = LAYER_TYPES.issuperset(found)
    rope = found.get("full_attention") if nested else found
    if (
        not rope
        or "rope_theta" not in rope
        or not isinstance(getattr(text, "max_position_embeddings", None), int)
    ):
        raise ConfigError(
            f"{asked}: {config.model_type} has no rotary positions that can be stretched; leave it out"
        )
    kind, factor = rope.get("rope_type", "default"), float(rope.get("factor") or 1.0)
    again = kind == cfg.rope_scaling and kind != RopeScaling.linear and cfg.rope_factor > factor
    if kind != "default" and not again:
        remedy = "leave it out" if kind == "linear" else f"leave it out, or give a larger factor of {kind}"
        raise ConfigError(
            f"{asked}: the model's positions are stretched by {kind} x {factor:g} already; {remedy}"
        )
    own = rope.get("original_max_position_embeddings") or text.max_position_embeddings
    more = {"rope_type": str(cfg.rope_scaling), "factor": cfg.rope_factor}
    if cfg.rope_scaling is not RopeScaling.linear:
        more["original_max_position_embeddings"] = own
    names = rope if again else ("rope_theta", "partial_rotary_factor")
    # an attention_factor belongs to the old factor: without it, transformers finds that of the new one
    kept = {name: rope[name] for name in names if rope.get(name) is not None and name != "attention_factor"}
    changed = {**(LLAMA3 if cfg.rope_scaling is RopeScaling.llama3 else {}), **kept, **more}
    text.rope_parameters = {**found, "full_attention": changed} if nested else changed
    text.max_position_embeddings = int(own * cfg.rope_factor)
    return config


def check_length(skeleton: Any, config: Any, seq_len: int, cfg: ModelConfig) -> str:
    """Compare train.seq_len with the length that the model's config names; return a warning, or "".

    Raises ConfigError if the sequence is longer than the model's table of positions. Computed positions (rotary, ALiBi)
    have no such limit, but a pretrained model has not been trained on longer sequences. `skeleton` may be on the meta
    device.
    """
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if type(longest) is not int or not 0 < longest < seq_len:
        return ""
    if table := _find_table(skeleton, longest):
        raise ConfigError(
            f"train.seq_len={seq_len}: the model has a table of {longest} positions ({table}), and no row for later "
            f"ones: set train.seq_len={longest} or less"
        )
    if cfg.rope_scaling is not None:
        needed = -(-seq_len * cfg.rope_factor // longest)
        raise ConfigError(
            f"train.seq_len={seq_len} is longer than the {longest} positions that "
            f"model.rope_factor={cfg.rope_factor:g} reaches: set model.rope_factor={needed:g}, or "
            f"train.seq_len={longest} or less"
        )
    if cfg.init is not ModelInit.pretrained:
        return ""
    return (
        f"train.seq_len={seq_len} is longer than the {longest} positions that the model was made for "
        f"(max_position_embeddings): it must learn the later ones. Set train.seq_len={longest} or less, or stretch its "
        f"rotary positions: model.rope_scaling=yarn model.rope_factor={-(-seq_len // longest)}"
    )


def _find_table(skeleton: Any, longest: int) -> str:
    """Return the name of an embedding or buffer with one row per position; empty without one."""
    words = skeleton.get_input_embeddings() if hasattr(skeleton, "get_input_embeddings") else None
    rows = range(longest, longest + LARGEST_OFFSET + 1)
    for name, module in skeleton.named_modules():
        if isinstance(module, nn.Embedding) and module is not words and module.num_embeddings in rows:
            return name
    for name, buffer in skeleton.named_buffers():
        if buffer.dim() > 1 and any(size in rows for size in buffer.shape):
            return name
    return ""
