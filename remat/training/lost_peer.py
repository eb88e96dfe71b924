"""Find out which rank is gone when a collective fails for that reason, and name the rank in one sentence.

The ranks hold a roll call over their store (remat/machine/peers.py). Every live rank answers it, from its watchdog's
thread or when its own collective has failed.
"""

from __future__ import annotations

import re
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from remat.machine import distributed, peers
from remat.machine.peers import LostPeer, Peers
from remat.training.watchdog import Watchdog, name_place

ROLL_S = 10.0  # how long ranks may take to answer; their watchdogs listen every 2 s
FOLDER = "errors"  # in the run directory: the traceback of each rank
KINDS = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)  # NCCL, sockets, the store
WORDS = re.compile(  # texts of gloo's errors, which are plain RuntimeErrors
    r"Connection closed by peer|Connection reset by peer|Read error \[|Write error \[|Broken pipe|connectFullMesh|"
    r"Application timeout caused pair closure|[Ss]ocket [Tt]imeout|Connect timeout|Timed out waiting \d+ms|"
    r"NCCL error|remote process exited|Connection was likely closed"
)


@contextmanager
def named(watchdog: Watchdog | None = None) -> Iterator[None]:
    """Raise LostPeer when something inside fails because another rank is gone.

    Any other failure is reported to the other ranks and raised as it is.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, LostPeer) or not recognised(error):
            peers.leave(f"{type(error).__name__}: {error}")
            raise
        raise _explained(error, watchdog) from error


def leave_together() -> None:
    """End a launch once all ranks have come to this point. Collective."""
    with named():
        distributed.shut_down()


def recognised(error: BaseException) -> bool:
    """Return whether a collective or the store failed because the other end is gone."""
    return isinstance(error, KINDS) or (isinstance(error, RuntimeError) and bool(WORDS.search(str(error))))


def _explained(error: Exception, watchdog: Watchdog | None) -> LostPeer:
    phase, step = watchdog.place if watchdog is not None else ("end", 0)
    file = _keep(error, watchdog.run_dir if watchdog is not None else None)
    found = peers.present()
    text, lost = (
        _verdict(found, (phase, step), str(error).strip().splitlines()[0]) if found else (str(error), [])
    )
    return LostPeer(
        f"{text}; found in {name_place(phase, step)}: the run ends, saved states are as they were, resume=auto goes on "
        f"from the newest (traceback: {file})",
        lost,
    )


def _verdict(found: Peers, place: tuple[str, int], cause: str) -> tuple[str, list[int]]:
    """Return a sentence about the ranks that are gone, and their numbers.

    All ranks get the same answer: that of the first rank to ask.
    """
    try:
        found.put_own("alive", place)
        asks = found.add("roll_call") == 1
        if asks:
            found.put("call", "lost")
        end = time.monotonic() + (ROLL_S if asks else 1.5 * ROLL_S)
        while time.monotonic() < end and not found.get("lost"):
            if asks and (found.get("left") or not found.missing("alive")):
                break
            time.sleep(peers.ASK_EVERY_S)
        if not (told := found.get("lost")):
            told = _who(found, cause)
            found.put("lost", told)
        return told[0], told[1]
    except RuntimeError:  # the store is gone
        if found.holder != "rank 0":
            return f"{found.holder}, which held the ranks' store, is gone", []
        return f"{found.named([0])}, which held the ranks' store, is gone", [0]


def _who(found: Peers, cause: str) -> tuple[str, list[int]]:
    if left := found.get("left"):
        return f"{found.named([left['rank']])} ended ({left['why']})", [left["rank"]]
    lost = found.missing("alive")
    if not lost:
        return f"the connection between ranks broke, though each of them answers ({cause})", []
    beats = found.each("beat", lost[: peers.MOST_NAMED])
    places = sorted({f"step {b['step']}" if b["phase"] == "step" else str(b["phase"]) for b in beats.values()})
    heard = f", last heard of in {' and '.join(places)}" if places else ""
    return f"{found.named(lost)} {'is' if len(lost) == 1 else 'are'} gone{heard}", lost


def _keep(error: Exception, run_dir: Path | None) -> Path:
    """Write the traceback to a file of this rank, in the run directory if there is one, and return its path."""
    folder = run_dir / FOLDER if run_dir is not None else Path(tempfile.mkdtemp(prefix="remat-errors-"))
    path = folder / f"rank-{distributed.rank_from_env()}.txt"
    text = "".join(traceback.format_exception(error))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as second:
        print(text, flush=True)
        return Path(f"above, for {path} cannot be written: {second.strerror}")
    return path
