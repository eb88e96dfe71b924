"""What benchmarks/plan_accuracy.py measures: shapes, strategies and tokens, the most telling first."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

STEPS = 4  # ZeRO-3 learns the order of modules in the first two
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


def portable(words: list[str]) -> list[str]:
    """Without the folders of this machine."""
    return [word for word in words if not word.startswith(("output_dir=", "data.cache_dir="))]
