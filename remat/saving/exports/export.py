"""Write the model as a Hugging Face folder that transformers loads: safetensors shards, config, tokenizer.

A model trained through adapters is written as an adapter folder, which peft loads on the base model.

Weights are streamed: all ranks gather one parameter at a time. Each rank writes its share of the files and holds one
file in memory. Where transformers keeps weights fused in the model and separate in the files, as in mixtures of
experts, one decoder layer is gathered at a time. The folder appears complete or not at all.
"""

from __future__ import annotations

import contextlib
import glob
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
from transformers.dynamic_module_utils import custom_object_save

from remat.config.options import ConfigError, Precision
from remat.machine import distributed
from remat.model import adapters, hf_model
from remat.saving import manifest, safe_load, shares
from remat.saving.exports import hf_files
from remat.saving.manifest import ENGINE, SaveError
from remat.saving.state_files import SavedWeights

MODEL_FOLDER = "model"
README = "README.md"
SUFFIX = 8  # hexadecimal digits at the end of an unfinished folder's name
# (name, keep) -> the weight, None unless this rank is to keep it; collective
Read = Callable[[str, bool], torch.Tensor | None]
DTYPES = {str(precision): dtype for precision, dtype in hf_model.DTYPES.items()}


@dataclass(frozen=True)
class Form:
    """How an export is written: the size of its largest file, such as "5GB"; dtype None keeps that of the weights.

    `readme`, called on rank 0, returns the model card that goes with the model.
    """

    max_shard_size: str = "5GB"
    dtype: torch.dtype | None = None
    readme: Callable[[], str] | None = None


@dataclass(frozen=True)
class ExportResult:
    """An exported model: its folder, weight files, their bytes and number of parameters, the seconds it took."""

    path: Path
    files: list[str]
    bytes: int
    num_params: int
    seconds: float


def export(engine: Any, folder: Path, form: Form, *, tokenizer: Any) -> ExportResult:
    """Export the live model to `folder`. Call it on every rank, between steps, at any ZeRO stage.

    For another dtype than that of the weights, values come from the fp32 master copy if there is one. An earlier export
    at `folder` is replaced; raises ConfigError if anything else is there. Raises SaveError on every rank when writing
    fails, or when the weights are not those of a plain model of this config.
    """
    module = hf_model.model_of(engine.module)
    dtype = form.dtype or dtype_of(module)
    plan, adapter = live_plan(module, dtype, form.max_shard_size), hf_files.find_adapter_config(module)
    if adapter is None:
        _check_same_weights(engine, plan)

    def describe(target: Path) -> None:
        if adapter is None:
            return describe_plain(target, module, plan, tokenizer, form)
        hf_files.write_adapter_config(target, adapter)
        return _write_extras(target, tokenizer, None, form.readme)

    with gathering(engine.optimizer):
        return write(plan, engine_reader(engine, dtype), folder, describe)


@contextlib.contextmanager
def gathering(optimizer: Any) -> Iterator[None]:
    """Shard ZeRO-3's small, persistent parameters while inside, as DeepSpeed does while it saves."""
    if hasattr(optimizer, "checkpoint_event_prologue"):
        optimizer.checkpoint_event_prologue()
    try:
        yield
    finally:
        if hasattr(optimizer, "checkpoint_event_epilogue"):
            optimizer.checkpoint_event_epilogue()  # gathers them again


def describe_plain(target: Path, module: Any, plan: hf_files.Plan, tokenizer: Any, form: Form) -> None:
    """Write the files beside the weights of the plain model `module`: config, code, tokenizer, model card."""
    config: Any = plan.skeleton.config  # upstream annotates a dict, but takes a config too
    if module.is_remote_code():
        custom_object_save(module, target, config=config)
    config.save_pretrained(target)
    _write_extras(target, tokenizer, module.generation_config if module.can_generate() else None, form.readme)


def dtype_of(module: nn.Module) -> torch.dtype:
    return next(p.dtype for p in module.parameters() if p.is_floating_point())


