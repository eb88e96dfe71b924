"""What the first step shows of each layer, held against what its policy promised."""

from __future__ import annotations

from typing import Any

from remat.activation_checkpointing.apply import Applied
from remat.activation_checkpointing.mechanisms.counters import LayerCounters
from remat.activation_checkpointing.op_tracer import OpTracer
from remat.activation_checkpointing.policy import RUNS_AGAIN, LayerDecision, Mechanism, spans
from remat.config.options import CheckpointingConfig

Layers = dict[int, tuple[LayerDecision, LayerCounters]]  # by index, of those that ran

SLACK_BYTES = 1 << 20  # small things a layer may keep beside its output: masks, random states, routing indices


def rows(applied: Applied, watch: OpTracer) -> list[dict[str, Any]]:
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
            "empty_regions": counts.empty,
            "repeated_recomputations": counts.repeated,
            "took_effect": dict(counts.in_effect),
            "kept_bytes": watch.kept_bytes.get(index, 0),
            "shared_with_other_layers_bytes": watch.shared_bytes.get(index, 0),
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


def line(applied: Applied, watch: OpTracer) -> str:
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
    if idle := _idle(applied):
        parts.append(f"layers {spans(idle)} did not run in the first step")
    if repeated := [index for index, c in enumerate(counts) if c.repeated]:
        parts.append(f"layers {spans(repeated)} ran again more than once, for checkpoints of their own")
    if words := applied.stacks.describe():
        parts.append(words)
    return ", ".join(parts)


def broken_promises(applied: Applied, watch: OpTracer, cfg: CheckpointingConfig) -> list[str]:
    """Every promise of the policy that the first step did not keep; empty when the policy is in effect.

    A layer that the model skipped in this step (layerdrop, say) promises nothing in it; one that ran around its hook
    does.
    """
    if not applied.decisions:
        return []
    idle = _idle(applied)
    around = [index for index in idle if index in watch.calls.ran]
    if around or len(idle) == len(applied.counts):
        return [
            f"checkpointing is not in effect: layers {spans(around or idle)} never ran through their hook in the first "
            "step; the model does not call the layers it lists"
        ]
    layers = {
        index: (decision, counts)
        for index, (decision, counts) in enumerate(zip(applied.decisions, applied.counts, strict=True))
        if index not in idle
    }
    found = _counts(layers, watch)
    found += _linears(layers, cfg.selective_ops.save_linears) or _listed(layers, cfg)
    found += _switches(layers, cfg)
    return found + _offload(layers, watch, cfg) + _kept_too_much(layers, watch) + _kept_inside(layers, watch)


def _idle(applied: Applied) -> list[int]:
    return [index for index, counts in enumerate(applied.counts) if counts.forwards == 0]


def _listed(layers: Layers, cfg: CheckpointingConfig) -> list[str]:
    """Of everything that a policy's lists name: that it did something in some layer.

    Of each range in `checkpointing.layers`: that something on the lists of its policy did. One layer of several may
    have nothing that a gradient needs.
    """
    found = []
    for mechanism, lists in _lists(cfg).items():
        asked = [index for index, (decision, _) in layers.items() if decision.mechanism is mechanism]
        for entries in _ranges(layers, asked):
            if not any(sum(layers[index][1].in_effect.values()) for index in entries):
                named = " and ".join(f"{option}={names}" for option, names, _ in lists)
                reason = "; ".join(reason for _, names, reason in lists if names)
                found.append(f"{named}: nothing on the list took effect in layers {spans(entries)}: {reason}")
                asked = [index for index in asked if index not in entries]
        found += [
            f"{option}: {name} did not take effect in layers {spans(asked)}: {reason}; leave it off the list"
            for option, names, reason in lists
            for name in names
            if asked and not any(layers[index][1].in_effect.get(name) for index in asked)
        ]
    return found


def _lists(cfg: CheckpointingConfig) -> dict[Mechanism, list[tuple[str, list[str], str]]]:
    """The lists of each mechanism: option, entries that must take effect, why one may not."""
    ops = cfg.selective_ops
    return {
        Mechanism.selective_ops: [
            (
                "checkpointing.selective_ops.save",
                # ranks that do not share layers have nothing to communicate inside them
                [name for name in ops.save if name != "communication"],
                "the operator never ran in a forward (eager attention, and attention with dropout on a CPU, have no "
                "fused operation), or its result is written to later",
            ),
            (
                "checkpointing.selective_ops.save_linears",
                ops.save_linears,
                "the Linear never ran, or its result is written to later",
            ),
        ],
        Mechanism.selective_modules: [
            (
                "checkpointing.recompute_modules",
                cfg.recompute_modules,
                "no module with this role ran with a gradient, so nothing of it is recomputed",
            )
        ],
        Mechanism.discard_output: [
            (
                "checkpointing.discard_modules",
                cfg.discard_modules,
                "no output was discarded; the modules with this role did not run, or the next operation keeps "
                "something else than what they make (dropout between them, say)",
            )
        ],
    }


def _ranges(layers: Layers, asked: list[int]) -> list[list[int]]:
    """`asked` by the entry of `checkpointing.layers` that decided over them."""
    entries: dict[str, list[int]] = {}
    for index in asked:
        entries.setdefault(layers[index][0].entry, []).append(index)
    return list(entries.values())


