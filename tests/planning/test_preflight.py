"""Needed against found, on machines that exist only here."""

from __future__ import annotations

import dataclasses
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from remat.config import compose, ds_config
from remat.config.ds_config import RunValues
from remat.config.options import ModelConfig, ModelInit, Precision, SaveConfig
from remat.config.units import GIB
from remat.machine import node
from remat.machine.node import Disk, Machine
from remat.planning import preflight
from remat.planning.model_states import Item, model_states
from remat.planning.preflight import Needs, Row

FOLDER = Path(__file__).resolve().parents[2] / "ds_configs"
LLAMA_70B = 70_553_706_496
HEAD_70B = 128_256 * 8192

MACHINE = Machine(
    local_size=8,
    host_available_bytes=2000 * GIB,
    host_limit_bytes=2015 * GIB,
    host_total_bytes=2015 * GIB,
    shm_bytes=1000 * GIB,
    gpu_bytes=79 * GIB,
    memlock_bytes=None,
    output=Disk("outputs", 10_000 * GIB, 1),
    nvme=Disk("/scratch", 10_000 * GIB, 2),
    download=Disk("/hub", 10_000 * GIB, 3),
)


def machine(**changes: Any) -> Machine:
    return dataclasses.replace(MACHINE, **changes)


def rendered(
    name: str, *, precision: Precision = Precision.bf16, ranks: int = 8, pin: bool = True
) -> dict[str, Any]:
    run = RunValues(
        world_size=ranks,
        micro_batch_size=1,
        global_batch_size=ranks,
        gradient_clipping=1.0,
        precision=precision,
        hidden_size=8192,
        nvme_path="/scratch",
        pin_memory_possible=pin,
    )
    return ds_config.render(ds_config.load(name, FOLDER), {}, run)


def states_70b(name: str, *, can_pin: bool = True) -> list[Item]:
    return model_states(
        num_params=LLAMA_70B,
        largest_param=HEAD_70B,
        ds=rendered(name),
        world_size=8,
        ranks_per_node=8,
        gas=1,
        can_pin=can_pin,
    )


def needs_70b(name: str = "zero3_offload", *, save: SaveConfig | None = None, can_pin: bool = True) -> Needs:
    return preflight.count_needs(
        states_70b(name, can_pin=can_pin),
        num_params=LLAMA_70B,
        ds=rendered(name),
        ranks_per_node=8,
        save=save or SaveConfig(every=100, keep=2, export=True),
        steps=500,
    )


def test_ranks_that_share_layers_read_the_whole_model_each() -> None:
    """Eight ranks, 70 B parameters, 2 bytes each: 1.1 TB, which model states alone would not show."""
    read = [
        "model.init=pretrained",
        "model.path=org/model",
        "save.at_end=false",
        "save.every=0",
        "save.export=false",
    ]
    alone, shared = (compose.compose_run([*read, f"train.tensor_parallel_size={n}"]).run for n in (1, 8))
    asked = {"num_params": LLAMA_70B, "width": 2, "ranks_per_node": 8}
    reading = preflight.reading_bytes(shared, zero_stage=2, **asked)
    assert reading == 8 * 2 * LLAMA_70B
    assert preflight.reading_bytes(shared, zero_stage=3, **asked) == 0
    assert preflight.reading_bytes(alone, zero_stage=2, **asked) == 0
    assert preflight.reads_onto_device(alone, "cuda")
    assert not preflight.reads_onto_device(shared, "cuda") and not preflight.reads_onto_device(alone, "cpu")
    needs = dataclasses.replace(needs_70b(), reading_bytes=reading)
    small = machine(host_available_bytes=reading - 1)
    (row,) = [row for row in preflight.compare(needs, small) if "read the whole model" in row.name]
    assert not row.fits and row.needed_bytes == reading and "tensor_parallel_size=1" in row.remedy


