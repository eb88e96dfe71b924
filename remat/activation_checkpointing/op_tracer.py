"""Trace a forward and backward op by op: bytes each layer keeps, FLOPs by phase, bytes that ZeRO-3 gathers.

It counts what happened, whatever a policy promised: a storage that was made in a layer and still lives when the
forward is over is kept, by autograd, by a policy, or by mistake. Works on CPU, CUDA and meta tensors.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from remat.activation_checkpointing.mechanisms import operators
from remat.activation_checkpointing.mechanisms.arguments import find_tensors
from remat.activation_checkpointing.mechanisms.counters import LayerCounters, Scope
from remat.activation_checkpointing.mechanisms.offload import HostOffload
from remat.model.flops import Mode, dequantised_bytes, flop_formula, operands
from remat.model.layers import ROLES

GATHERS = {"c10d::_allgather_base_", "c10d::allgather_", "c10d::allgather_into_tensor_coalesced_"}
OUTSIDE = -1  # embeddings, the output layer, the loss
Phase = str  # "forward", "recompute", "backward"


class OpTracer(Mode):
    """`with OpTracer(scope, device) as tracer: forward; tracer.forward_done(); backward`.

    `device` is where computation happens; host buffers of an offload engine are elsewhere, or, on a CPU, named by
    `ignored` (a function that returns the storages to leave out). `weights` yields the model's parameters, `layers`
    are those that a policy treats, in the order of their indices, and `counts` what each of them did. `offload` tells
    what should have left the device.
    """

    def __init__(
        self,
        scope: Scope,
        device: torch.device,
        *,
        weights: Callable[[], Iterable[torch.Tensor]] = tuple,
        ignored: Callable[[], Iterable[torch.UntypedStorage]] = tuple,
        layers: Sequence[nn.Module] = (),
        counts: Sequence[LayerCounters] = (),
        offload: HostOffload | None = None,
    ) -> None:
        super().__init__()
        self.calls = Calls(layers)
        self.kept_bytes: dict[int, int] = {}  # per layer, at the end of forward
        # of each layer's own result, and what its table says that it keeps, same moment: widths of micro-batches differ
        self.output_bytes: dict[int, int] = {}
        self.table_bytes: dict[int, int] = {}
        self.pinned_weight_bytes: dict[int, int] = {}  # gathered weights that autograd still holds, same moment
        self.shared_bytes: dict[int, int] = {}  # part of the kept bytes that other layers got as an argument
        self.region_bytes: dict[int, int] = {}  # made in parts of a layer that are recomputed
        self.region_kept_bytes: dict[int, int] = {}  # of these, kept although only the part's result should be
        self.moved_hidden_bytes: dict[int, int] = {}  # hidden states that were moved and are still there
        self.moved_input_bytes: dict[int, int] = {}  # the same of what was made before the first layer
        self.moved_kept_bytes: dict[int, int] = {}  # and anything else that was moved and is still there
        self.flops: dict[Phase, dict[int, int]] = {
            p: defaultdict(int) for p in ("forward", "recompute", "backward")
        }
        self.gathered_bytes: dict[Phase, int] = dict.fromkeys(self.flops, 0)
        # per layer, the most that one run of its MLP, or of a slice of it, made and held at a time
        self.mlp_peak_bytes: dict[int, int] = defaultdict(int)
        self.choices: dict[int, Choices] = defaultdict(Choices)  # of the routers of each layer
        self.live_bytes = 0
        self.peak_bytes = 0
        self._scope, self._device, self._counts = scope, device, counts
        self._weights, self._ignored, self._offload = weights, ignored, offload
        self._backward = False
        # key: (storage, layer, bytes)
        self._made: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, int]] = {}
        self._outside: dict[int, StorageWeakRef] = {}  # the reference keeps an address from being used again
        self._gathered: set[int] = set()
        self._in_region: set[int] = set()
        self._mlp_run, self._mlp_layer = 0, OUTSIDE  # the last one
        self._in_mlp: dict[int, int] = {}  # its storages that live: index in `_mlp_bytes`
        self._mlp_bytes: list[int] = []  # that it allocated, and freed (negative), in order
        self._hooks = ExitStack()

    def __enter__(self) -> Any:
        self.calls.__enter__()
        for layer in self.calls.layers:
            for _, mlp in ROLES["mlp"](layer):
                before = mlp.register_forward_pre_hook(lambda *_: self._scope.enter_mlp(), prepend=True)
                self._hooks.callback(before.remove)
                self._hooks.callback(mlp.register_forward_hook(self._leave_mlp, always_call=True).remove)
        self._scope.handed_out = self._hand_out
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        self._scope.handed_out = None
        self._hooks.close()
        self._end_mlp_run()
        self.calls.__exit__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in operands((args, kwargs)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._made and storage._cdata not in self._outside:
                self._outside[storage._cdata] = StorageWeakRef(storage)
        result = func(*args, **kwargs)
        for tensor in operands(result):
            self._track(tensor)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + dequantised_bytes(func, args))
        self._count(func, args, kwargs, result)
        return result

    def forward_done(self) -> None:
        """Count the kept bytes of every layer. Call it between forward and backward."""
        self._backward = True
        left_out = {storage._cdata for storage in self._ignored()}
        left_out |= {weight.untyped_storage()._cdata for weight in self._weights()}
        if self._offload is not None:
            self._offload.transfers.forward_is_over()
            self._count_moved(self._offload)
        kept: dict[int, int] = defaultdict(int)
        pinned: dict[int, int] = defaultdict(int)
        shared: dict[int, int] = defaultdict(int)
        in_region: dict[int, int] = defaultdict(int)
        for key, (ref, layer, _) in list(self._made.items()):
            storage = ref()
            if storage is None or key in left_out:
                continue
            nbytes = storage.nbytes()
            (pinned if key in self._gathered else kept)[layer] += nbytes
            is_shared = self.calls.is_shared(key, layer)
            shared[layer] += nbytes * is_shared
            in_region[layer] += nbytes * (key in self._in_region and not is_shared)
        self.kept_bytes, self.pinned_weight_bytes = dict(kept), dict(pinned)
        self.shared_bytes, self.region_kept_bytes = dict(shared), dict(in_region)
        self.output_bytes = {index: counts.output_bytes for index, counts in enumerate(self._counts)}
        self.table_bytes = {index: counts.table_bytes for index, counts in enumerate(self._counts)}

    def _count_moved(self, offload: HostOffload) -> None:
        """Count what was moved to the host and is still on the device, without need."""
        if any(offload.still_on_device()):
            gc.collect()  # a reference cycle of the model holds a tensor until it is collected
        for layer, storage, nbytes in offload.still_on_device():
            if self.calls.must_stay(storage, offload.moving()):
                continue
            made_in = self._made[storage][1] if storage in self._made else OUTSIDE
            found = self.moved_kept_bytes
            # the first one may be needed before the layers, as embedding
            if self.calls.is_hidden_state(storage):
                found = self.moved_input_bytes if made_in == OUTSIDE else self.moved_hidden_bytes
            found[layer] = found.get(layer, 0) + nbytes

    def _hand_out(self, results: list[torch.Tensor]) -> None:
        self._in_region -= {operators.storage(tensor) for tensor in results}

    def recomputed_share(self) -> float:
        """Return the share of the layers' forward FLOPs that ran again."""
        forward, again = (
            sum(flops for layer, flops in self.flops[phase].items() if layer != OUTSIDE)
            for phase in ("forward", "recompute")
        )
        return again / forward if forward else 0.0

    def total_flops(self, phase: Phase) -> int:
        """Sum matrix products and attention over the whole model, 2 per multiply-add."""
        return sum(self.flops[phase].values())

    def _leave_mlp(self, *_: Any) -> None:
        self._scope.in_mlp = 0

    def _phase(self) -> Phase:
        return "recompute" if self._scope.recomputing else ("backward" if self._backward else "forward")

    def _layer(self) -> int:
        return OUTSIDE if self._scope.layer is None else self._scope.layer

    def _track(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._made or key in self._outside or tensor.device.type != self._device.type:
            return
        self._made[key] = (weakref.ref(storage), self._layer(), storage.nbytes())
        if self._scope.in_region:
            self._in_region.add(key)
            self.region_bytes[self._layer()] = self.region_bytes.get(self._layer(), 0) + storage.nbytes()
        if run := self._scope.in_mlp:
            self._track_mlp(run, key, storage.nbytes())
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, _free, weakref.ref(self), key).atexit = False

    def _track_mlp(self, run: int, key: int, nbytes: int) -> None:
        if run != self._mlp_run:
            self._end_mlp_run()
            self._mlp_run, self._mlp_layer = run, self._layer()
        self._in_mlp[key] = len(self._mlp_bytes)
        self._mlp_bytes.append(nbytes)

    def _end_mlp_run(self) -> None:
        if not self._mlp_bytes:
            return
        most = max(itertools.accumulate(self._mlp_bytes))
        self.mlp_peak_bytes[self._mlp_layer] = max(self.mlp_peak_bytes[self._mlp_layer], most)
        self._in_mlp.clear()
        self._mlp_bytes.clear()

    def _is_gathered(self, key: int) -> None:
        """Note that a storage holds a gathered weight, which no MLP made."""
        self._gathered.add(key)
        if (place := self._in_mlp.pop(key, None)) is not None:
            self._mlp_bytes[place] = 0

    def _free(self, key: int) -> None:
        entry = self._made.pop(key, None)
        if entry and self._in_mlp.pop(key, None) is not None:
            self._mlp_bytes.append(-entry[2])
        self.live_bytes -= entry[2] if entry else 0
        self._gathered.discard(key)
        self._in_region.discard(key)

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        formula = flop_formula(func)
        if formula is not None:
            self.flops[self._phase()][self._layer()] += formula(*args, **kwargs, out_val=result)
        elif not isinstance(func, torch._ops.OpOverload):
            return
        elif func._schema.name in operators.CHOICES:
            self.choices[self._layer()].note(result, again=self._scope.recomputing)
        elif func._schema.name in GATHERS:
            for tensor in operands(args[0]):
                self.gathered_bytes[self._phase()] += tensor.nbytes
                self._is_gathered(tensor.untyped_storage()._cdata)
        elif func is torch.ops.aten.cat.default and self._are_gathered(args[0]):
            # ZeRO-3 concatenates a weight from the parts that its bucket gathered from each rank.
            self._is_gathered(result.untyped_storage()._cdata)

    def _are_gathered(self, tensors: list[torch.Tensor]) -> bool:
        return bool(self._gathered) and all(t.untyped_storage()._cdata in self._gathered for t in tensors)


