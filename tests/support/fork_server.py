"""A process with everything imported, of which the ranks of tests are forks: `python -m tests.support.fork_server FD`.

A rank needs seven seconds of CPU time to import torch, transformers and DeepSpeed, and one to run a tiny model. This
process imports them once. It has one thread and initialises nothing: no process group, no pool of threads, no random
number. A fork gets the environment, arguments, folder and output of a process of its own, and is seeded anew.

`start` and `ask` are for the tests; the rest runs in the server. Under pytest-xdist all workers share the server of
the process that started them (tests/conftest.py).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "REMAT_TEST_FORK_SERVER"  # environment: the socket of a server that runs
CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
BASE = dict(os.environ) | CPU_ONLY | {"OMP_NUM_THREADS": "1"}  # of the server: that of the tests as they began
POLL_S = 0.05
OTHERS_GO_AFTER_S = 1.0  # as DeepSpeed's launcher: it looks once a second, then sends SIGTERM,
OTHERS_ARE_KILLED_AFTER_S = 30.0  # and SIGKILL to those that live on
# Read while the libraries are imported: a fork that asks for another value would not get it.
READ_AT_IMPORT = ("CUDA_", "DS_ACCELERATOR", "HF_HOME", "HF_HUB_OFFLINE", "LD_", "OMP_", "PYTHON")


class Forked:
    """What `ask` started: process `pid`, whose answer is read from `connection`."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.pid: int = connection.recv()

    def answer(self, timeout_s: float) -> Any:
        """What the process says at its end. Raises TimeoutError, and EOFError where it died without a word."""
        if not self.connection.poll(timeout_s):
            raise TimeoutError
        return self.connection.recv()

    def kill(self, *, group: bool = False) -> None:
        """End the process, or all of its process group, and wait until it is gone."""
        try:
            (os.killpg if group else os.kill)(self.pid, signal.SIGKILL)
            while self.connection.poll(None):
                self.connection.recv()
        except (ProcessLookupError, EOFError, ConnectionError):
            pass


def ask(job: dict[str, Any], *files: int) -> Forked:
    """Have `job` done in a fork of the server, which is started if none runs.

    `job` has an `environment`, a `folder`, what to `do` (launch, serve_pool, run_source) and `with` which arguments;
    `files` are descriptors that the fork gets as its own.
    """
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.connect(address())
    socket.send_fds(client, [b"!"], files)
    connection = Connection(client.detach())
    # Tensors are handed from process to process under this key.
    connection.send(job | {"key": bytes(multiprocessing.current_process().authkey)})
    return Forked(connection)


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """`own` as the environment of a fork. Raises ValueError where it sets what is read only at an import."""
    asked, given = ({k: v for k, v in env.items() if k.startswith(READ_AT_IMPORT)} for env in (own, BASE))
    wrong = sorted(name for name in asked | given if asked.get(name) != given.get(name))
    if wrong:
        raise ValueError(f"{wrong} are read when libraries are imported: launch with real=True")
    return dict(own)


@functools.cache
def address() -> str:
    return os.environ.get(ADDRESS) or start()


def start() -> str:
    """Start a server that ends with this process; the path of its socket, on which it answers once all is imported."""
    folder = tempfile.TemporaryDirectory(prefix="remat-tests-")
    path = f"{folder.name}/socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(64)
        command = [sys.executable, "-u", "-m", "tests.support.fork_server", str(listener.fileno())]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=BASE,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )

    def end() -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        folder.cleanup()

    atexit.register(end)
    return path


def main(listener: socket.socket) -> int:
    """Fork a process for each connection until the standard input ends. Returns in the forks too, with their code."""
    preload()
    signal.signal(signal.SIGCHLD, reap)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            break
        client, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            return work(client)
        client.close()
    listener.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    while True:  # they end as their connections do; so their CPU time counts as that of the tests
        try:
            os.wait()
        except ChildProcessError:
            return 0


def preload() -> None:
    """Import what ranks import, quietened as train.py does."""
    sys.path.insert(0, str(ROOT))
    from remat.report import console

    console.quiet_libraries(debug=False)
    import cpuinfo  # noqa: F401
    import deepspeed  # noqa: F401
    import networkx  # noqa: F401
    import peft  # noqa: F401
    import setuptools  # noqa: F401
    import torch.utils.cpp_extension  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    from remat.training import build, loop, out_of_memory  # noqa: F401

    compose_what_many_runs_choose()
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise RuntimeError(f"{threads} threads after the imports: a fork would lose all but one")
    gc.collect()
    gc.freeze()  # collections in the forks would copy every page


def compose_what_many_runs_choose() -> None:
    """Hydra finds its plugins, reads its grammar, and composes the choices of tests/support/tiny.py, which are kept."""
    from remat.config import compose
    from remat.config.options import ConfigError

    tiny = ["recipe=tiny_zero3_offload", "model=hf", "data=alpaca", "tracking=wandb_disabled"]
    for choice in ["", *(f"checkpointing={name}" for name in compose.group_choices()["checkpointing"])]:
        with contextlib.suppress(ConfigError):  # there is no model yet
            compose.compose_run([*tiny, *filter(None, [choice])])


def reap(*_: object) -> None:
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


