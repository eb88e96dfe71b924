"""Report the progress of reading weights or checking a saved state."""

from __future__ import annotations

import time
from collections.abc import Callable

from remat.config.units import format_size

TOLD_EVERY_S = 5.0
CHECKING = "checking the saved state: {} of {}"


class LoadingProgress:
    """A callable that takes the bytes read so far and the bytes in all. A call with 0 restarts its clock.

    Every TOLD_EVERY_S `say` gets a line with rate and time left. `alive` is called at most once a second. `form` is the
    beginning of the line, with a place for each of the two sizes.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        alive: Callable[[], None],
        form: str = "loading: {} of {} of this rank",
    ) -> None:
        self._say, self._alive, self._form = say, alive, form
        self._began_s = self._told_s = self._alive_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if not done:
            self._began_s = self._told_s = now_s
        if now_s - self._alive_s >= 1 or not done:
            self._alive_s = now_s
            self._alive()
        if now_s - self._told_s < TOLD_EVERY_S:
            return
        self._told_s = now_s
        rate = done / (now_s - self._began_s)
        read = self._form.format(format_size(done), format_size(total))
        self._say(f"{read}, {format_size(rate)}/s, {(total - done) / rate:.0f} s left")
