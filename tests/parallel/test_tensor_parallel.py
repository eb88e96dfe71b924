"""Layers shared between ranks: who can, who cannot and why, and what each rank then holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from remat.config import compose
from remat.config.options import ConfigError
from remat.machine.distributed import World
from remat.parallel import tensor_parallel
from remat.planning import strategy
from tests.support.pool import RankPool

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SHARED = [
    "train.tensor_parallel_size=2",
    "deepspeed.config=zero2",
]


def skeleton(model_type: str, **more: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(SIZES | more)))


def held(model_type: str, tied: bool, zero_stage: int) -> list[int]:
    """What AutoTP leaves on this rank, parameter by parameter."""
    import deepspeed
    from deepspeed.utils import groups as deepspeed_groups

    groups: Any = deepspeed_groups

    _, group = tensor_parallel.join(World(0, 2, 0, 2, torch.device("cpu")), 2)
    assert group is groups is not None
    config = AutoConfig.for_model(model_type, tie_word_embeddings=tied, **SIZES)
    net = AutoModelForCausalLM.from_config(config)
    tensor_parallel.prepare(net, 2)
    ds = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": zero_stage}}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=optimizer,
        config=tensor_parallel.rendered(ds, 2) | {"zero_allow_untested_optimizer": True},
        mpu=group,
        dist_init_required=False,
    )
    found = [p.ds_numel if hasattr(p, "ds_numel") else p.numel() for p in engine.module.parameters()]
    engine.destroy()
    tensor_parallel.join(World(0, 2, 0, 2, torch.device("cpu")), 1)
    assert groups._TENSOR_MODEL_PARALLEL_GROUP is None and groups.mpu is None
    return found


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize("zero_stage", [2, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "phi", "gpt_neox"])
def test_what_a_rank_holds_is_known_before(
    two_ranks: RankPool, model_type: str, tied: bool, zero_stage: int
) -> None:
    model = skeleton(model_type, tie_word_embeddings=tied)
    expected = tensor_parallel.sizes_per_rank(model, 2)
    assert sum(expected) < sum(p.numel() for p in model.parameters())
    for rank in two_ranks.run(held, model_type=model_type, tied=tied, zero_stage=zero_stage):
        assert rank == expected


def test_one_rank_holds_everything() -> None:
    model = skeleton("llama")
    assert tensor_parallel.sizes_per_rank(model, 1) == [p.numel() for p in model.parameters()]


@pytest.mark.parametrize(
    ("model_type", "more", "size", "text"),
    [
        ("gpt2", {}, 2, "transformers has no plan for GPT2LMHeadModel"),
        ("mixtral", {}, 2, "AutoTP cannot split moe_tp_experts, packed_colwise for MixtralForCausalLM"),
        ("llama", {"num_attention_heads": 4, "num_key_value_heads": 1}, 2, "num_key_value_heads=1"),
        (
            "llama",
            {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 62},
            4,
            "gate_proj",
        ),
        ("llama", {}, 3, "num_attention_heads=4, num_key_value_heads=4"),
    ],
)
def test_models_that_cannot_be_shared(model_type: str, more: dict[str, Any], size: int, text: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.tensor_parallel_size=") as caught:
        tensor_parallel.check(size, skeleton(model_type, **more), world_size=2 * size, zero_stage=2)
    assert text in str(caught.value)
    assert "use " in str(caught.value)


def test_runs_that_cannot_share() -> None:
    with pytest.raises(ConfigError, match="3 ranks cannot be divided into groups of 2"):
        tensor_parallel.check(2, skeleton("llama"), world_size=3, zero_stage=2)
    with pytest.raises(ConfigError, match="ZeRO stage 0"):
        tensor_parallel.check(2, skeleton("llama"), world_size=2, zero_stage=0)
    with pytest.raises(ConfigError, match="swap files"):
        tensor_parallel.check(2, skeleton("llama"), world_size=2, zero_stage=3, on_nvme=True)
    tensor_parallel.check(1, skeleton("gpt2"), world_size=3, zero_stage=0)


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("peft=lora", "peft.method=lora with"),
        ("train.tensor_parallel_size=0", "train.tensor_parallel_size=0 is too small"),
    ],
)
def test_options_that_do_not_go_with_it(word: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose.compose_run([*SHARED, word])
    assert text in str(caught.value)


def test_a_strategy_counts_groups_not_ranks() -> None:
    shape = ["model.architecture.num_attention_heads=6", "model.architecture.num_key_value_heads=2"]
    words = [*SHARED, *shape, "train.global_batch_size=8", "train.micro_batch_size=2"]
    decided = strategy.decide(compose.compose_run(words).run, world_size=4, can_pin=False)
    assert decided.ds["gradient_accumulation_steps"] == 2
    assert decided.ds["tensor_parallel"] == {"autotp_size": 2, "vocab_parallel_lm_head": False}
    assert "train_batch_size" not in decided.ds
    assert decided.held.num_params < decided.facts.num_params
    alone = strategy.decide(
        compose.compose_run([word for word in words if "tensor_parallel" not in word]).run,
        world_size=4,
        can_pin=False,
    )
    assert "tensor_parallel" not in alone.ds
    assert alone.held == alone.facts == decided.facts


def test_consecutive_ranks_are_a_group() -> None:
    worlds = [World(rank, 4, rank, 4, torch.device("cpu"), tensor_parallel_size=2) for rank in range(4)]
    assert [world.data_rank for world in worlds] == [0, 0, 1, 1]
    assert {world.data_size for world in worlds} == {2}
