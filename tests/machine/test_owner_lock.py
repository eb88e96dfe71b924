"""Who owns a folder, in processes that are killed, suspended, on another host, or without a working flock."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from remat.machine import owner_lock
from remat.machine.owner_lock import OwnerLock, current_process, holder_of, labelled

# A process that wants the folder: says "ready", takes it when told to, says "taken" or who has it, then obeys words.
TAKER = """
import json, sys, time
from pathlib import Path
from remat.machine import owner_lock

host, flock, settings = sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
if host:
    owner_lock.socket.gethostname = lambda: host
if flock == "none":
    def refuse(handle, how):
        raise OSError({errno}, "Function not implemented")
    owner_lock.fcntl.flock = refuse
elif flock == "node-local":
    owner_lock.fcntl.flock = lambda handle, how: None
for name, value in settings.items():
    setattr(owner_lock, name, value)
lock = owner_lock.OwnerLock(Path(sys.argv[1]), on_lost=lambda by: print("lost to", by.in_words(), flush=True))
print("ready", flush=True)
sys.stdin.readline()
holder = lock.take(lambda text: print("says", text, file=sys.stderr, flush=True))
print("held by " + holder.in_words() if holder else "taken", flush=True)
for word in sys.stdin:
    if word == "release\\n":
        lock.release()
    elif word == "fork\\n":
        import os
        child = os.fork()
        if child == 0:
            time.sleep(100)
        print(child, flush=True)
    elif word == "raise\\n":
        raise SystemExit(3)
    print("done", flush=True)
