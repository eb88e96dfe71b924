"""Layers shared between ranks: who can, who cannot and why, and what each rank then holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from remat.config import compose
from remat.config.options import ConfigError, LossKind, PeftConfig, PeftMethod
from remat.machine.distributed import World
from remat.model import adapters
from remat.model.layers import decoder_layers
from remat.parallel import tensor_parallel
from remat.planning import strategy
from remat.saving.exports import export
from tests.support.pool import RankPool

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
ADAPTED = SIZES | {"num_key_value_heads": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0}
SHARED = [
    "train.tensor_parallel_size=2",
    "deepspeed.config=zero2",
]


def skeleton(model_type: str, **more: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(SIZES | more)))


def held(model_type: str, tied: bool, zero_stage: int, loss: LossKind) -> list[int]:
    """What AutoTP leaves on this rank, parameter by parameter."""
    import deepspeed
    from deepspeed.utils import groups as deepspeed_groups

    groups: Any = deepspeed_groups

    _, group = tensor_parallel.join(World(0, 2, 0, 2, torch.device("cpu")), 2)
    assert group is groups is not None
    config = AutoConfig.for_model(model_type, tie_word_embeddings=tied, **SIZES)
    net = AutoModelForCausalLM.from_config(config)
    tensor_parallel.prepare(net, 2, loss)
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


@pytest.mark.sample(one_in=4)
@pytest.mark.parametrize("zero_stage", [2, 3])
@pytest.mark.parametrize("loss", LossKind)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "phi", "gpt_neox"])
def test_what_a_rank_holds_is_known_before(
    two_ranks: RankPool, model_type: str, tied: bool, loss: LossKind, zero_stage: int
) -> None:
    model = skeleton(model_type, tie_word_embeddings=tied)
    expected = tensor_parallel.sizes_per_rank(model, 2, loss)
    assert sum(expected) < sum(p.numel() for p in model.parameters())
    for rank in two_ranks.run(held, model_type=model_type, tied=tied, zero_stage=zero_stage, loss=loss):
        assert rank == expected


def adapted(model_type: str, **more: Any) -> Any:
    """A model whose biases and norms are no zeros and ones, and adapters that do something."""
    torch.manual_seed(3)
    net = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **ADAPTED))
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    peft = PeftConfig(method=PeftMethod.lora, r=3, **more)
    wrapped = adapters.add_lora(net, peft, layers=decoder_layers(net), ds_config={}, zero_stage=0, seed=3)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    return wrapped


def train(net: Any, step: Callable[[torch.Tensor], None]) -> list[float]:
    """Two steps on the same tokens in every process, from the same random state; the loss of each."""
    losses = []
    for number in range(2):
        torch.manual_seed(number)
        ids = (torch.arange(40)[None] * 7 + number) % 64
        loss = net(input_ids=ids, labels=ids).loss
        step(loss)
        losses.append(float(loss.detach()))
    return losses


def train_shared(folder: Path, model_type: str, zero_stage: int, more: dict[str, Any]) -> dict[str, Any]:
    """Train adapters on two ranks that share layers, export them."""
    import deepspeed

    _, group = tensor_parallel.join(World(0, 2, 0, 2, torch.device("cpu")), 2)
    net = adapted(model_type, **more)
    planned = tensor_parallel.sizes_per_rank(net, 2, LossKind.full)
    tensor_parallel.prepare(net, 2, LossKind.full)
    ds = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": zero_stage}}
    ds |= {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
    }
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2),
        config=tensor_parallel.rendered(ds, 2),
        mpu=group,
        dist_init_required=False,
    )
    held = [p.ds_numel if hasattr(p, "ds_numel") else p.numel() for p in engine.module.parameters()]

    def step(loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.step()

    losses = train(engine, step)
    norm = float(engine.get_global_grad_norm())
    export.export(engine, folder, export.Form(), tokenizer=None)
    engine.destroy()
    tensor_parallel.join(World(0, 2, 0, 2, torch.device("cpu")), 1)
    return {"losses": losses, "norm": norm, "held": held, "planned": planned}


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dropout": ("llama", {"dropout": 0.3}),
    "biases": ("qwen2", {"dropout": 0.3}),
    "norms of heads": ("qwen3", {}),
    "dense": ("phi", {"dropout": 0.3}),
    "fused heads": ("gpt_neox", {}),
    "some": ("llama", {"target_modules": ["q_proj", "down_proj"], "rslora": True}),
    "modules to save": ("llama", {"modules_to_save": ["embed_tokens", "lm_head"]}),
}


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_as_on_one_rank(two_ranks: RankPool, tmp_path: Path, kind: str, zero_stage: int) -> None:
    """Losses, gradient norm, weights after the steps, and with dropout too: each column has its own mask."""
    model_type, more = KINDS[kind]
    alone = adapted(model_type, **more)
    trained = {name: p for name, p in alone.named_parameters() if p.requires_grad}
    adamw = torch.optim.AdamW(trained.values(), lr=1e-2)

    def step(loss: torch.Tensor) -> None:
        adamw.zero_grad()
        loss.backward()
        adamw.step()

    losses = train(alone, step)
    norm = torch.stack([p.grad.norm() for p in trained.values() if p.grad is not None]).norm().item()
    found = two_ranks.run(
        train_shared, folder=tmp_path / "export", model_type=model_type, zero_stage=zero_stage, more=more
    )
    for rank in found:
        assert rank["losses"] == pytest.approx(losses, rel=1e-5)
        assert rank["norm"] == pytest.approx(norm, rel=1e-5)
        assert rank["held"] == rank["planned"]
    exported = load_file(tmp_path / "export" / "adapter_model.safetensors")
    expected = get_peft_model_state_dict(alone, save_embedding_layers=False)
    assert exported.keys() == expected.keys()
    for name, weight in exported.items():
        assert torch.allclose(weight, expected[name], rtol=0, atol=2e-5), name


def test_one_rank_holds_everything() -> None:
    model = skeleton("llama")
    assert tensor_parallel.sizes_per_rank(model, 1, LossKind.chunked) == [p.numel() for p in model.parameters()]


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
        ("peft=qlora", "peft.method=qlora with train.tensor_parallel_size=2"),
        ("peft.dora=true", "peft.dora=true with train.tensor_parallel_size=2"),
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
