"""Ranks and the few collectives the project needs. The only module that starts a process group."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

LAZY = "TORCH_GLOO_LAZY_INIT"  # torch reads it when a group is made


@dataclass(frozen=True)
class World:
    """This process among all: `rank` of `size`, `local_rank` of `local_size` on this node, and its device.

    `tensor_parallel_size` consecutive ranks form a group, which reads the same data as one: group `data_rank` of
    `data_size`.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    tensor_parallel_size: int = 1

    @property
    def data_rank(self) -> int:
        return self.rank // self.tensor_parallel_size

    @property
    def data_size(self) -> int:
        return self.size // self.tensor_parallel_size

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def world_size_from_env() -> int:
    """The number of ranks the launcher announced; 1 for a plain `python train.py`."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank_from_env() -> int:
    return int(os.environ.get("RANK", "0"))


def local_rank_from_env() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_size_from_env() -> int:
    """Ranks on this node: LOCAL_SIZE under `deepspeed`, LOCAL_WORLD_SIZE under `torchrun`, else all of them."""
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or world_size_from_env())


def select_device() -> None:
    """Make this rank's GPU the current one before anything asks CUDA a question, or all ranks settle on the first."""
    local_rank = local_rank_from_env()
    if local_rank < torch.cuda.device_count():  # too few GPUs is preflight's to report
        torch.cuda.set_device(local_rank)


def settle_environment() -> None:
    """What a launcher says of the ranks; a process that none started is alone."""
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0" if os.environ["WORLD_SIZE"] == "1" else "29500")


def init(timeout_minutes: float = 30.0) -> World:
    """Join the process group (once per process) and return this rank's place in it.

    On a CPU machine DeepSpeed's shared-memory all-reduce is switched off: it leaves a 66 MiB file per rank and
    port in /dev/shm, even after a clean exit, until the machine is out of memory.
    """
    import deepspeed
    import deepspeed.ops

    select_device()
    if not dist.is_initialized():
        settle_environment()
        if not torch.cuda.is_available():
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(
            dist_backend="nccl" if torch.cuda.is_available() else "gloo",
            timeout=datetime.timedelta(minutes=timeout_minutes),
            auto_mpi_discovery=False,
            verbose=False,
        )
    return current()


def current() -> World:
    """The world of an initialised process group."""
    local_rank = local_rank_from_env()
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_rank=local_rank,
        local_size=local_size_from_env(),
        device=device,
    )


def cpu_group() -> Any:
    """A gloo group of all ranks that connects where it is used: its all-reduce goes round a ring, so to two others.

    As a rule gloo connects every rank with every other one, half a million connections for 1000 ranks.
    """
    before = os.environ.get(LAZY)
    os.environ[LAZY] = "1"
    try:
        return dist.new_group(backend="gloo")
    finally:
        if before is None:
            del os.environ[LAZY]
        else:
            os.environ[LAZY] = before


def shut_down() -> None:
    """Leave the process group together: a rank that exits while another still saves would end it."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def broadcast(value: Any) -> Any:
    """Rank 0's picklable `value` on every rank. Set-up only: it pickles and blocks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather(value: Any) -> list[Any]:
    """Every rank's picklable `value`, in rank order, on every rank. Set-up only."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def max_min(values: dict[str, float], device: torch.device) -> dict[str, float]:
    """Maximum over ranks under each key, and the minimum under `key_min`, in one all-reduce.

    Every rank must pass the same keys in the same order.
    """
    names = list(values)
    numbers = torch.tensor([values[n] for n in names], dtype=torch.float64, device=device)
    both = torch.cat([numbers, -numbers])
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
    highs, lows = both.tolist()[: len(names)], both.tolist()[len(names) :]
    result: dict[str, float] = {}
    for name, high, low in zip(names, highs, lows, strict=True):
        result[name] = high
        result[f"{name}_min"] = -low
    return result
