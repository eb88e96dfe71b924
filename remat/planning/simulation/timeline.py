"""Count live bytes, FLOPs and bytes moved of a forward and backward, operation by operation, on meta or CPU tensors.

The record does not depend on ZeRO's settings. It is cut wherever ZeRO may act (a module fetches or releases its
parameters, a gradient is ready). Each `Part` has the bytes at the cut and the most until the next cut. `peaks` adds
what DeepSpeed holds at each time.
"""

from __future__ import annotations

import weakref
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from remat.model.flops import Mode, dequantised_bytes, flop_formula, operands
from remat.planning.simulation.types import Category, OpCost, Phase
from remat.planning.simulation.zero3 import Event, is_whole

aten = torch.ops.aten
UNSHARED = 4  # _use_count() of a gradient that only autograd holds, in an operation under a dispatch mode


def op_cost(
    func: Any,
    args: Any,
    kwargs: Any,
    result: Any,
    given: list[torch.Tensor],
    made: list[torch.Tensor],
    phase: Phase,
) -> OpCost | None:
    """Return the cost of an operation; None if it runs nothing: views, and memory that is only allocated."""
    if _is_free(func, given, made):
        return None
    formula = flop_formula(func)
    flops = int(formula(*args, **kwargs, out_val=result)) if formula else 0
    name = str(func)
    kind = "elementwise" if formula is None else "attention" if "attention" in name else "matmul"
    if "all_to_all" in name:
        kind = "exchange"
    if "all_reduce" in name:
        kind = "sum"
    return OpCost(kind, flops, sum(t.nbytes for t in given) + sum(t.nbytes for t in made), phase)


def dequantisation(func: Any, args: Any, phase: Phase) -> OpCost | None:
    """Return the cost of dequantising a 4-bit weight, if `func` does: it writes a copy, which the product reads."""
    size = dequantised_bytes(func, args)
    return OpCost("elementwise", 0, 2 * size + args[1].nbytes, phase) if size else None


