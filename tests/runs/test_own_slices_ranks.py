"""Under ZeRO-3 each rank reads its own bytes of the files: the same model as from_pretrained's, each byte read once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from remat.config.options import Attention, ConfigError, ModelConfig, ModelInit, ModelLoad, Precision
from remat.config.units import MIB
from remat.model import hf_model, own_slices
from tests.model.test_flops import FAMILIES, SIZES
from tests.support import small_models
from tests.support.pool import RankPool
from tests.support.tiny import make_model

KINDS = ["fp32 as fp32", "bf16 as bf16", "fp32 as bf16", "bf16 as fp32"]  # in the files, as trained
PERSISTENT = 100  # elements: smaller weights stay gathered, larger ones do not


@pytest.fixture(scope="module")
def pools(two_ranks: RankPool) -> Iterator[dict[int, RankPool]]:
    three = RankPool(3)
    yield {2: two_ranks, 3: three}
    three.close()


def load(
    folder: Path, way: ModelLoad, precision: Precision, zero: dict[str, Any] | None = None
) -> tuple[dict[str, str], hf_model.Loaded, bool]:
    """Hashes of all gathered weights and all buffers by name, what was told, and whether padding is zero."""
    import deepspeed

    net, told = build(folder, way, precision, zero)
    hf_model.assert_sharded(net, torch.distributed.get_world_size())
    found, padded_with_zero = {}, True
    for name, parameter in net.named_parameters(remove_duplicate=False):
        shard = parameter.ds_tensor
        own = max(0, parameter.ds_numel - torch.distributed.get_rank() * shard.numel())
        padded_with_zero &= not shard[own:].any()
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name] = fingerprint(parameter.detach())
    found |= {f"buffer {name}": fingerprint(value) for name, value in net.named_buffers(remove_duplicate=False)}
    found["trains"] = f"{net.training} {[p.requires_grad for p in net.parameters()].count(False)}"
    found["conversions"] = repr([type(each).__name__ for each in getattr(net, "_weight_conversions", [])])
    found["generation"] = repr(net.generation_config)
    found["config"] = net.config.to_json_string(use_diff=False)
    return found, told, padded_with_zero


def build(
    folder: Path, way: ModelLoad, precision: Precision, zero: dict[str, Any] | None = None, **model: Any
) -> tuple[Any, hf_model.Loaded]:
    """The model on this rank and what was told. What was told of bytes is what preadv returned."""
    options: Any = {"load": way, "attention": Attention.eager} | model
    cfg = ModelConfig(init=ModelInit.pretrained, path=str(folder), **options)
    ds = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": precision is Precision.bf16},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": PERSISTENT} | (zero or {}),
    }
    told: list[hf_model.Loaded] = []
    read, preadv = [0], os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        got = preadv(descriptor, buffers, offset)
        read[0] += got
        return got

    with mock.patch.object(os, "preadv", counted):
        net: Any = hf_model.build(
            cfg,
            hf_model.load_config(cfg),
            precision=precision,
            ds_config=ds,
            zero_stage=3,
            seed=1,
            told=told.append,
        )
    assert read[0] == (told[0].read_bytes or 0)
    return net, told[0]


def fingerprint(value: torch.Tensor) -> str:
    content = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return f"{tuple(value.shape)} {value.dtype} {hashlib.sha256(content).hexdigest()}"


def save(net: Any, folder: Path, dtype: str) -> Path:
    net.to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    net.save_pretrained(folder, max_shard_size="50KB")
    return folder


def read_both(
    pool: RankPool,
    folder: Path,
    precision: Precision,
    zero: dict[str, Any] | None = None,
    way: ModelLoad = ModelLoad.own_slices,
) -> list[hf_model.Loaded]:
    """Hold own slices against from_pretrained on every rank; return what was told of each rank's slices."""
    ways = (ModelLoad.from_pretrained, way)
    theirs, own = (pool.run(load, folder=folder, way=each, precision=precision, zero=zero) for each in ways)
    for (expected, _, _), (found, _, padded_with_zero) in zip(theirs, own, strict=True):
        assert found == expected
        assert padded_with_zero
    return [told for _, told, _ in own]


@pytest.mark.sample(one_in=10)
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


def load_alone(folder: Path) -> tuple[int, int]:
    """The peak of host memory while this rank reads its slices in bf16, and the bytes of its shards."""
    net, told = build(folder, ModelLoad.own_slices, Precision.bf16)
    assert told.way is ModelLoad.own_slices, told.because
    return told.peak_bytes, sum(each.ds_tensor.nbytes for each in {*net.parameters()})


