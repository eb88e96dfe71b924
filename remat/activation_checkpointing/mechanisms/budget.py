"""Keep the values that a layer's table names, on the device or on the host, and recompute the rest from them.

The first call of a layer is recorded (`tables/graph.py`), with everything kept until its forward is over. A layer that
looks like an earlier one under the same table takes what that one has learnt: its first call is recorded only to check
that it does the same. From then on the n-th tensor that autograd saves is entry n. It stays, or is a weight that is
read again, or moves to host memory and back (`offload.py`), or backward recomputes it on demand by the recorded
operations. Later calls run without a dispatch mode. Every saved tensor is checked against its entry; a call with
arguments of another size or kind is recorded anew.
`planning/budget.py` makes the tables.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from remat.activation_checkpointing.mechanisms.arguments import Replayable
from remat.activation_checkpointing.mechanisms.counters import PolicyNotApplied
from remat.activation_checkpointing.mechanisms.mechanism import (
    Mechanism,
    Observed,
    Setting,
    Site,
    Treated,
    spans,
)
from remat.activation_checkpointing.mechanisms.offload import row_of, stored_bytes
from remat.activation_checkpointing.mechanisms.saved_tensors import expect_unedited, read_gathered
from remat.activation_checkpointing.mechanisms.selective_modules import wrap_forward
from remat.activation_checkpointing.mechanisms.tables.code import write_makers
from remat.activation_checkpointing.mechanisms.tables.graph import (
    Geometry,
    Graph,
    Recorder,
    Ref,
    Value,
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
    choose_moved,
    compile_table,
    sign,
)
from remat.config.options import CheckpointingConfig, StorageDtype
from remat.config.units import MIB
from remat.machine import rng
from remat.model.layers import describe

GRAPHS = "graphs"  # in Setup.shared: the graph of each layer's first call, by index
LEARNT = "learnt"  # in Setup.shared: the program of the first layer under each table, by kind of call
PROGRAMS = "programs"  # in Setup.shared: programs that equal layers under equal tables share
MOST_SHAPES = 64  # shapes of arguments whose programs a layer remembers: lengths may vary without end


def remember(known: dict[Any, Program], key: Any, program: Program) -> None:
    """Put `program` into `known`; if there are MOST_SHAPES already, drop the oldest."""
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
        self._recorder: Recorder | None = None  # of the call that runs
        self._looks = ""
        self.again = site.setup.scope.inside(site.index, recomputing=True)

    def __call__(self, call: Replayable, *args: Any) -> Any:
        cast: tuple[Any, ...] = ()
        if torch._C._is_any_autocast_enabled():
            kinds = ("cpu", "cuda")
            cast = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
        key = sign(args), sign(call.keywords), self.layer.training, cast
        program = self.programs.get(key)
        if program is not None:
            return self._run(program, call, args)
        return self._run_first(key, call, args)

    def _run_first(self, key: Any, call: Replayable, args: tuple[Any, ...]) -> Any:
        """Run a call of a kind that the layer has not had yet."""
        if not self._looks:
            self._looks = describe(self.layer, self.site.index)
        shared, kind = self.site.setup.shared, self._kind(key, call, args)
        known = shared.setdefault(GRAPHS, {}).get(self.site.index)
        if known is not None and known.call == kind:  # from an earlier plan
            return self._run(self._take(key, self._compile(known)), call, args)
        learnt = shared.setdefault(LEARNT, {})
        like = (self.table, kind)
        if like in learnt:
            return self._run_as(learnt[like], key, kind, call, args)
        output = self._learn(key, kind, call, args)
        remember(learnt, like, self.programs[key])
        return output

    def _kind(self, key: Any, call: Replayable, args: tuple[Any, ...]) -> Any:
        """Return what layers and their calls must have in common to do the same, as far as it shows before a call."""
        makers = tuple(maker(tensor.grad_fn) for _, tensor in find_arguments(args, call.keywords))
        return self._looks, key, makers

    def _take(self, key: Any, program: Program) -> Program:
        """Make `program` the layer's own for calls with this key."""
        remember(self.programs, key, program)
        for side, name in program.taps:
            self._listen(side, name)
        return program

    @property
    def gathers(self) -> bool:
        """Return whether weights are gathered only while the modules that own them run (ZeRO-3)."""
        return self.site.setup.zero_stage == 3

    @property
    def weights(self) -> list[Any]:
        if not self._weights:  # now, and not earlier: DeepSpeed partitions them after the policy is in place
            self._weights = find_weights(self.layer)
        return self._weights

    def _run(self, program: Program, call: Replayable, args: tuple[Any, ...]) -> Any:
        self.frame = frame = Frame(self, program, args, call.keywords)
        self._calls.clear()
        coming = iter(program.entries)
        try:
            with saved_tensors_hooks(self._packer(frame, coming), _unpack):
                output = call(*args)
        finally:
            self.frame = None
        lacking = len(list(coming))
        if lacking:
            total = len(program.entries)
            raise self._mismatch(f"saved {total - lacking} tensors, where its table has {total}")
        self._count(program)
        return output

    def _packer(self, frame: Frame, coming: Iterator[Entry]) -> Callable[[torch.Tensor], Any]:
        """Return the function that treats what autograd saves in one call, each tensor by its entry in `coming`."""
        program, gathers = frame.program, self.gathers
        make, weight, move = Fate.make, Fate.weight, Fate.move

        def pack(tensor: torch.Tensor) -> Any:
            entry = next(coming, None)
            if entry is None:
                raise self._mismatch(f"saves more than the {len(program.entries)} tensors of its table")
            if tensor.dtype is not entry.dtype or tensor.shape != entry.size:
                self._check(program, entry, tensor)
            fate = entry.fate
            if fate is make or fate is move or (fate is weight and gathers):
                # Backward gets another tensor than this one, so this one must be the one of the table.
                if type(tensor.grad_fn) is not entry.node:
                    self._check(program, entry, tensor)
                if fate is weight:
                    return WeightView(self.weights[entry.weight], entry.ref, self.site.setup.model)
                if entry.store:
                    frame.put(entry.value, tensor)
                return [frame, entry, None]
            if entry.maker is not None:
                tensor = tensor.detach()  # an output that is held by its own grad_fn is never freed
            if entry.store:
                frame.put(entry.value, tensor)
            if fate is weight:
                frame.values[entry.slot] = tensor
            return tensor, tensor._version

        return pack

    def _run_as(self, program: Program, key: Any, kind: Any, call: Replayable, args: tuple[Any, ...]) -> Any:
        """Run a first call by the program of a layer that looks alike, and record it to see whether it does the same.

        Otherwise run it again by its own program.
        """
        states, counts, moved_bytes = rng.get(), self.site.counts, self.site.counts.moved_bytes
        for side, name in program.taps:
            self._listen(side, name)
        self.frame = frame = Frame(self, program, args, call.keywords)
        self._calls.clear()
        pack_one = self._packer(frame, iter(program.entries))
        slots: list[weakref.ref[Slot]] = []

        def pack(number: int, tensor: torch.Tensor) -> Slot:
            try:
                slot = Slot(pack_one(tensor))
            except PolicyNotApplied:  # as the recorded graph will tell
                slot = Slot((tensor.detach(), tensor._version))
            slots.append(weakref.ref(slot))
            return slot

        self._recorder = recorder = Recorder(self.layer, find_arguments(args, call.keywords), holds=False)
        try:
            output = recorder.run(self.layer, partial(call, *args), pack, _unpack)
        finally:
            self.frame = self._recorder = None
        recorder.graph.call = (
            kind  # not that of the program's graph: layers of several kinds may share a program
        )
        own = self._take(key, self._program_of(recorder.graph, slots))
        if own is program:
            self._count(program)
            return output
        rng.put(states)
        counts.moved_bytes = moved_bytes
        output = self._run(own, call, args)
        counts.recomputations -= isinstance(call, Replayable)  # it counts each run after the first as one
        return output

    def _program_of(self, graph: Graph, slots: Sequence[weakref.ref[Slot]]) -> Program:
        """Return the program of a recorded call. `slots`: what autograd still holds of it, in order."""
        for save, slot in zip(graph.saves, slots, strict=True):
            save.dead = slot() is None  # autograd has dropped that branch: nothing uses it
        graph.finish()
        self.site.setup.shared.setdefault(GRAPHS, {}).setdefault(self.site.index, graph)
        return self._compile(graph)

    def unrecorded(self) -> AbstractContextManager[None]:
        """Return a context whose operations are not the layer's own."""
        return self._recorder.paused() if self._recorder else nullcontext()

    def _count(self, program: Program) -> None:
        self.site.counts.table_bytes = program.kept_bytes
        self.site.counts.table_moved_bytes += program.moved_bytes

    def _check(self, program: Program, entry: Entry, tensor: torch.Tensor) -> None:
        """Raise PolicyNotApplied for a saved tensor that is not the one of the table."""
        changed = (tensor.dtype is not entry.dtype or tensor.shape != entry.size) and not entry.any_size
        if changed or not _is_made_by(entry, tensor.grad_fn):
            raise self._mismatch(
                f"saves {tuple(tensor.shape)} {tensor.dtype} of {maker(tensor.grad_fn) or 'nothing'!r} as number "
                f"{program.entries.index(entry)}, where its table has {entry.size} {entry.dtype} of "
                f"{entry.maker or 'nothing'!r}"
            )

    def _learn(self, key: Any, kind: Any, call: Replayable, args: tuple[Any, ...]) -> Any:
        """Record a call: keep everything until the layer's forward is over, then carry out its table."""
        slots: list[weakref.ref[Slot]] = []

        def pack(number: int, tensor: torch.Tensor) -> Slot:
            tensor = tensor if tensor.grad_fn is None else tensor.detach()
            slot = Slot((tensor, tensor._version))
            slots.append(weakref.ref(slot))
            return slot

        recorder = Recorder(self.layer, find_arguments(args, call.keywords))
        output = recorder.run(self.layer, partial(call, *args), pack, _unpack)
        recorder.graph.call = kind
        program = self._take(key, self._program_of(recorder.graph, slots))
        frame = Frame(self, program, args, call.keywords)
        for (side, name), taps in program.taps.items():
            for times, leaf, value in taps:
                frame.put(value, recorder.tapped[side, name, times, leaf])
        recorder.tapped.clear()  # autograd holds the hook, and so the recorder, as long as the graph
        for reference, entry in zip(slots, program.entries, strict=True):
            alive = reference()
            if alive is None:
                continue
            if entry.store:
                frame.put(entry.ref.value, _unpack(alive))
            if entry.fate in (Fate.make, Fate.move):
                alive.handle = [frame, entry, None]
            elif entry.fate is Fate.weight and self.gathers:
                alive.handle = WeightView(self.weights[entry.weight], entry.ref, self.site.setup.model)
        self._count(program)
        return output

    def _compile(self, graph: Graph) -> Program:
        operations = tuple((op.func, op.ins, tuple(op.made), op.fixed, repr(op.args)) for op in graph.ops)
        saves = tuple((save.ref, save.maker, save.dead) for save in graph.saves)
        key = self.table, operations, saves, tuple(value.name for value in graph.values)
        known: dict[Any, Program] = self.site.setup.shared.setdefault(PROGRAMS, {})
        if key not in known:
            kept = choose_kept(graph, self.table)
            program = compile_table(graph, kept, choose_moved(graph, self.table, kept))
            program.rows = {value: row_of_value(graph.values[value]) for value in program.moved}
            dtype = self.site.setup.cfg.offload.dtype
            program.moved_bytes = sum(host_bytes(graph.values[value], dtype) for value in program.moved)
            remember(known, key, program)
        return known[key]

    def _mismatch(self, text: str) -> PolicyNotApplied:
        return PolicyNotApplied(
            f"checkpointing=budget: {self.site.name} {text}: it does not do the same each time it is given the same; "
            "give such layers another policy with checkpointing.layers (full, say)"
        )

    def _listen(self, side: str, name: str) -> None:
        """Register a hook that takes values where they enter a module (`side` "in") or leave it ("out")."""
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
                    frame.put(value, tree_leaves(tree)[leaf])

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
        """Call `run` inside the hooks of `modules`, which gather their weights unless these are gathered already.

        DeepSpeed's coordinator fetches, waits, notes the order and releases, as for a forward.
        """
        if not modules:
            return run()
        module, rest = modules[0], partial(self.with_weights, modules[1:], run)
        if not self.gathers or self._is_there(module):
            return rest()
        pending = module.__dict__.get("ds_grads_remaining")
        self._open.add(module)
        try:
            with wrap_forward(module, lambda *_: rest()):
                module()
        finally:
            self._open.discard(module)
            # the hook before a forward makes it 0, and the module would never be released
            if pending is not None:
                module.ds_grads_remaining = pending
        return None

    def _is_there(self, module: nn.Module) -> bool:
        """Return whether the weights of `module` are gathered for its own backward, or for good.

        Their status alone does not tell: what happens to be prefetched must not change the order that ZeRO-3 learnt.
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
    """The state of one forward of a layer until its backward is done: kept values, and how many readers they have left.

    `values` has a place for each value of the program's graph, then for the views of them that are read (`code.py`).
    `moved` has what is in host memory, until its last reader is done.
    """

    __slots__ = ("began", "constants", "moved", "program", "runner", "uses", "values", "versions")

    def __init__(
        self, runner: LayerRunner, program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.runner, self.program, self.began = runner, program, False
        self.values: list[torch.Tensor | None] = [None] * program.places
        self.versions: dict[int, int] = {}  # of values that were kept, not recomputed
        self.moved: dict[int, Any] = {}
        self.uses = program.readers.copy()
        self.constants = [
            (runner.weights[place], runner.weights[place]._version) for place in program.constants
        ]
        for value, (root, *path) in program.arguments.items():
            given: Any = args if root == "args" else kwargs
            for key in path:
                given = given[key]
            self.put(value, given)

    def put(self, value: int, tensor: torch.Tensor) -> None:
        """Keep `value` for its readers in backward, in host memory if the table says so."""
        if value in self.program.moved:
            mover = self.runner.site.offload
            assert mover is not None
            with self.runner.unrecorded():
                self.moved[value] = mover.move(tensor, self.program.rows[value])
            return
        if tensor.requires_grad:
            tensor = tensor.detach()  # an output that is held by its own grad_fn is never freed
        self.values[value], self.versions[value] = tensor, tensor._version

    def bring(self, value: int) -> torch.Tensor:
        """Return a moved value on the device, with the size and stride that it was taken with."""
        mover = self.runner.site.offload
        assert mover is not None
        tensor = mover.unpack(self.moved[value])
        if self.program.graph.values[value].kind != "arg":
            tensor = tensor.as_strided(*self.program.canon[value])
        self.values[value] = tensor
        return tensor

    def take(self, entry: Entry) -> torch.Tensor:
        """Return a saved tensor, after running the operations that make it."""
        if not self.began:
            self._begin()
        value, slot, values, uses = entry.value, entry.slot, self.values, self.uses
        base = values[value]
        if base is None:
            if value in self.moved:
                self.bring(value)
            else:
                self._make_for_autograd(value)
        elif value in self.versions and base._version != self.versions[value]:
            self.refuse_edit(value)
        tensor = values[slot]
        if tensor is None:
            tensor = self.view(slot)
        uses[value] -= 1
        if not uses[value]:
            for place in self.program.seen[value]:
                values[place] = None
            self.moved.pop(value, None)
        return tensor

    def _begin(self) -> None:
        self.began, site, program = True, self.runner.site, self.program
        if not program.makers:
            program.makers = write_makers(program, gathers=self.runner.gathers)
        site.counts.expected += 1
        site.counts.is_reached()
        site.counts.recomputations += 1
        site.counts.takes_effect("operations made again", len(program.steps))
        if any(tensor._version != version for tensor, version in self.constants):
            raise RuntimeError(
                f"checkpointing=budget: layer {site.index} needs a buffer in backward that was modified by an "
                "in-place operation after its forward"
            )

    def _make_for_autograd(self, value: int) -> None:
        with self.runner.again:
            if torch.is_grad_enabled():  # as where somebody takes a gradient of a gradient
                with torch.no_grad():
                    self.make(value)
            elif torch._C._is_any_autocast_enabled():
                with torch._C._DisableAutocast():
                    self.make(value)
            else:
                self.make(value)

    def make(self, value: int) -> None:
        """Run the operation that makes `value`, and those that it needs."""
        step = self.program.steps[value]
        run = self.program.makers[value]
        if step.owners and self.runner.gathers:
            self._prepare(step)
            self.runner.with_weights(self.runner.holders(step), partial(run, self))
        else:
            run(self)

    def _prepare(self, step: Step) -> None:
        """Make the inputs of `step` that other modules compute, so that one module is gathered at a time, and once."""
        for value in step.inputs:
            if self.values[value] is not None:
                continue
            if value in self.moved:
                self.bring(value)
                continue
            before = self.program.steps.get(value)
            if before is not None and step.owners and self.runner.holders(before) == self.runner.holders(step):
                self._prepare(before)
            else:
                self.make(value)

    def refuse_edit(self, value: int) -> None:
        raise RuntimeError(
            f"checkpointing=budget: layer {self.runner.site.index} needs {self.program.graph.values[value].name!r} "
            "in backward, which was modified by an in-place operation after it was kept"
        )

    def copy(self, leaf: Ref, becomes: int) -> torch.Tensor:
        """Copy what an operation will edit in place: the value before the edit may be kept, or have other readers."""
        base = self.values[leaf.value]
        assert base is not None
        flat = base.as_strided((base.untyped_storage().nbytes() // base.element_size(),), (1,), 0).clone()
        if self.uses[becomes]:
            self.values[becomes] = flat.as_strided(*self.program.canon[becomes])
        return flat.as_strided(*self._in_storage(leaf.value, leaf.place, base))

    def view(self, slot: int) -> torch.Tensor:
        """Make the view for `slot`. A view of a gathered weight is not stored: it lives no longer than it is used."""
        ref = self.program.views[slot]
        value = self.program.graph.values[ref.value]
        if value.kind == "weight":
            tensor = _view_of(self.runner.weights[value.where].data, ref)
            if self.runner.gathers:
                return tensor
        else:
            base = self.values[ref.value]
            assert base is not None
            tensor = base.as_strided(*self._in_storage(ref.value, ref.place, base))
        self.values[slot] = tensor
        return tensor

    def _in_storage(self, value: int, place: Geometry, base: torch.Tensor) -> Geometry:
        """Return `place` with an offset from the start of the storage; an argument's counts from the argument."""
        if self.program.graph.values[value].kind != "arg":
            return place
        return place._replace(offset=place.offset + int(base.storage_offset()))


