"""GPUs by the name torch reports, and machines: memory, rates, links. A figure without a source is None, not guessed.

GB is 1e9 bytes. A rate is `measured` where a measurement was published. Otherwise it is the data sheet's peak times a
fraction; the rate's source says where the fraction is from.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from remat.config.options import ConfigError, HardwareConfig, Precision


@dataclass(frozen=True)
class Rate:
    """An achievable rate, in the unit of the field that holds it, and where it is from."""

    value: float
    source: str
    measured: bool = False


def measured(value: float, source: str) -> Rate:
    return Rate(value, source, measured=True)


def share(peak: float, fraction: float, reason: str) -> Rate:
    """Return `fraction` of a data sheet's `peak` as a Rate; `reason` says why this fraction."""
    return Rate(peak * fraction, f"data sheet: {fraction:.1%} of {peak:g}; {reason}")


def _memory(peak_gbs: float) -> Rate:
    return share(
        peak_gbs,
        0.89,
        "1727 of 1935 GB/s measured on an A800 PCIe, github.com/mli/transformers-benchmarks issue 4",
    )


def _best(tflops: float) -> Rate:
    return measured(tflops, "best shape of torch.mm in bf16, github.com/mag-/gpu_benchmark README")


def _flash2(peak_tflops: float) -> Rate:
    """Return what torch's flash kernels (FlashAttention-2) reach on GPUs whose own mma instructions they use."""
    return share(peak_tflops, 0.615, "50 to 73 % on A100, Dao 2023 (FlashAttention-2), abstract; the middle")


def _flash2_hopper(peak_tflops: float) -> Rate:
    return share(peak_tflops, 0.35, "FlashAttention-2 on H100, Shah et al. 2024 (FlashAttention-3), abstract")


LAUNCH_US = measured(
    0.9,
    "3.8 us per 2.9 us kernel with launches overlapped, on a V100: NVIDIA technical blog, Getting Started with CUDA "
    "Graphs; other GPUs taken to be alike",
)


@dataclass(frozen=True)
class Gpu:
    """One model of GPU.

    `pattern` matches the whole name of `torch.cuda.get_device_name()`. `memory_gib` is what torch reports as total
    memory, rounded down: a little less than the figure on the box. Peaks are dense tensor-core TFLOP/s with fp32
    accumulation and without sparsity; None where the GPU has no such units. `matmul` and `attention` are achievable
    TFLOP/s in bf16 (for attention, counting the FLOPs that its kernel does). `memory` is the GB/s of a large copy,
    reads and writes both counted.
    """

    name: str
    pattern: str
    memory_gib: float
    peak_bf16_tflops: float | None
    peak_fp16_tflops: float
    source: str
    matmul: Rate | None = None
    attention: Rate | None = None
    memory: Rate | None = None
    launch_us: Rate = LAUNCH_US

    def peak_tflops(self, precision: Precision) -> float | None:
        """Return the dense peak at `precision`; None for fp32, whose rate depends on whether TF32 is allowed."""
        return {Precision.bf16: self.peak_bf16_tflops, Precision.fp16: self.peak_fp16_tflops}.get(precision)


