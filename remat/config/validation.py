"""Check the rules between options, from the configuration alone. Every problem is reported, not only the first."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, fields

from remat.config import data_fields, paths
from remat.config.options import (
    NOT_FOLDERS,
    WITHOUT_PATH,
    Attention,
    CheckpointingConfig,
    Compilation,
    ConfigError,
    DataConfig,
    DataFormat,
    DataSource,
    FileType,
    HardwareConfig,
    MixedSource,
    ModelConfig,
    ModelInit,
    ModelLoad,
    OptimConfig,
    OptimName,
    OptimStates,
    Packing,
    PeftConfig,
    PeftMethod,
    Policy,
    Precision,
    ProfileConfig,
    RunConfig,
    SaveConfig,
    Schedule,
    StrategyChoice,
    TrainConfig,
)

# bf16 has 8 bits of significand: with a larger beta2, the product beta2 x moment can round back to the moment.
LARGEST_BETA2_IN_BF16 = 1 - 2**-8
LARGEST_LR = 1.0  # AdamW and Lion move every weight by about lr a step, whatever the gradient
LINK_S_LEAST = 4  # the kernel sends three probes, at least a second apart


def problems(cfg: RunConfig) -> list[str]:
    """Return every contradiction in `cfg`; each entry names option, value and remedy."""
    return [
        *_train(cfg.train),
        *_model(cfg.model),
        *_attention(cfg),
        *data_problems(cfg.data),
        *_optim(cfg.optim, cfg.train),
        *_states(cfg.optim, cfg.train),
        *_peft(cfg.peft, cfg.optim),
        *_tensor_parallel(cfg),
        *_sequence_parallel(cfg),
        *_pipeline_parallel(cfg),
        *_checkpointing(cfg.checkpointing),
        *_tiled_run(cfg),
        *_compile(cfg),
        *_save(cfg.save, cfg.peft),
        *_held_out(cfg),
        *_streamed_length(cfg),
        *_profile(cfg.profile),
        *_hardware(cfg.hardware),
        *_top(cfg),
    ]


def check_plan(cfg: RunConfig) -> None:
    """Raise ConfigError for a run that cannot be planned."""
    if missing := paths.model_problems(cfg.model):
        raise ConfigError("\n".join(missing))


def check_launch(cfg: RunConfig) -> None:
    """Raise ConfigError for what a plan can do without, but a run cannot."""
    found = [
        *paths.resume_problems(cfg.resume),
        *paths.model_problems(cfg.model),
        *(paths.weight_problems(cfg.model) if reads_weights(cfg) else []),
        *paths.tokenizer_problems(cfg.model),
        *paths.data_problems(cfg),
        *paths.home_problems(cfg),
        *(paths.output_problems(cfg) if cfg.resume in NOT_FOLDERS else []),
    ]
    found += [
        of_source(
            name,
            f"data.path is missing: data.source={data.source} needs data.path=FILE_FOLDER_OR_NAME "
            "(or data=python_stdlib, which needs none)",
        )
        for name, data in cfg.data.sources().items()
        if data.source not in WITHOUT_PATH and not data.path
    ]
    if cfg.train.steps is None and cfg.train.epochs is None:
        found.append(
            "train.steps and train.epochs are both empty: give one of them, for example train.epochs=3, from which the "
            "steps follow once the data is read, or train.steps=1000"
        )
    if cfg.tracking.tensorboard and importlib.util.find_spec("tensorboard") is None:
        found.append(
            "tracking.tensorboard=true needs the package tensorboard, which is not installed: type `pip install "
            "tensorboard`, or leave the option out"
        )
    if found:
        raise ConfigError("\n".join(dict.fromkeys(found)))  # a model and its tokenizer may be at one path


def reads_weights(cfg: RunConfig) -> bool:
    """Return whether the model's files are read: a saved state has all weights but frozen ones."""
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
    """Check lower limits. Options are passed as group__name; a double underscore stands for the dot."""
    return [
        f"{name.replace('__', '.')}={value:g} is {'too small' if math.isfinite(value) else 'no size'}: give at least "
        f"{low:g}"
        for name, value in options.items()
        if value < low or not math.isfinite(value)
    ]


