"""The configuration keys that DeepSpeed 0.19.8 reads, and the value of each that is written if a file gives none.

Read from `deepspeed/runtime/config.py`, `runtime/zero/config.py`, `runtime/zero/offload_config.py` and
`runtime/precision_config.py`; `tests/config/test_ds_config.py` compares these tables with the installed version.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

ZERO = "zero_optimization"
SECOND_SHARDS = "zero_hpz_partition_size"  # ranks that share a second copy of the weights
OFFLOADS = ("offload_optimizer", "offload_param")
SIZES = (  # filled from the model's width
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
)

# Every value is written, so a default that changes between versions cannot change a run: gradient_clipping became
# 1.0 in 0.19.3, pin_memory became true in 0.19.5, bf16.check_grad_overflow became true.
TOP_LEVEL: dict[str, Any] = {
    "zero_allow_untested_optimizer": False,
    "zero_force_ds_cpu_optimizer": True,
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "wall_clock_breakdown": False,
    "memory_breakdown": False,
    "dump_state": False,
    "disable_allgather": False,
    "disable_python_gc": False,
    "dataloader_drop_last": False,
    # on, it stops the GPU every micro-step
    "timers": {"throughput": {"enabled": False, "synchronized": False}},
    "torch_autocast": {"enabled": False},
    "managed_gradient_accumulation": True,
    "gradient_allreduce_op": "mean",
    "checkpoint": {"tag_validation": "Warn", "load_universal": False, "use_node_local_storage": False},
}

# Owned by the run: filled in, and a different literal is an error naming the option on the right.
OWNED: dict[str, str] = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size / (train.micro_batch_size * ranks)",
    "gradient_clipping": "optim.gradient_clipping",
    "bf16.enabled": "train.precision",
    "bf16.bf16_master_weights_and_grads": "optim.states",
    "bf16.bf16_optimizer_states": "optim.states",
    "fp16.enabled": "train.precision",
}

# What the training loop or the optimizer takes for granted: a different literal is an error with this reason.
FIXED: dict[str, str] = {
    "managed_gradient_accumulation": "the training loop steps on DeepSpeed's accumulation boundary",
    "gradient_allreduce_op": "the training loop scales the loss for a mean over ranks",
    "torch_autocast.enabled": "train.precision sets the type of parameters and gradients",
    "bf16.check_grad_overflow": "a step whose gradient is not finite is skipped",
    "fp16.fp16_master_weights_and_grads": "optim.states has 16-bit master weights for train.precision=bf16 alone",
    "zero_optimization.offload_optimizer.super_offload": "optim=... has no optimizer for it",
    "zero_optimization.compute_grad_norm": "the run logs and clips by the gradient norm",
    "checkpoint.load_universal": "resume switches it on for the states that need it (reshard=auto)",
}

# Allowed when somebody writes them, absent otherwise.
OPTIONAL = (
    "aio",
    "bf16",
    "comet",
    "comms_logger",
    "communication_data_type",
    "csv_monitor",
    "data_types",
    "flops_profiler",
    "fp16",
    "log_level",
    "seq_parallel_communication_data_type",
    "steps_per_print",
    "tensorboard",
    "vocabulary_size",
    "zero_optimization",
)

_REMOVED = "DeepSpeed removed it: delete it"
_NO_EFFECT = "it has no effect here: delete it"
_ONE_DIMENSION = "it changes the number of data-parallel ranks, which this run takes to be all ranks: delete it"
REFUSED: dict[str, str] = {
    "optimizer": "the run's optimizer is set by optim=... (optim.lr, optim.weight_decay, ...): delete the section",
    "scheduler": "the learning rate is set by optim=... (optim.schedule, optim.warmup_steps): delete the section",
    "activation_checkpointing": "DeepSpeed never reads it for Hugging Face models: delete the section and use "
    "checkpointing=deepspeed with checkpointing.deepspeed.partition_activations and the like",
    "bfloat16": "the old spelling of bf16: delete it, train.precision=bf16 fills bf16.enabled",
    "wandb": "Weights & Biases is set by tracking.wandb: delete the section",
    "tensor_parallel": "the run's is set by train.tensor_parallel_size: delete the section",
    "expert_parallel": _ONE_DIMENSION,
    "sequence_parallel_size": "sequences are shared by train.sequence_parallel_size: delete the key",
    "use_data_before_expert_parallelism": _ONE_DIMENSION,
    "pipeline": "stages are asked for by train.pipeline_parallel_size: delete the section",
    "compile": _NO_EFFECT,
    "hybrid_engine": _NO_EFFECT,
    "weight_quantization": _NO_EFFECT,
    "data_efficiency": "the data order is set by data=...: delete the section",
    "datastates_ckpt": "saving is set by save=...: delete the section",
    "autotuning": "it starts runs of its own: delete the section",
    "amp": _REMOVED,
    "compression_training": _REMOVED,
    "curriculum_learning": _REMOVED,
    "eigenvalue": _REMOVED,
    "elasticity": _REMOVED,
    "graph_harvesting": _REMOVED,
    "nebula": _REMOVED,
    "progressive_layer_drop": _REMOVED,
    "quantize_training": _REMOVED,
    "sparse_attention": _REMOVED,
    "sparse_gradients": _REMOVED,
}

ZERO_ALWAYS: dict[str, Any] = {
    "stage": None,
    "contiguous_gradients": True,
    "reduce_scatter": True,
    "overlap_comm": True,
    "reduce_bucket_size": "auto",
}
ZERO_BELOW_3: dict[str, Any] = {
    "allgather_partitions": True,
    "allgather_bucket_size": 500_000_000,
    "use_multi_rank_bucket_allreduce": True,
    "round_robin_gradients": False,
    "ignore_unused_parameters": True,
    "parameter_alignment": False,
    "compute_grad_norm": True,
}
ZERO_3: dict[str, Any] = {
    "sub_group_size": 1_000_000_000,
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_gather_16bit_weights_on_model_save": False,
    "stage3_module_granularity_threshold": 0,
    "stage3_use_all_reduce_for_fetch_params": False,
    "stage3_allgather_sequential": False,
    "memory_efficient_linear": True,
    SECOND_SHARDS: 1,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
}
# Rarely needed, or about loading; DeepSpeed's default holds unless somebody writes them.
ZERO_OPTIONAL = (
    "offload_optimizer",
    "offload_param",
    "load_from_fp32_weights",
    "override_module_apply",
    "enable_sanity_checks",
    "log_trace_cache_warnings",
    "leaf_module",
)
ZERO_3_OPTIONAL = ("stage3_model_persistence_threshold", "pipeline_loading_checkpoint")
ZERO_REFUSED: dict[str, str] = {
    "cpu_offload": "write offload_optimizer: {device: cpu}",
    "cpu_offload_param": "write offload_param: {device: cpu}",
    "cpu_offload_use_pin_memory": "write pin_memory inside offload_optimizer and offload_param",
    "stage3_gather_fp16_weights_on_model_save": "write stage3_gather_16bit_weights_on_model_save",
    "elastic_checkpoint": "DeepSpeed no longer supports it: delete it",
    "legacy_stage1": "DeepSpeed no longer supports it: delete it",
    "zenflow": "it changes the optimizer's mathematics and needs its own trainer: delete it",
    "save_muon_momentum_buffer_in_memory": "it belongs to the Muon optimizer: delete it",
    "mics_shard_size": _REMOVED,
    "mics_hierarchical_params_gather": _REMOVED,
    "zeropp_loco_param": _REMOVED,
}

OFFLOAD_OPTIMIZER: dict[str, Any] = {
    "device": None,
    "pin_memory": True,
    "ratio": 1.0,
    "super_offload": False,
    "cpuadam_cores_perc": 0.8,
}
OFFLOAD_OPTIMIZER_NVME: dict[str, Any] = {
    "nvme_path": "auto",
    "buffer_count": 4,  # master, two moments, gradient
    "pipeline_read": False,
    "pipeline_write": False,
    "fast_init": False,
}
OFFLOAD_PARAM: dict[str, Any] = {"device": None, "pin_memory": True}
OFFLOAD_PARAM_NVME: dict[str, Any] = {
    "nvme_path": "auto",
    "buffer_count": 5,
    "buffer_size": "auto",  # elements: the largest parameter's shard
    "max_in_cpu": 1_000_000_000,
}

BF16: dict[str, Any] = {
    "enabled": "auto",
    "immediate_grad_update": False,
    "check_grad_overflow": True,
    "bf16_master_weights_and_grads": "auto",
    "bf16_optimizer_states": "auto",
}
FP16: dict[str, Any] = {
    "enabled": "auto",
    "auto_cast": False,
    "loss_scale": 0,  # 0: dynamic
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1,
    "fp16_master_weights_and_grads": False,
}
AIO: dict[str, Any] = {
    "block_size": 1_048_576,
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
    "use_gds": False,
}
DATA_TYPES = ("grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules")
CHECKPOINT_OPTIONAL = ("checkpoint_serialization", "writer", "parallel_write")

SECTIONS: dict[str, set[str]] = {  # nested sections whose keys are checked
    "bf16": {*BF16},
    "fp16": {*FP16},
    "aio": {*AIO},
    "data_types": {*DATA_TYPES},
    "checkpoint": {*TOP_LEVEL["checkpoint"], *CHECKPOINT_OPTIONAL},
    "zero_optimization.offload_optimizer": {*OFFLOAD_OPTIMIZER, *OFFLOAD_OPTIMIZER_NVME},
    "zero_optimization.offload_param": {*OFFLOAD_PARAM, *OFFLOAD_PARAM_NVME},
}

BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}  # per element, by DeepSpeed's name of the type


def top_level() -> set[str]:
    """Return every key allowed at the top of a file."""
    return {*TOP_LEVEL, *OPTIONAL, *(name for name in OWNED if "." not in name)}


def zero(stage: int) -> dict[str, Any]:
    """Return what `zero_optimization` must hold at `stage`, with the value written where a file is silent."""
    return {**ZERO_ALWAYS, **(ZERO_3 if stage == 3 else ZERO_BELOW_3)}


def zero_allowed(stage: int) -> set[str]:
    """Return every key allowed in `zero_optimization` at `stage`: others would have no effect there."""
    return {*zero(stage), *ZERO_OPTIONAL, *(ZERO_3_OPTIONAL if stage == 3 else ())}


def defaults(stage: int, offloads: Mapping[str, Any]) -> dict[str, Any]:
    """Return every key a rendered dict must have, with its value where file and overrides are silent.

    `offloads` maps the names in OFFLOADS to the section somebody wrote, or None.
    """
    full: dict[str, Any] = {**TOP_LEVEL, "bf16": BF16, "fp16": FP16, ZERO: zero(stage)}
    tables = {
        "offload_optimizer": (OFFLOAD_OPTIMIZER, OFFLOAD_OPTIMIZER_NVME),
        "offload_param": (OFFLOAD_PARAM, OFFLOAD_PARAM_NVME),
    }
    for name, (always, on_nvme) in tables.items():
        section = offloads.get(name)
        if section is not None:
            nvme = isinstance(section, Mapping) and section.get("device") == "nvme"
            full[ZERO][name] = {**always, **(on_nvme if nvme else {})}
            if nvme:
                full["aio"] = AIO
    return copy.deepcopy(full)
