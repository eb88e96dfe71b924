"""How long a model's sequences may be: some look positions up in a table, the others compute them for any length."""

from __future__ import annotations

from typing import Any

from torch import nn

from remat.config.options import ConfigError

LARGEST_OFFSET = 2  # OPT's table has two rows more than positions


def check_length(skeleton: Any, config: Any, seq_len: int, *, pretrained: bool) -> str:
    """Compare train.seq_len with the length that the model's config names; return a warning, or "".

    Raises ConfigError where a longer sequence would index a table of positions out of its range. Positions that are
    computed (rotary, ALiBi) have no such end, but a pretrained model has not met longer ones. `skeleton` may be on the
    meta device.
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
    if not pretrained:
        return ""
    return (
        f"train.seq_len={seq_len} is longer than the {longest} positions that the model was made for "
        f"(max_position_embeddings): it must learn the later ones. Set train.seq_len={longest} or less, or give the "
        "folder's config.json a rope scaling for the length"
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
