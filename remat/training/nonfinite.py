"""Steps whose loss or gradient is not finite on any rank: applied by none, recorded with their samples, and bounded."""

from __future__ import annotations

import json

import torch

from remat.data.batches import StepBatch
from remat.machine import distributed
from remat.training.run import Parts


class TrainingFailed(RuntimeError):
    """The run cannot go on (exit 70). Saved states are as they were."""


def spread(loss: torch.Tensor) -> torch.Tensor:
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


def refuse(parts: Parts, batch: StepBatch, step: int, losses: torch.Tensor) -> None:
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


def refuse_too_many(parts: Parts, in_a_row: int, step: int) -> None:
    """Raise TrainingFailed on every rank once `train.max_skipped_steps` steps in a row, up to `step`, were skipped."""
    if in_a_row >= parts.cfg.train.max_skipped_steps:
        raise TrainingFailed(
            f"{in_a_row} steps in a row had a non-finite loss or gradient (up to step {step}); their batch ids are in "
            f"{parts.folder / 'nonfinite.jsonl'}. Weights and saved states are as before. Lower optim.lr, look at "
            "those samples, or raise train.max_skipped_steps"
        )


def loss_scale(parts: Parts) -> float:
    return float(getattr(parts.engine.optimizer, "cur_scale", 1.0))
