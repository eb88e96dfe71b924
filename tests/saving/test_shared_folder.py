"""Two ranks of two nodes, one of which has another folder at the same path, or sees a shared one late."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from remat.config.options import ConfigError
from remat.saving import shared_folder


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """This process is rank 1 on node 2; what rank 0 broadcasts is given."""
    for name, value in {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(shared_folder, "LOCAL_S", 0.1)
    monkeypatch.setattr(shared_folder, "ASK_EVERY_S", 0.02)
    monkeypatch.setattr(shared_folder.distributed, "gather", lambda value: [None, value])

    def hears(value: Any) -> None:
        monkeypatch.setattr(shared_folder.distributed, "broadcast", lambda own: value)

    return hears


def test_a_folder_of_one_node_is_refused_with_the_word_shared(
    tmp_path: Path, second: Callable[[Any], None]
) -> None:
    second(".shared-abc")
    for folder in (tmp_path, tmp_path / "not-even-there"):
        with pytest.raises(
            ConfigError, match=r"output_dir=out: the folder must be shared by all nodes.*rank 1"
        ):
            shared_folder.check(folder, "output_dir=out")
    (tmp_path / ".shared-abc").touch()
    shared_folder.check(tmp_path, "output_dir=out")


def test_a_network_file_system_may_show_the_file_late(
    tmp_path: Path, second: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    second(".shared-abc")
    monkeypatch.setattr(shared_folder, "is_local", lambda folder: False)
    late = threading.Timer(0.5, (tmp_path / ".shared-abc").touch)
    late.start()
    shared_folder.check(tmp_path, "output_dir=out")
    late.join()


def test_states_that_another_node_does_not_see_are_refused_before_they_are_read(
    tmp_path: Path, second: Callable[[Any], None]
) -> None:
    state = tmp_path / "saved" / "step-000002" / "manifest.json"
    second((state, 2))
    with pytest.raises(ConfigError, match="resume=auto: the folder must be shared"):
        shared_folder.check_newest(tmp_path, ["saved/step-*/manifest.json"], "resume=auto")
    state.parent.mkdir(parents=True)
    state.write_text("{}")
    shared_folder.check_newest(tmp_path, ["saved/step-*/manifest.json"], "resume=auto")
    second(None)  # rank 0 found none either: resuming says so
    shared_folder.check_newest(tmp_path, ["saved/step-*/manifest.json"], "resume=auto")


def test_a_file_that_goes_while_it_is_looked_at_is_not_the_newest(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "gone").symlink_to(tmp_path / "never")  # listed, but without a stat
    assert [path.name for path, _ in shared_folder._with_stat(tmp_path, ["*"])] == ["a"]


def test_rank_0_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(shared_folder.distributed, "broadcast", lambda own: own)
    monkeypatch.setattr(shared_folder.distributed, "gather", lambda value: [value, None])
    shared_folder.check(tmp_path, "output_dir=out")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="cannot be written to"):
        shared_folder.check(tmp_path / "missing", "output_dir=out")
