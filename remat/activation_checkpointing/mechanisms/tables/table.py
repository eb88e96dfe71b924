"""Define tables, which name the values of a layer to keep and where, and compile them into programs of a layer.

Names say where a value is made ("mlp.act_fn: silu", "self_attn: attention [1]"), so that a table made on meta tensors
holds for real ones, and for other lengths. Values that are not in a table and cannot be recomputed are kept all the
same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from remat.activation_checkpointing.mechanisms.tables.frontier import least
from remat.activation_checkpointing.mechanisms.tables.graph import Geometry, Graph, Op, Ref, Tap


@dataclass(frozen=True)
class Table:
    """What one layer keeps: `keep` on the device, `offload` in host memory.

    Bytes are of a full micro-batch; 0: not planned. `saved_bytes`: of what it makes itself and keeps on the device.
    `moved_bytes`: what the host holds.
    """

    keep: frozenset[str] = frozenset()
    saved_bytes: int = 0
    offload: frozenset[str] = frozenset()
    moved_bytes: int = 0


Maker = Callable[[Any], None]  # fn(frame): makes a value in the frame

NOTHING = Table()  # keeps only what cannot be recomputed


class Fate(Enum):
    """What becomes of a saved tensor: it stays, is a weight that is read again, is recomputed, or is moved."""

    keep = "keep"
    weight = "weight"
    make = "make"
    move = "move"


@dataclass(eq=False)
class Entry:
    """The n-th tensor that autograd saves. `slot`: its place in the frame. `store`: the program reads it too.

    `maker`: the autograd node that made it; None: another part of the model made it.
    """

    fate: Fate
    ref: Ref
    maker: str | None
    slot: int
    store: bool
    weight: int = -1
    any_size: bool = False
    node: type | None = None  # of that autograd node, once one was seen: quicker to compare than its name

    def __post_init__(self) -> None:
        self.value, self.dtype, self.size = self.ref.value, self.ref.dtype, self.ref.place.size


@dataclass(eq=False)
class Step:
    """One operation that runs again. `inputs`: values that are no weights."""

    op: Op
    owners: tuple[str, ...]  # modules that own the weights it reads
    inputs: tuple[int, ...]


@dataclass(eq=False)
class Program:
    """One graph under one table. `kept`: values, of which `moved` are in host memory.

    `uses`: how many readers each value has in backward. `taps`: (in or out, module) -> (call, leaf, value) of values
    taken there. `arguments`: value -> path. `canon`: the geometry of each value in the frame. `constants`:
    buffers and the like that operations read again. `slots`: the views of values that are read, numbered after the
    values; `views`: the reverse. `readers`: `uses` of each value. `seen`: the slots of each value, its own first.
    `rows`: moved value -> how many of its numbers share a scale in 8 bits. `moved_bytes`: what the host holds.
    """

    graph: Graph
    kept: frozenset[int]
    moved: frozenset[int] = frozenset()
    entries: list[Entry] = field(default_factory=list)
    steps: dict[int, Step] = field(default_factory=dict)  # by each value they make
    uses: Counter[int] = field(default_factory=Counter)
    arguments: dict[int, Any] = field(default_factory=dict)
    taps: dict[tuple[str, str], list[tuple[int, int, int]]] = field(default_factory=dict)
    canon: dict[int, Geometry] = field(default_factory=dict)
    constants: list[int] = field(default_factory=list)
    slots: dict[Ref, int] = field(default_factory=dict)
    views: dict[int, Ref] = field(default_factory=dict)
    readers: list[int] = field(default_factory=list)
    seen: dict[int, list[int]] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    moved_bytes: int = 0
    makers: dict[int, Maker] = field(default_factory=dict)  # written when a backward first needs them

    def slot(self, ref: Ref) -> int:
        """Return the place of `ref` in a frame: that of its value, or of a view that all its readers share."""
        if self.graph.values[ref.value].kind != "weight" and _is_exact(self, ref):
            return ref.value
        if ref not in self.slots:
            self.slots[ref] = len(self.graph.values) + len(self.slots)
            self.views[self.slots[ref]] = ref
            self.seen.setdefault(ref.value, [ref.value]).append(self.slots[ref])
        return self.slots[ref]

    @property
    def places(self) -> int:
        """Return how many places a frame has: one for each value, and one for each view that is read."""
        return len(self.graph.values) + len(self.slots)

    @property
    def kept_bytes(self) -> int:
        """Return the bytes on the device of kept values that the layer makes itself, without what it is given."""
        on_device = map(self.graph.values.__getitem__, self.kept - self.moved)
        return sum(value.nbytes for value in on_device if value.kind == "op")


def choose_kept(graph: Graph, table: Table) -> frozenset[int]:
    """Return the values of `graph` that `table` keeps, anywhere, and those that must be kept; only what is read."""
    named = graph.named()
    held = frozenset(
        named[name]
        for name in table.keep | table.offload
        if name in named and graph.values[named[name]].can_be_kept
    )
    kept = least(graph, held).keep
    read = set(graph.saved()).union(*(graph.ops[number].ins for number in _operations(graph, kept)))
    return kept & read


def choose_moved(graph: Graph, table: Table, kept: frozenset[int]) -> frozenset[int]:
    """Return those of the values `kept` that `table` moves to the host."""
    return frozenset(
        value
        for value in kept
        if graph.values[value].name in table.offload and graph.values[value].can_be_moved
    )


def compile_table(graph: Graph, kept: frozenset[int], moved: frozenset[int] = frozenset()) -> Program:
    program = Program(graph, kept, moved)
    read: set[int] = set()  # weights
    for number in _operations(graph, kept):
        op = graph.ops[number]
        weights = [graph.values[value].where for value in op.ins if graph.values[value].kind == "weight"]
        read.update(weights)
        owners = dict.fromkeys(owner for weight in weights if (owner := graph.owner(weight)) is not None)
        inputs = tuple(value for value in op.ins if graph.values[value].kind != "weight")
        step = Step(op, tuple(owners), inputs)
        program.steps |= dict.fromkeys(op.made, step)
        program.uses.update(op.ins)
    for save in graph.saves:
        value = graph.values[save.ref.value]
        if not (save.dead or value.free or value.id in kept - moved):
            program.uses[value.id] += 1
    stores = _find_taps(program)
    for number, save in enumerate(graph.saves):
        value = graph.values[save.ref.value]
        stays = save.dead or value.free or value.id in kept
        gathered = value.kind == "weight" and graph.owner(value.where) is not None
        fate = Fate.weight if gathered else Fate.keep if stays else Fate.make
        if value.id in moved and not save.dead:
            fate = Fate.move
        program.entries.append(
            Entry(
                fate, save.ref, save.maker if value.kind in ("op", "weight") else None,
                program.slot(save.ref) if fate is not Fate.keep else -1, number in stores,
                value.where if value.kind == "weight" else -1,
                value.op >= 0 and graph.ops[value.op].fixed == "its size depends on data",
            )
        )  # fmt: skip
    for step in dict.fromkeys(program.steps.values()):
        for place, leaf in enumerate(step.op.args):
            if isinstance(leaf, Ref) and place not in step.op.writes:
                program.slot(leaf)
    program.constants = sorted(where for where in read if graph.owner(where) is None)
    for number in program.uses:
        program.seen.setdefault(number, [number])
    program.readers = [program.uses[value.id] for value in graph.values]
    return program


def _operations(graph: Graph, kept: frozenset[int]) -> list[int]:
    """Return the operations that must run again to make all that autograd saves and that is not kept."""
    todo, again = [value for value in graph.saved() if value not in kept], set[int]()
    while todo:
        value = graph.values[todo.pop()]
        if value.free or value.id in kept or value.op in again:
            continue
        if value.op < 0 or graph.ops[value.op].fixed:
            raise ValueError(f"{value.name or value.kind} is needed and not kept")
        again.add(value.op)
        todo += graph.ops[value.op].ins
    return sorted(again)


def _find_taps(program: Program) -> dict[int, int]:
    """Decide where the frame takes each value that it needs. Returns number of a saved tensor -> value."""
    stores: dict[int, int] = {}
    for number in program.uses:
        value = program.graph.values[number]
        if value.kind == "weight" or number in program.steps:
            program.canon[number] = value.canon
            continue
        tap: Tap = min(
            value.taps, key=lambda tap: ("arg", "save", "in", "out").index(tap[0]), default=("none",)
        )
        program.canon[number] = value.taps.get(tap, value.canon)
        if tap[0] == "arg":
            program.arguments[number] = tap[1]
        elif tap[0] == "save":
            stores[tap[1]] = number
        elif tap[0] != "none":
            program.taps.setdefault((tap[0], tap[1]), []).append((tap[2], tap[3], number))
    return stores


def _is_exact(program: Program, ref: Ref) -> bool:
    canon = program.canon.get(ref.value)
    if canon is None:
        return False
    if program.graph.values[ref.value].kind == "arg":
        return ref.place == canon._replace(offset=0)
    return ref.place == canon


def sign(value: Any) -> Any:
    """Return what the graph of a call depends on in its arguments: types and geometry of tensors, plain values."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.stride(), value.requires_grad
    if isinstance(value, (tuple, list)):
        return tuple(map(sign, value))
    if isinstance(value, dict):
        return tuple((key, sign(part)) for key, part in value.items())
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__
