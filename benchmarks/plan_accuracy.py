"""Planned against measured: GPU memory of real runs beside what the planner says of them, misses included.

Each point is one fresh launch of train.py on one GPU: random weights, synthetic tokens, a few steps. Its plan is made
in this process from the same options. What is measured is the largest max_memory_allocated of any step, after
loading, and the largest max_memory_reserved; and how much more of the whole device was in use while it ran. A run that
runs out of memory is a row. Every finished point is a file of its own, so a second start goes on where the first ended.

    python benchmarks/plan_accuracy.py --minutes 9                 # as many points as fit, most telling first
    python benchmarks/plan_accuracy.py --plan-only                 # renew what is planned, keep what was measured
    python benchmarks/plan_accuracy.py --device cpu --only NAME    # a rehearsal: small shapes, no GPU to measure
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULT = ROOT / "benchmarks" / "results" / "plan_accuracy.json"
WORK = ROOT / "outputs" / "plan_accuracy"

from remat import compose, planner, run_dir  # noqa: E402
from remat.host_memory import host_memory  # noqa: E402
from remat.tracking import RECORD  # noqa: E402

GIB = 1024**3
STEPS = 4  # ZeRO-3 learns the order of modules in the first two
LIMIT_S = 180  # for one point; advice after an out-of-memory takes long
REFUSED, OUT_OF_MEMORY = 3, 70  # exit codes of train.py
NOT_YET = "not yet measured"
ALLOCATED, RESERVED = "memory/gpu_allocated_peak_gib", "memory/gpu_reserved_peak_gib"
LLAMA_1B = [
    "model=llama8b", "model.architecture.hidden_size=2048", "model.architecture.intermediate_size=8192",
    "model.architecture.num_hidden_layers=16", "model.architecture.tie_word_embeddings=true",
]  # fmt: skip
SHAPES = {  # true widths; where a name ends in L, that many of the layers
    "gpt2-medium": ["model=gpt2_medium"],
    "llama-1b": LLAMA_1B,
    "llama-8b": ["model=llama8b"],
    "llama-8b-4L": ["model=llama8b", "model.architecture.num_hidden_layers=4"],
    "llama-8b-8L": ["model=llama8b", "model.architecture.num_hidden_layers=8"],
    "llama2-7b": ["model=llama2_7b"],
    "llama2-7b-6L": ["model=llama2_7b", "model.architecture.num_hidden_layers=6"],
    "qwen3-8b-4L": ["model=qwen3_8b", "model.architecture.num_hidden_layers=4"],
}
LLAMA_ON_CPU = [
    "model.architecture.hidden_size=64", "model.architecture.intermediate_size=128",
    "model.architecture.num_hidden_layers=2", "model.architecture.num_attention_heads=4",
    "model.architecture.num_key_value_heads=2", "model.architecture.vocab_size=512",
]  # fmt: skip
GPT2_ON_CPU = [
    "model.architecture.n_embd=64", "model.architecture.n_layer=2",
    "model.architecture.n_head=4", "model.architecture.vocab_size=512",
]  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One run: a shape of SHAPES, a file of ds_configs/, a choice of conf/checkpointing, tokens, and what else."""

    shape: str
    zero: str
    checkpointing: str
    micro_batch: int
    seq_len: int
    more: tuple[str, ...] = ()
    accumulation: int = 1

    @property
    def name(self) -> str:
        said = [word.rpartition(".")[2].replace("=", "-") for word in self.more]
        if self.accumulation > 1:
            said.append(f"accumulate-{self.accumulation}")
        parts = [self.shape, self.zero, self.checkpointing, f"b{self.micro_batch}", f"s{self.seq_len}", *said]
        return "_".join(parts)


