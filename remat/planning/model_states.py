"""List the model states of DeepSpeed 0.19.8: parameters, gradients, master copy, moments, buckets, host buffers.

They are a lower bound of a run's memory, taken at the end of backward. Activations, gathered weights, kernel
workspaces and the optimizer step's temporaries come on top. Each term names the line of DeepSpeed that
allocates it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from remat.config import ds_config, ds_defaults
from remat.config.options import OptimName, OptimStates
from remat.config.units import MIB
from remat.machine.allocator import TORCH_DEFAULT, Allocators
from remat.model import optimizer_state
from remat.model.four_bits.layout_4bit import BLOCK, BLOCK_OF_CONSTANTS, flat_bytes

Place = Literal["gpu", "host", "pinned", "nvme"]
FP32 = 4  # bytes
SECOND_SHARDS = "second shards of parameters"
WEIGHTS = (  # the names of items that are the model's weights
    "parameters",
    "frozen parameters",
    "4-bit weights",
    "constants of 4-bit weights",
    "constants of the constants",
    "means of the constants",
    "tables of 4-bit values",
    "tables of 8-bit values",
)
MIN_SWAPPED_BYTES = MIB  # runtime/swap_tensor/utils.py:14
S12 = "runtime/zero/stage_1_and_2.py"
S3 = "runtime/zero/stage3.py"
PARTITION = "runtime/zero/partition_parameters.py"
PARAM_SWAPPER = "runtime/swap_tensor/partitioned_param_swapper.py"
STATE_SWAPPER = "runtime/swap_tensor/partitioned_optimizer_swapper.py"
CPU_ADAM, CPU_LION = "ops/adam/cpu_adam.py:161", "ops/lion/cpu_lion.py:121"
MODEL, AUTOGRAD, TORCH_ADAM = "the model", "torch.autograd", optimizer_state.SOURCE[OptimName.adamw]
BNB, BNB_CUDA = "bitsandbytes/functional.py", "bitsandbytes/backends/cuda/ops.py"  # 0.50.2


@dataclass(frozen=True)
class Item:
    """An allocation: its bytes on one rank, and on all ranks of a node together.

    `pinned` is page-locked host memory. torch may round it up to a power of two; `raw_bytes_per_rank` is the size
    before rounding. `mlocked` marks memory that DeepSpeed locks itself, within RLIMIT_MEMLOCK. `source` is a
    line of the deepspeed package or of bitsandbytes, or names who else allocates.
    """

    name: str
    place: Place
    bytes_per_rank: int
    bytes_per_node: int
    raw_bytes_per_rank: int
    source: str
    mlocked: bool = False


def model_states(
    *,
    num_params: int,
    largest_param: int,
    ds: Mapping[str, Any],
    world_size: int,
    ranks_per_node: int,
    gas: int,
    can_pin: bool = True,
    num_trainable_params: int | None = None,
    largest_trainable_param: int | None = None,
    quantised_weights: Sequence[int] = (),
    optimizer: OptimName = OptimName.adamw,
    trained_shapes: Sequence[optimizer_state.Shape] = (),
    allocators: Allocators = TORCH_DEFAULT,
) -> list[Item]:
    """Return the model states of each rank under the rendered DeepSpeed dict `ds`.

    Frozen parameters have no gradient, master copy or moments. Both trainable counts are None when all
    parameters are trained. `quantised_weights` are the element counts of the frozen matrices held in 4 bits;
    each rank holds them whole, under stage 3 its part of each. `gas` is the number of micro-batches per optimizer
    step. `can_pin` is false without CUDA, where a pinned allocation is an ordinary one. Padding (a few elements per
    parameter) is left out. The state of another optimizer than AdamW follows from `trained_shapes`, in the model's
    order. `allocators` says how torch rounds page-locked buffers.
    """
    trained = num_params if num_trainable_params is None else num_trainable_params
    largest = largest_param if largest_trainable_param is None else largest_trainable_param
    frozen = num_params - trained - sum(quantised_weights)
    sizes = _Sizes(trained, frozen, largest, ds, world_size, ranks_per_node, gas, can_pin)
    sizes.optimizer, sizes.shapes, sizes.allocators = optimizer, trained_shapes, allocators
    build = {0: _stage_0, 1: _stage_1_2, 2: _stage_1_2, 3: _stage_3}[sizes.stage]
    items = [*build(sizes), *_quantised(sizes, quantised_weights)]
    return [item for item in items if item.bytes_per_rank > 0]


def update_bytes(
    *,
    num_trainable_params: int,
    largest_trainable_param: int,
    ds: Mapping[str, Any],
    world_size: int,
    optimizer: OptimName = OptimName.adamw,
) -> int:
    """Return the peak bytes of copies on the GPU during the optimizer's update.

    The copies lie beside the model states: gradients are flattened, then converted to fp32. Under stages 1 and
    2 this is done for this rank's share (stage_1_and_2.py:3110-3119; not with gradients that are fp32 and flat
    already, :1259), under stage 3 for one sub-group after another (stage3.py:2686). Without ZeRO all gradients
    are converted to fp32 (runtime/fp16/unfused_optimizer.py:222; plain fp32 has no copy). Adafactor also has
    two fp32 copies of the weight that it updates (transformers/optimization.py:1262).
    """
    s = _Sizes(num_trainable_params, 0, largest_trainable_param, ds, world_size, 1, 1, False)
    if s.optimizer_device:
        return 0
    if s.stage == 0:
        own = 2 * FP32 * s.largest if optimizer is OptimName.adafactor else 0
        return own + (0 if s.width == FP32 else FP32 * s.params)
    flat = s.grad_width + (s.master if s.grad_width < s.master else 0)
    if s.stage == 3:
        return flat * max(_sub_groups(s))
    return 0 if s.grad_width > s.width else flat * s.shard


class _Sizes:
    """Bytes per element, and element counts: of trained parameters, but for the frozen counts."""

    def __init__(
        self,
        num_params: int,
        num_frozen: int,
        largest_param: int,
        ds: Mapping[str, Any],
        world_size: int,
        ranks_per_node: int,
        gas: int,
        can_pin: bool,
    ) -> None:
        self.params, self.frozen, self.largest, self.gas = num_params, num_frozen, largest_param, gas
        self.frozen_shard = math.ceil(num_frozen / world_size)
        self.shard = math.ceil(num_params / world_size)
        self.largest_shard = math.ceil(largest_param / world_size)
        self.ranks_per_node, self.can_pin = ranks_per_node, can_pin
        self.ranks, self.optimizer = world_size, OptimName.adamw
        self.shapes: Sequence[optimizer_state.Shape] = ()
        self.allocators = TORCH_DEFAULT
        self.ds, self.zero = ds, ds["zero_optimization"]
        self.stage = ds_config.zero_stage(ds)
        self.optimizer_device = ds_config.optimizer_offload_device(ds)
        self.param_device = ds_config.param_offload_device(ds)
        self.dtype = "bf16" if ds["bf16"]["enabled"] else "fp16" if ds["fp16"]["enabled"] else "fp32"
        self.width = ds_defaults.BYTES[self.dtype]
        states = ds_config.optimizer_states(ds)
        self.master = FP32 if states is OptimStates.fp32 else ds_defaults.BYTES["bf16"]  # and of its gradient
        self.moments = 2 * (ds_defaults.BYTES["bf16"] if states is OptimStates.bf16 else FP32)  # AdamW's two
        self.grad_width = ds_defaults.BYTES[ds["data_types"]["grad_accum_dtype"]]
        self.pin_optimizer = bool(self.optimizer_device and self.zero["offload_optimizer"]["pin_memory"])

    @property
    def on_host(self) -> str:
        """Return the line of DeepSpeed's kernel on the host. Its Lion has a second moment, which it never reads."""
        return CPU_LION if self.optimizer is OptimName.lion else CPU_ADAM

    def item(self, name: str, place: Place, size: int, source: str) -> Item:
        return Item(name, place, size, size * self.ranks_per_node, size, source)

    def pinned(self, name: str, sizes: list[int], pin: bool, source: str) -> Item:
        """Return the item of host buffers of `sizes` bytes. torch locks each if `pin` holds and the machine can."""
        raw = sum(sizes)
        if not (pin and self.can_pin):
            return self.item(name, "host", raw, source)
        rounded = sum(self.allocators.pinned_bytes(size) for size in sizes)
        return Item(name, "pinned", rounded, rounded * self.ranks_per_node, raw, source)

    def mlocked(self, name: str, size: int, source: str) -> Item:
        """Return the item of a buffer of DeepSpeed's own asynchronous I/O: page-aligned and locked, not rounded."""
        return Item(name, "pinned", size, size * self.ranks_per_node, size, source, mlocked=True)


