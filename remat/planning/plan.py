"""Make a plan: every byte of a run by place and category, the moment of the peak, and whether it all fits.

Planning needs no GPU, no weights and no network, and calls the code that the run itself uses. The peak of a GPU
is the persistent bytes plus the largest total of temporary bytes at one instant.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch

from remat.activation_checkpointing import apply, compiled
from remat.activation_checkpointing.mechanisms.mechanism import LayerDecision
from remat.activation_checkpointing.mechanisms.offload import pool_bytes
from remat.activation_checkpointing.mechanisms.tables.graph import Graph
from remat.activation_checkpointing.policy import without_engine
from remat.config import ds_config, validation
from remat.config.options import (
    Compilation,
    ConfigError,
    DataSource,
    HardwareConfig,
    OffloadConfig,
    OptimStates,
    RunConfig,
)
from remat.config.units import GIB, format_count, format_size
from remat.machine import gpus
from remat.machine.gpus import outside_torch_bytes
from remat.model import hf_model, layers, loss, meta_kernels, optimizer_state
from remat.parallel import pipeline_parallel, sequence_parallel, tensor_parallel
from remat.planning import budget, model_states, preflight, step_time, strategy, tiling
from remat.planning.budget import Corners, Trial
from remat.planning.model_states import Item
from remat.planning.simulation import simulate
from remat.planning.simulation.peaks import IN_BACKWARD
from remat.planning.simulation.repeat import REACHES, REACHES_OF_MOVES, NotRepeated, Owners, lengthen_sizes
from remat.planning.simulation.reserved import Around, Replayed
from remat.planning.simulation.types import PEAKS, Category, Moment, Phase, Simulation, ZeroSettings

META = torch.device("meta")
PROCESS_BYTES = int(2.5 * GIB)  # torch with CUDA, DeepSpeed, transformers, per rank
CPU_PROCESS_BYTES = int(0.5 * GIB)  # the same without CUDA; 0.47 to 0.55 measured

# Least share of the allocated peak that is counted for gaps in torch's allocator, by whether segments are expandable.
# A replay alone misses blocks that another stream still uses when they are freed. Replays of the shipped recipes: 0.2
# to 6.6 % with expandable segments. With fixed ones others measured 0.6 to 60 % (docs/plan-accuracy.md has the runs).
FRAGMENTATION = {True: 0.06, False: 0.6}
RESERVED_AFTER = ("states", "forward", "backward", "step")  # parts of the first step, fields of Replayed
GPU_MEMORY, HOST_MEMORY = "GPU memory", "host memory per node"
CATEGORY_OF = {  # category of each model state on the GPU, by its name in planning/model_states.py
    **dict.fromkeys(model_states.WEIGHTS, Category.weights),
    model_states.SECOND_SHARDS: Category.second_shards,
    "gradients": Category.gradients,
    "accumulated gradients": Category.gradients,
    "gradient staging on the GPU": Category.buckets,
    "reduction bucket": Category.buckets,
    "reduction buckets": Category.buckets,
    "master parameters": Category.optimizer_state,
    "master gradients": Category.optimizer_state,
    "moments": Category.optimizer_state,
}


class Verdict(StrEnum):
    """Whether a run fits: surely, perhaps (if the terms that a plan cannot know turn out small), or not."""

    fits = "fits"
    tight = "tight"
    too_large = "does not fit"


@dataclass(frozen=True)
class Resource:
    """A limited resource of a machine: bytes needed and bytes found (None if unknown).

    `needed_bytes` has every term at its largest. `least_bytes` has every term at its smallest; None: it is equal.
    """

    name: str
    needed_bytes: int
    found_bytes: int | None
    least_bytes: int | None = None

    @property
    def fits(self) -> bool:
        return self.verdict is Verdict.fits

    @property
    def verdict(self) -> Verdict:
        if self.found_bytes is None or self.needed_bytes <= self.found_bytes:
            return Verdict.fits
        least = self.needed_bytes if self.least_bytes is None else self.least_bytes
        return Verdict.tight if least <= self.found_bytes else Verdict.too_large

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

    `gpu` has the bytes by category at the moment of the peak. `peak_bytes` is what torch would report as
    max_memory_allocated, `reserved_bytes` as max_memory_reserved, and `process_bytes` is what nvidia-smi would show
    for the process; the latter two are 0 without a GPU. `reserved_by_segments` has the bytes reserved in replays of
    torch's allocator by kind of segments, `expandable` and `fixed`: that in effect, and without stages and curves the
    other too; it is empty without a replay. `resources` begins with the GPU memory, if there is a GPU. `host`, `pinned`
    and `nvme` have the bytes by item. `states` has the model states on the GPU after a backward, whenever the peak is.
    `peaks` has those of forward, loss, backward and update.
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
    peaks: Mapping[str, Moment] = field(default_factory=dict)
    reserved_bytes: int = 0
    outside_bytes: int = 0  # the CUDA context and NCCL
    reserved_by_segments: Mapping[str, int] = field(default_factory=dict)
    reserved_after: Mapping[str, int] = field(default_factory=dict)  # at the end of each of RESERVED_AFTER

    @property
    def fits(self) -> bool:
        return all(resource.fits for resource in self.resources)

    @property
    def missing_bytes(self) -> dict[str, int]:
        """Return the bytes missing of each resource that is too small."""
        return {r.name: -r.spare_bytes for r in self.resources if r.spare_bytes is not None and not r.fits}

    @property
    def process_bytes(self) -> int:
        return self.reserved_bytes + self.outside_bytes

    @property
    def verdict(self) -> Verdict:
        found = {resource.verdict for resource in self.resources}
        return next((v for v in (Verdict.too_large, Verdict.tight) if v in found), Verdict.fits)


def overhead_bytes(peak_bytes: int, world_size: int, *, expandable: bool) -> int:
    """Return the bytes on a GPU besides the tensors of the peak: the allocator's gaps, the CUDA context, NCCL."""
    return int(FRAGMENTATION[expandable] * peak_bytes) + outside_torch_bytes(world_size)


