"""Process that the `deepspeed` launcher starts in place of a rank: it starts the rank, keeps its log, reports its end.

`python -m remat.launch.rank_keeper [--local_rank=N] script|module|program NAME ARGUMENTS...`, started by `remat launch`
only. It reports the rank's process id and exit code to the supervisor over a Unix socket. It exits only when told to,
because DeepSpeed's launcher kills the other ranks once one has exited. Standard library only: it costs each rank some
10 MB and a tenth of a second.
"""

from __future__ import annotations

import contextlib
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

from remat.launch import exit_codes, signals

SOCKET, LOG_DIR = "REMAT_KEEPER_SOCKET", "REMAT_KEEPER_LOG_DIR"
CONTROL = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-Z\\^_])")
EXIT_NOT_STARTED = 127


def main(argv: list[str]) -> int:
    """Run one rank, then wait until the supervisor says leave. Return the rank's exit code, 128 + N for signal N."""
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    link = socket.socket(socket.AF_UNIX)
    link.connect(os.environ.pop(SOCKET))
    log = (Path(os.environ.pop(LOG_DIR)) / f"rank-{rank}.log").open("ab", buffering=0)
    woken = signals.wake_on([signal.SIGCHLD])
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
    """Return the rank's command, given the keeper's arguments; `--local_rank=N` precedes the rank's arguments."""
    local_rank = [word for word in argv[:1] if word.startswith("--local_rank")]
    kind, name, *words = argv[len(local_rank) :]
    start = {"script": [sys.executable, "-u"], "module": [sys.executable, "-u", "-m"], "program": []}[kind]
    return [*start, name, *local_rank, *words]


def _start(argv: list[str], streams: _Streams) -> subprocess.Popen:
    """Start the rank. It is killed when this process ends, and receives the signals that the launchers block."""
    prepare = signals.end_with_parent(signal.SIGKILL, unblock=signals.OF_A_LAUNCH)
    return subprocess.Popen(command(argv), stdout=streams.stdout, stderr=streams.stderr, preexec_fn=prepare)


def _watch(child: int, link: socket.socket, streams: _Streams, woken: int) -> tuple[int, int]:
    """Wait for the rank's end. Return its exit code, negative for a signal, and its peak resident memory in bytes.

    If the supervisor is gone, the rank gets SIGTERM, and SIGKILL when its grace period is over.
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
    """Report the rank's end, wait until the supervisor says leave or is gone, and return this process's exit code."""
    with contextlib.suppress(OSError):
        _tell(link, code=code, at=time.monotonic(), peak_rss_bytes=peak_rss_bytes)
        while (text := link.recv(4096)) and b"leave" not in text:
            pass
    return exit_codes.of_process(code)


def _tell(link: socket.socket, **fields: float) -> None:
    link.sendall(json.dumps(fields).encode() + b"\n")


class _Streams:
    """Destinations of the rank's output: its log and, if `live`, this process's own output too.

    In place of a terminal the rank gets a pseudo-terminal, so that it shows colours and bars; its log has plain lines.
    """

    def __init__(self, log: BinaryIO, *, live: bool) -> None:
        self.copies: list[_Copy] = []
        self.stdout = self.stderr = log.fileno()
        if not live:
            return
        terminals, slave = [os.isatty(1), os.isatty(2)], -1
        if any(terminals):
            master, slave = pty.openpty()
            tty.setraw(slave)
            self.copies.append(_Copy(master, 1 if terminals[0] else 2, log, lines=_Lines()))
        self.fit_terminal()
        self.stdout, self.stderr = (
            slave if terminal else self._pipe(target, log)
            for target, terminal in zip((1, 2), terminals, strict=True)
        )

    def _pipe(self, target: int, log: BinaryIO) -> int:
        source, end = os.pipe()
        self.copies.append(_Copy(source, target, log))
        return end

    def fit_terminal(self) -> None:
        """Give the rank's pseudo-terminal the size of the real terminal."""
        for copy in self.copies:
            if copy.lines:
                with contextlib.suppress(OSError):
                    size = fcntl.ioctl(copy.target, termios.TIOCGWINSZ, bytes(8))
                    fcntl.ioctl(copy.source, termios.TIOCSWINSZ, size)

    def close(self, *, killed: bool) -> None:
        """Copy the remaining output. After a killed rank, show the terminal's cursor again."""
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
        """Copy what can be read now; return False when there is nothing."""
        try:
            data = os.read(self.source, 1 << 16)
        except OSError:
            return False
        self.show(data)
        self.log.write(self.lines.plain(data) if self.lines else data)
        return bool(data)

    def show(self, data: bytes) -> None:
        """Write to `target`. When `target` is closed, stop showing the output; the run goes on."""
        while self._shown and data:
            try:
                data = data[os.write(self.target, data) :]
            except OSError:
                self._shown = False


class _Lines:
    """Turns terminal output into plain lines, without colours and without progress bars that were overwritten."""

    def __init__(self) -> None:
        self._rest = b""

    def plain(self, data: bytes) -> bytes:
        *whole, self._rest = (self._rest + data).split(b"\n")
        # drop overwritten text; a newline may still follow the last carriage return
        self._rest = self._rest[max(0, self._rest.rstrip(b"\r").rfind(b"\r")) :]
        found = [CONTROL.sub(b"", line).rstrip(b"\r").rpartition(b"\r")[2].rstrip() for line in whole]
        return b"".join(line + b"\n" for line in found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
