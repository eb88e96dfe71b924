"""Every promise of a DeepSpeed config about places, kept and broken, on what a rank would report."""

from __future__ import annotations

from typing import Any

import pytest

from remat.training import engine_memory
from remat.training.engine_memory import OptimizerState, Parameters, Placement

ELEMENTS, RANKS = 1000, 2
SHARE = 2 * ELEMENTS // RANKS  # Adam's two moments


def found(
    *,
    sharded: int = 4,
    elements: int = SHARE,
    parameters_on: str = "cuda",
    state_on: dict[str, int] | None = None,
    forms: tuple[str, str, str] = ("fp32", "fp32", "fp32"),
) -> Placement:
    return Placement(
        Parameters(
            count=4,
            elements=ELEMENTS,
            trained_elements=ELEMENTS,
            sharded=sharded,
            bytes_on={parameters_on: 2 * ELEMENTS},
        ),
        OptimizerState(
            elements=elements,
            bytes_on={"cuda": 4 * elements} if state_on is None else state_on,
            pinned_bytes=0,
            bytes_in={
                name: {form: 4 * elements}
                for name, form in zip(("master weights", "master gradients", "moments"), forms, strict=True)
            },
        ),
    )


def ds(stage: int = 3, optimizer: Any = None, param: Any = None, states: str = "fp32") -> dict[str, Any]:
    sections = {"offload_optimizer": optimizer, "offload_param": param}
    bf16 = {"bf16_master_weights_and_grads": states != "fp32", "bf16_optimizer_states": states == "bf16"}
    return {
        "bf16": bf16,
        "zero_optimization": {"stage": stage} | {k: v for k, v in sections.items() if v is not None},
    }


def broken(report: Placement, config: dict[str, Any]) -> list[str]:
    return engine_memory.unmet_expectations(report, config, ranks=RANKS, device_type="cuda")


