"""A table: which values of a layer are kept, by name. `compile_table` makes of it what a forward and backward do.

Names say where a value is made ("mlp.act_fn: silu", "self_attn: attention [1]"), so that a table made on meta tensors
holds for the real ones, and for other lengths. What a table leaves out and cannot be made again is kept all the same.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_unflatten

from remat.activation_checkpointing.mechanisms.tables.frontier import least
from remat.activation_checkpointing.mechanisms.tables.graph import Geometry, Graph, Op, Ref, Tap


@dataclass(frozen=True)
class Table:
    """What one layer keeps. `saved_bytes`: of what it makes itself and keeps, in a full micro-batch; 0: not planned."""

    keep: frozenset[str] = frozenset()
    saved_bytes: int = 0


NOTHING = Table()  # keeps what cannot be made again


class Fate(Enum):
    """What becomes of a saved tensor: it stays, is a weight that is read again, or is made again."""

    keep = "keep"
    weight = "weight"
    make = "make"


@dataclass(eq=False)
class Entry:
    """The n-th tensor that autograd saves. `exact`: the value as the frame has it. `store`: a program needs it.

    `maker`: the autograd node behind it; None: another part of the model made it.
    """

    fate: Fate
    ref: Ref
    maker: str | None
    exact: bool
    store: bool
    weight: int = -1
    any_size: bool = False
    node: type | None = None  # of that autograd node, once one was seen: quicker to compare than its name


@dataclass(eq=False)
class Step:
    """One operation that runs again. Places are those among the leaves of its arguments.

    `leaves`: what is no tensor. `exact`: (place, value) of values as they are. `views`: of others, with geometry.
    `weights`: the same of weights. `writes`: what the operation edits, and the value that this becomes. `nested`: where
    arguments are lists: their places, one by one. `keywords`: the names of the last leaves; None: deeper than that.
    """

    op: Op
    owners: tuple[str, ...]  # modules that own the weights it reads
    inputs: tuple[int, ...] = ()  # values that are no weights
    leaves: list[Any] = field(default_factory=list)
    exact: list[tuple[int, int]] = field(default_factory=list)
    views: list[tuple[int, Ref]] = field(default_factory=list)
    weights: list[tuple[int, int, Ref]] = field(default_factory=list)
    writes: list[tuple[int, Ref, int]] = field(default_factory=list)
    nested: list[Any] = field(default_factory=list)
    keywords: tuple[str, ...] | None = ()


@dataclass(eq=False)
class Program:
    """One graph under one table.

    `uses`: how many readers each value has in backward. `taps`: (in or out, module) -> (call, leaf, value) of what
    is taken where it passes. `arguments`: value -> path. `canon`: how each value is seen in the frame. `constants`:
    buffers and the like that operations read again.
    """

    graph: Graph
    kept: frozenset[int]
    entries: list[Entry] = field(default_factory=list)
    steps: dict[int, Step] = field(default_factory=dict)  # by each value they make
    uses: Counter[int] = field(default_factory=Counter)
    arguments: dict[int, Any] = field(default_factory=dict)
    taps: dict[tuple[str, str], list[tuple[int, int, int]]] = field(default_factory=dict)
    canon: dict[int, Geometry] = field(default_factory=dict)
    constants: list[int] = field(default_factory=list)

    @property
    def kept_bytes(self) -> int:
        """Bytes of kept values that the layer makes itself; what it is given belongs to others."""
        return sum(
            value.nbytes for value in map(self.graph.values.__getitem__, self.kept) if value.kind == "op"
        )


def choose_kept(graph: Graph, table: Table) -> frozenset[int]:
    """Return the values that `table` keeps of `graph`, and what must be kept besides."""
    named = graph.named()
    held = frozenset(
        named[name] for name in table.keep if name in named and graph.values[named[name]].can_be_kept
    )
    return least(graph, held).keep


def compile_table(graph: Graph, kept: frozenset[int]) -> Program:
    program = Program(graph, kept)
    for number in _operations(graph, kept):
        op = graph.ops[number]
        weights = [graph.values[value].where for value in op.ins if graph.values[value].kind == "weight"]
        owners = dict.fromkeys(owner for weight in weights if (owner := graph.owner(weight)) is not None)
        step = Step(op, tuple(owners))
        program.steps |= dict.fromkeys(op.made, step)
        program.uses.update(op.ins)
    for save in graph.saves:
        value = graph.values[save.ref.value]
        if not (save.dead or value.free or value.id in kept):
            program.uses[value.id] += 1
    stores = _find_taps(program)
    for number, save in enumerate(graph.saves):
        value = graph.values[save.ref.value]
        stays = save.dead or value.free or value.id in kept
        gathered = value.kind == "weight" and graph.owner(value.where) is not None
        fate = Fate.weight if gathered else Fate.keep if stays else Fate.make
        program.entries.append(
            Entry(
                fate, save.ref, save.maker if value.kind in ("op", "weight") else None,
                _is_exact(program, save.ref), number in stores,
                value.where if value.kind == "weight" else -1,
                value.op >= 0 and graph.ops[value.op].fixed == "its size depends on data",
            )
        )  # fmt: skip
    for step in set(program.steps.values()):
        _lay_out(program, step)
    read = {where for step in program.steps.values() for _, where, _ in step.weights}
    program.constants = sorted(where for where in read if graph.owner(where) is None)
    return program


def _lay_out(program: Program, step: Step) -> None:
    """Sort the arguments of an operation by how they are had, so that a replay need not look."""
    values, op = program.graph.values, step.op
    step.inputs = tuple(value for value in op.ins if values[value].kind != "weight")
    for place, leaf in enumerate(op.args):
        step.leaves.append(None if isinstance(leaf, Ref) else leaf)
        if not isinstance(leaf, Ref):
            continue
        if values[leaf.value].kind == "weight":
            step.weights.append((place, values[leaf.value].where, leaf))
        elif place in op.writes:
            step.writes.append((place, leaf, op.writes[place]))
        elif _is_exact(program, leaf):
            step.exact.append((place, leaf.value))
        else:
            step.views.append((place, leaf))
    if op.spec is not None:
        args, kwargs = tree_unflatten(range(len(op.args)), op.spec)
        flat = all(isinstance(leaf, int) for leaf in (*args, *kwargs.values()))
        lists = not kwargs and all(isinstance(part, int) for leaf in args for part in tree_leaves(leaf))
        lists = lists and all(isinstance(leaf, (int, list)) for leaf in args)
        step.nested = list(args) if lists and not flat else []
        step.keywords = tuple(kwargs) if flat or lists else None


def _operations(graph: Graph, kept: frozenset[int]) -> list[int]:
    """Return the operations that run again, so that all that is saved and not kept is there."""
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
    """Decide where the frame gets each value it needs. Returns saved tensor -> value."""
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
    """Return what a graph depends on, of the arguments of a layer: sizes and plain values."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.stride(), value.requires_grad
    if isinstance(value, (tuple, list)):
        return tuple(map(sign, value))
    if isinstance(value, dict):
        return tuple((key, sign(part)) for key, part in value.items())
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__
