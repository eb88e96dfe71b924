"""`remat plan`: from a run's options to a plan, without a GPU, weights or network. The trainer's own policy code."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from remat.config import ds_config
from remat.config.options import ConfigError, RunConfig
from remat.config.units import GIB
from remat.machine import gpus
from remat.planning import model_states, preflight, step_time, strategy
from remat.planning.plan import Capacity, Plan, assemble
from remat.planning.recording import Recordings
from remat.planning.simulation.types import Simulation, ZeroSettings

PROCESS_BYTES = int(2.5 * GIB)  # torch with CUDA, DeepSpeed, transformers, per rank
CPU_PROCESS_BYTES = int(0.5 * GIB)  # the same without CUDA; 0.47 to 0.55 measured


@dataclass(frozen=True)
class Planned:
    """A plan with what it was made from."""

    cfg: RunConfig
    strategy: strategy.Strategy
    simulation: Simulation
    plan: Plan
    time: step_time.StepTime
    world_size: int


def make(
    cfg: RunConfig,
    *,
    world_size: int | None = None,
    capacity: Capacity | None = None,
    decided: strategy.Strategy | None = None,
    on_gpu: bool = True,
    recordings: Recordings | None = None,
) -> Planned:
    """Plan the run of `cfg` on its own machine (or `world_size` ranks and `capacity`). Raises ConfigError.

    `decided` saves deciding it again; `on_gpu` false: ranks that compute on CPUs, whose only memory is the host's.
    `recordings` is what earlier plans recorded: one that differs only in ZeRO's settings or machine records nothing.
    """
    ranks = world_size or ranks_of(cfg)
    if cfg.train.tensor_parallel_size > 1:
        raise ConfigError(
            f"train.tensor_parallel_size={cfg.train.tensor_parallel_size}: remat plan does not know shared layers yet; "
            "plan with 1"
        )
    decided = decided or strategy.decide(cfg, world_size=ranks, can_pin=on_gpu)
    recording = (recordings or Recordings()).get(cfg, decided, on_gpu=on_gpu)
    simulation = recording.under(ZeroSettings.of(decided.ds, ranks))
    return priced(cfg, decided, simulation, world_size=ranks, capacity=capacity, on_gpu=on_gpu)


def ranks_of(cfg: RunConfig) -> int:
    """One per GPU of the machine that the options name."""
    return (cfg.hardware.gpus_per_node or 1) * cfg.hardware.num_nodes


def priced(
    cfg: RunConfig,
    decided: strategy.Strategy,
    simulation: Simulation,
    *,
    world_size: int,
    capacity: Capacity | None = None,
    on_gpu: bool = True,
) -> Planned:
    """The plan that follows from a simulated micro-batch."""
    per_node = min(cfg.hardware.gpus_per_node or 1, world_size)
    zero = ZeroSettings.of(decided.ds, world_size)
    items = decided.model_states(data_ranks=world_size, ranks_per_node=per_node, can_pin=on_gpu)
    trained = decided.facts.num_trainable_params
    plan = assemble(
        items,
        simulation,
        zero,
        capacity or _capacity(cfg),
        update_bytes=model_states.update_bytes(
            num_trainable_params=trained,
            largest_trainable_param=decided.facts.largest_trainable_param,
            ds=decided.ds,
            world_size=world_size,
        ),
        ranks_per_node=per_node,
        num_nodes=cfg.hardware.num_nodes,
        saved_state_bytes=preflight.saved_state_bytes(trained, decided.ds)
        * preflight.states_on_disk(cfg.save, cfg.train.steps),
        extra_host_bytes=PROCESS_BYTES if on_gpu else CPU_PROCESS_BYTES,
        on_gpu=on_gpu,
    )
    return Planned(cfg, decided, simulation, plan, _time(cfg, decided, simulation, zero), world_size)


def _time(
    cfg: RunConfig, decided: strategy.Strategy, simulation: Simulation, zero: ZeroSettings
) -> step_time.StepTime:
    return step_time.step_time(
        simulation,
        machine=gpus.machine(cfg.hardware),
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


def _capacity(cfg: RunConfig) -> Capacity:
    """Of the machine that the options name; what they do not name is unknown."""
    gpu = cfg.hardware.gpu_memory_gib
    if gpu is None and cfg.hardware.gpu and (known := gpus.find_gpu(cfg.hardware.gpu)):
        gpu = known.memory_gib
    return Capacity(
        gpu_bytes=_bytes(gpu),
        host_bytes=_bytes(cfg.hardware.host_memory_gib),
        nvme_bytes=_bytes(cfg.hardware.nvme_gib),
    )


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)


def needed_bytes(planned: Planned, resource: str) -> int:
    """Of one resource by its name; 0 where the plan has none such."""
    return next((r.needed_bytes for r in planned.plan.resources if r.name == resource), 0)


def plan_as_json(planned: Planned) -> dict[str, Any]:
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