def live_plan(module: Any, dtype: torch.dtype, max_shard_size: str) -> hf_files.Plan:
    """Return the plan for an export of this model, or of its adapters."""
    if hf_files.find_adapter_config(module) is not None:
        return hf_files.plan_adapter(module, dtype)
    conversions = getattr(module, "_weight_conversions", None)
    return hf_files.plan(type(module), module.config, dtype, max_shard_size, conversions)


def write_config_and_tokenizer(
    run_dir: Path, model_config: Any, tokenizer: Any, generation_config: Any = None, adapter: Any = None
) -> None:
    """Write config and tokenizer to run_dir/model, where `export_saved_state` reads them. Rank 0 only.

    `adapter` is peft's configuration of the adapters, if the model has any.
    """
    target = run_dir / MODEL_FOLDER
    target.mkdir(parents=True, exist_ok=True)
    if adapter is not None:
        hf_files.write_adapter_config(target, adapter)
    hf_files.inference_config(model_config).save_pretrained(target)
    _write_extras(target, tokenizer, generation_config)


def export_saved_state(
    state_dir: Path, run_dir: Path, folder: Path, form: Form, *, verified: bool = False
) -> ExportResult:
    """Export a saved state without GPU or engine, in one process, by default in the precision of the run.

    `verified`: `find_newest` has just read and hashed every file of the state, so this is not done again.

    Host memory holds one shard, one weight in fp32 (or a decoder layer, as in `export`) and a window of file pages.
    Raises ConfigError when the state or run_dir/model is incomplete, or one of their files asks to run code.
    """
    problems = [] if verified else manifest.verify(state_dir)
    if problems:
        raise ConfigError(f"{state_dir} is not complete: {problems[0]}; choose another saved state")
    described = run_dir / MODEL_FOLDER
    plan, read = open_saved_state(state_dir, run_dir, form)
    refuse_code(state_dir)
    adapted = (described / hf_files.ADAPTER_CONFIG).exists()

    def describe(target: Path) -> None:
        if not adapted:
            plan.skeleton.config.save_pretrained(target)
        copy_extras(described, target, but=["config.json", *(["generation_config.json"] if adapted else [])])
        _write_extras(target, None, None, form.readme)

    return write(plan, lambda name, keep: read(name), folder, describe)


def refuse_code(state_dir: Path) -> None:
    """Raise UnsafeFile when a file of a state asks to run code, even if an export does not read the file."""
    unsafe = safe_load.problem(safe_load.pickled(state_dir))
    if unsafe is not None:
        raise safe_load.UnsafeFile(unsafe)


def copy_extras(source: Path, target: Path, *, but: Collection[str]) -> None:
    """Copy what `write_config_and_tokenizer` wrote to `source`, except the files named."""
    for extra in source.iterdir():
        if extra.name not in but:
            shutil.copy2(extra, target / extra.name)


def open_saved_state(
    state_dir: Path, run_dir: Path, form: Form
) -> tuple[hf_files.Plan, Callable[[str], torch.Tensor]]:
    """Return the plan for an export of a saved state, and a function that reads a weight by name. No collectives.

    Raises ConfigError when the state or run_dir/model is incomplete.
    """
    info = manifest.read(state_dir)
    described = run_dir / MODEL_FOLDER
    if not (described / "config.json").exists():
        raise ConfigError(f"{described}/config.json is missing: give the run directory of {state_dir}")
    config = load_config(described)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if not isinstance(model_class, type):
        raise ConfigError(f"{described}/config.json: {config.model_type} is not one causal language model")
    wanted = form.dtype or DTYPES[info.precision]
    plan = (
        hf_files.plan_adapter(hf_files.build_adapter_skeleton(model_class, config, described), wanted)
        if (described / hf_files.ADAPTER_CONFIG).exists()
        else hf_files.plan(model_class, config, wanted, form.max_shard_size, None)
    )
    weights = _saved_weights(state_dir, info, wanted)
    missing = [name for unit in plan.units for name in unit if name not in weights.names]
    if missing:
        why = "frozen weights are not in the state" if info.frozen_excluded else "the state is of another model"
        raise ConfigError(f"{state_dir} has no {missing[:3]} (of {len(missing)}): {why}")

    def read(name: str) -> torch.Tensor:
        value = weights.read(name)
        return value.to(wanted) if value.is_floating_point() else value

    return plan, read


