"""Check whether this machine can hold the run, before any weight is read: resources needed against found.

This module checks disks, locked memory, the number of GPUs, and a lower bound of memory from the model states
alone. Where the run has a plan, `remat.planning.launch_plan` replaces that bound with the plan's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remat.config import ds_config, ds_defaults, paths
from remat.config.options import ModelConfig, ModelInit, RunConfig, SaveConfig
from remat.config.units import GIB, MIB
from remat.machine.gpus import outside_torch_bytes
from remat.machine.node import Disk, Machine
from remat.planning.model_states import WEIGHTS, Item
from remat.saving import disk_space

REHEARSED_FROM = 1e9  # parameters: a failed save of so large a model would be found late and cost hours
SHM_PER_RANK = 32 * MIB  # a rule of thumb, not measured
LOWER_BOUND = (
    "This is a lower bound: model states and saved files. Activations, gathered weights and workspaces come on "
    "top of it."
)


class DoesNotFit(Exception):
    """Error: the machine lacks something the run needs. Its text is a table of needed and found, with remedies."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The least that a run allocates. Host, pinned and NVMe bytes are per node, GPU and locked bytes per rank.

    `rounding_bytes` is the part of the host bytes that comes from rounding the optimizer's pinned buffers.
    """

    ranks_per_node: int
    host_bytes: int
    rounding_bytes: int
    gpu_bytes: int
    mlocked_bytes: int
    nvme_bytes: int
    saved_bytes: int
    export_bytes: int
    rehearsal_bytes: int  # one trial saved state and export, deleted before the first real one
    download_bytes: int
    reading_bytes: int  # host memory while weights are read, before the model states exist
    flat_bytes: int  # of a rank's buffer into which ZeRO-1 and 2 copy trained weights
    gpu_weights_bytes: int  # the part of the GPU bytes that is allocated before that copy
    gpu_remedy: str


def reads_onto_device(cfg: RunConfig, device_type: str) -> bool:
    """Return whether, below ZeRO-3, pretrained weights go from their files straight onto the GPU.

    With tensor parallelism layers are cut on the host, and with stages layers are taken out of the whole model.
    """
    whole = cfg.train.tensor_parallel_size == cfg.train.pipeline_parallel_size == 1
    return device_type == "cuda" and whole


def reading_bytes(cfg: RunConfig, num_params: int, width: int, *, zero_stage: int, ranks_per_node: int) -> int:
    """Return the host memory of a node while the weights are read.

    Below ZeRO-3 each rank that shares layers, or has a stage, reads the whole model. Otherwise nothing is added: a rank
    with a GPU moves one weight after another to it, and a rank on a CPU keeps what it reads. `num_params` counts the
    whole model, `width` is bytes per parameter.
    """
    divided = max(cfg.train.tensor_parallel_size, cfg.train.pipeline_parallel_size) > 1
    whole = zero_stage < 3 and divided and cfg.model.init is ModelInit.pretrained
    return ranks_per_node * num_params * width if whole else 0


def flattens_on_gpu(*, flat_bytes: int, weights_bytes: int, gpu_bytes: int, world_size: int) -> bool:
    """Return whether a GPU has room for ZeRO-1 and 2's flat buffer beside the weights that are copied into it.

    Otherwise each rank makes the copy on the host, and holds both there for a while (deepspeed 0.19.8,
    runtime/zero/stage_1_and_2.py:452-518).
    """
    return gpu_bytes - outside_torch_bytes(world_size) - weights_bytes >= flat_bytes


@dataclass(frozen=True)
class Row:
    """A line of the table: a resource, the bytes needed and found of it, and the remedy if they are too few."""

    name: str
    needed_bytes: int
    found_bytes: int
    remedy: str

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.found_bytes


def too_few_gpus(*, needed: int, found: int) -> str | None:
    """Return the error when a node has GPUs but fewer than ranks; else None."""
    if not 0 < found < needed:
        return None
    return (
        f"GPUs on this node: needed {needed} (one per rank), found {found}; start deepspeed with "
        f"--num_gpus {found} or look at CUDA_VISIBLE_DEVICES"
    )


def count_needs(
    items: Sequence[Item],
    *,
    num_params: int,
    ds: Mapping[str, Any],
    ranks_per_node: int,
    save: SaveConfig,
    steps: int | None,
    rehearse: bool = False,
    num_merged_params: int = 0,
    download_bytes: int = 0,
    reading_bytes: int = 0,
    flat_bytes: int = 0,
    moments_bytes: int | None = None,
) -> Needs:
    """Return what a run with these model states needs of one node, and of the disk that all nodes share.

    `num_params` counts the parameters that are saved and exported: the trained ones. `num_merged_params` counts those
    of a model that adapters are merged into. `moments_bytes` is as in `saved_state_bytes`.
    """
    saved_bytes = saved_state_bytes(num_params, ds, moments_bytes)
    width = ds_defaults.BYTES["bf16" if ds["bf16"]["enabled"] or ds["fp16"]["enabled"] else "fp32"]
    per_node = {
        place: sum(i.bytes_per_node for i in items if i.place == place) for place in ("host", "pinned", "nvme")
    }
    rounding = sum(
        item.bytes_per_rank - item.raw_bytes_per_rank
        for item in items
        if item.place == "pinned" and not item.name.startswith("parameters")
    )
    # save.best counts twice: a better model lies beside the one it replaces
    return Needs(
        ranks_per_node=ranks_per_node,
        host_bytes=per_node["host"] + per_node["pinned"],
        rounding_bytes=rounding * ranks_per_node,
        gpu_bytes=sum(i.bytes_per_rank for i in items if i.place == "gpu"),
        mlocked_bytes=sum(i.bytes_per_rank for i in items if i.mlocked),
        nvme_bytes=per_node["nvme"],
        saved_bytes=states_on_disk(save, steps) * saved_bytes,
        export_bytes=width * (num_params * (save.export + 2 * save.best) + num_merged_params),
        rehearsal_bytes=saved_bytes + width * num_params if rehearse else 0,
        download_bytes=download_bytes,
        reading_bytes=reading_bytes,
        flat_bytes=flat_bytes,
        gpu_weights_bytes=sum(i.bytes_per_rank for i in items if i.place == "gpu" and i.name in WEIGHTS),
        gpu_remedy=_gpu_remedy(ds),
    )


def saved_state_bytes(num_params: int, ds: Mapping[str, Any], moments_bytes: int | None = None) -> int:
    """Return the size of one saved state of all ranks: master and moments, and below stage 3 the module once more.

    `moments_bytes` are those of all ranks; None: AdamW's.
    """
    half = ds["bf16"]["enabled"] or ds["fp16"]["enabled"]
    states = ds_config.optimizer_states(ds)
    each = disk_space.bytes_per_parameter(zero_stage=ds_config.zero_stage(ds), half=half, states=states)
    if moments_bytes is None:
        return num_params * each
    return num_params * (each - disk_space.MOMENTS[states]) + moments_bytes


def rehearses(save: SaveConfig, num_params: int) -> bool:
    """Return whether the run tries its save and export after the first step. `num_params` counts the whole model."""
    if save.rehearse is not None:
        return save.rehearse
    keeps = save.every > 0 or save.at_end or save.export or save.best
    return keeps and num_params > REHEARSED_FROM


def states_on_disk(save: SaveConfig, steps: int | None) -> int:
    """Return how many saved states exist at once at most. `steps` None: not known before the data is read.

    These are the kept states and the next one, which is complete before a kept one is deleted.
    """
    if steps is None:
        return save.keep + 1 if save.every else int(save.at_end)
    regular = steps // save.every if save.every else 0
    last = 1 if save.at_end and not (save.every and steps % save.every == 0) else 0
    return min(regular + last, save.keep + 1)


def download_bytes(model: ModelConfig, num_params: int, *, cache: Path) -> int:
    """Return the bytes that fetching the weights takes in the hub's cache: 2 per parameter, 0 if nothing is fetched."""
    if model.init is not ModelInit.pretrained or not model.path or paths.expand(model.path).exists():
        return 0
    snapshots = cache / f"models--{model.path.replace('/', '--')}" / "snapshots"
    if any(snapshots.glob("*/*.safetensors")) or any(snapshots.glob("*/*.bin")):
        return 0
    return 2 * num_params


