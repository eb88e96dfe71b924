"""Shard QLoRA's 4-bit weights under ZeRO-3: every matrix is one frozen parameter of bytes.

ZeRO-3 partitions, gathers, prefetches, offloads and releases such a parameter like any weight. Its product is an
autograd function of this file. That of bitsandbytes keeps a view of the gathered bytes, which ZeRO-3 cannot release,
so the whole base would stay gathered from forward to backward. The arithmetic is that of bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import QuantState, create_dynamic_map, dequantize_4bit, quantize_4bit
from torch import nn
from transformers.pytorch_utils import Conv1D

from remat.model.four_bits.layout_4bit import BLOCK, BLOCK_OF_CONSTANTS, Layout


class Product(torch.autograd.Function):
    """Compute rows [..., in] times the transposed matrix in `flat`, plus `bias`: [..., out].

    It saves the parameter itself and no view of it, so backward reads the bytes that ZeRO-3 has gathered again.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, flat: torch.Tensor, bias: torch.Tensor | None, layout: Layout
    ) -> torch.Tensor:
        ctx.save_for_backward(flat)
        ctx.layout = layout
        packed, state = opened(flat, layout)
        product: torch.Tensor = bnb.matmul_4bit(rows, packed, quant_state=state, bias=bias)
        return product

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (flat,) = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        packed, state = opened(flat, ctx.layout)
        return grads[0] @ dequantize_4bit(packed, state).to(grads[0].dtype), None, None, None


class ShardedLinear4bit(bnb.nn.Linear4bit):
    """A subclass of Linear4bit, so that peft recognises it. Only its own forward can read its weight of flat bytes."""

    layout_4bit: Layout
    source_cls: type[nn.Module]  # the class of the module that it replaces

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = self.layout_4bit.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        product: torch.Tensor = Product.apply(x.to(dtype), self.weight, bias, self.layout_4bit)
        return product.to(x.dtype)


def close(weight: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Quantise a `weight` [out, in] on its device; return the flat bytes [flat_bytes]."""
    table(weight.device)
    packed, state = quantize_4bit(
        weight.contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
    )
    return joined(layout, packed, state.absmax, state.state2.absmax, state.offset)


def joined(
    layout: Layout, packed: torch.Tensor, constants: torch.Tensor, nested: torch.Tensor, mean: torch.Tensor
) -> torch.Tensor:
    """Join the parts to flat bytes: 4-bit weights, 8-bit constants, their fp32 constants and their fp32 mean."""
    flat = torch.zeros(layout.flat_bytes, dtype=torch.uint8, device=packed.device)
    for part, values in zip(layout.cut(flat), (packed, constants, nested, mean), strict=True):
        part.copy_(values.reshape(-1).view(torch.uint8))
    return flat


def opened(flat: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, QuantState]:
    """Return views of a gathered `flat` parameter in bitsandbytes' form: the packed weights and their constants."""
    packed, constants, nested, mean = layout.cut(flat.detach())
    of_constants = QuantState(
        absmax=nested.view(torch.float32),
        code=table(flat.device),
        blocksize=BLOCK_OF_CONSTANTS,
        dtype=torch.float32,
    )
    state = QuantState(
        absmax=constants,
        shape=torch.Size(layout.shape),
        dtype=layout.dtype,
        blocksize=BLOCK,
        quant_type="nf4",
        offset=mean.view(torch.float32)[0],
        state2=of_constants,
    )
    return packed.view(-1, 1), state


@cache
def table(device: torch.device) -> torch.Tensor:
    """Return the 256 values of 8-bit constants on `device`, one table for all matrices.

    bitsandbytes makes its own table once per process, when it first quantises. On meta it would have no values.
    """
    found: torch.Tensor = create_dynamic_map()
    bnb.functional.name2qmap.setdefault("dynamic", found)
    return found.to(device)


def dequantise(module: ShardedLinear4bit) -> torch.Tensor:
    """Return the dequantised weight [out, in] of `module`, which must be gathered, in the dtype of its products."""
    weight: torch.Tensor = dequantize_4bit(*opened(module.weight.data, module.layout_4bit))
    return weight


def replacement(old: Any, flat: torch.Tensor, dtype: torch.dtype) -> ShardedLinear4bit:
    """Return the module that replaces the linear module `old`, with its bias and the `flat` bytes as weight."""
    rows, columns = shape_of(old)
    with torch.device("meta"):
        new = ShardedLinear4bit(columns, rows, old.bias is not None, dtype, quant_type="nf4")
    parameter: Any = nn.Parameter(flat, requires_grad=False)
    parameter.compress_statistics, parameter.quant_type = True, "nf4"  # peft reads these
    parameter.constants = table(flat.device)  # found by the recording of a layer, beside its weights
    new.weight = parameter
    if old.bias is not None:
        new.bias = old.bias
    new.layout_4bit, new.source_cls = Layout((rows, columns), dtype), type(old)
    module: ShardedLinear4bit = new.train(old.training)
    return module


def shape_of(old: Any) -> tuple[int, int]:
    """Return [out, in] of a linear module, whole or sharded; GPT-2's Conv1D holds its weight transposed."""
    first, second = getattr(old.weight, "ds_shape", old.weight.shape)
    return (second, first) if isinstance(old, Conv1D) else (first, second)


def quantise_whole(old: Any, dtype: torch.dtype) -> ShardedLinear4bit:
    """Return the 4-bit module that replaces the linear module `old`, whose weight must be whole or gathered."""
    weight = old.weight.detach()
    weight = weight.T if isinstance(old, Conv1D) else weight
    if weight.is_meta:
        flat = torch.empty(Layout(shape_of(old), dtype).flat_bytes, dtype=torch.uint8, device="meta")
        return replacement(old, flat, dtype)
    return replacement(old, close(weight, Layout(shape_of(old), dtype)), dtype)


def shard(parameters: Sequence[tuple[str, Any]], ds_config: dict[str, Any]) -> None:
    """Shard these named parameters by ZeRO-3, with rank 0's values. Collective."""
    import deepspeed

    holder = nn.Module()
    for name, parameter in parameters:
        holder.register_parameter(name.replace(".", "_"), parameter)
    deepspeed.zero.Init(module=holder, config_dict_or_path=ds_config)


def quantise_shards(model: Any, paths: Sequence[str], dtype: torch.dtype, ds_config: dict[str, Any]) -> None:
    """Replace linear modules that ZeRO-3 has sharded in 16 bits by 4-bit ones, one after another. Collective.

    Each rank quantises every matrix, and holds one whole matrix at a time.
    """
    import deepspeed

    for path in paths:
        old = model.get_submodule(path)
        with deepspeed.zero.GatheredParameters([old.weight]):
            new = quantise_whole(old, dtype)
        shard([("weight", new.weight)], ds_config)
        old.weight.ds_tensor = None  # closures refer to it: it would stay until garbage collection
        model.set_submodule(path, new)
    model.is_loaded_in_4bit = True  # peft reads this
