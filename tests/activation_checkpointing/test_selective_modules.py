"""Parts of a layer that run again: same numbers, once each, and nothing left behind."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from remat.activation_checkpointing import apply, policy, validation
from remat.activation_checkpointing.apply import Applied
from remat.activation_checkpointing.mechanisms.mechanism import Setting
from remat.activation_checkpointing.op_tracer import OpTracer
from remat.config.options import Attention, CheckpointingConfig, ConfigError, Policy
from remat.model.layers import decoder_layers
from tests.support import small_models
from tests.support.pool import RankPool
from tests.support.small_models import build, gradients, same

MODELS = ["llama", "qwen2", "gpt2", "mixtral", "gemma", "phi", "deepseek_v3"]
ROLES = {
    "attention": (["attention"], 1),
    "mlp": (["mlp"], 1),
    "norm": (["norm"], None),
    "activation": (["activation"], None),
    "core_attention": (["core_attention"], 1),
    "all": (["attention", "core_attention", "mlp", "activation", "norm"], None),
}


def put_in_place(net: Any, roles: list[str], *, only: int | None = None, zero_stage: int = 0) -> Applied:
    """`roles` of every layer, or of layer `only`, are recomputed; without roles nothing is."""
    kind = Policy.selective_modules if roles else Policy.none
    cfg = CheckpointingConfig(policy=kind, recompute_modules=roles)
    if only is not None:
        cfg = CheckpointingConfig(policy=Policy.none, layers={only: kind}, recompute_modules=roles)
    decisions = policy.decide_layers(cfg, len(decoder_layers(net)), zero_stage=zero_stage)
    return apply.apply(net, decisions, cfg, zero_stage=zero_stage)


@pytest.mark.sample(one_in=5)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", list(ROLES))
@pytest.mark.parametrize("model_type", MODELS)
def test_bit_equal_to_none(model_type: str, name: str, attention: str) -> None:
    expected = gradients(build(model_type, attention=attention))
    net = build(model_type, attention=attention)
    roles, regions = ROLES[name]
    applied = put_in_place(net, roles)
    counts = applied.counts
    assert same(gradients(net), expected)
    for layer in counts:
        assert layer.expected == layer.recomputations > 0
        assert regions is None or layer.expected == regions
    applied.remove()
    before = [layer.recomputations for layer in counts]
    assert same(gradients(net), expected)
    assert [layer.recomputations for layer in counts] == before


@pytest.mark.parametrize("roles", [["moe"], ["router", "experts"], ["shared_experts"], ["experts", "norm"]])
@pytest.mark.parametrize("model_type", ["qwen2_moe", "mixtral"])
def test_parts_of_a_sparse_block(model_type: str, roles: list[str]) -> None:
    expected = gradients(build(model_type))
    net = build(model_type)
    if model_type == "mixtral" and "shared_experts" in roles:
        with pytest.raises(ConfigError, match="MixtralDecoderLayer has no shared_experts"):
            put_in_place(net, roles)
        return
    counts = put_in_place(net, roles).counts
    assert same(gradients(net), expected)
    assert all(layer.expected == layer.recomputations > 0 for layer in counts)


def test_the_outer_module_wins() -> None:
    net = build("llama")
    counts = put_in_place(net, ["activation", "mlp", "core_attention", "attention"]).counts
    gradients(net)
    assert [layer.recomputations for layer in counts] == [2, 2, 2]


def test_a_model_with_an_attention_registry_of_its_own() -> None:
    """Doge overwrites one name of transformers' registry for itself."""

    def doge() -> Any:
        torch.manual_seed(0)
        config = AutoConfig.for_model("doge", **small_models.SIZES)
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()

    expected, net = gradients(doge()), doge()
    registry = sys.modules[type(net).__module__].ALL_ATTENTION_FUNCTIONS
    before = dict(registry.items())
    applied = put_in_place(net, ["core_attention"])
    assert same(gradients(net), expected)
    assert [layer.recomputations for layer in applied.counts] == [1, 1, 1]
    applied.remove()
    assert dict(registry.items()) == before


def test_undo_leaves_nothing() -> None:
    net = build("llama")
    names = [name for name, _ in net.named_modules()]
    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    layer = net.model.layers[0]
    config, hidden = layer.self_attn.config, layer.mlp.forward
    applied = put_in_place(net, ["mlp", "norm", "core_attention"])
    assert layer.self_attn.config is not config and net.config is config
    assert len(dict(ALL_ATTENTION_FUNCTIONS.items())) == len(before) + 3
    assert [name for name, _ in net.named_modules()] == names
    applied.remove()
    assert dict(ALL_ATTENTION_FUNCTIONS.items()) == before
    assert layer.self_attn.config is config and config._attn_implementation == "sdpa"
    assert layer.mlp.forward == hidden
    assert not any("forward" in module.__dict__ for module in net.modules())


def test_undo_restores_a_forward_that_someone_else_put_there() -> None:
    net = build("llama")
    mine = net.model.layers[0].mlp.forward = net.model.layers[0].mlp.forward
    put_in_place(net, ["mlp"]).remove()
    assert net.model.layers[0].mlp.__dict__["forward"] is mine


def test_only_the_layer_asked_for() -> None:
    net = build("llama")
    counts = put_in_place(net, ["core_attention", "mlp"], only=1).counts
    others = [net.model.layers[0], net.model.layers[2]]
    assert all(layer.self_attn.config is net.config and "forward" not in layer.mlp.__dict__ for layer in others)
    gradients(net)
    assert [layer.recomputations for layer in counts] == [0, 2, 0]


