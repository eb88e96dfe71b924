"""The longest sequence of each rung: the search for it, and rungs that are planned as the command line would be."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from remat import cli
from remat.config import compose
from remat.config.options import ConfigError
from remat.planning.plan import Recordings, make_plan
from remat.planning.settings import ladder
from remat.planning.settings.choices import joined
from remat.planning.settings.ladder import GRANULE, Rung
from remat.report import plan as report

TWO_SMALL_GPUS = [
    "model=tiny_llama", "model.architecture.num_hidden_layers=2", "hardware=2x4090", "hardware.gpu_memory_gib=1.8",
    "train.precision=bf16", "train.micro_batch_size=1", "train.global_batch_size=2",
]  # fmt: skip


def linear(length: int) -> float:
    return 0.2 + length / 100_000


def stepped(length: int) -> float:
    """Page-locked slabs come in powers of two."""
    return 0.3 + 2.0 ** math.ceil(math.log2(length)) / 200_000


def ends(length: int) -> float:
    """A table of positions ends."""
    return 0.1 if length <= 50_000 else math.inf


@pytest.mark.parametrize("excess", [linear, stepped, ends])
@pytest.mark.parametrize("first", [GRANULE, 8192, 500_000])
def test_the_longest_length_that_fits_is_found(excess: Callable[[int], float], first: int) -> None:
    tried: list[int] = []

    def counting(length: int) -> float:
        tried.append(length)
        return excess(length)

    found = ladder.largest(counting, {}, first)
    assert excess(found) <= 1 and found % GRANULE == 0
    assert excess(found) >= ladder.USED_WELL or excess(int(found / ladder.USED_WELL) + GRANULE) > 1
    assert len(tried) <= ladder.TRIED


def test_nothing_fits() -> None:
    assert ladder.largest(lambda _: 2.0, {}, 8192) == 0
    assert ladder.largest(lambda _: math.inf, {}, 8192) == 0


@pytest.fixture(scope="module")
def rungs() -> list[Rung]:
    return ladder.climb(TWO_SMALL_GPUS, Recordings())


def test_each_rung_is_longer_and_fits_as_the_command_line_says(rungs: list[Rung]) -> None:
    names = [rung.name for rung in rungs]
    assert names == [
        "every layer recomputed",
        "flash attention: no mask",
        "MLPs in 8 slices",
        "layer inputs in host memory",
        "2 ranks share each sequence",
    ]  # the loss is in chunks and the states are in host memory already
    lengths = [rung.seq_len for rung in rungs if rung.helps]
    assert lengths == sorted(set(lengths)) and rungs[-1].helps
    for rung in rungs:
        assert rung.planned is not None and rung.planned.plan.fits
        assert rung.planned.cfg == compose.from_command_line([*TWO_SMALL_GPUS, *rung.overrides]).run


def test_a_longer_sequence_does_not_fit(rungs: list[Rung]) -> None:
    for rung in (rungs[0], rungs[-1]):
        longer = int(rung.seq_len * 1.1) // GRANULE * GRANULE + GRANULE
        words = [*TWO_SMALL_GPUS, *rung.overrides[:-1], f"train.seq_len={longer}"]
        assert not make_plan(compose.from_command_line(words).run).plan.fits
        assert rung.bound_by == "GPU memory"


def test_a_mask_is_what_flash_attention_saves(rungs: list[Rung]) -> None:
    assert rungs[1].seq_len > 2 * rungs[0].seq_len


def test_ranks_that_share_a_sequence_nearly_double_it(rungs: list[Rung]) -> None:
    longest = max(rung.seq_len for rung in rungs[:-1])
    assert 1.8 * longest < rungs[-1].seq_len < 2.2 * longest


def test_what_is_shown_names_the_longest(rungs: list[Rung]) -> None:
    console = Console(width=110, record=True)
    report.show_ladder(rungs, console, title="tiny")
    text = console.export_text()
    assert f"The longest, {rungs[-1].seq_len:,} tokens" in text
    assert f"train.seq_len={rungs[-1].seq_len}" in text


@pytest.mark.parametrize("width", [80, 120])
def test_no_number_and_no_word_is_cut_where_a_terminal_is_narrow(rungs: list[Rung], width: int) -> None:
    """The largest figures that a machine gives, too; wide terminals have a line for each rung."""
    assert rungs[-1].planned is not None
    time = replace(rungs[-1].planned.time, compute_s=355_392.0)
    longest = replace(rungs[-1], seq_len=3_595_264, planned=replace(rungs[-1].planned, time=time))
    console = Console(width=width, record=True)
    report.show_ladder([*rungs[:-1], longest], console, title="tiny")
    table = console.export_text().partition("A grey rung")[0].partition("The longest")[0]
    assert "…" not in table
    for rung in (*rungs[:-1], longest):
        assert f" {rung.seq_len:,} " in table
        assert (f" {rung.name} " in table) == (width == 120)
    words = {word for line in table.splitlines()[1:] for word in line.split()}
    assert {word for rung in rungs for word in rung.name.split()} <= words
    assert {"memory", "compute"} <= words


def test_a_model_with_a_table_of_positions_is_bound_by_it() -> None:
    words = ["model=gpt2_small", "model.architecture.n_layer=2", "hardware=1x4090", "train.global_batch_size=1"]
    first = ladder.climb(words, Recordings())[0]
    assert first.seq_len == GRANULE and "table of 1024 positions" in first.bound_by


def test_a_machine_on_which_nothing_fits_is_told_with_what_is_full() -> None:
    words = [*TWO_SMALL_GPUS, "hardware.gpu_memory_gib=0.6"]
    result = CliRunner().invoke(cli.app, ["plan", "--ladder", "--json", *words])
    assert result.exit_code == 3
    first, *others = json.loads(result.stdout)
    assert (first["seq_len"], first["bound_by"], first["plan"]) == (0, "GPU memory", None)
    assert not any(rung["seq_len"] for rung in others)


@pytest.mark.parametrize(
    "words", [["--ladder", "--best"], ["--ladder", "--plot", "x.png"], ["--ladder", "--curve"]]
)
def test_a_ladder_stands_alone(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="--ladder"):
        CliRunner().invoke(cli.app, ["plan", *words, "model=tiny_llama"], catch_exceptions=False)


def test_a_machine_of_unknown_memory_has_no_ladder() -> None:
    with pytest.raises(ConfigError, match=r"--ladder: .*hardware=NAME"):
        ladder.climb(["model=tiny_llama", "hardware=this_machine"], Recordings())


def test_a_type_to_store_on_the_host_waits_for_the_rung_that_moves() -> None:
    """`full` moves nothing, and would refuse it."""
    args = [*TWO_SMALL_GPUS, "checkpointing=offload", "checkpointing.offload.dtype=fp8"]
    asked = compose.from_command_line(args).run
    words, stored = ladder.base(asked), []
    for _, more in ladder.steps(asked):
        words = joined(words, more)
        found = compose.from_command_line([*args, *words]).run.checkpointing
        stored.append((found.offload.enabled, str(found.offload.dtype)))
    assert set(stored[:5]) == {(False, "same")} and set(stored[5:]) == {(True, "fp8")}
