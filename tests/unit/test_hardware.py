"""The GPU table and the machines under conf/hardware."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from remat.config import HardwareConfig, Precision
from remat.hardware import GPUS, find_gpu

MACHINES = sorted((Path(__file__).resolve().parents[2] / "conf" / "hardware").glob("*.yaml"))


@pytest.mark.parametrize(
    ("reported", "name", "bf16"),
    [
        ("NVIDIA GeForce RTX 3090", "RTX 3090", 71.0),
        ("GeForce RTX 3090", "RTX 3090", 71.0),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5090", "RTX 5090", 209.5),
        ("NVIDIA L40S", "L40S", 362.0),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB", 312.0),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB", 312.0),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", "A100 80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 989.4),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756.0),
        ("NVIDIA H200", "H200", 989.4),
        ("NVIDIA GH200 480GB", "GH200 96GB", 989.4),
        ("NVIDIA B200", "B200", 2250.0),
        ("Tesla V100-SXM2-32GB", "V100 32GB SXM", None),
        ("Tesla V100-PCIE-16GB", "V100 16GB PCIe", None),
        ("Tesla T4", "T4", None),
    ],
)
def test_names_as_torch_reports_them(reported: str, name: str, bf16: float | None) -> None:
    gpu = find_gpu(reported)
    assert gpu is not None
    assert gpu.name == name
    assert gpu.peak_bf16_tflops == bf16


@pytest.mark.parametrize(
    "reported",
    [
        "",
        "cpu",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA L40",
        "AMD Instinct MI300X",
    ],
)
def test_unknown_names_stay_unknown(reported: str) -> None:
    assert find_gpu(reported) is None


def test_peak_by_precision() -> None:
    h100, v100 = find_gpu("NVIDIA H100 80GB HBM3"), find_gpu("Tesla V100-SXM2-16GB")
    assert h100 is not None
    assert v100 is not None
    assert h100.peak_tflops(Precision.bf16) == h100.peak_tflops(Precision.fp16) == 989.4
    assert h100.peak_tflops(Precision.fp32) is None
    assert v100.peak_tflops(Precision.bf16) is None
    assert v100.peak_tflops(Precision.fp16) == 125.0


def test_every_row_has_a_source_and_no_name_matches_two_rows() -> None:
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)
    for gpu in GPUS:
        assert gpu.source.startswith("NVIDIA ")
        assert 10 < gpu.memory_gib < 200


@pytest.mark.parametrize("path", MACHINES, ids=lambda p: p.stem)
def test_machines_agree_with_the_table(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# "), "a machine says in its first line what it is"
    machine = HardwareConfig(**yaml.safe_load(text))
    assert machine.name == path.stem
    if path.stem == "this_machine":
        assert machine == HardwareConfig()
        return
    gpu = find_gpu(machine.gpu or "")
    assert gpu is not None
    assert machine.gpu_memory_gib == gpu.memory_gib
    assert machine.gpus_per_node is not None
    assert machine.gpus_per_node == int(path.stem.split("x")[0])
    assert machine.host_memory_gib


def test_the_machines_that_ship() -> None:
    names = {path.stem for path in MACHINES}
    assert names == {"this_machine", "1x4090", "1x3090", "8xa100-80", "8xh100-80", "1xh100-80", "1xh200"}