def _train(train: TrainConfig) -> list[str]:
    found = _length(train)
    found += _at_least(
        1,
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
        train__router_aux_loss_coef=train.router_aux_loss_coef or 0.0,
        **{f"train__deadlines__{name}": seconds for name, seconds in asdict(train.deadlines).items()},
    )
    if 0 < train.deadlines.link_s < LINK_S_LEAST:
        found.append(
            f"train.deadlines.link_s={train.deadlines.link_s:g} is too small: a lost packet must not end a run; "
            f"give at least {LINK_S_LEAST}, or 0 for no watch on the network between nodes"
        )
    found += stop_problems(train)
    if train.micro_batch_size > train.global_batch_size:
        found.append(
            f"train.micro_batch_size={train.micro_batch_size} is larger than "
            f"train.global_batch_size={train.global_batch_size}: lower the first or raise the second"
        )
    return found


def _length(train: TrainConfig) -> list[str]:
    if train.steps is not None and train.epochs is not None:
        return [
            f"train.steps={train.steps} and train.epochs={train.epochs:g}: both say how long to train; give one. On a "
            "command line the one that is given replaces the recipe's"
        ]
    if train.epochs is not None and not 0 < train.epochs < math.inf:
        return [f"train.epochs={train.epochs:g} must be above 0"]
    return [] if train.steps is None else _at_least(1, train__steps=train.steps)


def _streamed_length(cfg: RunConfig) -> list[str]:
    if not cfg.data.streaming or cfg.train.epochs is None:
        return []
    return [
        f"train.epochs={cfg.train.epochs:g} with data.streaming=true: how long an epoch is, is known only at its end; "
        "set train.steps"
    ]


def stop_problems(train: TrainConfig) -> list[str]:
    """Return what is wrong with `stop_at` once the steps are known; with train.epochs only the data tells them."""
    if train.stop_at < 0:
        return [f"train.stop_at={train.stop_at} must be at least 0"]
    if train.steps is not None and train.stop_at > max(train.steps, 0):
        return [f"train.stop_at={train.stop_at} must lie between 0 and train.steps={train.steps}"]
    return []


def _rope(model: ModelConfig) -> list[str]:
    if model.rope_scaling is None and model.rope_factor != 1:
        return [
            f"model.rope_factor={model.rope_factor:g} without model.rope_scaling: add model.rope_scaling=yarn, or "
            "leave it out"
        ]
    if model.rope_scaling is not None and not model.rope_factor > 1:
        return [
            f"model.rope_scaling={model.rope_scaling} with model.rope_factor={model.rope_factor:g}: give how many "
            "times the model's own length is wanted, for example model.rope_factor=4"
        ]
    return []


def _model(model: ModelConfig) -> list[str]:
    if problems := _rope(model):
        return problems
    if model.architecture.get("use_cache"):
        return [
            "model.architecture.use_cache=true: a key-value cache is for generation, and a recomputation "
            "would fill it twice; leave it out"
        ]
    if model.init is ModelInit.random and model.load is ModelLoad.own_slices:
        return ["model.load=own_slices: model.init=random reads no weights; leave out model.load"]
    if model.init is ModelInit.pretrained and not model.path:
        return ["model.init=pretrained needs model.path=FOLDER_OR_HUB_NAME (or model.init=random)"]
    if not model.path and not model.architecture:
        return ["model has neither model.path nor model.architecture: choose one, for example model=tiny_llama"]
    if not model.path and not model.tokenizer:
        return [
            "model.tokenizer is missing: without model.path give model.tokenizer=bytes or a tokenizer folder"
        ]
    return []


