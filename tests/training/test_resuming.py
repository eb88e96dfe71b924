"""What a resume refuses before the model is built, and where its data goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from remat.config import compose
from remat.config.options import ConfigError
from remat.training import build
from tests.data.test_batches import make_blocks, stream


def test_a_position_in_other_data_means_nothing() -> None:
    batches = stream(make_blocks(10))
    saved = {"data": batches.state(), "data_key": "a" * 16}
    build.check_same_data(saved, SimpleNamespace(report={"folder": f"cache/{'a' * 16}"}), batches, "auto")
    with pytest.raises(
        ConfigError,
        match=r"resume=auto.*the data, its packing, the tokenizer or train.seq_len changed \(now bbb",
    ):
        build.check_same_data(saved, SimpleNamespace(report={"folder": f"cache/{'b' * 16}"}), batches, "auto")


def test_epochs_become_steps_once_the_data_is_open() -> None:
    """10 blocks in batches of 4: an epoch is 2.5 steps, and no block is seen less often than asked."""
    words = ["recipe=tiny_zero3_offload", "train.global_batch_size=4"]

    def steps(epochs: float, *more: str) -> int | None:
        cfg = compose.compose_run([*words, f"train.epochs={epochs}", *more]).run
        assert cfg.train.steps is None
        return build.with_steps(cfg, 10).train.steps

    assert [steps(epochs) for epochs in (0.01, 0.4, 1, 2, 2.1, 3)] == [1, 1, 3, 5, 6, 8]
    fixed = compose.compose_run([*words, "train.steps=7"]).run
    assert build.with_steps(fixed, 10) is fixed
    with pytest.raises(
        ConfigError, match=r"train\.epochs=2 is 5 steps: train\.stop_at=6 must lie between 0 and"
    ):
        steps(2, "train.stop_at=6")
    with pytest.raises(
        ConfigError, match=r"train\.epochs=2 is 5 steps: optim\.warmup_steps=20 \+ optim\.decay_steps=2"
    ):
        steps(2, "optim=adamw_wsd", "optim.decay_steps=2")


def test_the_data_goes_on_with_the_sample_after_the_last_one() -> None:
    cfg = compose.compose_run(["recipe=tiny_zero3_offload", "train.global_batch_size=4"]).run
    world: Any = SimpleNamespace(data_rank=0, data_size=1)

    def batches(point: Any) -> Any:
        return build._batches(cfg, make_blocks(20), world, point)

    whole = batches(None)
    before = whole.next_step()
    point = SimpleNamespace(state=SimpleNamespace(client_state={"data": whole.state()}))
    after = batches(point).next_step()
    assert after.sample_ids.tolist() == whole.next_step().sample_ids.tolist()
    assert not set(before.sample_ids.tolist()) & set(after.sample_ids.tolist())
