"""Exit codes of commands and of ranks. docs/commands.md says which comes when. Standard library only."""

from __future__ import annotations

import signal

CONFIG = 2  # an option, a file or the environment is refused
NOT_ABLE = 3  # this machine cannot do it: memory, disk space, an op of a run, an ssh
FAILED = 70  # what had begun failed; saved states are as they were
STOPPED = 75  # stopped on request, with a saved state if a step was done
KILLED = 128 + signal.SIGKILL


def of_process(code: int) -> int:
    """Return a process's code as a shell has it: 128 + N where signal N ended it, which `code` has as -N."""
    return code if code >= 0 else 128 - code
