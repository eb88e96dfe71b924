"""Persistent ranks for numerics: `pool.run(function, **kwargs)` calls a top-level function on every rank.

The process group lives as long as the pool: DeepSpeed caches groups and cannot be initialised twice in a process.
Each pool has a free port of its own, its processes die with the test session, and nothing stays in shared memory.
They are forks of a process that has imported everything (tests/support/fork_server.py); those with GPUs are processes
of their own.
GPUs are hidden from the ranks unless a test asks for them: what is held on a CPU machine is held here on any.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from remat.launch.processes import free_port
from tests.support import fork_server
from tests.support.fork_server import CPU_ONLY

TIMEOUT_S = 300


class RankPool:
    def __init__(self, size: int, *, gpus: bool = False) -> None:
        start = _spawn if gpus else _fork
        port = free_port()
        self._pipes: list[Connection] = []
        self._kills: list[Callable[[], None]] = []
        for rank in range(size):
            ours, theirs = multiprocessing.Pipe()
            self._kills.append(start(theirs, {"rank": rank, "size": size, "port": port}))
            theirs.close()
            self._pipes.append(ours)

    def run(self, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Each rank's result, in rank order. A rank's exception is raised here with its traceback."""
        for pipe in self._pipes:
            pipe.send((function, kwargs))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT_S):
                others = [text for text, _ in answers if text]
                others += [text for p in self._pipes[rank + 1 :] if p.poll(0) for text, _ in [p.recv()] if text]
                self.close()
                raise TimeoutError(
                    f"rank {rank} gave no answer to {function.__name__} in {TIMEOUT_S} s\n" + "\n".join(others)
                )
            answers.append(pipe.recv())
        failed = [f"rank {rank}:\n{text}" for rank, (text, _) in enumerate(answers) if text]
        if failed:
            raise AssertionError("\n".join(failed))
        return [value for _, value in answers]

    def close(self) -> None:
        for kill in self._kills:
            kill()


def _fork(pipe: Connection, place: dict[str, int]) -> Callable[[], None]:
    """A rank that is a fork, at the other end of `pipe`; what ends it."""
    job = {
        "do": "serve_pool",
        "with": place,
        "environment": fork_server.environment(dict(os.environ) | CPU_ONLY | {"OMP_NUM_THREADS": "1"}),
        "folder": str(fork_server.ROOT),
    }
    return fork_server.ask(job, pipe.fileno()).kill


def _spawn(pipe: Connection, place: dict[str, int]) -> Callable[[], None]:
    """The same in a process of its own, which sees the GPUs."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=serve, args=(pipe,), kwargs=place | {"gpus": True}, daemon=True)
    process.start()

    def kill() -> None:
        process.kill()
        process.join()

    return kill


def serve(pipe: Connection, rank: int, size: int, port: int, gpus: bool = False) -> None:
    """Call on this rank what comes through `pipe`, until it is closed at the other end."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        **({} if gpus else CPU_ONLY),
    )
    from torch.nn import functional

    from remat.machine import distributed, ops
    from remat.report import console

    linear = functional.linear
    ops.use_environment_folder()
    console.quiet_libraries(debug=False)
    distributed.init()
    failed = False
    while True:
        try:
            function, kwargs = pipe.recv()
        except EOFError:
            return
        if failed:
            leave_groups()
        try:
            pipe.send((None, function(**kwargs)))
            failed = False
        except BaseException:
            pipe.send((traceback.format_exc(), None))
            failed = True
        let_engines_go()
        functional.linear = linear  # ZeRO-3 puts its own there for good: later cases would save other tensors
        gc.collect()
        # After a failure others may still be in a collective of the case, which must not meet a barrier in its place.
        if not failed:
            with contextlib.suppress(RuntimeError):  # a rank is gone: the pool closes, or the next case tells
                leave_groups()
        gc.freeze()  # DeepSpeed keeps much of each engine, and looks for garbage whenever it builds the next


def let_engines_go() -> None:
    """Clear what DeepSpeed keeps of every ZeRO-3 engine of a process: its model on a stack, its gathers in a cache."""
    from deepspeed.runtime.zero import parameter_offload

    parameter_offload.FWD_MODULE_STACK.clear()
    released = (
        parameter_offload.PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    )
    inspect.getclosurevars(released).nonlocals["func"].cache_clear()


def leave_groups() -> None:
    """Destroy all process groups but that of all ranks. Collective.

    Threads of gloo wake a hundred times a second for each group, also of one that an engine still holds: those of fifty
    runs took a core, those of two hundred both.
    """
    import deepspeed
    import torch.distributed as dist

    gc.collect()
    dist.barrier()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            deepspeed.comm.destroy_process_group(group)
