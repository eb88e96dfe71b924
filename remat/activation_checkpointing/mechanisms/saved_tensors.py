"""Treat the tensors that autograd saves while one layer runs, by one pair of hooks, because hooks do not nest.

The first of these rules that applies decides: a weight of the layer is never stored (under ZeRO-3 it is referred to,
and read when gathered again); a norm's or activation's output is discarded; another tensor is moved to the host, if the
layer offloads; everything else stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from remat.activation_checkpointing.mechanisms.discard_output import OutputDiscarding
from remat.activation_checkpointing.mechanisms.offload import LayerOffload, span

Packed = tuple[Callable[[Any], torch.Tensor], Any]  # the function that gives the tensor back, and what it needs


class SavedTensors:
    """The hooks on what autograd saves in one layer. `by_reference` (ZeRO-3): they must not hold gathered weights.

    DeepSpeed frees a gathered weight by taking the memory from the parameter. That is enough for a weight that is saved
    itself, not for a view of it: fused experts, which are used through slices, would stay gathered until backward.
    Under any hook all weights would, because a hook is given aliases.
    """

    def __init__(
        self,
        layer: nn.Module,
        *,
        by_reference: bool,
        offload: LayerOffload | None,
        discarded: OutputDiscarding | None,
        model: nn.Module | None = None,
    ) -> None:
        """`model`: the one given to DeepSpeed, which keeps there the gathers that are under way."""
        self._layer, self._by_reference, self._model = layer, by_reference, model
        self._offload, self._discarded = offload, discarded
        self._weights: list[nn.Parameter] | None = None
        self._needed = False
        self._gathered: dict[int, list[nn.Parameter]] = {}  # by storage, of the forward that runs
        self._hooks = ExitStack()

    def hooks(self) -> AbstractContextManager[None]:
        """Return the context for one forward of the layer; it does nothing if no rule can apply."""
        # now, and not earlier: DeepSpeed partitions the weights after the policy is in place
        if self._weights is None:
            self._weights = list(self._layer.parameters())
            dims = [len(getattr(weight, "ds_shape", weight.shape)) for weight in self._weights]
            views_of_weights = self._by_reference and max(dims, default=0) > 2
            self._needed = bool(views_of_weights or self._offload or self._discarded)
            if self._needed and self._by_reference:
                self._follow_gathers()
        return self._around_forward() if self._needed else nullcontext()

    def close(self) -> None:
        self._hooks.close()

    def _follow_gathers(self) -> None:
        """Note weights when the module that owns them runs: ZeRO-3's hooks, which run first, have gathered them."""
        for module in self._layer.modules():
            self._hooks.callback(module.register_forward_pre_hook(self._note_gathered).remove)

    def _note_gathered(self, module: nn.Module, *_: Any) -> None:
        others = getattr(module, "ds_external_parameters", None)  # of other modules, gathered for this one
        for weight in [*module.parameters(recurse=False), *(p for _, p in (others() if others else ()))]:
            storage = weight.untyped_storage()._cdata
            there = self._gathered.get(storage, [])  # some may have left, and the address was given to another
            self._gathered[storage] = [
                w for w in there if w.untyped_storage()._cdata == storage and w is not weight
            ]
            self._gathered[storage].append(weight)

    @contextmanager
    def _around_forward(self) -> Iterator[None]:
        # A user's hooks, or torch's, go on seeing what stays.
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        # Below ZeRO-3 a weight is there anyway, and so is a buffer (a causal mask).
        there = [] if self._by_reference else [*(self._weights or []), *self._layer.buffers()]
        resident = {tensor.untyped_storage()._cdata for tensor in there}
        self._gathered = {}
        for module in self._layer.modules() if self._by_reference else ():
            self._note_gathered(module)

        def pack(tensor: torch.Tensor) -> Packed:
            inside = self._discarded is not None and self._discarded.is_running
            if not inside and tensor.untyped_storage()._cdata in resident:
                return _pass(tensor, outer)
            return self._reference(tensor, inside) or self._handle(tensor) or _pass(tensor, outer)

        around = self._discarded.around_forward(pack, _unpack) if self._discarded else nullcontext()
        try:
            with around, saved_tensors_hooks(pack, _unpack):
                yield
        finally:
            self._gathered = {}

    def _reference(self, tensor: torch.Tensor, inside: bool) -> Packed | None:
        if not self._by_reference or inside:
            return None
        view = _view_of(self._gathered.get(tensor.untyped_storage()._cdata, ()), tensor)
        return (self._from_weight, view) if view else None

    def _from_weight(self, view: _WeightView) -> torch.Tensor:
        def read(values: torch.Tensor) -> torch.Tensor:
            return values.as_strided(view.size, view.stride, values.storage_offset() + view.offset)

        return read_gathered(view.weight, self._model, read)

    def _handle(self, tensor: torch.Tensor) -> Packed | None:
        if self._discarded and (discarded := self._discarded.pack(tensor)):
            return self._discarded.unpack, discarded
        if self._offload and (moved := self._offload.pack(tensor)):
            return self._offload.unpack, moved
        return None


