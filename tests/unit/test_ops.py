"""Locks of op builds: a dead owner's is cleared, a live owner's is waited for, with a word about either."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from remat import ops


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
