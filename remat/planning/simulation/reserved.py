"""Replay the allocations of a micro-batch through torch's caching allocator: how much memory it reserves on a GPU.

The rules are those of torch 2.13's CUDACachingAllocator. Sizes are rounded to 512 bytes. Up to 1 MiB comes from
segments of 2 MiB, up to 10 MiB from segments of 20 MiB, more from segments of its own size, rounded to 2 MiB. The
smallest free block that is large enough is taken, and split. Free neighbours of one segment become one block. Each
stream has pools of its own. With `expandable_segments` a pool is one segment that grows at its end, by 2 or 20 MiB.

Not replayed: that blocks which another stream still uses when they are freed come back later, and what libraries take.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from remat.config.units import MIB
from remat.planning.simulation.peaks import Gradients
from remat.planning.simulation.timeline import Part, Ready, Record
from remat.planning.simulation.types import ZeroSettings
from remat.planning.simulation.zero3 import Event, Gathers, Parameters

SMALLEST, SMALL, OWN_FROM = 512, MIB, 10 * MIB
SMALL_SEGMENT, LARGE_SEGMENT, ROUND_LARGE = 2 * MIB, 20 * MIB, 2 * MIB
COMPUTE, GATHERS, REDUCTIONS = range(3)  # streams


@dataclass(frozen=True)
class Block:
    """A block of a segment. `pool` is its stream and whether its blocks are small. `start` and `size` are in bytes."""

    pool: tuple[int, bool]
    segment: int
    start: int
    size: int


class CachingAllocator:
    """A replica of the allocator of one GPU. `reserved_bytes` is the size of its segments, `peak_bytes` the most."""

    def __init__(self, *, expandable: bool) -> None:
        self.reserved_bytes = self.peak_bytes = 0
        self._expandable = expandable
        self._segments = 0
        self._free: dict[tuple[int, bool], list[tuple[int, int, int]]] = {}  # (size, segment, start), in order
        self._starts: dict[tuple[int, int], int] = {}  # free blocks: (segment, start) -> size
        self._ends: dict[tuple[int, int], int] = {}  # free blocks: (segment, end) -> size
        # pool -> its segment and how far it is mapped
        self._grown: dict[tuple[int, bool], tuple[int, int]] = {}

    def malloc(self, nbytes: int, stream: int = COMPUTE) -> Block:
        """Return a block of at least `nbytes` bytes."""
        size = max(SMALLEST, -(-nbytes // SMALLEST) * SMALLEST)
        pool = stream, size <= SMALL
        free = self._free.setdefault(pool, [])
        place = bisect.bisect_left(free, (size, 0, 0))
        if place < len(free):
            found, segment, start = free[place]
            self._take(pool, segment, start, found)
        elif self._expandable:
            segment, start, found = self._grow(pool, size)
        else:
            segment, start, found = self._add(size)
        rest = found - size
        if rest >= SMALLEST if pool[1] or self._expandable else rest > SMALL:
            self._put(pool, segment, start + size, rest)
            found = size
        return Block(pool, segment, start, found)

    def free(self, block: Block) -> None:
        """Give a block back; it joins its free neighbours."""
        start, size = block.start, block.size
        before = self._ends.get((block.segment, start))
        if before is not None:
            self._take(block.pool, block.segment, start - before, before)
            start, size = start - before, size + before
        after = self._starts.get((block.segment, start + size))
        if after is not None:
            self._take(block.pool, block.segment, start + size, after)
            size += after
        self._put(block.pool, block.segment, start, size)

    def _add(self, size: int) -> tuple[int, int, int]:
        if size <= SMALL:
            whole = SMALL_SEGMENT
        else:
            whole = LARGE_SEGMENT if size < OWN_FROM else -(-size // ROUND_LARGE) * ROUND_LARGE
        self._segments += 1
        self._reserve(whole)
        return self._segments, 0, whole

    def _grow(self, pool: tuple[int, bool], size: int) -> tuple[int, int, int]:
        """Map more memory at the end of the pool's segment; the result includes a free block that lies there."""
        if pool not in self._grown:
            self._segments += 1
            self._grown[pool] = self._segments, 0
        segment, end = self._grown[pool]
        last = self._ends.get((segment, end), 0)
        if last:
            self._take(pool, segment, end - last, last)
        page = SMALL_SEGMENT if pool[1] else LARGE_SEGMENT
        added = -(-(size - last) // page) * page
        self._grown[pool] = segment, end + added
        self._reserve(added)
        return segment, end - last, last + added

    def _reserve(self, size: int) -> None:
        self.reserved_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes)

    def _put(self, pool: tuple[int, bool], segment: int, start: int, size: int) -> None:
        bisect.insort(self._free[pool], (size, segment, start))
        self._starts[segment, start] = self._ends[segment, start + size] = size

    def _take(self, pool: tuple[int, bool], segment: int, start: int, size: int) -> None:
        free = self._free[pool]
        del free[bisect.bisect_left(free, (size, segment, start))]
        del self._starts[segment, start], self._ends[segment, start + size]


