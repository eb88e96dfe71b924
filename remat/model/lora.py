"""LoRA (Hu et al. 2021) through the peft library: small trained adapters beside the frozen linear layers of a decoder.

Adapters have the model's dtype, since DeepSpeed trains one dtype; its fp32 master copy is what Adam updates. Under
ZeRO-3 they are created as shards, like the model itself. peft is imported only when it is asked for.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from remat.config.options import ConfigError, PeftConfig
from remat.machine import rng

if TYPE_CHECKING:
    from peft import PeftModel

ADAPTER = "default"  # peft's own name for the only adapter; it is not part of the files' keys


def find_targets(layers: Sequence[nn.Module], wanted: Sequence[str]) -> list[str]:
    """Leaf names of the linear modules inside the decoder `layers` that get an adapter, in the order of the model.

    Empty `wanted` means all of them; the output head is outside the layers and never among them. GPT-2's `Conv1D`
    counts as linear. Raises ConfigError naming what was found when `wanted` has another name, or nothing is there.
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


def wrap(model: PreTrainedModel, cfg: PeftConfig, layers: Sequence[nn.Module]) -> PeftModel:
    """`model` with its weights frozen and adapters, of no defined value, in its decoder `layers`; changed in place.

    Fit for a model on the meta device, to count. Raises ConfigError as `find_targets` does.
    """
    from peft import LoraConfig, get_peft_model

    names = find_targets(layers, cfg.target_modules)
    inside = {id(module) for layer in layers for module in layer.modules()}
    chosen = [(path, module) for path, module in model.named_modules() if path.rpartition(".")[2] in names]
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=cfg.r,
        lora_alpha=cfg.alpha,
        lora_dropout=cfg.dropout,
        target_modules=names,
        exclude_modules="|".join(re.escape(path) for path, module in chosen if id(module) not in inside)
        or None,
        fan_in_fan_out=all(isinstance(module, Conv1D) for _, module in chosen),
        init_lora_weights=False,  # peft would draw before ZeRO-3 could gather: `apply` draws afterwards
    )
    config.base_model_name_or_path = model.name_or_path or None
    wrapped = get_peft_model(model, config, adapter_name=ADAPTER, autocast_adapter_dtype=False)
    config.init_lora_weights = True  # what `apply` does, and what a reader of adapter_config.json expects
    return wrapped


def apply(
    model: PreTrainedModel,
    cfg: PeftConfig,
    *,
    layers: Sequence[nn.Module],
    ds_config: dict[str, Any],
    zero_stage: int,
    seed: int,
) -> PeftModel:
    """Adapters on a built model, each a shard under ZeRO-3, with peft's first values: A uniform, B zero.

    The values are the same on every rank, and on a CPU at every ZeRO stage. Collective under ZeRO-3.
    """
    with _sharded(ds_config) if zero_stage == 3 else contextlib.nullcontext():
        wrapped = wrap(model, cfg, layers)
    rng.seed(seed)
    for module in wrapped.modules():
        if ADAPTER in getattr(module, "lora_A", ()):
            with _whole(module) if zero_stage == 3 else contextlib.nullcontext():
                module.reset_lora_parameters(ADAPTER, True)  # type: ignore[operator]
    wrapped.train()
    return wrapped


def check_offload(param_device: str | None) -> None:
    """Raise ConfigError for what DeepSpeed 0.19.8 cannot do: it assigns a frozen parameter's swap buffer twice."""
    if param_device == "nvme":
        raise ConfigError(
            "peft.method=lora freezes parameters, which DeepSpeed cannot prefetch from NVMe: choose "
            "deepspeed.config=zero3_offload, or set "
            "deepspeed.overrides.zero_optimization.offload_param.device=cpu and keep optimizer state on NVMe"
        )


def describe(cfg: PeftConfig, trained: int, total: int) -> str:
    """The run's header: what is trained, in parameters."""
    where = ", ".join(cfg.target_modules) or "every linear module of the decoder layers"
    return f"LoRA r={cfg.r} alpha={cfg.alpha} on {where}: {trained:,} of {total:,} parameters trained"


def _sharded(ds_config: dict[str, Any]) -> Any:
    """Modules created inside are partitioned at once."""
    import deepspeed

    return deepspeed.zero.Init(config_dict_or_path=ds_config)


def _whole(module: Any) -> Any:
    """Both adapter matrices gathered, to be written by rank 0 for all."""
    import deepspeed

    matrices = [module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight]
    return deepspeed.zero.GatheredParameters(matrices, modifier_rank=0)
