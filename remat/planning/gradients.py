"""Gradients and reduction buckets during one backward, as DeepSpeed 0.19.8 holds them on the GPU.

Only what comes and goes with a backward: ZeRO-3's bucket and flat gradients are there from the start and belong to
the model states, as does everything on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from remat.planning.records import ZeroSettings
from remat.planning.zero3_events import Parameters

IN_BACKWARD = {"gradients", "reduction buckets"}  # items of planning.states below stage 3 that are counted here
ALLREDUCE_ELEMENTS = 500_000_000  # runtime/engine.py:3921


class Gradients:
    """Call `backward_begins`, `ready(parameter)` whenever autograd finished a gradient, and `backward_ends`.

    `kept_bytes` and `bucket_bytes` are there after a call, what it returns only during it. A gradient counts here
    from its `ready` on.
    """

    def __init__(self, parameters: Parameters, settings: ZeroSettings) -> None:
        self.bucket_bytes = 0
        self._of, self._settings = parameters, settings
        trained = [i for i, wanted in enumerate(parameters.trained) if wanted]
        self._width = max((parameters.item_bytes[p] for p in trained), default=0)
        self._all_bytes = self._bytes(trained)
        self._shard_bytes = 0 if settings.offload_optimizer else self._all_bytes // settings.world_size
        # Stage 1 reduces as it goes only where the hooks may and the boundary is this backward.
        stage, accumulating = settings.stage, settings.accumulating
        self._as_it_goes = stage >= 2 or (stage == 1 and settings.overlap_comm and not accumulating)
        self._whole: set[int] = set(trained) if accumulating and not self._as_it_goes else set()
        self._waiting: list[int] = []  # for the next reduction
        self._too_large = 0  # bytes of those that wait outside of the bucket
        self._shards = self._shard_bytes if accumulating and stage == 2 else 0

    @property
    def kept_bytes(self) -> int:
        return self._bytes(self._whole) + self._too_large + self._shards

    def backward_begins(self) -> None:
        """One bucket, two with overlap_comm (stage_1_and_2.py:3256)."""
        if self._settings.stage in (1, 2):
            buckets = 2 if self._settings.overlap_comm else 1
            self.bucket_bytes = buckets * self._settings.reduce_bucket_size * self._width

    def ready(self, parameter: int) -> int:
        """Into the bucket (stage_1_and_2.py:1414, stage3.py:1569), or kept until the last micro-batch is done."""
        if not self._as_it_goes:
            self._whole.add(parameter)
            return 0
        size, elements = self._settings.reduce_bucket_size, self._of.elements[parameter]
        filled = sum(self._of.elements[p] for p in self._waiting)
        during = self._reduce() if filled and filled + elements > size else 0
        self._waiting.append(parameter)
        self._too_large += self._bytes([parameter]) if elements > size else 0
        return during

    def backward_ends(self) -> int:
        """Whole gradients are reduced: by stage 0 in copies of up to 500 M elements, by stage 1 through its bucket."""
        during = 0
        if self._as_it_goes:
            during = self._reduce()
        elif self._settings.stage == 0 and self._settings.world_size > 1:
            during = min(self._all_bytes, ALLREDUCE_ELEMENTS * self._width)
        elif self._settings.stage == 1:
            during = max(0, self._shard_bytes - self._settings.reduce_bucket_size * self._width)
        return during

    def _reduce(self) -> int:
        """Stages 1 and 2 take memory for all of this rank's gradients when the first of them comes out of the bucket.

        The last rank owns the last parameters, whose gradients come first (stage_1_and_2.py:2184). Stage 3 copies the
        bucket to cut it by ranks, unless it is one gradient that divides (comm/coalesced_collectives.py:102).
        """
        members, self._waiting, too_large, self._too_large = self._waiting, [], self._too_large, 0
        if self._settings.stage < 3:
            earlier = self._shard_bytes if self._settings.accumulating else 0
            self._shards = earlier + self._shard_bytes
            return too_large
        world = self._settings.world_size
        if not members or (len(members) == 1 and self._of.elements[members[0]] % world == 0):
            return too_large
        padded = (math.ceil(self._of.elements[p] / world) * world * self._of.item_bytes[p] for p in members)
        return too_large + sum(padded)

    def _bytes(self, parameters: Iterable[int]) -> int:
        return sum(self._of.elements[p] * self._of.item_bytes[p] for p in parameters)