def _quantised(s: _Sizes, weights: Sequence[int]) -> list[Item]:
    """Return the items of weights in NF4 with double quantisation.

    Each block of weights has an 8-bit constant, and each 256 of those constants have an fp32 one. Each matrix
    also has one fp32 mean of its constants, and two tables of values, of 16 and 256 fp32 numbers.

    Under stage 3 all but the tables is one flat parameter of bytes; one table of 1 KiB serves all matrices of a rank
    and is left out.
    """
    if s.stage == 3 and weights:
        return _quantised_3(s, weights)
    constants = [math.ceil(elements / BLOCK) for elements in weights]
    of_constants = sum(math.ceil(count / BLOCK_OF_CONSTANTS) for count in constants)
    packed = sum(math.ceil(elements / 2) for elements in weights)
    return [
        s.item("4-bit weights", "gpu", packed, f"{BNB_CUDA}:392"),
        s.item("constants of 4-bit weights", "gpu", sum(constants), f"{BNB_CUDA}:311"),
        s.item("constants of the constants", "gpu", 4 * of_constants, f"{BNB_CUDA}:310"),
        s.item("means of the constants", "gpu", 4 * len(weights), f"{BNB}:939"),
        s.item("tables of 4-bit values", "gpu", 4 * 16 * len(weights), f"{BNB}:854"),
        s.item("tables of 8-bit values", "gpu", 4 * 256 * len(weights), f"{BNB}:677"),
    ]


