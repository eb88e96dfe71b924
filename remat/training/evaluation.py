"""The loss on held-out data, during a run."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from remat.data.batches import NO_LOSS, eval_micro_batches
from remat.training import out_of_memory
from remat.training.run import Parts


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
