"""Compute figures from results: medians and quartiles over all repeats, and ratios to the baseline with a spread."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from remat.lab.cache_key import FORMAT, Place
from remat.lab.experiment import Experiment, Point
from remat.lab.launch import Result
from remat.lab.measure import (
    DOES_NOT_FIT,
    FAILED,
    FINISHED,
    NOT_LAUNCHED,
    OUT_OF_MEMORY,
    REFUSED,
    TIMES,
    Figures,
    Measured,
)

# a point without figures shows the first of these that occurred
ORDER = (OUT_OF_MEMORY, DOES_NOT_FIT, FAILED, REFUSED, NOT_LAUNCHED)
# of these a row has the most of all repeats, of other figures the last repeat's
MOST = ("peak_bytes", "counted_bytes", "kept_bytes", "micro_batch_bytes")


@dataclass(frozen=True)
class Spread:
    """The median and the quartiles of all steady steps of all repeats together."""

    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, kw_only=True)
class Row(Figures):
    """The figures of a point. `times` are in seconds; `ratio` is its step time over its baseline's.

    Bytes are the maximum over repeats; `same_bytes` says whether all repeats agree on all of them. A point without
    figures has only `status` and `words`.
    """

    name: str
    own: tuple[str, ...]
    baseline: str
    status: str
    words: str = ""
    repeats: int = 0
    command: str = ""
    same_bytes: bool = True
    times: dict[str, Spread] = field(default_factory=dict)
    ratio: Spread | None = None
    tokens_per_s: Spread | None = None

    @property
    def step(self) -> Spread | None:
        return self.times.get("step")

    @property
    def final_loss(self) -> float | None:
        return self.loss[-1][1] if self.loss else None

    def memory(self, which: str) -> int | None:
        """Return the bytes of `peak`, `kept` or `micro_batch`."""
        found: int | None = getattr(self, f"{which}_bytes")
        return found


def rows(experiment: Experiment, results: Sequence[Result]) -> list[Row]:
    """Return one row per point, in the order of the experiment."""
    made = {
        point.name: _row(point, [r for r in results if r.point == point.name]) for point in experiment.points
    }
    return [_against(made[point.name], made[point.baseline]) for point in experiment.points]


def spread(values: Sequence[float]) -> Spread | None:
    """Return median and quartiles. None without values; a single value is all three."""
    if not values:
        return None
    low, middle, high = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    )
    return Spread(middle, low, high, len(values))


def ratio(mine: Spread, base: Spread) -> Spread:
    """Divide two spreads.

    The median is the ratio of medians. `low` is the lower quartile over the baseline's upper quartile, `high` the
    upper over the baseline's lower.
    """
    return Spread(
        mine.median / base.median, mine.low / base.high, mine.high / base.low, min(mine.count, base.count)
    )


def as_json(
    experiment: Experiment, results: Sequence[Result], found: Sequence[Row], place: Place
) -> dict[str, Any]:
    """Return the content of results.json: the experiment, the machine and every row."""
    finished = [result for result in results if result.status == FINISHED]
    known = [result.measured for result in finished if result.measured]
    return {
        "format": FORMAT,
        "name": experiment.name,
        "title": experiment.title,
        "question": experiment.question,
        "claims": list(experiment.claims),
        "device": place.device,
        "reduction": experiment.reduction,
        "ranks": experiment.ranks,
        "repeats": experiment.repeats,
        "tradeoff": experiment.tradeoff,
        "peak_how": known[0].peak_how if known else "",
        "first_steady_step": max((m.first_steady_step for m in known), default=0),
        "hardware": place.hardware,
        "env": finished[-1].env if finished else {},
        "points": [asdict(row) for row in found],
    }


def as_csv(results: Sequence[Result]) -> str:
    """Return one line per launch: plain numbers in bytes, seconds and nats per token; empty where there is none."""
    lines = [_flat(result) for result in results]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]) if lines else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _row(point: Point, results: Sequence[Result]) -> Row:
    about: dict[str, Any] = {"name": point.name, "own": point.own, "baseline": point.baseline}
    known = [result.measured for result in results if result.status == FINISHED and result.measured]
    if not known:
        worst = min(results, key=lambda result: ORDER.index(result.status))
        return Row(**about, status=worst.status, words=worst.words, command=worst.command)
    others = [result for result in results if result.status != FINISHED]
    words = f"{len(others)} of {len(results)} launches: {others[0].status}: {others[0].words}" if others else ""
    last = {item.name: getattr(known[-1], item.name) for item in fields(Figures)}
    return Row(
        **about | last | {name: _most(known, name) for name in MOST},
        status=FINISHED,
        words=words,
        repeats=len(known),
        command=next(result.command for result in results if result.status == FINISHED),
        same_bytes=len({_bytes(measured) for measured in known}) == 1,
        times={
            name: found
            for name in known[-1].steps
            if (found := spread([value for measured in known for value in measured.steps[name]]))
        },
        tokens_per_s=spread([value for measured in known for value in measured.tokens_per_s]),
    )


def _against(row: Row, base: Row) -> Row:
    if row.step is None or base.step is None:
        return row
    return replace(row, ratio=ratio(row.step, base.step))


def _bytes(measured: Measured) -> tuple[object, ...]:
    """Return all byte counts. They must be equal whenever a run is repeated on the same machine."""
    return (
        *(getattr(measured, name) for name in MOST),
        tuple(measured.kept_bytes_per_layer),
        tuple(sorted(measured.states_bytes.items())),
    )


def _most(known: Sequence[Measured], name: str) -> int | None:
    values = [value for measured in known if (value := getattr(measured, name)) is not None]
    return max(values, default=None)


def _flat(result: Result) -> dict[str, Any]:
    measured = result.measured or Measured()
    medians = {name: found.median for name, values in measured.steps.items() if (found := spread(values))}
    rate = spread(measured.tokens_per_s)
    return {
        "point": result.point,
        "repeat": result.repeat,
        "status": result.status,
        "words": result.words,
        "peak_bytes": measured.peak_bytes,
        "counted_bytes": measured.counted_bytes,
        "counted_planned_bytes": measured.counted_planned_bytes,
        "kept_bytes": measured.kept_bytes,
        "kept_planned_bytes": measured.kept_planned_bytes,
        "moved_bytes": measured.moved_bytes if result.measured else None,
        "micro_batch_bytes": measured.micro_batch_bytes,
        "states_bytes": sum(measured.states_bytes.values()) if result.measured else None,
        "recomputed_percent": measured.recomputed_percent,
        **{f"{name}_s": medians.get(name) for name in TIMES},
        "steady_steps": len(measured.tokens_per_s),
        "tokens_per_s": rate.median if rate else None,
        "loss": measured.loss[-1][1] if measured.loss else None,
        "eval_loss": measured.eval_loss,
        "launch_s": result.seconds,
        "commit": result.env.get("commit"),
        "started": result.env.get("started"),
        "command": result.command,
    }
