"""How many slices `checkpointing.tiles=auto` takes, and that every rank of a launch takes as many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from remat.activation_checkpointing import policy
from remat.config import compose
from remat.config.options import ConfigError
from remat.machine.distributed import World
from remat.planning import launch_plan, strategy, tiling
from remat.planning.plan import GPU_MEMORY, Planned, Recordings, make_plan, needed_bytes
from remat.planning.simulation.types import Phase
from tests.support import tiny

LONG = [*tiny.ON_A_4090, "checkpointing=full", "train.seq_len=16384", "train.micro_batch_size=1"]
WORLD = World(0, 1, 0, 1, torch.device("cpu"))


def plan(*more: str, known: Recordings | None = None) -> Planned:
    return make_plan(compose.compose_run([*LONG, *more]).run, recordings=known)


def count(planned: Planned) -> int:
    return tiling.chosen_count(planned.strategy.decisions)


def test_auto_takes_as_many_as_lower_the_memory_needed() -> None:
    """With a wide MLP the peak is there; each count is planned, and the FLOPs of none are more."""
    wide, known = "model.architecture.intermediate_size=4096", Recordings()
    auto = plan(wide, "checkpointing.tiles=auto", known=known)
    each = {
        n: plan(wide, f"checkpointing.tiles={n}", known=known) for n in (1, 2, count(auto), 2 * count(auto))
    }
    needs = {n: needed_bytes(planned, GPU_MEMORY) for n, planned in each.items()}
    peaks = {n: planned.plan.peak_bytes for n, planned in each.items()}
    assert count(auto) > 2
    assert needs[1] > needs[2] > needs[count(auto)]
    assert needs[2 * count(auto)] > tiling.LOWER * needs[count(auto)]
    assert peaks[1] > 1.2 * peaks[2] > 1.3 * peaks[count(auto)]
    assert auto.plan.peak_bytes == peaks[count(auto)]
    assert len({planned.simulation.flops[Phase.recompute] for planned in each.values()}) == 1
    assert len({planned.simulation.flops[Phase.backward] for planned in each.values()}) == 1
    assert f"took {count(auto)} slices" in auto.strategy.decided_because
    assert f"in {count(auto)} slices" in policy.describe(auto.strategy.decisions)


def test_auto_leaves_mlps_whole_where_the_peak_is_elsewhere() -> None:
    auto = plan("checkpointing.tiles=auto", "train.loss=full", "train.seq_len=512")
    assert count(auto) == 1
    assert "took 1 slice:" in auto.strategy.decided_because
    assert "slices" not in policy.describe(auto.strategy.decisions)


def launched(folder: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception | None = None) -> Any:
    words = ["recipe=tiny_zero3_offload", "checkpointing=full", "checkpointing.tiles=auto", "train.seq_len=256"]
    words += [
        "model.architecture.intermediate_size=4096",
        "train.global_batch_size=1",
        "train.micro_batch_size=1",
    ]
    cfg = compose.compose_run([*words, f"output_dir={folder}"]).run
    decided = strategy.decide(cfg, world_size=1, can_pin=False)
    assert tiling.is_open(decided.decisions)

    def fail(*args: Any, **kwargs: Any) -> Planned:
        raise failure or AssertionError

    if failure:
        monkeypatch.setattr(launch_plan, "make_plan", fail)
    return launch_plan.plan_launch(cfg, decided, WORLD, words=words, warn=lambda _: None)


def test_a_launch_carries_out_what_its_plan_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = launched(tmp_path, monkeypatch)
    assert not tiling.is_open(launch.strategy.decisions)
    assert tiling.chosen_count(launch.strategy.decisions) == count(launch.planned) > 1


def test_a_launch_without_a_plan_asks_for_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="give the number of slices"):
        launched(tmp_path, monkeypatch, ConfigError("it cannot be planned"))
