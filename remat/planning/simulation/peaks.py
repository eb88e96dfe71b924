"""Add what DeepSpeed holds (gathered parameters, gradients, buckets) to a record of live bytes, and find the peaks.

A record is replayed in a fraction of a second, so one simulation answers for any ZeRO setting of the same
stage. `Gradients` is what DeepSpeed 0.19.8 holds on the GPU during one backward. ZeRO-3's bucket and flat
gradients are there from the start: they belong to the model states, as does everything on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from remat.planning.simulation.timeline import KINDS, Ready, Record, Snapshot
from remat.planning.simulation.types import Category, Moment, Phase, ZeroSettings
from remat.planning.simulation.zero3 import Event, Gathers, Parameters

IN_BACKWARD = {"gradients", "reduction buckets"}  # of planning.model_states, counted here below stage 3
ALLREDUCE_ELEMENTS = 500_000_000  # runtime/engine.py:3921


class Gradients:
    """The gradients and buckets on the GPU during one backward.

    Call `ready(parameter)` whenever autograd finished a gradient, and `backward_ends` at the end. `kept_bytes`
    and `bucket_bytes` are the bytes after a call. Each call returns the same two at the worst instant within it;
    `ready` leaves the gradient itself out of them, because until then it belongs to autograd.
    """

    def __init__(self, parameters: Parameters, settings: ZeroSettings, *, rank: int = 0) -> None:
        self.bucket_bytes = 0
        self._of, self._settings = parameters, settings
        trained = [i for i, wanted in enumerate(parameters.trained) if wanted]
        self._width = max((parameters.item_bytes[p] for p in trained), default=0)
        self._all_bytes = self._bytes(trained)
        self._owned = _owned(parameters, trained, settings.world_size, rank)
        self._shard_bytes = 0 if settings.offload_optimizer else self._bytes(self._owned)
        # Stage 1 reduces during backward only with overlap_comm and when no gradients are accumulated.
        stage, accumulating = settings.stage, settings.accumulating
        self._as_it_goes = stage >= 2 or (stage == 1 and settings.overlap_comm and not accumulating)
        self._whole: set[int] = set(trained) if accumulating and not self._as_it_goes else set()
        self._waiting: list[int] = []  # for the next reduction
        self._waiting_elements = 0
        self._too_large: set[int] = set()  # gradients larger than the bucket
        self._held_bytes = self._bytes(self._whole)  # of both
        self._earlier = self._shard_bytes if accumulating and stage == 2 else 0
        self._shards = 0

    @property
    def kept_bytes(self) -> int:
        return self._held_bytes + self._earlier + self._shards

    def _hold(self, parameter: int, among: set[int]) -> None:
        if parameter not in self._whole and parameter not in self._too_large:
            self._held_bytes += self._bytes([parameter])
        among.add(parameter)

    def _let_go(self, kept: set[int]) -> None:
        """Free the gradients larger than the bucket, except those in `kept`."""
        if not self._too_large <= kept:
            self._too_large &= kept
            self._held_bytes = self._bytes(self._whole | self._too_large)

    def ready(self, parameter: int) -> tuple[int, int]:
        """Put a gradient into the bucket, or keep it until the last micro-batch is done.

        Source: stage_1_and_2.py:1414, stage3.py:1569.
        """
        # The first gradient allocates one bucket, or two with overlap_comm (stage_1_and_2.py:3256).
        if self._settings.stage in (1, 2):
            buckets = 2 if self._settings.overlap_comm else 1
            self.bucket_bytes = buckets * self._settings.reduce_bucket_size * self._width
        worst = self.kept_bytes, self.bucket_bytes
        if not self._as_it_goes:
            self._hold(parameter, self._whole)
            return worst
        size, elements = self._settings.reduce_bucket_size, self._of.elements[parameter]
        if self._waiting_elements and self._waiting_elements + elements > size:
            worst = self._reduce()
        self._waiting.append(parameter)
        self._waiting_elements += elements
        if elements > size:
            self._hold(parameter, self._too_large)
        return worst

    def backward_ends(self) -> tuple[int, int]:
        """Reduce whole gradients: stage 0 in copies of up to 500 M elements, stage 1 through its bucket."""
        if self._as_it_goes:
            return self._reduce()
        kept, bucket = self.kept_bytes, self.bucket_bytes
        if self._settings.stage == 0:
            alone = self._settings.world_size == 1
            return kept, 0 if alone else min(self._all_bytes, ALLREDUCE_ELEMENTS * self._width)
        return kept + self._shard_bytes, bucket  # the first rank owns what is reduced first

    def _reduce(self) -> tuple[int, int]:
        """Reduce the gradients that wait in the bucket.

        Stages 1 and 2 allocate memory for all of this rank's gradients when the first of them comes out of the
        bucket. Stage 1 does not free a gradient that did not fit, unless it is this rank's
        (stage_1_and_2.py:2184, 2262). Stage 3 copies its bucket to cut it by ranks, unless it is one gradient
        that divides (coalesced_collectives.py:102).
        """
        members, self._waiting, self._waiting_elements = self._waiting, [], 0
        if self._settings.stage < 3:
            if self._owned.intersection(members):
                self._shards = self._shard_bytes
            worst = self.kept_bytes, self.bucket_bytes
            self._let_go(set() if self._settings.stage == 2 else self._too_large - self._owned)
            return worst
        world, worst = self._settings.world_size, (self.kept_bytes, 0)
        self._let_go(set())
        if not members or (len(members) == 1 and self._of.elements[members[0]] % world == 0):
            return worst
        padded = (math.ceil(self._of.elements[p] / world) * world * self._of.item_bytes[p] for p in members)
        return worst[0], sum(padded)

    def _bytes(self, parameters: Iterable[int]) -> int:
        return sum(self._of.elements[p] * self._of.item_bytes[p] for p in parameters)


def _owned(parameters: Parameters, trained: list[int], world_size: int, rank: int) -> set[int]:
    """Return the parameters with a part in this rank's share of the flat parameters (taken as one group)."""
    shard = math.ceil(sum(parameters.elements[p] for p in trained) / world_size)
    found, start = set(), 0
    for p in trained:
        end = start + parameters.elements[p]
        if start < (rank + 1) * shard and end > rank * shard:
            found.add(p)
        start = end
    return found


