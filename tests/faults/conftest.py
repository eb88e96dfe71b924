"""Outcomes of injected faults as JSON lines, for the table in the documentation: REMAT_FAULT_TABLE=FILE."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def fault_record() -> Callable[[str, str, float], None]:
    """`fault_record(name, outcome, seconds)`: what came of a fault, and how long after it the run was over."""

    def record(name: str, outcome: str, seconds: float) -> None:
        if table := os.environ.get("REMAT_FAULT_TABLE"):
            row = {"fault": name, "outcome": outcome, "seconds": round(seconds, 1)}
            with Path(table).open("a") as out:
                out.write(json.dumps(row) + "\n")

    return record
