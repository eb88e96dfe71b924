"""Move what a layer keeps to host memory in its forward, and back for its backward.

On a GPU tensors are copied out on a side stream while the next layer computes, and copied back while the layer above is
in backward. One side stream serves both directions, so that a buffer is never overwritten before it was read; and the
last layer must be out before it can come back anyway. The device memory of a layer is freed when the layer after the
next begins, after the compute stream has waited for the copy. With `record_stream` instead, the CPU, which runs ahead
of the GPU, would find no freed memory and allocate the memory of all layers. If a CPU computes, the same code copies at
once into ordinary memory.

Why existing engines are not used: DeepSpeed's manager takes only tensors on an accelerator and only marked inputs of
layers, stores a tensor that is saved twice two times, and does nothing under ZeRO-3, whose hooks replace the marked
tensor. torch's save_on_cpu copies on the compute stream into fresh memory, one copy per save, parameters included.

In 8 bits (`encode`, `decode`) a tensor has one scale per row, which is its last dimension. fp8 is float8_e4m3fn (3
mantissa bits: an error of at most 1/16 of each value), int8 is uniform (at most 1/254 of the largest value of the row).
8-bit storage changes the gradients slightly, so it is never a default.

Buffers (`HostPool`) are cut from slabs and reused. If torch pins exact sizes, a large buffer is a slab of its own. If
torch rounds pinned memory up to a power of two, slabs are powers of two, so large that at most an eighth is wasted. A
returned buffer is joined with the free space beside it. Unused slabs are freed when a larger one is needed: with
sequences of many lengths the pool would otherwise keep buffers for each length.
"""

from __future__ import annotations

import bisect
import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from remat.activation_checkpointing.mechanisms.counters import LayerCounters
from remat.activation_checkpointing.mechanisms.mechanism import (
    LayerDecision,
    Observed,
    Setting,
    by_range,
    spans,
)
from remat.activation_checkpointing.mechanisms.operators import Version
from remat.config.options import CheckpointingConfig, OffloadConfig, StorageDtype
from remat.config.units import MIB
from remat.machine.allocator import TORCH_DEFAULT, Allocators

LARGEST_VALUE = {StorageDtype.fp8: 448.0, StorageDtype.int8: 127.0}
NOT_FINITE = -128  # int8 has no infinity: the one value that no number is rounded to
SMALLEST_SLAB_BYTES = 32 << 20
ALIGNMENT_BYTES = 512
LARGEST_SLAB_IN_BUFFERS = 16
EXPERT_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts")
SHORTEST_ROW = 16  # values that share a scale; below, the scales would cost more than 8 bits save


