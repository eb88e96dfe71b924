"""A tiny pretrained model, tiny data, and a plain PyTorch training loop to hold everything else to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import bitsandbytes
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import AutoConfig, AutoModelForCausalLM, set_seed
from transformers.optimization import Adafactor

from remat.config import compose
from remat.config.options import OptimConfig, OptimName, Packing
from remat.data.batches import GlobalBatches, steps_of
from remat.data.cache import open_blocks
from remat.data.tokenizer import load_tokenizer
from remat.model import optimizer

STEPS = 4
SIZES: dict[str, Any] = {  # of a Llama with 60 k parameters
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
ENDLESS = [  # a run that something else must end
    "train.steps=100000",
    "optim.warmup_steps=0",
    "save.every=2",
    "save.keep=9",
    "deepspeed.config=zero2",
]
ON_A_4090 = [  # a plan that keeps all activations
    "recipe=tiny_zero3_offload",
    "hardware=1x4090",
    "model.architecture.num_hidden_layers=2",
    "deepspeed.config=zero2",
    "checkpointing=none",
    "train.seq_len=4096",
    "train.micro_batch_size=4",
]
# The least of both: a search for less memory has fewer settings.
NO_CHOICE = ["train.micro_batch_size=1", "train.loss=chunked"]


def make_model(folder: Path, model_type: str = "llama", **more: object) -> Path:
    """A Llama with 60 k parameters, or its like of another type, saved as safetensors."""
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(SIZES | more))).save_pretrained(folder)
    return folder


def make_instructions(path: Path, rows: int = 40) -> Path:
    """Alpaca rows whose answers differ much in length: a mean of means would weigh their tokens wrongly."""
    with path.open("w") as out:
        for index in range(rows):
            row = {
                "instruction": f"Count to {index}",
                "input": "",
                "output": " ".join(map(str, range(index % 9 + 1))),
            }
            out.write(json.dumps(row) + "\n")
    return path


def overrides(model: Path, data: Path, out: Path, name: str, *more: str) -> list[str]:
    return [
        "recipe=tiny_zero3_offload",
        f"name={name}",
        "run_id=run",
        f"output_dir={out}",
        "model=hf",
        f"model.path={model}",
        "model.tokenizer=bytes",
        "data=alpaca",
        f"data.path={data}",
        f"data.cache_dir={out}/cache",
        "data.eval_fraction=0",
        "train.precision=fp32",
        f"train.steps={STEPS}",
        "train.seq_len=192",
        "train.micro_batch_size=2",
        "train.global_batch_size=4",
        "train.log_every=1",
        "train.eval_every=0",
        "optim.warmup_steps=2",
        "optim.lr=1e-2",
        "save.every=0",
        "save.at_end=false",
        "save.export=false",
        "tracking=wandb_disabled",
        *more,
    ]


def make_workshop(folder: Path) -> Path:
    """`folder` with a model and instructions in it: what `words` refers to."""
    make_model(folder / "model")
    make_instructions(folder / "data.jsonl")
    make_texts(folder / "texts.jsonl")
    return folder


def words(workshop: Path, name: str, *more: str) -> list[str]:
    """The overrides of run `name` over what the workshop holds; it lands in workshop/out/name/run."""
    return overrides(workshop / "model", workshop / "data.jsonl", workshop / "out", name, *more)


def adapted(net: Any) -> PeftModel:
    """peft alone; its first values drawn once more after seeding, as creation draws others in between."""
    shape = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")
    wrapped = get_peft_model(net, shape)
    set_seed(1234)
    for module in wrapped.modules():
        if isinstance(module, LoraLayer):
            module.reset_lora_parameters("default", True)
    return wrapped


def plain_loop(words: list[str], adapt: Callable[[Any], Any] = lambda net: net) -> list[tuple[float, float]]:
    """(loss, gradient norm) per step of the same run in plain PyTorch: one process, no DeepSpeed, full logits.

    With data.packing=documents, and instruction data by default, each document goes through the model by itself,
    without positions or masks.
    `adapt` is applied to the model before training, for example to freeze parts of it.
    """
    cfg = compose.compose_run(words).run
    net = adapt(AutoModelForCausalLM.from_pretrained(cfg.model.path, dtype=torch.float32))
    tokenizer = load_tokenizer("bytes", None, trust_remote_code=False)
    packing = cfg.data.packing or (Packing.documents if cfg.data.has_rows else None)
    data = replace(cfg.data, packing=packing)
    blocks = open_blocks(
        data, tokenizer=tokenizer, seq_len=cfg.train.seq_len, seed=cfg.train.seed, show_progress=False
    )
    size = cfg.train.global_batch_size
    steps = cfg.train.steps or steps_of(cfg.train.epochs or 0, len(blocks.train), size)
    batches = GlobalBatches(
        blocks.train,
        global_batch_size=size,
        micro_batch_size=size,
        rank=0,
        world_size=1,
        seed=cfg.train.seed,
        shuffle=cfg.data.shuffle,
    )
    trained = [p for p in net.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": cfg.optim.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    plain = _optimizer(cfg.optim, groups)
    history = []
    for step in range(steps):
        batch = batches.next_step().micro_batches[0]
        logits = _logits(net, batch)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
        plain.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), cfg.optim.gradient_clipping)
        for group in plain.param_groups:
            group["lr"] = optimizer.lr_at(step, cfg.optim, steps)
        plain.step()
        history.append((loss.item(), norm.item()))
    return history


def _optimizer(cfg: OptimConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The library's own optimizer of this name, on whole weights."""
    betas = (cfg.beta1, cfg.beta2)
    if cfg.name is OptimName.adamw:
        return torch.optim.AdamW(groups, betas=betas, eps=cfg.eps)
    if cfg.name is OptimName.adafactor:
        return Adafactor(groups, lr=cfg.lr, scale_parameter=False, relative_step=False)
    if cfg.name is OptimName.lion:
        return bitsandbytes.optim.Lion32bit(groups, betas=betas)
    return bitsandbytes.optim.AdamW8bit(groups, betas=betas, eps=cfg.eps)


def _logits(net: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """[batch, seq, vocab]"""
    if "position_ids" not in batch:
        logits: torch.Tensor = net(input_ids=batch["input_ids"], use_cache=False).logits
        return logits
    rows = []
    for ids, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        parts = [net(input_ids=ids[None, a:b], use_cache=False).logits[0] for a, b in pairwise(starts)]
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def make_texts(path: Path, rows: int = 120) -> Path:
    """Documents of 1 to 90 letters in jsonl."""
    texts = [chr(97 + index % 26) * (1 + 37 * index % 90) for index in range(rows)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def rows(folder: Path, key: str = "loss/train") -> list[dict[str, float]]:
    """The rows of a run's metrics.jsonl that have `key`."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if key in row]
