"""Choose the tables of checkpointing=budget: the fastest whose planned peak is within `checkpointing.budget_gib`.

A table says what a layer keeps and what it recomputes. Each distinct layer has a Pareto frontier of recomputation time
over kept bytes. All layers start at the fewest bytes and climb their frontiers corner by corner: the climb that saves
the most seconds per byte comes first, and of equal ones the last layer's, whose backward comes first. This is optimal
except for the last corner, which does not fit. Plans of the whole run decide how far the layers climb: gathers, loss,
workspaces, recomputed values and the optimizer count in their peaks.

With `checkpointing.offload.enabled` a value may also move to the host. Each layer gets a share of the link that ZeRO
leaves free (`step_time.LinkRoom`), in proportion to its forward time, and an equal share of the free host memory.
Tables that move values are taken only if their plan is faster than that of tables that do not.

With pipeline stages, each stage gets the fastest tables within the budget for its own layers. A stage that holds k
micro-batches keeps k times what its tables keep, and its plans count that. A step takes the slowest stage's time for
every micro-batch, and each other stage's time once; so the fastest tables of each stage make the fastest step.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from remat.activation_checkpointing.mechanisms import budget
from remat.activation_checkpointing.mechanisms.mechanism import KEEP, LayerDecision, spans
from remat.activation_checkpointing.mechanisms.recompute import MECHANISM as RECOMPUTE
from remat.activation_checkpointing.mechanisms.tables.frontier import Point, frontier
from remat.activation_checkpointing.mechanisms.tables.graph import Graph
from remat.activation_checkpointing.mechanisms.tables.placement import Link, frontier_with_link
from remat.activation_checkpointing.mechanisms.tables.table import (
    Table,
    choose_kept,
    choose_moved,
    compile_table,
)
from remat.config import paths
from remat.config.options import CheckpointingConfig, ConfigError, StorageDtype
from remat.config.units import GIB
from remat.machine.gpus import Machine
from remat.planning.simulation.types import OpCost, Phase
from remat.planning.step_time import LinkRoom, price

CHOICE = "checkpointing=budget"  # as on the command line
FILE = "checkpointing_table.json"
MARGIN = 0.02  # share of a GPU's memory that budget_gib=auto leaves free
CLOSE = 0.002  # share of the budget: a plan that leaves less unused is not improved
MOST_TRIALS = 12
MOST_STAIRS = 4
SCARCE = 100  # times the cost of moving, so that a layer moves what it cannot recompute, and nothing else
MUCH = 0.05  # share of a budget: a plan that leaves as much unused is worth more plans
LEAPS = (1.0, 0.5, 0.25)  # shares of the unused bytes that higher climbs are tried to use
FEW_LAYERS = 12  # up to so many layers, the last one gets plans of its own
FIRST_CORNERS = 6  # parts of the last layer's frontier whose ends are tried before the neighbours of the best
LITTLE = 0.05  # share of recomputation: if a climb saves less, more kept bytes may lower the peak
WORKSPACE = 0.05  # share of a budget by which the fewest kept bytes may exceed it: more may need less
NANO = 1e9
CUT_SHORT = "the time was up before all tables were tried: a faster one may fit"
MORE_OFFLOAD = "; checkpointing.offload.enabled=true lets tables move to the host too"
POOLED = 0.8  # usable share of free host memory: buffers fill at least so much of their blocks


@dataclass(frozen=True)
class Trial:
    """`made`, a plan of the whole run, and its figures. `seconds` are of a step, 0 if unknown.

    `graphs` are those of the layers under a table. `link` and `host_room_bytes` are what activations may use of the
    link to the host and of each rank's host memory; None: unknown.
    """

    needed_bytes: int
    seconds: float
    recomputed_flops: int
    graphs: Mapping[int, Graph]
    made: Any
    link: LinkRoom | None = None
    host_room_bytes: int | None = None

    @property
    def speed(self) -> tuple[float, int]:
        """Return the sort key by speed, the fastest plan first: seconds, then recomputed FLOPs."""
        return self.seconds, self.recomputed_flops


class NoRoom(ConfigError):
    """Error: no plan is within the budget. `least_bytes` is the smallest budget that is enough; 0: unknown."""

    def __init__(self, text: str, least_bytes: int = 0) -> None:
        super().__init__(text)
        self.least_bytes = least_bytes


class TimeIsUp(ConfigError):
    """Error: no plan within the budget was found before the time was up."""


Plan = Callable[[list[LayerDecision]], Trial]
Found = tuple[Trial, list[LayerDecision]]  # a plan and its decisions
Choice = tuple[Trial, list[LayerDecision], str]  # a plan, its decisions, why it has no table ("" if it has)
Climb = tuple[int, int]  # a layer and the corner of its frontier that it climbs to
Corners = dict[Any, list[Point]]  # frontier of each distinct layer, by its values, costs and link


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline. `first` is the number of its first layer; `plan` plans a rank of the stage.

    `decisions` has one entry per layer of the stage. `in_flight` is the number of micro-batches that it holds at once.
    """

    first: int
    decisions: list[LayerDecision]
    plan: Plan
    in_flight: int

    @property
    def span(self) -> str:
        """Return the numbers of its layers in words, for example `0-3`."""
        return spans(list(range(self.first, self.first + len(self.decisions))))


