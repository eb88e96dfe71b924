"""QLoRA (Dettmers et al. 2023): the frozen linear layers in 4-bit NF4 with doubly quantised constants, by bitsandbytes.

What is quantised is decided here, alike for a run and a plan: every linear module of the decoder layers. Embeddings,
the output head, norms and biases keep the dtype of training. bitsandbytes is imported only when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from remat.config.options import ConfigError

BLOCK = 64  # weights that share a constant


def check(zero_stage: int) -> None:
    """Raise ConfigError for what cannot work: bitsandbytes is not there, or ZeRO-3 would shard nothing."""
    if zero_stage == 3:
        raise ConfigError(
            "peft.method=qlora with ZeRO-3 (deepspeed.config): transformers does not shard a model that it quantises, "
            "so every rank would hold it whole and parameters could not be offloaded; choose deepspeed.config=zero2 "
            "or zero2_offload, or peft=lora"
        )
    _bitsandbytes()


def weights(layers: Sequence[nn.Module]) -> tuple[int, ...]:
    """Elements of each weight that will be quantised. Fit for a model on the meta device.

    Raises ConfigError when most of the layers is not made of linear modules, as fused experts are not.
    """
    found = tuple(module.weight.numel() for layer in layers for module in _plain_linears(layer))
    total = sum(p.numel() for layer in layers for p in layer.parameters())
    if 2 * sum(found) < total:
        raise ConfigError(
            f"peft.method=qlora would quantise {sum(found):,} of the {total:,} parameters in the decoder layers: the "
            "others (experts in one tensor, say) are no linear modules, which bitsandbytes needs; choose peft=lora"
        )
    return found


def loading(skeleton: nn.Module, layers: Sequence[nn.Module], dtype: torch.dtype, device: torch.device) -> Any:
    """Arguments of `from_pretrained` that quantise each weight as it is read, right onto `device`."""
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


def quantise(model: Any, layers: Sequence[nn.Module], dtype: torch.dtype, device: torch.device) -> None:
    """Quantise what is not yet of a transformers model, one weight at a time, onto `device`.

    Fit for meta, where shapes alone are made.
    """
    bnb, inside = _bitsandbytes(), _ids(layers)
    todo = [(path, module) for path, module in model.named_modules() if id(module) in inside]
    for path, module in todo:
        if _is_plain(module):
            model.set_submodule(path, _quantised(module, bnb, dtype, device))
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            _set_up(module)
    model.is_loaded_in_4bit = True  # what peft asks


def describe(weights: Sequence[int]) -> str:
    """The run's header: what is quantised, in parameters."""
    return f"{sum(weights):,} parameters in {len(weights)} matrices as 4-bit NF4, the rest as trained"


def _quantised(module: Any, bnb: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    weight = module.weight.T if isinstance(module, Conv1D) else module.weight
    rows, columns = weight.shape
    with torch.device("meta"):
        new = bnb.nn.Linear4bit(columns, rows, module.bias is not None, dtype, quant_type="nf4")
    # The table of 8-bit constants is made once per process: not on meta, where it would have no values.
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


def _set_up(module: Any) -> None:
    module.support_avx512bf16_for_cpu = (
        False  # an evaluation would repack weights for a kernel without a gradient
    )
    module.register_state_dict_post_hook(_without_constants)


def _without_constants(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Of a frozen weight nothing is saved, so neither are its constants."""
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


def _plain_linears(layer: nn.Module) -> Iterator[Any]:
    return (module for module in layer.modules() if _is_plain(module))


def _is_plain(module: nn.Module) -> bool:
    """Of the classes that transformers replaces."""
    return type(module) is nn.Linear or isinstance(module, Conv1D)


def _ids(layers: Sequence[nn.Module]) -> set[int]:
    return {id(module) for layer in layers for module in layer.modules()}
