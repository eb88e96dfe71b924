"""Lock by which one live process owns a folder: an flock, where the file system has it, and a record with a heartbeat.

The kernel frees an flock when its owner ends, but some file systems have no flock and some have one per node. So the
owner also writes a record (host, process, since when), and one of its threads rewrites the count in it every BEAT_S.
An owner on this host is dead when its process is. An owner on another host is dead when its record did not change for
STALE_S while the reader watched it: clocks of two hosts are never compared. An owner that hangs keeps the lock,
because it may still write; the watchdog ends it. An owner that was suspended until another process took over learns
of it at its next beat. Standard library only.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import errno
import fcntl
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BEAT_S = 5.0
STALE_S = 60.0
LOOK_S = 0.5
SETTLE_S = 1.0  # longer than a process needs between its last look at the record and writing its own
NAMED_S = 2.0  # time for the owner of the flock to write its record, or to end
RELEASE_S = 10.0
BUSY = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}
LABEL = re.compile(r"([^+]+)\+([^+]*)\+([^+]*)\+(\d+)\+(\d*)")


@dataclass(frozen=True)
class Process:
    """Identity of a process. A reused process id, or the same id in another container, is a different Process.

    `started` is in clock ticks since the boot `boot`, as in /proc; both are empty strings where there is no /proc.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    started: str

    def lives(self) -> bool | None:
        """Return whether the process still runs; None when that cannot be seen from this host or container."""
        here = current_process()
        is_near = (self.host, self.boot, self.namespace) == (here.host, here.boot, here.namespace)
        if not self.started or not is_near:
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # another user's
        state, started = _stat_of(self.pid)
        if not started:
            return None
        return started == self.started and state not in ("Z", "X")

    def label(self) -> str:
        """Return a text for a file name, which `labelled` reads."""
        return f"{self.host}+{self.boot}+{self.namespace}+{self.pid}+{self.started}"


def current_process() -> Process:
    return Process(
        host=re.sub(r"[^\w.-]", "-", socket.gethostname()),
        boot=_text("/proc/sys/kernel/random/boot_id").strip(),
        namespace="".join(character for character in _link("/proc/self/ns/pid") if character.isdigit()),
        pid=os.getpid(),
        started=_stat_of(os.getpid())[1],
    )


def labelled(name: str) -> Process | None:
    """Return the process whose `label` a file name begins with, if any."""
    found = LABEL.match(name)
    return Process(found[1], found[2], found[3], int(found[4]), found[5]) if found else None


@dataclass(frozen=True)
class Holder:
    """The owner of a folder as its record tells; `process` is None while there is no readable record."""

    process: Process | None = None
    since: str = ""  # UTC, by the clock of its host
    token: str = ""
    beat: int = 0
    progress: int = 0  # a count of the owner's progress, if it reports any
    raw: bytes = b""

    def in_words(self) -> str:
        if self.process is None:
            return "another process, which has not written its name"
        return f"process {self.process.pid} on {self.process.host}, since {self.since}"


def holder_of(path: Path) -> Holder | None:
    """Return who owns the folder with this record, without taking it; None for nobody or an owner surely dead."""
    try:
        found = _parsed(path.read_bytes())
    except OSError:
        return None
    return None if found.process is not None and found.process.lives() is False else found


