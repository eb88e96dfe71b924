"""hpZ, a second copy of the weights for each two of four ranks: the losses without it, and the planned bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import tiny
from tests.support.launcher import deepspeed

pytestmark = [pytest.mark.launch, pytest.mark.exhaustive]  # four ranks, and a process for each setting
ZERO = "deepspeed.overrides.zero_optimization"
SECOND = f"{ZERO}.zero_hpz_partition_size=2"
ALL_SHARDED = [f"{ZERO}.stage3_param_persistence_threshold=0", "train.micro_batch_size=1"]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_workshop(tmp_path_factory.mktemp("second"))


def launch(workshop: Path, name: str, *more: str, code: int = 0) -> Path:
    """One run a launch: DeepSpeed keeps its groups of ranks as long as a process lives."""
    done = deepspeed(*tiny.words(workshop, name, *ALL_SHARDED, *more), ranks=4)
    assert done.code == code, done.out[-6000:]
    return workshop / "out" / name / "run"


@pytest.mark.parametrize(
    ("config", "peft"), [("zero3", "none"), ("zero3_offload", "none"), ("zero3_offload_optimizer", "lora")]
)
def test_losses_are_those_without_and_the_second_shards_are_as_planned(
    workshop: Path, config: str, peft: str
) -> None:
    words = [f"deepspeed.config={config}", f"peft={peft}"]
    plain = launch(workshop, f"plain_{config}", *words)
    found = launch(workshop, f"second_{config}", *words, SECOND)
    losses = [[row["loss/train"] for row in tiny.rows(run)] for run in (plain, found)]
    assert losses[0] == losses[1]
    rows = {row["category"]: row for row in json.loads((found / "ledger.json").read_text())["rows"]}
    second, first = rows["second shards of weights in host memory"], rows["weights in host memory"]
    assert second["measured"] == pytest.approx(second["planned"], rel=1e-6)
    assert second["measured"] == pytest.approx(2 * first["measured"], rel=1e-6)


def test_a_resumed_run_makes_them_anew(workshop: Path) -> None:
    whole = launch(workshop, "whole", "deepspeed.config=zero3", SECOND)
    launch(workshop, "parts", "deepspeed.config=zero3", SECOND, "train.stop_at=2", code=75)
    parts = launch(workshop, "parts", "deepspeed.config=zero3", SECOND, "resume=auto")
    assert [row["loss/train"] for row in tiny.rows(parts)] == [row["loss/train"] for row in tiny.rows(whole)]