class WeightView:
    """A weight or a view of it, read in backward while it is gathered. `model`: see SavedTensors."""

    __slots__ = ("model", "ref", "weight")

    def __init__(self, weight: Any, ref: Ref, model: nn.Module) -> None:
        self.weight, self.ref, self.model = weight, ref, model

    def get(self) -> torch.Tensor:
        return read_gathered(self.weight, self.model, partial(_view_of, ref=self.ref))


class Slot:
    """A handle of the recorded call; its content is decided when the layer's forward is over."""

    __slots__ = ("__weakref__", "handle")

    def __init__(self, handle: Any) -> None:
        self.handle = handle


def _unpack(handle: Any) -> torch.Tensor:
    """Return the tensor of a handle. Handles are plain containers, because a layer makes dozens of them a step.

    [frame, entry, None or the tensor]: it is recomputed or moved back; it stays in the handle, for a second backward,
    until autograd drops the handle. (tensor, version): it was kept.
    """
    if type(handle) is Slot:
        handle = handle.handle
    if type(handle) is list:
        frame, entry, made = handle
        if made is None:
            made = handle[2] = frame.take(entry)
        tensor: torch.Tensor = made
        return tensor
    if type(handle) is WeightView:
        return handle.get()
    return expect_unedited(handle)


def _is_made_by(entry: Entry, node: Any) -> bool:
    """Return whether `node` is of the kind that the table names; remember its class if that tells the kind."""
    if entry.maker is None:
        return True
    if maker(node) != entry.maker:
        return False
    if node is None or type(node).__name__ == node.name():
        entry.node = type(node)
    return True


