"""Every policy x ZeRO stage x offload x full or LoRA through the launcher, held to the same run without any policy.

The grid of docs/granularity.md is made of these results: REMAT_WRITE_GRID=1 runs all columns and writes them to
docs/granularity.json, scripts/granularity_table.py the table. Without it a mode runs in one column and must be what is
written there. Of variants of a mode, and of models that are hard to recompute, `make test` runs a sample.
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
from tests.support.grids import chosen
from tests.support.launcher import deepspeed

pytestmark = pytest.mark.launch
WHOLE = bool(os.environ.get("REMAT_WRITE_GRID"))


def refusal(words: list[str], world_size: int = 2) -> str | None:
    """Why this cell cannot work: what the user is told before any weight is read."""
    try:
        strategy.decide(compose.compose_run(words).run, world_size=world_size, can_pin=False)
    except ConfigError as error:
        return " ".join(str(error).split())
    return None


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cells.make_workshop(tmp_path_factory.mktemp("granularity"))


SKIPPED = (
    "skipped layers"  # ranks that skip different layers reduce different gradients: no launch, with any policy
)
STRATEGY = "ZeRO-3"


@pytest.fixture(scope="module")
def architectures(workshop: Path) -> Path:
    cells.make_architectures(workshop)
    return workshop


@pytest.mark.parametrize(
    "whole", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["sample", "all"]
)
def test_layers_that_share_or_repeat_are_bit_equal_where_they_are_not_refused(
    architectures: Path, whole: bool
) -> None:
    """Shared K/V, keyword tensors, repeated layers, two stacks, packed documents."""
    spec = {}
    for cell in cells.chosen_hard(whole=whole):
        words = cells.hard_words(architectures, *cell, STRATEGY)
        if refusal(words) is None:
            spec[cell] = words
    names = {cell: cells.run_name(cell[1], f"{STRATEGY}, {cell[0]}") for cell in spec}
    left = [cell for cell in spec if not (architectures / "out" / names[cell]).exists()]
    path = architectures / "hard.json"
    path.write_text(json.dumps({names[cell]: spec[cell] for cell in left}))
    done = deepspeed(str(path), ranks=2, script="tests/support/many_runs.py", timeout_s=1500)
    assert done.code == 0, done.out[-6000:]
    found = {cell: compared(architectures, cell[1], f"{STRATEGY}, {cell[0]}") for cell in spec}
    differ = {cell: text for cell, text in found.items() if text not in (cells.REFERENCE, cells.BIT_EQUAL)}
    assert not differ


def test_what_layers_that_share_or_repeat_cannot_have_is_refused(architectures: Path) -> None:
    modes = ("full_reentrant", "uniform", "selective_modules, attention")
    every = {(architecture, mode) for architecture in cells.IN_SAMPLE for mode in modes}
    every |= set(cells.chosen_hard(whole=False))
    refused = {cell for cell in every if refusal(cells.hard_words(architectures, *cell, STRATEGY))}
    assert ("shared K/V", "full_reentrant") in refused
    assert ("shared K/V", "uniform") not in refused  # it falls back to the other variant
    assert not any(architecture == cells.PACKED for architecture, _ in refused)
    assert not {(architecture, "selective_modules, attention") for architecture in cells.IN_SAMPLE} & refused
    assert not set(cells.chosen_hard(whole=False)) & refused


def test_segments_are_refused_where_layers_are_skipped(architectures: Path) -> None:
    """By one rank; several would skip different layers, with any policy."""
    words = {mode: cells.hard_words(architectures, SKIPPED, mode, "ZeRO-2") for mode in ("uniform", "full")}
    assert "a segment runs all its layers or none" in str(refusal(words["uniform"], world_size=1))
    assert refusal(words["full"], world_size=1) is None
    assert all("layerdrop=0.3" in str(refusal(asked)) for asked in words.values())


@pytest.fixture(scope="module")
def grid(request: pytest.FixtureRequest, workshop: Path) -> dict[str, dict[str, str]]:
    """Mode -> column -> "bit-equal", "within ..." or "refused: ...". One launch runs all that can run."""
    found: dict[str, dict[str, str]] = {mode: {} for mode in cells.MODES}
    run_here = cells.chosen(whole=WHOLE, each=True in chosen(request, "whole"))
    spec = {}
    for mode, column in run_here:
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
    for mode, column in run_here:
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
        for column in grid["none"]
    }
    assert all(losses[0][0] != losses[-1][0] for losses in runs.values())
    assert len({tuple(losses) for losses in runs.values()}) >= 2


def test_the_grid_is_the_published_one(grid: dict[str, dict[str, str]]) -> None:
    if WHOLE:
        cells.RESULTS.write_text(json.dumps(grid, indent=1) + "\n")
    published = json.loads(cells.RESULTS.read_text())
    for mode, row in grid.items():
        assert row == {column: published[mode][column] for column in row}
    assert published.keys() == cells.MODES.keys()


def test_every_run_proved_itself(workshop: Path, grid: dict[str, dict[str, str]]) -> None:
    ran = [
        (mode, column) for mode, row in grid.items() for column, text in row.items() if "refused" not in text
    ]
    for mode, column in ran:
        proof = json.loads((workshop / "out" / cells.run_name(mode, column) / "run" / "proof.json").read_text())
        assert len(proof["layers"]) == 4
        assert all(row["recomputations"] == row["expected_recomputations"] for row in proof["layers"])
        assert len(proof["placement_by_rank"]) == 2
        moved = [row["moved_bytes"] for row in proof["layers"]]
        assert any(moved) == ("offload" in mode), f"{mode}, {column}: {moved}"
