"""Several nodes: which ZeRO is the fastest that fits, hpZ among them. One node: no other choices than ever."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from remat import cli
from remat.config import compose
from remat.planning.plan import GPU_MEMORY, Recordings, make_plan, needed_bytes
from remat.planning.settings import choices, sharding
from remat.planning.settings.search import Search

TINY = ["recipe=tiny_zero3_offload", "hardware=8xh100-80", "model.architecture.num_hidden_layers=2"]
TWO_NODES = [*TINY, "hardware.num_nodes=2", "train.global_batch_size=64"]
SLOW = [*TWO_NODES, "hardware.nic_gbs=0.05"]
ZERO = "deepspeed.overrides.zero_optimization"
HPZ = f"{ZERO}.zero_hpz_partition_size=8"
PINNED = {"train.loss", "train.micro_batch_size", "checkpointing"}


@pytest.fixture(scope="module")
def known() -> Recordings:
    return Recordings()


def words_of(args: list[str]) -> list[tuple[str, ...]]:
    found = choices.strategies(compose.compose_run(args).run)
    return [option.words for option in found if option]


def test_only_several_nodes_have_a_second_copy_among_their_choices() -> None:
    assert not [words for words in words_of(TINY) if "hpz" in " ".join(words)]
    assert [words for words in words_of(TWO_NODES) if HPZ in words] == [
        ("deepspeed.config=zero3", HPZ),
        (HPZ,),  # of zero3_offload, which the recipe has
        ("deepspeed.config=zero3_offload_optimizer", HPZ),
    ]
    shared = [*TWO_NODES, "train.tensor_parallel_size=2"]
    assert not [words for words in words_of(shared) if "hpz" in " ".join(words)]
    assert ("deepspeed.config=zero2", f"{ZERO}.zero_hpz_partition_size=null") in words_of([*TWO_NODES, HPZ])


@pytest.mark.parametrize("args", [TWO_NODES, [*TWO_NODES, HPZ]])
def test_words_and_changes_are_the_same(args: list[str]) -> None:
    cfg = compose.compose_run(args).run
    for option in filter(None, choices.strategies(cfg)):
        assert compose.compose_run([*args, *option.words]).run.deepspeed == option.apply(cfg).deepspeed


def test_the_way_to_take_is_the_fastest_of_whole_plans(known: Recordings) -> None:
    cfg = compose.compose_run(SLOW).run
    ways = sharding.compare(cfg, known)
    assert [way.name for way in ways] == ["ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3 with hpZ"]
    whole = {
        way.name: make_plan(compose.compose_run([*SLOW, *way.setting.overrides]).run, recordings=known)
        for way in ways
    }
    for way in ways:
        assert way.setting.planned.time.total_s == pytest.approx(whole[way.name].time.total_s)
    (taken,) = [way.name for way in ways if way.is_taken]
    assert taken == min(whole, key=lambda name: whole[name].time.total_s)


def test_a_way_that_does_not_fit_is_not_taken(known: Recordings) -> None:
    args = [*SLOW, "hardware.gpu_memory_gib=0.9"]
    ways = sharding.compare(compose.compose_run(args).run, known)
    assert not [way.name for way in ways if way.is_taken]
    assert all(not way.setting.planned.plan.fits for way in ways)


def test_the_search_takes_the_second_copy_where_the_network_is_slow_and_no_other_fits(
    known: Recordings,
) -> None:
    args = ["recipe=llama8b_full_8x80", "model.architecture.num_hidden_layers=2", "checkpointing=full"]
    args += ["train.seq_len=1024", "hardware.num_nodes=2", "hardware.nic_gbs=5", "hardware.gpu_memory_gib=10"]
    best = Search(args, compose.compose_run(args).run, known).fastest(1, pinned=PINNED)[0]
    assert best.overrides == [HPZ]
    plain = make_plan(compose.compose_run(args).run, recordings=known)
    assert best.planned.time.total_s < plain.time.total_s
    assert needed_bytes(best.planned, GPU_MEMORY) > needed_bytes(plain, GPU_MEMORY)


def test_the_command_says_which_to_take_on_several_nodes_alone() -> None:
    found = CliRunner().invoke(cli.app, ["plan", "--no-advice", "--json", *SLOW])
    ways = json.loads(found.stdout)["zero_of_nodes"]
    assert [way["sharding"] for way in ways if way["taken"]] and all("step_time_s" in way for way in ways)
    text = CliRunner().invoke(cli.app, ["plan", "--no-advice", *SLOW]).stdout
    assert "ZeRO on 2 nodes" in text and "the one to take" in text and f"ZeRO-3 with hpZ: {HPZ}" in text
    one = CliRunner().invoke(cli.app, ["plan", "--no-advice", "--json", *TINY, "train.global_batch_size=64"])
    assert json.loads(one.stdout)["zero_of_nodes"] == []