def load_config(folder: Path) -> Any:
    """Load the model's configuration. Hub code and attention kernels that a config.json can name are not loaded."""
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, attn_implementation="eager")
    except ValueError as error:
        raise ConfigError(f"{folder}/config.json is refused: {str(error).strip().splitlines()[0]}") from error


def _check_same_weights(engine: Any, plan: hf_files.Plan) -> None:
    """Raise SaveError unless the live model has exactly the plain model's weights, shapes and ties. Collective."""
    module = engine.module
    live = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    names = {name for unit in plan.units for name in unit}
    kind = type(hf_model.model_of(module)).__name__
    shapes = {name: shares.whole_shape(value) for name, value in live.items()}
    everywhere = shares.of_stages(engine, (list(module.state_dict()), shapes))
    saved = [name for stage, _ in everywhere for name in stage]
    lost = [n for n in saved if n not in names and n not in plan.tied]
    lost = [n for n in lost if n not in (plan.skeleton._keys_to_ignore_on_save or ())]
    absent = sorted(names.difference(*(held for _, held in everywhere)))
    if lost or absent:
        raise SaveError(f"export: a plain {kind} has no {lost[:3]} and this model has no {absent[:3]}")
    for name, shape in sorted((item for _, held in everywhere for item in held.items() if item[0] in names)):
        if shape != plan.skeleton.get_parameter_or_buffer(name).shape:
            raise SaveError(f"export: {name} has shape {tuple(shape)}, which is not what config.json describes")
    for name, kept in plan.tied.items() if len(everywhere) == 1 else ():  # stages keep a tied weight the same
        if live[name] is not live[kept]:
            raise SaveError(f"export: config.json ties {name} to {kept}, but the trained model holds both")


def engine_reader(engine: Any, dtype: torch.dtype) -> Read:
    """Return a collective function that reads a weight, in `dtype` and on the CPU, for the ranks that keep it."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    module = engine.module
    held = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    masters = _unpartitioned_masters(engine)

    def copy_out(name: str, value: torch.Tensor, *, keep: bool) -> torch.Tensor | None:
        value = shares.gather(held[name], value)
        wanted = dtype if value.is_floating_point() else value.dtype
        return value.detach().to("cpu", wanted, copy=True).contiguous() if keep else None

    def read(name: str, keep: bool) -> torch.Tensor | None:
        value = held[name]
        owner = module.get_submodule(name.rpartition(".")[0])
        if name.endswith(".weight") and adapters.is_quantised(owner):
            with deepspeed.zero.GatheredParameters([value]):  # does nothing for a parameter that is not sharded
                return copy_out(name, adapters.dequantise(owner), keep=keep)
        if value.is_floating_point() and value.dtype != dtype and value.requires_grad:
            master = masters[value] if value in masters else safe_get_full_fp32_param(value)
            if master is not None:
                return copy_out(name, master, keep=keep)
        with deepspeed.zero.GatheredParameters([value]):
            return copy_out(name, value.data, keep=keep)

    return read if shares.stage_count(engine) == 1 else shares.read_over_stages(engine, read, held, dtype)


def _unpartitioned_masters(engine: Any) -> dict[torch.Tensor, torch.Tensor]:
    """Return parameter -> fp32 master, for 16-bit training at ZeRO stage 0, where DeepSpeed has no function for it."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() > 0 or not hasattr(optimizer, "fp16_groups"):
        return {}
    if hasattr(optimizer, "fp32_groups"):
        groups = optimizer.fp32_groups
    else:
        groups = [
            flat.split([p.numel() for p in group])
            for flat, group in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True)
        ]
    return {
        p: master.view(p.shape)
        for group, values in zip(optimizer.fp16_groups, groups, strict=True)
        for p, master in zip(group, values, strict=True)
    }


