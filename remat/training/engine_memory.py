"""Count the bytes of model states that a DeepSpeed engine holds on this rank, by device, from its tensors' storages.

Measuring at two moments covers every state: gradients and reduction buffers after a backward, weights and optimizer
state after an applied step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from remat.config import ds_config
from remat.config.options import OptimStates
from remat.config.units import format_size

NVME, PAGED = "nvme", "paged"

Held = dict[str, dict[str, int]]  # category -> kind of device (cpu, cuda) -> bytes
MASTER, MASTER_GRADIENTS, MOMENTS = "master weights", "master gradients", "moments"
FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
DEPTH = 4  # of nested lists and dicts that are searched in the optimizer's attributes
RETURNING = "param_buffer_of_bit16_for_cpu_offload_groups"  # updated weights on their way back to the GPU


@dataclass(frozen=True)
class Parameters:
    """The weights that a rank holds. `sharded` counts those of which it holds a part only."""

    count: int
    elements: int
    trained_elements: int
    sharded: int
    bytes_on: dict[str, int]  # by kind of device: cpu, cuda, nvme


@dataclass(frozen=True)
class OptimizerState:
    """The optimizer state that a rank holds. Bytes on NVMe are those of the swapped tensors."""

    elements: int
    bytes_on: dict[str, int]  # by kind of device: cpu, cuda, nvme, paged
    pinned_bytes: int
    bytes_in: dict[str, dict[str, int]]  # kind of state -> number format -> bytes, of what is in memory


@dataclass(frozen=True)
class Placement:
    """Where a rank holds its part of the model states; an entry of proof.json."""

    parameters: Parameters
    optimizer_state: OptimizerState


def measure_after_backward(engine: Any) -> Held:
    """Measure gradients, communication buckets, and second shards of weights (ZeRO++ hpZ) if there are any.

    Call it after a backward, before the update.
    """
    seen = _Storages()
    seen.take(_weights(engine))
    seen.take(_optimizer_state(engine))
    named = [(name, tensor) for name, value in vars(engine.optimizer).items() for tensor in _tensors(value)]
    buckets = seen.take(t for name, t in named if "ipg" in name or "temp_grad" in name)
    gradients = seen.take(
        [
            *(p.grad for p in engine.module.parameters() if p.grad is not None),
            *(t for name, t in named if "grad" in name and "ipg" not in name and "temp_grad" not in name),
        ]
    )
    found = {"gradients": gradients, "communication buckets": buckets}
    shards = [getattr(parameter, "ds_secondary_tensor", None) for parameter in engine.module.parameters()]
    second = seen.take(shard for shard in shards if shard is not None)
    return found | ({"second shards of weights": second} if second else {})


def measure_after_step(engine: Any) -> Held:
    """Measure weights and optimizer state (master copy, its gradient, moments). Call it after an applied step."""
    seen = _Storages()
    weights = seen.take(_weights(engine))
    return {"weights": weights, "optimizer state": seen.take(_optimizer_state(engine))}


def take_largest(ranks: Iterable[Mapping[str, Mapping[str, int]]]) -> Held:
    """Return the maximum over ranks of each category and device."""
    found: Held = {}
    for rank in ranks:
        for category, places in rank.items():
            most = found.setdefault(category, {})
            for place, size in places.items():
                most[place] = max(size, most.get(place, 0))
    return found


class _Storages:
    """A counter of bytes that counts each storage once, however many tensors share it."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def take(self, tensors: Iterable[torch.Tensor]) -> dict[str, int]:
        """Return the bytes by device of the storages that were not seen before."""
        sizes: dict[str, int] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen and storage.nbytes():
                self._seen.add(storage._cdata)
                sizes[tensor.device.type] = sizes.get(tensor.device.type, 0) + storage.nbytes()
        return sizes


def _weights(engine: Any) -> Iterator[torch.Tensor]:
    for parameter in engine.module.parameters():
        yield parameter.ds_tensor if hasattr(parameter, "ds_id") else parameter
    yield from _tensors(getattr(engine.optimizer, "fp16_partitioned_groups_flat", []))
    yield from _tensors(getattr(engine.optimizer, RETURNING, []))


