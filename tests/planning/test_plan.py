"""`remat plan`: every shipped recipe fits the machine it names; what does not fit is said, by how much."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from remat import cli
from remat.config import compose
from remat.config.options import ConfigError
from remat.config.units import GIB
from remat.machine import gpus
from remat.planning.plan import Planned, Recordings, make_plan, plan_as_json
from remat.planning.settings import search
from remat.planning.simulation.types import Category, Phase
from remat.planning.sweep import is_timed
from tests.support.grids import cases

IN_SAMPLE = {"llama8b_full_8x80", "tiny_zero3_offload"}
KNOWN = Recordings()  # plans of one model share what was recorded of it


def plan(*words: str) -> Planned:
    return make_plan(compose.compose_run(list(words)).run, recordings=KNOWN)


@pytest.mark.parametrize("recipe", cases(compose.recipe_names(), set(compose.recipe_names()) - IN_SAMPLE))
def test_each_recipe_fits_its_named_machine(recipe: str) -> None:
    planned = plan(f"recipe={recipe}")
    assert planned.plan.fits, planned.plan.verdict
    assert sum(planned.plan.gpu.values()) == planned.plan.resources[0].needed_bytes
    assert planned.time.total_s >= 0
    said = compose.compose_run([f"recipe={recipe}"]).run.meta.planned  # as `remat recipes` shows it
    if planned.cfg.hardware.gpu is None:
        assert not said
        return
    assert said["gpu_gib"] == round(planned.plan.resources[0].needed_bytes / GIB, 1)
    speed = planned.time.tokens_per_s if is_timed(planned) else 0
    assert said.get("tokens_per_s", 0) == pytest.approx(speed, rel=0.005)


def test_what_only_the_data_tells_is_said_and_not_guessed() -> None:
    words = ["recipe=tiny_zero3_offload", "save.every=50"]
    known = plan(*words)
    unknown = plan(*words, "train.epochs=3", "data=alpaca", "data.path=rows.jsonl")
    added = set(unknown.plan.assumptions) - set(known.plan.assumptions)
    assert sorted(text.split(":")[0] for text in added) == [
        "every micro-batch is full, which is the most it can be",
        "train.epochs=3",
    ]
    assert unknown.plan.saved_state_bytes == known.plan.saved_state_bytes > 0, (
        "three states at most, both times"
    )


def test_the_parts_of_an_8b_plan() -> None:
    """By hand: 8.03 B parameters in bf16 over 8 ranks, moments and master copy on the host."""
    planned = plan("recipe=llama8b_zero3_offload_optimizer", "train.seq_len=4096")
    share = 8_030_261_248 / 8
    assert planned.plan.gpu[Category.weights] == pytest.approx(2 * share, rel=1e-3)
    assert planned.plan.host["moments"] == pytest.approx(8 * share, rel=1e-3)
    assert planned.plan.host["master parameters"] == pytest.approx(4 * share, rel=1e-3)
    inputs = 31 * 4096 * 4096 * 2  # full: one hidden state per layer, the last layer's output is not kept
    assert sum(planned.simulation.kept_bytes) == inputs
    assert Category.optimizer_state not in planned.plan.gpu


def test_the_peak_of_an_update_counts_its_copies_of_the_gradients() -> None:
    """ZeRO-2 makes its bf16 gradients flat, then fp32, at the step. Without ZeRO fp32 needs no copy and no master."""
    words = [
        "model=gpt2_small",
        "hardware=1x4090",
        "data=synthetic",
        "deepspeed.config=zero2",
        "train.seq_len=8",
    ]
    words += ["train.micro_batch_size=1", "train.global_batch_size=1", "checkpointing=full"]
    mixed = plan(*words)
    plain = plan(*words, "train.precision=fp32", "deepspeed.overrides.zero_optimization.stage=0")
    params = mixed.strategy.facts.num_params
    assert mixed.plan.peak.phase is Phase.step and mixed.plan.peak_bytes == pytest.approx(22 * params, rel=0.01)
    assert plain.plan.peak.phase is not Phase.step and plain.plan.peak_bytes < 18 * params


def test_what_does_not_fit_says_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "advise", lambda args, planned, **_: search.Advice([], None))
    words = ["recipe=llama8b_zero3_offload_optimizer", "hardware=1x4090", "checkpointing=none"]
    planned = plan(*words)
    gpu = planned.plan.resources[0]
    assert not gpu.fits and gpu.spare_bytes is not None and gpu.spare_bytes < 0
    result = CliRunner().invoke(cli.app, ["plan", *words])
    assert result.exit_code == 3
    assert "does not fit, by" in result.output


def test_more_tokens_need_more_memory_and_less_is_kept_with_checkpointing() -> None:
    words = ["recipe=llama8b_zero3_offload_optimizer"]
    short, long = (plan(*words, f"train.seq_len={n}").plan.peak_bytes for n in (1024, 4096))
    none = plan(*words, "train.seq_len=4096", "checkpointing=none").plan.peak_bytes
    assert short < long < none
    assert none - long > 20 * GIB


def test_adapters_need_less() -> None:
    full, adapted = (
        plan("recipe=llama8b_zero3_offload_optimizer", "model.architecture.num_hidden_layers=8", *more).plan
        for more in ([], ["peft=lora"])
    )
    assert sum(adapted.host.values()) < 0.5 * sum(full.host.values())


def test_the_command_prints_tables_and_json() -> None:
    text = CliRunner().invoke(cli.app, ["plan", "recipe=tiny_zero3_offload"]).output
    for word in (
        "GPU at its peak",
        "GiB per rank",
        "kept activations",
        "step time: not known",
        "saved states on disk",
    ):
        assert word in text
    found: dict[str, Any] = json.loads(
        CliRunner().invoke(cli.app, ["plan", "--json", "recipe=tiny_zero3_offload"]).output
    )
    assert found["fits"] is True
    assert found["gpu_allocated_peak_bytes"] > 0
    assert {row["name"] for row in found["resources"]} == {"GPU memory", "host memory per node"}


def test_sums_over_ranks_that_share_layers_take_their_time() -> None:
    """In a micro-batch each layer sums twice in forward and thrice in backward: q, k and v, then gate and up, apart.

    With checkpointing=none nothing is summed again. The output layer, which they share too, sums the gradient of the
    hidden states, and three fp32 numbers of each token in the loss.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    words = [f"model.architecture.{name}={size}" for name, size in sizes.items()]
    words += ["recipe=tiny_zero3_offload", "deepspeed.config=zero2", "checkpointing=none", "hardware=4x4090"]
    words += ["train.seq_len=128", "train.micro_batch_size=2", "model.architecture.num_hidden_layers=3"]
    made = plan(*words, "train.tensor_parallel_size=2")
    tokens, layers = 2 * 128, 3
    hidden_bytes = tokens * 64 * 2
    assert made.simulation.summed_bytes == (layers * (2 + 5) + 1) * hidden_bytes + tokens * 3 * 4
    accumulation = made.strategy.ds["gradient_accumulation_steps"]
    seconds = accumulation * made.simulation.summed_bytes / (gpus.machine(made.cfg.hardware).gpu_link_gbs * 1e9)
    assert made.time.collectives_s > seconds
    alone = plan(*words)
    assert alone.simulation.summed_bytes == 0
    states = [made.plan.states["weights"] for made in (made, alone)]
    assert states[0] < states[1]


