"""Which models can share their sequences, as a small copy of each shows, and what is said of the others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from remat.config.options import Attention, ConfigError, ModelConfig, Packing, TrainConfig
from remat.data.batches import Part, own_part
from remat.model import packing, small_copy
from remat.model.packing import Packed
from remat.parallel import sequence_trial, ulysses
from remat.parallel.sequence_parallel import SequenceParallel
from remat.parallel.sequence_trial import STREAM
from tests.support import small_models

WORKING = {
    "llama": {"num_key_value_heads": 1},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "gpt2": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "mistral": {},
    "llama4_text": {},
    "gpt_oss": {"num_key_value_heads": 1, "num_local_experts": 4},  # attention sinks: a weight for each head
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "falcon": ({}, "does not go through transformers' AttentionInterface"),
    "deepseek_v4": ({}, "DeepseekV4ForCausalLM cannot share its sequences"),  # layers merge 128 tokens into one
    "lfm2": ({"layer_types": ["conv", "full_attention", "conv"]}, "something in it looks along the sequence"),
    "qwen3_next": (
        {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
        "something in it looks along the sequence",
    ),
}


def ask(model_type: str, attention: Attention, *, apart: bool = False, **more: Any) -> str:
    """Why the model is refused; empty when it is not."""
    sizes = small_models.SIZES | {"num_attention_heads": 4} | more
    config = AutoConfig.for_model(model_type, **sizes)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    model = ModelConfig(attention=attention)
    packed = STREAM
    if apart:
        way = packing.way(config, skeleton, model)
        assert isinstance(way, packing.Way)
        packed = Packed(Packing.documents, "", way)
    train = TrainConfig(sequence_parallel_size=2)
    try:
        sequence_trial.check(train, model, config, skeleton, packed)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("attention", [Attention.sdpa, Attention.eager, Attention.flash_attention_2])
@pytest.mark.parametrize("model_type", WORKING)
def test_logits_of_ranks_are_those_of_whole_sequences(model_type: str, attention: Attention) -> None:
    """Flash attention by its formula, in the place of its kernel: windows and documents' ends are what it is given."""
    if model_type == "llama4_text" and attention is Attention.flash_attention_2:
        pytest.skip("transformers has no chunked attention for it")
    assert ask(model_type, attention, **WORKING[model_type]) == ""
    assert ask(model_type, attention, apart=True, **WORKING[model_type]) == ""


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_model_that_looks_along_the_sequence_elsewhere_is_refused(model_type: str) -> None:
    sizes, reason = REFUSED[model_type]
    assert reason in ask(model_type, Attention.sdpa, **sizes)


def test_a_rank_has_the_gradient_of_the_sinks_of_its_heads() -> None:
    """Of each its own, and zeros: ZeRO's sum over ranks is the gradient of whole sequences."""
    net = small_models.build(
        "gpt_oss", attention="eager", num_attention_heads=4, num_key_value_heads=1, num_local_experts=4
    )
    sinks = [weight for name, weight in net.named_parameters() if name.endswith("sinks")]
    batch = sequence_trial._batch(net, STREAM)
    expected = torch.autograd.grad(net(**batch, use_cache=False).logits.square().sum(), sinks)
    group, found = sequence_trial._ThreadGroup(2), dict[int, Any]()
    sequence = SequenceParallel(net, group, STREAM, Attention.eager)

    def compute(rank: int) -> None:
        group.enter(rank)
        rows, width = batch["input_ids"].shape
        own = own_part(sequence_trial._blocks(batch), np.arange(rows), Part(rank, 2))
        inputs = sequence.inputs(own, torch.device("cpu"))
        inside = width - rank * own["input_ids"].shape[1]  # the last part has padding
        del inputs["targets"]
        logits = net(**inputs, use_cache=False).logits[:, :inside]
        found[rank] = torch.autograd.grad(logits.square().sum(), sinks)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compute, range(2)))
    sequence.remove()
    for whole, first, second in zip(expected, found[0], found[1], strict=True):
        assert not first[2:].any() and not second[:2].any()
        torch.testing.assert_close(first + second, whole, rtol=1e-4, atol=1e-6)
        assert whole.all()


@pytest.mark.parametrize("dropped", ["attention_mask", "position_ids"])
def test_a_mask_or_positions_that_do_not_arrive_are_found(
    dropped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are what a library drops silently: a window's or documents' mask, and where a block begins."""
    real = SequenceParallel.inputs

    def without(self: SequenceParallel, *args: Any) -> dict[str, Any]:
        return {name: value for name, value in real(self, *args).items() if name != dropped}

    monkeypatch.setattr(SequenceParallel, "inputs", without)
    monkeypatch.setattr(small_copy, "_ANSWERS", {})
    for apart in (False, True):
        assert "cannot share its sequences" in ask("gemma3_text", Attention.sdpa, apart=apart, head_dim=16)


def test_what_is_asked_for_is_refused_by_name() -> None:
    def refuse(heads: int, attention: Attention, train: TrainConfig) -> str:
        config = AutoConfig.for_model("llama", **(small_models.SIZES | {"num_attention_heads": heads}))
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
        with pytest.raises(ConfigError) as error:
            sequence_trial.check(train, ModelConfig(attention=attention), config, skeleton, STREAM)
        return str(error.value)

    found = refuse(4, Attention.flex_attention, TrainConfig(sequence_parallel_size=8, seq_len=4))
    assert "train.sequence_parallel_size=8 does not divide num_attention_heads=4 of LlamaForCausalLM" in found
    assert "train.seq_len=4: a rank has no token" in found
    assert "model.attention=flex_attention" in found


def test_the_model_and_the_registry_are_as_before() -> None:
    net = small_models.build("gemma3_text")
    configs = [module.config for module in net.modules() if hasattr(module, "config")]
    known = list(ulysses.ALL_ATTENTION_FUNCTIONS)
    sequence = SequenceParallel(net, ulysses.RankGroup(2), STREAM, Attention.sdpa)
    assert len(list(ulysses.ALL_ATTENTION_FUNCTIONS)) == len(known) + 1
    assert net.config._attn_implementation == "sdpa"
    sequence.remove()
    assert list(ulysses.ALL_ATTENTION_FUNCTIONS) == known
    assert all(
        a is b for a, b in zip(configs, [m.config for m in net.modules() if hasattr(m, "config")], strict=True)
    )
