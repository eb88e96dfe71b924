"""Keep frozen parameters out of saved states, and check at a resume that the model was built with the same values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from remat.saving.manifest import SaveError

VALUES = 16  # values of each parameter in the fingerprint


def present(module: nn.Module) -> bool:
    return any(not p.requires_grad for p in module.parameters())


def fingerprint(module: nn.Module) -> str:
    """Return a digest of the first values of each frozen parameter, of the part that this rank holds."""
    return _digest(module, lambda parameter: getattr(parameter, "ds_tensor", parameter).detach().flatten())


def fingerprint_of_first(module: nn.Module, ranks: int) -> str:
    """Return on rank 0 what `fingerprint` gives there when `ranks` ranks hold the same model. Collective."""
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
    """Load a state without frozen parameters into `dst`.

    Raises SaveError when it has unexpected names, or lacks any but those of frozen parameters.
    """
    result = dst.load_state_dict(src, strict=False)
    absent = {name for name, p in dst.named_parameters(remove_duplicate=False) if not p.requires_grad}
    missing = set(result.missing_keys) - absent
    if missing or result.unexpected_keys:
        raise SaveError(f"the model lacks {result.unexpected_keys[:5]}, the state lacks {sorted(missing)[:5]}")
