"""Estimate a plan at a fraction of its cost: without the replay of torch's allocator, and with tables not yet chosen.

A search among many candidates uses this. What is shown to anyone is planned whole (remat.planning.plan).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remat.activation_checkpointing.mechanisms.mechanism import KEEP, Mechanism
from remat.config.options import RunConfig
from remat.machine import gpus
from remat.planning import budget, plan, strategy
from remat.planning.plan import Planned, Recordings
from remat.planning.simulation.types import Category, Moment, Phase, Simulation, ZeroSettings
from remat.planning.strategy import Strategy

MAY_FIT_BELOW = 1.0  # share of the machine up to which an estimate may fit when it is planned whole
TABLES_MAY_FIT_BELOW = 1.08  # the same of tables, whose peak is only near that of the tables that are chosen
SURELY_FITS_BELOW = 0.93  # share up to which it does fit: a replay of the allocator may find more gaps


class Screen:
    """An estimator of plans. One object serves one search."""

    def __init__(self, recordings: Recordings) -> None:
        self._recordings = recordings

    def estimate(self, cfg: RunConfig) -> Planned:
        """Estimate the plan of `cfg`. Raises ConfigError.

        When the model states alone do not fit, the plan contains only those: its simulation is NO_ACTIVATIONS.
        """
        ranks = cfg.hardware.ranks
        decided = strategy.decide(cfg, world_size=ranks, can_pin=True)
        bound = plan.estimate(cfg, decided, NO_ACTIVATIONS, world_size=ranks)
        if not bound.plan.fits:
            return bound
        if budget.is_open(decided.decisions) and cfg.checkpointing.table is None:
            return self._with_tables(cfg, decided)
        if decided.stages is not None:
            return plan.make_plan(cfg, decided=decided, recordings=self._recordings)
        simulation, _ = self._simulate(cfg, decided)
        return plan.estimate(cfg, decided, simulation, world_size=ranks)

    def _simulate(
        self, cfg: RunConfig, decided: Strategy, mechanism: Mechanism | None = None
    ) -> tuple[Simulation, Mapping[int, Any]]:
        """Simulate a micro-batch, and return the graphs of the layers under a table.

        `mechanism` takes the place of the tables that are to be chosen.
        """
        if mechanism is not None:
            decided = replace(
                decided, decisions=[replace(each, mechanism=mechanism) for each in decided.decisions]
            )
        recording = self._recordings.get(cfg, decided)
        return recording.under(ZeroSettings.of(decided.ds, cfg.hardware.ranks)), recording.graphs

    def _with_tables(self, cfg: RunConfig, decided: Strategy) -> Planned:
        """Estimate what tables of all layers do that fill the budget, between the least and keeping all.

        The peak is that of keeping all, less what the tables do not keep, but for one layer, which is made again whole.
        The seconds follow the frontier of each layer. Raises NoRoom where the least does not fit.
        """
        limit = budget.limit_bytes(cfg.checkpointing, plan.capacity_of(cfg.hardware).gpu_bytes, on_gpu=True)
        machine, ranks = gpus.machine(cfg.hardware), cfg.hardware.ranks
        least, graphs = self._simulate(cfg, decided)
        most, _ = self._simulate(cfg, decided, KEEP)
        tables = budget.Tables(graphs, machine, self._recordings.corners)
        droppable = (len(decided.decisions) - 1) * tables.added[-1] // len(graphs)

        def at(share: float) -> Planned:
            dropped = round((1 - share) * droppable)
            between = replace(
                _between(least, most, tables.time_saved(share)),
                forward_peak=_less(most.forward_peak, dropped),
                backward_peak=_less(most.backward_peak, dropped),
            )
            return plan.estimate(cfg, decided, between, world_size=ranks)

        keeping_all = at(1.0)
        beyond = plan.needed_bytes(keeping_all, plan.GPU_MEMORY) - limit
        if beyond <= 0:
            return keeping_all
        estimate = at(max(0.0, 1 - beyond / max(1, droppable * (1 + plan.FRAGMENTATION))))
        if plan.needed_bytes(estimate, plan.GPU_MEMORY) > TABLES_MAY_FIT_BELOW * limit:
            raise budget.NoRoom("checkpointing=budget: nothing fits the GPU")
        return estimate


def _between(low: Simulation, high: Simulation, share: float) -> Simulation:
    """Return what lies `share` of the way from `low` to `high`. The peaks are those of `high`."""

    def at(one: float, other: float) -> int:
        return max(0, round(one + (other - one) * share))

    low_ops, high_ops = Counter(low.ops), Counter(high.ops)
    return replace(
        high,
        host_bytes=at(low.host_bytes, high.host_bytes),
        flops={phase: at(low.flops[phase], high.flops[phase]) for phase in Phase},
        ops=[op for op in low_ops | high_ops for _ in range(at(low_ops[op], high_ops[op]))],
        gathered_bytes=at(low.gathered_bytes, high.gathered_bytes),
        peaks={},
    )


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
