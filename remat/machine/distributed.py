"""Join the process group, find the network interface between nodes, and run the few collectives the project needs.

This is the only module that starts a process group. gloo listens on the address of this host's name, which Debian and
Ubuntu map to 127.0.1.1 in /etc/hosts: no other node can reach that. The kernel's route to another node names the
right interface.
"""

from __future__ import annotations

import datetime
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
import torch.distributed as dist

from remat.config.metrics import lowest
from remat.config.options import ConfigError

INTERFACE = "GLOO_SOCKET_IFNAME"  # torch reads it when a group is made, as LAZY
LONGEST_LOOK_S = 1.0
Work = Callable[[Callable[[], None]], Any]
LAZY = "TORCH_GLOO_LAZY_INIT"


@dataclass(frozen=True)
class World:
    """This process among all ranks: `rank` of `size`, `local_rank` of `local_size` on this node, and its device.

    `tensor_parallel_size` consecutive ranks share layers, or `sequence_parallel_size` share sequences. All ranks of
    such a group read the same data, as group `data_rank` of `data_size`. ZeRO shards over `zero_size` ranks and
    averages gradients over them: ranks that share sequences have gradients of their own. With stages, the ranks of one
    stage are consecutive, and a pipeline has one rank of each stage.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    tensor_parallel_size: int = 1
    sequence_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def stage(self) -> int:
        """Return the pipeline stage that this rank runs; 0 without stages."""
        return self.rank // self.zero_size if self.pipeline_parallel_size > 1 else 0

    @property
    def data_rank(self) -> int:
        return self.data_rank_of(self.rank)

    @property
    def data_size(self) -> int:
        return self.zero_size // self.sequence_parallel_size

    @property
    def sequence_rank(self) -> int:
        """Return which block of each sequence this rank has."""
        return self.rank % self.sequence_parallel_size

    @property
    def zero_size(self) -> int:
        return self.size // (self.tensor_parallel_size * self.pipeline_parallel_size)

    def data_rank_of(self, rank: int) -> int:
        """Return the number of the group that `rank` is in; all ranks of a group read the same data."""
        if self.pipeline_parallel_size > 1:
            return rank % self.data_size
        return rank // (self.tensor_parallel_size * self.sequence_parallel_size)

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def world_size_from_env() -> int:
    """Return the world size that the launcher set; 1 for a plain `python train.py`."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank_from_env() -> int:
    return int(os.environ.get("RANK", "0"))


def local_rank_from_env() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_size_from_env() -> int:
    """Return the number of ranks on this node.

    It is LOCAL_SIZE under `deepspeed`, LOCAL_WORLD_SIZE under `torchrun`, else the world size.
    """
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or world_size_from_env())


def select_device() -> None:
    """Make this rank's GPU the current one. Call it before any other CUDA call, or all ranks use the first GPU."""
    local_rank = local_rank_from_env()
    if local_rank < torch.cuda.device_count():  # preflight reports too few GPUs
        torch.cuda.set_device(local_rank)


def settle_environment() -> None:
    """Set the variables of a launcher (RANK, WORLD_SIZE, ...) where they are missing.

    A process that no launcher started is alone.
    """
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0" if os.environ["WORLD_SIZE"] == "1" else "29500")


