"""End a run that makes no progress, with a report of every live rank: phase, step and stack (exit 70).

A thread of each rank checks once a second. It also runs while the main thread is blocked in a collective, because
a collective releases the GIL. A rank that was stopped, or that holds the GIL, cannot report, and is the suspect for
that reason.

Ranks report to each other over their store (remat/machine/peers.py), which is up to date on every node. Where
the store does not answer, they report in the run directory, which a network file system may show a minute late.

A node that no longer answers is found within train.deadlines.link_s, by a connection from each node to rank 0's
(remat/launch/node_link.py).

A rank past its own deadline gets more time while a rank that is behind it is alive and has time left. Nothing
here waits for ever for a disk or the store: one that no longer answers is a common cause of a hang.
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from remat.config.options import DeadlinesConfig
from remat.launch import exit_codes
from remat.launch.node_link import NodeLink
from remat.machine import distributed, peers

FOLDER = "hang"  # in the run directory
POLL_S = 1.0
LISTEN_S = 2.0  # between two reads of the store, which take 20 microseconds each
FOLDER_S = 30.0  # between two looks at the folder, where the store does not answer
BEAT_S = 10.0  # between two messages of a live rank that say where it is
LOST_S = 30.0  # how long this rank may take to end by itself once another found a rank lost
REPORTS_S = 10.0  # how long other ranks may take to report too
HEARD_S = 3 * LISTEN_S  # time for the other ranks to hear that a node does not answer
SLOWEST_DISK = 100e6  # bytes a second that all ranks together write or read
FIRST_SPEAKS_S = 5.0  # a launcher ends all ranks once one has left, so the others wait for the one that prints


class Watchdog(threading.Thread):
    """A thread that watches the progress of this rank. `enter` marks progress: a phase that begins or goes on.

    A phase without a deadline may last for ever. Call `start`, then `meet` when the ranks have met, `keep_in`
    as soon as there is a run directory, which the ranks must share, and `close`. All ranks enter the same
    phases in the same order. `let_go` is the last call before the watchdog ends this process.
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
        self._bytes: Mapping[str, int] = {}  # phase -> what all ranks together write or read in it
        self._mark = self._seen = ("build", 0)  # as entered, and as the thread saw it last
        self._marks = 0  # phases entered: tells which rank is behind
        self._waited_s, self._looked_at = 0.0, 0.0
        self._folder: Path | None = None
        self._before: dict[str, int] = {}
        self._peers: peers.Peers | None = None
        self._beats, self._beaten_at, self._beaten = 0, 0.0, ("", 0)
        # of each rank: when its count of beats last rose, and its last beat
        self._others: dict[int, tuple[float, dict[str, Any]]] = {}
        self._waiting = self._said = ""  # in words: the ranks that this one waits for, and those last printed
        self._lost_at = 0.0
        self._closed = threading.Event()
        self._asked = threading.Event()  # set when another rank reports a hang

    def allow_for(self, sizes: Mapping[str, int]) -> None:
        """Lengthen the deadlines of phases by the time that a slow disk takes for `sizes`, the bytes of all ranks."""
        self._bytes = sizes

    @property
    def longest_s(self) -> float:
        """Return the longest deadline of any phase."""
        return max(self._limit_s(name.removesuffix("_s")) for name in vars(self._deadlines))

    def enter(self, phase: str, step: int = 0) -> None:
        self._mark = (phase, step)  # a new object each time: that is what counts as progress
        self._marks += 1

    def meet(self, found: peers.Peers | None) -> None:
        """Exchange progress with the other ranks from now on, and watch the connections between nodes."""
        self._peers = found
        if found is None:
            return
        self._beat(found)
        several = distributed.local_size_from_env() < distributed.world_size_from_env()
        if several and distributed.local_rank_from_env() == 0 and self._deadlines.link_s:
            host, silent_s = os.environ["MASTER_ADDR"], self._deadlines.link_s
            NodeLink(found, host, silent_s, on_break=self._link_broke, say=_say).start()

    @property
    def place(self) -> tuple[str, int]:
        """Return (phase, step) as last entered."""
        return self._mark

    @property
    def run_dir(self) -> Path | None:
        return self._folder.parent if self._folder else None

    def keep_in(self, run_dir: Path) -> None:
        """Write reports to `run_dir`/hang from now on. Reports of an earlier launch there are ignored."""
        folder = run_dir / FOLDER
        self._before = {path.name: path.stat().st_mtime_ns for path in folder.glob("rank-*.json")}
        self._folder = folder

    def close(self) -> None:
        self._closed.set()

    def run(self) -> None:
        if self._size > 1:
            threading.Thread(target=self._listen, name="remat-watchdog-listens", daemon=True).start()
        self._looked_at = time.monotonic()
        while not self._closed.wait(POLL_S):
            if self.over(time.monotonic()) or self._asked.is_set():
                self._end()

    def _listen(self) -> None:
        """Talk to the other ranks, in a thread of its own because the disk or the store may be what hangs."""
        while not self._closed.wait(LISTEN_S):
            if self._peers is not None:
                try:
                    self._beat(self._peers)
                    self._hear(self._peers)
                    continue
                except RuntimeError:  # the store's rank has left, or the store does not answer
                    pass
            if self._reports():
                self._asked.set()
            self._closed.wait(FOLDER_S - LISTEN_S)

    def _beat(self, found: peers.Peers) -> None:
        """Tell the store where this rank is: whenever the phase changes, and every BEAT_S."""
        now, mark, marks = time.monotonic(), self._mark, self._marks
        if now - self._beaten_at < BEAT_S and mark[0] == self._beaten[0]:
            return
        self._beats += 1
        self._beaten_at, self._beaten = now, mark
        left_s = self._deadline_s() - self._waited_s if self._deadline_s() else None
        here = {"phase": mark[0], "step": mark[1], "marks": marks, "left_s": left_s, "beats": self._beats}
        found.put_own("beat", here)

    def _hear(self, found: peers.Peers) -> None:
        call = found.get("call")
        if call == "hang":
            self._asked.set()
        elif call == "cut":
            self._leave_now((found.get("lost") or ["a node is gone"])[0])
        elif call and self._lost_at == 0.0:
            found.put_own("alive", self._mark)
            self._lost_at = time.monotonic()
        elif call and time.monotonic() - self._lost_at > LOST_S:
            self._leave_now((found.get("lost") or ["a rank is gone"])[0])
        if 0 < self._deadline_s() <= self._waited_s + 3 * BEAT_S:
            self._look_at_others(found)

    def _link_broke(self, rank: int, cut: bool) -> None:
        """End this rank when the connection to `rank` is lost; rank 0 also tells the others.

        When only that rank's process ended (not `cut`), collectives get LOST_S to fail first: their errors say more.
        """
        found = self._peers
        if self._closed.is_set() or found is None:
            return
        ranks = range(rank, min(rank + distributed.local_size_from_env(), found.size))
        if cut:
            text = (
                f"no answer from {found.hosts[rank]} for {self._deadlines.link_s:g} s (train.deadlines.link_s): that "
                f"node ({found.named(ranks)}) is down, or its network"
            )
        else:
            text = f"{found.named([rank])} is gone"
        if self._rank == 0:
            self._tell_of_loss(found, text, ranks, cut=cut)
        if not cut and self._closed.wait(LOST_S):
            return
        self._leave_now(text)

    def _tell_of_loss(self, found: peers.Peers, text: str, ranks: range, *, cut: bool) -> None:
        if cut:
            found.put("lost", [text, list(ranks)])
            found.put("call", "cut")
            self._closed.wait(HEARD_S)
        elif found.get("call") is None:
            found.put("call", "lost")

    def _leave_now(self, text: str) -> None:
        phase, step = self._mark
        _say(
            f"{text}; rank {self._rank} was in {name_place(phase, step)}: the run ends, saved states are as they were, "
            "resume=auto goes on from the newest"
        )
        self._let_go()
        os._exit(exit_codes.FAILED)

    def _look_at_others(self, found: peers.Peers) -> None:
        now, seen = time.monotonic(), {}
        for rank, beat in found.each("beat").items():
            rose_at, before = self._others.get(rank, (now, beat))
            seen[rank] = now if beat["beats"] > before["beats"] else rose_at, beat
        self._others = seen
        behind = {
            rank: beat["phase"]
            for rank, (rose_at, beat) in seen.items()
            if beat["marks"] < self._marks
            and now - rose_at <= 2 * BEAT_S + LISTEN_S
            and (beat["left_s"] is None or beat["left_s"] > 0)
        }
        waiting = f"{found.named(behind)} in {' and '.join(sorted(set(behind.values())))}" if behind else ""
        if waiting and waiting != self._said and self._waited_s >= self._deadline_s() and self._rank == 0:
            print(
                f"remat: in {self._seen[0]} since {self._waited_s:.0f} s, waiting for {waiting}",
                file=sys.stderr,
                flush=True,
            )
            self._said = waiting
        self._waiting = waiting

    def over(self, now_s: float) -> bool:
        """Return whether the deadline of the present phase is over; `now_s` is time.monotonic(). Call every POLL_S."""
        mark = self._mark
        # a longer gap means that the whole run was suspended, or that the machine is slow
        gap_s = min(now_s - self._looked_at, 2 * POLL_S)
        self._waited_s = self._waited_s + gap_s if mark is self._seen else 0.0
        if mark is not self._seen:
            self._others, self._waiting = {}, ""
        self._seen, self._looked_at = mark, now_s
        return 0 < self._deadline_s() <= self._waited_s and not self._waiting

    def _deadline_s(self) -> float:
        return self._limit_s(self._seen[0])

    def _limit_s(self, phase: str) -> float:
        own = float(getattr(self._deadlines, f"{phase}_s", 0.0))
        return own + self._for_bytes_s(phase) if own else 0.0

    def _for_bytes_s(self, phase: str) -> float:
        return self._bytes.get(phase, 0) / SLOWEST_DISK

    def _end(self) -> None:
        mine = {
            "rank": self._rank,
            "phase": self._seen[0],
            "step": self._seen[1],
            "seconds": round(self._waited_s, 1),
            "deadline_s": self._deadline_s(),
            "for_bytes_s": self._for_bytes_s(self._seen[0]),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "where": _where(),
        }
        last_resort = threading.Timer(2 * (REPORTS_S + FIRST_SPEAKS_S), _leave_alone, [mine])
        last_resort.daemon = True
        last_resort.start()
        told = _Told(self._peers, mine) if self._peers is not None else None
        with contextlib.suppress(Exception):  # a full disk does not keep the run from ending
            self._write(mine)
        everyone = self._gather(mine, told)
        if told.speaks if told else self._rank == min(everyone):
            _say(self._in_words(everyone, told))
        else:
            time.sleep(FIRST_SPEAKS_S)
        self._let_go()
        os._exit(exit_codes.FAILED)  # the main thread cannot be reached

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

    def _gather(self, mine: dict[str, Any], told: _Told | None) -> dict[int, dict[str, Any]]:
        """Return the reports by rank: all of them, or those that came in time."""
        deadline = time.monotonic() + REPORTS_S
        found = {self._rank: mine}
        while len(found) < self._size and time.monotonic() < deadline:
            time.sleep(0.1)
            if told is not None and told.another_speaks:
                break
            found |= told.reports if told is not None else {}
            if told is None or not told.answered:
                with contextlib.suppress(OSError, ValueError):
                    found |= {report["rank"]: report for report in self._reports()}
        return found

    def _reports(self) -> list[dict[str, Any]]:
        """Return the reports that ranks have written to the run directory in this launch."""
        if self._folder is None:
            return []
        with contextlib.suppress(OSError):
            paths = [
                p for p in self._folder.glob("rank-*.json") if p.stat().st_mtime_ns != self._before.get(p.name)
            ]
            return [json.loads(path.read_text()) for path in paths]
        return []

    def _in_words(self, everyone: dict[int, dict[str, Any]], told: _Told | None) -> str:
        late = [report for report in everyone.values() if 0 < report["deadline_s"] <= report["seconds"]]
        first = max(late or everyone.values(), key=lambda report: report["seconds"])
        lines = [
            f"no progress for {first['seconds']:.0f} s in {_place(first)} of rank {first['rank']} "
            f"({_option(first)}): the run ends, saved states are as they were"
        ]
        for rank in range(self._size):
            report = everyone.get(rank)
            name = (
                self._peers.named([rank]) if self._peers and len(set(self._peers.hosts)) > 1 else f"rank {rank}"
            )
            if report is not None:
                lines.append(f"  {name}: {_place(report)}, {report['seconds']:.0f} s: {report['where']}")
            elif told is None or told.answered:
                lines.append(f"  {name}: did not report: it was stopped or hangs itself, and is the suspect")
            else:
                lines.append(
                    f"  {name}: has not reported yet: the store at {told.holder} does not answer, so its report is "
                    "looked for in the run directory, where those of other nodes may be a minute late"
                )
        if self._folder is not None:
            lines.append(f"  stacks of all threads: {self._folder}/rank-N.txt")
        return "\n".join(lines)


