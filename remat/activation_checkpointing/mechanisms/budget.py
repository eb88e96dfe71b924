"""Keep what a table says of each layer, and make the rest again from it, operation by operation.

The first call of a layer is written down (`tables/graph.py`), with everything kept until its forward is over. From then
on the n-th tensor that autograd saves is entry n: it stays, is a weight that is read again, or is made again in
backward by the operations that were seen, on demand. No dispatch mode is left. Every save is held against its entry;
arguments of another size or kind are written down anew. `planning/budget.py` makes the tables.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_unflatten

from remat.activation_checkpointing.mechanisms.arguments import Replayable
from remat.activation_checkpointing.mechanisms.counters import PolicyNotApplied
from remat.activation_checkpointing.mechanisms.mechanism import (
    LayerForward,
    Mechanism,
    Observed,
    Setting,
    Site,
    Treated,
    spans,
)
from remat.activation_checkpointing.mechanisms.tables.graph import (
    Geometry,
    Graph,
    Recorder,
    Ref,
    find_arguments,
    find_weights,
    maker,
)
from remat.activation_checkpointing.mechanisms.tables.table import (
    NOTHING,
    Entry,
    Fate,
    Program,
    Step,
    choose_kept,
    compile_table,
    sign,
)
from remat.config.options import CheckpointingConfig
from remat.config.units import MIB

GRAPHS = "graphs"  # in Setup.shared: the graph of each layer's largest call, by index
PROGRAMS = "programs"  # what equal layers under equal tables share
MOST_SHAPES = 64  # of arguments, whose programs a layer remembers: lengths may vary without end


def remember(known: dict[Any, Program], key: Any, program: Program) -> None:
    """Put `program` into `known`, in the place of the oldest where there are many."""
    if len(known) >= MOST_SHAPES:
        known.pop(next(iter(known)))
    known[key] = program


class LayerRunner:
    """Carries out the table of one layer."""

    def __init__(self, site: Site) -> None:
        self.site, self.layer = site, site.layer
        self.table = site.decision.table or NOTHING
        self.programs: dict[Any, Program] = {}
        self.frame: Frame | None = None  # of the forward that runs
        self._calls: Counter[tuple[str, str]] = Counter()
        self._hooked: set[tuple[str, str]] = set()
        self._modules = dict(self.layer.named_modules())
        self._weights: list[Any] = []  # parameters, which DeepSpeed gives attributes of its own
        self._open: set[nn.Module] = set()  # modules inside whose hooks a program runs

    def __call__(self, call: Replayable, *args: Any) -> Any:
        cast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
        key = sign(args), sign(call.keywords), self.layer.training, tuple(cast)
        program = self.programs.get(key)
        if program is None:
            return self._learn(key, call, args)
        return self._run(program, call, args)

    @property
    def gathers(self) -> bool:
        """Return whether weights are there only while the modules that own them run."""
        return self.site.setup.zero_stage == 3

    @property
    def weights(self) -> list[Any]:
        if not self._weights:  # now, and not earlier: DeepSpeed partitions them after the policy is in place
            self._weights = find_weights(self.layer)
        return self._weights

    def _run(self, program: Program, call: Replayable, args: tuple[Any, ...]) -> Any:
        self.frame = frame = Frame(self, program, args, call.keywords)
        self._calls.clear()
        entries, total, number = program.entries, len(program.entries), 0

        def pack(tensor: torch.Tensor) -> Any:
            nonlocal number
            if number >= total:
                raise self._mismatch(f"saves more than the {total} tensors of its table")
            entry, node = entries[number], tensor.grad_fn
            number += 1
            value, dtype, place = entry.ref
            changed = (tensor.dtype is not dtype or tensor.shape != place.size) and not entry.any_size
            if changed or (type(node) is not entry.node and not _is_made_by(entry, node)):
                raise self._mismatch(
                    f"saves {tuple(tensor.shape)} {tensor.dtype} of {maker(node) or 'nothing'!r} as number "
                    f"{number - 1}, where its table has {place.size} {dtype} of {entry.maker or 'nothing'!r}"
                )
            if entry.store:
                frame.put(value, tensor.detach())
            if entry.fate is Fate.keep:
                # An output that is held by its own grad_fn is never freed.
                return Kept(tensor if node is None else tensor.detach())
            return (
                Made(frame, entry)
                if entry.fate is Fate.make
                else WeightView(self.weights[entry.weight], entry.ref)
            )

        try:
            with saved_tensors_hooks(pack, _unpack):
                output = call(*args)
        finally:
            self.frame = None
        if number != total:
            raise self._mismatch(f"saved {number} tensors, where its table has {total}")
        self.site.counts.table_bytes = program.kept_bytes
        return output

    def _learn(self, key: Any, call: Replayable, args: tuple[Any, ...]) -> Any:
        """Keep everything until the layer's forward is over, then carry out its table."""
        slots: list[weakref.ref[Slot]] = []

        def pack(number: int, tensor: torch.Tensor) -> Slot:
            slot = Slot(Kept(tensor if tensor.grad_fn is None else tensor.detach()))
            slots.append(weakref.ref(slot))
            return slot

        recorder = Recorder(self.layer, find_arguments(args, call.keywords))
        output = recorder.run(self.layer, partial(call, *args), pack, _unpack)
        graph = recorder.graph
        for save, slot in zip(graph.saves, slots, strict=True):
            save.dead = slot() is None  # autograd has dropped that branch: nothing uses it
        graph.finish()
        shared = self.site.setup.shared
        shared.setdefault(GRAPHS, {}).setdefault(self.site.index, graph)
        program = self._compile(graph)
        remember(self.programs, key, program)
        frame = Frame(self, program, args, call.keywords)
        for (side, name), taps in program.taps.items():
            self._listen(side, name)
            for times, leaf, value in taps:
                frame.put(value, recorder.tapped[side, name, times, leaf])
        recorder.tapped.clear()  # autograd holds the hook, and so the recorder, as long as the graph
        for reference, entry in zip(slots, program.entries, strict=True):
            alive = reference()
            if alive is None:
                continue
            if entry.store:
                frame.put(entry.ref.value, alive.handle.get())
            if entry.fate is Fate.make:
                alive.handle = Made(frame, entry)
            elif entry.fate is Fate.weight:
                alive.handle = WeightView(self.weights[entry.weight], entry.ref)
        self.site.counts.table_bytes = program.kept_bytes
        return output

    def _compile(self, graph: Graph) -> Program:
        operations = tuple((op.func, op.ins, tuple(op.made), op.fixed, repr(op.args)) for op in graph.ops)
        saves = tuple((save.ref, save.maker, save.dead) for save in graph.saves)
        key = self.table, operations, saves, tuple(value.name for value in graph.values)
        known: dict[Any, Program] = self.site.setup.shared.setdefault(PROGRAMS, {})
        if key not in known:
            remember(known, key, compile_table(graph, choose_kept(graph, self.table)))
        return known[key]

    def _mismatch(self, text: str) -> PolicyNotApplied:
        return PolicyNotApplied(
            f"checkpointing=budget: {self.site.name} {text}: it does not do the same each time it is given the same; "
            "give such layers another policy with checkpointing.layers (full, say)"
        )

    def _listen(self, side: str, name: str) -> None:
        """Take values where they pass into a module or out of it."""
        if (side, name) in self._hooked:
            return
        self._hooked.add((side, name))

        def take(tree: Any) -> None:
            frame = self.frame
            if frame is None:
                return
            times = self._calls[side, name]
            self._calls[side, name] += 1
            for wanted, leaf, value in frame.program.taps.get((side, name), ()):
                if wanted == times:
                    frame.put(value, tree_leaves(tree)[leaf].detach())

        module, cleanup = self._modules[name], self.site.setup.cleanup
        if side == "in":
            hook = module.register_forward_pre_hook(
                lambda _, args, kwargs: take((args, kwargs)), with_kwargs=True
            )
            cleanup.callback(hook.remove)
        else:
            cleanup.callback(module.register_forward_hook(lambda _, args, output: take(output)).remove)

    def holders(self, step: Step) -> list[nn.Module]:
        """Return the modules whose hooks gather what `step` reads: the owners, or ZeRO-3's leaf modules around them."""
        found = []
        for name in step.owners:
            module = self._modules[name]
            weights = module.parameters(recurse=False)
            leaves = (p.ds_z3_leaf_module for p in weights if hasattr(p, "ds_z3_leaf_module"))
            found.append(next(leaves, module))
        return list(dict.fromkeys(found))

    def with_weights(self, modules: list[nn.Module], run: Callable[[], None]) -> None:
        """Run inside the hooks of `modules`, which gather their weights, where those are not there.

        DeepSpeed's coordinator fetches, waits, notes the order and releases, as for a forward.
        """
        if not modules:
            return run()
        module, rest = modules[0], partial(self.with_weights, modules[1:], run)
        if not self.gathers or self._is_there(module):
            return rest()
        before, pending = module.__dict__.get("forward"), module.__dict__.get("ds_grads_remaining")
        module.forward = lambda: rest()
        self._open.add(module)
        try:
            module()
        finally:
            self._open.discard(module)
            if before is None:
                del module.forward
            else:
                module.forward = before
            if (
                pending is not None
            ):  # the hook before a forward makes it 0, and the module would never be released
                module.ds_grads_remaining = pending
        return None

    def _is_there(self, module: nn.Module) -> bool:
        """Return whether the weights of `module` are gathered for a backward of its own, or for good.

        Not by their status alone: what happens to be prefetched must not change the order that ZeRO-3 has learnt.
        """
        if module in self._open:
            return True
        there = hasattr(module, "ds_id")  # not on meta tensors
        weight: Any
        for weight in module.parameters():
            status = getattr(weight, "ds_status", None)
            if status is None:
                continue
            if weight.ds_persist:
                if status.name == "NOT_AVAILABLE":  # before the first step
                    weight.all_gather()
                if weight.ds_status.name == "AVAILABLE":
                    continue
            if module.ds_id not in weight.ds_active_sub_modules:
                return False
        return there


