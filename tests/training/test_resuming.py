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
        ConfigError, match=r"resume=auto.*the data, tokenizer or train.seq_len changed \(now bbb"
    ):
        build.check_same_data(saved, SimpleNamespace(report={"folder": f"cache/{'b' * 16}"}), batches, "auto")


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