def _view_of(weight: torch.Tensor, ref: Ref) -> torch.Tensor:
    place = ref.place
    if weight.dtype is not ref.dtype:  # a parameter of bytes that holds other numbers
        weight = weight.view(ref.dtype)
    if weight.shape == place.size and weight.stride() == place.stride:
        return weight
    return weight.as_strided(place.size, place.stride, int(weight.storage_offset()) + place.offset)


def row_of_value(value: Value) -> int:
    """Return how many numbers of `value` share a scale when it is stored in 8 bits; 0: it is stored as it is."""
    if not value.differentiable:
        return 0
    size, stride, offset = value.canon
    return row_of(size, stride, offset, value.nbytes // value.dtype.itemsize)


def host_bytes(value: Value, dtype: StorageDtype) -> int:
    """Return the bytes that `value` takes on the host when it is moved."""
    return stored_bytes(value.nbytes, value.dtype.itemsize, row_of_value(value), dtype)


def _refuse(cfg: CheckpointingConfig, treated: Treated, setting: Setting) -> list[str]:
    found = []
    if setting.tensor_parallel_size > 1:
        found.append(
            f"train.tensor_parallel_size={setting.tensor_parallel_size} with checkpointing=budget: layers that ranks "
            "share are not planned by value; use checkpointing=selective_linears, or train.tensor_parallel_size=1"
        )
    return found


def _unmet(cfg: CheckpointingConfig, observed: Observed) -> list[str]:
    """Tell which layers keep or move other bytes than their table says; the layer's own result may live on or not."""
    wrong = [
        index
        for index, layer in observed.items()
        if layer.own_bytes - layer.table_bytes not in (0, layer.output_bytes)
    ]
    unmoved = [
        index for index, layer in observed.items() if layer.counts.moved_bytes != layer.counts.table_moved_bytes
    ]
    found = []
    if wrong:
        one = observed[wrong[0]]
        found.append(
            f"checkpointing=budget is not in effect in layers {spans(wrong)}: layer {wrong[0]} keeps "
            f"{one.own_bytes / MIB:.3f} MiB, its table says {one.table_bytes / MIB:.3f} MiB"
        )
    if unmoved:
        counts = observed[unmoved[0]].counts
        found.append(
            f"checkpointing=budget is not in effect in layers {spans(unmoved)}: layer {unmoved[0]} moved "
            f"{counts.moved_bytes / MIB:.3f} MiB to host memory, where its table says "
            f"{counts.table_moved_bytes / MIB:.3f} MiB"
        )
    return found


MECHANISM = Mechanism("budget", LayerRunner, refuse=_refuse, unmet=_unmet)