def _optimizer_state(engine: Any) -> Iterator[torch.Tensor]:
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    masters = [p for group in base.param_groups for p in group["params"]]
    masters += _tensors(getattr(engine.optimizer, "fp32_partitioned_groups_flat", []))
    for master in masters:
        yield master
        if master.grad is not None and base is not engine.optimizer:
            yield master.grad
    for state in base.state.values():
        yield from _tensors(state)


def _tensors(value: Any, depth: int = DEPTH) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth == 0:
        return
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner, depth - 1)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner, depth - 1)
    elif hasattr(value, "buffer"):  # DeepSpeed's buckets
        yield from _tensors(value.buffer, depth - 1)


def find_placement(engine: Any) -> Placement:
    """Return where this rank holds weights and optimizer state. Call it after a step was applied."""
    parameters = list(engine.module.parameters())
    held = [p.ds_tensor if hasattr(p, "ds_id") else p for p in parameters]
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    moments = [t for state in base.state.values() for name, t in state.items() if _is_moment(name, t)]
    swapped = _swapped_numel(engine)
    return Placement(
        Parameters(
            count=len(parameters),
            elements=sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
            trained_elements=sum(getattr(p, "ds_numel", p.numel()) for p in parameters if p.requires_grad),
            sharded=sum(hasattr(p, "ds_id") for p in parameters),
            bytes_on=_bytes_by_device(held),
        ),
        OptimizerState(
            elements=sum(t.numel() for t in moments) + 2 * swapped,
            bytes_on=_bytes_by_device(moments) | ({NVME: 2 * 4 * swapped} if swapped else {}),
            pinned_bytes=sum(t.nbytes for t in moments if t.device.type == "cpu" and t.is_pinned()),
            bytes_in={name: _bytes_by_format(tensors) for name, tensors in _states(engine, moments).items()},
        ),
    )


def unmet_expectations(found: Placement, ds: Mapping[str, Any], *, ranks: int, device_type: str) -> list[str]:
    """Return a message for each promise of the DeepSpeed config that the engine does not keep.

    `ranks` is how many share the optimizer state; `device_type` is where the model computes.
    """
    parameters, state = found.parameters, found.optimizer_state
    stage = ds_config.zero_stage(ds)
    problems = []
    if stage == 3 and parameters.sharded < parameters.count:
        problems.append(
            f"zero_optimization.stage=3 is not in effect: {parameters.count - parameters.sharded} of "
            f"{parameters.count} parameters are whole on every rank"
        )
    # no optimizer keeps more than AdamW's two moments
    share = 2 * parameters.trained_elements / (ranks if stage else 1)
    padding = 2 * 2 * ranks * max(1, parameters.count)
    if not 0 < state.elements <= share + padding:
        problems.append(
            f"zero_optimization.stage={stage} is not in effect: this rank holds {state.elements} elements of "
            f"optimizer state, its share is {share:.0f}"
        )
    places = {
        "offload_optimizer": (ds_config.optimizer_offload_device(ds), state.bytes_on),
        "offload_param": (ds_config.param_offload_device(ds) if stage == 3 else None, parameters.bytes_on),
    }
    for section, (wanted, bytes_on) in places.items():
        # with NVMe offload, what is too small to be swapped stays in host memory
        allowed = {wanted or device_type} | ({"cpu"} if wanted == NVME else set())
        # with Twin-Flow the first (1 - ratio) of the sub-groups are updated where the model computes
        if section == "offload_optimizer" and ds_config.offload_ratio(ds) < 1:
            allowed.add(device_type)
        if section == "offload_optimizer" and not wanted:
            allowed.add(PAGED)
        elsewhere = {place: size for place, size in bytes_on.items() if place not in allowed and size}
        if elsewhere:
            problems.append(
                f"zero_optimization.{section}.device={wanted or 'none'} is not in effect: bytes are on "
                f"{dict(bytes_on)}"
            )
    return problems + _other_formats(state.bytes_in, ds_config.optimizer_states(ds))


