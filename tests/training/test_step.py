"""One optimizer step: what a rank's losses are multiplied by before their gradients are averaged."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from remat.training import loop
from remat.training.proof import FirstStep


def test_a_loss_weighs_by_the_trained_tokens_of_the_global_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 of 24 tokens are trained; gradients are averaged over 2 ranks, so each rank's sum counts 2 / 10."""
    weighted: list[float] = []

    @contextmanager
    def watching(*_: Any) -> Any:
        yield lambda loss: None

    def backward(loss: torch.Tensor, scale_wrt_gas: bool) -> None:
        assert not scale_wrt_gas
        weighted.append(float(loss))

    monkeypatch.setattr(loop.proof, "watching", watching)
    monkeypatch.setattr(loop.optimizer, "set_lr", lambda *_: None)
    monkeypatch.setattr(loop.optimizer, "lr_at", lambda *_: 0.1)
    run: Any = SimpleNamespace(
        pipeline=None,
        engine=SimpleNamespace(backward=backward, step=lambda: None, optimizer=None),
        timer=SimpleNamespace(phase=lambda _: nullcontext()),
        watchdog=SimpleNamespace(enter=lambda *_: None),
        applied=SimpleNamespace(micro_batch=nullcontext),
        inputs=lambda micro_batch: micro_batch,
        token_loss=lambda engine, inputs: torch.tensor(inputs["loss"]),
        strategy=SimpleNamespace(zero_stage=2),
        stop=SimpleNamespace(start=lambda flushed: None),
        saves=SimpleNamespace(flushed=True),
        cfg=SimpleNamespace(optim=None),
        steps=1,
        world=SimpleNamespace(zero_size=2, tensor_parallel_size=1),
    )
    batch: Any = SimpleNamespace(
        trained_tokens=10, seen_tokens=24, micro_batches=[{"loss": 3.0}, {"loss": 8.0}]
    )
    assert loop._forward_backward_update(run, FirstStep(), batch, step=0).tolist() == [3.0, 8.0]
    assert weighted == pytest.approx([3.0 * 2 / 10, 8.0 * 2 / 10])
