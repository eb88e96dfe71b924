"""Budgets along the frontier under every memory strategy: the run trains as with everything kept, within its budget."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from remat.config import compose
from remat.config.units import GIB
from remat.planning import budget
from remat.planning.plan import make_plan
from tests.support import granularity_cells as cells
from tests.support import tiny
from tests.support.grids import cases, chosen
from tests.support.launcher import deepspeed

pytestmark = pytest.mark.launch
STRATEGIES = {
    "unsharded": ["deepspeed.config=zero1", f"{cells.ZERO}.stage=0"],
    "ZeRO-1": ["deepspeed.config=zero1"],
    **cells.STRATEGIES,
}
PRECISIONS = {
    "fp32": ["train.precision=fp32"],
    "bf16": ["train.precision=bf16", "train.global_batch_size=8"],  # two micro-batches of each rank in a step
}
COLUMNS = {
    f"{strategy}, {precision}, {trained}": [
        *STRATEGIES[strategy],
        *PRECISIONS[precision],
        *cells.TRAINED[trained],
    ]
    for strategy in STRATEGIES
    for precision in PRECISIONS
    for trained in cells.TRAINED
}
REST = COLUMNS.keys() - {
    "ZeRO-1, bf16, full"
}  # one point of ZeRO-2 and of ZeRO-3 is in test_granularity_grid.py
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the way from the peak of full to that of none


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cells.make_workshop(tmp_path_factory.mktemp("budgets"))


def words(workshop: Path, column: str, name: str, *more: str) -> list[str]:
    steps = [f"train.steps={cells.STEPS}", "optim.warmup_steps=0"]
    return tiny.words(workshop, cells.run_name(name, column), *steps, *COLUMNS[column], *more)


def budgets(workshop: Path, column: str, shares: Sequence[float]) -> list[int]:
    least, most = (
        make_plan(
            compose.compose_run(words(workshop, column, name, f"checkpointing={name}")).run,
            world_size=2,
            on_gpu=False,
        ).plan.peak_bytes
        for name in ("full", "none")
    )
    return [int(least + share * (most - least)) for share in shares]


@pytest.fixture(scope="module")
def limits(request: pytest.FixtureRequest, workshop: Path) -> dict[str, list[int]]:
    """The budgets of each chosen column, in bytes. One launch runs them all."""
    rest = REST & chosen(request, "column")
    columns = [column for column in COLUMNS if column not in REST - rest]
    found = {column: budgets(workshop, column, SHARES if rest else SHARES[::2]) for column in columns}
    spec = {}
    for column, sizes in found.items():
        spec[cells.run_name("none", column)] = words(workshop, column, "none", "checkpointing=none")
        for place, size in enumerate(sizes):
            limit = f"checkpointing.budget_gib={size / GIB:.12f}"
            spec[cells.run_name(str(place), column)] = words(
                workshop, column, str(place), "checkpointing=budget", limit
            )
    path = workshop / "spec.json"
    path.write_text(json.dumps(spec))
    done = deepspeed(str(path), ranks=2, script="tests/support/many_runs.py", timeout_s=1500)
    assert done.code == 0, done.out[-6000:]
    return found


@pytest.mark.parametrize("column", cases(COLUMNS, REST))
def test_budgets_are_kept_and_change_nothing(column: str, workshop: Path, limits: dict[str, list[int]]) -> None:
    """Losses and gradient norms bit for bit, with dropout; kept bytes of each layer as planned."""
    folder = workshop / "out"
    reference = cells.trajectory(folder / cells.run_name("none", column) / "run")
    assert len(set(reference)) == cells.STEPS
    kept, recomputed = [], []
    for place, limit in enumerate(limits[column]):
        run = folder / cells.run_name(str(place), column) / "run"
        assert cells.trajectory(run) == reference
        plan = json.loads((run / "plan.json").read_text())["planned"]
        assert plan["gpu_allocated_peak_bytes"] <= limit
        ledger = json.loads((run / "ledger.json").read_text())["kept_bytes_per_layer"]
        assert ledger["measured"] == ledger["planned"] == plan["kept_bytes_per_layer"]
        kept.append(sum(ledger["measured"]))
        proof = json.loads((run / "proof.json").read_text())
        recomputed.append(proof["first_micro_batch_flops"].get("recompute", 0))
        assert (run / budget.FILE).exists()
    assert kept == sorted(kept) and recomputed == sorted(recomputed, reverse=True)
    assert len(set(kept)) > len(kept) / 2, "tables differ"
