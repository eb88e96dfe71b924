"""`remat launch`: a thin supervisor in front of DeepSpeed's launchers. It owns the run's processes.

    remat launch -> deepspeed runner -> node launcher -> rank keeper -> rank        (one keeper and rank per GPU)

On one node with --num_gpus N there is no runner. The launchers start ranks as usual, but with stop signals blocked,
because DeepSpeed answers them by killing the ranks. Each keeper (remat/launch/rank_keeper.py) reports its rank's
process id and exit code over a socket. So signals reach every rank at once, exit codes are the ranks' own, no rank is
left behind when a launcher or this process is killed, and no rank is cut off in a save because another rank ended
earlier.

On SIGTERM, SIGINT or SIGUSR1 a rank saves and exits with code 75. It may get such a signal twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from remat.config.options import ConfigError
from remat.config.units import GIB, format_count
from remat.launch import arguments, exit_codes, left_behind, processes, rank_keeper, retreat, signals
from remat.launch.arguments import LaunchWords
from remat.machine.host_memory import host_memory, oom_kills, peak_rss_bytes

TAIL_LINES = 30
NEARLY_ALL = 0.9  # of host memory
LONGEST_TMPDIR = 77  # bytes; a socket's path has at most 107, and a folder and a name take 30 of them


def say(text: str) -> None:
    show(f"remat launch: {text}")


def show(text: str) -> None:
    """Print to standard error. Once nobody listens (a closed terminal, a pipe without reader), go on unheard."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        # what is left in the buffer goes there too, else Python would exit with 120
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def killed(rank: int, *, peak_bytes: int, together_bytes: int, limit_bytes: int, oom_kills: int | None) -> str:
    """Say that a rank got SIGKILL, likely from the kernel for lack of memory, and give the evidence.

    `peak_bytes` is the rank's peak RSS (0: unknown), `together_bytes` that of all ranks of the node, `oom_kills`
    how many processes the kernel killed for memory since launch (None: unknown).
    """
    own = f"{peak_bytes / GIB:.1f}" if peak_bytes else "an unknown part"
    if oom_kills is None:
        counted = "the control group does not tell whether the kernel did it"
    else:
        counted = f"the control group counts {format_count(oom_kills, 'out-of-memory kill')} since launch"
    return (
        f"rank {rank} was killed (SIGKILL). Host out of memory? Its peak RSS was {own} of {limit_bytes / GIB:.1f} GiB, "
        f"{together_bytes / GIB:.1f} GiB with the other ranks of this node; {counted}"
    )


def killed_for_memory(oom_kills: int | None, *, together_bytes: int, limit_bytes: int) -> bool:
    """Return whether the kernel killed a rank for memory: by its count or, without one, by how full host memory was."""
    return together_bytes >= NEARLY_ALL * limit_bytes if oom_kills is None else oom_kills > 0


def show_tail(rank: int, log: Path) -> None:
    """Show the end of a log that was not shown live."""
    if log.exists():
        say(f"the last lines of rank {rank}, which failed first:")
        lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        show("\n".join(f"  {line}" for line in lines))


PEERS_S = 10.0  # time for ranks to end by themselves after another has failed
LAUNCHER_GONE_S = 30.0  # time for ranks to save and end after a launcher was killed
LEAVING_S = 15.0  # time for DeepSpeed's launchers to exit after all ranks have ended
NEVER = float("inf")
Tell = Callable[..., None]


def launch(words: LaunchWords, tell: Tell | None = None) -> int:
    """Run until all ranks have ended. Return their exit code, 128 + N for signal N. Call it in the main thread.

    `tell` is called when the ranks of this node have begun, and when the first of them fails. Ranks that ran out of
    memory may ask for another launch that needs less (remat.launch.retreat).
    """
    log_dir, number = words.log_dir, 0
    hangup = signal.getsignal(signal.SIGHUP)
    while True:
        file = log_dir / f"retreat-{number + 1}.json"
        retreat.forget(file)
        told = {retreat.FILE: str(file), retreat.NUMBER: str(number)} if words.on_one_node else {}
        ended = _launch_once(words, told, tell)
        if ended.was_stopped or ended.code in (0, exit_codes.STOPPED):
            return ended.code
        with signals.noting():
            asked = retreat.take(file)
            if asked is None and ended.out_of_memory:
                asked = retreat.after_kill(file, ended.out_of_memory, number, say)
        if asked is None:
            return ended.code
        if stop := signals.noted():
            say(f"stopped by {signal.Signals(stop).name} before it was started again")
            return exit_codes.of_process(-stop)
        signal.signal(signal.SIGHUP, hangup)  # ignored at the end of a launch
        number += 1
        say(f"starting the run again with less memory, {' '.join(asked.overrides)}: {asked.why}")
        words = replace(
            words, words=retreat.words_again(words.words, asked), log_dir=log_dir / f"retreat-{number}"
        )


