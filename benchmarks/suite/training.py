"""One launch of train.py as a row: peak, step time, tokens/s, MFU, and what the plan said of it."""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import plan_accuracy
from benchmarks.accuracy_points import LLAMA_ON_CPU
from benchmarks.plan_accuracy import TIME_OVER
from benchmarks.suite.points import SHAPES, TOKENS, TOKENS_ON_CPU, Point
from remat.config import compose
from remat.config.options import ConfigError
from remat.config.units import GIB
from remat.machine import gpus
from remat.planning.plan import Capacity, make_plan
from remat.report.tracking import RECORD

STEPS_OF_A_RUNG = 2
ROOM, IN_TIME = 0.9, 0.75  # of memory and of a point's time: what a plan may be wrong by, and the next rung
START_S, LEAST_S = 30, 10  # until the first step; less is not worth a start
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
    small = list(LLAMA_ON_CPU)
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
    shutil.rmtree(run_folder, ignore_errors=True)
    return plan_accuracy.launch(words, limit_s, device) | figures(run_folder)


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


@dataclass(frozen=True)
class Rung:
    """A length of the ladder: whether the planner says that it fits with room, and seconds of STEPS_OF_A_RUNG."""

    seq_len: int
    fits: bool
    planned_s: float


def longest(point: Point, work: Path, device: str, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Two steps at the longest sequence that is planned to fit, with room, and to end in time; then up or down.

    Up until one does not run, down until one does, or the point's time is over. `machine`: its `gpu`, `gpu_bytes`
    and `host_bytes`; gpu None: a CPU.
    """
    ends = time.monotonic() + point.limit_s
    run_folder = work / "runs" / "gpu_suite" / folder_name(point)
    ladder = planned_ladder(point, work, device, machine)
    number = first_rung(ladder, point.limit_s)
    tried: dict[int, dict[str, Any]] = {}
    while 0 <= number < len(ladder) and number not in tried:
        rung, left = ladder[number], ends - time.monotonic()
        if left < LEAST_S or (tried and rung.planned_s > left):
            tried[number] = {
                "seq_len": rung.seq_len,
                "status": TIME_OVER,
                "said": f"not started: {left:.0f} s left",
            }
            break
        words = overrides(point, work, device, seq_len=rung.seq_len, steps=STEPS_OF_A_RUNG)
        tried[number] = {"seq_len": rung.seq_len, "words": words} | launch(words, run_folder, left, device)
        number += 1 if tried[number]["status"] == "ran" else -1
    return climbed(list(tried.values()))


def climbed(rungs: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of a climb: the longest that ran, and what became of the next longer one."""
    ran = max((rung["seq_len"] for rung in rungs if rung["status"] == "ran"), default=0)
    longer = sorted((rung for rung in rungs if rung["seq_len"] > ran), key=lambda rung: rung["seq_len"])
    ended = longer[0]["status"] if longer else "the ladder ended"
    row = {"status": "ran" if ran else ended, "longest_seq_len": ran, "ended": ended, "rungs": rungs}
    return row if ran else row | {"said": longer[0].get("said", "")}


def planned_ladder(point: Point, work: Path, device: str, machine: Mapping[str, Any]) -> list[Rung]:
    """Every rung of a point, planned in this process, without a GPU, up to the first that does not fit."""
    capacity = Capacity(gpu_bytes=machine["gpu_bytes"], host_bytes=machine["host_bytes"])
    known = [f"hardware.gpu={machine['gpu']}"] if machine["gpu"] and gpus.find_gpu(machine["gpu"]) else []
    ladder: list[Rung] = []
    for tokens in TOKENS if device == "cuda" else TOKENS_ON_CPU:
        if tokens > point.most_tokens:
            break
        fits, planned_s = not ladder or ladder[-1].fits, 0.0
        if fits:
            words = overrides(point, work, device, seq_len=tokens, steps=STEPS_OF_A_RUNG)
            try:
                made = make_plan(
                    compose.compose_run([*words, *known]).run,
                    world_size=1, capacity=capacity, on_gpu=device == "cuda",
                )  # fmt: skip
            except ConfigError:  # train.py says why
                fits = False
            else:
                fits = all(
                    r.found_bytes is None or r.needed_bytes <= ROOM * r.found_bytes for r in made.plan.resources
                )
                planned_s = STEPS_OF_A_RUNG * made.time.total_s
        ladder.append(Rung(tokens, fits, planned_s))
    return ladder


def first_rung(ladder: list[Rung], limit_s: float) -> int:
    """The number of the longest that fits and is to end in IN_TIME of the limit; 0 where none is."""
    good = [
        number
        for number, rung in enumerate(ladder)
        if rung.fits and START_S + rung.planned_s <= IN_TIME * limit_s
    ]
    return max(good, default=0)