def work(client: socket.socket) -> int:
    _, files, _, _ = socket.recv_fds(client, 1, 8)
    connection = Connection(client.detach())
    job = connection.recv()
    become(job["environment"], job["folder"])
    multiprocessing.current_process().authkey = job["key"]
    connection.send(os.getpid())
    do = {"launch": launch, "serve_pool": serve_pool, "run_source": run_source}[job["do"]]
    return do(connection, files, **job["with"])


def become(own: dict[str, str], folder: str) -> None:
    """Take on environment and folder, and forget what a new process would not know."""
    import multiprocessing.process

    import torch

    added = {name: value for name, value in os.environ.items() if name not in BASE}  # by the imports
    os.environ.clear()
    os.environ.update(added | own)
    os.chdir(folder)
    multiprocessing.process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]
    tempfile.tempdir = None
    torch.set_num_threads(int(own["OMP_NUM_THREADS"]))
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)


def seed() -> None:
    """Forks begin with equal states of what draws random numbers, Python's own excepted."""
    import numpy
    import torch

    numpy.random.seed()
    torch.default_generator.seed()


def serve_pool(connection: Connection, files: list[int], **place: int) -> int:
    """A rank of a pool, until its pipe ends. `connection` stays open as long as it lives."""
    from tests.support import pool

    seed()
    pool.serve(Connection(files[0]), **place)
    connection.close()
    return 0


def run_source(connection: Connection, files: list[int], source: str, argv: list[str]) -> int:
    """As `python -u -c SOURCE ARGV`, with `files` as standard input and output."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = ["-c", *argv]
    seed()
    exec(source, {"__name__": "__main__"})
    connection.close()
    return 0


def launch(
    connection: Connection,
    files: list[int],
    ranks: int,
    port: int,
    argv: list[str],
    node: dict[str, Any] | None = None,
) -> int:
    """As `deepspeed --num_gpus RANKS --master_port PORT ARGV`: the ranks, and the exit code of the first that fails.

    With a `node` (tests/support/nodes.py) it is that node's launcher: process `pid` of the node, its `rank` among
    nodes, how many there are (`of`), and the name of the first, the `master`.
    """
    os.setsid()
    if node:
        enter(node["pid"], Path.cwd())
    os.dup2(files[0], 1)
    os.dup2(files[0], 2)
    os.close(files[0])
    alive: dict[int, int] = {}
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            connection.close()
            return run_rank(rank, ranks, port, argv, **({"node": node} if node else {}))
        alive[pid] = rank
    code = 0
    while alive and code == 0:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            del alive[pid]
        elif connection.poll(POLL_S):  # never said: the test is gone
            os.killpg(0, signal.SIGKILL)
    if code:
        end_others(list(alive))
    connection.send(code & 0xFF)
    return 0


def end_others(pids: list[int]) -> None:
    """SIGTERM to them and all they started, later SIGKILL; to those that were stopped at once."""
    import psutil

    time.sleep(OTHERS_GO_AFTER_S)
    trees = []
    for pid in pids:
        process = psutil.Process(pid)
        trees += [*process.children(recursive=True), process]
    for process in trees:
        with contextlib.suppress(psutil.NoSuchProcess):  # SIGTERM would not reach one that is stopped
            (process.kill if process.status() == psutil.STATUS_STOPPED else process.terminate)()
    _, left = psutil.wait_procs(trees, timeout=OTHERS_ARE_KILLED_AFTER_S)
    for process in left:
        process.kill()


def enter(pid: int, folder: Path) -> None:
    """Be on the node that process `pid` is on, in all but process ids: those are new in this process's children."""
    libc = ctypes.CDLL(None, use_errno=True)
    for space in ("net", "uts", "ipc", "pid", "mnt"):
        with Path(f"/proc/{pid}/ns/{space}").open() as handle:
            if libc.setns(handle.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns {space}")
    os.chdir(folder)


def run_rank(
    rank: int, ranks: int, port: int, argv: list[str], node: Mapping[str, Any] = MappingProxyType({})
) -> int:
    """The script as `python -u SCRIPT --local_rank=RANK WORDS` runs it."""
    import runpy

    import torch

    # torch makes its thread pool anew after each fork: two threads at once would find none (ParallelOpenMP.cpp)
    torch.set_num_threads(torch.get_num_threads())
    os.environ.update(
        MASTER_ADDR=node.get("master", "127.0.0.1"),
        MASTER_PORT=str(port),
        WORLD_SIZE=str(ranks * node.get("of", 1)),
        CROSS_RANK=str(node.get("rank", 0)),
        CROSS_SIZE=str(node.get("of", 1)),
        LOCAL_SIZE=str(ranks),
        RANK=str(rank + ranks * node.get("rank", 0)),
        LOCAL_RANK=str(rank),
        CUDA_VISIBLE_DEVICES=",".join(map(str, range(ranks))),
    )
    seed()
    script, *words = argv
    sys.argv = [script, f"--local_rank={rank}", *words]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
    return 0


def leave(code: object) -> None:
    """End this process as Python does, except that two million objects are not freed one by one: 2 s of CPU time."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    try:
        leave(main(socket.socket(fileno=int(sys.argv[1]))))
    except SystemExit as asked:
        leave(asked.code)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        leave(1)
