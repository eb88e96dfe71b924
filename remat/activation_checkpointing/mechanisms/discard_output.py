"""Discard the outputs of norms and activation functions and recompute them (Megatron-LM's CheckpointWithoutOutput).

Recomputing only a norm saves no memory, because the projection behind it keeps the norm's output. Here the output is
freed as soon as the projection has run, with everything that the norm saved inside; backward runs the norm once more
and provides both again. Megatron resizes the storage and fills it later. Here autograd's saved tensors are replaced by
references to the call, which is bit-equal, survives a second backward, and needs no tensor for a hook.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_unflatten

from remat.activation_checkpointing.mechanisms.counters import LayerCounters, PolicyNotApplied, Scope
from remat.activation_checkpointing.mechanisms.mechanism import (
    LayerForward,
    Listed,
    Mechanism,
    Need,
    Observed,
    Setting,
    Site,
    Treated,
    find_idle_entries,
    run_as_it_is,
)
from remat.activation_checkpointing.mechanisms.operators import Version
from remat.activation_checkpointing.mechanisms.selective_modules import refuse_input_noise, wrap_forward
from remat.config.options import CheckpointingConfig, ConfigError
from remat.model import layers

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]
Place = int | tuple[torch.Size, tuple[int, ...], int]  # size, stride, offset from the output's own
RANDOM = (nn.RReLU, nn.modules.dropout._DropoutNd)
# roles whose modules draw no random numbers by function calls, which no module would show
DISCARDABLE = "norm", "activation"


def problems(asked: list[str]) -> list[str]:
    """Tell why the outputs of these roles cannot be discarded. Needs no model."""
    option = "checkpointing.discard_modules"
    if not asked:
        return [
            f"{option}=[]: nothing is discarded; name {' or '.join(DISCARDABLE)}, or use checkpointing=none"
        ]
    others = [role for role in asked if role not in DISCARDABLE]
    if not others:
        return []
    return [
        f"{option}={asked}: the output of {', '.join(others)} cannot be discarded, only that of "
        f"{' and '.join(DISCARDABLE)}: a region runs again without its random state; leave it out, or name it in "
        "checkpointing.recompute_modules with checkpointing=selective_modules"
    ]


class OutputDiscarding:
    """Output discarding in one layer: `pack` refers to what autograd saves, `unpack` returns it in backward."""

    def __init__(
        self, layer: nn.Module, roles_: list[str], index: int, counts: LayerCounters, scope: Scope
    ) -> None:
        """`roles_`: norm, activation or both. Raises ConfigError where their modules draw random numbers."""
        self.index, self.counts, self.scope = index, counts, scope
        self.forward: _LayerForward | None = None  # while the layer runs
        self.capture: Pack | None = None  # while a region runs again
        self.again: nn.Module | None = None  # the module of that region
        self._undo = ExitStack()
        for role in roles_:
            for name, module in layers.find_modules(layer, role, "checkpointing.discard_modules"):
                random = [part for part in module.modules() if isinstance(part, RANDOM)]
                if random:
                    raise ConfigError(
                        f"checkpointing.discard_modules={role}: {name} draws random numbers "
                        f"({type(random[0]).__name__}); use checkpointing=selective_modules"
                    )
                # Inside ZeRO-3's hooks: what they do to inputs and outputs is not part of the region.
                self._undo.enter_context(wrap_forward(module, partial(self._call, name, role, module)))

    @contextmanager
    def around_forward(self, keep: Pack, restore: Unpack) -> Iterator[None]:
        """Wrap one forward of the layer. `keep` and `restore` store the inputs of its norms and activations.

        Raises PolicyNotApplied if the layer edited an output in place: backward would see the output before the edit.
        """
        self.forward = forward = _LayerForward(keep, restore)
        try:
            yield
        finally:
            self.forward = None
        for region in forward.regions:
            region.check()
            freed = region.freed_bytes()
            self.counts.discarded_bytes += freed
            self.counts.takes_effect(region.role, freed)

    @property
    def is_running(self) -> bool:
        """Return whether a region runs for the first time: then all that autograd saves is its own, weights too."""
        return self.forward is not None and self.forward.running is not None

    def pack(self, tensor: torch.Tensor) -> Handle | None:
        """Return a handle to the region that made `tensor`, inside or as its output; None: no region did."""
        forward = self.forward
        if forward is None:
            return None
        if forward.running:
            return forward.running.inside(tensor)
        region = forward.outputs.get(tensor.untyped_storage()._cdata)
        return region.of_output(tensor) if region else None

    def unpack(self, handle: Handle) -> torch.Tensor:
        """Return the tensor; the first call for a region recomputes all its tensors."""
        region = handle.region
        if not region.wanted:  # what only a dead branch saved is never asked for
            region.wanted = True
            self.counts.expected += 1
            self.counts.is_reached()
        if handle.value is None:
            region.run_again()
        assert handle.value is not None
        return handle.value

    def close(self) -> None:
        """Leave the modules as they were."""
        self._undo.close()

    def _call(
        self, name: str, role: str, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if self.capture:
            self.counts.recomputations += module is self.again
            with self.scope.later_run(self.index), saved_tensors_hooks(self.capture, _never):
                return run(*args, **kwargs)
        forward = self.forward
        # another layer's turn, a second forward, or a norm inside a norm
        if forward is None or forward.running:
            return run(*args, **kwargs)
        region = Region(self, name, role, module, run, args, kwargs)
        forward.regions.append(region)
        forward.running = region
        try:
            output = run(*args, **kwargs)
        finally:
            forward.running = None
        if region.has_output(output):
            forward.outputs[output.untyped_storage()._cdata] = region
        return output


class _LayerForward:
    """One forward of a layer. `regions` keeps every storage's address from being given to another until it ends."""

    def __init__(self, keep: Pack, restore: Unpack) -> None:
        self.keep, self.restore = keep, restore
        self.regions: list[Region] = []
        self.outputs: dict[int, Region] = {}
        self.running: Region | None = None