class _WeightView(NamedTuple):
    """`offset` counts elements from the start of the weight, wherever it will be gathered to."""

    weight: Any
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def read_gathered(
    weight: Any, model: nn.Module | None, read: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return what `read` makes of a weight's values; gather them if they were released too early.

    `model`: see SavedTensors.
    """
    shard = None if weight.is_meta else getattr(weight, "ds_status", None)  # None: not sharded
    if shard is not None and shard.name == "INFLIGHT":
        _wait_for(weight, model)
    released = shard is not None and weight.ds_status.name == "NOT_AVAILABLE"
    if released:
        weight.all_gather()
    values = read(weight.data)
    if released:
        weight.partition()
    return values


def _wait_for(weight: Any, model: nn.Module | None) -> None:
    """Wait for `weight`, which DeepSpeed prefetches on a stream of its own."""
    handle = getattr(model, "ds_inflight_param_registry", {}).pop(weight, None)
    if handle is None:
        raise RuntimeError(
            f"ZeRO-3 gathers a weight of shape {list(weight.ds_shape)}, and nobody can wait for it"
        )
    handle.wait()
    if weight.device.type == "cuda":
        # the copy of a group of one rank waits for its own stream only
        torch.cuda.synchronize(weight.device)


def _unpack(packed: Packed) -> torch.Tensor:
    give, handle = packed
    return give(handle)


def _pass(tensor: torch.Tensor, outer: Any) -> Packed:
    """Keep `tensor` itself, by an alias: an output that is held by its own grad_fn is never freed."""
    if outer is not None:
        pack, unpack = outer
        return unpack, pack(tensor)
    return expect_unedited, (tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)


def expect_unedited(kept: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Return the tensor. Raises RuntimeError if it was edited in place, which autograd does not check under hooks."""
    tensor, version = kept
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor needed for backward, of shape {list(tensor.shape)}, was modified by an in-place operation: it "
            f"is at version {tensor._version}, expected version {version}"
        )
    return tensor


def _view_of(weights: Iterable[nn.Parameter], tensor: torch.Tensor) -> _WeightView | None:
    """Find `tensor` as a view of one of `weights`, which ZeRO-3 gathered into its storage and may have released since.

    Weights of a plan are on meta and not sharded; they are treated like those of the run.
    """
    storage = tensor.untyped_storage()._cdata
    for weight in weights:
        if weight.untyped_storage()._cdata != storage or not (weight.is_meta or hasattr(weight, "ds_id")):
            continue
        start, length = span(tensor)
        offset = start - int(weight.storage_offset())
        if tensor.dtype == weight.dtype and offset >= 0 and offset + length <= weight.numel():
            return _WeightView(weight, tensor.size(), tensor.stride(), offset)
    return None
