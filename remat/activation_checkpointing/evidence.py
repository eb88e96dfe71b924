"""What the first step shows of each layer, held against what its policy promised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remat.activation_checkpointing.apply import Applied
from remat.activation_checkpointing.counts import Counts
from remat.activation_checkpointing.policy import LayerDecision, Mechanism, spans
from remat.activation_checkpointing.watch import Watch
from remat.config import CheckpointingConfig

SLACK_BYTES = 1 << 20  # small things a layer may keep beside its output: masks, random states, routing indices


def rows(applied: Applied, watch: Watch) -> list[dict[str, Any]]:
    """One row per layer, for proof.json. Counts are of the first step, bytes of its first micro-batch."""
    return [
        {
            "layer": index,
            "policy": str(decision.policy),
            "recomputed_with_layers": [decision.first, decision.last],
            "offload": decision.offload,
            "forwards": counts.forwards,
            "expected_recomputations": counts.expected,
            "recomputations": counts.recomputations,
            "kept_bytes": watch.kept_bytes.get(index, 0),
            "output_bytes": counts.output_bytes,
            "moved_bytes": counts.moved_bytes,
            "partitioned_bytes": counts.partitioned_bytes,
            "contiguous_bytes": counts.contiguous_bytes,
            "discarded_bytes": counts.discarded_bytes,
            "kept_results": counts.kept_outputs,
            "reused_results": counts.reused_outputs,
            "pinned_gathered_weight_bytes": watch.pinned_weight_bytes.get(index, 0),
        }
        for index, (decision, counts) in enumerate(zip(applied.decisions, applied.counts, strict=True))
    ]


def line(applied: Applied, watch: Watch) -> str:
    """The proof in one line: `full: 32 of 32 layers recomputed once per forward; 64.0 MiB kept`."""
    counts = applied.counts
    if not counts:
        return "no layer is touched"
    forwards = max(c.forwards for c in counts) or 1
    regions = sum(c.recomputations for c in counts)
    kept = sum(watch.kept_bytes.get(index, 0) for index in range(len(counts)))
    touched = sum(c.recomputations > 0 for c in counts)
    parts = [f"{touched} of {len(counts)} layers recomputed ({regions / forwards:g} regions per forward)"]
    parts.append(f"{kept / 2**20:.1f} MiB kept on the device")
    for text, total in (
        ("moved to the host", sum(c.moved_bytes for c in counts) / forwards),
        ("discarded", sum(c.discarded_bytes for c in counts) / forwards),
        ("given to other ranks", sum(c.partitioned_bytes for c in counts) / forwards),
    ):
        if total:
            parts.append(f"{total / 2**20:.1f} MiB {text}")
    return ", ".join(parts)


def broken_promises(applied: Applied, watch: Watch, cfg: CheckpointingConfig) -> list[str]:
    """Every promise of the policy that the first step did not keep; empty when the policy is in effect."""
    if not applied.decisions:
        return []
    layers = list(zip(applied.decisions, applied.counts, strict=True))
    idle = [index for index, (_, counts) in enumerate(layers) if counts.forwards == 0]
    if idle:
        return [
            f"checkpointing is not in effect: layers {spans(idle)} never ran through their hook in the first step; "
            "the model does not call the layers it lists"
        ]
    found = _counts(layers)
    found += _missing(
        layers,
        lambda d: d.mechanism is Mechanism.selective_ops,
        lambda c: c.reused_outputs,
        f"checkpointing.selective_ops: nothing on the lists save={cfg.selective_ops.save} and "
        f"save_linears={cfg.selective_ops.save_linears} ran (eager attention, and attention with dropout on a "
        "CPU, have no fused operation)",
    )
    found += _linears(layers, cfg.selective_ops.save_linears)
    found += _missing(
        layers,
        lambda d: d.mechanism is Mechanism.discard_output,
        lambda c: c.discarded_bytes,
        f"checkpointing.discard_modules={cfg.discard_modules}: no output was discarded",
    )
    found += _missing(
        layers,
        lambda d: d.offload,
        lambda c: c.moved_bytes,
        f"checkpointing.offload: no tensor of at least offload.min_bytes={cfg.offload.min_bytes} was moved; lower it",
    )
    return found + _switches(layers, cfg) + _kept_too_much(layers, watch)


def _linears(layers: list[tuple[LayerDecision, Counts]], listed: list[str]) -> list[str]:
    """Of the named Linears: that some ran, and that of each that did something was kept (an expert may not run)."""
    asked = [i for i, (d, _) in enumerate(layers) if listed and d.mechanism is Mechanism.selective_ops]
    lost = {i: [path for path, kept in layers[i][1].kept_linears.items() if not kept] for i in asked}
    without = [index for index in asked if lost[index] or not layers[index][1].kept_linears]
    if not without:
        return []
    names = sorted({path for paths in lost.values() for path in paths})
    what = (
        f"nothing was kept of {', '.join(names)}: their results are written to" if names else "none of them ran"
    )
    return [
        f"checkpointing.selective_ops.save_linears={listed}: {what} (layers {spans(without)}); leave them out"
    ]


def _switches(layers: list[tuple[LayerDecision, Counts]], cfg: CheckpointingConfig) -> list[str]:
    """Of DeepSpeed's function: it treats every layer alike, but its side stream keeps the last one on the device."""
    ds = cfg.deepspeed
    calls = [index for index, (d, _) in enumerate(layers) if d.mechanism is Mechanism.deepspeed]
    leaving = calls if ds.partition_activations else calls[:-1]
    promised = (
        (
            ds.partition_activations,
            calls,
            "partitioned_bytes",
            "partition_activations: nothing was partitioned",
        ),
        (ds.cpu_checkpointing, leaving, "moved_bytes", "cpu_checkpointing: nothing was moved to host memory"),
        (
            ds.contiguous_memory_optimization,
            calls,
            "contiguous_bytes",
            "contiguous_memory_optimization: nothing was kept in the list of buffers",
        ),
    )
    found = []
    for wanted, asked, name, text in promised:
        without = [index for index in asked if getattr(layers[index][1], name) == 0]
        if wanted and without:
            found.append(f"checkpointing.deepspeed.{text} (layers {spans(without)})")
    return found


