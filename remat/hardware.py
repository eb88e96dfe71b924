"""GPUs by the name torch reports: memory and peak rate. An unknown GPU is unknown: no figure is ever guessed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from remat.config import Precision


@dataclass(frozen=True)
class Gpu:
    """One model of GPU.

    `pattern` matches the whole name of `torch.cuda.get_device_name()`. `memory_gib` is what torch reports as total
    memory, rounded down: a little less than the figure on the box. Peaks are dense tensor-core TFLOP/s with fp32
    accumulation and without sparsity; None where the GPU has no such units.
    """

    name: str
    pattern: str
    memory_gib: float
    peak_bf16_tflops: float | None
    peak_fp16_tflops: float
    source: str

    def peak_tflops(self, precision: Precision) -> float | None:
        """Dense peak at `precision`; None for fp32, whose rate depends on whether TF32 is allowed."""
        return {Precision.bf16: self.peak_bf16_tflops, Precision.fp16: self.peak_fp16_tflops}.get(precision)


GPUS = (
    Gpu("RTX 3090", r"(NVIDIA )?GeForce RTX 3090", 23.5, 71.0, 71.0, "NVIDIA Ampere GA102 whitepaper"),
    Gpu("RTX 4090", r"NVIDIA GeForce RTX 4090", 23.5, 165.2, 165.2, "NVIDIA Ada GPU architecture whitepaper"),
    Gpu("RTX 5090", r"NVIDIA GeForce RTX 5090", 31.3, 209.5, 209.5, "NVIDIA RTX Blackwell whitepaper"),
    Gpu("L40S", r"NVIDIA L40S", 44.3, 362.0, 362.0, "NVIDIA L40S datasheet"),
    Gpu("A100 40GB", r"(NVIDIA )?A100-(SXM4|SXM|PCIE)-40GB", 39.3, 312.0, 312.0, "NVIDIA A100 datasheet"),
    Gpu(
        "A100 80GB",
        r"(NVIDIA )?A100(-SXM4-80GB|-SXM-80GB| 80GB PCIe|-PCIE-80GB)",
        79.1,
        312.0,
        312.0,
        "NVIDIA A100 80GB datasheet",
    ),
    Gpu("H100 SXM", r"NVIDIA H100 80GB HBM3", 79.1, 989.4, 989.4, "NVIDIA H100 SXM datasheet"),
    Gpu("H100 PCIe", r"NVIDIA H100 PCIe", 79.1, 756.0, 756.0, "NVIDIA H100 PCIe datasheet"),
    Gpu("H200", r"NVIDIA H200", 139.7, 989.4, 989.4, "NVIDIA H200 SXM datasheet"),
    Gpu("GH200 96GB", r"NVIDIA GH200 480GB", 94.5, 989.4, 989.4, "NVIDIA GH200 datasheet"),
    Gpu("B200", r"NVIDIA B200", 178.3, 2250.0, 2250.0, "NVIDIA HGX B200 datasheet"),
    Gpu("V100 16GB SXM", r"(NVIDIA )?Tesla V100-SXM2-16GB", 15.7, None, 125.0, "NVIDIA V100 datasheet"),
    Gpu("V100 32GB SXM", r"(NVIDIA )?Tesla V100-SXM[23]-32GB", 31.7, None, 125.0, "NVIDIA V100 datasheet"),
    Gpu("V100 16GB PCIe", r"(NVIDIA )?Tesla V100-PCIE-16GB", 15.7, None, 112.0, "NVIDIA V100 datasheet"),
    Gpu("V100 32GB PCIe", r"(NVIDIA )?Tesla V100-PCIE-32GB", 31.7, None, 112.0, "NVIDIA V100 datasheet"),
    Gpu("T4", r"(NVIDIA )?Tesla T4", 14.5, None, 65.0, "NVIDIA T4 datasheet"),
)


def find_gpu(name: str) -> Gpu | None:
    """The GPU that reports itself as `name`; None when it is not in the table.

    A slice of a GPU (MIG) or a variant with other clocks (Ti, D, Laptop, NVL) has another name and is not matched.
    """
    return next((gpu for gpu in GPUS if re.fullmatch(gpu.pattern, name.strip())), None)