def reserved_bytes(planned: Planned, recording: simulate.Recording, *, expandable: bool) -> Replayed:
    """Return what torch's allocator reserves on each GPU of a plan, by a replay of `recording`."""
    decided = planned.strategy
    zero = ZeroSettings.of(decided.ds, planned.world_size)
    items = decided.model_states(data_ranks=zero.world_size, ranks_per_node=1, can_pin=True)
    simulated = IN_BACKWARD if zero.stage < 3 else ()
    sizes = [(item.name, item.bytes_per_rank) for item in items if item.place == "gpu"]
    states = [size for name, size in sizes if name != "moments" and name not in simulated]
    if in_flight := _in_flight_bytes(planned.cfg, decided, planned.simulation):
        states.append(in_flight)
    around = Around(
        states=states,
        from_update=[size for name, size in sizes if name == "moments"],
        update_bytes=_update_bytes(decided, zero.world_size),
    )
    found = recording.reserved_bytes(zero, around, expandable=expandable)
    return replace(found, most=max(planned.plan.peak_bytes, found.most))


def with_replay(planned: Planned, recording: simulate.Recording) -> Planned:
    """Return `planned`, a run on GPUs, with the bytes that torch's allocator reserves in a replay of `recording`.

    Gaps in the allocator that exceed FRAGMENTATION add to the GPU memory needed.
    """
    plan = planned.plan
    expandable = planned.strategy.allocators.expandable_segments
    replayed = reserved_bytes(planned, recording, expandable=expandable)
    reserved = replayed.most
    needed = max(plan.resources[0].needed_bytes, reserved + plan.outside_bytes)
    kind, least = "expandable" if expandable else "fixed", FRAGMENTATION[expandable]
    assumed = (
        f"torch's allocator leaves gaps of {reserved / max(1, plan.peak_bytes) - 1:.1%} of the allocated peak, by a "
        f"replay of two micro-batches and updates with {kind} segments; at least {least:.0%} is kept free for "
        f"them, and {plan.outside_bytes / GIB:.1f} GiB go to the CUDA context{' and NCCL' * (planned.world_size > 1)}"
    )
    return replace(
        planned,
        plan=replace(
            plan,
            gpu={**plan.gpu, Category.overhead: needed - plan.peak_bytes},
            resources=[replace(plan.resources[0], needed_bytes=needed), *plan.resources[1:]],
            assumptions=[*plan.assumptions, assumed],
            reserved_bytes=reserved,
            reserved_by_segments={kind: reserved},
            reserved_after={name: getattr(replayed, name) for name in RESERVED_AFTER},
        ),
    )


def _update_bytes(decided: strategy.Strategy, world_size: int) -> int:
    return model_states.update_bytes(
        num_trainable_params=decided.held.num_trainable_params,
        largest_trainable_param=decided.held.largest_trainable_param,
        ds=decided.ds,
        world_size=world_size,
        optimizer=decided.optimizer,
    )


def _persistent(items: Iterable[Item]) -> dict[Category, int]:
    """Return the model states on the GPU at the end of a backward, by category."""
    found: Counter[Category] = Counter()
    for item in items:
        if item.place == "gpu":
            found[CATEGORY_OF[item.name]] += item.bytes_per_rank
    return dict(found)


def _with_states(moment: Moment, persistent: Mapping[Category, int]) -> Moment:
    """Return `moment` with the persistent bytes added."""
    total = Counter(persistent)
    total.update(moment.by_category)
    return replace(moment, total_bytes=total.total(), by_category=dict(total))


def _optimizer_step(persistent: Mapping[Category, int], copies_bytes: int) -> Moment:
    """Return the moment of the optimizer's update, when copies of the gradients lie beside the model states."""
    total = {**persistent, Category.gradients: persistent.get(Category.gradients, 0) + copies_bytes}
    return Moment(sum(total.values()), total, Phase.step, None, "optimizer")


def _by_name(items: Iterable[Item], place: str) -> dict[str, int]:
    found: Counter[str] = Counter()
    for item in items:
        if item.place == place:
            found[item.name] += item.bytes_per_rank
    return dict(found)


