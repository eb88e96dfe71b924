"""Frozen parameters stay out of saved states: the model must be built with the same values, and that is checked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from remat.saving.manifest import SaveError

VALUES = 16  # of each parameter


def present(module: nn.Module) -> bool:
    return any(not p.requires_grad for p in module.parameters())


def fingerprint(module: nn.Module) -> str:
    """Digest of a few values of each frozen parameter, as this rank holds it."""
    return _digest(module, lambda parameter: getattr(parameter, "ds_tensor", parameter).detach().flatten())


def fingerprint_of_first(module: nn.Module, ranks: int) -> str:
    """On rank 0, what `fingerprint` gives there when the same model is spread over `ranks` ranks. Collective."""
    from deepspeed.runtime.zero import GatheredParameters

    def held(parameter: Any) -> torch.Tensor:
        if not hasattr(parameter, "ds_tensor"):
            return parameter.detach().flatten()
        count = -(-parameter.ds_numel // ranks)
        if parameter.ds_tensor.numel() >= min(count, VALUES):
            return parameter.ds_tensor.detach().flatten()[:count]
        with GatheredParameters([parameter]):
            return parameter.detach().flatten()[:count].clone()

    return _digest(module, held)


def _digest(module: nn.Module, held: Callable[[nn.Parameter], torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        if not parameter.requires_grad:
            digest.update(f"{name}{held(parameter)[:VALUES].float().tolist()}".encode())
    return digest.hexdigest()


def load_trainable(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
    """Strict loading of a state without frozen parameters."""
    result = dst.load_state_dict(src, strict=False)
    absent = {name for name, p in dst.named_parameters(remove_duplicate=False) if not p.requires_grad}
    missing = set(result.missing_keys) - absent
    if missing or result.unexpected_keys:
        raise SaveError(f"the model lacks {result.unexpected_keys[:5]}, the state lacks {sorted(missing)[:5]}")
