"""Norms and activations whose output is discarded: same gradients, exact bytes, nothing left behind, edits refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from remat.activation_checkpointing import apply, policy, validation, verification
from remat.activation_checkpointing.mechanisms.counters import LayerCounters, PolicyNotApplied, Scope
from remat.activation_checkpointing.mechanisms.discard_output import OutputDiscarding, Region
from remat.activation_checkpointing.mechanisms.mechanism import Setting
from remat.activation_checkpointing.mechanisms.saved_tensors import SavedTensors
from remat.config.options import Attention, CheckpointingConfig, ConfigError, Policy
from remat.model.layers import decoder_layers
from tests.support import small_models, watched

FAMILIES = ["llama", "qwen2", "gpt2", "mixtral", "gemma", "phi", "qwen3_moe", "deepseek_v3", "opt"]
ROLES = [["norm"], ["activation"], ["norm", "activation"]]


def discard(*roles: str) -> CheckpointingConfig:
    return CheckpointingConfig(policy=Policy.discard_output, discard_modules=list(roles))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[Any, watched.Watched]:
    net = small_models.build(request.param)
    return net, watched.run(net, watched.NONE)


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("roles", ROLES, ids="+".join)
def test_bit_equal_and_in_effect(roles: list[str], family: tuple[Any, watched.Watched]) -> None:
    net, kept = family
    cfg = discard(*roles)
    result = watched.run(net, cfg)
    assert watched.differences(result, kept) == []
    assert verification.unmet_expectations(result.applied, result.watch, cfg) == []
    assert result.watch.total_flops("recompute") == 0  # neither a norm nor an activation has a matrix product


def test_discarded_bytes_are_what_is_not_kept() -> None:
    """On a model whose norms and activations save nothing but what none would keep as well."""
    net = small_models.build("llama")
    kept = watched.run(net, watched.NONE).watch.kept_bytes
    for roles in ROLES:
        result = watched.run(net, discard(*roles))
        for index, counts in enumerate(result.applied.counts):
            assert kept[index] - result.watch.kept_bytes[index] == counts.discarded_bytes, roles
            assert counts.recomputations == {1: 2 if "norm" in roles else 1, 2: 3}[len(roles)]


@pytest.mark.parametrize(
    ("roles", "hidden_states"),
    [([], 20.04), (["norm"], 16.03), (["activation"], 17.29), (["norm", "activation"], 13.28)],
)
def test_bytes_of_a_llama_layer(roles: list[str], hidden_states: float) -> None:
    """Width 256, ffn 704, 8 heads of which 4 for keys and values, batch 2, 128 tokens, fp32."""
    net = small_models.build(
        "llama",
        hidden_size=256,
        intermediate_size=704,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_hidden_layers=2,
    )
    ids = torch.zeros(2, 128, dtype=torch.long)
    watch = watched.run(net, discard(*roles) if roles else watched.NONE, ids).watch
    assert watch.kept_bytes[0] / (2 * 128 * 256 * 4) == pytest.approx(hidden_states, abs=0.006)
    assert watch.kept_bytes[1] == watch.kept_bytes[0]


class Layer(nn.Module):
    """norm -> Linear -> activation -> Linear, with a place to meddle between norm and Linear."""

    def __init__(self, meddle: Any = None) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 16)
        self.act, self.down = nn.GELU(), nn.Linear(16, 8)
        self.meddle = meddle or (lambda tensor: tensor)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(self.act(self.up(self.meddle(self.norm(hidden)))))


def hooked(layer: nn.Module, roles: list[str]) -> tuple[SavedTensors, OutputDiscarding, LayerCounters]:
    counts = LayerCounters()
    discarded = OutputDiscarding(layer, roles, 0, counts, Scope())
    return SavedTensors(layer, by_reference=False, offload=None, discarded=discarded), discarded, counts


def test_backward_twice_and_inputs_that_are_views() -> None:
    torch.manual_seed(0)
    layer = Layer()
    base = torch.randn(4, 3, 8, requires_grad=True)
    inputs = [layer.norm.weight, base]
    wanted = torch.autograd.grad(layer(base.transpose(0, 1)).square().sum(), inputs)
    saved, _, counts = hooked(layer, ["norm", "activation"])
    with saved.hooks():
        loss = layer(base.transpose(0, 1)).square().sum()
    for _ in range(2):
        found = torch.autograd.grad(loss, inputs, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert counts.recomputations == counts.expected == 2


def test_a_norm_feeding_a_norm_is_made_again_through_it() -> None:
    torch.manual_seed(0)
    second = nn.LayerNorm(8)
    layer = Layer(second)
    layer.second_norm = second
    hidden = torch.randn(5, 8, requires_grad=True)
    (wanted,) = torch.autograd.grad(layer(hidden).sum(), hidden)
    saved, _, counts = hooked(layer, ["norm"])
    with saved.hooks():
        loss = layer(hidden).sum()
    (found,) = torch.autograd.grad(loss, hidden)
    assert torch.equal(found, wanted)
    assert counts.recomputations == counts.expected == 2


@pytest.mark.parametrize(
    "meddle", [lambda t: t.mul_(2), lambda t: t.view(-1).mul_(2).view_as(t)], ids=["itself", "a view"]
)
def test_an_output_that_is_edited_is_refused(meddle: Any) -> None:
    saved, _, _ = hooked(layer := Layer(meddle), ["norm"])
    with (
        pytest.raises(
            PolicyNotApplied,
            match=r"layer 0.*leave the role norm out or use checkpointing=full",
        ),
        saved.hooks(),
    ):
        layer(torch.randn(2, 8, requires_grad=True))


def test_an_output_that_is_edited_after_its_consumer_ran_is_refused() -> None:
    class Late(Layer):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            normed = self.norm(hidden)
            out = self.up(normed)
            normed.zero_()
            return out

    saved, _, _ = hooked(layer := Late(), ["norm"])
    with pytest.raises(PolicyNotApplied), saved.hooks():
        layer(torch.randn(2, 8, requires_grad=True))


def test_a_norm_that_only_a_dead_branch_saved_is_not_expected_again() -> None:
    class Dead(Layer):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.unused = self.down(self.act(self.up(self.norm(hidden))))  # alive, but not part of the loss
            return super().forward(hidden)

    saved, _, counts = hooked(layer := Dead(), ["norm"])
    with saved.hooks():
        loss = layer(torch.randn(2, 8, requires_grad=True)).sum()
    assert counts.expected == 0
    loss.backward()
    assert counts.recomputations == counts.expected == 1
    del layer.unused  # a cycle through autograd's graph, which no collector sees


def test_a_region_that_does_not_run_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both numbers are counted where the thing happens: the demand in backward, the run in the module itself."""
    saved, discarded, counts = hooked(layer := Layer(), ["norm"])
    with saved.hooks():
        loss = layer(torch.randn(2, 8, requires_grad=True)).sum()
    monkeypatch.setattr(Region, "_again", lambda region, args, kwargs: nn.LayerNorm(8)(*args, **kwargs))
    with pytest.raises(RuntimeError, match="tensors in forward and 0"):
        loss.backward()
    assert (counts.expected, counts.recomputations) == (1, 0)
    assert discarded.capture is None and discarded.again is None


