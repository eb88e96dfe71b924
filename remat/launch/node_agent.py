"""Run the supervisor of one node, for a launch on another node: `python -m remat.launch.node_agent`, over ssh.

It reads its task and signals from standard input and reports on standard output: see remat/launch/nodes.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from io import FileIO
from pathlib import Path
from typing import Any

from remat.config.options import ConfigError
from remat.launch import arguments, exit_codes, nodes, signals, supervisor


def main() -> int:
    """Run this node's part of the launch and return its exit code."""
    orders = os.fdopen(os.dup(0), "rb", buffering=0)  # unbuffered: a thread may wait in it as Python ends
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)  # the ranks' standard input
    task = json.loads(orders.readline())
    os.environ.update(task["environment"])
    with tempfile.TemporaryDirectory(prefix="remat-node-") as folder:
        hostfile = Path(folder) / "hosts"
        hostfile.write_text("".join(f"{host} slots={slots}\n" for host, slots in task["hosts"].items()))
        try:
            words = arguments.parse(["--hostfile", str(hostfile), *task["words"]])
            threading.Thread(target=_obey, args=[orders], daemon=True).start()
            return supervisor.launch(words, tell=_tell)
        except ConfigError as error:
            _tell(failed=str(error), code=exit_codes.CONFIG)
            supervisor.say(str(error))
            return exit_codes.CONFIG


def _obey(orders: FileIO) -> None:
    """Send this process each signal that a line of `orders` names, and SIGTERM at their end."""
    for line in orders:
        if (order := line.decode().strip()) == nodes.KILL:
            _send(signal.SIGTERM)
            time.sleep(1.5 * signals.SAME_STOP_S)
            _send(signal.SIGTERM)  # the second one ends the ranks at once
        else:
            _send(signal.Signals[order])
    _send(signal.SIGTERM)


def _send(signum: signal.Signals) -> None:
    os.kill(os.getpid(), signum)


def _tell(**event: Any) -> None:
    with contextlib.suppress(OSError):  # the launch is gone: `_obey` hears that, and the ranks may save
        os.write(1, nodes.MARK + json.dumps(event).encode() + nodes.MARK + b"\n")


if __name__ == "__main__":
    sys.exit(main())
