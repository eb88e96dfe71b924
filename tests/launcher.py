"""The user's path: the real `deepspeed` launcher in a process group of its own, on a free port, always cleaned up.

GPUs are hidden from what is launched unless a test passes `gpus=True`.
"""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.pool import CPU_ONLY, free_port

ROOT = Path(__file__).resolve().parent.parent


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
) -> Launched:
    """Run `deepspeed SCRIPT WORDS` to its end. On a time-out the whole process group is killed."""
    command = [
        "deepspeed",
        "--num_gpus",
        str(ranks),
        "--master_port",
        str(free_port()),
        str(ROOT / script),
        *words,
    ]
    return run(command, cwd=cwd, timeout_s=timeout_s, gpus=gpus)


def run(command: list[str], *, cwd: Path = ROOT, timeout_s: float = 600, gpus: bool = False) -> Launched:
    """Run any command the same way; stdout and stderr together."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if not gpus:  # one thread a rank: tests run side by side, and threads that wait for each other spin
        env |= CPU_ONLY | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
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
