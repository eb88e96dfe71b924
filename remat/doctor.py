"""Is this machine able: versions, cores, memory, disk, and each compiled op built and run once."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from remat import ops
from remat.cores import available_cores
from remat.memory import host_memory

FLOORS = {
    "torch": "2.13",
    "deepspeed": "0.19.8",
    "transformers": "5.23",
    "hydra-core": "1.3.2",
    "wandb": "0.31",
}
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the report; `remedy` is empty when all is well."""

    what: str
    found: str
    remedy: str = ""

    @property
    def ok(self) -> bool:
        return not self.remedy


def examine(op_names: Sequence[str], say: Callable[[str], None]) -> list[Finding]:
    """Everything about this machine; builds the named ops if they are not built, and runs each."""
    machine = [_gpu(), _cores(), _memory(), _shared_memory(), _locked_memory(), _disk()]
    return [*_versions(), *machine, *_ops(op_names, say)]


def available_ops() -> list[str]:
    """Ops that can be built here: async_io only where libaio's headers are."""
    import deepspeed.ops

    return [name for name in ops.BUILDERS if deepspeed.ops.__compatible_ops__.get(name)]


def _versions() -> list[Finding]:
    found = []
    for name, floor in FLOORS.items():
        version = importlib.metadata.version(name)
        old = _numbers(version) < _numbers(floor)
        found.append(
            Finding(name, version, f"needs {floor} or newer: pip install -r requirements.lock" if old else "")
        )
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".") if part.isdigit())


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("GPU", "none: ranks run on the CPU (gloo)")
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    return Finding(
        "GPU", f"{torch.cuda.device_count()} x {', '.join(sorted(names))}, CUDA {torch.version.cuda}"
    )


def _cores() -> Finding:
    return Finding("cores", f"{available_cores()} usable of {os.cpu_count()}")


def _memory() -> Finding:
    host = host_memory()
    limited = host.limit_bytes < host.total_bytes
    limit = f", control-group limit {host.limit_bytes / GIB:.1f} GiB" if limited else ""
    return Finding(
        "host memory", f"{host.available_bytes / GIB:.1f} of {host.total_bytes / GIB:.1f} GiB free{limit}"
    )


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.exists():
        return Finding("/dev/shm", "absent", "mount a tmpfs at /dev/shm: data workers and NCCL need it")
    left = sorted(p.name for p in folder.glob("deepspeed_allreduce_buffer_*") if p.stat().st_uid == os.getuid())
    free = shutil.disk_usage(folder).free / GIB
    remedy = (
        f"{len(left)} files of earlier runs hold memory: rm /dev/shm/deepspeed_allreduce_buffer_*"
        if left
        else ""
    )
    return Finding("/dev/shm", f"{free:.1f} GiB free", remedy)


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Finding("locked memory", "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / GIB:.2f} GiB")


def _disk() -> Finding:
    return Finding("disk here", f"{shutil.disk_usage(Path.cwd()).free / GIB:.1f} GiB free")


def _ops(names: Sequence[str], say: Callable[[str], None]) -> list[Finding]:
    found = []
    for name in names:
        try:
            seconds = ops.ensure(name, say)
            with tempfile.TemporaryDirectory() as folder:
                found.append(
                    Finding(f"op {name}", f"loaded in {seconds:.1f} s; {ops.try_op(name, Path(folder))}")
                )
        except ops.OpError as error:
            found.append(Finding(f"op {name}", "does not build", str(error)))
    return found
