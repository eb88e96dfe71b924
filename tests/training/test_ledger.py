"""Rows of the ledger that only a GPU has: what is allocated, what is reserved beside it, what others hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from remat.config.units import GIB, MIB
from remat.machine.distributed import World
from remat.planning.simulation.types import Category
from remat.training import ledger
from remat.training.proof import FirstStep


def test_each_peak_of_a_gpu_is_in_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 GiB: 5 allocated and 7 reserved at the peaks, 6 reserved at the end, 1 held by other programs."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (9 * GIB, 16 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 6 * GIB)
    planned = SimpleNamespace(
        simulation_of=lambda stage: SimpleNamespace(peak=SimpleNamespace(total_bytes=2 * GIB)),
        plan=SimpleNamespace(peak_bytes=4 * GIB, reserved_bytes=6 * GIB, gpu={Category.overhead: GIB // 2}),
    )
    run: Any = SimpleNamespace(
        plan=SimpleNamespace(planned=planned),
        strategy=SimpleNamespace(zero_stage=2),
        world=World(0, 1, 0, 1, torch.device("cuda", 0)),
        cfg=SimpleNamespace(train=SimpleNamespace(micro_batch_size=2, seq_len=512)),
        splits=SimpleNamespace(train=SimpleNamespace(one_each=False)),
        peaks={"memory/gpu_allocated_peak_gib": 5.0, "memory/gpu_reserved_peak_gib": 7.0},
    )
    rows = {row.category: (row.planned, row.measured) for row in ledger._peaks(run, FirstStep())}
    assert rows[ledger.ON_GPU] == (4 * GIB, 5 * GIB)
    assert rows["GPU, reserved at the peak"] == (6 * GIB, 7 * GIB)
    assert rows["GPU, allocator and context"] == (GIB // 2, (7 - 5) * GIB + (16 - 9 - 6) * GIB)


def test_a_figure_of_a_smaller_micro_batch_is_held_against_a_bound() -> None:
    """Without packing a micro-batch is as wide as its longest row; the plan is for the widest there can be."""
    run: Any = SimpleNamespace(cfg=SimpleNamespace(train=SimpleNamespace(micro_batch_size=4, seq_len=512)))
    assert [ledger._at_most(run, shape) for shape in ((4, 96), (4, 512), (0, 0))] == ["at most", "", ""]
    rows = [
        ledger.Row(ledger.KEPT, 8.0 * MIB, 1.5 * MIB, "bytes", "", ledger.AT_MOST),
        ledger.Row(ledger.STEP, 2.0, 2.5, "s", ""),
    ]
    scaled = [ledger._scaled(row) for row in rows]
    assert (scaled[0].planned, scaled[0].unit, scaled[0].planned_is) == (8.0, "MiB", "at most")
    assert ledger.describe(scaled) == {
        "activations": "planned at most 8 MiB, measured 1.5",
        "step": "planned 2 s, measured 2.5 (+25.0%)",
    }


def test_names_for_wandb_are_names() -> None:
    row = ledger.Row("peak of a micro-batch, on top of the model states", 1.0, 2.0, "MiB", "")
    name = "ledger/peak_of_a_micro_batch_on_top_of_the_model_states_mib"
    assert ledger.metrics([row]) == {f"{name}/planned": 1.0, f"{name}/measured": 2.0}
