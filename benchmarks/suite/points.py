"""What the suite measures, most valuable first. A point is one run; a section is one result file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks import accuracy_points

Kind = Literal["train", "longest", "peer", "script", "tests"]
SHAPES = accuracy_points.SHAPES | {
    "llama-8b-20L": ["model=llama8b", "model.architecture.num_hidden_layers=20"],
}
TOKENS = (8192, 16384, 32768, 65536, 131072, 262144, 524288)  # the rungs of the ladder
TOKENS_ON_CPU = (32, 64)


@dataclass(frozen=True)
class Point:
    """One figure. `words` are options of train.py, of a peer's script, a file of tests, or a whole command.

    `seconds` is a first guess; `limit_s` ends a point that hangs, and what is over it is a row that says so. In a
    command, WORK is the suite's --work. `most_tokens` ends a ladder.
    """

    section: str
    name: str
    kind: Kind
    words: tuple[str, ...] = ()
    shape: str = "llama-1b"
    seq_len: int = 4096
    micro_batch: int = 4
    seconds: float = 30
    limit_s: float = 180
    most_tokens: int = TOKENS[-1]


def _train(section: str, name: str, *words: str, **more: object) -> Point:
    return Point(section, name, "train", words, **more)  # type: ignore[arg-type]


def _peer(name: str, script: str, *words: str, seconds: float = 45) -> Point:
    return Point("peers", name, "peer", (script, *words), seconds=seconds)


def _longest(name: str, *words: str, **more: object) -> Point:
    return Point("longest", name, "longest", words, micro_batch=1, seconds=120, limit_s=240, **more)  # type: ignore[arg-type]


def _lab(name: str) -> Point:
    words = ("-m", "remat.cli", "compare", f"lab={name}", "--publish", "benchmarks/results/lab",
             "--out", "WORK/lab")  # fmt: skip
    return Point("lab", name, "script", words, seconds=150, limit_s=420)


def _tests(name: str) -> Point:
    return Point("tests", name, "tests", (f"tests/gpu/test_{name}_gpu.py",), seconds=60, limit_s=240)


ACCURACY = ("benchmarks/plan_accuracy.py", "--work", "WORK/plan_accuracy")
HOST_STATES = ("deepspeed.config=zero2_offload",)
POINTS = [
    _train("mfu", "llama-1b full", "deepspeed.config=zero2", "checkpointing=full"),
    Point("accuracy", "planner accuracy, first part", "script",
          (*ACCURACY, "--minutes", "2"), seconds=150, limit_s=300),
    Point("policies", "every policy, 8 layers of 8B", "script", ("benchmarks/policies.py",), seconds=100, limit_s=240),
    _peer("Trainer + DeepSpeed, its checkpointing", "trainer_deepspeed", "--checkpointing", "full"),
    _train("peers", "remat, full logits", "deepspeed.config=zero2", "checkpointing=full", "train.loss=full"),
    _train("peers", "remat", "deepspeed.config=zero2", "checkpointing=full"),
    _train("mfu", "llama-8b, LoRA, selective_ops", "deepspeed.config=zero2", "checkpointing=selective_ops",
           "peft=lora", shape="llama-8b", micro_batch=2),
    _train("mfu", "llama-8b of 20 layers, full", "deepspeed.config=zero2", "checkpointing=full",
           shape="llama-8b-20L", micro_batch=2, seconds=60),
    Point("overhead", "loop against bare DeepSpeed and the Trainer", "script",
          ("benchmarks/loop_overhead.py", "--ranks", "1", "--windows", "10"), seconds=60, limit_s=180),
    _train("offload", "everything on the GPU", "deepspeed.config=zero2", "checkpointing=none"),
    _train("offload", "activations in host memory", "deepspeed.config=zero2", "checkpointing=offload"),
    _train("offload", "optimizer in host memory", *HOST_STATES, "checkpointing=none", seconds=60),
    _train("offload", "ZeRO-3, optimizer and parameters in host memory", "deepspeed.config=zero3_offload",
           "checkpointing=none", seconds=60),
    _peer("Trainer + DeepSpeed, activations offloaded", "trainer_deepspeed", "--checkpointing", "offload"),
    _train("peers", "remat, activations offloaded", "deepspeed.config=zero2", "checkpointing=offload"),
    _peer("Trainer + DeepSpeed, optimizer offloaded", "trainer_deepspeed", "--zero", "zero2_offload"),
    _train("peers", "remat, optimizer offloaded", *HOST_STATES, "checkpointing=full", seconds=60),
    _peer("TRL, activation offloading", "trl_sft"),
    _peer("torchtune's activation offloading", "torchtune_offload"),
    _peer("Unsloth", "unsloth_full"),
    _train("mfu", "llama-1b none", "deepspeed.config=zero2", "checkpointing=none"),
    _train("mfu", "llama-1b selective_ops", "deepspeed.config=zero2", "checkpointing=selective_ops"),
    _train("mfu", "llama2-7b, LoRA, full", "deepspeed.config=zero2", "checkpointing=full", "peft=lora",
           shape="llama2-7b", micro_batch=4),
    *(_tests(name) for name in ("allocator", "reserved", "offload", "policies", "resume", "runs", "tools",
                                "deepspeed_checkpointing")),
    Point("budget", "budgets beside the policies of peers", "script", ("benchmarks/budget.py", "--rounds", "5"),
          seconds=300, limit_s=560),
    Point("accuracy", "planner accuracy, the rest", "script",
          (*ACCURACY, "--minutes", "6"), seconds=380, limit_s=560),
    *(_lab(f"seed_{claim}") for claim in ("b8", "b7", "d3", "b10", "b5", "c4", "a5")),
    _longest("none", "deepspeed.config=zero2", "checkpointing=none"),
    _longest("full", "deepspeed.config=zero2", "checkpointing=full"),
    _longest("full, activations offloaded", "deepspeed.config=zero2", "checkpointing=offload"),
    _longest("selective_ops", "deepspeed.config=zero2", "checkpointing=selective_ops"),
    _longest("llama-8b, LoRA, activations offloaded", "deepspeed.config=zero2", "checkpointing=offload",
             "peft=lora", shape="llama-8b", most_tokens=262144),  # beyond that, page-locked memory fills the host
    Point("ladder", "the longest sequence of each rung, planned and measured", "script",
          ("benchmarks/long.py", "--climb", "480", "--work", "WORK/long"), seconds=490, limit_s=560),
]  # fmt: skip
SECTIONS = list(dict.fromkeys(point.section for point in POINTS))
