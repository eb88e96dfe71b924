"""Decide by a vote of all ranks whether the run stops: a signal on any of them, a stop file, or the time limit.

Each rank contributes a small number, and the largest counts. The ranks use a process group of their own on the
CPU. The vote is started before an optimizer step and read after it, so no step waits for a GPU because of it.
Another number goes with it: how many background saves every rank has flushed.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from remat.launch import signals
from remat.machine import distributed
from remat.machine.distributed import World

FILE = "stop"  # in the run directory
RANK_BITS = 20
TIME_IS_OVER, FILE_IS_THERE, SIGNAL = 1, 2, 16  # codes; a signal's is SIGNAL + its number


class StopVote:
    """A vote on whether to stop. Collective: call `start` and `finish` in pairs, equally often on every rank.

    Rank 0 watches file and clock. `age_s`: seconds since the launch, which count towards `max_minutes` (0: no
    limit).
    """

    def __init__(self, world: World, folder: Path, *, max_minutes: float, age_s: float) -> None:
        self.reason: str | None = None  # set once all ranks agreed to stop
        self.flushed = 0  # background saves flushed on every rank, as of the last vote
        self._world, self._folder = world, folder
        self._max_minutes = max_minutes
        self._ends_at = time.monotonic() + 60 * max_minutes - age_s if max_minutes else float("inf")
        self._group = distributed.cpu_group() if world.size > 1 else None
        self._pending: tuple[torch.Tensor, dist.Work | None] | None = None

    def start(self, *, flushed: int = 0) -> None:
        """Start a vote; returns at once. `flushed`: background saves of which this rank has flushed its part."""
        if self.reason is not None or self._pending is not None:
            return
        code = self._own()
        words = torch.tensor([code << RANK_BITS | self._world.rank, -code, -flushed])
        work = dist.all_reduce(words, dist.ReduceOp.MAX, self._group, async_op=True) if self._group else None
        self._pending = words, work

    def finish(self) -> bool:
        """Wait for the vote and return whether to stop: the same on every rank."""
        if self._pending is not None:
            words, work = self._pending
            self._pending = None
            if work is not None:
                work.wait()
            most, least, behind = words.tolist()
            self.flushed = max(self.flushed, -behind)
            if most >> RANK_BITS:
                self.reason = self._in_words(most >> RANK_BITS, most % (1 << RANK_BITS), -least)
        return self.reason is not None

    def poll(self) -> bool:
        """Start a vote and finish it. Collective."""
        self.start()
        return self.finish()

    def clear(self) -> None:
        """Forget the request to stop: remove the stop file and forget the signals."""
        signals.forget()
        if self._world.is_main:
            (self._folder / FILE).unlink(missing_ok=True)

    def _own(self) -> int:
        if signum := signals.noted():
            return SIGNAL + signum
        if self._world.is_main and (self._folder / FILE).exists():
            return FILE_IS_THERE
        return TIME_IS_OVER if self._world.is_main and time.monotonic() >= self._ends_at else 0

    def _in_words(self, code: int, rank: int, least: int) -> str:
        if code == TIME_IS_OVER:
            return f"train.max_minutes={self._max_minutes:g}"
        if code == FILE_IS_THERE:
            return str(self._folder / FILE)
        name = signal.Signals(code - SIGNAL).name
        if self._world.size == 1:
            return name
        return f"{name} on {'all ranks' if least == code else f'rank {rank}'}"