class Frame:
    """One forward of a layer until its backward is done: what is kept for programs, and who still reads it."""

    __slots__ = ("began", "constants", "program", "runner", "uses", "values", "versions")

    def __init__(
        self, runner: LayerRunner, program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.runner, self.program, self.began = runner, program, False
        self.values: dict[int, torch.Tensor] = {}
        self.versions: dict[int, int] = {}
        self.uses = dict(program.uses)
        self.constants = [
            (runner.weights[place], runner.weights[place]._version) for place in program.constants
        ]
        for value, (root, *path) in program.arguments.items():
            given: Any = args if root == "args" else kwargs
            for key in path:
                given = given[key]
            self.put(value, given.detach())

    def put(self, value: int, tensor: torch.Tensor) -> None:
        self.values[value], self.versions[value] = tensor, tensor._version

    def take(self, entry: Entry) -> torch.Tensor:
        """Return a saved tensor, after the operations that it needs."""
        site = self.runner.site
        if not self.began:
            self.began = True
            site.counts.expected += 1
            site.counts.is_reached()
            site.counts.recomputations += 1
            if any(tensor._version != version for tensor, version in self.constants):
                raise RuntimeError(
                    f"checkpointing=budget: layer {site.index} needs a buffer in backward that was modified by an "
                    "in-place operation after its forward"
                )
        number = entry.ref.value
        if number in self.values:
            self._need(number)
        elif torch.is_grad_enabled():  # as where somebody takes a gradient of a gradient
            with torch.no_grad():
                self._make(number)
        else:
            self._make(number)
        tensor = self.values[number] if entry.exact else self._view(entry.ref)
        self._used(number)
        return tensor

    def _make(self, value: int) -> None:
        site = self.runner.site
        with site.setup.scope.inside(site.index, recomputing=True), torch._C._DisableAutocast():
            self._need(value)

    def _need(self, value: int) -> None:
        base = self.values.get(value)
        if base is None:
            step = self.program.steps[value]
            if step.owners and self.runner.gathers:
                self._prepare(step)
                self.runner.with_weights(self.runner.holders(step), partial(self._finish, step))
            else:
                self._finish(step)
        elif self.versions.get(value, base._version) != base._version:
            raise RuntimeError(
                f"checkpointing=budget: layer {self.runner.site.index} needs {self.program.graph.values[value].name!r} "
                "in backward, which was modified by an in-place operation after it was kept"
            )

    def _prepare(self, step: Step) -> None:
        """Make what comes from outside of the module that owns the weights: one is gathered at a time, and once."""
        for value in step.inputs:
            if value in self.values:
                continue
            before = self.program.steps.get(value)
            if before is not None and step.owners and self.runner.holders(before) == self.runner.holders(step):
                self._prepare(before)
            else:
                self._need(value)

    def _finish(self, step: Step) -> None:
        for value in step.inputs:
            self._need(value)
        self._execute(step)
        for value in step.inputs:
            self._used(value)

    def _execute(self, step: Step) -> None:
        op, values, leaves = step.op, self.values, step.leaves.copy()
        for place, value in step.exact:
            leaves[place] = values[value]
        for place, ref in step.views:
            leaves[place] = self._view(ref)
        for place, index, ref in step.weights:
            leaves[place] = _view_of(self.runner.weights[index].data, ref)
        for place, ref, becomes in step.writes:
            leaves[place] = self._copy(ref, becomes)
        if step.keywords is None:
            args, kwargs = tree_unflatten(leaves, op.spec)
            result = op.func(*args, **kwargs)
        elif step.nested:
            result = op.func(
                *(leaves[at] if type(at) is int else [leaves[part] for part in at] for at in step.nested)
            )
        elif step.keywords:
            first = len(leaves) - len(step.keywords)
            result = op.func(*leaves[:first], **dict(zip(step.keywords, leaves[first:], strict=True)))
        else:
            result = op.func(*leaves)
        results = (result,) if isinstance(result, torch.Tensor) else tree_leaves(result)
        for place, value in op.outs:
            if self.uses.get(value):
                values.setdefault(value, results[place])
        self.runner.site.counts.takes_effect("operations made again")

    def _copy(self, leaf: Ref, becomes: int) -> torch.Tensor:
        """Copy what an operation is going to edit: the value before it may be kept, or needed by others."""
        base = self.values[leaf.value]
        flat = base.as_strided((base.untyped_storage().nbytes() // base.element_size(),), (1,), 0).clone()
        if self.uses.get(becomes):
            self.values[becomes] = flat.as_strided(*self.program.canon[becomes])
        return flat.as_strided(*self._in_storage(leaf.value, leaf.place, base))

    def _view(self, ref: Ref) -> torch.Tensor:
        base = self.values[ref.value]
        return base.as_strided(*self._in_storage(ref.value, ref.place, base))

    def _in_storage(self, value: int, place: Geometry, base: torch.Tensor) -> Geometry:
        """Return `place` with an offset from the start of the storage; of an argument it counts from the argument."""
        if self.program.graph.values[value].kind != "arg":
            return place
        return place._replace(offset=place.offset + int(base.storage_offset()))

    def _used(self, value: int) -> None:
        """Free a value after its last reader. What comes from outside is read as often as anyone likes."""
        if value in self.uses:
            self.uses[value] -= 1
            if self.uses[value] == 0:
                self.values.pop(value, None)


class Kept:
    """A tensor that stays."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version

    def get(self) -> torch.Tensor:
        if self.tensor._version != self.version:  # autograd checks it itself only where there are no hooks
            raise RuntimeError(
                f"a tensor needed for backward, of shape {list(self.tensor.shape)}, was modified by an in-place "
                f"operation: it is at version {self.tensor._version}, expected version {self.version}"
            )
        return self.tensor


class Made:
    """A tensor that is made again. Autograd drops the handle when it is done with it; a second backward finds it."""

    __slots__ = ("entry", "frame", "tensor")

    def __init__(self, frame: Frame, entry: Entry) -> None:
        self.frame, self.entry = frame, entry
        self.tensor: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        if self.tensor is None:
            self.tensor = self.frame.take(self.entry)
        return self.tensor


class WeightView:
    """A weight or a view of it: read when it is gathered, and gathered here where it was released too early."""

    __slots__ = ("ref", "weight")

    def __init__(self, weight: Any, ref: Ref) -> None:
        self.weight, self.ref = weight, ref

    def get(self) -> torch.Tensor:
        status = getattr(self.weight, "ds_status", None)
        released = status is not None and status.name == "NOT_AVAILABLE"
        if released:
            self.weight.all_gather()
        tensor = _view_of(self.weight.data, self.ref)
        if released:
            self.weight.partition()
        return tensor


class Slot:
    """A handle of the call that is written down: what it stands for is decided when the layer's forward is over."""

    __slots__ = ("__weakref__", "handle")

    def __init__(self, handle: Kept | Made | WeightView) -> None:
        self.handle = handle


def _unpack(handle: Any) -> torch.Tensor:
    tensor: torch.Tensor = handle.handle.get() if type(handle) is Slot else handle.get()
    return tensor


def _is_made_by(entry: Entry, node: Any) -> bool:
    """Return whether `node` is of the kind that the table names, and remember its class where that says as much."""
    if entry.maker is None:
        return True
    if maker(node) != entry.maker:
        return False
    if node is None or type(node).__name__ == node.name():
        entry.node = type(node)
    return True


def _view_of(weight: torch.Tensor, ref: Ref) -> torch.Tensor:
    place = ref.place
    if weight.dtype is not ref.dtype:  # numbers in a parameter of bytes
        weight = weight.view(ref.dtype)
    if weight.shape == place.size and weight.stride() == place.stride:
        return weight
    return weight.as_strided(place.size, place.stride, int(weight.storage_offset()) + place.offset)


def _treat(site: Site) -> LayerForward:
    return LayerRunner(site)


def _refuse(cfg: CheckpointingConfig, treated: Treated, setting: Setting) -> list[str]:
    found = []
    if cfg.offload.enabled:
        found.append(
            "checkpointing.offload.enabled=true with checkpointing=budget: a table does not move what it keeps to the "
            "host; leave offload out, or use checkpointing=selective_linears with it"
        )
    if setting.tensor_parallel_size > 1:
        found.append(
            f"train.tensor_parallel_size={setting.tensor_parallel_size} with checkpointing=budget: layers that ranks "
            "share are not planned by value; use checkpointing=selective_linears, or train.tensor_parallel_size=1"
        )
    return found


def _unmet(cfg: CheckpointingConfig, observed: Observed) -> list[str]:
    """Tell which layers do not keep what their table says, to the byte; the layer's result may live on or not."""
    wrong = [
        index
        for index, layer in observed.items()
        if layer.own_bytes - layer.counts.table_bytes not in (0, layer.counts.output_bytes)
    ]
    if not wrong:
        return []
    one = observed[wrong[0]]
    return [
        f"checkpointing=budget is not in effect in layers {spans(wrong)}: layer {wrong[0]} keeps "
        f"{one.own_bytes / MIB:.3f} MiB, its table says {one.counts.table_bytes / MIB:.3f} MiB"
    ]


MECHANISM = Mechanism("budget", _treat, refuse=_refuse, unmet=_unmet)
