"""Adapters go where they should, count as they should, start as they should, and are written as peft writes them."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.neftune import neftune_post_forward_hook

from remat.config import compose, validation
from remat.config.options import (
    ConfigError,
    LossKind,
    ModelConfig,
    ModelInit,
    PeftConfig,
    PeftMethod,
    Precision,
)
from remat.model import adapters, flops, hf_model, loss, noise
from remat.model.layers import decoder_layers
from remat.planning import strategy
from remat.planning.plan import Recordings
from remat.saving.exports import export
from tests.support.pool import RankPool

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4}
ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
FOUND = [
    ({"model_type": "llama", **SIZES}, ATTENTION + MLP),
    ({"model_type": "qwen2", **SIZES}, ATTENTION + MLP),
    ({"model_type": "gemma", "head_dim": 8, **SIZES}, ATTENTION + MLP),
    ({"model_type": "phi", **SIZES}, ["q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"]),
    ({"model_type": "mixtral", "num_local_experts": 4, **SIZES}, ATTENTION),
    (GPT2, ["c_attn", "c_proj", "c_fc"]),
]
LLAMA = FOUND[0][0]


def config(**more: Any) -> PeftConfig:
    return PeftConfig(method=PeftMethod.lora, r=4, alpha=8, **more)


def built(fields: dict[str, Any], **more: Any) -> Any:
    cfg = ModelConfig(architecture=fields)
    return hf_model.build(
        cfg, hf_model.load_config(cfg), precision=Precision.fp32, ds_config={}, zero_stage=0, seed=3, **more
    )


def adapted(net: Any, cfg: PeftConfig, seed: int = 3) -> PeftModel:
    return adapters.add_lora(net, cfg, layers=decoder_layers(net), ds_config={}, zero_stage=0, seed=seed)


def engine(net: nn.Module) -> Any:
    return SimpleNamespace(module=net, optimizer=None, zero_optimization_stage=lambda: 0)


def filled(net: PeftModel) -> PeftModel:
    """With adapters that do something: B starts at zero."""
    torch.manual_seed(7)
    for parameter in net.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    return net


@pytest.mark.parametrize(("fields", "names"), FOUND, ids=lambda value: str(value)[:24])
def test_every_linear_of_the_decoder_layers_and_nothing_else(fields: dict[str, Any], names: list[str]) -> None:
    net = built(fields)
    assert sorted(adapters.find_targets(decoder_layers(net), [])) == sorted(names)
    wrapped = adapted(net, config())
    inside = {id(module) for layer in decoder_layers(wrapped) for module in layer.modules()}
    holders = [(path, m) for path, m in wrapped.named_modules() if hasattr(m, "lora_A")]
    assert {path.rpartition(".")[2] for path, _ in holders} == set(names)
    assert all(id(module) in inside for _, module in holders)
    assert not hasattr(wrapped.get_output_embeddings(), "lora_A")
    trained = [name for name, p in wrapped.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * len(holders)
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    ids = torch.arange(8)[None]
    wrapped(input_ids=ids, labels=ids).loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in wrapped.parameters())


def test_an_equal_name_outside_the_layers_is_left_alone() -> None:
    net = built(LLAMA)
    net.q_proj = nn.Linear(32, 32)
    wrapped = adapted(net, config(target_modules=["q_proj"]))
    holders = [path for path, m in wrapped.named_modules() if hasattr(m, "lora_A")]
    assert len(holders) == 2
    assert all("layers." in path for path in holders)


@pytest.mark.parametrize("name", ["lm_head", "mlp", "q", "self_attn.q_proj"])
def test_an_unknown_name_lists_what_there_is(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        adapters.find_targets(decoder_layers(built(LLAMA)), ["q_proj", name])
    assert "peft.target_modules" in str(caught.value)
    assert f": {name} is not" in str(caught.value)
    assert "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj" in str(caught.value)


def test_unknown_names_stop_a_run_before_weights_are_read() -> None:
    run = compose.compose_run(["peft=lora", "peft.target_modules=[c_attn]"]).run
    with pytest.raises(ConfigError, match=r"c_attn is not in the decoder layers, which have q_proj"):
        strategy.decide(run, world_size=1, can_pin=False)


def test_parameters_on_nvme_are_refused_and_its_remedy_is_not() -> None:
    words = ["peft=lora", "deepspeed.config=zero3_nvme", "hardware.nvme_path=/tmp"]
    with pytest.raises(ConfigError, match=r"peft\.method=lora.*offload_param\.device=cpu"):
        strategy.decide(compose.compose_run(words).run, world_size=1, can_pin=False)
    remedy = "deepspeed.overrides.zero_optimization.offload_param.device=cpu"
    assert (
        strategy.decide(compose.compose_run([*words, remedy]).run, world_size=1, can_pin=False).zero_stage == 3
    )


def test_first_values_are_pefts_own_and_follow_the_seed() -> None:
    first, again, other = (adapted(built(LLAMA), config(), seed=seed) for seed in (3, 3, 4))
    plain = built(LLAMA)
    for (name, one), two, three in zip(
        first.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(one, two), name
        if ".lora_A." in name:
            assert not torch.equal(one, three)
            bound = one.shape[1] ** -0.5  # uniform with variance 1 / (3 fan_in), as nn.Linear
            assert 0.8 * bound < one.abs().max() <= bound
        elif ".lora_B." in name:
            assert not one.any()
    ids = torch.arange(8)[None]
    assert torch.equal(first(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert first.peft_config["default"].init_lora_weights is True


def values(stage: int, precision: Precision, **more: Any) -> dict[str, Any]:
    """Every parameter gathered, and what `assert_sharded` says at stage 3."""
    import deepspeed

    cfg, ds = ModelConfig(architecture=LLAMA), zero_dict(stage, precision)
    net = hf_model.build(
        cfg, hf_model.load_config(cfg), precision=precision, ds_config=ds, zero_stage=stage, seed=3
    )
    wrapped = adapters.add_lora(
        net, config(**more), layers=decoder_layers(net), ds_config=ds, zero_stage=stage, seed=3
    )
    found: dict[str, Any] = {"shard_bytes": hf_model.assert_sharded(wrapped, 2) if stage == 3 else 0}
    found["resident_bytes"] = sum(p.untyped_storage().nbytes() for p in wrapped.parameters())
    found["values"] = {}
    for name, parameter in wrapped.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found["values"][name] = parameter.detach().clone()
    return found


def zero_dict(stage: int, precision: Precision) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": precision is Precision.bf16},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


WHOLE = {"modules_to_save": ["embed_tokens", "lm_head"]}


@pytest.mark.parametrize(
    ("precision", "more"), [(Precision.fp32, {}), (Precision.bf16, {}), (Precision.bf16, WHOLE)]
)
def test_first_values_do_not_depend_on_rank_or_stage(
    two_ranks: RankPool, precision: Precision, more: dict[str, Any]
) -> None:
    expected = two_ranks.run(values, stage=2, precision=precision, **more)[0]["values"]
    dtype = hf_model.DTYPES[precision]
    whole = sum(value.numel() for value in expected.values()) * dtype.itemsize
    for rank in two_ranks.run(values, stage=3, precision=precision, **more):
        assert rank["values"].keys() == expected.keys()
        for name, value in expected.items():
            assert value.dtype == rank["values"][name].dtype == dtype
            assert torch.equal(value, rank["values"][name]), name
        assert whole / 2 <= rank["shard_bytes"] <= whole / 2 + 4 * len(expected)
        assert rank["resident_bytes"] == 0


def test_adapters_are_counted_before_weights_are_read() -> None:
    words = ["peft=lora", "peft.r=8", "peft.target_modules=[q_proj,down_proj]", "model=tiny_llama"]
    run = compose.compose_run(words).run
    facts = strategy.decide(run, world_size=1, can_pin=False).facts
    plain = strategy.decide(compose.compose_run(["model=tiny_llama"]).run, world_size=1, can_pin=False).facts
    shape = run.model.architecture
    hidden, inner, layers = (shape[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    expected = layers * 8 * ((hidden + hidden) + (inner + hidden))
    assert facts.num_trainable_params == expected
    assert facts.num_params == plain.num_params + expected
    assert facts.largest_trainable_param == 8 * inner
    assert facts.largest_param == plain.largest_param
    assert (plain.num_trainable_params, plain.largest_trainable_param) == (
        plain.num_params,
        plain.largest_param,
    )
    assert facts.class_name == "LlamaForCausalLM"


KINDS: dict[str, dict[str, Any]] = {
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "dora with dropout": {"dora": True, "dropout": 0.1},
    "whole modules": WHOLE,
    "a norm, dora, rslora": {"modules_to_save": ["norm"], "dora": True, "rslora": True},
}


@pytest.mark.parametrize("fields", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("kind", ["rslora", "dora", "dora with dropout"])
def test_each_kind_of_adapter_starts_as_the_model_itself(fields: dict[str, Any], kind: str) -> None:
    net, plain = adapted(built(fields), config(**KINDS[kind])).eval(), built(fields).eval()
    ids = torch.arange(8)[None]
    assert torch.allclose(net(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-6)
    for module in net.modules():
        if "dora" in kind and hasattr(module, "lora_magnitude_vector") and module.lora_magnitude_vector:
            weight = module.get_base_layer().weight
            rows = weight.T if fields is GPT2 else weight
            assert torch.allclose(
                module.lora_magnitude_vector[adapters.ADAPTER].weight.flatten(), rows.norm(dim=1)
            )


def test_rslora_scales_by_the_root_of_the_rank() -> None:
    for rslora, scaling in ((False, 8 / 4), (True, 8 / 2)):
        net = adapted(built(LLAMA), config(rslora=rslora))
        found = {module.scaling[adapters.ADAPTER] for module in net.modules() if hasattr(module, "lora_A")}
        assert found == {scaling}


def test_adapters_find_their_base_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exported from model.path=base, which was typed in the folder that holds it."""
    built(LLAMA).save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    cfg = ModelConfig(init=ModelInit.pretrained, path="base")
    loaded = hf_model.load_config(cfg)
    base = hf_model.build(cfg, loaded, precision=Precision.fp32, ds_config={}, zero_stage=0, seed=3)
    net = filled(adapted(base, config()))
    export.export(engine(net), tmp_path / "export", export.Form(), tokenizer=None)
    monkeypatch.chdir("/")
    ids = torch.arange(8)[None]
    found = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "export")).eval()
    assert torch.equal(found(input_ids=ids).logits, net.eval()(input_ids=ids).logits)
    named = AutoModelForCausalLM.from_config(loaded)
    named.name_or_path = "owner/model"
    assert adapted(named, config()).peft_config["default"].base_model_name_or_path == "owner/model"


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_trained_and_written_as_peft_writes_it(tmp_path: Path, kind: str) -> None:
    net = filled(adapted(built(LLAMA), config(**KINDS[kind])))
    ids = torch.arange(8)[None]
    net(input_ids=ids, labels=ids).loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in net.parameters())
    result = export.export(engine(net), tmp_path / "ours", export.Form("1GB"), tokenizer=None)
    net.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    reloaded = PeftModel.from_pretrained(built(LLAMA), str(result.path)).eval()
    assert torch.equal(reloaded(input_ids=ids).logits, net.eval()(input_ids=ids).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_a_skeleton_of_each_kind_plans_the_same_files(tmp_path: Path, kind: str) -> None:
    from remat.saving.exports import hf_files

    net = adapted(built(LLAMA), config(**KINDS[kind]))
    hf_config = copy.deepcopy(net.get_base_model().config)
    export.write_config_and_tokenizer(tmp_path, hf_config, None, None, hf_files.find_adapter_config(net))
    card = tmp_path / "model"
    model_class = type(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(card)))
    skeleton = hf_files.build_adapter_skeleton(model_class, AutoConfig.from_pretrained(card), card)
    live, offline = (hf_files.plan_adapter(m, torch.float32) for m in (net, skeleton))
    assert (live.shapes, live.units) == (offline.shapes, offline.units)


