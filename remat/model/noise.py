"""Add noise to the embeddings of a training step (NEFTune, Jain et al. 2023), none in an evaluation."""

from __future__ import annotations

import math
from typing import Any

import torch


def add(model: Any, alpha: float, *, blocks: int = 1) -> None:
    """Add uniform noise to what the embedding of `model` returns while it trains; `alpha` 0 adds none.

    Of a hidden state [batch, seq, width] each element gets noise in +-alpha / sqrt(seq * width), also where the
    embedding has one of `blocks` equal blocks of the sequence. It is drawn from the rank's own random state, which a
    saved state has.
    """
    if alpha:
        model.get_input_embeddings().register_forward_hook(
            lambda module, _, found: _noisy(module, found, alpha, blocks)
        )


def _noisy(module: torch.nn.Module, found: torch.Tensor, alpha: float, blocks: int) -> torch.Tensor:
    if not module.training:
        return found
    most = alpha / math.sqrt(blocks * found.size(1) * found.size(2))
    return found + torch.zeros_like(found).uniform_(-most, most)
