"""Can this machine hold the run? Asked before any weight is read, answered with needed against found.

A lower bound: model states and saved files only. Activations, gathered weights, kernel workspaces and the page cache
come on top, so a run that does not pass here cannot run; one that passes may still not fit.
"""

from __future__ import annotations

import resource
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remat import ds_config, ds_keys
from remat.config import ModelConfig, ModelInit, RunConfig, SaveConfig
from remat.memory import GIB, host_memory
from remat.planning.states import MASTER, MOMENTS, Item

CAP_IPC_LOCK = 14  # linux/capability.h: a process with it locks memory without limit
LOWER_BOUND = (
    "This is a lower bound: model states and saved files. Activations, gathered weights and workspaces come on "
    "top of it."
)


class DoesNotFit(Exception):
    """The machine lacks something the run needs. The text is a table of needed and found, and a remedy for each."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What this node has. Bytes; `gpu_bytes` is the smallest visible GPU's, None without one.

    `host_available_bytes` is what can still be allocated under the control-group limit, `host_limit_bytes` that
    limit or the physical memory. `memlock_bytes` is None when locking is unlimited. Disks are named by the folder
    that was asked for and carry the id of their filesystem.
    """

    local_size: int
    host_available_bytes: int
    host_limit_bytes: int
    host_total_bytes: int
    gpu_count: int
    gpu_bytes: int | None
    memlock_bytes: int | None
    output: Disk
    nvme: Disk | None
    download: Disk


@dataclass(frozen=True)
class Disk:
    folder: str
    free_bytes: int
    filesystem: int


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the run allocates at least. Host, pinned and NVMe bytes are per node, GPU and locked bytes per rank.

    `rounding_bytes` is the part of the host bytes that pinning the optimizer's buffers adds by rounding.
    """

    ranks_per_node: int
    host_bytes: int
    rounding_bytes: int
    gpu_bytes: int
    mlocked_bytes: int
    nvme_bytes: int
    saved_bytes: int
    export_bytes: int
    download_bytes: int
    gpu_remedy: str


@dataclass(frozen=True)
class Row:
    """One line of the table: a resource, what is needed and found of it, and what to do when it is too little."""

    name: str
    needed_bytes: int
    found_bytes: int
    remedy: str

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.found_bytes


def run(
    items: Sequence[Item],
    num_params: int,
    cfg: RunConfig,
    *,
    ds: Mapping[str, Any],
    local_size: int,
    num_trainable_params: int | None = None,
) -> list[Row]:
    """Compare this node with what the run needs; `ds` is the rendered DeepSpeed dict. Returns the table's rows.

    `num_trainable_params` None: all are trained. Only those are saved and exported.

    Raises DoesNotFit when something is too small.
    """
    needs = required(
        items,
        num_params=num_params if num_trainable_params is None else num_trainable_params,
        ds=ds,
        ranks_per_node=local_size,
        save=cfg.save,
        steps=cfg.train.steps,
        download_bytes=download_bytes(cfg.model, num_params, cache=_hub_cache()),
    )
    nvme = cfg.hardware.nvme_path if needs.nvme_bytes else None
    machine = found(local_size=local_size, output_dir=cfg.output_dir, nvme_path=nvme, cache=_hub_cache())
    enforce(needs, machine)
    return rows(needs, machine)


def found(
    *, local_size: int, output_dir: str, nvme_path: str | None, cache: Path, root: Path = Path("/")
) -> Machine:
    """Look at this node. `cache` is where weights would be downloaded to; `root` is / but in tests."""
    import torch

    host = host_memory(root)
    gpus = [torch.cuda.get_device_properties(n).total_memory for n in range(torch.cuda.device_count())]
    return Machine(
        local_size=local_size,
        host_available_bytes=host.available_bytes,
        host_limit_bytes=host.limit_bytes,
        host_total_bytes=host.total_bytes,
        gpu_count=len(gpus),
        gpu_bytes=min(gpus) if gpus else None,
        memlock_bytes=_memlock_bytes(root),
        output=disk(output_dir),
        nvme=disk(nvme_path) if nvme_path else None,
        download=disk(str(cache)),
    )


def required(
    items: Sequence[Item],
    *,
    num_params: int,
    ds: Mapping[str, Any],
    ranks_per_node: int,
    save: SaveConfig,
    steps: int,
    download_bytes: int = 0,
) -> Needs:
    """What a run with these model states needs of one node, and of the disk that all nodes share.

    `num_params` are those that are saved and exported: the trained ones.
    """
    width = ds_keys.BYTES["bf16" if ds["bf16"]["enabled"] or ds["fp16"]["enabled"] else "fp32"]
    per_node = {
        place: sum(i.bytes_per_node for i in items if i.place == place) for place in ("host", "pinned", "nvme")
    }
    rounding = sum(
        item.bytes_per_rank - item.raw_bytes_per_rank
        for item in items
        if item.place == "pinned" and not item.name.startswith("parameters")
    )
    return Needs(
        ranks_per_node=ranks_per_node,
        host_bytes=per_node["host"] + per_node["pinned"],
        rounding_bytes=rounding * ranks_per_node,
        gpu_bytes=sum(i.bytes_per_rank for i in items if i.place == "gpu"),
        mlocked_bytes=sum(i.bytes_per_rank for i in items if i.mlocked),
        nvme_bytes=per_node["nvme"],
        saved_bytes=states_on_disk(save, steps) * saved_state_bytes(num_params, ds),
        export_bytes=width * num_params if save.export else 0,
        download_bytes=download_bytes,
        gpu_remedy=_gpu_remedy(ds),
    )


def saved_state_bytes(num_params: int, ds: Mapping[str, Any]) -> int:
    """One saved state of all ranks: master and moments, and below stage 3 the module once more.

    Measured with deepspeed 0.19.8: 12.0 bytes per parameter at stage 3, 14.0 below it in bf16, 16.0 in fp32; plain
    fp32 without ZeRO has no separate master, so 12.0.
    """
    stage = ds_config.zero_stage(ds)
    half = ds["bf16"]["enabled"] or ds["fp16"]["enabled"]
    module = 0 if stage == 3 else 2 if half else 4
    master = 0 if stage == 0 and not half else MASTER
    return num_params * (module + master + MOMENTS)


def states_on_disk(save: SaveConfig, steps: int) -> int:
    """How many saved states exist at once at most: the kept ones, and the next, which is complete before one goes."""
    regular = steps // save.every if save.every else 0
    last = 1 if save.at_end and not (save.every and steps % save.every == 0) else 0
    return min(regular + last, save.keep + 1)


def download_bytes(model: ModelConfig, num_params: int, *, cache: Path) -> int:
    """What fetching the weights takes in the hub's cache, at 2 bytes per parameter; 0 when nothing is fetched."""
    if model.init is not ModelInit.pretrained or not model.path or Path(model.path).expanduser().exists():
        return 0
    snapshots = cache / f"models--{model.path.replace('/', '--')}" / "snapshots"
    if any(snapshots.glob("*/*.safetensors")) or any(snapshots.glob("*/*.bin")):
        return 0
    return 2 * num_params