@pytest.mark.parametrize(
    ("more", "added"),
    [
        ({"dora": True}, 2 * (32 + 16 + 16 + 32 + 64 + 64 + 32)),
        (WHOLE, 2 * 96 * 32),
        ({"modules_to_save": ["norm"]}, 32),
        ({"rslora": True}, 0),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_each_kind_adds_is_counted_exactly(more: dict[str, Any], added: int) -> None:
    """In the model and, without a weight, in the plan."""
    plain, net = adapted(built(LLAMA), config()), adapted(built(LLAMA), config(**more))

    def sizes(model: nn.Module) -> tuple[int, int]:
        parameters = list(model.parameters())
        return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)

    assert sizes(net) == tuple(size + added for size in sizes(plain))
    words = [f"model.architecture.{name}={value}" for name, value in LLAMA.items()]
    options = [f"peft.{name}={str(value).replace(' ', '')}" for name, value in more.items()]
    asked = ["recipe=tiny_zero3_offload", "peft=lora", "peft.r=4", "peft.alpha=8", "deepspeed.config=zero2"]
    run = compose.compose_run([*asked, *words, *options]).run
    facts = strategy.decide(run, world_size=1, can_pin=False).facts
    assert (facts.num_params, facts.num_trainable_params) == sizes(net)


def test_what_cannot_be_is_refused_by_name() -> None:
    words = ["recipe=tiny_zero3_offload", "peft=lora"]
    with pytest.raises(ConfigError, match=r"peft\.dora=true with ZeRO-3.*zero2"):
        strategy.decide(compose.compose_run([*words, "peft.dora=true"]).run, world_size=1, can_pin=False)
    for name in ("q_proj", "nothing"):
        run = compose.compose_run([*words, f"peft.modules_to_save=[{name}]"]).run
        with pytest.raises(
            ConfigError, match=rf"modules_to_save=.*{name} is not outside .* embed_tokens, norm, lm_head"
        ):
            strategy.decide(run, world_size=1, can_pin=False)
    with pytest.raises(ConfigError, match=r"peft\.dora=true with peft\.method=qlora"):
        compose.compose_run(["recipe=tiny_zero3_offload", "peft=qlora", "peft.dora=true"])
    with pytest.raises(ConfigError, match=r"are in peft\.target_modules too"):
        compose.compose_run([*words, "peft.modules_to_save=[q_proj]", "peft.target_modules=[q_proj]"])


@pytest.mark.parametrize("kind", list(LossKind))
def test_the_loss_finds_the_output_layer_that_is_trained(
    monkeypatch: pytest.MonkeyPatch, kind: LossKind
) -> None:
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 7 * 96)
    net = filled(adapted(built(LLAMA), config(**WHOLE)))
    ids = torch.arange(24)[None]
    ours = loss.TokenLoss(net, kind)(net, {"input_ids": ids, "labels": ids})
    assert torch.allclose(ours / 23, net(input_ids=ids, labels=ids).loss, rtol=1e-6)
    ours.backward()
    assert net.get_output_embeddings().modules_to_save[adapters.ADAPTER].weight.grad is not None


