"""Compare planned and measured figures by category for ledger.json, with how each was measured or why it was not.

Every figure was counted in the run's first step or is a mean that is logged anyway, so the ledger costs no time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from remat.config.metrics import (
    GPU_ALLOCATED_PEAK_GIB,
    GPU_RESERVED_PEAK_GIB,
    HOST_PINNED_GIB,
    HOST_RSS_PEAK_GIB,
    STEP_S,
    TOKENS_PER_S,
    phase_s,
)
from remat.config.units import GIB, MIB
from remat.model.hf_model import describe_loaded
from remat.planning.plan import CATEGORY_OF
from remat.planning.simulation.types import Category, Phase
from remat.training import engine_memory
from remat.training.proof import FirstStep
from remat.training.run import Run

OFF_GPU = {  # items of planning/model_states.py that a GPU never holds -> category; items of no category are buckets
    "parameters kept in host memory": Category.weights,
    "parameters on their way back": Category.weights,
    "paged moments": Category.optimizer_state,
    "parameters too small to be swapped": Category.weights,
    "master parameters, moments, gradients": Category.optimizer_state,
}
UNTIL_UPDATE = "gradients of small weights"  # kept in host memory until the update, with NVMe offload
ON_GPU = "GPU, allocated at the peak"
MICRO_BATCH = "peak of a micro-batch, on top of the model states"
KEPT, HOST, STEP = "kept activations, all layers", "host memory", "step time"
MOVED = "activations moved to the host, per micro-batch"
SHORT = {ON_GPU: "GPU peak", MICRO_BATCH: "micro-batch", KEPT: "activations", HOST: "host", STEP: "step"}
AT_MOST, AT_LEAST, ABOUT = "at most", "at least", "about"  # plans are for full micro-batches
TENSORS = "storages of the engine's tensors in the first step, the most of any rank"
WATCHED = "counted op by op in the first micro-batch, on rank 0"
SETTLED = "counted op by op in a micro-batch after three others, when ZeRO-3 has learnt its order; on rank 0"


@dataclass(frozen=True)
class Row:
    """A planned and a measured figure, of one rank unless the category says otherwise.

    None: not planned or not measured; `how` says why.
    """

    category: str
    planned: float | None
    measured: float | None
    unit: str
    how: str
    planned_is: str = ""  # AT_MOST, AT_LEAST or ABOUT where batches are smaller than the planned ones


def compare(run: Run, first: FirstStep, summary: Mapping[str, float]) -> list[Row]:
    """Return every row; `summary` are the run's means by metric name, {} when it failed before its end."""
    found = [
        *_peaks(run, first),
        *_states(run, first),
        *_activations(run, first),
        *_host(run),
        *_loading(run),
        *_times(run, summary),
    ]
    return [_scaled(row) for row in found]


def record(run: Run, first: FirstStep, lines: list[Row], *, finished: bool) -> dict[str, Any]:
    """Return the content of ledger.json. Bytes of activations are also given by layer."""
    planned, watch = run.plan.planned, first.trace
    layers = range(len(run.applied.decisions))
    return {
        "finished": finished,
        "device": run.plan.device,
        "no_plan": run.plan.reason,
        "micro_batch": {
            "planned": [run.cfg.train.micro_batch_size, run.cfg.train.seq_len],
            "watched": list(first.shape),
        },
        "rows": [asdict(line) for line in lines],
        "loaded": [asdict(each) for each in run.loaded],
        "kept_bytes_per_layer": {
            "planned": planned.simulation_of(run.world.stage).kept_bytes if planned else None,
            "measured": [watch.kept_bytes.get(layer, 0) for layer in layers] if watch else None,
        },
    }


def metrics(lines: list[Row]) -> dict[str, float]:
    """Return the rows for W&B, under names like `ledger/weights_gib/planned`."""
    return {
        f"ledger/{_name(line)}/{side}": value
        for line in lines
        for side, value in (("planned", line.planned), ("measured", line.measured))
        if value is not None
    }


def _name(line: Row) -> str:
    """Return the row's category and unit in snake case: `kept_activations_all_layers_mib`."""
    return "_".join(re.findall(r"[a-z0-9]+", f"{line.category} {line.unit}".lower()))


def describe(lines: list[Row]) -> dict[str, str]:
    """Return the rows of the final table: those named in SHORT that have both figures."""
    found = {}
    for line in lines:
        if line.category in SHORT and line.planned and line.measured is not None:
            planned = f"{line.planned_is} {line.planned:,.4g}".lstrip()
            deviation = "" if line.planned_is else f" ({line.measured / line.planned - 1:+.1%})"
            text = f"planned {planned} {line.unit}, measured {line.measured:,.4g}{deviation}"
            found[SHORT[line.category]] = text
    return found