LORA, QLORA = ("peft=lora",), ("peft=qlora",)
HOST = "zero3_offload_optimizer"  # the peak is in a micro-batch then, not in the optimizer's step
POINTS = [  # the most telling first
    Point("llama-8b-4L", HOST, "full", 1, 8192),
    Point("llama-1b", "zero2", "none", 1, 4096),
    Point("gpt2-medium", "zero2", "none", 8, 1024),
    Point("llama-1b", HOST, "selective_ops", 1, 8192),
    Point("llama-8b-4L", "zero3", "full", 1, 4096),
    Point("llama-8b", "zero3", "full", 1, 4096, LORA),
    Point("llama-1b", HOST, "full", 1, 16384),
    Point("llama-1b", "zero2_offload", "none", 2, 2048),
    Point("llama-8b-4L", "zero3_offload", "full", 1, 16384),
    Point("llama2-7b-6L", HOST, "selective_linears", 1, 4096),
    Point("llama-1b", HOST, "offload", 1, 16384),
    Point("llama-8b-4L", "zero2", "full", 2, 2048, QLORA),
    Point("gpt2-medium", "zero2", "full", 8, 1024),
    Point("llama-1b", HOST, "full", 1, 4096, ("train.loss=full",)),
    Point("llama-1b", HOST, "discard_output", 1, 4096),
    Point("llama2-7b-6L", "zero3", "sqrt", 2, 4096),
    Point("llama-1b", "zero3_offload", "full", 8, 512),
    Point("llama-1b", "zero2", "full", 2, 2048, accumulation=2),
    Point("llama2-7b", "zero3", "full", 4, 2048, LORA),
    Point("qwen3-8b-4L", HOST, "none", 1, 4096),
    Point("gpt2-medium", "zero2_offload", "selective_ops", 8, 1024),
    Point("llama-1b", "zero3", "none", 2, 4096),
    Point("gpt2-medium", "zero3", "none", 16, 512),
    Point("llama-1b", HOST, "selective_modules", 1, 4096),
    Point("gpt2-medium", "zero1", "none", 4, 1024),
    Point("llama-1b", "zero2", "none", 1, 2048, LORA),
    Point("llama-1b", HOST, "uniform", 4, 512),
    Point("llama-8b-8L", "zero3", "interval", 1, 4096),
]


def main() -> None:
    args = parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    points = [point for point in POINTS if not args.only or point.name in args.only]
    result = args.result or (RESULT if args.device == "cuda" else args.work / "plan_accuracy_cpu.json")
    if args.plan_only:
        renew(result, points, args)
        return
    if args.device == "cuda":
        require_gpu()
    folder = args.work / "points"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(KeyboardInterrupt):  # what is finished is written
        run_all(points, folder, args)
    measured = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    rows = [measured.get(point.name) or not_measured(point, args) for point in points]
    result.parent.mkdir(parents=True, exist_ok=True)
    write(result, {"environment": environment(args.device), "points": rows})
    print(f"{sum(row['status'] != NOT_YET for row in rows)} of {len(points)} points: {result}")


def run_all(points: list[Point], folder: Path, args: argparse.Namespace) -> None:
    """Measure what has no file in `folder`, until the minutes are over."""
    ends = time.monotonic() + 60 * args.minutes
    for point in points:
        path = folder / f"{point.name}.json"
        if is_done(path, overrides(point, args)):
            continue
        if time.monotonic() > ends:
            print(f"{args.minutes} minutes are over; start again to go on")
            break
        row = measure(point, args)
        write(path, row)
        print(line(row), flush=True)


def renew(result: Path, points: list[Point], args: argparse.Namespace) -> None:
    """Plan every point again, and keep what was measured of exactly the same run."""
    old = json.loads(result.read_text()) if result.exists() else {"environment": None, "points": []}
    known = {tuple(portable(row["words"])): row for row in old["points"]}
    rows = []
    for point in points:
        new = not_measured(point, args)
        before = known.get(tuple(portable(new["words"])), {})
        rows.append(new | {key: value for key, value in before.items() if not key.startswith("planned_")})
        print(line(rows[-1]), flush=True)
    write(result, {"environment": old["environment"], "points": rows})


