"""`remat plan`: from a run's options to a plan, without a GPU, weights or network. The trainer's own policy code."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch

from remat import ds_config, hardware, loss, preflight, strategy
from remat.activation_checkpointing import apply
from remat.config import ConfigError, RunConfig
from remat.planning import shadows, simulate, states, timing
from remat.planning.plan import Capacity, Plan, assemble
from remat.planning.records import Simulation, ZeroSettings

META = torch.device("meta")
GIB = 1024**3
PROCESS_BYTES = int(2.5 * GIB)  # torch with CUDA, DeepSpeed, transformers, per rank


@dataclass(frozen=True)
class Planned:
    """A plan with what it was made from."""

    cfg: RunConfig
    strategy: strategy.Strategy
    simulation: Simulation
    plan: Plan
    time: timing.StepTime
    world_size: int


def make(cfg: RunConfig, *, world_size: int | None = None, capacity: Capacity | None = None) -> Planned:
    """Plan the run of `cfg` on its own machine (or `world_size` ranks and `capacity`). Raises ConfigError."""
    per_node = cfg.hardware.gpus_per_node or 1
    ranks = world_size or per_node * cfg.hardware.num_nodes
    if cfg.train.tensor_parallel_size > 1:
        raise ConfigError(
            f"train.tensor_parallel_size={cfg.train.tensor_parallel_size}: remat plan does not know shared layers yet; "
            "plan with 1"
        )
    decided = strategy.decide(cfg, world_size=ranks, can_pin=True)
    zero = ZeroSettings.of(decided.ds, ranks)
    simulation = _simulate(cfg, decided, zero)
    items = states.model_states(
        num_params=decided.facts.num_params,
        largest_param=decided.facts.largest_param,
        num_trainable_params=decided.facts.num_trainable_params,
        largest_trainable_param=decided.facts.largest_trainable_param,
        ds=decided.ds,
        world_size=ranks,
        ranks_per_node=min(per_node, ranks),
        gas=decided.ds["gradient_accumulation_steps"],
        can_pin=True,
    )
    trained = decided.facts.num_trainable_params
    plan = assemble(
        items,
        simulation,
        zero,
        capacity or _capacity(cfg),
        trained_per_rank=-(-trained // (ranks if zero.stage else 1)),
        ranks_per_node=min(per_node, ranks),
        num_nodes=cfg.hardware.num_nodes,
        saved_state_bytes=preflight.saved_state_bytes(trained, decided.ds)
        * preflight.states_on_disk(cfg.save, cfg.train.steps),
        extra_host_bytes=PROCESS_BYTES,
    )
    return Planned(cfg, decided, simulation, plan, _time(cfg, decided, simulation, zero), ranks)


def _time(
    cfg: RunConfig, decided: strategy.Strategy, simulation: Simulation, zero: ZeroSettings
) -> timing.StepTime:
    return timing.step_time(
        simulation,
        machine=hardware.machine(cfg.hardware),
        zero=zero,
        num_params=decided.facts.num_params,
        num_trained=decided.facts.num_trainable_params,
        accumulation=decided.ds["gradient_accumulation_steps"],
        moved_bytes=simulation.host_bytes,
        tokens=cfg.train.micro_batch_size * cfg.train.seq_len,
        precision=cfg.train.precision,
        optimizer_on_nvme=ds_config.optimizer_offload_device(decided.ds) == "nvme",
        params_on_nvme=ds_config.param_offload_device(decided.ds) == "nvme",
    )


def _simulate(cfg: RunConfig, decided: strategy.Strategy, zero: ZeroSettings) -> Simulation:
    """One micro-batch of the real model on meta tensors with the policies of the run on it."""
    net = strategy.meta_model(cfg)
    with ExitStack() as undo:
        applied = apply.apply(
            net, decided.decisions, cfg.checkpointing, zero_stage=decided.zero_stage, device=META
        )
        undo.callback(applied.remove)
        return simulate.run(
            net,
            loss=loss.TokenLoss(net, cfg.train.loss, verify=False, cross_entropy=shadows.cross_entropy),
            scope=applied.scope,
            around=applied.micro_batch(),
            zero=zero,
            micro_batch_size=cfg.train.micro_batch_size,
            seq_len=cfg.train.seq_len,
            ignored=applied.offload.storages if applied.offload else tuple,
        )


def _capacity(cfg: RunConfig) -> Capacity:
    """Of the machine that the options name; what they do not name is unknown."""
    gpu = cfg.hardware.gpu_memory_gib
    if gpu is None and cfg.hardware.gpu and (known := hardware.find_gpu(cfg.hardware.gpu)):
        gpu = known.memory_gib
    host = cfg.hardware.host_memory_gib
    return Capacity(
        gpu_bytes=None if gpu is None else int(gpu * GIB),
        host_bytes=None if host is None else int(host * GIB),
    )


def as_json(planned: Planned) -> dict[str, Any]:
    """Everything of a plan as plain data, for plan.json and --json. Bytes and seconds."""
    plan, time = planned.plan, planned.time
    return {
        "name": planned.cfg.name,
        "machine": planned.cfg.hardware.name,
        "world_size": planned.world_size,
        "fits": plan.fits,
        "gpu_bytes_at_peak": {str(name): size for name, size in plan.gpu.items()},
        "gpu_allocated_peak_bytes": plan.peak_bytes,
        "peak": {"phase": str(plan.peak.phase), "layer": plan.peak.layer, "operation": plan.peak.operation},
        "pinned_bytes_per_rank": dict(plan.pinned),
        "host_bytes_per_rank": dict(plan.host),
        "nvme_bytes_per_rank": dict(plan.nvme),
        "saved_states_bytes": plan.saved_state_bytes,
        "resources": [
            {"name": r.name, "needed_bytes": r.needed_bytes, "found_bytes": r.found_bytes, "fits": r.fits}
            for r in plan.resources
        ],
        "kept_bytes_per_layer": planned.simulation.kept_bytes,
        "step_time_s": {name: seconds for name, seconds in asdict(time).items() if name.endswith("_s")},
        "total_s": time.total_s,
        "tokens_per_s": time.tokens_per_s,
        "unknown_times": time.unknown,
        "assumptions": [*plan.assumptions, *time.assumptions],
    }
