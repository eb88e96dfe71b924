"""The training loop. Read `train` first: it is the table of contents."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch

from remat.activation_checkpointing.mechanisms.counters import NotInEffect
from remat.data.batches import StepBatch
from remat.machine import distributed
from remat.machine.peers import LostPeer
from remat.model import optimizer
from remat.saving import swapping
from remat.saving.manifest import SaveError
from remat.training import ending, lost_peer, nonfinite, out_of_memory, proof, rehearsal, saves
from remat.training.evaluation import evaluate
from remat.training.nonfinite import TrainingFailed
from remat.training.run import Parts

FAILURES = (TrainingFailed, NotInEffect, SaveError, LostPeer)  # what ends a run with exit 70, beside memory


@dataclass
class Progress:
    """What a resumed run must know again; kept in every saved state."""

    step: int = 0
    tokens_seen: int = 0
    tokens_trained: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    to_evaluate: bool = False  # a stop came before or within the evaluation of this step


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
        ending.failed(parts, error)
        parts.console.close()
        parts.tracker.finish(1)
        raise
    finally:
        parts.batches.close()
        parts.profiler.close()
        parts.applied.remove()
        swapping.remove(parts.swap_folder, parts.world)
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
            rehearsal.rehearse(parts, progress)
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
    ending.finish(parts, progress.step, metrics, finished=finished)
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
    rehearsal.prepare(parts)
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
                engine.backward(loss * scale * nonfinite.spread(loss), scale_wrt_gas=False)
        losses.append(loss.detach())
        if parts.strategy.zero_stage == 0 and engine.is_gradient_accumulation_boundary():
            nonfinite.refuse(parts, batch, step, torch.stack(losses))
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
        nonfinite.skipped(parts, batch, step, losses, _grad_norm(parts))
    progress.step += 1
    progress.tokens_seen += batch.seen_tokens
    progress.tokens_trained += batch.trained_tokens
    parts.window.step_end(batch.seen_tokens, batch.trained_tokens)
    parts.console.progress(progress.step, parts.cfg.train.steps)
    if not parts.proven and progress.skipped_in_a_row == 0:
        proof.prove(parts)
        parts.snapshots.write(parts.record_folder, parts.world)
    nonfinite.refuse_too_many(parts, progress.skipped_in_a_row, progress.step)


def _log(parts: Parts, progress: Progress, mean_loss: float) -> dict[str, float]:
    """One row of `metrics.jsonl` and one line on the terminal. Two small collectives."""
    times = parts.window.close()
    lr = optimizer.lr_at(progress.step - 1, parts.cfg.optim, parts.cfg.train.steps)
    metrics: dict[str, float] = {"loss/train": mean_loss, "optim/lr": lr}
    norm = _grad_norm(parts)
    if norm is not None:
        metrics["optim/grad_norm"] = norm
    if parts.engine.fp16_enabled():
        metrics["optim/loss_scale"] = nonfinite.loss_scale(parts)
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
