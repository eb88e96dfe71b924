"""Ranks started by hand, one process each, with what a launcher of several nodes would tell them: none ends another."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from remat.launch.processes import free_port
from tests.support.launcher import ROOT
from tests.support.pool import CPU_ONLY

DEADLINE_S = 240.0


class ByHand:
    """`words` are those of each rank, which is the only one of its node."""

    def __init__(self, folder: Path, words: Sequence[Sequence[str]], size: int | None = None) -> None:
        port = free_port()
        self.outputs = [folder / f"rank-{rank}.out" for rank in range(len(words))]
        self.processes = []
        for rank, own in enumerate(words):
            env = os.environ | CPU_ONLY | {
                "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": str(size or len(words)), "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
            with self.outputs[rank].open("wb") as out:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, str(ROOT / "train.py"), *own],
                        cwd=ROOT,
                        env=env,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def out(self, rank: int) -> str:
        return self.outputs[rank].read_text(errors="replace")

    def until(self, true: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not true():
            assert time.monotonic() < end, f"no {what}:\n{self.out(0)[-4000:]}"
            time.sleep(0.05)

    def finish(self, *ranks: int) -> list[int]:
        """The exit codes of these ranks, by default of all."""
        return [self.processes[rank].wait(DEADLINE_S) for rank in ranks or range(len(self.processes))]

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def by_hand(folder: Path, words: Sequence[Sequence[str]], size: int | None = None) -> Iterator[ByHand]:
    run = ByHand(folder, words, size)
    try:
        yield run
    finally:
        run.close()