def is_open(decisions: Sequence[LayerDecision]) -> bool:
    """Return whether tables are still to be chosen."""
    return any(decision.mechanism == budget.MECHANISM and decision.table is None for decision in decisions)


def choose(
    cfg: CheckpointingConfig,
    decisions: list[LayerDecision],
    plan: Plan,
    machine: Machine,
    *,
    gpu_bytes: int | None,
    on_gpu: bool,
    known: Corners | None = None,
    in_flight: int | None = None,
    until: float = math.inf,
) -> Choice:
    """Return the chosen plan, its decisions, and the reason if it has no table, or CUT_SHORT.

    `gpu_bytes` is the memory of the GPU; None: unknown. `known` caches the frontier of each layer. `in_flight` is the
    number of micro-batches whose kept values a stage holds; None: there are no stages. After `until`, a time by
    time.process_time(), no plan is begun but the first: the fastest so far is returned. Raises NoRoom if nothing fits
    the budget, TimeIsUp if nothing was found by then, ConfigError for a table that does not suit the model.
    """
    if cfg.table is not None:
        given = read_given(cfg, decisions, plan(decisions).graphs)
        return plan(given), given, ""
    limit = limit_bytes(cfg, gpu_bytes, on_gpu=on_gpu)
    in_time = _InTime(plan, limit, until)
    prices = Prices(machine, {} if known is None else known, on_gpu=on_gpu)
    try:
        return _search(cfg, decisions, in_time, prices, limit, in_flight)
    except TimeIsUp:
        if in_time.best is None:
            raise
        return *in_time.best, CUT_SHORT


def read_given(
    cfg: CheckpointingConfig, decisions: Sequence[LayerDecision], graphs: Mapping[int, Graph]
) -> list[LayerDecision]:
    """Return the decisions of the file checkpointing.table, for layers with these graphs. Raises ConfigError."""
    assert cfg.table is not None
    return _read(paths.expand(cfg.table), decisions, graphs, cfg.offload.dtype)


class _InTime:
    """A `plan` that raises TimeIsUp after `until`, but never the first time. `best`: the fastest so far that fits."""

    def __init__(self, plan: Plan, limit: int, until: float) -> None:
        self._plan, self._limit, self._until = plan, limit, until
        self._has_begun = False
        self.best: Found | None = None

    def __call__(self, decisions: list[LayerDecision]) -> Trial:
        if self._has_begun and time.process_time() > self._until:
            raise TimeIsUp(f"{CHOICE}: no table that fits was found before the time was up")
        self._has_begun = True
        trial = self._plan(decisions)
        if trial.needed_bytes <= self._limit and (self.best is None or trial.speed < self.best[0].speed):
            self.best = trial, decisions
        return trial


