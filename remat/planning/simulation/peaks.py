"""Lay what DeepSpeed holds (gathered parameters, gradients, buckets) over a record of live bytes, and find the peaks.

A record is replayed in a fraction of a second, so one simulation answers for any ZeRO setting of the same stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from remat.planning.simulation import zero3
from remat.planning.simulation.gradients import Gradients
from remat.planning.simulation.timeline import KINDS, Part, Ready, Snapshot
from remat.planning.simulation.types import Category, Moment, Phase, ZeroSettings
from remat.planning.simulation.zero3_events import Event, Kind, Parameters


class Instant(NamedTuple):
    """Bytes on top of the model states, at one point of a micro-batch."""

    phase: Phase
    layer: int | None
    total_bytes: int


@dataclass(frozen=True)
class Peaks:
    """`curve` is the whole micro-batch in order, at every cut of the record and at the most until the next."""

    forward: Moment
    backward: Moment
    gathered_elements: int
    curve: list[Instant]


def find(parts: list[Part], backward_begins_at: int, parameters: Parameters, zero: ZeroSettings) -> Peaks:
    """The peaks of forward and of backward under `zero`, on the rank that has the worst; `parts` are a Timeline's.

    Below stage 3 the last rank owns the gradients that come first, the first rank those that come last.
    """
    ranks = {0, zero.world_size - 1} if zero.stage in (1, 2) else {0}
    found = [_Replay(parts, parameters, zero, rank).run(backward_begins_at) for rank in sorted(ranks)]
    return max(found, key=lambda peaks: peaks.backward.total_bytes)


class _Replay:
    def __init__(self, parts: list[Part], parameters: Parameters, zero: ZeroSettings, rank: int) -> None:
        self._parts = parts
        self._gathered = self._gathered_at_most = 0
        if zero.stage < 3:  # its thresholds mean nothing
            zero = replace(zero, param_persistence_threshold=-1)
        events = [part.cut for part in parts if isinstance(part.cut, Event)]
        self._coordinator = zero3.steady(parameters, [*events, Event(Kind.end)], zero, self._on_change)
        self._gathered = self._coordinator.bytes
        self._gradients = Gradients(parameters, zero, rank=rank)
        self._best: dict[Phase, Moment] = {}
        self._curve: list[Instant] = []

    def _on_change(self, gathered: int) -> None:
        self._gathered = gathered
        self._gathered_at_most = max(self._gathered_at_most, gathered)

    def run(self, backward_begins_at: int) -> Peaks:
        phase, gradients = Phase.forward, self._gradients
        for index, part in enumerate(self._parts):
            if index == backward_begins_at:
                phase = Phase.backward
            held = gradients.kept_bytes, gradients.bucket_bytes
            self._gathered_at_most = self._gathered
            if isinstance(part.cut, Event):
                self._coordinator.handle(part.cut)
            elif isinstance(part.cut, Ready):
                held = gradients.ready(part.cut.parameter)
            self._offer(phase, part.at_cut, self._gathered_at_most, *held)
            self._offer(phase, part.peak, self._gathered, gradients.kept_bytes, gradients.bucket_bytes)
        end = self._parts[-1].at_cut._replace(layer=None, operation="reduction of gradients")
        self._offer(Phase.backward, end, self._gathered, *gradients.backward_ends())
        return Peaks(
            self._best[Phase.forward], self._best[Phase.backward], self._coordinator.elements, self._curve
        )

    def _offer(self, phase: Phase, local: Snapshot, gathered: int, kept: int, bucket: int) -> None:
        total = local.total + gathered + kept + bucket
        self._curve.append(Instant(phase, local.layer, total))
        best = self._best.get(phase)
        if best is not None and total <= best.total_bytes:
            return
        by_category = dict(zip(KINDS, local.by_kind, strict=True))
        by_category |= {Category.gathered: gathered, Category.gradients: kept, Category.buckets: bucket}
        self._best[phase] = Moment(total, by_category, local.phase, local.layer, local.operation)
