"""Make a plan: every byte of a run by place and category, the moment of the peak, and whether it all fits.

Planning needs no GPU, no weights and no network, and calls the code that the run itself uses. The peak of a GPU
is what persists plus the largest total of temporary bytes at one instant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from remat.activation_checkpointing import apply
from remat.activation_checkpointing.mechanisms.mechanism import LayerDecision
from remat.activation_checkpointing.policy import without_engine
from remat.config import ds_config, validation
from remat.config.options import ConfigError, DataSource, HardwareConfig, RunConfig
from remat.config.units import GIB
from remat.machine import gpus
from remat.machine.node import CONTEXT_BYTES
from remat.model import loss, meta_kernels, optimizer_state, packing
from remat.planning import budget, model_states, preflight, step_time, strategy
from remat.planning.budget import Corners, Trial
from remat.planning.model_states import Item
from remat.planning.simulation import simulate
from remat.planning.simulation.peaks import IN_BACKWARD
from remat.planning.simulation.types import Category, Moment, Phase, Simulation, ZeroSettings

META = torch.device("meta")
PROCESS_BYTES = int(2.5 * GIB)  # torch with CUDA, DeepSpeed, transformers, per rank
CPU_PROCESS_BYTES = int(0.5 * GIB)  # the same without CUDA; 0.47 to 0.55 measured

COLLECTIVES_BYTES = int(0.5 * GIB)  # NCCL's channels, per communicator, when there is more than one rank
FRAGMENTATION = 0.06  # reserved over allocated in replays of the caching allocator: 1.06 to 1.12
GPU_MEMORY, HOST_MEMORY = "GPU memory", "host memory per node"
CATEGORY_OF = {  # of the model states on the GPU, by the names in planning/model_states.py
    "parameters": Category.weights,
    "frozen parameters": Category.weights,
    "4-bit weights": Category.weights,
    "constants of 4-bit weights": Category.weights,
    "constants of the constants": Category.weights,
    "means of the constants": Category.weights,
    "tables of 4-bit values": Category.weights,
    "tables of 8-bit values": Category.weights,
    "gradients": Category.gradients,
    "accumulated gradients": Category.gradients,
    "gradient staging on the GPU": Category.buckets,
    "reduction bucket": Category.buckets,
    "reduction buckets": Category.buckets,
    "master parameters": Category.optimizer_state,
    "master gradients": Category.optimizer_state,
    "moments": Category.optimizer_state,
}


@dataclass(frozen=True)
class Resource:
    """A limited resource of a machine: bytes needed and bytes found (None if unknown)."""

    name: str
    needed_bytes: int
    found_bytes: int | None

    @property
    def fits(self) -> bool:
        return self.found_bytes is None or self.needed_bytes <= self.found_bytes

    @property
    def spare_bytes(self) -> int | None:
        return None if self.found_bytes is None else self.found_bytes - self.needed_bytes


@dataclass(frozen=True)
class Capacity:
    """The memory of a machine: the GPU of one rank, host memory and NVMe of one node. None: unknown."""

    gpu_bytes: int | None
    host_bytes: int | None
    nvme_bytes: int | None = None


@dataclass(frozen=True)
class Plan:
    """The memory a run needs. Bytes are of one rank, or of one node where a name says so.

    `gpu` is by category at the moment of the peak. `peak_bytes` is what torch would report as
    max_memory_allocated. `resources` begins with the GPU memory needed, if there is a GPU. `host`, `pinned` and
    `nvme` are by item. `states` is what the model states take on the GPU after a backward, whenever the peak
    is.
    """

    gpu: Mapping[Category, int]
    states: Mapping[Category, int]
    peak: Moment
    peak_bytes: int
    states_bytes: int  # on the GPU from the first micro-batch to the last
    host: Mapping[str, int]
    pinned: Mapping[str, int]
    nvme: Mapping[str, int]
    ranks_per_node: int
    saved_state_bytes: int
    resources: list[Resource]
    assumptions: list[str]

    @property
    def fits(self) -> bool:
        return all(resource.fits for resource in self.resources)


def assemble(
    items: Sequence[Item],
    simulation: Simulation,
    zero: ZeroSettings,
    capacity: Capacity,
    *,
    update_bytes: int,
    ranks_per_node: int,
    num_nodes: int,
    saved_state_bytes: int,
    extra_host_bytes: int,
    on_gpu: bool = True,
) -> Plan:
    """Combine the model states and one simulated micro-batch into a plan.

    `update_bytes` is what the optimizer's update adds on the GPU. `extra_host_bytes` is what each process needs
    in host memory besides (libraries, the data's page cache). Without a GPU (`on_gpu=False`) the bytes of `gpu`
    are host memory too, with no allocator or context around them.
    """
    simulated = IN_BACKWARD if zero.stage < 3 else ()  # the simulation counts these itself
    states = _persistent(item for item in items if item.name not in simulated)
    moments = [_with_states(moment, states) for moment in (simulation.forward_peak, simulation.backward_peak)]
    moments.append(_optimizer_step(_persistent(items), update_bytes))
    peak = max(moments, key=lambda moment: moment.total_bytes)
    gpu = dict(peak.by_category)
    overhead = overhead_bytes(peak.total_bytes, zero.world_size) if on_gpu else 0
    gpu[Category.overhead] = overhead
    host = _by_name(items, "host") | {"processes and libraries": extra_host_bytes}
    pinned = _by_name(items, "pinned")
    if simulation.host_bytes:
        pinned["offloaded activations"] = simulation.host_bytes
    nvme = _by_name(items, "nvme")
    per_rank = sum(host.values()) + sum(pinned.values()) + (0 if on_gpu else peak.total_bytes)
    resources = [Resource(HOST_MEMORY, ranks_per_node * per_rank, capacity.host_bytes)]
    if on_gpu:
        resources.insert(0, Resource(GPU_MEMORY, peak.total_bytes + overhead, capacity.gpu_bytes))
    if nvme:
        resources.append(Resource("NVMe per node", ranks_per_node * sum(nvme.values()), capacity.nvme_bytes))
    return Plan(
        gpu=gpu,
        states=_persistent(items),
        peak=peak,
        peak_bytes=peak.total_bytes,
        states_bytes=sum(states.values()),
        host=host,
        pinned=pinned,
        nvme=nvme,
        ranks_per_node=ranks_per_node,
        saved_state_bytes=saved_state_bytes,
        resources=resources,
        assumptions=[
            *simulation.assumptions,
            _overhead_in_words(zero.world_size)
            if on_gpu
            else "there is no GPU: what would be on it is host memory",
            f"{num_nodes} node{'s' * (num_nodes != 1)} of {ranks_per_node} rank{'s' * (ranks_per_node != 1)}",
        ],
    )


def overhead_bytes(peak_bytes: int, world_size: int) -> int:
    """Return what a GPU holds besides the tensors of the peak: the allocator's gaps, the CUDA context, NCCL."""
    return int(FRAGMENTATION * peak_bytes) + CONTEXT_BYTES + (COLLECTIVES_BYTES if world_size > 1 else 0)


def _overhead_in_words(world_size: int) -> str:
    nccl = f", {COLLECTIVES_BYTES / GIB:.1f} GiB to NCCL" if world_size > 1 else ""
    context = f"{CONTEXT_BYTES / GIB:.1f} GiB to the CUDA context"
    return f"{FRAGMENTATION:.0%} of the peak goes to the allocator, {context}{nccl}"


def _persistent(items: Iterable[Item]) -> dict[Category, int]:
    """Return the model states on the GPU at the end of a backward, by category."""
    found: dict[Category, int] = {}
    for item in items:
        if item.place == "gpu":
            category = CATEGORY_OF[item.name]
            found[category] = found.get(category, 0) + item.bytes_per_rank
    return found


def _with_states(moment: Moment, persistent: Mapping[Category, int]) -> Moment:
    """Return `moment` with the persistent bytes added."""
    total = dict(persistent)
    for category, size in moment.by_category.items():
        total[category] = total.get(category, 0) + size
    return Moment(sum(total.values()), total, moment.phase, moment.layer, moment.operation)


def _optimizer_step(persistent: Mapping[Category, int], copies_bytes: int) -> Moment:
    """Return the moment of the optimizer's update, when copies of the gradients lie beside the model states."""
    total = dict(persistent)
    total[Category.gradients] = total.get(Category.gradients, 0) + copies_bytes
    return Moment(sum(total.values()), total, Phase.step, None, "optimizer")


def _by_name(items: Iterable[Item], place: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for item in items:
        if item.place == place:
            found[item.name] = found.get(item.name, 0) + item.bytes_per_rank
    return found


class Recordings:
    """A cache of recorded micro-batches. Pass the same one to every `make_plan` of a search.

    `made` counts the recordings that were really made. `corners` are those of the layers that tables were chosen for.
    """

    def __init__(self) -> None:
        self.made = 0
        self.corners: Corners = {}
        self._found: dict[str, simulate.Recording] = {}

    def get(self, cfg: RunConfig, decided: strategy.Strategy, *, on_gpu: bool = True) -> simulate.Recording:
        """Return the recorded micro-batch of the run of `cfg`, from the cache if it is there.

        It does not depend on the machine, nor on ZeRO settings, except whether the stage is 3.
        """
        train = cfg.train
        depends_on = (
            (cfg.model, cfg.peft, cfg.checkpointing, decided.decisions, decided.zero_stage == 3, on_gpu),
            decided.packed,
            (train.precision, train.loss, train.micro_batch_size, train.seq_len, train.neftune_alpha > 0),
        )
        key = repr(depends_on)
        if key not in self._found:
            self._found[key] = _record(cfg, decided, on_gpu=on_gpu)
            self.made += 1
        return self._found[key]


def _record(cfg: RunConfig, decided: strategy.Strategy, *, on_gpu: bool) -> simulate.Recording:
    """Record one micro-batch of the real model on meta tensors, with the run's policies applied."""
    decisions = without_engine(decided.decisions)
    if decisions != decided.decisions and cfg.checkpointing.deepspeed.cpu_checkpointing:
        raise ConfigError(
            "checkpointing.deepspeed.cpu_checkpointing=true: remat plan does not count what DeepSpeed moves to the "
            "host; plan with checkpointing=offload, which moves the same"
        )
    net = strategy.meta_model(cfg, decided.zero_stage)
    with ExitStack() as undo:
        applied = apply.apply(net, decisions, cfg.checkpointing, zero_stage=decided.zero_stage, device=META)
        undo.callback(applied.remove)
        recording = simulate.record(
            net,
            loss=loss.TokenLoss(
                net, cfg.train.loss, verify=False, cross_entropy=meta_kernels.cross_entropy if on_gpu else None
            ),
            scope=applied.scope,
            around=applied.micro_batch(),
            stage_3=decided.zero_stage == 3,
            micro_batch_size=cfg.train.micro_batch_size,
            seq_len=cfg.train.seq_len,
            given=packing.planned(decided.packed, cfg.model.attention, net),
            ignored=applied.offload.storages if applied.offload else tuple,
            workspaces=on_gpu,
            on_gpu=on_gpu,
        )
        return replace(recording, graphs=applied.graphs())


@dataclass(frozen=True)
class Planned:
    """A plan and what it was made from."""

    cfg: RunConfig
    strategy: strategy.Strategy
    simulation: Simulation
    plan: Plan
    time: step_time.StepTime
    world_size: int
    table: dict[str, Any] | None = None  # of checkpointing=budget, as it is written to the run


def make_plan(
    cfg: RunConfig,
    *,
    world_size: int | None = None,
    capacity: Capacity | None = None,
    decided: strategy.Strategy | None = None,
    on_gpu: bool = True,
    recordings: Recordings | None = None,
) -> Planned:
    """Plan the run of `cfg` on its own machine (or `world_size` ranks and `capacity`). Raises ConfigError.

    A `decided` strategy is used as it is instead of being resolved again. `on_gpu` is false for ranks that
    compute on CPUs, whose only memory is the host's. `recordings` holds what earlier plans recorded: a plan
    that differs from one of them only in ZeRO's settings or machine records nothing.
    """
    ranks = world_size or cfg.hardware.ranks
    validation.check_plan(cfg)
    decided = decided or strategy.decide(cfg, world_size=ranks, can_pin=on_gpu)
    known = recordings or Recordings()
    plan = _planner(cfg, decided, known, world_size=ranks, capacity=capacity, on_gpu=on_gpu)
    if not budget.is_open(decided.decisions):
        made: Planned = plan(decided.decisions).made
        return made
    trial, decisions, because = budget.choose(
        cfg.checkpointing,
        decided.decisions,
        plan,
        gpus.machine(cfg.hardware),
        gpu_bytes=(capacity or capacity_of(cfg.hardware)).gpu_bytes,
        on_gpu=on_gpu,
        known=known.corners,
    )
    return _with_table(trial, decisions, cfg, because or decided.decided_because)


def make_curve(cfg: RunConfig, parts: int, recordings: Recordings) -> Iterator[Planned]:
    """Yield the plans of `cfg`, a run with checkpointing=budget, under tables that keep from the least to all.

    They are about `parts` equal steps of bytes apart, whatever the budget of `cfg`. Raises ConfigError.
    """
    validation.check_plan(cfg)
    decided = strategy.decide(cfg, world_size=cfg.hardware.ranks, can_pin=True)
    plan = _planner(cfg, decided, recordings, world_size=cfg.hardware.ranks)
    machine = gpus.machine(cfg.hardware)
    for trial, decisions in budget.curve(decided.decisions, plan, machine, parts, known=recordings.corners):
        yield _with_table(trial, decisions, cfg, "")


def _planner(
    cfg: RunConfig,
    decided: strategy.Strategy,
    known: Recordings,
    *,
    world_size: int,
    capacity: Capacity | None = None,
    on_gpu: bool = True,
) -> budget.Plan:
    """Return what plans the run under other decisions for its layers."""

    def plan(decisions: list[LayerDecision]) -> Trial:
        own = replace(decided, decisions=decisions)
        recording = known.get(cfg, own, on_gpu=on_gpu)
        simulation = recording.under(ZeroSettings.of(decided.ds, world_size))
        made = estimate(cfg, own, simulation, world_size=world_size, capacity=capacity, on_gpu=on_gpu)
        needed = needed_bytes(made, GPU_MEMORY) if on_gpu else made.plan.peak_bytes
        again = simulation.flops[Phase.recompute]
        return Trial(needed, made.time.total_s, again, recording.graphs, made)

    return plan


def _with_table(trial: Trial, decisions: list[LayerDecision], cfg: RunConfig, because: str) -> Planned:
    made: Planned = trial.made
    table = budget.as_record(trial, decisions, cfg.checkpointing)
    return replace(made, strategy=replace(made.strategy, decided_because=because), table=table)


def estimate(
    cfg: RunConfig,
    decided: strategy.Strategy,
    simulation: Simulation,
    *,
    world_size: int,
    capacity: Capacity | None = None,
    on_gpu: bool = True,
) -> Planned:
    """Make the plan that follows from a simulated micro-batch."""
    per_node = min(cfg.hardware.gpus_per_node or 1, world_size)
    zero = ZeroSettings.of(decided.ds, world_size)
    items = decided.model_states(data_ranks=world_size, ranks_per_node=per_node, can_pin=on_gpu)
    trained = decided.facts.num_trainable_params
    plan = assemble(
        items,
        simulation,
        zero,
        capacity or capacity_of(cfg.hardware),
        update_bytes=model_states.update_bytes(
            num_trainable_params=trained,
            largest_trainable_param=decided.facts.largest_trainable_param,
            ds=decided.ds,
            world_size=world_size,
            optimizer=decided.optimizer,
        ),
        ranks_per_node=per_node,
        num_nodes=cfg.hardware.num_nodes,
        saved_state_bytes=preflight.saved_state_bytes(
            trained, decided.ds, decided.saved_moments_bytes(items, world_size)
        )
        * preflight.states_on_disk(cfg.save, cfg.train.steps),
        extra_host_bytes=PROCESS_BYTES if on_gpu else CPU_PROCESS_BYTES,
        on_gpu=on_gpu,
    )
    plan.assumptions.extend(_unread(cfg))
    return Planned(cfg, decided, simulation, plan, _time(cfg, decided, simulation, zero), world_size)


def _unread(cfg: RunConfig) -> list[str]:
    """Return what a plan would have to read the data for."""
    found = []
    if cfg.train.steps is None:
        asked = "no train.steps" if cfg.train.epochs is None else f"train.epochs={cfg.train.epochs:g}"
        found.append(
            f"{asked}: the number of steps follows from the data, which a plan does not read; saved states are counted "
            "at their most"
        )
    if cfg.data.has_rows and cfg.data.source is not DataSource.synthetic:
        found.append(
            "every micro-batch is full, which is the most it can be: how much of it is padding only the data tells, so "
            "tokens/s count padding too"
        )
    return found


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
        optimizer_bytes=optimizer_state.STREAMED_BYTES[decided.optimizer],
        params_on_nvme=ds_config.param_offload_device(decided.ds) == "nvme",
    )


def capacity_of(machine: HardwareConfig) -> Capacity:
    """Return the capacity of the machine that the options name; what they do not name is unknown."""
    gpu = machine.gpu_memory_gib
    if gpu is None and machine.gpu and (known := gpus.find_gpu(machine.gpu)):
        gpu = known.memory_gib
    return Capacity(
        gpu_bytes=_bytes(gpu),
        host_bytes=_bytes(machine.host_memory_gib),
        nvme_bytes=_bytes(machine.nvme_gib),
    )


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)


def needed_bytes(planned: Planned, resource: str) -> int:
    """Return the bytes needed of the resource with this name; 0 if the plan does not list it."""
    return next((r.needed_bytes for r in planned.plan.resources if r.name == resource), 0)


def plan_as_json(planned: Planned) -> dict[str, Any]:
    """Return everything of a plan as plain data, in bytes and seconds, for plan.json and --json."""
    plan, time = planned.plan, planned.time
    return {
        "name": planned.cfg.name,
        "machine": planned.cfg.hardware.name,
        "world_size": planned.world_size,
        "optimizer": str(planned.strategy.optimizer),
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
        "checkpointing_table": planned.table,
        "step_time_s": {name: seconds for name, seconds in asdict(time).items() if name.endswith("_s")},
        "total_s": time.total_s,
        "tokens_per_s": time.tokens_per_s,
        "unknown_times": time.unknown,
        "assumptions": [*plan.assumptions, *time.assumptions],
        "warnings": [planned.strategy.length_warning] if planned.strategy.length_warning else [],
    }
