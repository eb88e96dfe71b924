"""Render DeepSpeed's configuration: a JSON file with Hugging Face's "auto" values becomes a complete, explicit dict.

Nothing here touches a device or imports DeepSpeed. Precedence, weakest first: the JSON file, `deepspeed.overrides`
(deep merge; null deletes a key, also in the file), the values the run owns. No "auto" is left, and every value whose
default could matter is written, so the dict does not depend on DeepSpeed's defaults. Each problem is a line that names
key, value and remedy.
"""

from __future__ import annotations

import copy
import difflib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remat.config import ds_defaults, paths
from remat.config.ds_defaults import OFFLOADS, SECOND_SHARDS, ZERO
from remat.config.options import ConfigError, OptimName, OptimStates, Precision, RunConfig
from remat.config.redact import is_secret
from remat.config.resumed import flat
from remat.config.units import format_count

DEVICES = ("none", "cpu", "nvme")
DEEPSPEEDS_BUFFER = 100_000_000  # elements: its default of offload_param.buffer_size, where no model is known
OPTIMIZER_SWAP_BUFFERS = 4  # master, two moments and the gradient of one sub-group are swapped in together


@dataclass(frozen=True, kw_only=True)
class RunValues:
    """Values that the run's options decide, and not the DeepSpeed file. Sizes in blocks, ranks and elements.

    `world_size` counts the ranks that read data of their own. Where ranks share layers or sequences it counts their
    groups, each of `ranks_per_group` ranks. None: not known yet; then values that depend on it are neither checked
    nor filled in. ZeRO divides parameters that lie on NVMe among the ranks of all groups.
    `pin_memory_possible` is false without CUDA: torch pins host memory for an accelerator only, so pin_memory is
    then written as false. `largest_param`, when given, is checked against the NVMe parameter buffers.
    `optimizer` is optim.name: ZeRO must be told to take one that DeepSpeed has not tested. `states` is optim.states.
    """

    world_size: int | None
    micro_batch_size: int
    global_batch_size: int
    gradient_clipping: float
    precision: Precision
    hidden_size: int
    nvme_path: str | None = None
    pin_memory_possible: bool = True
    largest_param: int | None = None
    optimizer: OptimName = OptimName.adamw
    states: OptimStates = OptimStates.fp32
    ranks_per_group: int = 1


def values_of(
    cfg: RunConfig,
    *,
    world_size: int | None,
    hidden_size: int,
    can_pin: bool = True,
    largest_param: int | None = None,
) -> RunValues:
    """Return the values that a run of `world_size` ranks owns; ranks that share layers or sequences count as one."""
    sizes = {
        "train.pipeline_parallel_size": cfg.train.pipeline_parallel_size,
        "train.sequence_parallel_size": cfg.train.sequence_parallel_size,
        "train.tensor_parallel_size": cfg.train.tensor_parallel_size,
    }
    if world_size is not None:
        for option, size in sizes.items():
            world_size = count_data_ranks(size, world_size, option=option)
    return RunValues(
        world_size=world_size,
        micro_batch_size=cfg.train.micro_batch_size,
        global_batch_size=cfg.train.global_batch_size,
        gradient_clipping=cfg.optim.gradient_clipping,
        precision=cfg.train.precision,
        hidden_size=hidden_size,
        nvme_path=cfg.hardware.nvme_path,
        pin_memory_possible=can_pin,
        largest_param=largest_param,
        optimizer=cfg.optim.name,
        states=cfg.optim.states,
        ranks_per_group=math.prod(sizes.values()),
    )


def tensor_ranks(ds: Mapping[str, Any]) -> int:
    """Return how many ranks share each layer under the dict that reaches the engine."""
    return int((ds.get("tensor_parallel") or {}).get("autotp_size", 1))


def pipeline_stages(ds: Mapping[str, Any]) -> int:
    """Return into how many stages the layers are divided under the dict that reaches the engine."""
    return int((ds.get("pipeline") or {}).get("stages", 1))


def second_shard_ranks(ds: Mapping[str, Any]) -> int:
    """Return how many ranks share a second copy of the weights (hpZ) under the rendered dict; 1: there is none."""
    return int(ds.get(ZERO, {}).get(SECOND_SHARDS, 1))