class Handle:
    """One saved tensor of a region: the `place`-th one inside, or a view of its output.

    Holds the tensor from the region's second run until autograd drops the handle, as it would have held the original.
    """

    def __init__(self, region: Region, place: Place) -> None:
        self.region, self.place = region, place
        self.value: torch.Tensor | None = None


class Region:
    """One call of a norm or an activation function."""

    def __init__(
        self,
        owner: OutputDiscarding,
        name: str,
        role: str,
        module: nn.Module,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        assert owner.forward is not None
        self.name, self.role = name, role
        self._owner, self._module, self._run, self._restore = owner, module, run, owner.forward.restore
        leaves, self._tree = tree_flatten((args, kwargs))
        keep = owner.forward.keep
        self._inputs: list[Any] = [
            _Input(keep(leaf), leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._elsewhere = {t.untyped_storage()._cdata for t in [*tensors, *module.parameters()]}
        self._versions = [Version(tensor) for tensor in tensors]
        self._autocast = autocast_of_now(tensors[0].device.type) if tensors else nullcontext
        self.wanted = False  # by backward
        self._saves = 0
        self._handles: list[weakref.ref[Handle]] = []
        self._gone: dict[int, tuple[StorageWeakRef, int]] = {}  # storages that autograd would have kept
        self._output: tuple[StorageWeakRef, torch.dtype, int] | None = None  # with its storage offset

    def inside(self, tensor: torch.Tensor) -> Handle:
        """Return a handle for `tensor`, which autograd saves while the region runs."""
        self._saves += 1
        if tensor.untyped_storage()._cdata not in self._elsewhere:
            self._note(tensor)
        return self._handle(self._saves - 1)

    def has_output(self, output: Any) -> bool:
        """Return whether `output` can be discarded. Raises PolicyNotApplied when the region edited its input."""
        self.check()
        if not isinstance(output, torch.Tensor) or output.untyped_storage()._cdata in self._elsewhere:
            return False
        self._output = StorageWeakRef(output.untyped_storage()), output.dtype, int(output.storage_offset())
        self._versions = [Version(output)]
        return True

    def of_output(self, tensor: torch.Tensor) -> Handle | None:
        """Return a handle for `tensor`, a view of the output, which autograd saves later in the layer."""
        assert self._output is not None
        _, dtype, offset = self._output
        if tensor.dtype != dtype:
            return None
        self._note(tensor)
        return self._handle((tensor.size(), tensor.stride(), int(tensor.storage_offset()) - offset))

    def check(self) -> None:
        if any(version.changed() for version in self._versions):
            edited = (
                "output is edited in place later in the layer" if self._output else "input is edited in place"
            )
            raise PolicyNotApplied(
                f"checkpointing.discard_modules: in layer {self._owner.index} the {edited} ({self.name}; Mixtral does "
                f"this with router_jitter_noise > 0), so it cannot be made again; leave the role {self.role} out or "
                "use checkpointing=full"
            )

    def freed_bytes(self) -> int:
        """Return the bytes that autograd would have kept and that are free."""
        return sum(nbytes for storage, nbytes in self._gone.values() if storage.expired())

    def run_again(self) -> None:
        """Run the region again to fill the handles that autograd still holds."""
        handles = [handle for ref in self._handles if (handle := ref()) is not None]
        inside = {handle.place: handle for handle in handles if isinstance(handle.place, int)}
        args, kwargs = tree_unflatten([self._input(leaf) for leaf in self._inputs], self._tree)
        saves = 0

        def capture(tensor: torch.Tensor) -> None:
            nonlocal saves
            handle, saves = inside.get(saves), saves + 1
            if handle:
                handle.value = tensor.detach()

        owner = self._owner
        owner.capture, owner.again = capture, self._module
        try:
            with torch.enable_grad(), self._autocast(), owner.scope.inside(owner.index, recomputing=True):
                output = self._again(args, kwargs)
        finally:
            owner.capture = owner.again = None
        if saves != self._saves:
            raise RuntimeError(
                f"checkpointing.discard_modules: layer {owner.index}'s {self.name} saved {self._saves} tensors "
                f"in forward and {saves} when it ran again; leave its role out"
            )
        for handle in handles:
            if not isinstance(handle.place, int):
                size, stride, offset = handle.place
                handle.value = output.detach().as_strided(size, stride, output.storage_offset() + offset)
        self._inputs = []  # every handle has its tensor now

    def _input(self, leaf: Any) -> Any:
        if not isinstance(leaf, _Input):
            return leaf
        return self._restore(leaf.kept).detach().requires_grad_(leaf.requires_grad)

    def _handle(self, place: Place) -> Handle:
        handle = Handle(self, place)
        self._handles.append(weakref.ref(handle))
        return handle

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._gone:  # the reference keeps the address from being given to another
            self._gone[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def _again(self, args: Any, kwargs: Any) -> Any:
        """Run the region, by the module itself if ZeRO-3's hooks must gather its weights.

        If the weights are gathered already, the hooks must not run: they would release them in the module's backward.
        """
        status = [
            parameter.ds_status.name
            for parameter in self._module.parameters()
            if hasattr(parameter, "ds_status")
        ]
        if all(name == "AVAILABLE" for name in status):
            return self._owner._call(self.name, self.role, self._module, self._run, args, kwargs)
        return self._module(*args, **kwargs)


@dataclass(frozen=True)
class _Input:
    kept: Any
    requires_grad: bool


def autocast_of_now(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that makes the present autocast context, to be entered again in backward."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext
    return partial(
        torch.autocast,
        device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )


def _never(packed: Any) -> torch.Tensor:
    raise AssertionError("the graph of a second run is never used")


def _treat(site: Site) -> LayerForward:
    setup = site.setup
    site.discarded = OutputDiscarding(
        site.layer, setup.cfg.discard_modules, site.index, site.counts, setup.scope
    )
    setup.cleanup.callback(site.discarded.close)
    return run_as_it_is


def _refuse(cfg: CheckpointingConfig, treated: Treated, setting: Setting) -> list[str]:
    found = problems(cfg.discard_modules)
    if "norm" in cfg.discard_modules:
        found += refuse_input_noise(
            setting,
            [module for _, layer in treated for module in layer.modules()],
            f"checkpointing.discard_modules={cfg.discard_modules}",
            "edits the norm's output in place, which then cannot be made again",
            "leave norm off the list",
        )
    return found


def _needs(cfg: CheckpointingConfig) -> list[Need]:
    option = "checkpointing.discard_modules"
    return [partial(layers.find_modules, role=role, option=option) for role in cfg.discard_modules]


def _unmet(cfg: CheckpointingConfig, observed: Observed) -> list[str]:
    otherwise = (
        "no output was discarded; the modules with this role did not run, or the next operation keeps something else "
        "than what they make (dropout between them, say)"
    )
    return find_idle_entries(
        [Listed("checkpointing.discard_modules", cfg.discard_modules, otherwise)], observed
    )


MECHANISM = Mechanism(
    "discard_output", _treat, refuse=_refuse, needs=_needs, unmet=_unmet, restores_random_state=False
)
