"""Find the decoder layers of a Hugging Face model: where every policy is applied."""

from __future__ import annotations

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from remat.config import ConfigError


def decoder_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The repeated layers of `model`, first to last: the longest ModuleList of checkpointable layers.

    Raises ConfigError when the model has none.
    """
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    stacks = [[layer for layer in layers if isinstance(layer, GradientCheckpointingLayer)] for layers in lists]
    stacks = [found for found, layers in zip(stacks, lists, strict=True) if found and len(found) == len(layers)]
    if not stacks:
        raise ConfigError(
            f"{type(model).__name__} has no stack of layers that supports activation checkpointing: "
            "use checkpointing=none or another model"
        )
    return max(stacks, key=len)
