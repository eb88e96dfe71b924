"""Tells whether a tensor was edited in place."""

from __future__ import annotations

import torch


class Version:
    """Of a tensor, as it is now, without holding its memory: an alias shares the version counter."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._alias = tensor.detach()
        self._alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._version = tensor._version

    def changed(self) -> bool:
        return self._alias._version != self._version
