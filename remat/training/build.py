"""Build everything a run needs: options, machine, data, model, engine. Checks that cost little come first.

A saved state to resume from is found and checked against the launch and its data before a model exists.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from remat.activation_checkpointing import compiled
from remat.activation_checkpointing.apply import Applied, apply
from remat.config import compose, ds_config, paths, validation
from remat.config.compose import Composed
from remat.config.options import (
    NOT_FOLDERS,
    Compilation,
    ConfigError,
    LossKind,
    ModelLoad,
    PeftMethod,
    Precision,
    RunConfig,
    StrategyChoice,
)
from remat.data import cache
from remat.data.batches import GlobalBatches, Part, ReadAhead, check_same_order, steps_of
from remat.data.blocks import Blocks
from remat.data.build import NoRoom
from remat.data.cache import Splits, open_blocks
from remat.data.first_look import FirstLook, load_run_tokenizer, look_first
from remat.data.streaming import FirstWindow, StreamedBatches
from remat.launch import left_behind
from remat.machine import distributed, gpus, ops, peers, rng, versions
from remat.machine.distributed import World
from remat.machine.host_memory import HostPeak
from remat.machine.memory import MemoryMonitor
from remat.model import adapters, flops, hf_model, layers, loss, noise, own_slices, weight_files
from remat.model import optimizer as optim
from remat.model.hf_model import Loaded
from remat.model.own_slices import NotSliced
from remat.parallel import pipeline_parallel, sequence_parallel, tensor_parallel, vocabulary
from remat.parallel.pipeline_parallel import PipelineParallel
from remat.parallel.sequence_parallel import SequenceParallel
from remat.parallel.ulysses import RankGroup
from remat.planning import launch_plan, preflight
from remat.planning.budget import FILE as TABLE_FILE
from remat.planning.launch_plan import LaunchPlan
from remat.planning.preflight import DoesNotFit
from remat.planning.strategy import Strategy, counted_model, decide, pack_again
from remat.report import run_dir, summary
from remat.report.console import Console
from remat.report.loading import CHECKING, LoadingProgress
from remat.report.run_dir import Ownership
from remat.report.tracking import Tracker
from remat.saving import disk_space, load, nvme, reshard, shared_folder, swap_room
from remat.saving.exports import export, hf_files
from remat.saving.manifest import FILE, SAVED, STEP, SavedState
from remat.training import lost_peer, out_of_memory, profiling, same_launch
from remat.training.profiling import Snapshots
from remat.training.run import Run, RunState
from remat.training.stopping import StopVote
from remat.training.throughput import FORMULAS, PhaseTimer, Window
from remat.training.watchdog import Watchdog


def find_resume_point(
    cfg: RunConfig,
    strategy: Strategy,
    world: World,
    console: Console,
    own: Callable[[Path], None] = lambda run_dir: None,
    progress: load.Progress = lambda done, total: None,
) -> load.ResumePoint | None:
    """Return the saved state to resume from, if one was asked for, checked against this launch. Collective.

    `own` is called with the run directory, to take it for this launch, before its states are read. `progress` is called
    while the files of a state are read. Raises ConfigError when the state cannot be loaded, DoesNotFit when the disk
    has no room to reshard it.
    """
    _check_shared(cfg)
    found = load.resolve_resume(
        cfg.resume, output_dir=cfg.output_dir, name=cfg.name, run_id=cfg.run_id, own=own, progress=progress
    )
    if found is not None:
        shared_by = cfg.train.tensor_parallel_size
        also = reshard.find_refusals(
            found.state,
            cfg.reshard,
            world_size=world.size,
            shared_by=shared_by,
            stages=cfg.train.pipeline_parallel_size,
            rendered=strategy.ds,
        )
        load.check_compatible(
            found.state,
            zero_stage=strategy.zero_stage,
            precision=cfg.train.precision,
            optimizer=optim.kind_named(cfg.optim.name),
            states=cfg.optim.states,
            also=also,
        )
        load.refuse_code(found.state)
        for note in found.notes:
            console.warning(note)
        if not reshard.same_ranks(found.state, world.size, shared_by, cfg.train.pipeline_parallel_size):
            _check_reshard(found.state, world, console)
    return found


def _check_shared(cfg: RunConfig) -> None:
    """Check that every node sees the newest saved state that rank 0 sees. Collective.

    Without this check a folder that the nodes do not share would be reported as a damaged state.
    """
    if cfg.resume == "none":
        return
    state = f"{STEP}*/{FILE}"
    if cfg.resume in NOT_FOLDERS:
        runs = paths.expand(cfg.output_dir) / cfg.name
        patterns = [f"{cfg.run_id or '*'}/{SAVED}/{state}"]
        shared_folder.check_newest(runs, patterns, f"resume={cfg.resume} output_dir={cfg.output_dir}")
    else:
        patterns = [FILE, state, f"{SAVED}/{state}"]
        shared_folder.check_newest(paths.expand(cfg.resume), patterns, f"resume={cfg.resume}")


def check_same_data(saved: RunState, splits: Splits, batches: GlobalBatches, resume: str) -> None:
    """Raise ConfigError unless the blocks and their order are as saved: the data position is valid only for them."""
    now = splits.key
    found = check_same_order(saved.data, batches)
    if saved.data_key != now:
        found.append(
            "the data, its packing, the tokenizer or train.seq_len changed "
            f"(now {now[:12]}, was {saved.data_key[:12]})"
        )
    if found:
        raise ConfigError(
            f"resume={resume}: the saved data position means nothing now: {'; '.join(found)}. Or start a new run from "
            "the exported model: model=hf model.path=RUN_DIR/export"
        )


def _tell_changes(
    state: SavedState, asked: RunConfig, cfg: RunConfig, splits: Splits, world: World, console: Console
) -> None:
    """Print the options that differ from the saved run's, and what follows for the learning rate."""
    if world.is_main:
        for line in same_launch.describe_changes(state, asked, cfg, splits.train.epoch_length):
            console.note(line)