def test_attention_code_reads_the_true_name() -> None:
    """GPT-2 asks whether it is eager to choose another computation, flash functions ask for their version."""
    expected = gradients(
        build("gpt2", attention="eager", reorder_and_upcast_attn=True, scale_attn_by_inverse_layer_idx=True)
    )
    net = build("gpt2", attention="eager", reorder_and_upcast_attn=True, scale_attn_by_inverse_layer_idx=True)
    counts = put_in_place(net, ["core_attention"]).counts
    assert same(gradients(net), expected)
    assert [layer.expected for layer in counts] == [
        0,
        0,
        0,
    ]  # that computation has no inner function: nothing runs again
    seen = []

    def spy(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        seen.append((module.config._attn_implementation, type(module.config._attn_implementation)))
        return real(module, query, key, value, mask, **kwargs)

    real = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = spy
    try:
        net = build("llama")
        put_in_place(net, ["core_attention"])
        gradients(net)
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert seen == [("sdpa", str)] * 6


def test_falcon_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"core_attention is not possible here.*FalconAttention.*use attention"
    ):
        put_in_place(build("falcon"), ["core_attention"])


def test_a_frozen_model_and_no_grad_expect_nothing() -> None:
    net = build("llama")
    counts = put_in_place(net, ["mlp", "core_attention"]).counts
    with torch.no_grad():
        net(input_ids=torch.arange(32).reshape(2, 16))
    net.requires_grad_(False)
    net(input_ids=torch.arange(32).reshape(2, 16))
    assert [layer.expected for layer in counts] == [layer.recomputations for layer in counts] == [0, 0, 0]


def test_saved_tensor_hooks_around_the_layer_see_every_input() -> None:
    """The mask and rotary tables come by keyword, in tuples; parameters stay out."""
    net = build("llama", attention="eager")
    layer = net.model.layers[0]
    put_in_place(net, ["attention"], only=0)
    seen: list[torch.Tensor] = []

    def run(fn: Any, *args: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
            return fn(*args)

    layer._gradient_checkpointing_func = run
    inputs: list[torch.Tensor] = []
    layer.self_attn.register_forward_pre_hook(
        lambda m, args, kwargs: inputs.extend(
            [kwargs["hidden_states"], kwargs["attention_mask"], *kwargs["position_embeddings"]]
        ),
        with_kwargs=True,
    )
    gradients(net)
    assert len(inputs) == 4
    pointers = [tensor.data_ptr() for tensor in seen]
    assert all(tensor.data_ptr() in pointers for tensor in inputs)
    assert not any(parameter.data_ptr() in pointers for parameter in layer.self_attn.parameters())


KEPT = {"core_attention": 20.01, "attention": 17.01, "mlp": 9.04, "norm": 18.03}


@pytest.mark.parametrize("role", list(KEPT))
def test_kept_bytes(role: str) -> None:
    """Of a Llama-shaped layer, in hidden states of 2 x 128 x 256 fp32; nothing recomputed keeps 20.04."""
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 4}
    net = build("llama", **sizes)
    scope = put_in_place(net, [role]).scope
    ids = torch.randint(0, 64, (2, 128))
    with OpTracer(scope, torch.device("cpu"), weights=net.parameters) as watch:
        loss = net(input_ids=ids, labels=ids, use_cache=False).loss
        watch.forward_done()
        loss.backward()
    assert watch.kept_bytes[1] / (2 * 128 * 256 * 4) == pytest.approx(KEPT[role], abs=0.006)


def steps(model_type: str, roles: list[str]) -> dict[str, Any]:
    """Losses and gradient norms under ZeRO-3, different data per rank."""
    import deepspeed

    net = build(model_type)
    applied = put_in_place(net, roles, zero_stage=3)
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 20_000,
        "stage3_max_reuse_distance": 20_000,
    }
    ds = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=1e-2),
        config=ds,
        dist_init_required=False,
    )
    torch.manual_seed(7)
    draw = torch.Generator().manual_seed(torch.distributed.get_rank())
    found = []
    for _ in range(3):
        ids = torch.randint(0, 64, (2, 16), generator=draw)
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        found += [loss.item(), float(engine.get_global_grad_norm())]
    engine.destroy()
    applied.remove()
    again = [counts.recomputations for counts in applied.counts]
    return {"values": found, "again": again, "expected": [counts.expected for counts in applied.counts]}


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("model_type", ["mixtral", "qwen2", "gpt2"])
def test_under_zero3(two_ranks: RankPool, model_type: str) -> None:
    expected = two_ranks.run(steps, model_type=model_type, roles=[])
    for roles in (["mlp", "attention"], ["core_attention", "norm", "activation"]):
        found = two_ranks.run(steps, model_type=model_type, roles=roles)
        assert [f["values"] for f in found] == [e["values"] for e in expected]
        assert found[0]["again"] == found[0]["expected"]
        assert min(found[0]["again"]) >= 6


def test_an_empty_list_is_refused_before_the_run() -> None:
    cfg = CheckpointingConfig(policy=Policy.selective_modules, recompute_modules=[])
    net = build("llama", num_hidden_layers=1)
    setting = Setting(
        zero_stage=0,
        tensor_parallel_size=1,
        has_gpu=False,
        attention=Attention.sdpa,
        lora_dropout=0.0,
        fields={},
        activation_elements=1024,
        element_bytes=2,
    )
    (text,) = validation.problems(cfg, list(decoder_layers(net)), setting)
    assert text.startswith("checkpointing.recompute_modules=[]: name at least one role")