@dataclass(frozen=True)
class Ended:
    """How a launch ended: its exit code, whether a signal stopped it, and which rank the kernel killed for memory."""

    code: int
    was_stopped: bool = False
    out_of_memory: str = ""


def _launch_once(words: LaunchWords, more: dict[str, str], tell: Tell | None) -> Ended:
    """Run one launch, with the variables `more` in its ranks' environment; return how it ended.

    Raises ConfigError when its logs cannot be written.
    """
    try:
        words.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--log-dir {words.log_dir}: {error.strerror}; choose another folder") from error
    processes.adopt_orphans()
    with contextlib.ExitStack() as stack:
        folder = _make_folder()
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        swapped = Path(folder) / "swapped"
        stack.callback(left_behind.remove, swapped)
        more = more | {left_behind.FILE: str(swapped)}
        supervisor = _Supervisor(words, Path(folder) / "keepers", stack, more, tell)
        return Ended(supervisor.run(), supervisor.stop is not None, supervisor.out_of_memory)


def _make_folder() -> str:
    """Make the folder of the keepers' socket, in /tmp where the path in TMPDIR would be too long for a socket."""
    is_long = len(os.fsencode(tempfile.gettempdir())) > LONGEST_TMPDIR
    return tempfile.mkdtemp(prefix="remat-launch-", dir="/tmp" if is_long else None)


@dataclass
class _Rank:
    """A rank on this node, as its keeper reports it."""

    link: socket.socket
    rank: int = -1
    pid: int = 0
    code: int | None = None
    at: float = 0.0
    peak_rss_bytes: int = 0
    ended_by_us: bool = False
    heard: bytes = b""

    @property
    def runs(self) -> bool:
        return self.pid > 0 and self.code is None


