"""Packing by length alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.data.blocks import best_fit
from tests.support.chats import lengths


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 90))
def test_every_example_is_in_one_block_that_holds_it(found: list[int], room: int) -> None:
    blocks = best_fit(np.array(found, dtype=np.int64), room)
    assert sorted(index for block in blocks for index in block) == list(range(len(found)))
    assert all(sum(found[index] for index in block) <= room for block in blocks)
    assert all(block == sorted(block) for block in blocks)
    assert blocks == sorted(blocks)
    fullness = sorted(sum(found[index] for index in block) for block in blocks)
    assert len(fullness) < 2 or fullness[0] + fullness[1] > room, "two blocks that would fit in one"


@pytest.mark.parametrize(("room", "filled"), [(512, 0.99), (1024, 0.99), (8192, 0.98)])
def test_blocks_of_varied_lengths_are_almost_full(room: int, filled: float) -> None:
    found = np.minimum(lengths(8000), room)
    assert found.sum() / (room * len(best_fit(found, room))) > filled


def test_the_best_fit_is_the_least_room() -> None:
    assert best_fit(np.array([6, 5, 4, 3, 2]), 10) == [[0, 2], [1, 3, 4]]
    assert best_fit(np.array([7, 5, 3]), 10) == [[0, 2], [1]]
    assert best_fit(np.array([], dtype=int), 10) == []
    with pytest.raises(ValueError, match="11 tokens does not fit a block of 10"):
        best_fit(np.array([11]), 10)
