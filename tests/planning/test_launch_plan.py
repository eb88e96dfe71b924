"""The plan of a launch: one that fails says so: console, header, plan.json, ledger, report."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from remat.config import compose
from remat.config.options import ConfigError
from remat.machine.distributed import World
from remat.planning import launch_plan, strategy
from remat.planning.plan import Planned
from remat.report import run_report
from remat.training import ledger
from remat.training.proof import FirstStep

SMALL = ["train.seq_len=32", "train.micro_batch_size=1", "train.global_batch_size=1"]
WORLD = World(0, 1, 0, 1, torch.device("cpu"))


def launched(tmp_path: Path) -> tuple[launch_plan.LaunchPlan, list[str]]:
    cfg = compose.compose_run([*SMALL, f"output_dir={tmp_path}"]).run
    warnings: list[str] = []
    decided = strategy.decide(cfg, world_size=1, can_pin=False)
    made = launch_plan.plan_launch(cfg, decided, WORLD, words=SMALL, warn=warnings.append, added=SMALL[1:2])
    return made, warnings


def test_a_launch_with_a_plan_warns_of_nothing(tmp_path: Path) -> None:
    plan, warnings = launched(tmp_path)
    assert plan.planned is not None and plan.reason is None and warnings == []
    assert plan.added == tuple(SMALL[1:2])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConfigError("X cannot be planned:\n  it reads values"), "X cannot be planned: it reads values"),
        (RuntimeError("shapes differ\nand more"), "RuntimeError: shapes differ"),
    ],
)
def test_a_launch_whose_plan_fails_says_so_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Planned:
        raise error

    monkeypatch.setattr(launch_plan, "make_plan", fail)
    plan, warnings = launched(tmp_path)
    assert len(warnings) == 1 and warnings[0].startswith(f"no plan: {reason}. The run starts without one")
    assert plan.line() == f"no plan: {reason}"
    assert plan.record()["planned"] is None and plan.record()["reason"] == reason
    cfg = SimpleNamespace(train=SimpleNamespace(micro_batch_size=1, seq_len=8))
    run: Any = SimpleNamespace(plan=plan, cfg=cfg, applied=SimpleNamespace(decisions=[]), loaded=[])
    rows = ledger._times(run, {"time/step_s": 1.0})
    assert all(f"no plan: {reason}" in row.how and row.planned is None for row in rows)
    found = ledger.record(run, FirstStep(), rows, finished=True)
    table = run_report._ledger_table(found)
    assert table is not None and table.note == f"no plan: {reason}"
