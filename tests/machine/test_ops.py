"""Locks of op builds: a dead owner's is cleared, a live owner's is waited for, with a word about either."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock

from remat.machine import ops


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "cpu_adam" / "lock"
    path.parent.mkdir()
    return path


def test_a_dead_owners_lock_is_removed_with_its_age(lock: Path) -> None:
    lock.touch()
    os.utime(lock, (1.7e9, 1.7e9))
    said: list[str] = []
    ops._clear_lock("cpu_adam", lock, said.append)
    assert not lock.exists()
    (line,) = said
    assert str(lock) in line
    assert "min old, its process is gone" in line


def test_a_live_owners_lock_is_waited_for(lock: Path) -> None:
    holder = os.open(lock, os.O_CREAT | os.O_EXCL)  # as torch's FileBaton takes it
    assert ops.lock_holder(lock) == os.getpid()
    waits, said = threading.Event(), []

    def say(text: str) -> None:
        said.append(text)
        waits.set()

    waiting = threading.Thread(target=ops._clear_lock, args=("cpu_adam", lock, say), daemon=True)
    waiting.start()
    assert waits.wait(30)
    assert lock.exists()
    assert waiting.is_alive()
    lock.unlink()  # what torch does at the end of a build
    os.close(holder)
    waiting.join(30)
    assert not waiting.is_alive()
    assert said == [f"waiting for process {os.getpid()}, which builds DeepSpeed op cpu_adam and holds {lock}"]


def test_a_strangers_lock_is_named(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock.touch()
    os.utime(lock, (1.7e9, 1.7e9))

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(ops.OpError, match="TORCH_EXTENSIONS_DIR"):
        ops._clear_lock("cpu_adam", lock, lambda text: None)


def test_a_wait_for_another_build_is_said(tmp_path: Path) -> None:
    flock = tmp_path / "cpu_adam.flock"
    waits, passed = threading.Event(), threading.Event()

    def enter() -> None:
        with ops._alone("cpu_adam", flock, lambda text: waits.set()):
            passed.set()

    with FileLock(flock):
        waiting = threading.Thread(target=enter, daemon=True)
        waiting.start()
        assert waits.wait(30)
        assert not passed.is_set()
    assert passed.wait(30)


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a wait says; the wait is given up at its first word."""
    said: list[str] = []

    def give_up(seconds: float) -> None:
        raise TimeoutError

    monkeypatch.setattr(ops.time, "sleep", give_up)
    return said


def test_a_lock_of_which_nothing_is_known_is_stale_only_after_a_time_without_any_change(
    lock: Path, changed: list[str]
) -> None:
    """It may be held on another node, whose processes nobody here can see."""
    lock.touch()
    with pytest.raises(TimeoutError):
        ops._clear_lock("cpu_adam", lock, changed.append)
    assert lock.exists() and "perhaps on another node" in changed[0]
    long_ago = time.time() - ops.QUIET_S - 60
    os.utime(lock, (long_ago, long_ago))
    (lock.parent / "cpu_adam.o").touch()  # a build goes on
    with pytest.raises(TimeoutError):
        ops._clear_lock("cpu_adam", lock, changed.append)
    assert lock.exists()
    os.utime(lock.parent / "cpu_adam.o", (long_ago, long_ago))
    ops._clear_lock("cpu_adam", lock, changed.append)
    assert not lock.exists()


def test_a_builder_on_another_node_lives_while_it_writes(lock: Path, changed: list[str]) -> None:
    lock.touch()
    builder = ops._builder_file(lock)
    builder.write_text(json.dumps(["node-2 of another kernel", "node-2"]))
    with pytest.raises(TimeoutError):
        ops._clear_lock("cpu_adam", lock, changed.append)
    assert lock.exists() and changed[0].startswith("waiting for a process on node-2, which builds")
    silent = time.time() - ops.SILENT_S - 60
    os.utime(builder, (silent, silent))
    ops._clear_lock("cpu_adam", lock, changed.append)
    assert not lock.exists() and not builder.exists()


def test_a_builder_of_this_node_that_left_its_lock_is_dead_at_once(lock: Path) -> None:
    lock.touch()
    ops._builder_file(lock).write_text(json.dumps([ops._place(), "here"]))
    said: list[str] = []
    ops._clear_lock("cpu_adam", lock, said.append)
    assert not lock.exists() and "its process is gone" in said[0]


def test_a_builder_says_that_it_lives_until_it_is_done(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "HEARTBEAT_S", 0.01)
    file = ops._builder_file(lock)
    with ops._as_builder(file):
        file.write_text("")
        for _ in range(1000):
            if file.read_text():
                break
            time.sleep(0.01)
        assert json.loads(file.read_text())[0] == ops._place()
    assert not file.exists()


def test_a_lock_left_by_a_killed_load_stops_no_later_run(tmp_path: Path) -> None:
    """A finished build was loaded through torch, which waits for its lock for ever without a word."""
    said: list[str] = []
    ops.ensure("cpu_adam", said.append)  # there is a build, as after the first run in this environment
    own = tmp_path / "extensions"
    shutil.copytree(os.environ["TORCH_EXTENSIONS_DIR"], own)
    (own / "cpu_adam" / "lock").touch()
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from remat.machine import ops; ops.ensure('cpu_adam', print); ops.ensure('cpu_adam', print)",
        ],
        env=os.environ | {"TORCH_EXTENSIONS_DIR": str(own)},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0
