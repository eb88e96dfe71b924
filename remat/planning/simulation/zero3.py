"""Replay what ZeRO-3 gathers and releases: DeepSpeed 0.19.8's coordinator, without an engine.

`recorded` notes on a model of any device what the hooks of ZeRO-3 would do
(runtime/zero/parameter_offload.py:316-510); that depends on no setting. `Coordinator` replicates what those hooks call
(runtime/zero/partitioned_param_coordinator.py). It learns the order of modules in a first micro-batch. From the
second on it prefetches in that order and keeps what is soon used again. One record can be replayed under many
settings.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map

from remat.planning.simulation.types import ZeroSettings


class Kind(Enum):
    start = "a forward of the whole model begins"
    fetch = "a module needs its parameters"
    release = "a module is done with them"
    end = "backward is over"


class Event(NamedTuple):
    """A moment at which ZeRO-3 acts.

    `module` is an index into Parameters.owned; `again`: a forward inside a backward.

    `pinned` parameters have aliases: autograd would still hold their memory if they were released now.
    """

    kind: Kind
    module: int = 0
    forward: bool = True
    again: bool = False
    pinned: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Parameters:
    """The parameters of a model, in its own order; `owned` lists for each module those that are gathered for it.

    These are the module's own. A module that is gathered whole also has those of its parts, which then have none.
    """

    elements: tuple[int, ...]
    item_bytes: tuple[int, ...]
    trained: tuple[bool, ...]
    owned: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Parameters:
        found = list(model.parameters())
        index = {id(p): i for i, p in enumerate(found)}
        return cls(
            elements=tuple(p.numel() for p in found),
            item_bytes=tuple(p.element_size() for p in found),
            trained=tuple(p.requires_grad for p in found),
            owned=tuple(
                () if part else tuple(sorted({index[id(p)] for p in _gathered_for(m)}))
                for m, part in _with_parts(model)
            ),
        )


def _gathered_for(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are gathered when `module` is called: its own and DeepSpeed's external ones."""
    return [*module.parameters(recurse=is_whole(module)), *getattr(module, "_external_params", {}).values()]


def is_whole(module: nn.Module) -> bool:
    """Return whether the weights of `module` and its parts are gathered and reduced together (DeepSpeed's leaf)."""
    return bool(getattr(module, "_z3_leaf", False))


