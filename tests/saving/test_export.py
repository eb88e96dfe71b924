"""Files against `save_pretrained` of a plain model, which is the reference; no engine."""

from __future__ import annotations

import importlib
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from remat.config.options import ConfigError
from remat.saving import manifest
from remat.saving.exports import export, hf_files
from remat.saving.manifest import SaveError

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 31,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, **SIZES},
    "llama-untied": {"model_type": "llama", "tie_word_embeddings": False, **SIZES},
    "gpt2-tied": {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 31},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 3, **SIZES},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "head_dim": 8,
        **SIZES,
    },
}


def model(name: str) -> PreTrainedModel:
    fields = dict(MODELS[name])
    torch.manual_seed(1)
    built = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    built.config.use_cache = False
    return built


def engine(net: torch.nn.Module) -> Any:
    return SimpleNamespace(module=net, optimizer=None, zero_optimization_stage=lambda: 0, autotp_size=lambda: 0)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def same_tensors(one: Path, other: Path) -> bool:
    first, second = load_file(one), load_file(other)
    same = (
        value.dtype == second[name].dtype and torch.equal(value, second[name]) for name, value in first.items()
    )
    return first.keys() == second.keys() and all(same)


@pytest.mark.parametrize("max_shard_size", ["3KB", "1GB"])
@pytest.mark.parametrize("name", MODELS)
def test_files_equal_save_pretrained(tmp_path: Path, name: str, max_shard_size: str) -> None:
    net = model(name)
    result = export.export(engine(net), tmp_path / "out", export.Form(max_shard_size), tokenizer=None)
    net.save_pretrained(tmp_path / "reference")
    expected, written = tensors(tmp_path / "reference"), tensors(tmp_path / "out")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[key], value) for key, value in expected.items())
    assert result.num_params == sum(value.numel() for value in expected.values())
    assert result.bytes == sum(value.nbytes for value in expected.values())
    assert (len(result.files) > 1) == (max_shard_size == "3KB")
    if len(result.files) > 1:
        index = json.loads((tmp_path / "out" / hf_files.INDEX).read_text())
        assert index["weight_map"].keys() == expected.keys()
        assert set(index["weight_map"].values()) == set(result.files)
        assert index["metadata"]["total_size"] == result.bytes
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    reference = json.loads((tmp_path / "reference" / "config.json").read_text())
    assert config == reference | {"use_cache": True}  # training switched the cache off
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    ids = torch.arange(8).view(1, 8)
    assert torch.equal(reloaded(ids).logits, net.eval()(ids).logits)


def test_only_one_shard_is_held_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    original = hf_files.Shards.add

    def watched(self: hf_files.Shards, values: dict[str, torch.Tensor]) -> None:
        original(self, values)
        held.append(sum(t.nbytes for shard in self.open.values() for t in shard.values()))

    monkeypatch.setattr(hf_files.Shards, "add", watched)
    result = export.export(engine(model("llama-untied")), tmp_path / "out", export.Form("3KB"), tokenizer=None)
    assert max(held) <= 3000 < result.bytes / 5
    assert held[-1] == 0


@pytest.mark.parametrize("name", MODELS)
def test_ranks_that_share_the_files_write_what_one_writes(tmp_path: Path, name: str) -> None:
    """File for file. A file is of one rank; a layer whose files are of several ranks is converted on each of them."""
    net, ranks = model(name), 3
    export.export(engine(net), tmp_path / "one", export.Form("3KB"), tokenizer=None)
    plan = hf_files.plan(type(net), net.config, torch.float32, "3KB", getattr(net, "_weight_conversions", None))
    shared, kept, names = tmp_path / "shared", list[int](), list[str]()
    shared.mkdir()
    for rank in range(ranks):
        files, read = plan.files_of(rank, ranks), list[bool]()

        def reader(name: str, keep: bool, read: list[bool] = read) -> torch.Tensor | None:
            read.append(keep)
            return net.state_dict()[name] if keep else None

        assert export._write_files(hf_files.Shards(shared, plan, files), reader) is None
        assert sorted(path.name for path in shared.iterdir()) == sorted([*names, *files])
        names += files
        kept.append(sum(read))
    assert sorted(names) == sorted(plan.split.filename_to_tensors) and min(kept) > 0
    if max(len(unit) for unit in plan.units) == 1:
        assert sum(kept) == len(plan.units)  # each weight is copied on one rank alone
    for file in names:
        assert same_tensors(shared / file, tmp_path / "one" / file), file


