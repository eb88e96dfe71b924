"""Keep the results of chosen operations, recompute the rest of the layer around them.

This needs two dispatch modes of its own. torch's `create_selective_checkpoint_contexts` counts every operation: under
ZeRO-3 the gathers inside a layer differ between forward and recomputation, so it raises, or returns a Linear's result
to which DeepSpeed then adds the bias a second time. Here only listed operations are counted, and a result is dropped as
soon as anything writes to its memory.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from remat.activation_checkpointing.mechanisms import operators
from remat.activation_checkpointing.mechanisms.counters import LayerCounters
from remat.activation_checkpointing.mechanisms.lazy_matmul import OVERLOADS, PRODUCTS, DeferredMatmul
from remat.activation_checkpointing.mechanisms.mechanism import (
    LayerDecision,
    LayerForward,
    Listed,
    Mechanism,
    Mover,
    Need,
    Observed,
    Setting,
    Site,
    Treated,
    find_idle_entries,
    spans,
)
from remat.activation_checkpointing.mechanisms.recompute import Recompute
from remat.config.options import Attention, CheckpointingConfig, ConfigError, SelectiveOpsConfig, StorageDtype
from remat.model import layers
from remat.model.flops import Mode

LINEARS_OPTION = "checkpointing.selective_ops.save_linears"
NO_ATTENTION_OPERATION = {
    Attention.eager: "has no fused attention operation",
    Attention.flex_attention: "is compiled by transformers into a kernel that is no operation",
}
Key = tuple[str, str, int]  # the Linear or "", the operator, how often it ran before


def problems(cfg: SelectiveOpsConfig) -> list[str]:
    """Tell which names in `cfg.save` cannot be kept, and which lists contradict themselves. Needs no model."""
    option = "checkpointing.selective_ops.save"
    found = [f"{option}: {text}" for name in cfg.save if (text := operators.name_problem(name))]
    if {"matmul", "every_other_matmul"} <= set(cfg.save):
        found.append(f"{option}: matmul keeps all that every_other_matmul keeps; name one of the two")
    if not cfg.save and not cfg.save_linears:
        found.append(f"{option}=[]: with save_linears=[] nothing is kept; use checkpointing=full")
    return found


class SelectiveCheckpoint:
    """Selective checkpointing of one layer. `contexts()` is torch's context_fn: a new store per forward.

    Hooks on the named Linears tell when they run: the modes see operations, not modules. Raises ConfigError.
    """

    def __init__(
        self, layer: nn.Module, cfg: SelectiveOpsConfig, counts: LayerCounters, offload: Mover | None = None
    ) -> None:
        found = problems(cfg)
        if found:
            raise ConfigError("\n".join(found))
        self.counts, self.offload = counts, offload
        self.running = ""  # the Linear that runs now
        self.call = 0  # and which call of a Linear in this pass that is
        self._save = cfg.save
        self._half = "every_other_matmul" in cfg.save
        # path: the entries of the list that mean it
        self._kept_linears: dict[str, list[str]] = defaultdict(list)
        for name in cfg.save_linears:
            for path, _ in layers.find_linears(layer, name):
                self._kept_linears[path].append(name)
        self._listed: dict[str, list[str]] = {}  # operator: the entries of the list that mean it
        self._hooks = ExitStack()
        self.postponed: DeferredMatmul | None = None  # of the recomputation that runs
        self.in_linear = False  # any Linear, kept or not
        self._to_follow: nn.Module | None = layer
        self._follow_all = bool({"matmul", "every_other_matmul", *operators.MATMULS} & set(cfg.save))

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        layer, self._to_follow = self._to_follow, None
        if layer is not None:  # now, and not earlier: AutoTP replaces Linears after the policy is in place
            self._follow_linears(layer)
        store = SavedOutputs()
        return _CachingMode(self, store), _CachedMode(self, store)

    def close(self) -> None:
        self._hooks.close()

    def start(self) -> None:
        """Begin a pass: forget the Linear that an interrupted pass may have left."""
        self.running, self.call, self.in_linear, self.postponed = "", 0, False, None

    def current_call(self) -> int:
        """Return which call of a Linear runs; 0 outside the Linears."""
        return self.call if self.running else 0

    def key(self, operator: operators.Operator, ran: Counter[tuple[str, str]]) -> Key | None:
        """Return the key of this call of a listed operator; None: it is not kept. `ran` counts calls in this pass."""
        name = operator.name
        if self.running in self._kept_linears and name in operators.MATMULS:
            place = (self.running, name)
        elif self._entries_of(name):
            place = ("", name)
            if self._half and name in operators.MATMULS:
                ran["", "every_other_matmul"] += 1
                if ran["", "every_other_matmul"] % 2 == 0:
                    return None
        else:
            return None
        ran[place] += 1
        return *place, ran[place]

    def note_kept(self, store: SavedOutputs) -> None:
        self.counts.kept_outputs += len(store.entries)
        for path, operator, _ in store.entries:
            if path:
                self.counts.kept_linears[path] += 1
            for entry in self._kept_linears[path] if path else ():
                self.counts.takes_effect(entry)
            for entry in self._entries_of(operator):  # a Linear's product is a matmul that is kept as well
                self.counts.takes_effect(entry)

    def _entries_of(self, operator: str) -> list[str]:
        if operator not in self._listed:
            self._listed[operator] = [
                entry
                for entry in self._save
                if (operators.GROUPS[entry](operator) if entry in operators.GROUPS else entry == operator)
            ]
        return self._listed[operator]

    def _follow_linears(self, layer: nn.Module) -> None:
        for path, module in layer.named_modules():
            if path in self._kept_linears or layers.is_linear(module):
                before = module.register_forward_pre_hook(partial(self._enter_linear, path))
                self._hooks.callback(before.remove)
                self._hooks.callback(module.register_forward_hook(self._leave_linear).remove)

    def _enter_linear(self, path: str, *_: Any) -> None:
        self.in_linear = True
        if path in self._kept_linears:
            self.counts.kept_linears.setdefault(path, 0)
        if self._follow_all or path in self._kept_linears:
            self.running = path
            self.call += 1

    def _leave_linear(self, *_: Any) -> None:
        self.running, self.in_linear = "", False
        if self.postponed is not None:
            self.postponed.compute()


class _Mode(Mode):
    def __init__(self, results: SelectiveCheckpoint, store: SavedOutputs) -> None:
        super().__init__()
        self._results, self._store = results, store
        self._ran: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> Any:
        self._results.start()
        self._ran.clear()
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._results.start()
        super().__exit__(kind, error, trace)


class _CachingMode(_Mode):
    """The mode of the forward: it keeps results of listed operations."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator = operators.describe(func)
        key = self._results.key(operator, self._ran)
        before = operators.random_state((args, kwargs)) if key and operator.random else None
        self._store.products += operator.name in PRODUCTS
        result = func(*args, **kwargs)
        if operator.writes:
            self._note_writes(operator, args, kwargs)
        if self._results.running and self._store.entries:
            self._note_reads(operator, args, kwargs, result)
        if key is not None:
            self._keep(key, result, (args, kwargs), before)
        return result

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if error is None:
            self._store.forward_done(self._results.offload)
            self._results.note_kept(self._store)
        else:
            self._store.clear()

    def _keep(self, key: Key, result: Any, given: Any, before: torch.Tensor | None) -> None:
        leaves, spec = tree_flatten(result)
        storages = operators.storages(leaves)
        if not storages or storages & operators.storages(given):
            return  # memory of an input is not this operation's to keep
        after = None if before is None else operators.random_state(given)
        drew = before is not None and after is not None and not torch.equal(before, after)
        self._store.add(
            key,
            SavedOutput(
                call=self._results.current_call(),
                leaves=[_detached(leaf) for leaf in leaves],
                spec=spec,
                random_state=after if drew else None,
                device=operators.device_of(given),
                storages=storages,
            ),
        )

    def _note_writes(self, operator: operators.Operator, args: Any, kwargs: Any) -> None:
        for tensor in operators.written(operator, args, kwargs):
            owned = self._store.owner(tensor)
            if owned is None:
                continue
            key, entry = owned
            same_call = entry.call > 0 and entry.call == self._results.current_call()
            if (
                _finishes(operator, args) is not None
                and same_call
                and not entry.read
                and len(entry.storages) == 1
            ):
                entry.absorbed += 1
            else:
                self._store.entries.pop(key)

    def _note_reads(self, operator: operators.Operator, args: Any, kwargs: Any, result: Any) -> None:
        """Note which kept results are read. A view of one does not count, nor does an absorbed addition or sum."""
        made = operators.storages(result)
        finishing = _finishes(operator, args) is not None
        used = args[1:] if finishing else args
        for tensor in tree_leaves((used, kwargs)):
            owned = self._store.owner(tensor) if isinstance(tensor, torch.Tensor) else None
            if owned is not None and owned[1].call == self._results.current_call():
                is_view = not finishing and made == owned[1].storages
                owned[1].read |= not is_view


