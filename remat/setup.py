"""Build everything a run needs, in the order in which it can fail cheapest: options, machine, data, model, engine."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase, set_seed

from remat import (
    checks,
    compose,
    distributed,
    ds_config,
    export,
    flops,
    hardware,
    loss,
    model,
    ops,
    optim,
    preflight,
    run_dir,
    saving,
    summary,
)
from remat.activation_checkpointing import layers, policy, recompute
from remat.config import ConfigError, Precision, RunConfig
from remat.console import Console
from remat.data.batches import GlobalBatches
from remat.data.blocks import Blocks
from remat.data.cache import Splits, open_blocks
from remat.data.tokenizer import load_tokenizer
from remat.distributed import World
from remat.memory import MemoryMonitor
from remat.planning import states
from remat.throughput import FORMULAS, PhaseTimer, Window
from remat.tracking import Tracker


@dataclass
class Parts:
    """A run ready to train. `position`, the step and the token counts live in `trainer.Progress`."""

    cfg: RunConfig
    world: World
    console: Console
    folder: Path
    engine: Any
    token_loss: loss.TokenLoss
    batches: GlobalBatches
    blocks: Blocks
    held_out: Blocks | None
    data_key: str
    applied: recompute.Applied
    tracker: Tracker
    memory: MemoryMonitor
    timer: PhaseTimer
    window: Window
    tokenizer: PreTrainedTokenizerBase
    zero_stage: int
    resumed: dict[str, Any] | None
    swap_folder: Path | None
    peaks: dict[str, float] = field(default_factory=dict)  # memory maxima over the run


def build(cfg: RunConfig, yaml: str) -> Parts:
    """Everything up to the first step.

    Raises ConfigError (exit 2) or DoesNotFit (exit 3) before any weight is read.
    """
    console = Console(is_main=distributed.rank_from_env() == 0, debug=cfg.log_level == "debug")
    shape = model.shape_config(cfg.model)
    facts = model.facts(shape, cfg.model)
    rendered = render_ds_config(cfg, shape, distributed.world_size_from_env(), facts.largest_param)
    _preflight(cfg, facts, rendered, console)
    checks.check_launch(cfg)
    _check_precision(cfg.train.precision)
    hf_config = model.load_config(cfg.model)
    world = distributed.init()
    point = _resume_point(cfg, rendered, world, console)
    tokenizer, splits = _data(cfg, hf_config)
    data_key = Path(splits.report["folder"]).name
    if point is not None:
        _check_same_data(point.state.client_state["data_key"], data_key, cfg.resume)
    folder = run_dir.open_run_dir(
        cfg.output_dir, cfg.name, cfg.run_id, existing=point.run_dir if point else None
    )
    swap_folder = _own_swap_folder(rendered, folder, world)
    engine, applied = _engine(cfg, hf_config, rendered, world, console, resuming=point is not None)
    resumed = saving.load(engine, point.state) if point else None
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = (
            cfg.optim.gradient_clipping
        )  # DeepSpeed takes the saved run's, whatever is asked now
    if world.is_main:
        _write_records(folder, yaml, rendered, world, resumed)
        export.write_model_card(folder, hf_config, tokenizer, engine.module.generation_config)
    timer = PhaseTimer(world.device)
    parts = Parts(
        cfg=cfg,
        world=world,
        console=console,
        folder=folder,
        engine=engine,
        token_loss=loss.TokenLoss(engine.module, cfg.train.loss),
        batches=_batches(cfg, splits.train, world, position=resumed["position"] if resumed else 0),
        blocks=splits.train,
        held_out=splits.held_out,
        data_key=data_key,
        applied=applied,
        tracker=_tracker(cfg, folder, world, console, resumed),
        memory=MemoryMonitor(world.device),
        timer=timer,
        window=_window(cfg, hf_config, facts, timer, world, console),
        tokenizer=tokenizer,
        zero_stage=ds_config.zero_stage(rendered),
        resumed=resumed,
        swap_folder=swap_folder,
    )
    console.header(f"remat {cfg.name}", summary.rows(parts, facts, rendered))
    return parts


def render_ds_config(
    cfg: RunConfig, hf_config: PretrainedConfig, world_size: int, largest_param: int | None = None
) -> dict[str, Any]:
    """The complete DeepSpeed dict of this run. Raises ConfigError with every problem."""
    return ds_config.render(
        ds_config.load(cfg.deepspeed.config, compose.DS_CONFIG_DIR),
        cfg.deepspeed.overrides,
        ds_config.RunValues(
            world_size=world_size,
            micro_batch_size=cfg.train.micro_batch_size,
            global_batch_size=cfg.train.global_batch_size,
            gradient_clipping=cfg.optim.gradient_clipping,
            precision=cfg.train.precision,
            hidden_size=hf_config.get_text_config().hidden_size,
            nvme_path=cfg.hardware.nvme_path,
            pin_memory_possible=torch.cuda.is_available(),
            largest_param=largest_param,
        ),
    )


def _check_precision(precision: Precision) -> None:
    """DeepSpeed's own refusal comes after the model is built, so ask first. Raises ConfigError."""
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