def _offload(layers: Layers, watch: OpTracer, cfg: CheckpointingConfig) -> list[str]:
    asked = [index for index, (decision, _) in layers.items() if decision.offload]
    found = [
        f"checkpointing.offload: no tensor of at least offload.min_bytes={cfg.offload.min_bytes} was moved (layers "
        f"{spans(entries)}); lower it"
        for entries in _ranges(layers, asked)
        if not any(layers[index][1].moved_bytes for index in entries)
    ]
    still = {
        index: watch.moved_hidden_bytes.get(index, 0) + watch.moved_kept_bytes.get(index, 0) for index in asked
    }
    wrong = [
        index
        for index in asked
        if watch.moved_hidden_bytes.get(index, 0)
        or 2 * still[index] > layers[index][1].moved_bytes / layers[index][1].forwards
    ]
    inputs = sum(watch.moved_input_bytes.values())
    moved = sum(layers[index][1].moved_bytes / layers[index][1].forwards for index in asked)
    if not wrong and inputs and inputs + sum(still.values()) >= moved:
        still, wrong = watch.moved_input_bytes, [index for index in asked if index in watch.moved_input_bytes]
    if wrong:
        found.append(
            f"checkpointing.offload frees nothing in layers {spans(wrong)}: of what was moved to host memory, "
            f"{sum(still[index] for index in wrong) / 2**20:.4g} MiB are on the device all the same after forward, "
            "because something else holds them (output_hidden_states, a hook, the model itself)"
        )
    return found


def _linears(layers: Layers, listed: list[str]) -> list[str]:
    """Of the named Linears: that some ran, and that of each that did something was kept (an expert may not run)."""
    asked = [i for i, (d, _) in layers.items() if listed and d.mechanism is Mechanism.selective_ops]
    lost = {i: [path for path, kept in layers[i][1].kept_linears.items() if not kept] for i in asked}
    without = [
        index
        for index in asked
        if lost[index]
        or not (layers[index][1].kept_linears or layers[index][1].empty)  # empty: it does nothing
    ]
    if not without:
        return []
    names = sorted({path for paths in lost.values() for path in paths})
    what = (
        f"nothing was kept of {', '.join(names)}: their results are written to" if names else "none of them ran"
    )
    return [
        f"checkpointing.selective_ops.save_linears={listed}: {what} (layers {spans(without)}); leave them out"
    ]


def _switches(layers: Layers, cfg: CheckpointingConfig) -> list[str]:
    """Of DeepSpeed's function: it treats every layer alike, but its side stream keeps the last one on the device."""
    ds = cfg.deepspeed
    calls = [index for index, (d, _) in layers.items() if d.mechanism is Mechanism.deepspeed]
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


def _counts(layers: Layers, watch: OpTracer) -> list[str]:
    def empty(index: int) -> int:
        """Calls with nothing to recompute. A layer that keeps more than its output is none of these."""
        decision, counts = layers[index]
        more = _own_bytes(watch, index) > counts.output_bytes
        return 0 if more and decision.mechanism in RUNS_AGAIN else counts.empty

    wrong = [
        index
        for index, (_, c) in layers.items()
        if not c.reached - empty(index) <= c.recomputations <= c.expected
    ]
    found = []
    if wrong:
        found.append(
            f"checkpointing is not in effect in layers {spans(wrong)}: expected "
            f"{[layers[i][1].reached for i in wrong]} recomputations in the first step, counted "
            f"{[layers[i][1].recomputations for i in wrong]}{_why(layers, wrong)}"
        )
    recomputed = [index for index, (d, _) in layers.items() if d.mechanism is not Mechanism.keep]
    found += [
        f"checkpointing is not in effect in layers {spans(asked)}: {layers[asked[0]][0].policy} has nothing to "
        "recompute there, because no gradient passes through"
        for asked in _ranges(layers, recomputed)
        if all(layers[i][1].expected == 0 for i in asked)  # some may be frozen down to the embedding
    ]
    return found


def _why(layers: Layers, wrong: list[int]) -> str:
    if any(layers[i][1].recomputations for i in wrong) or not all(layers[i][1].empty for i in wrong):
        return ""
    return " (saved-tensor hooks of the layer's own keep what backward needs; give such layers the policy none)"


def _kept_too_much(layers: Layers, watch: OpTracer) -> list[str]:
    """A layer that is recomputed whole keeps its output, the next layer's input, and nothing else of size.

    What the model hands from it to other layers (shared K/V) is theirs, not what the policy keeps of it.
    """
    kept = {index: _own_bytes(watch, index) for index in layers}
    wrong = [
        index
        for index, (decision, counts) in layers.items()
        if decision.mechanism in (Mechanism.recompute, Mechanism.deepspeed)
        and kept[index] > counts.output_bytes + SLACK_BYTES
    ]
    if not wrong:
        return []
    return [
        f"checkpointing is not in effect in layers {spans(wrong)}: layer {wrong[0]} keeps "
        f"{kept[wrong[0]] / 2**20:.1f} MiB, {layers[wrong[0]][0].policy} promises "
        f"{layers[wrong[0]][1].output_bytes / 2**20:.1f} MiB"
    ]


def _own_bytes(watch: OpTracer, index: int) -> int:
    return watch.kept_bytes.get(index, 0) - watch.shared_bytes.get(index, 0)


def _kept_inside(layers: Layers, watch: OpTracer) -> list[str]:
    """What a recomputed module makes on its way to its result is gone after its forward, attention weights too."""
    wrong = [
        index
        for index, (decision, _) in layers.items()
        if decision.mechanism is Mechanism.selective_modules
        and watch.region_kept_bytes.get(index, 0) > min(SLACK_BYTES, watch.region_bytes.get(index, 0) // 64)
    ]
    if not wrong:
        return []
    kept = watch.region_kept_bytes[wrong[0]]
    return [
        f"checkpointing.recompute_modules is not in effect in layers {spans(wrong)}: layer {wrong[0]} keeps "
        f"{kept / 2**20:.4g} MiB that its recomputed modules made and should let go of; something else holds them "
        "(output_attentions, output_hidden_states, a hook)"
    ]