def not_measured(point: Point, args: argparse.Namespace) -> dict[str, Any]:
    """The row of a point that is only planned."""
    row = {"name": point.name, "words": portable(overrides(point, args)), **plan(point, args)}
    return row | {"status": NOT_YET, "allocated_bytes": None, "reserved_bytes": None, "device_bytes": None}


def portable(words: list[str]) -> list[str]:
    """Without the folders of this machine."""
    return [word for word in words if not word.startswith(("output_dir=", "data.cache_dir="))]


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="no point is started after that many")
    parser.add_argument("--only", nargs="+", choices=[point.name for point in POINTS], metavar="NAME")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--plan-only", action="store_true", help="run nothing")
    parser.add_argument("--work", type=Path, default=WORK, help="finished points, runs and data")
    parser.add_argument("--result", type=Path, help="default: benchmarks/results/plan_accuracy.json of a GPU")
    return parser.parse_args(words)


def require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        sys.exit(
            "torch sees no GPU: nothing can be measured. --plan-only plans the points, --device cpu rehearses one"
        )


def overrides(point: Point, args: argparse.Namespace) -> list[str]:
    """What train.py is given. The CPU's rehearsal has the same options with a small shape and few tokens."""
    on_cpu = args.device == "cpu"
    words = [
        "recipe=tiny_zero3_offload", "name=plan_accuracy", f"run_id={point.name}", f"output_dir={args.work}/runs",
        *SHAPES[point.shape], "model.init=random", "model.path=null", "model.tokenizer=bytes",
        "data=synthetic", f"data.cache_dir={args.work}/data", "data.eval_fraction=0", "data.synthetic_blocks=64",
        f"train.seq_len={point.seq_len}", f"train.micro_batch_size={point.micro_batch}",
        f"train.global_batch_size={point.micro_batch * point.accumulation}", f"train.steps={STEPS}",
        "train.log_every=1", "train.eval_every=0", "optim.lr=1e-5", "optim.warmup_steps=0",
        "save.every=0", "save.at_end=false", "save.export=false", "tracking=wandb_disabled",
        f"deepspeed.config={point.zero}", f"checkpointing={point.checkpointing}", *point.more,
    ]  # fmt: skip
    if not on_cpu:
        return words
    small = GPT2_ON_CPU if point.shape.startswith("gpt2") else LLAMA_ON_CPU
    return [*words, *small, "train.seq_len=64", "train.micro_batch_size=1", "train.global_batch_size=1"]


def plan(point: Point, args: argparse.Namespace) -> dict[str, Any]:
    """What the planner says of the point on one rank; made in this process from the run's own options."""
    run = compose.compose_run(overrides(point, args)).run
    made = planner.make(run, world_size=1, on_gpu=args.device == "cuda")
    needed = planner.needed_bytes(made, "GPU memory") if args.device == "cuda" else made.plan.peak_bytes
    return {
        "planned_allocated_bytes": made.plan.peak_bytes,
        "planned_total_bytes": needed,
        "planned_host_bytes": planner.needed_bytes(made, "host memory per node"),
        "planned_by_category": {str(name): size for name, size in made.plan.gpu.items()},
        "planned_peak": f"{made.plan.peak.phase}, layer {made.plan.peak.layer}, {made.plan.peak.operation}",
    }


