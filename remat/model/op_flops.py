"""FLOPs of one operation: torch's formulas, and ours where it has none or too narrow a one. A multiply-add is 2.

Causal attention counts whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

FOUR_BIT_PRODUCT = "bitsandbytes.gemm_4bit"  # by name: the library is there only if it is used


def flop_formula(func: Any) -> Callable[..., int] | None:
    """`formula(func)(*args, **kwargs, out_val=result)`; None when `func` is no matrix product and no attention."""
    packet = getattr(func, "_overloadpacket", func)
    if str(packet) == FOUR_BIT_PRODUCT:
        return _four_bit
    return _OWN.get(packet) or flop_registry.get(packet)


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


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """QK^T and PV: [b, h, s_q, d_q], [b, h or fewer, s_k, d_q], [b, h or fewer, s_k, d_v].

    torch's own formulas refuse grouped-query attention before 2.13.
    """
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[2] * (width + value.shape[3])


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """QK^T again, then the gradients of P, V, Q and K: five products, three of them of the width of the query."""
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[2] * (3 * width + 2 * value.shape[3])


def _grouped_mm(left: Any, right: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """[tokens, k] x [experts, k, n] forward, [k, tokens] x [tokens, n] for the weights' gradient."""
    return 2 * left.shape[0] * left.shape[1] * right.shape[-1]


aten = torch.ops.aten
_KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_OWN: dict[Any, Callable[..., int]] = {
    aten._grouped_mm: _grouped_mm,
    **{getattr(aten, f"_scaled_dot_product_{name}"): _attention for name in _KERNELS},
    **{getattr(aten, f"_scaled_dot_product_{name}_backward"): _attention_backward for name in _KERNELS},
}