class _Supervisor:
    def __init__(
        self,
        words: LaunchWords,
        socket_path: Path,
        stack: contextlib.ExitStack,
        more: dict[str, str],
        tell: Tell | None,
    ) -> None:
        self.words = words
        self.tell = tell  # None unless this is one node of several
        self.environment = more
        self.ranks: list[_Rank] = []
        self.local_size = 0
        self.launcher_code: int | None = None
        self.stop: tuple[int, float] | None = None  # the first stop signal that was sent on, and when
        self.kill_at = NEVER
        self.forced = False
        self.launcher_gone = False
        self.failed_first: _Rank | None = None
        self.out_of_memory = ""  # the message on the rank that the kernel killed for memory
        self.kills_before = oom_kills()
        self.socket_path = socket_path
        self.events = stack.enter_context(selectors.DefaultSelector())
        self.listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        self.listener.bind(str(socket_path))
        self.listener.listen(128)
        self.events.register(self.listener, selectors.EVENT_READ)
        self.port = 0

    def run(self) -> int:
        woken = signals.wake_on([*signals.OF_A_LAUNCH, signal.SIGCHLD])
        self.events.register(woken, selectors.EVENT_READ)
        process = self._start_launcher()  # kept: a Popen that is let go may wait for its process
        self.launcher = process.pid
        if not self.words.over_ssh and self.tell is None:
            say(f"every rank's output is kept in {short(self.words.log_dir)}/rank-N.log")
        while not self._over():
            for key, _ in self.events.select(max(0.0, min(1.0, self.kill_at - time.monotonic()))):
                if key.fileobj == woken:
                    for signum in os.read(woken, 4096):
                        self._signalled(signum)
                elif key.fileobj is self.listener:
                    self._accept()
                else:
                    self._read_message(key.data)
            self._check_state()
        return self._end()

    def _start_launcher(self) -> subprocess.Popen:
        """Start DeepSpeed's launcher, in a session of its own, with arguments that start a keeper for each rank."""
        words, asked = self.words, list(self.words.runner)
        env = os.environ | self.environment
        if not words.runner_has("-q", "--quiet", "--log_level"):
            asked += ["--log_level", "critical"]  # it reports each failure again, in its own words
        if not words.runner_has("--master_port", "-H", "--hostfile", "--node_rank"):
            self.port = processes.free_port()
            asked += ["--master_port", str(self.port)]
        rank = [words.target, *words.words]
        if words.over_ssh:
            asked += words.kind_flag
        else:
            asked.append("--module")
            rank = ["remat.launch.rank_keeper", words.kind, *rank]
            env |= {rank_keeper.SOCKET: str(self.socket_path), rank_keeper.LOG_DIR: str(words.log_dir)}
        prepare = signals.end_with_parent(signal.SIGKILL, block=() if words.over_ssh else signals.OF_A_LAUNCH)
        command = [sys.executable, "-u", "-m", *arguments.launcher(words, asked), *rank]
        return subprocess.Popen(command, env=env, start_new_session=True, preexec_fn=prepare)

    # Events

    def _signalled(self, signum: int) -> None:
        if signum == signal.SIGCHLD:
            self.launcher_code = processes.reap().get(self.launcher, self.launcher_code)
            return
        name, now = signal.Signals(signum).name, time.monotonic()
        if signum == signal.SIGHUP:
            signum = signal.SIGTERM  # a closed terminal: ranks need no handler of SIGHUP
        if self.words.over_ssh:
            say(f"{name} sent on to the deepspeed runner, which ends the other nodes")
            processes.send(self.launcher, signum)
        elif not self._all_started():
            say(f"{name} before the ranks began: nothing to save")
            self.stop = self.stop or (signum, now)
            self._kill()
        elif self.stop is None or self.stop[0] == signal.SIGUSR1:
            self.stop = (signum, now)
            self.kill_at = min(self.kill_at, now + self.words.grace_s)
            running = self._send(signum)
            again = f"; again to end at once, by force after {self.words.grace_s:g} s"
            say(f"{name} sent to {format_count(running, 'rank')}: they may save and stop{again}")
        elif signum != signal.SIGUSR1 and now - self.stop[1] > signals.SAME_STOP_S:
            say(f"{name} again: ending at once")
            self._kill()

    def _accept(self) -> None:
        link, _ = self.listener.accept()
        link.sendall(f"grace {self.words.grace_s}\n".encode())
        self.ranks.append(_Rank(link))
        self.events.register(link, selectors.EVENT_READ, self.ranks[-1])

    def _read_message(self, rank: _Rank) -> None:
        """Read a keeper's message: its rank has begun or ended. End of file means that the keeper was killed."""
        try:
            text = rank.link.recv(4096)
        except OSError:
            text = b""
        if not text:
            self.events.unregister(rank.link)
            if rank.code is None:
                rank.at, rank.code = time.monotonic(), -signal.SIGKILL  # the kernel ends the rank with it
            return
        *lines, rank.heard = (rank.heard + text).split(b"\n")
        for line in lines:
            told = json.loads(line)
            if "code" in told:
                rank.code, rank.at, rank.peak_rss_bytes = told["code"], told["at"], told["peak_rss_bytes"]
            else:
                rank.rank, rank.pid, self.local_size = told["rank"], told["pid"], told["local_size"]
                if self.tell and self._all_started():
                    self.tell(began=self.local_size)

    def _check_state(self) -> None:
        """End the ranks that are left after a rank failed, after a launcher was killed, or when time is over."""
        now = time.monotonic()
        ended = [r for r in self.ranks if r.code not in (None, 0)]
        failed = [r for r in ended if r.code != exit_codes.STOPPED and not r.ended_by_us]
        if failed and self.failed_first is None:
            self.failed_first = min(failed, key=lambda rank: rank.at)
            self._report_failure(self.failed_first)
            self._end_ranks(PEERS_S)
        elif ended and self.kill_at == NEVER:
            self.kill_at = now + self.words.grace_s  # the others may still be saving
        if self.launcher_code is not None and not self._all_ended() and not self.launcher_gone and self.ranks:
            self.launcher_gone = True
            say(f"the {self._launcher_that_ended()} was killed: ending the ranks")
            self._end_ranks(LAUNCHER_GONE_S)
        if now >= self.kill_at and not self._all_ended():
            self._kill()

    def _launcher_that_ended(self) -> str:
        """Return its name. The runner ends with code 0 when the node launcher behind it was killed."""
        return "node launcher" if self.launcher_code == 0 or self.words.needs_no_runner else "deepspeed runner"

    def _over(self) -> bool:
        return self.forced or self._all_ended() or (self.launcher_code is not None and not self.ranks)

    def _all_started(self) -> bool:
        return 0 < self.local_size <= len([r for r in self.ranks if r.rank >= 0])

    def _all_ended(self) -> bool:
        live = [r for r in self.ranks if r.code is None]
        return not live and (self._all_started() or (self.launcher_gone and bool(self.ranks)))

    # Actions

    def _send(self, signum: int, *, to_end: bool = False) -> int:
        """Send a signal to each rank that runs and return how many do; `to_end`: their ends are then no failures."""
        running = [r for r in self.ranks if r.runs]
        for rank in running:
            rank.ended_by_us = rank.ended_by_us or to_end
            processes.send(rank.pid, signum)
        return len(running)

    def _end_ranks(self, within_s: float) -> None:
        self._send(signal.SIGTERM, to_end=True)
        self.kill_at = min(self.kill_at, time.monotonic() + within_s)

    def _kill(self) -> None:
        """Kill every rank now, without waiting for its keeper's report."""
        killed = self._send(signal.SIGKILL, to_end=True)
        if killed and time.monotonic() >= self.kill_at:
            say(f"{format_count(killed, 'rank')} did not end in time: killed")
        self.forced = True

    def _end(self) -> int:
        """Let the launchers exit, remove processes and shared memory that are left, and return the exit code."""
        if not self.forced:
            for rank in self.ranks:
                with contextlib.suppress(OSError):
                    rank.link.sendall(b"leave\n")
            deadline = time.monotonic() + LEAVING_S
            while self.ranks and self.launcher_code is None and time.monotonic() < deadline:
                self.launcher_code = processes.reap().get(self.launcher, self.launcher_code)
                time.sleep(0.05)
        processes.end_descendants(at_once=self.forced)
        if self.port:
            processes.remove_shared_buffers(self.port)
        code = self._code()
        first = self.failed_first
        # the output of this node's first rank was shown live
        if first and first.rank != min((r.rank for r in self.ranks if r.rank >= 0), default=-1):
            show_tail(first.rank, self.words.log_dir / f"rank-{first.rank}.log")
        if code and not self.words.asks_help and self.tell is None:
            say(f"exit code {code}; logs in {short(self.words.log_dir)}")
        signals.ignore(signals.OF_A_LAUNCH)
        return code

    def _code(self) -> int:
        if self.failed_first is not None:
            return exit_codes.of_process(self.failed_first.code or 0)
        if self.launcher_gone:
            return exit_codes.KILLED
        codes = [r.code for r in self.ranks]
        if self.forced and self.stop:
            return exit_codes.of_process(-self.stop[0]) if self._all_started() else exit_codes.STOPPED
        if self.forced:
            return exit_codes.KILLED
        if codes:
            return exit_codes.STOPPED if exit_codes.STOPPED in codes else 0
        if self.launcher_code == 0 and not self.words.asks_help and not self.words.over_ssh:
            say("DeepSpeed's launcher left before it started a rank")
            return 1
        if (self.launcher_code or 0) < 0:
            say(f"the {self._launcher_that_ended()} was killed before it started a rank")
        return exit_codes.of_process(self.launcher_code or 0)

    def _report_failure(self, rank: _Rank) -> None:
        code = rank.code or 0
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
        text = self._why_killed(rank) if code == -signal.SIGKILL else f"rank {rank.rank} {how}"
        say(text)
        if self.tell:
            self.tell(failed=text, code=exit_codes.of_process(code))

    def _why_killed(self, rank: _Rank) -> str:
        together = rank.peak_rss_bytes + sum(peak_rss_bytes(r.pid) for r in self.ranks if r.runs)
        before, after, limit = self.kills_before, oom_kills(), host_memory().limit_bytes
        kills = None if before is None or after is None else after - before
        text = killed(
            rank.rank,
            peak_bytes=rank.peak_rss_bytes,
            together_bytes=together,
            limit_bytes=limit,
            oom_kills=kills,
        )
        if killed_for_memory(kills, together_bytes=together, limit_bytes=limit):
            self.out_of_memory = text
        return text
