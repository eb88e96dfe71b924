"""Note signals that ask a run to stop. It stops at a step that all ranks agree on (remat/training/stopping.py).

The processes of `remat launch` around the ranks read signals from a descriptor instead (`wake_on`). Standard library
only, so that the handlers are in place before any slow import.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
OF_A_LAUNCH = (*SIGNALS, signal.SIGHUP)  # with that of a closed terminal
PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that a process gets when its parent ends
SAME_STOP_S = 1.0  # two signals within this time are one request: some senders signal process and group

_noted: list[tuple[int, float]] = []  # (signal, time.monotonic()) since the launch, or since `forget`


def around(main: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run `main(argv)` with stop signals noted, and return its exit code."""
    catch()
    code = main(argv)
    ignore(SIGNALS)
    return code


def ignore(signums: Iterable[int]) -> None:
    """Ignore signals from now on: one that comes while Python leaves would replace the exit code."""
    for signum in signums:
        signal.signal(signum, signal.SIG_IGN)


def wake_on(signums: Iterable[int]) -> int:
    """Catch signals, and return a file descriptor from which the numbers of those that come are read, a byte each.

    SIGHUP stays ignored under nohup.
    """
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for signum in signums:
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)
    return woken


def end_with_parent(
    signum: int, *, block: Iterable[int] = (), unblock: Iterable[int] = ()
) -> Callable[[], None]:
    """Return a function for a new process, to call before it becomes another program: `preexec_fn` of Popen.

    The process then gets `signum` when its parent ends. It starts with the parent's blocked signals, and those of
    `block`, and without those of `unblock`.
    """
    libc = ctypes.CDLL(None)  # loaded before the fork

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signum)
        signal.pthread_sigmask(signal.SIG_BLOCK, block)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, unblock)

    return prepare


def catch() -> None:
    """Note stop signals in this process from now on. In processes that it forks they act as usual."""
    for signum in SIGNALS:
        signal.signal(signum, _note)
    os.register_at_fork(after_in_child=let_end)


@contextmanager
def noting() -> Iterator[None]:
    """Note the stop signals that come inside, in place of what else they would do; those before are forgotten."""
    forget()
    before = {signum: signal.signal(signum, _note) for signum in SIGNALS}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def noted() -> int:
    """Return the first stop signal that came, 0 for none."""
    return _noted[0][0] if _noted else 0


def forget() -> None:
    """Forget the signals noted so far, for a process that goes on with another run."""
    _noted.clear()


def let_end() -> None:
    """Let stop signals end this process from now on, as if they had never been caught."""
    for signum in SIGNALS:
        if signal.getsignal(signum) is _note:
            signal.signal(signum, signal.SIG_DFL)


def _note(signum: int, _: object) -> None:
    """Note a signal. A second Ctrl-C ends the process at once; other signals may come any number of times."""
    now = time.monotonic()
    first = next((at for known, at in _noted if known == signum), now)
    _noted.append((signum, now))
    if signum == signal.SIGINT and now - first > SAME_STOP_S:
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
