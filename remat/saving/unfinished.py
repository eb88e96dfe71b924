"""A state whose files are written, but not yet flushed, hashed and named: completed at once, or while training goes on.

Flushing and hashing are each rank's own and may run in a thread. What the ranks do together (gather the hashes, write
the manifest, rename) stays in the main thread: no thread enters a collective, and no state is complete before every
rank has said that its part is on disk.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from remat.machine import distributed
from remat.saving import disk_space, manifest
from remat.saving.manifest import Manifest, SaveError


@dataclass(frozen=True)
class SaveResult:
    """A state just saved: its folder and the bytes of all ranks' files.

    On this rank: the seconds until it was complete, and those of them in which training waited.
    """

    path: Path
    bytes: int
    seconds: float
    stall_s: float


class Unfinished:
    """The state in folder `tmp`, to become `final`; `info` is its manifest without the files.

    `what` names it in errors; `error` is one of this rank that the others do not know yet; `started` is the
    time.monotonic() at which the save began.
    """

    def __init__(
        self,
        tmp: Path,
        final: Path,
        info: Manifest,
        *,
        what: str,
        keep: int,
        started: float,
        error: Exception | None,
    ) -> None:
        self._tmp, self._final, self._info = tmp, final, info
        self._what, self._keep, self._started = what, keep, started
        self._error = error
        self._files: dict[str, manifest.FileEntry] | None = None  # this rank's, once they are on disk
        self._thread: threading.Thread | None = None
        self._stalled_s = 0.0

    @property
    def step(self) -> int:
        return self._info.step

    def in_background(self) -> None:
        """Flush and hash this rank's files in a thread from now on. Raises nothing: `complete` does."""
        self._stalled_s = time.monotonic() - self._started
        thread = threading.Thread(target=self._flush, name="remat-save", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread is left; the other ranks learn of it in `complete`
            self._error = error
        else:
            self._thread = thread

    @property
    def flushed(self) -> bool:
        """In the background: whether this rank is done, well or not; `complete` then waits for other ranks only."""
        return self._thread is None or not self._thread.is_alive()

    def complete(self) -> SaveResult:
        """Flush (or wait for the thread), write the manifest, rename, and delete states beyond `keep`. Collective.

        Raises SaveError on every rank when any part failed; the folder is then gone, older states are untouched.
        """
        began = time.monotonic()
        if self._thread is None:
            self._flush()
        else:
            self._thread.join()
        is_main = manifest.place()[0] == 0
        try:
            if self._files is None and self._error is None:
                self._error = SaveError("the thread that flushes and hashes ended without a result")
            manifest.agree(self._error, self._what)
            every = {name: entry for part in distributed.gather(self._files) for name, entry in part.items()}
            size = manifest.on_main(lambda: self._publish(every), self._what)
        except SaveError:
            if is_main:
                manifest.remove(self._tmp)
            raise
        if is_main:
            _retain(self._final.parent, self._keep)
        now = time.monotonic()
        seconds = now - self._started
        stall_s = seconds if self._thread is None else self._stalled_s + now - began
        return SaveResult(path=self._final, bytes=size, seconds=seconds, stall_s=stall_s)

    def _flush(self) -> None:
        if self._error is not None:
            return
        try:
            rank = manifest.place()[0]
            own = [name for name in manifest.files_in(self._tmp) if (manifest.rank_of(name) or 0) == rank]
            self._files = manifest.describe(self._tmp, own)
        except Exception as error:
            self._error = disk_space.cause(error, self._tmp)

    def _publish(self, files: dict[str, manifest.FileEntry]) -> int:
        unseen = [name for name in files if not (self._tmp / name).exists()]
        if unseen:
            raise SaveError(
                f"rank 0 does not see {unseen[0]} (and {len(unseen) - 1} more): output_dir must be on a filesystem "
                "that all nodes share"
            )
        earlier = [state.info.sequence for state in manifest.list_states(self._final.parent)[0]]
        info = replace(self._info, sequence=max(earlier, default=0) + 1, files=files)
        manifest.write(self._tmp, info)
        manifest.publish(self._tmp, self._final)
        return info.size_bytes


def _retain(saved: Path, keep: int) -> None:
    """Delete complete states beyond the `keep` newest; incomplete ones do not count and are left to look at."""
    complete = [state for state in manifest.list_states(saved)[0] if manifest.is_complete(state.path)]
    for state in complete[keep:]:
        manifest.remove(state.path)
