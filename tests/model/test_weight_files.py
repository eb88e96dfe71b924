"""What is wrong with the weights in a model's folder is found from names and shapes, before any is read."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, Mxfp4Config, PretrainedConfig

from remat.config.options import Attention, ModelConfig, ModelInit, PeftMethod
from remat.model import hf_model, weight_files
from remat.model.four_bits import load_4bit
from tests.model.test_flops import FAMILIES, SIZES
from tests.support import tiny


def cfg_of(folder: Path) -> ModelConfig:
    return ModelConfig(init=ModelInit.pretrained, path=str(folder), attention=Attention.eager)


def differences(folder: Path) -> list[str]:
    cfg = cfg_of(folder)
    return weight_files.find_differences(hf_model.skeleton(hf_model.load_config(cfg), cfg), cfg)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_model_as_it_was_saved_is_fine(family: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(family, **(SIZES | FAMILIES[family]))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert differences(tmp_path) == []


def test_weights_that_a_model_makes_anew_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.make_model(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: w for name, w in load_file(file).items() if name != "lm_head.weight"}, file)
    assert "1 missing" in differences(tmp_path)[0]
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_missing", [r"^lm_head\."])
    assert differences(tmp_path) == []


def change(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def test_another_width_more_layers_and_another_family_are_told(tmp_path: Path) -> None:
    tiny.make_model(tmp_path)
    change(tmp_path, num_hidden_layers=3)
    (told,) = differences(tmp_path)
    assert "9 missing (for example model.layers.2." in told
    change(tmp_path, num_hidden_layers=2, hidden_size=64)
    (told,) = differences(tmp_path)
    assert "model.embed_tokens.weight is 258x32, not 258x64" in told and "missing" not in told
    save_file({"transformer.wte.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    (told,) = differences(tmp_path)
    assert "missing (for example model.embed_tokens.weight" in told and "a LlamaForCausalLM" in told


def test_a_file_that_the_index_does_not_name_is_not_read(tmp_path: Path) -> None:
    whole = LlamaForCausalLM.from_pretrained(tiny.make_model(tmp_path / "whole"))
    folder = tmp_path / "parts"
    whole.save_pretrained(folder, max_shard_size="50KB")
    own = whole.lm_head.weight.detach()
    for name, left in {"model-1-of-1": own + 1, "model-9-of-9": own + 2}.items():  # before and after the others
        save_file({"lm_head.weight": left}, folder / f"{name}.safetensors", metadata={"format": "pt"})
    cfg = cfg_of(folder)
    with ExitStack() as stack:
        model, files = load_4bit.look(cfg, hf_model.load_config(cfg), torch.float32, stack)
        assert torch.equal(files.read(model.lm_head.weight), own)
    save_file({"lm_head.weight": torch.ones(2, 2)}, folder / "model-9-of-9.safetensors")
    assert differences(folder) == []


def test_weights_in_few_bits_are_refused_but_for_those_that_qlora_reads() -> None:
    def found(method: PeftMethod, **quantised: Any) -> list[str]:
        config = PretrainedConfig(quantization_config=quantised)
        return weight_files.refuse_quantised(config, cfg_of(Path("model")), method)

    (told,) = found(PeftMethod.lora, quant_method="mxfp4")
    assert "model.path=model holds weights quantised by mxfp4" in told and "peft=qlora" in told
    assert found(PeftMethod.qlora, quant_method="bitsandbytes", load_in_4bit=True) == []
    assert found(PeftMethod.lora, quant_method="bitsandbytes", load_in_4bit=True)
    assert weight_files.refuse_quantised(PretrainedConfig(), cfg_of(Path("model")), PeftMethod.none) == []


OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "layer_types": ["full_attention"],
}


def test_gpt_oss_restored_from_mxfp4_as_the_docs_say_is_a_model_that_is_trained(tmp_path: Path) -> None:
    folder, restored = tmp_path / "mxfp4", tmp_path / "bf16"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**OSS), dtype=torch.bfloat16).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = weights.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": torch.full_like(blocks[..., 0], 120)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    change(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    cfg = cfg_of(folder)
    assert weight_files.refuse_quantised(hf_model.load_config(cfg), cfg, PeftMethod.lora)
    whole = Mxfp4Config(dequantize=True)
    net = AutoModelForCausalLM.from_pretrained(folder, quantization_config=whole, dtype="bfloat16")
    net._weight_conversions = None
    net.save_pretrained(restored)
    cfg = cfg_of(restored)
    config = hf_model.load_config(cfg)
    assert weight_files.refuse_quantised(config, cfg, PeftMethod.lora) == []
    assert weight_files.find_differences(hf_model.skeleton(config, cfg), cfg) == []
