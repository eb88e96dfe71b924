"""Memory strategies change where bytes live, never the trajectory: held to a plain PyTorch loop by the launcher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch import tiny
from tests.launcher import deepspeed

pytestmark = pytest.mark.launch

STRATEGIES = {
    "zero0": ["deepspeed.config=zero1", "deepspeed.overrides.zero_optimization.stage=0"],
    "zero1": ["deepspeed.config=zero1"],
    "zero1_optimizer": [
        "deepspeed.config=zero1",
        "deepspeed.overrides.zero_optimization.offload_optimizer.device=cpu",
    ],
    "zero2": ["deepspeed.config=zero2"],
    "zero2_optimizer": ["deepspeed.config=zero2_offload"],
    "zero3": ["deepspeed.config=zero3"],
    "zero3_optimizer": ["deepspeed.config=zero3_offload_optimizer"],
    "zero3_optimizer_parameters": ["deepspeed.config=zero3_offload"],
    "zero3_nothing_persistent": [
        "deepspeed.config=zero3_offload",
        "deepspeed.overrides.zero_optimization.stage3_param_persistence_threshold=0",
    ],
    "zero3_no_checkpointing": ["deepspeed.config=zero3", "checkpointing=none"],
    "zero3_full_logits": ["deepspeed.config=zero3", "train.loss=full"],
    "zero2_micro1": ["deepspeed.config=zero2", "train.micro_batch_size=1"],
    "zero3_micro1": ["deepspeed.config=zero3_offload", "train.micro_batch_size=1"],
}
ONE_RANK = {
    "one_rank_micro4": ["deepspeed.config=zero2", "train.micro_batch_size=4"],
    "one_rank_micro1": ["deepspeed.config=zero2", "train.micro_batch_size=1"],
    "one_rank_micro1_zero3": ["deepspeed.config=zero3_offload", "train.micro_batch_size=1"],
}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trajectories")
    tiny.make_model(folder / "model")
    tiny.make_instructions(folder / "data.jsonl")
    return folder


def words(workshop: Path, name: str, *more: str) -> list[str]:
    return tiny.overrides(workshop / "model", workshop / "data.jsonl", workshop / "out", name, *more)


@pytest.fixture(scope="module")
def reference(workshop: Path) -> list[tuple[float, float]]:
    history = tiny.plain_loop(words(workshop, "plain"))
    assert history[-1][0] < history[0][0] - 0.5, "the reference itself must learn something"
    return history


def launch(workshop: Path, strategies: dict[str, list[str]], ranks: int) -> None:
    spec = workshop / f"spec_{ranks}.json"
    spec.write_text(json.dumps({name: words(workshop, name, *more) for name, more in strategies.items()}))
    done = deepspeed(str(spec), ranks=ranks, script="tests/launch/many_runs.py")
    assert done.code == 0, done.out[-6000:]


@pytest.fixture(scope="module")
def two_rank_runs(workshop: Path) -> Path:
    launch(workshop, STRATEGIES, ranks=2)
    return workshop / "out"


@pytest.fixture(scope="module")
def one_rank_runs(workshop: Path) -> Path:
    launch(workshop, ONE_RANK, ranks=1)
    return workshop / "out"


def compare(run: Path, reference: list[tuple[float, float]]) -> None:
    rows = tiny.rows(run)
    assert [row["loss/train"] for row in rows] == pytest.approx([loss for loss, _ in reference], rel=1e-5)
    assert [row["optim/grad_norm"] for row in rows] == pytest.approx([norm for _, norm in reference], rel=1e-4)


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_two_ranks_follow_the_plain_loop(
    name: str, two_rank_runs: Path, reference: list[tuple[float, float]]
) -> None:
    compare(two_rank_runs / name / "run", reference)


@pytest.mark.parametrize("name", list(ONE_RANK))
def test_one_rank_follows_the_plain_loop(
    name: str, one_rank_runs: Path, reference: list[tuple[float, float]]
) -> None:
    compare(one_rank_runs / name / "run", reference)
