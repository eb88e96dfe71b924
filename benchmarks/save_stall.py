"""How long training waits for a save, at once and in the background: one run of one model, saved in turns both ways.

The model has some 100 MB of weights and a state of all ranks some 0.4 GB. Every other save makes training wait for all
of it; the ones between flush and hash beside the steps that follow. Medians over each kind. Steps with and without a
state on its way are told apart too: hashing takes cores and disk from training where these are few.

    python benchmarks/save_stall.py [--saves 10] [--ranks 2]      # save_stall.json; on GPUs save_stall_cuda.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results"
SETTLED = 3  # steps before the first save and after each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saves", type=int, default=10, help="of each kind")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()
    if "RANK" in os.environ:
        measure(args)
        return
    if (few := too_few_gpus(args.ranks)) is not None:
        sys.exit(few)
    from remat.launch.processes import free_port

    RESULTS.mkdir(exist_ok=True)
    command = ["deepspeed", "-q", "--num_gpus", str(args.ranks), "--master_port", str(free_port()), __file__]
    subprocess.run([*command, *sys.argv[1:]], check=True, cwd=ROOT)


def too_few_gpus(ranks: int) -> str | None:
    """What is wrong with so many ranks on this machine. None: nothing, or they compute on its CPU."""
    import torch

    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return None
    found = torch.cuda.device_count()
    return (
        f"--ranks {ranks}: this machine has {found} GPU(s); pass --ranks {found}" if 0 < found < ranks else None
    )


def result_path(device: str) -> Path:
    """A GPU's figures stand beside the CPU's."""
    return RESULTS / f"save_stall{'' if device == 'cpu' else f'_{device}'}.json"


def measure(args: argparse.Namespace) -> None:
    from remat.machine.start_up import share_cores

    share_cores()
    from remat.config import compose
    from remat.machine import distributed, ops
    from remat.report import console, run_dir
    from remat.training import build, loop, saves
    from remat.training.proof import FirstStep

    ops.use_environment_folder()
    console.quiet_libraries(debug=False)
    found: dict[str, list[Any]] = {"at once": [], "in the background": []}
    step_s: dict[str, list[float]] = {"alone": [], "beside a save": []}
    with tempfile.TemporaryDirectory() as scratch:
        composed = compose.compose_run(overrides(scratch))
        parts = build.build(composed)
        progress, first = loop.start(parts), FirstStep()

        def step() -> None:
            began, kind = time.perf_counter(), "beside a save" if parts.saves.pending else "alone"
            loop.step(parts, first, progress, parts.cfg.train.steps)
            step_s[kind].append(time.perf_counter() - began)
            saves.complete_save(parts, progress.step)

        for _ in range(SETTLED):
            step()
        for turn in range(2 * args.saves):
            kind = "in the background" if turn % 2 else "at once"
            saves.save_state(parts, progress, must=kind == "at once")
            for _ in range(SETTLED):
                step()
            while parts.saves.pending:
                step()
            rows = read_saves(parts.folder) if parts.world.is_main else []
            found[kind] += rows[-1:]
        if parts.world.is_main:
            state = next((parts.folder / "saved").iterdir())
            size = sum(path.stat().st_size for path in state.rglob("*") if path.is_file())
            result = figures(found, step_s, size, parts.strategy.facts.num_params)
            environment = run_dir.environment(parts.world, "")
            result["environment"] = {
                name: environment[name] for name in environment if name not in ("formulas", "command")
            }
            result_path(parts.world.device.type).write_text(json.dumps(result, indent=2) + "\n")
            print(json.dumps({name: result[name] for name in list(result)[:4]}, indent=2))
            for kind in found:
                print(f"{kind}: stall {result[kind]['stall_s']:.2f} s of {result[kind]['whole_s']:.2f} s")
        parts.engine.destroy()
        distributed.shut_down()


def overrides(scratch: str) -> list[str]:
    return [
        "recipe=tiny_zero3_offload",
        "data=synthetic",
        "model.architecture.hidden_size=512",
        "model.architecture.intermediate_size=1408",
        "model.architecture.num_hidden_layers=8",
        "model.architecture.num_attention_heads=8",
        "model.architecture.num_key_value_heads=8",
        f"output_dir={scratch}/out",
        f"data.cache_dir={scratch}/cache",
        "deepspeed.config=zero2",
        "train.precision=fp32",
        "train.seq_len=64",
        "train.micro_batch_size=1",
        "train.global_batch_size=2",
        "train.steps=100000",
        "train.log_every=100000",
        "train.eval_every=0",
        "data.eval_fraction=0",
        "save.in_background=true",
        "save.keep=1",
        "tracking=wandb_disabled",
    ]


def read_saves(folder: Path) -> list[dict[str, float]]:
    from remat.report.tracking import read_metrics

    return [row for row in read_metrics(folder) if "time/save_s" in row]


def figures(
    found: dict[str, list[Any]], step_s: dict[str, list[float]], size: int, num_params: int
) -> dict[str, Any]:
    """Medians of each kind of save, in seconds, and how long steps took with and without one on its way."""
    kinds: dict[str, Any] = {}
    for kind, rows in found.items():
        stall, whole = ([row[f"time/{name}_s"] for row in rows] for name in ("save_stall", "save"))
        kinds[kind] = {
            "stall_s": statistics.median(stall),
            "whole_s": statistics.median(whole),
            "ratio": statistics.median(a / b for a, b in zip(stall, whole, strict=True)),
            "all_stall_s": stall,
            "all_whole_s": whole,
        }
    stalls = [kinds[kind]["stall_s"] for kind in ("in the background", "at once")]
    return {
        "stall_in_the_background_to_at_once": stalls[0] / stalls[1],
        "step_s": {
            kind: {"median": statistics.median(values), "steps": len(values)}
            for kind, values in step_s.items()
            if values
        },
        "state_bytes": size,
        "num_params": num_params,
        **kinds,
    }


if __name__ == "__main__":
    main()
