"""The search for settings: nothing that fits is faster, what the user sets stays, a resume keeps what was chosen."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from remat import cli
from remat.config import compose
from remat.config.options import ConfigError
from remat.machine.distributed import World
from remat.planning import budget, launch_plan
from remat.planning.plan import GPU_MEMORY, Recordings, make_plan, needed_bytes
from remat.planning.preflight import DoesNotFit
from remat.planning.settings import choices, search
from remat.planning.settings.screening import Screen
from remat.planning.settings.search import Search
from remat.planning.simulation.types import Phase
from remat.saving import manifest
from remat.saving.manifest import Manifest
from tests.support import tiny

BASE = [
    "recipe=tiny_zero3_offload",
    "hardware=1x4090",
    "model.architecture.num_hidden_layers=2",
    "deepspeed.config=zero2",
    "train.seq_len=4096",
    "hardware.gpu_memory_gib=0.9",
]
PINNED = {"deepspeed.config", "train.loss"}


@pytest.fixture(scope="module")
def known() -> Recordings:
    return Recordings()


def test_nothing_that_fits_is_faster(known: Recordings) -> None:
    cfg = compose.compose_run(BASE).run
    (best,) = Search(BASE, cfg, known).fastest(1, pinned=PINNED)
    axes = choices.same_training(BASE, cfg)
    assert best.planned.plan.fits and best.overrides
    fits = 0
    for pair in itertools.product(axes["train.micro_batch_size"][:2], axes["checkpointing"]):
        words = [word for option in pair if option is not None for word in option.words]
        if words[-2:] == MOVES:  # two plans in one, of which a test below has its own
            continue
        try:
            planned = make_plan(compose.compose_run([*BASE, *words]).run, recordings=known)
        except budget.NoRoom:
            continue
        fits += planned.plan.fits
        if planned.plan.fits:
            assert planned.time.total_s >= (1 - search.SAME_TIME) * best.planned.time.total_s
    assert fits > 5


def test_ranks_of_one_pipeline_share_their_micro_batches() -> None:
    words = [*BASE, "hardware=4x4090", "deepspeed.config=zero1"]
    words += ["train.global_batch_size=8", "train.micro_batch_size=1"]
    cfg = compose.compose_run([*words, "train.pipeline_parallel_size=2"]).run
    found = choices.same_training(words, cfg)["train.micro_batch_size"]
    assert [option and option.words[0] for option in found] == [
        None, "train.micro_batch_size=2", "train.micro_batch_size=4",
    ]  # fmt: skip


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize("name", choices.OUTDONE_BY_TABLES)
def test_tables_are_at_least_as_fast_in_the_bytes_of_the_policies_that_they_replace(
    name: str, known: Recordings
) -> None:
    """The search leaves these out where tables can be had."""
    words = [*BASE, "model.architecture.num_hidden_layers=4", "hardware.gpu_memory_gib=24"]
    other = make_plan(compose.compose_run([*words, f"checkpointing={name}"]).run, recordings=known)
    size = f"checkpointing.budget_gib={budget.gib_up(needed_bytes(other, GPU_MEMORY))}"
    own = make_plan(compose.compose_run([*words, "checkpointing=budget", size]).run, recordings=known)
    assert own.time.total_s <= (1 + search.SAME_TIME) * other.time.total_s


TIGHT = [*BASE, "model.architecture.num_hidden_layers=16", "hardware.gpu_memory_gib=1.5"]
MOVES = f"checkpointing={choices.MOVING}".split()
TABLES = ["checkpointing=budget"]


def test_a_search_finds_tables_that_move_values_and_those_that_do_not(known: Recordings) -> None:
    """Where not everything can be kept. Its estimates, made before tables are chosen, are near the plans.

    Bytes less so than seconds: gaps of the allocator can end a climb before the budget is used.
    """
    search_ = Search(TIGHT, compose.compose_run(TIGHT).run, known)
    found = search_.fastest(2, pinned={*PINNED, "train.micro_batch_size"})
    assert [setting.overrides for setting in found] == [MOVES, TABLES]
    times = [setting.planned.time.total_s for setting in found]
    assert times[0] < (1 - search.SAME_TIME) * times[1]
    for setting in found:
        assert setting.planned.plan.fits and setting.planned.table is not None
        moved = setting.planned.simulation.moved_bytes
        assert (moved > 0) == (setting is found[0])
        estimate = Screen(known).estimate(compose.compose_run([*TIGHT, *setting.overrides]).run)
        assert estimate.time.total_s == pytest.approx(setting.planned.time.total_s, rel=0.03)
        assert estimate.plan.peak_bytes == pytest.approx(setting.planned.plan.peak_bytes, rel=0.12)


def test_a_budget_of_the_command_line_may_move_values_too(known: Recordings) -> None:
    """No run with a budget in GiB keeps everything: what it keeps says nothing about what moves would save."""
    words = [*TIGHT, "hardware.gpu_memory_gib=23.5", *TABLES, "checkpointing.budget_gib=1.5"]
    looking = Search(words, compose.compose_run(words).run, known)
    found = looking.fastest(2, pinned={*PINNED, "train.micro_batch_size"})
    assert [setting.overrides for setting in found] == [MOVES, []]


def test_layers_with_a_policy_of_their_own_keep_it_in_an_estimate_of_tables(known: Recordings) -> None:
    words = [*TIGHT, *TABLES, "checkpointing.layers={0-9: full}", "hardware.gpu_memory_gib=1.35"]
    cfg = compose.compose_run(words).run
    whole, estimate = make_plan(cfg, recordings=known), Screen(known).estimate(cfg)
    assert whole.simulation.flops[Phase.recompute] > 0 and whole.table is not None
    assert estimate.time.total_s == pytest.approx(whole.time.total_s, rel=0.03)
    assert estimate.plan.peak_bytes == pytest.approx(whole.plan.peak_bytes, rel=0.12)


def test_a_given_table_is_estimated_as_it_is_planned(known: Recordings, tmp_path: Path) -> None:
    """A search may change the strategy under it, and the best strategies count, as with any other policy."""
    table = tmp_path / "table.json"
    table.write_text(json.dumps(make_plan(compose.compose_run([*TIGHT, *MOVES]).run, recordings=known).table))
    words = [*TIGHT, *MOVES, f"checkpointing.table={table}"]
    cfg = compose.compose_run(words).run
    whole, estimate = make_plan(cfg, recordings=known), Screen(known).estimate(cfg)
    assert estimate.plan.peak_bytes == whole.plan.peak_bytes and estimate.time == whole.time
    assert estimate.simulation.moved_bytes > 0
    pinned = {"checkpointing", "train.loss", "train.micro_batch_size"}
    assert len(Search(words, cfg, known).fastest(2, pinned=pinned)) == 2


def test_moves_that_promised_more_than_they_keep_do_not_push_out_what_is_faster(
    known: Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Screen, "_movable", lambda *_: 1 << 40)
    words = [*TIGHT, "hardware.pcie_d2h_gbs=0.01", "hardware.pcie_h2d_gbs=0.01"]
    pinned = {*PINNED, "train.micro_batch_size"}
    (best,) = Search(words, compose.compose_run(words).run, known).fastest(1, pinned=pinned)
    assert best.planned.simulation.moved_bytes == 0


def test_model_states_that_do_not_fit_rule_out_no_tables_that_do(known: Recordings) -> None:
    """The bound of such a strategy has no computation: no step is as short."""
    wide = ["hidden_size=960", "intermediate_size=4096", "num_hidden_layers=6"]
    words = [*BASE, *(f"model.architecture.{size}" for size in wide), "checkpointing=budget"]
    words += ["train.seq_len=512", "hardware.gpu_memory_gib=1.5"]
    pinned = {"checkpointing", "train.loss", "train.micro_batch_size"}
    (best,) = Search(words, compose.compose_run(words).run, known).fastest(1, pinned=pinned)
    assert best.planned.plan.fits and "offload" in best.overrides[0]


def test_mlps_are_sliced_where_nothing_else_fits(known: Recordings) -> None:
    words = [*BASE[:4], "train.seq_len=16384", "model.architecture.intermediate_size=4096"]
    words += ["train.micro_batch_size=1", "train.global_batch_size=1"]
    sliced = f"checkpointing={choices.IN_SLICES}".split()
    for size_gib, fits in ((2.1, [sliced]), (1.8, [])):
        args = [*words, f"hardware.gpu_memory_gib={size_gib}"]
        found = Search(args, compose.compose_run(args).run, known).fastest(2, pinned=PINNED)
        assert [setting.overrides for setting in found] == fits
        assert all(setting.planned.plan.fits for setting in found)
    args = [*words, "hardware.gpu_memory_gib=23.5"]
    best = Search(args, compose.compose_run(args).run, known).fastest(1, pinned=PINNED)[0]
    assert best.planned.cfg.checkpointing.tiles == "1"


def test_a_budget_that_nothing_fits_is_refused_by_an_estimate_too(known: Recordings) -> None:
    words = [*BASE, "model.architecture.num_hidden_layers=16", "checkpointing=budget"]
    cfg = compose.compose_run([*words, "checkpointing.budget_gib=0.3"]).run
    with pytest.raises(budget.NoRoom):
        Screen(known).estimate(cfg)


def test_what_the_command_line_sets_stays(known: Recordings) -> None:
    args = [*BASE, "train.micro_batch_size=2", "strategy=auto"]
    found = search.choose(args, compose.compose_run(args).run, 3, known)
    assert len(found) == 3 and [s.cost for s in found] == sorted(s.cost for s in found)
    for setting in found:
        assert all(word.startswith("checkpointing=") for word in setting.overrides)
        assert setting.planned.cfg.train.micro_batch_size == 2


def test_the_command_plans_with_what_it_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    args = [*BASE, "train.micro_batch_size=2", "checkpointing=full", "strategy=auto", "deepspeed.config=zero1"]
    chosen = CliRunner().invoke(cli.app, ["plan", *args])
    assert chosen.exit_code == 0 and "strategy=auto: the settings of the recipe" in chosen.stderr
    best = CliRunner().invoke(cli.app, ["plan", "--best", "--json", *args])
    (found,) = json.loads(best.stdout)
    assert found["overrides"] == [] and found["fits"]
    text = CliRunner().invoke(cli.app, ["plan", "--best", *args]).stdout
    assert "fastest on 1x4090 with a global batch of" in text and "(no change)" in text


def test_a_machine_that_is_not_known_or_too_small_is_said(known: Recordings) -> None:
    unknown = [word for word in BASE if "hardware" not in word]
    with pytest.raises(ConfigError, match="no GPU whose speed is known: name one by hardware=NAME"):
        search.choose(unknown, compose.compose_run(unknown).run, 1, known)
    done = CliRunner().invoke(cli.app, ["plan", *unknown, "strategy=auto"])
    assert "Planned with the settings of the recipe" in done.stderr
    small = [*BASE, "hardware.gpu_memory_gib=0.7", "checkpointing=none", "train.micro_batch_size=4"]
    with pytest.raises(DoesNotFit, match=r"no ZeRO stage.* fits 1x4090; the nearest.* lacks .* of GPU memory"):
        search.choose(small, compose.compose_run(small).run, 1, known)
    assert CliRunner().invoke(cli.app, ["plan", "--best", *small]).exit_code == 3


@pytest.mark.parametrize("policy", ["full", "none"])
def test_what_a_step_gathers_is_estimated_as_it_is_planned(policy: str, known: Recordings) -> None:
    """Of few layers ZeRO-3 gathers more for each than of many: an estimate from few had 2.5 times the traffic."""
    words = [*BASE, "model.architecture.num_hidden_layers=12", "hardware=4x4090"]
    words += ["hardware.gpu_memory_gib=23.5", "deepspeed.config=zero3"]
    cfg = compose.compose_run([*words, f"checkpointing={policy}"]).run
    whole, estimate = make_plan(cfg, recordings=known), Screen(known).estimate(cfg)
    assert estimate.simulation.gathered_bytes == whole.simulation.gathered_bytes > 0
    assert estimate.time == whole.time


def test_a_model_in_a_folder_is_screened(tmp_path: Path) -> None:
    words = ["hidden_size=64", "num_hidden_layers=16"]
    sizes = {name: int(value) for name, value in (word.split("=") for word in words)}
    folder = tiny.make_model(tmp_path / "model", **sizes)
    args = [*BASE, "model=hf", f"model.path={folder}", "model.tokenizer=bytes", "train.seq_len=256"]
    args.remove("model.architecture.num_hidden_layers=2")
    cfg, known = compose.compose_run(args).run, Recordings()
    estimate = Screen(known).estimate(cfg)
    assert known.made == 1
    assert estimate.plan.peak_bytes == make_plan(cfg).plan.peak_bytes


def one_rank() -> World:
    return World(0, 1, 0, 1, torch.device("cpu"))


def test_a_launch_without_a_known_gpu_keeps_the_recipe_and_says_so() -> None:
    said: list[str] = []
    cfg = compose.compose_run(BASE).run
    assert launch_plan.choose_settings(cfg, one_rank(), words=BASE, note=said.append) is None
    assert "no GPU whose speed is known" in said[0] and "The settings of the recipe stay" in said[0]


def test_a_launch_takes_the_fastest_settings_of_its_machine(
    known: Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = [*BASE, "train.micro_batch_size=2", "deepspeed.config=zero2"]
    here = compose.compose_run(args).run
    monkeypatch.setattr(launch_plan, "Recordings", lambda: known)
    monkeypatch.setattr(launch_plan, "_hardware", lambda cfg, world: here.hardware)
    monkeypatch.setattr(launch_plan, "_command", lambda *_: ["remat", "plan", "hardware.gpu_memory_gib=0.9"])
    said: list[str] = []
    chosen = launch_plan.choose_settings(here, one_rank(), words=args, note=said.append)
    assert chosen == search.choose(args, here, 1, known)[0].overrides != []
    assert said[0].startswith(f"strategy=auto: {chosen[0]}, ") and "tokens/s planned; next: " in said[0]


def test_a_resume_takes_what_its_run_was_given(tmp_path: Path) -> None:
    cfg = replace(compose.compose_run(BASE).run, output_dir=str(tmp_path), name="mine")
    for age_s, run in enumerate(("new", "old")):
        file = tmp_path / "mine" / run / launch_plan.CHOSEN
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps([f"train.micro_batch_size={age_s + 1}"]))
        os.utime(file, (1e9 - age_s, 1e9 - age_s))
    said: list[str] = []
    found = [
        launch_plan.choose_settings(replace(cfg, **kind), one_rank(), words=BASE, note=said.append)
        for kind in (
            {"resume": "auto"},
            {"resume": "auto_or_start", "run_id": "old"},
            {"resume": str(tmp_path / "mine" / "old")},
        )
    ]
    assert found == [["train.micro_batch_size=1"], ["train.micro_batch_size=2"], ["train.micro_batch_size=2"]]
    assert "new/strategy.json has it" in said[0]


def test_a_resume_takes_the_choice_of_the_run_that_it_loads(tmp_path: Path) -> None:
    """Of the run whose state was saved last, whenever a run began; a run with given settings has no choice to take."""
    runs = [tmp_path / "mine" / name for name in ("early", "late", "given")]
    for minute, run in zip((30, 20, 40), runs, strict=True):
        state = run / "saved" / "step-000001"
        state.mkdir(parents=True)
        created = f"2026-01-01T00:{minute}:00+00:00"
        manifest.write(state, Manifest(1, 1, 1, 2, "bf16", "", False, created, {}, {}, {}))
    for run, at_s in ((runs[0], 1e9), (runs[1], 1e9 + 60)):
        (run / launch_plan.CHOSEN).write_text(json.dumps([f"deepspeed.config={run.name}"]))
        os.utime(run / launch_plan.CHOSEN, (at_s, at_s))
    cfg = replace(compose.compose_run(BASE).run, output_dir=str(tmp_path), name="mine", resume="auto")
    assert launch_plan.choose_settings(cfg, one_rank(), words=BASE, note=lambda _: None) is None
    (runs[2] / "saved").rename(tmp_path / "elsewhere")
    words = ["recipe=tiny_zero3_offload"]
    assert launch_plan.choose_settings(cfg, one_rank(), words=words, note=lambda _: None) == [
        "deepspeed.config=early"
    ]


def test_a_resume_takes_what_its_command_line_sets(tmp_path: Path) -> None:
    cfg = compose.compose_run([*BASE, f"output_dir={tmp_path}", "resume=auto"]).run
    file = tmp_path / cfg.name / "mine" / launch_plan.CHOSEN
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(["train.micro_batch_size=8", *MOVES]))
    for word, left in (
        ("train.micro_batch_size=1", MOVES),
        ("checkpointing=full", ["train.micro_batch_size=8"]),
    ):
        words = ["recipe=tiny_zero3_offload", word]
        assert launch_plan.choose_settings(cfg, one_rank(), words=words, note=lambda _: None) == left