def _search(
    cfg: CheckpointingConfig,
    decisions: list[LayerDecision],
    plan: Plan,
    prices: Prices,
    limit: int,
    in_flight: int | None,
) -> Choice:
    """Return what `choose` returns, for tables that are to be chosen."""
    least = plan(decisions)
    ways = [_Slopes(decisions, least, plan, prices.frontiers(least.graphs), cfg.offload.dtype)]
    climbed = [_climb_with_last(ways[0], limit, in_flight)]
    if cfg.offload.enabled and least.graphs:
        links = find_links(cfg, len(decisions), least, prices)
        scarce = {
            layer: replace(link, free_bytes=0, cost_per_byte=SCARCE * link.cost_per_byte)
            for layer, link in links.items()
        }
        for room in links, scarce:
            ways.append(ways[0].move(prices.frontiers(least.graphs, room)))
            climbed.append(_climb_with_last(ways[-1], limit, in_flight))
            if any(climbed):
                break
    best = min(filter(None, climbed), key=lambda found: found[0].speed, default=None)
    best = best and _keep_last(best, plan)
    # checkpointing=full recomputes at least as much as `least`, so that it cannot be faster here.
    if best and 2 * best[0].recomputed_flops < least.recomputed_flops:
        return *best, ""
    whole = [replace(d, mechanism=RECOMPUTE) if d.mechanism == budget.MECHANISM else d for d in decisions]
    recomputed = plan(whole)
    fits = recomputed.needed_bytes <= limit
    if fits and (best is None or recomputed.speed <= best[0].speed):
        return recomputed, whole, "no table is faster than checkpointing=full here, which is taken"
    if best is None:
        smallest = min(recomputed.needed_bytes, *(slopes.least.needed_bytes for slopes in ways))
        raise NoRoom(
            f"checkpointing.budget_gib={cfg.budget_gib}: the least that this run needs is {gib_up(smallest)} GiB of "
            f"each GPU; set checkpointing.budget_gib={gib_up(smallest)}, or make the run smaller "
            f"(train.micro_batch_size, train.seq_len, the ZeRO stage, offload{MORE_OFFLOAD * (len(ways) == 1)}); "
            "checkpointing=full checkpointing.tiles=auto may need less, for it computes MLPs in slices",
            smallest,
        )
    return *best, ""


def _climb_with_last(slopes: _Slopes, limit: int, in_flight: int | None) -> Found | None:
    """Return the fastest plan within `limit` that the slopes lead to; None if no plan is within it."""
    found = _climb(slopes, limit, in_flight)
    if in_flight is not None:  # in a stage the backward of its last layer follows other micro-batches
        return found
    return _set_last_apart(found, slopes, limit)


def choose_in_stages(
    cfg: CheckpointingConfig,
    stages: Sequence[Stage],
    machine: Machine,
    *,
    gpu_bytes: int | None,
    on_gpu: bool,
    known: Corners,
    until: float = math.inf,
) -> list[Choice]:
    """Return what `choose` returns, for each stage by itself: no stage uses the memory of another.

    Raises NoRoom, with every stage that does not fit and the smallest budget that is enough for all, and ConfigError.
    """
    if cfg.table is not None:
        return _given_to_stages(paths.expand(cfg.table), stages, cfg.offload.dtype)
    limit = limit_bytes(cfg, gpu_bytes, on_gpu=on_gpu)
    found: list[Choice] = []
    lacking: dict[int, int] = {}
    for number, stage in enumerate(stages):
        if not is_open(stage.decisions):
            trial = stage.plan(stage.decisions)
            found.append((trial, stage.decisions, ""))
            if trial.needed_bytes > limit:
                lacking[number] = trial.needed_bytes
            continue
        try:
            trial, decisions, because = choose(
                cfg,
                stage.decisions,
                stage.plan,
                machine,
                gpu_bytes=gpu_bytes,
                on_gpu=on_gpu,
                known=known,
                in_flight=stage.in_flight,
                until=until,
            )
            found.append((trial, decisions, because and f"stage {number}: {because}"))
        except NoRoom as error:
            lacking[number] = error.least_bytes
    if lacking:
        most = gib_up(max(lacking.values()))
        least = ", ".join(
            f"stage {number} (layers {stages[number].span}, {stages[number].in_flight} micro-batches at once) "
            f"{gib_up(size)} GiB"
            for number, size in lacking.items()
        )
        raise NoRoom(
            f"checkpointing.budget_gib={cfg.budget_gib}: the least that these stages need of each of their GPUs is "
            f"more: {least}; set checkpointing.budget_gib={most}, or make the run smaller (train.micro_batch_size, "
            "train.seq_len, a larger train.pipeline_parallel_size)",
            max(lacking.values()),
        )
    return found


