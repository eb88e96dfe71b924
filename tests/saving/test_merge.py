"""Merged models against the adapted ones they come from, and what becomes of a base in 4 bits. No engine."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from remat.config.options import (
    ConfigError,
    ModelConfig,
    ModelInit,
    PeftConfig,
    PeftMethod,
    RunConfig,
    TrainConfig,
)
from remat.machine.host_memory import HostMemory
from remat.model import adapters
from remat.model.layers import decoder_layers
from remat.saving.exports import export, hf_files, merge
from tests.support.grids import cases

SIZES: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = {"model_type": "llama", "tie_word_embeddings": False, **SIZES, **HEADS}
TIED = LLAMA | {"tie_word_embeddings": True}
GPT2 = {"model_type": "gpt2", "vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 3, **SIZES, **HEADS}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": (LLAMA, {}),
    "some": (LLAMA, {"target_modules": ["q_proj", "down_proj"]}),
    "rslora": (LLAMA, {"rslora": True}),
    "dora": (LLAMA, {"dora": True}),
    "dora on gpt2": (GPT2, {"dora": True}),
    "gpt2": (GPT2, {}),
    "mixture": (MIXTRAL, {}),
    "modules to save": (LLAMA, {"modules_to_save": ["embed_tokens", "norm", "lm_head"]}),
    "tied": (TIED, {}),
    "tied, the embedding trained": (TIED, {"modules_to_save": ["embed_tokens"]}),
    "tied, the head trained": (TIED, {"modules_to_save": ["lm_head"]}),
    "qlora": (LLAMA, {"method": PeftMethod.qlora}),
    "qlora on some of gpt2": (GPT2, {"method": PeftMethod.qlora, "target_modules": ["c_attn"]}),
}
IDS = torch.arange(24)[None] * 3 % 96


def base_at(folder: Path, fields: dict[str, Any], seed: int = 1) -> Path:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).save_pretrained(folder)
    return folder


def adapted(base: Path, cfg: PeftConfig) -> PeftModel:
    """As a run builds it, with adapters that do something."""
    net: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    layers = decoder_layers(net)
    if cfg.method is PeftMethod.qlora:
        adapters.quantise(net, layers, torch.float32, torch.device("cpu"))
    wrapped = adapters.add_lora(net, cfg, layers=decoder_layers(net), ds_config={}, zero_stage=0, seed=3).eval()
    torch.manual_seed(7)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    return wrapped


def engine(net: nn.Module) -> Any:
    return SimpleNamespace(module=net, optimizer=None, zero_optimization_stage=lambda: 0, autotp_size=lambda: 0)


def run_of(base: Path, peft: PeftConfig) -> RunConfig:
    model = ModelConfig(init=ModelInit.pretrained, path=str(base))
    return RunConfig(model=model, peft=peft, train=TrainConfig(precision="fp32"))  # type: ignore[arg-type]


@torch.no_grad()
def logits(net: Any) -> torch.Tensor:
    return net.eval()(input_ids=IDS).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", cases(KINDS, {"lora", "gpt2", "tied"}))  # each is in a richer one
def test_a_merged_model_answers_as_the_adapted_one(kind: str, tmp_path: Path) -> None:
    """In the run, and from its exported adapters and the base on disk: the same files, in plain transformers."""
    fields, more = KINDS[kind]
    peft = PeftConfig(**({"method": PeftMethod.lora, "r": 4, "alpha": 8} | more))
    base = base_at(tmp_path / "base", fields)
    net = adapted(base, peft)
    expected, before = logits(net), {name: value.clone() for name, value in net.state_dict().items()}
    live = merge.export_merged(engine(net), tmp_path / "live", export.Form("100KB"), tokenizer=None)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    found, report = AutoModelForCausalLM.from_pretrained(live.path, output_loading_info=True)
    assert not isinstance(found, PeftModel) and not any(
        report[key] for key in ("missing_keys", "unexpected_keys")
    )
    assert torch.allclose(logits(found), expected, rtol=0, atol=2e-5)
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert (logits(plain) - expected).abs().max() > 0.05, "the adapters do something"
    assert "quantization_config" not in json.loads((live.path / "config.json").read_text())
    assert len(live.files) > 1

    run = tmp_path / "run"
    card = copy.deepcopy(net.get_base_model().config)
    export.write_config_and_tokenizer(run, card, None, None, hf_files.find_adapter_config(net))
    export.export(engine(net), run / "export", export.Form("1GB"), tokenizer=None)
    offline = merge.merge_folder(run / "export", run, run / "merged", export.Form("100KB"), run_of(base, peft))
    assert offline.files == live.files
    state, other = found.state_dict(), AutoModelForCausalLM.from_pretrained(offline.path).state_dict()
    assert state.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in state.items()
    )


@pytest.mark.parametrize("kind", ["lora", "mixture", "tied, the embedding trained"])
def test_ranks_that_share_the_files_write_what_one_writes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields, more = KINDS[kind]
    net = adapted(
        base_at(tmp_path / "base", fields), PeftConfig(**({"method": PeftMethod.lora, "r": 4} | more))
    )
    one = merge.export_merged(engine(net), tmp_path / "one", export.Form("100KB"), tokenizer=None)
    given: list[Any] = []
    monkeypatch.setattr(export, "write", lambda *parts: given.extend(parts))
    merge.export_merged(engine(net), tmp_path / "shared", export.Form("100KB"), tokenizer=None)
    plan, read, shared = given[0], given[1], tmp_path / "shared"
    shared.mkdir()
    for rank in range(3):
        files = plan.files_of(rank, 3)
        assert files and export._write_files(hf_files.Shards(shared, plan, files), read) is None
    assert sorted(path.name for path in shared.iterdir()) == sorted(one.files)
    for name in one.files:
        first, second = load_file(one.path / name), load_file(shared / name)
        assert first.keys() == second.keys()
        assert all(torch.equal(value, second[key]) for key, value in first.items())


def test_other_precisions_are_merged_in_fp32_and_then_cast(tmp_path: Path) -> None:
    peft = PeftConfig(method=PeftMethod.lora, r=4)
    net = adapted(base_at(tmp_path / "base", LLAMA), peft)
    whole, half = (
        AutoModelForCausalLM.from_pretrained(
            merge.export_merged(engine(net), tmp_path / name, export.Form(dtype=dtype), tokenizer=None).path,
            dtype="auto",
        )
        for name, dtype in (("whole", None), ("half", torch.bfloat16))
    )
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    for name, value in half.state_dict().items():
        if "layers" not in name:
            assert torch.equal(value, whole.state_dict()[name].bfloat16()), name
    net.bfloat16()
    exact = merge.export_merged(
        engine(net), tmp_path / "exact", export.Form(dtype=torch.float32), tokenizer=None
    ).path
    layer = net.get_base_model().model.layers[0].self_attn.q_proj
    delta = (
        layer.scaling["default"]
        * layer.lora_B["default"].weight.float()
        @ layer.lora_A["default"].weight.float()
    )
    merged = AutoModelForCausalLM.from_pretrained(exact).model.layers[0].self_attn.q_proj.weight
    assert torch.allclose(merged, layer.base_layer.weight.float() + delta, rtol=0, atol=1e-6)


def test_what_cannot_be_merged_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(cfg: RunConfig, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            merge.merge_folder(tmp_path, tmp_path, tmp_path / "out", export.Form(), cfg)
        assert not (tmp_path / "out").exists()

    peft = PeftConfig(method=PeftMethod.lora)
    refused(RunConfig(), ConfigError, "there are no adapters to merge; leave out --merge")
    refused(RunConfig(peft=peft), ConfigError, "drawn at random.*save.merge=true")
    refused(run_of(tmp_path / "gone", peft), ConfigError, "gone does not exist")
    base = base_at(tmp_path / "base", LLAMA)
    monkeypatch.setattr(merge, "host_memory", lambda: HostMemory(2**30, 2**10, 2**30))
    refused(
        run_of(base, peft), merge.NoRoom, r"base takes .* of host memory .* 1.0 KiB are free: merge on a larger"
    )
