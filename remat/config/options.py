"""Every option of a run, typed, with its default. Standard library only: no torch, no Hydra, no disk, no network.

YAML under `conf/` and `recipes/` holds values; this file holds names, types and defaults. A default lives here
and nowhere else. Which combinations are possible is decided in `remat.config.validation`; what only the machine can
tell, in `remat.planning.preflight`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from remat.config.units import MIB


class LogLevel(StrEnum):
    info = "info"  # what a person needs
    debug = "debug"  # also what the libraries say


class Precision(StrEnum):
    fp32 = "fp32"  # 32-bit floats
    bf16 = "bf16"  # bfloat16 with fp32 master weights
    fp16 = "fp16"  # half precision with a loss scale


class Attention(StrEnum):
    sdpa = "sdpa"  # torch's own kernels, chosen by torch
    flash_attention_2 = "flash_attention_2"  # the flash-attn package; a GPU only
    flex_attention = "flex_attention"  # torch's flex attention; a GPU only
    eager = "eager"  # plain matrix products; keeps all scores


class ModelInit(StrEnum):
    pretrained = "pretrained"  # the weights at `model.path`
    random = "random"  # fresh weights from `train.seed`; needs no file


class RopeScaling(StrEnum):
    """How rotary positions reach further: the kinds of transformers that do not depend on the batch."""

    linear = "linear"
    yarn = "yarn"
    llama3 = "llama3"


class ModelLoad(StrEnum):
    auto = "auto"  # own_slices where ZeRO-3 and the files allow it, else from_pretrained, with the reason
    own_slices = "own_slices"  # each rank reads only its own part of the files
    from_pretrained = "from_pretrained"  # transformers reads; at ZeRO-3 rank 0 reads all


class DataSource(StrEnum):
    python_stdlib = "python_stdlib"  # the Python standard library's own source, on every machine
    files = "files"  # local files and folders
    hub = "hub"  # a data set of the Hugging Face hub
    synthetic = "synthetic"  # random tokens, for timing


WITHOUT_PATH = (DataSource.python_stdlib, DataSource.synthetic)  # sources that read no data.path


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
    plain = "plain"  # text; every token is trained
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
    drop = "drop"  # left out and counted
    refuse = "refuse"  # the run ends with their places


class RewrittenTurns(StrEnum):
    """What becomes of turns that a chat template renders otherwise once others follow, as Qwen3's drops thoughts."""

    each = "each"  # each is trained in a row of its own: the chat up to it
    last = "last"  # only those that the whole chat has as they were said are trained


class BadRows(StrEnum):
    stop = "stop"  # the run ends with the row's place
    skip = "skip"  # the row is left out and counted


class LossKind(StrEnum):
    chunked = "chunked"  # logits of a few tokens at a time: less memory, same loss
    full = "full"  # all logits at once


class OptimName(StrEnum):
    adamw = "adamw"  # two moments in fp32
    adamw_8bit = "adamw_8bit"  # two moments in 8 bits (bitsandbytes)
    paged_adamw_8bit = "paged_adamw_8bit"  # the same, moved to host memory while a GPU lacks room
    lion = "lion"  # one moment
    adafactor = "adafactor"  # a row and a column of second moments of each matrix


class OptimStates(StrEnum):
    fp32 = "fp32"  # master weights, their gradients and both moments in fp32
    # master weights and their gradients in bf16, moments in fp32; needs offload_optimizer on cpu
    bf16_master = "bf16_master"
    bf16 = "bf16"  # all of them in bf16


class Schedule(StrEnum):
    constant = "constant"  # the peak after warm-up
    linear = "linear"  # a straight line from the peak down to the end
    cosine = "cosine"  # half a cosine from the peak down to the end
    wsd = "wsd"  # the peak, then a fall over the last `optim.decay_steps`


