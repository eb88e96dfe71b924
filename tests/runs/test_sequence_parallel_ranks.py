"""Ranks that share sequences train what one rank trains that has whole ones: losses, gradient norms and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import shared_sequences
from tests.support.pool import RankPool
from tests.support.shared_sequences import Cell

pytestmark = pytest.mark.launch

SAMPLE = [  # every choice once
    Cell("llama", "zero1", "none", "whole", "plain"),
    Cell("qwen3", "zero2", "full", "lora", "packed"),
    Cell("mixtral", "zero3", "selective_linears", "whole", "packed"),
    Cell("gemma3_text", "zero3_offload", "offload", "whole", "plain"),
    Cell("gemma3_text", "zero2", "none", "lora", "packed"),
]
CELLS = [
    cell if cell in SAMPLE else pytest.param(cell, marks=pytest.mark.exhaustive)
    for cell in shared_sequences.every_cell()
]
LOSS, NORM = 1e-2, 1e-2
WEIGHTS = 1e-5  # of the largest weight of a matrix


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_sequences.make_workshop(tmp_path_factory.mktemp("shared_sequences"))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """Pools of their own: whole runs change more of a process than an engine does."""
    pools: dict[int, RankPool] = {}

    def of(size: int) -> RankPool:
        return pools.setdefault(size, pools.get(size) or RankPool(size))

    yield of
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="module")
def alone(workshop: Path, ranks: Callable[[int], RankPool]) -> Callable[[Cell], dict[str, Any]]:
    known: dict[str, dict[str, Any]] = {}

    def of(cell: Cell) -> dict[str, Any]:
        words = cell.alone(workshop)
        if str(words) not in known:
            (known[str(words)],) = ranks(1).run(shared_sequences.run, words=words)
        return known[str(words)]

    return of


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_ranks_that_share_sequences_train_what_one_rank_does(
    cell: Cell, workshop: Path, ranks: Callable[[int], RankPool], alone: Callable[[Cell], dict[str, Any]]
) -> None:
    expected = alone(cell)
    for found in ranks(cell.ranks).run(shared_sequences.run, words=cell.words(workshop)):
        assert found["losses"] == pytest.approx(expected["losses"], rel=LOSS)
        assert found["norms"] == pytest.approx(expected["norms"], rel=NORM)
        assert found["weights"].keys() == expected["weights"].keys()
        import os
        if os.environ.get("LONG"):
            with open("/tmp/long.diffs", "a") as out:
                print(cell, [f"{b/a-1:.1g}" for a,b in zip(expected["losses"],found["losses"])], [f"{b/a-1:.1g}" for a,b in zip(expected["norms"],found["norms"])], max((float((found["weights"][n]-w).abs().max()/w.abs().max()),float((found["weights"][n]-w).abs().max()),n) for n,w in expected["weights"].items()), file=out)
            continue
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(
                found["weights"][name], weight, rtol=0, atol=WEIGHTS * float(weight.abs().max())
            )
