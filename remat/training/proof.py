"""Write proof.json: what was asked of this run, and what its first step shows to be in effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from remat.activation_checkpointing import policy, verification
from remat.activation_checkpointing.mechanisms.counters import PolicyNotApplied
from remat.activation_checkpointing.op_tracer import OpTracer
from remat.activation_checkpointing.replay import Recorder, Replayed
from remat.machine import distributed
from remat.report import run_dir, summary
from remat.training import engine_memory
from remat.training.engine_memory import Held
from remat.training.run import Run

LEARNT = 3  # micro-batches in a row until ZeRO-3 knows its prefetch order; an evaluation makes it forget


@dataclass
class FirstStep:
    """The results of a launch's first step. `watching` and `verify_first_step` fill it; the ledger reads it."""

    trace: OpTracer | None = None  # trace of the first micro-batch, operation by operation
    steady_trace: OpTracer | None = (
        None  # trace of the first micro-batch after ZeRO-3's prefetch order is fixed
    )
    shape: tuple[int, int] = (
        0,
        0,
    )  # rows and positions of the first micro-batch; the width may differ from others'
    steady_shape: tuple[int, int] = (0, 0)  # the same of the micro-batch of `steady_trace`
    replayed: Replayed | None = None  # first micro-batch: layers compared with a pass that keeps everything
    memory: Held = field(default_factory=dict)  # model-state bytes, maximum over ranks
    shared_sequences: dict[str, Any] | None = None  # of ranks that share sequences: what sequence_proof found
    verified: bool = False
    micro_batches: int = 0  # in a row, since the launch or its last evaluation


@contextmanager
def watching(
    run: Run, first: FirstStep, micro_batch: Mapping[str, torch.Tensor]
) -> Iterator[Callable[[torch.Tensor], None]]:
    """Trace the first micro-batch op by op. Under ZeRO-3 trace another once the order of its gathers is fixed.

    Until the first step is verified, count what each backward leaves.
    """
    wanted = 0 if first.trace is None else LEARNT
    with ExitStack() as around:
        recorder = around.enter_context(run.applied.recording()) if first.trace is None else None
        if first.steady_trace is None and first.micro_batches == wanted:
            watch = around.enter_context(run.applied.watch(run.world.device))

            def forward_done(loss: torch.Tensor) -> None:
                watch.forward_done()
                if recorder is not None:
                    recorder.forward_done(loss)

            yield forward_done
            rows, width = micro_batch["input_ids"].shape
            if first.trace is None:
                first.trace, first.shape = watch, (rows, width)
            if run.strategy.zero_stage < 3 or wanted == LEARNT:
                first.steady_trace, first.steady_shape = watch, (rows, width)
        else:
            yield lambda loss: None
    first.micro_batches += 1
    if recorder is not None:
        replay(run, first, recorder)
    if not first.verified:
        first.memory = engine_memory.take_largest(
            [first.memory, engine_memory.measure_after_backward(run.engine)]
        )


def replay(run: Run, first: FirstStep, recorder: Recorder) -> None:
    """Compare a layer of each kind with the pass that keeps everything, before anything is updated. Collective.

    Raises PolicyNotApplied on all ranks when something differs on any; proof.json is written then too.
    """
    with run.window.excluded():
        ready = distributed.gather(recorder.ready())
        regions = sorted(set(ready[0]).intersection(*ready[1:]))
        first.replayed = recorder.replay(regions)
        everyone = distributed.gather((first.replayed.differences, first.replayed.notes))
    for note in sorted({text for _, notes in everyone for text in notes}):
        run.console.warning(f"not proven: {note}")
    problems = [f"rank {rank}: {text}" for rank, (texts, _) in enumerate(everyone) for text in texts]
    if not problems:
        return
    if run.world.is_main:
        found = {"policy": str(run.cfg.checkpointing.policy), "run_again": asdict(first.replayed)}
        run_dir.write_json(run.record_folder / "proof.json", found | {"problems": problems})
    raise PolicyNotApplied("\n".join(problems))


def verify_first_step(run: Run, first: FirstStep) -> None:
    """Check after the first applied step that what was asked is in effect, and write proof.json either way. Collective.

    Raises PolicyNotApplied on all ranks when a promise was not kept on any.
    """
    first.verified = True
    first.memory |= engine_memory.measure_after_step(run.engine)
    mine, broken = collect(run, first)
    everyone = distributed.gather((mine, broken, first.memory))
    first.memory = engine_memory.take_largest([found for _, _, found in everyone])
    if run.world.is_main:
        run_dir.write_json(
            run.record_folder / "proof.json", record(run, first, [found for found, _, _ in everyone])
        )
    problems = [f"rank {rank}: {text}" for rank, (_, texts, _) in enumerate(everyone) for text in texts]
    if problems:
        raise PolicyNotApplied("\n".join(problems))
    run.window.recomputes(first.trace.recomputed_share() if first.trace else 0.0)
    run.console.note(f"proven: {line(run, first, mine)}")
    if first.replayed is not None:
        run.console.note(f"proven: {first.replayed.line()}")
    run.console.note(f"first step done {summary.seconds_since_launch():.1f} s after launch")


def collect(run: Run, first: FirstStep) -> tuple[dict[str, Any], list[str]]:
    """Return what this rank found, and every promise that was not kept on it. No collectives."""
    watch = first.trace
    assert watch is not None, "the first micro-batch is always watched"
    where = engine_memory.shard_placement(run.engine)
    found = {
        "layers": verification.rows(run.applied, watch),
        "placement": where,
        "flops": {phase: watch.total_flops(phase) for phase in watch.flops},
        "zero3_gathered_bytes": dict(watch.gathered_bytes),
    }
    largest = run.cfg.train.micro_batch_size * run.cfg.train.seq_len
    full = first.shape[0] * first.shape[1] >= largest
    broken = verification.unmet_expectations(run.applied, watch, run.cfg.checkpointing, full=full)
    broken += engine_memory.unmet_expectations(
        where, run.strategy.ds, ranks=run.world.zero_size, device_type=run.world.device.type
    )
    return found, broken


def record(run: Run, first: FirstStep, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of proof.json.

    Layers, FLOPs and gathers are as rank 0 saw them in the first micro-batch; the placement is of every rank.
    """
    return {
        "policy": str(run.cfg.checkpointing.policy),
        "in_words": policy.describe(run.strategy.decisions),
        "stacks": run.strategy.stacks,
        "zero_stage": run.strategy.zero_stage,
        "compile": str(
            run.cfg.compile
        ),  # from the second micro-batch on: what is proven are the layers as they are
        "first_micro_batch": {"rows": first.shape[0], "positions": first.shape[1]},
        "layers": found[0]["layers"],
        "first_micro_batch_flops": found[0]["flops"],
        "first_micro_batch_zero3_gathered_bytes": found[0]["zero3_gathered_bytes"],
        "run_again": asdict(first.replayed) if first.replayed else None,
        "placement_by_rank": [rank["placement"] for rank in found],
        "shared_sequences": first.shared_sequences,
    }


def line(run: Run, first: FirstStep, found: dict[str, Any]) -> str:
    """Return the line for the terminal: layers, bytes, placement."""
    assert first.trace is not None
    return (
        f"{verification.line(run.applied, first.trace)}; {engine_memory.describe_placement(found['placement'])}"
    )
