"""Train: read `train` first, it is the table of contents. Also here: evaluation, skipped steps, the end of a run.

A step whose loss or gradient is not finite on any rank is applied by none, recorded with its samples, and bounded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch
import torch.distributed as dist

from remat.activation_checkpointing.mechanisms.counters import NotInEffect
from remat.config.units import format_size
from remat.data.batches import NO_LOSS, StepBatch, eval_micro_batches
from remat.machine import distributed
from remat.machine.peers import LostPeer
from remat.model import optimizer
from remat.report import run_dir, summary
from remat.report.console import final_rows
from remat.saving import export, nvme
from remat.saving.manifest import SaveError
from remat.training import ledger, lost_peer, out_of_memory, proof, saves
from remat.training.run import Parts, Progress


def finish(parts: Parts, step: int, metrics: Mapping[str, float], *, finished: bool) -> None:
    """Export when the run reached its end; write the ledger; close the record; print the table."""
    parts.watchdog.enter("export", step)
    if finished and parts.cfg.save.export:
        _export(parts, step)
    distributed.barrier()  # no rank still reads its swap files when they are removed
    whole = distributed.max_min(parts.window.summary(), parts.world.device)
    lines = _write_ledger(parts, whole, finished=finished) if parts.proven else []
    parts.tracker.summarise(ledger.metrics(lines))
    parts.tracker.finish(0)
    how = "finished" if finished else f"stopped at step {step}, resumable with resume=auto"
    parts.console.final_table(
        f"{parts.cfg.name} {how}",
        final_rows(whole, dict(metrics) | parts.peaks, ledger.in_words(lines) | summary.files(parts.folder)),
    )


def failed(parts: Parts, error: BaseException) -> None:
    """What is known when a run fails: the allocator's history if memory ran out and `profile.memory` is on; the
    ledger, once there was a first step. No collectives; raises nothing."""
    if isinstance(error, out_of_memory.OutOfMemory) and (path := parts.profiler.out_of_memory()):
        parts.console.warning(f"the allocator's history: {path} (pytorch.org/memory_viz)")
    if not parts.proven:
        return
    try:
        _write_ledger(parts, {}, finished=False)
    except Exception as second:  # it would hide why the run failed
        parts.console.warning(f"no ledger: {type(second).__name__}: {second}")


def _export(parts: Parts, step: int) -> None:
    parts.console.progress(step, parts.cfg.train.steps, doing="exporting")
    with out_of_memory.named("export", parts.plan):
        result = export.export(
            parts.engine,
            parts.folder / "export",
            tokenizer=parts.tokenizer,
            max_shard_size=parts.cfg.save.max_shard_size,
        )
    parts.take_memory_peaks()
    parts.console.note(f"exported {result.path} ({format_size(result.bytes)}, {result.seconds:.1f} s)")


def _write_ledger(parts: Parts, whole: Mapping[str, float], *, finished: bool) -> list[ledger.Row]:
    if not parts.world.is_main:
        return []
    lines = ledger.rows(parts, whole)
    content = ledger.record(parts, lines, finished=finished)
    run_dir.write_json(parts.record_folder / "ledger.json", content)
    return lines


def evaluate(parts: Parts, step: int) -> dict[str, float]:
    """Mean loss per trained token over the held-out blocks; the same number of forwards on every rank.

    {} without held-out blocks, or when the ranks agree to stop before it is done.
    """
    if parts.held_out is None or parts.stop.why is not None:
        return {}
    started = time.perf_counter()
    parts.console.progress(step, parts.cfg.train.steps, doing="evaluating")
    with parts.window.excluded(), out_of_memory.named("evaluate", parts.plan):
        mean = _mean_loss(parts, step)
    parts.in_a_row = 0
    parts.take_memory_peaks()
    if parts.stop.why is not None:
        return {}
    metrics = {"loss/eval": mean}
    parts.tracker.log(step, metrics)
    parts.console.eval_line(step, mean, time.perf_counter() - started)
    return metrics


@torch.no_grad()
def _mean_loss(parts: Parts, step: int) -> float:
    cfg, device = parts.cfg.train, parts.world.device
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    assert parts.held_out is not None
    parts.engine.eval()
    for micro_batch in eval_micro_batches(
        parts.held_out,
        micro_batch_size=cfg.micro_batch_size,
        rank=parts.world.data_rank,
        world_size=parts.world.data_size,
        max_batches=cfg.eval_batches,
    ):
        parts.watchdog.enter("evaluate", step)
        if parts.stop.answer():  # asked a micro-batch ago: there is nothing to wait for
            break
        parts.stop.ask()
        inputs = parts.inputs(micro_batch)
        totals[0] += parts.token_loss(parts.engine, inputs)
        totals[1] += (inputs["labels"][:, 1:] != NO_LOSS).sum()
    parts.stop.answer()
    parts.engine.train()
    if parts.world.size > 1:
        dist.all_reduce(totals)
    return (totals[0] / totals[1].clamp(min=1)).item()


class TrainingFailed(RuntimeError):
    """The run cannot go on (exit 70). Saved states are as they were."""


def poison_gradients(loss: torch.Tensor) -> torch.Tensor:
    """1, or NaN where `loss` is not finite: a factor that makes its gradients so as well, wherever it went wrong.

    The gradients are summed over the ranks, so all of them see it and skip the step.
    """
    return 1 + 0 * loss.detach()


def skipped(parts: Parts, batch: StepBatch, step: int, losses: torch.Tensor, grad_norm: float | None) -> None:
    """Write a row to `nonfinite.jsonl`. `losses` [micro-batches] are this rank's of step `step`, counted from 0."""
    own = [index for index, finite in enumerate(losses.isfinite().tolist()) if not finite]
    everyone = distributed.gather(own)  # a skipped step may take its time
    if not parts.world.is_main:
        return
    scale = loss_scale(parts)
    micro = parts.cfg.train.micro_batch_size
    ids = batch.sample_ids.reshape(-1, parts.world.data_size, micro)
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
                "sample_ids": ids[index, rank // parts.world.tensor_parallel_size].tolist(),
            }
            for rank, indices in enumerate(everyone)
            for index in indices
        ],
    }
    with (parts.folder / "nonfinite.jsonl").open("a") as record:
        record.write(json.dumps(row) + "\n")
    ranks = [str(rank) for rank, indices in enumerate(everyone) if indices]
    what = f"loss of rank {', '.join(ranks)}" if ranks else "gradient"
    parts.console.warning(f"step {step + 1} skipped: non-finite {what} (loss scale {scale:g})")


