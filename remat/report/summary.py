"""Describe a run in a few rows: the header before the first step, and where the files are after the last."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, Protocol

import psutil

from remat.activation_checkpointing import policy
from remat.config import ds_config
from remat.config.options import OptimStates, PeftMethod, RunConfig
from remat.config.units import format_count
from remat.data import cache
from remat.data.cache import Splits
from remat.machine.distributed import World
from remat.model import adapters, hf_model
from remat.planning.launch_plan import LaunchPlan, makes_trial_save
from remat.planning.strategy import Strategy


class Described(Protocol):
    """The parts of a run that the header needs."""

    cfg: RunConfig
    strategy: Strategy
    plan: LaunchPlan
    world: World
    folder: Path
    splits: Splits
    padding_share: float
    loaded: list[hf_model.Loaded]

    @property
    def resumed_step(self) -> int | None: ...


def describe(run: Described) -> dict[str, str]:
    """Return labels and values, in reading order."""
    cfg, train = run.cfg, run.cfg.train
    decided, splits = run.strategy, run.splits
    facts, ds = decided.facts, decided.ds
    accumulation = ds["gradient_accumulation_steps"]
    steps = train.steps or 0
    streamed = splits.train.epoch_length == 0
    epochs = 0.0 if streamed else steps * train.global_batch_size / splits.train.epoch_length
    count = "streamed," if streamed else f"{splits.train.epoch_length}"
    seen = steps * train.global_batch_size * splits.tokens_per_block
    held_out = f", {len(splits.held_out)} held out" if splits.held_out else ""
    notes = f"; {text}" if (text := cache.summary(splits.report)) else ""
    found = {
        "model": f"{facts.class_name}, {_count(facts.num_params)} parameters, {train.precision}, {cfg.model.attention}",
        "data": _data(run) + f", {count} blocks of {train.seq_len} tokens{held_out}{notes}",
        "packing": run.strategy.packed.line() + _filling(run),
        "ranks": _ranks(run.world),
        "ZeRO": f"stage {run.strategy.zero_stage} ({cfg.deepspeed.config}), {_offload(ds)}",
        "activations": "; ".join(
            filter(None, [policy.describe(decided.decisions), decided.stacks, decided.decided_because])
        ),
        "loss": str(train.loss),
        "batch": f"{train.global_batch_size} blocks = {train.micro_batch_size} per rank x {accumulation} accumulated "
        f"x {_readers(run.world)}",
        "steps": f"{steps}, {'about ' * streamed}{_count(seen)} tokens, "
        + ("an epoch ends where the data does, which is not known before" if streamed else _epochs(epochs)),
        "plan": run.plan.line(),
        "run": str(run.folder),
    }
    if decided.stages is not None:
        waiting = decided.stages.bubble(accumulation)
        found["stages"] = (
            f"{decided.stages.describe()}; 1F1B, {waiting:.1%} of a step is waiting where stages are equal"
        )
    if cfg.data.mix:
        found["mixture"] = _mixture(splits.report["sources"], epochs)
    if cfg.peft.method is not PeftMethod.none:
        found["trained"] = adapters.describe_lora(cfg.peft, facts.num_trainable_params, facts.num_params)
    optim = cfg.optim
    found["optimizer"] = str(optim.name) + f", optim.states={optim.states}" * (
        optim.states is not OptimStates.fp32
    )
    found["lr"] = f"{optim.lr:g}, {optim.schedule}{_warmup(optim.warmup(steps), steps)}"
    if cfg.peft.lr is not None:
        found["lr"] += f"; brought by peft={cfg.peft.method}, optim.lr=... sets another"
    if facts.quantised_weights:
        found["frozen"] = adapters.describe_quantised(
            facts.quantised_weights, sharded=run.strategy.zero_stage == 3
        )
    if makes_trial_save(cfg, run.strategy):
        found["rehearsal"] = "a save, an export and their reload after the first step (save.rehearse)"
    if run.loaded:
        found["weights"] = hf_model.describe_loaded(run.loaded)
    if run.resumed_step is not None:
        found["resumed"] = f"at step {run.resumed_step}"
    return found


def _filling(run: Described) -> str:
    """Describe the share of padding and how many rows share a block; "" for plain text, which fills its blocks."""
    train, counts = run.splits.train, run.splits.report["train"]
    if not train.of_rows:
        return ""
    rows = (counts["restarts"] + counts["blocks"]) / counts["blocks"]
    shared = f", {rows:.3g} rows a block" * train.apart
    return f"; {1 - run.padding_share:.1%} of positions are tokens, {run.padding_share:.1%} padding{shared}"


def _epochs(count: float) -> str:
    return f"{count:.3g} epoch{'s' * (count != 1)}"


def _data(run: Described) -> str:
    """Describe where the data is from and what was found there."""
    if sources := run.splits.report.get("sources"):
        return "; ".join(
            f"{name}: {source['source']} {source['path'] or ''} ({source['found']})"
            for name, source in sources.items()
        )
    paths = run.cfg.data.path if isinstance(run.cfg.data.path, list) else [run.cfg.data.path or ""]
    named = f"{run.cfg.data.source} {', '.join(map(str, paths))}".strip()
    return f"{named} ({found})" if (found := run.splits.report.get("found")) else named


def _warmup(warmup_steps: int, run_steps: int) -> str:
    if not warmup_steps:
        return ""
    text = f" after {format_count(warmup_steps, 'step')} of warm-up"
    return text + "; the run ends before it reaches optim.lr" * (warmup_steps >= run_steps)


def _mixture(sources: dict[str, Any], epochs: float) -> str:
    """Describe each source's share of an epoch's tokens, and how often the run sees each of its blocks."""
    parts = [
        f"{name} {source['share']:.1%} of tokens ({source['passes_per_epoch'] * epochs:.3g} times in this run)"
        for name, source in sources.items()
    ]
    return ", ".join(parts) + "; an epoch ends when one source has been seen once"


def seconds_since_launch() -> float:
    """Return the seconds since this process began, or since the launcher above it began."""
    process = psutil.Process()
    begun = process.create_time()
    with contextlib.suppress(psutil.Error):  # the system may hide other users' processes
        for parent in process.parents():
            if any(name in " ".join(parent.cmdline()[:4]) for name in ("deepspeed", "torch.distributed")):
                begun = parent.create_time()
    return time.time() - begun


def files(folder: Path) -> dict[str, str]:
    """Return labels and the paths of the run's files, and the commands that show them."""
    found = {"run": str(folder), "metrics": "metrics.jsonl"}
    states = sorted((folder / "saved").glob("step-*"))
    if states:
        found["saved states"] = ", ".join(f"saved/{state.name}" for state in states)
    for kind, name in (("exported", "export"), ("merged", "merged"), ("best", "best")):
        if (folder / name).is_dir():
            found[f"{kind} model"] = f"{name}/"
    found["look at it"] = f"remat report {folder}"
    return found


def _ranks(world: World) -> str:
    shared = world.tensor_parallel_size
    groups = "" if shared == 1 else f", each layer shared by {shared}"
    if world.pipeline_parallel_size > 1:
        groups = f", {world.pipeline_parallel_size} stages of {world.zero_size}"
    if world.sequence_parallel_size > 1:
        groups = f", each sequence shared by {world.sequence_parallel_size}"
    return f"{world.size} on {world.device.type}, {world.local_size} per node{groups}"


def _readers(world: World) -> str:
    """Describe how many readers of different rows there are: ranks, or groups of ranks that share their rows."""
    count = world.data_size
    if count == world.size:
        return f"{count} ranks"
    return "1 group of ranks" if count == 1 else f"{count} groups of ranks"


def _offload(ds: dict[str, Any]) -> str:
    places = {
        "optimizer state": ds_config.optimizer_offload_device(ds),
        "parameters": ds_config.param_offload_device(ds),
    }
    moved = [f"{what} on {place}" for what, place in places.items() if place]
    return ", ".join(moved) or "no offload"


def _count(value: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"
