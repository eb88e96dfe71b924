"""Train small adapters beside frozen linear layers: LoRA (Hu et al. 2021) and QLoRA (Dettmers et al. 2023).

peft makes the adapters and bitsandbytes the 4-bit weights. Each is imported only when it is used. Adapters have the
model's dtype, because DeepSpeed trains one dtype; Adam updates their fp32 master copy. Under ZeRO-3 adapters are
created as shards, like the model. QLoRA stores every linear module of the decoder layers as NF4 with doubly quantised
constants, under ZeRO-3 as shards too (sharded_4bit.py). Embeddings, the output head, norms and biases keep the
training dtype. Runs and plans call the same functions of this file.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from remat.config import ds_config as ds_json
from remat.config.options import ConfigError, PeftConfig
from remat.machine import rng
from remat.model.four_bits.layout_4bit import BLOCK

if TYPE_CHECKING:
    from peft import PeftModel
ADAPTER = "default"  # peft's name for a single adapter; the keys in its files do not contain it
PREFIX = "base_model.model."  # peft's prefix of the base model's names


def find_targets(layers: Sequence[nn.Module], wanted: Sequence[str]) -> list[str]:
    """Return the names of the linear modules in the decoder `layers` that get an adapter, in model order.

    A name is the last part of a module's path. Empty `wanted` means all names. The output head is outside the layers
    and never included. GPT-2's `Conv1D` counts as linear. Raises ConfigError, naming the modules that exist, when
    `wanted` has an unknown name or the layers have no linear module.
    """
    found: dict[str, None] = {}
    for layer in layers:
        for path, module in layer.named_modules():
            if isinstance(module, (nn.Linear, Conv1D)):
                found[path.rpartition(".")[2]] = None
    unknown = [name for name in wanted if name not in found]
    if unknown or not found:
        raise ConfigError(
            f"peft.target_modules={list(wanted)}: {', '.join(unknown) or 'a linear module'} is not in the decoder "
            f"layers, which have {', '.join(found) or 'none (peft=none trains such a model)'}"
        )
    return [name for name in found if not wanted or name in wanted]


def find_saved(model: nn.Module, inside: Container[int], wanted: Sequence[str]) -> list[str]:
    """Return the modules `wanted`, trained in full beside the adapters, for peft: names, or paths if ambiguous.

    `inside` are the ids of the decoder layers' modules, which cannot be chosen. A name is the last part of a module's
    path. Raises ConfigError for another name, naming the modules that can be chosen.
    """
    paths = [path for path, module in model.named_modules() if path]
    there = {
        path.rpartition(".")[2]: path
        for path, module in model.named_modules()
        if path and id(module) not in inside and next(module.parameters(recurse=False), None) is not None
    }
    if unknown := [name for name in wanted if name not in there]:
        raise ConfigError(
            f"peft.modules_to_save={list(wanted)}: {', '.join(unknown)} is not outside the decoder layers, where there "
            f"are {', '.join(there)}"
        )
    # peft takes every module whose path ends with the name: `norm` would match `input_layernorm` too
    return [name if sum(path.endswith(name) for path in paths) == 1 else there[name] for name in wanted]


def wrap(model: PreTrainedModel, cfg: PeftConfig, layers: Sequence[nn.Module]) -> PeftModel:
    """Freeze `model` in place and put adapters into its decoder `layers`.

    The adapters have no defined values yet. Works on the meta device too, to count parameters. Raises ConfigError as
    `find_targets` does.
    """
    from peft import LoraConfig, get_peft_model

    names = find_targets(layers, cfg.target_modules)
    inside = _ids(layers)
    chosen = [(path, module) for path, module in model.named_modules() if path.rpartition(".")[2] in names]
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=cfg.r,
        lora_alpha=cfg.alpha,
        lora_dropout=cfg.dropout,
        target_modules=names,
        modules_to_save=find_saved(model, inside, cfg.modules_to_save) or None,
        use_rslora=cfg.rslora,
        use_dora=cfg.dora,
        exclude_modules="|".join(re.escape(path) for path, module in chosen if id(module) not in inside)
        or None,
        fan_in_fan_out=all(isinstance(module, Conv1D) for _, module in chosen),
        init_lora_weights=False,  # peft would draw values before ZeRO-3 gathers; `add_lora` draws them later
    )
    config.base_model_name_or_path = model.name_or_path or None
    wrapped = get_peft_model(model, config, adapter_name=ADAPTER, autocast_adapter_dtype=False)
    config.base_model_name_or_path = _name_of_base(model)
    config.init_lora_weights = True  # for adapter_config.json: `add_lora` initialises like peft
    return wrapped


def _name_of_base(model: PreTrainedModel) -> str | None:
    """Return the base model's name for peft: a hub name, or the absolute path of a local folder."""
    name = model.name_or_path
    return str(Path(name).absolute()) if name and Path(name).is_dir() else name or None


