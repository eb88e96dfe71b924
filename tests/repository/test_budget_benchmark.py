"""benchmarks/budget.py: its points are what they say, its committed figures are whole, its verdicts are arithmetic."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import budget, peer_policies


def row(point: str, peak_bytes: int, time_of_none: float) -> dict[str, Any]:
    return {
        "model": "llama",
        "dtype": "fp32",
        "point": point,
        "peak_bytes": peak_bytes,
        "time_of_none": time_of_none,
    }


def test_a_small_model_is_measured_beside_peers(tmp_path: Path) -> None:
    known = peer_policies.peers(torch.device("cpu"), compiled=False)
    chosen = {
        name: known[name] for name in ("torch checkpoint", budget.TITAN, "after Megatron: uniform, 2 layers")
    }
    shape = budget.Shape(layers=2, seq_len=32, wide=0.25)
    threads = torch.get_num_threads()
    try:
        (rows,) = budget.measure(["llama"], ["fp32"], shape, chosen, rounds=1, between=2)
    finally:
        torch.set_num_threads(threads)
    assert all(one["bit_equal"] and one["seconds"] > 0 for one in rows)
    peaks = {one["point"]: one["peak_bytes"] for one in rows}
    assert peaks["torch checkpoint"] == peaks[budget.FULL] < peaks[budget.TITAN] < peaks[budget.NONE]
    budgets = [one["peak_bytes"] for one in rows if one["point"].startswith(budget.BUDGET)]
    # A larger budget is no slower, but its peak may be the smaller one: rates that are measured choose between corners.
    assert max(budgets) == budgets[-1] == peaks[budget.NONE] and len(set(budgets)) > 2
    budget.write(tmp_path / "rows.csv", rows)
    read = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert budget.judge(read) == budget.judge(rows) and budget.judge(rows).peers == 3
    budget.draw(read, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").stat().st_size > 1000


def test_operations_that_run_again_are_told_from_what_is_around_them() -> None:
    threads = torch.get_num_threads()
    try:
        whole, least = budget.measure_overhead(rounds=1)
    finally:
        torch.set_num_threads(threads)
    assert whole["operations_us"] == 0 < least["operations_us"] < least["extra_us"] + least["none_us"]


def test_verdicts() -> None:
    rows = [
        row("none", 100, 1.0),
        row("torch checkpoint", 50, 1.4),
        row("Hugging Face", 50, 1.3),
        row(budget.TITAN, 70, 1.4),
        row("DeepSpeed", 40, 1.4),
        row("remat: full", 50, 1.0),  # is no peer
        row("budget: 0 layers keep all", 51, 1.17),
        row("budget: 1 layers keep all", 65, 1.1),
        row("budget: 2 layers keep all", 71, 1.0),
    ]
    found = budget.judge(rows)
    assert (found.peers, found.beaten) == (4, 1)
    assert found.unbeaten == ("torch checkpoint", "Hugging Face", "DeepSpeed")  # at their own peak, not near it
    assert found.titan_spared == pytest.approx(1 - 0.1 / 0.4)
    assert found.full_spared == pytest.approx(1 - 1.17 / 1.3)


def test_the_committed_figures_are_whole() -> None:
    rows = list(csv.DictReader((budget.RESULTS / "budget_cpu.csv").open()))
    groups = budget.group(rows)
    assert set(groups) == set(itertools.product(budget.MODELS, budget.DTYPES))
    peers = set(peer_policies.peers(torch.device("cpu")))
    for members in groups.values():
        points = {one["point"] for one in members}
        assert peers <= points and {budget.NONE, budget.FULL} <= points
        budgets = [one for one in members if one["point"].startswith(budget.BUDGET)]
        assert len(budgets) >= 8
        assert all(one["bit_equal"] == "True" for one in budgets)