def jitter_problems(cfg: CheckpointingConfig, model_type: str, **jitter: float) -> list[str]:
    config = AutoConfig.for_model(model_type, **(small_models.SIZES | {"num_local_experts": 4} | jitter))
    with torch.device("meta"):
        net = AutoModelForCausalLM.from_config(config)
    setting = Setting(
        zero_stage=0,
        tensor_parallel_size=1,
        has_gpu=True,
        attention=Attention.sdpa,
        lora_dropout=0.0,
        fields=net.config.to_dict(),
        activation_elements=2 * 16 * 32,
        element_bytes=4,
    )
    return validation.problems(cfg, list(decoder_layers(net)), setting)


@pytest.mark.parametrize(
    ("model_type", "field", "role"),
    [("mixtral", "router_jitter_noise", "mlp"), ("phimoe", "input_jitter_noise", "mlp")],
)
def test_jitter_is_refused_before_the_run_with_remedies_that_work(
    model_type: str, field: str, role: str
) -> None:
    """The noise is multiplied into the norm's output, which is the input of the sparse block."""
    norms, blocks = discard("norm", "activation"), CheckpointingConfig(policy=Policy.selective_modules)
    (text,) = jitter_problems(norms, model_type, **{field: 0.1})
    assert f"{field}=0.1 edits the norm's output" in text and "leave norm off the list, or use" in text
    (text,) = jitter_problems(blocks, model_type, **{field: 0.1})
    assert f"{field}=0.1 edits the input of {role}" in text and "leave mlp off the list" in text
    for cfg in (norms, blocks):
        assert jitter_problems(cfg, model_type, **{field: 0.0}) == []
    attention = CheckpointingConfig(policy=Policy.selective_modules, recompute_modules=["attention", "norm"])
    for cfg in (discard("activation"), attention, CheckpointingConfig()):
        assert jitter_problems(cfg, model_type, **{field: 0.1}) == []