def _quantised_3(s: _Sizes, weights: Sequence[int]) -> list[Item]:
    """Return this rank's shards of flat 4-bit parameters, each allocated where frozen parameters are."""
    shards = [math.ceil(flat_bytes(elements) / s.ranks) for elements in weights]
    if s.param_device is None:
        return [s.item("4-bit weights", "gpu", sum(shards), f"{PARTITION}:1836")]
    pin = bool(s.zero["offload_param"]["pin_memory"])
    return [s.pinned("4-bit weights", shards, pin, f"{PARTITION}:1836")]


def _moments(s: _Sizes, numel: int) -> list[Item]:
    """Return the items of the optimizer's state where the model computes, of `numel` parameters on this rank.

    Memory that the driver pages counts as host memory: at the peak of a full GPU it lies there.
    """
    if s.optimizer is OptimName.adamw:
        return [s.item("moments", "gpu", s.moments * numel, TORCH_ADAM)]
    size = s.zero.get("sub_group_size", 0)
    tensors = optimizer_state.shard(s.shapes, zero_stage=s.stage, ranks=s.ranks, sub_group_size=size)
    kept, source = optimizer_state.count_state(s.optimizer, tensors), optimizer_state.SOURCE[s.optimizer]
    if not s.can_pin:
        return [s.item("moments", "gpu", kept.on_device + kept.paged, source)]
    return [
        s.item("moments", "gpu", kept.on_device, source),
        s.item("paged moments", "host", kept.paged, source),
    ]


def _stage_0(s: _Sizes) -> list[Item]:
    items = [
        s.item("parameters", "gpu", s.width * s.params, MODEL),
        s.item("frozen parameters", "gpu", s.width * s.frozen, MODEL),
        s.item("gradients", "gpu", s.width * s.params, AUTOGRAD),
        *_moments(s, s.params),
    ]
    if s.width < FP32:  # plain fp32 is trained by the optimizer itself, without a wrapper
        source = "runtime/fp16/unfused_optimizer.py:78"
        items.append(s.item("master parameters", "gpu", s.master * s.params, source))
    return items


def _stage_1_2(s: _Sizes) -> list[Item]:
    """Return the items of stages 1 and 2: parameters whole on each GPU, optimizer state sharded.

    The parameters are 16-bit or fp32. An fp32 run keeps a master copy too.
    """
    items = [
        s.item("parameters", "gpu", s.width * s.params, f"{S12}:505"),
        s.item("frozen parameters", "gpu", s.width * s.frozen, MODEL),
        *_gradients_1_2(s),
    ]
    if s.optimizer_device is None:
        return [
            *items,
            s.item("master parameters", "gpu", s.master * s.shard, f"{S12}:560"),
            *_moments(s, s.shard),
        ]
    pin = s.pin_optimizer
    items += [
        s.item("gradient staging on the GPU", "gpu", s.width * s.largest, f"{S12}:659"),
        s.pinned("master parameters", [s.master * s.shard], pin, f"{S12}:560"),
        s.pinned("parameters on their way back", [s.width * s.shard], pin, f"{S12}:567"),
        s.pinned("master gradients", [s.master * s.shard], pin, f"{S12}:937"),
        s.item("moments", "host", s.moments * s.shard, s.on_host),
        s.pinned("gradient staging", [s.width * s.largest], pin, f"{S12}:653"),
    ]
    if s.stage == 2 and s.gas > 1 and s.grad_width == s.width and s.master == FP32:  # else in master gradients
        # One buffer per parameter, each rounded. Their sizes are not known here, so the sum is not rounded.
        place: Place = "pinned" if pin and s.can_pin else "host"
        items.append(s.item("accumulated gradients", place, s.width * s.shard, f"{S12}:1824"))
    return items