def _own_swap_folder(rendered: dict[str, Any], folder: Path, world: World) -> Path | None:
    """Give NVMe offload a fresh folder of this run: DeepSpeed never cleans its own, and two runs would share it."""
    sections = [rendered["zero_optimization"].get(name) for name in ("offload_optimizer", "offload_param")]
    swapping = [section for section in sections if section and section["device"] == "nvme"]
    if not swapping:
        return None
    own = Path(swapping[0]["nvme_path"]).expanduser() / f"remat-{folder.parent.name}-{folder.name}"
    if world.local_rank == 0:
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir(parents=True)
    distributed.barrier()
    for section in swapping:
        section["nvme_path"] = str(own)
    return own


def _resume_point(
    cfg: RunConfig, rendered: dict[str, Any], world: World, console: Console
) -> saving.ResumePoint | None:
    """The saved state to go on from, if one was asked for, checked against this launch."""
    point = saving.resolve_resume(cfg.resume, output_dir=cfg.output_dir, name=cfg.name, run_id=cfg.run_id)
    if point is not None:
        saving.check_compatible(
            point.state,
            world_size=world.size,
            zero_stage=ds_config.zero_stage(rendered),
            precision=cfg.train.precision,
        )
        for note in point.notes:
            console.warning(note)
    return point


def _data(cfg: RunConfig, hf_config: PretrainedConfig) -> tuple[PreTrainedTokenizerBase, Splits]:
    """The tokenizer, fit for the model, and the blocks. Every rank may be the one that builds the cache."""
    tokenizer = load_tokenizer(
        cfg.model.tokenizer, cfg.model.path, trust_remote_code=cfg.model.trust_remote_code
    )
    model.check_vocabulary(hf_config, len(tokenizer), cfg.model.tokenizer or str(cfg.model.path))
    splits = open_blocks(
        cfg.data, tokenizer=tokenizer, seq_len=cfg.train.seq_len, seed=cfg.train.seed, show_progress=True
    )
    return tokenizer, splits


def _check_same_data(saved: str, now: str, resume: str) -> None:
    if saved != now:
        raise ConfigError(
            f"resume={resume}: the data, tokenizer or train.seq_len changed since the save, so its data position "
            f"means nothing now (cache {saved[:12]}, now {now[:12]}). Restore them, or start a new run from the "
            "exported model: model=hf model.path=RUN_DIR/export"
        )


def _preflight(cfg: RunConfig, facts: model.ModelFacts, rendered: dict[str, Any], console: Console) -> None:
    local_size = distributed.local_size_from_env()
    items = states.model_states(
        num_params=facts.num_params,
        largest_param=facts.largest_param,
        ds=rendered,
        world_size=distributed.world_size_from_env(),
        ranks_per_node=local_size,
        gas=rendered["gradient_accumulation_steps"],
        can_pin=torch.cuda.is_available(),
    )
    try:
        preflight.run(items, facts.num_params, cfg, ds=rendered, local_size=local_size)
    except preflight.DoesNotFit as problem:
        if not cfg.force:
            raise
        console.warning(f"force=true: starting although\n{problem}")