def test_a_plan_counts_the_noise_and_one_without_it_does_not() -> None:
    known = Recordings()
    words = ["recipe=tiny_zero3_offload", "train.micro_batch_size=1", "train.global_batch_size=2"]

    def operations(*more: str) -> int:
        cfg = compose.compose_run([*words, *more]).run
        recorded = known.get(cfg, strategy.decide(cfg, world_size=2, can_pin=False), on_gpu=False)
        return len(recorded.timeline.ops)

    assert operations() < operations("train.neftune_alpha=5") == operations("train.neftune_alpha=1")
    assert known.made == 2


def test_noise_is_that_of_neftune_and_only_in_training() -> None:
    net, other, ids = built(LLAMA), built(LLAMA), torch.arange(8)[None]
    plain = net.eval()(input_ids=ids).logits
    noise.add(net, 5.0)
    other.get_input_embeddings().neftune_noise_alpha = 5.0
    other.get_input_embeddings().register_forward_hook(neftune_post_forward_hook)
    assert torch.equal(net(input_ids=ids).logits, plain)
    drawn = []
    for model in (net.train(), other.train()):
        torch.manual_seed(3)
        drawn.append(model(input_ids=ids).logits)
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0], plain)
    noise.add(third := built(LLAMA), 0.0)
    assert torch.equal(third.train()(input_ids=ids).logits, plain)


