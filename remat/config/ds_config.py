"""DeepSpeed configuration: a file in the Hugging Face "auto" vocabulary becomes one complete, explicit dict.

Dict in, dict out: nothing here touches a device or imports DeepSpeed. Precedence, weakest first: the JSON file,
`deepspeed.overrides` (deep merge; null deletes a key), the values the run owns. No "auto" is left, and every value
whose default could matter is written, so the dict does not depend on DeepSpeed's defaults.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remat.config import ds_defaults, ds_problems
from remat.config.choices import Precision
from remat.config.ds_defaults import OFFLOADS, ZERO
from remat.config.options import ConfigError


@dataclass(frozen=True, kw_only=True)
class RunValues:
    """What the run decides and a memory strategy does not. Sizes in blocks, ranks and elements.

    `pin_memory_possible` is false without CUDA: torch pins host memory for an accelerator only, so pin_memory is
    then written as false. `largest_param`, when given, is checked against the NVMe parameter buffers.
    """

    world_size: int
    micro_batch_size: int
    global_batch_size: int
    gradient_clipping: float
    precision: Precision
    hidden_size: int
    nvme_path: str | None = None
    pin_memory_possible: bool = True
    largest_param: int | None = None


def load(name_or_path: str, folder: Path) -> dict[str, Any]:
    """The JSON named by `deepspeed.config`: a stem in `folder`, or a path that ends in .json.

    Raises ConfigError: unknown name (with the choices), unreadable file, invalid JSON (file and line), double keys.
    """
    if name_or_path.endswith(".json"):
        path = Path(name_or_path).expanduser()
        if not path.is_file():
            raise ConfigError(f"deepspeed.config={name_or_path}: no such file; give a path to a JSON file")
    else:
        path = folder / f"{name_or_path}.json"
        choices = sorted(p.stem for p in folder.glob("*.json"))
        if name_or_path not in choices:
            raise ConfigError(
                f"deepspeed.config={name_or_path}: no such configuration{ds_problems.close(name_or_path, choices)}; "
                f"choices: {', '.join(choices)}, or a path that ends in .json"
            )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}, line {error.lineno}, column {error.colno}: invalid JSON, {error.msg}"
        ) from error
    except (_DoubleKeyError, OSError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: the file must hold one JSON object, found {type(raw).__name__}")
    return raw


def render(raw: Mapping[str, Any], overrides: Mapping[str, Any], values: RunValues) -> dict[str, Any]:
    """The complete dict for `deepspeed.initialize(config=...)` or, as a file, `--deepspeed_config`.

    Raises one ConfigError with every problem, one per line.
    """
    rendered, found = _render(raw, overrides, values)
    if found:
        raise ConfigError("\n".join(found))
    return rendered


def problems(raw: Mapping[str, Any], overrides: Mapping[str, Any], values: RunValues) -> list[str]:
    """Why `render` would refuse; each entry names key, value and remedy."""
    return _render(raw, overrides, values)[1]


def gradient_accumulation(values: RunValues) -> int:
    """Micro-batches per optimizer step: global batch / (micro batch * ranks).

    Raises ConfigError with all three values and the nearest valid ones when that is not a whole number.
    """
    micro, batch, ranks = values.micro_batch_size, values.global_batch_size, values.world_size
    step = micro * ranks
    if batch % step == 0 and batch >= step:
        return batch // step
    batches = [n for n in (batch // step * step, (batch // step + 1) * step) if n > 0]
    remedy = f"use train.global_batch_size={' or '.join(map(str, batches))}"
    if batch % ranks == 0 and batch >= ranks:
        valid = [n for n in range(1, batch // ranks + 1) if (batch // ranks) % n == 0]
        near = [*[n for n in valid if n < micro][-1:], *[n for n in valid if n > micro][:1]]
        remedy += f", or train.micro_batch_size={' or '.join(map(str, near))}"
    raise ConfigError(
        f"train.global_batch_size={batch} is not a multiple of train.micro_batch_size={micro} x {ranks} ranks "
        f"= {step}: {remedy}"
    )


def zero_stage(ds: Mapping[str, Any]) -> int:
    """The ZeRO stage of a rendered dict: 0 (off), 1, 2 or 3."""
    return int(ds.get(ZERO, {}).get("stage", 0))


def optimizer_offload_device(ds: Mapping[str, Any]) -> str | None:
    """Where a rendered dict keeps the optimizer state off the GPU: "cpu", "nvme" or None."""
    return _offload_device(ds, "offload_optimizer")


def param_offload_device(ds: Mapping[str, Any]) -> str | None:
    """Where a rendered dict keeps the parameters off the GPU: "cpu", "nvme" or None."""
    return _offload_device(ds, "offload_param")


def _offload_device(ds: Mapping[str, Any], section: str) -> str | None:
    device = (ds.get(ZERO, {}).get(section) or {}).get("device", "none")
    return None if device == "none" else str(device)


def _render(
    raw: Mapping[str, Any], overrides: Mapping[str, Any], values: RunValues
) -> tuple[dict[str, Any], list[str]]:
    merged = _merge(raw, overrides)
    unknown = ds_problems.unknown_at_top(merged)
    found = ds_problems.stage(merged)
    if found:
        return {}, [*unknown, *found, *_accumulation_problem(values)]
    zero = merged[ZERO]
    defaults = ds_defaults.defaults(zero["stage"], {name: zero.get(name) for name in OFFLOADS})
    found = ds_problems.sections(merged, defaults)
    if found:
        return {}, [*unknown, *found, *_accumulation_problem(values)]
    found = [
        *unknown,
        *ds_problems.unknown_inside(merged, zero["stage"]),
        *ds_problems.offload(
            zero, nvme_path=values.nvme_path, largest_param=values.largest_param, world_size=values.world_size
        ),
    ]
    ds = _merge(defaults, merged)
    for section in OFFLOADS:  # one that moves nothing is the same as none
        if ds_problems.get(ds, f"{ZERO}.{section}.device") == "none":
            del ds[ZERO][section], defaults[ZERO][section]
    found += _fill(ds, values)
    found += ds_problems.types(ds, defaults)
    found += ds_problems.fixed(ds, defaults)
    found += ds_problems.combinations(ds, ds_defaults.DTYPE[values.precision])
    found += ds_problems.secrets(ds)
    found += ds_problems.leftover_auto(ds)
    return {key: ds[key] for key in sorted(ds, key=_reading_order)}, found


def _reading_order(key: str) -> int:
    first = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
    order = (*first, "bf16", "fp16", ZERO, "aio")
    return order.index(key) if key in order else len(order)


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it, objects key by key; null deletes."""
    merged = copy.deepcopy(dict(base))
    for key, value in changes.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            inside = merged.get(key)
            merged[key] = _merge(inside if isinstance(inside, dict) else {}, value)
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
    """Write what the run, the machine and the model decide; a literal that says otherwise is a problem."""
    dtype = ds_defaults.DTYPE[values.precision]
    ds.setdefault("steps_per_print", None)  # the run prints its own rows
    ds.setdefault("communication_data_type", dtype)
    ds.setdefault("data_types", {}).setdefault("grad_accum_dtype", dtype)
    for inside in (ds[ZERO][section] for section in OFFLOADS if section in ds[ZERO]):
        if not values.pin_memory_possible:
            inside["pin_memory"] = False
        if inside["device"] == "nvme":
            inside["nvme_path"] = values.nvme_path  # the file holds a placeholder
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
        "gradient_accumulation_steps": "auto" if found else gradient_accumulation(values),
        "gradient_clipping": values.gradient_clipping,
        "bf16.enabled": values.precision is Precision.bf16,
        "fp16.enabled": values.precision is Precision.fp16,
    }
    if ds["bf16"]["enabled"] is True and ds["fp16"]["enabled"] is True:
        found.append('bf16.enabled=true and fp16.enabled=true: write "auto" in both, train.precision chooses')
        ds["bf16"]["enabled"] = ds["fp16"]["enabled"] = "auto"
    for path, value in owned.items():
        given = ds_problems.get(ds, path)
        if given is not None and given != "auto" and value != "auto":
            found += ds_problems.contradiction(path, given, value, values.precision)
        section, _, key = path.rpartition(".")
        (ds[section] if section else ds)[key] = value
    if owned["gradient_accumulation_steps"] == "auto":
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