def of_source(name: str, text: str) -> str:
    """Return `text` with the options of `data` renamed to those of source `name` of data.mix; as it is for ""."""
    options = "|".join(item.name for item in fields(MixedSource))
    return re.sub(rf"\bdata\.({options})\b", rf"data.mix.{name}.\1", text) if name else text


def data_problems(data: DataConfig) -> list[str]:
    """Return the contradictions in `data`; called again when the format of the rows is found."""
    found = _at_least(1, data__synthetic_blocks=data.synthetic_blocks) + _mix(data)
    found += _at_least(0, data__processes=data.processes, data__eval_rows=data.eval_rows) + _streaming(data)
    for name, each in data.sources().items():
        found += [of_source(name, problem) for problem in _source_problems(each)]
    return found


def _attention(cfg: RunConfig) -> list[str]:
    if cfg.model.attention is not Attention.flash_attention_2 or cfg.train.precision is not Precision.fp32:
        return []
    return [
        f"model.attention={cfg.model.attention} with train.precision=fp32: its kernels take 16 bits alone; set "
        "train.precision=bf16, or model.attention=sdpa"
    ]


def _mix(data: DataConfig) -> list[str]:
    found = []
    for option, value in (("data.path", data.path), ("data.eval_path", data.eval_path)):
        if data.mix and value is not None:
            found.append(
                f"{option}={value} with data.mix: a mixture names the paths of its sources; leave {option} out, or "
                f"make it a source: data.mix.NAME.{option[5:]}={value}"
            )
    for name, given in data.mix.items():
        if not re.fullmatch(r"[\w-]+", str(name)):
            found.append(f"data.mix names a source {name!r}: use letters, digits, _ and -")
        if not 0 < given.weight < math.inf:
            found.append(
                f"data.mix.{name}.weight={given.weight:g} must be above 0: leave out what is not wanted"
            )
    if len(data.mix) == 1:
        found.append(
            f"data.mix has the one source {next(iter(data.mix))}: name another, or use data.path alone"
        )
    if any(each.source is DataSource.synthetic for each in data.sources().values()) and data.mix:
        found.append("data.mix: random tokens (data.source=synthetic) cannot be mixed; leave that source out")
    return found


def _streaming(data: DataConfig) -> list[str]:
    default, found = DataConfig(), list[str]()
    if not data.streaming:
        if data.eval_rows != default.eval_rows:
            found.append(
                f"data.eval_rows={data.eval_rows} has no effect without data.streaming=true: use data.eval_fraction"
            )
        return found
    if data.mix:
        found.append(
            "data.streaming=true with data.mix: the sources' sizes, which weights need, are not known; leave out one"
        )
    if data.source is DataSource.synthetic:
        found.append(
            "data.streaming=true has no meaning with data.source=synthetic, which is not read: leave it out"
        )
    if data.processes:
        found.append(f"data.processes={data.processes} has no effect with data.streaming=true: leave it out")
    if data.eval_fraction not in (0, default.eval_fraction):
        found.append(
            f"data.eval_fraction={data.eval_fraction:g} with data.streaming=true: a fraction of what is not known yet; "
            "set data.eval_rows, the number of first rows that are held out, or data.eval_path"
        )
    return found


def _source_problems(data: DataConfig) -> list[str]:
    found = []
    if not 0 <= data.eval_fraction < 1:
        found.append(f"data.eval_fraction={data.eval_fraction:g} must be at least 0 and below 1")
    found += _at_least(0, data__eval_tokens=data.eval_tokens)
    found += _paths(data)
    found += _rows(data)
    found += _joined_files(data)
    if data.packing is Packing.stream and data.has_rows:
        found.append(
            f"data.packing=stream with data.format={data.format}: rows that see each other would be one conversation; "
            "use data.packing=documents, which keeps them apart, or data.packing=none, one row a block"
        )
    if data.packing is Packing.none and data.format is DataFormat.plain:
        found.append(
            "data.packing=none with data.format=plain: every text would be cut at train.seq_len; use "
            "data.packing=documents or data.packing=stream"
        )
    return found