CPU, NVME, NONE = {"device": "cpu"}, {"device": "nvme"}, {"device": "none"}
BOTH = {"cuda": 3000, "cpu": 1000}
KEPT: dict[str, tuple[Placement, dict[str, Any]]] = {
    "stage 3": (found(), ds()),
    "stage 3, padded": (found(elements=SHARE + 16), ds()),
    "stage 2": (found(sharded=0), ds(2)),
    "stage 0": (found(sharded=0, elements=2 * ELEMENTS), ds(0)),
    "no offload in words": (found(), ds(optimizer=NONE, param=NONE)),
    "optimizer on cpu": (found(state_on={"cpu": 4000}), ds(optimizer=CPU)),
    "optimizer on cpu, stage 2": (found(sharded=0, state_on={"cpu": 4000}), ds(2, optimizer=CPU)),
    "optimizer on nvme": (found(state_on={"nvme": 4000}), ds(optimizer=NVME)),
    "optimizer on nvme, small groups on cpu": (found(state_on={"nvme": 3000, "cpu": 1000}), ds(optimizer=NVME)),
    "Twin-Flow": (found(state_on=BOTH), ds(optimizer=CPU | {"ratio": 0.3})),
    "Twin-Flow of one sub-group": (found(state_on={"cpu": 4000}), ds(optimizer=CPU | {"ratio": 0.3})),
    "parameters on cpu": (found(parameters_on="cpu"), ds(param=CPU)),
    "parameters on nvme": (found(parameters_on="nvme"), ds(param=NVME)),
    "parameters on nvme, small ones on cpu": (found(parameters_on="cpu"), ds(param=NVME)),
    "paged state": (found(state_on={"cuda": 1000, "paged": 3000}), ds()),
    "states in bf16": (found(forms=("bf16", "bf16", "bf16")), ds(states="bf16")),
    "master weights in bf16": (found(forms=("bf16", "bf16", "fp32")), ds(states="bf16_master")),
    "moments in 8 bits": (found(forms=("fp32", "fp32", "uint8")), ds()),
    "a device without bytes": (found(state_on={"cpu": 4000, "cuda": 0}), ds(optimizer=CPU)),
}
OPTIMIZER, PARAM = "zero_optimization.offload_optimizer.device=", "zero_optimization.offload_param.device="
BROKEN: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "whole parameters": (
        found(sharded=1),
        ds(),
        "zero_optimization.stage=3 is not in effect: 3 of 4 parameters",
    ),
    "no state": (found(elements=0), ds(), "holds 0 elements of optimizer state, its share is 1000"),
    "unsharded state": (found(elements=2 * ELEMENTS), ds(), "holds 2000 elements of optimizer state"),
    "unsharded state, stage 1": (
        found(sharded=0, elements=2 * ELEMENTS),
        ds(1),
        "zero_optimization.stage=1 is not",
    ),
    "state stayed": (found(), ds(optimizer=CPU), f"{OPTIMIZER}cpu"),
    "state stayed in part": (found(state_on=BOTH), ds(optimizer=CPU), f"{OPTIMIZER}cpu"),
    "state stayed in part, ratio 1": (
        found(state_on=BOTH),
        ds(optimizer=CPU | {"ratio": 1.0}),
        f"{OPTIMIZER}cpu",
    ),
    "state stayed, nvme": (found(), ds(optimizer=NVME), f"{OPTIMIZER}nvme"),
    "paged, and asked to be on cpu": (found(state_on={"paged": 4000}), ds(optimizer=CPU), f"{OPTIMIZER}cpu"),
    "state left": (found(state_on={"cpu": 4000}), ds(), f"{OPTIMIZER}none"),
    "state on nvme, not asked": (found(state_on={"nvme": 1, "cpu": 1}), ds(optimizer=CPU), f"{OPTIMIZER}cpu"),
    "Twin-Flow on nvme": (
        found(state_on={"nvme": 4000}),
        ds(optimizer=CPU | {"ratio": 0.3}),
        f"{OPTIMIZER}cpu",
    ),
    "parameters stayed": (found(), ds(param=CPU), f"{PARAM}cpu"),
    "parameters stayed, ratio": (
        found(state_on=BOTH),
        ds(optimizer=CPU | {"ratio": 0.3}, param=CPU),
        f"{PARAM}cpu",
    ),
    "parameters stayed, nvme": (found(), ds(param=NVME), f"{PARAM}nvme"),
    "fp32 states": (found(), ds(states="bf16_master"), "master weights are in fp32, not in bf16"),
    "16-bit states, not asked": (
        found(forms=("bf16", "fp32", "fp32")),
        ds(),
        "optim.states=fp32 is not in effect: master weights are in bf16",
    ),
    "moments in fp32": (
        found(forms=("bf16", "bf16", "fp32")),
        ds(states="bf16"),
        "optim.states=bf16 is not in effect: moments are in fp32, not in bf16",
    ),
    "moments in bf16": (
        found(forms=("bf16", "bf16", "bf16")),
        ds(states="bf16_master"),
        "optim.states=bf16_master is not in effect: moments are in bf16, not in fp32",
    ),
    "gradients in fp32": (
        found(forms=("bf16", "fp32", "bf16")),
        ds(states="bf16"),
        "master gradients are in fp32, not in bf16",
    ),
    "parameters left": (found(parameters_on="cpu"), ds(), f"{PARAM}none"),
}


@pytest.mark.parametrize("name", list(KEPT))
def test_kept(name: str) -> None:
    assert broken(*KEPT[name]) == []


@pytest.mark.parametrize("name", list(BROKEN))
def test_broken(name: str) -> None:
    report, config, text = BROKEN[name]
    problems = broken(report, config)
    assert len(problems) == 1 + (name == "fp32 states")
    assert text in problems[0]


def test_in_one_line() -> None:
    text = "4 of 4 parameters sharded, this rank holds 2.0 KiB on cuda; optimizer state 3.9 KiB on cuda"
    assert engine_memory.describe_placement(found()) == text
    forms = " (master weights in bf16, master gradients in bf16, moments in fp32)"
    assert engine_memory.describe_placement(found(forms=("bf16", "bf16", "fp32"))) == text + forms
