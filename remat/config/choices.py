"""The values that an option of a run may take, where they are a closed set of words. Standard library only."""

from __future__ import annotations

from enum import StrEnum


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
    text = "text"
    jsonl = "jsonl"
    parquet = "parquet"
    hub = "hub"
    synthetic = "synthetic"


class DataFormat(StrEnum):
    plain = "plain"
    alpaca = "alpaca"
    chat = "chat"


class Packing(StrEnum):
    documents = "documents"  # positions restart with each document and attention stays within it
    stream = "stream"  # one text: a document sees those before it in its block


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
