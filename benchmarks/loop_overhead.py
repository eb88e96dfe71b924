"""What the loop costs: this project's against a bare DeepSpeed loop and against the Hugging Face Trainer.

Same model shape and values, data, DeepSpeed config, accumulation, precision, activation checkpointing and logging
interval. The three are interleaved step by step in one process per rank: the Trainer runs as usual, and after each
of its steps one step of each of the other two runs inside its callback. Their times are summed over windows of one
logging interval and the medians over windows compared, so a noisy machine hurts all three alike.

    python benchmarks/loop_overhead.py [--windows 12] [--steps 10] [--ranks 2]
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results"
WARMING = 2  # windows
NAMES = ("bare", "remat", "trainer")


def main() -> None:
    args = parse_args()
    if "RANK" in os.environ:
        measure(args)
        return
    from remat.launch.processes import free_port

    RESULTS.mkdir(exist_ok=True)
    command = ["deepspeed", "-q", "--num_gpus", str(args.ranks), "--master_port", str(free_port()), __file__]
    subprocess.run([*command, *sys.argv[1:]], check=True, cwd=ROOT)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument(
        "--steps", type=int, default=10, help="optimizer steps per window; also the logging interval"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--config", default="zero3")
    parser.add_argument("--local_rank", type=int, default=0)
    return parser.parse_args()


def measure(args: argparse.Namespace) -> None:
    from remat.machine.start_up import share_cores

    share_cores()
    import torch

    from benchmarks.plan_accuracy import write
    from remat.config import compose
    from remat.machine import distributed, ops
    from remat.report import console, run_dir
    from remat.training import build

    ops.use_environment_folder()
    console.quiet_libraries(debug=False)
    with tempfile.TemporaryDirectory() as scratch:
        composed = compose.compose_run(overrides(args, scratch))
        parts = build.build(composed)
        loops = {"remat": remat_loop(parts, args), "bare": bare_loop(parts, args)}
        world = distributed.current()
        about = {
            "device": str(world.device),
            "environment": run_dir.environment(world, ""),
            "overrides": overrides(args, "SCRATCH"),
        }
        suffix = "" if world.device.type == "cpu" else f"_{world.device.type}"

        def keep(seconds: dict[str, list[float]]) -> None:
            if world.is_main and seconds["remat"]:
                write(RESULTS / f"loop_overhead{suffix}.json", result_of(seconds, args.steps) | about)

        seconds = trainer_with(parts, args, loops, scratch, keep)
        if world.is_main:
            print(table(result_of(seconds, args.steps)))
        torch.distributed.barrier()
    distributed.shut_down()


def result_of(seconds: dict[str, list[float]], steps: int) -> dict[str, Any]:
    """Medians and ratios of the windows that are finished, seconds of each loop in each."""
    return {
        "median_step_s": {name: statistics.median(values) / steps for name, values in seconds.items()},
        "windows": len(seconds["remat"]),
        "steps_per_window": steps,
        "window_s": seconds,
        "ratio": ratios(seconds),
    }


def overrides(args: argparse.Namespace, scratch: str) -> list[str]:
    return [
        "recipe=tiny_zero3_offload", f"output_dir={scratch}/out", f"deepspeed.config={args.config}",
        f"train.steps={(args.windows + 4) * args.steps}", f"train.log_every={args.steps}", "train.seq_len=128",
        "train.micro_batch_size=4", f"train.global_batch_size={8 * args.ranks}", "train.eval_every=0",
        "save.every=0", "save.at_end=false", "save.export=false", "tracking=wandb_disabled",
        "data.eval_fraction=0", "log_level=info",
    ]  # fmt: skip


def remat_loop(parts: Any, args: argparse.Namespace) -> Callable[[], None]:
    """A step of this project's loop; it logs when it is due."""
    from remat.training import loop
    from remat.training.proof import FirstStep

    progress, first = loop.start(parts), FirstStep()

    return lambda: loop.step(parts, first, progress, last=0) and None