GPUS = (
    Gpu(
        "RTX 3090",
        r"(NVIDIA )?GeForce RTX 3090",
        23.5,
        71.0,
        71.0,
        "NVIDIA Ampere GA102 whitepaper",
        _best(78.0),
        _flash2(71.0),
        _memory(936),
    ),
    Gpu(
        "RTX 4090",
        r"NVIDIA GeForce RTX 4090",
        23.5,
        165.2,
        165.2,
        "NVIDIA Ada GPU architecture whitepaper",
        measured(158.6, "8192 x 8192 in fp16, github.com/mli/transformers-benchmarks issue 4"),
        _flash2(165.2),
        _memory(1008),
    ),
    Gpu(
        "RTX 5090",
        r"NVIDIA GeForce RTX 5090",
        31.3,
        209.5,
        209.5,
        "NVIDIA RTX Blackwell whitepaper",
        measured(
            224.3,
            "16384 x 8192 x 1280 in bf16, main-horse.github.io/posts/5090-mm-perf; boosts above the data sheet",
        ),
        _flash2(209.5),
        _memory(1792),
    ),
    Gpu(
        "L40S",
        r"NVIDIA L40S",
        44.3,
        362.0,
        362.0,
        "NVIDIA L40S datasheet",
        _best(252.0),
        _flash2(362.0),
        _memory(864),
    ),
    Gpu(
        "A100 40GB",
        r"(NVIDIA )?A100-(SXM4|SXM|PCIE)-40GB",
        39.3,
        312.0,
        312.0,
        "NVIDIA A100 datasheet",
        _best(267.9),
        _flash2(312.0),
        _memory(1555),
    ),
    Gpu(
        "A100 80GB",
        r"(NVIDIA )?A100(-SXM4-80GB|-SXM-80GB)",
        79.1,
        312.0,
        312.0,
        "NVIDIA A100 80GB datasheet",
        _best(267.9),
        _flash2(312.0),
        _memory(2039),
    ),
    Gpu(
        "A100 80GB PCIe",
        r"(NVIDIA )?A100( 80GB PCIe|-PCIE-80GB)",
        79.1,
        312.0,
        312.0,
        "NVIDIA A100 80GB datasheet",
        _best(256.4),
        _flash2(312.0),
        _memory(1935),
    ),
    Gpu(
        "H100 SXM",
        r"NVIDIA H100 80GB HBM3",
        79.1,
        989.4,
        989.4,
        "NVIDIA H100 SXM datasheet",
        _best(792.1),
        _flash2_hopper(989.4),
        _memory(3350),
    ),
    Gpu(
        "H100 PCIe",
        r"NVIDIA H100 PCIe",
        79.1,
        756.0,
        756.0,
        "NVIDIA H100 PCIe datasheet",
        _best(499.5),
        _flash2_hopper(756.0),
        _memory(2000),
    ),
    Gpu(
        "H200",
        r"NVIDIA H200",
        139.7,
        989.4,
        989.4,
        "NVIDIA H200 SXM datasheet",
        share(989.4, 0.80, "the processor is that of the H100 SXM, which reaches 792.1 of 989.4"),
        _flash2_hopper(989.4),
        _memory(4800),
    ),
    Gpu(
        "GH200 96GB",
        r"NVIDIA GH200 480GB",
        94.5,
        989.4,
        989.4,
        "NVIDIA GH200 datasheet",
        _best(842.5),
        _flash2_hopper(989.4),
        measured(3400, "STREAM, Schieffer et al. 2024, arXiv 2407.07850"),
    ),
    Gpu(
        "B200",
        r"NVIDIA B200",
        178.3,
        2250.0,
        2250.0,
        "NVIDIA HGX B200 datasheet",
        share(2250.0, 0.80, "no measurement found; the fraction that an H100 SXM reaches"),
        None,
        _memory(8000),
    ),
    Gpu("V100 16GB SXM", r"(NVIDIA )?Tesla V100-SXM2-16GB", 15.7, None, 125.0, "NVIDIA V100 datasheet"),
    Gpu("V100 32GB SXM", r"(NVIDIA )?Tesla V100-SXM[23]-32GB", 31.7, None, 125.0, "NVIDIA V100 datasheet"),
    Gpu("V100 16GB PCIe", r"(NVIDIA )?Tesla V100-PCIE-16GB", 15.7, None, 112.0, "NVIDIA V100 datasheet"),
    Gpu("V100 32GB PCIe", r"(NVIDIA )?Tesla V100-PCIE-32GB", 31.7, None, 112.0, "NVIDIA V100 datasheet"),
    Gpu("T4", r"(NVIDIA )?Tesla T4", 14.5, None, 65.0, "NVIDIA T4 datasheet"),
)


