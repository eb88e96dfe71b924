"""Define the results of a simulated micro-batch and its ZeRO settings. Bytes, elements and FLOPs are of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from remat.config import ds_config


class Category(StrEnum):
    """The purpose of bytes on the GPU; each is a row of a plan."""

    weights = "weights"
    gradients = "gradients"
    optimizer_state = "optimizer state"
    gathered = "gathered and prefetched parameters"
    buckets = "communication buckets"
    second_shards = "second shards of weights"  # of hpZ
    activations = "kept activations"
    recompute = "recompute transients"
    loss = "logits and loss"
    overhead = "allocator and context"


class Phase(StrEnum):
    forward = "forward"
    recompute = "recompute"
    backward = "backward"
    step = "optimizer step"


@dataclass(frozen=True)
class OpCost:
    """The cost of one operation: a multiply-add counts 2 FLOPs; `bytes` are read and written.

    `kind` is matmul, attention, elementwise, exchange (blocks of sequences for heads, between ranks) or sum (over the
    ranks that share a layer, in place).
    """

    kind: str
    flops: int
    bytes: int
    phase: Phase


@dataclass(frozen=True)
class Moment:
    """An instant at which memory peaks: bytes by category on top of the model states, and where the run is then."""

    total_bytes: int
    by_category: Mapping[Category, int]
    phase: Phase
    layer: int | None  # None: outside of the decoder layers
    operation: str
    module: str = ""  # the part of the layer, or of the model, whose weight was used last

    def in_words(self) -> str:
        """Return for example `backward of layer 31, MLP`."""
        if self.phase is Phase.step:
            return "update of the weights"
        named = MODULE_WORDS.get(self.module, self.module)
        doing = "recomputation" if self.phase is Phase.recompute else str(self.phase)
        place = "outside the layers" if self.layer is None else f"of layer {self.layer}"
        return f"{doing} {place}" + f", {named}" * bool(named)


MODULE_WORDS = {
    "self_attn": "attention",
    "attn": "attention",
    "mlp": "MLP",
    "lm_head": "output layer and loss",
    "embed_tokens": "embedding",
    "wte": "embedding",
}
PEAKS = ("forward", "loss", "backward", "update")  # the parts of a step that a plan gives a peak of


@dataclass(frozen=True)
class Simulation:
    """The costs of one micro-batch on meta tensors. Bytes per layer are those that stay from forward to backward."""

    forward_peak: Moment
    backward_peak: Moment
    kept_bytes: list[int]
    host_bytes: int  # host memory that was allocated for activations, at the end of forward
    flops: Mapping[Phase, int]
    ops: list[OpCost] = field(repr=False)
    gathered_bytes: int  # gathered by ZeRO-3 over forward and backward, with reuse as configured
    assumptions: list[str]
    peaks: Mapping[str, Moment] = field(default_factory=dict)  # of PEAKS, without the update
    forward_end_bytes: int = 0  # all that the micro-batch holds between forward and backward
    moved_bytes: int = 0  # of activations that go to host memory, and come back

    @property
    def exchanged_bytes(self) -> int:
        """Return what a rank gives in exchanges with the ranks that share its sequences, its own part included."""
        return sum(op.bytes // 2 for op in self.ops if op.kind == "exchange")

    @property
    def summed_bytes(self) -> int:
        """Return the bytes of the tensors that are summed over the ranks that share the layers."""
        return sum(op.bytes // 2 for op in self.ops if op.kind == "sum")

    @property
    def peak(self) -> Moment:
        return max(self.forward_peak, self.backward_peak, key=lambda moment: moment.total_bytes)


@dataclass(frozen=True)
class ZeroSettings:
    """The part of a rendered DeepSpeed dict that decides what is on the GPU during a micro-batch.

    Sizes in elements.
    """

    stage: int
    world_size: int
    reduce_bucket_size: int
    overlap_comm: bool
    prefetch_bucket_size: int = 0
    param_persistence_threshold: int = 0
    max_live_parameters: int = 0
    max_reuse_distance: int = 0
    offload_optimizer: bool = False
    offload_param: bool = False
    second_shards: int = 1  # ranks that share a second copy of the weights (hpZ)
    accumulating: bool = False  # gradients of an earlier micro-batch are already there
    tensor_ranks: int = 1  # that share each layer

    @classmethod
    def of(cls, ds: Mapping[str, Any], world_size: int) -> ZeroSettings:
        """Read the settings from the dict that reaches the engine.

        Model states are sharded over those of the `world_size` ranks that have the same part and stage of the model.
        """
        zero, tensor_ranks = ds["zero_optimization"], ds_config.tensor_ranks(ds)
        return cls(
            stage=ds_config.zero_stage(ds),
            world_size=world_size // (tensor_ranks * ds_config.pipeline_stages(ds)),
            reduce_bucket_size=int(zero.get("reduce_bucket_size", 0)),
            overlap_comm=bool(zero.get("overlap_comm", False)),
            prefetch_bucket_size=int(zero.get("stage3_prefetch_bucket_size", 0)),
            param_persistence_threshold=int(zero.get("stage3_param_persistence_threshold", 0)),
            max_live_parameters=int(zero.get("stage3_max_live_parameters", 0)),
            max_reuse_distance=int(zero.get("stage3_max_reuse_distance", 0)),
            offload_optimizer=ds_config.optimizer_offload_device(ds) is not None,
            offload_param=ds_config.param_offload_device(ds) is not None,
            second_shards=ds_config.second_shard_ranks(ds),
            accumulating=ds["gradient_accumulation_steps"] > 1,
            tensor_ranks=tensor_ranks,
        )
