"""Layers shared between ranks: an export joins the shares to the weights that were there before AutoTP cut them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from remat.config.options import ConfigError, LossKind
from remat.machine.distributed import World
from remat.parallel import tensor_parallel
from remat.saving import frozen, load, save, shares
from remat.saving.exports import export
from remat.saving.state_files import SavedWeights
from tests.support.pool import RankPool

SIZES: dict[str, Any] = {
    "vocab_size": 66,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def model(model_type: str, tied: bool) -> Any:
    torch.manual_seed(3)
    net = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, tie_word_embeddings=tied, **SIZES))
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter)  # biases and norms too
    return net


def start(net: Any, zero_stage: int, loss: LossKind) -> Any:
    """An engine whose layers two ranks share."""
    import deepspeed

    _, group = tensor_parallel.join(World(0, 2, 0, 2, torch.device("cpu")), 2)
    tensor_parallel.prepare(net, 2, loss)
    ds = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": zero_stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.1),
        config=tensor_parallel.rendered(ds, 2),
        mpu=group,
        dist_init_required=False,
    )
    return engine


def end(engine: Any) -> None:
    engine.destroy()
    tensor_parallel.join(World(0, 2, 0, 2, torch.device("cpu")), 1)


def write(folder: str, model_type: str, tied: bool, zero_stage: int, loss: LossKind) -> dict[str, Any]:
    """Share a model by two ranks; export and save it before any step."""
    engine = start(model(model_type, tied), zero_stage, loss)
    export.export(engine, Path(folder) / "export", export.Form(), tokenizer=None)
    state = save.save(engine, Path(folder), step=1, client_state={}, keep=1)
    held = {name: list(shares.whole_shape(p)) for name, p in engine.module.named_parameters()}
    end(engine)
    return {"shapes": held, "bytes": state.bytes}


def load_with_another_loss(folder: str) -> str:
    engine = start(model("llama", tied=False), 2, LossKind.full)
    try:
        load.load(engine, save.manifest.list_states(Path(folder))[0][0])
    except ConfigError as error:
        return str(error)
    finally:
        end(engine)
    return ""


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("zero_stage", [1, 2])
@pytest.mark.parametrize("loss", LossKind)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "phi"])
def test_shares_are_joined_bit_for_bit(
    two_ranks: RankPool, tmp_path: Path, model_type: str, tied: bool, loss: LossKind, zero_stage: int
) -> None:
    """With the chunked loss those of the output layer too, unless its weight is the embedding's."""
    plain = model(model_type, tied)
    found = two_ranks.run(
        write, folder=str(tmp_path), model_type=model_type, tied=tied, zero_stage=zero_stage, loss=loss
    )
    expected = {name: list(p.shape) for name, p in plain.named_parameters()}
    assert [rank["shapes"] for rank in found] == [expected] * 2
    exported = load_file(tmp_path / "export" / "model.safetensors")
    info = save.manifest.read(tmp_path / "saved" / "step-000001")
    assert info.tensor_parallel_size == 2
    assert set(info.cuts.values()) == {0, 1}
    assert ("lm_head.weight" in info.cuts) == (loss is LossKind.chunked and not tied)
    saved = SavedWeights(tmp_path / "saved" / "step-000001" / "engine", zero_stage, cuts=info.cuts)
    assert saved.trained == {name: torch.Size(shape) for name, shape in expected.items()}
    for name, parameter in plain.named_parameters():
        assert torch.equal(exported[name], parameter), name
        assert torch.equal(saved.read(name), parameter), name


def test_a_resume_names_another_loss(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(
        write, folder=str(tmp_path), model_type="llama", tied=False, zero_stage=2, loss=LossKind.chunked
    )
    for text in two_ranks.run(load_with_another_loss, folder=str(tmp_path)):
        assert "lm_head.weight divided over the ranks" in text
        assert "set train.loss" in text


def narrow() -> Any:
    """A model that is frozen but for its norms, with shares of fewer columns than a fingerprint has values."""
    torch.manual_seed(3)
    fields = SIZES | {"hidden_size": 16, "head_dim": 4, "tie_word_embeddings": False}
    net = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **fields))
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("norm" in name)
    return net


def fingerprints(zero_stage: int) -> tuple[bool, bool, bool]:
    """Whether ranks that share layers know what one rank alone would have noted of frozen weights, and the reverse."""
    alone = narrow()
    engine = start(narrow(), zero_stage, LossKind.chunked)
    shared: Any = engine.module
    of_one: Any = SimpleNamespace(cuts={}, world_size=1, tensor_parallel_size=1, zero_stage=zero_stage)
    cuts = shares.find_cuts(shared)
    of_two: Any = SimpleNamespace(cuts=cuts, world_size=2, tensor_parallel_size=2, zero_stage=zero_stage)
    noted = frozen.fingerprint(shared), frozen.fingerprint(alone)
    found = frozen.fingerprint_of_first(alone, of_two), frozen.fingerprint_of_first(shared, of_one)
    again = frozen.fingerprint_of_first(shared, of_two) == noted[0]
    end(engine)
    return noted[0] == found[0], noted[1] == found[1], again


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_frozen_weights_are_recognised_whoever_has_which_share(two_ranks: RankPool, zero_stage: int) -> None:
    """Rank 0 compares: the other one has other values."""
    assert two_ranks.run(fingerprints, zero_stage=zero_stage)[0] == (True, True, True)