class Policy(StrEnum):
    none = "none"  # everything is kept
    full = "full"  # each layer keeps its input and runs again in backward
    interval = "interval"  # every k-th layer runs again
    uniform = "uniform"  # segments of several layers, each of which runs again
    block = "block"  # the first layers run again
    sqrt = "sqrt"  # segments of about the square root of the depth
    selective_ops = "selective_ops"  # chosen operations are kept, the rest of the layer runs again
    selective_modules = "selective_modules"  # chosen modules of each layer run again
    # outputs of cheap modules are dropped and made again, each from its input
    discard_output = "discard_output"
    deepspeed = "deepspeed"  # deepspeed.checkpointing with its switches
    budget = "budget"  # value by value, what a number of GiB has room for is kept


class DeterminismCheck(StrEnum):
    default = "default"  # shapes, dtypes and devices of a recomputation must be those of the forward
    none = "none"  # no check


class StorageDtype(StrEnum):
    same = "same"  # as computed; nothing changes
    fp8 = "fp8"  # 8-bit floats, half of bf16
    int8 = "int8"  # 8-bit integers with a scale per row


# What a save that fails does to the run; older states stay either way. "stop" ends it with exit 70; "continue" trains
# on and saves again when it is due (the last save of a run must succeed). Not a class: "continue" is a keyword.
SaveFailure = StrEnum("SaveFailure", {"stop": "stop", "continue": "continue"})


class Reshard(StrEnum):
    auto = "auto"  # a checkpoint saved with a different number of ranks is resharded on load
    refuse = "refuse"  # it is refused


NOT_FOLDERS = ("none", "auto", "auto_or_start")  # values of resume that name no folder


class PeftMethod(StrEnum):
    none = "none"  # all weights are trained
    lora = "lora"  # low-rank adapters beside frozen weights
    qlora = "qlora"  # lora on a base in 4-bit NF4


class WandbMode(StrEnum):
    disabled = "disabled"  # not used
    offline = "offline"  # files under RUN_DIR/wandb, uploaded by `wandb sync`
    online = "online"  # sent while training


class RecipeStatus(StrEnum):
    planned = "planned"  # figures are planned, not measured
    measured = "measured"  # figures were measured on `meta.machine`
    starting_point = "starting_point"  # for any model and machine: the user names the model


class StrategyChoice(StrEnum):
    given = "given"
    auto = "auto"  # the fastest ZeRO stage, offload, checkpointing and micro-batch that fit the machine, by their plans


class Compilation(StrEnum):
    none = "none"
    layers = "layers"  # torch.compile makes kernels of each decoder layer; with checkpointing=none or full


class OnOutOfMemory(StrEnum):
    stop = "stop"
    # remat launch starts the run again from its newest saved state, with what needs less memory
    retreat = "retreat"


class ConfigError(ValueError):
    """A configuration that cannot run. The text names each option, its value and the remedy."""