class Instant(NamedTuple):
    """The bytes on top of the model states at one point of a micro-batch."""

    phase: Phase
    layer: int | None
    total_bytes: int


@dataclass(frozen=True)
class Peaks:
    """The peaks of a micro-batch.

    `curve` is the whole micro-batch in order: at every cut of the record, and at the highest point until the
    next cut.
    """

    forward: Moment
    backward: Moment
    curve: list[Instant]
    # forward and backward inside the layers; `loss` is all that is outside them
    by_part: Mapping[str, Moment]


def find(record: Record, parameters: Parameters, zero: ZeroSettings, gathers: Gathers) -> Peaks:
    """Return the peaks of forward and of backward under `zero`, on the rank with the highest peak.

    `gathers` is what the events of `record` gather. Below stage 3 the last rank owns the gradients that come first, the
    first rank those that come last.
    """
    ranks = {0, zero.world_size - 1} if zero.stage in (1, 2) else {0}
    found = [_Replay(record, parameters, zero, gathers, rank).run() for rank in sorted(ranks)]
    return max(found, key=lambda peaks: peaks.backward.total_bytes)


class _Replay:
    def __init__(
        self, record: Record, parameters: Parameters, zero: ZeroSettings, gathers: Gathers, rank: int
    ) -> None:
        self._record, self._gathers = record, gathers
        self._gradients = Gradients(parameters, zero, rank=rank)
        self._best: dict[Phase, Moment] = {}
        self._by_part: dict[str, Moment] = {}
        self._curve: list[Instant] = []

    def run(self) -> Peaks:
        phase, gradients, gathered = Phase.forward, self._gradients, self._gathers.start_bytes
        changes = iter(self._gathers.changes)
        for index, part in enumerate(self._record.parts):
            if index == self._record.backward_begins_at:
                phase = Phase.backward
            held = gradients.kept_bytes, gradients.bucket_bytes
            levels = [gathered, *next(changes)] if isinstance(part.cut, Event) else [gathered]
            at_most, gathered = max(levels), levels[-1]
            if isinstance(part.cut, Ready):
                held = gradients.ready(part.cut.parameter)
            self._offer(phase, part.at_cut, at_most, *held)
            now = gathered, gradients.kept_bytes, gradients.bucket_bytes
            self._offer(phase, part.peak, *now)
            for local in part.of_place.values():
                self._offer_part(phase, local, *now)
            self._offer_part(phase, part.at_cut, at_most, *held)
        end = self._record.parts[-1].at_cut._replace(layer=None, operation="reduction of gradients")
        last = gathered, *gradients.backward_ends()
        self._offer(Phase.backward, end, *last)
        self._offer_part(Phase.backward, end, *last)
        return Peaks(self._best[Phase.forward], self._best[Phase.backward], self._curve, self._by_part)

    def _offer(self, phase: Phase, local: Snapshot, gathered: int, kept: int, bucket: int) -> None:
        total = local.total + gathered + kept + bucket
        self._curve.append(Instant(phase, local.layer, total))
        best = self._best.get(phase)
        if best is None or total > best.total_bytes:
            self._best[phase] = _moment(local, gathered, kept, bucket)

    def _offer_part(self, phase: Phase, local: Snapshot, gathered: int, kept: int, bucket: int) -> None:
        name = "loss" if local.layer is None else str(phase)
        best = self._by_part.get(name)
        if best is None or local.total + gathered + kept + bucket > best.total_bytes:
            self._by_part[name] = _moment(local, gathered, kept, bucket)


def _moment(local: Snapshot, gathered: int, kept: int, bucket: int) -> Moment:
    by_category = dict(zip(KINDS, local.by_kind, strict=True))
    by_category |= {Category.gathered: gathered, Category.gradients: kept, Category.buckets: bucket}
    total = local.total + gathered + kept + bucket
    return Moment(total, by_category, local.phase, local.layer, local.operation, local.module)
