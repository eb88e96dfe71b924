"""Choose how many slices checkpointing.tiles=auto cuts MLPs into: as many as still lower the memory that a run needs.

The smallest power of two is taken of which twice as many would lower it by less than 1 %, by plans of the whole run.
The peak is elsewhere then: in attention, in the loss, in the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from remat.activation_checkpointing.mechanisms.mechanism import LayerDecision
from remat.planning.budget import Plan, Trial

AUTO = "checkpointing.tiles=auto"
LOWER = 0.99  # of the bytes needed: what is worth twice as many slices
MOST = 64  # slices


def is_open(decisions: Sequence[LayerDecision]) -> bool:
    """Return whether the number of slices is still to be chosen."""
    return any(decision.tiling is not None and decision.tiling.count == 0 for decision in decisions)


def with_count(decisions: Sequence[LayerDecision], count: int) -> list[LayerDecision]:
    """Return `decisions` with `count` slices for each layer of which the number is still to be chosen."""
    return [
        replace(d, tiling=replace(d.tiling, count=count)) if d.tiling is not None and d.tiling.count == 0 else d
        for d in decisions
    ]


def chosen_count(decisions: Sequence[LayerDecision]) -> int:
    """Return the number of slices in `decisions`, 1 where no MLP is sliced."""
    return max((d.tiling.count for d in decisions if d.tiling is not None), default=1)


def choose(decisions: Sequence[LayerDecision], plan: Plan) -> tuple[Trial, str]:
    """Return the plan that is taken, and why."""
    count, best = 1, plan(with_count(decisions, 1))
    while count < MOST:
        more = plan(with_count(decisions, 2 * count))
        if more.needed_bytes > LOWER * best.needed_bytes:
            break
        count, best = 2 * count, more
    slices = f"{count} slice{'s' * (count > 1)}"
    return best, f"{AUTO} took {slices}: twice as many would lower the memory needed by less than 1 %"
