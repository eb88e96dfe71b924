"""`remat calibrate`: measure this machine in under a minute and write it down as a file for `hardware=`."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from remat.config.options import ConfigError
from remat.config.units import GB, GIB, MIB, format_size
from remat.machine import ops
from remat.machine.gpus import GPU_RATES
from remat.machine.host_memory import host_memory

MATMULS = ((8192, 4096, 4096), (8192, 14336, 4096), (8192, 4096, 14336), (8192, 8192, 8192))
ATTENTION = (1, 32, 4096, 128)  # batch, heads, sequence, head size
NOT_MEASURED = "gpu_link_gbs and nic_gbs need several ranks: not measured; give them by hand where they matter"


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements; `seconds` is how long each GPU measurement repeats."""

    adam_params: int = 50_000_000
    copy_bytes: int = GIB
    file_bytes: int = GIB
    seconds: float = 0.5


@dataclass
class Calibration:
    """Measured figures by their name in HardwareConfig (a GPU's by their key in gpu_rates).

    `how` says how each was measured.
    """

    values: dict[str, float] = field(default_factory=dict)
    how: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def put(self, name: str, value: float, how: str) -> None:
        self.values[name], self.how[name] = float(f"{value:.4g}"), how


def measure(
    *, nvme_path: Path | None = None, sizes: Sizes | None = None, say: Callable[[str], None] = print
) -> Calibration:
    """Measure GPU, DRAM, CPU Adam and disk. Raises ConfigError for a bad `nvme_path`, OpError without a compiler."""
    sizes = sizes or Sizes()
    found = Calibration()
    if nvme_path is not None and not os.access(nvme_path, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--nvme-path {nvme_path} is no folder one can write to: give one on the disk to measure"
        )
    if torch.cuda.is_available():
        say("GPU ...")
        _gpu(found, sizes)
    else:
        found.notes.append("no GPU here: its rates and PCIe are not measured")
    say("host memory ...")
    _dram(found, sizes.copy_bytes)
    say("CPU Adam ...")
    _cpu_adam(found, sizes.adam_params, say)
    if nvme_path is not None:
        say(f"disk of {nvme_path} ...")
        _nvme(found, nvme_path, sizes.file_bytes, say)
    else:
        found.notes.append("no --nvme-path: the disk is not measured")
    found.notes.append(NOT_MEASURED)
    return found


