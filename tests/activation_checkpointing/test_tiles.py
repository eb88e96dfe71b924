"""MLPs in slices of the tokens: the same training within rounding, a smaller peak, no forward more than without."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from remat.activation_checkpointing import apply, dry_run, policy, verification
from remat.activation_checkpointing.mechanisms import tiles
from remat.activation_checkpointing.mechanisms.mechanism import LayerDecision
from remat.config import validation
from remat.config.options import (
    CheckpointingConfig,
    Compilation,
    ConfigError,
    Policy,
    RunConfig,
    SelectiveOpsConfig,
    TrainConfig,
)
from remat.model import layers, meta_kernels
from tests.support import small_models, watched

IDS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(3))
NO_DROPOUT = {"gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0}}
NORMS = {  # what is sliced with the MLP; two layer inputs of parallel ones share a norm
    "llama": ("post_attention_layernorm", ""),
    "gpt2": ("ln_2", ""),
    "mixtral": ("post_attention_layernorm", ""),
    "qwen3_moe": ("post_attention_layernorm", ""),
    "deepseek_v3": ("post_attention_layernorm", ""),
    "gemma3_text": ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    "phi": ("", ""),
    "gpt_neox": ("post_attention_layernorm", ""),
    "falcon": ("", ""),
}
REFUSED: dict[str, dict[str, Any]] = {"gpt_neox": {"hidden_dropout": 0.1}, "gpt_oss": {"num_local_experts": 4}}
LINEARS = SelectiveOpsConfig(save_linears=["all_but_down", "o"])
ROUNDING = 1e-5  # fp32, relative to the largest gradient of all weights


def full(count: int = 4, **more: Any) -> CheckpointingConfig:
    return CheckpointingConfig(tiles=str(count), **more)


def decide(net: Any, cfg: CheckpointingConfig) -> list[LayerDecision]:
    decisions = policy.decide_layers(cfg, len(layers.decoder_layers(net)))
    return tiles.find_tilings(net, decisions, lambda: net(input_ids=IDS, use_cache=False))


def run(net: Any, cfg: CheckpointingConfig) -> watched.Watched:
    return watched.run(net, cfg, IDS, decisions=decide(net, cfg))


def furthest(one: watched.Watched, other: watched.Watched) -> float:
    """How far gradients are apart, relative to the largest of all."""
    assert one.gradients.keys() == other.gradients.keys()
    largest = max(value.abs().max() for value in other.gradients.values())
    return max(
        float((one.gradients[name] - other.gradients[name]).abs().max() / largest) for name in one.gradients
    )


@functools.cache
def whole(family: str) -> tuple[Any, watched.Watched]:
    net = small_models.build(family, **NO_DROPOUT.get(family, {}))
    return net, watched.run(net, CheckpointingConfig(), IDS)


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize("family", NORMS)
def test_equals_the_whole_and_runs_no_forward_more(family: str) -> None:
    net, reference = whole(family)
    found = run(net, full())
    names = {(d.tiling.before, d.tiling.after) for d in found.applied.decisions if d.tiling}
    assert names == {NORMS[family]}
    assert abs(float(found.loss - reference.loss)) < 1e-6
    assert 0 < furthest(found, reference) < ROUNDING
    assert found.watch.flops["recompute"] == reference.watch.flops["recompute"]
    assert found.watch.flops["backward"] == reference.watch.flops["backward"]
    assert found.replayed.differences == found.replayed.notes == []
    assert verification.unmet_expectations(found.applied, found.watch, full()) == []
    assert all(c.slices == c.slices_again == 4 and not c.slices_thrice for c in found.applied.counts)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral"])
def test_attention_can_be_kept_beside_slices(family: str) -> None:
    net = small_models.build(family)
    cfg = CheckpointingConfig(
        policy=Policy.selective_ops,
        selective_ops=SelectiveOpsConfig(save=["attention"], save_linears=["q", "o"]),
    )
    reference, found = watched.run(net, cfg, IDS), run(net, replace(cfg, tiles="4"))
    assert 0 < furthest(found, reference) < ROUNDING
    assert found.watch.flops == reference.watch.flops
    assert found.watch.kept_bytes == reference.watch.kept_bytes
    assert found.replayed.differences == verification.unmet_expectations(found.applied, found.watch, cfg) == []
    assert [(c.slices, c.slices_again, c.slices_thrice) for c in found.applied.counts] == [(4, 4, 0)] * 3
    assert [c.reused_outputs for c in found.applied.counts] == [
        c.reused_outputs for c in reference.applied.counts
    ]


def test_the_peak_of_the_mlp_falls_by_the_number_of_slices() -> None:
    net, reference = whole("llama")
    before = reference.watch.mlp_peak_bytes
    assert before[0] >= 4 * 32 * 64 * 4, "four results of the intermediate size"
    for count in (2, 4, 8):
        found = run(net, full(count))
        assert {layer: size * count for layer, size in found.watch.mlp_peak_bytes.items()} == before
        assert found.watch.kept_bytes == reference.watch.kept_bytes


def test_nothing_of_a_slice_outlives_a_step() -> None:
    net = small_models.build("llama")
    cfg = full()
    applied = apply.apply(net, decide(net, cfg), cfg)
    with applied.watch(torch.device("cpu")) as watch:
        lives = []
        for _ in range(3):
            with applied.micro_batch():
                net(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
            net.zero_grad()
            lives.append(watch.live_bytes)
    assert lives[1] == lives[2]
    forward = [
        module.forward.__qualname__ for layer in layers.decoder_layers(net) for module in layer.modules()
    ]
    applied.remove()
    assert forward != [m.forward.__qualname__ for layer in layers.decoder_layers(net) for m in layer.modules()]


def test_slices_that_do_not_divide_and_more_of_them_than_tokens() -> None:
    net, reference = whole("llama")
    for count in (3, 1000):
        found = run(net, full(count))
        assert furthest(found, reference) < ROUNDING
        assert found.applied.counts[0].slices == (3 if count == 3 else 32)


def test_a_weight_gets_its_gradient_once() -> None:
    """ZeRO reduces a gradient when it is handed over: parts of it would be reduced each for itself."""
    net, handed = small_models.build("llama"), list[str]()
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: handed.append(name))
    run(net, full())
    assert sorted(handed) == sorted(name for name, _ in net.named_parameters())


def test_evaluation_is_sliced_too() -> None:
    net, cfg = small_models.build("llama").eval(), full()
    with torch.no_grad():
        expected = net(input_ids=IDS).logits
        applied = apply.apply(net, decide(net.train(), cfg), cfg)
        with applied.watch(torch.device("cpu")) as watch:
            found = net.eval()(input_ids=IDS).logits
        applied.remove()
        with applied.watch(torch.device("cpu")) as unsliced:
            net(input_ids=IDS)
    assert torch.allclose(found, expected, atol=1e-6)
    assert watch.mlp_peak_bytes[-1] * 4 == unsliced.mlp_peak_bytes[-1]


def test_a_norm_that_is_sliced_wrongly_is_found_in_the_first_step() -> None:
    net, cfg = small_models.build("llama"), full()
    decisions = [
        replace(d, tiling=replace(d.tiling, before="input_layernorm")) for d in decide(net, cfg) if d.tiling
    ]
    found = watched.run(net, cfg, IDS, decisions=decisions)
    assert "of an MLP in slices" in found.replayed.differences[0]


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gpt2", "dropout of GPT2Block drops values at random (p=0.1)"),
        ("opt", "OPTDecoderLayer has no MLP that it calls by a known name (layers 0-2)"),
        ("gpt_oss", "the MLP of GptOssDecoderLayer returns a tuple (layers 0-2)"),
        ("gpt_neox", "so a recomputation of the layer would run the MLP too, and each slice a third time"),
        ("bloom", "the MLP of BloomBlock takes more than the hidden state"),
    ],
)
def test_models_that_are_refused(family: str, words: str) -> None:
    net = small_models.build(family, attention="eager", **REFUSED.get(family, {}))
    with pytest.raises(ConfigError) as error:
        decide(net, full())
    assert words in str(error.value)
    assert "checkpointing.tiles=1" in str(error.value)


def test_an_mlp_that_draws_without_a_module_for_it_is_refused() -> None:
    class Noisy(torch.nn.SiLU):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.nn.functional.dropout(input, 0.1, self.training))

    net = small_models.build("llama")
    layers.decoder_layers(net)[1].mlp.act_fn = Noisy()
    with pytest.raises(ConfigError, match=r"LlamaDecoderLayer draws random numbers .* \(layers 1\)"):
        decide(net, full())


def test_a_layer_that_fails_while_it_is_watched_leaves_nothing_switched_on() -> None:
    net = small_models.build("llama")

    def fail(*_: Any) -> None:
        raise ValueError("no")

    net.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="no"):
        decide(net, full())
    assert _get_current_dispatch_mode_stack() == []
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert all("forward" not in vars(layer) for layer in net.model.layers)


def test_layers_that_keep_everything_keep_their_mlps_whole() -> None:
    net, cfg = small_models.build("llama"), full(policy=Policy.interval, interval=2)
    reference, found = watched.run(net, replace(cfg, tiles="1"), IDS), run(net, cfg)
    assert furthest(found, reference) < ROUNDING
    assert found.watch.flops == reference.watch.flops
    assert [c.slices for c in found.applied.counts] == [4, 0, 4]
    assert "MLPs of layers 0, 2 in 4 slices" in policy.describe(list(found.applied.decisions))


def test_the_dry_run_finds_what_is_sliced() -> None:
    with torch.device("meta"):
        net = small_models.build("llama")
    decisions, _ = dry_run.choose(
        net, full(), [3], zero_stage=0, around=lambda: meta_kernels.as_in_a_run(0, on_gpu=False), has_gpu=False
    )
    assert [d.tiling for d in decisions] == [d.tiling for d in decide(small_models.build("llama"), full())]
    assert "MLPs of layers 0-2 in 4 slices" in policy.describe(decisions)


@pytest.mark.parametrize(
    ("cfg", "words"),
    [
        (RunConfig(checkpointing=full(0)), "give the number of slices"),
        (RunConfig(checkpointing=CheckpointingConfig(tiles="many")), "give the number of slices"),
        (RunConfig(checkpointing=full(policy=Policy.budget)), "with checkpointing=budget"),
        (RunConfig(checkpointing=full(policy=Policy.uniform)), "with checkpointing=uniform"),
        (RunConfig(checkpointing=full(layers={1: Policy.discard_output})), "with checkpointing=discard_output"),
        (
            RunConfig(checkpointing=full(policy=Policy.selective_ops, selective_ops=LINEARS)),
            "that keeps all_but_down",
        ),
        (RunConfig(checkpointing=full(policy=Policy.none)), "with checkpointing=none"),
        (RunConfig(checkpointing=full(reentrant=True)), "with checkpointing.reentrant=true"),
        (RunConfig(checkpointing=full(early_stop=False)), "with checkpointing.early_stop=false"),
        (RunConfig(checkpointing=full(), compile=Compilation.layers), "with compile=layers"),
        (RunConfig(checkpointing=full(), train=TrainConfig(tensor_parallel_size=2)), "tensor_parallel_size=2"),
    ],
)
def test_options_that_are_refused(cfg: RunConfig, words: str) -> None:
    said = [
        text for text in validation.problems(cfg) if text.startswith("checkpointing.tiles=") and words in text
    ]
    assert len(said) == 1