def find_gpu(name: str) -> Gpu | None:
    """Return the GPU that reports itself as `name`; None when it is not in the table.

    A slice of a GPU (MIG) or a variant with other clocks (Ti, D, Laptop, NVL) has another name and is not matched.
    """
    return next((gpu for gpu in GPUS if re.fullmatch(gpu.pattern, name.strip())), None)


GPU_RATES = ("matmul_tflops", "attention_tflops", "memory_gbs", "launch_us")  # keys of hardware.gpu_rates
ADAM_BYTES = (
    28  # fp32 parameter, two moments and gradient read, the first three written: csrc/adam/cpu_adam_impl.cpp
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of a machine that step times are computed from. None: unknown. GB is 1e9 bytes; GPU rates are for bf16.

    `pcie_*` are per link, which `gpus_per_pcie_link` GPUs share. `nic_gbs`, `dram_gbs`, `cpu_adam_gparams_s` and the
    NVMe figures are per node, `gpu_link_gbs` per GPU in one direction. `sources` says where each figure is from.
    """

    name: str
    gpu: str | None = None
    gpus_per_node: int = 1
    num_nodes: int = 1
    matmul_tflops: float | None = None
    attention_tflops: float | None = None
    memory_gbs: float | None = None
    launch_us: float | None = None
    pcie_h2d_gbs: float | None = None
    pcie_d2h_gbs: float | None = None
    gpus_per_pcie_link: int = 1
    gpu_link_gbs: float | None = None
    nic_gbs: float | None = None
    dram_gbs: float | None = None
    cpu_adam_gparams_s: float | None = None
    nvme_read_gbs: float | None = None
    nvme_write_gbs: float | None = None
    nvme_gib: float | None = None
    sources: dict[str, str] = field(default_factory=dict)


def machine(cfg: HardwareConfig) -> Machine:
    """Return the Machine that `cfg` describes. GPU rates that it does not give are taken from the table of GPUs.

    The CPU's Adam rate, when not given, is what the host's memory bandwidth allows. Raises ConfigError for an unknown
    key in hardware.gpu_rates.
    """
    unknown = sorted(set(cfg.gpu_rates) - set(GPU_RATES))
    if unknown:
        raise ConfigError(
            f"hardware.gpu_rates has {', '.join(unknown)}, which is no rate: the rates are {', '.join(GPU_RATES)}"
        )
    gpu = find_gpu(cfg.gpu) if cfg.gpu else None
    values: dict[str, Any] = {}
    sources = dict(cfg.sources)
    table = (gpu.matmul, gpu.attention, gpu.memory, gpu.launch_us) if gpu else (None,) * len(GPU_RATES)
    for name, rate in zip(GPU_RATES, table, strict=True):
        if name in cfg.gpu_rates:
            values[name] = cfg.gpu_rates[name]
            sources.setdefault(name, "hardware.gpu_rates")
        elif rate is not None:
            values[name] = rate.value
            sources[name] = f"measured: {rate.source}" if rate.measured else rate.source
    adam = cfg.cpu_adam_gparams_s
    if adam is None and cfg.dram_gbs is not None:
        adam = cfg.dram_gbs / ADAM_BYTES
        sources["cpu_adam_gparams_s"] = (
            f"derived: {ADAM_BYTES} bytes per parameter at dram_gbs; cores and NUMA may make it slower"
        )
    return Machine(
        name=cfg.name,
        gpu=cfg.gpu,
        gpus_per_node=cfg.gpus_per_node or 1,
        num_nodes=cfg.num_nodes,
        pcie_h2d_gbs=cfg.pcie_h2d_gbs,
        pcie_d2h_gbs=cfg.pcie_d2h_gbs,
        gpus_per_pcie_link=cfg.gpus_per_pcie_link,
        gpu_link_gbs=cfg.gpu_link_gbs,
        nic_gbs=cfg.nic_gbs,
        dram_gbs=cfg.dram_gbs,
        cpu_adam_gparams_s=adam,
        nvme_read_gbs=cfg.nvme_read_gbs,
        nvme_write_gbs=cfg.nvme_write_gbs,
        nvme_gib=cfg.nvme_gib,
        sources=sources,
        **values,
    )