def _counts(layers: list[tuple[LayerDecision, Counts]]) -> list[str]:
    wrong = [index for index, (_, c) in enumerate(layers) if c.expected != c.recomputations]
    found = []
    if wrong:
        found.append(
            f"checkpointing is not in effect in layers {spans(wrong)}: expected "
            f"{[layers[i][1].expected for i in wrong]} recomputations in the first step, counted "
            f"{[layers[i][1].recomputations for i in wrong]}"
        )
    keep = Mechanism.keep
    for policy in {d.policy for d, _ in layers if d.mechanism is not keep}:
        asked = [i for i, (d, _) in enumerate(layers) if d.policy is policy and d.mechanism is not keep]
        if all(layers[i][1].expected == 0 for i in asked):  # some may be frozen down to the embedding
            found.append(
                f"checkpointing is not in effect in layers {spans(asked)}: {policy} has nothing to recompute there, "
                "because no gradient passes through"
            )
    return found


def _missing(
    layers: list[tuple[LayerDecision, Counts]],
    promised: Callable[[LayerDecision], bool],
    count: Callable[[Counts], int],
    text: str,
) -> list[str]:
    """A promise that none of the layers kept that made it. One alone may have nothing that a gradient needs."""
    asked = [index for index, (d, _) in enumerate(layers) if promised(d)]
    return [f"{text} (layers {spans(asked)})"] if asked and not any(count(layers[i][1]) for i in asked) else []


def _kept_too_much(layers: list[tuple[LayerDecision, Counts]], watch: Watch) -> list[str]:
    """A layer that is recomputed whole keeps its output, the next layer's input, and nothing else of size."""
    wrong = [
        index
        for index, (decision, counts) in enumerate(layers)
        if decision.mechanism in (Mechanism.recompute, Mechanism.deepspeed)
        and watch.kept_bytes.get(index, 0) > counts.output_bytes + SLACK_BYTES
    ]
    if not wrong:
        return []
    kept = watch.kept_bytes[wrong[0]]
    return [
        f"checkpointing is not in effect in layers {spans(wrong)}: layer {wrong[0]} keeps {kept / 2**20:.1f} MiB, "
        f"{layers[wrong[0]][0].policy} promises {layers[wrong[0]][1].output_bytes / 2**20:.1f} MiB"
    ]
