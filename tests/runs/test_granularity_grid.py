"""Every policy x ZeRO stage x offload x full or LoRA through the launcher, held to the same run without any policy.

The grid of docs/granularity.md is made of these results: REMAT_WRITE_GRID=1 runs all columns and writes them to
docs/granularity.json, scripts/granularity_table.py the table. Without it every mode runs in one column and every column
has some modes, and must be what is written there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from remat.config import compose
from remat.config.options import ConfigError
from remat.planning import strategy
from tests.support import granularity_cells as cells
from tests.support.launcher import deepspeed

pytestmark = pytest.mark.launch
WHOLE = bool(os.environ.get("REMAT_WRITE_GRID"))
CELLS = cells.chosen(whole=WHOLE)


def refusal(words: list[str]) -> str | None:
    """Why this cell cannot work: what the user is told before any weight is read."""
    try:
        strategy.decide(compose.compose_run(words).run, world_size=2, can_pin=False)
    except ConfigError as error:
        return " ".join(str(error).split())
    return None


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cells.make_workshop(tmp_path_factory.mktemp("granularity"))


SKIPPED = (
    "skipped layers"  # ranks that skip different layers reduce different gradients: no launch, with any policy
)
HARD = [
    (architecture, mode, "ZeRO-3")
    for architecture in [*cells.ARCHITECTURES, cells.PACKED]
    if architecture != SKIPPED
    for mode in cells.HARD_MODES
]


@pytest.fixture(scope="module")
def hard(workshop: Path) -> dict[tuple[str, str, str], str]:
    """(architecture, mode, strategy) -> as in `grid`, for models that are hard to recompute."""
    cells.make_architectures(workshop)
    found: dict[tuple[str, str, str], str] = {}
    spec = {}
    for cell in HARD:
        words = cells.hard_words(workshop, *cell)
        reason = refusal(words)
        if reason:
            found[cell] = f"refused: {reason}"
        else:
            spec[cells.run_name(cell[1], f"{cell[2]}, {cell[0]}")] = words
    path = workshop / "hard.json"
    path.write_text(json.dumps(spec))
    done = deepspeed(str(path), ranks=2, script="tests/support/many_runs.py", timeout_s=1500)
    assert done.code == 0, done.out[-6000:]
    return found | {
        cell: compared(workshop, cell[1], f"{cell[2]}, {cell[0]}") for cell in HARD if cell not in found
    }


def test_layers_that_share_or_repeat_are_bit_equal_or_refused(
    hard: dict[tuple[str, str, str], str],
) -> None:
    """Shared K/V, keyword tensors, repeated layers, two stacks, packed documents."""
    wrong = {cell: text for cell, text in hard.items() if text.startswith("differs")}
    assert not wrong
    for architecture in {cell[0] for cell in hard}:
        equal = [cell[1] for cell, text in hard.items() if cell[0] == architecture and text == cells.BIT_EQUAL]
        assert {"full", "selective_modules, attention"} <= set(equal)
    refused = {
        (architecture, mode) for (architecture, mode, _), text in hard.items() if text.startswith("refused")
    }
    assert ("shared K/V", "full_reentrant") in refused
    assert ("shared K/V", "uniform") not in refused  # it falls back to the other variant
    assert not any(architecture == cells.PACKED for architecture, _ in refused)


def test_segments_are_refused_where_layers_are_skipped(workshop: Path) -> None:
    cells.make_architectures(workshop)
    refused = {
        mode: refusal(cells.hard_words(workshop, SKIPPED, mode, "ZeRO-2")) for mode in ("uniform", "full")
    }
    assert "draws random numbers between layers 0 and 1" in str(refused["uniform"])
    assert refused["full"] is None


@pytest.fixture(scope="module")
def grid(workshop: Path) -> dict[str, dict[str, str]]:
    """Mode -> column -> "bit-equal", "within ..." or "refused: ...". One launch runs all that can run."""
    found: dict[str, dict[str, str]] = {mode: {} for mode in cells.MODES}
    spec = {}
    for mode, column in CELLS:
        words = cells.words(workshop, mode, column)
        reason = refusal(words)
        if reason:
            found[mode][column] = f"refused: {reason}"
        else:
            spec[cells.run_name(mode, column)] = words
    path = workshop / "spec.json"
    path.write_text(json.dumps(spec))
    done = deepspeed(str(path), ranks=2, script="tests/support/many_runs.py", timeout_s=1500)
    assert done.code == 0, done.out[-6000:]
    for mode, column in CELLS:
        if column not in found[mode]:
            found[mode][column] = compared(workshop, mode, column)
    return found


def compared(workshop: Path, mode: str, column: str) -> str:
    if mode == "none":
        return cells.REFERENCE
    run, reference = (
        cells.trajectory(workshop / "out" / cells.run_name(name, column) / "run") for name in (mode, "none")
    )
    assert len(run) == len(reference) == cells.STEPS
    if run == reference:
        return cells.BIT_EQUAL
    pairs = [(a, b) for one, other in zip(run, reference, strict=True) for a, b in zip(one, other, strict=True)]
    worst = max(abs(a - b) / abs(b) for a, b in pairs)
    tolerance = cells.TOLERANCE.get(mode, 0.0)
    return f"within {tolerance:g}" if worst <= tolerance else f"differs by {worst:.2g}"


def test_no_cell_differs(grid: dict[str, dict[str, str]]) -> None:
    wrong = {(m, c): text for m, row in grid.items() for c, text in row.items() if text.startswith("differs")}
    assert not wrong


def test_the_reference_learns_and_every_column_differs(workshop: Path, grid: dict[str, dict[str, str]]) -> None:
    """Equal trajectories mean something only if weights move, and full and LoRA are not the same run."""
    runs = {
        column: cells.trajectory(workshop / "out" / cells.run_name("none", column) / "run")
        for column in cells.COLUMNS
    }
    assert all(losses[0][0] != losses[-1][0] for losses in runs.values())
    assert runs["ZeRO-3 offload, full"] != runs["ZeRO-3, LoRA"]


def test_the_grid_is_the_published_one(grid: dict[str, dict[str, str]]) -> None:
    if WHOLE:
        cells.RESULTS.write_text(json.dumps(grid, indent=1) + "\n")
    published = json.loads(cells.RESULTS.read_text())
    assert {(mode, column): grid[mode][column] for mode, column in CELLS} == {
        (mode, column): published[mode][column] for mode, column in CELLS
    }
    assert published.keys() == cells.MODES.keys()


def test_every_run_proved_itself(workshop: Path, grid: dict[str, dict[str, str]]) -> None:
    for mode, column in CELLS:
        if grid[mode][column].startswith("refused"):
            continue
        proof = json.loads((workshop / "out" / cells.run_name(mode, column) / "run" / "proof.json").read_text())
        assert len(proof["layers"]) == 4
        assert all(row["recomputations"] == row["expected_recomputations"] for row in proof["layers"])
        assert len(proof["placement_by_rank"]) == 2
        moved = [row["moved_bytes"] for row in proof["layers"]]
        assert any(moved) == ("offload" in mode), f"{mode}, {column}: {moved}"
