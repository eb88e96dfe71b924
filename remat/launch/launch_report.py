"""What `remat launch` says: on stderr, each line marked as its own."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from remat.config.units import GIB

TAIL_LINES = 30


def say(text: str) -> None:
    print(f"remat launch: {text}", file=sys.stderr, flush=True)


def ranks_in_words(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def failure(rank: int, code: int) -> str:
    """How a rank ended that was not killed; `code` is negative for a signal."""
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    return f"rank {rank} {how}"


def killed(rank: int, *, peak_bytes: int, together_bytes: int, limit_bytes: int, oom_kills: int | None) -> str:
    """A SIGKILL nobody here sent: likely the kernel, out of memory. Says what speaks for it.

    `peak_bytes` is the rank's peak RSS (0: unknown), `together_bytes` that of all ranks of the node, `oom_kills`
    how many processes the kernel killed for memory since launch, where the control group tells.
    """
    own = f"{peak_bytes / GIB:.1f}" if peak_bytes else "an unknown part"
    if oom_kills is None:
        counted = "the control group does not tell whether the kernel did it"
    else:
        counted = (
            f"the control group counts {oom_kills} out-of-memory kill{'s' * (oom_kills != 1)} since launch"
        )
    return (
        f"rank {rank} was killed (SIGKILL). Host out of memory? Its peak RSS was {own} of {limit_bytes / GIB:.1f} GiB, "
        f"{together_bytes / GIB:.1f} GiB with the other ranks of this node; {counted}"
    )


def show_tail(rank: int, log: Path) -> None:
    """The end of a log that was not shown live."""
    if log.exists():
        say(f"the last lines of rank {rank}, which failed first:")
        lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        print("\n".join(f"  {line}" for line in lines), file=sys.stderr, flush=True)
