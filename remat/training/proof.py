"""Write proof.json: what was asked of this run, and what its first step shows to be in effect.

Ranks that share sequences are compared, before the first step, with one rank that computes a sequence by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from remat.activation_checkpointing import policy, verification
from remat.activation_checkpointing.mechanisms.counters import PolicyNotApplied
from remat.activation_checkpointing.op_tracer import OpTracer
from remat.activation_checkpointing.replay import Recorder, Replayed
from remat.config.options import Precision
from remat.data.batches import StepBatch
from remat.machine import distributed
from remat.model.loss import IGNORED
from remat.parallel.sequence_parallel import SequenceParallel
from remat.report import run_dir, summary
from remat.training import engine_memory
from remat.training.engine_memory import Held, Placement
from remat.training.run import Run

LONGEST = 4096  # tokens of a row whose loss one rank computes by itself
LONGEST_BACKWARD = 256  # the same with a gradient, for which one rank keeps all activations
# Relative tolerances: both losses, and both gradient norms, are sums of the same numbers in different orders.
SAME_LOSS = {Precision.fp32: 1e-4, Precision.bf16: 1e-2, Precision.fp16: 1e-2}
SAME_GRADIENT = {Precision.fp32: 1e-3, Precision.bf16: 5e-2, Precision.fp16: 5e-2}
LEARNT = 3  # micro-batches in a row until ZeRO-3 knows its prefetch order; an evaluation makes it forget


@dataclass
class FirstStep:
    """The results of a launch's first step. `watching` and `verify_first_step` fill it; the ledger reads it."""

    trace: OpTracer | None = None  # of the first micro-batch, operation by operation
    steady_trace: OpTracer | None = None  # of the first micro-batch after ZeRO-3's prefetch order is fixed
    shape: tuple[int, int] = (0, 0)  # rows and positions of the micro-batch of `trace`; widths may differ
    steady_shape: tuple[int, int] = (0, 0)  # the same of `steady_trace`
    moved_bytes: int | None = None  # of activations, moved to host memory in the first micro-batch
    replayed: Replayed | None = None  # first micro-batch: layers compared with a pass that keeps everything
    memory: Held = field(default_factory=dict)  # model-state bytes, maximum over ranks
    shared_sequences: dict[str, Any] | None = None  # of ranks that share sequences: see prove_shared_sequences
    verified: bool = False
    micro_batches: int = 0  # in a row, since the launch or its last evaluation


@dataclass(frozen=True)
class RankProof:
    """The part of proof.json that a rank found in its first step."""

    layers: list[dict[str, Any]]  # `verification.rows`, by the layer's number in the whole model
    placement: Placement
    flops: dict[str, float]  # of the first micro-batch, by phase
    gathered_bytes: dict[str, int]  # by ZeRO-3 in the first micro-batch, by phase


