"""2 -> 1 -> 2 ranks: a state is cut for another number of ranks and the run goes on, by the real launcher."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.checkpoint import ds_to_universal

from remat.saving import manifest, reshard
from remat.saving.manifest import SavedState
from remat.saving.state_files import MASTER, MOMENTS, MOMENTS_OF, SavedWeights, mapped, optimizer_files
from tests.support import tiny
from tests.support.launcher import deepspeed

pytestmark = pytest.mark.launch

FIRST, SECOND, THIRD, STEPS = 2, 3, 4, 5  # steps saved by 2 ranks, by 1, and twice by 2 again
ESSENTIAL = {
    "zero2_optimizer": ["deepspeed.config=zero2_offload"],  # with round_robin_gradients
    "zero3": ["deepspeed.config=zero3", "deepspeed.overrides.zero_optimization.sub_group_size=10000"],
    "zero3_qlora_parameters": ["deepspeed.config=zero3_offload", "train.precision=bf16", "peft=qlora"],
    "zero2_lion": ["deepspeed.config=zero2", "optim.name=lion", "optim.lr=1e-3"],
}
MORE = {
    "zero3_bf16_states": ["deepspeed.config=zero3", "train.precision=bf16", "optim.states=bf16"],
    "zero3_lion": ["deepspeed.config=zero3", "optim.name=lion", "optim.lr=1e-3"],
    "zero0": ["deepspeed.config=zero1", "deepspeed.overrides.zero_optimization.stage=0"],
    "zero1": ["deepspeed.config=zero1"],
    "zero2": ["deepspeed.config=zero2"],
    "zero2_bf16": ["deepspeed.config=zero2", "train.precision=bf16"],
    "zero2_bf16_optimizer": ["deepspeed.config=zero2_offload", "train.precision=bf16"],
    "zero2_bf16_states": ["deepspeed.config=zero2_offload", "train.precision=bf16", "optim.states=bf16"],
    "zero2_aligned": [
        "deepspeed.config=zero2_offload",
        "deepspeed.overrides.zero_optimization.parameter_alignment=true",
    ],
    "zero2_lora": ["deepspeed.config=zero2", "peft=lora"],
    "zero3_bf16": ["deepspeed.config=zero3", "train.precision=bf16"],
    "zero3_optimizer": ["deepspeed.config=zero3_offload_optimizer"],
    "zero3_optimizer_parameters": ["deepspeed.config=zero3_offload"],
    "zero3_tied": ["deepspeed.config=zero3"],
    "zero2_tied": ["deepspeed.config=zero2"],
    "zero2_optimizer_again": ESSENTIAL["zero2_optimizer"],
    "zero3_lora_parameters": ["deepspeed.config=zero3_offload", "train.precision=bf16", "peft=lora"],
}
CELLS = ESSENTIAL | MORE
AGAIN = {"zero3", *MORE}  # go on once more, with as many ranks
PARAMETERS = [*ESSENTIAL, *(pytest.param(name, marks=pytest.mark.slow_fault) for name in MORE)]
# Two summands have one sum in either order: on 2 ranks and 1 the losses are equal but for fused sums of LoRA's rows.
REL = 1e-6


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.make_workshop(tmp_path_factory.mktemp("reshard"))
    tiny.make_model(folder / "tied", tie_word_embeddings=True)
    return folder


def run_folder(workshop: Path, name: str) -> Path:
    return workshop / "out" / name / "run"


def saved(workshop: Path, name: str, step: int) -> Path:
    return run_folder(workshop, name) / "saved" / f"step-{step:06d}"


def stage(name: str) -> int:
    return int(name[len("zero")])


def launch(workshop: Path, spec: dict[str, list[str]], ranks: int) -> Any:
    file = workshop / "spec.json"
    file.write_text(json.dumps(spec))
    done = deepspeed("copies", str(file), ranks=ranks, script="tests/support/reshard_runs.py")
    assert done.code == 0, done.out[-6000:]
    return json.loads(file.with_suffix(".done.json").read_text())


@pytest.fixture(scope="module")
def runs(workshop: Path) -> Callable[[str], dict[str, Any]]:
    """Of a cell: its run whole on 2 ranks, after FIRST steps on 1, then on 2; of AGAIN after THIRD once more on 2."""
    known: dict[str, dict[str, Any]] = {}

    def words(name: str, *more: str) -> list[str]:
        model = [f"model.path={workshop / 'tied'}"] if name.endswith("tied") else []
        return tiny.words(workshop, name, f"train.steps={STEPS}", *CELLS[name], "save.keep=9", *model, *more)

    def resume(name: str, step: int, *more: str) -> list[str]:
        own = [word for word in words(name, *more) if not word.startswith("run_id=")]
        return [*own, f"resume={saved(workshop, name, step)}"]

    def of(name: str) -> dict[str, Any]:
        if name not in known:
            cells = ESSENTIAL if name in ESSENTIAL else MORE
            whole = launch(workshop, {cell: words(cell, f"save.every={FIRST}") for cell in cells}, 2)
            for cell in cells:  # what a killed launch leaves
                left = saved(workshop, cell, FIRST).with_name(reshard.UNIVERSAL) / "engine" / "zero"
                left.mkdir(parents=True)
                (left / "optimizer_state.pt").write_text("half")
            one = launch(workshop, {cell: resume(cell, FIRST, f"train.stop_at={SECOND}") for cell in cells}, 1)
            spec = {cell: resume(cell, SECOND, "save.every=1") for cell in cells}
            repeated = {f"{cell} again": resume(cell, THIRD) for cell in cells if cell in AGAIN}
            two = launch(workshop, spec | repeated, 2)
            for cell in cells:
                known[cell] = {"whole": whole[cell], "one": one[cell], "two": two[cell]}
                known[cell] |= {"again": two[f"{cell} again"]} if cell in AGAIN else {}
        return known[name]

    return of


def column(found: dict[str, Any], key: str) -> list[float]:
    return [row[key] for row in found["rows"]]


@pytest.mark.parametrize("name", PARAMETERS)
def test_two_ranks_then_one_then_two_follow_the_uninterrupted_run(
    name: str, runs: Callable[[str], dict[str, Any]]
) -> None:
    found = runs(name)
    whole, one, two = (found[key] for key in ("whole", "one", "two"))
    for key in ("loss/train", "optim/grad_norm"):
        assert column(one, key) == pytest.approx(column(whole, key)[:SECOND], rel=REL)
        assert column(two, key) == pytest.approx(column(whole, key), rel=REL)
    for key in ("tokens/seen", "tokens/trained", "optim/lr"):
        assert column(two, key) == column(whole, key)
    assert one["ids"] == whole["ids"][FIRST:SECOND]
    assert two["ids"] == whole["ids"][SECOND:]
    if name in AGAIN:
        again = found["again"]
        assert again["ids"] == whole["ids"][THIRD:]
        for key in ("loss/train", "optim/grad_norm"):
            assert column(again, key) == column(two, key), "a resume with as many ranks is bit-equal"
    assert column(whole, "loss/train")[-1] < column(whole, "loss/train")[0] - 0.1, "it learns something"


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_engine_holds_what_was_saved_bit_for_bit(
    name: str, workshop: Path, runs: Callable[[str], dict[str, Any]]
) -> None:
    runs(name)
    run = run_folder(workshop, name)
    for ranks, step in ((1, FIRST), (2, SECOND)):
        then, now = saved(workshop, name, step), run / f"loaded-{ranks}-{step}" / "saved" / f"step-{step:06d}"
        assert manifest.verify(then) == [], "the state itself is only read"
        assert (manifest.read(then).world_size, manifest.read(now).world_size) == (3 - ranks, ranks)
        if stage(name) == 0:
            continue
        moments = MOMENTS_OF["lion" if name.endswith("lion") else "adamw"]
        a, b = (SavedWeights(path / "engine", stage(name), moments=moments) for path in (then, now))
        assert a.trained == b.trained and len(a.trained) >= 20
        for weight in a.trained:
            for state in (MASTER, *moments):
                assert torch.equal(a.read(weight, state), b.read(weight, state)), (weight, state)
    left = [path.name for path in (run / "saved").iterdir() if path.name.startswith("tmp-")]
    assert left == []


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_group_has_taken_the_steps_of_the_run(
    name: str, workshop: Path, runs: Callable[[str], dict[str, Any]]
) -> None:
    runs(name)
    for step in (SECOND, THIRD, STEPS):
        folder = saved(workshop, name, step) / "engine"
        if stage(name) == 0:
            state = mapped(folder / "mp_rank_00_model_states.pt")["optimizer"]["state"]
            assert {int(values["step"]) for values in state.values()} == {step}
            continue
        for file in optimizer_files(folder):
            optimizer = mapped(file)["optimizer_state_dict"]
            key = "optimizer_state_dict" if stage(name) == 3 else "base_optimizer_state"
            assert {int(values["step"]) for values in optimizer[key]["state"].values()} == {step}


CONVERTIBLE = [
    "zero3",
    "zero1",
    "zero2",
    "zero2_lora",
    "zero2_tied",
    "zero3_bf16",
    "zero3_optimizer",
    "zero3_tied",
]


@pytest.mark.parametrize(
    "name", [CONVERTIBLE[0], *(pytest.param(name, marks=pytest.mark.slow_fault) for name in CONVERTIBLE[1:])]
)
def test_the_tensors_are_those_of_deepspeeds_converter(
    name: str, workshop: Path, runs: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    """Not with round_robin_gradients: there DeepSpeed 0.19.8's converter gives weights the numbers of others."""
    runs(name)
    path = saved(workshop, name, FIRST)
    assert reshard.convert(SavedState(path, manifest.read(path)), tmp_path / "ours") is None
    words = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    folders = {"input_folder": str(path / "engine"), "output_folder": str(tmp_path / "theirs")}
    ds_to_universal.main(Namespace(**words, **folders, inject_missing_state=True))
    weights = SavedWeights(path / "engine", stage(name)).trained
    for weight in weights:
        for state in (MASTER, *MOMENTS):
            file = f"zero/{weight}/{state}.pt"
            own, other = (torch.load(tmp_path / side / file, weights_only=False) for side in ("ours", "theirs"))
            other = other["param"] if isinstance(other, dict) else other
            assert torch.equal(own["param"].flatten(), other.flatten()), file
