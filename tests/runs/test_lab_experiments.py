"""Three of the named experiments, two points of each at the CPU size. By forks; test_compare_lab has the launcher."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from remat.lab import command, launch
from tests.support import launcher
from tests.support.pool import CPU_ONLY

pytestmark = pytest.mark.launch
Compare = Callable[..., dict[str, Any]]


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compare:
    """Runs those points of an experiment that are named; what results.json says of each."""
    for name, value in CPU_ONLY.items():
        monkeypatch.setenv(name, value)

    monkeypatch.setattr(launch, "_run", launcher.of_the_lab)

    def run(name: str, points: tuple[str, ...], *words: str) -> dict[str, Any]:
        choose = command.choose

        def few(*asked: Any) -> Any:
            whole = choose(*asked)
            return dataclasses.replace(whole, points=tuple(p for p in whole.points if p.name in points))

        monkeypatch.setattr(command, "choose", few)
        assert command.run([f"lab={name}", *words], command.Options(out=tmp_path, repeats=1)) == 0
        folder = tmp_path / name
        assert all((folder / file).stat().st_size for file in ("panels.png", "pareto.png", "index.html"))
        content = json.loads((folder / "results.json").read_text())
        found = {point["name"]: point for point in content["points"]}
        assert list(found) == list(points)
        assert all(p["status"] == "finished" and p["same_bytes"] for p in found.values()), found
        return found

    return run


@pytest.mark.exhaustive
def test_b10_loss_curves_with_and_without_recomputation_are_the_same(compare: Compare) -> None:
    found = compare("seed_b10", ("none", "full"), "train.steps=6")
    assert len(found["none"]["loss"]) == 6
    assert found["none"]["loss"] == found["full"]["loss"]
    assert found["full"]["recomputed_percent"] > 50 and not found["none"]["recomputed_percent"]


@pytest.mark.exhaustive
def test_d2_accumulation_saves_activations_and_leaves_the_loss(compare: Compare) -> None:
    found = compare("seed_d2", ("16 at once", "4 at once"), "train.steps=3")
    whole, parts = found.values()
    assert parts["micro_batch_bytes"] < 0.3 * whole["micro_batch_bytes"]
    assert [v for _, v in parts["loss"]] == pytest.approx([v for _, v in whole["loss"]], abs=1e-5)


@pytest.mark.exhaustive
def test_c1_the_reentrant_variant_runs_every_layer_again(compare: Compare) -> None:
    found = compare("seed_c1", ("none", "reentrant"), "train.steps=3")
    none, again = found.values()
    assert again["recomputed_percent"] > 95 and not none["recomputed_percent"], "all but the output layer"
    assert again["kept_bytes"] < 0.1 * none["kept_bytes"]
    assert again["micro_batch_bytes"] < 0.5 * none["micro_batch_bytes"]
    assert again["loss"] == none["loss"]
