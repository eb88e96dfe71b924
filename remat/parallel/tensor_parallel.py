"""Split every layer's matrices over a group of ranks with the same data, by DeepSpeed's AutoTP.

AutoTP follows the tensor-parallel plan that transformers has for the architecture. Activations between layers are
whole on every rank of a group. Groups are consecutive ranks, so a group stays within a node when its size divides the
node's number of GPUs.

Adapters (LoRA) are cut like their base matrix. Where the base is cut by its outputs, B is cut; where it is cut by its
inputs, A is. The other adapter matrix is whole on every rank of the group. Its gradient is whole too, because the cut
matrix sums its result and its gradient over the ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from remat.config import ds_config
from remat.config.options import ConfigError, LossKind
from remat.machine.distributed import World
from remat.model import adapters
from remat.parallel import sums, vocabulary

OPTION = "train.tensor_parallel_size"
COLUMN, ROW = "colwise", "rowwise"
WHOLE = "embedding_rowwise"  # AutoTP leaves such a module whole unless it is told to split the vocabulary
SHARED_GRADIENT = "replicated_with_grad_allreduce"
OUTPUT_LAYER = "lm_head"


def check(
    size: int, skeleton: PreTrainedModel, *, world_size: int, zero_stage: int, on_nvme: bool = False
) -> None:
    """Raise one ConfigError with every reason why `size` ranks cannot share the layers of this model.

    `on_nvme` says that parameters or the optimizer's state are offloaded to NVMe.
    """
    if size == 1:
        return
    ds_config.count_data_ranks(size, world_size)
    found = []
    if on_nvme:
        found.append(
            f"{OPTION}={size} with parameters or the optimizer on NVMe: their swap files are known by data rank alone, "
            f"and ranks that share layers would load each other's; use deepspeed.config=zero3_offload, or {OPTION}=1"
        )
    elif zero_stage == 0:
        found.append(
            f"{OPTION}={size}: ZeRO stage 0 knows no gradient norm over groups; use deepspeed.config=zero1 or higher"
        )
    found += _model(size, skeleton)
    if found:
        raise ConfigError("\n".join(found))


def rendered(ds: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return the DeepSpeed dict `ds` with AutoTP where ranks share layers."""
    if size == 1:
        return dict(ds)
    return {**ds, "tensor_parallel": {"autotp_size": size, "vocab_parallel_lm_head": False}}


def for_creation(ds: Mapping[str, Any]) -> dict[str, Any]:
    """Return `ds` without AutoTP, so that transformers creates whole layers. They are split afterwards."""
    return {key: value for key, value in ds.items() if key != "tensor_parallel"}


