"""Launch on all nodes of a hostfile: start a supervisor on each node over ssh, and direct them from this process.

    remat launch --hostfile H -> ssh -> node_agent (a supervisor, as with --no_ssh) -> runner -> ... -> rank

The first line to an agent's standard input is its task, every further line a signal for its ranks. The end of the
input means that this process or the connection is gone: the ranks may save and stop. Agents report on their standard
output, in lines between marks, when their ranks have begun and which rank failed. So a stop reaches all nodes at once,
each node ends its own processes, and the first failure is reported as the cause.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from remat.config.options import ConfigError
from remat.launch import exit_codes, processes, signals
from remat.launch.arguments import RUNNER_VALUES, LaunchWords, without
from remat.launch.supervisor import NEVER, say, short

MARK = b"\x1e"  # around each report of an agent
TOLD = re.compile(rb"\x1e(.*?)\x1e\n?")
KILL = "KILL"  # in place of a signal: end all ranks now
EXPORTED = ("NCCL", "PYTHON", "MLFLOW", "MV2", "UCX", "GLOO", "DS_ACCELERATOR")
ENV_FILE = ".deepspeed_env"  # DeepSpeed's file of variables for all nodes, NAME=value a line, here or in $HOME
HOST = re.compile(r"(\S+)\s+slots=(\d+)(\s+#.*)?$")
# to notice a lost node, [s], times, [s]; a connection that ssh shares (ControlMaster) would not use these options
OF_SSH = {"ServerAliveInterval": 5, "ServerAliveCountMax": 4, "ConnectTimeout": 20, "ControlPath": "none"}
SSH_FAILED = 255
OTHERS_S = 60.0  # time for the other nodes to end by themselves after one has failed
KILLED_S = 15.0  # time for nodes to end all their processes after KILL
OF_THE_HEAD = ("-H", "--hostfile", "--master_addr", "--master_port", "--ssh_port", "--num_nodes")


def launch(words: LaunchWords) -> int:
    """Run on all nodes until all have ended. Return the exit code of the first failure, else 75 (stopped) or 0.

    Call it in the main thread. Raises ConfigError before anything runs.
    """
    options = _values(words.runner)
    hosts = read_hostfile(Path(options.get("-H") or options["--hostfile"]), options.get("--num_nodes"))
    if left_out := {"-i", "--include", "-e", "--exclude"} & options.keys():
        raise ConfigError(
            f"{left_out.pop()}: give remat launch a hostfile of the nodes and slots that are to train"
        )
    if not shutil.which("ssh"):
        raise ConfigError(
            "--hostfile: there is no ssh on this node; install it, or start one `remat launch` a node with --no_ssh"
        )
    return _Head(words, hosts, options).run()


def read_hostfile(path: Path, num_nodes: str | None) -> dict[str, int]:
    """Return {host: slots} of the first `num_nodes` hosts. Raises ConfigError when the file is no hostfile."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"--hostfile {path}: {error.strerror}") from error
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = HOST.match(line.strip())
        if not found or found[1] in hosts:
            why = "names that node again" if found else "should be `NAME slots=N`"
            raise ConfigError(f"--hostfile {path}, line {number}: {line.strip()!r} {why}")
        hosts[found[1]] = int(found[2])
    if not hosts:
        raise ConfigError(f"--hostfile {path} names no node: write `NAME slots=N`, a node a line")
    if num_nodes is None:
        return hosts
    if not num_nodes.isdecimal() or not 1 <= int(num_nodes) <= len(hosts):
        raise ConfigError(
            f"--num_nodes {num_nodes}: {path} names {', '.join(hosts)}; give 1 to {len(hosts)}, or leave it out for all"
        )
    return dict(list(hosts.items())[: int(num_nodes)])


def _values(runner: list[str]) -> dict[str, str]:
    """Return the runner's options that have values."""
    return {name: runner[at + 1] for at, name in enumerate(runner) if name in RUNNER_VALUES}