class HostOffload:
    """Moves what the layers of one model keep. One per model and device."""

    def __init__(
        self,
        cfg: OffloadConfig,
        device: torch.device,
        num_layers: int,
        allocators: Allocators = TORCH_DEFAULT,
    ) -> None:
        self.cfg, self.device = cfg, device
        self.pool = HostPool(device, allocators)
        self.transfers = _Transfers(device)
        self._layers: list[LayerOffload | None] = [None] * num_layers
        # A storage that several saves or layers share (masks, rotary tables) is moved once. Every value keeps the
        # address of its storage from being reused, so an address that is found belongs to this storage.
        self.known: weakref.WeakValueDictionary[tuple[Any, ...], _Moved] = weakref.WeakValueDictionary()
        self.taken = Taken() if device.type == "meta" else None

    def layer(self, index: int, counts: LayerCounters) -> LayerOffload:
        layer = LayerOffload(self, index, counts)
        self._layers[index] = layer
        return layer

    def follow(self, index: int, output: Any) -> None:
        """Start to copy a layer back when the gradient of its `output` arrives, before its tensors are needed.

        The layer below is copied back at the same time, even if this layer keeps everything on the device.
        """
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(partial(self._gradient_is_at, index))
                return

    def _gradient_is_at(self, index: int, _: torch.Tensor) -> None:
        layer, below = self._layers[index], self._layers[index - 1] if index else None
        if layer:
            layer.backward_begins()
        elif below:
            self.transfers.forward_is_over()
            below.fetch()

    def backward_reaches(self, index: int) -> None:
        """Copy back layer `index`, which is in backward now, and the next one below that moves something."""
        self.transfers.forward_is_over()
        below = next((layer for layer in reversed(self._layers[:index]) if layer), None)
        for layer in (self._layers[index], below):
            if layer:
                layer.fetch()

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Wrap one forward and its backward: afterwards every buffer is in the pool again.

        A graph that is still alive then, after an exception for example, cannot be used any more.
        """
        self.taken = Taken() if self.taken is not None else None
        try:
            yield
        finally:
            self.transfers.finish()
            for layer in self._layers:
                if layer:
                    layer.drop()

    def moving(self) -> set[int]:
        """Return the layers whose kept tensors are moved."""
        return {index for index, layer in enumerate(self._layers) if layer}

    def still_on_device(self) -> Iterator[tuple[int, int, int]]:
        """Yield layer, device storage and bytes of what was moved and is still held by something else."""
        seen: set[int] = set()
        for index, layer in enumerate(self._layers):
            for moved in layer.moved() if layer else ():
                if moved.storage.cdata not in seen and not moved.storage.expired():
                    seen.add(moved.storage.cdata)
                    yield index, moved.storage.cdata, moved.nbytes

    def storages(self) -> list[torch.UntypedStorage]:
        """Return the storages of the host buffers: on a CPU machine they must not count as device memory."""
        return self.pool.storages()


class Taken:
    """What each layer took from the pool in a micro-batch on meta tensors, in bytes and in order.

    `in_a_row`: nothing was taken after something had come back. Then the pool's size follows from the sizes alone.
    """

    def __init__(self) -> None:
        self.by_layer: dict[int, list[int]] = {}
        self.in_a_row = True
        self.came_back = False

    def add(self, layer: int, sizes: Sequence[int]) -> None:
        last = next(reversed(self.by_layer), layer)
        self.in_a_row = self.in_a_row and not self.came_back and last <= layer
        self.by_layer.setdefault(layer, []).extend(sizes)


class LayerOffload:
    """The offload of one layer: `pack` moves what autograd or a policy saves, `unpack` returns it in backward."""

    def __init__(self, owner: HostOffload, index: int, counts: LayerCounters) -> None:
        self._owner, self._index, self._counts = owner, index, counts
        self._moved: weakref.WeakValueDictionary[int, _Moved] = weakref.WeakValueDictionary()  # as saved
        self._saves = itertools.count()
        self._in_backward = False

    def pack(self, tensor: torch.Tensor) -> Handle | None:
        """Move `tensor`, return its handle; None: it stays, as it is small, no floating point or not on the device."""
        storage = tensor.untyped_storage()
        item = tensor.element_size()
        start, length = span(tensor)
        if (
            tensor.device.type != self._owner.device.type
            or not tensor.is_floating_point()
            or length * item < max(1, self._owner.cfg.min_bytes)
            or storage.nbytes() == 0
        ):
            return None
        if 2 * length * item >= storage.nbytes():
            start, length = 0, storage.nbytes() // item
        key = (storage._cdata, tensor._version, tensor.dtype, start, length)
        moved = self._owner.known.get(key)
        if moved is None:
            moved = self._owner.known[key] = self._send(tensor, start, length, _row(tensor, start, length))
        return self._handle(moved, tensor, start)

    def move(self, tensor: torch.Tensor, row: int) -> Handle:
        """Move the whole storage of `tensor`, whatever its size. In 8 bits `row` values share a scale; 0: unchanged."""
        length = tensor.untyped_storage().nbytes() // tensor.element_size()
        return self._handle(self._send(tensor, 0, length, row), tensor, 0)

    def _send(self, tensor: torch.Tensor, start: int, length: int, row: int) -> _Moved:
        self._in_backward = False
        self._owner.transfers.enter(self._index)
        moved = _Moved(self._owner, tensor, start, length, row)
        self._counts.moved_bytes += moved.nbytes
        if self._owner.taken is not None:
            self._owner.taken.add(self._index, moved.sizes)
        return moved

    def _handle(self, moved: _Moved, tensor: torch.Tensor, start: int) -> Handle:
        self._moved[next(self._saves)] = moved
        return Handle(
            moved, Version(tensor), tensor.size(), tensor.stride(), int(tensor.storage_offset()) - start
        )

    def unpack(self, handle: Handle) -> torch.Tensor:
        """Return the tensor on the device, with the same values, size and stride, as often as it is asked for.

        Raises RuntimeError when the original was edited in place, as autograd does without offload.
        """
        if self.edited(handle):
            raise RuntimeError(
                f"checkpointing.offload: a tensor of shape {list(handle.size)} that layer {self._index} keeps for "
                "backward was modified by an in-place operation; backward would fail without offload as well"
            )
        self.backward_begins()
        return handle.moved.values().as_strided(handle.size, handle.stride, handle.offset)

    def edited(self, handle: Handle) -> bool:
        """Return whether the original was edited in place since it was packed."""
        return handle.version.changed()

    def moved(self) -> list[_Moved]:
        """Return the moved ranges that an autograd graph still refers to."""
        return list(self._moved.values())

    def drop(self) -> None:
        """Give back every buffer that a graph still holds."""
        for moved in list(self._moved.values()):
            moved.drop()
        self._moved.clear()

    def backward_begins(self) -> None:
        """Copy back what this layer and the next one below keep, unless that was started since its forward."""
        if not self._in_backward:
            self._in_backward = True
            self._owner.backward_reaches(self._index)

    def fetch(self) -> None:
        """Start to copy back everything that is not being copied back yet."""
        for moved in reversed(list(self._moved.values())):
            moved.fetch()


@dataclass(frozen=True, eq=False)
class Handle:
    """A tensor as a view of a moved range. `version` shows later edits in place, which may precede the copy."""

    moved: _Moved
    version: Version
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Moved:
    """A range of one storage in host memory. It lives as long as an autograd graph refers to it.

    Once it is back on the device it stays there until then: memory is freed when it would be freed without offload,
    and a second backward finds everything in place.
    """

    def __init__(self, owner: HostOffload, tensor: torch.Tensor, start: int, length: int, row: int) -> None:
        """`start` and `length` count elements of the storage. `row`: values that share a scale; 0: there is none."""
        self._owner = owner
        self.storage = StorageWeakRef(tensor.untyped_storage())  # keeps the key in `known` unique
        self._dtype, self._shape = tensor.dtype, (length,)
        self._values: torch.Tensor | None = None
        self._arriving: list[torch.Tensor] = []
        self._arrival: torch.cuda.Event | None = None
        with torch.no_grad():
            flat = tensor.detach().as_strided((length,), (1,), start)
            if owner.cfg.dtype is not StorageDtype.same and row:
                parts = list(encode(flat.view(-1, row), owner.cfg.dtype))
            else:
                parts = [flat]
            self.sizes = [part.nbytes for part in parts]
            self.nbytes = sum(self.sizes)
            self._buffers = [owner.pool.take(part.nbytes) for part in parts]
            self._host = [
                buffer[: part.nbytes].view(part.dtype).view(part.shape)
                for buffer, part in zip(self._buffers, parts, strict=True)
            ]
            owner.transfers.send(parts, self._host)

    def fetch(self) -> None:
        """Start to copy back, unless that was started."""
        if self._values is None and not self._arriving and self._host:
            self._arriving, self._arrival = self._owner.transfers.bring(self._host, self._owner.device)

    def values(self) -> torch.Tensor:
        """Return all of the range, flat, on the device; the current stream waits for it."""
        if self._values is None:
            if not self._host:
                raise RuntimeError(
                    "checkpointing.offload: backward came after its micro-batch was over, when what it needs had been "
                    "given up; run backward inside the micro-batch"
                )
            self.fetch()
            self._wait()
            parts, self._arriving = self._arriving, []
            with torch.no_grad():
                values = parts[0] if len(parts) == 1 else decode(parts[0], parts[1], self._dtype)
                self._values = values.view(self._shape)
        return self._values

    def drop(self) -> None:
        self._wait()  # memory that a copy still writes to must not be given to another
        self._values, self._arriving, self._host = None, [], []
        while self._buffers:
            self._owner.pool.give(self._buffers.pop())
            if self._owner.taken is not None:
                self._owner.taken.came_back = True

    def _wait(self) -> None:
        if self._arrival is not None:
            torch.cuda.current_stream(self._owner.device).wait_event(self._arrival)
            self._arrival = None

    def __del__(self) -> None:
        if getattr(self, "_buffers", None):
            self.drop()


class _Transfers:
    """Copies between device and host. All streams and events are here; without CUDA every copy is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._layer: int | None = None
        self._leaving: list[torch.Tensor] = []  # of the layer that runs
        # of the layers before
        self._left: deque[tuple[torch.cuda.Event | None, list[torch.Tensor]]] = deque()
        # on meta tensors: copies are no operations of the GPU, and memory is freed as if they took time
        self.simulates_gpu = False

    def enter(self, layer: int) -> None:
        """Free the device memory of the layer before the last, now that `layer` runs forward."""
        if self._copies_at_once or layer == self._layer:
            return
        self._layer = layer
        self._close()
        self._free(keep=1)

    def send(self, parts: list[torch.Tensor], host: list[torch.Tensor]) -> None:
        """Copy device tensors to host tensors. The device memory stays allocated until the copy is done."""
        if self.simulates_gpu:
            self._leaving += parts
            return
        if self._side is None:
            for target, part in zip(host, parts, strict=True):
                target.copy_(part)
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            for target, part in zip(host, parts, strict=True):
                target.copy_(part, non_blocking=True)
        self._leaving += parts

    def bring(
        self, host: list[torch.Tensor], device: torch.device
    ) -> tuple[list[torch.Tensor], torch.cuda.Event | None]:
        """Return device copies of host tensors and the event after which they may be read.

        They are allocated on the compute stream, where they will be used and freed, so the caching allocator needs no
        record of the side stream. The copy starts when the compute stream has finished with the memory's former owner.
        """
        parts = [torch.empty(part.shape, dtype=part.dtype, device=device) for part in host]
        if self.simulates_gpu:
            return parts, None
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side) if self._side is not None else nullcontext():
            for part, source in zip(parts, host, strict=True):
                part.copy_(source, non_blocking=self._side is not None)
        return parts, self._side.record_event() if self._side is not None else None

    def forward_is_over(self) -> None:
        """Free the device memory of all that was copied out: nothing more leaves before the first copy comes back."""
        if not self._copies_at_once:
            self._layer = None
            self._close()
            self._free(keep=0)

    def finish(self) -> None:
        """End a micro-batch, also one that raised."""
        self.forward_is_over()
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side)

    @property
    def _copies_at_once(self) -> bool:
        return self._side is None and not self.simulates_gpu

    def _close(self) -> None:
        if self._leaving:
            self._left.append((self._side.record_event() if self._side else None, self._leaving))
            self._leaving = []

    def _free(self, keep: int) -> None:
        while len(self._left) > keep:
            event, parts = self._left.popleft()
            if event is not None:
                torch.cuda.current_stream(self._device).wait_event(event)
            del parts


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where `tensor` starts in its storage, and how many elements it reaches over."""
    if tensor.numel() == 0:
        return int(tensor.storage_offset()), 0
    reach = sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    return int(tensor.storage_offset()), reach + 1


def _row(tensor: torch.Tensor, start: int, length: int) -> int:
    """Return how many values share a scale. 0: `tensor` is stored as it is.

    Statistics of a norm or of attention carry no gradient and affect all other values, so they stay exact.
    """
    if not tensor.requires_grad:
        return 0
    return row_of(tensor.size(), tensor.stride(), int(tensor.storage_offset()) - start, length)


def row_of(size: Sequence[int], stride: Sequence[int], offset: int, length: int) -> int:
    """Return the last dimension of an activation in a range of `length` elements; 0: it does not divide the range."""
    if len(size) < 2 or stride[-1] != 1:
        return 0
    steps = [step for n, step in zip(size[:-1], stride[:-1], strict=True) if n > 1]
    row = size[-1]
    return row if row >= SHORTEST_ROW and all(n % row == 0 for n in (length, offset, *steps)) else 0


def pool_bytes(sizes: Iterable[int], allocators: Allocators) -> int:
    """Return the host memory that buffers of `sizes`, taken in this order, are cut from."""
    pool = HostPool(torch.device("meta"), allocators)
    for size in sizes:
        pool.take(size)
    return pool.slab_bytes


def stored_bytes(nbytes: int, element_bytes: int, row: int, dtype: StorageDtype) -> int:
    """Return the host bytes for `nbytes` of a tensor: as many, or a byte per value and an fp32 scale per row."""
    if dtype is StorageDtype.same or not row:
        return nbytes
    values = nbytes // element_bytes
    return values + 4 * (values // row)


def encode(tensor: torch.Tensor, dtype: StorageDtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Store a floating point `tensor` [..., n] as (payload [..., n] of one byte each, scales [..., 1] fp32).

    Rows of zeros come back exactly. What is not finite comes back as NaN and leaves the rest of its row alone.
    """
    values = tensor.detach().float()
    finite = torch.isfinite(values)
    values = torch.where(finite, values, 0.0)
    scales = values.abs().amax(dim=-1, keepdim=True) / LARGEST_VALUE[dtype]
    values = values / torch.where(scales > 0, scales, 1.0)
    if dtype is StorageDtype.int8:
        return torch.where(finite, values.round_(), NOT_FINITE).to(torch.int8), scales
    return torch.where(finite, values, torch.nan).to(torch.float8_e4m3fn), scales


