"""Every metric of a run, by the name under which it is logged, and how its rows are read from the record.

Writers and readers import the names from here. For a metric that each rank measures, the name holds the maximum over
ranks, and `lowest(name)` the minimum.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

StepMetrics = dict[str, float]  # a row of metrics.jsonl, and what W&B is sent for a step

LOSS_TRAIN = "loss/train"  # mean per trained token since the last row
LOSS_EVAL = "loss/eval"  # mean per trained token of the held-out blocks

LEARNING_RATE = "optim/lr"
GRAD_NORM = "optim/grad_norm"  # before clipping
LOSS_SCALE = "optim/loss_scale"  # fp16 only
SKIPPED_STEPS = "optim/skipped_steps"  # since the start of training

TOKENS_SEEN = "tokens/seen"  # since the start of training
TOKENS_TRAINED = "tokens/trained"  # of those seen, the ones that carry the loss
PADDING_SHARE = "tokens/padding_share"  # of all positions computed since the start of training

STEP_S = "time/step_s"  # mean of the steps since the last row
SAVE_S = "time/save_s"
SAVE_STALL_S = "time/save_stall_s"  # time for which training waited
TRIAL_SAVE_S = "time/rehearsal_s"

TOKENS_PER_S = "throughput/tokens_per_s"
TRAINED_TOKENS_PER_S = "throughput/trained_tokens_per_s"
TOKENS_PER_S_PER_GPU = "throughput/tokens_per_s_per_gpu"
TFLOPS_PER_GPU = "throughput/tflops_per_gpu"  # model FLOPs, without recomputation
MFU = "throughput/mfu"  # model FLOPs as a share of the GPU's peak
HFU = "throughput/hfu"  # the same with recomputed FLOPs

GPU_ALLOCATED_PEAK_GIB = "memory/gpu_allocated_peak_gib"  # torch.cuda.max_memory_allocated
GPU_RESERVED_PEAK_GIB = "memory/gpu_reserved_peak_gib"
GPU_ALLOC_RETRIES = "memory/gpu_alloc_retries"
HOST_RSS_GIB = "memory/host_rss_gib"
HOST_RSS_PEAK_GIB = "memory/host_rss_peak_gib"
HOST_PINNED_GIB = "memory/host_pinned_gib"
HOST_AVAILABLE_GIB = "memory/host_available_gib"
RETREATS = "memory/retreats"  # how often the run was started again with less memory
PLANNED_GPU_PEAK_GIB = "plan/gpu_peak_gib"

TIME, THROUGHPUT = "time/", "throughput/"  # prefixes of the names


def phase_s(phase: str) -> str:
    """Name the mean seconds of a phase of the step: `time/forward_s`."""
    return f"{TIME}{phase}_s"


def share_of(source: str) -> str:
    """Name the share of a source of data.mix in the tokens seen since the start of training."""
    return f"tokens/share/{source}"


def lost_rows(what: str) -> str:
    """Name a count of rows of streamed data since the start of training: cut, left out, dropped, unusable."""
    return f"data/{what}"


def lowest(name: str) -> str:
    """Name the minimum over ranks of a metric."""
    return f"{name}_min"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file with one JSON object per line, without torn ones."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:  # the process died or the disk filled while this row was written
            continue
    return rows