def test_noise_of_a_block_is_scaled_by_the_whole_sequence() -> None:
    """Of 8 tokens that are one of 4 blocks it is half of what it is for 8 tokens."""
    noisy = []
    for blocks in (1, 4):
        net = built(LLAMA).train()
        noise.add(net, 5.0, blocks=blocks)
        torch.manual_seed(3)
        plain = net.get_input_embeddings().weight[:8]
        noisy.append(net.get_input_embeddings()(torch.arange(8)[None])[0] - plain)
    torch.testing.assert_close(2 * noisy[1], noisy[0])


def test_contradictions_are_named() -> None:
    def problems(**changes: Any) -> str:
        run = compose.compose_run(["peft=lora"]).run
        return "\n".join(validation.problems(dataclasses.replace(run, peft=PeftConfig(**changes))))

    text = problems(method=PeftMethod.lora, r=0, alpha=0, dropout=1.0)
    for part in ("peft.r=0", "peft.alpha=0", "peft.dropout=1"):
        assert part in text
    assert "peft.target_modules=['q_proj'] has no effect" in problems(target_modules=["q_proj"])
    assert problems() == problems(method=PeftMethod.lora) == ""


@pytest.mark.parametrize("kind", list(LossKind))
def test_the_loss_sees_through_the_adapters(monkeypatch: pytest.MonkeyPatch, kind: LossKind) -> None:
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 7 * 96)
    net = filled(adapted(built(LLAMA), config()))
    ids = torch.arange(24)[None]
    ours = loss.TokenLoss(net, kind)(net, {"input_ids": ids, "labels": ids})
    assert torch.allclose(ours / 23, net(input_ids=ids, labels=ids).loss, rtol=1e-6)