class OwnerLock:
    """A lock with its record in `path` and its flock on `path` + ".flock". `release` removes both files.

    `on_lost` is called from a thread, with the new owner, when another process has taken over. The owner may count
    up `progress`, which others read in the record.
    """

    def __init__(self, path: Path, *, on_lost: Callable[[Holder], None] | None = None) -> None:
        self.path = path
        self.progress = 0
        self.token = ""  # id of this ownership; empty: not the owner
        self._on_lost = on_lost
        self._flock_path = path.with_name(f"{path.name}.flock")
        self._flock: int | None = None
        self._since, self._beat, self._new_token = "", 0, ""
        self._process = current_process()
        self._writes = threading.Lock()
        self._released = threading.Event()
        os.register_at_fork(after_in_child=self._forget)

    def take(self, say: Callable[[str], None] = lambda text: None) -> Holder | None:
        """Take the lock. Returns None once this process is the owner, else the present owner.

        Waits STALE_S at most, and `say`s so. Raises OSError when nothing can be written there.
        """
        deadline = time.monotonic() + NAMED_S
        while not self._take_flock():
            found = self._read()
            if found is not None and found.process is not None and found.process.lives() is not False:
                return found
            if time.monotonic() > deadline:
                return found or Holder()
            time.sleep(LOOK_S / 5)
        try:
            found = self._read()
            while found is None or not self._is_held(found, say):
                if self._create() if found is None else self._replace(found):
                    self._start()
                    return None
                found = self._read()
        except BaseException:
            self._drop_flock()
            raise
        self._drop_flock()
        return found

    def release(self) -> None:
        """Give the folder up; may be called more than once and from any thread. Raises nothing."""
        self._released.set()
        if not self._writes.acquire(timeout=RELEASE_S):
            return  # the heartbeat hangs in the file system; the lock ends with the process
        try:
            if not self.token:
                return
            with contextlib.suppress(OSError):
                found = self._read()
                if found is not None and found.token == self.token:
                    self.path.unlink()
                    self._flock_path.unlink()
            self.token = ""
            self._drop_flock()
        finally:
            self._writes.release()
        atexit.unregister(self.release)

    def _take_flock(self) -> bool:
        """Take the flock; return False when another process has it.

        Returns True also on a file system without flock: then the record alone decides.
        """
        while True:
            handle = os.open(self._flock_path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(handle)
                return error.errno not in BUSY
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), self._flock_path.stat()):
                    self._flock = handle
                    return True  # otherwise its owner has just removed the file: try again
            os.close(handle)

    def _drop_flock(self) -> None:
        """Release the flock, and leave its file: an owner on another node may hold an flock on it."""
        if self._flock is not None:
            os.close(self._flock)
        self._flock = None

    def _is_held(self, found: Holder, say: Callable[[str], None]) -> bool:
        lives = found.process.lives() if found.process else None
        return self._changes(found, say) if lives is None else lives

    def _changes(self, found: Holder, say: Callable[[str], None]) -> bool:
        """Watch a record for STALE_S. Return True as soon as it changes, False if it does not or is deleted."""
        say(f"{self.path} names {found.in_words()}: watching for its heartbeat, {STALE_S:.0f} s at most")
        watched_s, before = 0.0, time.monotonic()
        while watched_s < STALE_S:
            time.sleep(LOOK_S)
            try:
                now = self._read()
            except OSError:
                before = time.monotonic()
                continue
            if now is None:
                return False
            if now.raw != found.raw:
                return True
            # a longer gap means that this process was suspended, or the file system did not answer
            watched_s += min(time.monotonic() - before, 2 * LOOK_S)
            before = time.monotonic()
        return False

    def _create(self) -> bool:
        """Create the record; return False when another process was first."""
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        try:
            os.write(handle, self._record())
        except OSError:
            self.path.unlink()
            raise
        finally:
            os.close(handle)
        return True

    def _replace(self, dead: Holder) -> bool:
        """Replace a dead owner's record by this process's; return whether this process is now the owner.

        When two processes do so at once, the later one is the owner.
        """
        record = self._record()
        part = self.path.with_name(f"{self.path.name}.{self._new_token}")
        part.write_bytes(record)
        try:
            now = self._read()
            if now is None or now.raw != dead.raw:
                return False
            part.replace(self.path)
        finally:
            part.unlink(missing_ok=True)
        if self._flock is None or dead.process is None or dead.process.lives() is None:
            time.sleep(SETTLE_S)
        now = self._read()
        return now is not None and now.token == self._new_token

    def _record(self) -> bytes:
        """Return the record's bytes. Their length is always the same, so rewriting in place leaves no old bytes."""
        if not self.token:
            self._new_token = uuid.uuid4().hex
            self._since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        content = {
            **asdict(self._process),
            "since": self._since,
            "token": self.token or self._new_token,
        }
        counts = f'"beat": {self._beat:10d}, "progress": {self.progress:20d}'
        return f"{json.dumps(content)[:-1]}, {counts}}}\n".encode()

    def _start(self) -> None:
        self.token = self._new_token
        self._released = threading.Event()
        atexit.register(self.release)
        threading.Thread(target=self._keep, args=(self._released,), name="remat-owner", daemon=True).start()

    def _keep(self, released: threading.Event) -> None:
        """Write the heartbeat until the lock is released or lost. Errors of the file system do not end it."""
        while not released.wait(BEAT_S):
            with self._writes:
                if not self.token:
                    return
                lost: Holder | None = None
                with contextlib.suppress(OSError):
                    lost = self._rewrite()
            if lost is not None:
                if self._on_lost is not None:
                    self._on_lost(lost)
                return

    def _rewrite(self) -> Holder | None:
        """Count a beat in this process's record; return the new owner if the record is another's."""
        self._beat += 1
        try:
            handle = os.open(self.path, os.O_RDWR)
        except FileNotFoundError:  # somebody deleted the record
            return None if self._create() else self._lost()
        try:  # reads and writes the same file, even if another now has its name
            if _parsed(os.read(handle, 1 << 16)).token not in ("", self.token):
                return self._lost()
            os.pwrite(handle, self._record(), 0)
        finally:
            os.close(handle)  # on NFS others see the write only after this
        return None

    def _lost(self) -> Holder | None:
        found = self._read()
        return None if found is not None and found.token == self.token else found or Holder()

    def _read(self) -> Holder | None:
        try:
            return _parsed(self.path.read_bytes())
        except FileNotFoundError:
            return None

    def _forget(self) -> None:
        """Give up the lock in a forked child: it belongs to the parent."""
        self._drop_flock()
        self.token, self._writes = "", threading.Lock()


def _parsed(raw: bytes) -> Holder:
    """Parse a record; one that is cut off or damaged gives a Holder without a process."""
    try:
        content: dict[str, Any] = json.loads(raw)
        process = Process(**{name: content.pop(name) for name in Process.__dataclass_fields__})
        return Holder(process=process, raw=raw, **content)
    except (ValueError, KeyError, TypeError, AttributeError):
        return Holder(raw=raw)


def _stat_of(pid: int) -> tuple[str, str]:
    """Return (state, start in ticks since boot) of a process; empty strings where /proc does not show it."""
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()  # a name may hold spaces and brackets
    return (fields[0], fields[19]) if len(fields) > 19 else ("", "")


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""
