"""Record one call of a layer: its operations, the memory they make, and what autograd saves.

A *value* is one storage in one state: a write in place makes the next value. Views are no operations. A tensor is a
value with dtype, size, stride and offset, so that a replay needs no view either. Weights are leaves, found by their
storage: what ZeRO-3 does to gather them is dead code here.

A call can be recorded on real tensors and on meta tensors. A graph holds no tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_leaves

from remat.activation_checkpointing.mechanisms import operators
from remat.model.flops import Mode, flop_formula

# Where a value can be taken while a layer runs: ("save", n), ("in" or "out", module, call, leaf).
Tap = tuple[Any, ...]
VIEWS = {"ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0"}  # which one depends on active modes
FIXED_RESULT = "bitsandbytes::"  # of a library whose operations draw no random numbers
DATA_SIZED = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class Geometry(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements, from the start of the storage; of a leaf, from the leaf's own start


class Ref(NamedTuple):
    """A tensor as a view of a value."""

    value: int
    dtype: torch.dtype
    place: Geometry


@dataclass(eq=False)
class Value:
    """One storage in one state. `kind`: op, arg, weight, or outside (neither made in the layer nor given to it).

    `where`: the path of an argument, the place of a weight among `find_weights`. `free`: it lives until backward in any
    case. `canon`: its geometry as the operation returned it. `taps`: where it can be taken, and its geometry there.
    `differentiable`: it gets a gradient.
    """

    id: int
    nbytes: int
    kind: str
    dtype: torch.dtype
    canon: Geometry
    op: int = -1
    where: Any = None
    free: bool = False
    overwritten: bool = False
    differentiable: bool = False
    taps: dict[Tap, Geometry] = field(default_factory=dict)
    name: str = ""

    @property
    def can_be_kept(self) -> bool:
        return self.free or (bool(self.taps) and not self.overwritten)

    @property
    def can_be_moved(self) -> bool:
        """Return whether moving it would free device memory: a free value lives on the device in any case."""
        return self.can_be_kept and not self.free and self.nbytes > 0


@dataclass(eq=False)
class Op:
    """`args`: leaves of (args, kwargs), tensors as Ref. `outs`: (place among the result's leaves, value).

    `writes`: place among `args` -> the value it becomes. `fixed`: it cannot run again, and why. FLOPs count 2 per
    multiply-add, `moved_bytes` are read and written.
    """

    func: Any
    args: list[Any]
    spec: Any
    ins: tuple[int, ...]
    outs: list[tuple[int, int]]
    writes: dict[int, int]
    module: str
    fixed: str
    flops: int
    moved_bytes: int

    @property
    def label(self) -> str:
        """Return a short name: `mm`, `add_`; every fused attention is `attention`, whichever kernel it was."""
        name = str(operators.describe(self.func).name)
        return "attention" if operators.FUSED_ATTENTION.fullmatch(name) else name.rpartition("::")[2]

    @property
    def made(self) -> list[int]:
        return [value for _, value in self.outs] + list(self.writes.values())


@dataclass(eq=False)
class Save:
    """The n-th tensor that autograd saves. `maker`: the node that made it. `dead`: autograd dropped its branch."""

    ref: Ref
    maker: str
    dead: bool = False


@dataclass(eq=False)
class Graph:
    """`owners`: the name of the module that owns each parameter of the layer; other weights are never gathered.

    `call`: what the layer looks like and how it was called; other calls of this kind need no record
    (`mechanisms/budget.py`). `first_bytes`: the most bytes in the recorded call, in which everything is kept, without
    those that earlier layers keep; a plan notes it.
    """

    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)
    outputs: set[int] = field(default_factory=set)
    edited: set[int] = field(default_factory=set)  # weights that the layer writes to, such as counting buffers
    call: Any = None
    first_bytes: int = 0

    def saved(self) -> list[int]:
        """Return the values that backward needs and that are not free."""
        found = dict.fromkeys(save.ref.value for save in self.saves if not save.dead)
        return [value for value in found if not self.values[value].free]

    def named(self) -> dict[str, int]:
        return {value.name: value.id for value in self.values if value.name}

    def owner(self, weight: int) -> str | None:
        return self.owners[weight] if weight < len(self.owners) else None

    def finish(self) -> None:
        """Leave out dead code (gathers of weights) and name the values, once saves are known.

        Then layers that do the same have the same graph, whatever was gathered in their calls.
        """
        for op in self.ops:
            if not op.fixed and self.edited.intersection(op.ins):
                op.fixed = "it reads what the layer changes"
        for number, save in enumerate(self.saves):
            if save.dead:
                self.values[save.ref.value].taps.pop(("save", number), None)
        roots = [save.ref.value for save in self.saves] + list(self.outputs)
        alive: set[int] = set()
        while roots:
            value = self.values[roots.pop()]
            if value.op >= 0 and value.op not in alive:
                alive.add(value.op)
                roots += self.ops[value.op].ins
        self._renumber(sorted(alive))
        seen: Counter[str] = Counter()
        for op in self.ops:
            base = f"{op.module or 'layer'}: {op.label}"
            seen[base] += 1
            times = f" {seen[base]}" if seen[base] > 1 else ""
            for place, made in enumerate(op.made):
                self.values[made].name = f"{base}{times}" + (f" [{place}]" if place else "")
        for value in self.values:
            if value.kind == "arg":
                value.name = "input " + ".".join(map(str, value.where[1:]))

    def _renumber(self, alive: list[int]) -> None:
        """Keep the operations `alive`, with the values that they, saves and outputs use, in the order of first use."""
        self.ops = [self.ops[number] for number in alive]
        used = [value.id for value in self.values if value.kind == "arg"]
        for op in self.ops:
            used += [*op.ins, *op.made]
        used += [*(save.ref.value for save in self.saves), *sorted(self.outputs)]
        to = {old: new for new, old in enumerate(dict.fromkeys(used))}
        to_op = {old: new for new, old in enumerate(alive)}
        self.values = [self.values[old] for old in to]
        for new, value in enumerate(self.values):
            value.id, value.op = new, to_op.get(value.op, -1)
        for op in self.ops:
            op.args = [
                leaf._replace(value=to[leaf.value]) if isinstance(leaf, Ref) else leaf for leaf in op.args
            ]
            op.ins = tuple(to[value] for value in op.ins)
            op.outs = [(leaf, to[value]) for leaf, value in op.outs]
            op.writes = {leaf: to[value] for leaf, value in op.writes.items()}
        for save in self.saves:
            save.ref = save.ref._replace(value=to[save.ref.value])
        self.outputs = {to[value] for value in self.outputs}
        self.edited = {to[value] for value in self.edited if value in to}


class Recorder(Mode):
    """Records one call of `layer` with arguments `given` (path, tensor) in `graph`.

    `tapped` has the tensors that enter and leave modules, unless it `holds` none.
    """

    def __init__(self, layer: nn.Module, given: list[tuple[Any, torch.Tensor]], *, holds: bool = True) -> None:
        super().__init__()
        self._holds, self._is_paused = holds, False
        self.graph = Graph()
        self.tapped: dict[Tap, torch.Tensor] = {}
        self._weights = find_weights(layer)
        owner = {id(p): name for name, m in layer.named_modules() for p in m.parameters(recurse=False)}
        self.graph.owners = [owner[id(p)] for p in layer.parameters()]
        self._now: dict[int, int] = {}  # storage: its present value
        self._alive: list[StorageWeakRef] = []  # keep the addresses of freed storages from being given away
        self._start: dict[int, int] = {}  # of leaves: storage offset of the tensor
        self._weight_values: dict[int, int] = {}
        self._path: list[str] = []
        self._calls: Counter[str] = Counter()
        self._sized_by_data: set[int] = set()
        for where, tensor in given:
            if operators.storage(tensor) not in self._now and self._weight(tensor) is None:
                value = self._new(tensor, "arg")
                value.where, value.free = where, not tensor.requires_grad
                value.differentiable = tensor.requires_grad
                value.taps["arg", where] = value.canon
                self._start[value.id] = value.canon.offset

    def run(self, layer: nn.Module, forward: Callable[[], Any], pack: Any, unpack: Any) -> Any:
        """Run `forward` once. `pack(n, tensor)` and `unpack` treat what autograd saves."""

        def save(tensor: torch.Tensor) -> Any:
            number = len(self.graph.saves)
            self.graph.saves.append(Save(self._ref(tensor), maker(tensor.grad_fn)))
            self._tap(("save", number), tensor)
            return pack(number, tensor)

        with ExitStack() as stack:
            for name, module in layer.named_modules():
                if module is not layer:
                    enter, leave = self._listeners(name)
                    stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                    stack.callback(module.register_forward_hook(leave).remove)
            with self, saved_tensors_hooks(save, unpack):
                output = forward()
        # a weight or a constant is no output of its own
        self.graph.outputs = {self._now[key] for key in operators.storages(output) if key in self._now}
        return output

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        before = [self._ref(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        given = {operators.storage(tensor) for tensor in tensors}
        result = func(*args, **kwargs)
        described = operators.describe(func)
        written = {operators.storage(tensor) for tensor in operators.written(described, args, kwargs)}
        number, graph = len(self.graph.ops), self.graph
        writes = {}
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor) or operators.storage(leaf) not in written:
                continue
            if self._weight(leaf) is not None:
                graph.edited.add(self._ref(leaf).value)
            else:
                graph.values[self._now[operators.storage(leaf)]].overwritten = True
                writes[place] = self._new(leaf, "op", number).id
        made = [
            (place, leaf) for place, leaf in enumerate(tree_leaves(result)) if isinstance(leaf, torch.Tensor)
        ]
        outs = [
            (place, self._new(leaf, "op", number).id)
            for place, leaf in made
            if (key := operators.storage(leaf)) not in given and key not in self._now
        ]
        if outs or writes:
            formula = flop_formula(func)
            op = Op(
                func, before, spec, tuple(dict.fromkeys(leaf.value for leaf in before if isinstance(leaf, Ref))),
                outs, writes, self._path[-1] if self._path else "", "",
                int(formula(*args, **kwargs, out_val=result)) if formula else 0,
                sum(tensor.nbytes for tensor in [*tensors, *(leaf for _, leaf in made)]),
            )  # fmt: skip
            op.fixed = self._why_fixed(op, described, leaves, args, kwargs)
            graph.ops.append(op)
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the operations inside."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _why_fixed(
        self, op: Op, described: operators.Operator, leaves: list[Any], args: Any, kwargs: Any
    ) -> str:
        """Tell why an operation cannot run again with the same result; empty: it can."""
        name, tags = described.name, getattr(op.func, "tags", ())
        # indexing is tagged because of masks; positions give a known size
        indexed = op.func is torch.ops.aten.index.Tensor and not any(
            leaf.dtype in (torch.bool, torch.uint8) for leaf in leaves[1:] if isinstance(leaf, torch.Tensor)
        )
        if (DATA_SIZED.intersection(tags) and not indexed) or self._sized_by_data.intersection(op.ins):
            self._sized_by_data.update(op.made)
            return "its size depends on data"
        if "c10d" in name:
            return "it communicates"
        if "::empty" in name or "::new_empty" in name:
            return "a kernel that is not seen here may fill it"
        if name in operators.CHOICES:
            return "it chooses"
        if operators.FUSED_ATTENTION.fullmatch(name):
            return "" if _without_dropout(op.func, args, kwargs) else "it draws random numbers"
        unknown = described.random and name not in operators.MATMULS and not name.startswith(FIXED_RESULT)
        if unknown or not hasattr(op.func, "_schema"):
            return "it draws random numbers, or may"
        values = self.graph.values
        punned = any(
            isinstance(leaf, Ref)
            and values[leaf.value].kind != "weight"
            and (values[leaf.value].kind == "outside" or leaf.dtype != values[leaf.value].dtype)
            for leaf in op.args
        )
        return "it reads what the layer was not given" if punned else ""

    def _new(self, tensor: torch.Tensor, kind: str, op: int = -1) -> Value:
        storage = tensor.untyped_storage()
        value = Value(len(self.graph.values), storage.nbytes(), kind, tensor.dtype, geometry(tensor), op)
        self.graph.values.append(value)
        self._now[storage._cdata] = value.id
        self._alive.append(StorageWeakRef(storage))
        return value

    def _weight(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return the weight that `tensor` is a view of, and the offset in it, in elements of `tensor`."""
        key, width = operators.storage(tensor), tensor.element_size()
        start_bytes = width * int(tensor.storage_offset())
        for index, weight in enumerate(self._weights):
            if operators.storage(weight) != key:
                continue
            offset_bytes = start_bytes - weight.element_size() * int(weight.storage_offset())
            if 0 <= offset_bytes < weight.nbytes:
                return index, offset_bytes // width
        return None

    def _ref(self, tensor: torch.Tensor) -> Ref:
        place = geometry(tensor)
        if (found := self._weight(tensor)) is not None:
            index, offset = found
            if index not in self._weight_values:
                dtype = self._weights[index].dtype  # `tensor` may read its bytes as another
                value = Value(len(self.graph.values), tensor.untyped_storage().nbytes(), "weight", dtype, place)
                value.where, value.free = index, True
                self.graph.values.append(value)
                self._weight_values[index] = value.id
            return Ref(self._weight_values[index], tensor.dtype, place._replace(offset=offset))
        number = self._now.get(operators.storage(tensor))
        if number is None:
            value = self._new(tensor, "outside")
            value.free, number = True, value.id
            self._start[number] = place.offset
        return Ref(number, tensor.dtype, place._replace(offset=place.offset - self._start.get(number, 0)))

    def _tap(self, tap: Tap, tensor: torch.Tensor) -> None:
        number = self._now.get(operators.storage(tensor))
        if number is not None and self._weight(tensor) is None and self.graph.values[number].kind == "op":
            value = self.graph.values[number]
            value.taps[tap] = geometry(tensor)
            value.differentiable |= tensor.requires_grad

    def _listeners(self, name: str) -> tuple[Any, Any]:
        def look(side: str, tree: Any) -> None:
            for leaf, tensor in enumerate(tree_leaves(tree)):
                if isinstance(tensor, torch.Tensor):
                    tap = (side, name, self._calls[name] - 1, leaf)
                    self._tap(tap, tensor)
                    if self._holds:
                        self.tapped[tap] = tensor

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._calls[name] += 1
            self._path.append(name)
            look("in", (args, kwargs))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._path.pop()
            look("out", output)

        return enter, leave


def find_weights(layer: nn.Module) -> list[torch.Tensor]:
    """Return the tensors that exist before a call: parameters, then buffers and scales of quantised parameters."""
    parameters = list(layer.parameters())
    states = [vars(state) for p in parameters if (state := getattr(p, "quant_state", None)) is not None]
    states += [vars(nested) for state in states if (nested := state.get("state2")) is not None]
    scales = [part for state in states for part in state.values() if isinstance(part, torch.Tensor)]
    scales += [p.constants for p in parameters if hasattr(p, "constants")]  # of a shard of bytes
    return [*parameters, *layer.buffers(), *scales]


def geometry(tensor: torch.Tensor) -> Geometry:
    return Geometry(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


def maker(node: Any) -> str:
    """Name the autograd node that made a tensor; empty for a leaf."""
    if node is None:
        return ""
    name = str(node.name())
    return "View" if name in VIEWS else name


def find_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, torch.Tensor]]:
    """Return (path, tensor) of the tensors in a call: ("args", 0), ("kwargs", "position_embeddings", 1)."""
    found: list[tuple[Any, torch.Tensor]] = []

    def walk(path: tuple[Any, ...], value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append((path, value))
        elif isinstance(value, (tuple, list, dict)):
            for key, part in value.items() if isinstance(value, dict) else enumerate(value):
                walk((*path, key), part)

    walk(("args",), args)
    walk(("kwargs",), kwargs)
    return found


def _without_dropout(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an attention kernel runs without dropout; all such kernels are tagged as random."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False
    given = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    given |= dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    return given.get("dropout_p") == 0.0