def _peaks(run: Run, first: FirstStep) -> list[Row]:
    planned, watch = run.plan.planned, first.steady_trace
    stated = planned.simulation_of(run.world.stage).peak.total_bytes if planned else None
    found = [
        Row(
            MICRO_BATCH,
            stated,
            watch.peak_bytes if watch else None,
            "bytes",
            _how_steady(run, first),
            _at_most(run, first.steady_shape),
        )
    ]
    if run.world.device.type != "cuda":
        return found
    peak = planned.plan.peak_bytes if planned else None
    overhead = planned.plan.gpu.get(Category.overhead, 0) if planned else None
    allocated = _most(run, GPU_ALLOCATED_PEAK_GIB)
    reserved = _most(run, GPU_RESERVED_PEAK_GIB)
    free, total = torch.cuda.mem_get_info(run.world.device)
    outside = total - free - torch.cuda.memory_reserved(run.world.device)
    beside = None if allocated is None or reserved is None else reserved - allocated + outside
    return [
        Row(
            ON_GPU,
            peak,
            allocated,
            "bytes",
            "torch.cuda.max_memory_allocated, highest rank",
            AT_MOST * run.splits.train.one_each,
        ),
        Row(
            "GPU, reserved at the peak",
            planned.plan.reserved_bytes if planned else None,
            reserved,
            "bytes",
            "torch.cuda.max_memory_reserved; planned by a replay of torch's allocator",
        ),
        Row(
            "GPU, allocator and context",
            overhead,
            beside,
            "bytes",
            "reserved less allocated at the peaks, and what the device has in use outside of torch's allocator at the "
            "end, other programs included; rank 0",
        ),
        *found,
    ]


def _states(run: Run, first: FirstStep) -> list[Row]:
    """Return the rows of the model states by place.

    Ranks on CPUs hold everything in host memory, also what would be on a GPU.
    """
    planned: dict[tuple[str, str], int] = {}
    for item in run.plan.states:
        if item.mlocked or item.name == UNTIL_UPDATE:
            continue  # swap buffers have a row of their own; these gradients are gone when tensors are counted
        category = str((CATEGORY_OF | OFF_GPU).get(item.name, Category.buckets))
        place: str = "host" if item.place == "pinned" else item.place
        if place == "gpu" and run.world.device.type == "cpu":
            place = "host"
        planned[category, place] = planned.get((category, place), 0) + item.bytes_per_rank
    measured = {
        (category, {"cpu": "host", "cuda": "gpu"}.get(device, device)): size
        for category, places in first.memory.items()
        for device, size in places.items()
    }
    labels = {"gpu": "on the GPU", "host": "in host memory", "nvme": "on NVMe"}
    found = []
    for category, place in dict.fromkeys([*planned, *measured]):
        size, how = measured.get((category, place)), TENSORS
        if not first.memory:
            how = "the first step was not reached"
        elif place == "nvme":
            size, how = None, "files of DeepSpeed's own, see NVMe per node"
        elif category == Category.buckets and run.strategy.zero_stage < 3:
            size, how = None, "made and freed within a backward"
        found.append(Row(f"{category} {labels[place]}", planned.get((category, place), 0), size, "bytes", how))
    return found


def _activations(run: Run, first: FirstStep) -> list[Row]:
    planned, watch = run.plan.planned, first.trace
    ahead = planned and planned.simulation_of(run.world.stage)
    found = [
        Row(
            KEPT,
            sum(ahead.kept_bytes) if ahead else None,
            sum(size for layer, size in watch.kept_bytes.items() if layer >= 0) if watch else None,
            "bytes",
            WATCHED,
            _at_most(run, first.shape),
        ),
        Row(
            "recomputed FLOPs, of forward",
            _share(ahead.flops[Phase.recompute], ahead.flops[Phase.forward]) if ahead else None,
            _share(watch.total_flops("recompute"), watch.total_flops("forward")) if watch else None,
            "%",
            WATCHED,
            ABOUT * bool(_at_most(run, first.shape)),
        ),
    ]
    if any(decision.offload for decision in run.applied.decisions):
        how = "counted as tensors left in the first micro-batch, on rank 0"
        moved = ahead.moved_bytes if ahead else None
        found.append(Row(MOVED, moved, first.moved_bytes, "bytes", how, _at_most(run, first.shape)))
    if run.strategy.zero_stage == 3:
        settled = first.steady_trace
        stated = ahead.gathered_bytes if ahead else None
        gathered = sum(settled.gathered_bytes.values()) if settled else None
        how = _how_steady(run, first)
        found.append(Row("gathered by ZeRO-3 per micro-batch", stated, gathered, "bytes", how))
    return found


def _at_most(run: Run, shape: tuple[int, int]) -> str:
    """Return "at most" for figures of a watched micro-batch of `shape` that is smaller than the planned one."""
    planned = run.cfg.train.micro_batch_size, run.cfg.train.seq_len
    return AT_MOST if 0 < shape[0] * shape[1] < planned[0] * planned[1] else ""


def _how_steady(run: Run, first: FirstStep) -> str:
    if run.strategy.zero_stage < 3:
        return WATCHED
    if first.steady_trace is None:
        return "there were never four micro-batches in a row"
    return (
        f"{SETTLED}; the plan knows no evaluations, after which more is gathered" if run.held_out else SETTLED
    )


