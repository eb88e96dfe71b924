"""Run a model once under a policy and hold it to no activation checkpointing, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from remat.activation_checkpointing import apply, policy
from remat.activation_checkpointing.apply import Applied
from remat.activation_checkpointing.mechanisms.mechanism import LayerDecision
from remat.activation_checkpointing.op_tracer import OpTracer
from remat.activation_checkpointing.replay import Replayed
from remat.config.options import CheckpointingConfig, OffloadConfig, Policy
from remat.model import layers
from remat.model.loss import TokenLoss

NONE = CheckpointingConfig(policy=Policy.none)


@dataclass
class Watched:
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    applied: Applied
    watch: OpTracer
    replayed: Replayed


def offload_all(**more: Any) -> OffloadConfig:
    """Every layer, every tensor."""
    return OffloadConfig(enabled=True, min_bytes=0, keep_last_layers=0, **more)


def run(
    net: Any,
    cfg: CheckpointingConfig,
    ids: torch.Tensor | None = None,
    zero_stage: int = 0,
    token_loss: TokenLoss | None = None,
    decisions: list[LayerDecision] | None = None,
) -> Watched:
    """One forward and backward under `cfg`; afterwards the model is bare again. `ids` [batch, seq].

    `token_loss` takes the place of the model's own loss, `decisions` of what follows from `cfg` alone.
    """
    depths = layers.find_stacks(net).depths
    decisions = decisions or policy.decide_layers(cfg, sum(depths), zero_stage=zero_stage, stacks=depths)
    applied = apply.apply(net, decisions, cfg, zero_stage=zero_stage)
    if ids is None:
        ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(3))
    net.zero_grad()
    torch.manual_seed(7)
    watch = applied.watch(torch.device("cpu"))
    try:
        with applied.recording() as recorder, applied.micro_batch(), watch:
            batch = {"input_ids": ids, "labels": ids}
            loss = token_loss(net, batch) if token_loss else net(**batch, use_cache=False).loss
            watch.forward_done()
            recorder.forward_done(loss)
            loss.backward()
        gradients = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
        replayed = recorder.replay(recorder.ready())
    finally:
        applied.remove()
    return Watched(loss.detach(), gradients, applied, watch, replayed)


def differences(one: Watched, other: Watched) -> list[str]:
    """What is not bit-equal: the loss, gradients by name."""
    assert one.gradients.keys() == other.gradients.keys()
    assert one.gradients
    found = [name for name, value in one.gradients.items() if not torch.equal(value, other.gradients[name])]
    return found + ([] if torch.equal(one.loss, other.loss) else ["loss"])
