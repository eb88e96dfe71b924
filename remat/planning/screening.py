"""Estimate a plan at a fraction of its cost: a few layers are simulated, and the rest are assumed to be alike.

A search among many candidates uses this. What is shown to anyone is planned whole (remat.planning.plan).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from remat.activation_checkpointing import policy
from remat.config.options import ConfigError, Policy, RunConfig
from remat.model import hf_model
from remat.model.hf_model import ModelFacts
from remat.planning import plan, strategy
from remat.planning.plan import Planned
from remat.planning.recording import Recordings
from remat.planning.simulation.types import Category, Moment, Phase, Simulation, ZeroSettings
from remat.planning.strategy import Strategy

FEW_LAYERS = 8  # a model of at most so many is simulated whole
DEPTH_FIELDS = ("num_hidden_layers", "n_layer")
LOW_LAYERS = 2


class Screen:
    """An estimator of plans. One object serves one search and remembers what it simulated."""

    def __init__(self, recordings: Recordings) -> None:
        self._recordings = recordings
        self._facts: dict[str, ModelFacts] = {}
        self._few: dict[str, Strategy] = {}  # what was decided for models of a few layers

    def estimate(self, cfg: RunConfig) -> Planned:
        """Estimate the plan of `cfg`. Raises ConfigError.

        When the model states alone do not fit, the plan contains only those: its simulation is NO_ACTIVATIONS.
        """
        low, high = _depths(cfg)
        ranks = cfg.hardware.ranks
        try:
            large = _with_depth(cfg, high) if high else cfg
            decided = strategy.decide(large, world_size=ranks, can_pin=True)
            if high:
                facts = self._whole(cfg)
                decided = replace(decided, facts=facts, held=facts)
            bound = plan.estimate(cfg, decided, NO_ACTIVATIONS, world_size=ranks)
            if not bound.plan.fits:
                return bound
            if high:
                few, more = (self._simulation(each, decided) for each in (_with_depth(cfg, low), large))
                whole = _stretched(few, more, (_depth(cfg) - high) / (high - low))
                return plan.estimate(cfg, decided, whole, world_size=ranks)
        except ConfigError:
            if not high:
                raise  # else perhaps only the few layers are refused, because of layer ranges
        return plan.make_plan(cfg, recordings=self._recordings)

    def _simulation(self, cfg: RunConfig, decided: Strategy) -> Simulation:
        """Simulate a model of a few layers, under the ZeRO settings of `decided`."""
        ranks = cfg.hardware.ranks
        depends_on = (cfg.model, cfg.peft, cfg.data, cfg.train, cfg.checkpointing, decided.zero_stage)
        key = repr(depends_on)
        if key not in self._few:
            self._few[key] = strategy.decide(cfg, world_size=ranks, can_pin=True)
        return self._recordings.get(cfg, self._few[key]).under(ZeroSettings.of(decided.ds, ranks))

    def _whole(self, cfg: RunConfig) -> ModelFacts:
        key = repr((cfg.model, cfg.peft))
        if key not in self._facts:
            ranks = cfg.hardware.ranks
            self._facts[key] = strategy.decide(cfg, world_size=ranks, can_pin=True).facts
        return self._facts[key]


def with_shape(cfg: RunConfig) -> RunConfig:
    """Return `cfg` with the fields of the model's own config in its options, so that fewer layers can be planned."""
    if cfg.model.architecture or cfg.model.path is None or cfg.model.trust_remote_code:
        return cfg
    config = hf_model.shape_config(cfg.model)
    if config.get_text_config() is not config:
        return cfg
    return replace(cfg, model=replace(cfg.model, architecture=config.to_dict()))


def _depth(cfg: RunConfig) -> int:
    """Return the number of decoder layers that the options name; 0 if a folder does, whose model is planned whole."""
    return next(
        (int(cfg.model.architecture[name]) for name in DEPTH_FIELDS if name in cfg.model.architecture), 0
    )


def _depths(cfg: RunConfig) -> tuple[int, int]:
    """Two depths between which a policy repeats; zeros when the model is hardly deeper than that."""
    unit = policy.period(cfg.checkpointing, _depth(cfg))
    low = unit * math.ceil(LOW_LAYERS / unit)
    high = low + unit * math.ceil(2 / unit)
    return (low, high) if _depth(cfg) > max(FEW_LAYERS, high + high // 2) else (0, 0)


def _with_depth(cfg: RunConfig, depth: int) -> RunConfig:
    fields = {name: depth if name in DEPTH_FIELDS else value for name, value in cfg.model.architecture.items()}
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == _depth(cfg):  # one entry per layer
            fields[name] = value[:depth]
    checkpointing = cfg.checkpointing
    if checkpointing.policy is Policy.sqrt:  # segments as long as those of the whole model
        size = policy.sqrt_segment(_depth(cfg))
        checkpointing = replace(checkpointing, policy=Policy.uniform, segment_layers=size)
    return replace(cfg, model=replace(cfg.model, architecture=fields), checkpointing=checkpointing)


def _stretched(low: Simulation, high: Simulation, repeats: float) -> Simulation:
    """Return `high` with its difference from `low` added `repeats` times more."""

    def grown(few: float, more: float) -> int:
        return max(0, round(more + (more - few) * repeats))

    few_ops, more_ops = Counter(low.ops), Counter(high.ops)
    return replace(
        high,
        forward_peak=_stretched_moment(low.forward_peak, high.forward_peak, repeats),
        backward_peak=_stretched_moment(low.backward_peak, high.backward_peak, repeats),
        host_bytes=grown(low.host_bytes, high.host_bytes),
        flops={phase: grown(low.flops[phase], high.flops[phase]) for phase in Phase},
        ops=[op for op in more_ops for _ in range(grown(few_ops[op], more_ops[op]))],
        gathered_elements=grown(low.gathered_elements, high.gathered_elements),
    )


def _stretched_moment(low: Moment, high: Moment, repeats: float) -> Moment:
    sizes: dict[Category, int] = {}
    for name, size in high.by_category.items():
        sizes[name] = round(size + (size - low.by_category.get(name, 0)) * repeats)
    return replace(high, total_bytes=sum(sizes.values()), by_category=sizes)


def _nothing(phase: Phase) -> Moment:
    empty: Mapping[Category, int] = {}
    return Moment(0, empty, phase, None, "nothing")


NO_ACTIVATIONS = Simulation(
    forward_peak=_nothing(Phase.forward),
    backward_peak=_nothing(Phase.backward),
    kept_bytes=[],
    host_bytes=0,
    flops=dict.fromkeys(Phase, 0),
    ops=[],
    gathered_elements=0,
    assumptions=[],
)
