"""The loss under each format of AdamW's states against fp32 states: the same seeds, data and steps; one CPU rank.

Two pieces of training, because what rounding loses depends on how small a step is beside a weight: from random weights
at 3e-3, and on from what fp32 states reached there, at 1e-5. fp32 states are trained by both kernels, torch's and that
of the host: they say how far apart two runs are that round differently. Each run is one process, of about two minutes
of one core; what was measured is kept, so that the script can be stopped and started again.

    python benchmarks/optimizer_states.py [--only NAME ...]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULT = ROOT / "benchmarks" / "results" / "optimizer_states.json"
LAST = 50  # steps whose training losses are averaged
STATES = {
    "adamw": ["deepspeed.config=zero2"],
    "adamw, offloaded": ["deepspeed.config=zero2_offload"],
    "bf16_master": ["deepspeed.config=zero2_offload", "optim.states=bf16_master"],
    "bf16": ["deepspeed.config=zero2", "optim.states=bf16"],
    "bf16, offloaded": ["deepspeed.config=zero2_offload", "optim.states=bf16"],
    "adamw_8bit": ["deepspeed.config=zero2", "optim.name=adamw_8bit"],
}
COMMON = [
    "recipe=tiny_zero3_offload", "train.seq_len=128", "train.micro_batch_size=8", "train.global_batch_size=8",
    "train.log_every=1", "train.eval_every=0", "train.eval_batches=0", "data.eval_tokens=100000", "save.every=0",
    "save.at_end=false", "tracking=wandb_disabled", "run_id=run", "checkpointing=none", "save.rehearse=false",
]  # fmt: skip
FROM_SCRATCH = ["train.steps=400", "optim.lr=3e-3", "save.export=true"]
GO_ON = [
    "train.steps=200",
    "optim.lr=1e-5",
    "optim.warmup_steps=0",
    "optim.schedule=constant",
    "save.export=false",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(STATES), choices=list(STATES))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "remat_optimizer_states")
    args = parser.parse_args()
    for part in ("from scratch", "go on"):
        for name in args.only:
            measure(part, name, args.work)


def measure(part: str, name: str, work: Path) -> None:
    """Run one piece of training and add its losses to the result file; do nothing where they are there."""
    from benchmarks.environment import environment

    result: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    key, kept = f"{part}: {name}", result.setdefault("losses", {})
    if key in kept:
        return
    words = [*COMMON, f"output_dir={work}", f"name={folder_of(key)}", *STATES[name]]
    train([*words, *(FROM_SCRATCH if part == "from scratch" else [*GO_ON, *trained(work)])])
    measured_by = environment("cpu")
    metrics = work / folder_of(key) / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [row["loss/train"] for row in rows if "loss/train" in row]
    held_out = next(row["loss/eval"] for row in reversed(rows) if "loss/eval" in row)
    kept[key] = {
        "held_out": held_out,
        "train_last_50": statistics.mean(losses[-LAST:]),
        "first": losses[0],
        "steps": len(losses),
        **{name: measured_by[name] for name in ("commit", "date")},
    }
    result["words"] = {"common": COMMON, "from scratch": FROM_SCRATCH, "go on": GO_ON, "states": STATES}
    result["environment"] = {
        name: value for name, value in measured_by.items() if name not in ("commit", "date")
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(key, kept[key], flush=True)


def folder_of(key: str) -> str:
    return "_".join(re.findall(r"[a-z0-9]+", key))


def trained(work: Path) -> list[str]:
    """The words of a run that begins with what fp32 states reached."""
    model = work / folder_of("from scratch: adamw") / "run" / "export"
    return ["model.init=pretrained", f"model.path={model}", "model.tokenizer=bytes"]


def train(words: list[str]) -> None:
    subprocess.run(
        [sys.executable, "train.py", *words], check=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


if __name__ == "__main__":
    main()
