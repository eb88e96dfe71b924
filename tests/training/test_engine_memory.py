"""Every promise of a DeepSpeed config about places, kept and broken, on what a rank would report."""

from __future__ import annotations

from typing import Any

import pytest

from remat.training import engine_memory

ELEMENTS, RANKS = 1000, 2
SHARE = 2 * ELEMENTS // RANKS  # Adam's two moments


def found(
    *,
    sharded: int = 4,
    elements: int = SHARE,
    parameters_on: str = "cuda",
    state_on: dict[str, int] | None = None,
) -> dict[str, Any]:
    return {
        "parameters": {
            "count": 4,
            "elements": ELEMENTS,
            "trained_elements": ELEMENTS,
            "sharded": sharded,
            "bytes_on": {parameters_on: 2 * ELEMENTS},
        },
        "optimizer_state": {
            "elements": elements,
            "bytes_on": {"cuda": 4 * elements} if state_on is None else state_on,
            "pinned_bytes": 0,
        },
    }


def ds(stage: int = 3, optimizer: Any = None, param: Any = None) -> dict[str, Any]:
    sections = {"offload_optimizer": optimizer, "offload_param": param}
    return {"zero_optimization": {"stage": stage} | {k: v for k, v in sections.items() if v is not None}}


def broken(report: dict[str, Any], config: dict[str, Any]) -> list[str]:
    return engine_memory.unmet_expectations(report, config, ranks=RANKS, device_type="cuda")


CPU, NVME, NONE = {"device": "cpu"}, {"device": "nvme"}, {"device": "none"}
BOTH = {"cuda": 3000, "cpu": 1000}
KEPT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
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
    "parameters left": (found(parameters_on="cpu"), ds(), f"{PARAM}none"),
}


@pytest.mark.parametrize("name", list(KEPT))
def test_kept(name: str) -> None:
    assert broken(*KEPT[name]) == []


@pytest.mark.parametrize("name", list(BROKEN))
def test_broken(name: str) -> None:
    report, config, text = BROKEN[name]
    (problem,) = broken(report, config)
    assert text in problem


def test_in_one_line() -> None:
    text = "4 of 4 parameters sharded, this rank holds 2.0 KiB on cuda; optimizer state 3.9 KiB on cuda"
    assert engine_memory.describe_placement(found()) == text
