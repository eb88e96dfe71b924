"""Policies that choose among whole layers: what is decided, that it changes nothing, what it keeps, what it proves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from remat.activation_checkpointing import apply, policy, verification
from remat.activation_checkpointing.mechanisms import recompute
from remat.activation_checkpointing.mechanisms.counters import PolicyNotApplied
from remat.config.options import (
    CheckpointingConfig,
    ConfigError,
    DeterminismCheck,
    OffloadConfig,
    Policy,
)
from remat.model import layers
from tests.support import small_models, watched

LAYERS = 4
FAMILIES = ("llama", "qwen2", "gpt2", "mixtral", "gemma", "phi")
HIDDEN = 2 * 16 * 32 * 4  # bytes of one hidden state
WHOLE_LAYERS = {
    "full": CheckpointingConfig(),
    "full_reentrant": CheckpointingConfig(reentrant=True),
    "full_to_the_end": CheckpointingConfig(early_stop=False),
    "interval": CheckpointingConfig(policy=Policy.interval, interval=2),
    "uniform": CheckpointingConfig(policy=Policy.uniform, segment_layers=3),
    "uniform_reentrant": CheckpointingConfig(policy=Policy.uniform, segment_layers=2, reentrant=True),
    "block": CheckpointingConfig(policy=Policy.block, block_layers=3),
    "sqrt": CheckpointingConfig(policy=Policy.sqrt),
    "ranges": CheckpointingConfig(layers={0: Policy.none, "2-3": Policy.uniform}),
}


def llama() -> Any:
    return small_models.build("llama", num_hidden_layers=LAYERS, num_key_value_heads=2)


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> tuple[torch.nn.Module, watched.Watched]:
    net = small_models.build(request.param, num_hidden_layers=LAYERS)
    return net, watched.run(net, CheckpointingConfig(policy=Policy.none))


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("name", list(WHOLE_LAYERS))
def test_bit_equal_to_none_and_proven(name: str, family: tuple[torch.nn.Module, watched.Watched]) -> None:
    net, kept = family
    result = watched.run(net, WHOLE_LAYERS[name])
    assert watched.differences(result, kept) == []
    assert verification.unmet_expectations(result.applied, result.watch, WHOLE_LAYERS[name]) == []
    assert sum(counts.recomputations for counts in result.applied.counts) > 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("full", [1, 1, 1, 1]),
        ("full_reentrant", [1, 1, 1, 1]),
        ("uniform", [0, 0, 1, 1]),
        ("uniform_reentrant", [0, 1, 0, 1]),
        ("sqrt", [0, 1, 0, 1]),
    ],
)
def test_one_hidden_state_per_recomputed_call(name: str, expected: list[int]) -> None:
    """A layer's output is the next call's input: nothing else stays, and inside a segment not even that."""
    result = watched.run(llama(), WHOLE_LAYERS[name])
    assert [result.watch.kept_bytes.get(index, 0) for index in range(LAYERS)] == [n * HIDDEN for n in expected]


def test_recomputed_flops_are_counted() -> None:
    """Early stop spares each layer its last projection; attention and six projections run again."""
    net = llama()
    tokens, width, inner = 2 * 16, 32, 64
    attention = 2 * 2 * tokens * 16 * width  # scores and values, full square
    projections = 2 * tokens * (width * (width + width + 2 * width) + 2 * width * inner)
    last = 2 * tokens * width * inner
    for name, layer_flops in (
        ("full", attention + projections),
        ("full_to_the_end", attention + projections + last),
    ):
        watch = watched.run(net, WHOLE_LAYERS[name]).watch
        assert [watch.flops["recompute"][index] for index in range(LAYERS)] == [layer_flops] * LAYERS, name
        assert watch.recomputed_share() == layer_flops / (attention + projections + last)
    none = watched.run(net, CheckpointingConfig(policy=Policy.none)).watch
    assert none.total_flops("recompute") == none.recomputed_share() == 0
    assert none.flops["forward"][0] == attention + projections + last


class Longer(torch.autograd.Function):
    """Return `x`, and save a tensor that is longer each time."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Longer.runs += 1
        ctx.save_for_backward(torch.zeros(Longer.runs))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        assert len(ctx.saved_tensors) == 1
        return gradients[0]


def test_a_recomputation_of_other_shapes_is_refused_unless_nothing_is_compared() -> None:
    net = llama()
    layers.decoder_layers(net)[1].mlp.register_forward_hook(lambda module, args, found: Longer.apply(found))
    with pytest.raises(PolicyNotApplied, match="different"):
        watched.run(net, CheckpointingConfig())
    result = watched.run(net, CheckpointingConfig(determinism_check=DeterminismCheck.none))
    assert [counts.recomputations for counts in result.applied.counts] == [1] * LAYERS