def check_second_shards(ds: Mapping[str, Any], *, world_size: int, shared_by: int) -> None:
    """Raise ConfigError when second copies of the weights (hpZ) do not fit `world_size` ranks or other options.

    `shared_by` is the number of ranks that share each layer.
    """
    size = second_shard_ranks(ds)
    if size <= 1:
        return
    asked = f"deepspeed.overrides.{ZERO}.{SECOND_SHARDS}={size}"
    found = []
    if shared_by > 1:
        found.append(
            f"{asked} with train.tensor_parallel_size={shared_by}: DeepSpeed gives the second copy to consecutive "
            "ranks, and those have other parts of each layer; leave one of them at 1"
        )
    elif world_size % size:
        found.append(f"{asked} with {world_size} ranks: give a divisor, usually the GPUs of a node")
    if param_offload_device(ds) == "nvme":
        found.append(
            f"{asked} with parameters on NVMe: the second copy cannot lie there; use deepspeed.config=zero3_offload"
        )
    if found:
        raise ConfigError("\n".join(found))


def count_data_ranks(shared_by: int, world_size: int, *, option: str = "train.tensor_parallel_size") -> int:
    """Count the groups of ranks that read data of their own. Raises ConfigError when ranks are left over."""
    if world_size % shared_by:
        raise ConfigError(
            f"{option}={shared_by}: {format_count(world_size, 'rank')} cannot be divided into groups of "
            f"{shared_by}; start a multiple of {shared_by}"
        )
    return world_size // shared_by


