"""A real `remat launch` in a process group of its own, with ranks to watch; whatever it leaves is killed afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tests.support.launcher import ROOT
from tests.support.pool import CPU_ONLY

RANK = Path(__file__).with_name("rank.py")
DEADLINE_S = 240.0


class Supervised:
    """`folder` holds what the ranks of tests/support/rank.py write, `folder/logs` their logs."""

    def __init__(self, folder: Path, *words: str, options: tuple[str, ...] = (), ranks: int = 2) -> None:
        self.folder = folder
        self.size = ranks
        self.seen: set[psutil.Process] = set()
        self.output = folder / "terminal"
        env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | CPU_ONLY
        command = [
            "remat",
            "launch",
            "--num_gpus",
            str(ranks),
            "--log-dir",
            str(folder / "logs"),
            *options,
            *words,
        ]
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # tests under nohup ignore it
            )

    @property
    def out(self) -> str:
        return self.output.read_text(errors="replace")

    def until(self, true: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not true():
            if time.monotonic() > deadline:
                raise AssertionError(f"no {what}:\n{self.out[-4000:]}")
            time.sleep(0.02)

    def ready(self) -> list[int]:
        """The pids of the ranks, once all are ready; every process of the run is watched from now on."""
        files = [self.folder / f"ready-{rank}" for rank in range(self.size)]
        self.until(lambda: all(file.exists() for file in files) or self.process.poll() is not None, "ranks")
        assert self.process.poll() is None, self.out
        self.watch()
        return [int(file.read_text()) for file in files]

    def watch(self) -> None:
        self.seen |= set(psutil.Process(self.process.pid).children(recursive=True))

    def launcher(self, module: str) -> psutil.Process:
        """The process of deepspeed.launcher.runner, or of deepspeed.launcher.launch: the node launcher."""
        return next(p for p in self.seen if f"deepspeed.launcher.{module}" in words_of(p))

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def after(self, spec: Path) -> float:
        """Seconds since the last fault of `spec` (tests/support/faulty_runs.py)."""
        found = json.loads(spec.with_suffix(".fault.json").read_text())
        return float(time.monotonic() - found["monotonic_s"])

    def finish(self, launches: int = 1) -> int:
        """The exit code of a supervisor that starts so many launches, one after another."""
        try:
            return self.process.wait(launches * DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end:\n{self.out[-4000:]}") from None

    def left(self) -> list[psutil.Process]:
        """Processes of the run that still live."""
        return [p for p in self.seen if _lives(p)]

    def close(self) -> None:
        for process in (
            [*self.seen, psutil.Process(self.process.pid)] if self.process.poll() is None else self.seen
        ):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def supervised(
    folder: Path, *words: str, options: tuple[str, ...] = (), ranks: int = 2
) -> Iterator[Supervised]:
    run = Supervised(folder, *words, options=options, ranks=ranks)
    try:
        yield run
    finally:
        run.close()


def words_of(process: psutil.Process) -> str:
    """Its command line; nothing of one that has ended since it was seen."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