@contextmanager
def watching(
    run: Run, first: FirstStep, micro_batch: Mapping[str, torch.Tensor]
) -> Iterator[Callable[[torch.Tensor], None]]:
    """Trace the first micro-batch op by op. Under ZeRO-3 trace another once the order of its gathers is fixed.

    Yields a function to call with the loss after the forward. Until the first step is verified, model states are
    measured after each backward.
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
            rows, own = micro_batch["input_ids"].shape
            width = own * run.world.sequence_parallel_size
            if first.trace is None:
                first.trace, first.shape = watch, (rows, width)
                first.moved_bytes = sum(counts.moved_bytes for counts in run.applied.counts)
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
    """Run a layer of each kind again with all activations kept, and compare, before the update. Collective.

    Raises PolicyNotApplied on all ranks when a value differs on any, after proof.json is written.
    """
    with run.window.excluded():
        mine = recorder.ready()
        ready = distributed.gather(mine) if run.pipeline is None else [mine]  # stages have layers of their own
        regions = sorted(set(ready[0]).intersection(*ready[1:]))
        first.replayed = recorder.replay(regions)
        found = first.replayed.differences, first.replayed.notes
        everyone = distributed.gather(tuple(_placed(run, texts) for texts in found))
    for note in sorted({text for _, notes in everyone for text in notes}):
        run.console.warning(f"not proven: {note}")
    problems = [f"rank {rank}: {text}" for rank, (texts, _) in enumerate(everyone) for text in texts]
    _refuse(run, {"run_again": asdict(first.replayed)}, problems)


def _refuse(run: Run, found: dict[str, Any], problems: list[str]) -> None:
    """Write proof.json and raise PolicyNotApplied if there are `problems`, which must be the same on all ranks."""
    if not problems:
        return
    if run.world.is_main:
        content = {"policy": str(run.cfg.checkpointing.policy), **found, "problems": problems}
        run_dir.write_json(run.record_folder / "proof.json", content)
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
    assert first.trace is not None, "the first micro-batch is always watched"
    run.window.recomputes(first.trace.recomputed_share())
    held = engine_memory.describe_placement(mine.placement)
    run.console.note(f"proven: {verification.line(run.applied, first.trace)}; {held}")
    if first.replayed is not None:
        run.console.note(f"proven: {first.replayed.line()}")
    run.console.note(f"first step done {summary.seconds_since_launch():.1f} s after launch")


def collect(run: Run, first: FirstStep) -> tuple[RankProof, list[str]]:
    """Return what this rank found, and every promise that was not kept on it. No collectives."""
    watch = first.trace
    assert watch is not None, "the first micro-batch is always watched"
    where = engine_memory.find_placement(run.engine)
    found = RankProof(
        layers=[_renumbered(row, _first_layer(run)) for row in verification.rows(run.applied, watch)],
        placement=where,
        flops={phase: watch.total_flops(phase) for phase in watch.flops},
        gathered_bytes=dict(watch.gathered_bytes),
    )
    largest = run.cfg.train.micro_batch_size * run.cfg.train.seq_len
    full = first.shape[0] * first.shape[1] >= largest
    broken = _placed(run, verification.unmet_expectations(run.applied, watch, run.cfg.checkpointing, full=full))
    broken += engine_memory.unmet_expectations(
        where, run.strategy.ds, ranks=run.world.zero_size, device_type=run.world.device.type
    )
    return found, broken


def _first_layer(run: Run) -> int:
    return run.pipeline.first_layer if run.pipeline else 0


def _placed(run: Run, texts: list[str]) -> list[str]:
    """Return texts about layers, which count from the first of a stage, with the place of that one in the model."""
    before = _first_layer(run)
    return [
        f"in a stage whose layer 0 is the model's layer {before}, {text}" if before else text for text in texts
    ]


def _renumbered(row: dict[str, Any], before: int) -> dict[str, Any]:
    """Return a layer's row with layers numbered in the whole model; `before` layers precede the stage."""
    together = [before + layer for layer in row["recomputed_with_layers"]]
    return row | {"layer": before + row["layer"], "recomputed_with_layers": together}


