"""Compare what the first step showed of each layer with what its policy promised."""

from __future__ import annotations

from typing import Any

from remat.activation_checkpointing.apply import Applied
from remat.activation_checkpointing.mechanisms import offload, tiles
from remat.activation_checkpointing.mechanisms.mechanism import (
    KEEP,
    SLACK_BYTES,
    Observed,
    ObservedLayer,
    by_range,
    spans,
)
from remat.activation_checkpointing.op_tracer import OpTracer
from remat.config.options import CheckpointingConfig
from remat.config.units import MIB


def rows(applied: Applied, watch: OpTracer) -> list[dict[str, Any]]:
    """Make one row per layer for proof.json.

    Counts, and bytes moved, discarded or given away, are sums up to the first applied step. Other bytes are of the
    launch's first micro-batch.
    """
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
            "output_bytes": watch.output_bytes.get(index, 0),
            "table_bytes": watch.table_bytes.get(index, 0),
            "planned_table_bytes": decision.table.saved_bytes if decision.table else 0,
            "moved_bytes": counts.moved_bytes,
            "partitioned_bytes": counts.partitioned_bytes,
            "contiguous_bytes": counts.contiguous_bytes,
            "discarded_bytes": counts.discarded_bytes,
            "mlp_peak_bytes": watch.mlp_peak_bytes.get(index, 0),
            "slices": counts.slices,
            "slices_run_again": counts.slices_again,
            "slices_run_a_third_time": counts.slices_thrice,
            "router_choices": len(watch.choices[index].made),
            "router_choices_made_again": watch.choices[index].made_again,
            "router_choices_changed": watch.choices[index].changed,
            "kept_results": counts.kept_outputs,
            "reused_results": counts.reused_outputs,
            "pinned_gathered_weight_bytes": watch.pinned_weight_bytes.get(index, 0),
        }
        for index, (decision, counts) in enumerate(zip(applied.decisions, applied.counts, strict=True))
    ]


def line(applied: Applied, watch: OpTracer) -> str:
    """Put the proof in one line: `32 of 32 layers recomputed (32 regions per forward), 64.0 MiB kept on the device`."""
    counts = applied.counts
    if not counts:
        return "no layer is touched"
    forwards = max(c.forwards for c in counts) or 1
    regions = sum(c.recomputations for c in counts)
    kept = sum(watch.kept_bytes.get(index, 0) for index in range(len(counts)))
    touched = sum(c.recomputations > 0 for c in counts)
    parts = [f"{touched} of {len(counts)} layers recomputed ({regions / forwards:g} regions per forward)"]
    parts.append(f"{kept / MIB:.1f} MiB kept on the device")
    if sliced := [index for index, c in enumerate(counts) if c.slices]:
        most = max(watch.mlp_peak_bytes.get(index, 0) for index in sliced)
        parts.append(
            f"MLPs of layers {spans(sliced)} in slices of at most {most / MIB:.4g} MiB, each run twice"
        )
    for text, total in (
        ("moved to the host", sum(c.moved_bytes for c in counts) / forwards),
        ("discarded", sum(c.discarded_bytes for c in counts) / forwards),
        ("given to other ranks", sum(c.partitioned_bytes for c in counts) / forwards),
    ):
        if total:
            parts.append(f"{total / MIB:.1f} MiB {text}")
    if idle := _idle(applied):
        parts.append(f"layers {spans(idle)} did not run in the first step")
    if repeated := [index for index, c in enumerate(counts) if c.repeated]:
        parts.append(f"layers {spans(repeated)} ran again more than once, for checkpoints of their own")
    if again := sum(choices.made_again for choices in watch.choices.values()):
        parts.append(f"{again} choices of routers made again, the same")
    if words := applied.stacks.describe():
        parts.append(words)
    return ", ".join(parts)