class Recordings:
    """A cache of recorded micro-batches. Pass the same one to every `make_plan` of a search.

    `made` counts the recordings that the cache did not have. `corners` caches the frontiers of layers.
    """

    def __init__(self) -> None:
        self.made = 0
        self.corners: Corners = {}
        self._found: dict[str, simulate.Recording] = {}
        self._reaches: dict[Any, int] = {}  # by kind of layers, the reach that was enough: it is tried first
        self._graphs: dict[str, dict[int, Graph]] = {}  # what layers under a table compute, under any table

    def get(self, cfg: RunConfig, decided: strategy.Strategy, *, on_gpu: bool = True) -> simulate.Recording:
        """Return the recorded micro-batch of the run of `cfg`, from the cache if it is there.

        A recording depends neither on the machine nor on ZeRO settings, except on whether the stage is 3.
        """
        train, chosen = cfg.train, replace(cfg.checkpointing, budget_gib="auto")  # decisions hold its tables
        if not any(decision.offload for decision in decided.decisions):
            chosen = replace(chosen, offload=OffloadConfig())
        depends_on = (
            (cfg.model, cfg.peft, chosen, decided.zero_stage == 3, on_gpu),
            (decided.packed, cfg.compile, decided.allocators.exact_above_bytes),
            (train.precision, train.loss, train.micro_batch_size, train.seq_len, train.neftune_alpha > 0),
            (train.sequence_parallel_size, train.tensor_parallel_size, decided.router_coef > 0),
            (decided.stages, decided.stage),
        )
        model = repr(depends_on)
        key = model + repr(decided.decisions)
        if key not in self._found:
            graphs = self._graphs.setdefault(model, {})
            self._found[key] = found = _record(cfg, decided, self._reaches, graphs, on_gpu=on_gpu)
            graphs |= found.graphs
            self.made += 1
        return self._found[key]


def _record(
    cfg: RunConfig,
    decided: strategy.Strategy,
    reaches: dict[Any, int],
    graphs: Mapping[int, Graph],
    *,
    on_gpu: bool,
) -> simulate.Recording:
    """Record one micro-batch of the real model on meta tensors, with the run's policies applied.

    `reaches` has, by kind of layers, how far a layer affects its neighbours (see repeat.py); this adds what it finds.
    `graphs` has what layers compute, as far as it is known. The first layer of each kind under a table holds more in
    its first call than later: the peaks count that, and the allocations are those of micro-batches after the first.
    """
    decisions = without_engine(decided.decisions)
    if decisions != decided.decisions and cfg.checkpointing.deepspeed.cpu_checkpointing:
        raise ConfigError(
            "checkpointing.deepspeed.cpu_checkpointing=true: remat plan does not count what DeepSpeed moves to the "
            "host; plan with checkpointing=offload, which moves the same"
        )
    recording = _record_few(cfg, decided, decisions, reaches, graphs, on_gpu=on_gpu)
    first_bytes: dict[int, int] = {}
    of_calls: dict[Any, int] = {}
    kinds = set()
    for layer, graph in sorted(recording.graphs.items()):
        most = of_calls.setdefault(graph.call, graph.first_bytes)
        kind = graph.call, decisions[layer].table
        if kind not in kinds:  # layers after it take what it has learnt
            kinds.add(kind)
            first_bytes[layer] = most
    return simulate.with_first_calls(recording, first_bytes) if first_bytes else recording


def _record_few(
    cfg: RunConfig,
    decided: strategy.Strategy,
    decisions: list[LayerDecision],
    reaches: dict[Any, int],
    graphs: Mapping[int, Graph],
    *,
    on_gpu: bool,
) -> simulate.Recording:
    """Record a few layers that stand for all, or all layers where none do."""
    if decided.stage is not None:
        return _record_layers(cfg, decided, decisions, None, graphs, on_gpu=on_gpu)
    kind = decided.zero_stage == 3, frozenset((d.mechanism.name, d.offload) for d in decisions)
    possible = REACHES_OF_MOVES if any(d.offload for d in decisions) else REACHES
    for reach in sorted(possible, key=lambda reach: reach != reaches.get(kind)):
        short = strategy.shorten(cfg, decisions, reach)
        if short is None:
            continue
        try:
            recorded = _record_layers(cfg, decided, short.decisions(decisions), short, graphs, on_gpu=on_gpu)
        except NotRepeated:
            continue
        except ConfigError:  # the recording of the whole model, below, reports what is wrong
            break
        reaches[kind] = reach
        return recorded
    return _record_layers(cfg, decided, decisions, None, graphs, on_gpu=on_gpu)


