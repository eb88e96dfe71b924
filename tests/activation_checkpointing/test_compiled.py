"""compile=layers: the same training within rounding, one graph for equal layers, refused where it cannot be."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from remat.activation_checkpointing import apply, policy
from remat.activation_checkpointing.compiled import CompiledLayers
from remat.activation_checkpointing.mechanisms.arguments import Replayable, name_arguments
from remat.config import compose
from remat.config.options import CheckpointingConfig, ConfigError, Policy
from remat.model import layers
from remat.planning import strategy
from remat.planning.plan import Recordings, make_plan
from remat.planning.preflight import DoesNotFit
from remat.planning.simulation.timeline import Ready
from remat.planning.simulation.types import Category
from remat.training import build as build_run
from tests.support.small_models import build

CPU = torch.device("cpu")
RELATIVE = 1e-5  # of losses and gradients in fp32: fused kernels round in another order


def _told(forward: Any, name: str, names: list[str]) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            names.append(name)
        return forward(*args, **kwargs)

    return run


def train(
    cfg: CheckpointingConfig, made: CompiledLayers | None, eager: list[str], *, watched: bool = False
) -> Any:
    """Two steps of a small Llama: losses and the gradients of the last."""
    torch.manual_seed(0)
    net = build("llama", num_hidden_layers=3).train()
    for name, module in net.named_modules():
        if name.endswith(".mlp"):
            module.forward = _told(module.forward, name, eager)
    plan = policy.decide_layers(cfg, len(layers.decoder_layers(net)))
    applied = apply.apply(net, plan, cfg, compiled=made)
    found = []
    for step in range(2):
        ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(step))
        watch = applied.watch(CPU) if watched else None
        with applied.micro_batch():
            if watch is not None:
                with watch:
                    loss = net(input_ids=ids, labels=ids, use_cache=False).loss
                    watch.forward_done()
                    loss.backward()
            else:
                loss = net(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
        found.append(loss.item())
    applied.remove()
    return found, [p.grad for p in net.parameters()]


@pytest.mark.parametrize("name", ["none", "full", "interval"])
def test_compiled_layers_train_the_same_within_rounding(name: str) -> None:
    cfg, made, eager = CheckpointingConfig(policy=Policy(name)), CompiledLayers(), list[str]()
    if name == "none":  # torch keeps graphs for as long as the process lives: the others find this one's
        torch._dynamo.reset()
    losses, gradients = train(cfg, None, [])
    found, ours = train(cfg, made, eager)
    assert found == pytest.approx(losses, rel=RELATIVE)
    for gradient, wanted in zip(ours, gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=RELATIVE, atol=RELATIVE * float(wanted.abs().max()))
    assert eager == [], "a layer ran, or ran again, as it is"
    assert made.graphs <= 2, "equal layers share a graph"
    if name == "none":
        assert made.graphs and made.seconds > 0 and "torch.compile took" in made.news()
    assert made.news() == ""


def test_layers_run_as_they_are_where_each_operation_is_watched() -> None:
    made, eager = CompiledLayers(), list[str]()
    plain, _ = train(CheckpointingConfig(policy=Policy.none), None, [], watched=True)
    found, _ = train(CheckpointingConfig(policy=Policy.none), made, eager, watched=True)
    assert found == plain and made.graphs == 0 and len(eager) == 6


def test_a_layer_that_is_no_one_graph_is_refused() -> None:
    net = build("llama", num_hidden_layers=2).train()
    mlp = layers.decoder_layers(net)[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: (torch._dynamo.graph_break(), forward(x))[1]
    cfg, made = CheckpointingConfig(policy=Policy.none), CompiledLayers()
    applied = apply.apply(net, policy.decide_layers(cfg, 2), cfg, compiled=made)
    ids = torch.zeros((1, 8), dtype=torch.long)
    with pytest.raises(ConfigError, match="compile=layers: LlamaDecoderLayer cannot be compiled as one graph"):
        net(input_ids=ids, use_cache=False)
    applied.remove()


def test_messages_name_the_arguments_of_a_compiled_layer() -> None:
    def forward(layer: Any, hidden_states: torch.Tensor, mask: Any = None) -> torch.Tensor:
        return hidden_states

    made = CompiledLayers()
    call = Replayable(made.take(partial(forward, None)), lambda *_: nullcontext())
    assert list(name_arguments(call, (torch.zeros(1), None))) == ["hidden_states", "mask"]
    made.close()


@pytest.mark.parametrize(
    "word",
    [
        "checkpointing=budget",
        "checkpointing=selective_ops",
        "checkpointing=uniform",
        "checkpointing.layers={0: discard_output}",
        "checkpointing.reentrant=true",
        "checkpointing=offload",
        "train.tensor_parallel_size=2",
        "peft=qlora",
    ],
)
def test_what_cannot_be_compiled_is_refused_with_a_remedy(word: str) -> None:
    with pytest.raises(ConfigError, match=r"compile=layers with .*; .*compile=none"):
        compose.compose_run(["compile=layers", word])


def test_adapters_are_not_compiled_under_zero_3() -> None:
    words = ["compile=layers", "peft=lora", "checkpointing=full"]
    for config in ("zero2", "zero3"):
        cfg = compose.compose_run([*words, f"deepspeed.config={config}"]).run
        if config == "zero2":
            assert strategy.decide(cfg, world_size=2, can_pin=False).zero_stage == 2
            continue
        with pytest.raises(ConfigError, match=r"compile=layers with peft=lora and ZeRO-3.*compile=none"):
            strategy.decide(cfg, world_size=2, can_pin=False)


def test_a_machine_without_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = compose.compose_run(["compile=layers"]).run
    build_run.check_machine(cfg, local_size=1, warn=print)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DoesNotFit, match=r"compile=layers needs a C\+\+ compiler: install g\+\+.*compile=none"):
        build_run.check_machine(replace(cfg, force=True), local_size=1, warn=print)


def test_a_plan_has_the_weights_and_the_gradients_of_a_compiled_layer_together() -> None:
    words = ["train.seq_len=32", "train.micro_batch_size=1", "checkpointing=none", "deepspeed.config=zero3"]
    sizes = ("max_reuse_distance", "prefetch_bucket_size", "param_persistence_threshold")
    words += [f"deepspeed.overrides.zero_optimization.stage3_{name}=0" for name in sizes]
    words += ["model.architecture.intermediate_size=4096"]  # its peaks are in layers
    gathered, together = {}, {}
    for scope in ("none", "layers"):
        known = Recordings()
        planned = make_plan(
            compose.compose_run([*words, f"compile={scope}"]).run, world_size=2, recordings=known
        )
        gathered[scope] = planned.simulation.backward_peak.by_category[Category.gathered]
        assert any("compile=layers" in text for text in planned.plan.assumptions) == (scope == "layers")
        (recording,) = known._found.values()
        cuts = [isinstance(part.cut, Ready) for part in recording.timeline.parts]
        together[scope] = max(len(list(same)) for ready, same in itertools.groupby(cuts) if ready)
    layer_bytes = 2 * 3 * 4096 * compose.compose_run(words).run.model.architecture["hidden_size"]
    assert gathered["none"] < 0.8 * layer_bytes <= gathered["layers"]
    assert together == {"none": 1, "layers": 9}, "seven matrices and two norms of a Llama's layer"
