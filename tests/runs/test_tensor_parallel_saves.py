"""Layers shared between ranks: saved, stopped, resumed, cut for ranks that share nothing and back, exported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from remat.config import compose
from remat.saving import manifest
from remat.saving.exports import export, merge
from tests.support import tiny
from tests.support.grids import cases, chosen
from tests.support.launcher import deepspeed

pytestmark = pytest.mark.launch

FIRST, SECOND, STEPS = 2, 3, 4  # steps saved by ranks that share layers, by ranks that do not, and the last one
SHARED = "train.tensor_parallel_size=2"
LORA = ["peft=lora", "peft.r=4", "peft.alpha=8"]
CELLS = {
    "zero2": ["deepspeed.config=zero2"],
    "zero3": ["deepspeed.config=zero3"],
    "zero1": ["deepspeed.config=zero1"],
    "zero2_bf16": ["deepspeed.config=zero2", "train.precision=bf16"],
    "zero3_bf16": ["deepspeed.config=zero3", "train.precision=bf16"],
    "zero2_offload": ["deepspeed.config=zero2_offload"],
    "zero3_offload": ["deepspeed.config=zero3_offload"],
    "zero1_lora": ["deepspeed.config=zero1", *LORA],
    "zero2_lora": ["deepspeed.config=zero2", *LORA],
    "zero3_lora": ["deepspeed.config=zero3", *LORA],
    "zero3_lora_bf16": ["deepspeed.config=zero3_offload", "train.precision=bf16", *LORA],
}
ESSENTIAL = ("zero2", "zero3", "zero3_lora")
NAMES = cases(CELLS, CELLS.keys() - ESSENTIAL)
ADAPTED = [case for name, case in zip(CELLS, NAMES, strict=True) if name.endswith("_lora")]
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


def spec_of(workshop: Path, cell: str, *more: str, stops: bool = True) -> dict[str, list[str]]:
    """The runs of a cell by name; with `stops` one that a signal stops, too, and one that goes on from there."""
    shared, stopped = (SHARED, *more), f"{cell}_stopped"
    saving = [f"save.every={FIRST}", "save.at_end=true", "save.export=true", "save.rehearse=true"]
    spec = {
        f"{cell} whole": words(workshop, cell, cell, *shared, *saving, *["save.merge=true"] * ("lora" in cell)),
        f"{cell} same": resume(workshop, cell, cell, FIRST, *shared),
        f"{cell} apart": resume(workshop, cell, cell, FIRST, *more, f"train.stop_at={SECOND}"),
        f"{cell} again": resume(workshop, cell, cell, SECOND, *shared),
    }
    if not stops:
        return spec
    return spec | {
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
def runs(workshop: Path, request: pytest.FixtureRequest) -> Callable[[str], Found]:
    """Of a cell: what its runs on two ranks gave. With the essential ones go two that share nothing."""
    known: dict[str, Found] = {}
    stopped = chosen(request, "stopped")

    def of(cell: str) -> Found:
        if cell not in known:
            cells = [name for name in CELLS if (name in ESSENTIAL) == (cell in ESSENTIAL)]
            spec = {}
            for each in cells:
                spec |= spec_of(workshop, each, stops=each in stopped)
            if cell in ESSENTIAL:
                spec["alone"] = words(workshop, "alone", "zero2", "save.export=true")
                adapted = [*LORA, "save.export=true", "save.merge=true"]
                spec["alone_lora"] = words(workshop, "alone_lora", "zero2", *adapted)
            found = launch(workshop, spec, ranks=2)
            known.update(
                {each: {n.split()[-1]: found[n] for n in found if n.split()[0] == each} for each in cells}
            )
        return known[cell]

    return of


def column(found: Found, key: str) -> list[float]:
    return [row[key] for row in found["rows"]]


def check(found: Found, rel: float) -> None:
    """The whole run against those that were interrupted; `rel`: how much a sum differs in another order."""
    whole = found["whole"]
    for key in ("loss/train", "optim/grad_norm"):
        assert column(found["same"], key) == column(whole, key)
        assert column(found["apart"], key) == pytest.approx(column(whole, key)[:SECOND], rel=rel)
        assert column(found["again"], key) == pytest.approx(column(whole, key), rel=rel)
    assert found["apart"]["ids"] == whole["ids"][FIRST:SECOND]
    assert found["again"]["ids"] == whole["ids"][SECOND:]
    assert column(whole, "loss/train")[-1] < column(whole, "loss/train")[0] - 0.1, "it learns something"


def check_stopped(found: Found) -> None:
    for key in ("loss/train", "optim/grad_norm"):
        assert column(found["stopped"], key) == column(found["whole"], key)[:FIRST]
        assert column(found["continued"], key) == column(found["whole"], key)


@pytest.mark.parametrize("cell", NAMES)
def test_interrupted_runs_go_on_as_the_whole_one(cell: str, runs: Callable[[str], Found]) -> None:
    """Bit for bit on ranks that share the layers again."""
    check(runs(cell), rel=2e-2 if "bf16" in cell else 1e-6)


@pytest.mark.parametrize("stopped", cases(CELLS, CELLS.keys() - {"zero2"}))
def test_a_run_that_a_signal_stopped_goes_on_as_the_whole_one(
    stopped: str, runs: Callable[[str], Found]
) -> None:
    check_stopped(runs(stopped))


@pytest.mark.exhaustive
@pytest.mark.parametrize("cell", ESSENTIAL)
def test_two_groups_of_two_ranks_do_so_too(cell: str, tmp_path: Path) -> None:
    workshop = tiny.make_workshop(tmp_path)
    found = launch(workshop, spec_of(workshop, cell, "train.micro_batch_size=1"), ranks=4)
    by_name = {name.split()[-1]: run for name, run in found.items()}
    check(by_name, rel=1e-6)
    check_stopped(by_name)


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
    live = folder / "export"
    assert {path.name for path in result.path.iterdir()} == {path.name for path in live.iterdir()} - {
        "README.md"
    }
    (weights,) = live.glob("*.safetensors")
    assert shapes_in(result.path / weights.name) == shapes_in(weights)
    if "lora" not in cell:
        assert shapes_in(weights) == shapes_in(workshop / "model" / "model.safetensors")


def shapes_in(file: Path) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in load_file(file).items()}


def test_the_export_is_that_of_ranks_that_share_nothing(workshop: Path, runs: Callable[[str], Found]) -> None:
    runs("zero2")
    alone, *shared = (
        load_file(workshop / "out" / name / "run" / "export" / "model.safetensors")
        for name in ("alone", "zero2", "zero3")
    )
    start = load_file(workshop / "model" / "model.safetensors")
    for name, weight in alone.items():
        moved = float((weight - start[name]).abs().max())
        for found in shared:
            assert torch.allclose(found[name], weight, rtol=0, atol=1e-3 * moved), name


@pytest.mark.parametrize("cell", ADAPTED)
def test_adapters_and_the_merged_model_are_those_of_ranks_that_share_nothing(
    cell: str, workshop: Path, tmp_path: Path, runs: Callable[[str], Found]
) -> None:
    """The same files with the same keys; peft's own merge of them is the merged model; a saved state gives both."""
    runs("zero2"), runs(cell)
    alone, shared = (workshop / "out" / name / "run" for name in ("alone_lora", cell))
    for folder, start in (("export", None), ("merged", load_file(workshop / "model" / "model.safetensors"))):
        names = {path.name for path in (alone / folder).iterdir()}
        assert {path.name for path in (shared / folder).iterdir()} == names
        (file,) = (name for name in names if name.endswith(".safetensors"))
        one, other = (load_file(run / folder / file) for run in (alone, shared))
        assert one.keys() == other.keys()
        for name, weight in one.items():
            moved = float((weight if start is None else weight - start[name]).abs().max())
            assert torch.allclose(other[name], weight, rtol=0, atol=1e-3 * moved), name
    one, other = (json.loads((run / "export" / "adapter_config.json").read_text()) for run in (alone, shared))
    assert sorted(one.pop("target_modules")) == sorted(other.pop("target_modules"))
    assert one == other
    base = AutoModelForCausalLM.from_pretrained(workshop / "model", dtype=torch.float32)
    expected = PeftModel.from_pretrained(base, str(shared / "export")).merge_and_unload().state_dict()
    merged = load_file(shared / "merged" / "model.safetensors")
    assert all(torch.allclose(merged[name], expected[name], rtol=0, atol=1e-6) for name in merged)
    state = shared / "saved" / f"step-{STEPS:06d}"
    cfg = compose.compose_run(words(workshop, cell, cell, SHARED)).run
    again = merge.merge_folder(state, shared, tmp_path / "merged", export.Form(), cfg)
    offline = load_file(again.path / "model.safetensors")
    assert offline.keys() == merged.keys()
    assert all(torch.equal(offline[name], merged[name]) for name in merged)