def counted_flops(net: PeftModel, seq: int) -> int:
    ids = torch.arange(seq)[None]
    with FlopCounterMode(display=False) as counter:
        net(input_ids=ids, labels=ids).loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("targets", [[], ["q_proj", "k_proj", "v_proj", "down_proj"]], ids=["all", "some"])
def test_frozen_weights_cost_two_thirds(targets: list[str]) -> None:
    """The formula against torch's count, which leaves out norms and what the frozen embedding's side needs not."""
    seq, net = 16, built(LLAMA)
    net.set_attn_implementation("eager")
    wrapped = adapted(net, config(target_modules=targets))
    found = flops.count(copy.deepcopy(wrapped).to("meta"), seq)
    norms = sum(p.numel() for p in wrapped.parameters() if p.dim() == 1)
    of_the_embedding = [
        p.numel()
        for name, p in wrapped.named_parameters()
        if ".layers.0.self_attn." in name and ".o_proj" not in name and ".lora_B." not in name
    ]
    expected = found.model_flops_per_token - 4 * norms - 2 * sum(of_the_embedding)
    assert counted_flops(wrapped, seq) == expected * seq
    full = dataclasses.replace(found, trained_weights=found.weights)
    ratio = found.model_flops_per_token / full.model_flops_per_token
    assert 2 / 3 < ratio < 0.85


def test_the_written_folder_is_pefts_own(tmp_path: Path) -> None:
    net = filled(adapted(built(LLAMA), config(dropout=0.1)))
    result = export.export(engine(net), tmp_path / "ours", export.Form("3KB"), tokenizer=None)
    net.save_pretrained(tmp_path / "theirs")
    assert sorted(p.name for p in result.path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert result.num_params == sum(value.numel() for value in theirs.values())
    reloaded = PeftModel.from_pretrained(built(LLAMA), str(result.path)).eval()
    ids = torch.arange(8)[None]
    assert torch.equal(reloaded(input_ids=ids).logits, net.eval()(input_ids=ids).logits)
    assert reloaded.peft_config["default"].inference_mode
    export.export(engine(net), tmp_path / "ours", export.Form("1GB"), tokenizer=None)  # replaces its own
    with pytest.raises(ConfigError, match="not a former export"):
        export.export(engine(net), tmp_path / "theirs", export.Form("1GB"), tokenizer=None)


def test_export_in_another_dtype(tmp_path: Path) -> None:
    net = filled(adapted(built(LLAMA), config()))
    export.export(engine(net), tmp_path / "out", export.Form(dtype=torch.bfloat16), tokenizer=None)
    with safe_open(tmp_path / "out" / "adapter_model.safetensors", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_a_skeleton_plans_the_same_files(tmp_path: Path) -> None:
    """What `remat export` builds from run_dir/model alone."""
    from remat.saving.exports import hf_files

    net = adapted(built(GPT2), config(target_modules=["c_attn"]))
    hf_config = copy.deepcopy(net.get_base_model().config)
    export.write_config_and_tokenizer(tmp_path, hf_config, None, None, hf_files.find_adapter_config(net))
    card = tmp_path / "model"
    kind = type(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(card)))
    skeleton = hf_files.build_adapter_skeleton(kind, AutoConfig.from_pretrained(card), card)
    assert all(p.is_meta for p in skeleton.parameters())
    live, offline = (hf_files.plan_adapter(m, torch.float32) for m in (net, skeleton))
    assert (live.shapes, live.units) == (offline.shapes, offline.units)
    assert len(live.shapes) == 4
