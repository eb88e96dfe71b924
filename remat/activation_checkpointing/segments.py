"""Several layers recomputed by one call: only the first one's input is kept.

A model calls its layers one by one, so all but the last of a segment put themselves on a list and return their
input; the last one runs the list. Nothing between two layers may read the hidden state: it is not there yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from remat.activation_checkpointing.recompute import Recompute, carries_gradient
from remat.config import ConfigError

LayerForward = Callable[..., Any]


class Segment:
    """Layers `first` to `last`, run by `recompute` as one region."""

    def __init__(self, first: int, last: int, recompute: Recompute) -> None:
        self.first, self.last = first, last
        self._recompute = recompute
        self._waiting: list[tuple[LayerForward, tuple[Any, ...]]] = []
        self._passed_on: tuple[int, int, int] | None = (
            None  # the hidden state between two layers, as it was given
        )

    def __call__(self, index: int, layer_forward: LayerForward, hidden: torch.Tensor, *rest: Any) -> Any:
        """Layer `index` of the segment; the hidden state [batch, seq, hidden] comes first."""
        if index == self.first:
            self._waiting = []  # what an interrupted forward left behind
        elif len(self._waiting) == index - self.first and self._passed_on != _identity(hidden):
            raise ConfigError(
                f"checkpointing: this model edits the hidden state between layers {index - 1} and {index}, so they "
                "cannot be recomputed in one segment; use checkpointing=full"
            )
        if self._recompute.reentrant and carries_gradient(tree_leaves(rest)):
            raise ConfigError(
                f"checkpointing: layer {index} is given a tensor besides the hidden state that carries a gradient, and "
                "a segment of the reentrant variant (the default under ZeRO-3) passes one back to its input only; use "
                "checkpointing=full"
            )
        self._waiting.append((layer_forward, rest))
        if index < self.last:
            self._passed_on = _identity(hidden)
            return hidden
        layers, self._waiting = self._waiting, []
        if len(layers) != self.last - self.first + 1:
            raise ConfigError(
                f"checkpointing: the model did not call layers {self.first} to {self.last} one after the other; "
                "use checkpointing=full"
            )

        def run(state: torch.Tensor) -> torch.Tensor:
            for forward, others in layers:
                output = forward(state, *others)
                if not isinstance(output, torch.Tensor):
                    raise ConfigError(
                        f"checkpointing: this model's layers return a {type(output).__name__}, so they cannot be "
                        "recomputed in segments; use checkpointing=full"
                    )
                state = output
            return state

        return self._recompute(run, hidden)


def _identity(hidden: torch.Tensor) -> tuple[int, int, int]:
    """Memory and version: ZeRO-3's hooks wrap the tensor in new ones, which share both."""
    return hidden.untyped_storage()._cdata, int(hidden.storage_offset()), hidden._version
