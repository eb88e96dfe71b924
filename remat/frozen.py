"""Frozen parameters stay out of saved states: the model must be built with the same values, and that is checked."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from remat.manifest import SaveError


def present(module: nn.Module) -> bool:
    return any(not p.requires_grad for p in module.parameters())


def fingerprint(module: nn.Module) -> str:
    """Digest of a few values of each frozen parameter, as this rank holds it."""
    digest = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        if not parameter.requires_grad:
            held = getattr(parameter, "ds_tensor", parameter).detach().flatten()[:16]
            digest.update(f"{name}{held.float().tolist()}".encode())
    return digest.hexdigest()


def load_trainable(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
    """Strict loading of a state without frozen parameters."""
    result = dst.load_state_dict(src, strict=False)
    absent = {name for name, p in dst.named_parameters(remove_duplicate=False) if not p.requires_grad}
    missing = set(result.missing_keys) - absent
    if missing or result.unexpected_keys:
        raise SaveError(f"the model lacks {result.unexpected_keys[:5]}, the state lacks {sorted(missing)[:5]}")