def _share(part: float, whole: float) -> float | None:
    return 100 * part / whole if whole else None


def _host(run: Run) -> list[Row]:
    planned = run.plan.planned
    host = pinned = None
    if planned is not None:
        pinned = sum(planned.plan.pinned.values())
        host = sum(planned.plan.host.values()) + pinned
        if run.world.device.type == "cpu":
            host += planned.plan.peak_bytes
    how = "resident memory at its highest, highest rank; shared libraries and the page cache of the data count"
    shorter = run.world.device.type == "cpu" and run.splits.train.one_each
    found = [Row(HOST, host, _most(run, HOST_RSS_PEAK_GIB), "bytes", how, AT_MOST * shorter)]
    if run.world.device.type == "cuda":
        how = "torch's pinned host allocator, highest rank"
        found.append(Row("pinned host memory", pinned, _most(run, HOST_PINNED_GIB), "bytes", how))
    on_nvme = sum(item.bytes_per_node for item in run.plan.states if item.place == "nvme")
    if run.swap_folder is not None:
        locked = sum(item.bytes_per_rank for item in run.plan.states if item.mlocked)
        buffers = engine_memory.swap_buffers_bytes(run.engine)
        found.append(
            Row("swap buffers in host memory", locked, buffers, "bytes", "of DeepSpeed's swappers, rank 0")
        )
        how = "files in DeepSpeed's swap folder at the end, on the node of rank 0"
        found.append(Row("NVMe per node", on_nvme, _folder_bytes(run.swap_folder), "bytes", how))
    return found


def _loading(run: Run) -> list[Row]:
    """Return the rows of reading pretrained weights, and of the flat buffer that ZeRO-1 and 2 copy them into."""
    planned, loaded = run.plan.loading, run.loaded
    if not loaded:
        return []
    counted = [each.read_bytes for each in loaded if each.read_bytes is not None]
    flat = engine_memory.flat_buffer_bytes(run.engine)
    rows = [
        Row(
            "weights read, all ranks together",
            planned.read_bytes_of_all if planned else None,
            sum(counted) if counted else None,
            "bytes",
            f"{'counted as they came from the files' if counted else 'transformers counts none'}; "
            f"{describe_loaded(loaded)}",
        ),
        Row(
            "host memory while weights are read",
            planned.reading_host_bytes if planned else None,
            max(each.peak_bytes for each in loaded),
            "bytes",
            "the most that a rank held beyond what it began with, imports of the architecture included, mapped files "
            "not; sampled",
            AT_LEAST * (not counted),
        ),
        Row(
            "reading weights",
            planned.time_s if planned else None,
            max(each.seconds for each in loaded),
            "s",
            "the model's creation included, slowest rank; planned is the disk's share, where its rate is known",
            AT_LEAST,
        ),
    ]
    if flat > 0:
        rows.append(
            Row(
                "flat buffer of what is trained",
                planned.flat_bytes if planned else None,
                flat,
                "bytes",
                "of DeepSpeed's optimizer at stage 1 and 2, rank 0, padding included",
            )
        )
    return rows


def _times(run: Run, summary: Mapping[str, float]) -> list[Row]:
    planned = run.plan.planned
    mean = (
        "mean of the run without its first step, slowest rank" if summary else "the run did not reach its end"
    )
    unknown = planned.time.unknown if planned else []
    lacking = f"{mean}; not planned, for the machine's rates are not known" if unknown else mean
    if planned is None:
        lacking = f"{mean}; no plan: {run.plan.reason}"
    step = planned.time if planned and not unknown else None
    tokens = step.tokens_per_s if step else None
    shorter = step is not None and run.splits.train.one_each
    most, least = AT_MOST * shorter, AT_LEAST * shorter
    if tokens is not None:  # the plan counts full blocks
        tokens *= run.splits.tokens_per_block / run.cfg.train.seq_len
    return [
        Row(STEP, step.total_s if step else None, summary.get(STEP_S), "s", lacking, most),
        *(
            Row(
                phase,
                step.phases_s[phase] if step else None,
                summary.get(phase_s(phase)),
                "s",
                f"{lacking}; with copies and collectives",
                most if phase != "optimizer" else "",
            )
            for phase in ("forward", "backward", "optimizer")
        ),
        Row(
            "throughput",
            tokens,
            summary.get(TOKENS_PER_S),
            "tokens/s",
            f"{lacking.replace('slowest rank', 'fastest rank')}; padding does not count",
            least,
        ),
    ]


def _most(run: Run, metric: str) -> float | None:
    return run.peaks[metric] * GIB if metric in run.peaks else None


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _scaled(row: Row) -> Row:
    """Return the row with bytes in GiB, or in MiB when both figures are below 1 GiB."""
    if row.unit != "bytes":
        return row
    unit, name = (GIB, "GiB") if max(row.planned or 0, row.measured or 0) >= GIB else (MIB, "MiB")
    planned, measured = (None if value is None else value / unit for value in (row.planned, row.measured))
    return replace(row, planned=planned, measured=measured, unit=name)