def init(timeout_minutes: float = 30.0) -> World:
    """Join the process group (once per process) and return this rank's World.

    On a CPU machine DeepSpeed's shared-memory all-reduce is switched off. It leaves a 66 MiB file per rank and port
    in /dev/shm, even after a clean exit, until the machine is out of memory.
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


def as_launched() -> World:
    """Return this rank's World as the launcher's environment says it, before the process group exists."""
    local_rank = local_rank_from_env()
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    return World(rank_from_env(), world_size_from_env(), local_rank, local_size_from_env(), device)


def current() -> World:
    """Return the World of an initialised process group."""
    return replace(as_launched(), rank=dist.get_rank(), size=dist.get_world_size())


def cpu_group() -> Any:
    """Return a gloo group of all ranks that connects two ranks only when they first exchange data.

    Its all-reduce goes round a ring, so each rank connects to two others. By default gloo connects every rank with
    every other one: half a million connections for 1000 ranks.
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
    """Leave the process group together: a rank that exits early would end another one that still saves."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def broadcast(value: Any) -> Any:
    """Return rank 0's picklable `value` on every rank. For set-up only: it pickles and blocks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather(value: Any) -> list[Any]:
    """Return every rank's picklable `value`, in rank order, on every rank. For set-up only."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def place() -> tuple[int, int]:
    """Return (rank, world size); (0, 1) outside a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def while_some_work(work: Work | None, on_progress: Callable[[], None]) -> list[Any]:
    """Run `work` on the ranks that have it; return every rank's result on every rank. For set-up only. Collective.

    The result of a rank without `work` is None. Work may take longer than a collective's time-out: it runs in a thread,
    and calls its argument at every step of progress. The ranks meet at least every second; all call `on_progress` when
    any rank made progress. A failure on one rank is raised on every rank: unchanged on that rank; on the others a
    ConfigError as ConfigError, anything else as RuntimeError.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [work(on_progress) if work else None]
    worker = _Worker(work, on_progress)
    heard, wait_s = None, 0.02
    while heard is None or any(runs for _, runs in heard):
        states = gather((worker.steps, worker.is_alive()))
        if states != heard:
            on_progress()
        heard = states
        if any(runs for _, runs in heard):
            worker.join(wait_s)
            if not worker.is_alive():
                time.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_LOOK_S)
    outcomes = gather((worker.result, worker.error_in_words(), isinstance(worker.error, ConfigError)))
    if worker.error is not None:
        raise worker.error
    for rank, (_, error, is_config) in enumerate(outcomes):
        if error is not None:
            raise ConfigError(error) if is_config else RuntimeError(f"rank {rank}: {error}")
    return [result for result, _, _ in outcomes]


class _Worker(threading.Thread):
    def __init__(self, work: Work | None, on_progress: Callable[[], None]) -> None:
        super().__init__(name="remat-works", daemon=True)
        self.steps = 0
        self.result: Any = None
        self.error: BaseException | None = None
        self._work, self._on_progress = work, on_progress
        self.start()

    def run(self) -> None:
        if self._work is None:
            return
        try:
            self.result = self._work(self._advance)
        except BaseException as error:
            self.error = error

    def error_in_words(self) -> str | None:
        if self.error is None or isinstance(self.error, ConfigError):
            return None if self.error is None else str(self.error)
        return f"{type(self.error).__name__}: {self.error}"

    def _advance(self) -> None:
        self.steps += 1
        self._on_progress()


def max_min(values: dict[str, float], device: torch.device) -> dict[str, float]:
    """Return the maximum over ranks under each key, and the minimum under `key_min`, with one all-reduce.

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
        result[lowest(name)] = -low
    return result


def own_address(host: str, port: int) -> str | None:
    """Return the address from which this process would send to `host`; None if `host` is unknown or has no route.

    Connecting a datagram socket sends nothing: the kernel looks up the route.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def interface_of(address: str) -> str | None:
    """Return the network interface that has `address`, or None."""
    for name, addresses in _interfaces().items():
        if address in {known.split("%")[0] for known in addresses}:
            return name
    return None


def choose_interface(addresses: Iterable[str | None], env: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Return (interface for gloo, problem); both None where gloo needs no help or the user has chosen.

    `addresses` has each rank's address on its route to rank 0. Ranks with one address are on one node.
    """
    if asked := env.get(INTERFACE):
        have = _interfaces()
        lacking = [name for name in asked.split(",") if name not in have]
        if lacking:
            return None, f"{INTERFACE}={asked}: there is no {', '.join(lacking)} (there is {', '.join(have)})"
        return None, None
    others = sorted({address for address in addresses if address and not is_loopback(address)})
    if not others or len({address for address in addresses if address}) == 1:
        return None, None
    for other in others:
        mine = own_address(other, 1)
        if mine and not is_loopback(mine) and (name := interface_of(mine)):
            return name, None
    return None, (
        f"no network interface leads to {', '.join(others[:3])}: set {INTERFACE} on each node to the one that reaches "
        "the others (`ip route get ADDRESS` names it)"
    )


def _interfaces() -> dict[str, list[str]]:
    return {name: [entry.address for entry in found] for name, found in psutil.net_if_addrs().items()}