def decode(payload: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor [..., n] in `dtype` that `encode` stored."""
    values = payload.float() * scales
    if payload.dtype == torch.int8:
        values = torch.where(payload == NOT_FINITE, torch.nan, values)
    return values.to(dtype)


class HostPool:
    """A pool of host buffers. `take(nbytes)` a uint8 buffer and `give` it back."""

    def __init__(self, device: torch.device, allocators: Allocators = TORCH_DEFAULT) -> None:
        """`device` is where the model computes, `allocators` how torch rounds page-locked memory."""
        self._allocators = allocators
        self._pinned = device.type == "cuda"
        self._device = torch.device("meta" if device.type == "meta" else "cpu")
        self._slabs: dict[int, _Slab] = {}  # by the identity of their memory
        self.taken_bytes = 0

    @property
    def slab_bytes(self) -> int:
        return sum(slab.memory.numel() for slab in self._slabs.values())

    def storages(self) -> list[torch.UntypedStorage]:
        return [slab.memory.untyped_storage() for slab in self._slabs.values()]

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a buffer of at least `nbytes` bytes, aligned to 512, from the smallest free range that holds it."""
        size = max(1, -(-nbytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
        fitting = [
            (end - start, key, place)
            for key, slab in self._slabs.items()
            for place, (start, end) in enumerate(slab.free)
            if end - start >= size
        ]
        _, key, place = min(fitting) if fitting else (size, self._add(size), 0)
        self.taken_bytes += size
        return self._slabs[key].cut(place, size)

    def give(self, buffer: torch.Tensor) -> None:
        start = int(buffer.storage_offset())
        self._slabs[buffer.untyped_storage()._cdata].give(start, start + buffer.numel())
        self.taken_bytes -= buffer.numel()

    def _add(self, size: int) -> int:
        """Add a slab for buffers of `size` bytes, in place of unused ones: each of them is too small."""
        unused = [key for key, slab in self._slabs.items() if slab.is_unused]
        for key in unused:
            del self._slabs[key]
        if unused and self._pinned:
            torch.accelerator.empty_host_cache()  # else torch keeps the page-locked memory for itself
        memory = torch.empty(
            slab_bytes(size, self._allocators), dtype=torch.uint8, device=self._device, pin_memory=self._pinned
        )
        key = memory.untyped_storage()._cdata
        self._slabs[key] = _Slab(memory)
        return key


@dataclass
class _Slab:
    memory: torch.Tensor
    free: list[tuple[int, int]] = field(init=False)  # (start, end), in order, none touches the next

    def __post_init__(self) -> None:
        self.free = [(0, self.memory.numel())]

    @property
    def is_unused(self) -> bool:
        return self.free == [(0, self.memory.numel())]

    def cut(self, place: int, size: int) -> torch.Tensor:
        """Cut a buffer from the start of the free range at `place`."""
        start, end = self.free.pop(place)
        if start + size < end:
            self.free.insert(place, (start + size, end))
        return self.memory[start : start + size]

    def give(self, start: int, end: int) -> None:
        place = bisect.bisect(self.free, (start, end))
        if place < len(self.free) and self.free[place][0] == end:
            end = self.free.pop(place)[1]
        if place and self.free[place - 1][1] == start:
            place -= 1
            start = self.free.pop(place)[0]
        self.free.insert(place, (start, end))


def slab_bytes(size: int, allocators: Allocators = TORCH_DEFAULT) -> int:
    """Return the bytes of a slab for buffers of `size` bytes: `size`, if it is large and torch does not round it up.

    Otherwise it is the smallest power of two of which such buffers fill at least seven eighths.
    """
    if 2 * size > SMALLEST_SLAB_BYTES and allocators.pinned_bytes(size) == size:
        return size
    slab = max(SMALLEST_SLAB_BYTES, 1 << (size - 1).bit_length())
    while slab % size > slab // 8 and slab < LARGEST_SLAB_IN_BUFFERS * size:
        slab *= 2
    return slab


def problems(cfg: CheckpointingConfig, decisions: Sequence[LayerDecision], setting: Setting) -> list[str]:
    """Tell why these options cannot move what the layers keep to the host, or have no effect."""
    offload = cfg.offload
    if not offload.enabled:
        if offload.dtype is StorageDtype.same:
            return []
        return [
            f"checkpointing.offload.dtype={offload.dtype} has no effect without checkpointing.offload.enabled=true"
        ]
    found = []
    if offload.keep_last_layers >= len(decisions):
        found.append(
            f"checkpointing.offload.keep_last_layers={offload.keep_last_layers} keeps all {len(decisions)} layers on "
            "the device: lower it"
        )
    experts = [name for name in EXPERT_FIELDS if setting.fields.get(name)]
    if experts and offload.dtype is not StorageDtype.same:
        found.append(
            f"checkpointing.offload.dtype={offload.dtype} with {experts[0]}={setting.fields[experts[0]]}: a router "
            "that runs again on rounded inputs may choose other experts than in forward; leave dtype=same"
        )
    size = setting.activation_elements * setting.element_bytes
    if size < offload.min_bytes and all(decision.mechanism.keeps_only_input for decision in decisions):
        found.append(
            f"checkpointing.offload.min_bytes={offload.min_bytes}: all that checkpointing={cfg.policy} keeps of a "
            f"layer is its input of {size} bytes, so nothing would be moved; give at most {size}"
        )
    return found


def unmet(cfg: CheckpointingConfig, observed: Observed, *, full: bool = True) -> list[str]:
    """Tell which of the layers that ran should have moved their kept tensors and did not, or did not free them.

    `full` false: the first step's micro-batches were shorter than train.seq_len, and their tensors may all be below
    `offload.min_bytes`, although those of a full one are not.
    """
    moving = {index: layer for index, layer in observed.items() if layer.decision.offload}
    found = [
        f"checkpointing.offload: no tensor of at least offload.min_bytes={cfg.offload.min_bytes} was moved (layers "
        f"{spans(entries)}); lower it"
        for entries in by_range(moving)
        if not any(moving[index].counts.moved_bytes for index in entries)
        and (full or any(moving[index].output_bytes >= cfg.offload.min_bytes for index in entries))
    ]
    still = {index: layer.moved_hidden_bytes + layer.moved_kept_bytes for index, layer in moving.items()}
    moved = {index: layer.counts.moved_bytes / layer.counts.forwards for index, layer in moving.items()}
    wrong = [
        index for index, layer in moving.items() if layer.moved_hidden_bytes or 2 * still[index] > moved[index]
    ]
    inputs = sum(layer.moved_input_bytes for layer in moving.values())
    if not wrong and inputs and inputs + sum(still.values()) >= sum(moved.values()):
        still = {index: layer.moved_input_bytes for index, layer in moving.items()}
        wrong = [index for index in moving if still[index]]
    if wrong:
        found.append(
            f"checkpointing.offload frees nothing in layers {spans(wrong)}: of what was moved to host memory, "
            f"{sum(still[index] for index in wrong) / MIB:.4g} MiB are on the device all the same after forward, "
            "because something else holds them (output_hidden_states, a hook, the model itself)"
        )
    return found
