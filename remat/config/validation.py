"""Rules between options, known from the configuration alone. Every problem is reported, not only the first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, fields

from remat.config import paths
from remat.config.options import (
    NOT_FOLDERS,
    CheckpointingConfig,
    ConfigError,
    DataConfig,
    DataFormat,
    DataSource,
    ModelConfig,
    ModelInit,
    OptimConfig,
    Packing,
    PeftConfig,
    PeftMethod,
    Policy,
    ProfileConfig,
    RunConfig,
    SaveConfig,
    Schedule,
    TrainConfig,
)

WITHOUT_PATH = (DataSource.python_stdlib, DataSource.synthetic)


def check(cfg: RunConfig) -> None:
    """Raise one ConfigError with every contradiction in `cfg`, one per line."""
    found = problems(cfg)
    if found:
        raise ConfigError("\n".join(found))


def problems(cfg: RunConfig) -> list[str]:
    """Each entry names option, value and remedy."""
    return [
        *_train(cfg.train),
        *_model(cfg.model),
        *_data(cfg.data),
        *_optim(cfg.optim, cfg.train),
        *_peft(cfg.peft, cfg.optim),
        *_tensor_parallel(cfg),
        *_checkpointing(cfg.checkpointing),
        *_save(cfg.save),
        *_held_out(cfg),
        *_profile(cfg.profile),
        *_top(cfg),
    ]


def check_plan(cfg: RunConfig) -> None:
    """Raise ConfigError for a run that no plan can be made of."""
    if missing := paths.model_problems(cfg.model):
        raise ConfigError("\n".join(missing))
    if cfg.train.tensor_parallel_size > 1:
        raise ConfigError(
            f"train.tensor_parallel_size={cfg.train.tensor_parallel_size}: remat plan does not know shared layers yet; "
            "plan with 1"
        )


def check_launch(cfg: RunConfig) -> None:
    """What a plan can do without, but a run cannot. Raises ConfigError."""
    found = [
        *paths.model_problems(cfg.model),
        *(paths.weight_problems(cfg.model) if _reads_weights(cfg) else []),
        *paths.data_problems(cfg),
        *(paths.output_problems(cfg) if cfg.resume in NOT_FOLDERS else []),
    ]
    if cfg.data.source not in WITHOUT_PATH and not cfg.data.path:
        found.append(
            f"data.path is missing: data.source={cfg.data.source} needs data.path=FILE_FOLDER_OR_NAME "
            "(or data=python_stdlib, which needs none)"
        )
    if found:
        raise ConfigError("\n".join(found))


def _reads_weights(cfg: RunConfig) -> bool:
    """Whether the model's files are read: a saved state has all weights but frozen ones."""
    return cfg.resume in ("none", "auto_or_start") or cfg.peft.method is not PeftMethod.none


def check_environment(env: Mapping[str, str]) -> None:
    """Refuse N tasks that would each train alone: srun and mpirun start processes without telling their ranks."""
    for variable in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        tasks = env.get(variable, "1")
        if "RANK" not in env and tasks.isdigit() and int(tasks) > 1:
            raise ConfigError(
                f"{variable}={tasks} but RANK is not set: {tasks} processes would each train a model of their own. "
                "Start one task per node with `deepspeed` or `torchrun` in it (see scripts/slurm.sbatch)"
            )


def _at_least(low: float, **options: float) -> list[str]:
    """Options are passed as group__name; a double underscore stands for the dot."""
    return [
        f"{name.replace('__', '.')}={value:g} is too small: give at least {low:g}"
        for name, value in options.items()
        if value < low
    ]


def _train(train: TrainConfig) -> list[str]:
    found = _at_least(
        1,
        train__steps=train.steps,
        train__micro_batch_size=train.micro_batch_size,
        train__global_batch_size=train.global_batch_size,
        train__log_every=train.log_every,
        train__max_skipped_steps=train.max_skipped_steps,
    )
    found += _at_least(2, train__seq_len=train.seq_len)
    found += _at_least(
        0,
        train__eval_every=train.eval_every,
        train__eval_batches=train.eval_batches,
        train__early_stopping_evals=train.early_stopping_evals,
        train__max_minutes=train.max_minutes,
        train__neftune_alpha=train.neftune_alpha,
        **{f"train__deadlines__{name}": seconds for name, seconds in asdict(train.deadlines).items()},
    )
    if not 0 <= train.stop_at <= train.steps:
        found.append(f"train.stop_at={train.stop_at} must lie between 0 and train.steps={train.steps}")
    if train.micro_batch_size > train.global_batch_size:
        found.append(
            f"train.micro_batch_size={train.micro_batch_size} is larger than "
            f"train.global_batch_size={train.global_batch_size}: lower the first or raise the second"
        )
    return found


