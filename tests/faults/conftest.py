"""Outcomes of injected faults as JSON lines, for docs/reliability.md: REMAT_FAULT_TABLE=FILE (`make reliability`)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def fault_record(request: pytest.FixtureRequest) -> Callable[[str, str, float | None], None]:
    """`fault_record(name, outcome, seconds)`: what came of a fault, and the seconds from it to the end of the launch.

    None where the run went on, and where runs shared a launch. Call it last: what is recorded has been shown.
    """

    def record(name: str, outcome: str, seconds: float | None = None) -> None:
        if table := os.environ.get("REMAT_FAULT_TABLE"):
            file = str(request.path.relative_to(ROOT))
            rounded = None if seconds is None else round(seconds, 1)
            row = {"test": file, "fault": name, "outcome": outcome, "seconds": rounded}
            with Path(table).open("a") as out:
                out.write(json.dumps(row) + "\n")

    return record
