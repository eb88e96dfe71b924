"""Say how far the reading of weights is."""

from __future__ import annotations

import time
from collections.abc import Callable

from remat.config.units import format_size

TOLD_EVERY_S = 5.0


class LoadingProgress:
    """Called with the bytes that this rank has read, and those it reads in all.

    `say` gets a line with rate and time left every few seconds; `alive` is called each second at most.
    """

    def __init__(self, say: Callable[[str], None], alive: Callable[[], None]) -> None:
        self._say, self._alive = say, alive
        self._began_s = self._told_s = self._alive_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s - self._alive_s >= 1:
            self._alive_s = now_s
            self._alive()
        if now_s - self._told_s < TOLD_EVERY_S:
            return
        self._told_s = now_s
        rate = done / (now_s - self._began_s)
        self._say(
            f"loading: {format_size(done)} of {format_size(total)} of this rank, {format_size(rate)}/s, "
            f"{(total - done) / rate:.0f} s left"
        )