def _model(model: ModelConfig) -> list[str]:
    if model.architecture.get("use_cache"):
        return [
            "model.architecture.use_cache=true: a key-value cache is for generation, and a recomputation "
            "would fill it twice; leave it out"
        ]
    if model.init is ModelInit.pretrained and not model.path:
        return ["model.init=pretrained needs model.path=FOLDER_OR_HUB_NAME (or model.init=random)"]
    if not model.path and not model.architecture:
        return ["model has neither model.path nor model.architecture: choose one, for example model=tiny_llama"]
    if not model.path and not model.tokenizer:
        return [
            "model.tokenizer is missing: without model.path give model.tokenizer=bytes or a tokenizer folder"
        ]
    return []


def _data(data: DataConfig) -> list[str]:
    found = []
    if not 0 <= data.eval_fraction < 1:
        found.append(f"data.eval_fraction={data.eval_fraction:g} must be at least 0 and below 1")
    found += _at_least(1, data__synthetic_blocks=data.synthetic_blocks)
    if data.packing is Packing.stream and data.format is not DataFormat.plain:
        found.append(
            f"data.packing=stream has no effect with data.format={data.format}, where every example has a block of its "
            "own: leave it out"
        )
    return found


def _optim(optim: OptimConfig, train: TrainConfig) -> list[str]:
    found = _at_least(
        0,
        optim__lr=optim.lr,
        optim__eps=optim.eps,
        optim__weight_decay=optim.weight_decay,
        optim__gradient_clipping=optim.gradient_clipping,
        optim__warmup_steps=optim.warmup_steps,
        optim__decay_steps=optim.decay_steps,
    )
    for name, value in (("beta1", optim.beta1), ("beta2", optim.beta2)):
        if not 0 <= value < 1:
            found.append(f"optim.{name}={value:g} must be at least 0 and below 1")
    if not 0 <= optim.min_lr_ratio <= 1:
        found.append(f"optim.min_lr_ratio={optim.min_lr_ratio:g} must lie between 0 and 1")
    if optim.schedule is Schedule.wsd and optim.decay_steps == 0:
        found.append("optim.schedule=wsd needs optim.decay_steps, the number of last steps over which lr falls")
    if optim.schedule is not Schedule.wsd and optim.decay_steps:
        found.append(
            f"optim.decay_steps={optim.decay_steps} has no effect with optim.schedule={optim.schedule}: "
            "set it to 0 or choose optim.schedule=wsd"
        )
    if optim.decay_steps and optim.warmup_steps + optim.decay_steps > train.steps:
        found.append(
            f"optim.warmup_steps={optim.warmup_steps} + optim.decay_steps={optim.decay_steps} exceed "
            f"train.steps={train.steps}: lower them or train longer"
        )
    return found


def _peft(peft: PeftConfig, optim: OptimConfig) -> list[str]:
    if peft.method is PeftMethod.none:
        return [
            f"peft.{item.name}={getattr(peft, item.name)} has no effect with peft.method=none: choose peft=lora"
            for item in fields(peft)
            if item.name != "method" and getattr(peft, item.name) != getattr(PeftConfig(), item.name)
        ]
    found = _at_least(1, peft__r=peft.r, peft__alpha=peft.alpha)
    if peft.lr is not None and peft.lr != optim.lr:
        found.append(f"peft.lr={peft.lr:g} and optim.lr={optim.lr:g} name two learning rates: leave one out")
    if both := sorted({*peft.target_modules} & {*peft.modules_to_save}):
        found.append(f"peft.modules_to_save={both} are in peft.target_modules too: leave them out of one")
    if peft.dora and peft.method is PeftMethod.qlora:
        found.append(
            "peft.dora=true with peft.method=qlora: the norms of its directions would be of weights in 4 bits, anew "
            "for each layer and micro-batch; choose peft=lora, or peft.rslora=true"
        )
    if not 0 <= peft.dropout < 1:
        found.append(f"peft.dropout={peft.dropout:g} must be at least 0 and below 1")
    return found


