"""Join weights of which ranks hold shares, and read weights that other ranks hold.

Ranks of a tensor-parallel group hold shares of one weight. Each stage of a pipeline holds weights of its own.

DeepSpeed's AutoTP notes the dimension of the cut and the shape of the whole weight on every parameter that it cuts.
Other parameters, such as norms and embeddings, are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from remat.machine import distributed

T = TypeVar("T")
NOTE = "ds_autotp_universal_checkpoint_meta"  # deepspeed.checkpoint.constants.DS_AUTOTP_UC_META


def group_size(engine: Any) -> int:
    """Return how many ranks share the layers of `engine`."""
    return int(engine.autotp_size()) or 1


def stage_count(engine: Any) -> int:
    """Return into how many stages the layers of `engine` are divided."""
    return int(getattr(engine, "num_stages", 1))


def of_stages(engine: Any, own: T) -> list[T]:
    """Return `own` of each stage's first rank, in the order of stages. Collective where there are several."""
    if stage_count(engine) == 1:
        return [own]
    return distributed.gather(own)[:: distributed.place()[1] // stage_count(engine)]


def cut_of(parameter: torch.Tensor) -> int | None:
    """Return the dimension along which `parameter` is cut; None where ranks hold no shares of it."""
    note = getattr(parameter, NOTE, None)
    return None if note is None else note["partition_dim"]


def find_cuts(module: nn.Module) -> dict[str, int]:
    """Return {name: dimension of the cut} of the weights of which ranks hold shares."""
    cuts = {name: cut_of(parameter) for name, parameter in module.named_parameters()}
    return {name: dim for name, dim in cuts.items() if dim is not None}


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """Return the shape of the whole weight: before ZeRO-3 sharded it, and before ranks took their shares."""
    if cut_of(parameter) is not None:
        return torch.Size(getattr(parameter, NOTE)["original_shape"])
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def gather(parameter: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return the whole weight, given this rank's share of `parameter` as DeepSpeed gathered it from ZeRO's shards.

    Collective in the tensor-parallel group for a parameter that is cut; any other is returned as it is.
    """
    dim = cut_of(parameter)
    if dim is None:
        return share
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import groups

    group = groups.get_tensor_model_parallel_group()
    own = share.detach().to(get_accelerator().current_device_name()).contiguous()
    shares = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shares, own, group=group)
    return torch.cat(shares, dim=dim)


def read_over_stages(
    engine: Any,
    read: Callable[[str, bool], torch.Tensor | None],
    held: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
) -> Callable[[str, bool], torch.Tensor | None]:
    """Return a collective function that reads a weight of any stage: the stage's first rank broadcasts it.

    `held` are the weights of this rank's stage. `read(name, keep)` reads one of them, floating-point ones in `dtype`,
    and returns None unless it is to `keep` the weight.
    """
    from deepspeed.accelerator import get_accelerator

    rank, size = distributed.place()
    per_stage, device = size // stage_count(engine), get_accelerator().current_device_name()
    forms = {name: (value.shape, value.dtype) for name, value in held.items()}
    owners: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
    for stage, named in enumerate(of_stages(engine, forms)):
        for name, (shape, kind) in named.items():
            owners.setdefault(name, (stage * per_stage, shape, dtype if kind.is_floating_point else kind))

    def read_any(name: str, keep: bool) -> torch.Tensor | None:
        owner, shape, kind = owners[name]
        value = read(name, rank == owner) if owner // per_stage == rank // per_stage else None
        sent = torch.empty(shape, dtype=kind, device=device) if value is None else value.to(device)
        dist.broadcast(sent, owner)
        return sent.cpu() if keep else None

    return read_any
