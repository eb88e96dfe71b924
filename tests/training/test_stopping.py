"""Stop signals are noted instead of ending the process; what a stop is called; one rank agrees with itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from remat.config.options import SaveFailure
from remat.launch import signals
from remat.launch.processes import free_port
from remat.machine.distributed import World
from remat.saving.manifest import SaveError
from remat.training import saves
from remat.training.stopping import StopVote

NOTED = """
import os, signal, sys, time
from remat.launch import signals
"""


def outcome(program: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", NOTED + program], capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.strip()


def test_a_stop_signal_that_comes_twice_is_noted_and_ends_nothing() -> None:
    program = """
def main(argv):
    for name in ("SIGUSR1", "SIGTERM", "SIGTERM", "SIGINT", "SIGINT"):
        os.kill(os.getpid(), signal.Signals[name])
    print(signal.Signals(signals.noted()).name)
    return 75
code = signals.around(main, [])
os.kill(os.getpid(), signal.SIGTERM)  # while Python leaves
sys.exit(code)
"""
    assert outcome(program) == (75, "SIGUSR1")


def test_a_second_ctrl_c_ends_the_process_at_once() -> None:
    program = """
signals.catch()
signals.SAME_STOP_S = 0.0
os.kill(os.getpid(), signal.SIGINT)
print("first", flush=True)
os.kill(os.getpid(), signal.SIGINT)
print("second", flush=True)
"""
    assert outcome(program) == (-signal.SIGINT, "first")


def test_a_forked_process_is_ended_by_the_signals_as_ever() -> None:
    program = """
signals.catch()
child = os.fork()
if not child:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert outcome(program) == (0, str(-signal.SIGTERM))


@pytest.fixture
def caught() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in signals.SIGNALS}
    signals.catch()
    yield
    signals.forget()
    for signum, handler in before.items():
        signal.signal(signum, handler)


def stop(folder: Path, *, max_minutes: float = 0.0, age_s: float = 0.0) -> StopVote:
    world = World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cpu"))
    return StopVote(world, folder, max_minutes=max_minutes, age_s=age_s)


def test_a_signal_is_obeyed_from_the_next_question_on(tmp_path: Path, caught: None) -> None:
    asked = stop(tmp_path)
    asked.start()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert not asked.finish() and asked.reason is None
    assert asked.poll() and asked.reason == "SIGUSR1"
    asked.clear()
    assert not stop(tmp_path).poll()


def test_what_is_flushed_is_agreed_on_beside_it(tmp_path: Path) -> None:
    asked = stop(tmp_path)
    for flushed, agreed in ((0, 0), (1, 1)):
        asked.start(flushed=flushed)
        asked.finish()
        assert asked.flushed == agreed
    assert not asked.poll() and asked.flushed == 1  # a question about stops alone takes nothing back


def test_a_stop_file_is_obeyed_and_removed(tmp_path: Path) -> None:
    asked = stop(tmp_path)
    assert not asked.poll()
    (tmp_path / "stop").touch()
    assert asked.poll() and asked.reason == str(tmp_path / "stop")
    asked.clear()
    assert not (tmp_path / "stop").exists()


def test_the_minutes_count_from_the_launch(tmp_path: Path) -> None:
    assert not stop(tmp_path, max_minutes=60, age_s=3000).poll()
    late = stop(tmp_path, max_minutes=60, age_s=3600)
    assert late.poll() and late.reason == "train.max_minutes=60"


RING = """
import datetime, multiprocessing, os, sys
import psutil, torch
import torch.distributed as dist
from remat.machine import distributed

def connections():
    return sum(found.status == "ESTABLISHED" for found in psutil.Process().net_connections("tcp"))

def rank(rank, size, answers):
    os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=100))
    before, group = connections(), distributed.cpu_group()
    for _ in range(3):
        found = torch.tensor([rank, -rank])
        dist.all_reduce(found, dist.ReduceOp.MAX, group)
    answers.put((connections() - before, found.tolist()))
    dist.barrier()

size = 7
os.environ.update(WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
forks = multiprocessing.get_context("fork")
answers = forks.Queue()
ranks = [forks.Process(target=rank, args=(n, size, answers)) for n in range(size)]
for process in ranks:
    process.start()
for more, found in [answers.get(timeout=100) for _ in ranks]:
    assert found == [size - 1, 0] and more <= 2, (more, found)
"""


@pytest.mark.parametrize(("reason", "goes_on"), [(None, True), ("SIGTERM", False)])
def test_a_save_that_fails_while_the_run_ends_does_not_say_that_training_goes_on(
    reason: str | None, goes_on: bool
) -> None:
    run = MagicMock()
    run.cfg.save.on_error, run.stop.reason = SaveFailure("continue"), reason
    run.saves.pending.complete.side_effect = SaveError("no room")
    saves.wait_for_save(run, may_fail=True)
    told = "no room" + ". Training goes on (save.on_error=continue)" * goes_on
    run.console.warning.assert_called_once_with(told)


def test_ranks_that_agree_are_connected_in_a_ring_and_not_each_with_each() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RING, str(free_port())],
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
