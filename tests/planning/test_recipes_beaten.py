"""No recipe is beaten on its own machine: no other strategy, checkpointing or micro-batch plans a faster step there."""

from __future__ import annotations

import pytest

from remat.config import compose
from remat.planning.plan import Recordings
from remat.planning.settings.search import Search

MOST = 1.03  # of the best planned time of a step
NOT_FOR_SPEED = {  # made to compare, to try, or to leave GPU memory free; their files say so
    "gpt2_medium_lab",
    "tiny_zero3_offload",
    "llama8b_zero3_offload_optimizer",
    "llama70b_zero3_offload",
}
IN_SAMPLE = {"llama1b_full_1x24"}


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=[] if name in IN_SAMPLE else pytest.mark.exhaustive)
        for name in compose.recipe_names()
        if name not in NOT_FOR_SPEED
    ],
)
def test_no_other_choice_is_faster_on_the_machine_of_the_recipe(recipe: str) -> None:
    words = [f"recipe={recipe}", "data.path=rows.jsonl"]
    search = Search(words, compose.compose_run(words).run, Recordings())
    own = search.plan([])
    assert own is not None and own.planned.plan.fits
    best = search.fastest(1)[0]
    assert own.planned.time.total_s <= MOST * best.planned.time.total_s, best.overrides