def _check_reshard(state: SavedState, world: World, console: Console) -> None:
    """Raise DoesNotFit if the disk has no room for the resharded copy; else say that it will be made."""
    needed, free = reshard.measure_room(state, world.size, world.tensor_parallel_size)
    place, ranks = state.path.parent, f"{state.info.world_size} ranks for {world.size}"
    size = disk_space.describe_size(needed)
    if needed > free:
        raise DoesNotFit(
            f"resume: resharding {state.path.name} of {ranks} needs {size} in {place} while it is loaded, and "
            f"{disk_space.describe_size(free)} are free: free some, or start {state.info.world_size} ranks"
        )
    console.note(
        f"resharding {state.path.name} of {ranks} ({size} in {place} while it is loaded); random states start anew and "
        "sums are taken in another order: losses agree closely, not bit for bit"
    )


def _in_folder(cfg: RunConfig, plan: LaunchPlan, folder: Path, world: World) -> LaunchPlan:
    """Return `plan` with the run directory, and write what to plan if the kernel kills a rank for memory."""
    plan = replace(plan, folder=folder)
    if world.is_main:
        out_of_memory.prepare_for_kill(cfg, plan)
    return plan


def _swap_folder(
    run_dir: Path,
    strategy: Strategy,
    plan: LaunchPlan,
    world: World,
    undo: contextlib.ExitStack,
    *,
    force: bool,
    say: Callable[[str], None],
) -> Path | None:
    """Make this node's folder of swap files and return it; None without NVMe offload. `undo` removes it. Collective.

    Folders that killed launches of this run left are deleted first. Raises, on every rank, ConfigError when a node
    cannot make its folder and DoesNotFit when its disk has no room.
    """
    folder = nvme.own_folder(strategy.ds, run_dir, world)
    if folder is None:
        return None
    undo.callback(nvme.remove_folder, folder, world)
    if world.local_rank == 0:
        left_behind.name(folder)
    needed = sum(item.bytes_per_node for item in plan.states if item.place == "nvme")
    problem = None if force or world.local_rank else swap_room.describe_lack(folder, needed)
    if found := [text for text in distributed.gather(problem) if text]:
        raise DoesNotFit("\n".join(found))
    ops.ensure("async_io", say)
    swap_room.reserve_first(folder)
    return folder


