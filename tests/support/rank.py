"""A rank without torch, for faults that are the supervisor's: `rank.py [--local_rank=N] FOLDER WHAT [RANK CODE]`.

It writes FOLDER/ready-RANK (its pid) once it can take signals. WHAT: `stop` waits for a stop signal, then until all
ranks got theirs, and exits 75; `deaf` takes no stop signal; `exit` does as `stop`, but RANK exits CODE once FOLDER/go
is there; `talk` writes to both streams and ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
DEADLINE = time.monotonic() + 300


def wait_for(*paths: Path) -> None:
    while not all(path.exists() for path in paths):
        if time.monotonic() > DEADLINE:
            sys.exit(f"rank {RANK}: no {paths}")
        time.sleep(0.02)


def main(folder: Path, what: str, who: str = "", code: str = "0") -> int:
    got: list[str] = []
    for signum in STOPS:
        action = signal.SIG_IGN if what == "deaf" else lambda signum, _: got.append(signal.Signals(signum).name)
        signal.signal(signum, action)
    if what == "talk":
        print("\x1b[31mred\x1b[0m\nbar 10%\rbar 100%", sys.stdout.isatty(), flush=True)
        print(f"error of rank {RANK}", file=sys.stderr, flush=True)
        return 0
    if what == "exit":  # a process that leaves its session, as a service does
        subprocess.Popen(
            ["sh", "-c", f"sleep 1000 & echo $! >{folder}/service-{RANK}"], start_new_session=True
        ).wait()
    print(f"rank {RANK} is ready", flush=True)
    (folder / f"part-{RANK}").write_text(str(os.getpid()))
    (folder / f"part-{RANK}").rename(folder / f"ready-{RANK}")
    while not got and time.monotonic() < DEADLINE:
        if who == str(RANK) and (folder / "go").exists():
            print(f"rank {RANK} ends with {code}", flush=True)
            return int(code)
        time.sleep(0.02)
    (folder / f"got-{RANK}").write_text(got[0])
    if what != "exit":
        wait_for(*(folder / f"got-{rank}" for rank in range(SIZE)))
    return 75


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[2]), *sys.argv[3:]))
