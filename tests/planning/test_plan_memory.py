"""Planning takes little memory itself: any shipped recipe within 3 GiB of a fresh process, libraries included."""

from __future__ import annotations

import pytest

from benchmarks import plan_speed
from remat.config import compose

MOST_BYTES = 3 * 2**30
IN_SAMPLE = {"llama70b_zero3_offload"}


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=[] if name in IN_SAMPLE else pytest.mark.exhaustive)
        for name in compose.recipe_names()
    ],
)
def test_a_plan_fits_a_laptop(recipe: str) -> None:
    used = plan_speed.planned(recipe)
    assert 100 * 2**20 < used["peak_rss_bytes"] <= MOST_BYTES
