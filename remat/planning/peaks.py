"""Lay what DeepSpeed holds (gathered parameters, gradients, buckets) over a record of live bytes, and find the peaks.

A record is replayed in a fraction of a second, so one simulation answers for any ZeRO setting of the same stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from remat.planning import zero3
from remat.planning.gradients import Gradients
from remat.planning.records import Category, Moment, Phase, ZeroSettings
from remat.planning.timeline import KINDS, Part, Ready, Snapshot
from remat.planning.zero3_events import Event, Kind, Parameters


@dataclass(frozen=True)
class Peaks:
    forward: Moment
    backward: Moment
    gathered_elements: int


def find(parts: list[Part], backward_begins_at: int, parameters: Parameters, zero: ZeroSettings) -> Peaks:
    """The peaks of forward and of backward under `zero`; `parts` are a Timeline's."""
    return _Replay(parts, parameters, zero).run(backward_begins_at)


class _Replay:
    def __init__(self, parts: list[Part], parameters: Parameters, zero: ZeroSettings) -> None:
        self._parts = parts
        self._gathered = self._gathered_at_most = 0
        if zero.stage < 3:  # its thresholds mean nothing
            zero = replace(zero, param_persistence_threshold=-1)
        events = [part.cut for part in parts if isinstance(part.cut, Event)]
        self._coordinator = zero3.steady(parameters, [*events, Event(Kind.end)], zero, self._on_change)
        self._gathered = self._coordinator.bytes
        self._gradients = Gradients(parameters, zero)
        self._best: dict[Phase, Moment] = {}

    def _on_change(self, gathered: int) -> None:
        self._gathered = gathered
        self._gathered_at_most = max(self._gathered_at_most, gathered)

    def run(self, backward_begins_at: int) -> Peaks:
        phase = Phase.forward
        for index, part in enumerate(self._parts):
            if index == backward_begins_at:
                phase = Phase.backward
                self._gradients.backward_begins()
            kept, bucket = self._gradients.kept_bytes, self._gradients.bucket_bytes
            self._gathered_at_most = self._gathered
            during = 0
            if isinstance(part.cut, Event):
                self._coordinator.handle(part.cut)
            elif isinstance(part.cut, Ready):
                during = self._gradients.ready(part.cut.parameter)
            self._offer(phase, part.at_cut, self._gathered_at_most, kept, bucket + during)
            self._offer(
                phase,
                part.peak,
                self._gathered,
                self._gradients.kept_bytes,
                self._gradients.bucket_bytes,
            )
        during = self._gradients.backward_ends()
        kept, bucket = self._gradients.kept_bytes, self._gradients.bucket_bytes
        end = Snapshot(0, (0, 0, 0), Phase.backward, None, "reduction of gradients")
        self._offer(Phase.backward, end, self._gathered, kept, bucket + during)
        return Peaks(self._best[Phase.forward], self._best[Phase.backward], self._coordinator.elements)

    def _offer(self, phase: Phase, local: Snapshot, gathered: int, kept: int, bucket: int) -> None:
        total = local.total + gathered + kept + bucket
        best = self._best.get(phase)
        if best is not None and total <= best.total_bytes:
            return
        by_category = dict(zip(KINDS, local.by_kind, strict=True))
        by_category |= {Category.gathered: gathered, Category.gradients: kept, Category.buckets: bucket}
        self._best[phase] = Moment(total, by_category, local.phase, local.layer, local.operation)