def add_lora(
    model: PreTrainedModel,
    cfg: PeftConfig,
    *,
    layers: Sequence[nn.Module],
    ds_config: dict[str, Any],
    zero_stage: int,
    seed: int,
) -> PeftModel:
    """Add adapters to a built model and give them peft's initial values: A uniform, B zero.

    Under ZeRO-3 each adapter is a shard, and the call is collective. The values are the same on every rank, and on a
    CPU at every ZeRO stage.
    """
    with _sharded(ds_config) if zero_stage == 3 else contextlib.nullcontext():
        wrapped = wrap(model, cfg, layers)
    if zero_stage == 3:
        _shard_saved(wrapped, ds_config)
    rng.seed(seed)
    for module in wrapped.modules():
        if ADAPTER in getattr(module, "lora_A", ()):
            with _whole(module) if zero_stage == 3 else contextlib.nullcontext():
                module.reset_lora_parameters(ADAPTER, True)  # type: ignore[operator]
            if cfg.dora:
                _set_magnitudes(module)
    wrapped.train()
    return wrapped


def _set_magnitudes(module: Any) -> None:
    """Set DoRA's magnitudes to their initial values, the norms of the weight's rows. B must be zero."""
    module.lora_magnitude_vector[ADAPTER].update_layer(
        base_layer=module.get_base_layer(),
        lora_A=module.lora_A[ADAPTER].weight,
        lora_B=module.lora_B[ADAPTER].weight,
        scaling=module.scaling[ADAPTER],
    )


def check_dora(zero_stage: int) -> None:
    """Raise ConfigError for DoRA under ZeRO-3: peft reads the base weight outside the call that gathers it."""
    if zero_stage == 3:
        raise ConfigError(
            "peft.dora=true with ZeRO-3 (deepspeed.config): DoRA takes norms of the whole frozen weights, which a rank "
            "does not hold; choose deepspeed.config=zero2 or zero2_offload, or peft.rslora=true"
        )


def check_compiled(zero_stage: int) -> None:
    """Raise ConfigError for compiled layers under ZeRO-3: their backward would find frozen weights released."""
    if zero_stage == 3:
        raise ConfigError(
            "compile=layers with peft=lora and ZeRO-3 (deepspeed.config): the backward of a compiled layer finds its "
            "frozen weights released; choose deepspeed.config=zero2 or zero2_offload, or compile=none"
        )


def check_lora_offload(param_device: str | None) -> None:
    """Raise ConfigError for parameters on NVMe: DeepSpeed 0.19.8 assigns a frozen parameter's swap buffer twice."""
    if param_device == "nvme":
        raise ConfigError(
            "peft.method=lora freezes parameters, which DeepSpeed cannot prefetch from NVMe: choose "
            "deepspeed.config=zero3_offload, or set "
            "deepspeed.overrides.zero_optimization.offload_param.device=cpu and keep optimizer state on NVMe"
        )


def describe_lora(cfg: PeftConfig, trained: int, total: int) -> str:
    """Describe for the run's header how many parameters are trained."""
    where = ", ".join(cfg.target_modules) or "every linear module of the decoder layers"
    kind = ("DoRA" if cfg.dora else "LoRA") + " scaled by alpha / sqrt(r)" * cfg.rslora
    also = f", and {', '.join(cfg.modules_to_save)} whole" if cfg.modules_to_save else ""
    return f"{kind} r={cfg.r} alpha={cfg.alpha} on {where}{also}: {trained:,} of {total:,} parameters trained"


