"""Read back an export and its saved state: check names, shapes, ties, finite numbers, and equal weights in both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from remat.saving import manifest
from remat.saving.exports import export, hf_files


def verify_export(
    module: Any, exported: Path, state: Path, run_dir: Path, *, max_shard_size: str, part: int, parts: int
) -> str | None:
    """Return the first difference between the live `module`, its export and its saved state; None without any.

    `part` of `parts` reads only every parts-th weight, so that ranks can share the reading. The state is compared with
    the export unless only a running engine can read it. Host memory holds one weight in fp32, one in its own
    precision and a window of file pages. When transformers fuses weights, it holds decoder layers instead of weights,
    and only part 0 reads. No collectives.
    """
    dtype = export.dtype_of(module)
    plan, files = export.live_plan(module, dtype, max_shard_size), _files(exported)
    found = _other_names(plan, files) or _other_config(module, exported, plan, max_shard_size)
    if found is not None:
        return found
    if not _readable_without_engine(module, state):
        wrong = (_wrong(name, files[name], plan, None) for name in sorted(files)[part::parts])
        return next((text for text in wrong if text is not None), None)
    _, read = export.open_saved_state(state, run_dir, export.Form(max_shard_size, dtype))
    if max(len(unit) for unit in plan.units) > 1:
        part, parts = (0, 1) if part == 0 else (len(plan.units), parts)
    for unit in plan.units[part::parts]:
        for name, value in plan.convert({name: read(name) for name in unit}).items():
            if (found := _wrong(name, files[name], plan, value)) is not None:
                return found
    return None


def _files(exported: Path) -> dict[str, Path]:
    """Return {name of a weight: file}, as a loader finds it: through the index, or in the only file."""
    index = exported / hf_files.INDEX
    if index.exists():
        return {name: exported / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    (only,) = exported.glob("*.safetensors")
    with safe_open(only, framework="pt") as reader:
        return dict.fromkeys(reader.keys(), only)


def _other_names(plan: hf_files.Plan, files: dict[str, Path]) -> str | None:
    for what, names in (
        ("lacks", plan.shapes.keys() - files.keys()),
        ("adds", files.keys() - plan.shapes.keys()),
    ):
        if names:
            return f"the export {what} {min(names)} (and {len(names) - 1} more)"
    return None


def _other_config(module: Any, exported: Path, plan: hf_files.Plan, max_shard_size: str) -> str | None:
    """Return a difference in names or ties between `plan` and the model that the exported config.json describes."""
    if hf_files.find_adapter_config(module) is not None or module.is_remote_code():
        return None
    config, conversions = AutoConfig.from_pretrained(exported), getattr(module, "_weight_conversions", None)
    built = hf_files.plan(type(module), config, export.dtype_of(module), max_shard_size, conversions)
    if built.shapes != plan.shapes:
        return "the exported config.json describes other weights than the trained model has"
    if built.tied != plan.tied:
        return f"the exported config.json ties {built.tied}, the trained model {plan.tied}"
    return None


def _readable_without_engine(module: Any, state: Path) -> bool:
    """Return whether `remat export` can read the state.

    It reads neither DeepSpeed's NVMe files nor a model whose code comes with its weights.
    """
    if hf_files.find_adapter_config(module) is None and module.is_remote_code():
        return False
    return not manifest.read(state).on_nvme


def _wrong(name: str, file: Path, plan: hf_files.Plan, saved: torch.Tensor | None) -> str | None:
    """Return what is wrong with one exported weight; `saved` is the same weight in the saved state."""
    try:
        with safe_open(file, framework="pt") as reader:
            value = reader.get_tensor(name)
    except (OSError, SafetensorError) as error:
        return f"{name} cannot be read from {file.name}: {error}"
    if value.shape != plan.shapes[name]:
        return f"{name} was exported as {tuple(value.shape)}, the model has {tuple(plan.shapes[name])}"
    if not bool(torch.isfinite(value).all()):
        return f"{name} was exported with numbers that are not finite"
    if saved is not None and not torch.equal(saved.to(value.dtype), value):
        return f"{name} is not the same in the saved state and in the export"
    return None
