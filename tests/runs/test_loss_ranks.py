"""The chunked loss inside a real engine: many chunks under ZeRO-3's gathers give the trajectory of full logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from remat.config.options import LossKind, ModelConfig, Precision
from remat.model import hf_model, loss
from tests.support.pool import RankPool

VOCAB, ROWS, SEQ = 512, 2, 48


def train(stage: int, kind: LossKind, chunk_tokens: int, tied: bool) -> dict[str, list[float]]:
    """Losses and gradient norms of four steps, and how often the output layer's chunks ran."""
    import deepspeed

    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if stage == 3:
        zero |= {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 20_000}
    ds = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }
    fields = {"model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64}
    heads = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": tied,
    }
    cfg = ModelConfig(architecture=fields | heads)
    net = hf_model.build(
        cfg, hf_model.load_config(cfg), precision=Precision.fp32, ds_config=ds, zero_stage=stage, seed=11
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    engine, _, _, _ = deepspeed.initialize(model=net, optimizer=optimizer, config=ds, dist_init_required=False)
    before, loss.CHUNK_ELEMENTS = loss.CHUNK_ELEMENTS, chunk_tokens * VOCAB
    try:
        token_loss = loss.TokenLoss(engine.module, kind)
        return _steps(engine, token_loss)
    finally:
        loss.CHUNK_ELEMENTS = before
        engine.destroy()


def _steps(engine: Any, token_loss: loss.TokenLoss) -> dict[str, list[float]]:
    losses, norms = [], []
    for step in range(4):
        generator = torch.Generator().manual_seed(100 * step + torch.distributed.get_rank())
        ids = torch.randint(0, VOCAB, (ROWS, SEQ), generator=generator)
        labels = ids.masked_fill(ids % 7 == 0, loss.IGNORED)
        value = token_loss(engine, {"input_ids": ids, "labels": labels})
        engine.backward(value / (ROWS * SEQ), scale_wrt_gas=False)
        engine.step()
        losses.append(value.item())
        norms.append(float(engine.get_global_grad_norm()))
    return {"losses": losses, "norms": norms}


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_many_chunks_follow_full_logits(two_ranks: RankPool, stage: int, tied: bool) -> None:
    full = two_ranks.run(train, stage=stage, kind=LossKind.full, chunk_tokens=10**6, tied=tied)
    chunked = two_ranks.run(train, stage=stage, kind=LossKind.chunked, chunk_tokens=13, tied=tied)
    for expected, found in zip(full, chunked, strict=True):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert full[0]["losses"][-1] != full[0]["losses"][0]
