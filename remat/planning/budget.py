"""Choose the tables of checkpointing=budget: the fastest whose planned peak is within `checkpointing.budget_gib`.

Each distinct layer has a frontier of time over bytes. From the fewest bytes everywhere, layers climb theirs one corner
at a time, the most seconds per byte first, the last layers before the others, as their backward comes first. That is
exact but for the last corner that does not fit. How far they climb is judged by plans of the whole run: gathers, loss,
workspaces, what is made again and the optimizer are in their peaks.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from remat.activation_checkpointing.mechanisms import budget
from remat.activation_checkpointing.mechanisms.mechanism import KEEP, LayerDecision, spans
from remat.activation_checkpointing.mechanisms.recompute import MECHANISM as RECOMPUTE
from remat.activation_checkpointing.mechanisms.tables.frontier import Point, frontier
from remat.activation_checkpointing.mechanisms.tables.graph import Graph
from remat.activation_checkpointing.mechanisms.tables.table import Table, choose_kept, compile_table
from remat.config.options import CheckpointingConfig, ConfigError
from remat.config.units import GIB
from remat.machine.gpus import Machine
from remat.planning.simulation.types import OpCost, Phase
from remat.planning.step_time import price

CHOICE = "checkpointing=budget"  # as it is typed
FILE = "checkpointing_table.json"
MARGIN = 0.02  # of a GPU's memory, left free by budget_gib=auto
CLOSE = 0.002  # of the budget: a plan that uses all but this is not improved upon
MOST_TRIALS = 12
NANO = 1e9


@dataclass(frozen=True)
class Trial:
    """A plan of the whole run. `seconds` of a step, 0 if unknown; `graphs` of the layers under a table; the plan."""

    needed_bytes: int
    seconds: float
    recomputed_flops: int
    graphs: Mapping[int, Graph]
    made: Any

    @property
    def speed(self) -> tuple[float, int]:
        """Return what is compared: the less the faster."""
        return self.seconds, self.recomputed_flops


class NoRoom(ConfigError):
    """Nothing that could be planned is within the budget."""


Plan = Callable[[list[LayerDecision]], Trial]
Climb = tuple[int, int]  # a layer and the corner of its frontier that it climbs to
Corners = dict[Any, list[Point]]  # of each layer that was seen, by what it does


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
) -> tuple[Trial, list[LayerDecision], str]:
    """Return the plan that is taken, its decisions, and why it is not a table where it is not.

    `gpu_bytes`: of the GPU; None: unknown. `known` gets the corners of each layer. Raises NoRoom for a budget that
    nothing fits, ConfigError for a table that does not suit the model.
    """
    if cfg.table is not None:
        least = plan(decisions)
        given = _read(Path(cfg.table).expanduser(), decisions, least.graphs)
        return plan(given), given, ""
    limit = limit_bytes(cfg, gpu_bytes, on_gpu=on_gpu)
    least = plan(decisions)
    best: tuple[Trial, list[LayerDecision]] | None = None
    if least.needed_bytes <= limit:
        corners = _frontiers(least.graphs, machine, {} if known is None else known, on_gpu=on_gpu)
        best = _keep_last(_climb(decisions, least, plan, corners, limit), plan)
        # What `full` runs again is what the least does, or more.
        if 2 * best[0].recomputed_flops < least.recomputed_flops:
            return *best, ""
    whole = [replace(d, mechanism=RECOMPUTE) if d.mechanism == budget.MECHANISM else d for d in decisions]
    recomputed = plan(whole)
    fits = recomputed.needed_bytes <= limit
    if fits and (best is None or recomputed.speed <= best[0].speed):
        return recomputed, whole, "no table is faster than checkpointing=full here, which is taken"
    if best is None:
        smallest = min(least.needed_bytes, recomputed.needed_bytes)
        raise NoRoom(
            f"checkpointing.budget_gib={cfg.budget_gib}: the least that this run needs is {gib_up(smallest)} GiB of "
            f"each GPU; set checkpointing.budget_gib={gib_up(smallest)}, or make the run smaller "
            "(train.micro_batch_size, train.seq_len, the ZeRO stage, offload)"
        )
    return *best, ""


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


def _climb(
    decisions: list[LayerDecision],
    least: Trial,
    plan: Plan,
    frontiers: Mapping[int, list[Point]],
    limit: int,
) -> tuple[Trial, list[LayerDecision]]:
    """Return the plan that keeps the most of those within `limit`, found by as few plans as may be."""
    steps, added = _order(frontiers)

    def at(count: int) -> tuple[Trial, list[LayerDecision]]:
        tried = _after(steps[:count], decisions, least.graphs, frontiers)
        return plan(tried), tried

    best, low, high, beyond = (least, decisions), 0, len(steps) + 1, 0
    for _ in range(MOST_TRIALS):
        room = limit - best[0].needed_bytes
        if high - low <= 1 or (low and room < CLOSE * limit):
            break
        # What a plan needs grows by what layers keep, up to where another moment is the peak.
        guess = max(
            (count for count in range(low, high) if added[count] - added[low] <= room - beyond), default=low
        )
        count = min(max(guess, low + 1), high - 1)
        found = at(count)
        if found[0].needed_bytes <= limit:
            best, low = found, count
            beyond = min(0, found[0].needed_bytes - limit) // 2 if beyond < 0 else beyond
        else:
            high = count
            beyond += found[0].needed_bytes - limit
    return best


def curve(
    decisions: list[LayerDecision], plan: Plan, machine: Machine, parts: int, *, known: Corners
) -> Iterator[tuple[Trial, list[LayerDecision]]]:
    """Yield plans from the fewest bytes to keeping all, `parts` steps of about as many bytes; on a GPU."""
    least = plan(decisions)
    yield least, decisions
    frontiers = _frontiers(least.graphs, machine, known, on_gpu=True)
    steps, added = _order(frontiers)
    for count in dict.fromkeys(bisect_left(added, part / parts * added[-1]) for part in range(1, parts + 1)):
        tried = _after(steps[:count], decisions, least.graphs, frontiers)
        yield plan(tried), tried


def _after(
    steps: Sequence[Climb],
    decisions: Sequence[LayerDecision],
    graphs: Mapping[int, Graph],
    frontiers: Mapping[int, list[Point]],
) -> list[LayerDecision]:
    """Return the decisions after `steps` from the fewest bytes."""
    corners = dict.fromkeys(frontiers, 0) | dict(steps)
    return [
        _decide(decision, graphs[i], frontiers[i][corners[i]]) if i in corners else decision
        for i, decision in enumerate(decisions)
    ]


def _keep_last(found: tuple[Trial, list[LayerDecision]], plan: Plan) -> tuple[Trial, list[LayerDecision]]:
    """Let the last layer keep all where that needs no memory, as it often does.

    Its backward is the first: what it makes again lives with all that other layers keep, at the same moment as what it
    would have kept.
    """
    trial, decisions = found
    last = max(
        (i for i, decision in enumerate(decisions) if decision.mechanism == budget.MECHANISM), default=None
    )
    if last is None:
        return found
    tried = [replace(d, mechanism=KEEP, table=None) if i == last else d for i, d in enumerate(decisions)]
    kept = plan(tried)
    return (kept, tried) if kept.needed_bytes <= trial.needed_bytes and kept.speed < trial.speed else found


def _frontiers(
    graphs: Mapping[int, Graph], machine: Machine, known: Corners, *, on_gpu: bool
) -> dict[int, list[Point]]:
    """Return the corners of each layer, worked out once for layers that do the same."""
    found = {}
    for index, graph in graphs.items():
        operations = [
            OpCost(_kind(op.label, op.flops), op.flops, op.moved_bytes, Phase.recompute) for op in graph.ops
        ]
        costs = [round(price(operation, machine, on_gpu=on_gpu) * NANO) for operation in operations]
        key = tuple((value.name, value.nbytes, value.can_be_kept) for value in graph.values), tuple(costs)
        if key not in known:
            known[key] = frontier(graph, costs)
        found[index] = known[key]
    return found


def _kind(label: str, flops: int) -> str:
    if label == "attention":
        return label
    return "matmul" if flops else "elementwise"


def _order(frontiers: Mapping[int, list[Point]]) -> tuple[list[Climb], list[int]]:
    """Order the climbs of all layers by seconds per byte. A frontier is convex: each layer's come in their order.

    Returns also the bytes that are kept on top of the fewest before the first climb, and after each.
    """

    def worth(climb: Climb) -> tuple[Fraction, int, int]:
        low, high = frontiers[climb[0]][climb[1] - 1 : climb[1] + 1]
        return -Fraction(low.cost - high.cost, max(1, high.bytes - low.bytes)), climb[1], -climb[0]

    climbs = [(layer, corner) for layer, points in frontiers.items() for corner in range(1, len(points))]
    climbs.sort(key=worth)
    sizes = (frontiers[layer][to].bytes - frontiers[layer][to - 1].bytes for layer, to in climbs)
    return climbs, list(itertools.accumulate(sizes, initial=0))


class Tables:
    """What tables of some layers save on a GPU by what they keep. `added`: bytes before and after each climb."""

    def __init__(self, graphs: Mapping[int, Graph], machine: Machine, known: Corners) -> None:
        frontiers = _frontiers(graphs, machine, known, on_gpu=True)
        steps, self.added = _order(frontiers)
        saved = (frontiers[layer][to - 1].cost - frontiers[layer][to].cost for layer, to in steps)
        self._saved = list(itertools.accumulate(saved, initial=0))

    def time_saved(self, share: float) -> float:
        """Return the share of recomputation that goes when `share` of the bytes from the least to all is kept."""
        kept = share * self.added[-1]
        after = min(bisect_left(self.added, kept, lo=1), len(self.added) - 1)
        part = (kept - self.added[after - 1]) / max(1, self.added[after] - self.added[after - 1])
        saved = self._saved[after - 1] + part * (self._saved[after] - self._saved[after - 1])
        return saved / max(1, self._saved[-1])


def _decide(decision: LayerDecision, graph: Graph, point: Point) -> LayerDecision:
    """Give the layer its table; one that keeps all is left alone, without hooks."""
    program = compile_table(graph, point.keep)
    if not program.steps:
        return replace(decision, mechanism=KEEP)
    names = frozenset(graph.values[value].name for value in point.keep)
    return replace(decision, table=Table(names, program.kept_bytes))


def pack(decisions: Sequence[LayerDecision]) -> list[tuple[str, Table | None]]:
    """Return what was chosen as plain data, for other ranks."""
    return [(decision.mechanism.name, decision.table) for decision in decisions]


def unpack(decisions: Sequence[LayerDecision], chosen: list[tuple[str, Table | None]]) -> list[LayerDecision]:
    """Return the `decisions` of a policy with what was chosen in their place."""
    by_name = {mechanism.name: mechanism for mechanism in (KEEP, RECOMPUTE, budget.MECHANISM)}
    return [
        replace(decision, mechanism=by_name[name], table=table)
        if decision.mechanism == budget.MECHANISM
        else decision
        for decision, (name, table) in zip(decisions, chosen, strict=True)
    ]


def as_record(trial: Trial, decisions: Sequence[LayerDecision], cfg: CheckpointingConfig) -> dict[str, Any]:
    """Return the content of checkpointing_table.json: for each group of equal layers what is kept, and what is not."""
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
        again = compile_table(graph, kept).steps
        layers[spans(members)] = {
            "policy": "budget",
            "kept_bytes": table.saved_bytes,
            "keep": {graph.values[value].name: graph.values[value].nbytes for value in sorted(kept)},
            "made_again": {graph.values[value].name: graph.values[value].nbytes for value in sorted(again)},
        }
    return {"budget_gib": cfg.budget_gib, "planned_gib": round(trial.needed_bytes / GIB, 3), "layers": layers}


def _read(path: Path, decisions: Sequence[LayerDecision], graphs: Mapping[int, Graph]) -> list[LayerDecision]:
    """Return the decisions of a table that was written, and perhaps edited by hand. Raises ConfigError."""
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
        _given(option, index, decision, entries[index], graphs[index]) if index in graphs else decision
        for index, decision in enumerate(decisions)
    ]


def _given(option: str, index: int, decision: LayerDecision, entry: Any, graph: Graph) -> LayerDecision:
    kind = entry.get("policy", "budget") if isinstance(entry, dict) else None
    if kind == "none":
        return replace(decision, mechanism=KEEP)
    if kind not in ("budget", "recompute") or (
        kind == "budget" and not isinstance(entry.get("keep"), (dict, list))
    ):
        raise ConfigError(f"{option}: layer {index} has no list `keep`, and is not of policy none or recompute")
    if kind == "recompute":
        return replace(decision, mechanism=RECOMPUTE)
    named = graph.named()
    for name in entry["keep"]:
        if name not in named or not graph.values[named[name]].can_be_kept:
            close = difflib.get_close_matches(
                name, [n for n, v in named.items() if graph.values[v].can_be_kept]
            )
            hint = f"; did you mean {', '.join(close)}?" if close else ""
            raise ConfigError(f"{option}: layer {index} has no {name!r} that can be kept{hint}")
    kept = choose_kept(graph, Table(frozenset(entry["keep"])))
    return _decide(decision, graph, Point(kept, 0, 0))


def _indices(key: str) -> list[int]:
    """ "0-2, 5" -> 0, 1, 2, 5."""
    found: list[int] = []
    for part in key.split(","):
        first, _, last = part.strip().partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def gib_up(size: int) -> str:
    """Return GiB, rounded up to two decimals, or to three digits where they are small."""
    decimals = max(2, 2 - math.floor(math.log10(max(size, 1) / GIB)))
    return f"{math.ceil(size / GIB * 10**decimals) / 10**decimals:.{decimals}f}"
