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
SET = {"deepspeed.config", "train.loss", "train.micro_batch_size"}
SAMPLE = pytest.param("llama1b_full_1x24", SET, id="llama1b_full_1x24, checkpointing alone")


@pytest.mark.parametrize(
    ("recipe", "pinned"),
    [
        SAMPLE,
        *(
            pytest.param(name, set(), marks=pytest.mark.exhaustive, id=name)
            for name in compose.recipe_names()
            if name not in NOT_FOR_SPEED
        ),
    ],
)
def test_no_other_choice_is_faster_on_the_machine_of_the_recipe(recipe: str, pinned: set[str]) -> None:
    """The sample compares checkpointing alone: the whole search of a recipe takes a minute of a core."""
    words = [f"recipe={recipe}", "data.path=rows.jsonl"]
    search = Search(words, compose.compose_run(words).run, Recordings())
    own = search.plan([])
    assert own is not None and own.planned.plan.fits
    best = search.fastest(1, pinned=pinned)[0]
    assert own.planned.time.total_s <= MOST * best.planned.time.total_s, best.overrides