class _CachedMode(_Mode):
    """The mode of the recomputation: it reuses kept results. All are freed at its end: a second one reuses nothing."""

    def __init__(self, results: SelectiveCheckpoint, store: SavedOutputs) -> None:
        super().__init__(results, store)
        self._complete: dict[int, tuple[torch.Tensor, int, int]] = {}  # storage: value, writes to skip, call
        self._products = 0
        self._postponed = DeferredMatmul()

    def __enter__(self) -> Any:
        entered = super().__enter__()
        self._results.postponed = self._postponed
        return entered

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator = operators.describe(func)
        key = self._results.key(operator, self._ran)
        self._products += operator.name in PRODUCTS
        entry = self._store.entries.pop(key, None) if key else None
        if entry is not None and entry.untouched(self._results.offload):
            return self._reuse(entry)
        target = _finishes(operator, args) if self._complete else None
        if target is not None and self._already_in(target):
            return _finished(operator, target)
        self._postponed.before(func, operator, args)
        last = operator.name in PRODUCTS and self._products == self._store.products
        if last and func in OVERLOADS and self._results.in_linear:
            return self._postponed.put_off(func, operator, args, kwargs)
        return func(*args, **kwargs)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        self._postponed.forget()
        self._complete.clear()
        self._store.clear()

    def _reuse(self, entry: SavedOutput) -> Any:
        offload = self._results.offload
        for index in entry.moved:
            assert offload is not None
            entry.leaves[index] = offload.unpack(entry.leaves[index])
        if entry.random_state is not None and entry.device is not None:
            operators.set_random_state(entry.device, entry.random_state)
        if entry.absorbed:
            value = next(leaf for leaf in entry.leaves if isinstance(leaf, torch.Tensor))
            self._complete[operators.storage(value)] = (value, entry.absorbed, entry.call)
        self._results.counts.reused_outputs += 1
        return tree_unflatten(entry.leaves, entry.spec)

    def _already_in(self, target: torch.Tensor) -> bool:
        storage = operators.storage(target)
        value, writes, call = self._complete.get(storage, (target, 0, 0))
        if writes == 0 or call != self._results.current_call():
            return False
        self._complete[storage] = (value, writes - 1, call)
        return True


