"""Cores from a control group's quota, and a rank's share of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from remat.machine import start_up


def test_quota_cuts_the_affinity_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert start_up.available_cores(tmp_path) == 8
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert start_up.available_cores(tmp_path) == 2
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert start_up.available_cores(tmp_path) == 8


def test_version_one_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("50000\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert start_up.available_cores(tmp_path) == 1


@pytest.mark.parametrize(("variable", "expected"), [("LOCAL_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")])
def test_each_rank_gets_its_share(monkeypatch: pytest.MonkeyPatch, variable: str, expected: str) -> None:
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(start_up, "available_cores", lambda: 8)
    monkeypatch.setenv(variable, "4")
    start_up.share_cores()
    assert os.environ["OMP_NUM_THREADS"] == expected


def test_a_users_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    start_up.share_cores()
    assert os.environ["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(("accelerator", "expected"), [("cpu", ""), ("cuda", "0,1")])
def test_cpu_ranks_see_no_gpu_whatever_the_launcher_wrote(
    monkeypatch: pytest.MonkeyPatch, accelerator: str, expected: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("DS_ACCELERATOR", accelerator)
    start_up.hide_gpus_from_cpu_ranks()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
