"""Add noise to the embeddings in training (NEFTune, Jain et al. 2023), but not in evaluations."""

from __future__ import annotations

import math
from typing import Any

import torch


def add(model: Any, alpha: float, *, blocks: int = 1) -> None:
    """Add uniform noise to the output of the embedding of `model` while it trains; `alpha` 0 adds none.

    Each element of the output [batch, seq, width] gets noise in +-alpha / sqrt(seq * width). Where a rank has one of
    `blocks` equal blocks of a sequence, seq is the length of the whole sequence. Noise is drawn from the rank's random
    state, which is part of a saved state.
    """

    def add_noise(module: torch.nn.Module, _: Any, found: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return found
        most = alpha / math.sqrt(blocks * found.size(1) * found.size(2))
        return found + torch.zeros_like(found).uniform_(-most, most)

    if alpha:
        model.get_input_embeddings().register_forward_hook(add_noise)
