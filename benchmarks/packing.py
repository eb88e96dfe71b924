"""Tokens trained per second, rows packed against rows padded: two CPU ranks.

All have the same model, strategy and micro-batch, and so the same planned memory: chats of varied lengths made of real
text (tests/support/chats.py), the recipe tiny_zero3_offload in fp32. Rows are padded to train.seq_len, as where every
row is padded to one length, or to the longest of their micro-batch. Micro-batches are made of rows in random order, as
trainers do that do not group rows by length, or of the rows of a step sorted by length, as data.packing=none does. The
last two take about as many tokens a step as the packed one, in more micro-batches. Launches take turns; each figure is
the median of the steady steps of all launches of its kind. The load of the machine is recorded.

    python benchmarks/packing.py [--repeats 2] [--steps 14] [--micro-batches 1 2 4]  # benchmarks/results/packing.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULT = ROOT / "benchmarks" / "results" / "packing.json"
RANKS, SEQ_LEN = 2, 512
ROWS = "REMAT_BENCHMARK_ROWS"  # in the ranks: how rows make micro-batches
FIRST_STEADY = 3  # micro-batches of the first step are watched operation by operation
VARIANTS = {  # how rows make micro-batches, and how many micro-batches a rank has in a step
    "packed": ("packed", 1),
    "padded to train.seq_len": ("to train.seq_len", 1),
    "padded to the longest, in random order": ("in random order", 1),
    "padded to the longest, sorted": ("sorted", 1),
    "padded to the longest, in random order, as many tokens a step": ("in random order", 4),
    "padded to the longest, sorted, as many tokens a step": ("sorted", 4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4])
    args = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cpu"
    from benchmarks.environment import environment
    from tests.support.chats import make_chats

    result: dict[str, Any] = {"micro_batches": {}, "ranks": RANKS, "seq_len": SEQ_LEN}
    with tempfile.TemporaryDirectory() as scratch:
        chats = make_chats(Path(scratch) / "chats.jsonl")
        for rows in args.micro_batches:
            result["micro_batches"][rows] = compare(Path(scratch), chats, rows, args.repeats, args.steps)
    result["load_average"] = os.getloadavg()
    result["environment"] = environment("cpu")
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def compare(scratch: Path, chats: Path, micro_batch: int, repeats: int, steps: int) -> dict[str, Any]:
    """Launch each variant `repeats` times in turns, with one micro-batch a rank and step, but for the last variant."""
    found: dict[str, list[list[dict[str, float]]]] = {name: [] for name in VARIANTS}
    data: dict[str, dict[str, Any]] = {}
    for repeat in range(repeats):
        for name, (rows, factor) in VARIANTS.items():
            packing = "documents" if rows == "packed" else "none"
            words = [f"data.packing={packing}", f"train.micro_batch_size={micro_batch}", f"train.steps={steps}"]
            words.append(f"train.global_batch_size={factor * RANKS * micro_batch}")
            os.environ[ROWS] = rows
            run = launch(scratch, chats, f"{re.sub('[^a-z]+', '-', name)}-{micro_batch}-{repeat}", words)
            lines = (run / "metrics.jsonl").read_text().splitlines()
            steps_of = [row for row in map(json.loads, lines) if "throughput/tokens_per_s" in row]
            found[name].append([row for row in steps_of if row["step"] >= FIRST_STEADY])
            data[name] = json.loads((run / "data.json").read_text())
    result: dict[str, Any] = {name: figures(found[name], data[name]) for name in VARIANTS}
    packed = result["packed"]["trained_tokens_per_s"]
    result["packed_to_others"] = {
        name: packed / result[name]["trained_tokens_per_s"] for name in VARIANTS if name != "packed"
    }
    return result


def launch(scratch: Path, chats: Path, name: str, words: list[str]) -> Path:
    from tests.support.launcher import deepspeed

    done = deepspeed(
        "recipe=tiny_zero3_offload", f"name={name}", "run_id=run", f"output_dir={scratch}/out",
        "data=chat", f"data.path={chats}", f"data.cache_dir={scratch}/cache", "data.eval_fraction=0",
        "train.precision=fp32", f"train.seq_len={SEQ_LEN}",
        "train.log_every=1",
        "train.eval_every=0", "save.every=0", "save.at_end=false", "save.export=false", "tracking=wandb_disabled",
        *words, script="benchmarks/packing.py", real=True,
    )  # fmt: skip
    if done.code:
        sys.exit(done.out[-4000:])
    return scratch / "out" / name / "run"


def figures(launches: list[list[dict[str, float]]], data: dict[str, Any]) -> dict[str, Any]:
    rows = [row for launch in launches for row in launch]

    def median(key: str) -> float:
        return statistics.median(row[key] for row in rows)

    return {
        "trained_tokens_per_s": median("throughput/trained_tokens_per_s"),
        "tokens_per_s": median("throughput/tokens_per_s"),
        "step_s": median("time/step_s"),
        "padding_share": rows[-1]["tokens/padding_share"],
        "blocks": data["blocks"],
        "steps": len(rows),
    }


def train() -> None:
    """Be a rank: train.py, where asked with every row as long as train.seq_len, or with rows in random order."""
    import numpy as np

    from remat.data.batches import GlobalBatches
    from remat.data.blocks import Blocks

    if os.environ[ROWS] == "to train.seq_len":
        Blocks.widths = lambda self, groups: np.full(len(groups), self.seq_len)  # type: ignore[method-assign]
    elif os.environ[ROWS] == "in random order":
        by_length = GlobalBatches._sample_ids

        def at_random(self: GlobalBatches, position: int, count: int) -> np.ndarray:
            return np.random.default_rng(position).permutation(by_length(self, position, count))

        GlobalBatches._sample_ids = at_random  # type: ignore[method-assign]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


if __name__ == "__main__":
    train() if "LOCAL_RANK" in os.environ else main()