def _with_parts(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Return the modules in their order, each with whether it is a part of one that is gathered whole."""
    found = list(model.modules())
    parts = {id(part) for m in found if is_whole(m) for part in m.modules() if part is not m}
    return [(m, id(m) in parts) for m in found]


@contextmanager
def recorded(model: nn.Module, on_event: Callable[[Event], None]) -> Iterator[None]:
    """Call `on_event` at every fetch and release inside the context, over any number of micro-batches."""
    recorder = _Recorder(model, on_event)
    try:
        yield
    finally:
        for handle in recorder.handles:
            handle.remove()


class _Recorder:
    def __init__(self, model: nn.Module, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._parameters = list(model.parameters())
        self._owned = Parameters.of(model).owned
        self._uses = [_uses(p) for p in self._parameters]
        self._pinned: frozenset[int] = frozenset()
        self.handles: list[Any] = [model.register_forward_pre_hook(lambda *_: self._tell(Event(Kind.start)))]
        for index, (module, part) in enumerate(_with_parts(model)):
            if not part:
                self._hook(module, index)

    def _tell(self, event: Event) -> None:
        """Report an event with the parameters that have aliases now.

        Only the module that used a parameter makes a new alias of it; an old alias may have died anywhere.
        """
        candidates = {*self._pinned, *self._owned[event.module]}
        pinned = {p for p in candidates if _uses(self._parameters[p]) > self._uses[p]}
        if pinned != self._pinned:
            self._pinned = frozenset(pinned)
        self._on_event(event._replace(pinned=self._pinned))

    def _hook(self, module: nn.Module, index: int) -> None:
        waiting = [0]  # inputs whose gradient is still to come

        def before_forward(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            self._tell(Event(Kind.fetch, index, again=torch._C._current_graph_task_id() != -1))
            if args:  # a call without any is only for weights: an earlier call may still await gradients
                waiting[0] = 0
            marked: tuple[Any, ...] = tree_map(lambda x: _mark(x, gradient_of_input, waiting), args)
            return marked

        def gradient_of_input() -> None:
            waiting[0] -= 1
            if waiting[0] == 0:
                self._tell(Event(Kind.release, index, forward=False))

        def gradient_of_output() -> None:
            self._tell(Event(Kind.fetch, index, forward=False))

        def after_forward(_: nn.Module, args: Any, output: Any) -> Any:
            self._tell(Event(Kind.release, index))
            return tree_map(lambda x: _mark(x, gradient_of_output), output)

        self.handles += [
            module.register_forward_pre_hook(before_forward),
            module.register_forward_hook(after_forward),
        ]


def _uses(parameter: torch.Tensor) -> int:
    """Return how many tensors share the parameter's memory, plus a constant."""
    return int(torch._C._storage_Use_Count(parameter.untyped_storage()._cdata))


class _Mark(torch.autograd.Function):
    """The identity function; its backward calls back when the gradient passes."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, callback: Callable[[], None]) -> torch.Tensor:
        ctx.callback = callback
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.callback()
        return grads[0], None


def _mark(value: Any, callback: Callable[[], None], waiting: list[int] | None = None) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    if waiting is not None and value.requires_grad:
        waiting[0] += 1
    return _Mark.apply(value, callback)


NEVER = -(10**10)


class _Bucket:
    """Parameters gathered by one fetch. `flat_bytes` are allocated until all of them have been waited for."""

    def __init__(self, members: list[int], flat_bytes: int) -> None:
        self.members, self.flat_bytes = members, flat_bytes
        self.waiting = set(members)
        self.arrived = False


class Trace(Enum):
    invalid = 0
    record = 1
    complete = 2


class Coordinator:
    """The gathered parameters on one GPU, in `bytes`. `elements` counts what was gathered, over all ranks, and
    `gathered_bytes` the same in bytes.

    `on_change(bytes)` is called whenever the bytes change. Pass the events of a micro-batch to `handle`, twice. The
    steady state begins with the second pass, which knows the order. Call `optimizer_step` where the engine steps.
    """

    def __init__(self, parameters: Parameters, settings: ZeroSettings) -> None:
        self.bytes = 0
        self.elements = self.gathered_bytes = 0
        self.on_change: Callable[[int], None] = lambda gathered: None
        self._of, self._settings = parameters, settings
        count = len(parameters.elements)
        self._persistent = [n <= settings.param_persistence_threshold for n in parameters.elements]
        self._gathered: dict[int, int] = {}  # available or in flight: bytes of the parameter itself
        self._in_flight: dict[int, _Bucket] = {}
        self._left_over: dict[int, int] = {}  # bytes that autograd still held when their parameter was released
        self._pinned: frozenset[int] = frozenset()
        self._users: list[set[int]] = [set() for _ in range(count)]
        self._in_backward: dict[int, None] = {}  # modules, in the order their backward began
        self._left_by_recompute: dict[int, set[int]] = defaultdict(set)
        self._trace = Trace.invalid
        self._order: list[int] = []
        self._uses: list[tuple[int, int]] = []  # (parameter, step)
        self._queue: deque[tuple[int, int]] = deque()
        self._fetched_for: dict[int, int] = defaultdict(lambda: NEVER)
        self._releasable: dict[tuple[int, int], set[int]] = {}
        self._step = 0
        self._available = 0  # elements, as DeepSpeed counts them

    def handle(self, event: Event) -> None:
        self._pinned = event.pinned
        for p in [p for p in self._left_over if p not in event.pinned]:
            self._change(-self._left_over.pop(p))
        if event.kind is Kind.start:
            self._reset()
        elif event.kind is Kind.fetch:
            self._fetch(event)
        elif event.kind is Kind.release:
            self._release(event.module, event.forward)
        else:
            while self._in_backward:
                module, _ = self._in_backward.popitem()
                for p in {*self._of.owned[module], *self._left_by_recompute.pop(module, ())}:
                    self._users[p].discard(module)
                    if not self._persistent[p]:
                        self._free(p)

    def optimizer_step(self) -> None:
        """Release all parameters, then gather the persistent ones again (stage3.py:2840)."""
        for p in list(self._gathered):
            self._wait(p)
            self._users[p].clear()
            self._free(p)
        for p, persistent in enumerate(self._persistent):
            if persistent:
                self._hold(p, self._padded_bytes(p))

    # The order of modules

    def _reset(self) -> None:
        self._let_flights_land()
        if self._trace is Trace.record:
            self._uses = [(p, step) for step, module in enumerate(self._order) for p in self._of.owned[module]]
            self._trace = Trace.complete
        elif self._trace is Trace.invalid:
            self._trace = Trace.record
        self._queue = deque(self._uses)
        self._fetched_for.clear()
        self._step = self._available = 0

    def _let_flights_land(self) -> None:
        for p in list(self._in_flight):
            self._wait(p)
            self._free(p)

    def _follow(self, module: int) -> None:
        """Compare `module` with the order that was learnt, or learn it (trace_prologue, record_module)."""
        if self._trace is Trace.complete and self._order[self._step : self._step + 1] != [module]:
            self._trace, self._order, self._uses = Trace.invalid, [], []
            self._fetched_for.clear()
            self._let_flights_land()
        elif self._trace is Trace.record:
            self._order.append(module)

    # Fetch and prefetch

    def _fetch(self, event: Event) -> None:
        module = event.module
        self._follow(module)
        if not event.forward:
            self._in_backward[module] = None
        wanted = self._of.owned[module]
        self._gather([p for p in wanted if p not in self._gathered])
        for p in wanted:
            self._users[p].add(module)
            if event.again and self._in_backward and not self._of.trained[p]:
                # A frozen parameter has no backward of its own to release it after a recomputation.
                owner = next(reversed(self._in_backward))
                self._left_by_recompute[owner].add(p)
                self._users[p].add(owner)
            self._wait(p)
        if self._trace is Trace.complete:
            self._pass_in_queue(wanted)
            self._prefetch()
        self._step += 1

    def _pass_in_queue(self, wanted: Sequence[int]) -> None:
        missing = {p for p in wanted if self._fetched_for[p] < self._step}
        found: set[int] = set()
        while self._queue and len(found) < len(missing):
            p, step = self._queue.popleft()
            self._fetched_for[p] = step
            found.add(p)
        if found != missing:
            raise RuntimeError("modules use their parameters in another order than in the recorded micro-batch")

    def _prefetch(self) -> None:
        room = min(self._settings.max_live_parameters - self._available, self._settings.prefetch_bucket_size)
        chosen: dict[int, None] = {}
        elements = 0
        while self._queue and elements < room:
            p, step = self._queue.popleft()
            self._fetched_for[p] = max(self._fetched_for[p], step)
            if p not in self._gathered and p not in chosen:
                chosen[p] = None
                elements += self._of.elements[p]
        if elements:
            self._gather(sorted(chosen))

    # Release

    def _release(self, module: int, forward: bool) -> None:
        going = self._may_go(module) if self._trace is Trace.complete else set(self._of.owned[module])
        touched = set(self._of.owned[module])
        if not forward:
            again = self._left_by_recompute.pop(module, set())
            going |= {p for p in again if not self._persistent[p]}
            touched |= again
            self._in_backward.pop(module, None)
        for p in touched:
            self._users[p].discard(module)
            if p in going:
                self._free(p)

    def _may_go(self, module: int) -> set[int]:
        """Return the parameters of `module` that may be released now, because they are not used again soon.

        The result is cached for good, as in DeepSpeed.
        """
        key = module, self._step
        if key in self._releasable:
            return self._releasable[key]
        going = {
            p for p in self._of.owned[module] if not self._persistent[p] and self._fetched_for[p] <= self._step
        }
        traversed = 0
        for step in range(self._step, len(self._order)):
            if traversed >= self._settings.max_reuse_distance or not going:
                break
            for p in self._of.owned[self._order[step]]:
                going.discard(p)
                traversed += self._of.elements[p]
        self._releasable[key] = going
        return going

    # Memory (partition_parameters.py:703-800, 1329-1440)

    def _padded_bytes(self, p: int) -> int:
        world = self._settings.world_size
        if world == 1:  # a reference to the only partition, unless that is on the host
            return self._of.elements[p] * self._of.item_bytes[p] if self._settings.offload_param else 0
        return math.ceil(self._of.elements[p] / world) * world * self._of.item_bytes[p]

    def _gather(self, wanted: list[int]) -> None:
        if not wanted:
            return
        elements = sum(self._of.elements[p] for p in wanted)
        self.elements += elements
        self.gathered_bytes += sum(self._of.elements[p] * self._of.item_bytes[p] for p in wanted)
        self._available += elements
        alone = len(wanted) == 1 or self._settings.world_size == 1
        bucket = _Bucket(wanted, 0 if alone else sum(self._padded_bytes(p) for p in wanted))
        for p in wanted:
            self._in_flight[p] = bucket
            self._hold(p, self._padded_bytes(p) if alone else 0)
        for width in sorted({self._of.item_bytes[p] for p in wanted}, reverse=True):
            # one collective for each dtype (partition_parameters.py:1468)
            size = sum(self._padded_bytes(p) for p in wanted if self._of.item_bytes[p] == width)
            self._change(0 if alone else size)
            if self._settings.offload_param and self._settings.world_size > 1:
                shards = size // self._settings.world_size
                self._change(shards)  # this rank's part on its way from host memory into the collective
                self._change(-shards)

    def _wait(self, p: int) -> None:
        bucket = self._in_flight.pop(p, None)
        if bucket is None:
            return
        if not bucket.arrived and bucket.flat_bytes:
            for member in bucket.members:  # each parameter is put together in memory of its own
                self._hold(member, self._of.elements[member] * self._of.item_bytes[member])
        bucket.arrived = True
        bucket.waiting.discard(p)
        if not bucket.waiting:
            self._change(-bucket.flat_bytes)

    def _hold(self, p: int, size: int) -> None:
        self._gathered[p] = size
        self._change(size)

    def _free(self, p: int) -> None:
        bucket = self._in_flight.get(p)
        if p in self._gathered and not self._users[p] and (bucket is None or bucket.arrived):
            size = self._gathered.pop(p)
            if p in self._pinned and p not in self._left_over:
                self._left_over[p] = size
            else:
                self._change(-size)
            self._available -= self._of.elements[p]

    def _change(self, size: int) -> None:
        if size:
            self.bytes += size
            self.on_change(self.bytes)


def steady(
    parameters: Parameters,
    events: Sequence[Event],
    settings: ZeroSettings,
    on_change: Callable[[int], None] = lambda gathered: None,
) -> Coordinator:
    """Return a coordinator that has seen the micro-batch `events` twice and is ready for the third."""
    coordinator = Coordinator(parameters, settings)
    for _ in range(2):
        for event in events:
            coordinator.handle(event)
        if not settings.accumulating:
            coordinator.optimizer_step()
    coordinator.elements = coordinator.gathered_bytes = 0
    coordinator.on_change = on_change
    return coordinator


@dataclass(frozen=True)
class Gathers:
    """What is gathered on one GPU in each micro-batch after the second.

    `start_bytes` are there when it begins. `changes` has for each event the bytes after each change, in order.
    `gathered_bytes` counts all that is gathered, over all ranks.
    """

    start_bytes: int
    changes: list[list[int]]
    gathered_bytes: int


def find_gathers(parameters: Parameters, events: Sequence[Event], settings: ZeroSettings) -> Gathers:
    """Return what the coordinator gathers at each of `events`, which are those of a micro-batch without its end."""
    changes: list[list[int]] = []
    coordinator = steady(
        parameters, [*events, Event(Kind.end)], settings, lambda gathered: changes[-1].append(gathered)
    )
    start_bytes = coordinator.bytes
    for event in events:
        changes.append([])
        coordinator.handle(event)
    return Gathers(start_bytes, changes, coordinator.gathered_bytes)


def elements_without_reuse(parameters: Parameters, events: Sequence[Event]) -> int:
    """Return the most elements that ZeRO-3 gathers in a micro-batch: nothing prefetched, nothing kept between uses."""
    off = ZeroSettings(stage=3, world_size=1, reduce_bucket_size=0, overlap_comm=False)
    coordinator = steady(parameters, events, off)
    for event in events:
        coordinator.handle(event)
    return coordinator.elements