def _gradients_1_2(s: _Sizes) -> list[Item]:
    """Return the gradients at the end of backward and the reduction buckets, on the GPU."""
    buckets = (2 if s.zero["overlap_comm"] else 1) * s.zero["reduce_bucket_size"]
    offloaded, separate = s.optimizer_device is not None, s.grad_width > s.width
    bucket_width = s.grad_width if s.stage == 1 and separate else s.width
    items: list[Item] = []
    # DeepSpeed's BF16_Optimizer: no bucket
    if s.stage == 1 and separate and s.dtype == "bf16" and not offloaded:
        return [
            s.item("gradients", "gpu", s.width * s.params, AUTOGRAD),
            s.item("accumulated gradients", "gpu", s.grad_width * s.params, "runtime/bf16_optimizer.py:191"),
        ]
    if s.stage == 1:
        kept = s.params if s.gas > 1 else 0 if offloaded else s.shard
        items.append(s.item("gradients", "gpu", bucket_width * kept, f"{S12}:{1237 if separate else 2192}"))
    elif separate:
        items.append(s.item("gradients", "gpu", s.grad_width * s.shard, f"{S12}:1270"))
    elif not offloaded:
        items.append(s.item("gradients", "gpu", s.width * s.shard, f"{S12}:2192"))
    if s.zero["contiguous_gradients"] or offloaded:
        items.append(s.item("reduction buckets", "gpu", bucket_width * buckets, f"{S12}:3266"))
    return items


def _stage_3(s: _Sizes) -> list[Item]:
    """Return the items of stage 3: everything is sharded.

    An fp32 run keeps a master copy too, because DeepSpeed compares a device with its name.
    """
    items = _params_3(s) + _second_shards(s)
    if s.zero["contiguous_gradients"]:
        width = ds_defaults.BYTES[s.ds["communication_data_type"]]
        items.append(s.item("reduction bucket", "gpu", width * s.zero["reduce_bucket_size"], f"{S3}:782"))
    flat = s.grad_width * s.shard
    if s.optimizer_device is None:
        return [
            *items,
            s.item("gradients", "gpu", flat, f"{S3}:791"),
            s.item("master parameters", "gpu", s.master * s.shard, f"{S3}:1170"),
            *_moments(s, s.shard),
        ]
    items.append(s.pinned("gradients", [flat], s.pin_optimizer, f"{S3}:791"))
    return items + (_optimizer_nvme(s) if s.optimizer_device == "nvme" else _optimizer_cpu(s))


def _second_shards(s: _Sizes) -> list[Item]:
    """Return this rank's part of the second copy of the weights (hpZ: Wang et al. 2023, ZeRO++, section 3.2).

    It is made in the first forward of a step, as weights are released, and dropped after the update (stage3.py:755).
    """
    size = ds_config.second_shard_ranks(s.ds)
    if size <= 1:
        return []
    elements = math.ceil((s.params + s.frozen) / size)
    pin = s.param_device == "cpu" and bool(s.zero["offload_param"]["pin_memory"]) and s.can_pin
    place: Place = "gpu" if s.param_device is None else "pinned" if pin else "host"
    return [s.item(SECOND_SHARDS, place, s.width * elements, f"{PARTITION}:1915")]