def measure(point: Point, args: argparse.Namespace) -> dict[str, Any]:
    """Plan it, run it, read what it held."""
    from tests.launcher import deepspeed

    words = overrides(point, args)
    row: dict[str, Any] = {"name": point.name, "words": portable(words), **plan(point, args)}
    run_folder = args.work / "runs" / "plan_accuracy" / point.name
    shutil.rmtree(run_folder, ignore_errors=True)
    fits_host = row["planned_host_bytes"] < host_memory().available_bytes
    force = ["force=true"] if fits_host else []  # a miss on the GPU must show
    started = time.monotonic()
    with device_memory(args.device) as device:
        try:
            done = deepspeed(*words, *force, ranks=1, gpus=args.device == "cuda", timeout_s=LIMIT_S)
            code, out = done.code, done.out
        except AssertionError as error:  # it took too long and was ended
            code, out = -1, str(error)
    row |= {"status": status(code, out), "wall_s": round(time.monotonic() - started, 1), "exit_code": code}
    if row["status"] != "ran":
        row["said"] = out[-3000:]
    row |= read(run_folder) | device
    row["commit"] = commit()
    return row


def status(code: int, out: str) -> str:
    """Of one run, from its exit code and what it said."""
    if code == 0:
        return "ran"
    if code == REFUSED:
        return "refused"
    ran_out = code == OUT_OF_MEMORY and re.search(r"out of (GPU|host) memory in", out)
    return "out of memory" if ran_out else "failed"


def read(run_folder: Path) -> dict[str, Any]:
    """The largest peak of any step, in bytes, and each step's; None where there was no GPU or no step."""
    record = run_folder / RECORD
    rows = [json.loads(text) for text in record.read_text().splitlines()] if record.exists() else []
    steps = [row for row in rows if "loss/train" in row]
    allocated = [int(row[ALLOCATED] * GIB) for row in steps if ALLOCATED in row]
    reserved = [int(row[RESERVED] * GIB) for row in steps if RESERVED in row]
    return {
        "steps": len(steps),
        "allocated_bytes": max(allocated, default=None),
        "allocated_bytes_by_step": allocated,
        "reserved_bytes": max(reserved, default=None),
    }


@contextmanager
def device_memory(device: str) -> Iterator[dict[str, Any]]:
    """Fills `device_bytes`: the most that was in use on the whole GPU, less what was in use before. None: no GPU.

    What torch does not allocate (context, kernels, NCCL) is in it. This process has a context of its own by then,
    which is part of what was in use before. Read fifty times a second.
    """
    found: dict[str, Any] = {"device_bytes": None}
    if device != "cuda":
        yield found
        return
    import torch

    def used() -> int:
        free, total = torch.cuda.mem_get_info(0)
        return total - free

    before, most, over = used(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.02):
            most = max(most, used())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        over.set()
        watcher.join()
        found["device_bytes"] = max(0, most - before)


def is_done(path: Path, words: list[str]) -> bool:
    """There is a result of exactly this run, and not one of a failure that may pass."""
    if not path.exists():
        return False
    row = json.loads(path.read_text())
    return bool(row["words"] == portable(words)) and row["status"] != "failed"


def line(row: dict[str, Any]) -> str:
    planned = f"planned {row['planned_allocated_bytes'] / GIB:6.2f} GiB"
    if row["allocated_bytes"] is None:
        return f"{row['name']:60} {planned}  {row['status']}"
    error = row["planned_allocated_bytes"] / row["allocated_bytes"] - 1
    measured = f"measured {row['allocated_bytes'] / GIB:6.2f} GiB"
    return f"{row['name']:60} {planned}  {measured}  {error:+6.1%}  {row['status']}  ({row['wall_s']} s)"


def environment(device: str) -> dict[str, Any]:
    """Hardware, versions, commit and date: what a figure needs beside it."""
    import deepspeed
    import torch
    import transformers

    on_gpu = device == "cuda"
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "gpu_bytes": torch.cuda.get_device_properties(0).total_memory if on_gpu else None,
        "cuda": torch.version.cuda if on_gpu else None,
        "host_bytes": host_memory().total_bytes,
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "deepspeed": deepspeed.__version__,
        "transformers": transformers.__version__,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def commit() -> str:
    return run_dir.commit() or "unknown"


def write(path: Path, content: Any) -> None:
    """Whole or not at all: a point that was cut off is measured again."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=2) + "\n")
    part.replace(path)


if __name__ == "__main__":
    main()
