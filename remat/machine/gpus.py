"""Look up GPUs by the name torch reports, and machines: memory, rates, links. A figure without a source is None.

The memory that a process takes on a GPU outside of torch's allocator is here too: the CUDA context and NCCL's channels.

The GPUs are a table in `conf/hardware/gpus/gpus.yaml`; a machine is a YAML file beside that folder. GB is 1e9 bytes.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from dataclasses import dataclass, field, fields
from typing import Any

import yaml

from remat.config import compose
from remat.config.options import ConfigError, HardwareConfig, Precision
from remat.config.units import GIB, MIB
from remat.machine.node import CONTEXT_BYTES
from remat.machine.versions import numbers

TABLE = compose.CONF_DIR / "hardware" / "gpus" / "gpus.yaml"
# By the first version of NCCL that they hold for: bytes that a communicator takes on each GPU, with two ranks and with
# more. Others measured: 544 and 688 MiB on 4 x A100 with NVLink (August 2023, github.com/NVIDIA/nccl/issues/964);
# 1.06 GB with the CUDA context on 8 x H100 (April 2025, github.com/NVIDIA/nccl/issues/1685); 484 MiB with the context
# for one rank on an RTX 3090 (CUDA 13.0, NVIDIA/nccl pull request 2366).
NCCL_BYTES = {"0": (544 * MIB, 688 * MIB), "2.19": (GIB // 2, GIB // 2)}
NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


@dataclass(frozen=True)
class Rate:
    """An achievable rate, in the unit of the field that holds it, and its source."""

    value: float
    source: str
    measured: bool = False


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One model of GPU. The head of `conf/hardware/gpus/gpus.yaml` gives the meaning and unit of each field."""

    name: str
    reported: str
    memory_gib: float
    peak_bf16_tflops: float | None = None
    peak_fp16_tflops: float
    source: str
    matmul_tflops: Rate | None = None
    attention_tflops: Rate | None = None
    memory_gbs: Rate | None = None
    launch_us: Rate

    def peak_tflops(self, precision: Precision) -> float | None:
        """Return the dense peak at `precision`; None for fp32, whose rate depends on whether TF32 is allowed."""
        return {Precision.bf16: self.peak_bf16_tflops, Precision.fp16: self.peak_fp16_tflops}.get(precision)


@functools.cache
def table() -> tuple[Gpu, ...]:
    """Return all GPUs of the table."""
    content = yaml.safe_load(TABLE.read_text())
    shares, launch = content["shares"], _rate(content["launch_us"], {})
    return tuple(
        Gpu(launch_us=launch, **{name: _rate(value, shares) for name, value in row.items()})
        for row in content["gpus"]
    )


def _rate(value: Any, shares: dict[str, Any]) -> Any:
    """Return a Rate for {measured, source} and for {data_sheet, share}; any other value as it is."""
    if not isinstance(value, dict):
        return value
    if "measured" in value:
        return Rate(value["measured"], value["source"], measured=True)
    peak, share = value["data_sheet"], shares[value["share"]]
    fraction = share["fraction"]
    return Rate(peak * fraction, f"data sheet: {fraction:.1%} of {peak:g}; {share['because']}")


def find_gpu(name: str) -> Gpu | None:
    """Return the GPU that reports itself as `name`; None when it is not in the table.

    A slice of a GPU (MIG) or a variant with other clocks (Ti, D, Laptop, NVL) has another name and is not matched.
    """
    return next((gpu for gpu in table() if re.fullmatch(gpu.reported, name.strip())), None)


GPU_RATES = ("matmul_tflops", "attention_tflops", "memory_gbs", "launch_us")  # keys of hardware.gpu_rates
# of a parameter: fp32 parameter, two moments and gradient read, the first three written (csrc/adam/cpu_adam_impl.cpp)
ADAM_BYTES = 28


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of a machine that step times are computed from. None: unknown. GB is 1e9 bytes; GPU rates are for bf16.

    All but the GPU rates have the names that they have in HardwareConfig.
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
    values = {item.name: getattr(cfg, item.name) for item in fields(Machine) if item.name not in GPU_RATES}
    sources = dict(cfg.sources)
    for name in GPU_RATES:
        rate = getattr(gpu, name) if gpu else None
        if name in cfg.gpu_rates:
            values[name] = cfg.gpu_rates[name]
            sources.setdefault(name, "hardware.gpu_rates")
        elif rate is not None:
            values[name] = rate.value
            sources[name] = f"measured: {rate.source}" if rate.measured else rate.source
    if cfg.cpu_adam_gparams_s is None and cfg.dram_gbs is not None:
        values["cpu_adam_gparams_s"] = cfg.dram_gbs / ADAM_BYTES
        sources["cpu_adam_gparams_s"] = (
            f"derived: {ADAM_BYTES} bytes per parameter at dram_gbs; cores and NUMA may make it slower"
        )
    values |= {"gpus_per_node": cfg.gpus_per_node or 1, "sources": sources}
    return Machine(**values)


def outside_torch_bytes(ranks: int) -> int:
    """Return the bytes that `ranks` ranks take on each GPU outside torch's allocator: CUDA's context and NCCL."""
    if ranks < 2:
        return CONTEXT_BYTES  # one rank has no communicator
    installed = numbers(nccl_version())
    known = max((since for since in NCCL_BYTES if numbers(since) <= installed), key=numbers)
    return CONTEXT_BYTES + NCCL_BYTES[known][ranks > 2]


@functools.cache  # each answer is read from files
def nccl_version() -> str:
    """Return the installed version of NCCL; the newest in NCCL_BYTES when none is installed."""
    for name in NCCL_PACKAGES:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return max(NCCL_BYTES, key=numbers)
