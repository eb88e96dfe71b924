"""What each layer keeps for backward: the decision, apart from how it is carried out. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from remat.config import CheckpointingConfig, Policy


@dataclass(frozen=True)
class LayerDecision:
    """One decoder layer: recomputed as a whole in backward, or kept."""

    recompute: bool


def plan(cfg: CheckpointingConfig, num_layers: int) -> list[LayerDecision]:
    """The decision for each of `num_layers` layers, first to last."""
    return [LayerDecision(recompute=cfg.policy is Policy.full)] * num_layers


def describe(cfg: CheckpointingConfig, num_layers: int) -> str:
    """The policy in words for the run's header."""
    if cfg.policy is Policy.none:
        return "none (every activation is kept)"
    recomputed = sum(decision.recompute for decision in plan(cfg, num_layers))
    return f"{cfg.policy} ({recomputed} of {num_layers} layers recomputed in backward)"