def test_each_optimizer_is_planned_with_its_own_state() -> None:
    """Of 8.03 B parameters over 8 ranks: 8 bytes each, 2 and constants, 4; what is paged lies in host memory."""
    share, words = 8_030_261_248 / 8, ["recipe=llama8b_zero3_offload_optimizer", "deepspeed.config=zero3"]
    plans = {
        name: plan(*words, f"optim.name={name}") for name in ("adamw", "adamw_8bit", "paged_adamw_8bit", "lion")
    }
    state = {name: found.plan.gpu[Category.optimizer_state] / share - 4 for name, found in plans.items()}
    assert state == pytest.approx(
        {"adamw": 8, "adamw_8bit": 2 + 8 / 256, "paged_adamw_8bit": 8 / 256, "lion": 4}, rel=1e-3, abs=1e-4
    )
    assert plans["paged_adamw_8bit"].plan.host["paged moments"] == pytest.approx(2 * share, rel=1e-3)
    saved = {name: found.plan.saved_state_bytes for name, found in plans.items()}
    assert saved["lion"] / saved["adamw"] == pytest.approx(8 / 12, rel=1e-3)
    assert saved["adamw_8bit"] == saved["paged_adamw_8bit"]
    assert plans["lion"].time.optimizer_s < plans["adamw"].time.optimizer_s
    assert plan_as_json(plans["lion"])["optimizer"] == "lion"
    with pytest.raises(ConfigError, match=r"offload_optimizer\.device=cpu: DeepSpeed steps on the host with"):
        plan(words[0], "optim.name=adamw_8bit")
