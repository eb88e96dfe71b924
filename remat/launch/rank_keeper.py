"""What the `deepspeed` launcher starts in the place of a rank: starts the rank, keeps its log, reports its end.

`python -m remat.rank_keeper [--local_rank=N] script|module|program NAME WORDS...`, started by `remat launch` only.
It tells the supervisor over a Unix socket which process the rank is and how it ended, and leaves when told to, so
that DeepSpeed's launcher, which kills the other ranks once one has left, never has cause to. Standard library only:
it costs each rank some 10 MB and a tenth of a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import pty
import re
import selectors
import signal
import socket
import subprocess
import sys
import termios
import time
import tty
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

SOCKET, LOG_DIR = "REMAT_KEEPER_SOCKET", "REMAT_KEEPER_LOG_DIR"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
CONTROL = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-Z\\^_])")
PR_SET_PDEATHSIG = 1
EXIT_NOT_STARTED = 127


def main(argv: list[str]) -> int:
    """Keep one rank from its start to the supervisor's leave; the rank's exit code, 128 + N for a signal."""
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    link = socket.socket(socket.AF_UNIX)
    link.connect(os.environ.pop(SOCKET))
    log = (Path(os.environ.pop(LOG_DIR)) / f"rank-{rank}.log").open("ab", buffering=0)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    streams = _Streams(log, live=local_rank == 0)
    try:
        child = _start(argv, streams)
    except OSError as error:
        os.write(2, f"remat launch: rank {rank} cannot be started: {error}\n".encode())
        _tell(link, rank=rank, local_size=int(os.environ["LOCAL_SIZE"]), pid=0)
        return _leave(link, EXIT_NOT_STARTED, 0)
    _tell(link, rank=rank, local_size=int(os.environ["LOCAL_SIZE"]), pid=child.pid)
    code, peak_rss_bytes = _watch(child.pid, link, streams, woken)
    streams.close(killed=code < 0)
    return _leave(link, code, peak_rss_bytes)


def command(argv: list[str]) -> list[str]:
    """Return the rank's own command, from the words of this one; `--local_rank=N` comes before its arguments."""
    local_rank = [word for word in argv[:1] if word.startswith("--local_rank")]
    kind, name, *words = argv[len(local_rank) :]
    start = {"script": [sys.executable, "-u"], "module": [sys.executable, "-u", "-m"], "program": []}[kind]
    return [*start, name, *local_rank, *words]


def _start(argv: list[str], streams: _Streams) -> subprocess.Popen:
    """Start the rank. It dies with this process, and takes the signals that the launchers above it do not."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    return subprocess.Popen(command(argv), stdout=streams.stdout, stderr=streams.stderr, preexec_fn=prepare)


def _watch(child: int, link: socket.socket, streams: _Streams, woken: int) -> tuple[int, int]:
    """Return the exit code or -signal of the rank once it ended, and its peak resident memory in bytes.

    If the supervisor is gone the rank is asked to stop, and killed when its grace is over.
    """
    waiting = selectors.DefaultSelector()
    waiting.register(woken, selectors.EVENT_READ)
    waiting.register(link, selectors.EVENT_READ)
    for copy in streams.copies:
        waiting.register(copy.source, selectors.EVENT_READ, copy)
    grace_s, kill_at = 0.0, float("inf")
    while True:
        for key, _ in waiting.select(1.0):
            if isinstance(key.data, _Copy):
                if not key.data.pump():
                    waiting.unregister(key.fileobj)
            elif key.fileobj == woken:
                os.read(woken, 4096)
            elif text := link.recv(4096):
                grace_s = float(text.split()[-1])
            else:  # the supervisor is gone
                waiting.unregister(link)
                os.kill(child, signal.SIGTERM)
                kill_at = time.monotonic() + grace_s
        if time.monotonic() > kill_at:
            os.kill(child, signal.SIGKILL)
        streams.fit_terminal()
        pid, status, used = os.wait4(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status), used.ru_maxrss * 1024


def _leave(link: socket.socket, code: int, peak_rss_bytes: int) -> int:
    """Report the end and wait until the supervisor allows to leave, or is gone."""
    with contextlib.suppress(OSError):
        _tell(link, code=code, at=time.monotonic(), peak_rss_bytes=peak_rss_bytes)
        while (text := link.recv(4096)) and b"leave" not in text:
            pass
    return code if code >= 0 else 128 - code


def _tell(link: socket.socket, **fields: float) -> None:
    link.sendall(json.dumps(fields).encode() + b"\n")


class _Streams:
    """Where the rank's output goes: to its log, and of a live rank to this process's own output as well.

    A terminal stays one for the rank (colours, bars), through a pseudo-terminal; its log gets plain lines.
    """

    def __init__(self, log: BinaryIO, *, live: bool) -> None:
        self.copies: list[_Copy] = []
        self.stdout = self.stderr = log.fileno()
        self._slave = -1
        if not live:
            return
        terminals = [os.isatty(1), os.isatty(2)]
        if any(terminals):
            master, self._slave = pty.openpty()
            tty.setraw(self._slave)
            self.copies.append(_Copy(master, 1 if terminals[0] else 2, log, lines=_Lines()))
        self.fit_terminal()
        self.stdout, self.stderr = (
            self._slave if terminal else self._pipe(target, log)
            for target, terminal in zip((1, 2), terminals, strict=True)
        )

    def _pipe(self, target: int, log: BinaryIO) -> int:
        source, end = os.pipe()
        self.copies.append(_Copy(source, target, log))
        return end

    def fit_terminal(self) -> None:
        """Make the rank's terminal as large as the real one, whenever that changes."""
        for copy in self.copies:
            if copy.lines:
                with contextlib.suppress(OSError):
                    size = fcntl.ioctl(copy.target, termios.TIOCGWINSZ, bytes(8))
                    fcntl.ioctl(copy.source, termios.TIOCSWINSZ, size)

    def close(self, *, killed: bool) -> None:
        """Copy what is still on its way; a killed rank could not give the terminal its cursor back."""
        for copy in self.copies:
            while copy.pump():
                pass
            if copy.lines and killed:
                copy.show(b"\x1b[?25h\n")


@dataclass
class _Copy:
    """One stream of the rank, copied to `target` and into the log."""

    source: int
    target: int
    log: BinaryIO
    lines: _Lines | None = None
    _shown: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        os.set_blocking(self.source, False)

    def pump(self) -> bool:
        """Copy what is there; False when there is nothing."""
        try:
            data = os.read(self.source, 1 << 16)
        except OSError:
            return False
        self.show(data)
        self.log.write(self.lines.plain(data) if self.lines else data)
        return bool(data)

    def show(self, data: bytes) -> None:
        """Show text; that nobody listens any more is no reason to end a run."""
        while self._shown and data:
            try:
                data = data[os.write(self.target, data) :]
            except OSError:
                self._shown = False


class _Lines:
    """What a terminal would have kept of each line: no colours, and no bar that was drawn over."""

    def __init__(self) -> None:
        self._rest = b""

    def plain(self, data: bytes) -> bytes:
        *whole, self._rest = (self._rest + data).split(b"\n")
        # a newline may follow the last
        self._rest = self._rest[max(0, self._rest.rstrip(b"\r").rfind(b"\r")) :]
        found = [CONTROL.sub(b"", line).rstrip(b"\r").rpartition(b"\r")[2].rstrip() for line in whole]
        return b"".join(line + b"\n" for line in found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
