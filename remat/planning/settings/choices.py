"""List single changes to a run that alter its memory or time: as overrides, and as changes to a composed run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from remat.config import compose, ds_config, resumed
from remat.config.options import (
    ConfigError,
    LossKind,
    OptimName,
    OptimStates,
    PeftMethod,
    Precision,
    RunConfig,
)

SAVING_MOST = ("=full", "=offload")
SHORTEST_SEQ_LEN = 256
LONGEST_MICRO_BATCH = 65536  # tokens
AXES = ("train.loss", "train.micro_batch_size", "deepspeed.config", "checkpointing")  # that train the same
MOVING = "budget checkpointing.offload.enabled=true"  # tables that may move values to the host
# The least recomputation comes first. Of policies that differ only in their implementation, one is listed.
POLICIES = (
    "none", "budget", MOVING, "discard_output", "selective_modules", "block", "selective_linears", "interval",
    "selective_ops", "full", "offload", "uniform", "sqrt",
)  # fmt: skip
IN_SLICES = "full checkpointing.tiles=auto"  # trains the same within rounding: tried if nothing else fits
# Tables can keep what these policies keep, with fewer bytes: these are skipped if tables can be chosen.
OUTDONE_BY_TABLES = (
    "discard_output", "selective_modules", "block", "selective_linears", "interval", "selective_ops",
)  # fmt: skip
ZERO = "deepspeed.overrides.zero_optimization"


@dataclass(frozen=True)
class Option:
    """One change to a run. Options with the same `axis` exclude each other.

    `words` are overrides; `apply` makes the same change to a composed run.
    """

    axis: str
    words: tuple[str, ...]
    apply: Callable[[RunConfig], RunConfig]


def same_training(args: Sequence[str], cfg: RunConfig) -> dict[str, list[Option | None]]:
    """Return the values of each axis that train the same; None is the present value.

    Micro-batches come smallest first, policies with the least recomputation first.
    """
    values = (_losses(cfg), _micro_batches(cfg), strategies(cfg), policies(args, cfg, POLICIES))
    return dict(zip(AXES, values, strict=True))


def saving_most(axes: Mapping[str, list[Option | None]]) -> dict[str, list[Option | None]]:
    """Return the values of the axes that need least memory, and the present policy."""
    small = [o for o in axes["checkpointing"] if o is None or o.words[0].endswith(SAVING_MOST)]
    return dict(axes) | {
        "train.loss": axes["train.loss"][-1:],
        "train.micro_batch_size": axes["train.micro_batch_size"][:1],
        "checkpointing": small,
    }


def keep_everything(args: Sequence[str], cfg: RunConfig) -> tuple[Option, ...] | None:
    """Return the change to a run that recomputes and offloads nothing: none, (), if `cfg` is one.

    None: `args` set an option of checkpointing that such a run does not read.
    """
    words = ("checkpointing=none",)
    with contextlib.suppress(ConfigError):
        chosen = composed(args, words).checkpointing
        return () if chosen == cfg.checkpointing else (_section("checkpointing", words, chosen),)
    return None


def other_training(args: Sequence[str], cfg: RunConfig) -> list[list[Option]]:
    """Return the changes of the sequence length and those to adapters, one list for each axis, the smallest first."""
    return [_seq_lens(cfg), _adapters(args, cfg)]


def smaller_states(cfg: RunConfig) -> list[list[Option]]:
    """Return the changes to smaller optimizer states, one list for each axis, the closest to fp32 states first."""
    optim = cfg.optim
    if optim.name is not OptimName.adamw or optim.states is not OptimStates.fp32:
        return []
    found = [[_option("optim.name", OptimName.adamw_8bit)]]
    if cfg.train.precision is Precision.bf16:
        found.append([_option("optim.states", each) for each in (OptimStates.bf16_master, OptimStates.bf16)])
    return found


def machines(args: Sequence[str], cfg: RunConfig) -> list[Option]:
    """Return the machines of conf/hardware, smallest first; none if `args` set single `hardware` options."""
    if any(word.lstrip("+").startswith("hardware.") for word in args):
        return []
    found: list[tuple[tuple[float, float, float], Option]] = []
    for name in compose.group_choices()["hardware"]:
        words = (f"hardware={name}",)
        machine = composed(args, words).hardware
        if machine.gpu_memory_gib is None or machine == cfg.hardware:
            continue
        gpus = (machine.gpus_per_node or 1) * machine.num_nodes
        size = (gpus, machine.gpu_memory_gib, machine.host_memory_gib or 0.0)
        found.append((size, _section("hardware", words, machine)))
    return [option for _, option in sorted(found, key=lambda entry: entry[0])]


def _section(name: str, words: tuple[str, ...], chosen: Any) -> Option:
    """Return the change of a whole section to `chosen`, which `words` compose to."""
    return Option(name, words, lambda cfg: replace(cfg, **{name: chosen}))


def _option(name: str, value: Any) -> Option:
    """Return the change of `section.option` to `value`."""
    section, _, option = name.partition(".")

    def apply(cfg: RunConfig) -> RunConfig:
        return replace(cfg, **{section: replace(getattr(cfg, section), **{option: value})})

    return Option(name, (f"{name}={value}",), apply)


def composed(args: Sequence[str], words: Sequence[str]) -> RunConfig:
    """Return the run of `args` with `words` after them. Raises ConfigError."""
    return compose.from_command_line([*args, *words]).run


def joined(words: Sequence[str], more: Sequence[str]) -> tuple[str, ...]:
    """Return `words` and `more`, without those of `words` whose option `more` sets too."""
    options = {word.partition("=")[0] for word in more}
    return (*(word for word in words if word.partition("=")[0] not in options), *more)


def policies(args: Sequence[str], cfg: RunConfig, names: Sequence[str]) -> list[Option | None]:
    """Return the policies of activation checkpointing in `names` and the present one, None, as in `same_training`."""
    found: list[Option | None] = []
    known = []
    for name in names:
        words = tuple(f"checkpointing={name}".split())
        try:
            chosen = composed(args, words).checkpointing
        except ConfigError:  # `args` set an option that only the present policy reads
            continue
        if chosen in known:  # `args` say already that values may move
            continue
        known.append(chosen)
        found.append(None if chosen == cfg.checkpointing else _section("checkpointing", words, chosen))
    return found if None in found else [*found, None]


def _losses(cfg: RunConfig) -> list[Option | None]:
    if cfg.train.loss is LossKind.chunked:
        return [None]
    return [None, _option("train.loss", LossKind.chunked)]


def _micro_batches(cfg: RunConfig) -> list[Option | None]:
    """Return the micro-batch sizes that divide a rank's share of the global batch, and the present size."""
    train, now = cfg.train, cfg.train.micro_batch_size
    shared_by = train.tensor_parallel_size * train.sequence_parallel_size * train.pipeline_parallel_size
    share = train.global_batch_size // max(1, cfg.hardware.ranks // shared_by)
    most = max(now, LONGEST_MICRO_BATCH // train.seq_len)
    return [
        None if size == now else _option("train.micro_batch_size", size)
        for size in range(1, min(share, most) + 1)
        if share % size == 0 or size == now
    ]


def strategies(cfg: RunConfig) -> list[Option | None]:
    """Return the files of ds_configs/; on several nodes, also ZeRO-3 with a second copy of the weights in each node."""
    names = sorted({path.stem for path in compose.DS_CONFIG_DIR.glob("*.json")} | {cfg.deepspeed.config})
    now = ds_config.second_shard_ranks(_raw(cfg, cfg.deepspeed.config))
    present = (cfg.deepspeed.config, now)
    pairs = [(name, size) for name in names for size in _second_shards(cfg, name, now)]
    return [None, *(_strategy(cfg, *pair, present) for pair in pairs if pair != present)]


def _raw(cfg: RunConfig, name: str) -> dict[str, Any]:
    return ds_config.merge(ds_config.load(name, compose.DS_CONFIG_DIR), cfg.deepspeed.overrides)


def _second_shards(cfg: RunConfig, name: str, now: int) -> tuple[int, ...]:
    """Return how many ranks may share a second copy of the weights with the strategy `name`; 1: there is none."""
    machine = cfg.hardware
    if machine.num_nodes == 1 or cfg.train.tensor_parallel_size > 1:
        return (now,)
    raw = _raw(cfg, name)
    if ds_config.zero_stage(raw) < 3 or ds_config.param_offload_device(raw) == "nvme":
        return (1,)
    return tuple(sorted({1, machine.gpus_per_node or 1}))


def _strategy(cfg: RunConfig, name: str, size: int, present: tuple[str, int]) -> Option:
    """Return the change to the strategy `name`, and to `size` ranks that share a second copy of the weights."""
    words, overrides = [], cfg.deepspeed.overrides
    if name != present[0]:
        words.append(f"deepspeed.config={name}")
    if size != present[1]:
        value = size if size > 1 else None  # below ZeRO-3 nothing reads it
        words.append(f"{ZERO}.{ds_config.SECOND_SHARDS}={size if size > 1 else 'null'}")
        overrides = _merged(overrides, {"zero_optimization": {ds_config.SECOND_SHARDS: value}})
    changed = replace(cfg.deepspeed, config=name, overrides=overrides)
    return Option("deepspeed.config", tuple(words), lambda cfg: replace(cfg, deepspeed=changed))


def zero_sizes() -> list[Option]:
    """Return the changes that let ZeRO-3 keep less gathered, and that avoid the rounding of pinned host memory.

    `apply` raises ConfigError where a change would have no effect.
    """
    changes: list[tuple[str, dict[str, Any]]] = [
        ("deepspeed.overrides (gathers)", {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}),
        ("deepspeed.overrides (pinning)", {"offload_optimizer": {"pin_memory": False}}),
    ]
    return [
        Option(
            axis,
            tuple(f"{name}={str(value).lower()}" for name, value in resumed.flat(values, ZERO).items()),
            partial(_resize, values),
        )
        for axis, values in changes
    ]


def _resize(values: dict[str, Any], cfg: RunConfig) -> RunConfig:
    """Return `cfg` with the sizes replaced. Raises ConfigError where a value would have no effect."""
    zero = ds_config.load(cfg.deepspeed.config, compose.DS_CONFIG_DIR).get("zero_optimization", {})
    for name in values:
        if name not in zero:
            raise ConfigError(f"{ZERO}.{name} has no effect with deepspeed.config={cfg.deepspeed.config}")
    merged = _merged(cfg.deepspeed.overrides, {"zero_optimization": values})
    return replace(cfg, deepspeed=replace(cfg.deepspeed, overrides=merged))


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for name, value in changes.items():
        result[name] = _merged(result.get(name) or {}, value) if isinstance(value, dict) else value
    return result


def _seq_lens(cfg: RunConfig) -> list[Option]:
    """Return changes to half, a quarter and an eighth of the sequence length."""
    lengths = [cfg.train.seq_len // part for part in (2, 4, 8)]
    return [_option("train.seq_len", n) for n in lengths if n >= SHORTEST_SEQ_LEN]


def _adapters(args: Sequence[str], cfg: RunConfig) -> list[Option]:
    """Return a change to each other method of conf/peft that trains adapters."""
    found = []
    for name in compose.group_choices()["peft"]:
        words = (f"peft={name}",)
        try:
            chosen = composed(args, words).peft
        except ConfigError:
            continue
        if chosen.method not in (PeftMethod.none, cfg.peft.method):
            found.append(_section("peft", words, chosen))
    return found
