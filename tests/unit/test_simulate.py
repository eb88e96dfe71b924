"""The simulated micro-batch against real ones on a CPU: peak bytes and FLOPs; and what follows from sizes alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from remat import compose, loss
from remat.activation_checkpointing import apply, layers, policy
from remat.config import CheckpointingConfig, LossKind
from remat.planning import shadows, simulate
from remat.planning.records import Category, Phase, Simulation, ZeroSettings
from tests import small_models

LAYERS, ROWS, SEQ, HIDDEN = 4, 2, 64, 64
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "gemma": {"head_dim": 32},
    "phi": {},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "mixtral": {"experts_implementation": "grouped_mm"},
}
POLICIES = ["none", "full", "selective_ops", "uniform"]
SINGLE = ZeroSettings(stage=0, world_size=1, reduce_bucket_size=10**6, overlap_comm=False)
TOLERANCE = 0.005  # largest: GPT-2 and Phi, whose norms keep fp32 statistics on a GPU, 0.2 %


def build(family: str) -> Any:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 160, "vocab_size": 512}
    net = small_models.build(family, num_hidden_layers=LAYERS, **sizes, **FAMILIES[family])
    return net.to(torch.bfloat16)


def checkpointing(name: str, *more: str) -> CheckpointingConfig:
    return compose.compose_run([f"checkpointing={name}", *more]).run.checkpointing


def put_on(net: Any, cfg: CheckpointingConfig, device: str, zero_stage: int) -> apply.Applied:
    plan = policy.plan(cfg, len(layers.decoder_layers(net)), zero_stage=zero_stage)
    return apply.apply(net, plan, cfg, zero_stage=zero_stage, device=torch.device(device))


def recorded(
    net: Any, cfg: CheckpointingConfig, *, kind: LossKind = LossKind.full, stage: int = 0, seq_len: int = SEQ
) -> simulate.Recording:
    net = net.to("meta")
    applied = put_on(net, cfg, "meta", stage)
    try:
        return simulate.record(
            net,
            loss=loss.TokenLoss(net, kind, verify=False, cross_entropy=shadows.cross_entropy),
            scope=applied.scope,
            around=applied.micro_batch(),
            stage_3=stage == 3,
            micro_batch_size=ROWS,
            seq_len=seq_len,
            ignored=applied.offload.storages if applied.offload else tuple,
            workspaces=False,  # a CPU's kernels have others
        )
    finally:
        applied.remove()


def simulated(net: Any, cfg: CheckpointingConfig, zero: ZeroSettings = SINGLE, **more: Any) -> Simulation:
    return recorded(net, cfg, stage=zero.stage, **more).under(zero)


def real(net: Any, cfg: CheckpointingConfig, kind: LossKind = LossKind.full) -> tuple[int, dict[str, int]]:
    """Peak bytes and FLOPs by phase of a run on the CPU."""
    applied = put_on(net, cfg, "cpu", 0)
    ids = torch.randint(0, 512, (ROWS, SEQ), generator=torch.Generator().manual_seed(3))
    watch = applied.watch(torch.device("cpu"))
    token_loss = loss.TokenLoss(net, kind, verify=False)
    with applied.micro_batch(), watch:
        value = token_loss(net, {"input_ids": ids, "labels": ids})
        watch.forward_done()
        value.backward()
        del value
    applied.remove()
    return watch.peak_bytes, {phase: watch.total_flops(phase) for phase in watch.flops}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_peak_and_flops_are_those_of_a_cpu_run(family: str, name: str) -> None:
    net, cfg = build(family), checkpointing(name)
    peak, flops = real(net, cfg)
    found = simulated(net, cfg)
    assert found.peak.total_bytes == pytest.approx(peak, rel=TOLERANCE)
    assert {phase.value: found.flops[phase] for phase in Phase if phase is not Phase.step} == flops
