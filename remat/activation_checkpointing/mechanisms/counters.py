"""Count what really happened in each layer since the last reset, and track which layer runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

PLACE = "remat_place"  # attribute of an exception that left a layer: (layer, recomputing)


class PolicyNotApplied(RuntimeError):
    """A policy promised something that did not happen; the text names the option and the cause."""


@dataclass
class LayerCounters:
    """What one layer did. `expected` and `recomputations` count its recomputed regions (the layer, its modules)."""

    forwards: int = 0
    expected: int = 0
    reached: int = 0  # of those expected, calls whose result got a gradient: a result may be unused
    recomputations: int = 0
    abandoned: int = 0  # calls in earlier micro-batches that backward never reached
    empty: int = 0  # calls of regions that saved nothing: backward may come and find nothing to recompute
    repeated: int = 0  # further recomputations of one call, asked for by a checkpoint of the model's own inside
    kept_outputs: int = 0  # results that a selective policy stored
    reused_outputs: int = 0  # and handed back in the recomputation
    kept_linears: dict[str, int] = field(default_factory=dict)  # stored results of each named Linear that ran
    # how often each entry of the policy's lists took effect
    in_effect: dict[str, int] = field(default_factory=dict)
    discarded_bytes: int = 0
    moved_bytes: int = 0  # to host memory
    partitioned_bytes: int = 0  # given to the other ranks of a tensor-parallel group
    contiguous_bytes: int = 0  # kept in DeepSpeed's list of buffers
    output_bytes: int = 0  # of the layer's own result, in its last forward
    slices: int = 0  # of its MLP, in all its forwards
    slices_again: int = 0  # that ran again, each for its own backward
    slices_thrice: int = 0  # that a recomputation of the layer ran: their own backward runs them a third time
    table_bytes: int = 0  # what its table says that it keeps of its last forward, without its result
    table_moved_bytes: int = 0  # what its table says that was moved to host memory, in all forwards

    def clear(self) -> None:
        vars(self).update(vars(LayerCounters()))

    def is_reached(self) -> None:
        self.reached += 1

    def takes_effect(self, entry: str, times: int = 1) -> None:
        self.in_effect[entry] = self.in_effect.get(entry, 0) + times


class Scope:
    """Which layer runs, and whether it runs for the second time."""

    def __init__(self) -> None:
        self.layer: int | None = None
        self.recomputing = False
        self.keeping = False  # no policy acts: a layer runs as it does without one
        self.whole = False  # while `keeping`: MLPs are not sliced either
        # entered around a later run of a part of a layer, in the micro-batch that is recorded
        self.note_later_run: Callable[[int], AbstractContextManager[None]] | None = None
        self.in_mlp = 0  # the number of this run of a layer's MLP, or of a slice of it; 0: in none
        self._mlp_runs = 0
        self.in_region = False  # in the first run of a part of the layer that will be recomputed
        # called with the results that such a part may keep
        self.handed_out: Callable[[list[torch.Tensor]], None] | None = None

    @contextmanager
    def keep_everything(self) -> Iterator[None]:
        """Run layers without their policies while it is entered."""
        self.keeping = True
        try:
            yield
        finally:
            self.keeping = False

    @contextmanager
    def inside_region(self) -> Iterator[None]:
        before, self.in_region = self.in_region, True
        try:
            yield
        finally:
            self.in_region = before

    def enter_mlp(self) -> None:
        self._mlp_runs += 1
        self.in_mlp = self._mlp_runs

    @contextmanager
    def inside_slice(self) -> Iterator[None]:
        before = self.in_mlp
        self.enter_mlp()
        try:
            yield
        finally:
            self.in_mlp = before

    def later_run(self, layer: int) -> AbstractContextManager[None]:
        """Return the context for the recomputation of a part of `layer`."""
        return self.note_later_run(layer) if self.note_later_run else nullcontext()

    def inside(self, layer: int, *, recomputing: bool = False) -> AbstractContextManager[None]:
        return _Inside(self, layer, recomputing)


class _Inside:
    """The context of `Scope.inside`. It is entered often, and a generator would take three times as long."""

    __slots__ = ("_before", "_here", "_scope")

    def __init__(self, scope: Scope, layer: int, recomputing: bool) -> None:
        self._scope = scope
        self._here = layer, scope.recomputing or recomputing

    def __enter__(self) -> None:
        self._before = self._scope.layer, self._scope.recomputing
        self._scope.layer, self._scope.recomputing = self._here

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._scope.layer, self._scope.recomputing = self._before
        if isinstance(error, Exception) and not hasattr(error, PLACE):
            setattr(error, PLACE, self._here)


@contextmanager
def one_run(layer: int, counts: LayerCounters, scope: Scope, earlier: int) -> Iterator[None]:
    """Wrap one run of a region that ran `earlier` times: the first is the forward, later ones recompute it."""
    counts.recomputations += earlier == 1
    counts.repeated += earlier > 1
    noted = scope.later_run(layer) if earlier else nullcontext()
    with noted, scope.inside(layer, recomputing=earlier > 0):
        if earlier or not torch.is_grad_enabled():
            yield
            return
        with _counted_saves() as saved:
            yield
        counts.empty += not saved


@contextmanager
def _counted_saves() -> Iterator[list[None]]:
    """Collect one entry per tensor that autograd saves under the outer hooks; without outer hooks, a single entry."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if outer is None:
        yield [None]
        return
    pack, unpack = outer
    saved: list[None] = []

    def count(tensor: torch.Tensor) -> Any:
        saved.append(None)
        return pack(tensor)

    with saved_tensors_hooks(count, unpack):
        yield saved
