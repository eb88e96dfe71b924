"""Weights of which each rank of a tensor-parallel group holds a share: where they are cut, and how to join them.

DeepSpeed's AutoTP notes on every parameter that it cuts along which dimension that is and what shape the whole has.
Other parameters, such as norms and embeddings, are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

NOTE = "ds_autotp_universal_checkpoint_meta"  # deepspeed.checkpoint.constants.DS_AUTOTP_UC_META


def group_size(engine: Any) -> int:
    """Return how many ranks share the layers of `engine`."""
    return int(engine.autotp_size()) or 1


def find_cuts(module: nn.Module) -> dict[str, int]:
    """Map the name of each weight of which ranks hold shares to the dimension along which it is cut."""
    cuts = {name: _cut(parameter) for name, parameter in module.named_parameters()}
    return {name: dim for name, dim in cuts.items() if dim is not None}


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """Return the shape of the whole weight: before ZeRO-3 sharded it, and before ranks took their shares."""
    if _cut(parameter) is not None:
        return torch.Size(getattr(parameter, NOTE)["original_shape"])
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def gather(parameter: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return the whole weight, given this rank's share of `parameter` as DeepSpeed gathered it from ZeRO's shards.

    Collective in the tensor-parallel group for a parameter that is cut; any other is returned as it is.
    """
    dim = _cut(parameter)
    if dim is None:
        return share
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import groups

    group = groups.get_tensor_model_parallel_group()
    own = share.detach().to(get_accelerator().current_device_name()).contiguous()
    shares = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shares, own, group=group)
    return join(shares, dim)


def join(shares: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Return the whole weight of the shares of all ranks of a group, in rank order."""
    return torch.cat(list(shares), dim=dim)


def _cut(parameter: torch.Tensor) -> int | None:
    note = getattr(parameter, NOTE, None)
    return None if note is None else note["partition_dim"]
