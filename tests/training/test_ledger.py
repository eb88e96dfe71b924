"""Rows of the ledger that only a GPU has: what is allocated, what is reserved beside it, what others hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from remat.config.units import GIB
from remat.training import ledger


def test_each_peak_of_a_gpu_is_in_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 GiB: 5 allocated and 7 reserved at the peaks, 6 reserved at the end, 1 held by other programs."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (9 * GIB, 16 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 6 * GIB)
    planned = {
        "micro_batch_peak_bytes": 2 * GIB,
        "gpu_allocated_peak_bytes": 4 * GIB,
        "gpu_bytes_at_peak": {"allocator and context": GIB // 2},
    }
    parts: Any = SimpleNamespace(
        plan=SimpleNamespace(planned=planned),
        settled=None,
        watch=None,
        strategy=SimpleNamespace(zero_stage=2),
        world=SimpleNamespace(device=torch.device("cuda", 0)),
        peaks={"memory/gpu_allocated_peak_gib": 5.0, "memory/gpu_reserved_peak_gib": 7.0},
    )
    rows = {row.category: (row.planned, row.measured) for row in ledger._peaks(parts)}
    assert rows[ledger.ON_GPU] == (4 * GIB, 5 * GIB)
    assert rows["GPU, reserved at the peak"] == (None, 7 * GIB)
    assert rows["GPU, allocator and context"] == (GIB // 2, (7 - 5) * GIB + (16 - 9 - 6) * GIB)