def _engine(
    cfg: RunConfig,
    hf_config: PretrainedConfig,
    rendered: dict[str, Any],
    world: World,
    console: Console,
    *,
    resuming: bool,
) -> tuple[Any, recompute.Applied]:
    """The DeepSpeed engine around the model, with the checkpointing policy in place."""
    import deepspeed

    stage = ds_config.zero_stage(rendered)
    optimizer_device = ds_config.optimizer_offload_device(rendered)
    for op in ops.needed(optimizer_device, ds_config.param_offload_device(rendered)):
        ops.ensure(op, console.note)
    net = model.build(
        cfg.model,
        hf_config,
        precision=cfg.train.precision,
        ds_config=rendered,
        zero_stage=stage,
        seed=cfg.train.seed,
        resuming=resuming,
    )
    if stage == 3:
        model.assert_sharded(net, world.size)
    num_layers = len(layers.decoder_layers(net))
    applied = recompute.apply(net, policy.plan(cfg.checkpointing, num_layers))
    optimizer = optim.build(net, cfg.optim, offloaded=optimizer_device is not None, device=world.device)
    engine, _, _, _ = deepspeed.initialize(
        model=net, optimizer=optimizer, config=rendered, dist_init_required=False
    )
    set_seed(cfg.train.seed + world.rank)  # dropout differs between ranks, as the data does
    return engine, applied


def _batches(cfg: RunConfig, blocks: Blocks, world: World, *, position: int) -> GlobalBatches:
    return GlobalBatches(
        blocks,
        global_batch_size=cfg.train.global_batch_size,
        micro_batch_size=cfg.train.micro_batch_size,
        rank=world.rank,
        world_size=world.size,
        seed=cfg.train.seed,
        shuffle=cfg.data.shuffle,
        position=position,
    )


def _window(
    cfg: RunConfig,
    hf_config: PretrainedConfig,
    facts: model.ModelFacts,
    timer: PhaseTimer,
    world: World,
    console: Console,
) -> Window:
    """Throughput; with MFU and HFU only where both the GPU's peak and the model's FLOPs are known."""
    gpu = hardware.find_gpu(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    peak = gpu.peak_tflops(cfg.train.precision) if gpu else None
    figures: dict[str, float] = {}
    if peak is not None:
        try:
            shape = flops.shape_from_config(
                hf_config.to_dict(),
                num_params=facts.num_params,
                num_params_embedding=facts.num_embedding_params,
            )
            counted = flops.model_flops_per_token(shape, cfg.train.seq_len)
            again = flops.recompute_flops_per_token(shape, cfg.train.seq_len, str(cfg.checkpointing.policy))
            figures = {"model_flops_per_token": counted, "hardware_flops_per_token": counted + again}
        except ConfigError as error:
            console.warning(f"no MFU and HFU: {error}")
    return Window(timer, device=world.device, world_size=world.size, peak_tflops=peak, **figures)


def _tracker(
    cfg: RunConfig, folder: Path, world: World, console: Console, resumed: dict[str, Any] | None
) -> Tracker:
    return Tracker(
        folder,
        cfg.tracking,
        run_config=asdict(cfg),
        name=cfg.name,
        run_id=folder.name,
        wandb_run_id=resumed["wandb_run_id"] if resumed else None,
        is_main=world.is_main,
        warn=console.warning,
    )


def _write_records(
    folder: Path, yaml: str, rendered: dict[str, Any], world: World, resumed: dict[str, Any] | None
) -> None:
    """What ran. A resume writes its own folder, so that the first launch's record stays."""
    target = folder / f"resumed-at-{resumed['step']:06d}" if resumed else folder
    target.mkdir(exist_ok=True)
    (target / "config.yaml").write_text(yaml)
    run_dir.write_json(target / "ds_config.json", rendered)
    run_dir.write_json(target / "env.json", run_dir.environment(world, f"{flops.formula_text()}\n{FORMULAS}"))
