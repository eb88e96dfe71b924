"""The loss of an evaluation is a mean over tokens, and training goes on after it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from remat.machine.distributed import World
from remat.training import loop
from tests.data.test_batches import make_blocks


class Engine:
    def __init__(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"

    def train(self) -> None:
        self.mode = "train"


def test_each_trained_token_counts_once_whatever_its_block() -> None:
    """A token's loss is the number of its block; blocks have different numbers of trained tokens."""
    engine, seen = Engine(), list[tuple[float, int]]()

    def token_loss(used: Engine, inputs: dict[str, torch.Tensor]) -> float:
        assert used.mode == "eval"
        tokens = int((inputs["labels"][:, 1:] != -100).sum())
        seen.append((float(inputs["input_ids"][0, 0] // 100), tokens))
        return seen[-1][0] * tokens

    run: Any = SimpleNamespace(
        cfg=SimpleNamespace(train=SimpleNamespace(micro_batch_size=1, eval_batches=0)),
        world=World(0, 1, 0, 1, torch.device("cpu")),
        pipeline=None,
        held_out=make_blocks(5),
        engine=engine,
        watchdog=SimpleNamespace(enter=lambda *_: None),
        stop=SimpleNamespace(start=lambda: None, finish=lambda: False),
        inputs=lambda micro_batch: micro_batch,
        token_loss=token_loss,
    )
    found = loop._mean_loss(run, step=3)
    assert found == pytest.approx(sum(loss * n for loss, n in seen) / sum(n for _, n in seen))
    assert found != pytest.approx(sum(loss for loss, _ in seen) / len(seen)), "or a mean of means would do"
    assert len(seen) == 5 and engine.mode == "train"
