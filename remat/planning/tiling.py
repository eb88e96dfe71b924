"""Choose how many slices checkpointing.tiles=auto cuts MLPs into: as many as still lower the memory that a run needs.

It takes the smallest power of two for which plans of the whole run say that twice as many slices lower the memory by
less than 1 %. The peak is then elsewhere: in attention, in the loss, or in the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from remat.activation_checkpointing.mechanisms.mechanism import LayerDecision
from remat.config.units import format_count
from remat.planning.budget import Plan, Trial

AUTO = "checkpointing.tiles=auto"
LOWER = 0.99  # twice as many slices are taken if they need at most this share of the bytes
MOST = 64  # slices


def is_open(decisions: Sequence[LayerDecision]) -> bool:
    """Return whether the number of slices is still to be chosen."""
    return any(decision.tiling is not None and decision.tiling.count == 0 for decision in decisions)


def with_count(decisions: Sequence[LayerDecision], count: int) -> list[LayerDecision]:
    """Return `decisions` with `count` slices for each layer whose number of slices is still to be chosen."""
    return [
        replace(d, tiling=replace(d.tiling, count=count)) if d.tiling is not None and d.tiling.count == 0 else d
        for d in decisions
    ]


def chosen_count(decisions: Sequence[LayerDecision]) -> int:
    """Return the number of slices in `decisions`, 1 where no MLP is sliced."""
    return max((d.tiling.count for d in decisions if d.tiling is not None), default=1)


def choose(decisions: Sequence[LayerDecision], plan: Plan) -> tuple[Trial, str]:
    """Return the chosen plan, and the reason for its number of slices."""
    count, best = 1, plan(with_count(decisions, 1))
    while count < MOST:
        more = plan(with_count(decisions, 2 * count))
        if more.needed_bytes > LOWER * best.needed_bytes:
            break
        count, best = 2 * count, more
    slices = format_count(count, "slice")
    return best, f"{AUTO} took {slices}: twice as many would lower the memory needed by less than 1 %"
