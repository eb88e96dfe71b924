"""Layers divided into stages: the trajectory of a plain PyTorch loop, what each stage holds, saved states, exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from remat.config import compose
from remat.config.units import GIB
from remat.planning import budget
from remat.planning.plan import Recordings, make_plan
from remat.saving import manifest
from remat.saving.exports import export
from tests.support import tiny
from tests.support.grids import cases, chosen
from tests.support.launcher import deepspeed

pytestmark = pytest.mark.launch

SAVED, STEPS, MICRO_BATCHES = 2, 4, 4  # the saved step, steps of a whole run, micro-batches of a step
COMMON = ["model.architecture={}", "train.micro_batch_size=1", f"train.global_batch_size={MICRO_BATCHES}"]
TWO_STAGES, THREE_STEPS, WHOLE = "train.pipeline_parallel_size=2", "train.steps=3", f"train.steps={STEPS}"
NONE, FULL, BF16 = "checkpointing=none", "checkpointing=full", "train.precision=bf16"
ZERO1, ZERO0 = "deepspeed.config=zero1", "deepspeed.overrides.zero_optimization.stage=0"
FOUR_STAGES, BUDGET = "train.pipeline_parallel_size=4", "checkpointing=budget"
OF_STAGES = [NONE, "checkpointing.layers={0: full}"]  # the first stage holds more micro-batches
SHARE = 0.2  # of the way from the peak of full to that of none: what a budget leaves
SAVING = [f"save.every={SAVED}", "save.keep=9", "save.at_end=true", "save.export=true", "save.rehearse=true"]
SAVING.append("save.max_shard_size=20KB")  # so that each rank writes files, with weights of both stages
TWO_RANKS = {
    "none": [TWO_STAGES, NONE, WHOLE, *SAVING],
    "full": [TWO_STAGES, FULL, THREE_STEPS],
    "of_stages": [TWO_STAGES, *OF_STAGES, THREE_STEPS],
    "budget": [TWO_STAGES, BUDGET, THREE_STEPS],
    "tied": [TWO_STAGES, FULL, THREE_STEPS],
    "linears": [TWO_STAGES, "checkpointing=selective_linears", THREE_STEPS],
    "discard": [TWO_STAGES, "checkpointing=discard_output", THREE_STEPS],
    "interval": [TWO_STAGES, "checkpointing=interval", "checkpointing.interval=2", THREE_STEPS],
    "uniform": [TWO_STAGES, "checkpointing=uniform", "checkpointing.segment_layers=1", THREE_STEPS],
    "ops": [TWO_STAGES, "checkpointing=selective_ops", THREE_STEPS],
    "modules": [TWO_STAGES, "checkpointing=selective_modules", THREE_STEPS],
    "tiles": [TWO_STAGES, FULL, "checkpointing.tiles=2", THREE_STEPS],
    "logits": [TWO_STAGES, NONE, "train.loss=full", THREE_STEPS],
    "tied_none": [TWO_STAGES, NONE, THREE_STEPS],
    "unsharded": [TWO_STAGES, ZERO0, NONE, THREE_STEPS],
    "unsharded_tied": [TWO_STAGES, ZERO0, FULL, THREE_STEPS],
    "tied_budget": [TWO_STAGES, BUDGET, THREE_STEPS],
    "unsharded_budget": [TWO_STAGES, ZERO0, BUDGET, THREE_STEPS],
}
FOUR_RANKS = {
    "four_stages": [FOUR_STAGES, *OF_STAGES, THREE_STEPS],
    "two_by_two": [TWO_STAGES, FULL, THREE_STEPS],
    "two_by_two_unsharded": [TWO_STAGES, ZERO0, NONE, THREE_STEPS],
    "four_stages_tied": [FOUR_STAGES, FULL, THREE_STEPS],
    "four_stages_none": [FOUR_STAGES, NONE, THREE_STEPS],
    "four_stages_budget": [FOUR_STAGES, BUDGET, THREE_STEPS],
    "two_by_two_none": [TWO_STAGES, NONE, THREE_STEPS],
    "two_by_two_budget": [TWO_STAGES, BUDGET, THREE_STEPS],
}
REST = {"linears", "discard", "interval", "uniform", "ops", "modules", "tiles", "logits", "tied_none"}
REST |= {"unsharded_tied", "two_by_two_unsharded", "four_stages_tied", "tied_budget", "unsharded_budget"}
REST |= {f"{name}_{kind}" for name in ("four_stages", "two_by_two") for kind in ("none", "budget")}
LOW = {
    name: [TWO_STAGES, policy, BF16, THREE_STEPS]
    for name, policy in (("bf16", NONE), ("bf16_full", FULL), ("bf16_budget", BUDGET))
}
HELD_OUT = ["data.eval_fraction=0.2", NONE, "train.steps=2"]
EVALUATING = {"evaluated": [*HELD_OUT, TWO_STAGES], "evaluated_alone": [*HELD_OUT, "save.export=true"]}
DROPOUT = {
    name: [TWO_STAGES, policy, THREE_STEPS]
    for name, policy in (("dropout", NONE), ("dropout_full", FULL), ("dropout_budget", BUDGET))
}
PAIRS = {  # runs that keep less, and one that keeps all, in one launch
    "full": "none",
    "of_stages": "none",
    "budget": "none",
    "dropout_full": "dropout",
    "dropout_budget": "dropout",
    "bf16_full": "bf16",
    "bf16_budget": "bf16",
    "tied_budget": "tied_none",
    "unsharded_budget": "unsharded",
}
STOPPED = {"is_stopped": [TWO_STAGES, NONE, WHOLE]}
Found = dict[str, Any]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.make_workshop(tmp_path_factory.mktemp("stages"))
    tiny.make_model(folder / "tied", tie_word_embeddings=True)
    tiny.make_model(folder / "dropout", attention_dropout=0.2)
    tiny.make_model(folder / "deep", num_hidden_layers=4)
    tiny.make_model(folder / "deep_tied", num_hidden_layers=4, tie_word_embeddings=True)
    return folder


def within(lines: dict[str, list[str]], ranks: int) -> dict[str, list[str]]:
    """Return the words of runs with a budget for those that ask for one: between the peaks of full and of none."""
    known, found = Recordings(), dict(lines)
    for name, line in lines.items():
        if BUDGET in line:
            least, most = (
                make_plan(
                    compose.compose_run([policy if word == BUDGET else word for word in line]).run,
                    world_size=ranks,
                    on_gpu=False,
                    recordings=known,
                ).plan.peak_bytes
                for policy in (FULL, NONE)
            )
            limit = least + SHARE * (most - least)
            found[name] = [*line, f"checkpointing.budget_gib={limit / GIB:.12f}"]
    return found


def words(workshop: Path, name: str, *more: str) -> list[str]:
    kind = "_".join([*(["deep"] if name in FOUR_RANKS else []), *(["tied"] if "tied" in name else [])])
    kind = "dropout" if name in DROPOUT else kind
    return tiny.words(workshop, name, *COMMON, f"model.path={workshop}/{kind or 'model'}", ZERO1, *more)


def resume(workshop: Path, name: str, *more: str) -> list[str]:
    own = [word for word in words(workshop, name, *more) if not word.startswith("run_id=")]
    return [*own, f"resume={workshop}/out/{name}/run/saved/step-{SAVED:06d}"]


def launch(workshop: Path, lines: dict[str, list[str]], ranks: int) -> Found:
    spec = within(lines, ranks)
    file = workshop / f"spec_{ranks}.json"
    file.write_text(json.dumps(spec))
    done = deepspeed(str(file), ranks=ranks, script="tests/support/reshard_runs.py")
    assert done.code == 0, done.out[-6000:]
    found: Found = json.loads(file.with_suffix(".done.json").read_text())
    return found


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest, workshop: Path) -> Found:
    left_out = REST - chosen(request)
    runs = {name: more for name, more in TWO_RANKS.items() if name not in left_out}
    runs |= LOW if {"bf16_full", "bf16_budget"} & chosen(request) else {}
    runs |= {name: more for name, more in TWO_RANKS.items() if name in map(PAIRS.get, runs)}
    dropout = {name: more for name, more in DROPOUT.items() if name not in left_out}
    spec = {n: words(workshop, n, *more) for n, more in (runs | EVALUATING | dropout | STOPPED).items()}
    spec["is_stopped"].append("save.keep=9")
    spec["resumed"] = resume(workshop, "none", TWO_STAGES, NONE, WHOLE)
    spec["continued"] = resume(workshop, "is_stopped", TWO_STAGES, NONE, WHOLE)
    return launch(workshop, {name.replace("is_", ""): line for name, line in spec.items()}, ranks=2)


@pytest.fixture(scope="module")
def four_ranks(request: pytest.FixtureRequest, workshop: Path) -> Found:
    left_out = REST - chosen(request)
    runs = {name: more for name, more in FOUR_RANKS.items() if name not in left_out}
    return launch(workshop, {name: words(workshop, name, *more) for name, more in runs.items()}, ranks=4)


def column(found: Found, key: str) -> list[float]:
    return [row[key] for row in found["rows"] if key in row]


def compare(workshop: Path, name: str, found: Found) -> None:
    expected = tiny.plain_loop(words(workshop, name, THREE_STEPS))
    losses, norms = column(found, "loss/train")[:3], column(found, "optim/grad_norm")[:3]
    assert losses == pytest.approx([loss for loss, _ in expected], rel=1e-6)
    assert norms == pytest.approx([norm for _, norm in expected], rel=1e-5)


@pytest.mark.parametrize("name", cases(TWO_RANKS, REST))
def test_two_stages_follow_the_plain_loop(name: str, workshop: Path, two_ranks: Found) -> None:
    compare(workshop, name, two_ranks[name])


@pytest.mark.parametrize("name", cases(FOUR_RANKS, REST))
def test_four_ranks_follow_the_plain_loop(name: str, workshop: Path, four_ranks: Found) -> None:
    compare(workshop, name, four_ranks[name])


@pytest.mark.parametrize("name", cases(PAIRS, {*REST, *LOW, "dropout_budget"}))
def test_recomputation_in_stages_changes_nothing(name: str, two_ranks: Found) -> None:
    for key in ("loss/train", "optim/grad_norm"):
        assert column(two_ranks[name], key) == column(two_ranks[PAIRS[name]], key)[:3]


@pytest.mark.parametrize("name", cases(("four_stages", "two_by_two"), ("four_stages", "two_by_two")))
def test_budgets_on_four_ranks_change_nothing(name: str, four_ranks: Found) -> None:
    for key in ("loss/train", "optim/grad_norm"):
        kept, within_budget = (column(four_ranks[f"{name}_{kind}"], key) for kind in ("none", "budget"))
        assert within_budget == kept and len(kept) == 3


def prove_tables(run: Path) -> None:
    """Each stage has tables of its own within the budget, which are written; each layer keeps what its own says."""
    plan = json.loads((run / "plan.json").read_text())["planned"]
    table = json.loads((run / budget.FILE).read_text())
    proof = json.loads((run / "proof.json").read_text())
    peaks = [stage["gpu_allocated_peak_bytes"] for stage in plan["stages"]]
    assert max(peaks) <= float(table["budget_gib"]) * GIB
    assert len(table["planned_gib_of_stages"]) == len(peaks)
    written = {
        layer: entry.get("kept_bytes", 0)
        for layers, entry in table["layers"].items()
        for layer in budget._indices(layers)
    }
    kept = {row["layer"]: row["table_bytes"] for row in proof["layers"]}
    assert kept == written == {row["layer"]: row["planned_table_bytes"] for row in proof["layers"]}
    assert sum(kept.values()) > 0
    assert max(stage["recomputed_share_of_forward"] for stage in plan["stages"]) > 0
    *earlier, _ = [
        stage["kept_bytes_per_micro_batch"] for stage in plan["stages"]
    ]  # the last one has logits too
    assert earlier == sorted(earlier)  # which hold fewer micro-batches, one after the other


def test_stages_get_tables_within_the_budget(workshop: Path, two_ranks: Found) -> None:
    prove_tables(workshop / "out" / "budget" / "run")


@pytest.mark.parametrize("name", cases(("four_stages_budget", "two_by_two_budget"), REST))
def test_stages_of_four_ranks_get_tables_within_the_budget(
    name: str, workshop: Path, four_ranks: Found
) -> None:
    prove_tables(workshop / "out" / name / "run")


def test_interrupted_runs_go_on_as_the_whole_one(two_ranks: Found) -> None:
    for key in ("loss/train", "optim/grad_norm"):
        whole = column(two_ranks["none"], key)
        assert column(two_ranks["stopped"], key) == whole[:SAVED]
        assert [column(two_ranks[name], key) for name in ("resumed", "continued")] == [whole, whole]
    assert two_ranks["continued"]["ids"] == two_ranks["none"]["ids"][SAVED:]


@pytest.mark.parametrize("name", ["none", "full", "of_stages", "budget"])
def test_a_stage_holds_the_micro_batches_in_flight(name: str, workshop: Path, two_ranks: Found) -> None:
    """Of the first step: live bytes after each forward. Its first micro-batch goes through the stages alone."""
    plan = json.loads((workshop / "out" / name / "run" / "plan.json").read_text())["planned"]
    (first, last), held = plan["stages"], two_ranks[name]["held"]
    assert [stage["micro_batches_in_flight"] for stage in (first, last)] == [2, 1]
    kept = first["kept_bytes_per_micro_batch"]
    assert held[0][:2] == [[kept], [kept, 2 * kept, 2 * kept]]
    kept = last["kept_bytes_per_micro_batch"]
    assert held[1][1][0] == pytest.approx(kept, rel=1e-3)
    assert max(held[1][1]) < kept + 3 * 192 * 32 * 4  # received ones and their gradients: tokens x width x fp32


@pytest.mark.parametrize("name", cases(TWO_RANKS, REST))
def test_what_a_stage_holds_is_planned(name: str, workshop: Path, two_ranks: Found) -> None:
    ledger = json.loads((workshop / "out" / name / "run" / "ledger.json").read_text())
    rows = {row["category"]: row for row in ledger["rows"] if row["measured"] is not None}
    exact = {
        "weights in host memory": 1e-3,
        "gradients in host memory": 1e-2,
        "optimizer state in host memory": 1e-3,
    }
    exact |= {"kept activations, all layers": 2e-3, "recomputed FLOPs, of forward": 1e-3}
    for category, within in exact.items():
        assert rows[category]["measured"] == pytest.approx(rows[category]["planned"], rel=within), rows[
            category
        ]
    kept = ledger["kept_bytes_per_layer"]
    assert kept["planned"] == kept["measured"]


def test_the_proof_is_of_the_layers_of_all_stages(workshop: Path, two_ranks: Found) -> None:
    proof = json.loads((workshop / "out" / "of_stages" / "run" / "proof.json").read_text())
    assert [(row["layer"], row["recomputations"]) for row in proof["layers"]] == [(0, MICRO_BATCHES), (1, 0)]


def test_evaluation_counts_every_held_out_block_once(workshop: Path, two_ranks: Found) -> None:
    staged, alone = (tiny.rows(workshop / "out" / name / "run", "loss/eval") for name in EVALUATING)
    assert [row["loss/eval"] for row in staged] == pytest.approx([row["loss/eval"] for row in alone], rel=1e-5)
    assert staged


def test_the_export_is_that_of_ranks_without_stages(workshop: Path, tmp_path: Path, two_ranks: Found) -> None:
    run = workshop / "out" / "none" / "run"
    state = run / "saved" / f"step-{SAVED:06d}"
    assert manifest.verify(state) == []
    again = export.export_saved_state(
        run / "saved" / f"step-{STEPS:06d}", run, tmp_path / "export", export.Form()
    )
    files = sorted((run / "export").glob("*.safetensors"))
    live = {name: value for file in files for name, value in load_file(file).items()}
    saved = load_file(again.path / "model.safetensors")
    assert len(files) > 2
    start = load_file(workshop / "model" / "model.safetensors")
    assert {n: t.shape for n, t in live.items()} == {n: t.shape for n, t in start.items()}
    assert all(torch.equal(live[name], saved[name]) for name in start)
    assert all(not torch.equal(live[name], start[name]) for name in start)