def _given_to_stages(path: Path, stages: Sequence[Stage], dtype: StorageDtype) -> list[Choice]:
    """Return the plans of stages under a table that was written for all layers. Raises ConfigError."""
    graphs = merge_graphs(stages, [stage.plan(stage.decisions) for stage in stages])
    every = [decision for stage in stages for decision in stage.decisions]
    given = _read(path, every, graphs, dtype)
    if moving := [index for index, decision in enumerate(given) if decision.offload]:
        raise ConfigError(
            f"checkpointing.table={path}: layers {spans(moving)} move values to the host, whose buffers hold one "
            "micro-batch, and stages hold several; leave `offload` empty"
        )
    own = [given[stage.first : stage.first + len(stage.decisions)] for stage in stages]
    return [(stage.plan(decisions), decisions, "") for stage, decisions in zip(stages, own, strict=True)]


def merge_graphs(stages: Sequence[Stage], trials: Sequence[Trial]) -> dict[int, Graph]:
    """Return the graphs of the layers of all stages, by their numbers in the whole model."""
    return {
        stage.first + index: graph
        for stage, trial in zip(stages, trials, strict=True)
        for index, graph in trial.graphs.items()
    }


def limit_bytes(cfg: CheckpointingConfig, gpu_bytes: int | None, *, on_gpu: bool) -> int:
    """Return the bytes of each GPU that the run may take. Raises ConfigError where they are not known."""
    if cfg.budget_gib != "auto":
        return int(float(cfg.budget_gib) * GIB)
    if gpu_bytes is None or not on_gpu:
        raise ConfigError(
            "checkpointing.budget_gib=auto: there is no GPU whose memory is known; give GiB per rank, for example "
            "checkpointing.budget_gib=20, or name a machine (hardware=1xh100)"
        )
    return int(gpu_bytes * (1 - MARGIN))


@dataclass(frozen=True)
class _Slopes:
    """What layers climb: their frontiers, from the fewest bytes on, and plans of the run at any corners of them.

    `least` is the plan under `decisions`, which keeps the fewest bytes. `dtype` is that of moved values on the host.
    """

    decisions: list[LayerDecision]
    least: Trial
    plan: Plan
    frontiers: Mapping[int, list[Point]]
    dtype: StorageDtype

    def plan_after(self, steps: Sequence[Climb]) -> Found:
        """Return the plan after the climbs `steps` from the fewest bytes."""
        corners = dict.fromkeys(self.frontiers, 0) | dict(steps)
        tried = [
            self.decide(i, self.frontiers[i][corners[i]]) if i in corners else decision
            for i, decision in enumerate(self.decisions)
        ]
        return self.plan(tried), tried

    def move(self, frontiers: Mapping[int, list[Point]]) -> _Slopes:
        """Return the slopes of other frontiers, on which values may move to the host."""
        moving = replace(self, frontiers=frontiers)
        least, decisions = moving.plan_after([])
        return replace(moving, least=least, decisions=decisions)

    def decide(self, layer: int, point: Point) -> LayerDecision:
        return _decide(self.decisions[layer], self.least.graphs[layer], point, self.dtype)

    def find_corner(self, layer: int, chosen: LayerDecision) -> int:
        """Return the corner of a layer's frontier at which it gets the decision `chosen`."""
        tables = (self.decide(layer, point) for point in self.frontiers[layer])
        return next((corner for corner, table in enumerate(tables) if table == chosen), 0)


def _climb(slopes: _Slopes, limit: int, in_flight: int | None = None) -> Found | None:
    """Return the plan within `limit` that keeps the most; None if no plan is within it.

    The plan that keeps the fewest bytes may need more memory than plans that keep more, because recomputed values and
    the workspace of their recomputation are in memory together in the backward of one layer.
    """
    steps, kept = _order(slopes.frontiers)
    added = [(in_flight or 1) * size for size in kept]
    climb = _bisect if in_flight is None else _climb_on
    least = slopes.least

    def at(count: int) -> Found:
        return slopes.plan_after(steps[:count])

    best = None
    if least.needed_bytes <= limit:
        best, _ = climb(at, 0, (least, slopes.decisions), added, limit)
    if best and best[0].recomputed_flops < (1 - LITTLE) * least.recomputed_flops:
        return best
    if least.needed_bytes <= (1 + WORKSPACE) * limit:
        for count in _stairs(steps):
            found = at(count)
            if found[0].needed_bytes <= limit and (best is None or found[0].speed < best[0].speed):
                return climb(at, count, found, added, limit)[0]
    return best


