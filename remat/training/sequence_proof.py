"""Before the first step, compare ranks that share sequences with one rank that has a whole one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from remat.activation_checkpointing.mechanisms.counters import PolicyNotApplied
from remat.config.options import Precision
from remat.data.batches import StepBatch
from remat.machine import distributed
from remat.model.loss import IGNORED, shifted
from remat.parallel.sequence_parallel import SequenceParallel
from remat.report import run_dir
from remat.training.run import Run

LONGEST = 4096  # tokens of a row that one rank computes by itself
# Of the two losses, which are sums of the same numbers in another order.
SAME_WITHIN = {Precision.fp32: 1e-4, Precision.bf16: 1e-2, Precision.fp16: 1e-2}


def prove(run: Run, batch: StepBatch) -> dict[str, Any]:
    """Return what proof.json says of shared sequences, from the first step's batch. Collective.

    The first tokens of a row are computed by the group, and whole by each rank of it, without gradients or dropout:
    the summed losses must agree. Labels of all ranks' blocks are counted: none may be lost or seen twice. Raises
    PolicyNotApplied on all ranks otherwise; proof.json is written then too.
    """
    sequence = run.sequence
    assert sequence is not None, "only runs that share sequences are proven to"
    shared, whole = _losses(run, sequence, _first_row(batch.micro_batches[0]))
    trained = sum(int((sequence.take_own(each)["targets"] != IGNORED).sum()) for each in batch.micro_batches)
    everyone = distributed.gather((shared, whole, trained))
    found = {
        "ranks": sequence.group.size,
        "loss_of_the_group": [value for value, _, _ in everyone],
        "loss_of_one_rank": [value for _, value, _ in everyone],
        "same_within": SAME_WITHIN[run.cfg.train.precision],
        "trained_tokens_by_rank": [count for _, _, count in everyone],
        "trained_tokens": batch.trained_tokens,
    }
    problems = compare(found)
    if problems and run.world.is_main:
        content = {"policy": str(run.cfg.checkpointing.policy), "shared_sequences": found, "problems": problems}
        run_dir.write_json(run.record_folder / "proof.json", content)
    if problems:
        raise PolicyNotApplied("\n".join(problems))
    run.console.note(
        f"proven: {sequence.group.size} ranks that share a sequence have the loss of one rank: {shared:.6g}, alone "
        f"{whole:.6g}; each of {batch.trained_tokens} trained tokens is on one rank"
    )
    return found


def compare(found: dict[str, Any]) -> list[str]:
    """Return what is wrong in `found`, the content that `prove` makes."""
    problems = [
        f"rank {rank}: the loss of {found['ranks']} ranks that share a sequence is {shared:.8g}, and {whole:.8g} when "
        "one rank computes it whole: train.sequence_parallel_size=1 trains this model"
        for rank, (shared, whole) in enumerate(
            zip(found["loss_of_the_group"], found["loss_of_one_rank"], strict=True)
        )
        if not _same(shared, whole, found["same_within"])
    ]
    if (counted := sum(found["trained_tokens_by_rank"])) != found["trained_tokens"]:
        problems.append(
            f"the ranks' blocks have {counted} trained tokens, the batch has {found['trained_tokens']}: a label was "
            "lost or is seen twice"
        )
    return problems


def _same(one: float, other: float, within: float) -> bool:
    """Losses that are not finite are left to the guard of steps."""
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.isfinite(one) == math.isfinite(other)
    return abs(one - other) <= within * abs(other)


def _first_row(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the row whose first tokens carry most loss, as far as it is computed by one rank."""
    cut = {name: value[:, :LONGEST] for name, value in batch.items()}
    row = int((shifted(cut["labels"]) != IGNORED).sum(1).argmax())
    return {name: value[row : row + 1] for name, value in cut.items()}


@torch.no_grad()
def _losses(run: Run, sequence: SequenceParallel, batch: dict[str, Tensor]) -> tuple[float, float]:
    """Return the summed loss of `batch` by the group, and by this rank alone."""
    device = run.world.device
    run.engine.eval()
    with run.window.excluded():
        part = run.token_loss(run.engine, sequence.inputs(batch, device))
        shared = sequence.sum(part.double()).item()
        on_device = {name: value.to(device) for name, value in batch.items()}
        whole = sequence.run_whole(run.engine, run.token_loss, on_device).item()
    run.engine.train()
    return shared, whole