def sizes_per_rank(model: nn.Module, size: int, loss: LossKind) -> list[int]:
    """Return the elements of each parameter that a rank holds (before ZeRO), in the model's order."""
    styles = find_cut(model, size, loss)
    found = []
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        style = styles.get(module)
        split = style == COLUMN or (style == ROW and kind == "weight")
        found.append(parameter.numel() // size if split else parameter.numel())
    return found


def share_on_meta(model: nn.Module, size: int, loss: LossKind) -> None:
    """Reduce a model on meta tensors to the share of one rank of `size`.

    The operations are those of AutoTP's layers (deepspeed/module_inject/layers.py: LinearLayer, LinearAllreduce), sums
    over the ranks included. The output layer is not called: the loss uses its weight (`share_of_vocabulary`).
    """
    if size == 1:
        return
    cut = find_cut(model, size, loss)
    for path, style in cut.items():
        module: Any = model.get_submodule(path)
        if style == COLUMN:
            module.__class__ = _Column
            module.out_features //= size
            module.weight = _first(module.weight, 0, size)
            if module.bias is not None:
                module.bias = _first(module.bias, 0, size)
        else:
            module.__class__ = _Row
            module.in_features //= size
            module.weight = _first(module.weight, 1, size)
    _share_dropout(model, cut, size, rank=0)


class _Column(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        output = torch.matmul(sums.SumInBackward.apply(input, None), self.weight.transpose(-1, -2))
        return output if self.bias is None else output + self.bias


class _Row(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        output = sums.SumInForward.apply(torch.matmul(input, self.weight.transpose(-1, -2)), None)
        return output if self.bias is None else output + self.bias


def _first(parameter: nn.Parameter, dim: int, size: int) -> nn.Parameter:
    return nn.Parameter(parameter.detach().chunk(size, dim)[0].clone(), requires_grad=parameter.requires_grad)


class _SliceOfDropout(nn.Dropout):
    """Dropout of one rank's columns [..., columns]: its part of the mask that a single rank draws for all columns.

    The ranks of a group draw the same numbers, so every column has a mask of its own.
    """

    def __init__(self, p: float, size: int, rank: int) -> None:
        super().__init__(p)
        self.size, self.rank = size, rank

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return input
        *rows, columns = input.shape
        mask = F.dropout(input.new_ones(*rows, columns * self.size), self.p)
        return input * mask.chunk(self.size, dim=-1)[self.rank].clone()  # a slice would keep the whole mask


def choose_styles(model: Any) -> dict[str, str]:
    """Map patterns of module names to AutoTP's styles. The output layer is left out: vocabulary.py cuts it."""
    styles = {pattern: str(style).lower() for pattern, style in (model.tp_plan or {}).items()}
    return {pattern: WHOLE if pattern == OUTPUT_LAYER else style for pattern, style in styles.items()}


def find_cut(model: Any, size: int, loss: LossKind) -> dict[str, str]:
    """Map the path of each module of `model` that is cut, adapters included, to COLUMN or ROW."""
    styles = choose_styles(model)
    found = {path: _style(path, styles) for path, module in model.named_modules() if not _is_adapted(module)}
    cut = {path: style for path, style in found.items() if style in (COLUMN, ROW)}
    head = vocabulary.find_head(model, size, loss)
    return cut if head is None else cut | {head: COLUMN}


def _is_adapted(module: nn.Module) -> bool:
    """Return whether `module` is peft's layer around a matrix and its adapter."""
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def _style(path: str, styles: Mapping[str, str]) -> str | None:
    """Return the style of the module at `path`, in a plain model or in one with adapters."""
    outer = _outer(path)
    style = styles.get(_pattern(outer.removeprefix(adapters.PREFIX)))
    half = path.removeprefix(outer).removesuffix(f".{adapters.ADAPTER}")
    return None if (half, style) in ((".lora_A", COLUMN), (".lora_B", ROW)) else style


def prepare(model: Any, size: int, loss: LossKind) -> None:
    """Set the plan that AutoTP reads from the model, and cut what AutoTP would not. Collective.

    AutoTP leaves out the output layer and the matrices inside peft's layers. They are replaced by AutoTP's modules.
    Call this before the optimizer is built.
    """
    if size == 1:
        return
    from deepspeed.module_inject import set_autotp_mode
    from deepspeed.utils import groups

    set_autotp_mode(training=True)
    cut, head = find_cut(model, size, loss), vocabulary.find_head(model, size, loss)
    model._tp_plan = choose_styles(model)
    adapted = {path: module for path, module in model.named_modules() if _is_adapted(module)}
    cut = {path: style for path, style in cut.items() if path == head or _outer(path) in adapted}
    for path, style in cut.items():
        _cut(model, path, style)
    _share_dropout(model, cut, size, groups.get_tensor_model_parallel_rank())
    for module in [*adapted.values(), *([model.get_submodule(head)] if head else [])]:
        module.replaced = True  # tells AutoTP to leave the module as it is
    for parameter in model.parameters():
        if not parameter.requires_grad:  # tells AutoTP that there is no gradient to sum over the ranks
            parameter._ds_grad_allreduce_registered = True


def describe_whole_head(model: Any, size: int, loss: LossKind) -> str:
    """Return a note on the output layer of `model` where `size` ranks share all other matrices; "" where it is cut."""
    because = "" if size == 1 else vocabulary.why_whole(model, size, loss)
    return because and f"every rank has the whole output layer, although {size} share each other one: {because}"


def share_of_vocabulary(head: Any) -> vocabulary.Share | None:
    """Return the rank's share of the output layer `head` of a prepared model; None where it has all rows."""
    if isinstance(head, _Column):
        return vocabulary.Share(0, head.weight.shape[0], None)
    if not hasattr(head, "tp_index"):
        return None
    rows = head.weight.ds_shape[0] if hasattr(head.weight, "ds_shape") else head.weight.shape[0]
    return vocabulary.Share(rows * head.tp_index, rows, head.mp_group)


def _outer(path: str) -> str:
    """Return the path of peft's layer around the module at `path`, if there is one."""
    return re.sub(rf"\.(base_layer|lora_[AB]\.{adapters.ADAPTER})$", "", path)


def _cut(model: nn.Module, path: str, style: str) -> None:
    """Replace the linear module at `path` by AutoTP's layer with this rank's share."""
    import deepspeed
    from deepspeed.module_inject import layers
    from deepspeed.utils import groups

    module = model.get_submodule(path)
    shards = {name: p for name, p in module.named_parameters(recurse=False) if hasattr(p, "ds_id")}
    with deepspeed.zero.GatheredParameters(list(shards.values())):
        whole = {name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in shards.items()}
    for name, parameter in whole.items():  # ordinary parameters: ZeRO-3 shards the rank's share further
        setattr(module, name, parameter)
    kind = layers.LinearLayer if style == COLUMN else layers.LinearAllreduce
    model.set_submodule(path, kind(module, groups.get_tensor_model_parallel_group(), name=path))


def _share_dropout(model: nn.Module, cut: Iterable[str], size: int, rank: int) -> None:
    """Give the dropout before each cut A this rank's part of the columns."""
    for path in cut:
        if not path.endswith(f".lora_A.{adapters.ADAPTER}"):
            continue
        module: Any = model.get_submodule(_outer(path))
        dropout = module.lora_dropout[adapters.ADAPTER]
        if isinstance(dropout, nn.Dropout):
            module.lora_dropout[adapters.ADAPTER] = _SliceOfDropout(dropout.p, size, rank)


def join(world: World, size: int) -> tuple[World, Any | None]:
    """Divide `world` into groups of `size` ranks; return it with DeepSpeed's object for the groups.

    Returns (world, None) for size 1. DeepSpeed would keep the groups of an earlier run in the same process.
    """
    from deepspeed.utils import groups

    groups._TENSOR_MODEL_PARALLEL_GROUP = None
    groups._MODEL_PARALLEL_GROUP = None
    groups._DATA_PARALLEL_GROUP = None
    groups.mpu = None
    if size == 1:
        return world, None
    groups._init_tp_mesh_device(tensor_model_parallel_size=size)
    return replace(world, tensor_parallel_size=size), groups


def _model(size: int, skeleton: PreTrainedModel) -> list[str]:
    styles = choose_styles(skeleton)
    name = type(skeleton).__name__
    known = {COLUMN, ROW, WHOLE, SHARED_GRADIENT}
    unknown = sorted(set(styles.values()) - known)
    if unknown or not {COLUMN, ROW} <= set(styles.values()):
        reason = (
            f"DeepSpeed's AutoTP cannot split {', '.join(unknown)}" if unknown else "transformers has no plan"
        )
        return [f"{OPTION}={size}: {reason} for {name}; use {OPTION}=1"]
    config: Any = skeleton.config.get_text_config()
    counts = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
    }
    counts |= _widths(skeleton, styles)
    wrong = [f"{what}={count}" for what, count in counts.items() if count % size]
    if not wrong:
        return []
    return [f"{OPTION}={size} does not divide {', '.join(wrong)} of {name}: use a size that divides them all"]


def _widths(skeleton: PreTrainedModel, styles: Mapping[str, str]) -> dict[str, int]:
    """Return, for each split matrix, the size of the side that is divided."""
    found: dict[str, int] = {}
    for path, module in skeleton.named_modules():
        pattern = _pattern(path)
        if styles.get(pattern) == COLUMN:
            found[f"{pattern}.out_features"] = module.out_features
        elif styles.get(pattern) == ROW:
            found[f"{pattern}.in_features"] = module.in_features
    return found


def _pattern(path: str) -> str:
    """Replace layer numbers: model.layers.3.mlp.up_proj -> model.layers.*.mlp.up_proj"""
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)
