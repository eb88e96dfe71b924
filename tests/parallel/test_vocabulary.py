"""The output layer cut by its rows: the loss and its gradients against those of one rank with all rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from remat.config import compose
from remat.config.options import LossKind
from remat.model import loss
from remat.parallel import tensor_parallel, vocabulary
from remat.planning import strategy
from tests.support.pool import RankPool

ROWS, WIDTH, WORDS = 90, 12, 34


def given(dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states [2, rows / 2, width], weight, bias and targets, of which some are left out."""
    torch.manual_seed(2)
    hidden = (torch.randn(2, ROWS // 2, WIDTH) * scale).to(dtype)
    targets = torch.randint(0, WORDS, (2, ROWS // 2))
    targets[:, ::5] = loss.IGNORED
    return hidden, torch.randn(WORDS, WIDTH).to(dtype), torch.randn(WORDS).to(dtype), targets


def gradients(kept: list[Tensor], total: Tensor) -> dict[str, Tensor]:
    (total * 3).backward()
    return {"loss": total.detach(), **{str(i): t.grad for i, t in enumerate(kept) if t.grad is not None}}


def of_share(dtype: torch.dtype, scale: float, chunk: int, block: int) -> dict[str, Tensor]:
    hidden, weight, bias, targets = given(dtype, scale)
    count = WORDS // dist.get_world_size()
    share = vocabulary.Share(count * dist.get_rank(), count, dist.group.WORLD)
    own = slice(share.first, share.first + count)
    kept = [nn.Parameter(t) for t in (hidden, weight[own].clone(), bias[own].clone())]
    sizes = loss.CHUNK_ELEMENTS, vocabulary.BLOCK_ELEMENTS
    loss.CHUNK_ELEMENTS, vocabulary.BLOCK_ELEMENTS = chunk * count, block * count
    try:
        total = loss.chunked_loss(share.enter(kept[0]), kept[1], kept[2], targets, share.cross_entropy)
        return gradients(kept, total)
    finally:
        loss.CHUNK_ELEMENTS, vocabulary.BLOCK_ELEMENTS = sizes


@pytest.mark.parametrize(
    ("dtype", "scale", "chunk", "block"),
    [
        (torch.float32, 1.0, 1000, 1000),
        (torch.float32, 1.0, 32, 5),
        (torch.float32, 300.0, 32, 1),
        (torch.bfloat16, 1.0, 32, 5),
    ],
    ids=["at once", "in chunks", "far apart", "bf16"],
)
def test_loss_and_gradients_are_those_of_one_rank(
    two_ranks: RankPool, dtype: torch.dtype, scale: float, chunk: int, block: int
) -> None:
    """`far apart`: logits whose exponentials are infinite, or zero on one of the ranks."""
    hidden, weight, bias, targets = given(dtype, scale)
    kept = [nn.Parameter(t.float()) for t in (hidden, weight, bias)]
    logits = torch.nn.functional.linear(kept[0], kept[1], kept[2]).flatten(0, 1)
    total = torch.nn.functional.cross_entropy(
        logits, targets.flatten(), ignore_index=loss.IGNORED, reduction="sum"
    )
    expected = gradients(kept, total)
    shares = two_ranks.run(of_share, dtype=dtype, scale=scale, chunk=chunk, block=block)
    rel = 2e-2 if dtype is torch.bfloat16 else 1e-5
    found = {name: torch.cat([rank[name] for rank in shares]) for name in ("1", "2")}
    for rank in shares:
        assert torch.equal(rank["loss"], shares[0]["loss"])
        assert torch.equal(rank["0"], shares[0]["0"]), "every rank goes on with the same gradient"
        found |= {"loss": rank["loss"], "0": rank["0"]}
        for name, value in expected.items():
            atol = rel * float(value.abs().max())
            assert torch.allclose(found[name].float(), value, rtol=0, atol=atol), name


def skeleton(**more: Any) -> Any:
    fields: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
    }
    fields |= {"num_attention_heads": 4, "tie_word_embeddings": False}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **(fields | more)))


def test_what_keeps_the_output_layer_whole() -> None:
    cut = tensor_parallel.find_cut(skeleton(), 2, LossKind.chunked)
    assert cut["lm_head"] == tensor_parallel.COLUMN
    for model, kind, text in (
        (skeleton(), LossKind.full, "train.loss=full reads the logits"),
        (skeleton(tie_word_embeddings=True), LossKind.chunked, "its weight is the embedding's"),
        (skeleton(vocab_size=65), LossKind.chunked, "its 65 rows do not divide"),
    ):
        assert "lm_head" not in tensor_parallel.find_cut(model, 2, kind)
        assert text in tensor_parallel.describe_whole_head(model, 2, kind)
    assert tensor_parallel.describe_whole_head(skeleton(), 2, LossKind.chunked) == ""
    assert tensor_parallel.describe_whole_head(skeleton(), 1, LossKind.full) == ""


def test_a_run_is_told_that_it_stays_whole() -> None:
    shape = ["model.architecture.num_attention_heads=6", "model.architecture.num_key_value_heads=2"]
    words = [*shape, "train.tensor_parallel_size=2", "deepspeed.config=zero2", "train.loss=full"]
    decided = strategy.decide(compose.compose_run(words).run, world_size=2, can_pin=False)
    assert any("every rank has the whole output layer" in text for text in decided.warnings)
    words[-1] = "peft=lora"
    adapted = strategy.decide(compose.compose_run(words).run, world_size=2, can_pin=False)
    assert not any("output layer" in text for text in adapted.warnings)
    words.append("peft.modules_to_save=[lm_head]")
    trained = strategy.decide(compose.compose_run(words).run, world_size=2, can_pin=False)
    assert any("peft trains a copy of it" in text for text in trained.warnings)
