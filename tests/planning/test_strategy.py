"""Every shipped recipe is decided completely, and its model states fit the machine it names."""

from __future__ import annotations

import functools
import json
import re

import pytest

from remat.config import compose
from remat.config.options import ConfigError, PeftMethod, Precision, RunConfig
from remat.config.units import GIB
from remat.planning import preflight, strategy
from tests.model.test_model_shapes import PUBLISHED


def published(name: str) -> int:
    """Parameters of the model that a recipe trains, adapters left out."""
    model = re.search(r"override /model: (\S+)", (compose.RECIPE_DIR / f"{name}.yaml").read_text())
    assert model is not None
    return 1_720_000 if model[1] == "tiny_llama" else PUBLISHED[model[1]][0]


@functools.cache
def recipe(name: str) -> tuple[RunConfig, strategy.Strategy, int]:
    run = compose.compose_run([f"recipe={name}"]).run
    ranks = (run.hardware.gpus_per_node or 2) * run.hardware.num_nodes
    return run, strategy.decide(run, world_size=ranks, can_pin=run.hardware.gpu is not None), ranks


@pytest.mark.sample(one_in=8)
@pytest.mark.parametrize("name", compose.recipe_names())
def test_every_recipe_renders_completely(name: str) -> None:
    run, decided, ranks = recipe(name)
    adapters = 0.0 if run.peft.method is PeftMethod.none else 0.02
    assert 0.998 <= decided.facts.num_params / published(name) <= 1.002 + adapters
    assert '"auto"' not in json.dumps(decided.ds)
    readers = ranks // run.train.sequence_parallel_size  # those that share sequences read them together
    batch = decided.ds["train_micro_batch_size_per_gpu"] * decided.ds["gradient_accumulation_steps"] * readers
    assert batch == run.train.global_batch_size
    if readers == ranks:  # else DeepSpeed, which divides by all ranks, is not told
        assert batch == decided.ds["train_batch_size"]
    layers = run.model.architecture.get("num_hidden_layers") or run.model.architecture["n_layer"]
    assert len(decided.decisions) == layers
    assert decided.ds["bf16"]["enabled"] is (run.train.precision is Precision.bf16)


@pytest.mark.sample(one_in=8)
@pytest.mark.parametrize("name", [n for n in compose.recipe_names() if not n.startswith("tiny")])
def test_every_recipe_fits_the_machine_it_names(name: str) -> None:
    run, decided, ranks = recipe(name)
    per_node = run.hardware.gpus_per_node
    assert per_node and run.hardware.host_memory_gib and run.hardware.gpu_memory_gib
    items = decided.model_states(data_ranks=ranks, ranks_per_node=per_node, can_pin=True)
    needs = preflight.count_needs(
        items, num_params=decided.facts.num_params, ds=decided.ds, ranks_per_node=per_node, save=run.save,
        steps=run.train.steps,
    )  # fmt: skip
    assert needs.host_bytes < run.hardware.host_memory_gib * GIB
    assert needs.gpu_bytes < run.hardware.gpu_memory_gib * GIB


def test_a_batch_that_does_not_divide_names_all_three() -> None:
    run = compose.compose_run(["train.global_batch_size=16", "train.micro_batch_size=4"]).run
    with pytest.raises(ConfigError) as caught:
        strategy.decide(run, world_size=3, can_pin=False)
    for part in ("train.global_batch_size=16", "train.micro_batch_size=4", "3"):
        assert part in str(caught.value)


def test_eight_bits_and_a_router_are_refused() -> None:
    words = ["model=mixtral_8x7b", "checkpointing=offload", "checkpointing.offload.dtype=int8"]
    run = compose.compose_run(words).run
    with pytest.raises(ConfigError, match="choose other experts"):
        strategy.decide(run, world_size=1, can_pin=True)


SKIPS = [
    "model.architecture.model_type=opt",
    "model.architecture.layerdrop=0.25",
    "model.architecture.num_hidden_layers=4",
]


def with_layerdrop(*more: str) -> RunConfig:
    return compose.compose_run(["model=hf", "model.init=random", "model.tokenizer=bytes", *SKIPS, *more]).run


@pytest.mark.parametrize("mode", ["none", "full", "deepspeed"])
def test_layers_skipped_at_random_are_refused_on_several_ranks(mode: str) -> None:
    """Each rank skips others: ZeRO-2 aborts in gloo, ZeRO-3 hangs."""
    run = with_layerdrop(f"checkpointing={mode}")
    strategy.decide(run, world_size=1, can_pin=False)
    with pytest.raises(ConfigError, match=r"layerdrop=0.25 .* each of the 2 ranks others.* set it to 0"):
        strategy.decide(run, world_size=2, can_pin=False)


@pytest.mark.parametrize("mode", ["uniform", "sqrt"])
def test_segments_of_layers_skipped_at_random_are_refused_on_one_rank(mode: str) -> None:
    with pytest.raises(ConfigError, match=f"checkpointing={mode}: layerdrop=0.25 .* use checkpointing=full"):
        strategy.decide(with_layerdrop(f"checkpointing={mode}"), world_size=1, can_pin=False)