def _climb_on(
    at: Callable[[int], Found], start: int, first: Found, added: Sequence[int], limit: int
) -> tuple[Found, int]:
    """Do as `_bisect`, then try higher climbs if much of the budget is unused.

    The peak of a stage is often the optimizer's update. Then climbs differ only in the gaps of the GPU's allocator,
    which do not grow steadily: one climb may not fit although a higher one does. Climbs are tried that would use all
    of the unused bytes, half of them, and a quarter.
    """
    best, count = _bisect(at, start, first, added, limit)
    room = limit - best[0].needed_bytes
    if room < MUCH * limit:
        return best, count
    for part in LEAPS:
        leap = bisect_right(added, added[count] + part * room) - 1
        if leap <= count + 1:
            break
        found = at(leap)
        if found[0].needed_bytes <= limit:
            return _bisect(at, leap, found, added, limit)
    return best, count


def _bisect(
    at: Callable[[int], Found], start: int, first: Found, added: Sequence[int], limit: int
) -> tuple[Found, int]:
    """Return the highest climb that fits, and its number. It assumes that needed bytes grow with kept bytes.

    The next climb tried is where a straight line reaches the limit: between the highest that fits and the lowest that
    does not, or before there is one as if needed bytes grew like kept bytes. After two trials on one side it is the
    middle, because gaps in the allocator make steps of the line.
    """
    best, low, high, beyond, sides = first, start, len(added), 0, [0, 0]
    for _ in range(MOST_TRIALS):
        room = limit - best[0].needed_bytes
        if high - low <= 1 or (low > start and room < CLOSE * limit):
            break
        if not beyond:
            guess = bisect_right(added, added[low] + room) - 1
        elif max(sides) > 1:
            guess = (low + high) // 2
        else:
            guess = bisect_right(added, added[low] + (added[high] - added[low]) * room // (room + beyond)) - 1
        count = min(max(guess, low + 1), high - 1)
        found = at(count)
        if found[0].needed_bytes <= limit:
            best, low, sides = found, count, [sides[0] + 1, 0]
        else:
            high, beyond, sides = count, found[0].needed_bytes - limit, [0, sides[1] + 1]
    return best, low


def _stairs(steps: Sequence[Climb]) -> list[int]:
    """Return the numbers of climbs after which all layers have reached their first corner, their second, and so on."""
    last = {corner: count for count, (_, corner) in enumerate(steps, 1)}
    return sorted(last.values())[:MOST_STAIRS]


def curve(
    cfg: CheckpointingConfig,
    decisions: list[LayerDecision],
    plan: Plan,
    machine: Machine,
    parts: int,
    *,
    known: Corners,
) -> Iterator[Found]:
    """Yield plans on a GPU, from the fewest kept bytes to all, in `parts` steps of about equal bytes."""
    least, prices = plan(decisions), Prices(machine, known, on_gpu=True)
    links = find_links(cfg, len(decisions), least, prices) if cfg.offload.enabled else {}
    slopes = _Slopes(decisions, least, plan, prices.frontiers(least.graphs, links), cfg.offload.dtype)
    steps, added = _order(slopes.frontiers)
    counts = dict.fromkeys(bisect_left(added, part / parts * added[-1]) for part in range(parts + 1))
    for count in counts:
        yield slopes.plan_after(steps[:count])


def _set_last_apart(found: Found | None, slopes: _Slopes, limit: int) -> Found | None:
    """Return a faster choice than `found` in which the last layer has a corner of its own; `found` if there is none.

    Its backward is the first: what it keeps is freed before the backward of other layers, and what it recomputes is in
    memory together with all that they keep. So the peak may be lower if it keeps more. With more than FEW_LAYERS layers
    the gain is small, and nothing is planned.
    """
    last = max(slopes.frontiers, default=0)
    others = {layer: points for layer, points in slopes.frontiers.items() if layer != last}
    if not others or len(slopes.frontiers) > FEW_LAYERS:
        return found
    points_of_last = slopes.frontiers[last]
    steps, added = _order(others)
    saved = _saved(steps, others)
    reached = sum(slopes.find_corner(layer, found[1][layer]) for layer in others) if found else 0

    def at(corner: int, count: int) -> Found:
        return slopes.plan_after([*steps[:count], (last, corner)])

    @functools.cache
    def expect(corner: int) -> tuple[float, int]:
        """Return the cost with this corner, and the number of climbs of other layers that then fit, by one plan."""
        room = limit - at(corner, reached)[0].needed_bytes
        count = bisect_right(added, added[reached] + room) - 1
        cost = points_of_last[corner].cost - saved[count] if count >= 0 else math.inf
        return cost, count

    top = len(points_of_last) - 1
    best = min((top * part // FIRST_CORNERS for part in range(FIRST_CORNERS + 1)), key=expect)
    while (beside := min((c for c in (best - 1, best + 1) if 0 <= c <= top), key=expect, default=best)) != best:
        if expect(beside) >= expect(best):
            break
        best = beside
    for count in range(expect(best)[1], max(-1, expect(best)[1] - MOST_STAIRS), -1):
        first = at(best, count)
        if first[0].needed_bytes <= limit:
            apart, _ = _bisect(functools.partial(at, best), count, first, added, limit)
            return apart if found is None or apart[0].speed < found[0].speed else found
    return found


def _keep_last(found: Found, plan: Plan) -> Found:
    """Let the last layer keep everything if that is faster and needs no more memory, which is common.

    Its backward is the first: what it recomputes is in memory at the same moment as what it would have kept, beside all
    that other layers keep.
    """
    trial, decisions = found
    last = max(
        (i for i, decision in enumerate(decisions) if decision.mechanism == budget.MECHANISM), default=None
    )
    if last is None:
        return found
    kept_whole = replace(decisions[last], mechanism=KEEP, table=None, offload=False)
    tried = [kept_whole if i == last else d for i, d in enumerate(decisions)]
    kept = plan(tried)
    return (kept, tried) if kept.needed_bytes <= trial.needed_bytes and kept.speed < trial.speed else found


class Prices:
    """Costs of operations on one machine, and the frontiers of layers: equal layers are worked out once."""

    def __init__(self, machine: Machine, known: Corners, *, on_gpu: bool) -> None:
        self._machine, self._known, self._on_gpu = machine, known, on_gpu

    def costs(self, graph: Graph) -> list[int]:
        """Return the nanoseconds of each operation."""
        found = []
        for op in graph.ops:
            kind = "attention" if op.label == "attention" else "matmul" if op.flops else "elementwise"
            cost = OpCost(kind, op.flops, op.moved_bytes, Phase.recompute)
            found.append(round(price(cost, self._machine, on_gpu=self._on_gpu) * NANO))
        return found

    def frontiers(
        self, graphs: Mapping[int, Graph], links: Mapping[int, Link] | None = None
    ) -> dict[int, list[Point]]:
        """Return the frontier of each layer. `links` has the layers that may move values to the host."""
        found = {}
        for index, graph in graphs.items():
            costs, link = self.costs(graph), (links or {}).get(index)
            values = tuple((value.name, value.nbytes, value.can_be_kept) for value in graph.values)
            key = values, tuple(costs), repr(link)
            if key not in self._known:
                self._known[key] = frontier_with_link(graph, costs, link) if link else frontier(graph, costs)
            found[index] = self._known[key]
        return found


def find_links(cfg: CheckpointingConfig, num_layers: int, least: Trial, prices: Prices) -> dict[int, Link]:
    """Return what each layer may move to the host. `least` is a plan that moves nothing.

    Raises ConfigError if the link's rates are not known.
    """
    if least.link is None:
        raise ConfigError(
            f"checkpointing.offload.enabled=true with {CHOICE}: hardware.pcie_d2h_gbs and hardware.pcie_h2d_gbs are "
            "not known, so nothing can be planned over the link; name a machine (hardware=8xh100-80), measure this "
            "one with remat calibrate, give a table that moves values (checkpointing.table=FILE), or leave offload out"
        )
    moving = [index for index in least.graphs if index < num_layers - cfg.offload.keep_last_layers]
    room = least.link
    found = {}
    for index in moving:
        graph = least.graphs[index]
        sizes = {
            value.id: budget.host_bytes(value, cfg.offload.dtype)
            for value in graph.values
            if value.can_be_moved
            and value.dtype.is_floating_point
            and value.nbytes >= max(1, cfg.offload.min_bytes)
        }
        share = sum(prices.costs(graph)) / NANO / room.forward_s if room.forward_s else 0.0
        most = sum(sizes.values())
        if least.host_room_bytes is not None:
            most = min(most, int(POOLED * least.host_room_bytes / len(moving)))
        free = min(most, int(min(1.0, share) * room.free_bytes))
        found[index] = Link(sizes, free, most, room.s_per_byte * NANO)
    return found


def _order(frontiers: Mapping[int, list[Point]]) -> tuple[list[Climb], list[int]]:
    """Order the climbs of all layers by seconds saved per byte. As frontiers are convex, each layer's stay in order.

    Returns also the bytes kept on top of the fewest, before the first climb and after each.
    """

    def worth(climb: Climb) -> tuple[Fraction, int, int]:
        low, high = frontiers[climb[0]][climb[1] - 1 : climb[1] + 1]
        return -Fraction(low.cost - high.cost, max(1, high.bytes - low.bytes)), climb[1], -climb[0]

    climbs = [(layer, corner) for layer, points in frontiers.items() for corner in range(1, len(points))]
    climbs.sort(key=worth)
    sizes = (frontiers[layer][to].bytes - frontiers[layer][to - 1].bytes for layer, to in climbs)
    return climbs, list(itertools.accumulate(sizes, initial=0))


def _saved(steps: Sequence[Climb], frontiers: Mapping[int, list[Point]]) -> list[int]:
    """Return the total cost saved, before the first climb and after each."""
    spared = (frontiers[layer][to - 1].cost - frontiers[layer][to].cost for layer, to in steps)
    return list(itertools.accumulate(spared, initial=0))


class Tables:
    """The time that tables save on a GPU, by the bytes they keep. `added`: before the first climb and after each."""

    def __init__(self, graphs: Mapping[int, Graph], machine: Machine, known: Corners) -> None:
        frontiers = Prices(machine, known, on_gpu=True).frontiers(graphs)
        steps, self.added = _order(frontiers)
        self._saved = _saved(steps, frontiers)

    def time_saved(self, share: float) -> float:
        """Return the share of recomputation saved if `share` of the bytes between the fewest and all is kept."""
        kept = share * self.added[-1]
        after = min(bisect_left(self.added, kept, lo=1), len(self.added) - 1)
        part = (kept - self.added[after - 1]) / max(1, self.added[after] - self.added[after - 1])
        saved = self._saved[after - 1] + part * (self._saved[after] - self._saved[after - 1])
        return saved / max(1, self._saved[-1])


def _decide(decision: LayerDecision, graph: Graph, point: Point, dtype: StorageDtype) -> LayerDecision:
    """Return the decision with its table. A layer that keeps everything on the device gets no table and no hooks."""
    program = compile_table(graph, point.keep, point.move)
    if not (program.steps or point.move):
        return replace(decision, mechanism=KEEP, table=None, offload=False)
    keep, move = (
        frozenset(graph.values[value].name for value in values)
        for values in (point.keep - point.move, point.move)
    )
    moved_bytes = sum(budget.host_bytes(graph.values[value], dtype) for value in point.move)
    return replace(decision, table=Table(keep, program.kept_bytes, move, moved_bytes), offload=bool(move))


def pack(decisions: Sequence[LayerDecision]) -> list[tuple[str, Table | None]]:
    """Return the chosen mechanisms and tables as plain data, to send to other ranks."""
    return [(decision.mechanism.name, decision.table) for decision in decisions]


def unpack(decisions: Sequence[LayerDecision], chosen: list[tuple[str, Table | None]]) -> list[LayerDecision]:
    """Return `decisions` with the `chosen` mechanisms and tables, which `pack` made, for checkpointing=budget."""
    by_name = {mechanism.name: mechanism for mechanism in (KEEP, RECOMPUTE, budget.MECHANISM)}
    return [
        replace(decision, mechanism=by_name[name], table=table, offload=bool(table and table.offload))
        if decision.mechanism == budget.MECHANISM
        else decision
        for decision, (name, table) in zip(decisions, chosen, strict=True)
    ]


def as_record(trial: Trial, decisions: Sequence[LayerDecision], cfg: CheckpointingConfig) -> dict[str, Any]:
    """Return the content of checkpointing_table.json: what each group of equal layers keeps, and what it does not."""
    groups: dict[Any, list[int]] = {}
    for index, decision in enumerate(decisions):
        groups.setdefault((decision.mechanism, decision.table), []).append(index)
    layers: dict[str, Any] = {}
    for (mechanism, table), members in groups.items():
        if table is None:
            layers[spans(members)] = {"policy": "none" if mechanism == KEEP else mechanism.name}
            continue
        graph = trial.graphs[members[0]]
        kept = choose_kept(graph, table)
        moved = choose_moved(graph, table, kept)
        again = compile_table(graph, kept).steps
        layers[spans(members)] = {
            "policy": "budget",
            "kept_bytes": table.saved_bytes,
            "keep": _sizes(graph, kept - moved),
            "host_bytes": table.moved_bytes,
            "offload": _sizes(graph, moved),
            "made_again": _sizes(graph, again),
        }
    return {"budget_gib": cfg.budget_gib, "planned_gib": round(trial.needed_bytes / GIB, 3), "layers": layers}


def _sizes(graph: Graph, values: Iterable[int]) -> dict[str, int]:
    return {graph.values[value].name: graph.values[value].nbytes for value in sorted(values)}


def _read(
    path: Path, decisions: Sequence[LayerDecision], graphs: Mapping[int, Graph], dtype: StorageDtype
) -> list[LayerDecision]:
    """Return the decisions of a table file, perhaps edited by hand. Raises ConfigError."""
    option = f"checkpointing.table={path}"
    try:
        entries = {
            index: entry
            for key, entry in json.loads(path.read_text())["layers"].items()
            for index in _indices(key)
        }
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{option}: no table can be read there ({type(error).__name__}: {error}); give a {FILE} of a run"
        ) from error
    lacking = [index for index in graphs if index not in entries]
    if lacking or max(entries, default=0) >= len(decisions):
        raise ConfigError(
            f"{option}: it is for layers {spans(sorted(entries))}, and the model has {len(decisions)}; give each once"
        )
    return [
        _given(f"{option}: layer {index}", decision, entries[index], graphs[index], dtype)
        if index in graphs
        else decision
        for index, decision in enumerate(decisions)
    ]


def _given(layer: str, decision: LayerDecision, entry: Any, graph: Graph, dtype: StorageDtype) -> LayerDecision:
    """Return the decision for one layer. `layer`: the option and the layer in words. Raises ConfigError."""
    kind = entry.get("policy", "budget") if isinstance(entry, dict) else None
    if kind == "none":
        return replace(decision, mechanism=KEEP)
    if kind == "recompute":
        return replace(decision, mechanism=RECOMPUTE)
    keep, move = (entry.get("keep"), entry.get("offload", [])) if kind == "budget" else (None, None)
    if not isinstance(keep, (dict, list)) or not isinstance(move, (dict, list)):
        raise ConfigError(
            f"{layer} has no list `keep`, or an `offload` that is none, and is not of policy none or recompute"
        )
    table = Table(frozenset(keep), offload=frozenset(move))
    if both := sorted(table.keep & table.offload):
        raise ConfigError(f"{layer} has {both[0]!r} in keep and in offload; leave it out of one")
    _check_names(layer, table.keep, graph, "kept")
    _check_names(layer, table.offload, graph, "moved to the host")
    kept = choose_kept(graph, table)
    return _decide(decision, graph, Point(kept, 0, 0, choose_moved(graph, table, kept)), dtype)


def _check_names(layer: str, names: Iterable[str], graph: Graph, done: str) -> None:
    """Raise ConfigError if one of `names` is no value of the layer that can be `done`: kept, or moved to the host."""
    can_be = {
        value.name
        for value in graph.values
        if value.name and (value.can_be_kept if done == "kept" else value.can_be_moved)
    }
    for name in sorted(set(names) - can_be):
        close = difflib.get_close_matches(name, sorted(can_be))
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        raise ConfigError(f"{layer} has no {name!r} that can be {done}{hint}")


def _indices(key: str) -> list[int]:
    """ "0-2, 5" -> 0, 1, 2, 5."""
    found: list[int] = []
    for part in key.split(","):
        first, _, last = part.strip().partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def gib_up(size: int) -> str:
    """Return `size` in GiB as text, rounded up to two decimals, or to three digits below 1 GiB."""
    decimals = max(2, 2 - math.floor(math.log10(max(size, 1) / GIB)))
    return f"{math.ceil(size / GIB * 10**decimals) / 10**decimals:.{decimals}f}"