@pytest.mark.exhaustive
def test_a_rank_holds_its_shards_one_buffer_and_little_else(two_ranks: RankPool, tmp_path: Path) -> None:
    """Of a model of 280 MiB in bf16, from files in fp32. benchmarks/loading.py has larger ones."""
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 16000, "num_hidden_layers": 7}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": False}
    small_models.build("llama", **wide, **heads).save_pretrained(tmp_path, max_shard_size="100MB")
    for peak_bytes, shard_bytes in two_ranks.run(load_alone, folder=tmp_path):
        assert shard_bytes > 2 * 64 * MIB, "else reading all would pass"
        assert peak_bytes <= shard_bytes + own_slices.BOUNCE_BYTES + 64 * MIB


OTHERS = [name for name in FAMILIES if name not in small_models.ARCHITECTURES]


@pytest.mark.sample(one_in=4)
@pytest.mark.parametrize("name", OTHERS)
def test_other_families_are_read_alike(pools: dict[int, RankPool], tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **(SIZES | FAMILIES[name]))
    net = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    folder = save(net, tmp_path, "bf16")
    told = read_both(pools[3], folder, Precision.bf16, way=ModelLoad.auto)
    assert {each.because for each in told} == {""}


@pytest.mark.parametrize("place", ["none", "cpu"])
def test_a_weight_that_the_files_hold_under_two_names_is_one(
    two_ranks: RankPool, tmp_path: Path, place: str
) -> None:
    """The model ties them: as from_pretrained does it at ZeRO-3, the embedding's values are taken."""
    folder = save(small_models.build("llama", tie_word_embeddings=True), tmp_path, "bf16")
    file = sorted(folder.glob("*.safetensors"))[0]
    save_file(load_file(file) | {"lm_head.weight": torch.ones(64, 32)}, file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    text = index.read_text().replace('"weight_map": {', f'"weight_map": {{"lm_head.weight": "{file.name}",')
    index.write_text(text)
    read_both(two_ranks, folder, Precision.bf16, {"offload_param": {"device": place}})


def test_names_without_the_models_prefix_are_found(two_ranks: RankPool, tmp_path: Path) -> None:
    small_models.build("gpt2").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    held = {name.removeprefix("transformer."): weight for name, weight in load_file(file).items()}
    save_file(held, file, metadata={"format": "pt"})
    read_both(two_ranks, tmp_path, Precision.fp32)


def fails_while_reading(folder: Path) -> str:
    """Rank 1 finds a file shorter than its header said; the other rank must not go on alone."""
    create = own_slices._create

    def cut_off(*args: Any) -> Any:
        if torch.distributed.get_rank() == 1:
            os.truncate(folder / "model.safetensors", 20_000)
        torch.distributed.barrier()
        return create(*args)

    with mock.patch.object(own_slices, "_create", cut_off):
        try:
            build(folder, ModelLoad.auto, Precision.fp32)
        except ConfigError as error:
            return str(error)
    return "no error"


def test_a_file_that_ends_early_is_named_on_every_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    for text in two_ranks.run(fails_while_reading, folder=folder):
        assert text.startswith(f"model.path={folder}: model.safetensors has nothing at byte ")
        assert text.endswith("where its header says a weight is; copy or download it again")


def reason(folder: Path, way: ModelLoad = ModelLoad.auto, **model: Any) -> str:
    """Why slices were not read, or the error."""
    try:
        return build(folder, way, Precision.fp32, **model)[1].because
    except ConfigError as error:
        return str(error)


def lacks_a_file_on_rank_1(folder: Path) -> str:
    """As on a node whose disk holds the model in other files than the other's."""
    if torch.distributed.get_rank() == 1:
        folder = folder.with_name("other")
    return reason(folder)


def test_what_cannot_be_read_in_slices_is_read_by_transformers_which_says_why(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "model")
    assert set(two_ranks.run(reason, folder=folder)) == {""}
    (code,) = set(two_ranks.run(reason, folder=folder, trust_remote_code=True))
    assert code.startswith("model.trust_remote_code=true")
    forced = {"way": ModelLoad.own_slices, "trust_remote_code": True}
    (refused,) = set(two_ranks.run(reason, folder=folder, **forced))
    assert refused.startswith("model.load=own_slices") and refused.endswith("reads with from_pretrained")
    (asked,) = set(two_ranks.run(reason, folder=folder, way=ModelLoad.from_pretrained))
    assert asked == "model.load=from_pretrained"
    other = AutoModelForCausalLM.from_pretrained(folder)
    other.save_pretrained(tmp_path / "other", max_shard_size="50KB")
    (unlike,) = set(two_ranks.run(lacks_a_file_on_rank_1, folder=folder))
    assert unlike == "the ranks do not see the same files"
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    (pickled,) = set(two_ranks.run(reason, folder=folder, allow_pickle=True))
    assert pickled.startswith("there is no model.safetensors")
