"""Host memory under control-group limits, and the keys of one rank's sample."""

from __future__ import annotations

import mmap
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from remat.config.units import GIB, MIB
from remat.machine import memory
from remat.machine.host_memory import HostPeak, host_memory, oom_kills, peak_rss_bytes
from remat.machine.memory import MemoryMonitor


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=50 * GIB))


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def group_v2(folder: Path, limit: object, used_gib: int, cache_gib: int = 0) -> None:
    write(folder / "memory.max", limit)
    write(folder / "memory.current", used_gib * GIB)
    write(folder / "memory.stat", f"anon 1\ninactive_file {cache_gib * GIB}")


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    found = host_memory(tmp_path)
    assert (found.total_bytes, found.available_bytes, found.limit_bytes) == (64 * GIB, 50 * GIB, 64 * GIB)


def test_v2_limit_of_the_own_group_without_reclaimable_cache(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/pod/job")
    group_v2(tmp_path / "sys/fs/cgroup/pod/job", 16 * GIB, used_gib=10, cache_gib=3)
    found = host_memory(tmp_path)
    assert (found.total_bytes, found.available_bytes, found.limit_bytes) == (64 * GIB, 9 * GIB, 16 * GIB)


def test_v2_limit_of_a_parent_holds_too(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/pod/job")
    group_v2(tmp_path / "sys/fs/cgroup/pod/job", "max", used_gib=1)
    group_v2(tmp_path / "sys/fs/cgroup/pod", 8 * GIB, used_gib=2)
    found = host_memory(tmp_path)
    assert (found.limit_bytes, found.available_bytes) == (8 * GIB, 6 * GIB)


def test_v2_path_of_the_host_seen_from_inside_a_container(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/docker/0123")
    group_v2(tmp_path / "sys/fs/cgroup", 4 * GIB, used_gib=5)
    found = host_memory(tmp_path)
    assert (found.limit_bytes, found.available_bytes) == (4 * GIB, 0)


def test_v1_limit(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "5:cpu:/x\n4:memory:/slurm/job_7\n0::/")
    folder = tmp_path / "sys/fs/cgroup/memory/slurm/job_7"
    write(folder / "memory.limit_in_bytes", 32 * GIB)
    write(folder / "memory.usage_in_bytes", 12 * GIB)
    write(folder / "memory.stat", f"inactive_file 1\ntotal_inactive_file {2 * GIB}")
    found = host_memory(tmp_path)
    assert (found.limit_bytes, found.available_bytes) == (32 * GIB, 22 * GIB)


def test_v1_word_for_unlimited_is_no_limit(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "4:memory:/")
    folder = tmp_path / "sys/fs/cgroup/memory"
    write(folder / "memory.limit_in_bytes", 9223372036854771712)
    write(folder / "memory.usage_in_bytes", 12 * GIB)
    write(folder / "memory.stat", "total_inactive_file 0")
    assert host_memory(tmp_path).limit_bytes == 64 * GIB


def test_cpu_sample_has_no_gpu_or_pinned_keys() -> None:
    monitor = MemoryMonitor(torch.device("cpu"))
    monitor.reset_peak()
    sample = monitor.sample()
    assert set(sample) == {"memory/host_rss_gib", "memory/host_rss_peak_gib", "memory/host_available_gib"}
    assert 0 < sample["memory/host_rss_gib"] <= sample["memory/host_rss_peak_gib"]


def test_host_peak_keeps_what_was_freed() -> None:
    monitor = MemoryMonitor(torch.device("cpu"))
    before = monitor.sample()["memory/host_rss_gib"]
    with mmap.mmap(-1, 64 * 2**20) as block:  # not malloc, which may hand out pages that are resident already
        block.write(bytes(64 * 2**20))
    assert monitor.sample()["memory/host_rss_peak_gib"] >= before + 60 / 1024


def test_gpu_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"allocated_bytes.all.peak": 3 * GIB, "reserved_bytes.all.peak": 4 * GIB, "num_alloc_retries": 2}
    resets = []
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: {"allocated_bytes.current": GIB // 2})
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    monitor = MemoryMonitor(torch.device("cuda", 1))
    sample = monitor.sample()
    assert sample["memory/gpu_allocated_peak_gib"] == 3.0
    assert sample["memory/gpu_reserved_peak_gib"] == 4.0
    assert sample["memory/gpu_alloc_retries"] == 2.0
    assert sample["memory/host_pinned_gib"] == 0.5
    monitor.reset_peak()
    assert resets == [torch.device("cuda", 1)]


def test_peak_falls_back_to_getrusage(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Path, *_: object, **__: object) -> str:
        raise OSError

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(memory.resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=2**30))
    assert MemoryMonitor(torch.device("cpu")).sample()["memory/host_rss_peak_gib"] == 1024


def test_the_peak_of_another_process_is_read_while_it_lives() -> None:
    assert peak_rss_bytes(os.getpid()) >= 10 * 2**20
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    assert peak_rss_bytes(gone.pid) == 0


@pytest.mark.parametrize(
    ("groups", "file", "text", "kills"),
    [
        ("0::/job", "sys/fs/cgroup/job/memory.events", "oom 3\noom_kill 2\noom_group_kill 0", 2),
        ("4:memory:/job", "sys/fs/cgroup/memory/job/memory.oom_control", "under_oom 0\noom_kill 1", 1),
        ("0::/job", "sys/fs/cgroup/job/other", "oom_kill 5", None),
    ],
)
def test_kills_for_memory_are_counted(
    tmp_path: Path, groups: str, file: str, text: str, kills: int | None
) -> None:
    write(tmp_path / "proc/self/cgroup", groups)
    write(tmp_path / file, text)
    assert oom_kills(tmp_path) == kills


def test_a_peak_is_what_was_held_for_a_while_without_a_file_behind_it(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(32 * MIB))
    with HostPeak() as peak:
        held = mmap.mmap(-1, 64 * MIB)
        for at in range(0, 32 * MIB, 4096):
            held[at] = 1  # the rest is never touched
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert sum(mapped[at] for at in range(0, 32 * MIB, 4096)) == 0
            time.sleep(0.1)
        held.close()
    assert 32 * MIB <= peak.peak_bytes <= 36 * MIB
    with HostPeak() as after:
        pass
    assert after.peak_bytes < 4 * MIB