@dataclass
class Choices:
    """What the routers of a layer chose: positions that `operators.CHOICES` return.

    `made_again` counts the choices of recomputations, `changed` those of them that differ from all of the forward's.
    """

    made: list[bytes] = field(default_factory=list)
    made_again: int = 0
    changed: int = 0

    def note(self, result: Any, *, again: bool) -> None:
        chosen = [t for _, t in find_tensors(result) if not (t.is_meta or t.is_floating_point())]
        found = b"".join(t.cpu().numpy().tobytes() for t in chosen)
        if again:
            self.made_again += 1
            self.changed += found not in self.made
        else:
            self.made.append(found)


class Calls:
    """Which layers a model calls, which memory it passes to them, and which they return.

    It counts while it is entered, by hooks on modules that it removes at the end."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = layers
        self._hooks = ExitStack()
        self.ran: set[int] = set()  # layers of which any module ran with gradients
        self._hidden: dict[int, set[int]] = defaultdict(set)  # storage: the layers whose hidden state it was
        # storage: the layers that had it as another argument
        self._beside: dict[int, set[int]] = defaultdict(set)
        self._outputs: set[int] = set()
        self._seen: dict[int, StorageWeakRef] = {}  # the reference keeps an address from being used again

    def __enter__(self) -> Calls:
        for index, layer in enumerate(self.layers):
            before = layer.register_forward_pre_hook(self._given_to(index), with_kwargs=True)
            self._hooks.callback(before.remove)
            self._hooks.callback(layer.register_forward_hook(self._take).remove)
            for module in layer.modules():
                self._hooks.callback(module.register_forward_pre_hook(self._runs(index)).remove)
        return self

    def __exit__(self, *_: Any) -> None:
        self._hooks.close()

    def is_shared(self, storage: int, layer: int) -> bool:
        """Return whether another layer got this memory as an argument besides its hidden state, such as shared K/V."""
        return bool(self._beside.get(storage, set()) - {layer})

    def is_hidden_state(self, storage: int) -> bool:
        return storage in self._hidden

    def must_stay(self, storage: int, moving: set[int]) -> bool:
        """Return whether the model itself needs this memory once all that the layers `moving` keep has been moved.

        That is the case for what it passes to a layer that moves nothing, for what it passes to layers besides their
        hidden state, and for the output of the last layer.
        """
        given = self._hidden.get(storage, set())
        return bool(given - moving or storage in self._beside or (storage in self._outputs and not given))

    def _given_to(self, index: int) -> Any:
        def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            # transformers' layers take the hidden state first, or by this name
            _, hidden = next(find_tensors(args[0] if args else kwargs.get("hidden_states")), ("", None))
            for _, tensor in find_tensors((*args, *kwargs.values())):
                where = self._hidden if tensor is hidden else self._beside
                where[self._storage(tensor)].add(index)

        return note

    def _runs(self, index: int) -> Any:
        def note(module: nn.Module, args: Any) -> None:
            if module.training and torch.is_grad_enabled():
                self.ran.add(index)

        return note

    def _take(self, module: nn.Module, args: Any, output: Any) -> None:
        self._outputs |= {self._storage(tensor) for _, tensor in find_tensors(output)}

    def _storage(self, tensor: torch.Tensor) -> int:
        key = operators.storage(tensor)
        if key and key not in self._seen:
            self._seen[key] = StorageWeakRef(tensor.untyped_storage())
        return key


def _free(tracer: weakref.ref[OpTracer], key: int) -> None:
    """Note the end of a storage, which may outlive the tracer: a reference to it would keep the model."""
    if (living := tracer()) is not None:
        living._free(key)