def _saved_weights(state_dir: Path, info: manifest.Manifest, dtype: torch.dtype) -> SavedWeights:
    if info.on_nvme:
        raise ConfigError(
            f"{state_dir} keeps its fp32 weights in DeepSpeed's NVMe files, which only a running engine can read: "
            "resume the run with save.export=true"
        )
    if info.zero_stage == 0 and dtype != DTYPES[info.precision] and info.precision != str(Precision.fp32):
        raise ConfigError(
            f"{state_dir} was saved at ZeRO stage 0 in {info.precision}, without names for its fp32 copy: "
            f"export in {info.precision}, or set save.export=true to export from the run"
        )
    stages = info.pipeline_parallel_size
    return SavedWeights(state_dir / ENGINE, info.zero_stage, cuts=info.cuts, stages=stages)


def write(plan: hf_files.Plan, read: Read, folder: Path, describe: Callable[[Path], None]) -> ExportResult:
    """Read every unit on all ranks, write each file on one rank, check the files, and rename the folder. Collective.

    An error on any rank raises SaveError on every rank; a `folder` that is no export raises ConfigError.
    """
    started, folder = time.monotonic(), folder.absolute()
    what = f"exporting to {folder}"
    tmp = manifest.run_on_main(lambda: _prepare(folder), what)
    shards = hf_files.Shards(tmp, plan, plan.files_of(*distributed.place()))
    try:
        manifest.raise_together(_write_files(shards, read), what)
        manifest.run_on_main(lambda: _finish(plan, tmp, folder, describe), what)
    except SaveError:
        if distributed.place()[0] == 0:
            manifest.remove(tmp)
        raise
    return ExportResult(
        path=folder,
        files=list(plan.split.filename_to_tensors),
        bytes=plan.split.metadata["total_size"],
        num_params=plan.num_params,
        seconds=time.monotonic() - started,
    )


def _write_files(shards: hf_files.Shards, read: Read) -> Exception | None:
    """Read every unit and write this rank's files. Return an error at the end: other ranks need this one to gather."""
    error: Exception | None = None
    for unit, written in zip(shards.plan.units, shards.plan.written, strict=True):
        keep = False
        try:
            keep = error is None and shards.takes(written)
        except Exception as caught:
            error = caught
        values = {name: read(name, keep) for name in unit}
        try:
            if keep:
                shards.add({name: value for name, value in values.items() if value is not None})
        except Exception as caught:
            error = caught
    try:
        shards.close()
        if error is None:
            shards.check()
    except Exception as caught:
        error = error or caught
    return error


def _prepare(folder: Path) -> Path:
    """Make a folder beside `folder`. Its name is new, because a network file system may still show a removed one."""
    occupied = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if occupied and not hf_files.written_here(folder):
        raise ConfigError(f"{folder} exists and is not a former export: choose another folder")
    for left in folder.parent.glob(f"{manifest.TMP}{glob.escape(folder.name)}-{'[0-9a-f]' * SUFFIX}"):
        manifest.remove(left)  # what a killed export left, and no folder of a user
    tmp = folder.with_name(f"{manifest.TMP}{folder.name}-{uuid.uuid4().hex[:SUFFIX]}")
    tmp.mkdir(parents=True)
    return tmp


def _finish(plan: hf_files.Plan, tmp: Path, folder: Path, describe: Callable[[Path], None]) -> None:
    hf_files.write_index(tmp, plan)
    describe(tmp)
    for name in manifest.files_in(tmp):
        manifest.sync(tmp / name)
    manifest.publish(tmp, folder)


def _write_extras(
    folder: Path, tokenizer: Any, generation: Any, readme: Callable[[], str] | None = None
) -> None:
    if generation is not None:
        # save_pretrained refuses contradictory sampling settings, which some published models have.
        generation.to_json_file(
            folder / "generation_config.json", use_diff=True, keys_to_pop=["compile_config"]
        )
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if readme is not None:
        (folder / README).write_text(readme(), encoding="utf-8")
