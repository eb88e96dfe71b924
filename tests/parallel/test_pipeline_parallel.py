"""Layers divided into stages: how, for which models, what is refused, and what a plan says of each stage."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from remat.activation_checkpointing.mechanisms.counters import PolicyNotApplied
from remat.activation_checkpointing.replay import Replayed
from remat.config import compose
from remat.config.options import ConfigError
from remat.config.units import GIB
from remat.parallel.pipeline_parallel import SLOWER_WITHIN, Stages, divide, keep_stage
from remat.planning import strategy, sweep
from remat.planning.plan import GPU_MEMORY, Category, Recordings, make_plan
from remat.training import proof
from remat.training.proof import FirstStep
from tests.support import tiny

KNOWN = Recordings()
STAGED = ["train.pipeline_parallel_size=2", "deepspeed.config=zero1"]
SIZES: dict[str, Any] = {
    "pad_token_id": None,
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
}


def decide(*words: str, ranks: int = 2) -> strategy.Strategy:
    base = ["recipe=tiny_zero3_offload", "train.micro_batch_size=1", "train.global_batch_size=8", *STAGED]
    cfg = compose.from_command_line([*base, *words]).run
    return strategy.decide(cfg, world_size=ranks, can_pin=False)


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        decide(*words)
    return str(error.value)


def slowest(borders: tuple[int, ...], times: list[float], ends: tuple[float, float]) -> float:
    sums = [sum(times[a:b]) for a, b in itertools.pairwise(borders)]
    return max([sums[0] + ends[0], *sums[1:-1], sums[-1] + ends[1]])


@pytest.mark.parametrize("seed", range(4))
def test_no_division_is_faster_or_equally_fast_and_less_full(seed: int) -> None:
    rng = random.Random(seed)
    times, kept = ([rng.choice([1.0, 1.3, 2.0]) for _ in range(9)] for _ in range(2))
    ends, size = (0.0, rng.random() * 3), 3

    def fullest(borders: tuple[int, ...]) -> float:
        return max((size - s) * sum(kept[a:b]) for s, (a, b) in enumerate(itertools.pairwise(borders)))

    every = [(0, *inner, 9) for inner in itertools.combinations(range(1, 9), size - 1)]
    best = min(slowest(borders, times, ends) for borders in every)
    as_fast = [borders for borders in every if slowest(borders, times, ends) <= SLOWER_WITHIN * best]
    found = divide(times, kept, ends, size).borders
    assert found in as_fast
    assert fullest(found) == min(map(fullest, as_fast))


def test_an_output_layer_takes_layers_from_the_last_stage() -> None:
    assert divide([1.0] * 8, [1.0] * 8, (0.0, 0.0), 2).depths == [4, 4]
    assert divide([1.0] * 8, [1.0] * 8, (0.0, 2.0), 2).depths == [5, 3]


def test_1f1b_holds_fewer_micro_batches_in_later_stages() -> None:
    stages = Stages((0, 2, 4, 6, 8))
    assert [stages.in_flight(stage, 16) for stage in range(4)] == [4, 3, 2, 1]
    assert [stages.in_flight(stage, 2) for stage in range(4)] == [2, 2, 2, 1]
    assert stages.bubble(13) == 3 / 16


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "olmo2", "gpt2", "gpt_neox", "opt"]
)
def test_stages_together_are_the_model(model_type: str) -> None:
    """Every weight is in a stage, and none but a tied one in two."""
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, num_hidden_layers=3, **SIZES))
    names = [name for name, _ in net.named_parameters()]
    held: list[str] = []
    for stage in range(2):
        torch.manual_seed(0)
        part = AutoModelForCausalLM.from_config(net.config)
        keep_stage(part, Stages((0, 2, 3)), stage)
        held += [name for name, _ in part.named_parameters() if name in names]
    assert sorted(held) == sorted(names)


REFUSED = {
    "deepspeed.config=zero2": "with ZeRO stage 2: DeepSpeed's pipeline engine sums gradients once",
    "deepspeed.config=zero3_offload": "with ZeRO stage 3: .*\n.*with optimizer on cpu: .*\n.*with parameters on cpu: ",
    "train.tensor_parallel_size=2": "train.tensor_parallel_size=2: .*set one of them to 1",
    "train.sequence_parallel_size=2": "train.sequence_parallel_size=2: .*set one of them to 1",
    "peft=lora": "peft.method=lora: .*use peft=none",
    "train.precision=fp16": "train.precision=fp16: .*use bf16 or fp32",
    "optim.name=adamw_8bit": "optim.name=adamw_8bit: .*use optim=adamw",
    "compile=layers": "compile=layers: .*use compile=none",
    "strategy=auto": "strategy=auto: .*use strategy=given",
    "checkpointing=deepspeed": "checkpointing=deepspeed: .*use checkpointing=full",
    "checkpointing=budget checkpointing.offload.enabled=true": "checkpointing.offload: .*use checkpointing=full",
    "checkpointing=offload": "checkpointing.offload: .*use checkpointing=full",
    "checkpointing=full checkpointing.reentrant=true": "checkpointing.reentrant=true: .*leave it out",
    "train.global_batch_size=1": "with 1 micro-batches per step: .*has at least 2",
    "model.architecture.num_hidden_layers=1": "LlamaForCausalLM has 1 layer; give at most 1",
    "train.pipeline_parallel_size=0": "train.pipeline_parallel_size=0",
    "deepspeed.overrides.pipeline.stages=2": "stages are asked for by train.pipeline_parallel_size: delete",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_stages_cannot_is_refused_with_a_remedy(words: str) -> None:
    assert re.search(REFUSED[words], refusal(*words.split()), re.DOTALL)


def plan(stages: int, blocks: int, *words: str) -> Any:
    """Plan on eight GPUs, in micro-batches of one block."""
    staged = [f"train.pipeline_parallel_size={stages}", "deepspeed.config=zero1", "train.micro_batch_size=1"]
    more = ["hardware=8x4090", f"train.global_batch_size={blocks}", "train.seq_len=512", *staged, *words]
    return make_plan(compose.from_command_line([*tiny.ON_A_4090, *more]).run, recordings=KNOWN)


def test_a_plan_tells_of_each_stage() -> None:
    planned = plan(4, 32, "train.precision=bf16", "model.architecture.num_hidden_layers=8")
    assert [stage.in_flight for stage in planned.stages] == [4, 3, 2, 1]
    layers = [(stage.first_layer, stage.last_layer) for stage in planned.stages]
    assert [layer for first, last in layers for layer in range(first, last + 1)] == list(range(8))
    inner = planned.stages[1]
    assert inner.plan.gpu[Category.activations] >= (inner.in_flight - 1) * inner.kept_bytes
    assert planned.plan.peak_bytes == max(stage.plan.peak_bytes for stage in planned.stages)
    hidden = 512 * planned.strategy.fields["hidden_size"] * 2  # of one micro-batch, in bf16
    accumulation = 32 // 2
    assert [stage.sent_bytes for stage in planned.stages] == [n * accumulation * hidden for n in (1, 2, 2, 1)]


def test_a_broken_promise_says_which_layers_of_the_model_it_is_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof.engine_memory, "find_placement", Mock())
    monkeypatch.setattr(proof.engine_memory, "unmet_expectations", Mock(return_value=["host memory"]))
    monkeypatch.setattr(proof.verification, "rows", Mock(return_value=[]))
    monkeypatch.setattr(proof.verification, "unmet_expectations", Mock(return_value=["layer 1 was kept"]))
    run, first = MagicMock(), MagicMock(shape=(1, 8))
    run.cfg.train.micro_batch_size, run.cfg.train.seq_len, run.pipeline.first_layer = 1, 8, 4
    told = "in a stage whose layer 0 is the model's layer 4, layer 1 was kept"
    assert proof.collect(run, first)[1] == [told, "host memory"]


def test_a_layer_that_computes_another_value_is_named_by_its_place_in_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proof.distributed, "gather", lambda mine: [mine])
    run, recorder = MagicMock(), MagicMock()
    run.pipeline.first_layer, run.world.is_main = 4, False
    recorder.ready.return_value = [0]
    recorder.replay.return_value = Replayed(
        differences=["layer 1: its result differs"], notes=["layer 0: no result"]
    )
    where = "in a stage whose layer 0 is the model's layer 4"
    with pytest.raises(PolicyNotApplied, match=f"rank 0: {where}, layer 1: its result differs"):
        proof.replay(run, FirstStep(), recorder)
    run.console.warning.assert_called_once_with(f"not proven: {where}, layer 0: no result")


def test_more_micro_batches_wait_less() -> None:
    few, many = (plan(2, 4 * count).time for count in (8, 64))
    assert many.pipeline_s / many.total_s < few.pipeline_s / few.total_s
    assert many.compute_s == pytest.approx(8 * few.compute_s)


def test_a_router_loss_is_refused() -> None:
    moe: list[Any] = ["model.architecture.model_type=mixtral", "train.router_aux_loss_coef=0.01"]
    assert "with stages: the last one, which has the loss, does not know the routers" in refusal(*moe)


DEEP = ["train.precision=bf16", "model.architecture.num_hidden_layers=8", "train.seq_len=2048"]
BUDGET = "checkpointing=budget"


def peaks(*words: str) -> list[int]:
    """Return what each of four stages needs of its GPU."""
    return [needed_bytes(stage.plan) for stage in plan(4, 32, *DEEP, *words).stages]


def needed_bytes(planned: Any) -> int:
    (size,) = (resource.needed_bytes for resource in planned.resources if resource.name == GPU_MEMORY)
    return int(size)


@pytest.fixture(scope="module")
def halfway() -> Any:
    """The plan of a budget halfway between the peaks of full and of none, and the budget."""
    least, most = (max(peaks(f"checkpointing={name}")) for name in ("full", "none"))
    limit = (least + most) // 2
    return plan(4, 32, *DEEP, BUDGET, f"checkpointing.budget_gib={limit / GIB:.12f}"), limit


def test_a_budget_is_for_each_stage_and_the_first_ones_keep_least(halfway: Any) -> None:
    planned, limit = halfway
    assert all(needed_bytes(stage.plan) <= limit for stage in planned.stages)
    kept = [stage.kept_bytes for stage in planned.stages]
    again = [stage.recomputed_share for stage in planned.stages]
    assert kept[0] < kept[1] <= kept[2]  # layers as many; the last stage has an output layer
    assert again == sorted(again, reverse=True) and again[0] > again[-1] == 0
    slowest = max(stage.micro_batch_s for stage in planned.stages)
    assert planned.time.compute_s + planned.time.recompute_s == pytest.approx(16 * slowest)
    full = plan(4, 32, *DEEP, "checkpointing=full")
    assert planned.time.total_s < full.time.total_s
    assert planned.strategy.stages == full.strategy.stages


def test_the_division_of_a_budget_is_that_of_keeping_all(halfway: Any) -> None:
    assert halfway[0].strategy.stages == plan(4, 32, *DEEP, "checkpointing=none").strategy.stages


def test_a_table_of_stages_can_be_given_back(halfway: Any, tmp_path: Path) -> None:
    planned, _ = halfway
    path = tmp_path / "table.json"
    path.write_text(json.dumps(planned.table))
    given = plan(4, 32, *DEEP, BUDGET, f"checkpointing.table={path}")
    assert given.strategy.decisions == planned.strategy.decisions
    assert [stage.plan.peak_bytes for stage in given.stages] == [s.plan.peak_bytes for s in planned.stages]
    moving = json.loads(path.read_text())
    entry = next(entry for entry in moving["layers"].values() if entry.get("keep"))
    entry["offload"], entry["keep"] = entry["keep"], {}
    path.write_text(json.dumps(moving))
    with pytest.raises(ConfigError, match=r"layers .* move values to the host, .*leave `offload` empty"):
        plan(4, 32, *DEEP, BUDGET, f"checkpointing.table={path}")


def test_a_budget_that_a_stage_cannot_keep_names_it_and_the_least() -> None:
    with pytest.raises(
        ConfigError, match=r"stage 0 \(layers 0-\d, 4 micro-batches at once\) [0-9.]+ GiB"
    ) as refused:
        plan(4, 32, *DEEP, BUDGET, "checkpointing.budget_gib=0.01")
    assert "stage 3 (layers" in str(refused.value)
    would_do = str(refused.value).partition("set ")[2].partition(",")[0]
    assert plan(4, 32, *DEEP, BUDGET, would_do).stages


def test_a_stage_without_tables_counts_against_the_budget_too() -> None:
    """The first stage's layers keep all, whatever the budget is."""
    least, most = peaks("checkpointing=full")[0], peaks("checkpointing=none")[0]
    limit = f"checkpointing.budget_gib={(least + most) / 2 / GIB:.12f}"
    with pytest.raises(ConfigError, match=r"stage 0 .* GiB; set") as refused:
        plan(4, 32, *DEEP, BUDGET, limit, "checkpointing.layers={0-2: none}")
    assert "stage 1" not in str(refused.value)


def test_all_of_a_gpu_is_a_budget_too() -> None:
    planned = plan(4, 32, *DEEP, BUDGET)
    assert all(stage.recomputed_share == 0 for stage in planned.stages)


def test_there_is_no_curve_of_stages() -> None:
    with pytest.raises(
        ConfigError, match=r"train.pipeline_parallel_size=2 with --curve: each stage has tables"
    ):
        sweep.curve([*tiny.ON_A_4090, "hardware=8x4090", "train.global_batch_size=32", *STAGED])