def unmet_expectations(
    applied: Applied, watch: OpTracer, cfg: CheckpointingConfig, *, full: bool = True
) -> list[str]:
    """Tell every promise of the policy that the first step did not keep; none when the policy is in effect.

    `full` false: its micro-batches were smaller than the largest that there can be.

    A layer that the model skipped in this step (layerdrop, say) promises nothing in it; one that ran without its hook
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
    observed = _observe(applied, watch, without=idle)
    found = _check_recomputations(observed)
    for mechanism in dict.fromkeys(decision.mechanism for decision in applied.decisions):
        own = {index: layer for index, layer in observed.items() if layer.decision.mechanism == mechanism}
        found += mechanism.unmet(cfg, own)
    found += _check_choices(watch)
    return found + offload.unmet(cfg, observed, full=full) + tiles.unmet(observed) + _check_kept_bytes(observed)


def _check_choices(watch: OpTracer) -> list[str]:
    """Check that no router chose other experts when its layer ran again."""
    changed = [index for index, choices in sorted(watch.choices.items()) if choices.changed]
    if not changed:
        return []
    return [
        f"checkpointing changes what the model computes in layers {spans(changed)}: a router that ran again chose "
        f"other experts than in the forward ({sum(watch.choices[index].changed for index in changed)} choices); use "
        "checkpointing=budget, which never makes a choice again, or give such layers the policy none with "
        "checkpointing.layers"
    ]


def _observe(applied: Applied, watch: OpTracer, *, without: list[int]) -> Observed:
    return {
        index: ObservedLayer(
            decision,
            counts,
            own_bytes=watch.kept_bytes.get(index, 0) - watch.shared_bytes.get(index, 0),
            output_bytes=watch.output_bytes.get(index, 0),
            table_bytes=watch.table_bytes.get(index, 0),
            region_bytes=watch.region_bytes.get(index, 0),
            region_kept_bytes=watch.region_kept_bytes.get(index, 0),
            moved_hidden_bytes=watch.moved_hidden_bytes.get(index, 0),
            moved_input_bytes=watch.moved_input_bytes.get(index, 0),
            moved_kept_bytes=watch.moved_kept_bytes.get(index, 0),
        )
        for index, (decision, counts) in enumerate(zip(applied.decisions, applied.counts, strict=True))
        if index not in without
    }


def _idle(applied: Applied) -> list[int]:
    return [index for index, counts in enumerate(applied.counts) if counts.forwards == 0]


def _check_recomputations(layers: Observed) -> list[str]:
    """Check that each region ran again once for each of its forwards that backward reached."""

    def empty(layer: ObservedLayer) -> int:
        """Count calls with nothing to recompute. A layer that keeps more than its output has something."""
        keeps_more = layer.own_bytes > layer.output_bytes
        return 0 if keeps_more and layer.decision.mechanism.runs_layer_again else layer.counts.empty

    wrong = [
        index
        for index, layer in layers.items()
        if not layer.counts.reached - empty(layer) <= layer.counts.recomputations <= layer.counts.expected
    ]
    found = []
    if wrong:
        found.append(
            f"checkpointing is not in effect in layers {spans(wrong)}: expected "
            f"{[layers[i].counts.reached for i in wrong]} recomputations in the first step, counted "
            f"{[layers[i].counts.recomputations for i in wrong]}{_why(layers, wrong)}"
        )
    treated = {index: layer for index, layer in layers.items() if layer.decision.mechanism != KEEP}
    return found + [
        f"checkpointing is not in effect in layers {spans(entries)}: {layers[entries[0]].decision.policy} has nothing "
        "to recompute there, because no gradient passes through"
        for entries in by_range(treated)
        if all(layers[i].counts.expected == 0 for i in entries)  # some may be frozen down to the embedding
    ]


def _why(layers: Observed, wrong: list[int]) -> str:
    if any(layers[i].counts.recomputations for i in wrong) or not all(layers[i].counts.empty for i in wrong):
        return ""
    return " (saved-tensor hooks of the layer's own keep what backward needs; give such layers the policy none)"


def _check_kept_bytes(layers: Observed) -> list[str]:
    """Check that a layer that is recomputed whole keeps its output and nothing else of considerable size.

    What the model passes from it to other layers (shared K/V) counts as theirs, not as kept by its policy.
    """
    wrong = [
        index
        for index, layer in layers.items()
        if layer.decision.mechanism.keeps_only_input and layer.own_bytes > layer.output_bytes + SLACK_BYTES
    ]
    if not wrong:
        return []
    one = layers[wrong[0]]
    return [
        f"checkpointing is not in effect in layers {spans(wrong)}: layer {wrong[0]} keeps {one.own_bytes / MIB:.1f} "
        f"MiB, {one.decision.policy} promises {one.output_bytes / MIB:.1f} MiB"
    ]
