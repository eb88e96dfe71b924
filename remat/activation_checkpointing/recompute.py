"""Carry a plan out on a model, and count what really happens.

The hook point is transformers' `GradientCheckpointingLayer`: two attributes per layer, no patch of a class. It
checkpoints `forward` inside the module's hooks, so ZeRO-3 gathers a layer's weights before its recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from remat.activation_checkpointing.layers import decoder_layers
from remat.activation_checkpointing.policy import LayerDecision


class NotInEffect(RuntimeError):
    """A policy promised something that the first step did not do."""


@dataclass
class Applied:
    """A plan in place. `forwards` and `recomputations` count calls per layer since the last `reset`."""

    decisions: Sequence[LayerDecision]
    forwards: list[int] = field(default_factory=list)
    recomputations: list[int] = field(default_factory=list)
    proven: bool = False

    def reset(self) -> None:
        self.forwards = [0] * len(self.decisions)
        self.recomputations = [0] * len(self.decisions)

    def evidence(self) -> list[dict[str, Any]]:
        """Per layer: what was decided and what was counted, for proof.json."""
        counted = zip(self.decisions, self.forwards, self.recomputations, strict=True)
        return [{**asdict(d), "forwards": f, "recomputations": r} for d, f, r in counted]

    def verify(self) -> None:
        """Raise NotInEffect unless every layer was recomputed exactly as often as the plan says."""
        expected = [n if d.recompute else 0 for d, n in zip(self.decisions, self.forwards, strict=True)]
        if any(d.recompute for d in self.decisions) and sum(self.forwards) == 0:
            raise NotInEffect(
                "checkpointing is not in effect: no layer ran through its checkpoint in the first step; "
                "the model does not call the layers it lists"
            )
        wrong = [i for i, (e, c) in enumerate(zip(expected, self.recomputations, strict=True)) if e != c]
        if wrong:
            raise NotInEffect(
                f"checkpointing is not in effect in layers {wrong}: expected {[expected[i] for i in wrong]} "
                f"recomputations in the first step, counted {[self.recomputations[i] for i in wrong]}"
            )
        self.proven = True


def apply(model: nn.Module, decisions: Sequence[LayerDecision]) -> Applied:
    """Put `decisions` (one per decoder layer; none at all: everything is kept) in place and return their counters."""
    if not decisions:
        return Applied(decisions)
    layers = decoder_layers(model)
    if len(layers) != len(decisions):
        raise ValueError(f"the plan has {len(decisions)} layers, the model {len(layers)}")
    applied = Applied(decisions)
    applied.reset()
    for index, (layer, decision) in enumerate(zip(layers, decisions, strict=True)):
        layer.gradient_checkpointing = decision.recompute
        if decision.recompute:
            layer._gradient_checkpointing_func = _counting(applied, index)  # type: ignore[assignment]
    return applied


def _counting(applied: Applied, index: int) -> Callable[..., Any]:
    """A checkpoint function that counts the layer's forwards and recomputations: two integers a call."""

    def run(layer_forward: Callable[..., Any], *args: Any) -> Any:
        first = True

        def counted(*inner: Any) -> Any:
            nonlocal first
            if first:
                applied.forwards[index] += 1
                first = False
            else:
                applied.recomputations[index] += 1
            return layer_forward(*inner)

        if not torch.is_grad_enabled():
            return layer_forward(*args)
        return checkpoint(counted, *args, use_reentrant=False)

    return run
