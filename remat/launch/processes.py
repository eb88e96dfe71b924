"""Handle Linux processes: adopt orphans, read peak memory, end all descendants, find a free port."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
from pathlib import Path

import psutil

PR_SET_CHILD_SUBREAPER = 36
PORTS = range(20000, 32768)  # below the ports that Linux gives to connections, 32768 and above
LAST_S = 5.0  # between SIGTERM and SIGKILL for processes that are left over


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, instead of init."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def reap() -> dict[int, int]:
    """Return {process id: exit code} of the children that have ended; the code is negative for a signal."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def end_descendants(*, at_once: bool) -> None:
    """Send SIGTERM (unless `at_once`), then SIGKILL, to every living descendant of this process; reap them."""
    for signum in (signal.SIGKILL,) if at_once else (signal.SIGTERM, signal.SIGKILL):
        left = [p for p in psutil.Process().children(recursive=True) if _alive(p)]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signum)
        psutil.wait_procs(left, timeout=LAST_S)
    reap()


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def send(pid: int, signum: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def free_port() -> int:
    """Return a port that is free and that the kernel gives to no outgoing connection. Raises OSError when none is."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"each port from {PORTS[0]} to {PORTS[-1]} is taken; give one by --master_port")


def remove_shared_buffers(port: int, folder: Path = Path("/dev/shm")) -> None:
    """Remove the buffers that DeepSpeed's CPU all-reduce leaves in /dev/shm for a port, 66 MiB per rank."""
    for path in folder.glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{port}_*"):
        path.unlink(missing_ok=True)