def test_a_gpu_without_room_for_the_flat_buffer_makes_it_on_the_host() -> None:
    """8 B parameters of 2 bytes, twice: the weights, and the buffer that ZeRO-2 copies them into."""
    count, ranks = 8_000_000_000, 2
    states = model_states(
        num_params=count,
        largest_param=500_000_000,
        ds=rendered("zero2_offload"),
        world_size=2,
        ranks_per_node=2,
        gas=1,
    )
    needs = preflight.count_needs(
        states, num_params=count, ds=rendered("zero2_offload"), ranks_per_node=ranks, save=SaveConfig(at_end=False),
        steps=10, flat_bytes=2 * count,
    )  # fmt: skip
    assert needs.gpu_weights_bytes == 2 * count

    def found(gpu_gib: int, host_bytes: int) -> list[Row]:
        here = machine(gpu_bytes=gpu_gib * GIB, host_available_bytes=host_bytes)
        return [row for row in preflight.compare(needs, here) if "flat buffer" in row.name]

    assert found(32, 0) == [] and found(80, 0) == [], "32 GiB hold both, with the CUDA context"
    ((too_small,), (enough,)) = (found(24, ranks * 4 * count - 1), found(24, ranks * 4 * count))
    assert not too_small.fits and enough.fits and "deepspeed.config=zero3" in too_small.remedy
    on_cpu = dataclasses.replace(machine(host_available_bytes=0), gpu_bytes=None)
    assert not [row for row in preflight.compare(needs, on_cpu) if "flat buffer" in row.name]


def test_a_rehearsal_needs_room_for_a_state_and_an_export() -> None:
    more = {"num_params": LLAMA_70B, "ds": rendered("zero3_offload"), "ranks_per_node": 8, "steps": 500}
    unsaved = SaveConfig(at_end=False)
    states = states_70b("zero3_offload")
    without = preflight.count_needs(states, save=unsaved, **more)
    needs = preflight.count_needs(states, save=unsaved, rehearse=True, **more)
    assert (without.rehearsal_bytes, needs.rehearsal_bytes) == (0, 14 * LLAMA_70B)
    assert not [row for row in preflight.compare(without, machine()) if row.name.startswith("disk")]
    (disk,) = [row for row in preflight.compare(needs, machine()) if row.name.startswith("disk")]
    assert disk.needed_bytes == 14 * LLAMA_70B and "save.rehearse=false" in disk.remedy
    kept = preflight.count_needs(states, save=SaveConfig(every=100), rehearse=True, **more)
    (disk,) = [row for row in preflight.compare(kept, machine()) if row.name.startswith("disk")]
    assert disk.needed_bytes == 36 * LLAMA_70B  # it is gone before the states come


@pytest.mark.parametrize(
    ("save", "num_params", "expected"),
    [
        (SaveConfig(), 2e9, True),
        (SaveConfig(), 1e9, False),
        (SaveConfig(at_end=False), 2e9, False),
        (SaveConfig(at_end=False, export=True), 2e9, True),
        (SaveConfig(rehearse=True, at_end=False), 1e6, True),
        (SaveConfig(rehearse=False), 2e9, False),
    ],
)
def test_large_models_that_are_saved_rehearse(save: SaveConfig, num_params: float, expected: bool) -> None:
    assert preflight.rehearses(save, int(num_params)) is expected


def checked(needs: Needs, found: Machine) -> list[str]:
    return preflight.problems(preflight.compare(needs, found))


def test_70b_needs_of_one_node() -> None:
    assert needs_70b(can_pin=False).host_bytes == pytest.approx(1411e9, rel=0.02)
    needs = needs_70b()
    assert needs.host_bytes == pytest.approx(1706e9, rel=0.02)
    assert needs.gpu_bytes == 2 * 8192 * 8192
    assert needs.saved_bytes == 3 * 12 * LLAMA_70B
    assert needs.export_bytes == 2 * LLAMA_70B
    assert needs.nvme_bytes == needs.mlocked_bytes == 0


def test_70b_fits_two_terabytes_and_not_one() -> None:
    assert checked(needs_70b(), MACHINE) == []
    small = machine(host_available_bytes=1007 * GIB, host_total_bytes=1024 * GIB, host_limit_bytes=1024 * GIB)
    (line,) = checked(needs_70b(), small)
    assert line.startswith("host memory of this node (8 ranks): needed 1,588.")
    assert "found 1,007.0 GiB" in line
    assert "zero3_nvme" in line
    assert "pin_memory=false" in line
    text = preflight.describe_lack(preflight.compare(needs_70b(), small))
    assert text is not None
    assert "too small" in text
    aligned = [
        row for row in text.splitlines() if row.startswith(("GiB ", "host memory of", "GPU memory", "disk: "))
    ]
    assert len(aligned) == 4
    assert len({len(row.removesuffix("  too small")) for row in aligned}) == 1, aligned