class SavedOutputs:
    """The results of operations that one forward keeps for its recomputation, by the key of their call.

    While it holds a tensor, the address of its storage is its identity."""

    def __init__(self) -> None:
        self.entries: dict[Key, SavedOutput] = {}
        self.products = 0  # that ran in forward
        self._by_storage: dict[int, Key] = {}

    def add(self, key: Key, entry: SavedOutput) -> None:
        self.entries[key] = entry
        self._by_storage |= dict.fromkeys(entry.storages, key)

    def owner(self, tensor: torch.Tensor) -> tuple[Key, SavedOutput] | None:
        """Return the entry that holds `tensor`'s memory."""
        key = self._by_storage.get(operators.storage(tensor))
        return None if key is None or key not in self.entries else (key, self.entries[key])

    def clear(self) -> None:
        self.entries.clear()
        self._by_storage.clear()

    def forward_done(self, offload: Mover | None) -> None:
        """Move results to the host: only now, when nothing in the layer writes any more."""
        self._by_storage.clear()
        for entry in self.entries.values():
            for index, leaf in enumerate(entry.leaves):
                handle = offload.pack(leaf) if offload and isinstance(leaf, torch.Tensor) else None
                if handle is not None:
                    entry.leaves[index] = handle
                    entry.moved.add(index)
            entry.versions = [tensor._version for tensor in entry.tensors()]


@dataclass
class SavedOutput:
    """The result of one operation, as leaves: detached tensors, handles of moved tensors, and anything else."""

    call: int  # of a Linear; 0: outside of them
    leaves: list[Any]
    spec: TreeSpec
    random_state: torch.Tensor | None
    device: torch.device | None
    storages: set[int]
    versions: list[int] = field(default_factory=list)
    moved: set[int] = field(default_factory=set)
    read: bool = False  # used by another operation of the same call: a later write may not be absorbed
    absorbed: int = 0  # writes whose result this value already contains

    def tensors(self) -> Iterator[torch.Tensor]:
        return (
            leaf
            for index, leaf in enumerate(self.leaves)
            if isinstance(leaf, torch.Tensor) and index not in self.moved
        )

    def untouched(self, offload: Mover | None) -> bool:
        """Return whether nothing wrote to it after the layer's forward."""
        if offload is not None and any(offload.edited(self.leaves[index]) for index in self.moved):
            return False
        return [tensor._version for tensor in self.tensors()] == self.versions


