"""Rows of the ledger that only a GPU has: what is allocated, what is reserved beside it, what others hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from remat.config.units import GIB
from remat.planning.simulation.types import Category
from remat.training import ledger
from remat.training.proof import FirstStep


def test_each_peak_of_a_gpu_is_in_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 GiB: 5 allocated and 7 reserved at the peaks, 6 reserved at the end, 1 held by other programs."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (9 * GIB, 16 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 6 * GIB)
    planned = SimpleNamespace(
        simulation=SimpleNamespace(peak=SimpleNamespace(total_bytes=2 * GIB)),
        plan=SimpleNamespace(peak_bytes=4 * GIB, gpu={Category.overhead: GIB // 2}),
    )
    run: Any = SimpleNamespace(
        plan=SimpleNamespace(planned=planned),
        strategy=SimpleNamespace(zero_stage=2),
        world=SimpleNamespace(device=torch.device("cuda", 0)),
        peaks={"memory/gpu_allocated_peak_gib": 5.0, "memory/gpu_reserved_peak_gib": 7.0},
    )
    rows = {row.category: (row.planned, row.measured) for row in ledger._peaks(run, FirstStep())}
    assert rows[ledger.ON_GPU] == (4 * GIB, 5 * GIB)
    assert rows["GPU, reserved at the peak"] == (None, 7 * GIB)
    assert rows["GPU, allocator and context"] == (GIB // 2, (7 - 5) * GIB + (16 - 9 - 6) * GIB)
