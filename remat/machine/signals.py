"""Signals that ask a run to stop. They are noted here, and obeyed where all ranks agree (remat/training/stopping.py).

Standard library only: it is in place before anything that takes long is imported.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAME_STOP_S = 1.0  # a sender that signals process and group does not ask twice

_noted: list[tuple[int, float]] = []  # (signal, time.monotonic()) since the launch, or since `forget`


def around(main: Callable[[list[str]], int], argv: list[str]) -> int:
    """The exit code of `main(argv)`, in which a stop signal ends nothing by itself; none replaces that code."""
    catch()
    code = main(argv)
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    return code


def catch() -> None:
    """From now on stop signals are noted in this process; those it forks are ended by them as ever."""
    for signum in SIGNALS:
        signal.signal(signum, _note)
    os.register_at_fork(after_in_child=let_end)


def noted() -> int:
    """The first stop signal that came, 0 for none."""
    return _noted[0][0] if _noted else 0


def forget() -> None:
    """What came is obeyed: for a process that goes on with another run."""
    _noted.clear()


def let_end() -> None:
    """From now on a stop signal ends this process, as if it had never been caught."""
    for signum in SIGNALS:
        if signal.getsignal(signum) is _note:
            signal.signal(signum, signal.SIG_DFL)


def _note(signum: int, _: object) -> None:
    """A second Ctrl-C ends the process at once. Anything else may come as often as it likes."""
    now = time.monotonic()
    first = next((at for known, at in _noted if known == signum), now)
    _noted.append((signum, now))
    if signum == signal.SIGINT and now - first > SAME_STOP_S:
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