def test_rounding_is_offered_only_where_it_matters() -> None:
    tight = machine(host_available_bytes=1)
    assert "rounding" in checked(needs_70b("zero3_offload_optimizer"), tight)[0]
    assert "rounding" not in checked(needs_70b("zero3_offload_optimizer", can_pin=False), tight)[0]


def test_a_control_group_limit_is_named() -> None:
    limited = machine(host_available_bytes=100 * GIB, host_limit_bytes=128 * GIB)
    (line,) = checked(needs_70b(), limited)
    assert "found 100.0 GiB" in line
    assert "a control group allows 128.0 GiB" in line


def test_gpu_memory_and_its_remedy() -> None:
    needs = needs_70b("zero3")
    assert needs.gpu_bytes == pytest.approx(2 * LLAMA_70B, rel=0.01)  # 16 bytes over 8 ranks
    (line,) = checked(needs, MACHINE)
    assert line.startswith("GPU memory of each rank: needed 131.")
    assert "found 79.0 GiB" in line
    assert "zero3_offload_optimizer" in line


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("zero1", "deepspeed.config=zero2"),
        ("zero2", "deepspeed.config=zero3"),
        ("zero2_offload", "deepspeed.config=zero3_offload_optimizer, or zero3_offload"),
        ("zero3", "deepspeed.config=zero3_offload_optimizer"),
        ("zero3_offload_optimizer", "deepspeed.config=zero3_offload"),
        ("zero3_offload", "reduce_bucket_size"),
    ],
)
def test_the_next_strategy_is_named(name: str, word: str) -> None:
    assert word in needs_70b(name).gpu_remedy


def test_without_a_gpu_its_bytes_are_host_bytes() -> None:
    needs = needs_70b("zero3")
    without = machine(gpu_bytes=None, host_available_bytes=1000 * GIB)
    rows = preflight.compare(needs, without)
    assert rows[0].needed_bytes == needs.host_bytes + 8 * needs.gpu_bytes
    assert not any(row.name.startswith("GPU") for row in rows)
    assert len(checked(needs, without)) == 1


def test_fewer_gpus_than_ranks() -> None:
    line = preflight.too_few_gpus(needed=8, found=4)
    assert line is not None
    assert "needed 8 (one per rank), found 4" in line
    assert "--num_gpus 4" in line
    assert preflight.too_few_gpus(needed=8, found=8) is None
    assert preflight.too_few_gpus(needed=8, found=0) is None, "ranks on CPUs"


def test_the_memory_of_a_plan_takes_the_place_of_the_lower_bound() -> None:
    needs = needs_70b("zero3_offload")
    host = preflight.host_row(needs, MACHINE, 1900 * GIB, 2000 * GIB)
    rows = preflight.compare(needs, MACHINE, [host, preflight.gpu_row(needs, MACHINE, 80 * GIB)])
    assert [row.needed_bytes for row in rows[:2]] == [1900 * GIB, 80 * GIB]
    assert rows[2].name == "/dev/shm"
    assert rows[3].name.startswith("disk")
    (line,) = preflight.problems(rows)
    assert line.startswith("GPU memory of each rank: needed 80.0 GiB, found 79.0 GiB")


def test_the_smallest_of_several_nodes() -> None:
    other = machine(host_available_bytes=5, gpu_bytes=7, memlock_bytes=9, output=Disk("outputs", 3, 4))
    found = node.smallest([MACHINE, other])
    assert (found.host_available_bytes, found.gpu_bytes, found.memlock_bytes) == (5, 7, 9)
    assert found.output.free_bytes == 3
    assert found.host_total_bytes == MACHINE.host_total_bytes
    assert node.smallest([machine(nvme=None), MACHINE, other]).nvme == MACHINE.nvme
    assert node.smallest([machine(gpu_bytes=None), machine(gpu_bytes=None)]).gpu_bytes is None


