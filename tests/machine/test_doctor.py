"""What the doctor and preflight say of machines that exist only here: needed against found, and a remedy."""

from __future__ import annotations

import importlib.metadata
import json
import resource
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from remat.config import compose
from remat.config.units import GIB
from remat.machine import doctor, node, versions
from remat.machine.host_memory import host_memory
from remat.planning import launch_plan, preflight
from remat.training import build
from tests.planning.test_preflight import checked, machine, needs_70b

TINY = ["recipe=tiny_zero3_offload"]


def old_deepspeed(name: str) -> str:
    return "0.18.9" if name == "deepspeed" else importlib.metadata.version(name)


def test_a_library_below_its_floor_is_named() -> None:
    assert versions.too_old() == []
    (line,) = versions.too_old(old_deepspeed)
    assert line == "deepspeed 0.18.9: needs 0.19.8 or newer: pip install -r requirements.lock"


def test_a_library_that_is_missing_is_named_but_wandb_stops_nothing() -> None:
    def installed(name: str) -> str:
        if name in ("wandb", "torch"):
            raise importlib.metadata.PackageNotFoundError(name)
        return importlib.metadata.version(name)

    assert [line.split(":")[0] for line in versions.too_old(installed)] == ["torch not installed"]
    assert "wandb" in [name for name, _, wrong in versions.found(installed) if wrong]


def test_a_run_on_old_libraries_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "too_old", lambda: ["deepspeed 0.18.9: needs 0.19.8 or newer"])
    with pytest.raises(preflight.DoesNotFit, match="deepspeed 0"):
        build.check_machine(compose.compose_run(TINY).run, local_size=1, warn=pytest.fail)


def test_shared_memory_of_a_container_is_too_small_for_gpus() -> None:
    assert checked(needs_70b(), machine(shm_bytes=GIB)) == []
    (line,) = checked(needs_70b(), machine(shm_bytes=64 * 2**20))
    assert line.startswith("/dev/shm: needed 0.25 GiB, found 0.06 GiB")
    assert "--shm-size" in line
    (line,) = checked(needs_70b(), machine(shm_bytes=0))
    assert "found 0.00 GiB" in line
    rows = preflight.compare(needs_70b(), machine(shm_bytes=0, gpu_bytes=None))
    assert "/dev/shm" not in [row.name for row in rows]  # CPU ranks use none


def test_shared_memory_is_read_where_it_is(tmp_path: Path) -> None:
    assert node.shm_bytes(tmp_path) == 0
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert node.shm_bytes(tmp_path) == pytest.approx(psutil.disk_usage(str(tmp_path)).free, rel=0.05)


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_limits_host_memory(version: int, tmp_path: Path) -> None:
    names = {
        1: (
            "9:memory:/job",
            "memory/job",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
        2: ("0::/job", "job", "memory.max", "memory.current", "inactive_file"),
    }
    line, folder, limit, used, cache = names[version]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{line}\n")
    group = tmp_path / "sys/fs/cgroup" / folder
    group.mkdir(parents=True)
    (group / limit).write_text(f"{GIB}\n")
    (group / used).write_text(f"{GIB // 2}\n")
    (group / "memory.stat").write_text(f"{cache} {GIB // 4}\n")
    found = host_memory(tmp_path)
    assert found.limit_bytes == GIB
    assert found.available_bytes == 3 * GIB // 4


def test_locked_memory_is_limited_unless_the_process_may_ignore_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = tmp_path / "proc/self/status"
    status.parent.mkdir(parents=True)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (8 * 2**20, 8 * 2**20))
    status.write_text("CapEff:\t0000000000000000\n")
    assert node.memlock_bytes(tmp_path) == 8 * 2**20
    status.write_text("CapEff:\t0000000000004000\n")
    assert node.memlock_bytes(tmp_path) is None


def test_the_toolkit_has_the_major_version_of_torchs(tmp_path: Path) -> None:
    assert not doctor.toolkit(None, "13.0").ok
    (tmp_path / "version.json").write_text(json.dumps({"cuda": {"name": "CUDA SDK", "version": "12.4.1"}}))
    other = doctor.toolkit(str(tmp_path), "13.0")
    assert other.found.startswith("12.4.1 in")
    assert "CUDA 13.0 toolkit" in other.remedy
    assert doctor.toolkit(str(tmp_path), "12.8").ok


def test_a_recipe_that_this_machine_can_hold(capsys: pytest.CaptureFixture[str]) -> None:
    found, table = launch_plan.examine_for(compose.compose_run(TINY).run, 2, print)
    assert [finding.what for finding in found if finding.what.startswith("op ")] == ["op cpu_adam"]
    assert "host memory of this node (2 ranks)" in table
    memory = next(finding for finding in found if finding.what.startswith("host memory of"))
    assert memory.ok


def test_a_recipe_that_it_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    small = machine(host_available_bytes=GIB // 100, gpu_bytes=None, local_size=2)
    monkeypatch.setattr(node, "found", lambda **asked: small)
    found, table = launch_plan.examine_for(compose.compose_run(TINY).run, 2, lambda text: None)
    (lacking,) = [finding for finding in found if not finding.ok and finding.what.startswith("host")]
    assert "needed" in lacking.remedy
    assert "too small" in table


def test_files_of_earlier_runs_are_told_of_and_in_the_way_only_when_little_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor._shared_memory(tmp_path).ok
    (tmp_path / "deepspeed_allreduce_buffer_0_127.0.0.1_29500_0").write_bytes(bytes(1 << 20))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=8 * GIB))
    plenty = doctor._shared_memory(tmp_path)
    assert plenty.ok and "1 files of earlier runs hold" in plenty.found
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=GIB // 2))
    scarce = doctor._shared_memory(tmp_path)
    assert not scarce.ok and scarce.remedy == f"rm {tmp_path}/deepspeed_allreduce_buffer_*"