def build(asked: Composed) -> Run:
    """Build everything up to the first step of the run that was `asked` for. Collective.

    Raises ConfigError (exit 2) or DoesNotFit (exit 3) before any weight is read, OutOfMemory after that.
    """
    console = Console(is_main=distributed.rank_from_env() == 0)
    ownership = Ownership(console.note)
    watchdog = Watchdog(
        asked.run.train.deadlines,
        rank=distributed.rank_from_env(),
        size=distributed.world_size_from_env(),
        let_go=ownership.release,
    )
    watchdog.start()
    undo = contextlib.ExitStack()
    try:
        with lost_peer.named(watchdog):
            run = _build(asked, console, watchdog, ownership, undo)
    except BaseException:
        undo.close()
        ownership.release()
        ownership.remove_unused()
        watchdog.close()
        raise
    watchdog.enter("built")  # a phase without a deadline, until the caller enters the next one
    return run


def _build(
    asked: Composed, console: Console, watchdog: Watchdog, ownership: Ownership, undo: contextlib.ExitStack
) -> Run:
    distributed.select_device()
    ranks, local_ranks = distributed.world_size_from_env(), distributed.local_size_from_env()
    looked = _look_first(asked.run) if distributed.rank_from_env() == 0 else None
    strategy = _decide(asked.run, looked.problems if looked else [], ranks, local_ranks, console)
    for text in strategy.warnings:
        console.warning(text)
    world, group, sequence_group = _join(asked.run, strategy, watchdog)
    asked, strategy, chosen = _with_settings(asked, strategy, world, console)
    cfg, strategy = _with_format(asked.run, strategy, looked)
    profiling.check(cfg.profile, world.device)
    snapshots = Snapshots(world.device)
    plan = launch_plan.plan_launch(
        cfg, strategy, world, words=asked.words, warn=console.warning, added=chosen or ()
    )
    strategy, hf_config = plan.strategy, hf_model.load_config(cfg.model)
    watchdog.enter("load")  # every file of a saved state is read
    checking = LoadingProgress(console.note, lambda: watchdog.enter("load"), CHECKING)
    point = find_resume_point(cfg, strategy, world, console, ownership.take, checking)
    tokenizer, splits = _data(cfg, hf_config, strategy, watchdog, looked)
    cfg = with_steps(cfg, splits.train.epoch_length)
    if lost := cache.loss_of_tokens(splits.report):
        console.warning(lost)
    saved = None if point is None else RunState.read(point.state.client_state)
    batches = _batches(cfg, splits.train, world, saved)
    padding_share = batches.padding_share()
    if point is not None and saved is not None:
        check_same_data(saved, splits, batches, cfg.resume)
        _tell_changes(point.state, asked.run, cfg, splits, world, console)
    folder = _run_folder(cfg, point, watchdog, ownership)
    swap_folder = _swap_folder(folder, strategy, plan, world, undo, force=cfg.force, say=console.note)
    with out_of_memory.named("build", plan := _in_folder(cfg, plan, folder, world)):
        engine, applied, loaded, sequence, pipeline = _engine(
            cfg, hf_config, strategy, world, console, plan, watchdog, snapshots,
            group=group, sequence_group=sequence_group, resuming=point is not None,
        )  # fmt: skip
    watchdog.enter("load")
    if point is not None:
        with out_of_memory.named("load", plan):
            load.load(engine, point.state)
    watchdog.enter("build")
    optim.set_options(engine.optimizer, cfg.optim)
    snapshots.take("engine")
    run = Run(
        cfg=cfg,
        strategy=strategy,
        plan=plan,
        world=world,
        console=console,
        folder=folder,
        ownership=ownership,
        engine=engine,
        token_loss=pipeline.token_loss if pipeline else _token_loss(cfg, strategy, engine.module),
        batches=ReadAhead(batches, world.device),
        splits=splits,
        padding_share=padding_share,
        applied=applied,
        tracker=_tracker(cfg, folder, world, console, saved),
        stop=StopVote(world, folder, max_minutes=cfg.train.max_minutes, age_s=summary.seconds_since_launch()),
        watchdog=watchdog,
        snapshots=snapshots,
        **_instruments(cfg, splits, folder, world, console),
        tokenizer=tokenizer,
        resumed=saved,
        swap_folder=swap_folder,
        sequence=sequence,
        pipeline=pipeline,
        loaded=loaded,
    )
    if world.is_main:
        _write_records(run, asked.yaml, chosen, hf_config)
    console.header(f"remat {cfg.name}", summary.describe(run))
    return run