def _record_layers(
    cfg: RunConfig,
    decided: strategy.Strategy,
    decisions: list[LayerDecision],
    short: strategy.Shortened | None,
    graphs: Mapping[int, Graph],
    *,
    on_gpu: bool,
) -> simulate.Recording:
    """Record the whole model, or the layers in `short` that stand for all. Raises NotRepeated if they cannot."""
    net = strategy.meta_model(cfg, decided.zero_stage, short and short.config)
    if decided.stages is not None and decided.stage is not None:
        pipeline_parallel.keep_stage(net, decided.stages, decided.stage)
    marked = layers.decoder_layers(net) if short else ()
    owners = Owners.of(net, marked)
    made = None
    if cfg.compile is Compilation.layers:
        # layers run without their compiled graph here, because the simulation observes operations
        made = compiled.CompiledLayers()
        compiled.make_whole(layers.decoder_layers(net))
    with ExitStack() as undo:
        given = undo.enter_context(sequence_parallel.planned(cfg.train, cfg.model, decided.packed, net))
        applied = apply.apply(
            net,
            decisions,
            cfg.checkpointing,
            zero_stage=decided.zero_stage,
            device=META,
            compiled=made,
            allocators=decided.allocators,
            graphs=short.known(graphs) if short else graphs,
        )
        undo.callback(applied.remove)
        if applied.offload:
            applied.offload.transfers.simulates_gpu = on_gpu
        recording = simulate.record(
            net,
            loss=_loss(cfg, decided, net, on_gpu=on_gpu),
            scope=applied.scope,
            around=applied.micro_batch(),
            stage_3=decided.zero_stage == 3,
            micro_batch_size=cfg.train.micro_batch_size,
            seq_len=cfg.train.seq_len,
            given=given,
            packed=decided.packed.apart,
            ignored=applied.offload.storages if applied.offload else tuple,
            workspaces=on_gpu,
            on_gpu=on_gpu,
            marked=marked,
            first=applied.first_forward() if applied.learns else None,
        )
        moved_bytes = sum(counts.moved_bytes for counts in applied.counts)
        timeline = replace(recording.timeline, moved_bytes=moved_bytes)
        recording = replace(recording, timeline=timeline, graphs=applied.graphs())
        for layer, graph in recording.graphs.items():
            graph.first_bytes = graph.first_bytes or recording.first_bytes.get(layer, 0)
    if short is None:
        return recording
    taken = applied.offload.taken if applied.offload else None
    del net, marked, applied  # the record includes the release of what they still hold
    recording = simulate.lengthened(recording, owners, short.repeats)
    if taken is None:
        return recording
    if not taken.in_a_row:
        raise NotRepeated("host memory is taken after some of it has come back")
    sizes = lengthen_sizes(taken.by_layer, short.repeats, owners.num_layers)
    host_bytes = pool_bytes(sizes, decided.allocators)
    timeline = replace(recording.timeline, host_bytes=host_bytes, moved_bytes=sum(sizes))
    return replace(recording, timeline=timeline)


def _loss(cfg: RunConfig, decided: strategy.Strategy, net: Any, *, on_gpu: bool) -> simulate.Loss:
    """Return what a rank computes for a micro-batch: the loss, or the output of its pipeline stage."""
    token_loss = None
    if decided.stages is None or decided.stage in (None, decided.stages.size - 1):
        share = tensor_parallel.share_of_vocabulary(loss.find_head(net))
        whole = meta_kernels.cross_entropy if on_gpu else None
        token_loss = loss.TokenLoss(
            net,
            cfg.train.loss,
            verify=False,
            cross_entropy=share.cross_entropy if share else whole,
            enter=share.enter if share else None,
            router_coef=decided.router_coef,
        )
    if decided.stages is None or decided.stage is None:
        assert token_loss is not None, "without stages every rank has the loss"
        return token_loss
    return pipeline_parallel.planned(net, decided.stages, decided.stage, token_loss)


@dataclass(frozen=True)
class StagePlan:
    """The plan of a rank of one stage of a pipeline.

    `kept_bytes` is what one micro-batch holds between its forward and its backward; the stage holds `in_flight`
    micro-batches at once. `sent_bytes` are the hidden states and gradients that the rank sends to other stages in a
    step. `micro_batch_s` has the seconds of forward and backward of one micro-batch.
    """

    first_layer: int
    last_layer: int
    in_flight: int
    kept_bytes: int
    sent_bytes: int
    micro_batch_s: float
    plan: Plan
    simulation: Simulation

    @property
    def recomputed_share(self) -> float:
        """Return the recomputed FLOPs over the FLOPs of the forward."""
        flops = self.simulation.flops
        return flops[Phase.recompute] / max(1, flops[Phase.forward])


@dataclass(frozen=True)
class Planned:
    """A plan and what it was made from."""

    cfg: RunConfig
    strategy: strategy.Strategy
    simulation: Simulation
    plan: Plan
    time: step_time.StepTime
    world_size: int
    table: dict[str, Any] | None = None  # of checkpointing=budget, as the run writes it to a file
    stages: list[StagePlan] = field(default_factory=list)  # `plan` is that of the fullest; [] without stages

    @property
    def is_cut_short(self) -> bool:
        """Return whether the search for tables ended before its end."""
        return budget.CUT_SHORT in self.strategy.decided_because

    def simulation_of(self, stage: int) -> Simulation:
        return self.stages[stage].simulation if self.stages else self.simulation


def strategy_of_fullest(planned: Planned) -> strategy.Strategy:
    """Return the strategy of the stage whose plan `planned.plan` is; without stages, that of the run."""
    of_it = [number for number, stage in enumerate(planned.stages) if stage.plan is planned.plan]
    return planned.strategy.of_stage(of_it[0]) if of_it else planned.strategy


