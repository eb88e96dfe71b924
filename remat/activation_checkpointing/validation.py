"""Tell what cannot work before a weight is read: one problem per entry, with option, value and remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from remat.activation_checkpointing import policy
from remat.activation_checkpointing.mechanisms import offload
from remat.activation_checkpointing.mechanisms.mechanism import KEEP, LayerDecision, Mechanism, Setting, spans
from remat.activation_checkpointing.mechanisms.recompute import NO_LAYERDROP, describe_layerdrop
from remat.config.options import CheckpointingConfig, ConfigError

RANDOM_FIELDS = ("drop", "jitter_noise")  # in names of fields of a transformers config that make layers random


def problems(cfg: CheckpointingConfig, layers: Sequence[nn.Module], setting: Setting) -> list[str]:
    """Tell why `cfg` cannot work on a model with these decoder layers, which may be on any device, also meta."""
    found = policy.range_problems(cfg, len(layers))
    fitting = replace(cfg, layers={}) if found else cfg
    decisions = policy.decide_layers(fitting, len(layers), stacks=setting.stacks)
    found += _variants(cfg, setting)
    found += offload.problems(cfg, decisions, setting)
    found += policy.size_problems(cfg, len(layers), setting.stacks)
    for mechanism in _mechanisms(fitting):
        treated = [
            (decision, layer)
            for decision, layer in zip(decisions, layers, strict=True)
            if decision.mechanism == mechanism
        ]
        found += mechanism.refuse(cfg, treated, setting)
    return found or missing_parts(cfg, decisions, layers)


def skipped_layers(layerdrop: str, *, world_size: int) -> list[str]:
    """Tell why layers that are skipped at random cannot be trained on several ranks, whatever the policy."""
    if not layerdrop or world_size == 1:
        return []
    return [
        f"{describe_layerdrop(layerdrop)}, each of the {world_size} ranks others: their gradients and gathers would "
        f"not match, and the run would hang or abort; {NO_LAYERDROP}, or train on one rank"
    ]


def missing_parts(
    cfg: CheckpointingConfig, decisions: Sequence[LayerDecision], layers: Sequence[nn.Module]
) -> list[str]:
    """Check each layer for what its own policy needs: layers of one model may differ (dense and sparse ones).

    No weight is read; each text names option and remedy.
    """
    by_text: dict[str, list[int]] = {}
    for index, (decision, layer) in enumerate(zip(decisions, layers, strict=True)):
        for need in decision.mechanism.needs(cfg):
            try:
                need(layer)
            except ConfigError as error:
                by_text.setdefault(str(error), []).append(index)
    return [f"{text} (layers {spans(indices)})" for text, indices in by_text.items()]


def _mechanisms(cfg: CheckpointingConfig) -> list[Mechanism]:
    asked = policy.policies(cfg)
    return list(dict.fromkeys(rule.mechanism for name, rule in policy.RULES.items() if name in asked))


def _variants(cfg: CheckpointingConfig, setting: Setting) -> list[str]:
    mechanisms = [mechanism for mechanism in _mechanisms(cfg) if mechanism != KEEP]
    found = []
    without = sorted(
        name
        for name in policy.policies(cfg)
        if (mechanism := policy.RULES[name].mechanism) != KEEP and mechanism.is_reentrant is None
    )
    if cfg.reentrant and without:
        found.append(
            f"checkpointing.reentrant=true: {', '.join(without)} needs the non-reentrant variant; leave it out"
        )
    stops_early = any(mechanism.stops_early for mechanism in mechanisms) and not cfg.reentrant
    if not cfg.early_stop and stops_early and setting.zero_stage == 3:
        found.append(
            "checkpointing.early_stop=false under ZeRO-3: the recomputation would release weights that backward "
            "is about to use; leave it true"
        )
    random = _random_fields(setting)
    if not cfg.preserve_rng_state and random and mechanisms:
        found.append(
            f"checkpointing.preserve_rng_state=false with {', '.join(random)}: a recomputation would draw other random "
            "numbers than the forward and give wrong gradients; leave it true"
        )
    return found


def _random_fields(setting: Setting) -> list[str]:
    drawn = [
        f"{name}={value}"
        for name, value in sorted(setting.fields.items())
        if any(part in name for part in RANDOM_FIELDS) and isinstance(value, (int, float)) and value > 0
    ]
    return drawn + ([f"peft.dropout={setting.lora_dropout}"] if setting.lora_dropout else [])