@dataclass(kw_only=True)
class MetaConfig:
    """What a recipe says about itself: the machine it is for, and whether its figures were measured there."""

    summary: str = ""  # what a recipe trains, in a few words
    machine: str = "any"  # the machine a recipe is for
    status: RecipeStatus = RecipeStatus.planned  # whether the figures of a recipe were measured or planned
    # gpu_gib of a rank and tokens_per_s of all ranks, as `remat plan` says
    planned: dict[str, float] = field(default_factory=dict)
    # figures of a run on that machine, by their names in metrics.jsonl
    measured: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class ModelConfig:
    """Which Hugging Face causal language model, where its values come from, and how attention is computed."""

    init: ModelInit = ModelInit.random  # where the weights come from
    path: str | None = None  # local folder or hub name: weights, config and tokenizer
    # fields of the transformers config, with model_type; over those at `path`
    architecture: dict[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None  # "bytes", a folder or a hub name; null: the one at `path`
    attention: Attention = Attention.sdpa  # how attention is computed
    # how rotary positions are stretched to longer sequences; null: as they are
    rope_scaling: RopeScaling | None = None
    rope_factor: float = 1.0  # how many times the model's own length they reach
    trust_remote_code: bool = False  # run the Python code that comes with the model
    allow_pickle: bool = False  # load .bin weights too, which can run code; false: safetensors only
    load: ModelLoad = ModelLoad.auto  # how pretrained weights are read


@dataclass(kw_only=True)
class MixedSource:
    """One source of `data.mix`: its weight, and where it is otherwise than `data` says. None: as there."""

    weight: float = 1.0  # share of the tokens of an epoch, among the weights of all sources
    path: Any = None  # file, folder, glob or hub name, or a list of them
    source: DataSource | None = None  # where the data comes from; null: files where there is a path
    file_type: FileType | None = None  # what files are
    split: str | None = None  # which split
    format: DataFormat | None = None  # what a row means
    text_field: str | None = None  # the field that holds the text, in plain rows
    columns: dict[str, str] | None = None  # our field: the data's
    join_files: bool | None = None  # whether the files of a folder, or of a repository, are one document
    file_header: str | None = None  # what stands before each joined file
    alpaca_prompt: AlpacaPrompt | None = None  # how Alpaca rows become text
    train_on_roles: Any = None  # the roles whose turns carry the loss, or all
    train_on_end_token: bool | None = None  # whether the token that ends a trained turn carries the loss too
    rewritten_turns: RewrittenTurns | None = None  # what becomes of turns that the chat template rewrites
    long_rows: LongRows | None = None  # what becomes of rows longer than train.seq_len
    on_bad_row: BadRows | None = None  # what a row that cannot be read does
    eval_path: Any = None  # held-out data of this source
    eval_fraction: float | None = None  # share of this source that is held out
    eval_tokens: int | None = None  # [tokens] the most that is held out of this source, about


@dataclass(kw_only=True)
class DataConfig:
    """Where text comes from and how it becomes fixed blocks of `train.seq_len` tokens."""

    source: DataSource = DataSource.python_stdlib  # where the data comes from
    path: Any = None  # file, folder, glob or hub name, or a list of them
    # several sources by name, each with a weight and with what differs from here, instead of `path`
    mix: dict[str, MixedSource] = field(default_factory=dict)
    streaming: bool = False  # read and tokenize while training, without a cache: data that no disk here holds
    file_type: FileType = FileType.auto  # what files are, where their first bytes mislead
    split: str = "train"  # which split, of hub data and of folders that datasets.save_to_disk wrote
    format: DataFormat = DataFormat.auto  # what a row means
    text_field: str = "text"  # the field that holds the text, in plain rows
    # our field: the data's, for example {messages: dialogue}
    columns: dict[str, str] = field(default_factory=dict)
    # whether the files of each folder in `path`, or the rows of each `repo`, are one document, in order of `path`
    join_files: bool = False
    file_header: str = "# {path}\n"  # what stands before each joined file; {repo} and {path} are filled in
    alpaca_prompt: AlpacaPrompt = AlpacaPrompt.auto  # how Alpaca rows become text
    # the roles whose turns carry the loss, or all
    train_on_roles: Any = field(default_factory=lambda: ["assistant"])
    train_on_end_token: bool = True  # whether the token that ends a trained turn carries the loss too
    # a Jinja file, or a folder with a template, in place of the tokenizer's; "none": no template
    chat_template: str | None = None
    # what becomes of turns that the chat template renders otherwise once others follow
    rewritten_turns: RewrittenTurns = RewrittenTurns.each
    # how rows share a block; null: documents where the model can, else stream (text) or none (rows)
    packing: Packing | None = None
    long_rows: LongRows = LongRows.cut  # what becomes of instruction rows longer than train.seq_len
    eval_path: Any = None  # held-out data, as `path`; null: `eval_fraction` of the data is held out
    eval_fraction: float = 0.05  # share of the data that is held out, where no `eval_path` is given
    # [tokens] the most that is held out, about, whatever the fraction; 0: no bound
    eval_tokens: int = 1_000_000
    # [rows] of a stream without `eval_path`: the first ones are held out, up to `eval_tokens`; 0: none
    eval_rows: int = 1000
    on_bad_row: BadRows = BadRows.stop  # what a row that cannot be read does
    shuffle: bool = True  # whether blocks are shuffled, anew in each epoch
    cache_dir: str = "~/.cache/remat/data"  # folder for tokenized data, shared by all runs
    # [processes] that tokenize much data, with the same result for any number; 0: one for each core
    processes: int = 0
    synthetic_blocks: int = 1024  # [blocks] length of the synthetic data

    @property
    def has_rows(self) -> bool:
        """Return whether this is instruction data, whose rows stay whole; plain text is cut into full blocks.

        A format that is not found yet counts as plain text. In a mixture one source of instruction data is enough.
        """
        return any(each.format not in (DataFormat.auto, DataFormat.plain) for each in self.sources().values())

    def holds_nothing_out(self) -> bool:
        """Return whether no data is held out; for a single source, not for a mixture."""
        none_of_it = self.eval_fraction == 0 or (self.streaming and self.eval_rows == 0)
        return self.eval_path is None and none_of_it

    def sources(self) -> dict[str, DataConfig]:
        """Return the options of each source of `mix` by its name; without a mixture these options, under ""."""
        return {name: self._of(given) for name, given in self.mix.items()} or {"": self}

    def _of(self, given: MixedSource) -> DataConfig:
        own = {item.name: getattr(given, item.name) for item in fields(given) if item.name != "weight"}
        if own["source"] is None and given.path is not None and self.source in WITHOUT_PATH:
            own["source"] = DataSource.files
        return replace(self, mix={}, **{name: value for name, value in own.items() if value is not None})

    def trained_roles(self) -> list[str] | None:
        """Return the roles whose turns carry the loss; None: all."""
        roles = [self.train_on_roles] if isinstance(self.train_on_roles, str) else list(self.train_on_roles)
        return None if roles == ["all"] else [str(role) for role in roles]


@dataclass(kw_only=True)
class DeadlinesConfig:
    """Seconds without a new phase or micro-batch after which the run ends, every rank reporting (exit 70); 0: never."""

    data_s: float = 0.0  # reading and tokenizing, by one rank for all; each batch of documents is progress
    build_s: float = 1800.0  # building the model and the engine
    load_s: float = 3600.0  # loading weights or a saved state; a second more for each 100 MB of it
    step_s: float = 1800.0  # a micro-batch or an update
    evaluate_s: float = 1800.0  # a micro-batch of an evaluation
    save_s: float = 7200.0  # writing a training checkpoint; a second more for each 100 MB of it
    export_s: float = 7200.0  # writing the exported model; a second more for each 100 MB of it
    link_s: float = 20.0  # a node of several gives no answer to the node of rank 0; not less than 4


@dataclass(kw_only=True)
class TrainConfig:
    """The optimisation problem: length, batch, precision, loss, evaluation. Sizes in tokens, blocks and steps."""

    # [steps] updates of the weights; give this or `epochs`, which on a command line replaces what the recipe has
    steps: int | None = None
    # [passes] how often the run trains on every block; the steps follow from the data
    epochs: float | None = None
    seq_len: int = 512  # [tokens] length of a block
    micro_batch_size: int = 1  # [blocks] what one rank takes in one forward pass
    tensor_parallel_size: int = 1  # [ranks] how many share each layer and read the same blocks
    sequence_parallel_size: int = 1  # [ranks] how many share each sequence, every rank a block of its tokens
    # [stages] into how many the layers are divided; ranks of one stage hold its layers alone, hidden states travel
    pipeline_parallel_size: int = 1
    global_batch_size: int = 8  # [blocks] what one optimizer step takes over all ranks; accumulation is derived
    precision: Precision = Precision.bf16  # number format of forward and backward
    loss: LossKind = LossKind.chunked  # how logits and loss are computed
    seed: int = 1234  # fixes random weights, the order of data, and dropout
    log_every: int = 10  # [steps] how far logged rows are apart
    # [steps] how far evaluations are apart, with one before the first step; 0: only at the end
    eval_every: int = 0
    eval_batches: int = 0  # [micro-batches] what one rank evaluates each time; 0: all held-out blocks
    # [evaluations] so many in a row without a lower held-out loss end training; 0: never
    early_stopping_evals: int = 0
    # [steps] the step after which the run stops, resumable; schedules still span `steps`; 0: none
    stop_at: int = 0
    # time since the launch after which the run saves (which comes on top) and stops, resumable; 0: no limit
    max_minutes: float = 0.0
    # factor of the loss that balances a mixture of experts, 0.01 for example; 0: none; null: the model's own, where its
    # config has output_router_logits
    router_aux_loss_coef: float | None = None
    neftune_alpha: float = 0.0  # noise on embeddings while training (Jain et al. 2023), 5 for example; 0: none
    max_skipped_steps: int = 10  # [steps] so many in a row may be skipped as not finite before the run ends
    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig)


