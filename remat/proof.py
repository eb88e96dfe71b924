"""proof.json: what was asked of this run, and what its first step shows to be in effect."""

from __future__ import annotations

from typing import Any

from remat import placement
from remat.activation_checkpointing import evidence, policy
from remat.setup import Parts


def collect(parts: Parts) -> tuple[dict[str, Any], list[str]]:
    """What this rank found, and every promise that was not kept on it. No collectives."""
    watch = parts.watch
    assert watch is not None, "the first micro-batch is always watched"
    where = placement.inspect(parts.engine)
    found = {
        "layers": evidence.rows(parts.applied, watch),
        "placement": where,
        "flops": {phase: watch.total_flops(phase) for phase in watch.flops},
        "zero3_gathered_bytes": dict(watch.gathered_bytes),
    }
    broken = evidence.broken_promises(parts.applied, watch, parts.cfg.checkpointing)
    broken += placement.broken_promises(
        where, parts.strategy.ds, ranks=parts.world.data_size, device_type=parts.world.device.type
    )
    return found, broken


def record(parts: Parts, found: list[dict[str, Any]]) -> dict[str, Any]:
    """The file: layers, FLOPs and gathers as rank 0 saw them in the first micro-batch, placement of every rank."""
    return {
        "policy": str(parts.cfg.checkpointing.policy),
        "in_words": policy.describe(parts.strategy.decisions),
        "zero_stage": parts.strategy.zero_stage,
        "layers": found[0]["layers"],
        "first_micro_batch_flops": found[0]["flops"],
        "first_micro_batch_zero3_gathered_bytes": found[0]["zero3_gathered_bytes"],
        "placement_by_rank": [rank["placement"] for rank in found],
    }


def line(parts: Parts, found: dict[str, Any]) -> str:
    """For the terminal: layers, bytes, placement."""
    assert parts.watch is not None
    return f"{evidence.line(parts.applied, parts.watch)}; {placement.line(found['placement'])}"
