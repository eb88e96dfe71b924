"""Under ZeRO-3 no rank ever holds the whole model; and what a model's random values are does not depend on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from remat.config.options import ModelConfig, ModelInit, Precision
from remat.model import hf_model
from tests.support.pool import RankPool
from tests.support.tiny import make_model

TINY = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def build(cfg: ModelConfig, stage: int, precision: Precision) -> Any:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    ds = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": precision is Precision.bf16},
        "zero_optimization": zero,
    }
    config = hf_model.load_config(cfg)
    return hf_model.build(cfg, config, precision=precision, ds_config=ds, zero_stage=stage, seed=3)


def shards(cfg: ModelConfig, precision: Precision) -> dict[str, Any]:
    """This rank's shard bytes, the bytes its parameters really hold, and the gathered values."""
    import deepspeed

    net = build(cfg, 3, precision)
    shard_bytes = hf_model.assert_sharded(net, torch.distributed.get_world_size())
    resident = sum(p.untyped_storage().nbytes() for p in net.parameters())
    values = {}
    for name, parameter in net.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            values[name] = parameter.detach().clone()
    return {"shard_bytes": shard_bytes, "resident_bytes": resident, "values": values}


def whole(cfg: ModelConfig, precision: Precision) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in build(cfg, 2, precision).named_parameters()}


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
@pytest.mark.parametrize("init", list(ModelInit))
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_a_shard_and_the_values_are_those_of_stage_2(
    two_ranks: RankPool, tmp_path: Path, precision: Precision, init: ModelInit, tied: bool
) -> None:
    cfg = ModelConfig(architecture=TINY | {"tie_word_embeddings": tied})
    if init is ModelInit.pretrained:
        cfg = ModelConfig(init=init, path=str(make_model(tmp_path / "m", tie_word_embeddings=tied)))
    expected = two_ranks.run(whole, cfg=cfg, precision=precision)[0]
    for rank in two_ranks.run(shards, cfg=cfg, precision=precision):
        assert rank["values"].keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(rank["values"][name], value), name
        total_bytes = sum(v.numel() * v.element_size() for v in expected.values())
        assert total_bytes / 2 <= rank["shard_bytes"] <= total_bytes / 2 + 4 * len(expected)
        assert rank["resident_bytes"] == 0


def whole_model_claims_to_be_sharded() -> str:
    net = build(ModelConfig(architecture=TINY), 2, Precision.fp32)
    try:
        hf_model.assert_sharded(net, 2)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_whole_model_is_found_out(two_ranks: RankPool) -> None:
    assert all("did not partition" in text for text in two_ranks.run(whole_model_claims_to_be_sharded))