def test_the_model_is_left_as_it_was() -> None:
    net = llama()
    watched.run(net, CheckpointingConfig(policy=Policy.uniform, reentrant=True))
    for layer in layers.decoder_layers(net):
        assert "_gradient_checkpointing_func" not in layer.__dict__
        assert layer.gradient_checkpointing is False
    assert not net.get_input_embeddings()._forward_hooks


def test_a_failure_on_the_way_leaves_nothing_behind() -> None:
    net = llama()
    net.model.layers[3].input_layernorm = net.model.layers[3].post_attention_layernorm = torch.nn.Identity()
    cfg = CheckpointingConfig(policy=Policy.selective_modules, recompute_modules=["norm"])
    with pytest.raises(ConfigError, match="has no norm"):
        apply.apply(net, policy.decide_layers(cfg, LAYERS), cfg)
    for layer in layers.decoder_layers(net):
        assert "_gradient_checkpointing_func" not in layer.__dict__
    assert all("forward" not in module.__dict__ for module in net.modules())


def test_an_evaluation_recomputes_nothing() -> None:
    net = llama()
    applied = apply.apply(net, policy.decide_layers(CheckpointingConfig(), LAYERS), CheckpointingConfig())
    with torch.no_grad():
        net(input_ids=torch.zeros(1, 4, dtype=torch.long))
    net.eval()
    net(input_ids=torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    assert [counts.forwards for counts in applied.counts] == [0] * LAYERS


@pytest.mark.parametrize(
    ("cfg", "calls"),
    [
        (CheckpointingConfig(policy=Policy.interval, interval=3), ["0", "3"]),
        (CheckpointingConfig(policy=Policy.block, block_layers=2), ["0", "1"]),
        (CheckpointingConfig(policy=Policy.uniform, segment_layers=2), ["0-1", "2-3", "4-4"]),
        (CheckpointingConfig(policy=Policy.sqrt), ["0-2", "3-4"]),
        (CheckpointingConfig(policy=Policy.none, layers={"1-2": Policy.uniform, 4: Policy.full}), ["1-2", "4"]),
    ],
)
def test_which_layers_are_recomputed_together(cfg: CheckpointingConfig, calls: list[str]) -> None:
    found = {
        f"{d.first}-{d.last}" if d.policy in (Policy.uniform, Policy.sqrt) else str(d.first)
        for d in policy.decide_layers(cfg, 5)
        if d.mechanism == recompute.MECHANISM
    }
    assert sorted(found) == calls


def test_segments_are_reentrant_under_zero_3_only() -> None:
    cfg = CheckpointingConfig(policy=Policy.uniform)
    assert [d.reentrant for d in policy.decide_layers(cfg, 3, zero_stage=3)] == [True, True, False]
    assert not any(d.reentrant for d in policy.decide_layers(cfg, 3, zero_stage=2))


def test_offload_spares_the_last_layers() -> None:
    cfg = CheckpointingConfig(offload=OffloadConfig(enabled=True, keep_last_layers=2))
    assert [d.offload for d in policy.decide_layers(cfg, 4)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("ranges", "text"),
    [
        ({"0-9": Policy.none}, "0 to 3"),
        ({"2-1": Policy.none}, "rises"),
        ({"first": Policy.none}, "not a range"),
        ({"0-2": Policy.none, 2: Policy.full}, "layer 2 is also in 0-2"),
    ],
)
def test_bad_ranges(ranges: dict[object, Policy], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        policy.decide_layers(CheckpointingConfig(layers=ranges), 4)


def test_a_policy_that_does_not_run_is_found_out() -> None:
    cfg = CheckpointingConfig()
    result = watched.run(llama(), cfg)
    result.applied.counts[1].recomputations = 0
    assert "layers 1: expected [1]" in verification.unmet_expectations(result.applied, result.watch, cfg)[0]
    result.applied.reset()
    assert "never ran" in verification.unmet_expectations(result.applied, result.watch, cfg)[0]


def test_a_layer_that_keeps_more_than_promised_is_found_out() -> None:
    """Something holds on to activations behind the policy's back."""
    net = llama()
    held: list[torch.Tensor] = []
    net.model.layers[2].mlp.register_forward_hook(lambda m, a, out: held.append(out.detach().repeat(400, 1, 1)))
    result = watched.run(net, CheckpointingConfig())
    found = verification.unmet_expectations(result.applied, result.watch, CheckpointingConfig())
    assert len(found) == 1
    assert "layer 2 keeps" in found[0]


def test_frozen_layers_that_recompute_nothing_are_found_out() -> None:
    net = llama()
    net.requires_grad_(False)
    net.lm_head.requires_grad_(True)
    result = watched.run(net, CheckpointingConfig())
    assert (
        "no gradient passes"
        in verification.unmet_expectations(result.applied, result.watch, CheckpointingConfig())[0]
    )


def test_reentrant_with_frozen_embeddings_trains_what_follows() -> None:
    net = llama()
    net.get_input_embeddings().requires_grad_(False)
    kept = watched.run(net, CheckpointingConfig(policy=Policy.none))
    assert watched.differences(watched.run(net, CheckpointingConfig(reentrant=True)), kept) == []


def test_a_model_that_edits_hidden_states_between_layers_is_refused() -> None:
    """As models with visual features in deep layers do."""
    net = llama()

    cfg = CheckpointingConfig(policy=Policy.uniform, segment_layers=2)
    applied = apply.apply(net, policy.decide_layers(cfg, LAYERS), cfg)
    first, second = net.model.layers[:2]
    hidden = torch.randn(1, 4, 32, requires_grad=True)
    passed_on = first(hidden, position_embeddings=None)
    with pytest.raises(
        ConfigError, match=r"hidden state after layer 0 is not there .* the model uses it in aten.add"
    ):
        second(passed_on + 1, position_embeddings=None)
    applied.remove()


def test_layers_that_return_tuples_prove_themselves_above_the_slack() -> None:
    config = AutoConfig.for_model(
        "bloom", hidden_size=64, n_layer=2, n_head=2, vocab_size=64, use_cache=False, attention_dropout=0.0
    )
    net = AutoModelForCausalLM.from_config(config).train()
    result = watched.run(net, CheckpointingConfig(), torch.zeros(36, 128, dtype=torch.long))
    assert verification.SLACK_BYTES < 36 * 128 * 64 * 4
    assert verification.unmet_expectations(result.applied, result.watch, CheckpointingConfig()) == []


def test_a_frozen_first_layer_is_no_broken_promise() -> None:
    """As with LoRA on the last projections only: nothing before the first adapter carries a gradient."""
    net = llama()
    net.requires_grad_(False)
    for layer in net.model.layers:
        layer.mlp.down_proj.requires_grad_(True)
    cfg = CheckpointingConfig(policy=Policy.selective_modules, recompute_modules=["attention"])
    result = watched.run(net, cfg)
    assert result.applied.counts[0].expected == 0 < result.applied.counts[1].expected
    assert verification.unmet_expectations(result.applied, result.watch, cfg) == []


def test_a_segment_moves_its_input_unless_it_reaches_the_last_layers() -> None:
    offload = OffloadConfig(enabled=True, min_bytes=0, keep_last_layers=1)
    cfg = CheckpointingConfig(policy=Policy.uniform, segment_layers=2, offload=offload)
    assert [d.offload for d in policy.decide_layers(cfg, LAYERS)] == [True, True, False, False]
    result = watched.run(llama(), cfg)
    assert [counts.moved_bytes for counts in result.applied.counts] == [0, HIDDEN, 0, 0]
    assert verification.unmet_expectations(result.applied, result.watch, cfg) == []


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="checkpointing=none"):
        layers.decoder_layers(torch.nn.Linear(2, 2))


def test_layers_that_are_not_called_in_a_row_are_refused() -> None:
    net = llama()
    cfg = CheckpointingConfig(policy=Policy.uniform, segment_layers=2)
    apply.apply(net, policy.decide_layers(cfg, LAYERS), cfg)
    stack = net.model.layers
    assert isinstance(stack[1], GradientCheckpointingLayer)
    with pytest.raises(ConfigError, match="did not hand layer 0's output to layer 1"):
        stack[1](torch.zeros(1, 4, 32, requires_grad=True), position_embeddings=None)


@pytest.mark.parametrize(
    ("cfg", "text"),
    [
        (CheckpointingConfig(policy=Policy.none), "none (every activation is kept)"),
        (CheckpointingConfig(), "full (4 of 4 layers recomputed whole)"),
        (
            CheckpointingConfig(policy=Policy.sqrt, layers={0: Policy.none}),
            "none in layers 0 (every activation is kept); sqrt in layers 1-3 (3 of 4 layers recomputed whole in "
            "2 segments)",
        ),
    ],
)
def test_the_header_says_what_the_policy_does(cfg: CheckpointingConfig, text: str) -> None:
    assert policy.describe(policy.decide_layers(cfg, LAYERS)) == text


@pytest.mark.parametrize(
    "cfg",
    [
        CheckpointingConfig(),
        CheckpointingConfig(policy=Policy.interval, interval=3),
        CheckpointingConfig(policy=Policy.uniform, segment_layers=4),
        CheckpointingConfig(policy=Policy.sqrt),
    ],
    ids=lambda cfg: cfg.policy,
)
def test_a_policy_begins_again_after_its_period(cfg: CheckpointingConfig) -> None:
    """A plan of few layers stands for one of many: it stretches what one period adds."""

    def shape(decision: policy.LayerDecision, index: int) -> tuple[object, int, int]:
        return decision.mechanism, index - decision.first, decision.last - index

    decisions = [shape(decision, index) for index, decision in enumerate(policy.decide_layers(cfg, 12))]
    period = policy.period(cfg, 12)
    assert decisions[period:] == decisions[:-period]
    assert all(decisions[shorter:] != decisions[:-shorter] for shorter in range(1, period))
    assert policy.period(cfg, 0) >= 1  # whatever the model
