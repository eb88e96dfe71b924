"""How long a model takes to load at ZeRO-3, and what each rank holds meanwhile: own slices beside from_pretrained.

One model is written once and loaded in turns both ways, by new ranks each time, with its files out of the page cache
(posix_fadvise on these files alone; how much stayed there is recorded). Parameters are offloaded to the host. Seconds
are those of the slowest rank, from reading headers to a model that can train. Two peaks are told, both beyond what a
rank held before: memory that has no file behind it, and resident memory with mapped files, which the kernel can drop.

    python benchmarks/loading.py [--turns 5] [--ranks 2] [--mib 600] [--files F32]      # loading.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results"
MIB = 1024**2
HIDDEN, VOCABULARY = 1024, 32000
WAYS = ("own_slices", "from_pretrained")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=600, help="of weights in bf16, about")
    parser.add_argument("--files", choices=("BF16", "F32"), default="BF16", help="dtype of the files")
    args = parser.parse_args()
    from benchmarks import loading  # by its name, which the ranks can import
    from benchmarks.environment import environment
    from tests.support.pool import RankPool

    found: dict[str, list[Any]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_FOLDER")) as scratch:
        folder = Path(scratch)
        writer = RankPool(1)
        writer.run(loading.write_model, folder=folder, mib=args.mib, dtype=args.files)
        writer.close()
        for turn in range(args.turns):
            for way in WAYS if turn % 2 == 0 else WAYS[::-1]:
                pool = RankPool(args.ranks)
                try:
                    pool.run(loading.warm_up, folder=folder)
                    cached = drop_from_cache(folder)
                    ranks = pool.run(loading.load, folder=folder, way=way)
                finally:
                    pool.close()
                load_average = os.getloadavg()[0]
                found[way].append({"ranks": ranks, "cached_bytes": cached, "load_average": load_average})
                print(f"turn {turn}, {way}: {max(each['seconds'] for each in ranks):.2f} s", flush=True)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    result = figures(found, size) | {
        "files": args.files,
        "ranks": args.ranks,
        "environment": environment("cpu"),
    }
    path = RESULTS / f"loading{'' if args.files == 'BF16' else '_' + args.files.lower()}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(
        json.dumps(
            {key: result[key] for key in ("file_bytes", "medians", "own_over_from_pretrained")}, indent=2
        )
    )


def write_model(folder: Path, mib: int, dtype: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    layer = 4 * HIDDEN**2 + 3 * HIDDEN * 4 * HIDDEN
    layers = max(1, round((mib * MIB / 2 - 2 * VOCABULARY * HIDDEN) / layer))
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        tie_word_embeddings=False,
    )
    net = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    net.to(torch.bfloat16 if dtype == "BF16" else torch.float32).save_pretrained(folder, max_shard_size="200MB")


def warm_up(folder: Path) -> None:
    """Import the architecture: that is not loading."""
    from remat.model import hf_model

    cfg = model_config(folder, "auto")
    hf_model.skeleton(hf_model.load_config(cfg), cfg)


def model_config(folder: Path, way: str) -> Any:
    from remat.config.options import ModelConfig, ModelInit, ModelLoad

    return ModelConfig(init=ModelInit.pretrained, path=str(folder), load=ModelLoad(way))


def load(folder: Path, way: str) -> dict[str, float]:
    """Load on this rank; its figures. The kernel's high-water mark of this process begins anew."""
    from remat.config.options import Precision
    from remat.model import hf_model

    cfg, told = model_config(folder, way), []
    ds = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_param": {"device": "cpu"},
        },
    }
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    disk, passed = io_bytes()
    net = hf_model.build(
        cfg,
        hf_model.load_config(cfg),
        precision=Precision.bf16,
        ds_config=ds,
        zero_stage=3,
        seed=1,
        told=told.append,
    )
    disk_after, passed_after = io_bytes()
    parameters: Any = list({id(each): each for each in net.parameters()}.values())
    return {
        "seconds": told[0].seconds,
        "peak_bytes": told[0].peak_bytes,
        "peak_with_mapped_files_bytes": status_bytes("VmHWM") - before,
        "shard_bytes": sum(each.ds_tensor.nbytes for each in parameters),
        "preadv_bytes": told[0].read_bytes,
        "disk_bytes": disk_after - disk,
        "read_call_bytes": passed_after - passed,
    }


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def io_bytes() -> tuple[int, int]:
    """Bytes that this process fetched from disks (page faults included), and those its calls of read returned."""
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(found["read_bytes"]), int(found["rchar"])


def drop_from_cache(folder: Path) -> int | None:
    """Drop the model's files from the page cache; return the bytes that stayed, None where fincore is not there."""
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    names = [str(file) for file in folder.glob("*.safetensors")]
    try:
        told = subprocess.run(
            ["fincore", "-b", "-n", "-o", "RES", *names], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return sum(map(int, told.stdout.split()))


def figures(found: dict[str, list[Any]], file_bytes: int) -> dict[str, Any]:
    """Medians over the turns of what the worst rank has, and the ratio of the two ways turn by turn."""
    medians = {}
    for way, turns in found.items():
        median = {
            name: statistics.median(max(each[name] for each in turn["ranks"]) for turn in turns)
            for name in ("seconds", "peak_bytes", "peak_with_mapped_files_bytes", "shard_bytes")
        }
        median["disk_bytes_of_all"] = statistics.median(
            sum(each["disk_bytes"] for each in turn["ranks"]) for turn in turns
        )
        medians[way] = median
    slowest = {
        way: [max(each["seconds"] for each in turn["ranks"]) for turn in turns] for way, turns in found.items()
    }
    pairs = [own / theirs for own, theirs in zip(*(slowest[way] for way in WAYS), strict=True)]
    own_turns = found["own_slices"]
    read = statistics.median(sum(each["preadv_bytes"] for each in turn["ranks"]) for turn in own_turns)
    medians["own_slices"]["preadv_bytes_of_all"] = read
    return {
        "file_bytes": file_bytes,
        "medians": medians,
        "own_over_from_pretrained": {
            "seconds_of_medians": medians["own_slices"]["seconds"] / medians["from_pretrained"]["seconds"],
            "seconds_median_of_pairs": statistics.median(pairs),
            "seconds_of_each_pair": pairs,
            "preadv_bytes_over_files": read / file_bytes,
            "peak_over_shard_mib": (medians["own_slices"]["peak_bytes"] - medians["own_slices"]["shard_bytes"])
            / MIB,
        },
        "turns": found,
    }


if __name__ == "__main__":
    main()