def _other_formats(bytes_in: Mapping[str, Mapping[str, int]], states: OptimStates) -> list[str]:
    """Return which states are in another number format than optim.states promises.

    With optim.states=fp32 moments are not checked: those of optimizers other than AdamW have formats of their own.
    """
    wanted = dict.fromkeys((MASTER, MASTER_GRADIENTS), "fp32" if states is OptimStates.fp32 else "bf16")
    if states is not OptimStates.fp32:
        wanted[MOMENTS] = "bf16" if states is OptimStates.bf16 else "fp32"
    return [
        f"optim.states={states} is not in effect: {name} are in {', '.join(sorted(bytes_in[name])) or 'no memory'}, "
        f"not in {form}"
        for name, form in wanted.items()
        if bytes_in[name].keys() - {form}
        or (states is not OptimStates.fp32 and name == MOMENTS and not bytes_in[name])
    ]


def describe_placement(found: Placement) -> str:
    """Return the placement in words, and the number formats of the states where they are not all fp32.

    Example: `12 of 12 parameters sharded, this rank holds 1.2 GiB on cuda; optimizer state 4.8 GiB on cpu`.
    """
    parameters, state = found.parameters, found.optimizer_state
    forms = [f"{name} in {form}" for name, sizes in state.bytes_in.items() for form in sorted(sizes)]
    return (
        f"{parameters.sharded} of {parameters.count} parameters sharded, this rank holds "
        f"{_places(parameters.bytes_on)}; optimizer state {_places(state.bytes_on)}"
    ) + f" ({', '.join(forms)})" * any("bf16" in sizes for sizes in state.bytes_in.values())


def _states(engine: Any, moments: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Return tensors by kind of state: ZeRO's master weights and their gradients, and the `moments`."""
    flat = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups")
    masters = [t for name in flat for t in _tensors(getattr(engine.optimizer, name, []))]
    gradients = [master.grad for master in masters if master.grad is not None]
    return {MASTER: masters, MASTER_GRADIENTS: gradients, MOMENTS: moments}


def _bytes_by_format(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[FORMATS.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))] += tensor.nbytes
    return {name: size for name, size in sizes.items() if size}


def _is_moment(name: str, value: Any) -> bool:
    """Return whether `value` is a moment, and not a scalar or a table of bitsandbytes' 8-bit optimizers."""
    return isinstance(value, torch.Tensor) and value.numel() > 1 and not name.startswith(("absmax", "qmap"))


def _bytes_by_device(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        on_nvme = getattr(getattr(tensor, "final_location", None), "value", None) == NVME
        numel = getattr(tensor, "ds_numel", tensor.numel())
        paged = getattr(tensor, "is_paged", False)  # torch reports bitsandbytes' paged memory as host memory
        sizes[NVME if on_nvme else PAGED if paged else tensor.device.type] += numel * tensor.element_size()
    return dict(sizes)


def _swapped_numel(engine: Any) -> int:
    """Return the number of elements of the master weights whose moments are on NVMe.

    In the place of these moments DeepSpeed keeps empty tensors.
    """
    swapper = getattr(engine.optimizer, "optimizer_swapper", None)
    if swapper is None:
        return 0
    swappable = engine.optimizer._swappable_optimizer_subgroup
    sizes = engine.optimizer.fp16_partitioned_groups_flat_numel
    return sum(numel for index, numel in enumerate(sizes) if swappable(index))


def flat_buffer_bytes(engine: Any) -> int:
    """Return the bytes of the buffer that ZeRO-1 and 2 copied this rank's trained weights into; 0 at other stages."""
    return sum(flat.nbytes for flat in getattr(engine.optimizer, "bit16_groups_flat", ()))


def swap_buffers_bytes(engine: Any) -> int:
    """Return the bytes of this rank's buffers between host memory and NVMe."""
    own = (getattr(p, "nvme_swapper", None) for p in engine.module.parameters())
    of_weights = {id(found): found for found in own if found is not None}.values()
    of_state = getattr(engine.optimizer, "optimizer_swapper", None)
    buffers = [
        b for swapper in of_weights for b in (swapper.buffers, swapper.partitioned_swap_buffer) if b is not None
    ]
    buffers += [] if of_state is None else of_state.swap_buffer_manager.all_buffers
    return sum(buffer.nbytes for buffer in buffers)


def _places(bytes_on: Mapping[str, int]) -> str:
    return ", ".join(f"{format_size(size)} on {place}" for place, size in sorted(bytes_on.items())) or "nothing"
