"""The load-balancing loss of a mixture of experts: transformers' value and gradients, under every policy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from remat.activation_checkpointing import verification
from remat.config import compose
from remat.config.options import ConfigError, LossKind
from remat.model import loss
from remat.model.loss import TokenLoss
from tests.activation_checkpointing.test_mechanisms import NEEDS_PROCESS_GROUP, POLICIES, read
from tests.support import small_models, watched

COEF, FACTOR = 0.5, 7.0
FAMILIES = ("mixtral", "qwen3_moe", "qwen2_moe")


def batch_of(blocks: int) -> dict[str, torch.Tensor]:
    """Blocks [blocks, 16] of random tokens, of which one has tokens that are not trained."""
    ids = torch.randint(0, 64, (blocks, 16), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[1, :5] = loss.IGNORED
    return {"input_ids": ids, "labels": labels}


class LikeAnEngine(torch.nn.Module):
    """Like DeepSpeed's engine: in an evaluation only its model knows of it."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def eval(self) -> LikeAnEngine:
        self.module.train(False)
        return self

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self.module(**inputs)


def gradients(net: Any, value: torch.Tensor) -> dict[str, torch.Tensor]:
    net.zero_grad()
    (value * FACTOR).backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", LossKind)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers_block_by_block(family: str, kind: LossKind) -> None:
    ours = small_models.build(family, router_aux_loss_coef=COEF)
    theirs, batch = copy.deepcopy(ours), batch_of(3)
    found = TokenLoss(ours, kind, router_coef=COEF)(ours, batch)
    expected = torch.zeros(())
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        mean = theirs(input_ids=ids[None], labels=labels[None], output_router_logits=True).loss
        expected = expected + mean * (labels[1:] != loss.IGNORED).sum()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(ours, found), gradients(theirs, expected), rtol=1e-4, atol=1e-5)


def test_changes_the_gradient_of_the_routers_and_not_an_evaluation() -> None:
    net = small_models.build("mixtral")
    batch = batch_of(2)
    plain = TokenLoss(net, LossKind.full)(net, batch)
    before = gradients(net, plain)
    balanced = TokenLoss(net, LossKind.full, router_coef=COEF)
    after = gradients(net, balanced(net, batch))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name for name in before if "mlp.gate" in name} <= moved
    engine = LikeAnEngine(net)
    engine.eval()
    assert engine.training
    for called in (net, engine):
        assert balanced(called, batch).item() == pytest.approx(plain.item(), rel=1e-6)


@pytest.mark.parametrize("sizes", [(4,), (1, 3), (2, 2)])
def test_micro_batches_do_not_change_it(sizes: tuple[int, ...]) -> None:
    net = small_models.build("qwen3_moe")
    token_loss, batch = TokenLoss(net, LossKind.full, router_coef=COEF), batch_of(4)
    parts = zip(batch["input_ids"].split(sizes), batch["labels"].split(sizes), strict=True)
    net.zero_grad()
    total = 0.0
    for ids, labels in parts:
        value = token_loss(net, {"input_ids": ids, "labels": labels})
        value.backward()
        total += value.item()
    found = {name: p.grad.clone() for name, p in net.named_parameters()}
    one = token_loss(net, batch)
    assert total == pytest.approx(one.item(), rel=1e-6)
    net.zero_grad()
    one.backward()
    expected = {name: p.grad for name, p in net.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_padding_is_not_balanced() -> None:
    net = small_models.build("mixtral")
    token_loss, batch = TokenLoss(net, LossKind.full, router_coef=COEF), batch_of(2)
    bare = token_loss(net, batch).item()
    width = {"input_ids": 0, "labels": loss.IGNORED}
    padded = {name: torch.nn.functional.pad(value, (0, 4), value=width[name]) for name, value in batch.items()}
    mask = torch.nn.functional.pad(torch.ones_like(batch["input_ids"]), (0, 4))
    assert token_loss(net, padded | {"attention_mask": mask}).item() == pytest.approx(bare, rel=1e-5)


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("name", sorted(set(POLICIES) - NEEDS_PROCESS_GROUP))
def test_every_policy_gives_the_same(name: str) -> None:
    net = small_models.build("mixtral")
    token_loss = TokenLoss(net, LossKind.full, router_coef=COEF)
    kept = watched.run(net, watched.NONE, token_loss=token_loss)
    result = watched.run(net, read(name), token_loss=token_loss)
    assert watched.differences(result, kept) == []
    assert verification.unmet_expectations(result.applied, result.watch, read(name)) == []
    assert result.replayed.differences == result.replayed.notes == []


def decided(*words: str, family: str = "mixtral", **config: Any) -> float:
    cfg = compose.compose_run(["recipe=tiny_zero3_offload", *words]).run
    return loss.decide_balance(cfg, small_models.build(family, **config))


def test_the_models_own_factor_counts_where_its_config_turns_it_on() -> None:
    assert decided() == 0
    assert decided("train.router_aux_loss_coef=0.01") == 0.01
    on = {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    assert decided(**on) == 0.02
    assert decided("train.router_aux_loss_coef=0", **on) == 0


@pytest.mark.parametrize(
    ("words", "family", "reason"),
    [
        (["train.sequence_parallel_size=2"], "mixtral", "ranks that share a block"),
        (["compile=layers"], "mixtral", "cannot count its tokens"),
        ([], "llama", "no balancing loss for LlamaForCausalLM"),
    ],
)
def test_refused(words: list[str], family: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        decided("train.router_aux_loss_coef=0.01", *words, family=family)
    assert "set " in str(error.value)


def test_a_refusal_says_whose_factor_it_is() -> None:
    on = {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    with pytest.raises(
        ConfigError, match=r"router_aux_loss_coef=0\.02 \(the model's own\) with compile=layers"
    ):
        decided("compile=layers", **on)
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef=0\.01 with compile=layers"):
        decided("compile=layers", "train.router_aux_loss_coef=0.01", **on)
