"""The files of a peft adapter: names, shapes and the configuration, as peft's own `save_pretrained` writes them.

Base weights are not among them: the folder loads with `PeftModel.from_pretrained` on the base model.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards

from remat.config.options import ConfigError
from remat.saving import hf_files
from remat.saving.hf_files import Plan

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model{suffix}.safetensors"


def config_of(module: Any) -> PeftConfig | None:
    """The adapter's configuration, None for a model without one."""
    configs = getattr(module, "peft_config", None)
    return configs["default"] if configs else None


def plan(model: PeftModel, dtype: torch.dtype) -> Plan:
    """Every trained parameter of `model`, live (sharded or whole) or a skeleton, in one file: peft reads no shards."""
    from peft import get_peft_model_state_dict

    def keys(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return get_peft_model_state_dict(model, values, save_embedding_layers=False)

    trained = {
        name: torch.empty(getattr(p, "ds_shape", p.shape), dtype=dtype, device="meta")
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    files = keys(trained)
    split = split_torch_state_dict_into_shards(
        files, filename_pattern=WEIGHTS, max_shard_size=1 + sum(value.nbytes for value in files.values())
    )
    shapes = {name: value.shape for name, value in files.items()}
    return Plan(model, [list(trained)], {}, shapes, split, convert=keys)


def skeleton(model_class: Any, config: Any, card: Path) -> PeftModel:
    """The adapted model without storage, from the base's configuration and `card`/adapter_config.json."""
    from peft import LoraConfig, PeftModelForCausalLM

    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        base = model_class(hf_files.inference_config(config))
        adapter = LoraConfig.from_pretrained(str(card))
        if adapter.megatron_config is not None:  # names a module, which would be imported
            raise ConfigError(
                f"{card / CONFIG}: megatron_config is refused: adapters of this program have none"
            )
        adapter.inference_mode = False
        return PeftModelForCausalLM(base, adapter, autocast_adapter_dtype=False)


def write_config(folder: Path, config: PeftConfig) -> None:
    config = copy.deepcopy(config)
    config.inference_mode = True  # as peft writes it: who loads the adapter does not train it unless he says so
    config.save_pretrained(str(folder))
