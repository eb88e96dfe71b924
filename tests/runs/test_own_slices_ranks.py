"""Under ZeRO-3 each rank reads its own bytes of the files: the same model as from_pretrained's, each byte read once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from remat.config.options import Attention, ModelConfig, ModelInit, ModelLoad, Precision
from remat.model import hf_model
from tests.support import small_models
from tests.support.pool import RankPool

KINDS = ["fp32 as fp32", "bf16 as bf16", "fp32 as bf16", "bf16 as fp32"]  # in the files, as trained
PERSISTENT = 100  # elements: smaller weights stay gathered, larger ones do not


@pytest.fixture(scope="module")
def pools(two_ranks: RankPool) -> Iterator[dict[int, RankPool]]:
    three = RankPool(3)
    yield {2: two_ranks, 3: three}
    three.close()


def load(
    folder: Path, way: ModelLoad, precision: Precision, **zero: Any
) -> tuple[dict[str, str], hf_model.Loaded, bool]:
    """Hashes of all gathered weights and all buffers by name, what was told, and whether padding is zero."""
    import deepspeed

    cfg = ModelConfig(init=ModelInit.pretrained, path=str(folder), load=way, attention=Attention.eager)
    ds = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": precision is Precision.bf16},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": PERSISTENT} | zero,
    }
    told: list[hf_model.Loaded] = []
    net: Any = hf_model.build(
        cfg,
        hf_model.load_config(cfg),
        precision=precision,
        ds_config=ds,
        zero_stage=3,
        seed=1,
        told=told.append,
    )
    hf_model.assert_sharded(net, torch.distributed.get_world_size())
    found, padded_with_zero = {}, True
    for name, parameter in net.named_parameters(remove_duplicate=False):
        shard = parameter.ds_tensor
        own = max(0, parameter.ds_numel - torch.distributed.get_rank() * shard.numel())
        padded_with_zero &= not shard[own:].any()
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name] = fingerprint(parameter.detach())
    found |= {f"buffer {name}": fingerprint(value) for name, value in net.named_buffers(remove_duplicate=False)}
    found["conversions"] = repr([type(each).__name__ for each in getattr(net, "_weight_conversions", [])])
    found["generation"] = repr(net.generation_config)
    found["config"] = net.config.to_json_string(use_diff=False)
    return found, told[0], padded_with_zero


def fingerprint(value: torch.Tensor) -> str:
    content = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return f"{tuple(value.shape)} {value.dtype} {hashlib.sha256(content).hexdigest()}"


def save(net: Any, folder: Path, dtype: str) -> Path:
    net.to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    net.save_pretrained(folder, max_shard_size="50KB")
    return folder


def read_both(pool: RankPool, folder: Path, precision: Precision, **zero: Any) -> list[hf_model.Loaded]:
    """Hold own slices against from_pretrained on every rank; return what was told of each rank's slices."""
    ways = (ModelLoad.from_pretrained, ModelLoad.own_slices)
    theirs, own = (pool.run(load, folder=folder, way=way, precision=precision, **zero) for way in ways)
    for (expected, _, _), (found, _, padded_with_zero) in zip(theirs, own, strict=True):
        assert found == expected
        assert padded_with_zero
    return [told for _, told, _ in own]


@pytest.mark.sample(one_in=6)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", list(small_models.ARCHITECTURES))
def test_weights_and_buffers_are_those_of_from_pretrained(
    pools: dict[int, RankPool], tmp_path: Path, name: str, kind: str, ranks: int
) -> None:
    held, _, trained = kind.split()
    net = small_models.build(name, vocab_size=67)
    folder = save(net, tmp_path, held)
    size = 2 if held == "bf16" else 4
    whole_bytes = size * sum(value.numel() for value in {*net.parameters()})
    told = read_both(pools[ranks], folder, Precision(trained))
    assert all(each.way is ModelLoad.own_slices and each.because == "" for each in told)
    read_bytes = [each.read_bytes or 0 for each in told]
    assert whole_bytes <= sum(read_bytes) <= 1.05 * whole_bytes
    assert max(read_bytes) <= 1.05 * whole_bytes / ranks
