"""The GPU table and the machines under conf/hardware."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from remat.config import compose
from remat.config.options import ConfigError, HardwareConfig, Precision
from remat.machine.gpus import find_gpu, machine, table

MACHINES = sorted((Path(__file__).resolve().parents[2] / "conf" / "hardware").glob("*.yaml"))


@pytest.mark.parametrize(
    ("reported", "name", "bf16"),
    [
        ("NVIDIA GeForce RTX 3090", "RTX 3090", 71.0),
        ("GeForce RTX 3090", "RTX 3090", 71.0),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5090", "RTX 5090", 209.5),
        ("NVIDIA L4", "L4", 121.0),
        ("NVIDIA A10", "A10", 125.0),
        ("NVIDIA L40S", "L40S", 362.0),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB", 312.0),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB", 312.0),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe", 312.0),
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
        "NVIDIA A10G",
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
    assert len({gpu.name for gpu in table()}) == len(table())
    for gpu in table():
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


FIGURES = (
    "pcie_h2d_gbs",
    "pcie_d2h_gbs",
    "gpu_link_gbs",
    "nic_gbs",
    "dram_gbs",
    "cpu_adam_gparams_s",
    "nvme_read_gbs",
    "nvme_write_gbs",
    "nvme_gib",
)


@pytest.mark.parametrize("path", MACHINES, ids=lambda p: p.stem)
def test_every_figure_of_a_machine_has_a_source_that_says_how_it_was_had(path: Path) -> None:
    cfg = HardwareConfig(**yaml.safe_load(path.read_text()))
    given = {name for name in FIGURES if getattr(cfg, name) is not None}
    assert given == set(cfg.sources) - {"gpus_per_pcie_link"}
    assert ("gpus_per_pcie_link" in cfg.sources) == (cfg.gpus_per_pcie_link > 1)
    for name in given:
        assert getattr(cfg, name) > 0
        assert cfg.sources[name].startswith(("measured: ", "data sheet: ", "derived: "))
    if cfg.gpus_per_node and cfg.gpus_per_node > 1:
        assert cfg.gpu_link_gbs, "several GPUs exchange gradients over something"


def test_achievable_rates_are_below_the_peak_or_measured() -> None:
    for gpu in table():
        assert (gpu.matmul_tflops is None) == (gpu.peak_bf16_tflops is None)
        for rate in (gpu.matmul_tflops, gpu.attention_tflops):
            if rate is None:
                continue
            assert gpu.peak_bf16_tflops is not None
            assert len(rate.source) > 20
            assert rate.measured or rate.value < gpu.peak_bf16_tflops
            assert 0.3 < rate.value / gpu.peak_bf16_tflops < 1.15  # consumer cards boost above their data sheet
        assert gpu.memory_gbs is None or 200 < gpu.memory_gbs.value < 8000


def test_a_share_states_its_fraction_and_reason() -> None:
    a100 = find_gpu("NVIDIA A100-SXM4-80GB")
    assert a100 is not None and a100.attention_tflops is not None
    assert a100.attention_tflops.value == 312 * 0.615
    assert a100.attention_tflops.source.startswith("data sheet: 61.5% of 312; 50 to 73 % on A100")
    assert not a100.attention_tflops.measured


def test_a_machine_takes_what_it_does_not_say_from_its_gpu() -> None:
    h100 = find_gpu("NVIDIA H100 80GB HBM3")
    assert h100 is not None
    assert h100.matmul_tflops is not None
    cfg = compose.compose_run(["hardware=8xh100-80"]).run.hardware
    found = machine(cfg)
    assert found.matmul_tflops == h100.matmul_tflops.value == 792.1
    assert found.launch_us == h100.launch_us.value == 0.9
    assert (found.gpus_per_node, found.gpu_link_gbs, found.pcie_d2h_gbs) == (8, 370, 52.8)
    assert found.cpu_adam_gparams_s == pytest.approx(491.5 / 28)
    assert found.sources["matmul_tflops"].startswith("measured: ")
    assert found.sources["memory_gbs"].startswith("data sheet: ")
    mine = machine(compose.compose_run(["hardware=1x3090", "hardware.gpu_rates.matmul_tflops=66"]).run.hardware)
    assert mine.matmul_tflops == 66
    assert mine.sources["matmul_tflops"] == "hardware.gpu_rates"
    assert mine.attention_tflops == pytest.approx(0.615 * 71)


def test_what_has_no_source_is_unknown() -> None:
    assert machine(HardwareConfig()).matmul_tflops is None
    assert machine(HardwareConfig()).launch_us is None
    assert machine(HardwareConfig(gpu="NVIDIA B200")).attention_tflops is None
    assert machine(HardwareConfig(gpu="A card of tomorrow")).memory_gbs is None


def test_a_rate_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="gpu_rates has matmul_gflops"):
        machine(HardwareConfig(gpu_rates={"matmul_gflops": 1.0}))


def test_the_machines_that_ship() -> None:
    assert {path.stem for path in MACHINES} == {
        "this_machine",
        *("1x3090", "2x3090", "1x4090", "2x4090", "4x4090", "8x4090", "1x5090"),
        *("1xa10", "1xl4", "1xl40s", "4xl40s", "8xl40s"),
        *("1xa100-40", "8xa100-40", "1xa100-80", "4xa100-80", "8xa100-80"),
        *("1xh100-80", "4xh100-80", "8xh100-80"),
        *("1xh200", "8xh200", "1xgh200", "8xb200"),
    }
