"""No recipe is beaten on its own machine: no other strategy, granularity or micro-batch plans a faster step there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from remat.config import compose
from remat.config.options import ConfigError, PeftMethod, RunConfig
from remat.planning.recording import Recordings
from remat.planning.screening import Screen

MOST = 1.03  # of the best planned time for a token
NOT_FOR_SPEED = {  # made to compare, to try, or to leave GPU memory free; their files say so
    "gpt2_medium_lab",
    "tiny_zero3_offload",
    "llama8b_zero3_offload_optimizer",
    "llama70b_zero3_offload",
}
IN_SAMPLE = {"llama8b_lora_32k_1x80"}
GRANULARITIES = (
    "none", "full", "selective_ops", "selective_linears", "selective_modules", "discard_output", "interval", "block",
    "offload",
)  # fmt: skip
LONGEST_MICRO_BATCH = 32768  # tokens


def strategies(cfg: RunConfig) -> list[str]:
    """Those of ds_configs/ that can train `cfg` on its machine."""
    if cfg.peft.method is PeftMethod.qlora or cfg.hardware.ranks == 1:
        return ["zero2"] if cfg.peft.method is not PeftMethod.none else ["zero2", "zero2_offload"]
    if cfg.peft.method is PeftMethod.lora:
        return ["zero2", "zero3"]
    every = ["zero2", "zero2_offload", "zero3", "zero3_offload_optimizer", "zero3_offload"]
    return [*every, "zero3_nvme"] if cfg.hardware.nvme_path else every


def choices(cfg: RunConfig) -> Iterator[list[str]]:
    """Yield the overrides of every other choice with the same global batch."""
    batch, ranks = cfg.train.global_batch_size, cfg.hardware.ranks
    sizes = [
        size
        for size in (1, 2, 4, 8)
        if batch % (size * ranks) == 0 and size * cfg.train.seq_len <= LONGEST_MICRO_BATCH
    ]
    for size, granularity, strategy in itertools.product(sizes, GRANULARITIES, strategies(cfg)):
        yield [
            f"train.micro_batch_size={size}",
            f"checkpointing={granularity}",
            f"deepspeed.config={strategy}",
        ]


def tokens_per_s(screen: Screen, words: list[str]) -> float:
    """Planned speed, 0 for what does not fit or is refused."""
    try:
        planned = screen.estimate(compose.compose_run(words).run)
    except ConfigError:
        return 0.0
    return (planned.time.tokens_per_s or 0.0) if planned.plan.fits else 0.0


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=[] if name in IN_SAMPLE else pytest.mark.exhaustive)
        for name in compose.recipe_names()
        if name not in NOT_FOR_SPEED
    ],
)
def test_no_other_choice_is_faster_on_the_machine_of_the_recipe(recipe: str) -> None:
    screen, words = Screen(Recordings()), [f"recipe={recipe}", "data.path=rows.jsonl"]
    own = tokens_per_s(screen, words)
    assert own > 0
    found = {
        " ".join(more): tokens_per_s(screen, [*words, *more])
        for more in choices(compose.compose_run(words).run)
    }
    assert len(found) >= len(GRANULARITIES)
    faster = {words: speed / own for words, speed in found.items() if speed > MOST * own}
    assert not faster