def _paths(data: DataConfig) -> list[str]:
    found = []
    for option, value in (("data.path", data.path), ("data.eval_path", data.eval_path)):
        if isinstance(value, list):
            fits = all(isinstance(entry, str) and entry for entry in value)
        else:
            fits = value is None or isinstance(value, (str, int, float))
        if not fits:
            found.append(
                f"{option}={value} is neither a path nor a list of paths: write {option}=a.jsonl or "
                f"{option}=[a.jsonl,b.json]"
            )
    if data.file_type is not FileType.auto and data.source is not DataSource.files:
        found.append(
            f"data.file_type={data.file_type} has no effect with data.source={data.source}: choose data=files"
        )
    return found


def _rows(data: DataConfig) -> list[str]:
    """Check what is said about rows: the names of their fields, and what of them is trained."""
    found = []
    unknown = sorted(set(data.columns) - data_fields.NAMES)
    if unknown:
        found.append(
            f"data.columns={data.columns} names {', '.join(unknown)}, which no format reads: on the left stands one of "
            f"{', '.join(sorted(data_fields.NAMES))}, on the right the name in your data"
        )
    if "text" in data.columns and data.text_field != DataConfig().text_field:
        found.append(
            f"data.text_field={data.text_field} and data.columns.text={data.columns['text']}: set one of them"
        )
    roles = data.train_on_roles
    if not roles or not isinstance(roles, (str, list)) or not all(isinstance(role, str) for role in roles):
        found.append(
            f"data.train_on_roles={roles} names no role: write data.train_on_roles=[assistant], [assistant,tool] or all"
        )
    elif isinstance(roles, list) and "all" in roles and len(roles) > 1:
        found.append(f"data.train_on_roles={roles}: all stands alone; write data.train_on_roles=all")
    return found + _without_effect(data)


def _joined_files(data: DataConfig) -> list[str]:
    default, found = DataConfig(), list[str]()
    if not data.join_files:
        if data.file_header != default.file_header:
            found.append(
                f"data.file_header={data.file_header!r} has no effect without data.join_files=true: set it"
            )
        return found
    if data.source is DataSource.synthetic:
        found.append(
            "data.join_files=true has no meaning with data.source=synthetic, which has no files: leave it out"
        )
    if data.format not in (DataFormat.auto, DataFormat.plain):
        found.append(
            f"data.join_files=true with data.format={data.format}: conversations are no files of a repository; set "
            "data.join_files=false"
        )
    try:
        data.file_header.format(repo="", path="")
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        found.append(
            f"data.file_header={data.file_header!r} cannot be filled in ({type(error).__name__}: {error}): only "
            "{repo} and {path} are known, and other braces are doubled"
        )
    return found


def _without_effect(data: DataConfig) -> list[str]:
    """Find options for rows of another format than that of the data, once it is known."""
    default, found = DataConfig(), list[str]()
    if data.format is DataFormat.auto:
        return []
    if data.format is not DataFormat.alpaca and data.alpaca_prompt is not default.alpaca_prompt:
        found.append(f"data.alpaca_prompt={data.alpaca_prompt}")
    if data.format is DataFormat.plain:
        found += [
            f"data.{name}={getattr(data, name)}"
            for name in ("train_on_roles", "train_on_end_token", "rewritten_turns")
            if getattr(data, name) != getattr(default, name)
        ]
        read = ("text", *data_fields.OF_FILES) if data.join_files else ("text",)
        found += [f"data.columns.{name}={theirs}" for name, theirs in data.columns.items() if name not in read]
    return [f"{option} has no effect with data.format={data.format}: leave it out" for option in found]


