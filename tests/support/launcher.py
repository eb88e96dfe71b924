"""The user's path: `deepspeed` in a process group of its own, on a free port, always cleaned up.

Ranks are forks of a process that has imported everything (tests/support/fork_server.py), at a tenth of the CPU time
and with results that are bit-equal (tests/repository/test_fork_server.py). `real=True` starts the real launcher: where
it is what is tested, or where signals, its exit code, its own lines or the memory of new processes are. GPUs are hidden
from what is launched unless a test passes `gpus=True`, which is always real.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from remat.launch import arguments
from remat.launch.processes import free_port
from tests.support import fork_server
from tests.support.pool import CPU_ONLY

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Launched:
    code: int
    out: str


def deepspeed(
    *words: str,
    ranks: int = 2,
    script: str = "train.py",
    cwd: Path = ROOT,
    timeout_s: float = 600,
    gpus: bool = False,
    real: bool = False,
) -> Launched:
    """Run `deepspeed SCRIPT WORDS` to its end. On a time-out the whole process group is killed."""
    port, path = free_port(), str(ROOT / script)
    if not (real or gpus):
        return fork([path, *words], ranks=ranks, port=port, cwd=cwd, timeout_s=timeout_s)
    command = ["deepspeed", "--num_gpus", str(ranks), "--master_port", str(port), path, *words]
    return run(command, cwd=cwd, timeout_s=timeout_s, gpus=gpus)


def node_launch(words: list[str], monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """What the installed `deepspeed` would start on this node for `words`, parsed by its per-node launcher."""
    from deepspeed.launcher import launch, runner

    commands: list[list[str]] = []

    class Process:
        returncode = 0

        def __init__(self, command: list[str], env: dict[str, str]) -> None:
            commands.append(command)

        def wait(self) -> None: ...

    monkeypatch.setattr(runner.subprocess, "Popen", Process)
    monkeypatch.setattr(runner, "set_log_level_from_string", lambda level: None)  # of this whole process
    runner.main(words)
    assert commands[0][2:4] == ["-m", "deepspeed.launcher.launch"]
    monkeypatch.setattr("sys.argv", commands[0][3:])
    return launch.parse_args()


def fork(argv: list[str], *, ranks: int, port: int, cwd: Path, timeout_s: float) -> Launched:
    """Run `deepspeed ARGV` by forks of a process that has imported everything; stdout and stderr together."""
    job = {
        "do": "launch",
        "with": {"ranks": ranks, "port": port, "argv": argv},
        "environment": fork_server.environment(environment()),
        "folder": str(cwd),
    }
    with tempfile.TemporaryFile() as out:
        launched = fork_server.ask(job, out.fileno())

        def said() -> str:
            out.seek(0)
            return out.read().decode(errors="replace")

        try:
            code = launched.answer(timeout_s)
        except TimeoutError:
            launched.kill(group=True)
            raise AssertionError(f"{argv} took longer than {timeout_s} s:\n{said()[-4000:]}") from None
        except BaseException:
            launched.kill(group=True)
            raise
        return Launched(code, said())


def of_the_lab(command: Sequence[str], logs: Path, _: object) -> int:
    """In the place of `launch._run` of remat/lab, by forks: what `remat launch` is asked for, as it reads it."""
    asked = arguments.parse(list(command[command.index("launch") + 1 :]))
    assert asked.trains and asked.ranks is not None
    done = deepspeed(*asked.words, ranks=asked.ranks)
    (logs / "launch.log").write_text(done.out)
    return done.code


def environment(*, gpus: bool = False) -> dict[str, str]:
    """Of what is launched: that of the test; one thread a rank where no GPU is asked for.

    Tests run side by side, and threads that wait for each other spin.
    """
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return env if gpus else env | CPU_ONLY | {"OMP_NUM_THREADS": "1"}


def run(command: list[str], *, cwd: Path = ROOT, timeout_s: float = 600, gpus: bool = False) -> Launched:
    """Run any command the same way; stdout and stderr together."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(gpus=gpus),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        raise AssertionError(f"{command} took longer than {timeout_s} s:\n{out[-4000:]}") from None
    except BaseException:  # an interrupt does not reach its session
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return Launched(process.returncode, out)