def _is_free(func: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
    if not isinstance(func, torch._ops.OpOverload):
        return False
    if not made or "empty" in func.name():
        return True
    if func._schema.is_mutable:
        return False
    owners = {tensor.untyped_storage()._cdata for tensor in given}
    return all(tensor.untyped_storage()._cdata in owners for tensor in made)


def workspace_bytes(func: Any, args: Any) -> int:
    """Return the scratch memory of attention's backward, which a dispatch mode does not see.

    Flash (torch 2.13, flash_attn/flash_api.cpp, mha_bwd): an fp32 copy of the query's gradient, padded to 128
    rows and 32 columns, and one number per row; grouped heads get whole gradients of key and value first.
    Efficient (transformers/cuda/attention_backward.cu): one number per row, and fp32 accumulators.

    For a GPU's product with a 4-bit weight, return what it holds on top of `dequantised_bytes`: the constants of the
    weight before their mean is added.
    """
    if (dequantised := dequantised_bytes(func, args)) > 0:
        return dequantised - int(args[0].element_size()) * args[2][0] * args[2][1]  # the constants once more
    if func is aten._scaled_dot_product_flash_attention_backward.default:
        query, key = args[1], args[2]
        batch, heads, rows, width = query.shape
        padded = batch * heads * (-(-rows // 128) * 128)
        expanded = 2 * batch * heads * key.shape[2] * width * query.element_size()
        return int(4 * padded * (-(-width // 32) * 32 + 1) + (expanded if key.shape[1] != heads else 0))
    if func is aten._scaled_dot_product_efficient_attention_backward.default:
        batch, heads, rows, width = args[1].shape
        return int(4 * batch * heads * rows * (width + 1))
    return 0


def summed_in_place_bytes(func: Any, args: Any) -> int:
    """Return the bytes of a sum that autograd would write over one of its terms if there were no dispatch mode.

    torch/csrc/autograd/input_buffer.cpp: two gradients of one tensor are added in place when nothing else refers to
    one of them, but never under a mode. `func` runs in backward.
    """
    if func is not aten.add.Tensor or not all(isinstance(term, torch.Tensor) for term in args[:2]):
        return 0
    first, second = args[0], args[1]
    if first.shape != second.shape or first.dtype != second.dtype:
        return 0
    return int(first.nbytes) if min(first._use_count(), second._use_count()) <= UNSHARED else 0


KINDS = (Category.activations, Category.recompute, Category.loss)
ACTIVATIONS, RECOMPUTE, LOSS = range(3)


class Scope(Protocol):
    """The place of the computation: which decoder layer, and whether it is a recomputation."""

    @property
    def layer(self) -> int | None: ...
    @property
    def recomputing(self) -> bool: ...


class Ready(NamedTuple):
    """The event that a parameter's gradient is ready. `parameter` is its place in model.parameters()."""

    parameter: int


class Mark(NamedTuple):
    """The event that the forward of a layer begins, or that of all layers is over. No finished record has one."""

    layer: int


class Place(NamedTuple):
    """How far a record has come where a part begins."""

    trace: int
    ops: int
    allocations: int
    by_kind: tuple[int, int, int]


class Snapshot(NamedTuple):
    total: int
    by_kind: tuple[int, int, int]  # of KINDS
    phase: Phase
    layer: int | None
    operation: str
    module: str = ""  # the part of a layer, or of the model, whose weight was used last


@dataclass
class Part:
    """A part of the record: its `cut` (None: backward begins), the bytes then, and the most until the next cut.

    `of_place` has the most inside the layers (True) and outside them (False).
    """

    cut: Event | Ready | Mark | None
    at_cut: Snapshot
    peak: Snapshot
    of_place: dict[bool, Snapshot] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """A recorded micro-batch. `kept_bytes` by layer and `host_bytes` of all layers are at the end of forward.
    `moved_bytes` went to host memory.

    `trace` is every allocation and free in order, as pairs (allocation number, bytes). Bytes below 0 free the
    allocation; a number below 0 says that part -1 - number begins.
    """

    parts: list[Part]
    backward_begins_at: int  # index of a part
    trace: array[int]
    ops: list[OpCost]
    flops: Mapping[Phase, int]
    kept_bytes: Mapping[int, int]
    host_bytes: int
    num_layers: int
    moved_bytes: int = 0


class Timeline(Mode):
    """A mode that records a forward and a backward, operation by operation.

    Use: `with Timeline(scope, model) as timeline: forward; timeline.forward_done(); backward`. Parameters are
    not counted. Gradients are, until autograd has finished them; the parameters' `grad` stays None. `ignored`
    yields host memory. `workspaces`: count what a GPU's attention kernels allocate internally, and leave out
    what autograd allocates only under a dispatch mode.
    """

    def __init__(
        self,
        scope: Scope,
        model: nn.Module,
        *,
        ignored: Callable[[], Iterable[torch.UntypedStorage]] = tuple,
        workspaces: bool = True,
    ) -> None:
        super().__init__()
        self.kept_bytes: dict[int, int] = {}  # per layer, at the end of forward
        self.host_bytes = 0  # same moment
        self.begin_bytes: dict[int, int] = {}  # per layer, when it begins
        self.most_bytes: dict[int, int] = {}  # per layer, while it computes
        self.flops: dict[Phase, int] = defaultdict(int)
        self.ops: list[OpCost] = []
        self._scope, self._model, self._ignored, self._workspaces = scope, model, ignored, workspaces
        self._weights: dict[int, int | None] = {}  # the layer that used each weight
        self._modules: dict[int, str] = {}  # the part of a layer, or of the model, that has each weight
        self._module = ""
        self._backward_layer: int | None = None
        self._backward = False
        # by address: the storage, its bytes, its layer, its kind, its number in the trace
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, int | None, int, int]] = {}
        self._unsettled: list[tuple[weakref.ref[torch.UntypedStorage], int, int | None]] = []
        self._not_ours: dict[int, StorageWeakRef] = {}  # keeps each address from being reused
        self._by_kind = [0, 0, 0]
        start = Snapshot(0, (0, 0, 0), Phase.forward, None, "start")
        self.parts = [Part(None, start, start)]
        self.backward_begins_at = 0  # index of a part
        self.trace = array("q")  # as in Record
        self._allocations = 0
        self.places = [self._place()]  # of each part

    def __enter__(self) -> Timeline:
        self._weights = {p.untyped_storage()._cdata: None for p in self._model.parameters()}
        self._modules = {p.untyped_storage()._cdata: _part_of(n) for n, p in self._model.named_parameters()}
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._settle()
        given = operands((args, kwargs))
        for tensor in given:
            self._see(tensor)
        phase, layer = self._phase(), self._layer()
        if layer is not None:
            self.begin_bytes.setdefault(layer, sum(self._by_kind))
        result = func(*args, **kwargs)
        made = operands(result)
        name = func.name() if isinstance(func, torch._ops.OpOverload) else str(func)
        for tensor in made:
            self._track(tensor, layer, late="empty" in name)
        workspace = dequantised_bytes(func, args)
        if self._workspaces:
            workspace += workspace_bytes(func, args)
            workspace -= summed_in_place_bytes(func, args) if phase is Phase.backward else 0
        if workspace > 0:
            self.trace.extend((self._note(workspace), -1))
        self._bump(phase, layer, name, workspace)
        costs = op_cost(func, args, kwargs, result, given, made, phase), dequantisation(func, args, phase)
        for cost in filter(None, costs):
            self.ops.append(cost)
            self.flops[phase] += cost.flops
        return result

    @property
    def num_layers(self) -> int:
        """Return the number of layers that used weights of their own."""
        return max((layer for layer in self._weights.values() if layer is not None), default=-1) + 1

    def record(self) -> Record:
        """Return what was recorded. Call it when backward is over."""
        return Record(
            self.parts, self.backward_begins_at, self.trace, self.ops, self.flops, self.kept_bytes,
            self.host_bytes, self.num_layers,
        )  # fmt: skip

    def forward_done(self) -> None:
        """Note what forward keeps, and switch to backward. Call it between the two."""
        self._settle()
        kept: dict[int, int] = defaultdict(int)
        for _, size, layer, *_ in self._live.values():
            if layer is not None:
                kept[layer] += size
        self.kept_bytes = dict(kept)
        self.host_bytes = sum(storage.nbytes() for storage in self._ignored())
        self._backward, self._backward_layer = True, None
        self.backward_begins_at = len(self.parts)
        self.cut(None)

    def cut(self, event: Event | Ready | None, then: Callable[[], None] = lambda: None) -> None:
        """Cut the record where ZeRO acts, and call `then` right after."""
        self._settle()
        self.places.append(self._place())
        where = self._phase(), self._layer(), "between operations"
        before = self._snapshot(*where)
        then()
        self.trace.extend((-1 - len(self.parts), 0))
        self.parts.append(Part(event, before, self._snapshot(*where)))

    @contextmanager
    def layers_marked(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """Mark where the forward of each of `layers` begins, and where that of the last ends."""

        def mark(layer: int) -> None:
            if self._backward:
                return
            self.places.append(self._place())
            nothing = Snapshot(-1, (0, 0, 0), Phase.forward, None, "")
            self.parts.append(Part(Mark(layer), nothing, nothing))

        handles = [
            layer.register_forward_pre_hook(lambda *_, index=index: mark(index))
            for index, layer in enumerate(layers)
        ]
        handles += [layer.register_forward_hook(lambda *_: mark(len(layers))) for layer in layers[-1:]]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _place(self) -> Place:
        kinds = self._by_kind[0], self._by_kind[1], self._by_kind[2]
        return Place(len(self.trace), len(self.ops), self._allocations, kinds)

    @contextmanager
    def gradients_taken(self) -> Iterator[None]:
        """Cut the record at every gradient, and take it from its parameter.

        Gradients of a module that is gathered whole are ready together, when its backward is over.
        """
        handles = []
        together = {
            id(p): whole
            for module in self._model.modules()
            if is_whole(module)
            for whole in [[p for p in module.parameters() if p.requires_grad]]
            for p in whole
        }
        index_of = {id(p): index for index, p in enumerate(self._model.parameters())}
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                of_module = [(index_of[id(p)], p) for p in together.get(id(parameter), [parameter])]
                handles.append(parameter.register_post_accumulate_grad_hook(self._taker(of_module)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _taker(self, of_module: list[tuple[int, nn.Parameter]]) -> Callable[[torch.Tensor], None]:
        def hand_over(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                storage = gradient.untyped_storage()
                self._forget(storage._cdata)
                self._not_ours[storage._cdata] = StorageWeakRef(storage)

        def take(_: torch.Tensor) -> None:
            if all(parameter.grad is not None for _, parameter in of_module):
                for index, parameter in of_module:
                    self.cut(Ready(index), partial(hand_over, parameter))

        return take

    def _phase(self) -> Phase:
        if self._scope.recomputing:
            return Phase.recompute
        return Phase.backward if self._backward else Phase.forward

    def _layer(self) -> int | None:
        """Return the layer that computes now.

        In backward the scope does not know it: it is the layer whose weight was read last.
        """
        if self._scope.layer is not None:
            self._backward_layer = self._scope.layer
            return self._scope.layer
        return self._backward_layer if self._backward else None

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._weights:
            self._module = self._modules.get(key, "")
            if self._scope.layer is not None and not self._backward:
                self._weights[key] = self._scope.layer
            elif self._backward and self._scope.layer is None:
                self._backward_layer = self._weights[key]
        elif key not in self._live and key not in self._not_ours:
            self._not_ours[key] = StorageWeakRef(storage)

    def _track(self, tensor: torch.Tensor, layer: int | None, *, late: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or key in self._not_ours or key in self._weights:
            return
        inside = RECOMPUTE if self._backward or self._scope.recomputing else ACTIVATIONS
        kind = LOSS if layer is None else inside
        if late:  # whether it is host memory is known only when the caller has it
            self._unsettled.append((weakref.ref(storage), kind, layer))
        else:
            self._count(storage, kind, layer)

    def _settle(self) -> None:
        if not self._unsettled:
            return
        host = {storage._cdata for storage in self._ignored()}
        for ref, kind, layer in self._unsettled:
            storage = ref()
            if storage is None or storage._cdata in self._live:
                continue
            if storage._cdata in host:
                self._not_ours[storage._cdata] = StorageWeakRef(storage)
            else:
                self._count(storage, kind, layer)
        self._unsettled.clear()

    def _count(self, storage: torch.UntypedStorage, kind: int, layer: int | None) -> None:
        size = storage.nbytes()
        number = self._note(size)
        self._live[storage._cdata] = weakref.ref(storage), size, layer, kind, number
        self._by_kind[kind] += size
        weakref.finalize(storage, self._forget, storage._cdata).atexit = False

    def _forget(self, key: int) -> None:
        entry = self._live.pop(key, None)
        if entry is not None:
            self._by_kind[entry[3]] -= entry[1]
            self.trace.extend((entry[4], -1))

    def _note(self, size: int) -> int:
        """Write an allocation into the trace and return its number."""
        self._allocations += 1
        self.trace.extend((self._allocations, size))
        return self._allocations

    def _bump(self, phase: Phase, layer: int | None, name: str, workspace: int) -> None:
        part, inside = self.parts[-1], layer is not None
        total = sum(self._by_kind) + workspace
        if layer is not None:
            self.most_bytes[layer] = max(total, self.most_bytes.get(layer, 0))
        if inside not in part.of_place or total > part.of_place[inside].total:
            part.of_place[inside] = self._snapshot(phase, layer, name, workspace)
        if total > part.peak.total:
            part.peak = part.of_place[inside]

    def _snapshot(self, phase: Phase, layer: int | None, operation: str, workspace: int = 0) -> Snapshot:
        activations, recompute, loss = self._by_kind
        if workspace:
            activations += workspace * (layer is not None and phase is Phase.forward)
            recompute += workspace * (layer is not None and phase is not Phase.forward)
            loss += workspace * (layer is None)
        kinds = activations, recompute, loss
        return Snapshot(sum(kinds), kinds, phase, layer, operation.removeprefix("aten::"), self._module)


def _part_of(name: str) -> str:
    """Return the name that follows a layer's number in the name of a parameter, else the module that owns it."""
    parts = name.split(".")[:-1]
    after = next((place + 1 for place, part in enumerate(parts) if part.isdigit()), None)
    if after is None:
        return parts[-1] if parts else ""
    return parts[after] if after < len(parts) else ""
