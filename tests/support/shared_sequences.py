"""Runs whose sequences may be shared between ranks, and what they come to: losses, gradient norms, weights."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from remat.config import compose
from remat.config.units import GIB
from remat.planning.plan import make_plan
from remat.training import build, loop
from tests.support import tiny

ZERO = {
    "zero1": ["deepspeed.config=zero1"],
    "zero2": ["deepspeed.config=zero2"],
    "zero3": ["deepspeed.config=zero3"],
    "zero3_offload": ["deepspeed.config=zero3_offload"],
}
POLICIES = {
    "none": ["checkpointing=none"],
    "full": ["checkpointing=full"],
    "tiles": ["checkpointing=full", "checkpointing.tiles=3"],
    "selective_linears": ["checkpointing=selective_linears"],
    "offload": [
        "checkpointing=offload",
        "checkpointing.offload.min_bytes=1",
        "checkpointing.offload.keep_last_layers=0",
    ],
    "budget": ["checkpointing=budget"],
}
OTHER_ZERO = {
    "zero0": ["deepspeed.config=zero1", "deepspeed.overrides.zero_optimization.stage=0"],
    "zero2_offload": ["deepspeed.config=zero2_offload"],
}
OTHER_POLICIES = {
    name: [f"checkpointing={name}"]
    for name in (
        "full_reentrant", "interval", "uniform", "block", "sqrt", "selective_ops", "selective_modules",
        "discard_output", "deepspeed",
    )
}  # fmt: skip
TRAINED = {"whole": [], "lora": ["peft=lora", "peft.r=4"]}
OTHER_TRAINED = {"qlora": ["peft=qlora", "peft.r=4"]}
LENGTH = 62  # does not divide by four ranks
SIZES: dict[str, Any] = tiny.SIZES | {"max_position_embeddings": 256}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 8, "num_key_value_heads": 1},  # fewer than ranks
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 8,
    },
}
SINKS: dict[
    str, dict[str, Any]
] = {  # a weight for each head, which goes into attention beside queries and keys
    "gpt_oss": {
        "head_dim": 8,
        "num_key_value_heads": 1,
        "num_local_experts": 4,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    }
}
DATA = {"plain": "stream", "packed": "documents"}


@dataclass(frozen=True)
class Cell:
    """A run of the grid by its choices; `ranks` share each sequence, and there are `groups` of them."""

    model: str
    zero: str
    policy: str
    trained: str
    data: str
    ranks: int = 2
    groups: int = 1

    @property
    def world(self) -> int:
        return self.ranks * self.groups

    def __str__(self) -> str:
        shared = f"{self.groups}x{self.ranks}" if self.groups > 1 else str(self.ranks)
        return "-".join((self.model, self.zero, self.policy, self.trained, self.data, shared))

    def words(self, workshop: Path) -> list[str]:
        """The overrides of the run; it lands in workshop/out/NAME/run."""
        chosen = [*(ZERO | OTHER_ZERO)[self.zero], f"train.sequence_parallel_size={self.ranks}"]
        words = [*_words(workshop, str(self), self), *chosen]
        return [
            *words,
            *(POLICIES | OTHER_POLICIES)[self.policy],
            *(_half_way(words, self.world) if self.policy == "budget" else []),
        ]

    def alone(self, workshop: Path) -> list[str]:
        """The overrides of the same run on one rank, which keeps everything."""
        name = f"{self.model}-{self.trained}-{self.data}"
        return [*_words(workshop, name, self), "deepspeed.config=zero1", "checkpointing=none"]


OTHER_CELLS = [
    *(Cell("llama", "zero3", policy, "whole", "packed") for policy in OTHER_POLICIES),
    *(Cell("gemma3_text", zero, "full", "whole", "packed") for zero in OTHER_ZERO),
    *(Cell("qwen3", zero, "full", "qlora", "packed") for zero in ("zero2", "zero3")),
    Cell("llama", "zero1", "none", "whole", "plain", groups=2),
    Cell("mixtral", "zero2", "budget", "whole", "packed", groups=2),
    Cell("gemma3_text", "zero3", "full", "lora", "packed", groups=2),
    Cell("qwen3", "zero3_offload", "offload", "whole", "packed", groups=2),
]


def every_cell() -> list[Cell]:
    """Every combination on two ranks and on four; of models with sinks the diagonals, without what they refuse."""
    choices = (list(MODELS | SINKS), list(ZERO), list(POLICIES), list(TRAINED), list(DATA), [2, 4])
    found = []
    for place in itertools.product(*(range(len(names)) for names in choices)):
        cell = Cell(*(names[at] for names, at in zip(choices, place, strict=True)))
        refused = cell.policy in (
            "tiles",
            "selective_linears",
        )  # of sinks: attention that is not fused is not kept
        if cell.model not in SINKS or (not refused and sum(place) % 4 == 0):
            found.append(cell)
    return found + OTHER_CELLS


def make_workshop(folder: Path) -> Path:
    """`folder` with a model of each kind and texts of very different lengths."""
    for name, more in (MODELS | SINKS).items():
        torch.manual_seed(5)
        config = AutoConfig.for_model(name, **(SIZES | more))
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    draw = random.Random(5)
    texts = ["".join(draw.choices("abcdefgh ", k=draw.randint(1, 90))) for _ in range(120)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def _words(workshop: Path, name: str, cell: Cell) -> list[str]:
    return tiny.overrides(
        workshop / cell.model,
        workshop / "texts.jsonl",
        workshop / "out",
        name,
        "data=jsonl",
        f"data.packing={DATA[cell.data]}",
        f"train.seq_len={LENGTH}",
        "train.steps=3",
        "optim.eps=1e-4",  # a gradient that is rounding alone moves no weight
        *(TRAINED | OTHER_TRAINED)[cell.trained],
        *["model.attention=eager"] * (cell.model in SINKS),
    )


def _half_way(words: list[str], ranks: int) -> list[str]:
    """The budget half way between the peaks of recomputing all and of keeping all, as planned."""
    peaks = [
        make_plan(
            compose.compose_run([*words, f"checkpointing={policy}"]).run, world_size=ranks, on_gpu=False
        ).plan.peak_bytes
        for policy in ("full", "none")
    ]
    return [f"checkpointing.budget_gib={sum(peaks) / 2 / GIB:.12f}"]


def run(words: list[str]) -> dict[str, Any]:
    """Train on this rank; what metrics.jsonl says of each step, and the trained weights. Collective."""
    composed = compose.compose_run(words)
    made = build.build(composed)
    loop.train(made)
    weights = {name: p for name, p in made.engine.module.named_parameters() if p.requires_grad}
    gathered = contextlib.nullcontext()
    if made.strategy.zero_stage == 3:
        gathered = deepspeed.zero.GatheredParameters(list(weights.values()))
    with gathered:
        found = {name: p.detach().clone() for name, p in weights.items()}
    made.engine.destroy()
    rows = tiny.rows(made.folder)
    return {
        "losses": [row["loss/train"] for row in rows],
        "norms": [row["optim/grad_norm"] for row in rows],
        "evaluated": [row["loss/eval"] for row in tiny.rows(made.folder, "loss/eval")],
        "weights": found,
        "folder": made.folder,
    }
