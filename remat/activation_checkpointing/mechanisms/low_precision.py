"""Store an activation in 8 bits with one scale per row. It changes the gradients slightly, so it is never a default.

fp8 is float8_e4m3fn (3 mantissa bits: an error of at most 1/16 of each value), int8 is uniform (at most 1/254 of the
largest value of the row). A row is the last dimension; its scale is its largest finite magnitude over 448 or 127.
"""

from __future__ import annotations

import torch

from remat.config.options import StorageDtype

LARGEST = {StorageDtype.fp8: 448.0, StorageDtype.int8: 127.0}
STORED_AS = {StorageDtype.fp8: torch.float8_e4m3fn, StorageDtype.int8: torch.int8}
NOT_FINITE = -128  # int8 has no infinity: the one value that no number is rounded to


def encode(tensor: torch.Tensor, dtype: StorageDtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(payload [..., n] of one byte each, scales [..., 1] fp32) of a floating point `tensor` [..., n].

    Rows of zeros come back exactly. What is not finite comes back as NaN and leaves the rest of its row alone.
    """
    values = tensor.detach().float()
    finite = torch.isfinite(values)
    values = torch.where(finite, values, 0.0)
    scales = values.abs().amax(dim=-1, keepdim=True) / LARGEST[dtype]
    values = values / torch.where(scales > 0, scales, 1.0)
    if dtype is StorageDtype.int8:
        return torch.where(finite, values.round_(), NOT_FINITE).to(torch.int8), scales
    return torch.where(finite, values, torch.nan).to(torch.float8_e4m3fn), scales


def decode(payload: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor [..., n] in `dtype` that `encode` stored."""
    values = payload.float() * scales
    if payload.dtype == torch.int8:
        values = torch.where(payload == NOT_FINITE, torch.nan, values)
    return values.to(dtype)