def load(name_or_path: str, folder: Path) -> dict[str, Any]:
    """Read the JSON named by `deepspeed.config`: a stem in `folder`, or a path that ends in .json.

    Raises ConfigError: unknown name (with the choices), unreadable file, invalid JSON (file and line), double keys.
    """
    choices = sorted(path.stem for path in folder.glob("*.json"))
    if name_or_path.endswith(".json"):
        path = paths.expand(name_or_path)
        if not path.is_file():
            raise ConfigError(
                f"deepspeed.config={name_or_path}: no such file; give a path to a JSON file, or one of "
                f"{', '.join(choices)}"
            )
    else:
        path = folder / f"{name_or_path}.json"
        if name_or_path not in choices:
            raise ConfigError(
                f"deepspeed.config={name_or_path}: no such configuration{close(name_or_path, choices)}; "
                f"choices: {', '.join(choices)}, or a path that ends in .json"
            )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"deepspeed.config={name_or_path}: {path}, line {error.lineno}, column {error.colno}: invalid JSON, "
            f"{error.msg}; correct the file"
        ) from error
    except (_DoubleKeyError, OSError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: the file must hold one JSON object, found {type(raw).__name__}")
    return raw


def render(raw: Mapping[str, Any], overrides: Mapping[str, Any], values: RunValues) -> dict[str, Any]:
    """Return the complete dict for `deepspeed.initialize(config=...)` or, as a file, `--deepspeed_config`.

    Raises one ConfigError with every problem, one per line.
    """
    merged = merge(merge({}, raw), overrides)  # null in the file means what it means in an override
    unknown = unknown_at_top(merged)
    if found := stage(merged):
        raise ConfigError("\n".join([*unknown, *found, *_accumulation_problem(values)]))
    zero = merged[ZERO]
    defaults = ds_defaults.defaults(zero["stage"], {name: zero.get(name) for name in OFFLOADS})
    if found := sections(merged, defaults):
        raise ConfigError("\n".join([*unknown, *found, *_accumulation_problem(values)]))
    found = [*unknown, *unknown_inside(merged, zero["stage"]), *offload(zero, values)]
    ds = merge(defaults, merged)
    for section in OFFLOADS:  # one that moves nothing is the same as none
        if get(ds, f"{ZERO}.{section}.device") == "none":
            del ds[ZERO][section], defaults[ZERO][section]
    found += _fill(ds, values)
    found += types(ds, defaults)
    found += fixed(ds, defaults)
    found += combinations(ds, values.precision.value)
    found += secrets(ds)
    found += leftover_auto(ds)
    if found:
        raise ConfigError("\n".join(found))
    return {key: ds[key] for key in sorted(ds, key=_reading_order)}


def _readers(ranks: int, ranks_per_group: int) -> str:
    """Return in words how many ranks or groups read data of their own: `2 ranks`, or `1 group of 4 ranks`."""
    if ranks_per_group == 1:
        return format_count(ranks, "rank")
    return f"{format_count(ranks, 'group')} of {ranks_per_group} ranks"


def gradient_accumulation(values: RunValues) -> int | None:
    """Return the micro-batches of a step: global batch / (micro batch * ranks); None when the ranks are not known.

    Raises ConfigError with all three values and the nearest valid ones when that is not a whole number.
    """
    micro, batch, ranks = values.micro_batch_size, values.global_batch_size, values.world_size
    if ranks is None:
        return None
    step = micro * ranks
    if batch % step == 0 and batch >= step:
        return batch // step
    batches = [n for n in (batch // step * step, (batch // step + 1) * step) if n > 0]
    remedy = f"use train.global_batch_size={' or '.join(map(str, batches))}"
    if batch % ranks == 0 and batch >= ranks:
        valid = [n for n in range(1, batch // ranks + 1) if (batch // ranks) % n == 0]
        near = [*[n for n in valid if n < micro][-1:], *[n for n in valid if n > micro][:1]]
        remedy += f", or train.micro_batch_size={' or '.join(map(str, near))}"
    readers = _readers(ranks, values.ranks_per_group)
    raise ConfigError(
        f"train.global_batch_size={batch} is not a multiple of train.micro_batch_size={micro} x {readers} = {step}: "
        f"{remedy}"
    )


def zero_stage(ds: Mapping[str, Any]) -> int:
    """Return the ZeRO stage of a rendered dict: 0 (off), 1, 2 or 3."""
    return int(ds.get(ZERO, {}).get("stage", 0))


def optimizer_offload_device(ds: Mapping[str, Any]) -> str | None:
    """Return where a rendered dict keeps the optimizer state off the GPU: "cpu", "nvme" or None."""
    return _offload_device(ds, "offload_optimizer")


def offload_ratio(ds: Mapping[str, Any]) -> float:
    """Return the share of the optimizer state that a rendered dict updates on the host; DeepSpeed's default is all."""
    section = ds.get("zero_optimization", {}).get("offload_optimizer") or {}
    return float(section.get("ratio", 1.0))


def param_offload_device(ds: Mapping[str, Any]) -> str | None:
    """Return where a rendered dict keeps the parameters off the GPU: "cpu", "nvme" or None."""
    return _offload_device(ds, "offload_param")


def optimizer_states(ds: Mapping[str, Any]) -> OptimStates:
    """Return the number format of AdamW's states under a rendered dict."""
    bf16 = ds.get("bf16", {})
    if not bf16.get("bf16_master_weights_and_grads"):
        return OptimStates.fp32
    return OptimStates.bf16 if bf16.get("bf16_optimizer_states") else OptimStates.bf16_master


def _offload_device(ds: Mapping[str, Any], section: str) -> str | None:
    device = (ds.get(ZERO, {}).get(section) or {}).get("device", "none")
    return None if device == "none" else str(device)


def _reading_order(key: str) -> int:
    order = (*ds_defaults.OWNED, "bf16", "fp16", ZERO, "aio")
    return order.index(key) if key in order else len(order)


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes` merged in, objects key by key; null deletes a key."""
    merged = copy.deepcopy(dict(base))
    for key, value in changes.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            inside = merged.get(key)
            merged[key] = merge(inside if isinstance(inside, dict) else {}, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def _accumulation_problem(values: RunValues) -> list[str]:
    try:
        gradient_accumulation(values)
    except ConfigError as error:
        return [str(error)]
    return []


def _fill(ds: dict[str, Any], values: RunValues) -> list[str]:
    """Write the values that run, machine and model decide; return a problem for each literal that differs."""
    dtype = values.precision.value  # DeepSpeed names the types so too
    ds.setdefault("steps_per_print", None)  # the run prints its own rows
    ds.setdefault("communication_data_type", dtype)
    ds.setdefault("data_types", {}).setdefault("grad_accum_dtype", dtype)
    if values.optimizer is not OptimName.adamw:
        ds["zero_allow_untested_optimizer"] = True
    for inside in (ds[ZERO][section] for section in OFFLOADS if section in ds[ZERO]):
        if not values.pin_memory_possible:
            inside["pin_memory"] = False
        if inside["device"] == "nvme":
            inside["nvme_path"] = values.nvme_path  # the file holds a placeholder
        if inside.get("buffer_size") == "auto":
            inside["buffer_size"] = _largest_shard(values) or DEEPSPEEDS_BUFFER
    square = values.hidden_size**2
    sizes = {  # as Hugging Face derives them from the model's width
        "reduce_bucket_size": square,
        "stage3_prefetch_bucket_size": int(0.9 * square),
        "stage3_param_persistence_threshold": 10 * values.hidden_size,
    }
    for key, size in sizes.items():
        if ds[ZERO].get(key) == "auto":
            ds[ZERO][key] = size
    return _fill_owned(ds, values)


def _fill_owned(ds: dict[str, Any], values: RunValues) -> list[str]:
    found = _accumulation_problem(values)
    owned: dict[str, Any] = {
        "train_batch_size": values.global_batch_size,
        "train_micro_batch_size_per_gpu": values.micro_batch_size,
        "gradient_accumulation_steps": None if found else gradient_accumulation(values),
        "gradient_clipping": values.gradient_clipping,
        "bf16.enabled": values.precision is Precision.bf16,
        "bf16.bf16_master_weights_and_grads": values.states is not OptimStates.fp32,
        "bf16.bf16_optimizer_states": values.states is OptimStates.bf16,
        "fp16.enabled": values.precision is Precision.fp16,
    }
    if ds["bf16"]["enabled"] is True and ds["fp16"]["enabled"] is True:
        found.append('bf16.enabled=true and fp16.enabled=true: write "auto" in both, train.precision chooses')
        ds["bf16"]["enabled"] = ds["fp16"]["enabled"] = "auto"
    for path, value in owned.items():
        given = get(ds, path)
        if given not in (None, "auto") and value is not None:
            found += contradiction(path, given, value, values)
        section, _, key = path.rpartition(".")
        (ds[section] if section else ds)[key] = value
    if owned["gradient_accumulation_steps"] is None:
        del ds["gradient_accumulation_steps"]  # its problem is reported once, and nothing is rendered
    return found


class _DoubleKeyError(ValueError):
    """JSON allows a key twice and keeps the last; here it is an error."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise _DoubleKeyError(f"written twice in one object: {', '.join(double)}; keep one")
    return dict(pairs)


def close(word: str, choices: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(choices), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def get(ds: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path; None when it is not there."""
    value: Any = ds
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def stage(merged: Mapping[str, Any]) -> list[str]:
    zero = merged.get(ZERO)
    value = zero.get("stage") if isinstance(zero, dict) else None
    if type(value) is int and value in range(4):
        return []
    meant = close("stage", list(zero)) if isinstance(zero, dict) and "stage" not in zero else ""
    slip = f"; {ZERO} has {', '.join(zero)}{meant}" if isinstance(zero, dict) and zero and not value else ""
    return [f"{ZERO}.stage={_word(value)}: write 0, 1, 2 or 3{slip}"]


def unknown_at_top(merged: Mapping[str, Any]) -> list[str]:
    allowed = ds_defaults.top_level()
    found = []
    for key, value in merged.items():
        if key in ds_defaults.REFUSED:
            found.append(f"{key}={_word(value)} is refused: {ds_defaults.REFUSED[key]}")
        elif key not in allowed:
            found.append(f"{key} is no DeepSpeed key{close(key, allowed)}: correct or delete it")
    return found


def unknown_inside(merged: Mapping[str, Any], at_stage: int) -> list[str]:
    """Find unknown keys of `zero_optimization` and of the nested sections, and keys without effect at this stage."""
    allowed = ds_defaults.zero_allowed(at_stage)
    known = ds_defaults.zero_allowed(0) | ds_defaults.zero_allowed(3)
    found, idle = [], []
    for key, value in merged[ZERO].items():
        if key in ds_defaults.ZERO_REFUSED:
            found.append(f"{ZERO}.{key}={_word(value)} is refused: {ds_defaults.ZERO_REFUSED[key]}")
        elif key not in known:
            found.append(f"{ZERO}.{key} is no DeepSpeed key{close(key, allowed)}: correct or delete it")
        elif key not in allowed:
            idle.append(key)
    if idle:
        found.append(
            f"{ZERO}.stage={at_stage} does not read {', '.join(idle)}: delete them, or choose a "
            f"deepspeed.config of {'a lower stage' if at_stage == 3 else 'stage 3'}"
        )
    for path, names in ds_defaults.SECTIONS.items():
        section = get(merged, path)
        if isinstance(section, dict):
            found += [
                f"{path}.{key} is no DeepSpeed key{close(key, names)}: correct or delete it"
                for key in section
                if key not in names
            ]
    return found


def sections(merged: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Find keys that hold an object in DeepSpeed and something else here."""
    found = []
    for key in (*defaults, *(() if prefix else ("data_types",))):
        if isinstance(defaults.get(key, {}), dict) and key in merged:
            if isinstance(merged[key], dict):
                found += sections(merged[key], defaults.get(key, {}), f"{prefix}{key}.")
            elif merged[key] is not None:
                found.append(f"{prefix}{key}={_word(merged[key])}: write an object in braces")
    return found


def offload(zero: Mapping[str, Any], values: RunValues) -> list[str]:
    found = []
    lowest = {"offload_optimizer": 1, "offload_param": 3}
    for section in OFFLOADS:
        inside = zero.get(section)
        if inside is None:
            continue
        path = f"{ZERO}.{section}"
        device = inside.get("device") if isinstance(inside, dict) else None
        if device not in DEVICES:
            found.append(f"{path}.device={_word(device)}: write one of {', '.join(DEVICES)}")
            continue
        needed = 3 if device == "nvme" else lowest[section]
        if device != "none" and zero["stage"] < needed:
            found.append(
                f"{path}.device={device} needs ZeRO stage {needed} or higher, {ZERO}.stage={zero['stage']}: "
                "raise the stage or delete the section"
            )
        elif device == "nvme":
            found += _nvme(path, inside, values.nvme_path)
            if section == "offload_param":
                found += _param_buffer(path, inside, values)
    ratio = get(zero, "offload_optimizer.ratio")
    if zero["stage"] < 3 and ratio not in (None, 1, 1.0):
        found.append(f"{ZERO}.offload_optimizer.ratio={ratio} needs ZeRO stage 3: write 1.0 or raise the stage")
    return found


def _nvme(path: str, inside: Mapping[str, Any], nvme_path: str | None) -> list[str]:
    found = []
    if not nvme_path:
        found.append(
            f"{path}.device=nvme needs hardware.nvme_path, which is not set: give hardware.nvme_path=FOLDER on a "
            "fast local disk, or choose a deepspeed.config that offloads to cpu"
        )
    count = inside.get("buffer_count", OPTIMIZER_SWAP_BUFFERS)
    if path.endswith("offload_optimizer") and isinstance(count, int) and count < OPTIMIZER_SWAP_BUFFERS:
        found.append(
            f"{path}.buffer_count={count} is too small: Adam swaps {OPTIMIZER_SWAP_BUFFERS} tensors at a time; "
            f"write at least {OPTIMIZER_SWAP_BUFFERS}"
        )
    return found


def _param_buffer(path: str, inside: Mapping[str, Any], values: RunValues) -> list[str]:
    """Check that a parameter's shard fits a swap buffer (partitioned_param_swapper.py:304 asserts it while loading)."""
    size, shard, ranks = inside.get("buffer_size"), _largest_shard(values), _sharding_ranks(values)
    if not isinstance(size, (int, float)) or shard is None or shard <= size:
        return []
    return [
        f"{path}.buffer_size={size:.0f} is smaller than the largest parameter's shard, {shard} elements on each of "
        f"{ranks} ranks: set deepspeed.overrides.{path}.buffer_size={shard}"
    ]


def _largest_shard(values: RunValues) -> int | None:
    """Return the elements that a rank holds of the largest parameter; None where model or ranks are not known."""
    ranks = _sharding_ranks(values)
    return math.ceil(values.largest_param / ranks) if values.largest_param is not None and ranks else None


def _sharding_ranks(values: RunValues) -> int | None:
    """Return how many ranks ZeRO divides a parameter on NVMe among; ranks that share layers keep none there."""
    return values.world_size and values.world_size * values.ranks_per_group


def contradiction(path: str, given: Any, value: Any, values: RunValues) -> list[str]:
    """Return the problem of a literal of the file or the overrides that differs from the run's value, if it does."""
    if given == value and isinstance(given, bool) == isinstance(value, bool):
        return []
    option = ds_defaults.OWNED[path]
    said = {"train.precision": values.precision, "optim.states": values.states}.get(option, value)
    return [
        f'{path}={_word(given)} contradicts {option}={said}: write "auto" in the DeepSpeed file or drop the '
        "override; the option decides"
    ]


def types(ds: dict[str, Any], defaults: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Find values of another kind than DeepSpeed reads; whole floats (5e8) become integers in place."""
    found = []
    for key, default in defaults.items():
        value, path = ds.get(key), f"{prefix}{key}"
        if isinstance(default, dict):
            found += types(ds[key], default, f"{path}.")
        elif default == "auto" or value == "auto":
            if key in ds_defaults.SIZES:
                found += _integer(ds, key, path)
        elif isinstance(default, bool):
            if not isinstance(value, bool):
                found.append(f"{path}={_word(value)}: write true or false")
        elif isinstance(default, int):
            found += _integer(ds, key, path)
        elif isinstance(default, float) and (isinstance(value, bool) or not isinstance(value, (int, float))):
            found.append(f"{path}={_word(value)}: write a number")
    return found


def _integer(ds: dict[str, Any], key: str, path: str) -> list[str]:
    value = ds[key]
    if type(value) not in (int, float) or value < 0 or not float(value).is_integer():
        return [f"{path}={_word(value)}: write a whole number, 0 or more"]
    ds[key] = int(value)
    return []


def fixed(ds: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    return [
        f"{path}={_word(get(ds, path))} is not possible: {reason}; delete the key"
        for path, reason in ds_defaults.FIXED.items()
        if get(ds, path) != get(defaults, path)
    ]


def combinations(ds: Mapping[str, Any], dtype: str) -> list[str]:
    """Find pairs that DeepSpeed refuses only after the model is loaded. `dtype` is the run's: fp32, bf16 or fp16."""
    found = [
        f"{path}={_word(get(ds, path))}: write one of {', '.join(ds_defaults.BYTES)}"
        for path in ("communication_data_type", "data_types.grad_accum_dtype")
        if get(ds, path) not in [*ds_defaults.BYTES]  # a list, for values that cannot be hashed
    ]
    accumulated, parameters = ds["data_types"]["grad_accum_dtype"], ds["data_types"].get("param_dtype", dtype)
    if parameters != dtype:
        found.append(
            f"data_types.param_dtype={_word(parameters)} contradicts train.precision={dtype}: delete it"
        )
    if ds[ZERO]["stage"] == 0 and accumulated in [*ds_defaults.BYTES] and accumulated != dtype:
        found.append(
            f"data_types.grad_accum_dtype={accumulated} with train.precision={dtype} needs ZeRO stage 1 or higher: "
            "delete it or raise zero_optimization.stage"
        )
    if ds[ZERO]["stage"] == 0 and dtype == "fp16":
        found.append(
            "train.precision=fp16 with zero_optimization.stage=0: DeepSpeed does not scale the loss there but divides "
            "the gradients by the scale; use stage 1 or higher, or bf16"
        )
    scaled = ds["prescale_gradients"] or ds["gradient_predivide_factor"] != 1.0
    if ds[ZERO]["stage"] >= 2 and ds[ZERO]["reduce_scatter"] and scaled:
        found.append(
            f"prescale_gradients={_word(ds['prescale_gradients'])} and gradient_predivide_factor="
            f"{ds['gradient_predivide_factor']} do not work with reduce_scatter at ZeRO stages 2 and 3: delete them"
        )
    return found


def secrets(ds: Mapping[str, Any]) -> list[str]:
    """Find secrets: DeepSpeed writes its whole config into every saved state."""
    return [
        f"{path} is refused, it would be written into every saved state: set it in the environment and delete the key"
        for path, value in flat(ds).items()
        if value and is_secret(path, value)
    ]


def leftover_auto(ds: Mapping[str, Any]) -> list[str]:
    return [
        f'{path}="auto": nothing fills this key; write a value'
        for path, value in flat(ds).items()
        if value == "auto" and path != "data_types.keep_in_fp32_modules"  # DeepSpeed itself reads "auto" there
    ]


def _word(value: Any) -> str:
    """Write a value as JSON does, shortened."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:37]}..."
