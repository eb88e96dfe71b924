"""Two nodes on this machine, `node1` and `node2`, each with namespaces of its own and a network between them.

A node has its own network (10.77.0.K), host name, mounts, /dev/shm, IPC and process ids. All else is shared, as on a
cluster with a shared disk; `Nodes.local` is a folder of each node's own. Needs root, unshare and iproute2. A node ends
with the process that made it, and takes all its processes along.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from remat.launch import signals
from tests.support import fork_server
from tests.support.launcher import ROOT, environment

NAMES = ("node1", "node2")
SPACES = ("--net", "--uts", "--mount", "--ipc", "--pid")
DEADLINE_S = 240.0
INSIDE = """
hostname "$NAME"; mount -t tmpfs -o size=512m shm /dev/shm
for own in local=$LOCAL $OWN; do
  mkdir -p "$STAGE/${own%%=*}" "${own#*=}"; mount --bind "$STAGE/${own%%=*}" "${own#*=}"
done
mount --bind "$STAGE/hosts" /etc/hosts; mount --bind "$STAGE/hostname" /etc/hostname
ip link set lo up; touch "$STAGE/ready"; exec sleep infinity
"""


def lacking() -> str | None:
    """Why this machine cannot have nodes; None where it can."""
    if os.geteuid():
        return "two nodes need root, for namespaces and a network between them"
    if missing := [name for name in ("unshare", "nsenter", "ip", "mount") if not shutil.which(name)]:
        return f"two nodes need {', '.join(missing)} (Debian: util-linux, iproute2)"
    make = "mount -t tmpfs none /mnt && ip link add rmprobe type veth peer name rmprobe2"
    tried = subprocess.run(
        ["unshare", *SPACES, "--fork", "--mount-proc", "sh", "-c", make],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"two nodes need namespaces: {tried.stderr.strip()}" if tried.returncode else None


@dataclass
class Started:
    """A command on a node, or forked ranks of it; `out` is its output."""

    output: Path
    wait: Callable[[float], int]
    pid: int  # as seen from outside the nodes

    @property
    def out(self) -> str:
        return self.output.read_text(errors="replace")

    def code(self) -> int:
        """Its exit code, once it has ended."""
        try:
            return self.wait(DEADLINE_S)
        except (TimeoutError, subprocess.TimeoutExpired):
            raise AssertionError(f"no end of {self.output.name}:\n{self.out[-6000:]}") from None


class Nodes:
    """`own_name` is the address by which a node knows its own name: Debian's is 127.0.1.1."""

    def __init__(self, folder: Path, *, own_name: str = "", own_folders: Sequence[Path] = ()) -> None:
        self.folder, self.local = folder, folder / "local"
        self._started: list[subprocess.Popen | fork_server.Forked] = []
        self._keepers: list[subprocess.Popen] = []
        self.pids: list[int] = []
        self._link = f"rm{os.getpid()}"
        for node in (1, 2):
            self._begin(node, own_name, own_folders)
        for node in (1, 2):
            self._wait_for(node)
        first, second = self.pids
        self._run("ip", "link", "add", self._link, "netns", str(first), "type", "veth", "peer", "name", self._link,
                  "netns", str(second))  # fmt: skip
        for node in (1, 2):
            for words in (
                f"link set {self._link} name eth0",
                f"addr add 10.77.0.{node}/24 dev eth0",
                "link set eth0 up",
            ):
                self._run(*self.inside(node), "ip", *words.split())

    def _begin(self, node: int, own_name: str, own_folders: Sequence[Path]) -> None:
        stage = self.folder / f".{NAMES[node - 1]}"
        stage.mkdir(parents=True)
        lines = ["127.0.0.1 localhost"]
        for number, name in enumerate(NAMES, 1):
            lines.append(f"{own_name if own_name and number == node else f'10.77.0.{number}'} {name}")
        (stage / "hosts").write_text("\n".join(lines) + "\n")
        (stage / "hostname").write_text(f"{NAMES[node - 1]}\n")
        told = {
            "NAME": NAMES[node - 1],
            "STAGE": str(stage),
            "LOCAL": str(self.local),
            "OWN": " ".join(f"own{number}={path}" for number, path in enumerate(own_folders)),
        }
        self._keepers.append(
            subprocess.Popen(
                ["unshare", *SPACES, "--fork", "--kill-child", "--mount-proc", "bash", "-ec", INSIDE],
                env=os.environ | told,
                start_new_session=True,
                preexec_fn=signals.end_with_parent(signal.SIGKILL),
            )
        )

    def _wait_for(self, node: int) -> None:
        keeper, end = self._keepers[node - 1], time.monotonic() + 60
        while not (self.folder / f".{NAMES[node - 1]}" / "ready").exists():
            assert keeper.poll() is None and time.monotonic() < end, f"{NAMES[node - 1]} did not start"
            time.sleep(0.02)
        self.pids.append(psutil.Process(keeper.pid).children()[0].pid)

    @staticmethod
    def _run(*command: str) -> None:
        subprocess.run(command, check=True)

    def inside(self, node: int) -> list[str]:
        """What to write before a command so that it runs on `node` (1 or 2; 0 is this machine itself)."""
        return [] if node == 0 else ["nsenter", "-t", str(self.pids[node - 1]), *SPACES, f"--wd={ROOT}"]

    def start(self, node: int, *command: str, env: Mapping[str, str] | None = None) -> Started:
        """Start a command on `node`."""
        output = self._output(node)
        with output.open("wb") as out:
            process = subprocess.Popen(
                [*self.inside(node), *command],
                cwd=ROOT,
                env=environment() | dict(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)
        return Started(output, process.wait, process.pid)

    def fork(self, node: int, *argv: str, port: int, nodes: int = 2) -> Started:
        """Start `deepspeed ARGV` with one rank on `node`, of `nodes`: a fork of what has imported everything."""
        place = {"pid": self.pids[node - 1], "rank": node - 1, "of": nodes, "master": NAMES[0]}
        job = {
            "do": "launch",
            "with": {"ranks": 1, "port": port, "argv": list(argv), "node": place},
            "environment": fork_server.environment(environment()),
            "folder": str(ROOT),
        }
        output = self._output(node)
        with output.open("wb") as out:
            forked = fork_server.ask(job, out.fileno())
        self._started.append(forked)
        return Started(output, forked.answer, forked.pid)

    def _output(self, node: int) -> Path:
        return Path(tempfile.mkstemp(prefix=f"node{node}-", suffix=".out", dir=self.folder)[1])

    def own(self, node: int, number: int) -> Path:
        """What the own folder of that `number` is on `node`, as seen from outside."""
        return self.folder / f".{NAMES[node - 1]}" / f"own{number}"

    def cut(self) -> None:
        """Cut the link between the nodes: neither hears of the other any more, not even that it is gone."""
        self._run(*self.inside(2), "ip", "link", "set", "eth0", "down")

    def processes(self, node: int, words: str = "") -> list[psutil.Process]:
        """What runs on `node`, with `words` in its command line."""
        space, found = _space(self.pids[node - 1]), []
        own = {self.pids[node - 1], self._keepers[node - 1].pid}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                alive = process.status() != psutil.STATUS_ZOMBIE and process.pid not in own
                if alive and _space(process.pid) == space and words in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def rank(self, node: int) -> psutil.Process:
        """The process that trains on `node`, started by a launcher."""
        found = self.processes(node, "train.py --local_rank")
        return next(process for process in found if "remat.launch" not in " ".join(process.cmdline()))

    def until_empty(self, words: str = "") -> None:
        """Wait until no process is left on either node, or none with `words` in its command line."""
        end = time.monotonic() + 60
        while left := [*self.processes(1, words), *self.processes(2, words)]:
            assert time.monotonic() < end, left
            time.sleep(0.1)

    def close(self) -> None:
        for started in self._started:
            if isinstance(started, fork_server.Forked):
                started.kill(group=True)
        for keeper in self._keepers:  # the node's first process ends with it, and all others with that
            keeper.kill()
            keeper.wait()
        for started in self._started:
            if isinstance(started, subprocess.Popen):
                started.wait()


def _space(pid: int) -> str:
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    return ""


@contextlib.contextmanager
def two_nodes(folder: Path, *, own_name: str = "", own_folders: Sequence[Path] = ()) -> Iterator[Nodes]:
    nodes = Nodes(folder, own_name=own_name, own_folders=own_folders)
    try:
        yield nodes
    finally:
        nodes.close()


def until(true: Callable[[], bool], what: Callable[[], str]) -> None:
    """Wait until `true`; `what` is said where it never is."""
    end = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < end, what()
        time.sleep(0.05)


def stand_in_for_ssh(nodes: Nodes, folder: Path) -> dict[str, str]:
    """Environment with an `ssh` that goes to a node without a daemon: its last words are the host and the command."""
    folder.mkdir(parents=True, exist_ok=True)
    cases = "\n".join(f"{NAMES[node - 1]}) into='{' '.join(nodes.inside(node))}';;" for node in (1, 2))
    (folder / "ssh").write_text(
        f'#!/bin/bash\nhost="${{@: -2:1}}"\ncase "$host" in\n{cases}\n'
        f'*) echo "ssh: Could not resolve hostname $host" >&2; exit 255;;\nesac\n'
        f'exec $into env -i HOME=/root PATH=/usr/bin:/bin bash -c "${{@: -1}}"\n'
    )
    (folder / "ssh").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}