def make_plan(
    cfg: RunConfig,
    *,
    world_size: int | None = None,
    capacity: Capacity | None = None,
    decided: strategy.Strategy | None = None,
    on_gpu: bool = True,
    recordings: Recordings | None = None,
    until: float = math.inf,
) -> Planned:
    """Plan the run of `cfg` on its own machine (or `world_size` ranks and `capacity`). Raises ConfigError.

    A `decided` strategy is used as it is instead of being resolved again. `on_gpu` is false for ranks that
    compute on CPUs, whose only memory is the host's. `recordings` holds what earlier plans recorded: a plan
    that differs from one of them only in ZeRO's settings or machine records nothing. `until`, a time by
    time.process_time(), ends the search for tables: `is_cut_short` tells whether it did.
    """
    ranks = world_size or cfg.hardware.ranks
    validation.check_plan(cfg)
    decided = decided or strategy.decide(cfg, world_size=ranks, can_pin=on_gpu)
    known = recordings or Recordings()
    capacity = capacity or capacity_of(cfg.hardware)
    if decided.stages is not None:
        return _plan_stages(
            cfg, decided, known, world_size=ranks, capacity=capacity, on_gpu=on_gpu, until=until
        )
    plan = _planner(cfg, decided, known, world_size=ranks, capacity=capacity, on_gpu=on_gpu)
    if tiling.is_open(decided.decisions):
        trial, because = tiling.choose(decided.decisions, plan)
        made: Planned = replace(trial.made, strategy=replace(trial.made.strategy, decided_because=because))
    elif budget.is_open(decided.decisions):
        trial, decisions, because = budget.choose(
            cfg.checkpointing,
            decided.decisions,
            plan,
            gpus.machine(cfg.hardware),
            gpu_bytes=capacity.gpu_bytes,
            on_gpu=on_gpu,
            known=known.corners,
            until=until,
        )
        made = _with_table(trial, decisions, cfg, because or decided.decided_because)
    else:
        made = plan(decided.decisions).made
    return _both_segments(made, known) if on_gpu else made


def _plan_stages(
    cfg: RunConfig,
    decided: strategy.Strategy,
    known: Recordings,
    *,
    world_size: int,
    capacity: Capacity,
    on_gpu: bool,
    until: float,
) -> Planned:
    """Plan a rank of each stage. Return the plan of the fullest stage, with the time of a step through all stages."""
    stages = decided.stages
    assert stages is not None
    accumulation = decided.ds["gradient_accumulation_steps"]
    parts = [
        budget.Stage(
            first=stages.layers(stage).start,
            decisions=decided.decisions_of(stage),
            plan=_planner(
                cfg,
                decided.of_stage(stage),
                known,
                world_size=world_size,
                capacity=capacity,
                on_gpu=on_gpu,
                recorded_as=like,
            ),
            in_flight=stages.in_flight(stage, accumulation),
        )
        for stage, like in enumerate(strategy.find_like(cfg, decided))
    ]
    decided, trials, table = _choose_in_stages(
        cfg, decided, parts, known, gpu_bytes=capacity.gpu_bytes, on_gpu=on_gpu, until=until
    )
    every: list[Planned] = [trial.made for trial in trials]
    in_a_step = accumulation * _hidden_bytes(cfg)
    sent = [((stage > 0) + (stage < stages.size - 1)) * in_a_step for stage in range(stages.size)]
    fullest: Planned = max(trials, key=lambda trial: trial.needed_bytes).made
    fullest.plan.assumptions.append(
        f"layers are divided into {stages.size} stages ({stages.describe()}); 1F1B: stage s holds min({stages.size} - "
        f"s, {accumulation}) micro-batches at once, and each stage waits {stages.bubble(accumulation):.0%} of the time"
    )
    time = step_time.through_stages(
        [made.time for made in every], accumulation, sent, gpus.machine(cfg.hardware)
    )
    found = [
        StagePlan(
            first_layer=stages.layers(stage)[0],
            last_layer=stages.layers(stage)[-1],
            in_flight=parts[stage].in_flight,
            kept_bytes=made.simulation.forward_end_bytes,
            sent_bytes=sent[stage],
            micro_batch_s=(made.time.compute_s + made.time.recompute_s) / accumulation,
            plan=made.plan,
            simulation=made.simulation,
        )
        for stage, made in enumerate(every)
    ]
    return replace(fullest, strategy=decided, time=time, table=table, stages=found)


def _choose_in_stages(
    cfg: RunConfig,
    decided: strategy.Strategy,
    parts: Sequence[budget.Stage],
    known: Recordings,
    *,
    gpu_bytes: int | None,
    on_gpu: bool,
    until: float,
) -> tuple[strategy.Strategy, list[Trial], dict[str, Any] | None]:
    """Return the strategy with the decisions of all stages, the trial of each, and the record of their tables."""
    if not budget.is_open(decided.decisions):
        return decided, [part.plan(part.decisions) for part in parts], None
    chosen = budget.choose_in_stages(
        cfg.checkpointing,
        parts,
        gpus.machine(cfg.hardware),
        gpu_bytes=gpu_bytes,
        on_gpu=on_gpu,
        known=known.corners,
        until=until,
    )
    trials = [trial for trial, _, _ in chosen]
    because = "; ".join(text for _, _, text in chosen if text) or decided.decided_because
    decided = replace(decided.with_stages([decisions for _, decisions, _ in chosen]), decided_because=because)
    fullest = max(trials, key=lambda trial: trial.needed_bytes)
    whole = replace(fullest, graphs=budget.merge_graphs(parts, trials))
    table = budget.as_record(whole, decided.decisions, cfg.checkpointing)
    of_stages = {
        part.span: round(trial.needed_bytes / GIB, 3) for part, trial in zip(parts, trials, strict=True)
    }
    return decided, trials, table | {"planned_gib_of_stages": of_stages}