def _look_first(cfg: RunConfig) -> FirstLook:
    """Look at the data, the tokenizer and the names and shapes of the weights, before anything slow."""
    looked = look_first(cfg.data, cfg.model)
    try:
        config = hf_model.load_config(cfg.model)
        skeleton = hf_model.skeleton(config, cfg.model)
    except ConfigError:  # `decide` raises it again; a missing tokenizer follows from it
        own = f"model.path={cfg.model.path} holds no tokenizer"
        return looked._replace(problems=[text for text in looked.problems if not text.startswith(own)])
    if not validation.reads_weights(cfg):
        return looked
    found = weight_files.refuse_quantised(config, cfg.model, cfg.peft.method)
    found += weight_files.find_differences(skeleton, cfg.model)
    if cfg.model.load is ModelLoad.own_slices and Path(cfg.model.path or "").is_dir() and not found:
        try:
            own_slices.locate(skeleton, cfg.model)
        except NotSliced as error:
            found.append(own_slices.refusal(cfg.model, str(error)))
    return looked._replace(problems=looked.problems + found)


def _decide(
    cfg: RunConfig, problems: Sequence[str], ranks: int, local_ranks: int, console: Console
) -> Strategy:
    """Return the strategy, after checking that this machine can run it.

    `problems` of the data and the model's files are raised in one ConfigError with those of options and machine. With
    several nodes `problems` alone are raised once all ranks have joined, because other nodes would wait for this rank.
    """
    found = list(problems)
    try:
        strategy = decide(cfg, world_size=ranks, can_pin=torch.cuda.is_available())
        check_machine(cfg, local_size=local_ranks, warn=console.warning)
        if not found:
            return strategy
        world = distributed.as_launched()
        if not cfg.force and (lacking := launch_plan.compare_states(cfg, strategy, world)):
            found.append(lacking)
    except (ConfigError, DoesNotFit) as error:
        if not found:
            raise
        raise ConfigError("\n".join([*found, str(error)])) from error
    if ranks == local_ranks:
        raise ConfigError("\n".join(found))
    return strategy


def _with_settings(
    asked: Composed, strategy: Strategy, world: World, console: Console
) -> tuple[Composed, Strategy, list[str] | None]:
    """Return the run with the settings that strategy=auto chooses, its strategy, and the overrides. Collective."""
    if asked.run.strategy is StrategyChoice.given:
        return asked, strategy, None
    chosen = launch_plan.choose_settings(asked.run, world, words=asked.words, note=console.note)
    settled = compose.from_command_line([*asked.words, *(chosen or []), "strategy=given"])
    if chosen:  # else the strategy is of the same options
        strategy = decide(settled.run, world_size=world.size, can_pin=world.device.type == "cuda")
    return settled, strategy, chosen


def _with_format(cfg: RunConfig, strategy: Strategy, looked: FirstLook | None) -> tuple[RunConfig, Strategy]:
    """Return `cfg` and `strategy` for the data format that rank 0 found. Collective.

    Raises ConfigError on every rank for the problems that rank 0 found.
    """
    data, problems = distributed.broadcast(looked and (looked.data, looked.problems))
    if problems:
        raise ConfigError("\n".join(problems))
    found = replace(cfg, data=data)
    return found, strategy if data.has_rows == cfg.data.has_rows else pack_again(found, strategy)


def _instruments(
    cfg: RunConfig, splits: Splits, folder: Path, world: World, console: Console
) -> dict[str, Any]:
    """Return the arguments of `Run` that measure losses, memory, phases and throughput, and the profiler."""
    timer = PhaseTimer(world.device)
    figures = throughput_figures(cfg, splits.context, console.warning)
    window = Window(timer, device=world.device, world_size=world.size, **figures)
    return {
        "losses": loss.LossWindow(world.device),
        "memory": MemoryMonitor(world.device),
        "profiler": profiling.Profiler(cfg.profile, folder, timer, window, world.device, world.rank),
        "timer": timer,
        "window": window,
    }


def _run_folder(
    cfg: RunConfig, point: load.ResumePoint | None, watchdog: Watchdog, ownership: Ownership
) -> Path:
    """Open the run directory for this launch alone, check that all nodes share it, and send reports of a hang there."""
    owned = point.run_dir if point else _begun_before(cfg)
    folder = run_dir.open_run_dir(cfg.output_dir, cfg.name, cfg.run_id, owned, ownership)
    shared_folder.check(folder, f"output_dir={cfg.output_dir}")
    watchdog.keep_in(folder)
    return folder