""".replace("{errno}", str(errno.ENOLCK))
QUICK = {"BEAT_S": 0.2, "STALE_S": 2.0, "LOOK_S": 0.1, "SETTLE_S": 0.5, "NAMED_S": 1.0}


class Taker:
    def __init__(self, path: Path, host: str, flock: str, settings: dict[str, float]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", TAKER, str(path), host, flock, json.dumps(QUICK | settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def tell(self, word: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def take(self) -> str:
        self.tell("take")
        return self.line()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


Start = Callable[..., Taker]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "owner.json"


@pytest.fixture
def start(path: Path) -> Iterator[Start]:
    started: list[Taker] = []

    def begin(host: str = "", flock: str = "", **settings: float) -> Taker:
        started.append(Taker(path, host, flock, settings))
        return started[-1]

    yield begin
    for taker in started:
        with contextlib.suppress(ProcessLookupError):
            taker.process.send_signal(signal.SIGCONT)
        taker.process.kill()
        taker.process.communicate()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in QUICK.items():
        monkeypatch.setattr(owner_lock, name, value)


def seconds(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.monotonic()
    return call(), time.monotonic() - began


@pytest.mark.parametrize("flock", ["", "none", "node-local"])
def test_the_second_is_told_who_the_first_is_and_may_follow_it(start: Start, path: Path, flock: str) -> None:
    first, second = start(flock=flock), start(flock=flock)
    assert first.take() == "taken"
    record = json.loads(path.read_text())
    told = second.take()
    assert told == f"held by process {first.process.pid} on {record['host']}, since {record['since']}"
    first.tell("release")
    assert first.line() == "done"
    assert list(path.parent.iterdir()) == [], "a lock outlives nothing"
    assert start(flock=flock).take() == "taken"


@pytest.mark.parametrize("flock", ["", "none", "node-local"])
def test_a_killed_owner_on_this_host_is_followed_at_once(start: Start, path: Path, flock: str) -> None:
    first, second = start(flock=flock, STALE_S=1000), start(flock=flock, STALE_S=1000)
    assert first.take() == "taken"
    first.kill()
    assert path.exists()
    assert holder_of(path) is None
    assert second.take() == "taken"
    assert json.loads(path.read_text())["pid"] == second.process.pid


@pytest.mark.parametrize("flock", ["none", "node-local"])
def test_a_living_owner_on_another_host_keeps_it(start: Start, flock: str) -> None:
    """No shared flock, and its process cannot be seen: only its heartbeat tells."""
    first, second = start(host="elsewhere", flock=flock), start(flock=flock, STALE_S=1000)
    assert first.take() == "taken"
    assert second.take().startswith(f"held by process {first.process.pid} on elsewhere, since ")


@pytest.mark.parametrize("flock", ["none", "node-local"])
def test_a_dead_owner_on_another_host_is_followed_once_its_heartbeat_stood_still(
    start: Start, path: Path, flock: str
) -> None:
    first, second = start(host="elsewhere", flock=flock), start(host="here", flock=flock)
    assert first.take() == "taken"
    first.kill()
    os.utime(path, (time.time() + 86400,) * 2)  # clocks of two hosts are not compared
    told, waited_s = seconds(second.take)
    assert told == "taken"
    assert waited_s >= QUICK["STALE_S"] * 0.9
    assert json.loads(path.read_text())["host"] == "here"


def test_a_suspended_owner_on_this_host_keeps_it(start: Start) -> None:
    first, second = start(flock="none"), start(flock="none")
    assert first.take() == "taken"
    first.process.send_signal(signal.SIGSTOP)
    time.sleep(QUICK["STALE_S"] * 1.5)
    assert second.take().startswith(f"held by process {first.process.pid} ")


def test_an_owner_that_was_suspended_until_another_took_over_learns_of_it(start: Start, path: Path) -> None:
    first, second = start(host="elsewhere", flock="node-local"), start(host="here", flock="node-local")
    assert first.take() == "taken"
    first.process.send_signal(signal.SIGSTOP)
    assert second.take() == "taken"
    first.process.send_signal(signal.SIGCONT)
    assert first.line().startswith(f"lost to process {second.process.pid} on here, since ")
    first.tell("release")
    assert first.line() == "done"
    assert json.loads(path.read_text())["pid"] == second.process.pid, "what is lost is not removed"


@pytest.mark.parametrize(("flock", "host"), [("", ""), ("none", ""), ("none", "elsewhere")])
def test_of_many_that_follow_a_dead_one_at_once_one_owns_it(
    start: Start, path: Path, flock: str, host: str
) -> None:
    first = start(host=host, flock=flock)
    assert first.take() == "taken"
    first.kill()
    takers = [start(host=f"host-{n}" if host else "", flock=flock) for n in range(4)]
    for taker in takers:
        taker.tell("take")
    told = [taker.line() for taker in takers]
    assert sorted(line.split()[0] for line in told) == ["held", "held", "held", "taken"], told
    (owner,) = (taker for taker, line in zip(takers, told, strict=True) if line == "taken")
    assert json.loads(path.read_text())["pid"] == owner.process.pid


def test_it_is_given_up_by_a_process_that_ends_and_not_kept_by_its_children(start: Start, path: Path) -> None:
    first = start()
    assert first.take() == "taken"
    first.tell("fork")
    child = int(first.line())
    try:
        first.tell("raise")
        assert first.process.wait(30) == 3
        assert not path.exists()
        second = start()
        assert second.take() == "taken"
        second.kill()
        assert start(STALE_S=1000).take() == "taken"
    finally:
        os.kill(child, signal.SIGKILL)


def recorded(path: Path, **other: Any) -> None:
    """The record of a process like this one but for `other`, as one that was killed leaves it."""
    process = replace(current_process(), **other)
    path.write_text(json.dumps({**asdict(process), "since": "", "token": "x", "beat": 1}))


@pytest.mark.usefixtures("quick")
def test_a_number_used_again_is_no_owner(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_lock, "STALE_S", 1000.0)
    recorded(path, started="1")
    lock = OwnerLock(path)
    assert lock.take() is None
    lock.release()
    recorded(path)
    holder = OwnerLock(path).take()
    assert holder is not None and holder.process == current_process()


@pytest.fixture
def nobody_beats(quick: None, monkeypatch: pytest.MonkeyPatch) -> float:
    """How long a record is watched where no living owner could be slow to beat."""
    monkeypatch.setattr(owner_lock, "SETTLE_S", 0.1)
    monkeypatch.setattr(owner_lock, "STALE_S", 0.5)
    return owner_lock.STALE_S


@pytest.mark.parametrize("other", [{"boot": "another"}, {"namespace": "1"}, {"started": ""}, {"host": "x"}])
def test_what_cannot_be_seen_from_here_is_watched(
    path: Path, other: dict[str, str], nobody_beats: float
) -> None:
    recorded(path, pid=2**22 + 1, **other)  # a number that no process has
    said: list[str] = []
    lock = OwnerLock(path)
    holder, waited_s = seconds(lambda: lock.take(said.append))
    lock.release()
    assert holder is None and waited_s >= nobody_beats * 0.9
    assert len(said) == 1 and "watching for its heartbeat" in said[0]


@pytest.mark.parametrize("torn", [b"", b"{", b"[]", b'{"host": 1}', b"\xff\xfe"])
def test_a_torn_record_is_watched_and_replaced(path: Path, torn: bytes, nobody_beats: float) -> None:
    path.write_bytes(torn)
    lock = OwnerLock(path)
    holder, waited_s = seconds(lock.take)
    assert holder is None and waited_s >= nobody_beats * 0.9
    lock.release()
    assert list(path.parent.iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_the_heartbeat_goes_on_while_the_main_thread_waits_and_tells_progress(path: Path) -> None:
    lock = OwnerLock(path)
    assert lock.take() is None
    lock.progress = 7
    before = json.loads(path.read_text())
    threading.Event().wait(1.0)
    after = json.loads(path.read_text())
    assert after["beat"] >= before["beat"] + 2 and after["progress"] == 7
    path.unlink()  # somebody cleaned up
    threading.Event().wait(0.6)
    assert json.loads(path.read_text())["token"] == after["token"]
    lock.release()
    threading.Event().wait(0.6)
    assert list(path.parent.iterdir()) == []
    assert lock.take() is None  # and it can be taken again
    lock.release()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        OwnerLock(tmp_path / "nowhere" / "owner.json").take()


def test_a_label_names_a_process() -> None:
    here = current_process()
    assert labelled(f"{here.label()}_rest") == here
    assert labelled("12345") is None and labelled("") is None
    odd = replace(here, host="a_b.c-d", boot="", namespace="", started="")
    assert labelled(f"{odd.label()}_0123abcd") == odd