def test_what_mixtral_with_jitter_is_told_to_use_is_bit_equal_and_the_rest_stops() -> None:
    net = small_models.build("mixtral", router_jitter_noise=0.1)
    kept = watched.run(net, watched.NONE)
    attention = CheckpointingConfig(policy=Policy.selective_modules, recompute_modules=["attention", "norm"])
    for cfg in (discard("activation"), attention, CheckpointingConfig()):
        result = watched.run(net, cfg)
        assert watched.differences(result, kept) == []
        assert verification.unmet_expectations(result.applied, result.watch, cfg) == []
    with pytest.raises(PolicyNotApplied, match="post_attention_layernorm"):
        watched.run(net, discard("norm"))
    with pytest.raises(PolicyNotApplied, match="layer 0 mlp edits its input in place"):
        watched.run(net, CheckpointingConfig(policy=Policy.selective_modules))


def test_an_activation_that_edits_its_input_is_refused() -> None:
    layer = Layer()
    layer.act = nn.ReLU(inplace=True)
    saved, _, _ = hooked(layer, ["activation"])
    with pytest.raises(PolicyNotApplied, match="input is edited"), saved.hooks():
        layer(torch.randn(2, 8, requires_grad=True))


def test_randomness_is_refused() -> None:
    layer = Layer()
    layer.act = nn.RReLU()
    with pytest.raises(ConfigError, match="random"):
        hooked(layer, ["activation"])


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (["attention"], "output of attention cannot"),
        (["norm", "mlp"], "output of mlp cannot"),
        ([], "nothing is"),
    ],
)
def test_only_norms_and_activations(asked: list[str], text: str) -> None:
    """Functional dropout inside attention would draw other numbers in the second run: wrong gradients, no error."""
    net = small_models.build("gpt2", attn_pdrop=0.5)
    setting = Setting(
        zero_stage=0,
        tensor_parallel_size=1,
        has_gpu=True,
        attention=Attention.sdpa,
        lora_dropout=0.0,
        fields={},
        activation_elements=1024,
        element_bytes=2,
    )
    (found,) = validation.problems(discard(*asked), list(net.transformer.h), setting)
    assert found.startswith(f"checkpointing.discard_modules={asked}") and text in found


def test_close_leaves_the_modules_as_they_were() -> None:
    layer = Layer()
    _, discarded, _ = hooked(layer, ["norm", "activation"])
    assert "forward" in layer.norm.__dict__
    discarded.close()
    assert not any("forward" in module.__dict__ for module in layer.modules())


def test_autocast_is_the_one_of_the_forward() -> None:
    torch.manual_seed(0)
    layer = Layer()
    hidden = torch.randn(6, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (wanted,) = torch.autograd.grad(layer(hidden).sum(), hidden)
    saved, _, _ = hooked(layer, ["norm", "activation"])
    with torch.autocast("cpu", dtype=torch.bfloat16), saved.hooks():
        loss = layer(hidden).sum()
    (found,) = torch.autograd.grad(loss, hidden)
    assert torch.equal(found, wanted)


def test_an_interrupted_forward_leaves_nothing_behind() -> None:
    class Stop(Exception): ...

    def stop(tensor: torch.Tensor) -> torch.Tensor:
        raise Stop

    layer = Layer(stop)
    saved, discarded, _ = hooked(layer, ["norm"])
    hidden = torch.randn(2, 8, requires_grad=True)
    with pytest.raises(Stop), saved.hooks():
        layer(hidden)
    layer.meddle = lambda tensor: tensor
    assert discarded.forward is None
    with saved.hooks():
        loss = layer(hidden).sum()
    loss.backward()
    assert hidden.grad is not None


def test_a_module_that_two_layers_share() -> None:
    """The wrappers of both layers sit on it; each speaks only during its own layer."""
    net = small_models.build("llama")
    shared = net.model.layers[0].mlp.act_fn
    for layer in net.model.layers:
        layer.mlp.act_fn = shared
    kept = watched.run(net, watched.NONE)
    result = watched.run(net, discard("activation"))
    assert watched.differences(result, kept) == []
    assert [counts.recomputations for counts in result.applied.counts] == [1, 1, 1]
    assert "forward" not in shared.__dict__


def test_frozen_layers_under_trained_ones() -> None:
    """As under LoRA: what is saved depends on who needs a gradient."""
    net = small_models.build("llama")
    net.requires_grad_(False)
    net.model.layers[1].self_attn.q_proj.weight.requires_grad_(True)
    kept = watched.run(net, watched.NONE)
    result = watched.run(net, discard("norm", "activation"))
    assert watched.differences(result, kept) == []
    assert [counts.expected for counts in result.applied.counts] == [
        counts.recomputations for counts in result.applied.counts
    ]


def test_an_evaluation_is_left_alone() -> None:
    net = small_models.build("llama")
    cfg = discard("norm")
    applied = apply.apply(net, policy.decide_layers(cfg, 3), cfg)
    with torch.no_grad():
        net(input_ids=torch.zeros(1, 4, dtype=torch.long))
    assert [counts.expected for counts in applied.counts] == [0, 0, 0]
    applied.remove()