def _renumbered(simulation: Simulation, first: int) -> Simulation:
    """Return a stage's simulation with the numbers that its layers have in the whole model."""

    def move(moment: Moment) -> Moment:
        return moment if moment.layer is None else replace(moment, layer=moment.layer + first)

    return replace(
        simulation,
        forward_peak=move(simulation.forward_peak),
        backward_peak=move(simulation.backward_peak),
        peaks={name: move(moment) for name, moment in simulation.peaks.items()},
    )


def _hidden_bytes(cfg: RunConfig) -> int:
    """Return the bytes of the hidden states of one micro-batch, which stages send."""
    size = hf_model.hidden_size(hf_model.shape_config(cfg.model))
    return sequence_parallel.tokens_of_rank(cfg.train) * size * hf_model.DTYPES[cfg.train.precision].itemsize


def _in_flight_bytes(cfg: RunConfig, decided: strategy.Strategy, simulation: Simulation) -> int:
    """Return the bytes of a stage besides its current micro-batch: others in flight, and a receive buffer."""
    if decided.stages is None or decided.stage is None:
        return 0
    count = decided.stages.in_flight(decided.stage, decided.ds["gradient_accumulation_steps"])
    received = _hidden_bytes(cfg) * (decided.stage > 0)
    return (count - 1) * simulation.forward_end_bytes + received


def _both_segments(planned: Planned, known: Recordings) -> Planned:
    """Return `planned` with the bytes that torch's allocator would reserve with the other kind of segments added."""
    expandable = planned.strategy.allocators.expandable_segments
    other = reserved_bytes(planned, known.get(planned.cfg, planned.strategy), expandable=not expandable).most
    found = {**planned.plan.reserved_by_segments, "fixed" if expandable else "expandable": other}
    return replace(planned, plan=replace(planned.plan, reserved_by_segments=found))


def make_curve(cfg: RunConfig, parts: int, recordings: Recordings) -> Iterator[Planned]:
    """Yield plans of `cfg`, a run with checkpointing=budget, under tables that keep from the fewest bytes to all.

    The tables are about `parts` equal steps of bytes apart; the budget of `cfg` has no effect. Raises ConfigError.
    """
    validation.check_plan(cfg)
    decided = strategy.decide(cfg, world_size=cfg.hardware.ranks, can_pin=True)
    if decided.stages is not None:
        raise ConfigError(
            f"{pipeline_parallel.OPTION}={decided.stages.size} with --curve: each stage has tables of its own, "
            f"so there is no one curve; plan {budget.CHOICE} with a checkpointing.budget_gib for each point"
        )
    capacity = capacity_of(cfg.hardware)
    plan = _planner(cfg, decided, recordings, world_size=cfg.hardware.ranks, capacity=capacity)
    machine = gpus.machine(cfg.hardware)
    for trial, decisions in budget.curve(
        cfg.checkpointing, decided.decisions, plan, machine, parts, known=recordings.corners
    ):
        yield _with_table(trial, decisions, cfg, "")


