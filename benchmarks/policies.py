"""Memory and step time of every activation checkpointing policy on one model, side by side in one process.

Forward and backward of one micro-batch without an engine, so that nothing but the policy differs. Policies are
interleaved round by round and the medians compared; the result is written after each round. On a GPU the peak is the
allocator's; on a CPU, where there is none, it is the largest sum of live storages, counted op by op in a pass of its
own that is not timed.

    python benchmarks/policies.py                                      # 8B-shaped, 8 layers, 4096 tokens: needs 60 GiB
    python benchmarks/policies.py --hidden 256 --layers 4 --seq-len 256 --dtype fp32 --min-bytes 0   # on a CPU
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results"

import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from benchmarks.plan_accuracy import write  # noqa: E402
from remat.activation_checkpointing import apply, policy  # noqa: E402
from remat.config import compose  # noqa: E402
from remat.config.options import CheckpointingConfig, LossKind  # noqa: E402
from remat.model import loss  # noqa: E402
from remat.report import run_dir  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ALONE = {"deepspeed"}  # needs process groups; the same algorithm as full_reentrant
WITH_OFFLOAD = ["full", "selective_ops", "selective_linears", "selective_modules", "none"]


def main() -> None:
    args = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = model(args, device)
    token_loss = loss.TokenLoss(net, LossKind.chunked)  # it checks its first call, which is not timed
    wanted = policies(args)
    points = {name: {"name": name, "seconds": []} for name in wanted}
    for name, cfg in wanted.items():  # warm, and out-of-memory is a result
        points[name] |= memory(net, cfg, token_loss, args, device)
    path = RESULTS / f"policies_{device.type}.json"
    RESULTS.mkdir(exist_ok=True)
    alive = [name for name in wanted if "error" not in points[name]]
    for _ in range(args.rounds):
        for name in alive:
            points[name]["seconds"].append(seconds(net, wanted[name], token_loss, args, device))
        write(path, {"points": finished(points), "setting": vars(args), "machine": machine(device)})
    print(table(list(points.values())))
    print(path.relative_to(ROOT))


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--hidden", type=int, default=4096, help="Llama 3.1 8B's; other widths keep its proportions"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--vocab", type=int, default=32768, help="small, so that the loss is not the peak")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--min-bytes", type=int, default=1 << 20, help="checkpointing.offload.min_bytes")
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args(words)


def model(args: argparse.Namespace, device: torch.device) -> Any:
    """A Llama of the given width: 3.5 x intermediate, heads of 128 (or 32), 4 queries per key."""
    head = 128 if args.hidden >= 1024 else 32
    config = AutoConfig.for_model(
        "llama",
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 7 // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // head,
        num_key_value_heads=max(1, args.hidden // head // 4),
        vocab_size=args.vocab,
        max_position_embeddings=args.seq_len,
        use_cache=False,
    )
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=DTYPES[args.dtype]).train()


def policies(args: argparse.Namespace) -> dict[str, CheckpointingConfig]:
    """Every choice of conf/checkpointing, and what it keeps moved to the host."""
    names = [name for name in compose.group_choices()["checkpointing"] if name not in ALONE]
    found = {name: [f"checkpointing={name}"] for name in names}
    offload = "checkpointing.offload.enabled=true"
    found |= {f"{name} + offload": [f"checkpointing={name}", offload] for name in WITH_OFFLOAD}
    smallest = f"checkpointing.offload.min_bytes={args.min_bytes}"
    return {name: compose.compose_run([*words, smallest]).run.checkpointing for name, words in found.items()}


def one_pass(
    net: Any, applied: apply.Applied, token_loss: loss.TokenLoss, args: argparse.Namespace, device: torch.device
) -> None:
    """Forward, chunked loss, backward; gradients are dropped, as ZeRO with offload drops them."""
    ids = torch.zeros(args.micro_batch, args.seq_len, dtype=torch.long, device=device)
    with applied.micro_batch():
        token_loss(net, {"input_ids": ids, "labels": ids}).backward()
    net.zero_grad(set_to_none=True)


def memory(
    net: Any,
    cfg: CheckpointingConfig,
    token_loss: loss.TokenLoss,
    args: argparse.Namespace,
    device: torch.device,
) -> dict[str, Any]:
    """Kept bytes of the layers, the peak above the weights, FLOPs run again; an error instead when memory runs out."""
    applied = put_on(net, cfg, args, device)
    try:
        one_pass(net, applied, token_loss, args, device)
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
            one_pass(net, applied, token_loss, args, device)
            peak = torch.cuda.max_memory_allocated() - base
        watch = applied.watch(device)
        ids = torch.zeros(args.micro_batch, args.seq_len, dtype=torch.long, device=device)
        applied.reset()
        with applied.micro_batch(), watch:
            total = net.model(input_ids=ids, use_cache=False).last_hidden_state.sum()
            watch.forward_done()
            total.backward()
        net.zero_grad(set_to_none=True)
        return {
            "peak_bytes": peak if device.type == "cuda" else watch.peak_bytes,
            "kept_bytes": sum(watch.kept_bytes.get(index, 0) for index in range(args.layers)),
            "moved_bytes": sum(counts.moved_bytes for counts in applied.counts),
            "recomputed_of_forward": watch.total_flops("recompute") / watch.total_flops("forward"),
        }
    except torch.OutOfMemoryError as error:
        return {"error": str(error).splitlines()[0]}
    finally:
        applied.remove()
        net.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def seconds(
    net: Any,
    cfg: CheckpointingConfig,
    token_loss: loss.TokenLoss,
    args: argparse.Namespace,
    device: torch.device,
) -> float:
    """Of one pass, with an untimed one before it."""
    applied = put_on(net, cfg, args, device)
    one_pass(net, applied, token_loss, args, device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    one_pass(net, applied, token_loss, args, device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    spent = time.perf_counter() - started
    applied.remove()
    return spent


def put_on(net: Any, cfg: CheckpointingConfig, args: argparse.Namespace, device: torch.device) -> apply.Applied:
    return apply.apply(net, policy.decide_layers(cfg, args.layers), cfg, device=device)


def finished(points: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians, and ratios to `none` in the same rounds."""
    reference = points["none"]["seconds"]
    for point in points.values():
        if point["seconds"]:
            point["median_s"] = statistics.median(point["seconds"])
            if reference:
                pairs = zip(point["seconds"], reference, strict=True)
                point["time_of_none"] = statistics.median(mine / none for mine, none in pairs)
    return list(points.values())


def table(points: list[dict[str, Any]]) -> str:
    lines = [f"{'policy':32} {'peak MiB':>10} {'kept MiB':>10} {'moved MiB':>10} {'again':>7} {'time':>6}"]
    for point in points:
        if "error" in point:
            lines.append(f"{point['name']:32} {point['error']}")
            continue
        sizes = " ".join(f"{point[key] / 2**20:10.1f}" for key in ("peak_bytes", "kept_bytes", "moved_bytes"))
        ratio = f"{point['time_of_none']:5.2f}x" if "time_of_none" in point else ""
        lines.append(f"{point['name']:32} {sizes} {point['recomputed_of_forward']:7.1%} {ratio}")
    return "\n".join(lines)


def machine(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": name,
        "torch": str(torch.__version__),
        "commit": run_dir.commit() or "unknown",
        "date": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    main()