def record(run: Run, first: FirstStep, found: list[RankProof]) -> dict[str, Any]:
    """Return the content of proof.json.

    Layers, FLOPs and gathers are those that rank 0 counted in the first micro-batch (with stages the first rank of each
    stage); the placement is of every rank.
    """
    stages = found[:: run.world.size // run.world.pipeline_parallel_size]
    return {
        "policy": str(run.cfg.checkpointing.policy),
        "in_words": policy.describe(run.strategy.decisions),
        "stacks": run.strategy.stacks,
        "zero_stage": run.strategy.zero_stage,
        "compile": str(run.cfg.compile),  # from the second micro-batch on; the proof is of layers without it
        "first_micro_batch": {"rows": first.shape[0], "positions": first.shape[1]},
        "layers": [row for stage in stages for row in stage.layers],
        "first_micro_batch_flops": {
            phase: sum(stage.flops.get(phase, 0) for stage in stages) for phase in found[0].flops
        },
        "first_micro_batch_zero3_gathered_bytes": found[0].gathered_bytes,
        "run_again": asdict(first.replayed) if first.replayed else None,
        "placement_by_rank": [asdict(rank.placement) for rank in found],
        "shared_sequences": first.shared_sequences,
    }


def prove_shared_sequences(run: Run, batch: StepBatch) -> dict[str, Any]:
    """Check that ranks that share sequences compute one rank's loss; return the findings for proof.json. Collective.

    At most LONGEST tokens of the row with the most trained tokens are gathered. The group computes their loss together,
    and each rank computes it by itself, without dropout: the two must agree. For fewer tokens the norms of the loss's
    gradient for the embedding's output must agree too, because that gradient passes through every exchange. Labels of
    all ranks' parts are counted: none may be lost or counted twice.

    Raises PolicyNotApplied on all ranks otherwise, after proof.json is written.
    """
    sequence = run.sequence
    assert sequence is not None, "only runs that share sequences are proven to"
    run.engine.eval()
    with run.window.excluded():
        whole = sequence.gather(batch.micro_batches[0], LONGEST, run.world.device)
        losses = _losses(run, sequence, whole)
        norms = _gradient_norms(run, sequence, sequence.shorten(whole, LONGEST_BACKWARD))
    run.engine.train()
    trained = sum(int((each["targets"] != IGNORED).sum()) for each in batch.micro_batches)
    held = sum(each["input_ids"].numel() for each in batch.micro_batches)
    everyone = distributed.gather((*losses, *norms, trained, held))
    found = {
        "ranks": sequence.group.size,
        "loss_of_the_group": [each[0] for each in everyone],
        "loss_of_one_rank": [each[1] for each in everyone],
        "same_within": SAME_LOSS[run.cfg.train.precision],
        "gradient_norm_of_the_group": [each[2] for each in everyone],
        "gradient_norm_of_one_rank": [each[3] for each in everyone],
        "gradient_same_within": SAME_GRADIENT[run.cfg.train.precision],
        "trained_tokens_by_rank": [each[4] for each in everyone],
        "trained_tokens": batch.trained_tokens,
        "tokens_held_by_rank": [each[5] for each in everyone],
        "tokens_gathered": whole["input_ids"].numel(),
    }
    _refuse(run, {"shared_sequences": found}, compare_shared(found))
    run.console.note(
        f"proven: {sequence.group.size} ranks that share a sequence have the loss of one rank: {losses[0]:.6g}, alone "
        f"{losses[1]:.6g}; gradient norm {norms[0]:.4g}, alone {norms[1]:.4g}; each of {batch.trained_tokens} trained "
        "tokens is on one rank"
    )
    return found


def compare_shared(found: dict[str, Any]) -> list[str]:
    """Return the problems in `found`, the findings of `prove_shared_sequences`."""
    problems = []
    for what, key, within in (
        ("loss", "loss", found["same_within"]),
        ("gradient norm", "gradient_norm", found["gradient_same_within"]),
    ):
        pairs = zip(found[f"{key}_of_the_group"], found[f"{key}_of_one_rank"], strict=True)
        problems += [
            f"rank {rank}: the {what} of {found['ranks']} ranks that share a sequence is {shared:.8g}, and {whole:.8g} "
            "when one rank computes it whole: train.sequence_parallel_size=1 trains this model"
            for rank, (shared, whole) in enumerate(pairs)
            if not _same(shared, whole, within)
        ]
    if (counted := sum(found["trained_tokens_by_rank"])) != found["trained_tokens"]:
        problems.append(
            f"the ranks' blocks have {counted} trained tokens, the batch has {found['trained_tokens']}: a label was "
            "lost or is seen twice"
        )
    return problems


def _same(one: float, other: float, within: float) -> bool:
    """Return whether two values agree. Two that are not finite do: such a step is never applied."""
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.isfinite(one) == math.isfinite(other)
    return abs(one - other) <= within * abs(other)


@torch.no_grad()
def _losses(run: Run, sequence: SequenceParallel, whole: dict[str, Tensor]) -> tuple[float, float]:
    """Return the summed loss of the rows `whole` by the group, and by this rank alone."""
    with _unlearnt(run):
        part = run.token_loss(run.engine, sequence.inputs(sequence.take_own(whole), run.world.device))
    with _unlearnt(run):
        alone = sequence.run_whole(run.engine, run.token_loss, whole)
    return sequence.sum(part.double()).item(), alone.item()


def _gradient_norms(run: Run, sequence: SequenceParallel, whole: dict[str, Tensor]) -> tuple[float, float]:
    """Return the norms of the loss's gradient for the embedding's output, by the group and by this rank alone.

    All activations are kept, whatever the policy is, and no weight gets a gradient.
    """
    net, own = run.engine.module, sequence.inputs(sequence.take_own(whole), run.world.device)
    with run.applied.scope.keep_everything(), _unlearnt(run):
        part = _squared_gradient(net, lambda: run.token_loss(net, own))
    with run.applied.scope.keep_everything(), _unlearnt(run):
        alone = _squared_gradient(net, lambda: sequence.run_whole(net, run.token_loss, whole))
    return math.sqrt(sequence.sum(part).item()), math.sqrt(alone.item())


@contextmanager
def _unlearnt(run: Run) -> Iterator[None]:
    """Keep ZeRO-3 from learning the order of modules in a pass that is not part of a step.

    ZeRO-3 caches which weights it may release after each module, and keeps that cache when it forgets the order
    (runtime/zero/partitioned_param_coordinator.py:637, DeepSpeed 0.19.8). After a forward alone, in which no weight is
    used twice, every later micro-batch would gather each weight twice.
    """
    yield
    if run.strategy.zero_stage == 3:
        coordinator = run.engine.optimizer.parameter_offload.get_param_coordinator()
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()


def _squared_gradient(net: Any, compute: Callable[[], Tensor]) -> Tensor:
    """Return the squared norm of the gradient of `compute()` with respect to the output of the embedding of `net`."""
    given: list[Tensor] = []

    def cut(module: torch.nn.Module, args: Any, output: Tensor) -> Tensor:
        given.append(output.detach().requires_grad_())
        return given[-1]

    hook = net.get_input_embeddings().register_forward_hook(cut)
    try:
        (gradient,) = torch.autograd.grad(compute(), given)
    finally:
        hook.remove()
    return gradient.double().square().sum()
