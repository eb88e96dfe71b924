"""proof.json: what was asked of this run, and what its first step shows to be in effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import torch

from remat.activation_checkpointing import policy, verification
from remat.activation_checkpointing.mechanisms.counters import NotInEffect
from remat.activation_checkpointing.replay import Recorder
from remat.machine import distributed
from remat.report import run_dir, summary
from remat.training import engine_memory
from remat.training.run import Parts

LEARNT = 3  # micro-batches in a row until ZeRO-3 knows in which order to gather; an evaluation makes it forget


@contextmanager
def watching(parts: Parts) -> Iterator[Callable[[torch.Tensor], None]]:
    """The first micro-batch of a launch is watched op by op, and under ZeRO-3 the first of those that run alike.

    What each backward leaves is counted until the proof is there.
    """
    wanted = 0 if parts.watch is None else LEARNT
    with ExitStack() as around:
        recorder = around.enter_context(parts.applied.recording()) if parts.watch is None else None
        if parts.settled is None and parts.in_a_row == wanted:
            watch = around.enter_context(parts.applied.watch(parts.world.device))

            def forward_done(loss: torch.Tensor) -> None:
                watch.forward_done()
                if recorder is not None:
                    recorder.forward_done(loss)

            yield forward_done
            parts.watch = parts.watch or watch
            if parts.strategy.zero_stage < 3 or wanted == LEARNT:
                parts.settled = watch
        else:
            yield lambda loss: None
    parts.in_a_row += 1
    if recorder is not None:
        replay(parts, recorder)
    if not parts.proven:
        parts.held = engine_memory.largest([parts.held, engine_memory.after_backward(parts.engine)])


def replay(parts: Parts, recorder: Recorder) -> None:
    """Hold a layer of each kind to the pass that keeps everything; before anything is updated.

    Raises NotInEffect on all ranks when something differs on any; proof.json is written then too.
    """
    with parts.window.excluded():
        ready = distributed.gather(recorder.ready())
        regions = sorted(set(ready[0]).intersection(*ready[1:]))
        parts.replayed = recorder.replay(regions)
        everyone = distributed.gather((parts.replayed.differences, parts.replayed.notes))
    for note in sorted({text for _, notes in everyone for text in notes}):
        parts.console.warning(f"not proven: {note}")
    problems = [f"rank {rank}: {text}" for rank, (texts, _) in enumerate(everyone) for text in texts]
    if not problems:
        return
    if parts.world.is_main:
        found = {"policy": str(parts.cfg.checkpointing.policy), "run_again": asdict(parts.replayed)}
        run_dir.write_json(parts.record_folder / "proof.json", found | {"problems": problems})
    raise NotInEffect("\n".join(problems))


def prove(parts: Parts) -> None:
    """After the first step that was applied: is what was asked in effect? What was found goes to proof.json either way.

    Raises NotInEffect on all ranks when a promise was not kept on any.
    """
    parts.proven = True
    parts.held |= engine_memory.after_step(parts.engine)
    mine, broken = collect(parts)
    everyone = distributed.gather((mine, broken, parts.held))
    parts.held = engine_memory.largest([found for _, _, found in everyone])
    if parts.world.is_main:
        run_dir.write_json(
            parts.record_folder / "proof.json", record(parts, [found for found, _, _ in everyone])
        )
    problems = [f"rank {rank}: {text}" for rank, (_, texts, _) in enumerate(everyone) for text in texts]
    if problems:
        raise NotInEffect("\n".join(problems))
    parts.window.recomputes(parts.watch.recomputed_share() if parts.watch else 0.0)
    parts.console.note(f"proven: {line(parts, mine)}")
    if parts.replayed is not None:
        parts.console.note(f"proven: {parts.replayed.line()}")
    parts.console.note(f"first step done {summary.seconds_since_launch():.1f} s after launch")


def collect(parts: Parts) -> tuple[dict[str, Any], list[str]]:
    """What this rank found, and every promise that was not kept on it. No collectives."""
    watch = parts.watch
    assert watch is not None, "the first micro-batch is always watched"
    where = engine_memory.find_placement(parts.engine)
    found = {
        "layers": verification.rows(parts.applied, watch),
        "placement": where,
        "flops": {phase: watch.total_flops(phase) for phase in watch.flops},
        "zero3_gathered_bytes": dict(watch.gathered_bytes),
    }
    broken = verification.broken_promises(parts.applied, watch, parts.cfg.checkpointing)
    broken += engine_memory.broken_promises(
        where, parts.strategy.ds, ranks=parts.world.data_size, device_type=parts.world.device.type
    )
    return found, broken


def record(parts: Parts, found: list[dict[str, Any]]) -> dict[str, Any]:
    """The file: layers, FLOPs and gathers as rank 0 saw them in the first micro-batch, placement of every rank."""
    return {
        "policy": str(parts.cfg.checkpointing.policy),
        "in_words": policy.describe(parts.strategy.decisions),
        "stacks": parts.strategy.stacks,
        "zero_stage": parts.strategy.zero_stage,
        "layers": found[0]["layers"],
        "first_micro_batch_flops": found[0]["flops"],
        "first_micro_batch_zero3_gathered_bytes": found[0]["zero3_gathered_bytes"],
        "run_again": asdict(parts.replayed) if parts.replayed else None,
        "placement_by_rank": [rank["placement"] for rank in found],
    }


def line(parts: Parts, found: dict[str, Any]) -> str:
    """For the terminal: layers, bytes, placement."""
    assert parts.watch is not None
    return f"{verification.line(parts.applied, parts.watch)}; {engine_memory.describe_placement(found['placement'])}"