def _params_3(s: _Sizes) -> list[Item]:
    frozen = s.width * s.frozen_shard
    if s.param_device is None:
        return [
            s.item("parameters", "gpu", s.width * s.shard, f"{S3}:972"),
            s.item("frozen parameters", "gpu", frozen, f"{PARTITION}:1836"),
        ]
    section = s.zero["offload_param"]
    if s.param_device == "cpu":
        # One buffer per frozen parameter, each rounded. Their sizes are not known here, so the sum is not rounded.
        place: Place = "pinned" if section["pin_memory"] and s.can_pin else "host"
        return [
            # pinned whatever offload_param.pin_memory says
            s.pinned("parameters", [s.width * s.shard], True, f"{S3}:906"),
            s.item("frozen parameters", place, frozen, f"{PARTITION}:1836"),
        ]
    resident = min(section["max_in_cpu"], s.shard)
    buffers = section["buffer_count"] * section["buffer_size"]
    small = sum(n for group in _swap_groups(s) for n in group if s.width * n < _least_swapped_bytes(s))
    items = [
        s.item("parameters", "nvme", s.width * (s.shard - small), f"{PARAM_SWAPPER}:265"),
        s.item("frozen parameters", "nvme", frozen, f"{PARAM_SWAPPER}:265"),
        s.pinned("parameters kept in host memory", [s.width * resident], True, f"{S3}:906"),
        s.mlocked("parameter swap buffers", s.width * buffers, f"{PARAM_SWAPPER}:131"),
    ]
    if resident < s.shard:
        write = s.width * max(map(sum, _swap_groups(s)))
        items += [
            s.item("parameters too small to be swapped", "host", s.width * small, f"{PARTITION}:1836"),
            s.mlocked("parameter write buffer", write, f"{PARAM_SWAPPER}:396"),
        ]
    return items


def _optimizer_cpu(s: _Sizes) -> list[Item]:
    """Return the optimizer's items with sub-groups on the host.

    With offload_optimizer.ratio below 1 the first sub-groups stay on the GPU.
    """
    groups = _sub_groups(s)
    on_gpu = int((1 - s.zero["offload_optimizer"]["ratio"]) * len(groups))
    kept, moved = sum(groups[:on_gpu]), groups[on_gpu:]
    return [
        s.item("master parameters", "gpu", s.master * kept, f"{S3}:1158"),
        s.item("master gradients", "gpu", s.master * kept, f"{S3}:1342"),
        s.item("moments", "gpu", s.moments * kept, TORCH_ADAM),
        s.item("master parameters", "host", s.master * sum(moved), f"{S3}:1158"),
        s.pinned("master gradients", [s.master * n for n in moved], s.pin_optimizer, f"{S3}:1338"),
        s.item("moments", "host", s.moments * sum(moved), s.on_host),
    ]


def _optimizer_nvme(s: _Sizes) -> list[Item]:
    """Return the optimizer's items with sub-groups on NVMe.

    Four tensors of one group at a time are in host memory. Tiny groups always stay in host memory, and so do the
    gradients of small weights until the update.
    """
    smallest, groups = _least_swapped_bytes(s), _swap_groups(s)
    swapped = [group for group in groups if s.master * sum(group) >= smallest]
    kept = [sum(group) for group in groups if s.master * sum(group) < smallest]
    small = sum(n for group in swapped for n in group if s.master * n < smallest)
    buffers = s.zero["offload_optimizer"]["buffer_count"] * max(map(sum, groups))
    on_disk = (2 * s.master + s.moments) * sum(map(sum, swapped)) - s.master * small
    return [
        s.item("master parameters, moments, gradients", "nvme", on_disk, f"{STATE_SWAPPER}:105"),
        s.mlocked("optimizer swap buffers", s.master * buffers, "runtime/swap_tensor/utils.py:192"),
        s.item("master parameters", "host", s.master * sum(kept), f"{S3}:1158"),
        s.pinned("master gradients", [s.master * n for n in kept], s.pin_optimizer, f"{S3}:1338"),
        s.item("gradients of small weights", "host", s.master * small, f"{S3}:1453"),
        s.item("moments", "host", s.moments * sum(kept), CPU_ADAM),
    ]


def _least_swapped_bytes(s: _Sizes) -> int:
    """Return the bytes from which DeepSpeed writes a tensor to NVMe."""
    return max(MIN_SWAPPED_BYTES, int(s.ds["aio"]["block_size"]))


def _swap_groups(s: _Sizes) -> list[list[int]]:
    """Return the elements of this rank's pieces by sub-group; one piece in each where shapes are not known."""
    if s.shapes:
        return optimizer_state.sub_groups(s.shapes, ranks=s.ranks, size=s.zero["sub_group_size"])
    return [[size] for size in _sub_groups(s)]


def _sub_groups(s: _Sizes) -> list[int]:
    """Return the elements of each sub-group of one rank (stage3.py:1210).

    The parameter that reaches sub_group_size closes a sub-group. By how much it exceeds the size is unknown
    here. A group is at least as large as the largest parameter's shard that it must hold.
    """
    size = s.zero["sub_group_size"]
    if size <= 0 or size >= s.shard:
        return [s.shard]
    first = min(max(size, s.largest_shard), s.shard)
    full, rest = divmod(s.shard - first, size)
    return [first, *[size] * full, *([rest] if rest else [])]