def _sharded(ds_config: dict[str, Any], module: Any = None) -> Any:
    """Return a context in which ZeRO-3 partitions every new module. If `module` is given, partition it at once."""
    import deepspeed
    from deepspeed.utils import groups

    # the groups of hpZ, made with the base model: DeepSpeed refuses to make them twice
    second = groups._get_zero_param_intra_parallel_group()
    return deepspeed.zero.Init(module=module, config_dict_or_path=ds_config, zero_param_parallel_group=second)


def _shard_saved(wrapped: Any, ds_config: dict[str, Any]) -> None:
    """Shard the copies of `peft.modules_to_save`. peft copies gathered weights, so they are whole on every rank."""
    from peft.utils import ModulesToSaveWrapper

    for module in wrapped.modules():
        if isinstance(module, ModulesToSaveWrapper):
            _sharded(ds_config, module.modules_to_save)


def _whole(module: Any) -> Any:
    """Return a context that gathers both adapter matrices. Changes by rank 0 reach all ranks."""
    import deepspeed

    matrices = [module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight]
    return deepspeed.zero.GatheredParameters(matrices, modifier_rank=0)


CHANGES_BYTES = {  # keys of zero_optimization with which ZeRO-3 would change packed bytes -> how
    "stage3_use_all_reduce_for_fetch_params": "sums parameters of one dtype instead of gathering them",
    "zero_quantized_weights": "would quantise packed bytes once more",
    "zero_quantized_nontrainable_weights": "would quantise packed bytes once more",
    "stage3_allgather_sequential": "gathers by another path, which was never tried with bytes",
}


def check_quantised(ds: Mapping[str, Any], config: Any) -> None:
    """Raise ConfigError if bitsandbytes is missing, or if an option in `ds` cannot work with 4-bit weights.

    `config` is the model's; its files may hold weights that are already in 4 bits.
    """
    _bitsandbytes()
    if ds_json.zero_stage(ds) < 3:
        return
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"model.path={config.name_or_path} holds weights that are quantised already, which ZeRO-3 does not shard: "
            "give the same model in 16 bits, which peft=qlora quantises while it reads, or deepspeed.config=zero2"
        )
    zero: Mapping[str, Any] = ds.get("zero_optimization", {})
    said = "peft.method=qlora with ZeRO-3 shards the weights in 4 bits as bytes"
    where = "deepspeed.overrides.zero_optimization"
    for key, why in CHANGES_BYTES.items():
        if zero.get(key):
            raise ConfigError(f"{where}.{key}={zero[key]}: {said}, and this {why}; set it to false")
    if (shared_by := ds_json.second_shard_ranks(ds)) > 1:
        raise ConfigError(
            f"{where}.{ds_json.SECOND_SHARDS}={shared_by}: {said}, and a second copy of them on "
            "each node was never tried; leave it at 1"
        )
    if ds_json.param_offload_device(ds) == "nvme":
        raise ConfigError(
            "peft.method=qlora freezes parameters, which DeepSpeed cannot prefetch from NVMe: choose "
            "deepspeed.config=zero3_offload, or set deepspeed.overrides.zero_optimization.offload_param.device=cpu"
        )


def find_quantised(layers: Sequence[nn.Module]) -> tuple[int, ...]:
    """Return the number of elements of each weight that will be quantised.

    Works on the meta device too. Raises ConfigError when linear modules hold less than half of the layers' parameters,
    as in models with fused experts.
    """
    modules: list[Any] = [module for layer in layers for module in layer.modules()]
    found = tuple(module.weight.numel() for module in modules if _is_plain(module))
    total = sum(p.numel() for layer in layers for p in layer.parameters())
    if 2 * sum(found) < total:
        raise ConfigError(
            f"peft.method=qlora would quantise {sum(found):,} of the {total:,} parameters in the decoder layers: the "
            "others (experts in one tensor, say) are no linear modules, which bitsandbytes needs; choose peft=lora"
        )
    return found


def loading_quantised(
    skeleton: nn.Module, layers: Sequence[nn.Module], dtype: torch.dtype, device: torch.device
) -> Any:
    """Return arguments of `from_pretrained` that quantise each weight onto `device` as it is read."""
    from transformers import BitsAndBytesConfig

    inside = _ids(layers)
    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=[
                path
                for path, module in skeleton.named_modules()
                if isinstance(module, (nn.Linear, Conv1D)) and id(module) not in inside
            ],
        ),
        "device_map": {"": device},
    }


