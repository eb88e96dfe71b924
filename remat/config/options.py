"""Every option of a run, typed, with its default. Standard library only: no torch, no Hydra, no disk, no network.

YAML under `conf/` and `recipes/` holds values; this file holds names, types and defaults. A default lives here
and nowhere else. Which combinations are possible is decided in `remat.config.validation`; what only the machine can
tell, in `remat.planning.preflight`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class LogLevel(StrEnum):
    info = "info"
    debug = "debug"


class Precision(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Attention(StrEnum):
    sdpa = "sdpa"
    flash_attention_2 = "flash_attention_2"
    flex_attention = "flex_attention"
    eager = "eager"


class ModelInit(StrEnum):
    pretrained = "pretrained"
    random = "random"


class DataSource(StrEnum):
    python_stdlib = "python_stdlib"
    files = "files"
    hub = "hub"
    synthetic = "synthetic"


class FileType(StrEnum):
    auto = "auto"  # by its first bytes, and by its name where they do not tell
    text = "text"
    jsonl = "jsonl"  # one JSON object per line
    json = "json"  # one array of JSON objects
    csv = "csv"  # with a header; the separator is the one the header has most of: comma, semicolon or tab
    parquet = "parquet"
    arrow = "arrow"  # as datasets.save_to_disk writes


class DataFormat(StrEnum):
    auto = "auto"  # by the fields of the first rows
    plain = "plain"
    alpaca = "alpaca"  # instruction, input (optional), output
    chat = "chat"  # messages: role and content
    sharegpt = "sharegpt"  # conversations: from and value
    prompt_completion = "prompt_completion"  # both text, or both lists of messages


class AlpacaPrompt(StrEnum):
    auto = "auto"  # template where the tokenizer has one, else stanford
    template = "template"  # the chat template
    stanford = "stanford"


class Packing(StrEnum):
    documents = "documents"  # positions restart with each document and attention stays within it
    stream = "stream"  # plain text only, as one text: a document sees those before it in its block
    none = "none"  # rows only: one a block, padded to the longest of its micro-batch


class LongRows(StrEnum):
    cut = "cut"  # at train.seq_len
    drop = "drop"
    refuse = "refuse"


class BadRows(StrEnum):
    stop = "stop"
    skip = "skip"


class LossKind(StrEnum):
    chunked = "chunked"
    full = "full"


class Schedule(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"


class Policy(StrEnum):
    none = "none"
    full = "full"
    interval = "interval"
    uniform = "uniform"
    block = "block"
    sqrt = "sqrt"
    selective_ops = "selective_ops"
    selective_modules = "selective_modules"
    discard_output = "discard_output"
    deepspeed = "deepspeed"
    budget = "budget"


class DeterminismCheck(StrEnum):
    default = "default"  # shapes, dtypes and devices of a recomputation must be those of the forward
    none = "none"


class StorageDtype(StrEnum):
    same = "same"
    fp8 = "fp8"
    int8 = "int8"


# What a save that fails does to the run; older states stay either way. "stop" ends it with exit 70; "continue" trains
# on and saves again when it is due (the last save of a run must succeed). Not a class: "continue" is a keyword.
SaveFailure = StrEnum("SaveFailure", {"stop": "stop", "continue": "continue"})


class Reshard(StrEnum):
    auto = "auto"  # a state that another number of ranks saved is cut anew while it is loaded
    refuse = "refuse"


NOT_FOLDERS = ("none", "auto", "auto_or_start")  # values of resume that name no folder


class PeftMethod(StrEnum):
    none = "none"
    lora = "lora"
    qlora = "qlora"  # lora on a base in 4-bit NF4


class WandbMode(StrEnum):
    disabled = "disabled"
    offline = "offline"
    online = "online"


class RecipeStatus(StrEnum):
    planned = "planned"
    measured = "measured"
    starting_point = "starting_point"  # for any model and machine: the user names the model


class StrategyChoice(StrEnum):
    given = "given"
    auto = "auto"  # the fastest ZeRO stage, offload, checkpointing and micro-batch that fit the machine, by their plans


class ConfigError(ValueError):
    """A configuration that cannot run. The text names each option, its value and the remedy."""


@dataclass(kw_only=True)
class MetaConfig:
    """What a recipe says about itself: the machine it is for, and whether its figures were measured there."""

    summary: str = ""
    machine: str = "any"
    status: RecipeStatus = RecipeStatus.planned
    planned: dict[str, float] = field(
        default_factory=dict
    )  # gpu_gib and host_gib of a rank, tokens_per_s of all
    measured: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class ModelConfig:
    """Which Hugging Face causal language model, where its values come from, and how attention is computed."""

    init: ModelInit = ModelInit.random
    path: str | None = None  # local folder or hub name: weights, config and tokenizer
    architecture: dict[str, Any] = field(default_factory=dict)  # transformers config fields, with model_type
    tokenizer: str | None = None  # "bytes", a folder or a hub name; None: the one at `path`
    attention: Attention = Attention.sdpa
    trust_remote_code: bool = False
    allow_pickle: bool = False  # load .bin weights too; safetensors only by default


@dataclass(kw_only=True)
class DataConfig:
    """Where text comes from and how it becomes fixed blocks of `train.seq_len` tokens."""

    source: DataSource = DataSource.python_stdlib
    path: Any = None  # file, folder, glob or hub name, or a list of them
    file_type: FileType = FileType.auto  # files only
    split: str = "train"  # hub, and folders that datasets.save_to_disk wrote
    format: DataFormat = DataFormat.auto
    text_field: str = "text"
    columns: dict[str, str] = field(default_factory=dict)  # our field -> the data's, {messages: dialogue}
    alpaca_prompt: AlpacaPrompt = AlpacaPrompt.auto
    train_on_roles: Any = field(default_factory=lambda: ["assistant"])  # a list of roles, or all
    train_on_end_token: bool = True  # the token that ends what is trained is trained too
    chat_template: str | None = None  # a Jinja file, or a folder with a template; "none": use no template
    packing: Packing | None = None  # None: documents where the model can, else stream (text) or none (rows)
    long_rows: LongRows = LongRows.cut  # instruction rows of more than train.seq_len tokens
    eval_path: Any = None  # held-out data, as `path`; None: `eval_fraction` of the data is held out
    eval_fraction: float = 0.05
    eval_tokens: int = (
        1_000_000  # about as many tokens are held out at most, whatever the fraction; 0: no bound
    )
    on_bad_row: BadRows = BadRows.stop
    shuffle: bool = True
    cache_dir: str = "~/.cache/remat/data"
    synthetic_blocks: int = 1024

    @property
    def has_rows(self) -> bool:
        """Return whether this is instruction data: rows that stay whole, where plain text is cut as blocks are full.

        A format that is not found yet counts as plain text.
        """
        return self.format not in (DataFormat.auto, DataFormat.plain)

    def trained_roles(self) -> list[str] | None:
        """Return the roles whose words are trained; None: all."""
        roles = [self.train_on_roles] if isinstance(self.train_on_roles, str) else list(self.train_on_roles)
        return None if roles == ["all"] else [str(role) for role in roles]


@dataclass(kw_only=True)
class DeadlinesConfig:
    """Seconds without a new phase or micro-batch after which the run ends, every rank reporting (exit 70); 0: never."""

    data_s: float = 0.0  # reading and tokenizing, by one rank for all; each batch of documents is progress
    build_s: float = 1800.0
    load_s: float = 3600.0  # weights, a saved state
    step_s: float = 1800.0
    evaluate_s: float = 1800.0
    save_s: float = 7200.0
    export_s: float = 7200.0


@dataclass(kw_only=True)
class TrainConfig:
    """The optimisation problem: length, batch, precision, loss, evaluation. Sizes in tokens, blocks and steps."""

    steps: int | None = (
        None  # one of `steps` and `epochs`; on a command line the one given replaces the recipe's
    )
    epochs: float | None = None  # passes over the blocks for training; the steps follow from the data
    seq_len: int = 512
    micro_batch_size: int = 1  # blocks per rank and forward pass
    tensor_parallel_size: int = 1  # ranks that share each layer and read the same blocks
    global_batch_size: int = 8  # blocks per optimizer step over all ranks; accumulation is derived
    precision: Precision = Precision.bf16
    loss: LossKind = LossKind.chunked
    seed: int = 1234
    log_every: int = 10
    eval_every: int = 0  # steps between evaluations, with one before the first step; 0: only at the end
    eval_batches: int = 0  # micro-batches per rank and evaluation; 0: all held-out blocks
    early_stopping_evals: int = (
        0  # end after so many evaluations in a row without a lower held-out loss; 0: never
    )
    stop_at: int = 0  # stop after this step, resumable; schedules still span `steps`; 0: train to the end
    max_minutes: float = (
        0.0  # since the launch, then save (which comes on top) and stop, resumable; 0: no limit
    )
    neftune_alpha: float = 0.0  # noise on embeddings while training (Jain et al. 2023), 5 for example; 0: none
    max_skipped_steps: int = 10  # consecutive non-finite steps before the run stops
    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig)


@dataclass(kw_only=True)
class OptimConfig:
    """AdamW and its schedule. The implementation follows from where the optimizer state lives."""

    lr: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # matrices only; norms and biases are not decayed
    gradient_clipping: float = 1.0  # global L2 norm; 0: no clipping
    schedule: Schedule = Schedule.cosine
    warmup_steps: int = 0
    decay_steps: int = 0  # wsd only: the last steps, over which lr falls
    min_lr_ratio: float = 0.1


@dataclass(kw_only=True)
class SelectiveOpsConfig:
    """selective_ops: the results that are kept; the rest of the layer is recomputed around them."""

    save: list[str] = field(default_factory=lambda: ["attention", "communication"])
    # attention | communication | matmul | every_other_matmul | an operator's name, for example aten::bmm
    save_linears: list[str] = field(default_factory=list)  # q k v o gate up down, all_but_down, a module's name


@dataclass(kw_only=True)
class DeepSpeedCheckpointingConfig:
    """deepspeed: the six switches of deepspeed.checkpointing."""

    partition_activations: bool = False  # needs train.tensor_parallel_size > 1
    cpu_checkpointing: bool = False  # needs a GPU
    contiguous_memory_optimization: bool = False  # needs partition_activations
    number_checkpoints: int | None = None  # None: derived, one per checkpointed layer
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False


@dataclass(kw_only=True)
class OffloadConfig:
    """Where what a policy keeps lives between forward and backward: on the device, or in pinned host memory."""

    enabled: bool = False
    min_bytes: int = 1 << 20  # smaller tensors stay on the device
    keep_last_layers: int = 1  # the layers whose backward comes first
    dtype: StorageDtype = StorageDtype.same  # fp8 and int8 change the gradients slightly


@dataclass(kw_only=True)
class CheckpointingConfig:
    """Activation checkpointing: what each layer keeps for backward and what it recomputes."""

    policy: Policy = Policy.full
    layers: dict[Any, Policy] = field(default_factory=dict)  # another policy by range: {0-7: none, 31: full}
    reentrant: bool | None = None  # torch's variant; None: chosen (reentrant for segments under ZeRO-3)
    preserve_rng_state: bool = True
    determinism_check: DeterminismCheck = DeterminismCheck.default
    early_stop: bool = True  # a recomputation ends at the last tensor that backward needs
    interval: int = 2  # interval: every k-th layer is recomputed
    segment_layers: int = 2  # uniform: layers per segment, of which only the input is kept
    block_layers: int = 1  # block: how many of the first layers are recomputed
    selective_ops: SelectiveOpsConfig = field(default_factory=SelectiveOpsConfig)
    recompute_modules: list[str] = field(default_factory=lambda: ["mlp"])  # selective_modules: roles
    discard_modules: list[str] = field(default_factory=lambda: ["norm", "activation"])  # discard_output: roles
    deepspeed: DeepSpeedCheckpointingConfig = field(default_factory=DeepSpeedCheckpointingConfig)
    budget_gib: str = (
        "auto"  # budget: GiB of each GPU for all of the run; auto: what the GPU has, less a margin
    )
    table: str | None = None  # budget: a checkpointing_table.json to carry out as it is
    offload: OffloadConfig = field(default_factory=OffloadConfig)


@dataclass(kw_only=True)
class PeftConfig:
    """Parameter-efficient fine-tuning with the peft library: the base model is frozen, adapters are trained."""

    method: PeftMethod = PeftMethod.none
    r: int = 16
    alpha: int = 32
    lr: float | None = None  # what optim.lr becomes where the command line chooses peft, and not optim.lr
    dropout: float = 0.0
    target_modules: list[str] = field(default_factory=list)  # []: every Linear of the decoder layers
    modules_to_save: list[str] = field(
        default_factory=list
    )  # outside the layers, trained whole: embed_tokens, lm_head
    rslora: bool = False  # adapters are scaled by alpha / sqrt(r), not alpha / r (Kalajdzievski 2023)
    dora: bool = False  # magnitudes beside directions (Liu et al. 2024); not under ZeRO-3, not in 4 bits


@dataclass(kw_only=True)
class DeepSpeedConfig:
    """A memory strategy from `ds_configs/` (or a path to any JSON) and changes to it."""

    config: str = "zero2"
    overrides: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class HardwareConfig:
    """The machine a recipe is meant for. `this_machine` (all None) means: whatever is found at launch."""

    name: str = "this_machine"
    gpu: str | None = None
    gpu_memory_gib: float | None = None
    gpus_per_node: int | None = None
    num_nodes: int = 1
    host_memory_gib: float | None = None
    nvme_path: str | None = None  # folder on a fast local disk, for zero3_nvme
    pcie_h2d_gbs: float | None = None  # host to one GPU, pinned memory; GB = 1e9 bytes, None: unknown
    pcie_d2h_gbs: float | None = None
    gpus_per_pcie_link: int = 1  # GPUs that share such a link
    gpu_link_gbs: float | None = None  # bus bandwidth of collectives inside a node, per GPU and direction
    nic_gbs: float | None = None  # all network ports of a node together, one direction
    dram_gbs: float | None = None  # host memory of a node
    cpu_adam_gparams_s: float | None = None  # 1e9 parameters per second, all ranks of a node together
    nvme_read_gbs: float | None = None
    nvme_write_gbs: float | None = None
    nvme_gib: float | None = None
    gpu_rates: dict[str, float] = field(default_factory=dict)  # measured ones, instead of remat.hardware's
    sources: dict[str, str] = field(default_factory=dict)  # where each figure above is from

    @property
    def ranks(self) -> int:
        """One for each GPU; a machine of which no number is known counts as one GPU a node."""
        return (self.gpus_per_node or 1) * self.num_nodes


@dataclass(kw_only=True)
class ProfileConfig:
    """Memory and time of a few steps, in detail, under RUN_DIR/profile. What is profiled is slower."""

    memory: bool = False  # the allocator's history; also when memory runs out. Needs a GPU
    trace: bool = False  # a Chrome trace, each phase a range
    summary: bool = False  # tables by operation, and the allocator's summary
    after: int = (
        4  # steps of this launch before it begins: the first, and the fourth of ZeRO-3, are watched op by op
    )
    steps: int = 2
    nvml_interval_s: float = 0.0  # seconds between samples of the driver's figures, over the whole run; 0: none


@dataclass(kw_only=True)
class TrackingConfig:
    """Weights & Biases beside `metrics.jsonl`, which is always written."""

    wandb: WandbMode = WandbMode.offline
    project: str = "remat"
    entity: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class SaveConfig:
    """When training state is saved, how many states stay, and whether the model is exported at the end."""

    every: int = 0  # steps between saves; 0: only at the end
    at_end: bool = True
    keep: int = 2
    on_error: SaveFailure = SaveFailure.stop
    rehearse: bool | None = (
        None  # save, export and read back after the first step; None: if above 1e9 parameters
    )
    in_background: bool = False  # flush, hash and name a state while training goes on
    best: bool = False  # export the model of the lowest held-out loss, to RUN_DIR/best
    export: bool = False  # Hugging Face safetensors after the last step
    max_shard_size: str = "5GB"


@dataclass(kw_only=True)
class RunConfig:
    """One run. Only the modules above level 2 receive it whole; every other part takes its own slice."""

    name: str = ""  # "": the name of the recipe; the run directory is outputs/<name>/<run_id>
    meta: MetaConfig = field(default_factory=MetaConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpointing: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    peft: PeftConfig = field(default_factory=PeftConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    strategy: StrategyChoice = StrategyChoice.given  # auto: what the command line does not set of it is chosen
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    output_dir: str = "outputs"
    run_id: str | None = None  # None: the launch time
    resume: str = (
        "none"  # none | auto (newest complete state of this recipe) | auto_or_start | a run or saved state
    )
    reshard: Reshard = Reshard.auto  # of a state that another number of ranks saved
    force: bool = False  # start although preflight says it does not fit
    log_level: LogLevel = LogLevel.info
