"""Write a model that transformers loads without peft: adapters merged into the base that they were trained on.

peft merges one layer at a time and in fp32, so that memory holds the base, one more weight and one shard. Adapters that
were trained on a base in 4 bits are merged into the dequantised base.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn

from remat.config.options import ConfigError, ModelInit, PeftMethod, RunConfig
from remat.config.units import format_size
from remat.machine.host_memory import host_memory
from remat.model import adapters, hf_model, layers
from remat.saving import manifest
from remat.saving.exports import export, hf_files
from remat.saving.exports.export import ExportResult, Form, Read

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer
FOLDER = "merged"  # in the run directory


class NoRoom(RuntimeError):
    """The error raised when the base does not fit into the free host memory."""


def export_merged(engine: Any, folder: Path, form: Form, *, tokenizer: Any) -> ExportResult:
    """Export the live model with its adapters merged. Collective, as `export.export`, whose errors it raises."""
    live = engine.module
    base, held = live.get_base_model(), export.dtype_of(live)
    wanted = form.dtype or held
    skeleton = hf_files.adapter_skeleton(type(base), base.config, copy.deepcopy(live.peft_config["default"]))
    read = export.engine_reader(engine, torch.float32 if wanted is torch.float32 else held)
    conversions = getattr(base, "_weight_conversions", None)
    plan, merged = _merge(skeleton, read, wanted, form.max_shard_size, conversions)

    def describe(target: Path) -> None:
        export.describe_plain(target, base, plan, tokenizer, form)

    with export.gathering(engine.optimizer):
        return export.write(plan, merged, folder, describe)


def merge_folder(adapter: Path, run_dir: Path, folder: Path, form: Form, cfg: RunConfig) -> ExportResult:
    """Merge the adapters in `adapter`, a saved state or an export of the run `cfg` at `run_dir`, without an engine.

    Host memory holds the whole base in the precision of the run, which is also the default of the output. Raises
    ConfigError when there are no adapters or the base has no files, NoRoom when it does not fit into memory.
    """
    if cfg.peft.method is PeftMethod.none:
        raise ConfigError(f"{run_dir} trained every weight: there are no adapters to merge; leave out --merge")
    if cfg.model.init is ModelInit.random:
        raise ConfigError(
            f"{run_dir}: its base was drawn at random (model.init=random) and is on no disk: resume the run with "
            "save.merge=true, which merges at its end"
        )
    held = hf_model.DTYPES[cfg.train.precision]
    wanted = form.dtype or held
    config = hf_model.load_config(cfg.model)
    _check_room(hf_model.facts(hf_model.skeleton(config, cfg.model)).num_params * held.itemsize, cfg)
    base = hf_model.build(
        cfg.model, config, precision=cfg.train.precision, ds_config={}, zero_stage=0, seed=cfg.train.seed
    )
    skeleton, trained = _adapters(
        adapter, run_dir, type(base), torch.float32 if form.dtype is torch.float32 else held
    )
    quantised = (
        {f"{path}.weight" for path in adapters.paths_to_quantise(base, layers.decoder_layers(base))}
        if cfg.peft.method is PeftMethod.qlora
        else ()
    )
    plain = dict(base.named_parameters(remove_duplicate=False)) | dict(base.named_buffers())

    def read(name: str, _keep: bool) -> torch.Tensor:
        if (value := trained(name)) is not None:
            return value
        own = name.removeprefix(adapters.PREFIX).replace(".base_layer.", ".")
        if own in quantised:
            return adapters.dequantise(
                adapters.quantised(base.get_submodule(own.rpartition(".")[0]), held, torch.device("cpu"))
            )
        return plain[own].detach()

    plan, merged = _merge(
        skeleton, read, wanted, form.max_shard_size, getattr(base, "_weight_conversions", None)
    )
    described = run_dir / export.MODEL_FOLDER

    def describe(target: Path) -> None:
        export.describe_plain(target, base, plan, None, form)
        export.copy_extras(described, target, but=["config.json", hf_files.ADAPTER_CONFIG])

    return export.write(plan, merged, folder, describe)


def _adapters(
    place: Path, run_dir: Path, model_class: Any, dtype: torch.dtype
) -> tuple[PeftModel, Callable[[str], torch.Tensor | None]]:
    """Return the adapted model without storage, and a function that reads a trained weight (None for other names)."""
    if (place / manifest.FILE).is_file():
        export.refuse_code(place)
        plan, read = export.open_saved_state(place, run_dir, Form(dtype=dtype))
        names = {name for unit in plan.units for name in unit}
        return plan.skeleton, lambda name: read(name) if name in names else None
    config = export.load_config(run_dir / export.MODEL_FOLDER)
    skeleton = hf_files.build_adapter_skeleton(model_class, config, place)
    plan = hf_files.plan_adapter(skeleton, dtype)
    file = place / hf_files.ADAPTER_WEIGHTS.format(suffix="")
    marks = {name: torch.empty(0) for unit in plan.units for name in unit}
    place_of = {id(mark): key for key, mark in plan.convert(dict(marks)).items()}
    keys = {name: place_of[id(mark)] for name, mark in marks.items()}

    def from_file(name: str) -> torch.Tensor | None:
        if name not in keys:
            return None
        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(keys[name])

    return skeleton, from_file


def _merge(
    skeleton: PeftModel, read: Read, dtype: torch.dtype, max_shard_size: str, conversions: Any
) -> tuple[hf_files.Plan, Read]:
    """Return the plan of the plain model, and a function that reads one of its weights, merged and in `dtype`.

    `read` returns a weight of the adapted model by its name there.
    """
    base: Any = skeleton.get_base_model()
    config = hf_files.inference_config(base.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plan = hf_files.plan(type(base), config, dtype, max_shard_size, conversions)
    if any("modules_to_save" in _locate(base, name)[0] for pair in plan.tied.items() for name in pair):
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
        plan = hf_files.plan(type(base), config, dtype, max_shard_size, conversions)

    def merged(name: str, keep: bool) -> torch.Tensor | None:
        found, module = _locate(base, name)
        if module is None:
            value = read(found, keep)
        else:
            path = found.rpartition("base_layer.")[0]
            value = _merge_layer(module, path, lambda inner: read(inner, keep))
        return value.to(dtype) if value is not None and value.is_floating_point() else value

    return plan, merged


def _locate(base: Any, name: str) -> tuple[str, LoraLayer | None]:
    """Return the adapted model's name for the plain model's weight `name`, and the layer whose adapter changes it."""
    from peft.tuners import lora
    from peft.utils import ModulesToSaveWrapper

    *path, leaf = name.split(".")
    module, found = base, adapters.PREFIX
    for part in path:
        module, found = getattr(module, part), f"{found}{part}."
        if isinstance(module, ModulesToSaveWrapper):
            module = module.modules_to_save[adapters.ADAPTER]
            found += f"modules_to_save.{adapters.ADAPTER}."
    if not isinstance(module, lora.LoraLayer):
        return f"{found}{leaf}", None
    return f"{found}base_layer.{leaf}", module if leaf == "weight" else None


def _merge_layer(module: Any, path: str, read: Callable[[str], torch.Tensor | None]) -> torch.Tensor | None:
    """Return the merged weight of a layer at `path`, in fp32, None where `read` keeps none. `module` has no storage."""
    values = {name: read(f"{path}{name}") for name, _ in module.named_parameters()}
    known = {name: value.float() for name, value in values.items() if value is not None}
    if len(known) < len(values):
        return None
    layer: Any = copy.deepcopy(module)
    layer.load_state_dict(known, assign=True)
    layer.merge(safe_merge=True, adapter_names=[adapters.ADAPTER])
    weight: nn.Parameter = layer.get_base_layer().weight
    return weight.detach()


def _check_room(needed_bytes: int, cfg: RunConfig) -> None:
    free_bytes = host_memory().available_bytes
    if needed_bytes > free_bytes:
        raise NoRoom(
            f"model.path={cfg.model.path} takes {format_size(needed_bytes)} of host memory while it is merged, and "
            f"{format_size(free_bytes)} are free: merge on a larger machine, or in the run with save.merge=true"
        )
