"""One optimizer step: what a rank's losses are multiplied by before their gradients are averaged."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from remat.training import loop
from remat.training.proof import FirstStep
from remat.training.run import Progress


def a_run(**more: Any) -> Any:
    """What one step reads of a run of two ranks."""
    values = {
        "pipeline": None,
        "engine": SimpleNamespace(optimizer=None),
        "timer": SimpleNamespace(phase=lambda _: nullcontext()),
        "watchdog": SimpleNamespace(enter=lambda *_: None),
        "applied": SimpleNamespace(micro_batch=nullcontext),
        "inputs": lambda micro_batch: micro_batch,
        "strategy": SimpleNamespace(zero_stage=2),
        "stop": SimpleNamespace(start=lambda flushed: None),
        "saves": SimpleNamespace(flushed=True),
        "cfg": SimpleNamespace(optim=None),
        "steps": 1,
        "world": SimpleNamespace(zero_size=2, tensor_parallel_size=1, device=torch.device("cpu")),
    }
    return SimpleNamespace(**(values | more))


def do_nothing_beside_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def watching(*_: Any) -> Any:
        yield lambda loss: None

    monkeypatch.setattr(loop.proof, "watching", watching)
    monkeypatch.setattr(loop.optimizer, "set_lr", lambda *_: None)
    monkeypatch.setattr(loop.optimizer, "lr_at", lambda *_: 0.1)


def test_a_loss_weighs_by_the_trained_tokens_of_the_global_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 of 24 tokens are trained; gradients are averaged over 2 ranks, so each rank's sum counts 2 / 10."""
    weighted: list[float] = []

    def backward(loss: torch.Tensor, scale_wrt_gas: bool) -> None:
        assert not scale_wrt_gas
        weighted.append(float(loss))

    do_nothing_beside_the_step(monkeypatch)
    run = a_run(
        engine=SimpleNamespace(backward=backward, step=lambda: None, optimizer=None),
        token_loss=lambda engine, inputs: torch.tensor(inputs["loss"]),
    )
    batch: Any = SimpleNamespace(
        trained_tokens=10, seen_tokens=24, micro_batches=[{"loss": 3.0}, {"loss": 8.0}]
    )
    assert loop._forward_backward_update(run, FirstStep(), batch, step=0).tolist() == [3.0, 8.0]
    assert weighted == pytest.approx([3.0 * 2 / 10, 8.0 * 2 / 10])


class Stages:
    """A stage that takes the inputs of its micro-batches, and notes the watchdog's marks before and after each."""

    def __init__(self, marks: list[tuple[str, int]]) -> None:
        self.marks, self.seen = marks, list[int]()

    def train(self, engine: Any, batches: Any, count: int, **how: Any) -> None:
        for _ in range(count):
            next(batches)
            self.seen.append(len(self.marks))

    def take_losses(self, count: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(count, device=device)


def test_each_micro_batch_of_a_stage_has_the_deadline_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    do_nothing_beside_the_step(monkeypatch)
    marks = list[tuple[str, int]]()
    stages = Stages(marks)
    run = a_run(pipeline=stages, watchdog=SimpleNamespace(enter=lambda *place: marks.append(place)))
    batch: Any = SimpleNamespace(trained_tokens=10, micro_batches=[{}, {}, {}])
    loop._forward_backward_update(run, FirstStep(), batch, step=4)
    assert stages.seen == [1, 2, 3] and set(marks) == {("step", 5)}


def test_the_proof_of_the_first_step_is_no_part_of_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    within, done = list[str](), list[str]()

    @contextmanager
    def excluded() -> Any:
        within.append("proof")
        yield
        within.clear()

    def note(what: str) -> Any:
        return lambda *_: done.append(f"{what} {bool(within)}")

    monkeypatch.setattr(loop.proof, "verify_first_step", note("verified"))
    run = a_run(
        engine=SimpleNamespace(was_step_applied=lambda: True),
        window=SimpleNamespace(step_end=note("counted"), excluded=excluded),
        console=SimpleNamespace(progress=lambda *_: None),
        tracker=SimpleNamespace(begin=note("begun")),
        snapshots=SimpleNamespace(write=note("written")),
        record_folder=None,
        cfg=SimpleNamespace(train=SimpleNamespace(max_skipped_steps=1)),
    )
    batch: Any = SimpleNamespace(seen_tokens=24, trained_tokens=10, positions=24, seen_of={})
    loop._advance(run, FirstStep(), Progress(), batch, torch.zeros(1))
    assert done == ["counted False", "verified True", "begun True", "written True"]