def exported(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for other nodes: those that DeepSpeed's runner sends, and gloo's."""
    found = {name: value for name, value in environment.items() if name.startswith(EXPORTED)}
    for folder in (Path.home(), Path()):
        with contextlib.suppress(OSError):
            for line in (folder / ENV_FILE).read_text().splitlines():
                name, equals, value = line.partition("=")
                if equals:
                    found[name.strip()] = value.strip()
    return found


@dataclass
class _Node:
    number: int
    host: str
    process: subprocess.Popen[bytes]
    rest: dict[int, bytes] = field(default_factory=dict)  # by stream: the line that is not complete yet
    open: int = 2
    began: bool = False
    code: int | None = None

    def send(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            assert self.process.stdin is not None
            self.process.stdin.write(f"{text}\n".encode())
            self.process.stdin.flush()


@dataclass(frozen=True)
class _Cause:
    host: str
    text: str
    code: int


class _Head:
    def __init__(self, words: LaunchWords, hosts: Mapping[str, int], options: Mapping[str, str]) -> None:
        self.words, self.hosts, self.options = words, hosts, options
        self.nodes: list[_Node] = []
        self.cause: _Cause | None = None
        self.kill_at = self.leave_at = NEVER
        self.events = selectors.DefaultSelector()

    def run(self) -> int:
        woken = signals.wake_on([*signals.OF_A_LAUNCH, signal.SIGCHLD])
        self.events.register(woken, selectors.EVENT_READ)
        logs = f"{short(self.words.log_dir)}/rank-N.log"
        say(f"starting {len(self.hosts)} nodes over ssh; every rank's output is kept in {logs}")
        master = self.options.get("--master_addr") or next(iter(self.hosts))
        port = self.options.get("--master_port") or str(processes.free_port())
        self.nodes = [self._start(number, host, master, port) for number, host in enumerate(self.hosts)]
        while any(node.code is None for node in self.nodes):
            for key, _ in self.events.select(1.0):
                if key.fileobj == woken:
                    for signum in os.read(woken, 4096):
                        self._signalled(signal.Signals(signum))
                else:
                    self._hear(*key.data)
            self._check()
        return self._end()

    def _start(self, number: int, host: str, master: str, port: str) -> _Node:
        """Start an agent on `host`. Its ssh is killed when this process ends."""
        settings = [f"PYTHONPATH={os.environ['PYTHONPATH']}"] if "PYTHONPATH" in os.environ else []
        agent = shlex.join(["exec", "env", *settings, sys.executable, "-u", "-m", "remat.launch.node_agent"])
        how = [word for name, value in OF_SSH.items() for word in ("-o", f"{name}={value}")]
        how += ["-p", self.options["--ssh_port"]] if "--ssh_port" in self.options else []
        command = ["ssh", "-o", "BatchMode=yes", *how, host, f"cd {shlex.quote(str(Path.cwd()))} && {agent}"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            preexec_fn=signals.end_with_parent(signal.SIGKILL),
        )  # fmt: skip
        node = _Node(number, host, process)
        for stream, shown in ((process.stdout, 1), (process.stderr, 2)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self.events.register(stream, selectors.EVENT_READ, (node, stream, shown))
        task = {"hosts": dict(self.hosts), "environment": exported(os.environ),
                "words": self._words_of(number, master, port)}  # fmt: skip
        node.send(json.dumps(task))
        return node

    def _words_of(self, number: int, master: str, port: str) -> list[str]:
        """Return the command line of `remat launch` on one node; its agent adds the hostfile."""
        words = self.words
        place = ["--no_ssh", "--node_rank", str(number), "--master_addr", master, "--master_port", port]
        own = ["--log-dir", str(words.log_dir), "--grace-s", f"{words.grace_s:g}"]
        return [*without(words.runner, OF_THE_HEAD), *place, *own, *words.kind_flag, words.target, *words.words]

    # Events

    def _hear(self, node: _Node, stream: BinaryIO, shown: int) -> None:
        """Show a node's output, with its name unless it is the first node, and handle its agent's reports."""
        data = os.read(stream.fileno(), 1 << 16)
        if not data:
            self.events.unregister(stream)
            node.open -= 1
        text = node.rest.get(shown, b"") + data
        for told in TOLD.findall(text):
            event = json.loads(told)
            if "failed" in event:
                self._failed(node, event["failed"], event["code"])
            else:
                node.began = True
        text = TOLD.sub(b"", text)
        # whole lines, so that those of nodes do not mix
        ready = text[: text.rfind(b"\n") + 1] if data else text
        node.rest[shown] = text[len(ready) :]
        prefix = f"{node.host}: ".encode() * (node.number > 0)
        for line in ready.splitlines(keepends=True):
            with contextlib.suppress(OSError):  # nobody listens any more
                os.write(shown, prefix + line)

    def _failed(self, node: _Node, text: str, code: int) -> None:
        """Record the first failure as the cause: later ones on other nodes follow from it."""
        if self.cause is None:
            self.cause = _Cause(node.host, text, code)
            self.kill_at = min(self.kill_at, time.monotonic() + OTHERS_S)

    def _signalled(self, signum: signal.Signals) -> None:
        if signum == signal.SIGCHLD:
            return
        if all(node.began for node in self.nodes):
            running = [node for node in self.nodes if node.code is None]
            say(
                f"{signum.name} sent to {len(running)} nodes: their ranks may save and stop; again to end at once"
            )
            for node in running:
                node.send((signal.SIGTERM if signum == signal.SIGHUP else signum).name)
        else:
            say(f"{signum.name} before the ranks of all nodes began: nothing to save")
            self._kill()

    def _check(self) -> None:
        now = time.monotonic()
        for node in self.nodes:
            if node.code is None and node.open == 0 and (code := node.process.poll()) is not None:
                node.code = exit_codes.of_process(code)
                self._node_ended(node, node.code)
        if now > self.kill_at:
            self.kill_at = NEVER
            say("the other nodes did not end by themselves: ending all their processes")
            self._kill()
        if now > self.leave_at:
            for node in self.nodes:
                if node.code is None:
                    say(
                        f"{node.host} does not answer: what runs there ends by itself, since this connection is closed"
                    )
                    node.process.kill()
            self.leave_at = NEVER

    def _node_ended(self, node: _Node, code: int) -> None:
        if code in (0, exit_codes.STOPPED):
            self.kill_at = min(self.kill_at, time.monotonic() + self.words.grace_s)  # others may still save
        elif code != SSH_FAILED:
            self._failed(node, f"remat launch ended there with exit code {code}", code)
        elif node.began:
            self._failed(
                node, "no answer, or its remat launch was killed (ssh ended with 255)", exit_codes.FAILED
            )
        else:
            remedy = "`ssh NAME true` must work without a password for every name of the hostfile"
            self._failed(
                node, f"ssh could not start a launch there (exit code 255): {remedy}", exit_codes.NOT_ABLE
            )
            self._kill()

    def _kill(self) -> None:
        self.leave_at = min(self.leave_at, time.monotonic() + KILLED_S)
        for node in self.nodes:
            node.send(KILL)

    def _end(self) -> int:
        signals.ignore(signals.OF_A_LAUNCH)
        if self.cause is None:  # each node ended with 0 or 75
            stopped = any(node.code == exit_codes.STOPPED for node in self.nodes)
            code = exit_codes.STOPPED if stopped else 0
        else:
            code = self.cause.code
            say(f"first cause, on {self.cause.host}: {self.cause.text}")
        if code:
            say(f"exit code {code}; logs in {short(self.words.log_dir)}")
        return code
