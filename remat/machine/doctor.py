"""Check this machine: versions, cores, memory, disk, and each compiled op built and run once."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from remat.config.units import GIB
from remat.machine import node, ops, versions
from remat.machine.host_memory import host_memory
from remat.machine.start_up import available_cores

LEFT_IN_SHM = "deepspeed_allreduce_buffer_*"  # left by runs without `distributed.init`, or killed ones
SCARCE_SHM_BYTES = GIB


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
    """Return all findings on this machine. Builds the named ops where they are not built, and runs each once."""
    libraries = [Finding(*line) for line in versions.found()]
    machine = [_gpu(), *_cuda(), _cores(), _memory(), _shared_memory(), _locked_memory(), _disk()]
    return [*libraries, *machine, *_ops(op_names, say)]


def available_ops() -> list[str]:
    """Return the ops that most runs may need and that can be built here: async_io only where libaio's headers are."""
    import deepspeed.ops

    usual = (name for name in ops.BUILDERS if name not in ops.RARE)
    return [name for name in usual if deepspeed.ops.__compatible_ops__.get(name)]


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding("GPU", "none: ranks run on the CPU (gloo)")
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    return Finding(
        "GPU", f"{torch.cuda.device_count()} x {', '.join(sorted(names))}, CUDA {torch.version.cuda}"
    )


def _cuda() -> list[Finding]:
    """Return findings on the driver and the toolkit that compiles ops; none on a machine without a GPU."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return []
    from torch.utils.cpp_extension import CUDA_HOME

    driver = Path("/proc/driver/nvidia/version")
    version = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", driver.read_text()) if driver.exists() else None
    return [
        Finding("driver", version.group(1) if version else "unknown"),
        toolkit(CUDA_HOME, torch.version.cuda),
    ]


def toolkit(home: str | None, built_with: str) -> Finding:
    """Check that the CUDA toolkit in `home` has torch's major CUDA version: DeepSpeed builds with no other."""
    wanted = f"install the CUDA {built_with} toolkit and set CUDA_HOME: DeepSpeed compiles its ops with it"
    if home is None:
        return Finding("CUDA toolkit", "none", wanted)
    about = Path(home, "version.json")
    if not about.exists():
        return Finding("CUDA toolkit", f"{home}, of unknown version")
    version = str(json.loads(about.read_text())["cuda"]["version"])
    same = version.split(".")[0] == built_with.split(".")[0]
    return Finding("CUDA toolkit", f"{version} in {home}", "" if same else wanted)


def cores_of(ranks: int) -> Finding:
    """Check that there is a core for each of `ranks`, and say how to bind them.

    CPU Adam computes on the rank's own cores. Bound threads do not move between sockets.
    """
    cores = available_cores()
    bound = "bind them with deepspeed --bind_cores_to_rank"
    if shutil.which("numactl") is None:
        bound += ", which needs numactl"
    remedy = f"{ranks} ranks on {cores} cores wait for each other: start fewer, or give the job more cores"
    return Finding("cores per rank", f"{cores / ranks:.3g}; {bound}", remedy if cores < ranks else "")


def _cores() -> Finding:
    return Finding("cores", f"{available_cores()} usable of {os.cpu_count()}")


def _memory() -> Finding:
    host = host_memory()
    limited = host.limit_bytes < host.total_bytes
    limit = f", control-group limit {host.limit_bytes / GIB:.1f} GiB" if limited else ""
    return Finding(
        "host memory", f"{host.available_bytes / GIB:.1f} of {host.total_bytes / GIB:.1f} GiB free{limit}"
    )


def _shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Report files of earlier runs in /dev/shm. They are a problem only when little is free."""
    if not folder.exists():
        return Finding("/dev/shm", "absent", "mount a tmpfs at /dev/shm: data workers and NCCL need it")
    left = [path for path in folder.glob(LEFT_IN_SHM) if path.stat().st_uid == os.getuid()]
    free = shutil.disk_usage(folder).free
    found = f"{free / GIB:.1f} GiB free"
    if left:
        held = sum(path.stat().st_size for path in left) / GIB
        found += f"; {len(left)} files of earlier runs hold {held:.1f} GiB (rm {folder}/{LEFT_IN_SHM})"
    scarce = left and free < SCARCE_SHM_BYTES
    return Finding("/dev/shm", found, f"rm {folder}/{LEFT_IN_SHM}" if scarce else "")


def _locked_memory() -> Finding:
    soft = node.memlock_bytes(Path("/"))
    return Finding("locked memory", "unlimited" if soft is None else f"{soft / GIB:.2f} GiB")


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