class _Told(threading.Thread):
    """A thread that exchanges the reports of all ranks over the store.

    It is a thread because the store may be what hangs.

    Rank 0 speaks for all, or else the first rank to see that rank 0 did not report. So only one of many ranks
    reads and prints all reports.
    """

    def __init__(self, found: peers.Peers, mine: dict[str, Any]) -> None:
        super().__init__(name="remat-watchdog-tells", daemon=True)
        self._peers, self._mine = found, mine
        self.reports: dict[int, dict[str, Any]] = {}
        self.answered = False
        self.another_speaks = False
        self.holder = found.holder
        self._elected = found.rank == 0
        self.start()

    @property
    def speaks(self) -> bool:
        """Return whether this rank prints the report.

        Where the store does not answer, every rank prints, because none knows whether another one does.
        """
        return self._elected or not self.answered

    def run(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._peers.put_own("report", self._mine)
            self._peers.put("call", "hang")
            self.answered = True
            end = time.monotonic() + 0.6 * REPORTS_S
            while not self._elected and time.monotonic() < end:
                if self._peers.get("report/0") is not None:
                    self.another_speaks = True
                    return
                time.sleep(0.2)
            if not self._elected and self._peers.add("speaks") > 1:
                self.another_speaks = True
                return
            self._elected = True
            while len(self.reports) < self._peers.size:
                self.reports = self._peers.each("report")
                time.sleep(0.2)


def _say(text: str) -> None:
    print(f"\nremat: {text}\n", file=sys.stderr, flush=True)


def _leave_alone(mine: dict[str, Any]) -> None:
    """Print this rank's own report and end, when the reports cannot be written or read."""
    text = f"no progress in {_place(mine)} of rank {mine['rank']}, nor of its report: {mine['where']}"
    os.write(2, f"\nremat: {text}\n".encode())
    os._exit(exit_codes.FAILED)


def _option(report: dict[str, Any]) -> str:
    """Return the option that gave a report its deadline, and what its bytes add."""
    more = report["for_bytes_s"]
    own = f"train.deadlines.{report['phase']}_s={report['deadline_s'] - more:g}"
    return f"{own}, and {more:.0f} s for its bytes" if more >= 1 else own


def name_place(phase: str, step: int) -> str:
    """Return where a rank is: `step 4`, `save at step 4` or `build`."""
    return f"step {step}" if phase == "step" else f"{phase} at step {step}" if step else phase


def _place(report: dict[str, Any]) -> str:
    return name_place(report["phase"], report["step"])


def _where() -> str:
    """Return the main thread's innermost calls, innermost first."""
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main) if main is not None else None
    calls = traceback.extract_stack(frame)[::-1][:4] if frame else []
    return " < ".join(f"{call.name} ({Path(call.filename).name}:{call.lineno})" for call in calls)
