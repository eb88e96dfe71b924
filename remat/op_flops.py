"""FLOPs of one operation: torch's formulas and those it lacks. A multiply-add is 2; causal attention counts whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count


def formula(func: Any) -> Callable[..., int] | None:
    """`formula(func)(*args, **kwargs, out_val=result)`; None when `func` is no matrix product and no attention."""
    packet = getattr(func, "_overloadpacket", func)
    return flop_registry.get(packet) or _MORE.get(packet)


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