def compare(needs: Needs, machine: Machine, memory: Sequence[Row] = ()) -> list[Row]:
    """Return a row of needed and found bytes for each resource that the run uses.

    `memory` are the rows of a plan. Without them the rows of memory count the model states alone.
    """
    lines = list(memory) or lower_bound(needs, machine)
    if needs.reading_bytes:
        remedy = (
            "start fewer ranks on each node, or read onto the GPU with train.tensor_parallel_size=1 and "
            "train.pipeline_parallel_size=1"
        )
        name = f"host memory of this node while {needs.ranks_per_node} ranks read the whole model"
        lines.append(Row(name, needs.reading_bytes, machine.host_available_bytes, remedy))
    if needs.flat_bytes and machine.gpu_bytes is not None:
        lines += _flat_rows(needs, machine, machine.gpu_bytes)
    if needs.mlocked_bytes and machine.memlock_bytes is not None:
        kib = -(-needs.mlocked_bytes // 1024)
        remedy = (
            f"raise it with ulimit -l {kib} (limits.conf: memlock), or lower sub_group_size and buffer_size"
        )
        lines.append(
            Row("locked memory of each rank (ulimit -l)", needs.mlocked_bytes, machine.memlock_bytes, remedy)
        )
    return [*lines, *_shared_memory_rows(needs, machine), *_disk_rows(needs, machine)]


def _flat_rows(needs: Needs, machine: Machine, gpu_bytes: int) -> list[Row]:
    """Return the row of host memory for ZeRO-1 and 2's flat buffers, if the GPU has no room for its own."""
    ranks = needs.ranks_per_node
    flat, weights = needs.flat_bytes, needs.gpu_weights_bytes
    if flattens_on_gpu(flat_bytes=flat, weights_bytes=weights, gpu_bytes=gpu_bytes, world_size=ranks):
        return []
    name = f"host memory of this node while {ranks} ranks copy the weights into a flat buffer"
    remedy = "deepspeed.config=zero3 needs no such buffer; or start fewer ranks on each node"
    return [Row(name, 2 * flat * ranks, machine.host_available_bytes, remedy)]


def lower_bound(needs: Needs, machine: Machine) -> list[Row]:
    """Return the rows of memory for the model states. Without a GPU the GPU bytes count as host bytes."""
    host, ranks = needs.host_bytes, needs.ranks_per_node
    if machine.gpu_bytes is None:
        host += needs.gpu_bytes * ranks
    lines = [host_row(needs, machine, host, machine.host_available_bytes)]
    if machine.gpu_bytes is not None:
        lines.append(gpu_row(needs, machine, needs.gpu_bytes))
    return lines


def host_row(needs: Needs, machine: Machine, needed_bytes: int, found_bytes: int) -> Row:
    name = f"host memory of this node ({needs.ranks_per_node} ranks)"
    return Row(name, needed_bytes, found_bytes, _host_remedy(needs, machine))


def gpu_row(needs: Needs, machine: Machine, needed_bytes: int) -> Row:
    assert machine.gpu_bytes is not None
    return Row("GPU memory of each rank", needed_bytes, machine.gpu_bytes, needs.gpu_remedy)


def problems(lines: Sequence[Row]) -> list[str]:
    """Return one line for each resource that is too small: its name, needed and found, and the remedy."""
    return [
        f"{row.name}: needed {_gib(row.needed_bytes)} GiB, found {_gib(row.found_bytes)} GiB; {row.remedy}"
        for row in lines
        if not row.fits
    ]


def describe_lack(lines: Sequence[Row]) -> str | None:
    """Return the whole table and every problem when anything is too small; else None."""
    found = problems(lines)
    if not found:
        return None
    text = "\n".join(f"- {line}" for line in found)
    return f"this machine cannot hold the run\n\n{draw_table(lines)}\n\n{text}"


def draw_table(lines: Sequence[Row]) -> str:
    """Return the rows in aligned columns, in GiB."""
    width = max(len(row.name) for row in lines)
    head = f"{'GiB':<{width}}  {'needed':>10}  {'found':>10}"
    body = [
        f"{row.name:<{width}}  {_gib(row.needed_bytes):>10}  {_gib(row.found_bytes):>10}"
        f"{'' if row.fits else '  too small'}"
        for row in lines
    ]
    return "\n".join([head, *body])


def _host_remedy(needs: Needs, machine: Machine) -> str:
    remedy = "use more nodes, or deepspeed.config=zero3_nvme with hardware.nvme_path=FOLDER"
    if machine.host_limit_bytes < machine.host_total_bytes:
        remedy = f"a control group allows {_gib(machine.host_limit_bytes)} GiB in all: raise it, {remedy}"
    if needs.rounding_bytes >= 0.01 * needs.host_bytes > 0:
        remedy += (
            f", or save {_gib(needs.rounding_bytes)} GiB of rounding: allocator.exact_pinned=true with torch 2.13 or "
            "newer and without a PYTORCH_ALLOC_CONF of your own, or "
            "deepspeed.overrides.zero_optimization.offload_optimizer.pin_memory=false, which costs speed"
        )
    return remedy


def _shared_memory_rows(needs: Needs, machine: Machine) -> list[Row]:
    """Return the row of NCCL's segments between the GPUs of a node: 10 MB each, several per rank.

    CPU ranks use none (gloo).
    """
    if machine.gpu_bytes is None or machine.shm_bytes is None or needs.ranks_per_node < 2:
        return []
    remedy = (
        "start the container with --shm-size=1g or --ipc=host, or remove what earlier runs left in /dev/shm"
    )
    return [Row("/dev/shm", SHM_PER_RANK * needs.ranks_per_node, machine.shm_bytes, remedy)]


def _disk_rows(needs: Needs, machine: Machine) -> list[Row]:
    """Return one row per filesystem that the run writes to."""
    writes: list[tuple[Disk, int, str, str]] = [
        (
            machine.output,
            max(needs.saved_bytes + needs.export_bytes, needs.rehearsal_bytes),
            "output_dir",
            "free some, choose another output_dir, lower save.keep or set save.export=false or save.rehearse=false",
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
    """Return advice to use the next strategy that keeps less on the GPU, and no less on the host."""
    stage, optimizer = ds_config.zero_stage(ds), ds_config.optimizer_offload_device(ds)
    if ds_config.param_offload_device(ds):
        return "a smaller deepspeed.overrides.zero_optimization.reduce_bucket_size, or a GPU with more memory"
    if stage < 2 and optimizer is None:
        return "choose deepspeed.config=zero2, or zero3 to shard the parameters too"
    if stage < 3 and optimizer is None:
        return "choose deepspeed.config=zero3, or zero3_offload_optimizer"
    if stage < 3:
        return "choose deepspeed.config=zero3_offload_optimizer, or zero3_offload"
    following = "zero3_offload_optimizer" if optimizer is None else "zero3_offload"
    return f"choose deepspeed.config={following}, or use more GPUs"


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f}" if size >= 10 * GIB else f"{size / GIB:.2f}"
