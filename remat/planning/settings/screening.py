"""Estimate a plan at a fraction of its cost: without a replay of torch's allocator and without choosing tables.

A search among many candidates uses this. The settings that it returns have full plans (remat.planning.plan).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remat.activation_checkpointing.mechanisms.budget import MECHANISM as TABLES
from remat.activation_checkpointing.mechanisms.mechanism import KEEP, Mechanism
from remat.config.options import OffloadConfig, RunConfig
from remat.machine import gpus
from remat.planning import budget, plan, strategy, tiling
from remat.planning.plan import Planned, Recordings
from remat.planning.simulation.types import Category, Moment, Phase, Simulation, ZeroSettings
from remat.planning.strategy import Strategy

MAY_FIT_BELOW = 1.0  # bytes needed over bytes found, up to which the full plan may fit
# Bytes needed over the budget, up to which tables are estimated: their peak is only close to that of chosen tables. No
# search takes more than MAY_FIT_BELOW of the machine, so this counts where budget_gib is less than the machine has.
TABLES_MAY_FIT_BELOW = 1.08
LAYERS_ON_THEIR_WAY = 2  # layers whose values are still on the GPU while they are moved
SLICES = 8  # of MLPs, if their number is not chosen yet
SURELY_FITS_BELOW = 0.93  # share up to which the full plan fits, although its replay may find more gaps


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
        decided = replace(decided, decisions=tiling.with_count(decided.decisions, SLICES))
        if decided.stages is not None:
            return plan.make_plan(cfg, decided=decided, recordings=self._recordings)
        if budget.is_open(decided.decisions):
            if cfg.checkpointing.table is None:
                return self._with_tables(cfg, decided)
            graphs = self._recordings.get(cfg, decided).graphs
            given = budget.read_given(cfg.checkpointing, decided.decisions, graphs)
            decided = replace(decided, decisions=given)
        simulation, _ = self._simulate(cfg, decided)
        return plan.estimate(cfg, decided, simulation, world_size=ranks)

    def _simulate(
        self, cfg: RunConfig, decided: Strategy, mechanism: Mechanism | None = None
    ) -> tuple[Simulation, Mapping[int, Any]]:
        """Return a simulated micro-batch, and the graphs of the layers that get tables.

        `mechanism` takes the place of tables that are not chosen yet.
        """
        if mechanism is not None:
            decisions = [
                replace(each, mechanism=mechanism) if each.mechanism == TABLES else each
                for each in decided.decisions
            ]
            decided = replace(decided, decisions=decisions)
        recording = self._recordings.get(cfg, decided)
        return recording.under(ZeroSettings.of(decided.ds, cfg.hardware.ranks)), recording.graphs

    def _with_tables(self, cfg: RunConfig, decided: Strategy) -> Planned:
        """Estimate the plan with tables that fill the budget, between the fewest kept bytes and keeping all.

        The peak is that of keeping all in the layers with tables, minus what the tables of all of them but one do not
        keep: one is always recomputed whole. The seconds follow the frontier of each layer. Moved values are assumed to
        be all that the link carries at no cost, and to save as many seconds as kept ones, which is a best case. Raises
        NoRoom if the fewest bytes do not fit.
        """
        limit = budget.limit_bytes(cfg.checkpointing, plan.capacity_of(cfg.hardware).gpu_bytes, on_gpu=True)
        machine, ranks = gpus.machine(cfg.hardware), cfg.hardware.ranks
        staying = replace(cfg, checkpointing=replace(cfg.checkpointing, offload=OffloadConfig()))
        least, graphs = self._simulate(staying, decided)
        most, _ = self._simulate(staying, decided, KEEP)
        tables = budget.Tables(graphs, machine, self._recordings.corners)
        droppable = (len(graphs) - 1) * tables.added[-1] // len(graphs)

        def at(dropped: int, moved: int = 0) -> Planned:
            share = max(0.0, 1 - (dropped - moved) / max(1, droppable))
            between = _between(least, most, tables.time_saved(min(1.0, share)))
            between = replace(
                between,
                forward_peak=_less(most.forward_peak, dropped),
                backward_peak=_less(most.backward_peak, dropped),
                host_bytes=between.host_bytes + moved,
                moved_bytes=moved,
            )
            return plan.estimate(cfg, decided, between, world_size=ranks)

        keeping_all = at(0)
        beyond = plan.needed_bytes(keeping_all, plan.GPU_MEMORY) - limit
        if beyond <= 0:
            return keeping_all
        gaps = plan.FRAGMENTATION[decided.allocators.expandable_segments]
        needed, moved = round(beyond / (1 + gaps)), 0
        if cfg.checkpointing.offload.enabled:
            moved = self._movable(cfg, graphs, keeping_all)
        estimate = at(min(needed, droppable + moved), min(moved, needed))
        if plan.needed_bytes(estimate, plan.GPU_MEMORY) > TABLES_MAY_FIT_BELOW * limit:
            raise budget.NoRoom("checkpointing=budget: nothing fits the GPU")
        return estimate

    def _movable(self, cfg: RunConfig, graphs: Mapping[int, Any], keeping_all: Planned) -> int:
        """Return the bytes that can be moved to the host at no cost, without those of layers still on their way."""
        host = next(r for r in keeping_all.plan.resources if r.name == plan.HOST_MEMORY)
        room = None if host.spare_bytes is None else max(0, host.spare_bytes) // keeping_all.plan.ranks_per_node
        of = budget.Trial(0, 0.0, 0, graphs, None, keeping_all.time.link, room)
        prices = budget.Prices(gpus.machine(cfg.hardware), self._recordings.corners, on_gpu=True)
        links = budget.find_links(cfg.checkpointing, len(keeping_all.strategy.decisions), of, prices)
        sizes = [min(link.free_bytes, link.most_bytes) for link in links.values()]
        return max(0, sum(sizes) - LAYERS_ON_THEIR_WAY * max(sizes, default=0))


def _between(low: Simulation, high: Simulation, share: float) -> Simulation:
    """Interpolate between two simulations: `share` of the way from `low` to `high`. The peaks are those of `high`."""

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


NO_ACTIVATIONS = Simulation(
    forward_peak=Moment(0, {}, Phase.forward, None, "nothing"),
    backward_peak=Moment(0, {}, Phase.backward, None, "nothing"),
    kept_bytes=[],
    host_bytes=0,
    flops=dict.fromkeys(Phase, 0),
    ops=[],
    gathered_bytes=0,
    assumptions=[],
)
