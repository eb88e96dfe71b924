"""The training loop. Read `train` first: it is the table of contents."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist

from remat import distributed, export, optim, proof, run_dir, saving, summary
from remat.activation_checkpointing.counts import NotInEffect
from remat.console import final_rows
from remat.data.batches import NO_LOSS, StepBatch, eval_micro_batches
from remat.loss import LossWindow
from remat.setup import Parts


class TrainingFailed(RuntimeError):
    """The run cannot go on (exit 70). Saved states are as they were."""


@dataclass
class Progress:
    """What a resumed run must know again; kept in every saved state."""

    step: int = 0
    tokens_seen: int = 0
    tokens_trained: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0


@dataclass
class Outcome:
    """How a run ended. `finished` is false when `train.stop_at` ended it early."""

    finished: bool
    progress: Progress
    metrics: dict[str, float] = field(default_factory=dict)  # the last of each name


def train(parts: Parts) -> Outcome:
    """Train to `train.steps` (or `train.stop_at`), logging, evaluating and saving on the way.

    Raises TrainingFailed after too many non-finite steps, NotInEffect when the policy is not what ran. The record
    is closed however the run ends.
    """
    try:
        return _train(parts)
    except BaseException:
        parts.console.close()
        parts.tracker.finish(1)
        raise
    finally:
        parts.applied.remove()
        if parts.swap_folder is not None and parts.world.local_rank == 0:
            shutil.rmtree(parts.swap_folder, ignore_errors=True)


def _train(parts: Parts) -> Outcome:
    cfg = parts.cfg
    last = cfg.train.stop_at or cfg.train.steps
    progress = start(parts)
    losses = LossWindow(parts.world.device)
    metrics: dict[str, float] = {}
    if progress.step == 0 and cfg.train.eval_every:
        metrics |= _evaluate(parts, progress)  # where it starts from
    while progress.step < last:
        metrics |= step(parts, progress, losses, last)
        if _due(progress.step, cfg.train.eval_every, last):
            metrics |= _evaluate(parts, progress)
        if _due(progress.step, cfg.save.every, last if cfg.save.at_end or cfg.train.stop_at else 0):
            _save(parts, progress)
    return _finish(parts, progress, metrics)


def step(parts: Parts, progress: Progress, losses: LossWindow, last: int) -> dict[str, float]:
    """One optimizer step; its metrics when it is one that is logged, else nothing."""
    with parts.timer.phase("data"):
        batch = parts.batches.next_step()
    losses.add(_forward_backward_update(parts, batch, progress.step), batch.trained_tokens)
    _advance(parts, progress, batch)
    if progress.step % parts.cfg.train.log_every == 0 or progress.step == last:
        return _log(parts, progress, losses.take())
    return {}


def start(parts: Parts) -> Progress:
    """Fresh or resumed progress; on resume the record is cut back to the saved step."""
    progress = Progress()
    if parts.resumed is not None:
        known = {item.name for item in fields(Progress)}
        progress = Progress(**{name: value for name, value in parts.resumed.items() if name in known})
        parts.tracker.rewind(progress.step)
    parts.applied.reset()
    parts.engine.train()
    parts.memory.reset_peak()  # the peak of a step, not of loading
    parts.console.progress(progress.step, parts.cfg.train.steps)
    parts.window.start()
    return progress


def _forward_backward_update(parts: Parts, batch: StepBatch, step: int) -> torch.Tensor:
    """One optimizer step; returns this rank's summed loss, on the device.

    Each token of the global batch weighs the same: DeepSpeed averages gradients over the ranks that read data of
    their own, so a rank's summed loss is multiplied by their number / trained tokens of the global batch, and
    DeepSpeed's own division by the accumulation steps is switched off.
    """
    engine, timer, device = parts.engine, parts.timer, parts.world.device
    optim.set_lr(engine.optimizer, optim.lr_at(step, parts.cfg.optim, parts.cfg.train.steps))
    scale = parts.world.data_size / max(1, batch.trained_tokens)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for micro_batch in batch.micro_batches:
        with timer.phase("data"):
            inputs = _on_device(micro_batch, device)
        with parts.applied.micro_batch(), _watching(parts) as forward_done:
            with timer.phase("forward"):
                loss = parts.token_loss(engine, inputs)
            forward_done()
            with timer.phase("backward"):
                engine.backward(loss * scale, scale_wrt_gas=False)
        total += loss.detach()
        if parts.strategy.zero_stage == 0 and engine.is_gradient_accumulation_boundary():
            _refuse_non_finite(parts, batch, step)
        with timer.phase("optimizer"):
            engine.step()
    return total / parts.world.tensor_parallel_size  # ranks that share the layers have the same loss


def _refuse_non_finite(parts: Parts, batch: StepBatch, step: int) -> None:
    """ZeRO-0 in fp32 applies any gradient, so a bad one must stop the run before it reaches the weights."""
    grads = [p.grad for p in parts.engine.module.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    parts.engine._global_grad_norm = norm
    if not torch.isfinite(norm):
        _record_skip(parts, batch, step, float(norm))
        raise TrainingFailed(
            f"step {step + 1}: the gradient is not finite, and ZeRO stage 0 cannot skip a step; "
            f"batch ids are in {parts.folder / 'nonfinite.jsonl'}"
        )


def _advance(parts: Parts, progress: Progress, batch: StepBatch) -> None:
    """Count the step; skip or stop on non-finite gradients; prove the policy once."""
    step = progress.step
    if parts.engine.was_step_applied():
        progress.skipped_in_a_row = 0
    else:
        progress.skipped_steps += 1
        progress.skipped_in_a_row += 1
        _record_skip(parts, batch, step, _grad_norm(parts))
    progress.step += 1
    progress.tokens_seen += batch.seen_tokens
    progress.tokens_trained += batch.trained_tokens
    parts.window.step_end(batch.seen_tokens, batch.trained_tokens)
    parts.console.progress(progress.step, parts.cfg.train.steps)
    if not parts.proven and progress.skipped_in_a_row == 0:
        _prove(parts)
    if progress.skipped_in_a_row >= parts.cfg.train.max_skipped_steps:
        raise TrainingFailed(
            f"{progress.skipped_in_a_row} steps in a row had a non-finite loss or gradient (up to step "
            f"{progress.step}); their batch ids are in {parts.folder / 'nonfinite.jsonl'}. Weights and saved states "
            "are as before. Lower optim.lr, look at those samples, or raise train.max_skipped_steps"
        )


@contextmanager
def _watching(parts: Parts) -> Iterator[Callable[[], None]]:
    """The first micro-batch of a launch is watched op by op, for the proof."""
    if parts.watch is not None:
        yield lambda: None
        return
    parts.watch = parts.applied.watch(parts.world.device)
    with parts.watch:
        yield parts.watch.forward_done


def _prove(parts: Parts) -> None:
    """After the first step that was applied: is what was asked in effect? What was found goes to proof.json either way.

    Raises NotInEffect on all ranks when a promise was not kept on any.
    """
    parts.proven = True
    mine, broken = proof.collect(parts)
    everyone = distributed.gather((mine, broken))
    if parts.world.is_main:
        run_dir.write_json(
            parts.record_folder / "proof.json", proof.record(parts, [found for found, _ in everyone])
        )
    problems = [f"rank {rank}: {text}" for rank, (_, texts) in enumerate(everyone) for text in texts]
    if problems:
        raise NotInEffect("\n".join(problems))
    parts.window.recomputes(parts.watch.recomputed_share() if parts.watch else 0.0)
    parts.console.note(f"proven: {proof.line(parts, mine)}")
    parts.console.note(f"first step done {summary.seconds_since_launch():.1f} s after launch")


def _record_skip(parts: Parts, batch: StepBatch, step: int, grad_norm: float | None) -> None:
    if not parts.world.is_main:
        return
    row = {
        "step": step + 1,
        "epoch": batch.epoch,
        "sample_ids": batch.sample_ids.tolist(),
        "grad_norm": str(grad_norm),
        "loss_scale": _loss_scale(parts),
    }
    with (parts.folder / "nonfinite.jsonl").open("a") as record:
        record.write(json.dumps(row) + "\n")
    parts.console.warning(f"step {step + 1} skipped: non-finite gradient (loss scale {_loss_scale(parts)})")


def _log(parts: Parts, progress: Progress, mean_loss: float) -> dict[str, float]:
    """One row of `metrics.jsonl` and one line on the terminal. Two small collectives."""
    times = parts.window.close()
    lr = optim.lr_at(progress.step - 1, parts.cfg.optim, parts.cfg.train.steps)
    metrics: dict[str, float] = {"loss/train": mean_loss, "optim/lr": lr}
    norm = _grad_norm(parts)
    if norm is not None:
        metrics["optim/grad_norm"] = norm
    if parts.engine.fp16_enabled():
        metrics["optim/loss_scale"] = _loss_scale(parts)
    metrics |= {
        "optim/skipped_steps": progress.skipped_steps,
        "tokens/seen": progress.tokens_seen,
        "tokens/trained": progress.tokens_trained,
    }
    metrics |= distributed.max_min(times, parts.world.device) | _take_memory_peaks(parts)
    parts.tracker.log(progress.step, metrics)
    parts.console.line(progress.step, parts.cfg.train.steps, metrics)
    return metrics


def _take_memory_peaks(parts: Parts) -> dict[str, float]:
    """Memory since the last call, over all ranks; kept for the final table. Each phase starts its own peak."""
    metrics = distributed.max_min(parts.memory.sample(), parts.world.device)
    for name, value in metrics.items():
        parts.peaks[name] = max(value, parts.peaks.get(name, value))
    parts.memory.reset_peak()
    return metrics


def _evaluate(parts: Parts, progress: Progress) -> dict[str, float]:
    """Mean loss per trained token over the held-out blocks; the same number of forwards on every rank."""
    if parts.held_out is None:
        return {}
    cfg, device = parts.cfg.train, parts.world.device
    started = time.perf_counter()
    parts.console.progress(progress.step, cfg.steps, doing="evaluating")
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    with parts.window.excluded(), torch.no_grad():
        parts.engine.eval()
        for micro_batch in eval_micro_batches(
            parts.held_out,
            micro_batch_size=cfg.micro_batch_size,
            rank=parts.world.data_rank,
            world_size=parts.world.data_size,
            max_batches=cfg.eval_batches,
        ):
            inputs = _on_device(micro_batch, device)
            totals[0] += parts.token_loss(parts.engine, inputs)
            totals[1] += (inputs["labels"][:, 1:] != NO_LOSS).sum()
        parts.engine.train()
        if parts.world.size > 1:
            dist.all_reduce(totals)
    _take_memory_peaks(parts)
    metrics = {"loss/eval": (totals[0] / totals[1].clamp(min=1)).item()}
    parts.tracker.log(progress.step, metrics)
    parts.console.eval_line(progress.step, metrics["loss/eval"], time.perf_counter() - started)
    return metrics


def _save(parts: Parts, progress: Progress) -> None:
    """Save the training state, out of the step time."""
    parts.console.progress(progress.step, parts.cfg.train.steps, doing="saving")
    with parts.window.excluded():
        state: dict[str, Any] = asdict(progress)
        state |= {
            "data": parts.batches.state(),
            "data_key": parts.data_key,
            "wandb_run_id": parts.tracker.wandb_run_id,
        }
        result = saving.save(
            parts.engine, parts.folder, step=progress.step, client_state=state, keep=parts.cfg.save.keep
        )
    _take_memory_peaks(parts)
    parts.tracker.log(progress.step, {"time/save_s": result.seconds})
    parts.console.note(f"saved {result.path} ({result.bytes / 2**20:.0f} MiB, {result.seconds:.1f} s)")


def _finish(parts: Parts, progress: Progress, metrics: dict[str, float]) -> Outcome:
    """Export when the run reached its end; close the record; print the table."""
    finished = progress.step >= parts.cfg.train.steps
    if finished and parts.cfg.save.export:
        parts.console.progress(progress.step, parts.cfg.train.steps, doing="exporting")
        result = export.export(
            parts.engine,
            parts.folder / "export",
            tokenizer=parts.tokenizer,
            max_shard_size=parts.cfg.save.max_shard_size,
        )
        _take_memory_peaks(parts)
        parts.console.note(f"exported {result.path} ({result.bytes / 2**20:.0f} MiB, {result.seconds:.1f} s)")
    distributed.barrier()  # no rank still reads its swap files when they are removed
    whole = distributed.max_min(parts.window.summary(), parts.world.device)
    parts.tracker.finish(0)
    ending = "finished" if finished else f"stopped at step {progress.step}, resumable with resume=auto"
    parts.console.final_table(
        f"{parts.cfg.name} {ending}", final_rows(whole, metrics | parts.peaks, summary.files(parts.folder))
    )
    return Outcome(finished=finished, progress=progress, metrics=metrics)


def _on_device(micro_batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: value.to(device, non_blocking=True) for name, value in micro_batch.items()}


def _due(step: int, every: int, last: int) -> bool:
    return (every > 0 and step % every == 0) or step == last


def _grad_norm(parts: Parts) -> float | None:
    """DeepSpeed's norm of the last step before clipping; it has been read on the host already."""
    norm = parts.engine.get_global_grad_norm()
    return None if norm is None else float(norm)


def _loss_scale(parts: Parts) -> float:
    return float(getattr(parts.engine.optimizer, "cur_scale", 1.0))