def _optim(optim: OptimConfig, train: TrainConfig) -> list[str]:
    found = _at_least(
        0,
        optim__lr=optim.lr,
        optim__eps=optim.eps,
        optim__weight_decay=optim.weight_decay,
        optim__gradient_clipping=optim.gradient_clipping,
        optim__warmup_steps=optim.warmup_steps or 0,
        optim__decay_steps=optim.decay_steps,
    )
    if LARGEST_LR < optim.lr < math.inf:
        slip = f"{optim.lr:.3g}".replace("e+0", "e+").replace("e+", "e-")
        meant = f" (did you mean {slip}?)" if "e-" in slip else ""
        found.append(
            f"optim.lr={optim.lr:g} is above {LARGEST_LR:g}, where no optimizer here trains{meant}: give 1e-6 to 1e-3"
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
    return found + schedule_problems(optim, train)


def _states(optim: OptimConfig, train: TrainConfig) -> list[str]:
    """Find options that exclude 16-bit optimizer states at any ZeRO stage (model/optimizer.py checks the stage)."""
    if optim.states is OptimStates.fp32:
        return []
    asked, found = f"optim.states={optim.states}", []
    if train.precision is not Precision.bf16:
        found.append(
            f"{asked} with train.precision={train.precision}: they are the states of bf16 weights; set "
            "train.precision=bf16, or optim.states=fp32"
        )
    if optim.name is not OptimName.adamw:
        found.append(
            f"{asked} with optim.name={optim.name}: DeepSpeed keeps 16-bit states for AdamW alone; set "
            "optim.name=adamw, or optim.states=fp32"
        )
    if optim.states is OptimStates.bf16 and optim.beta2 > LARGEST_BETA2_IN_BF16:
        found.append(
            f"{asked} with optim.beta2={optim.beta2:g}: a number in bf16 does not change by less than one part in "
            "512, so a mean of squared gradients can stop falling; set optim.beta2 to at most "
            f"{LARGEST_BETA2_IN_BF16:.4g}, 0.95 for example, or optim.states=bf16_master, whose moments are in fp32"
        )
    if train.tensor_parallel_size > 1:
        found.append(
            f"{asked} with train.tensor_parallel_size={train.tensor_parallel_size}: layers that ranks share keep "
            "fp32 states; set train.tensor_parallel_size=1, or optim.states=fp32"
        )
    return found


def schedule_problems(optim: OptimConfig, train: TrainConfig) -> list[str]:
    """Return what is wrong with the schedule once the steps are known."""
    if train.steps is None or not optim.decay_steps:
        return []
    if (warmup := optim.warmup(train.steps)) + optim.decay_steps <= train.steps:
        return []
    return [
        f"optim.warmup_steps={warmup} + optim.decay_steps={optim.decay_steps} exceed "
        f"train.steps={train.steps}: lower them or train longer"
    ]


def check_steps(train: TrainConfig, optim: OptimConfig) -> None:
    """Raise ConfigError where steps that followed from train.epochs contradict other options."""
    found = stop_problems(train) + schedule_problems(optim, train)
    if found:
        raise ConfigError(
            "\n".join(f"train.epochs={train.epochs:g} is {train.steps} steps: {f}" for f in found)
        )


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
    """Find options that cannot be combined with tensor parallelism."""
    size = cfg.train.tensor_parallel_size
    if size <= 1:
        return _at_least(1, train__tensor_parallel_size=size)
    found = []
    if cfg.peft.method is PeftMethod.qlora:
        found.append(
            f"peft.method=qlora with train.tensor_parallel_size={size}: matrices in 4 bits are not cut for ranks that "
            "share layers; use peft=lora, or train.tensor_parallel_size=1"
        )
    if cfg.peft.dora:
        found.append(
            f"peft.dora=true with train.tensor_parallel_size={size}: the norms of its directions would be of a rank's "
            "share of the weights; use peft.rslora=true, or train.tensor_parallel_size=1"
        )
    return found


def _sequence_parallel(cfg: RunConfig) -> list[str]:
    """Find options that cannot be combined with sequence parallelism."""
    size = cfg.train.sequence_parallel_size
    if size <= 1:
        return _at_least(1, train__sequence_parallel_size=size)
    asked, found = f"train.sequence_parallel_size={size}", []
    if cfg.train.tensor_parallel_size > 1:
        found.append(
            f"{asked} with train.tensor_parallel_size={cfg.train.tensor_parallel_size}: ranks share layers or "
            "sequences, not both; set one of them to 1"
        )
    if cfg.compile is not Compilation.none:
        found.append(
            f"{asked} with compile={cfg.compile}: ranks exchange blocks inside of a layer, where a graph would break; "
            "use compile=none"
        )
    return found


def _pipeline_parallel(cfg: RunConfig) -> list[str]:
    """Find options that cannot be combined with pipeline parallelism."""
    train, policies = cfg.train, {cfg.checkpointing.policy, *cfg.checkpointing.layers.values()}
    size = train.pipeline_parallel_size
    if size <= 1:
        return _at_least(1, train__pipeline_parallel_size=size)
    several = "a stage runs the forwards of several micro-batches before the first backward"
    refused = [
        (
            train.tensor_parallel_size > 1,
            f"train.tensor_parallel_size={train.tensor_parallel_size}: DeepSpeed's AutoTP puts its groups of ranks in "
            "the place of those by which stages find each other; set one of them to 1",
        ),
        (
            train.sequence_parallel_size > 1,
            f"train.sequence_parallel_size={train.sequence_parallel_size}: stages of ranks that share sequences have "
            "not been built; set one of them to 1",
        ),
        (
            cfg.peft.method is not PeftMethod.none,
            f"peft.method={cfg.peft.method}: adapters of a stage are not saved and exported yet; use peft=none",
        ),
        (
            train.precision is Precision.fp16,
            "train.precision=fp16: a loss scale over stages has not been proven; use bf16 or fp32",
        ),
        (
            cfg.optim.name is not OptimName.adamw,
            f"optim.name={cfg.optim.name}: only AdamW has been proven with stages; use optim=adamw",
        ),
        (
            cfg.optim.states is not OptimStates.fp32,
            f"optim.states={cfg.optim.states}: not proven with stages; use optim.states=fp32",
        ),
        (
            cfg.compile is not Compilation.none,
            f"compile={cfg.compile}: compiled layers have not been proven with stages; use compile=none",
        ),
        (
            bool(train.neftune_alpha),
            f"train.neftune_alpha={train.neftune_alpha:g}: not proven with stages; set train.neftune_alpha=0",
        ),
        (
            cfg.strategy is StrategyChoice.auto,
            "strategy=auto: the search does not know stages; use strategy=given",
        ),
        (
            Policy.deepspeed in policies,
            f"checkpointing=deepspeed: its buffers hold one micro-batch, and {several}; use checkpointing=full",
        ),
        (
            cfg.checkpointing.offload.enabled,
            f"checkpointing.offload: its buffers on the host hold one micro-batch, and {several}; use "
            "checkpointing=full",
        ),
        (
            bool(cfg.checkpointing.reentrant),
            f"checkpointing.reentrant=true: {several}, which the reentrant variant takes for layers that are used "
            "twice; leave it out",
        ),
        (
            cfg.checkpointing.tiles == "auto",
            "checkpointing.tiles=auto: slices are chosen for one rank's memory; give their number",
        ),
    ]
    return [f"train.pipeline_parallel_size={size} with {text}" for applies, text in refused if applies]


OPTIONS_OF = {  # options that only one policy reads
    "interval": Policy.interval,
    "segment_layers": Policy.uniform,
    "block_layers": Policy.block,
    "selective_ops": Policy.selective_ops,
    "recompute_modules": Policy.selective_modules,
    "discard_modules": Policy.discard_output,
    "deepspeed": Policy.deepspeed,
    "budget_gib": Policy.budget,
    "table": Policy.budget,
}


def _idle_options(cfg: CheckpointingConfig) -> list[str]:
    """Find options that were set for a policy that no layer has."""
    default, asked = CheckpointingConfig(), {cfg.policy, *cfg.layers.values()}
    return [
        f"checkpointing.{name} is set, but has no effect with checkpointing={cfg.policy}: it belongs to "
        f"checkpointing={owner}; choose that, or leave the option out"
        for name, owner in OPTIONS_OF.items()
        if owner not in asked and getattr(cfg, name) != getattr(default, name)
    ]


def _budget(cfg: CheckpointingConfig) -> list[str]:
    option = f"checkpointing.budget_gib={cfg.budget_gib}"
    if cfg.budget_gib == "auto":
        return []
    try:
        size = float(cfg.budget_gib)
    except ValueError:
        size = 0.0
    if not 0 < size < math.inf:
        return [f"{option}: give the GiB of each GPU that the whole run may take, for example 70, or auto"]
    if cfg.table is not None:
        return [
            f"{option} has no effect with checkpointing.table={cfg.table}, which says what is kept: leave one out"
        ]
    return []


# Policies under which each layer runs once, or is recomputed by itself up to the last tensor that backward needs.
SLICED_WITH = (Policy.none, Policy.full, Policy.interval, Policy.block, Policy.selective_ops)
# operations and Linears outside of an MLP
KEPT_BESIDE_SLICES = {"attention", "communication"}, {"q", "k", "v", "o"}


def _tiles(cfg: CheckpointingConfig) -> list[str]:
    option = f"checkpointing.tiles={cfg.tiles}"
    if cfg.tiles == "1":
        return []
    if cfg.tiles != "auto" and not (cfg.tiles.isdecimal() and int(cfg.tiles) > 0):
        return [f"{option}: give the number of slices, for example 8, or auto"]
    asked = {cfg.policy, *cfg.layers.values()}
    found = [
        f"{option} with checkpointing={policy}: slices are made inside of layers that are recomputed each by itself; "
        "use checkpointing=full, interval, block or selective_ops"
        for policy in sorted(asked.difference(SLICED_WITH))
    ]
    kept, named = cfg.selective_ops.save, cfg.selective_ops.save_linears
    inside = [*set(kept) - KEPT_BESIDE_SLICES[0], *set(named) - KEPT_BESIDE_SLICES[1]]
    if Policy.selective_ops in asked and inside:
        found.append(
            f"{option} with checkpointing=selective_ops that keeps {', '.join(sorted(inside))}: what an MLP makes is "
            "not kept where it runs in slices; keep attention, communication and the Linears q, k, v and o alone, or "
            "use checkpointing.tiles=1"
        )
    if asked == {Policy.none}:
        found.append(
            f"{option} with checkpointing=none: nothing is recomputed, and slices would be; use checkpointing=full"
        )
    if cfg.reentrant:
        found.append(
            f"{option} with checkpointing.reentrant=true: the reentrant variant runs a layer to its end when it is "
            "recomputed, so its MLP would run a third time; leave checkpointing.reentrant out"
        )
    if not cfg.early_stop:
        found.append(
            f"{option} with checkpointing.early_stop=false: a layer would run to its end when it is recomputed, so its "
            "MLP would run a third time; leave checkpointing.early_stop out"
        )
    return found


def _tiled_run(cfg: RunConfig) -> list[str]:
    """Find options outside of checkpointing that cannot be combined with MLPs in slices (checkpointing.tiles)."""
    option, found = f"checkpointing.tiles={cfg.checkpointing.tiles}", list[str]()
    if cfg.checkpointing.tiles == "1":
        return []
    if cfg.compile is Compilation.layers:
        found.append(
            f"{option} with compile=layers: slices are made inside of a layer, and a compiled layer is one piece; use "
            "compile=none, or checkpointing.tiles=1"
        )
    if cfg.train.tensor_parallel_size > 1:
        found.append(
            f"{option} with train.tensor_parallel_size={cfg.train.tensor_parallel_size}: ranks that share an MLP would "
            "add up their parts of every slice; use train.tensor_parallel_size=1, or checkpointing.tiles=1"
        )
    return found


def _checkpointing(cfg: CheckpointingConfig) -> list[str]:
    return [
        *_idle_options(cfg),
        *_budget(cfg),
        *_tiles(cfg),
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


COMPILED_WITH = (Policy.none, Policy.full, Policy.interval, Policy.block)  # layers run whole, once or twice


def _compile(cfg: RunConfig) -> list[str]:
    """Find options that cannot be combined with compiled layers."""
    if cfg.compile is Compilation.none:
        return []
    policies, tensor_parallel = cfg.checkpointing, cfg.train.tensor_parallel_size
    wrong = {policies.policy, *policies.layers.values()}.difference(COMPILED_WITH)
    found = [
        f"compile=layers with checkpointing={policy}: it works inside of a layer or across several, and a compiled "
        "layer is one piece; use checkpointing=full or checkpointing=none, or compile=none"
        for policy in sorted(wrong)
    ]
    if policies.reentrant:
        found.append(
            "compile=layers with checkpointing.reentrant=true: the reentrant variant runs a layer outside of autograd "
            "first, which is another graph; use checkpointing.reentrant=false, or compile=none"
        )
    if policies.offload.enabled:
        found.append(
            "compile=layers with checkpointing.offload.enabled=true: what a compiled layer keeps for backward is not "
            "moved to the host; leave offload out, or use compile=none"
        )
    if tensor_parallel > 1:
        found.append(
            f"compile=layers with train.tensor_parallel_size={tensor_parallel}: layers that ranks share meet inside "
            "their forward, where a graph would break; use train.tensor_parallel_size=1, or compile=none"
        )
    if cfg.peft.method is PeftMethod.qlora:
        found.append(
            "compile=layers with peft=qlora: the 4-bit layers of bitsandbytes are no part of a graph; use peft=lora, "
            "or compile=none"
        )
    return found


def _profile(cfg: ProfileConfig) -> list[str]:
    return [
        *_at_least(0, profile__after=cfg.after, profile__nvml_interval_s=cfg.nvml_interval_s),
        *_at_least(1, profile__steps=cfg.steps),
    ]


def _hardware(hardware: HardwareConfig) -> list[str]:
    """Find figures of the machine by which a plan would divide, or which no machine has."""
    figures = asdict(hardware) | {f"gpu_rates.{name}": rate for name, rate in hardware.gpu_rates.items()}
    return [
        f"hardware.{name}={value:g} must be above 0: give what the machine has, or leave it out where it is not known"
        for name, value in figures.items()
        if isinstance(value, (int, float)) and not value > 0
    ]


def _save(save: SaveConfig, peft: PeftConfig) -> list[str]:
    found = _at_least(0, save__every=save.every) + _at_least(1, save__keep=save.keep)
    if save.merge and peft.method is PeftMethod.none:
        found.append(
            "save.merge=true with peft.method=none: there are no adapters to merge; save.export=true writes the model"
        )
    if not re.fullmatch(r"[1-9]\d*(KB|MB|GB|TB|KiB|MiB|GiB|TiB)", save.max_shard_size):
        found.append(f"save.max_shard_size={save.max_shard_size} is not a size: write for example 5GB")
    return found


def _held_out(cfg: RunConfig) -> list[str]:
    """Check that evaluations during training take place when an option compares them."""
    wanted = {
        "save.best=true": cfg.save.best,
        f"train.early_stopping_evals={cfg.train.early_stopping_evals}": cfg.train.early_stopping_evals > 0,
    }
    lacking = []
    if cfg.train.eval_every == 0:
        lacking.append("train.eval_every=STEPS")
    if all(each.holds_nothing_out() for each in cfg.data.sources().values()):
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
    found += _at_least(1, most_retreats=cfg.most_retreats)
    if not cfg.resume:
        found.append("resume is empty: give none, auto, auto_or_start or a path")
    if cfg.resume not in NOT_FOLDERS and cfg.run_id:
        found.append(
            f"run_id={cfg.run_id} has no effect with resume={cfg.resume}, which names the run: leave it out"
        )
    return found
