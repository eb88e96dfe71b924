"""Train, evaluate, skip steps with a loss or gradient that is not finite, and end a run. Read `train` first.

When the loss or the gradient of a step is not finite on any rank, all ranks skip the step. The ids of its samples are
recorded, and too many skipped steps in a row end the run.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from remat.activation_checkpointing.mechanisms.counters import PolicyNotApplied
from remat.config.metrics import (
    GRAD_NORM,
    LEARNING_RATE,
    LOSS_EVAL,
    LOSS_SCALE,
    LOSS_TRAIN,
    PADDING_SHARE,
    RETREATS,
    SKIPPED_STEPS,
    TOKENS_SEEN,
    TOKENS_TRAINED,
    StepMetrics,
    lost_rows,
    share_of,
)
from remat.config.units import format_size
from remat.data.batches import NO_LOSS, Part, StepBatch, eval_micro_batches
from remat.machine import distributed
from remat.machine.peers import LostPeer
from remat.model import optimizer
from remat.model.loss import targets_of
from remat.parallel.pipeline_parallel import PipelineParallel
from remat.report import run_dir, summary
from remat.report.console import final_rows
from remat.saving import nvme
from remat.saving.exports import merge
from remat.saving.manifest import SaveError
from remat.saving.swap_room import SwapError
from remat.training import ledger, lost_peer, out_of_memory, proof, saves
from remat.training.proof import FirstStep
from remat.training.run import Progress, Run


def finish(run: Run, first: FirstStep, step: int, metrics: Mapping[str, float], *, finished: bool) -> None:
    """Export if the run reached its end, write the ledger, close the record, print the table. Collective."""
    run.watchdog.enter("export", step)
    if finished and (run.cfg.save.export or run.cfg.save.merge):
        _export(run, step)
    distributed.barrier()  # no rank still reads its swap files when they are removed
    whole = distributed.max_min(run.window.summary(), run.world.device)
    lines = _write_ledger(run, first, whole, finished=finished) if first.verified else []
    run.tracker.summarise(ledger.metrics(lines))
    run.tracker.finish(0)
    how = "finished" if finished else f"stopped at step {step}, resumable with resume=auto"
    run.console.final_table(
        f"{run.cfg.name} {how}",
        final_rows(whole, dict(metrics) | run.peaks, ledger.describe(lines) | summary.files(run.folder)),
    )


def record_failure(run: Run, first: FirstStep, error: BaseException) -> None:
    """Write the records of a run that fails. No collectives; raises nothing.

    They are the allocator's history, if memory ran out and `profile.memory` is on, and the ledger, if the first step
    was verified.
    """
    if isinstance(error, out_of_memory.OutOfMemory) and (path := run.profiler.out_of_memory()):
        run.console.warning(f"the allocator's history: {path} (pytorch.org/memory_viz)")
    if not first.verified:
        return
    try:
        _write_ledger(run, first, {}, finished=False)
    except Exception as second:  # raising it would hide why the run failed
        run.console.warning(f"no ledger: {type(second).__name__}: {second}")


def _export(run: Run, step: int) -> None:
    run.console.progress(step, run.steps, doing="exporting")
    with out_of_memory.named("export", run.plan):
        results = [saves.write_model(run, run.folder / "export")] if run.cfg.save.export else []
        if run.cfg.save.merge:
            results.append(saves.write_model(run, run.folder / merge.FOLDER, merged=True))
    run.take_memory_peaks()
    for result in results:
        run.console.note(f"exported {result.path} ({format_size(result.bytes)}, {result.seconds:.1f} s)")


def _write_ledger(
    run: Run, first: FirstStep, whole: Mapping[str, float], *, finished: bool
) -> list[ledger.Row]:
    if not run.world.is_main:
        return []
    lines = ledger.compare(run, first, whole)
    content = ledger.record(run, first, lines, finished=finished)
    run_dir.write_json(run.record_folder / "ledger.json", content)
    return lines


def evaluate(run: Run, first: FirstStep, progress: Progress) -> StepMetrics:
    """Return the mean loss per trained token over the held-out blocks, and count it in `progress`. Collective.

    Every rank runs the same number of forwards. Returns {} without held-out blocks, or when the ranks agree to
    stop before it is done: then the evaluation is due after the resume.
    """
    metrics: StepMetrics = {}
    if run.held_out is not None and run.stop.reason is None:
        started = time.perf_counter()
        run.console.progress(progress.step, run.steps, doing="evaluating")
        with run.window.excluded(), out_of_memory.named("evaluate", run.plan):
            mean = _mean_loss(run, progress.step)
        first.micro_batches = 0  # ZeRO-3 forgets the order of its gathers
        run.take_memory_peaks()
        if run.stop.reason is None:
            metrics = {LOSS_EVAL: mean}
            run.tracker.log(progress.step, metrics)
            run.console.eval_line(progress.step, mean, time.perf_counter() - started)
    progress.to_evaluate = run.stop.reason is not None and not metrics
    saves.count_evaluation(run, progress, metrics)
    return metrics


@torch.no_grad()
def _mean_loss(run: Run, step: int) -> float:
    cfg, device = run.cfg.train, run.world.device
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    assert run.held_out is not None
    run.engine.eval()
    every = eval_micro_batches(
        run.held_out,
        micro_batch_size=cfg.micro_batch_size,
        rank=run.world.data_rank,
        world_size=run.world.data_size,
        max_batches=cfg.eval_batches,
        part=Part(run.world.sequence_rank, run.world.sequence_parallel_size),
    )
    while together := list(islice(every, run.world.pipeline_parallel_size)):
        run.watchdog.enter("evaluate", step)
        if run.stop.finish():  # the vote began a micro-batch ago: there is nothing to wait for
            break
        run.stop.start()
        if run.pipeline is not None:
            run.pipeline.evaluate(run.engine, map(run.inputs, together), len(together))
            totals[0] += run.pipeline.take_losses(len(together), device).sum()
            totals[1] += sum((targets_of(m) != NO_LOSS).sum() for m in together if run.pipeline.is_last)
            continue
        inputs = run.inputs(together[0])
        totals[0] += run.token_loss(run.engine, inputs)
        totals[1] += (targets_of(inputs) != NO_LOSS).sum()
    run.stop.finish()
    run.engine.train()
    if run.world.size > 1:
        dist.all_reduce(totals)
    return (totals[0] / totals[1].clamp(min=1)).item()


class TrainingFailed(RuntimeError):
    """The error raised when the run cannot go on (exit 70). Saved states are as they were."""


def poison_gradients(loss: torch.Tensor) -> torch.Tensor:
    """Return 1, or NaN where `loss` is not finite: a factor that makes all its gradients non-finite too.

    The gradients are summed over the ranks, so all ranks see it and skip the step.
    """
    return 1 + 0 * loss.detach()


def record_skipped_step(
    run: Run, batch: StepBatch, step: int, losses: torch.Tensor, grad_norm: float | None
) -> None:
    """Write a row to `nonfinite.jsonl`. Collective.

    `losses` [micro-batches] are this rank's losses of the step; `step` is counted from 0.
    """
    own = [index for index, finite in enumerate(losses.isfinite().tolist()) if not finite]
    everyone = distributed.gather(own)  # slow, but only skipped steps come here
    if not run.world.is_main:
        return
    scale = loss_scale(run)
    micro = run.cfg.train.micro_batch_size
    ids = batch.sample_ids.reshape(-1, run.world.data_size, micro)
    row = {
        "step": step + 1,
        "epoch": batch.epoch,
        "sample_ids": batch.sample_ids.tolist(),
        "grad_norm": str(grad_norm),
        "loss_scale": scale,
        "non_finite_losses": [
            {
                "rank": rank,
                "micro_batch": index,
                "sample_ids": ids[index, run.world.data_rank_of(rank)].tolist(),
            }
            for rank, indices in enumerate(everyone)
            for index in indices
        ],
    }
    with (run.folder / "nonfinite.jsonl").open("a") as record:
        record.write(json.dumps(row) + "\n")
    ranks = [str(rank) for rank, indices in enumerate(everyone) if indices]
    what = f"loss of rank {', '.join(ranks)}" if ranks else "gradient"
    run.console.warning(f"step {step + 1} skipped: non-finite {what} (loss scale {scale:g})")


def raise_if_nonfinite(run: Run, batch: StepBatch, step: int, losses: torch.Tensor) -> None:
    """Raise TrainingFailed on every rank when the gradient is not finite, before it reaches the weights.

    ZeRO-0 in fp32 applies any gradient and cannot skip the step. Collective with stages: each has its own gradients.
    """
    every = run.engine.module.parameters()
    parameters = [p for p in every if getattr(p, "model_parallel", True)]  # of tied ones one
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if run.pipeline is not None:
        squares = norm.square() / run.world.zero_size  # the ranks of a stage have the same gradients
        dist.all_reduce(squares)
        norm = squares.sqrt()
    run.engine._global_grad_norm = norm
    if not torch.isfinite(norm):
        record_skipped_step(run, batch, step, losses, float(norm))
        raise TrainingFailed(
            f"step {step + 1}: the gradient is not finite, and ZeRO stage 0 cannot skip a step; "
            f"batch ids are in {run.folder / 'nonfinite.jsonl'}"
        )


def raise_if_too_many_skipped(run: Run, in_a_row: int, step: int) -> None:
    """Raise TrainingFailed on every rank once `train.max_skipped_steps` steps in a row, up to `step`, were skipped."""
    if in_a_row >= run.cfg.train.max_skipped_steps:
        raise TrainingFailed(
            f"{in_a_row} steps in a row had a non-finite loss or gradient (up to step {step}); their batch ids are in "
            f"{run.folder / 'nonfinite.jsonl'}. Weights and saved states are as before. Lower optim.lr, look at "
            "those samples, or raise train.max_skipped_steps"
        )


def loss_scale(run: Run) -> float:
    return float(getattr(run.engine.optimizer, "cur_scale", 1.0))


# errors with exit code 70, besides OutOfMemory
FAILURES = TrainingFailed, PolicyNotApplied, SaveError, SwapError, LostPeer


@dataclass
class Outcome:
    """The end of a run. `finished` is false when `train.stop_at` or a stop ended it early."""

    finished: bool
    progress: Progress
    metrics: StepMetrics  # the last value of each


def train(run: Run) -> Outcome:
    """Train to `run.steps` (or `train.stop_at`, or a stop), logging, evaluating and saving on the way.

    Raises OutOfMemory and the errors in FAILURES: TrainingFailed after too many non-finite steps, PolicyNotApplied when
    the policy is not in effect, LostPeer when another rank is gone. The record is closed however the run ends.
    """
    first = FirstStep()
    try:
        with lost_peer.named(run.watchdog):
            return _train(run, first)
    except BaseException as error:
        # all ranks raise it, so the pending save can still be completed
        if isinstance(error, TrainingFailed):
            _complete_last(run)
        record_failure(run, first, error)
        run.console.close()
        run.tracker.finish(1)
        raise
    finally:
        run.batches.close()
        run.profiler.close()
        run.applied.remove()
        if run.sequence is not None:
            run.sequence.remove()
        nvme.remove_folder(run.swap_folder, run.world)
        run.ownership.release()
        run.watchdog.close()


def _complete_last(run: Run) -> None:
    """Complete the pending save. A failure here is only a warning, so that it does not hide why the run failed."""
    try:
        saves.wait_for_save(run, may_fail=True)
    except Exception as error:
        run.console.warning(f"the state on its way was not completed: {type(error).__name__}: {error}")


def _train(run: Run, first: FirstStep) -> Outcome:
    cfg = run.cfg
    last = cfg.train.stop_at or run.steps
    progress = start(run)
    metrics: StepMetrics = {}
    stop = run.stop
    stop.poll()  # a stop may have been asked for while the run was built
    if progress.to_evaluate:
        metrics |= evaluate(run, first, progress)
    while progress.step < last and stop.reason is None and not saves.is_over(run, progress):
        metrics |= step(run, first, progress, last)
        saves.complete_save(run, progress.step)
        if (
            run.saves.trial_due
            and progress.skipped_in_a_row == 0
            and progress.step < last
            and stop.reason is None
        ):
            saves.make_trial_save(run, progress)
            stop.poll()  # a stop may have been asked for during the rehearsal
        if _due(progress.step, cfg.train.eval_every, last):
            metrics |= evaluate(run, first, progress)
        end = progress.step if saves.is_over(run, progress) else last
        if saves.is_due(cfg, progress.step, end):
            saves.save_state(run, progress, must=progress.step == end)
            stop.poll()  # a stop may have been asked for during the save
    if stop.reason is not None:
        _stop(run, progress)
    saves.wait_for_save(run, progress.step)
    over = saves.is_over(run, progress) and stop.reason is None
    if over:
        run.console.note(saves.explain_end(run, progress))
    finished = over or (progress.step >= run.steps and stop.reason is None)
    finish(run, first, progress.step, metrics, finished=finished)
    return Outcome(finished=finished, progress=progress, metrics=metrics)


def step(run: Run, first: FirstStep, progress: Progress, last: int) -> StepMetrics:
    """Run one optimizer step; return its metrics if the step is logged, else {}. Collective."""
    run.watchdog.enter("step", progress.step + 1)
    with run.timer.phase("data"):
        batch = run.batches.next_step()
    if run.sequence is not None and first.shared_sequences is None:
        with out_of_memory.named("forward", run.plan):
            first.shared_sequences = proof.prove_shared_sequences(run, batch)
    run.profiler.step_begins()
    with out_of_memory.named(lambda: run.timer.last, run.plan):
        found = _forward_backward_update(run, first, batch, progress.step)
    if run.applied.compiled is not None and (line := run.applied.compiled.news()):
        run.console.note(f"step {progress.step + 1}: {line}")
    if run.engine.was_step_applied():
        run.losses.add(found.sum(dtype=torch.float64), batch.trained_tokens)
    _advance(run, first, progress, batch, found)
    run.profiler.step_ended()
    stopping = run.stop.finish()
    if progress.step % run.cfg.train.log_every == 0:
        return _log(run, progress, run.losses.take())
    if stopping or progress.step == last:
        return _log(run, progress, run.losses.mean())  # an extra row, which leaves the loss window open
    return {}


def start(run: Run) -> Progress:
    """Prepare the first step; return fresh or resumed progress. On resume, cut the record back to the saved step."""
    progress = Progress(to_evaluate=run.cfg.train.eval_every > 0)  # evaluate before the first step
    if run.resumed is not None:
        progress = copy.deepcopy(run.resumed.progress)
        if run.resumed.losses is not None:
            run.losses.restore(run.resumed.losses)
        run.tracker.rewind(progress.step)
    elif run.cfg.resume != "none":  # an earlier launch of this run may have been killed before its first save
        run.tracker.rewind(-1)
    if times := len(run_dir.retreats(run.folder)):
        run.tracker.log(progress.step, {RETREATS: float(times)})
    saves.prepare(run, progress.step)
    run.applied.reset()
    run.engine.train()
    run.memory.reset_peak()  # the first peak is that of a step, not of loading
    run.console.progress(progress.step, run.steps)
    run.snapshots.follow(run.timer)
    run.window.start()
    return progress


def _forward_backward_update(run: Run, first: FirstStep, batch: StepBatch, step: int) -> torch.Tensor:
    """Run one optimizer step; return this rank's summed loss of each micro-batch, on the device.

    Each token of the global batch has the same weight. DeepSpeed averages gradients over the ranks that have
    gradients of their own, so a rank's summed loss is multiplied by their number / trained tokens of the global
    batch. DeepSpeed's own division by the accumulation steps is switched off.
    """
    engine, timer = run.engine, run.timer
    optimizer.set_lr(engine.optimizer, optimizer.lr_at(step, run.cfg.optim, run.steps))
    scale = run.world.zero_size / max(1, batch.trained_tokens)
    if run.pipeline is not None:
        return _through_stages(run, run.pipeline, first, batch, step, scale)
    losses = []
    for micro_batch in batch.micro_batches:
        run.watchdog.enter("step", step + 1)
        with timer.phase("data"):
            inputs = run.inputs(micro_batch)
        with run.applied.micro_batch(), proof.watching(run, first, micro_batch) as forward_done:
            with timer.phase("forward"):
                loss = run.token_loss(engine, inputs)
            forward_done(loss)
            with timer.phase("backward"):
                engine.backward(loss * scale * poison_gradients(loss), scale_wrt_gas=False)
        losses.append(loss.detach())
        if run.strategy.zero_stage == 0 and engine.is_gradient_accumulation_boundary():
            raise_if_nonfinite(run, batch, step, torch.stack(losses))
        if len(losses) == len(batch.micro_batches):
            run.stop.start(flushed=run.saves.flushed)
        with timer.phase("optimizer"):
            engine.step()
    sharing = run.world.tensor_parallel_size  # ranks that share the layers have the same loss
    return torch.stack(losses) / sharing


def _through_stages(
    run: Run, pipeline: PipelineParallel, first: FirstStep, batch: StepBatch, step: int, scale: float
) -> torch.Tensor:
    """Run one optimizer step with stages. Ranks of the last stage return their losses, the others zeros.

    The first micro-batch of a launch goes through all stages by itself, so that what each stage keeps can be counted.
    """
    engine, count, device = run.engine, len(batch.micro_batches), run.world.device

    def inputs(micro_batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # as often on each stage: a rank that is behind is told by its marks
        run.watchdog.enter("step", step + 1)
        return run.inputs(micro_batch)

    def before_update() -> None:
        if run.strategy.zero_stage == 0:
            raise_if_nonfinite(run, batch, step, pipeline.own_losses(len(batch.micro_batches), device))

    every = map(inputs, batch.micro_batches)
    how: dict[str, Any] = {
        "weigh": lambda loss: loss * scale * poison_gradients(loss),
        "around": run.timer.phase,
    }
    with run.applied.micro_batch():
        if first.trace is None:
            with proof.watching(run, first, batch.micro_batches[0]) as forward_done:
                pipeline.train(engine, every, 1, updates=False, forward_done=forward_done, **how)
            count -= 1
        run.stop.start(flushed=run.saves.flushed)
        pipeline.train(engine, every, count, before_update=before_update, **how)
    return pipeline.take_losses(len(batch.micro_batches), device)


def _advance(run: Run, first: FirstStep, progress: Progress, batch: StepBatch, losses: torch.Tensor) -> None:
    """Count the step, record it if it was skipped, and verify the first applied one. Raises after too many skips."""
    step = progress.step
    if run.engine.was_step_applied():
        progress.skipped_in_a_row = 0
    else:
        progress.skipped_steps += 1
        progress.skipped_in_a_row += 1
        record_skipped_step(run, batch, step, losses, _grad_norm(run))
    progress.step += 1
    progress.tokens_seen += batch.seen_tokens
    progress.tokens_trained += batch.trained_tokens
    progress.positions += batch.positions
    for name, seen in batch.seen_of.items():
        progress.seen_of[name] = progress.seen_of.get(name, 0) + seen
    run.window.step_end(batch.seen_tokens, batch.trained_tokens)
    run.console.progress(progress.step, run.steps)
    if not first.verified and progress.skipped_in_a_row == 0:
        with run.window.excluded():  # the second step is timed from its end
            proof.verify_first_step(run, first)
            run.tracker.begin()
            run.snapshots.write(run.timer, run.record_folder, run.world)
    raise_if_too_many_skipped(run, progress.skipped_in_a_row, progress.step)


def _log(run: Run, progress: Progress, mean_loss: float) -> StepMetrics:
    """Write one row of `metrics.jsonl` and one line on the terminal. Two small collectives."""
    times = run.window.close()
    lr = optimizer.lr_at(progress.step - 1, run.cfg.optim, run.steps)
    metrics: StepMetrics = {LOSS_TRAIN: mean_loss, LEARNING_RATE: lr}
    norm = _grad_norm(run)
    if norm is not None:
        metrics[GRAD_NORM] = norm
    if run.engine.fp16_enabled():
        metrics[LOSS_SCALE] = loss_scale(run)
    metrics |= {
        SKIPPED_STEPS: progress.skipped_steps,
        TOKENS_SEEN: progress.tokens_seen,
        TOKENS_TRAINED: progress.tokens_trained,
        PADDING_SHARE: 1 - progress.tokens_seen / max(1, progress.positions),
    }
    metrics |= {share_of(name): seen / max(1, progress.tokens_seen) for name, seen in progress.seen_of.items()}
    metrics |= {lost_rows(name): count for name, count in run.batches.lost().items()}
    metrics |= distributed.max_min(times, run.world.device) | run.take_memory_peaks() | run.plan.metrics()
    run.tracker.log(progress.step, metrics)
    run.console.line(progress.step, run.steps, metrics)
    return metrics


def _stop(run: Run, progress: Progress) -> None:
    """Stop as asked: save the state of this step, unless it is saved already."""
    run.console.note(
        f"stopping after step {progress.step} ({run.stop.reason})"
        + (": saving" if run.saves.last != progress.step else "")
    )
    run.tracker.finish_wandb_soon()  # the save may take longer than the sender of the stop waits
    saves.wait_for_save(run, progress.step, may_fail=True)  # if it fails, this step's state is saved instead
    if run.saves.last != progress.step:
        saves.save_state(run, progress, must=True)
    run.stop.clear()
    run.console.note(f"resume with resume=auto ({run.folder})")


def _due(step: int, every: int, last: int) -> bool:
    return (every > 0 and step % every == 0) or step == last


def _grad_norm(run: Run) -> float | None:
    """Return DeepSpeed's norm of the last step before clipping; it has been read on the host already."""
    norm = run.engine.get_global_grad_norm()
    return None if norm is None else float(norm)
