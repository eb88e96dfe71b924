"""Kernels that cannot run on meta tensors, by functions that save the same tensors and move the same bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """DeepSpeed's Triton kernel (runtime/chunked_cross_entropy.py:121), summed over rows: the logits, the targets and
    one fp32 number per row are saved, and the gradient has the logits' dtype. Values are meaningless.
    """
    loss: Tensor = _CrossEntropy.apply(logits.contiguous(), targets.contiguous())
    return loss.sum()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        log_sum_exp = logits.sum(-1, dtype=torch.float32)
        loss = torch.empty_like(log_sum_exp)
        ctx.save_for_backward(logits, targets, log_sum_exp)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, _, log_sum_exp = ctx.saved_tensors
        scale = grads[0].float().contiguous()
        return logits.mul((log_sum_exp * scale).to(logits.dtype).unsqueeze(-1)), None
