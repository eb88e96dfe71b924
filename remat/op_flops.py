"""FLOPs of one operation: torch's formulas and those it lacks. A multiply-add is 2; causal attention counts whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

FOUR_BIT_PRODUCT = "bitsandbytes.gemm_4bit"  # by name: the library is there only if it is used


def formula(func: Any) -> Callable[..., int] | None:
    """`formula(func)(*args, **kwargs, out_val=result)`; None when `func` is no matrix product and no attention."""
    packet = getattr(func, "_overloadpacket", func)
    if str(packet) == FOUR_BIT_PRODUCT:
        return _four_bit
    return flop_registry.get(packet) or _MORE.get(packet)


def dequantised_bytes(func: Any, args: Any) -> int:
    """What a product with a 4-bit weight allocates within: the weight in the dtype of its input, and its constants.

    No dispatcher sees it. bitsandbytes 0.50.2, backends/cuda/ops.py:911-914, as on a CPU (backends/default/ops.py:336).
    A fused kernel that needs neither runs for few tokens only (cuda/ops.py:583).
    """
    if str(getattr(func, "_overloadpacket", func)) != FOUR_BIT_PRODUCT:
        return 0
    (rows, columns), block = args[2], args[4]
    return int(rows * columns * args[0].element_size() + 4 * -(-rows * columns // block))


def _four_bit(left: Any, packed: Any, shape: Any, *args: Any, **kwargs: Any) -> int:
    """[..., k] x [n, k] as `shape` says."""
    return 2 * int(left.numel()) * int(shape[0])


def _cpu_attention(query: Any, key: Any, value: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _cpu_attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


def _grouped_mm(left: Any, right: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """[tokens, k] x [experts, k, n] forward, [k, tokens] x [tokens, n] for the weights' gradient."""
    return 2 * left.shape[0] * left.shape[1] * right.shape[-1]


aten = torch.ops.aten
_MORE: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
    aten._grouped_mm: _grouped_mm,
}