def test_files_are_dealt_by_their_bytes(tmp_path: Path) -> None:
    net = model("llama-untied")
    plan = hf_files.plan(type(net), net.config, torch.float32, "3KB", None)
    numels = {
        file: sum(plan.shapes[n].numel() for n in names)
        for file, names in plan.split.filename_to_tensors.items()
    }
    for writers in (1, 2, 3, 40):
        dealt = [plan.files_of(rank, writers) for rank in range(writers)]
        assert sorted(file for files in dealt for file in files) == sorted(numels)
        loads = [sum(numels[file] for file in files) for files in dealt]
        assert max(loads) - min(loads) <= max(numels.values())


def test_a_file_is_written_while_the_next_weights_of_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next file of the same rank waits, so that a rank holds one file."""
    net = model("llama-untied")
    plan = hf_files.plan(type(net), net.config, torch.float32, "3KB", None)
    go, told, original = threading.Event(), list[str](), hf_files.save_file

    def slow(tensors: dict[str, torch.Tensor], path: Path, **settings: Any) -> None:
        assert go.wait(timeout=60)
        told.append(f"wrote {path.name}")
        original(tensors, path, **settings)

    def reader(name: str, keep: bool) -> torch.Tensor | None:
        told.append(f"{'kept' if keep else 'read'} {name}")
        if told.count(told[-1]) == 1 and not keep and len(told) > 1:
            go.set()  # of another rank, while this one's first file waits to be written
        return net.state_dict()[name] if keep else None

    monkeypatch.setattr(hf_files, "save_file", slow)
    shards = hf_files.Shards(tmp_path, plan, plan.files_of(0, 2))
    assert export._write_files(shards, reader) is None
    first = next(index for index, text in enumerate(told) if text.startswith("wrote"))
    assert any(text.startswith("read") for text in told[:first])
    held = 0
    for text in told:
        held += text.startswith("kept")
        if text.startswith("wrote"):
            held -= len(plan.split.filename_to_tensors[text.split()[1]])
            assert held == 0  # nothing of the next file was kept before this one was written


def test_dtype_and_tokenizer_and_generation_settings(tmp_path: Path) -> None:
    net = model("llama-tied")
    assert net.generation_config is not None
    net.generation_config.temperature = 0.3  # contradicts do_sample=False: save_pretrained would refuse
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    export.export(engine(net), tmp_path / "out", export.Form(dtype=torch.bfloat16), tokenizer=tokenizer)
    assert {value.dtype for value in tensors(tmp_path / "out").values()} == {torch.bfloat16}
    assert AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("b")["input_ids"] == [1]
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["temperature"] == 0.3
    assert net.config.use_cache is False and net.dtype == torch.float32  # the live model is left alone


def test_a_former_export_is_replaced_anything_else_is_not(tmp_path: Path) -> None:
    net = model("llama-tied")
    export.export(engine(net), tmp_path / "out", export.Form("3KB"), tokenizer=None)
    result = export.export(engine(net), tmp_path / "out", export.Form("1GB"), tokenizer=None)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert [p.name for p in (tmp_path / "out").glob("*.safetensors")] == result.files
    net.save_pretrained(tmp_path / "theirs")
    before = sorted((tmp_path / "theirs").iterdir())
    with pytest.raises(ConfigError, match=r"theirs exists and is not a former export"):
        export.export(engine(net), tmp_path / "theirs", export.Form("1GB"), tokenizer=None)
    assert sorted((tmp_path / "theirs").iterdir()) == before


def test_what_killed_exports_left_is_removed_and_folders_alike_by_name_stay(tmp_path: Path) -> None:
    net, theirs = model("llama-tied"), ["tmp-out-1234567", "tmp-out-backup", "tmp-out-backup-0123abcd"]
    for name in (*theirs, "tmp-out-0123abcd", "tmp-[out]-0123abcd"):
        (tmp_path / name).mkdir()
    for name in ("out", "[out]"):
        export.export(engine(net), tmp_path / name, export.Form("1GB"), tokenizer=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["[out]", "out", *theirs]


def test_a_model_unlike_its_config_is_refused(tmp_path: Path) -> None:
    def error(net: PreTrainedModel) -> str:
        with pytest.raises(SaveError) as caught:
            export.export(engine(net), tmp_path / "out", export.Form("1GB"), tokenizer=None)
        assert not any(tmp_path.iterdir())
        return str(caught.value)

    extra = model("llama-tied")
    extra.model.adapter = torch.nn.Linear(2, 2)
    assert "a plain LlamaForCausalLM has no ['model.adapter.weight', 'model.adapter.bias']" in error(extra)
    lacking = model("llama-tied")
    del lacking.model.norm
    assert "this model has no ['model.norm.weight']" in error(lacking)
    resized = model("llama-untied")
    resized.lm_head = torch.nn.Linear(16, 33, bias=False)
    assert "lm_head.weight has shape (33, 16)" in error(resized)
    apart = model("llama-tied")
    apart.lm_head.weight = torch.nn.Parameter(apart.lm_head.weight.detach().clone())
    assert "ties lm_head.weight to model.embed_tokens.weight, but the trained model holds both" in error(apart)


def test_what_was_written_is_checked(tmp_path: Path) -> None:
    net = model("llama-untied")
    plan = hf_files.plan(type(net), net.config, torch.float32, "1GB", None)
    shards = hf_files.Shards(tmp_path, plan, plan.files_of(0, 1))
    for unit in plan.units:
        shards.add({name: net.state_dict()[name] for name in unit})
    shards.close()
    shards.check()
    whole = load_file(tmp_path / "model.safetensors")
    save_file(whole | {"model.norm.weight": torch.empty(0)}, tmp_path / "model.safetensors")
    with pytest.raises(SaveError, match=r"model.norm.weight was written as \(0,\), expected \(16,\)"):
        shards.check()
    del whole["lm_head.weight"]
    save_file(whole, tmp_path / "model.safetensors")
    with pytest.raises(SaveError, match=r"lm_head.weight was written as None, expected \(31, 16\)"):
        shards.check()


def test_a_bad_shard_size_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"save.max_shard_size=5 gigs"):
        export.export(engine(model("llama-tied")), tmp_path / "o", export.Form("5 gigs"), tokenizer=None)


def test_code_of_a_custom_model_goes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "custom_llama.py").write_text(
        "from transformers import LlamaForCausalLM\n\n\nclass CustomLlama(LlamaForCausalLM):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    custom = importlib.import_module("custom_llama").CustomLlama
    custom.register_for_auto_class("AutoModelForCausalLM")
    net = custom(model("llama-tied").config)
    export.export(engine(net), tmp_path / "out", export.Form("1GB"), tokenizer=None)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["auto_map"] == {"AutoModelForCausalLM": "custom_llama.CustomLlama"}
    assert config["architectures"] == ["CustomLlama"]
    assert "class CustomLlama" in (tmp_path / "out" / "custom_llama.py").read_text()


def saved_state(run: Path, *, files: dict[str, bytes], zero_stage: int) -> Path:
    state = run / "saved" / "step-000001"
    for name, content in files.items():
        (state / name).parent.mkdir(parents=True, exist_ok=True)
        (state / name).write_bytes(content)
    info = manifest.Manifest(
        step=1,
        sequence=1,
        world_size=1,
        zero_stage=zero_stage,
        precision="bf16",
        layout="",
        frozen_excluded=False,
        created="2026-01-01T00:00:00+00:00",
        versions={},
        client_state={},
        files=manifest.describe(state, manifest.files_in(state)),
    )
    manifest.write(state, info)
    return state


def test_offline_export_says_why_it_cannot(tmp_path: Path) -> None:
    def error(state: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            export.export_saved_state(state, tmp_path, tmp_path / "out", export.Form())
        assert not (tmp_path / "out").exists()
        return str(caught.value)

    state = saved_state(tmp_path, files={"engine/offloaded_tensors/rank00/0.swp": b"x"}, zero_stage=3)
    assert f"{tmp_path}/model/config.json is missing" in error(state)
    export.write_config_and_tokenizer(tmp_path, model("llama-tied").config, None)
    assert "NVMe files" in error(state)
    (state / "engine/offloaded_tensors/rank00/0.swp").write_bytes(b"y")
    assert "content changed" in error(state)
    AutoConfig.for_model("t5").save_pretrained(tmp_path / "model")
    state = saved_state(tmp_path, files={"engine/mp_rank_00_model_states.pt": b"x"}, zero_stage=0)
    assert "t5 is not one causal language model" in error(state)


def test_offline_export_names_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "saved" / "step-000001").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"step-000001 is not complete: manifest.json is missing"):
        export.export_saved_state(tmp_path / "saved" / "step-000001", tmp_path, tmp_path / "out", export.Form())