class _Held:
    """Memory of one kind that DeepSpeed holds. Only the sum is known, so blocks come and go as the sum changes."""

    def __init__(self, allocator: CachingAllocator, stream: int) -> None:
        self._allocator, self._stream = allocator, stream
        self._blocks: list[tuple[int, Block]] = []  # by size
        self._bytes = 0

    def change_to(self, total: int) -> None:
        """Allocate a block as the sum grows; as it shrinks, free a block of that size, or the smallest that suffice."""
        if total > self._bytes:
            added = total - self._bytes
            block = self._allocator.malloc(added, self._stream)
            bisect.insort(self._blocks, (added, block), key=lambda held: held[0])
        elif total < self._bytes:
            self._shrink(self._bytes - total)
        self._bytes = total

    def _shrink(self, size: int) -> None:
        place = bisect.bisect_left(self._blocks, size, key=lambda held: held[0])
        if place < len(self._blocks) and self._blocks[place][0] == size:
            self._allocator.free(self._blocks.pop(place)[1])
            return
        gone = 0
        while gone < size:
            each, block = self._blocks.pop(0)
            self._allocator.free(block)
            gone += each
        if gone > size:
            self._blocks.insert(0, (gone - size, self._allocator.malloc(gone - size, self._stream)))
            self._blocks.sort(key=lambda held: held[0])


@dataclass(frozen=True)
class Around:
    """What a run allocates on a GPU outside its micro-batches, in bytes of one rank.

    `states` exist from the start. The first update allocates `from_update`, each update `update_bytes` for a while.
    """

    states: Sequence[int]
    from_update: Sequence[int]
    update_bytes: int


@dataclass(frozen=True)
class Replayed:
    """Bytes that torch has reserved at the end of each part of the first step, and the most in two steps.

    `states` is at the time when the engine is built. Nothing is given back between parts, so the bytes never fall.
    """

    states: int
    forward: int
    backward: int
    step: int
    most: int


def replay(
    record: Record,
    parameters: Parameters,
    zero: ZeroSettings,
    gathers: Gathers,
    around: Around,
    *,
    expandable: bool,
) -> Replayed:
    """Return the bytes that torch reserves over two micro-batches and the updates after each."""
    allocator = CachingAllocator(expandable=expandable)
    for size in around.states:
        allocator.malloc(size)
    reached = [allocator.reserved_bytes]
    for first in (True, False):
        micro_batch = _MicroBatch(allocator, record, parameters, zero, gathers)
        reached.append(micro_batch.run())
        reached.append(allocator.reserved_bytes)
        if first:
            for size in around.from_update:
                allocator.malloc(size)
        if around.update_bytes:
            allocator.free(allocator.malloc(around.update_bytes))
        reached.append(allocator.reserved_bytes)
        micro_batch.close()
    states, forward, backward, step = reached[:4]
    return Replayed(states, forward, backward, step, allocator.peak_bytes)


class _MicroBatch:
    def __init__(
        self,
        allocator: CachingAllocator,
        record: Record,
        parameters: Parameters,
        zero: ZeroSettings,
        gathers: Gathers,
    ) -> None:
        self._allocator, self._record = allocator, record
        apart = zero.overlap_comm and zero.stage == 3
        self._gathered = _Held(allocator, GATHERS if apart else COMPUTE)
        self._kept = _Held(allocator, COMPUTE)
        self._bucket = _Held(allocator, REDUCTIONS if apart else COMPUTE)
        self._gradients = Gradients(parameters, zero)
        self._changes = iter(gathers.changes)
        self._gathered.change_to(gathers.start_bytes)

    def run(self) -> int:
        """Follow the trace; return the bytes reserved after forward. Gradients and buckets stay for the update."""
        allocator, trace, after_forward = self._allocator, self._record.trace, 0
        live: dict[int, Block] = {}
        for place in range(0, len(trace), 2):
            name, size = trace[place], trace[place + 1]
            if name < 0:
                if -1 - name >= self._record.backward_begins_at and not after_forward:
                    after_forward = allocator.reserved_bytes
                self._at(self._record.parts[-1 - name])
            elif size < 0:
                allocator.free(live.pop(name))
            else:
                live[name] = allocator.malloc(size)
        self._hold(*self._gradients.backward_ends())
        self._hold(self._gradients.kept_bytes, self._gradients.bucket_bytes)
        for block in live.values():
            allocator.free(block)
        return after_forward or allocator.reserved_bytes

    def close(self) -> None:
        for held in (self._kept, self._bucket, self._gathered):
            held.change_to(0)

    def _at(self, part: Part) -> None:
        if isinstance(part.cut, Event):
            for total in next(self._changes):
                self._gathered.change_to(total)
        elif isinstance(part.cut, Ready):
            self._hold(*self._gradients.ready(part.cut.parameter))
        self._hold(self._gradients.kept_bytes, self._gradients.bucket_bytes)

    def _hold(self, kept: int, bucket: int) -> None:
        self._kept.change_to(kept)
        self._bucket.change_to(bucket)
