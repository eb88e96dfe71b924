"""From a JSONL of chats to packed blocks: this project against datasets.map and TRL's packing. CPU, no model.

Both read the same file with the same tokenizer (byte-level BPE, trained on the standard library here) and the same chat
template, mark what the assistant says, and pack by best fit to SEQ_LEN tokens. The other side does what SFTTrainer of
TRL does: `apply_chat_template(..., return_assistant_tokens_mask=True)` on each row in `datasets.map(num_proc=2)`, then
`trl.pack_dataset(strategy="bfd")`, and the result is written. Each is a process of its own; they take turns. Wall and
CPU seconds are without imports; memory is the highest sum of proportional set sizes over the process and its children,
and the same less what it was after the imports.

    python benchmarks/data_path.py --peer PYTHON_WITH_TRL [--repeats 2] [--megabytes 75]
    python benchmarks/data_path.py --megabytes 1000      # without --peer: this project alone, at two sizes
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import cycle
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results"
SEQ_LEN, PROCESSES, VOCABULARY = 2048, 2, 16_000
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", help="a Python that has trl")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=75)
    args = parser.parse_args()
    from benchmarks.environment import environment

    result: dict[str, Any] = {"sizes_mb": [], "environment": environment("cpu")}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_tokenizer(folder / "tokenizer")
        sizes = [args.megabytes] if args.peer else [args.megabytes // 10, args.megabytes]
        for megabytes in sizes:
            file = make_file(folder / f"{megabytes}.jsonl", megabytes * 1_000_000)
            found: dict[str, list[dict[str, float]]] = {"remat": [], "datasets and TRL": []}
            for repeat in range(args.repeats):
                found["remat"].append(measured(sys.executable, "ours", folder, file, repeat))
                if args.peer:
                    found["datasets and TRL"].append(measured(args.peer, "theirs", folder, file, repeat))
            medians = {name: _median(runs) for name, runs in found.items() if runs}
            result["sizes_mb"].append({"megabytes": megabytes, **medians})
            if args.peer:
                ours, theirs = medians["remat"], medians["datasets and TRL"]
                result["ratios"] = {
                    key: ours[key] / theirs[key] for key in ("wall_s", "cpu_s", "peak_mib", "grown_mib")
                }
    result["load_average"] = os.getloadavg()
    name = "data_path.json" if args.peer else "data_path_memory.json"
    (RESULTS / name).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def _median(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from remat.data.files import stdlib_files

    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
    bare.train([str(file.path) for file in stdlib_files()[::8]], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<|im_end|>", pad_token="<|pad|>")
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)


def make_file(path: Path, size_bytes: int) -> Path:
    """Write chats of 2 to 8 turns, of log-normal length, cut from the standard library's text."""
    import numpy as np

    from remat.data.files import stdlib_files

    text = "".join(file.path.read_text() for file in stdlib_files())
    draw, at = np.random.Generator(np.random.PCG64(0)), 0
    with path.open("w") as out:
        while out.tell() < size_bytes:
            roles = zip(cycle(["user", "assistant"]), range(2 * int(draw.integers(1, 5))), strict=False)
            turns = []
            for role, _ in roles:
                length = int(np.exp(draw.normal(5.0, 0.9))) + 4
                at = at + length if at + 2 * length < len(text) else 0
                turns.append({"role": role, "content": text[at : at + length].strip() or "yes"})
            out.write(json.dumps({"messages": turns}) + "\n")
    return path


def measured(python: str, which: str, folder: Path, file: Path, repeat: int) -> dict[str, float]:
    """Run one side in a process of its own; return what it says and its peak of memory."""
    import psutil

    scratch = folder / f"{which}-{file.stem}-{repeat}"
    scratch.mkdir()
    command = [python, __file__, f"--work={which}", str(folder / "tokenizer"), str(file), str(scratch)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HOME": str(scratch), "HF_HUB_OFFLINE": "1"}
    environment.pop("TOKENIZERS_PARALLELISM", None)  # as a user has it
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    peak = 0

    def watch() -> None:
        nonlocal peak
        while process.poll() is None:
            total = 0
            try:
                top = psutil.Process(process.pid)
                for each in [top, *top.children(recursive=True)]:
                    total += each.memory_full_info().pss
            except psutil.Error:
                continue
            peak = max(peak, total)
            time.sleep(0.1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    out, _ = process.communicate()
    watcher.join()
    if process.returncode:
        sys.exit(f"{which} failed")
    found: dict[str, float] = json.loads(out.splitlines()[-1])
    base = found.pop("base_bytes")
    return found | {"peak_mib": peak / 2**20, "grown_mib": (peak - base) / 2**20}


def work(which: str, tokenizer_folder: str, file: str, scratch: str) -> None:
    import psutil
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    prepare = ours(tokenizer, file, scratch) if which == "ours" else theirs(tokenizer, file, scratch)
    base = psutil.Process().memory_full_info().pss
    wall, before = time.perf_counter(), os.times()
    figures = prepare()
    wall, after = time.perf_counter() - wall, os.times()
    cpu = sum(after[:4]) - sum(before[:4])
    print(json.dumps({"wall_s": wall, "cpu_s": cpu, "base_bytes": base, **figures()}))


def ours(tokenizer: Any, file: str, scratch: str) -> Any:
    from remat.config.options import DataConfig, DataSource, Packing
    from remat.data.cache import open_blocks

    cfg = DataConfig(
        source=DataSource.files,
        path=file,
        packing=Packing.documents,
        eval_fraction=0.0,
        processes=PROCESSES,
        cache_dir=f"{scratch}/cache",
    )

    def prepare() -> Any:
        splits = open_blocks(cfg, tokenizer=tokenizer, seq_len=SEQ_LEN, seed=0, show_progress=False)
        counts = splits.report["train"]
        return lambda: {"tokens": counts["tokens"], "filled": counts["tokens"] / (counts["blocks"] * SEQ_LEN)}

    return prepare


def theirs(tokenizer: Any, file: str, scratch: str) -> Any:
    import datasets
    import trl

    def tokenise(row: dict[str, Any]) -> dict[str, Any]:
        found = tokenizer.apply_chat_template(
            row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return {"input_ids": found["input_ids"], "assistant_masks": found["assistant_masks"]}

    def prepare() -> Any:
        rows = datasets.load_dataset("json", data_files=file, split="train", cache_dir=f"{scratch}/cache")
        rows = rows.map(tokenise, remove_columns=["messages"], num_proc=PROCESSES)
        packed = trl.pack_dataset(rows, seq_length=SEQ_LEN, strategy="bfd", map_kwargs={"num_proc": PROCESSES})

        def figures() -> dict[str, float]:
            lengths = [len(ids) for ids in packed.with_format("arrow")["input_ids"]]
            return {"tokens": sum(lengths), "filled": sum(lengths) / (len(lengths) * SEQ_LEN)}

        return figures

    return prepare


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("--work="):
        work(sys.argv[1].removeprefix("--work="), *sys.argv[2:])
    else:
        main()