def _detached(leaf: Any) -> Any:
    """Detach a tensor. Without the guard the alias would have a version counter of its own, and hide later writes."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return leaf.detach()


IN_PLACE = ("aten::add_", "_c10d_functional::all_reduce_")  # the second in plans, which count such sums


def _finishes(operator: operators.Operator, args: Any) -> torch.Tensor | None:
    """Return the tensor that this operation edits in place, if it may be the last part of a Linear; else None.

    ZeRO-3's Linear adds its bias in place (deepspeed/runtime/zero/linear.py), and a tensor-parallel one sums its
    product over the ranks (RowParallel in deepspeed/module_inject/layers.py).
    """
    if operator.name in IN_PLACE:
        return args[0]
    if operator.name == "c10d::allreduce_" and len(args[0]) == 1:
        return args[0][0]
    return None


def _finished(operator: operators.Operator, target: torch.Tensor) -> Any:
    """Return what the operation returns, without running it."""
    if operator.name in IN_PLACE:
        return target
    from torch._C._distributed_c10d import FakeWork  # torch without collectives has none

    return [target], FakeWork().boxed()  # work that is done


def _treat(site: Site) -> LayerForward:
    saving = SelectiveCheckpoint(site.layer, site.setup.cfg.selective_ops, site.counts, site.offload)
    site.setup.cleanup.callback(saving.close)
    return site.expect_recomputation(Recompute(site.setup.cfg, context_fn=saving.contexts))


def _refuse(cfg: CheckpointingConfig, treated: Treated, setting: Setting) -> list[str]:
    found = problems(cfg.selective_ops)
    if setting.attention in NO_ATTENTION_OPERATION and "attention" in cfg.selective_ops.save:
        found.append(
            f"checkpointing.selective_ops.save keeps attention, but model.attention={setting.attention} "
            f"{NO_ATTENTION_OPERATION[setting.attention]}: use model.attention=sdpa, or leave attention off the "
            "list and add matmul or save_linears"
        )
    if cfg.offload.enabled and cfg.offload.dtype is not StorageDtype.same:
        found.append(
            f"checkpointing.offload.dtype={cfg.offload.dtype} with checkpointing=selective_ops: kept results stay "
            "exact, so it would only touch the layer's input; set it to same"
        )
    return found


def _needs(cfg: CheckpointingConfig) -> list[Need]:
    return [partial(layers.find_linears, name=name) for name in cfg.selective_ops.save_linears]


def _unmet(cfg: CheckpointingConfig, observed: Observed) -> list[str]:
    ops = cfg.selective_ops
    return _find_lost_linears(observed, ops.save_linears) or find_idle_entries(
        [
            Listed(
                "checkpointing.selective_ops.save",
                # ranks that do not share layers have nothing to communicate inside them
                [name for name in ops.save if name != "communication"],
                "the operator never ran in a forward (eager attention, and attention with dropout on a CPU, have no "
                "fused operation), or its result is written to later",
            ),
            Listed(LINEARS_OPTION, ops.save_linears, "the Linear never ran, or its result is written to later"),
        ],
        observed,
    )


def lists_attention(cfg: CheckpointingConfig, decisions: Sequence[LayerDecision]) -> bool:
    """Return whether some layer is to keep the result of a fused attention operation."""
    return "attention" in cfg.selective_ops.save and any(d.mechanism == MECHANISM for d in decisions)


def find_missing_attention(counts: Sequence[LayerCounters]) -> str:
    """Tell, after a forward on meta tensors as a CPU would run it, that no layer ran a fused attention operation."""
    if any(layer.in_effect.get("attention") for layer in counts):
        return ""
    return (
        "checkpointing.selective_ops.save keeps attention, but on a CPU no layer of this model runs a fused attention "
        "operation (with attention dropout, or values narrower than queries, there is none): leave attention off the "
        "list and add matmul or save_linears, or use checkpointing=full"
    )


def _find_lost_linears(observed: Observed, listed: list[str]) -> list[str]:
    """Check that some named Linears ran, and that something was kept of each that did (an expert may not run)."""
    if not listed:
        return []
    lost = {
        index: [path for path, kept in layer.counts.kept_linears.items() if not kept]
        for index, layer in observed.items()
    }
    without = [
        index
        for index, layer in observed.items()
        if lost[index] or not (layer.counts.kept_linears or layer.counts.empty)  # empty: it does nothing
    ]
    if not without:
        return []
    names = sorted({path for paths in lost.values() for path in paths})
    what = (
        f"nothing was kept of {', '.join(names)}: their results are written to" if names else "none of them ran"
    )
    return [f"{LINEARS_OPTION}={listed}: {what} (layers {spans(without)}); leave them out"]


MECHANISM = Mechanism(
    "selective_ops",
    _treat,
    refuse=_refuse,
    needs=_needs,
    unmet=_unmet,
    runs_layer_again=True,
    stops_early=True,
)
