"""Configuration and loading of models: what is refused before a weight is read, and what is built."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from remat.config import compose
from remat.config.options import Attention, ConfigError, ModelConfig, ModelInit, Precision
from remat.model import hf_model
from remat.planning import strategy
from tests.support.tiny import make_model

TINY = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def build(cfg: ModelConfig, **more: object) -> torch.nn.Module:
    settings = {"precision": Precision.fp32, "ds_config": {}, "zero_stage": 2, "seed": 1} | more
    return hf_model.build(cfg, hf_model.load_config(cfg), **settings)


def pretrained(folder: Path, **more: object) -> ModelConfig:
    return ModelConfig(init=ModelInit.pretrained, path=str(make_model(folder)), **more)


def test_random_values_follow_the_seed() -> None:
    cfg = ModelConfig(architecture=TINY, tokenizer="bytes")
    first, again, other = build(cfg), build(cfg), build(cfg, seed=2)
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert first.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert first.training
    assert first.config.use_cache is False


@pytest.mark.parametrize("precision", list(Precision))
def test_precision_is_the_dtype_of_every_weight(precision: Precision) -> None:
    net = build(ModelConfig(architecture=TINY), precision=precision)
    assert {p.dtype for p in net.parameters()} == {hf_model.DTYPES[precision]}


def test_attention_implementation_is_what_was_asked() -> None:
    assert (
        build(ModelConfig(architecture=TINY, attention=Attention.eager)).config._attn_implementation == "eager"
    )


FLASH = ModelConfig(architecture=TINY, attention=Attention.flash_attention_2)


def test_missing_flash_attention_is_an_error_not_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"model\.attention=flash_attention_2 cannot be had"):
        hf_model.skeleton(hf_model.load_config(FLASH), FLASH)


def test_flash_attention_is_planned_without_its_package_and_a_gpu() -> None:
    net = hf_model.skeleton(hf_model.load_config(FLASH), FLASH)
    assert {config._attn_implementation for config in hf_model.configs_of(net)} == {"flash_attention_2"}
    cannot = replace(FLASH, architecture=TINY | {"model_type": "gpt_oss"})
    with pytest.raises(ConfigError, match=r"model\.attention=flash_attention_2 cannot be had"):
        hf_model.skeleton(hf_model.load_config(cannot), cannot)


def test_flash_attention_does_not_run_on_a_cpu() -> None:
    run = compose.compose_run(["model=tiny_llama", "model.attention=flash_attention_2"]).run
    with pytest.raises(ConfigError, match=r"model\.attention=flash_attention_2: it needs a GPU"):
        strategy.decide(run, world_size=1, can_pin=False)


def test_a_model_without_sdpa_names_the_attention_that_works() -> None:
    cfg = ModelConfig(architecture={"model_type": "gpt_oss", "num_hidden_layers": 1})
    with pytest.raises(ConfigError, match=r"model\.attention=sdpa cannot be had.*model\.attention=eager"):
        hf_model.skeleton(hf_model.load_config(cfg), cfg)


def test_tied_embeddings_share_one_weight() -> None:
    net = build(ModelConfig(architecture=TINY | {"tie_word_embeddings": True}))
    assert net.lm_head.weight is net.model.embed_tokens.weight


def test_pretrained_values_are_the_files(tmp_path: Path) -> None:
    net = build(pretrained(tmp_path / "m"))
    saved = load_file(tmp_path / "m" / "model.safetensors")
    assert torch.equal(net.lm_head.weight, saved["lm_head.weight"])


def test_weights_go_from_the_files_onto_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below ZeRO-3 a rank on a GPU never has the whole model in host memory."""
    cfg, asked = pretrained(tmp_path / "m"), []
    load = transformers.AutoModelForCausalLM.from_pretrained

    def watched(*args: object, **kwargs: object) -> object:
        asked.append(kwargs.get("device_map"))
        return load(*args, **kwargs)

    monkeypatch.setattr(hf_model.AutoModelForCausalLM, "from_pretrained", watched)
    device = torch.device("cpu")
    onto, plain = build(cfg, onto=device), build(cfg)
    assert asked == [{"": device}, None]
    for (name, there), here in zip(onto.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(there, here), name
    assert [torch.equal(a, b) for a, b in zip(onto.buffers(), plain.buffers(), strict=True)].count(False) == 0


def test_pretrained_keeps_what_architecture_does_not_say(tmp_path: Path) -> None:
    make_model(tmp_path / "m", rope_parameters={"rope_type": "default", "rope_theta": 123.0})
    cfg = ModelConfig(
        init=ModelInit.pretrained,
        path=str(tmp_path / "m"),
        architecture={"model_type": "llama", "hidden_size": 32},
    )
    assert hf_model.load_config(cfg).rope_parameters["rope_theta"] == 123.0


def test_architecture_that_contradicts_the_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hidden_size=99 \(the folder has 32\)"):
        build(pretrained(tmp_path / "m", architecture={"model_type": "llama", "hidden_size": 99}))


def test_a_folder_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    cfg = pretrained(tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    weights = load_file(path)
    del weights["model.norm.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 missing .*model\.norm\.weight"):
        build(cfg)


def test_pickled_weights_need_a_word(tmp_path: Path) -> None:
    cfg = pretrained(tmp_path / "m")
    weights = load_file(tmp_path / "m" / "model.safetensors")
    (tmp_path / "m" / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"model\.allow_pickle=true"):
        build(cfg)
    cfg.allow_pickle = True
    assert torch.equal(build(cfg).lm_head.weight, weights["lm_head.weight"])


@pytest.mark.parametrize(
    ("cfg", "text"),
    [
        (ModelConfig(architecture={"hidden_size": 32}), "model_type"),
        (ModelConfig(architecture={"model_type": "lama"}), "lama"),
        (ModelConfig(init=ModelInit.pretrained, path="/no/such/folder"), "model.path=/no/such/folder"),
    ],
)
def test_what_cannot_be_configured_names_the_option(cfg: ModelConfig, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        hf_model.load_config(cfg)


def test_broken_config_json_names_the_folder(tmp_path: Path) -> None:
    make_model(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model\.path="):
        hf_model.load_config(ModelConfig(init=ModelInit.pretrained, path=str(tmp_path / "m")))


def test_a_config_without_a_causal_language_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ConfigError, match="causal"):
        cfg = ModelConfig(init=ModelInit.pretrained, path=str(tmp_path))
        hf_model.facts(hf_model.skeleton(hf_model.load_config(cfg), cfg))


def test_facts_are_those_of_the_real_model() -> None:
    cfg = ModelConfig(architecture=TINY)
    real = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY))
    facts = hf_model.facts(hf_model.skeleton(hf_model.load_config(cfg), cfg))
    assert facts.num_params == sum(p.numel() for p in real.parameters())
    assert facts.class_name == "LlamaForCausalLM"


def test_a_tokenizer_larger_than_the_embedding_is_refused() -> None:
    config = hf_model.load_config(ModelConfig(architecture=TINY))
    hf_model.check_vocabulary(config, 64, "mine")
    with pytest.raises(ConfigError, match=r"model\.tokenizer=mine has 65 tokens"):
        hf_model.check_vocabulary(config, 65, "mine")
