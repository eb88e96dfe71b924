"""Room for swap files: allocated before they are written, refused by name, and what killed launches left is free."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from remat.config.options import HardwareConfig, RunConfig
from remat.launch import left_behind
from remat.machine import distributed
from remat.planning import launch_plan
from remat.saving import nvme, swap_room
from remat.saving.swap_room import SwapError

MIB = 1 << 20


class Handle:
    """Stands for DeepSpeed's handle, which says nothing of what a write came to."""

    def __init__(self) -> None:
        self.written: list[tuple[str, int]] = []

    def async_pwrite(self, buffer: Any, path: str, offset: int) -> int:
        self.written.append((path, Path(path).stat().st_size))
        return 0

    def wait(self) -> int:
        return len(self.written)


def test_a_file_has_its_bytes_before_it_is_written(tmp_path: Path) -> None:
    plain = Handle()
    handle = swap_room.Reserving(plain, tmp_path)
    path = str(tmp_path / "moments.swp")
    for _ in range(2):
        assert handle.async_pwrite(torch.zeros(MIB // 4), path, 0) == 0
    assert plain.written == [(path, MIB)] * 2 and handle.wait() == 2
    assert swap_room.bytes_in(tmp_path) == MIB, "on the disk, not a hole"


def test_a_file_without_room_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    plain = Handle()
    handle = swap_room.Reserving(plain, tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
    try:
        with pytest.raises(
            SwapError, match=r"(?s)hardware.nvme_path=.*File too large, .*2,097,152 bytes\) needed"
        ):
            handle.async_pwrite(torch.zeros(MIB // 2), str(tmp_path / "moments.swp"), 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert plain.written == []


def test_a_disk_with_less_than_is_needed_is_refused(tmp_path: Path) -> None:
    assert swap_room.describe_lack(tmp_path, MIB) is None
    text = swap_room.describe_lack(tmp_path, 1 << 60)
    assert text is not None and f"hardware.nvme_path={tmp_path}: " in text
    assert f"({1 << 60:,} bytes) needed for swap files" in text and "another hardware.nvme_path" in text


@pytest.mark.parametrize(("resume", "counts"), [("none", 0), ("auto", 3), ("auto_or_start", 3), ("folder", 3)])
def test_what_a_killed_launch_left_is_room_for_the_next(tmp_path: Path, resume: str, counts: int) -> None:
    """Only what is this run's own: the swap files of a run of the same name elsewhere are not."""
    runs = [tmp_path / output / "name" / "run" for output in ("own", "other")]
    disk = tmp_path / "nvme"
    for run in runs:
        run.mkdir(parents=True)
        left = disk / nvme._identity(run) / "launch-00000"
        left.mkdir(parents=True)
        (left / "moments.swp").write_bytes(bytes(3 * MIB))
    place = str(runs[0]) if resume == "folder" else resume
    cfg = RunConfig(name="name", output_dir=str(tmp_path / "own"), resume=place)
    cfg = SimpleNamespace(**vars(cfg) | {"hardware": HardwareConfig(nvme_path=str(disk))})
    found = nvme.left_folders(str(disk), launch_plan._runs_to_resume(cfg))  # type: ignore[arg-type]
    assert swap_room.left_by(found) == counts * MIB
    world = distributed.as_launched()
    with_left = launch_plan._this_node(cfg, world, writes_nvme=True).nvme  # type: ignore[arg-type]
    without = launch_plan._this_node(
        SimpleNamespace(**vars(cfg) | {"resume": "none"}), world, writes_nvme=True
    ).nvme  # type: ignore[arg-type]
    assert with_left and without
    assert with_left.free_bytes - without.free_bytes == pytest.approx(counts * MIB, abs=MIB)


def test_the_supervisor_removes_what_its_ranks_named(tmp_path: Path) -> None:
    """And nothing else: another run's folder, and another node's of this run, stay."""
    own, of_node, other = (tmp_path / name for name in ("run/a-00000", "run/a-00008", "elsewhere/b-00000"))
    alone = tmp_path / "alone" / "c-00000"
    for folder in (own, of_node, other, alone):
        folder.mkdir(parents=True)
        (folder / "moments.swp").write_text("")
    file = tmp_path / "named"
    left_behind.remove(file)
    for folder in (own, alone):
        left_behind.name(folder, {left_behind.FILE: str(file)})
    left_behind.name(other, {})
    left_behind.remove(file)
    assert {path.parent for path in tmp_path.rglob("*.swp")} == {of_node, other}
    assert not (tmp_path / "alone").exists()