WARMUP_PERCENT = 3  # of a run's steps, as in the published commands of Stanford Alpaca and QLoRA


@dataclass(kw_only=True)
class OptimConfig:
    """The optimizer and its schedule. The implementation follows from where the optimizer state lives."""

    name: OptimName = OptimName.adamw  # which optimizer updates the weights
    # number format of AdamW's states; 16-bit ones change the training, and never follow by themselves
    states: OptimStates = OptimStates.fp32
    lr: float = 3e-4  # the highest learning rate
    beta1: float = 0.9  # decay of the mean of gradients; adafactor has none
    beta2: float = 0.95  # decay of the mean of squared gradients; adafactor has none
    eps: float = 1e-8  # added to Adam's denominator; lion and adafactor have none
    weight_decay: float = 0.1  # decay of matrices; norms and biases are not decayed
    gradient_clipping: float = 1.0  # the largest global L2 norm of a gradient; 0: no clipping
    schedule: Schedule = Schedule.cosine  # how the learning rate goes from its peak to its end
    warmup_steps: int | None = 0  # [steps] how long the learning rate rises to `lr`; null: 3 % of the run
    decay_steps: int = 0  # [steps] how long it falls at the end, with schedule wsd
    min_lr_ratio: float = 0.1  # the learning rate at the end, as a part of `lr`

    def warmup(self, run_steps: int) -> int:
        """Return the steps of warm-up in a run of `run_steps`."""
        return -(-WARMUP_PERCENT * run_steps // 100) if self.warmup_steps is None else self.warmup_steps


@dataclass(kw_only=True)
class SelectiveOpsConfig:
    """selective_ops: the results that are kept; the rest of the layer is recomputed around them."""

    # what is kept: attention, communication, matmul, every_other_matmul, or an operator's name such as aten::bmm
    save: list[str] = field(default_factory=lambda: ["attention", "communication"])
    # linear modules whose results are kept: q k v o gate up down, all_but_down, or a module's name
    save_linears: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class DeepSpeedCheckpointingConfig:
    """deepspeed: the six switches of deepspeed.checkpointing."""

    # split kept activations over the tensor-parallel ranks; needs train.tensor_parallel_size > 1
    partition_activations: bool = False
    cpu_checkpointing: bool = False  # keep activations in host memory; needs a GPU
    contiguous_memory_optimization: bool = False  # keep them in one buffer; needs partition_activations
    # [layers] size of that buffer; null: derived, one per checkpointed layer
    number_checkpoints: int | None = None
    synchronize_checkpoint_boundary: bool = False  # wait for the GPU at each layer
    profile: bool = False  # print times of DeepSpeed's own checkpointing


@dataclass(kw_only=True)
class OffloadConfig:
    """Where what a policy keeps lives between forward and backward: on the device, or in pinned host memory."""

    enabled: bool = False  # keep saved activations in host memory between forward and backward
    min_bytes: int = MIB  # smaller tensors stay on the device
    # [layers] so many of the last stay on the device, because their backward comes first
    keep_last_layers: int = 1
    dtype: StorageDtype = StorageDtype.same  # how they are stored; fp8 and int8 change the gradients slightly


@dataclass(kw_only=True)
class CheckpointingConfig:
    """Activation checkpointing: what each layer keeps for backward and what it recomputes."""

    policy: Policy = Policy.full  # which layers keep what; the choices of the group `checkpointing`
    # another policy for a range of layers: {0-7: none, 31: full}
    layers: dict[Any, Policy] = field(default_factory=dict)
    reentrant: bool | None = None  # torch's variant; null: chosen (reentrant for segments under ZeRO-3)
    preserve_rng_state: bool = True  # recompute with the random numbers of the forward, as dropout needs
    determinism_check: DeterminismCheck = DeterminismCheck.default  # what a recomputation is compared with
    early_stop: bool = True  # end a recomputation at the last tensor that backward needs
    interval: int = 2  # [layers] policy interval recomputes one in so many
    segment_layers: int = 2  # [layers] length of a segment of policy uniform, of which only the input is kept
    block_layers: int = 1  # [layers] so many of the first are recomputed by policy block
    selective_ops: SelectiveOpsConfig = field(default_factory=SelectiveOpsConfig)
    # roles of the modules that policy selective_modules runs again
    recompute_modules: list[str] = field(default_factory=lambda: ["mlp"])
    # roles of the modules whose outputs policy discard_output drops
    discard_modules: list[str] = field(default_factory=lambda: ["norm", "activation"])
    deepspeed: DeepSpeedCheckpointingConfig = field(default_factory=DeepSpeedCheckpointingConfig)
    # [GiB of each GPU] what the whole run may take under policy budget; auto: what the GPU has, less 2 %
    budget_gib: str = "auto"
    table: str | None = None  # a checkpointing_table.json that policy budget carries out; null: it is chosen
    # [slices] of the tokens in which recomputed layers compute their MLP and the norms around it; 1: whole; auto: as
    # many as still lower the planned peak
    tiles: str = "1"
    offload: OffloadConfig = field(default_factory=OffloadConfig)


@dataclass(kw_only=True)
class PeftConfig:
    """Parameter-efficient fine-tuning with the peft library: the base model is frozen, adapters are trained."""

    method: PeftMethod = PeftMethod.none  # what is trained
    r: int = 16  # rank of the adapters
    alpha: int = 32  # scale of the adapters: their output is multiplied by alpha / r
    lr: float | None = None  # what optim.lr becomes where the command line chooses peft, and not optim.lr
    dropout: float = 0.0  # probability, on the adapters' input
    # modules that get adapters; an empty list: every Linear of the decoder layers
    target_modules: list[str] = field(default_factory=list)
    # modules outside the layers that are trained whole: embed_tokens, lm_head
    modules_to_save: list[str] = field(default_factory=list)
    rslora: bool = False  # scale adapters by alpha / sqrt(r), not alpha / r (Kalajdzievski 2023)
    dora: bool = False  # train magnitudes beside directions (Liu et al. 2024); not under ZeRO-3, not in 4 bits


@dataclass(kw_only=True)
class DeepSpeedConfig:
    """A memory strategy from `ds_configs/` (or a path to any JSON) and changes to it."""

    config: str = "zero2"  # a file of `ds_configs/` by its name, or a path to any JSON
    # keys of DeepSpeed's config that replace the file's
    overrides: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class HardwareConfig:
    """The machine a recipe is meant for. `this_machine` (all None) means: whatever is found at launch."""

    name: str = "this_machine"  # name of the machine in plans
    gpu: str | None = None  # name of the GPU as torch.cuda.get_device_name() reports it
    gpu_memory_gib: float | None = None  # memory of one GPU
    gpus_per_node: int | None = None  # number of GPUs in a node
    num_nodes: int = 1  # number of nodes
    host_memory_gib: float | None = None  # host memory of a node
    nvme_path: str | None = None  # folder on a fast local disk, for zero3_nvme
    # copies from pinned host memory to one GPU; GB = 1e9 bytes, null: unknown
    pcie_h2d_gbs: float | None = None
    pcie_d2h_gbs: float | None = None  # copies from one GPU to pinned host memory
    gpus_per_pcie_link: int = 1  # number of GPUs that share such a link
    gpu_link_gbs: float | None = None  # bus bandwidth of collectives inside a node, per GPU and direction
    nic_gbs: float | None = None  # all network ports of a node together, one direction
    dram_gbs: float | None = None  # bandwidth of a node's host memory
    # how fast Adam on the CPU updates parameters, all ranks of a node together
    cpu_adam_gparams_s: float | None = None
    nvme_read_gbs: float | None = None  # reading from all disks of a node together
    nvme_write_gbs: float | None = None  # writing to all disks of a node together
    nvme_gib: float | None = None  # room on the disks of a node
    # measured rates of the GPU in place of those in conf/hardware/gpus/gpus.yaml
    gpu_rates: dict[str, float] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # where each figure above is from

    @property
    def ranks(self) -> int:
        """Return the number of ranks, one per GPU; a node whose number of GPUs is not given counts as one GPU."""
        return (self.gpus_per_node or 1) * self.num_nodes


@dataclass(kw_only=True)
class AllocatorConfig:
    """How torch takes memory on a GPU. PYTORCH_ALLOC_CONF of the environment, where it is set, counts instead."""

    expandable_segments: bool = True  # grow segments instead of adding new ones: fewer gaps between tensors
    # take pinned host memory at its size, not rounded up to a power of two; needs torch 2.13 or newer
    exact_pinned: bool = True


@dataclass(kw_only=True)
class ProfileConfig:
    """Memory and time of a few steps, in detail, under RUN_DIR/profile. What is profiled is slower."""

    memory: bool = False  # the allocator's history, also when memory runs out; needs a GPU
    trace: bool = False  # a Chrome trace, each phase a range
    summary: bool = False  # tables by operation, and the allocator's summary
    after: int = 4  # [steps] how many pass first: the first, and the fourth of ZeRO-3, are watched op by op
    steps: int = 2  # [steps] how many are profiled
    nvml_interval_s: float = 0.0  # time between samples of the GPU driver's figures; 0: none


@dataclass(kw_only=True)
class TrackingConfig:
    """Weights & Biases and TensorBoard beside `metrics.jsonl`, which is always written."""

    wandb: WandbMode = WandbMode.offline  # whether Weights & Biases gets the metrics
    project: str = "remat"  # name of the W&B project
    entity: str | None = None  # W&B user or team; null: your default
    tags: list[str] = field(default_factory=list)  # tags of the W&B run
    tensorboard: bool = False  # write the same metrics as events to RUN_DIR/tensorboard too


@dataclass(kw_only=True)
class SaveConfig:
    """When training state is saved, how many states stay, and whether the model is exported at the end."""

    every: int = 0  # [steps] how far saves are apart; 0: only at the end
    at_end: bool = True  # save after the last step
    keep: int = 2  # [saved states] how many stay; older ones are deleted
    on_error: SaveFailure = SaveFailure.stop  # what a save that fails does to the run
    # save, export and read back after the first step; null: if above 1e9 parameters
    rehearse: bool | None = None
    in_background: bool = False  # flush, hash and name a state while training goes on
    best: bool = False  # export the model of the lowest held-out loss, to RUN_DIR/best
    export: bool = False  # write Hugging Face safetensors after the last step
    # write adapters merged into their base, as a plain model, to RUN_DIR/merged after the last step
    merge: bool = False
    max_shard_size: str = "5GB"  # largest file of an export, 5GB for example


@dataclass(kw_only=True)
class RunConfig:
    """All options of a run. What composes, plans or builds a run takes it whole; other modules take their section."""

    name: str = ""  # the run's folder is outputs/NAME/RUN_ID; empty: the name of the recipe
    meta: MetaConfig = field(default_factory=MetaConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpointing: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    peft: PeftConfig = field(default_factory=PeftConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    # whether ZeRO stage, offload, checkpointing and micro-batch are found
    strategy: StrategyChoice = StrategyChoice.given
    compile: Compilation = Compilation.none  # what torch.compile makes kernels of
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    allocator: AllocatorConfig = field(default_factory=AllocatorConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    output_dir: str = "outputs"  # folder of all runs
    run_id: str | None = None  # name of the run's folder; null: the launch time
    # where to go on: none, auto (newest complete state of this recipe), auto_or_start, or a folder of a run or state
    resume: str = "none"
    reshard: Reshard = Reshard.auto  # what becomes of a state saved with a different number of ranks
    # what `remat launch` does when a rank runs out of memory
    on_out_of_memory: OnOutOfMemory = OnOutOfMemory.stop
    most_retreats: int = 3  # [launches] how often on_out_of_memory=retreat starts a run again
    force: bool = False  # start although preflight says it does not fit
    log_level: LogLevel = LogLevel.info  # how much the terminal shows
