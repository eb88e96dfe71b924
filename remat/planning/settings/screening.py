"""Estimate a plan at a fraction of its cost: a few layers are simulated, and the rest are assumed to be alike.

A search among many candidates uses this. What is shown to anyone is planned whole (remat.planning.plan).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remat.activation_checkpointing import policy
from remat.activation_checkpointing.mechanisms.mechanism import KEEP, Mechanism
from remat.config.options import ConfigError, Policy, RunConfig
from remat.machine import gpus
from remat.model import hf_model
from remat.model.hf_model import ModelFacts
from remat.planning import budget, plan, strategy
from remat.planning.plan import Planned, Recordings
from remat.planning.simulation.simulate import Recording
from remat.planning.simulation.types import Category, Moment, Phase, Simulation, ZeroSettings
from remat.planning.strategy import Strategy

# Estimates of the GPU's memory were off by up to 7 % both ways (Qwen3 4B, ZeRO-3, full recomputation): of few layers
# ZeRO-3 keeps all gathered until they are used again, of many it does not, and the peak may be at another moment.
MAY_FIT_BELOW = 1.08  # share of the machine up to which an estimate may fit when it is planned whole
SURELY_FITS_BELOW = 0.93  # share up to which it does fit
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
                if budget.is_open(decided.decisions) and cfg.checkpointing.table is None:
                    return self._with_tables(cfg, decided, (low, high))
                whole, _ = self._stretch(cfg, decided, (low, high))
                return plan.estimate(cfg, decided, whole, world_size=ranks)
        except budget.NoRoom:
            raise
        except ConfigError:
            if not high:
                raise  # else perhaps only the few layers are refused, because of layer ranges
        return plan.make_plan(cfg, recordings=self._recordings)

    def _stretch(
        self, cfg: RunConfig, decided: Strategy, depths: tuple[int, int], mechanism: Mechanism | None = None
    ) -> tuple[Simulation, Mapping[int, Any]]:
        """Simulate the whole model by two of few layers, and return the graphs of those under a table.

        `mechanism` takes the place of the tables that are to be chosen.
        """
        low, high = depths
        ranks = cfg.hardware.ranks
        few, more = (self._recording(_with_depth(cfg, depth), decided, mechanism) for depth in depths)
        zero = ZeroSettings.of(decided.ds, ranks)
        repeats = (_depth(cfg) - high) / (high - low)
        return _stretched(few.under(zero), more.under(zero), repeats), more.graphs

    def _with_tables(self, cfg: RunConfig, decided: Strategy, depths: tuple[int, int]) -> Planned:
        """Estimate what tables of all layers do that fill the budget, between the least and keeping all.

        The peak is that of keeping all, less what the tables do not keep, but for one layer, which is made again whole.
        The seconds follow the frontier of each layer. Raises NoRoom where the least does not fit.
        """
        limit = budget.limit_bytes(cfg.checkpointing, plan.capacity_of(cfg.hardware).gpu_bytes, on_gpu=True)
        machine, ranks = gpus.machine(cfg.hardware), cfg.hardware.ranks
        least, graphs = self._stretch(cfg, decided, depths)
        most, _ = self._stretch(cfg, decided, depths, KEEP)
        tables = budget.Tables(graphs, machine, self._recordings.corners)
        droppable = (_depth(cfg) - 1) * tables.added[-1] // len(graphs)

        def at(share: float) -> Planned:
            dropped = round((1 - share) * droppable)
            between = replace(
                _stretched(least, most, tables.time_saved(share) - 1),
                forward_peak=_less(most.forward_peak, dropped),
                backward_peak=_less(most.backward_peak, dropped),
            )
            return plan.estimate(cfg, decided, between, world_size=ranks)

        keeping_all = at(1.0)
        beyond = plan.needed_bytes(keeping_all, plan.GPU_MEMORY) - limit
        if beyond <= 0:
            return keeping_all
        estimate = at(max(0.0, 1 - beyond / max(1, droppable * (1 + plan.FRAGMENTATION))))
        if plan.needed_bytes(estimate, plan.GPU_MEMORY) > MAY_FIT_BELOW * limit:
            raise budget.NoRoom("checkpointing=budget: nothing fits the GPU")
        return estimate

    def _recording(self, cfg: RunConfig, decided: Strategy, mechanism: Mechanism | None) -> Recording:
        """Record a model of a few layers."""
        ranks = cfg.hardware.ranks
        depends_on = (cfg.model, cfg.peft, cfg.data, cfg.train, cfg.checkpointing, decided.zero_stage)
        key = repr(depends_on)
        if key not in self._few:
            self._few[key] = strategy.decide(cfg, world_size=ranks, can_pin=True)
        own = self._few[key]
        if mechanism is not None:
            own = replace(own, decisions=[replace(d, mechanism=mechanism) for d in own.decisions])
        return self._recordings.get(cfg, own)

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
        ops=[op for op in few_ops | more_ops for _ in range(grown(few_ops[op], more_ops[op]))],
        gathered_bytes=grown(low.gathered_bytes, high.gathered_bytes),
        peaks={},
    )


def _stretched_moment(low: Moment, high: Moment, repeats: float) -> Moment:
    sizes: dict[Category, int] = {}
    for name, size in high.by_category.items():
        sizes[name] = round(size + (size - low.by_category.get(name, 0)) * repeats)
    return replace(high, total_bytes=sum(sizes.values()), by_category=sizes)


def _less(moment: Moment, dropped_bytes: int) -> Moment:
    """Return the moment without that many bytes of kept activations; none below 0."""
    kept = moment.by_category.get(Category.activations, 0)
    left = max(0, kept - dropped_bytes)
    by_category = {**moment.by_category, Category.activations: left}
    return replace(moment, total_bytes=moment.total_bytes - kept + left, by_category=by_category)


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
    gathered_bytes=0,
    assumptions=[],
)