def _begun_before(cfg: RunConfig) -> Path | None:
    """Return the folder of this run_id that a launch left before its first saved state, to start in it again.

    Collective.
    """
    if cfg.resume != "auto_or_start" or cfg.run_id is None:
        return None
    folder = paths.expand(cfg.output_dir) / cfg.name / cfg.run_id
    return distributed.broadcast(folder if folder.is_dir() else None)


def _join(cfg: RunConfig, strategy: Strategy, watchdog: Watchdog) -> tuple[World, Any | None, RankGroup | None]:
    """Join the ranks, after checking that they were started alike. Collective.

    Collectives get a longer timeout than any deadline of the watchdog, because the watchdog's report says more.
    """
    watchdog.enter("join")  # joining has a time limit of its own, and names the missing ranks
    watchdog.meet(same_launch.join(cfg, strategy.ds, strategy.fields, _say))
    watchdog.allow_for(launch_plan.bytes_of_phases(cfg, strategy))
    watchdog.enter("build")
    timeout_minutes = max(30.0, watchdog.longest_s / 60 + 10)
    world = distributed.init(timeout_minutes=timeout_minutes)
    world, shared = tensor_parallel.join(world, cfg.train.tensor_parallel_size)
    sequences = cfg.train.sequence_parallel_size
    world, group = sequence_parallel.join(world, sequences, timeout_minutes=timeout_minutes)
    return pipeline_parallel.join(world, cfg.train.pipeline_parallel_size), shared, group


def _say(text: str) -> None:
    """Print a line on the first rank of each node, whose output is seen there."""
    if distributed.local_rank_from_env() == 0:
        print(f"remat (rank {distributed.rank_from_env()}): {text}", file=sys.stderr, flush=True)


def _data(
    cfg: RunConfig,
    hf_config: PretrainedConfig,
    strategy: Strategy,
    watchdog: Watchdog,
    looked: FirstLook | None,
) -> tuple[PreTrainedTokenizerBase, Splits]:
    """Return the tokenizer, checked against the model, and the blocks. Waits for a rank that builds their cache."""
    watchdog.enter("data")
    tokenizer = (looked and looked.tokenizer) or load_run_tokenizer(cfg.data, cfg.model)
    hf_model.check_vocabulary(hf_config, len(tokenizer), cfg.model.tokenizer or str(cfg.model.path))
    try:
        splits = open_blocks(
            replace(cfg.data, packing=strategy.packed.form),
            tokenizer=tokenizer,
            seq_len=cfg.train.seq_len,
            seed=cfg.train.seed,
            show_progress=True,
            on_progress=lambda: watchdog.enter("data"),
        )
    except NoRoom as error:
        raise DoesNotFit(str(error)) from error
    watchdog.enter("wait")  # a node may still build its cache: no deadline, no collective that times out
    if (others := peers.present()) is not None:
        others.meet("data", _say)
    watchdog.enter("build")
    return tokenizer, splits


def with_steps(cfg: RunConfig, blocks: int) -> RunConfig:
    """Return `cfg` with train.epochs converted to steps for `blocks` blocks. Raises ConfigError for a bad schedule."""
    train = cfg.train
    if train.epochs is None:
        return cfg
    train = replace(train, steps=steps_of(train.epochs, blocks, train.global_batch_size))
    validation.check_steps(train, cfg.optim)
    return replace(cfg, train=train)


def _batches(cfg: RunConfig, blocks: Blocks, world: World, saved: RunState | None) -> GlobalBatches:
    """Return the stream of batches, from its beginning or from the data position of a `saved` run."""
    data = saved.data if saved else {}
    options: dict[str, Any] = {
        "global_batch_size": cfg.train.global_batch_size,
        "micro_batch_size": cfg.train.micro_batch_size,
        "rank": world.data_rank,
        "world_size": world.data_size,
        "seed": cfg.train.seed,
        "shuffle": cfg.data.shuffle,
        "position": data.get("position", 0),
        "part": Part(world.sequence_rank, world.sequence_parallel_size),
    }
    if isinstance(blocks, FirstWindow):
        return StreamedBatches(blocks, place=data.get("place"), **options)
    return GlobalBatches(blocks, **options)