def bare_loop(parts: Any, args: argparse.Namespace) -> Callable[[], None]:
    """The least DeepSpeed loop that logs the same loss: forward, backward, step; one reduction per window."""
    import deepspeed
    import torch
    import torch.distributed as dist

    from remat.data.batches import GlobalBatches
    from remat.model import hf_model, optimizer

    cfg, ds = parts.cfg, parts.strategy.ds
    config = hf_model.load_config(cfg.model)
    net = hf_model.build(
        cfg.model,
        config,
        precision=cfg.train.precision,
        ds_config=ds,
        zero_stage=parts.strategy.zero_stage,
        seed=cfg.train.seed,
    )
    net.gradient_checkpointing_enable({"use_reentrant": False})
    adamw = optimizer.build(net, cfg.optim, offloaded=False, device=parts.world.device)
    engine, _, _, _ = deepspeed.initialize(model=net, optimizer=adamw, config=ds, dist_init_required=False)
    batches = GlobalBatches(
        parts.splits.train, global_batch_size=cfg.train.global_batch_size, seed=cfg.train.seed, shuffle=True,
        micro_batch_size=cfg.train.micro_batch_size, rank=parts.world.rank, world_size=parts.world.size,
    )  # fmt: skip

    total = torch.zeros((), device=parts.world.device)
    count = itertools.count(1)

    def step() -> None:
        number = next(count)
        optimizer.set_lr(engine.optimizer, optimizer.lr_at(number, cfg.optim, cfg.train.steps))
        for batch in batches.next_step().micro_batches:
            inputs = {name: value.to(parts.world.device) for name, value in batch.items()}
            loss = engine(**inputs, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            total.add_(loss.detach())
        if number % args.steps == 0:
            dist.all_reduce(total)
            total.item()
            total.zero_()

    return step


def trainer_with(
    parts: Any,
    args: argparse.Namespace,
    loops: dict[str, Callable[[], None]],
    scratch: str,
    keep: Callable[[dict[str, list[float]]], None],
) -> dict[str, list[float]]:
    """Run the Trainer; after each of its steps run and time one of the other loops'. Two windows warm up.

    `keep` is given the windows so far after each; its time counts for none.
    """
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from remat.config.options import Precision
    from remat.model import hf_model

    cfg, ds = parts.cfg, parts.strategy.ds
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    config = hf_model.load_config(cfg.model)

    class Interleave(TrainerCallback):
        """What the Trainer does after its on_step_end, logging included, counts towards its next step."""

        def __init__(self) -> None:
            self.since = time.perf_counter()
            self.spent = dict.fromkeys(NAMES, 0.0)

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            self.lap("trainer")
            for name in sorted(loops, reverse=state.global_step % 2 == 0):
                loops[name]()
                self.lap(name)
            if state.global_step % args.steps == 0:
                for name, spent in self.spent.items():
                    seconds[name].append(spent)
                self.spent = dict.fromkeys(NAMES, 0.0)
                keep(after_warming(seconds, args.windows))
                dist.barrier()
                self.since = time.perf_counter()

        def lap(self, name: str) -> None:
            dist.barrier()
            now = time.perf_counter()
            self.spent[name] += now - self.since
            self.since = now

    settings = TrainingArguments(
        output_dir=f"{scratch}/trainer",
        max_steps=(args.windows + WARMING) * args.steps,
        per_device_train_batch_size=cfg.train.micro_batch_size,
        gradient_accumulation_steps=ds["gradient_accumulation_steps"],
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=args.steps,
        bf16=cfg.train.precision is Precision.bf16,
        use_cpu=parts.world.device.type == "cpu",
        max_grad_norm=cfg.optim.gradient_clipping,
        learning_rate=cfg.optim.lr,
        weight_decay=cfg.optim.weight_decay,
        deepspeed=ds,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        log_level="error",
    )
    net = AutoModelForCausalLM.from_config(config)
    trainer = Trainer(net, settings, train_dataset=Rows(parts.splits.train), callbacks=[Interleave()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return after_warming(seconds, args.windows)


def after_warming(seconds: dict[str, list[float]], windows: int) -> dict[str, list[float]]:
    return {name: values[WARMING : WARMING + windows] for name, values in seconds.items()}


class Rows:
    """The same blocks as a map-style dataset."""

    def __init__(self, blocks: Any) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        import numpy as np

        ids = self.blocks.tokens(np.array([index]))[0].astype("int64")
        return {"input_ids": ids, "labels": ids}


def ratios(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Median, lowest and highest of the window-by-window ratio of this loop to each other one."""
    found = {}
    for other in ("bare", "trainer"):
        values = [mine / theirs for mine, theirs in zip(seconds["remat"], seconds[other], strict=True)]
        found[f"remat/{other}"] = {
            "median": statistics.median(values), "lowest": min(values), "highest": max(values)
        }  # fmt: skip
    return found


def table(result: dict[str, Any]) -> str:
    lines = [f"{name:8} {value * 1e3:8.1f} ms per step" for name, value in result["median_step_s"].items()]
    lines += [
        f"{name:14} {r['median']:.3f}  ({r['lowest']:.3f} to {r['highest']:.3f})"
        for name, r in result["ratio"].items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