def _planner(
    cfg: RunConfig,
    decided: strategy.Strategy,
    known: Recordings,
    *,
    world_size: int,
    capacity: Capacity,
    on_gpu: bool = True,
    recorded_as: int | None = None,
) -> budget.Plan:
    """Return a function that plans the run under given decisions for its layers.

    If `decided` is of a stage, `recorded_as` is a stage that computes the same, whose recordings are used.
    """

    def plan(decisions: list[LayerDecision]) -> Trial:
        own = replace(decided, decisions=decisions)
        recording = known.get(cfg, replace(own, stage=recorded_as), on_gpu=on_gpu)
        simulation = recording.under(ZeroSettings.of(decided.ds, world_size))
        if decided.stages is not None and decided.stage is not None:
            simulation = _renumbered(simulation, decided.stages.layers(decided.stage).start)
        made = estimate(cfg, own, simulation, world_size=world_size, capacity=capacity, on_gpu=on_gpu)
        if on_gpu:
            made = with_replay(made, recording)
        needed = needed_bytes(made, GPU_MEMORY) if on_gpu else made.plan.peak_bytes
        again = simulation.flops[Phase.recompute]
        host = next(r for r in made.plan.resources if r.name == HOST_MEMORY)
        room = None if host.spare_bytes is None else max(0, host.spare_bytes) // made.plan.ranks_per_node
        return Trial(needed, made.time.total_s, again, recording.graphs, made, made.time.link, room)

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
    """Make the plan that follows from the model states and one simulated micro-batch.

    Without a GPU the bytes of `gpu` are in host memory too, without gaps of an allocator or a CUDA context.
    """
    capacity = capacity or capacity_of(cfg.hardware)
    per_node = min(cfg.hardware.gpus_per_node or 1, world_size)
    zero = ZeroSettings.of(decided.ds, world_size)
    items = decided.model_states(data_ranks=zero.world_size, ranks_per_node=per_node, can_pin=on_gpu)
    simulated = IN_BACKWARD if zero.stage < 3 else ()  # the simulation counts these itself
    states = _persistent(item for item in items if item.name not in simulated)
    if in_flight := _in_flight_bytes(cfg, decided, simulation):
        states[Category.activations] = in_flight
    moments = [_with_states(moment, states) for moment in (simulation.forward_peak, simulation.backward_peak)]
    update = _optimizer_step(_persistent(items), _update_bytes(decided, zero.world_size))
    peak = max([*moments, update], key=lambda moment: moment.total_bytes)
    peaks = {name: _with_states(moment, states) for name, moment in simulation.peaks.items()}
    expandable = decided.allocators.expandable_segments
    overhead = overhead_bytes(peak.total_bytes, world_size, expandable=expandable) if on_gpu else 0
    outside = outside_torch_bytes(world_size) if on_gpu else 0
    host = _by_name(items, "host")
    host["processes and libraries"] = PROCESS_BYTES if on_gpu else CPU_PROCESS_BYTES
    pinned = _by_name(items, "pinned")
    if simulation.host_bytes:
        pinned["offloaded activations"] = simulation.host_bytes
    nvme = _by_name(items, "nvme")
    per_rank = sum(host.values()) + sum(pinned.values()) + (0 if on_gpu else peak.total_bytes)
    resources = [Resource(HOST_MEMORY, per_node * per_rank, capacity.host_bytes)]
    if on_gpu:
        least = peak.total_bytes + outside
        resources.insert(0, Resource(GPU_MEMORY, peak.total_bytes + overhead, capacity.gpu_bytes, least))
    if nvme:
        resources.append(Resource("NVMe per node", per_node * sum(nvme.values()), capacity.nvme_bytes))
    each_saved = preflight.saved_state_bytes(
        decided.num_saved_params, decided.ds, decided.saved_moments_bytes(items, zero.world_size)
    )
    plan = Plan(
        gpu={**peak.by_category, Category.overhead: overhead},
        states=_persistent(items),
        peak=peak,
        peak_bytes=peak.total_bytes,
        states_bytes=sum(states.values()),
        host=host,
        pinned=pinned,
        nvme=nvme,
        ranks_per_node=per_node,
        saved_state_bytes=each_saved * preflight.states_on_disk(cfg.save, cfg.train.steps),
        resources=resources,
        assumptions=_assumptions(cfg, simulation, zero, per_node, on_gpu=on_gpu),
        peaks={**peaks, "update": update},
        reserved_bytes=peak.total_bytes + overhead - outside if on_gpu else 0,
        outside_bytes=outside,
    )
    return Planned(cfg, decided, simulation, plan, _time(cfg, decided, simulation, zero), world_size)


def _assumptions(
    cfg: RunConfig, simulation: Simulation, zero: ZeroSettings, per_node: int, *, on_gpu: bool
) -> list[str]:
    """Return what a plan takes for granted. Some of it only the data, torch's compiler or a measurement could tell."""
    num_nodes = cfg.hardware.num_nodes
    found = list(simulation.assumptions)
    if not on_gpu:
        found.append("there is no GPU: what would be on it is host memory")
    found.append(f"{format_count(num_nodes, 'node')} of {format_count(per_node, 'rank')}")
    if cfg.optim.states is not OptimStates.fp32:
        found.append(
            f"optim.states={cfg.optim.states}: a step of AdamW on the host takes as long as one of fp32 states, whose "
            "rate is known; on a GPU it streams half the bytes"
        )
    if cfg.compile is Compilation.layers:
        found.append(
            "compile=layers: operations, what they keep and their times are those of layers that are not compiled; a "
            "layer's weights are gathered together, and its gradients are there together"
        )
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
    if (shared := cfg.train.sequence_parallel_size) > 1:
        tokens, exchanged = sequence_parallel.tokens_of_rank(cfg.train), format_size(simulation.exchanged_bytes)
        found.append(
            f"each sequence is shared by {shared} ranks: a rank has {tokens} tokens of a micro-batch and gives "
            f"{exchanged} in exchanges around attention, which waits for them"
        )
    if zero.tensor_ranks > 1:
        found.append(
            f"each layer is shared by {zero.tensor_ranks} ranks: in a micro-batch they sum "
            f"{format_size(simulation.summed_bytes)}, and each layer waits for it"
        )
        if cfg.checkpointing.deepspeed.partition_activations:
            found.append(
                "checkpointing.deepspeed.partition_activations=true: kept inputs of layers are counted whole; each "
                f"rank keeps 1/{zero.tensor_ranks} of them"
            )
    return found


