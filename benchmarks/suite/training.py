"""One launch of train.py as a row: peak, step time, tokens/s, MFU, and what the plan said of it."""

from __future__ import annotations

import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.plan_accuracy import GIB, LIMIT_S, status
from benchmarks.suite.points import ON_CPU, SHAPES, TOKENS, TOKENS_ON_CPU, Point
from remat.tracking import RECORD

STEPS, WARM = 12, 4  # logged one by one; the first ones compile, learn ZeRO's order and fill the allocator
FIGURES = {
    "step_s": "time/step_s",
    "forward_s": "time/forward_s",
    "backward_s": "time/backward_s",
    "optimizer_s": "time/optimizer_s",
    "tokens_per_s": "throughput/tokens_per_s",
    "tflops_per_gpu": "throughput/tflops_per_gpu",
    "mfu": "throughput/mfu",
    "hfu": "throughput/hfu",
}
PEAKS = {"allocated_bytes": "memory/gpu_allocated_peak_gib", "reserved_bytes": "memory/gpu_reserved_peak_gib"}


def overrides(
    point: Point, work: Path, device: str, seq_len: int | None = None, steps: int = STEPS
) -> list[str]:
    """The options of the run: random weights, synthetic tokens, no evaluation, no saves."""
    words = [
        "recipe=tiny_zero3_offload", "name=gpu_suite", f"run_id={folder_name(point)}", f"output_dir={work}/runs",
        *SHAPES[point.shape], "model.init=random", "model.path=null", "model.tokenizer=bytes",
        "model.architecture.max_position_embeddings=1048576", "data=synthetic", f"data.cache_dir={work}/data",
        "data.eval_fraction=0", "data.synthetic_blocks=64", "train.precision=bf16",
        f"train.seq_len={seq_len or point.seq_len}", f"train.micro_batch_size={point.micro_batch}",
        f"train.global_batch_size={point.micro_batch}", f"train.steps={steps}", "train.log_every=1",
        "train.eval_every=0", "optim.lr=1e-5", "optim.warmup_steps=0", "save.every=0", "save.at_end=false",
        "save.export=false", "tracking=wandb_disabled", "force=true", *point.words,
    ]  # fmt: skip
    if device == "cuda":
        return words
    tokens = min(seq_len or 64, 64)
    small = list(ON_CPU)
    if "checkpointing=offload" in point.words:
        small.append("checkpointing.offload.min_bytes=0")
    return [*words, *small, f"train.seq_len={tokens}", "train.micro_batch_size=1", "train.global_batch_size=1"]


def folder_name(point: Point) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in f"{point.section} {point.name}")


def measure(point: Point, work: Path, device: str) -> dict[str, Any]:
    """Run it; medians of the steps after the first WARM, the largest peak of them."""
    words = overrides(point, work, device)
    return {"words": words} | launch(
        words, work / "runs" / "gpu_suite" / folder_name(point), point.limit_s, device
    )


def launch(words: list[str], run_folder: Path, limit_s: float, device: str) -> dict[str, Any]:
    """One launch, whatever becomes of it."""
    from tests.launcher import deepspeed

    shutil.rmtree(run_folder, ignore_errors=True)
    started = time.monotonic()
    try:
        done = deepspeed(*words, ranks=1, gpus=device == "cuda", timeout_s=limit_s or LIMIT_S)
        code, out = done.code, done.out
    except AssertionError as error:  # it took too long and was ended
        code, out = -1, str(error)
    row: dict[str, Any] = {"status": status(code, out), "exit_code": code}
    row["wall_s"] = round(time.monotonic() - started, 1)
    if row["status"] != "ran":
        row["said"] = out[-3000:]
    return row | figures(run_folder)


def figures(run_folder: Path) -> dict[str, Any]:
    """What the record and the plan of a run say; nothing where there is none."""
    record, plan = run_folder / RECORD, run_folder / "plan.json"
    rows = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    steps = [row for row in rows if "loss/train" in row]
    found: dict[str, Any] = {"steps": len(steps), "losses": [row["loss/train"] for row in steps]}
    for name, metric in FIGURES.items():
        values = [row[metric] for row in steps[WARM:] if metric in row]
        if values:
            found[name] = statistics.median(values)
            found[f"{name}_lowest"], found[f"{name}_highest"] = min(values), max(values)
    for name, metric in PEAKS.items():
        sizes = [int(row[metric] * GIB) for row in steps[WARM:] or steps if metric in row]
        if sizes:
            found[name] = max(sizes)
    if plan.exists():
        planned = json.loads(plan.read_text())["planned"]
        found["planned_allocated_bytes"] = planned and planned["gpu_allocated_peak_bytes"]
        found["planned_step_s"] = planned and planned["total_s"]
    return found


def longest(point: Point, work: Path, device: str) -> dict[str, Any]:
    """Climb: two steps at each length, until one runs out of memory or the point's time is over."""
    rungs: list[dict[str, Any]] = []
    ends = time.monotonic() + point.limit_s
    run_folder = work / "runs" / "gpu_suite" / folder_name(point)
    for tokens in TOKENS if device == "cuda" else TOKENS_ON_CPU:
        left = ends - time.monotonic()
        if left < 10:
            break
        words = overrides(point, work, device, seq_len=tokens, steps=2)
        rungs.append({"seq_len": tokens, "words": words} | launch(words, run_folder, left, device))
        if rungs[-1]["status"] != "ran":
            break
    ran = [rung["seq_len"] for rung in rungs if rung["status"] == "ran"]
    ended = next((rung["status"] for rung in rungs if rung["status"] != "ran"), "the ladder or its time ended")
    return {
        "status": "ran" if ran else "failed",
        "longest_seq_len": max(ran, default=0),
        "ended": ended,
        "rungs": rungs,
    }