def _engine(
    cfg: RunConfig,
    hf_config: PretrainedConfig,
    strategy: Strategy,
    world: World,
    console: Console,
    plan: LaunchPlan,
    watchdog: Watchdog,
    snapshots: Snapshots,
    *,
    group: Any | None,
    sequence_group: RankGroup | None,
    resuming: bool,
) -> tuple[Any, Applied, list[Loaded], SequenceParallel | None, PipelineParallel | None]:
    """Build the model, with the checkpointing policy applied, and the DeepSpeed engine around it.

    Also returns the applied policy, how each rank read weights, and what divides sequences and layers over ranks.
    `group` is DeepSpeed's mpu, the ranks that share layers; `sequence_group` are those that share sequences.
    """
    import deepspeed

    optimizer_device = ds_config.optimizer_offload_device(strategy.ds)
    for op in ops.needed(optimizer_device, ds_config.param_offload_device(strategy.ds), cfg.optim.name):
        ops.ensure(op, console.note)
    watchdog.enter("load")
    with out_of_memory.named("load", plan):
        reading = LoadingProgress(console.note, lambda: watchdog.enter("load"))
        net, loaded = _model(cfg, hf_config, strategy, world, console, reading, resuming=resuming)
    snapshots.take("load")
    watchdog.enter("build")
    if cfg.compile is Compilation.layers:
        compiled.make_whole(layers.decoder_layers(net))
    sequence = None
    if sequence_group is not None:
        sequence = SequenceParallel(net, sequence_group, strategy.packed, cfg.model.attention)
    pipeline = None
    if strategy.stages is not None:
        pipeline = PipelineParallel(net, strategy.stages, world, cfg.train.loss)
    applied = apply(
        net,
        strategy.decisions_of(world.stage),
        cfg.checkpointing,
        zero_stage=strategy.zero_stage,
        device=world.device,
        tensor_parallel=group,
        compiled=compiled.CompiledLayers() if cfg.compile is Compilation.layers else None,
        allocators=strategy.allocators,
    )
    tensor_parallel.prepare(net, cfg.train.tensor_parallel_size, cfg.train.loss)
    optimizer = optim.build(net, cfg.optim, offloaded=optimizer_device is not None, device=world.device)
    with optim.held_still(optimizer), optim.muon_left_eager():
        trained = pipeline.module if pipeline else net
        engine, _, _, _ = deepspeed.initialize(
            model=trained, optimizer=optimizer, config=strategy.ds, dist_init_required=False, mpu=group
        )
    if pipeline is not None:
        pipeline.let_states_hold_weights(engine)
    rng.seed(cfg.train.seed + world.rank // world.tensor_parallel_size)  # the same on ranks that share layers
    return engine, applied, loaded, sequence, pipeline


def _token_loss(cfg: RunConfig, strategy: Strategy, net: Any) -> loss.TokenLoss:
    share = tensor_parallel.share_of_vocabulary(loss.find_head(net))
    return loss.TokenLoss(
        net,
        cfg.train.loss,
        cross_entropy=share.cross_entropy if share else None,
        enter=share.enter if share else None,
        router_coef=strategy.router_coef,
    )


def _model(
    cfg: RunConfig,
    hf_config: PretrainedConfig,
    strategy: Strategy,
    world: World,
    console: Console,
    reading: LoadingProgress,
    *,
    resuming: bool,
) -> tuple[torch.nn.Module, list[Loaded]]:
    """Build the model of this rank, with LoRA adapters if any; under ZeRO-3 assert that its parameters are sharded.

    Also returns how each rank read pretrained weights; [] when none were read.
    """
    told: list[Loaded] = []
    if cfg.peft.method is PeftMethod.qlora and strategy.zero_stage == 3:
        net = _sharded_4bit(cfg, hf_config, strategy, world, console, reading, told)
    else:
        net = _base(cfg, hf_config, strategy, world, reading, told, resuming=resuming)
        if cfg.peft.method is PeftMethod.qlora:
            dtype = hf_model.DTYPES[cfg.train.precision]
            adapters.quantise(net, layers.decoder_layers(net), dtype, world.device)
    trained: torch.nn.Module = net
    if cfg.peft.method is not PeftMethod.none:
        trained = adapters.add_lora(
            net,
            cfg.peft,
            layers=layers.decoder_layers(net),
            ds_config=strategy.ds,
            zero_stage=strategy.zero_stage,
            seed=cfg.train.seed,
        )
    noise.add(trained, cfg.train.neftune_alpha, blocks=cfg.train.sequence_parallel_size)
    if strategy.zero_stage == 3:
        hf_model.assert_sharded(trained, world.size)
    return trained, distributed.gather(told[0]) if told else []


def _base(
    cfg: RunConfig,
    hf_config: PretrainedConfig,
    strategy: Strategy,
    world: World,
    reading: LoadingProgress,
    told: list[Loaded],
    *,
    resuming: bool,
) -> PreTrainedModel:
    """Build the model without adapters; with QLoRA below ZeRO-3 transformers quantises it to 4 bits while reading."""
    quantised = cfg.peft.method is PeftMethod.qlora and strategy.zero_stage < 3
    return hf_model.build(
        cfg.model,
        hf_config,
        precision=cfg.train.precision,
        ds_config=tensor_parallel.for_creation(strategy.ds),
        zero_stage=strategy.zero_stage,
        seed=cfg.train.seed,
        resuming=resuming and cfg.peft.method is PeftMethod.none,  # a saved state has no frozen weights
        loading=_loading(cfg, hf_config, world) if quantised else None,
        onto=world.device if preflight.reads_onto_device(cfg, world.device.type) else None,
        progress=reading,
        told=told.append,
    )


def _sharded_4bit(
    cfg: RunConfig,
    hf_config: PretrainedConfig,
    strategy: Strategy,
    world: World,
    console: Console,
    reading: LoadingProgress,
    told: list[Loaded],
) -> PreTrainedModel:
    """Build the base in 4-bit shards: each rank reads its own, or quantises 16-bit shards that transformers read."""
    from remat.model.four_bits import load_4bit, sharded_4bit  # bitsandbytes is optional

    adapters.check_quantised(strategy.ds, hf_config)  # a plan may know the model by model.architecture alone
    dtype = hf_model.DTYPES[cfg.train.precision]
    began = time.monotonic()
    try:
        with HostPeak() as host:
            net, read_bytes = load_4bit.load(
                cfg.model,
                hf_config,
                dtype=dtype,
                ds_config=strategy.ds,
                device=world.device,
                find_matrices=lambda net: adapters.paths_to_quantise(net, layers.decoder_layers(net)),
            )
        told.append(Loaded(ModelLoad.own_slices, "", read_bytes, time.monotonic() - began, host.peak_bytes))
        return net
    except load_4bit.Elsewhere as reason:
        console.note(
            f"the model is read in 16 bits, each rank its part, and quantised after that: {reason}. Until then it "
            "takes four times the memory that it trains with"
        )
    net = _base(cfg, hf_config, strategy, world, reading, told, resuming=False)
    paths = adapters.paths_to_quantise(net, layers.decoder_layers(net))
    sharded_4bit.quantise_shards(net, paths, dtype, strategy.ds)
    return net


def _loading(cfg: RunConfig, hf_config: PretrainedConfig, world: World) -> dict[str, Any]:
    """Return the `from_pretrained` arguments that quantise a base while it is read."""
    skeleton = hf_model.skeleton(hf_config, cfg.model)
    return adapters.loading_quantised(
        skeleton, layers.decoder_layers(skeleton), hf_model.DTYPES[cfg.train.precision], world.device
    )


def _tracker(cfg: RunConfig, folder: Path, world: World, console: Console, resumed: RunState | None) -> Tracker:
    return Tracker(
        folder,
        cfg.tracking,
        run_config=asdict(cfg),
        name=cfg.name,
        run_id=folder.name,
        wandb_run_id=resumed.wandb_run_id if resumed else None,
        is_main=world.is_main,
        warn=console.warning,
    )


def _write_records(run: Run, yaml: str, chosen: list[str] | None, hf_config: PretrainedConfig) -> None:
    """Write records: options, DeepSpeed's config, plan, environment, data, and the model's config and tokenizer.

    The choice of strategy=auto and the model's files are those of the whole run, the rest are of this launch.
    """
    folder, planned = run.record_folder, run.plan.planned
    folder.mkdir(exist_ok=True)
    if chosen is not None:
        run_dir.write_json(run.folder / launch_plan.CHOSEN, chosen)
    (folder / "config.yaml").write_text(yaml)
    run_dir.write_json(folder / "ds_config.json", run.strategy.ds)
    run_dir.write_json(folder / "plan.json", run.plan.record())
    if planned is not None and planned.table is not None:
        run_dir.write_json(folder / TABLE_FILE, planned.table)
    formulas = f"{flops.formula_text()}\n{FORMULAS}"
    run_dir.write_json(folder / "env.json", run_dir.environment(run.world, formulas))
    run_dir.write_json(folder / "data.json", _describe_data(run))
    module = hf_model.model_of(run.engine.module)
    adapter = hf_files.find_adapter_config(module)
    export.write_config_and_tokenizer(run.folder, hf_config, run.tokenizer, module.generation_config, adapter)


def _describe_data(run: Run) -> dict[str, Any]:
    """Return the content of data.json: steps, epochs, packing, share of padding, and the report of the data cache."""
    train, blocks = run.cfg.train, run.splits.train.epoch_length
    return {
        "steps": train.steps,
        "blocks": blocks or None,
        "epochs": train.steps * train.global_batch_size / blocks if train.steps and blocks else None,
        "packing": run.strategy.packed.line(),
        "padding_share": run.padding_share,
        "cache": run.splits.report,
    }


def check_machine(cfg: RunConfig, *, local_size: int, warn: Callable[[str], None]) -> None:
    """Raise DoesNotFit for old libraries and for fewer GPUs than ranks (with `force` the latter is a warning).

    Raises ConfigError for a precision that the machine does not support. Memory and disks are checked
    later, with the plan, when the ranks can communicate.
    """
    if old := versions.too_old():
        raise DoesNotFit("\n".join(old))
    lacking = preflight.too_few_gpus(needed=local_size, found=torch.cuda.device_count())
    if lacking and not cfg.force:
        raise DoesNotFit(f"{lacking}. Start anyway with force=true")
    if lacking:
        warn(f"force=true: starting although {lacking}")
    _check_precision(cfg.train.precision)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if cfg.compile is Compilation.layers and (tool := compiled.lacking(device)):
        raise DoesNotFit(f"compile=layers needs {tool}; or use compile=none")


def throughput_figures(cfg: RunConfig, context: int, warn: Callable[[str], None]) -> dict[str, Any]:
    """Return FLOPs per token and the GPU's peak, for `Window`.

    `context` is how many tokens attention is computed over (`Splits.context`). Returns {} on a CPU, and no peak for a
    GPU that is not in the table.
    """
    if not torch.cuda.is_available():
        return {}
    try:
        model = counted_model(cfg)
        counted = flops.count(model, context)
    except Exception as error:  # a missing figure must not end a run that would work
        warn(f"no TFLOP/s, MFU and HFU: {error}")
        return {}
    again = 0.0
    tokens, size = sequence_parallel.tokens_of_rank(cfg.train), cfg.train.tensor_parallel_size
    own_rows = counted.vocab_size // (size if vocabulary.find_head(model, size, cfg.train.loss) else 1)
    if cfg.train.loss is LossKind.chunked and tokens > loss.chunk_tokens(own_rows):
        again = counted.output_layer
    gpu = gpus.find_gpu(torch.cuda.get_device_name())
    return {
        "model_flops_per_token": counted.model_flops_per_token,
        "hardware_flops_per_token": counted.model_flops_per_token + again,
        "layers_forward_flops_per_token": counted.layers_forward_flops_per_token,
        "peak_tflops": gpu.peak_tflops(cfg.train.precision) if gpu else None,
    }


def _check_precision(precision: Precision) -> None:
    """Raise ConfigError for a precision that the machine does not support.

    DeepSpeed refuses it too, but only after the model is built.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    supported = {
        Precision.fp16: accelerator.is_fp16_supported,
        Precision.bf16: accelerator.is_bf16_supported,
        Precision.fp32: lambda: True,
    }
    if not supported[precision]():
        others = ", ".join(str(other) for other in Precision if other is not precision and supported[other]())
        raise ConfigError(
            f"train.precision={precision} is not supported on this {accelerator.device_name()}: use {others}"
        )
