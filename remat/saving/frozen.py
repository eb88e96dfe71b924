"""Load states that lack frozen parameters, and check that the model was built with the same values of those."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from remat.config.options import ConfigError
from remat.saving import safe_load, shares
from remat.saving.manifest import ENGINE, Manifest, SavedState, SaveError

VALUES = 16  # values of each parameter in the fingerprint


def present(module: nn.Module) -> bool:
    return any(not p.requires_grad for p in module.parameters())


def fingerprint(module: nn.Module) -> str:
    """Return a digest of the first values of each frozen parameter, in the part that this rank holds."""
    return _digest(module, lambda _, parameter: getattr(parameter, "ds_tensor", parameter).detach().flatten())


def fingerprint_of_first(module: nn.Module, saved: Manifest) -> str:
    """Return on rank 0 the `fingerprint` of this model as rank 0 of the launch that saved computed it. Collective."""

    def held(name: str, parameter: Any) -> torch.Tensor:
        dim, ranks = saved.cuts.get(name), saved.world_size
        share = shares.whole_shape(parameter).numel()
        if dim is not None:  # ZeRO-3 shards a share over the ranks that hold the same share
            share, ranks = share // saved.tensor_parallel_size, ranks // saved.tensor_parallel_size
        count = min(VALUES, -(-share // ranks) if saved.zero_stage == 3 else share)
        return _first_values(parameter, dim, saved.tensor_parallel_size, count)

    return _digest(module, held)


def _first_values(parameter: Any, dim: int | None, shared_by: int, count: int) -> torch.Tensor:
    """Return on rank 0 the first `count` values, at most VALUES, of the first share of a parameter.

    The parameter is cut into `shared_by` shares along `dim`; with None the share is all of it. Collective when the
    values lie on several ranks.
    """
    from deepspeed.runtime.zero import GatheredParameters

    apart = dim is not None or shares.cut_of(parameter) is not None
    if not apart and getattr(parameter, "ds_tensor", parameter).numel() >= count:
        return getattr(parameter, "ds_tensor", parameter).detach().flatten()[:count]
    with GatheredParameters([parameter]):  # does nothing for a parameter that is not sharded
        # enough rows for these values, whichever dimension is cut in the saved run and in this one
        rows = shares.gather(parameter, parameter.detach()[:VALUES])
    if dim is not None:
        rows = rows.narrow(dim, 0, min(rows.shape[dim], shares.whole_shape(parameter)[dim] // shared_by))
    return rows.flatten()[:count].clone()


def _digest(module: nn.Module, held: Callable[[str, nn.Parameter], torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        if not parameter.requires_grad:
            digest.update(f"{name}{held(name, parameter)[:VALUES].float().tolist()}".encode())
    return digest.hexdigest()


def check_same(state: SavedState, noted: str, found: str) -> None:
    """Raise ConfigError when `state` has no frozen weights and the fingerprint `found` is not the `noted` one."""
    if state.info.frozen_excluded and found != noted:
        raise ConfigError(
            f"resume: {state.path} holds no frozen weights, and this model's differ from those of the saved run: "
            "build the model with model.init and model.path as in the saved run"
        )


def load_engine(engine: Any, folder: Path, info: Manifest) -> None:
    """Let DeepSpeed load its files in `folder`. Raises SaveError when it loads nothing. Collective."""
    load_module = _load_trainable if info.frozen_excluded else None
    with safe_load.guarding():
        loaded, _ = engine.load_checkpoint(str(folder), tag=ENGINE, custom_load_fn=load_module)
    if loaded is None:
        raise SaveError(f"DeepSpeed found nothing to load in {folder / ENGINE}")


def _load_trainable(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
    """Load a state without frozen parameters into `dst`.

    Raises SaveError when `src` has unknown names, or lacks a name that is not a frozen parameter's.
    """
    result = dst.load_state_dict(src, strict=False)
    absent = {name for name, p in dst.named_parameters(remove_duplicate=False) if not p.requires_grad}
    missing = set(result.missing_keys) - absent
    if missing or result.unexpected_keys:
        raise SaveError(f"the model lacks {result.unexpected_keys[:5]}, the state lacks {sorted(missing)[:5]}")