def raise_if_nonfinite(parts: Parts, batch: StepBatch, step: int, losses: torch.Tensor) -> None:
    """ZeRO-0 in fp32 applies any gradient, so a bad one must stop the run before it reaches the weights."""
    grads = [p.grad for p in parts.engine.module.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    parts.engine._global_grad_norm = norm
    if not torch.isfinite(norm):
        skipped(parts, batch, step, losses, float(norm))
        raise TrainingFailed(
            f"step {step + 1}: the gradient is not finite, and ZeRO stage 0 cannot skip a step; "
            f"batch ids are in {parts.folder / 'nonfinite.jsonl'}"
        )


def raise_if_too_many_skipped(parts: Parts, in_a_row: int, step: int) -> None:
    """Raise TrainingFailed on every rank once `train.max_skipped_steps` steps in a row, up to `step`, were skipped."""
    if in_a_row >= parts.cfg.train.max_skipped_steps:
        raise TrainingFailed(
            f"{in_a_row} steps in a row had a non-finite loss or gradient (up to step {step}); their batch ids are in "
            f"{parts.folder / 'nonfinite.jsonl'}. Weights and saved states are as before. Lower optim.lr, look at "
            "those samples, or raise train.max_skipped_steps"
        )


def loss_scale(parts: Parts) -> float:
    return float(getattr(parts.engine.optimizer, "cur_scale", 1.0))


FAILURES = (TrainingFailed, NotInEffect, SaveError, LostPeer)  # what ends a run with exit 70, beside memory


@dataclass
class Outcome:
    """How a run ended. `finished` is false when `train.stop_at` or a stop ended it early."""

    finished: bool
    progress: Progress
    metrics: dict[str, float] = field(default_factory=dict)  # the last of each name


def train(parts: Parts) -> Outcome:
    """Train to `train.steps` (or `train.stop_at`, or a stop), logging, evaluating and saving on the way.

    Raises TrainingFailed after too many non-finite steps, NotInEffect when the policy is not what ran, OutOfMemory,
    LostPeer when another rank is gone.
    The record is closed however the run ends.
    """
    try:
        with lost_peer.named(parts.watchdog):
            return _train(parts)
    except BaseException as error:
        # raised by all ranks: what they are saving can still be completed
        if isinstance(error, TrainingFailed):
            _complete_last(parts)
        failed(parts, error)
        parts.console.close()
        parts.tracker.finish(1)
        raise
    finally:
        parts.batches.close()
        parts.profiler.close()
        parts.applied.remove()
        nvme.remove_folder(parts.swap_folder, parts.world)
        parts.ownership.release()
        parts.watchdog.close()


def _complete_last(parts: Parts) -> None:
    """The state on its way; whatever happens to it does not hide why the run failed."""
    try:
        saves.wait_for_save(parts, may_fail=True)
    except Exception as error:
        parts.console.warning(f"the state on its way was not completed: {type(error).__name__}: {error}")


def _train(parts: Parts) -> Outcome:
    cfg = parts.cfg
    last = cfg.train.stop_at or cfg.train.steps
    progress = start(parts)
    metrics: dict[str, float] = {}
    parts.saves.last = progress.step if parts.resumed else -1
    stop = parts.stop
    stop.now()  # it may have been asked for while all was built
    if progress.to_evaluate:
        metrics |= _evaluate(parts, progress)
    while progress.step < last and stop.why is None:
        metrics |= step(parts, progress, last)
        saves.complete_save(parts, progress.step)
        if parts.to_rehearse and progress.skipped_in_a_row == 0 and progress.step < last and stop.why is None:
            saves.rehearse(parts, progress)
            stop.now()  # it may have been asked for within the rehearsal
        if _due(progress.step, cfg.train.eval_every, last):
            metrics |= _evaluate(parts, progress)
        if _due(progress.step, cfg.save.every, last if cfg.save.at_end or cfg.train.stop_at else 0):
            saves.save_state(parts, progress, must=progress.step == last)
            stop.now()  # it may have been asked for within the save
    if stop.why is not None:
        _stop(parts, progress)
    saves.wait_for_save(parts, progress.step)
    finished = progress.step >= cfg.train.steps and stop.why is None
    finish(parts, progress.step, metrics, finished=finished)
    return Outcome(finished=finished, progress=progress, metrics=metrics)


def step(parts: Parts, progress: Progress, last: int) -> dict[str, float]:
    """One optimizer step; its metrics when it is one that is logged, else nothing."""
    parts.watchdog.enter("step", progress.step + 1)
    with parts.timer.phase("data"):
        batch = parts.batches.next_step()
    parts.profiler.step_begins()
    with out_of_memory.named(lambda: parts.timer.last, parts.plan):
        found = _forward_backward_update(parts, batch, progress.step)
    if parts.engine.was_step_applied():
        parts.losses.add(found.sum(dtype=torch.float64), batch.trained_tokens)
    _advance(parts, progress, batch, found)
    parts.profiler.step_ended()
    stopping = parts.stop.answer()
    if progress.step % parts.cfg.train.log_every == 0:
        return _log(parts, progress, parts.losses.take())
    if stopping or progress.step == last:
        return _log(parts, progress, parts.losses.mean())  # a row more, which a resumed run does not know of
    return {}


def start(parts: Parts) -> Progress:
    """Fresh or resumed progress; on resume the record is cut back to the saved step."""
    progress = Progress(to_evaluate=parts.cfg.train.eval_every > 0)  # where it starts from
    if parts.resumed is not None:
        known = {item.name for item in fields(Progress)}
        progress = Progress(**{name: value for name, value in parts.resumed.items() if name in known})
        if "losses" in parts.resumed:  # not in older states
            parts.losses.restore(parts.resumed["losses"])
        parts.tracker.rewind(progress.step)
    saves.prepare(parts)
    parts.applied.reset()
    parts.engine.train()
    parts.memory.reset_peak()  # the peak of a step, not of loading
    parts.console.progress(progress.step, parts.cfg.train.steps)
    parts.snapshots.follow(parts.timer)
    parts.window.start()
    return progress


def _forward_backward_update(parts: Parts, batch: StepBatch, step: int) -> torch.Tensor:
    """One optimizer step; returns this rank's summed loss of each micro-batch, on the device.

    Each token of the global batch weighs the same: DeepSpeed averages gradients over the ranks that read data of
    their own, so a rank's summed loss is multiplied by their number / trained tokens of the global batch, and
    DeepSpeed's own division by the accumulation steps is switched off.
    """
    engine, timer = parts.engine, parts.timer
    optimizer.set_lr(engine.optimizer, optimizer.lr_at(step, parts.cfg.optim, parts.cfg.train.steps))
    scale = parts.world.data_size / max(1, batch.trained_tokens)
    losses = []
    for micro_batch in batch.micro_batches:
        parts.watchdog.enter("step", step + 1)
        with timer.phase("data"):
            inputs = parts.inputs(micro_batch)
        with parts.applied.micro_batch(), proof.watching(parts) as forward_done:
            with timer.phase("forward"):
                loss = parts.token_loss(engine, inputs)
            forward_done(loss)
            with timer.phase("backward"):
                engine.backward(loss * scale * poison_gradients(loss), scale_wrt_gas=False)
        losses.append(loss.detach())
        if parts.strategy.zero_stage == 0 and engine.is_gradient_accumulation_boundary():
            raise_if_nonfinite(parts, batch, step, torch.stack(losses))
        if len(losses) == len(batch.micro_batches):
            parts.stop.ask(flushed=parts.saves.flushed)
        with timer.phase("optimizer"):
            engine.step()
    sharing = parts.world.tensor_parallel_size  # ranks that share the layers have the same loss
    return torch.stack(losses) / sharing


def _advance(parts: Parts, progress: Progress, batch: StepBatch, losses: torch.Tensor) -> None:
    """Count the step; skip or stop on non-finite gradients; prove the policy once."""
    step = progress.step
    if parts.engine.was_step_applied():
        progress.skipped_in_a_row = 0
    else:
        progress.skipped_steps += 1
        progress.skipped_in_a_row += 1
        skipped(parts, batch, step, losses, _grad_norm(parts))
    progress.step += 1
    progress.tokens_seen += batch.seen_tokens
    progress.tokens_trained += batch.trained_tokens
    parts.window.step_end(batch.seen_tokens, batch.trained_tokens)
    parts.console.progress(progress.step, parts.cfg.train.steps)
    if not parts.proven and progress.skipped_in_a_row == 0:
        proof.prove(parts)
        parts.snapshots.write(parts.record_folder, parts.world)
    raise_if_too_many_skipped(parts, progress.skipped_in_a_row, progress.step)


def _log(parts: Parts, progress: Progress, mean_loss: float) -> dict[str, float]:
    """One row of `metrics.jsonl` and one line on the terminal. Two small collectives."""
    times = parts.window.close()
    lr = optimizer.lr_at(progress.step - 1, parts.cfg.optim, parts.cfg.train.steps)
    metrics: dict[str, float] = {"loss/train": mean_loss, "optim/lr": lr}
    norm = _grad_norm(parts)
    if norm is not None:
        metrics["optim/grad_norm"] = norm
    if parts.engine.fp16_enabled():
        metrics["optim/loss_scale"] = loss_scale(parts)
    metrics |= {
        "optim/skipped_steps": progress.skipped_steps,
        "tokens/seen": progress.tokens_seen,
        "tokens/trained": progress.tokens_trained,
    }
    metrics |= distributed.max_min(times, parts.world.device) | parts.take_memory_peaks() | parts.plan.metrics()
    parts.tracker.log(progress.step, metrics)
    parts.console.line(progress.step, parts.cfg.train.steps, metrics)
    return metrics


def _evaluate(parts: Parts, progress: Progress) -> dict[str, float]:
    """The evaluation of this step, or a note to do it after the resume when a stop comes first."""
    metrics = evaluate(parts, progress.step)
    progress.to_evaluate = parts.stop.why is not None and not metrics
    return metrics


def _stop(parts: Parts, progress: Progress) -> None:
    """Obey a stop: the state of this step is saved, unless it is already."""
    if parts.world.tensor_parallel_size > 1:
        parts.stop.obeyed()
        raise TrainingFailed(
            f"stopped after step {progress.step} ({parts.stop.why}); nothing is saved, which "
            f"train.tensor_parallel_size={parts.world.tensor_parallel_size} cannot be"
        )
    parts.console.note(
        f"stopping after step {progress.step} ({parts.stop.why})"
        + (": saving" if parts.saves.last != progress.step else "")
    )
    parts.tracker.finish_wandb_soon()  # a save may take longer than whoever asked to stop waits
    saves.wait_for_save(parts, progress.step, may_fail=True)  # then this step's state is saved instead
    if parts.saves.last != progress.step:
        saves.save_state(parts, progress, must=True)
    parts.stop.obeyed()
    parts.console.note(f"resume with resume=auto ({parts.folder})")


def _due(step: int, every: int, last: int) -> bool:
    return (every > 0 and step % every == 0) or step == last


def _grad_norm(parts: Parts) -> float | None:
    """DeepSpeed's norm of the last step before clipping; it has been read on the host already."""
    norm = parts.engine.get_global_grad_norm()
    return None if norm is None else float(norm)
