"""What a resume refuses before the model is built."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

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
