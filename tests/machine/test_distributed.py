"""The few collectives: every rank gets the same answer, and the right one."""

from __future__ import annotations

import torch

from remat.machine import distributed
from tests.support.pool import RankPool


def on_a_rank() -> dict[str, object]:
    rank = distributed.current().rank
    return {
        "max_min": distributed.max_min(
            {"up": rank + 1.0, "down": -3.0 * rank, "same": 0.5}, torch.device("cpu")
        ),
        "gather": distributed.gather({"rank": rank}),
        "broadcast": distributed.broadcast(f"from {rank}"),
    }


def test_two_ranks_agree(two_ranks: RankPool) -> None:
    expected = {
        "max_min": {"up": 2.0, "up_min": 1.0, "down": 0.0, "down_min": -3.0, "same": 0.5, "same_min": 0.5},
        "gather": [{"rank": 0}, {"rank": 1}],
        "broadcast": "from 0",
    }
    assert two_ranks.run(on_a_rank) == [expected] * 2


def test_one_process_is_its_own_maximum_and_minimum() -> None:
    assert distributed.max_min({"up": 1.5}, torch.device("cpu")) == {"up": 1.5, "up_min": 1.5}
    assert distributed.gather(3) == [3] and distributed.broadcast(3) == 3