def quantise(
    model: Any, layers: Sequence[nn.Module], dtype: torch.dtype, device: torch.device, *, flat: bool = False
) -> None:
    """Quantise the remaining linear modules of a transformers model onto `device`, one weight at a time.

    With `flat` each gets a single parameter, which ZeRO-3 can shard. Works on the meta device too, for shapes only.
    """
    bnb = _bitsandbytes()
    for path in paths_to_quantise(model, layers):
        module = model.get_submodule(path)
        model.set_submodule(path, _flat(module.to(device), dtype) if flat else quantised(module, dtype, device))
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False  # eval would repack weights for a kernel without backward
            module.register_state_dict_post_hook(_without_constants)
    model.is_loaded_in_4bit = True  # peft reads this


def paths_to_quantise(model: nn.Module, layers: Sequence[nn.Module]) -> list[str]:
    """Return the paths in `model` of the linear modules of the decoder `layers` that are not quantised yet."""
    inside = _ids(layers)
    return [path for path, module in model.named_modules() if id(module) in inside and _is_plain(module)]


def describe_quantised(weights: Sequence[int], *, sharded: bool = False) -> str:
    """Describe for the run's header how many parameters are quantised."""
    shared = ", each rank its part" * sharded
    return f"{sum(weights):,} parameters in {len(weights)} matrices as 4-bit NF4{shared}, the rest as trained"


def quantised(module: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return bitsandbytes' linear module with the weight of `module` in 4 bits, on `device`."""
    bnb = _bitsandbytes()
    weight = module.weight.T if isinstance(module, Conv1D) else module.weight
    rows, columns = weight.shape
    with torch.device("meta"):
        new = bnb.nn.Linear4bit(columns, rows, module.bias is not None, dtype, quant_type="nf4")
    # bitsandbytes makes the table of 8-bit constants once per process. On meta it would have no values.
    bnb.functional.name2qmap.setdefault("dynamic", bnb.functional.create_dynamic_map())
    packed, state = bnb.functional.quantize_4bit(
        weight.detach().to(device).contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
    )
    new.weight = bnb.nn.Params4bit(packed, quant_state=state, quant_type="nf4", module=new, bnb_quantized=True)
    new.quant_state = state
    if module.bias is not None:
        new.bias = module.bias
    new.source_cls = type(module)  # as transformers does
    trained: nn.Module = new.train(module.training)
    return trained


def is_quantised(module: nn.Module) -> bool:
    """Return whether `module` is a linear module whose weight is in 4 bits."""
    weight: Any = getattr(module, "weight", None)
    return hasattr(module, "layout_4bit") or hasattr(weight, "quant_state")


def dequantise(module: Any) -> torch.Tensor:
    """Return the dequantised weight of `module`, in the layout of the class that it replaced.

    A sharded weight must be gathered.
    """
    weight: torch.Tensor
    if hasattr(module, "layout_4bit"):
        from remat.model.four_bits import sharded_4bit

        weight = sharded_4bit.dequantise(module)
    else:
        weight = _bitsandbytes().functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
    return weight.T if getattr(module, "source_cls", None) is Conv1D else weight


def _flat(module: Any, dtype: torch.dtype) -> nn.Module:
    from remat.model.four_bits import sharded_4bit

    return sharded_4bit.quantise_whole(module, dtype)


def _without_constants(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Drop the quantisation constants from a state dict: frozen weights are not saved, so neither are these."""
    for name in [name for name in state if name.startswith(f"{prefix}weight.")]:
        del state[name]


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise ConfigError(
            f"peft.method=qlora needs bitsandbytes, which cannot be imported ({error}): pip install 'remat[qlora]'"
        ) from error
    return bitsandbytes


def _is_plain(module: nn.Module) -> bool:
    """Return whether transformers would replace `module` when it quantises."""
    return type(module) is nn.Linear or isinstance(module, Conv1D)


def _ids(layers: Sequence[nn.Module]) -> set[int]:
    return {id(module) for layer in layers for module in layer.modules()}