def _time(
    cfg: RunConfig, decided: strategy.Strategy, simulation: Simulation, zero: ZeroSettings
) -> step_time.StepTime:
    return step_time.step_time(
        simulation,
        machine=gpus.machine(cfg.hardware),
        zero=zero,
        num_params=decided.held.num_params,
        num_trained=decided.held.num_trainable_params,
        accumulation=decided.ds["gradient_accumulation_steps"],
        tokens=sequence_parallel.tokens_of_rank(cfg.train),
        precision=cfg.train.precision,
        optimizer_on_nvme=ds_config.optimizer_offload_device(decided.ds) == "nvme",
        optimizer_bytes=optimizer_state.streamed_bytes(decided.optimizer, cfg.optim.states),
        params_on_nvme=ds_config.param_offload_device(decided.ds) == "nvme",
        sequence_ranks=cfg.train.sequence_parallel_size,
    )


def capacity_of(machine: HardwareConfig) -> Capacity:
    """Return the capacity of the machine that the options describe; None for what they leave out."""
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


def what_decides(plan: Plan) -> str:
    """Return, in words, which resources are too small and what decides whether a tight run fits; "" if it fits."""
    found = []
    for r in plan.resources:
        if r.found_bytes is None or r.verdict is Verdict.fits:
            continue
        short = f"{r.name} lacks {(r.needed_bytes - r.found_bytes) / GIB:.1f} GiB"
        if r.verdict is Verdict.tight and r.least_bytes is not None:
            room = r.found_bytes - r.least_bytes
            short += (
                f" for the gaps of torch's allocator: {room / GIB:.1f} GiB are there for them, and up to "
                f"{(r.needed_bytes - r.least_bytes) / GIB:.1f} are counted. It may run, with pauses in which torch "
                "gives cached memory back, or run out"
            )
        found.append(short)
    return "; ".join(found)


def _moment_as_json(moment: Moment) -> dict[str, Any]:
    return {
        "phase": str(moment.phase),
        "layer": moment.layer,
        "module": moment.module,
        "operation": moment.operation,
        "allocated_bytes": moment.total_bytes,
        "in_words": moment.in_words(),
    }


def _stage_as_json(stage: StagePlan) -> dict[str, Any]:
    return {
        "layers": [stage.first_layer, stage.last_layer],
        "micro_batches_in_flight": stage.in_flight,
        "kept_bytes_per_micro_batch": stage.kept_bytes,
        "kept_bytes_per_layer": stage.simulation.kept_bytes,
        "recomputed_share_of_forward": stage.recomputed_share,
        "sent_bytes_per_step": stage.sent_bytes,
        "micro_batch_s": stage.micro_batch_s,
        "gpu_allocated_peak_bytes": stage.plan.peak_bytes,
        "gpu_bytes_at_peak": {str(name): size for name, size in stage.plan.gpu.items()},
        "verdict": str(stage.plan.verdict),
    }


def plan_as_json(planned: Planned) -> dict[str, Any]:
    """Return the whole plan as plain data, in bytes and seconds, for plan.json and --json."""
    plan, time = planned.plan, planned.time
    return {
        "name": planned.cfg.name,
        "machine": planned.cfg.hardware.name,
        "world_size": planned.world_size,
        "optimizer": str(planned.strategy.optimizer),
        "optimizer_states": str(ds_config.optimizer_states(planned.strategy.ds)),
        "verdict": str(plan.verdict),
        "fits": plan.fits,
        "decided_by": what_decides(plan),
        "gpu_bytes_at_peak": {str(name): size for name, size in plan.gpu.items()},
        "gpu_allocated_peak_bytes": plan.peak_bytes,
        "gpu_reserved_peak_bytes": plan.reserved_bytes,
        "gpu_reserved_by_segments_bytes": dict(plan.reserved_by_segments),
        "gpu_reserved_after_bytes": dict(plan.reserved_after),
        "gpu_process_peak_bytes": plan.process_bytes,
        "peak": _moment_as_json(plan.peak),
        "peaks": {name: _moment_as_json(plan.peaks[name]) for name in PEAKS if name in plan.peaks},
        "pinned_bytes_per_rank": dict(plan.pinned),
        "host_bytes_per_rank": dict(plan.host),
        "nvme_bytes_per_rank": dict(plan.nvme),
        "saved_states_bytes": plan.saved_state_bytes,
        "resources": [
            {
                "name": r.name,
                "needed_bytes": r.needed_bytes,
                "least_bytes": r.needed_bytes if r.least_bytes is None else r.least_bytes,
                "found_bytes": r.found_bytes,
                "fits": r.fits,
                "verdict": str(r.verdict),
            }
            for r in plan.resources
        ],
        "kept_bytes_per_layer": planned.simulation.kept_bytes,
        "checkpointing_table": planned.table,
        "stages": [_stage_as_json(stage) for stage in planned.stages],
        "step_time_s": {name: seconds for name, seconds in asdict(time).items() if name.endswith("_s")},
        "total_s": time.total_s,
        "tokens_per_s": time.tokens_per_s,
        "collectives_bytes": dict(time.traffic_bytes),
        "unknown_times": time.unknown,
        "total_between_s": time.between,
        "assumptions": [*plan.assumptions, *time.assumptions],
        "warnings": planned.strategy.warnings,
    }
