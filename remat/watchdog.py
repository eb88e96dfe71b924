"""A run that makes no progress ends with a report of every live rank: phase, step and stack (exit 70).

A thread of each rank looks once a second. It works while the main thread is blocked in a collective, which gives the
interpreter free. A rank that was stopped, or that holds the interpreter, cannot report: that makes it the suspect.
Nothing here waits for a disk for ever: one that no longer answers is a common cause of a hang.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remat.config import DeadlinesConfig

EXIT_FAILED = 70
FOLDER = "hang"  # in the run directory
POLL_S = 1.0
REPORTS_S = 10.0  # what other ranks get to report too
FIRST_SPEAKS_S = 5.0  # a launcher ends all ranks once one has left: the one that tells is the first


class Watchdog(threading.Thread):
    """`enter` marks progress: a phase that begins, or goes on with its next part. Phases without a deadline never end.

    Call `start`, then `keep_in` as soon as there is a run directory, which the ranks must share; and `close`.
    `let_go` is called before this process ends, which then runs nothing else.
    """

    def __init__(
        self,
        deadlines: DeadlinesConfig,
        *,
        rank: int,
        size: int,
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name="remat-watchdog", daemon=True)
        self._deadlines, self._rank, self._size = deadlines, rank, size
        self._let_go = let_go
        self._mark = self._seen = ("build", 0)  # as entered, as the thread saw it last
        self._waited_s, self._looked_at = 0.0, 0.0
        self._folder: Path | None = None
        self._before: dict[str, int] = {}
        self._closed = threading.Event()
        self._asked = threading.Event()  # another rank reports

    def enter(self, phase: str, step: int = 0) -> None:
        self._mark = (phase, step)  # a new object each time: that is what counts as progress

    def keep_in(self, run_dir: Path) -> None:
        """Reports go to `run_dir`/hang. Those of an earlier launch are no sign of this one."""
        folder = run_dir / FOLDER
        self._before = {path.name: path.stat().st_mtime_ns for path in folder.glob("rank-*.json")}
        self._folder = folder

    def close(self) -> None:
        self._closed.set()

    def run(self) -> None:
        threading.Thread(target=self._listen, name="remat-watchdog-listens", daemon=True).start()
        self._looked_at = time.monotonic()
        while not self._closed.wait(POLL_S):
            if self.over(time.monotonic()) or self._asked.is_set():
                self._end()

    def _listen(self) -> None:
        """In a thread of its own, for the disk may be what hangs."""
        while not self._closed.wait(POLL_S):
            if self._reports():
                self._asked.set()

    def over(self, now_s: float) -> bool:
        """Whether the deadline of the present phase is over; `now_s` is time.monotonic(), asked every POLL_S."""
        mark = self._mark
        # a longer gap: the whole run was suspended, or the machine is slow
        gap_s = min(now_s - self._looked_at, 2 * POLL_S)
        self._waited_s = self._waited_s + gap_s if mark is self._seen else 0.0
        self._seen, self._looked_at = mark, now_s
        return 0 < self._deadline_s() <= self._waited_s

    def _deadline_s(self) -> float:
        return float(getattr(self._deadlines, f"{self._seen[0]}_s", 0.0))

    def _end(self) -> None:
        mine = {
            "rank": self._rank,
            "phase": self._seen[0],
            "step": self._seen[1],
            "seconds": round(self._waited_s, 1),
            "deadline_s": self._deadline_s(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "where": _where(),
        }
        last_resort = threading.Timer(2 * (REPORTS_S + FIRST_SPEAKS_S), _leave_alone, [mine])
        last_resort.daemon = True
        last_resort.start()
        with contextlib.suppress(Exception):  # a full disk does not keep the run from ending
            self._write(mine)
        everyone = self._gather(mine)
        if self._rank == min(everyone):
            print(f"\nremat: {self._in_words(everyone)}\n", file=sys.stderr, flush=True)
        else:
            time.sleep(FIRST_SPEAKS_S)
        self._let_go()
        os._exit(EXIT_FAILED)  # the main thread cannot be reached

    def _write(self, mine: dict[str, Any]) -> None:
        if self._folder is None:
            faulthandler.dump_traceback(sys.stderr)
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / f"rank-{self._rank}.txt").open("w") as out:
            faulthandler.dump_traceback(out)
        part = self._folder / f"rank-{self._rank}.part"
        part.write_text(json.dumps(mine, indent=2) + "\n")
        part.replace(self._folder / f"rank-{self._rank}.json")

    def _gather(self, mine: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Reports by rank: all of them, or those that came in time."""
        deadline = time.monotonic() + REPORTS_S
        found = {self._rank: mine}
        while len(found) < self._size and self._folder is not None and time.monotonic() < deadline:
            time.sleep(0.1)
            with contextlib.suppress(OSError, ValueError):
                found |= {report["rank"]: report for report in self._reports()}
        return found

    def _reports(self) -> list[dict[str, Any]]:
        """What ranks have reported in this launch."""
        if self._folder is None:
            return []
        with contextlib.suppress(OSError):
            paths = [
                p for p in self._folder.glob("rank-*.json") if p.stat().st_mtime_ns != self._before.get(p.name)
            ]
            return [json.loads(path.read_text()) for path in paths]
        return []

    def _in_words(self, everyone: dict[int, dict[str, Any]]) -> str:
        late = [report for report in everyone.values() if 0 < report["deadline_s"] <= report["seconds"]]
        first = max(late or everyone.values(), key=lambda report: report["seconds"])
        lines = [
            f"no progress for {first['seconds']:.0f} s in {_place(first)} of rank {first['rank']} "
            f"(train.deadlines.{first['phase']}_s={first['deadline_s']:g}): the run ends, saved states are as they were"
        ]
        for rank in range(self._size):
            report = everyone.get(rank)
            if report is None:
                lines.append(
                    f"  rank {rank}: did not report: it was stopped or hangs itself, and is the suspect"
                )
            else:
                lines.append(f"  rank {rank}: {_place(report)}, {report['seconds']:.0f} s: {report['where']}")
        if self._folder is not None:
            lines.append(f"  stacks of all threads: {self._folder}/rank-N.txt")
        return "\n".join(lines)


def _leave_alone(mine: dict[str, Any]) -> None:
    """When the reports cannot be written or read: this rank's own, and the end."""
    text = f"no progress in {_place(mine)} of rank {mine['rank']}, nor of its report: {mine['where']}"
    os.write(2, f"\nremat: {text}\n".encode())
    os._exit(EXIT_FAILED)


def _place(report: dict[str, Any]) -> str:
    phase, step = report["phase"], report["step"]
    return f"step {step}" if phase == "step" else f"{phase} at step {step}" if step else str(phase)


def _where() -> str:
    """The main thread's innermost calls, innermost first."""
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main) if main is not None else None
    calls = traceback.extract_stack(frame)[::-1][:4] if frame else []
    return " < ".join(f"{call.name} ({Path(call.filename).name}:{call.lineno})" for call in calls)