def test_nvme_needs_disk_and_locked_memory() -> None:
    needs = needs_70b("zero3_nvme")
    assert needs.nvme_bytes == pytest.approx(18 * LLAMA_70B, rel=1e-6)
    assert checked(needs, MACHINE) == []
    poor = machine(memlock_bytes=8 * 1024**2, nvme=Disk("/scratch", 500 * GIB, 2))
    locked, swap = checked(needs, poor)
    assert locked.startswith("locked memory of each rank (ulimit -l): needed 3.")
    assert "found 0.01 GiB" in locked
    kib = -(-needs.mlocked_bytes // 1024)
    assert f"ulimit -l {kib}" in locked
    assert "hardware.nvme_path /scratch: needed 1,182." in swap
    assert "found 500.0 GiB" in swap


def test_host_offload_needs_no_locked_memory() -> None:
    """CUDA pins through the driver: RLIMIT_MEMLOCK is about DeepSpeed's own I/O buffers only."""
    assert checked(needs_70b(), machine(memlock_bytes=65536)) == []


def test_one_filesystem_is_counted_once() -> None:
    needs = needs_70b("zero3_nvme")
    shared = Disk("/scratch", 3000 * GIB, 1)
    same = machine(output=shared, nvme=shared, download=shared)
    row = preflight.compare(needs, same)[-1]
    assert row.needed_bytes == needs.saved_bytes + needs.export_bytes + needs.nvme_bytes
    assert "output_dir" in row.name
    assert "hardware.nvme_path" in row.name
    assert not row.fits
    assert checked(needs, machine(output=shared)) == []


def test_disk_remedies() -> None:
    (line,) = checked(needs_70b(), machine(output=Disk("outputs", GIB, 1)))
    assert line.startswith("disk: output_dir outputs: needed 2,496.")  # (3 x 12 + 2) bytes per parameter
    for word in ("save.keep", "save.export=false", "output_dir"):
        assert word in line


@pytest.mark.parametrize(
    ("name", "precision", "per_param"),
    [
        ("zero1", Precision.fp32, 16),
        ("zero1", Precision.bf16, 14),
        ("zero2_offload", Precision.fp16, 14),
        ("zero3", Precision.fp32, 12),
        ("zero3_offload", Precision.bf16, 12),
    ],
)
def test_bytes_of_a_saved_state(name: str, precision: Precision, per_param: int) -> None:
    """Measured on disk with deepspeed 0.19.8, two ranks, 2.6 M parameters: 12.04, 14.03, 16.03 bytes each."""
    assert preflight.saved_state_bytes(1000, rendered(name, precision=precision)) == 1000 * per_param


def test_bytes_of_a_saved_state_without_zero() -> None:
    run = RunValues(
        world_size=1,
        micro_batch_size=1,
        global_batch_size=1,
        gradient_clipping=1.0,
        precision=Precision.fp32,
        hidden_size=64,
    )
    raw = {"zero_optimization": {"stage": 0}}
    assert preflight.saved_state_bytes(1000, ds_config.render(raw, {}, run)) == 12_000
    half = dataclasses.replace(run, precision=Precision.bf16)
    assert preflight.saved_state_bytes(1000, ds_config.render(raw, {}, half)) == 14_000


@pytest.mark.parametrize(
    ("save", "steps", "count"),
    [
        (SaveConfig(every=0, at_end=True), 100, 1),
        (SaveConfig(every=0, at_end=False), 100, 0),
        (SaveConfig(every=10, keep=2), 100, 3),
        (SaveConfig(every=50, keep=2), 100, 2),
        (SaveConfig(every=60, keep=2), 100, 2),
        (SaveConfig(every=60, keep=2, at_end=False), 100, 1),
        (SaveConfig(every=10, keep=1), 100, 2),
        (SaveConfig(every=10, keep=2), None, 3),  # steps that only the data tells: at most
        (SaveConfig(every=0, at_end=True), None, 1),
        (SaveConfig(every=0, at_end=False), None, 0),
    ],
)
def test_how_many_states_exist_at_once(save: SaveConfig, steps: int | None, count: int) -> None:
    assert preflight.states_on_disk(save, steps) == count


def test_weights_are_downloaded_only_when_absent(tmp_path: Path) -> None:
    local = tmp_path / "weights"
    local.mkdir()
    hub = ModelConfig(init=ModelInit.pretrained, path="org/name")
    assert preflight.download_bytes(hub, 1000, cache=tmp_path) == 2000
    assert preflight.download_bytes(ModelConfig(path="org/name"), 1000, cache=tmp_path) == 0
    assert preflight.download_bytes(dataclasses.replace(hub, path=str(local)), 1000, cache=tmp_path) == 0
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    assert preflight.download_bytes(hub, 1000, cache=tmp_path) == 2000, "a config alone is not the weights"
    (snapshot / "model.safetensors").touch()
    assert preflight.download_bytes(hub, 1000, cache=tmp_path) == 0


def fake_root(folder: Path, *, version: int, limit: str, used: int, cache: int, capabilities: int = 0) -> Path:
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/status").write_text(f"Name:\tpython\nCapEff:\t{capabilities:016x}\n")
    if version == 2:
        membership, group = "0::/job", folder / "sys/fs/cgroup/job"
        names = ("memory.max", "memory.current", "inactive_file")
    else:
        membership, group = "4:memory:/job", folder / "sys/fs/cgroup/memory/job"
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    (folder / "proc/self/cgroup").write_text(f"{membership}\n")
    group.mkdir(parents=True)
    (group / names[0]).write_text(f"{limit}\n")
    (group / names[1]).write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"cache {cache}\n{names[2]} {cache}\n")
    return folder


