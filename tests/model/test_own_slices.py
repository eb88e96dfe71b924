"""Where weights lie in files is found from headers alone; what cannot be read in slices says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import ConversionOps, WeightConverter

from remat.config.options import Attention, ConfigError, ModelConfig, ModelInit, ModelLoad
from remat.model import hf_model, own_slices
from remat.model.own_slices import Layout, NotSliced
from tests.support import small_models
from tests.support.tiny import make_model


def cfg_of(folder: Path) -> ModelConfig:
    return ModelConfig(init=ModelInit.pretrained, path=str(folder), attention=Attention.eager)


def locate(folder: Path) -> Layout:
    cfg = cfg_of(folder)
    return own_slices.locate(hf_model.skeleton(hf_model.load_config(cfg), cfg), cfg)


def values(layout: Layout, name: str) -> torch.Tensor:
    """What the runs of a weight hold, one after the other."""
    parts = [
        torch.frombuffer(
            bytearray(run.file.read_bytes()), dtype=run.dtype, count=run.elements, offset=run.offset
        )
        for run in layout.runs[name]
    ]
    return torch.cat(parts)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_the_runs_hold_the_weights(tmp_path: Path, name: str) -> None:
    net = small_models.build(name, vocab_size=67)
    net.save_pretrained(tmp_path, max_shard_size="50KB")
    layout = locate(tmp_path)
    for weight, value in net.state_dict().items():
        if weight in layout.runs:
            assert torch.equal(values(layout, weight), value.flatten()), weight
    whole = set(net.state_dict(keep_vars=True).values())
    assert layout.model_bytes == sum(value.numel() * value.element_size() for value in whole)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 64])
def test_the_ranks_read_every_byte_once(tmp_path: Path, ranks: int) -> None:
    layout = locate(make_model(tmp_path, vocab_size=67))
    assert layout.sharded == layout.runs.keys()
    assert sum(layout.read_bytes(rank, ranks) for rank in range(ranks)) == layout.model_bytes


def test_a_buffer_is_read_whole_by_each_rank(tmp_path: Path) -> None:
    small_models.build("gpt_neox").save_pretrained(tmp_path)
    layout = locate(tmp_path)
    layout = Layout(layout.runs, layout.sharded - {"gpt_neox.embed_in.weight"}, [])
    extra = 64 * 32 * 4
    assert sum(layout.read_bytes(rank, 2) for rank in (0, 1)) == layout.model_bytes + extra


class Moves(ConversionOps):
    """What comes out of `change`."""

    def __init__(self, change: Any) -> None:
        self.change = change

    def convert(self, input_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        (weights,) = input_dict.values()
        return {"mlp.down_proj.weight": self.change(weights[0])}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: w + 1, "are computed"),
        (lambda w: (w + w.flip(0)) // 2, "are computed"),
        (lambda w: 2 * w - w.flip(0), "are computed"),
        (lambda w: w.flip(1), "columns of model.layers.0.mlp.down_proj.weight change places"),
        (lambda w: w.roll(1, 1), "change places"),
        (lambda w: w.T.contiguous(), "cut or turned"),
        (lambda w: w[:, :-1], "cut or turned"),
        (lambda w: w.float(), "cut or turned"),
        (lambda w: torch.linalg.inv(w), "needs their values"),
    ],
)
def test_a_conversion_that_does_more_than_move_rows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, reason: str
) -> None:
    make_model(tmp_path)
    pattern = "mlp.down_proj.weight"
    monkeypatch.setattr(
        own_slices,
        "get_model_conversion_mapping",
        lambda net: [WeightConverter(pattern, pattern, [Moves(change)])],
    )
    with pytest.raises(NotSliced, match=reason):
        locate(tmp_path)


def test_a_conversion_that_moves_rows_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path)
    pattern = "mlp.down_proj.weight"
    monkeypatch.setattr(
        own_slices,
        "get_model_conversion_mapping",
        lambda net: [WeightConverter(pattern, pattern, [Moves(lambda w: w.roll(3, 0))])],
    )
    layout, name = locate(tmp_path), "model.layers.0.mlp.down_proj.weight"
    weight = load_file(tmp_path / "model.safetensors")[name]
    assert len(layout.runs[name]) == 2
    assert torch.equal(values(layout, name), weight.roll(3, 0).flatten())


def test_a_group_of_too_many_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_models.build("mixtral").save_pretrained(tmp_path)
    monkeypatch.setattr(own_slices, "MOST_TRACED", 200)
    with pytest.raises(NotSliced, match="256 rows"):
        locate(tmp_path)


def test_many_small_pieces_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path, hidden_size=128)
    pattern = "mlp.down_proj.weight"
    monkeypatch.setattr(
        own_slices,
        "get_model_conversion_mapping",
        lambda net: [WeightConverter(pattern, pattern, [Moves(lambda w: w.flip(0))])],
    )
    with pytest.raises(NotSliced, match="128 small pieces"):
        locate(tmp_path)


def without_a_weight(folder: Path) -> None:
    file = folder / "model.safetensors"
    held = load_file(file)
    del held["model.norm.weight"]
    save_file(held, file, metadata={"format": "pt"})


def in_integers(folder: Path) -> None:
    file = folder / "model.safetensors"
    held = load_file(file)
    held["model.norm.weight"] = held["model.norm.weight"].to(torch.int8)
    save_file(held, file, metadata={"format": "pt"})


def in_another_shape(folder: Path) -> None:
    file = folder / "model.safetensors"
    held = load_file(file)
    held["model.norm.weight"] = torch.ones(7)
    save_file(held, file, metadata={"format": "pt"})


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def with_adapters(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def distributed_checkpoint(folder: Path) -> None:
    (folder / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"")


def quantised(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))


def weights_elsewhere(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "other.safetensors"}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_a_weight, r"1 weights are not in the files \(for example model.norm.weight\)"),
        (in_integers, "model.norm.weight is stored as I8"),
        (in_another_shape, r"model.norm.weight is \(7,\) in the file, \(32,\) in the model"),
        (pickled, "no model.safetensors"),
        (with_adapters, "adapters"),
        (distributed_checkpoint, "a distributed checkpoint"),
        (quantised, "quantised"),
        (weights_elsewhere, "names weight files of its own"),
    ],
)
def test_files_that_transformers_must_read_say_why(tmp_path: Path, change: Any, reason: str) -> None:
    make_model(tmp_path)
    change(tmp_path)
    with pytest.raises(NotSliced, match=reason):
        locate(tmp_path)


def test_a_damaged_header_is_named(tmp_path: Path) -> None:
    file = make_model(tmp_path) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8:20] = b"{{{{{{{{{{{{"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors has a damaged header"):
        locate(tmp_path)


def test_an_index_that_is_not_whole_is_left_to_transformers(tmp_path: Path) -> None:
    file = make_model(tmp_path) / "model.safetensors"
    file.rename(tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(NotSliced, match=r"index\.json is not whole"):
        locate(tmp_path)


@pytest.mark.parametrize("left", [4, 100, -1])
def test_a_file_that_is_cut_off_is_no_reason_to_read_otherwise(tmp_path: Path, left: int) -> None:
    file = make_model(tmp_path) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:left])
    with pytest.raises(ConfigError, match=r"model\.safetensors is cut off.*copy or download it again"):
        locate(tmp_path)


STAGE_3 = {"stage": 3}


@pytest.mark.parametrize(
    ("ds", "reason"),
    [
        ({"zero_optimization": {"stage": 2}}, "ZeRO stage 2"),
        ({"zero_optimization": STAGE_3, "tensor_parallel": {"autotp_size": 2}}, None),
        ({"zero_optimization": STAGE_3 | {"offload_param": {"device": "nvme"}}}, "NVMe"),
        ({"zero_optimization": STAGE_3 | {"zero_hpz_partition_size": 8}}, "second shard"),
        ({"zero_optimization": STAGE_3 | {"zero_quantized_nontrainable_weights": True}}, "quantised shards"),
        ({"zero_optimization": STAGE_3 | {"offload_param": {"device": "cpu"}}}, None),
    ],
)
def test_what_options_rule_out(ds: dict[str, Any], reason: str | None) -> None:
    found = own_slices.refuse(ModelConfig(), ds)
    assert found is None if reason is None else reason in str(found)


def test_code_that_comes_with_a_model_rules_it_out() -> None:
    assert "code of its own" in str(
        own_slices.refuse(ModelConfig(trust_remote_code=True), {"zero_optimization": STAGE_3})
    )


def test_the_refusal_names_option_value_and_remedy() -> None:
    text = own_slices.refusal(ModelConfig(path="m", load=ModelLoad.own_slices), "because")
    assert text.startswith("model.load=own_slices: model.path=m") and "use model.load=auto" in text