def check(needs: Needs, machine: Machine) -> list[str]:
    """What is too small; each line names the resource, needed and found, and the remedy."""
    lines = [
        f"{row.name}: needed {_gib(row.needed_bytes)} GiB, found {_gib(row.found_bytes)} GiB; {row.remedy}"
        for row in rows(needs, machine)
        if not row.fits
    ]
    if 0 < machine.gpu_count < machine.local_size:
        lines.append(
            f"GPUs on this node: needed {machine.local_size} (one per rank), found {machine.gpu_count}; start "
            f"deepspeed with --num_gpus {machine.gpu_count} or look at CUDA_VISIBLE_DEVICES"
        )
    return lines


def enforce(needs: Needs, machine: Machine) -> None:
    """Raise DoesNotFit, with the whole table, when anything is too small."""
    lines = check(needs, machine)
    if lines:
        text = "\n".join(f"- {line}" for line in lines)
        raise DoesNotFit(
            f"this machine cannot hold the run\n\n{table(rows(needs, machine))}\n\n{text}\n\n{LOWER_BOUND} "
            "Start anyway with force=true."
        )


def rows(needs: Needs, machine: Machine) -> list[Row]:
    """Needed against found for each resource the run uses. Without a GPU its bytes are host bytes."""
    host, ranks = needs.host_bytes, needs.ranks_per_node
    if machine.gpu_bytes is None:
        host += needs.gpu_bytes * ranks
    lines = [Row(f"host memory of this node ({ranks} ranks)", host, *_host_found(needs, machine))]
    if machine.gpu_bytes is not None:
        lines.append(Row("GPU memory of each rank", needs.gpu_bytes, machine.gpu_bytes, needs.gpu_remedy))
    if needs.mlocked_bytes and machine.memlock_bytes is not None:
        kib = -(-needs.mlocked_bytes // 1024)
        remedy = (
            f"raise it with ulimit -l {kib} (limits.conf: memlock), or lower sub_group_size and buffer_size"
        )
        lines.append(
            Row("locked memory of each rank (ulimit -l)", needs.mlocked_bytes, machine.memlock_bytes, remedy)
        )
    return [*lines, *_disk_rows(needs, machine)]


def table(lines: Sequence[Row]) -> str:
    """The rows in aligned columns, GiB."""
    width = max(len(row.name) for row in lines)
    head = f"{'GiB':<{width}}  {'needed':>10}  {'found':>10}"
    body = [
        f"{row.name:<{width}}  {_gib(row.needed_bytes):>10}  {_gib(row.found_bytes):>10}"
        f"{'' if row.fits else '  too small'}"
        for row in lines
    ]
    return "\n".join([head, *body])


def disk(folder: str) -> Disk:
    """Free bytes where `folder` is, or will be made: at its nearest parent that exists."""
    path = Path(folder).expanduser().absolute()
    while not path.exists():
        path = path.parent
    return Disk(folder, shutil.disk_usage(path).free, path.stat().st_dev)


def _host_found(needs: Needs, machine: Machine) -> tuple[int, str]:
    remedy = "use more nodes, or deepspeed.config=zero3_nvme with hardware.nvme_path=FOLDER"
    if machine.host_limit_bytes < machine.host_total_bytes:
        remedy = f"a control group allows {_gib(machine.host_limit_bytes)} GiB in all: raise it, {remedy}"
    if needs.rounding_bytes >= 0.01 * needs.host_bytes > 0:
        remedy += (
            ", or deepspeed.overrides.zero_optimization.offload_optimizer.pin_memory=false, which saves "
            f"{_gib(needs.rounding_bytes)} GiB of rounding and costs speed"
        )
    return machine.host_available_bytes, remedy


def _disk_rows(needs: Needs, machine: Machine) -> list[Row]:
    """One row per filesystem that the run writes to."""
    writes: list[tuple[Disk, int, str, str]] = [
        (
            machine.output,
            needs.saved_bytes + needs.export_bytes,
            "output_dir",
            "free some, choose another output_dir, lower save.keep or set save.export=false",
        ),
        (machine.download, needs.download_bytes, "hub cache", "free some, or set HF_HOME to a larger disk"),
    ]
    if machine.nvme is not None:
        remedy = "free some, or choose another hardware.nvme_path"
        writes.append((machine.nvme, needs.nvme_bytes, "hardware.nvme_path", remedy))
    lines = []
    for filesystem in dict.fromkeys(place.filesystem for place, size, _, _ in writes if size):
        mine = [write for write in writes if write[0].filesystem == filesystem and write[1]]
        name = ", ".join(f"{option} {place.folder}" for place, _, option, _ in mine)
        remedy = "; ".join(dict.fromkeys(text for _, _, _, text in mine))
        lines.append(Row(f"disk: {name}", sum(size for _, size, _, _ in mine), mine[0][0].free_bytes, remedy))
    return lines


def _gpu_remedy(ds: Mapping[str, Any]) -> str:
    """The next strategy that keeps less on the GPU."""
    stage, optimizer = ds_config.zero_stage(ds), ds_config.optimizer_offload_device(ds)
    if ds_config.param_offload_device(ds):
        return "a smaller deepspeed.overrides.zero_optimization.reduce_bucket_size, or a GPU with more memory"
    if stage < 2 and optimizer is None:
        return "choose deepspeed.config=zero2, or zero3 to shard the parameters too"
    if stage < 3:
        return "choose deepspeed.config=zero3, or zero3_offload_optimizer"
    following = "zero3_offload_optimizer" if optimizer is None else "zero3_offload"
    return f"choose deepspeed.config={following}, or use more GPUs"


def _memlock_bytes(root: Path) -> int | None:
    """The limit on memory that a process locks itself; None when there is none or the process may ignore it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return None
    status = root / "proc/self/status"
    effective = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("CapEff:")]
    return None if effective and int(effective[0], 16) >> CAP_IPC_LOCK & 1 else soft


def _hub_cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f}" if size >= 10 * GIB else f"{size / GIB:.2f}"