def _tensor_parallel(cfg: RunConfig) -> list[str]:
    """What a run whose layers are shared between ranks cannot do yet."""
    size = cfg.train.tensor_parallel_size
    if size <= 1:
        return _at_least(1, train__tensor_parallel_size=size)
    saving = {
        "save.every": cfg.save.every > 0,
        "save.at_end": cfg.save.at_end,
        "save.export": cfg.save.export,
        "save.best": cfg.save.best,
        "save.rehearse": bool(cfg.save.rehearse),
        "train.stop_at": cfg.train.stop_at > 0,
        "train.max_minutes": cfg.train.max_minutes > 0,
    }
    found = [
        f"{option} with train.tensor_parallel_size={size}: the shares of the ranks are not gathered into a saved "
        "state or an export; set save.every=0 save.at_end=false save.export=false save.rehearse=false train.stop_at=0 "
        "train.max_minutes=0 (and save.best=false)"
        for option, wanted in saving.items()
        if wanted
    ]
    if cfg.resume != "none":
        found.append(f"resume={cfg.resume} with train.tensor_parallel_size={size}: such runs are not saved")
    if cfg.peft.method is not PeftMethod.none:
        found.append(
            f"peft.method={cfg.peft.method} with train.tensor_parallel_size={size}: adapters are not split with their "
            "layers; use train.tensor_parallel_size=1"
        )
    return found


OPTIONS_OF = {  # what only some policies read
    "interval": Policy.interval,
    "segment_layers": Policy.uniform,
    "block_layers": Policy.block,
    "selective_ops": Policy.selective_ops,
    "recompute_modules": Policy.selective_modules,
    "discard_modules": Policy.discard_output,
    "deepspeed": Policy.deepspeed,
}


def _idle_options(cfg: CheckpointingConfig) -> list[str]:
    """Options that were set for a policy that no layer has: a promise that nothing would keep."""
    default, asked = CheckpointingConfig(), {cfg.policy, *cfg.layers.values()}
    return [
        f"checkpointing.{name} is set, but has no effect with checkpointing={cfg.policy}: it belongs to "
        f"checkpointing={owner}; choose that, or leave the option out"
        for name, owner in OPTIONS_OF.items()
        if owner not in asked and getattr(cfg, name) != getattr(default, name)
    ]


def _checkpointing(cfg: CheckpointingConfig) -> list[str]:
    return [
        *_idle_options(cfg),
        *_at_least(
            1,
            checkpointing__interval=cfg.interval,
            checkpointing__segment_layers=cfg.segment_layers,
            checkpointing__block_layers=cfg.block_layers,
        ),
        *_at_least(
            0,
            checkpointing__offload__min_bytes=cfg.offload.min_bytes,
            checkpointing__offload__keep_last_layers=cfg.offload.keep_last_layers,
        ),
    ]


def _profile(cfg: ProfileConfig) -> list[str]:
    found = []
    if cfg.after < 0:
        found.append(f"profile.after={cfg.after}: give how many steps come before, 0 or more")
    if cfg.steps < 1:
        found.append(f"profile.steps={cfg.steps}: give at least 1, or profile=none")
    if cfg.nvml_interval_s < 0:
        found.append(f"profile.nvml_interval_s={cfg.nvml_interval_s}: give seconds, or 0 for no samples")
    return found


def _save(save: SaveConfig) -> list[str]:
    found = _at_least(0, save__every=save.every) + _at_least(1, save__keep=save.keep)
    if not re.fullmatch(r"[1-9]\d*(KB|MB|GB|TB|KiB|MiB|GiB|TiB)", save.max_shard_size):
        found.append(f"save.max_shard_size={save.max_shard_size} is not a size: write for example 5GB")
    return found


def _held_out(cfg: RunConfig) -> list[str]:
    """What compares evaluations needs some on the way."""
    wanted = {
        "save.best=true": cfg.save.best,
        f"train.early_stopping_evals={cfg.train.early_stopping_evals}": cfg.train.early_stopping_evals > 0,
    }
    lacking = []
    if cfg.train.eval_every == 0:
        lacking.append("train.eval_every=STEPS")
    if cfg.data.eval_fraction == 0 and cfg.data.eval_path is None:
        lacking.append("data.eval_fraction or data.eval_path")
    return [
        f"{option} compares evaluations on the way: set {' and '.join(lacking)} too"
        for option, asked in wanted.items()
        if asked and lacking
    ]


def _top(cfg: RunConfig) -> list[str]:
    found = []
    for option, value in (("name", cfg.name), ("run_id", cfg.run_id or "")):
        if "/" in value or value in (".", ".."):
            found.append(f"{option}={value} must be one folder name, without slashes")
    if not cfg.resume:
        found.append("resume is empty: give none, auto, auto_or_start or a path")
    if cfg.resume not in NOT_FOLDERS and cfg.run_id:
        found.append(
            f"run_id={cfg.run_id} has no effect with resume={cfg.resume}, which names the run: leave it out"
        )
    return found
