"""Plan a launch on rank 0 for the machine it runs on, before any weight is read.

A run whose plan does not fit is refused. A model that cannot be planned is trained without a plan; then only the memory
of its model states is compared with the machine.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from remat.config import compose, ds_config, paths, resumed
from remat.config.metrics import PLANNED_GPU_PEAK_GIB
from remat.config.options import NOT_FOLDERS, ConfigError, HardwareConfig, RunConfig
from remat.config.units import GIB, format_size
from remat.machine import distributed, gpus, node, ops
from remat.machine.distributed import World
from remat.machine.doctor import Finding, cores_of, examine
from remat.machine.node import Machine
from remat.model import hf_model
from remat.planning import budget, preflight, strategy, tiling
from remat.planning.loading import Loading, plan_loading
from remat.planning.model_states import Item
from remat.planning.plan import (
    GPU_MEMORY,
    HOST_MEMORY,
    Capacity,
    Planned,
    Recordings,
    Resource,
    Verdict,
    make_plan,
    plan_as_json,
    what_decides,
)
from remat.planning.preflight import DoesNotFit, Needs, Row
from remat.planning.settings import search
from remat.planning.strategy import Strategy
from remat.saving import manifest, nvme, swap_room

CHOSEN = "strategy.json"  # in the run directory: the overrides that strategy=auto added
BEST_SHOWN = 3
WITHOUT_A_PLAN = (
    "The run starts without one: whether it fits was judged from model states and saved files alone, and the ledger "
    "has nothing to hold the run against"
)


@dataclass(frozen=True)
class LaunchPlan:
    """The plan of this launch; the same on every rank.

    `planned` is None when there is no plan, and `reason` says why. `states` are the model states of one rank.
    `command` is the `remat plan` command for this run on this machine. `strategy` is what the run does; with
    checkpointing=budget it has the tables that were chosen. `added` are the overrides that strategy=auto added to
    this launch.
    """

    device: str  # cuda or cpu: where the model computes
    planned: Planned | None
    reason: str | None
    states: list[Item]
    command: list[str]
    strategy: Strategy
    loading: Loading | None = None  # how pretrained weights are read; None if none are
    folder: Path | None = None  # the run directory, once it is known
    added: Sequence[str] = ()

    def record(self) -> dict[str, Any]:
        """Return the content of plan.json: the output of `remat plan --json`, and more that the ledger needs."""
        return {
            "planned": None if self.planned is None else _as_record(self.planned),
            "reason": self.reason,
            "device": self.device,
            "loading": self.loading and self.loading.record(),
            "model_states": [asdict(item) for item in self.states],
            "command": shlex.join(self.command),
        }

    def line(self) -> str:
        """Return the line for the header: the peak, where it is, and what is left over."""
        if self.planned is None:
            return f"no plan: {self.reason}"
        per = "GPU" if self.device == "cuda" else "rank, in host memory"
        found = [(r.name, r.spare_bytes) for r in self.planned.plan.resources if r.spare_bytes is not None]
        spare = ", ".join(f"{format_size(size)} of {name}" for name, size in found if size >= 0)
        lacking = ", ".join(f"{format_size(-size)} of {name}" for name, size in found if size < 0)
        verdict = f"lacks {lacking}" if lacking else f"fits with {spare} to spare"
        if self.planned.plan.verdict is Verdict.tight:
            verdict = f"tight: {what_decides(self.planned.plan)}"
        peak = format_size(self.planned.plan.peak_bytes)
        return f"peak {peak} per {per}, {self.where()}; {verdict}"

    def where(self) -> str:
        """Return the place of the peak, for example `in backward, layer 31 (mul.Tensor)`."""
        if self.planned is None:
            return ""
        peak = self.planned.plan.peak
        layer = "outside the layers" if peak.layer is None else f"layer {peak.layer}"
        return f"in {peak.phase}, {layer} ({peak.operation})"

    def metrics(self) -> dict[str, float]:
        """Return `plan/gpu_peak_gib`, to compare with memory/gpu_allocated_peak_gib; empty without a plan or a GPU."""
        if self.planned is None or self.device != "cuda":
            return {}
        return {PLANNED_GPU_PEAK_GIB: self.planned.plan.peak_bytes / GIB}


def plan_launch(
    cfg: RunConfig,
    strategy: Strategy,
    world: World,
    *,
    words: Sequence[str],
    warn: Callable[[str], None],
    added: Sequence[str] = (),
) -> LaunchPlan:
    """Plan on rank 0 and send the plan to all ranks. Collective: all ranks must call it.

    `words` are the arguments of this launch, with `added`, those that strategy=auto chose.
    Raises DoesNotFit on every rank, with one message, when something is too small; with `force` that is a warning.
    """
    items = model_states(cfg, strategy, world)
    needs = _needs(cfg, strategy, items, world)
    mine = _this_node(cfg, world, writes_nvme=needs.nvme_bytes > 0)
    machine = node.smallest(distributed.gather(mine))
    answer: tuple[Any, ...] = ()  # filled by rank 0
    command = _command(words, machine, world)
    if world.is_main:
        planned, reason = _planned(cfg, strategy, machine, world)
        lines = preflight.compare(needs, machine, _memory_rows(planned, needs, machine))
        plan = LaunchPlan(world.device.type, planned, reason, items, command, strategy)
        loading = plan_loading(
            replace(cfg, hardware=_hardware(cfg.hardware, world)),
            strategy,
            world_size=world.size,
            on_gpu=world.device.type == "cuda",
        )
        chosen = planned.strategy if planned else strategy
        tables = budget.pack(chosen.decisions), tiling.chosen_count(chosen.decisions)
        answer = (
            _to_send(planned),
            reason,
            _refusal(lines, plan),
            tables,
            chosen.decided_because,
            loading,
        )
    sent, reason, refusal, tables, because, loading = distributed.broadcast(answer)
    decisions = tiling.with_count(budget.unpack(strategy.decisions, tables[0]), tables[1])
    strategy = replace(strategy, decisions=decisions, decided_because=because)
    if budget.is_open(decisions):
        raise ConfigError(reason or "checkpointing=budget: there is no plan to choose tables by")
    if tiling.is_open(decisions):
        raise ConfigError(f"{tiling.AUTO}: there is no plan to choose by ({reason}); give the number of slices")
    planned = sent and replace(sent, strategy=strategy)
    if reason:
        warn(f"no plan: {reason}. {WITHOUT_A_PLAN}")
    if refusal and not cfg.force:
        raise DoesNotFit(
            f"{refusal}\n\nStart anyway with force=true. What would fit:\n\n  {shlex.join(command)}"
        )
    if refusal:
        warn(f"force=true: starting although {refusal}")
    if planned is not None and planned.plan.verdict is Verdict.tight:
        warn(f"the plan is tight: {what_decides(planned.plan)}")
    return LaunchPlan(world.device.type, planned, reason, items, command, strategy, loading, added=tuple(added))


def choose_settings(
    cfg: RunConfig, world: World, *, words: Sequence[str], note: Callable[[str], None]
) -> list[str] | None:
    """Return the overrides that strategy=auto adds to `words`, found by rank 0. Collective.

    A resume takes those of the run that it resumes, but for axes that `words` set. None: this machine's speed is not
    known, and the settings of the recipe stay. Raises DoesNotFit on every rank if nothing fits.
    """
    mine = _this_node(cfg, world, writes_nvme=False)
    machine = node.smallest(distributed.gather(mine))
    answer: tuple[Any, ...] = ()  # filled by rank 0
    if world.is_main:
        args = [*words, *_command((), machine, world)[2:], "force=true"]
        try:
            answer = *_choose(cfg, replace(cfg, hardware=_hardware(cfg.hardware, world)), args), None
        except (ConfigError, DoesNotFit) as error:
            answer = None, "", str(error)
    chosen, text, refusal = distributed.broadcast(answer)
    if refusal:
        raise DoesNotFit(refusal)
    note(f"strategy=auto: {text}")
    return chosen


def _choose(cfg: RunConfig, here: RunConfig, args: Sequence[str]) -> tuple[list[str] | None, str]:
    """Return the overrides and where they come from; None and the reason if none can be chosen."""
    if before := _chosen_before(cfg):
        given = search.set_by(args)  # what the command line sets now counts
        overrides = [word for word in json.loads(before.read_text()) if not search.set_by([word]) & given]
        return overrides, f"{_told(overrides)}, as {before} has it"
    if reason := search.explain_no_search(here):
        return None, f"{reason}. The settings of the recipe stay"
    best, *others = search.choose(args, compose.from_command_line(list(args)).run, BEST_SHOWN, Recordings())
    tokens = [f"{found.planned.time.tokens_per_s or 0:,.0f} tokens/s planned" for found in (best, *others)]
    rest = (f"{_told(found.overrides)} ({speed})" for found, speed in zip(others, tokens[1:], strict=True))
    return best.overrides, f"{_told(best.overrides)}, {tokens[0]}; next: {', '.join(rest) or 'nothing'}"


def _told(overrides: Sequence[str]) -> str:
    return " ".join(overrides) or "the settings of the recipe"


def _chosen_before(cfg: RunConfig) -> Path | None:
    """Return the file of the run to resume with the settings that strategy=auto chose for it."""
    run = max(_runs_to_resume(cfg), key=_last_used, default=None)
    return run / CHOSEN if run is not None and (run / CHOSEN).is_file() else None


def _last_used(run: Path) -> tuple[str, float]:
    """Return the sort key of runs, as `saving/load.py` has it: when one last saved; without a state, when it began."""
    states, _ = manifest.list_states(run)
    file = run / CHOSEN
    return states[0].info.created if states else "", file.stat().st_mtime if file.is_file() else 0.0


def _this_node(cfg: RunConfig, world: World, *, writes_nvme: bool) -> Machine:
    """Return the resources of the node of this rank. NVMe space that the launch will free counts as free."""
    machine = node.found(
        local_size=world.local_size,
        output_dir=cfg.output_dir,
        nvme_path=cfg.hardware.nvme_path if writes_nvme else None,
        cache=node.hub_cache(),
    )
    if machine.nvme is None:
        return machine
    left = swap_room.left_by(nvme.left_folders(cfg.hardware.nvme_path, _runs_to_resume(cfg)))
    return replace(machine, nvme=replace(machine.nvme, free_bytes=machine.nvme.free_bytes + left))


def _runs_to_resume(cfg: RunConfig) -> list[Path]:
    """Return the run directories, one of which a resume continues."""
    if cfg.resume == "none":
        return []
    if cfg.resume not in NOT_FOLDERS:
        return [resumed.run_folder(paths.expand(cfg.resume))]
    return list((paths.expand(cfg.output_dir) / cfg.name).glob(cfg.run_id or "*"))


def compare_states(cfg: RunConfig, strategy: Strategy, world: World) -> str | None:
    """Return why this node cannot hold the model states and files of the run, or None. Makes no plan."""
    needs = _needs(cfg, strategy, model_states(cfg, strategy, world), world)
    machine = _this_node(cfg, world, writes_nvme=needs.nvme_bytes > 0)
    text = preflight.describe_lack(preflight.compare(needs, machine, []))
    return None if text is None else f"{text}\n\n{preflight.LOWER_BOUND}"


def model_states(cfg: RunConfig, strategy: Strategy, world: World) -> list[Item]:
    """Return the model states of one rank."""
    return strategy.model_states(
        data_ranks=_data_ranks(cfg, world),
        ranks_per_node=world.local_size,
        can_pin=world.device.type == "cuda",
    )


def _data_ranks(cfg: RunConfig, world: World) -> int:
    return ds_config.count_data_ranks(
        cfg.train.tensor_parallel_size * cfg.train.pipeline_parallel_size, world.size
    )


def bytes_of_phases(cfg: RunConfig, strategy: Strategy) -> dict[str, int]:
    """Return the bytes that all ranks together write or read in each phase of the watchdog that moves states."""
    width = hf_model.DTYPES[cfg.train.precision].itemsize
    saved = preflight.saved_state_bytes(strategy.num_saved_params, strategy.ds)
    model = strategy.facts.num_params * width
    return {"save": saved, "load": max(saved, model), "export": model}


def makes_trial_save(cfg: RunConfig, strategy: Strategy) -> bool:
    """Return whether the run tries its save and export after the first step."""
    return preflight.rehearses(cfg.save, strategy.facts.num_params)


def _needs(cfg: RunConfig, strategy: Strategy, items: Sequence[Item], world: World) -> Needs:
    facts, width = strategy.facts, hf_model.DTYPES[cfg.train.precision].itemsize
    return preflight.count_needs(
        items,
        num_params=strategy.num_saved_params,
        ds=strategy.ds,
        ranks_per_node=world.local_size,
        save=cfg.save,
        steps=cfg.train.steps,
        moments_bytes=strategy.saved_moments_bytes(items, _data_ranks(cfg, world)),
        rehearse=makes_trial_save(cfg, strategy),
        num_merged_params=facts.num_params * cfg.save.merge,
        download_bytes=preflight.download_bytes(cfg.model, facts.num_params, cache=node.hub_cache()),
        reading_bytes=preflight.reading_bytes(
            cfg, facts.num_params, width, zero_stage=strategy.zero_stage, ranks_per_node=world.local_size
        ),
        flat_bytes=strategy.flat_bytes(width),
    )


def _planned(
    cfg: RunConfig, strategy: Strategy, machine: Machine, world: World
) -> tuple[Planned | None, str | None]:
    """Return the plan, or why there is none. An error here must not end a run that would work."""
    own = replace(cfg, hardware=_hardware(cfg.hardware, world))
    try:
        made = make_plan(
            own,
            world_size=world.size,
            capacity=Capacity(machine.gpu_bytes, _host_bytes(machine)),
            decided=strategy,
            on_gpu=world.device.type == "cuda",
        )
    except ConfigError as error:
        return None, " ".join(str(error).split())
    except Exception as error:
        text = str(error).strip().splitlines()
        return None, f"{type(error).__name__}: {text[0] if text else 'no reason given'}"
    return made, None


def _to_send(planned: Planned | None) -> Planned | None:
    """Return a plan for other ranks, without operations (too many) and strategy (each decides it)."""
    if planned is None:
        return None
    nothing: Any = None
    stages = [replace(stage, simulation=replace(stage.simulation, ops=[])) for stage in planned.stages]
    return replace(planned, strategy=nothing, simulation=replace(planned.simulation, ops=[]), stages=stages)


def _as_record(planned: Planned) -> dict[str, Any]:
    simulation = planned.simulation
    return plan_as_json(planned) | {
        "micro_batch_peak_bytes": simulation.peak.total_bytes,
        "gathered_bytes": simulation.gathered_bytes,
        "flops": {str(phase): count for phase, count in simulation.flops.items()},
    }


def _hardware(cfg: HardwareConfig, world: World) -> HardwareConfig:
    """Return the machine of this launch. Links and rates come from the recipe if it names the same GPU."""
    gpu = torch.cuda.get_device_name() if world.device.type == "cuda" else None
    kind = gpus.find_gpu(gpu) if gpu else None
    named = gpus.find_gpu(cfg.gpu) if cfg.gpu else None
    same = kind == named if gpu else cfg.gpu is None
    return replace(
        cfg if same else HardwareConfig(nvme_path=cfg.nvme_path),
        name=f"this launch: {world.size} x {gpu or 'cpu'}",
        gpu=gpu,
        gpus_per_node=world.local_size,
        num_nodes=max(1, world.size // world.local_size),
    )


def _host_bytes(machine: Machine) -> int:
    """Return the host memory that the ranks of a node can use: what is free, and what they already hold."""
    return machine.host_available_bytes + machine.local_size * machine.resident_bytes


def _memory_rows(planned: Planned | None, needs: Needs, machine: Machine) -> list[Row]:
    rows = []
    for resource in planned.plan.resources if planned else []:
        if resource.name == GPU_MEMORY and machine.gpu_bytes is not None:
            rows.append(preflight.gpu_row(needs, machine, _refused_above(resource)))
        elif resource.name == HOST_MEMORY:
            rows.append(preflight.host_row(needs, machine, resource.needed_bytes, _host_bytes(machine)))
    return rows


def _refused_above(resource: Resource) -> int:
    """Return the bytes below which a run is refused: a tight run may start, with a warning."""
    if resource.verdict is Verdict.tight and resource.least_bytes is not None:
        return resource.least_bytes
    return resource.needed_bytes


def _refusal(lines: Sequence[Row], plan: LaunchPlan) -> str | None:
    text = preflight.describe_lack(lines)
    if text is None:
        return None
    if plan.planned is None:
        return f"{text}\n\nno plan: {plan.reason}. {preflight.LOWER_BOUND}"
    parts = sorted(plan.planned.plan.gpu.items(), key=lambda part: -part[1])
    largest = ", ".join(f"{name} {format_size(held)}" for name, held in parts[:4] if held)
    return f"{text}\n\npeak of each rank {plan.where()}: {largest}"


def _command(words: Sequence[str], machine: Machine, world: World) -> list[str]:
    """Return the `remat plan` command for this run on the machine of this launch."""
    found = [
        f"hardware.gpus_per_node={world.local_size}",
        f"hardware.num_nodes={max(1, world.size // world.local_size)}",
        f"hardware.host_memory_gib={_host_bytes(machine) / GIB:.2f}",
    ]
    if machine.gpu_bytes is not None:
        found += [
            f"hardware.gpu='{torch.cuda.get_device_name()}'",
            f"hardware.gpu_memory_gib={machine.gpu_bytes / GIB:.2f}",
        ]
    return ["remat", "plan", *words, *found]


def examine_for(cfg: RunConfig, ranks: int, say: Callable[[str], None]) -> tuple[list[Finding], str]:
    """Check whether this machine can hold this run with `ranks` ranks here. Reads no weight.

    Builds and runs the ops that the run needs. Returns the findings and a table of needed and found bytes. `ranks` 0:
    one for each GPU of this machine; without a GPU, as many as the recipe's machine has.
    """
    has_gpu = torch.cuda.is_available()
    local = ranks or (torch.cuda.device_count() if has_gpu else cfg.hardware.gpus_per_node or 1)
    world = World(0, local * cfg.hardware.num_nodes, 0, local, torch.device("cuda" if has_gpu else "cpu"))
    decided = strategy.decide(cfg, world_size=world.size, can_pin=has_gpu)
    needs = _needs(cfg, decided, model_states(cfg, decided, world), world)
    machine = _this_node(cfg, world, writes_nvme=needs.nvme_bytes > 0)
    planned, reason = _planned(cfg, decided, machine, world)
    lines = preflight.compare(needs, machine, _memory_rows(planned, needs, machine))
    devices = ds_config.optimizer_offload_device(decided.ds), ds_config.param_offload_device(decided.ds)
    found = [*examine(ops.needed(*devices, cfg.optim.name), say), cores_of(local)]
    if lacking := preflight.too_few_gpus(needed=local, found=torch.cuda.device_count()):
        found.append(Finding("ranks", str(local), lacking))
    found += [
        Finding(row.name, f"{row.found_bytes / GIB:.2f} GiB", "".join(preflight.problems([row])))
        for row in lines
    ]
    note = f"\n\nno plan: {reason}. {preflight.LOWER_BOUND}" if reason else ""
    return found, preflight.draw_table(lines) + note