def as_yaml(found: Calibration, name: str, nvme_path: Path | None = None) -> str:
    """Return the text of a file for `conf`'s group hardware: what was measured, when, and with which versions."""
    fields: dict[str, Any] = {"name": name}
    if torch.cuda.is_available():
        fields["gpu"] = torch.cuda.get_device_name()
        fields["gpu_memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / GIB - 0.05, 1)
        fields["gpus_per_node"] = torch.cuda.device_count()
    fields["host_memory_gib"] = round(host_memory().limit_bytes / GIB, 1)
    if nvme_path is not None:
        fields["nvme_path"] = str(nvme_path.resolve())
    fields |= {key: value for key, value in found.values.items() if key not in GPU_RATES}
    rates = {key: value for key, value in found.values.items() if key in GPU_RATES}
    if rates:
        fields["gpu_rates"] = rates
    today = datetime.date.today().isoformat()
    versions = f"torch {torch.__version__}, deepspeed {version('deepspeed')}, {platform.machine()}"
    fields["sources"] = {key: f"measured: {how}, {today}" for key, how in found.how.items()}
    head = f"# {socket.gethostname()}, measured by `remat calibrate` on {today} ({versions}).\n"
    notes = "".join(f"# {note}.\n" for note in found.notes)
    return head + notes + yaml.safe_dump(fields, sort_keys=False, width=1000)


def check_out(out: Path) -> None:
    """Raise ConfigError when `hardware=` could not find the file `out`."""
    if out.parent.name != "hardware" or out.suffix != ".yaml":
        raise ConfigError(
            f"--out {out}: must be named DIR/hardware/NAME.yaml, to be used by --config-dir DIR hardware=NAME"
        )


def write(found: Calibration, out: Path, nvme_path: Path | None = None) -> str:
    """Write `out`, which `check_out` has passed, and return the options that use it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(as_yaml(found, out.stem, nvme_path))
    return f"--config-dir {out.parent.parent} hardware={out.stem}"


def table(found: Calibration) -> list[str]:
    """Return one line per figure, then one per note on what was not measured."""
    width = max(len(name) for name in found.values)
    lines = [f"{name:{width}}  {value:>8g}  {found.how[name]}" for name, value in found.values.items()]
    return [*lines, *(f"note: {note}" for note in found.notes)]


def _dram(found: Calibration, size: int) -> None:
    """Measure DRAM bandwidth with a copy between two buffers far larger than the caches.

    A byte copied counts twice: it is read and written.
    """
    source, target = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    seconds = _best_of(5, lambda: target.copy_(source))
    threads = torch.get_num_threads()
    found.put("dram_gbs", 2 * size / seconds / GB, f"copy of {format_size(size)} with {threads} threads")


def _cpu_adam(found: Calibration, count: int, say: Callable[[str], None]) -> None:
    """Time one step of DeepSpeed's CPU Adam on fp32 parameters, as ZeRO's offloaded optimizer runs it."""
    ops.ensure("cpu_adam", say)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    weight = torch.nn.Parameter(torch.ones(count))
    weight.grad = torch.full((count,), 1e-3)
    optimizer = DeepSpeedCPUAdam([weight], lr=1e-3)
    optimizer.step()  # allocates the moments
    seconds = _best_of(3, optimizer.step)
    threads = torch.get_num_threads()
    found.put(
        "cpu_adam_gparams_s",
        count / seconds / 1e9,
        f"DeepSpeedCPUAdam on {count:,} parameters, {threads} threads",
    )


def _nvme(found: Calibration, folder: Path, size: int, say: Callable[[str], None]) -> None:
    """Time writing and reading a file as DeepSpeed's swapper does: with asynchronous I/O past the page cache."""
    ops.ensure("async_io", say)
    from deepspeed.ops.op_builder import AsyncIOBuilder

    free = shutil.disk_usage(folder).free
    if free < 2 * size:
        raise ConfigError(
            f"--nvme-path {folder} has {format_size(free)} free, {format_size(2 * size)} are needed: free some"
        )
    handle = AsyncIOBuilder().load(verbose=False).aio_handle(MIB, 8, False, True, 1)
    buffer = torch.ones(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    path = folder / f"remat-calibrate-{os.getpid()}.bin"
    how = f"DeepSpeed async_io, one file of {format_size(size)}"
    try:
        seconds = _best_of(2, lambda: handle.sync_pwrite(buffer, str(path)))
        found.put("nvme_write_gbs", size / seconds / GB, how)
        seconds = _best_of(2, lambda: handle.sync_pread(buffer, str(path)))
        found.put("nvme_read_gbs", size / seconds / GB, how)
    finally:
        path.unlink(missing_ok=True)
    found.put("nvme_gib", free / GIB, "free on the day")


def _gpu(found: Calibration, sizes: Sizes) -> None:
    device = torch.device("cuda")
    flops = seconds = 0.0
    for m, n, k in MATMULS:
        left = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        right = torch.randn(k, n, device=device, dtype=torch.bfloat16)
        seconds += _on_gpu(sizes.seconds / 2, lambda a=left, b=right: torch.mm(a, b))  # type: ignore[misc]
        flops += 2.0 * m * n * k
    shapes = ", ".join("x".join(map(str, shape)) for shape in MATMULS)
    found.put("matmul_tflops", flops / seconds / 1e12, f"torch.mm in bf16 over {shapes}")
    found.put(
        "attention_tflops", _attention(device, sizes.seconds), "causal attention, forward and backward, bf16"
    )
    source = torch.ones(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = _on_gpu(sizes.seconds, lambda: target.copy_(source))
    found.put(
        "memory_gbs", 2 * sizes.copy_bytes / seconds / GB, f"copy of {format_size(sizes.copy_bytes)} on the GPU"
    )
    found.put("launch_us", _launch(device, sizes.seconds), "smallest kernel in a CUDA graph of 1000")
    pinned = torch.ones(sizes.copy_bytes // 4, dtype=torch.uint8, pin_memory=True)
    there = target[: pinned.numel()]
    how = f"pinned copy of {format_size(pinned.numel())}, one GPU alone"
    seconds = _on_gpu(sizes.seconds, lambda: there.copy_(pinned, non_blocking=True))
    found.put("pcie_h2d_gbs", pinned.numel() / seconds / GB, how)
    seconds = _on_gpu(sizes.seconds, lambda: pinned.copy_(there, non_blocking=True))
    found.put("pcie_d2h_gbs", pinned.numel() / seconds / GB, how)


def _attention(device: torch.device, duration_s: float) -> float:
    """Return the TFLOP/s of causal attention, forward and backward.

    FLOPs are counted as FlashAttention-2 does: two products forward, five backward, half of the square (causal).
    """
    batch, heads, sequence, size = ATTENTION
    query, key, value = (
        torch.randn(*ATTENTION, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    gradient = torch.randn(*ATTENTION, device=device, dtype=torch.bfloat16)

    def both() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(out, (query, key, value), gradient)

    product = 2.0 * batch * heads * sequence * sequence * size
    return (2 + 5) * product / 2 / _on_gpu(duration_s, both) / 1e12


def _launch(device: torch.device, duration_s: float) -> float:
    """Return the microseconds from kernel to kernel when the host runs ahead.

    A CUDA graph takes the host out of the measurement.
    """
    tiny = torch.zeros(1, device=device)
    tiny.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(1000):
            tiny.add_(1)
    return _on_gpu(duration_s, graph.replay) / 1000 * 1e6


def _on_gpu(duration_s: float, run: Callable[[], Any]) -> float:
    """Return the mean seconds of `run` by the GPU's own clock, over about `duration_s`, after three warm-up runs."""
    for _ in range(3):
        run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def timed(times: int) -> float:
        begin.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000 / times

    once = timed(3)
    return timed(max(3, min(10_000, int(duration_s / once))))


def _best_of(times: int, run: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of `times` runs, after a first run that touches all memory.

    The fastest is taken because other processes can only slow a run down.
    """
    run()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)
