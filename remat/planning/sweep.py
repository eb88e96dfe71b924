"""Plan a run several times, to compare memory and time.

`remat plan --sweep` plans every combination of the values that overrides with commas list. `remat plan --curve` plans
the tables of checkpointing=budget from the fewest kept bytes to all, and the policies in NAMED beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remat.config import compose
from remat.config.command_line import split_points
from remat.config.options import ConfigError
from remat.planning import budget, plan
from remat.planning.plan import Planned, Recordings

CURVE_PARTS = 10  # steps of the curve, which has one point more
NAMED = ("full", "selective_ops", "selective_linears", "discard_output", "offload", "none")


@dataclass(frozen=True)
class Point:
    """A combination of values: its plan, or why it is refused.

    `on_pareto_front`: no other point that fits is better in memory and in time.
    """

    overrides: tuple[str, ...]
    planned: Planned | None
    refused: str = ""
    on_pareto_front: bool = False

    @property
    def is_budget(self) -> bool:
        return budget.CHOICE in self.overrides

    @property
    def fits(self) -> bool:
        return self.planned is not None and self.planned.plan.fits

    @property
    def may_run(self) -> bool:
        """Return whether the verdict of the plan is fits or tight."""
        return self.planned is not None and self.planned.plan.verdict is not plan.Verdict.too_large


def run(args: Sequence[str], progress: Callable[[int, int], None] = lambda done, total: None) -> list[Point]:
    """Plan every combination; a refused one becomes a point with the reason. Raises ConfigError if all are refused."""
    fixed, points = split_points(args)
    recordings = Recordings()
    found = []
    for done, overrides in enumerate(points):
        progress(done, len(points))
        found.append(_point(fixed, overrides, recordings))
    progress(len(points), len(points))
    if all(point.planned is None for point in found):
        reasons = dict.fromkeys(point.refused for point in found)
        raise ConfigError("--sweep: every combination is refused\n" + "\n".join(reasons))
    return _mark_pareto_front(found)


def curve(args: Sequence[str], progress: Callable[[int, int], None] = lambda done, total: None) -> list[Point]:
    """Plan the run under tables from the fewest kept bytes to all, then under NAMED. Raises ConfigError for tables."""
    recordings, found = Recordings(), list[Point]()
    total = CURVE_PARTS + 1 + len(NAMED)
    cfg = compose.from_command_line([*args, budget.CHOICE]).run
    for planned in plan.make_curve(cfg, CURVE_PARTS, recordings):
        progress(len(found), total)
        size = f"checkpointing.budget_gib={budget.gib_up(gpu_bytes(planned))}"
        found.append(Point((budget.CHOICE, size), planned))
    for done, name in enumerate(NAMED, start=total - len(NAMED)):
        progress(done, total)
        found.append(_point(args, (f"checkpointing={name}",), recordings))
    progress(total, total)
    return _mark_pareto_front(found)


def _point(args: Sequence[str], overrides: tuple[str, ...], recordings: Recordings) -> Point:
    try:
        cfg = compose.from_command_line([*args, *overrides]).run
        return Point(overrides, plan.make_plan(cfg, recordings=recordings))
    except ConfigError as error:
        return Point(overrides, None, refused=" ".join(str(error).split()))


def gpu_bytes(planned: Planned) -> int:
    return plan.needed_bytes(planned, plan.GPU_MEMORY)


def is_timed(planned: Planned) -> bool:
    """Return whether the plan's time is complete and may be compared."""
    return planned.time.total_s > 0 and not planned.time.unknown


def _mark_pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the points with the Pareto front marked.

    A point that fits is on it when no other such point dominates it in GPU memory and time for a token.
    """
    costs = {
        index: (gpu_bytes(p.planned), 1 / p.planned.time.tokens_per_s)
        for index, p in enumerate(points)
        if p.planned and p.fits and is_timed(p.planned) and p.planned.time.tokens_per_s
    }
    front = {index for index, mine in costs.items() if not is_dominated(mine, costs.values())}
    return [replace(point, on_pareto_front=index in front) for index, point in enumerate(points)]


def is_dominated(mine: tuple[float, float], others: Iterable[tuple[float, float]]) -> bool:
    """Return whether one of `others` costs no more in memory and in time, and less in one of them."""
    return any(other != mine and other[0] <= mine[0] and other[1] <= mine[1] for other in others)


def as_json(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return one entry per point, in the order of the command line."""
    return [
        {
            "overrides": list(point.overrides),
            "fits": point.fits,
            "refused": point.refused or None,
            "on_front": point.on_pareto_front,
            "plan": plan.plan_as_json(point.planned) if point.planned else None,
        }
        for point in points
    ]
