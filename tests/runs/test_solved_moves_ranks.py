"""A run whose budget the solver meets with moves to the host: it trains as with everything kept, bytes as planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from remat.config import compose
from remat.config.units import GIB, MIB
from remat.planning import budget
from remat.planning.plan import make_plan
from remat.training import ledger
from tests.support import tiny
from tests.support.granularity_cells import STEPS, trajectory
from tests.support.launcher import deepspeed

pytestmark = pytest.mark.launch
LAYERS = 4
RATES = {"matmul_tflops": 0.001, "attention_tflops": 0.001, "memory_gbs": 100.0, "launch_us": 0.5}
WORDS = [
    "data=jsonl",
    "data.packing=stream",
    "train.seq_len=64",
    "train.precision=bf16",
    f"train.steps={STEPS}",
    "optim.warmup_steps=0",
    "deepspeed.config=zero3",
    # Of a machine on which a copy is cheap and a product is not.
    *(f"++hardware.gpu_rates.{name}={rate}" for name, rate in RATES.items()),
    "hardware.pcie_d2h_gbs=2",
    "hardware.pcie_h2d_gbs=2",
]
MAY_MOVE = ["checkpointing.offload.enabled=true", "checkpointing.offload.min_bytes=0"]


def words(workshop: Path, name: str, *more: str) -> list[str]:
    return tiny.words(workshop, name, *WORDS, f"data.path={workshop / 'texts.jsonl'}", *more)


def peak(workshop: Path, policy: str) -> int:
    cfg = compose.compose_run(words(workshop, policy, f"checkpointing={policy}")).run
    return make_plan(cfg, world_size=2, on_gpu=False).plan.peak_bytes


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    workshop = tiny.make_workshop(tmp_path_factory.mktemp("moves"))
    tiny.make_model(workshop / "model", num_hidden_layers=LAYERS)
    least, most = (peak(workshop, policy) for policy in ("full", "none"))
    limit = f"checkpointing.budget_gib={(least + (most - least) / 4) / GIB:.12f}"
    spec = {
        "none": words(workshop, "none", "checkpointing=none"),
        "budget": words(workshop, "budget", "checkpointing=budget", limit, *MAY_MOVE),
    }
    path = workshop / "spec.json"
    path.write_text(json.dumps(spec))
    done = deepspeed(str(path), ranks=2, script="tests/support/many_runs.py")
    assert done.code == 0, done.out[-6000:]
    return {name: workshop / "out" / name / "run" for name in spec}


def read(run: Path, name: str) -> Any:
    return json.loads((run / name).read_text())


def test_the_solver_moves_values_and_the_run_trains_as_with_everything_kept(runs: dict[str, Path]) -> None:
    entries = read(runs["budget"], budget.FILE)["layers"].values()
    assert any(entry.get("offload") for entry in entries)
    assert trajectory(runs["budget"]) == trajectory(runs["none"])
    assert len({loss for loss, _ in trajectory(runs["none"])}) == STEPS  # weights move


def test_what_goes_over_the_link_is_what_the_tables_say(runs: dict[str, Path]) -> None:
    decided = {}
    for layers, entry in read(runs["budget"], budget.FILE)["layers"].items():
        decided |= dict.fromkeys(budget._indices(layers), entry.get("host_bytes", 0))
    counted = {row["layer"]: row["moved_bytes"] for row in read(runs["budget"], "proof.json")["layers"]}
    assert counted == decided and sum(counted.values()) > 0
    rows = {row["category"]: row for row in read(runs["budget"], "ledger.json")["rows"]}
    moved = rows[ledger.MOVED]
    assert moved["planned"] == moved["measured"] == pytest.approx(sum(counted.values()) / MIB)
    kept = rows[ledger.KEPT]
    assert kept["measured"] == pytest.approx(kept["planned"], rel=0.001)
    assert ledger.MOVED not in {row["category"] for row in read(runs["none"], "ledger.json")["rows"]}