@pytest.mark.parametrize("version", [1, 2])
def test_found_looks_under_the_control_group(version: int, tmp_path: Path) -> None:
    """A limit far below this machine's memory, so that it decides: 3 MiB, 2 MiB used, of which 1 is page cache."""
    mib = 1024**2
    root = fake_root(tmp_path, version=version, limit=str(3 * mib), used=2 * mib, cache=mib)
    seen = node.found(
        local_size=2, output_dir=str(tmp_path / "a/b"), nvme_path=str(tmp_path), cache=tmp_path, root=root
    )
    assert seen.host_limit_bytes == 3 * mib
    assert seen.host_available_bytes == 2 * mib
    assert seen.host_total_bytes > 3 * mib
    assert seen.local_size == 2
    assert seen.nvme is not None
    assert seen.output.filesystem == seen.nvme.filesystem == tmp_path.stat().st_dev
    assert seen.output.free_bytes > 0
    assert (seen.gpu_bytes is None) == (not torch.cuda.is_available())


def test_an_unlimited_control_group_leaves_the_machine(tmp_path: Path) -> None:
    root = fake_root(tmp_path, version=2, limit="max", used=0, cache=0)
    seen = node.found(local_size=1, output_dir=str(tmp_path), nvme_path=None, cache=tmp_path, root=root)
    assert seen.host_limit_bytes == seen.host_total_bytes
    assert seen.nvme is None


def test_locked_memory_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def memlock(capabilities: int, limit: int, name: str) -> int | None:
        root = fake_root(tmp_path / name, version=2, limit="max", used=0, cache=0, capabilities=capabilities)
        monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
        seen = node.found(local_size=1, output_dir=str(tmp_path), nvme_path=None, cache=tmp_path, root=root)
        return seen.memlock_bytes

    assert memlock(0, 8 * 1024**2, "limited") == 8 * 1024**2
    assert memlock(1 << 14, 8 * 1024**2, "may lock") is None
    assert memlock(0, resource.RLIM_INFINITY, "unlimited") is None
    root = fake_root(tmp_path / "rootless", version=2, limit="max", used=0, cache=0, capabilities=1 << 14)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 * 1024**2, 8 * 1024**2))
    (root / "proc/self/uid_map").write_text("         0          0 4294967295\n")
    assert node.memlock_bytes(root) is None
    (root / "proc/self/uid_map").write_text("         0       1000          1\n")
    assert node.memlock_bytes(root) == 8 * 1024**2, "the capability is that of a user namespace"
