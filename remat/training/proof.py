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
from remat.training.run import Run

LEARNT = 3  # micro-batches in a row until ZeRO-3 knows in which order to gather; an evaluation makes it forget


@contextmanager
def watching(run: Run) -> Iterator[Callable[[torch.Tensor], None]]:
    """The first micro-batch of a launch is watched op by op, and under ZeRO-3 the first of those that run alike.

    What each backward leaves is counted until the proof is there.
    """
    wanted = 0 if run.watch is None else LEARNT
    with ExitStack() as around:
        recorder = around.enter_context(run.applied.recording()) if run.watch is None else None
        if run.settled is None and run.in_a_row == wanted:
            watch = around.enter_context(run.applied.watch(run.world.device))

            def forward_done(loss: torch.Tensor) -> None:
                watch.forward_done()
                if recorder is not None:
                    recorder.forward_done(loss)

            yield forward_done
            run.watch = run.watch or watch
            if run.strategy.zero_stage < 3 or wanted == LEARNT:
                run.settled = watch
        else:
            yield lambda loss: None
    run.in_a_row += 1
    if recorder is not None:
        replay(run, recorder)
    if not run.proven:
        run.held = engine_memory.largest([run.held, engine_memory.after_backward(run.engine)])


def replay(run: Run, recorder: Recorder) -> None:
    """Hold a layer of each kind to the pass that keeps everything; before anything is updated.

    Raises NotInEffect on all ranks when something differs on any; proof.json is written then too.
    """
    with run.window.excluded():
        ready = distributed.gather(recorder.ready())
        regions = sorted(set(ready[0]).intersection(*ready[1:]))
        run.replayed = recorder.replay(regions)
        everyone = distributed.gather((run.replayed.differences, run.replayed.notes))
    for note in sorted({text for _, notes in everyone for text in notes}):
        run.console.warning(f"not proven: {note}")
    problems = [f"rank {rank}: {text}" for rank, (texts, _) in enumerate(everyone) for text in texts]
    if not problems:
        return
    if run.world.is_main:
        found = {"policy": str(run.cfg.checkpointing.policy), "run_again": asdict(run.replayed)}
        run_dir.write_json(run.record_folder / "proof.json", found | {"problems": problems})
    raise NotInEffect("\n".join(problems))


def prove(run: Run) -> None:
    """After the first step that was applied: is what was asked in effect? What was found goes to proof.json either way.

    Raises NotInEffect on all ranks when a promise was not kept on any.
    """
    run.proven = True
    run.held |= engine_memory.after_step(run.engine)
    mine, broken = collect(run)
    everyone = distributed.gather((mine, broken, run.held))
    run.held = engine_memory.largest([found for _, _, found in everyone])
    if run.world.is_main:
        run_dir.write_json(run.record_folder / "proof.json", record(run, [found for found, _, _ in everyone]))
    problems = [f"rank {rank}: {text}" for rank, (_, texts, _) in enumerate(everyone) for text in texts]
    if problems:
        raise NotInEffect("\n".join(problems))
    run.window.recomputes(run.watch.recomputed_share() if run.watch else 0.0)
    run.console.note(f"proven: {line(run, mine)}")
    if run.replayed is not None:
        run.console.note(f"proven: {run.replayed.line()}")
    run.console.note(f"first step done {summary.seconds_since_launch():.1f} s after launch")


def collect(run: Run) -> tuple[dict[str, Any], list[str]]:
    """What this rank found, and every promise that was not kept on it. No collectives."""
    watch = run.watch
    assert watch is not None, "the first micro-batch is always watched"
    where = engine_memory.find_placement(run.engine)
    found = {
        "layers": verification.rows(run.applied, watch),
        "placement": where,
        "flops": {phase: watch.total_flops(phase) for phase in watch.flops},
        "zero3_gathered_bytes": dict(watch.gathered_bytes),
    }
    broken = verification.broken_promises(run.applied, watch, run.cfg.checkpointing)
    broken += engine_memory.broken_promises(
        where, run.strategy.ds, ranks=run.world.data_size, device_type=run.world.device.type
    )
    return found, broken


def record(run: Run, found: list[dict[str, Any]]) -> dict[str, Any]:
    """The file: layers, FLOPs and gathers as rank 0 saw them in the first micro-batch, placement of every rank."""
    return {
        "policy": str(run.cfg.checkpointing.policy),
        "in_words": policy.describe(run.strategy.decisions),
        "stacks": run.strategy.stacks,
        "zero_stage": run.strategy.zero_stage,
        "layers": found[0]["layers"],
        "first_micro_batch_flops": found[0]["flops"],
        "first_micro_batch_zero3_gathered_bytes": found[0]["zero3_gathered_bytes"],
        "run_again": asdict(run.replayed) if run.replayed else None,
        "placement_by_rank": [rank["placement"] for rank in found],
    }


def line(run: Run, found: dict[str, Any]) -> str:
    """For the terminal: layers, bytes, placement."""
    assert run.watch is not None
    return (
        f"{verification.line(run.applied, run.watch)}; {engine_memory.describe_placement(found['placement'])}"
    )
