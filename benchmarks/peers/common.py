"""What every peer is given: the same shape, tokens and clock. On a GPU, memory is the allocator's."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, TrainerCallback

STEPS, WARM = 12, 4


def arguments(*more: tuple[str, list[str]]) -> argparse.Namespace:
    """`more`: options of one peer, each with its choices, the first the default."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--shape", nargs="+", required=True, help="options of train.py that give the model's shape"
    )
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    for name, choices in more:
        parser.add_argument(name, choices=choices, default=choices[0])
    args = parser.parse_args()
    if args.device == "cpu":
        args.seq_len, args.micro_batch = 64, 1
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return args


def alone(args: argparse.Namespace) -> None:
    """The environment of a launcher that starts one rank; on a CPU without DeepSpeed's buffers in /dev/shm."""
    from remat.launch.processes import free_port

    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    if args.device == "cpu":
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def model_config(args: argparse.Namespace) -> Any:
    from remat.config import compose

    run = compose.compose_run(_words(args)).run
    fields = dict(run.model.architecture)
    return AutoConfig.for_model(fields.pop("model_type"), **fields, attn_implementation="sdpa", use_cache=False)


def _words(args: argparse.Namespace) -> list[str]:
    """The shape as options, with random weights."""
    random = ["model.init=random", "model.path=null", "model.tokenizer=bytes"]
    return ["recipe=tiny_zero3_offload", *args.shape, *random]


def deepspeed_config(args: argparse.Namespace, zero: str) -> dict[str, Any]:
    """The very DeepSpeed config that this project's run of the same strategy has."""
    from remat.config import compose
    from remat.planning import strategy

    words = [
        *_words(args), f"deepspeed.config={zero}", "train.precision=bf16", f"train.seq_len={args.seq_len}",
        f"train.micro_batch_size={args.micro_batch}", f"train.global_batch_size={args.micro_batch}",
    ]  # fmt: skip
    run = compose.compose_run(words).run
    return strategy.decide(run, world_size=1, can_pin=args.device == "cuda").ds


class Rows(torch.utils.data.Dataset):
    """Random tokens, the labels the same: [seq_len] each."""

    def __init__(self, vocabulary: int, seq_len: int, count: int = 64) -> None:
        draw = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, vocabulary, (count, seq_len), generator=draw)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {
            "input_ids": self.ids[index],
            "labels": self.ids[index],
            "attention_mask": torch.ones_like(self.ids[0]),
        }


class Clock(TrainerCallback):
    """Seconds from the end of each optimizer step to the end of the next, and the peak after the first WARM.

    Works alone as well: call `start` once, then `step`.
    """

    def __init__(self, device: str) -> None:
        self.device, self.seconds, self.since = device, list[float](), 0.0

    def start(self) -> None:
        self.since = self._now()

    def step(self) -> None:
        now = self._now()
        self.seconds.append(now - self.since)
        if len(self.seconds) == WARM and self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.since = self._now()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.step()

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def row(self, args: argparse.Namespace, versions: dict[str, str], differs: str) -> dict[str, Any]:
        """Medians of the steps after the first WARM. `differs`: what could not be made the same."""
        steady = self.seconds[WARM:]
        step_s = statistics.median(steady)
        found: dict[str, Any] = {
            "step_s": step_s,
            "step_s_lowest": min(steady),
            "step_s_highest": max(steady),
            "steps": len(self.seconds),
            "tokens_per_s": args.micro_batch * args.seq_len / step_s,
            "versions": versions,
            "differs": differs,
        }
        if self.device == "cuda":
            found["allocated_bytes"] = torch.cuda.max_memory_allocated()
            found["reserved_bytes"] = torch.cuda.max_memory_reserved()
        return found


def versions(*names: str) -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "transformers", *names)}


def finish(args: argparse.Namespace, row: dict[str, Any]) -> None:
    args.out.write_text(json.dumps(row, indent=2) + "\n")


def bare_steps(step: Callable[[dict[str, torch.Tensor]], None], rows: Rows, args: argparse.Namespace) -> Clock:
    """STEPS calls of `step` with a micro-batch [micro_batch, seq_len] on the device."""
    clock = Clock(args.device)
    clock.start()
    for number in range(STEPS):
        first = number * args.micro_batch % (len(rows) - args.micro_batch + 1)
        items = [rows[first + index] for index in range(args.micro_batch)]
        step({name: torch.stack([item[name] for item in items]).to(args.device) for name in items[0]})
        clock.step()
    return clock
