"""Layers shared between ranks: saved, stopped, resumed, cut for ranks that share nothing and back, exported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from remat.saving import manifest
from remat.saving.exports import export
from tests.support import tiny
from tests.support.launcher import deepspeed

pytestmark = pytest.mark.launch

FIRST, SECOND, STEPS = 2, 3, 4  # steps saved by ranks that share layers, by ranks that do not, and the last one
SHARED = "train.tensor_parallel_size=2"
CELLS = {
    "zero2": ["deepspeed.config=zero2"],
    "zero3": ["deepspeed.config=zero3"],
    "zero1": ["deepspeed.config=zero1"],
    "zero2_bf16": ["deepspeed.config=zero2", "train.precision=bf16"],
    "zero3_bf16": ["deepspeed.config=zero3", "train.precision=bf16"],
    "zero2_offload": ["deepspeed.config=zero2_offload"],
    "zero3_offload": ["deepspeed.config=zero3_offload"],
}
ESSENTIAL = ("zero2", "zero3")
NAMES = [name if name in ESSENTIAL else pytest.param(name, marks=pytest.mark.exhaustive) for name in CELLS]
Found = dict[str, Any]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_workshop(tmp_path_factory.mktemp("shares"))


def words(workshop: Path, name: str, cell: str, *more: str) -> list[str]:
    common = ["model.architecture={}", f"train.steps={STEPS}", "save.keep=9"]
    return tiny.words(workshop, name, *common, *CELLS[cell], *more)


def resume(workshop: Path, name: str, cell: str, step: int, *more: str) -> list[str]:
    own = [word for word in words(workshop, name, cell, *more) if not word.startswith("run_id=")]
    return [*own, f"resume={workshop}/out/{name}/run/saved/step-{step:06d}"]


def spec_of(workshop: Path, cell: str, *more: str) -> dict[str, list[str]]:
    shared, stopped = (SHARED, *more), f"{cell}_stopped"
    saving = [f"save.every={FIRST}", "save.at_end=true", "save.export=true", "save.rehearse=true"]
    return {
        f"{cell} whole": words(workshop, cell, cell, *shared, *saving),
        f"{cell} same": resume(workshop, cell, cell, FIRST, *shared),
        f"{cell} apart": resume(workshop, cell, cell, FIRST, *more, f"train.stop_at={SECOND}"),
        f"{cell} again": resume(workshop, cell, cell, SECOND, *shared),
        f"{cell} stopped": words(workshop, stopped, cell, *shared),
        f"{cell} continued": resume(workshop, stopped, cell, FIRST, *shared),
    }


def launch(workshop: Path, spec: dict[str, list[str]], ranks: int) -> Found:
    file = workshop / f"spec_{ranks}_{len(spec)}.json"
    file.write_text(json.dumps(spec))
    done = deepspeed(str(file), ranks=ranks, script="tests/support/reshard_runs.py")
    assert done.code == 0, done.out[-6000:]
    found: Found = json.loads(file.with_suffix(".done.json").read_text())
    return found


@pytest.fixture(scope="module")
def runs(workshop: Path) -> Callable[[str], Found]:
    """Of a cell: what its runs on two ranks gave. `alone` are those that share nothing."""
    known: dict[str, Found] = {}

    def of(cell: str) -> Found:
        if cell not in known:
            cells = [name for name in CELLS if (name in ESSENTIAL) == (cell in ESSENTIAL)]
            spec = {name: line for each in cells for name, line in spec_of(workshop, each).items()}
            if cell in ESSENTIAL:
                spec["alone"] = words(workshop, "alone", "zero2", "save.export=true")
            found = launch(workshop, spec, ranks=2)
            known.update(
                {each: {n.split()[-1]: found[n] for n in found if n.split()[0] == each} for each in cells}
            )
            known.update({"alone": found["alone"]} if "alone" in found else {})
        return known[cell]

    return of


def column(found: Found, key: str) -> list[float]:
    return [row[key] for row in found["rows"]]


def check(found: Found, rel: float) -> None:
    """The whole run against those that were interrupted; `rel`: how much a sum differs in another order."""
    whole = found["whole"]
    for key in ("loss/train", "optim/grad_norm"):
        for name in ("same", "continued"):
            assert column(found[name], key) == column(whole, key), name
        assert column(found["stopped"], key) == column(whole, key)[:FIRST]
        assert column(found["apart"], key) == pytest.approx(column(whole, key)[:SECOND], rel=rel)
        assert column(found["again"], key) == pytest.approx(column(whole, key), rel=rel)
    assert found["apart"]["ids"] == whole["ids"][FIRST:SECOND]
    assert found["again"]["ids"] == whole["ids"][SECOND:]
    assert column(whole, "loss/train")[-1] < column(whole, "loss/train")[0] - 0.1, "it learns something"


@pytest.mark.parametrize("cell", NAMES)
def test_interrupted_runs_go_on_as_the_whole_one(cell: str, runs: Callable[[str], Found]) -> None:
    """Bit for bit on ranks that share the layers again, after a stop by a signal too."""
    check(runs(cell), rel=2e-2 if "bf16" in cell else 1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cell", ESSENTIAL)
def test_two_groups_of_two_ranks_do_so_too(cell: str, tmp_path: Path) -> None:
    workshop = tiny.make_workshop(tmp_path)
    found = launch(workshop, spec_of(workshop, cell, "train.micro_batch_size=1"), ranks=4)
    check({name.split()[-1]: run for name, run in found.items()}, rel=1e-6)


@pytest.mark.parametrize("cell", NAMES)
def test_a_state_exports_what_the_run_exported(
    cell: str, workshop: Path, tmp_path: Path, runs: Callable[[str], Found]
) -> None:
    runs(cell)
    folder = workshop / "out" / cell / "run"
    state = folder / "saved" / "step-000002"
    assert manifest.verify(state) == []
    assert manifest.read(state).tensor_parallel_size == 2
    result = export.export_saved_state(state, folder, tmp_path / "export", export.Form())
    plain = load_file(workshop / "model" / "model.safetensors")
    assert {n: t.shape for n, t in load_file(result.path / "model.safetensors").items()} == {
        n: t.shape for n, t in plain.items()
    }


def test_the_export_is_that_of_ranks_that_share_nothing(workshop: Path, runs: Callable[[str], Found]) -> None:
    runs("zero2")
    alone, *shared = (
        load_file(workshop / "out" / name / "run" / "export" / "model.safetensors")
        for name in ("alone", *ESSENTIAL)
    )
    start = load_file(workshop / "model" / "model.safetensors")
    for name, weight in alone.items():
        moved = float((weight - start[name]).abs().max())
        for found in shared:
            assert torch.allclose(found[name], weight, rtol=0, atol=1e-3 * moved), name
