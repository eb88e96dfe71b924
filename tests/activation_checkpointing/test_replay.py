"""One layer of each kind is held to the pass that keeps everything; and what reentrant mechanisms cannot carry.

The models here do what real ones do: layers that share keys and values through a dictionary (Gemma 3n), layers that run
several times (HRM), a kernel that looks at the grad mode (Doge), layers that are skipped at random (OPT's layerdrop).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from remat.activation_checkpointing import apply, dry_run, policy
from remat.activation_checkpointing.mechanisms import recompute
from remat.activation_checkpointing.replay import Draws, Recorder, Replayed
from remat.config.options import CheckpointingConfig, ConfigError, OffloadConfig, Policy, SelectiveOpsConfig

HIDDEN, LAYERS = 8, 4
FULL = CheckpointingConfig()
REENTRANT = CheckpointingConfig(reentrant=True)
SEGMENTS = CheckpointingConfig(policy=Policy.uniform, segment_layers=2)
REENTRANT_SEGMENTS = CheckpointingConfig(policy=Policy.uniform, segment_layers=2, reentrant=True)
OFFLOADED_INPUTS = CheckpointingConfig(offload=OffloadConfig(enabled=True, min_bytes=0))
OFFLOADED = CheckpointingConfig(policy=Policy.none, offload=OffloadConfig(enabled=True, min_bytes=0))
SELECTIVE = CheckpointingConfig(policy=Policy.selective_ops, selective_ops=SelectiveOpsConfig(save=["matmul"]))


class Layer(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> Any:
        return hidden_states + self.down(torch.nn.functional.gelu(self.up(hidden_states)))


class Model(nn.Module):
    """Embedding, layers, output; the sum of squares is its loss."""

    layer: type[nn.Module] = Layer

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, HIDDEN)
        self.layers = nn.ModuleList(self.layer() for _ in range(LAYERS))

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def run(self, hidden: torch.Tensor) -> Any:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        output = self.run(self.embedding(input_ids))
        return output.pow(2).sum()


class Sharing(Layer):
    """Its values depend on what an earlier layer wrote."""

    def forward(self, hidden_states: torch.Tensor, *, shared: Any = None, **_: Any) -> torch.Tensor:
        if "values" not in shared:
            shared["values"] = (self.up(hidden_states),)
        return hidden_states + self.down(torch.nn.functional.gelu(shared["values"][0]))


class SharesAcrossLayers(Model):
    layer = Sharing

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        shared: dict[str, Any] = {}
        for layer in self.layers:
            hidden = layer(hidden, shared=shared)
        return hidden


class Overwrites(Layer):
    def forward(self, hidden_states: torch.Tensor, *, shared: Any = None, **_: Any) -> torch.Tensor:
        hidden_states = hidden_states + shared.get("last", 0.0)
        shared["last"] = self.up(hidden_states).mean(-1, keepdim=True)
        return super().forward(hidden_states)


class OverwritesAcrossLayers(SharesAcrossLayers):
    layer = Overwrites


class RunsTwice(Model):
    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            hidden = super().run(hidden)
        return hidden


class LooksAtGradMode(Layer):
    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        output: torch.Tensor = super().forward(hidden_states)
        return output * (1.0 if torch.is_grad_enabled() else 1.0001)


class KernelByGradMode(Model):
    layer = LooksAtGradMode


class SkipsTheLast(Model):
    """Layer 1, the last of a segment of two, is not called."""

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            hidden = hidden if index == 1 else layer(hidden)
        return hidden


class KeywordTensor(Model):
    class layer(Layer):
        def forward(self, hidden_states: torch.Tensor, *, bias: Any = None, **_: Any) -> torch.Tensor:
            return super().forward(hidden_states) * bias

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        bias = torch.sigmoid(self.embedding.weight.mean())
        for layer in self.layers:
            hidden = layer(hidden, bias=bias)
        return hidden


class CallsAPartial(Model):
    """Its layers are given a function with a list and a tensor bound to it, and write to the list."""

    class layer(Layer):
        def forward(self, hidden_states: torch.Tensor, *, scaled: Any = None, **_: Any) -> torch.Tensor:
            return super().forward(scaled(hidden_states))

    @staticmethod
    def scale(earlier: list[torch.Tensor], hidden: torch.Tensor, *, by: torch.Tensor) -> torch.Tensor:
        earlier.append(hidden.mean())
        return hidden * by * sum(earlier).sigmoid()

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        scaled = partial(self.scale, [hidden.sum()], by=self.embedding.weight.std())
        for layer in self.layers:
            hidden = layer(hidden, scaled=scaled)
        return hidden


class Dictionaries(Model):
    class layer(Layer):
        def forward(self, hidden_states: torch.Tensor, **_: Any) -> Any:
            return {"hidden": super().forward(hidden_states), "extra": (hidden_states.mean(), None, 3)}

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        extra = 0.0
        for layer in self.layers:
            output = layer(hidden)
            hidden, extra = output["hidden"], extra + output["extra"][0]
        return hidden * extra


class OneTuples(Model):
    class layer(Layer):
        def forward(self, hidden_states: torch.Tensor, **_: Any) -> Any:
            return (super().forward(hidden_states),)

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            (hidden,) = layer(hidden)
        return hidden


class StateByKeyword(Model):
    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden_states=hidden)
        return hidden


class EditsItsInput(Model):
    class layer(Layer):
        def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
            return super().forward(hidden_states.mul_(0.5))


class Counts(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        self.calls += 1
        return super().forward(hidden_states) * self.calls


class BufferThatCounts(Model):
    layer = Counts


class ReadsBetween(Model):
    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for layer in self.layers:
            hidden = layer(hidden)
            total = total + hidden.mean()
        return hidden * total


class ReadsAgain(Model):
    """The first hidden state is used once more at the end: a skip connection."""

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().run(hidden) * hidden.sigmoid()


class LeavesTraces(Model):
    """Python's random numbers, and a count in an attribute, that nothing but a further run would see."""

    class layer(Layer):
        runs = 0

        def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
            self.runs = self.runs + 1
            random.random()
            return super().forward(hidden_states)


class CountsItsCalls(Model):
    class layer(Layer):
        calls = 0

        def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
            self.calls += 1
            return super().forward(hidden_states) * (1 + self.calls)


class EditsAnAttribute(Model):
    """A running mean that is no buffer."""

    class layer(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torch.zeros(HIDDEN)

        def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
            self.mean.mul_(0.5).add_(hidden_states.detach().mean((0, 1)))
            return super().forward(hidden_states - self.mean)


class OwnGenerator(Model):
    """Dropout by a generator that no attribute shows."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for layer in self.layers:
            layer.down.forward = partial(self.drop, layer.down.forward, generator)

    @staticmethod
    def drop(run: Any, generator: torch.Generator, hidden: torch.Tensor) -> Any:
        return run(hidden * (torch.rand(hidden.shape, generator=generator) > 0.5))


class Numpy(Model):
    class layer(Layer):
        def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
            skipped = numpy.random.random() < 1e-9  # which never comes, in one step
            return hidden_states if skipped else super().forward(hidden_states)


class RandomActivation(Model):
    class layer(Layer):
        def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
            return self.down(torch.nn.functional.rrelu(self.up(hidden_states), training=True))


class CutsTheGradient(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].up.register_forward_pre_hook(lambda _, args: (args[0].detach(),))

    class layer(Layer):
        def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
            return self.down(self.up(hidden_states))


class StartsWithoutGradient(Model):
    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hidden = self.layers[1](self.layers[0](hidden))
        return self.layers[3](self.layers[2](hidden))


class CollectsInputs(Model):
    """As Inkling 2 does: what a layer was given is used once more when it has run."""

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        kept = []
        for layer in self.layers:
            output = layer(hidden)
            if layer is self.layers[0]:
                kept.append(hidden * 0.1)
            hidden = output
        return hidden + kept[0]


class DrawsBetween(Model):
    """As layerdrop does, whatever comes of it."""

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            torch.rand([])
            hidden = layer(hidden)
        return hidden


class SharesWeights(Model):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.up = self.layers[0].up


@torch.library.custom_op("test_c10d::exchange", mutates_args=())
def exchange(part: torch.Tensor) -> torch.Tensor:
    """Stands for a collective, which torch has in namespaces with this name too."""
    return part.clone()


class Exchanges(Model):
    class layer(Layer):
        def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
            return super().forward(hidden_states) + exchange(hidden_states.detach())


Result = tuple[list[torch.Tensor], Replayed]


def run(model: type[Model], cfg: CheckpointingConfig, *, steps: int = 1) -> Result:
    """Loss and gradients of the last step, and what the first step's replay found."""
    net = model().train()
    applied = apply.apply(net, policy.decide_layers(cfg, LAYERS), cfg)
    ids = torch.arange(12).view(2, 6)
    try:
        for step in range(steps):
            net.zero_grad()
            with applied.micro_batch(), applied.recording() as recorder:
                loss = net(ids)
                recorder.forward_done(loss)
                loss.backward()
                if step == 0:
                    replayed = recorder.replay(recorder.ready())
        return [loss.detach(), *(p.grad for p in net.parameters() if p.grad is not None)], replayed
    finally:
        applied.remove()


@contextmanager
def after_backward(net: Model, cfg: CheckpointingConfig) -> Iterator[Recorder]:
    """The recorder of one micro-batch, which is over but for the replay."""
    applied = apply.apply(net, policy.decide_layers(cfg, LAYERS), cfg)
    with applied.micro_batch(), applied.recording() as recorder:
        loss = net(torch.arange(12).view(2, 6))
        recorder.forward_done(loss)
        loss.backward()
        yield recorder
    applied.remove()


def equal(left: Result, right: Result) -> bool:
    return len(left[0]) == len(right[0]) and all(map(torch.equal, left[0], right[0]))


CARRIED = [
    (SharesAcrossLayers, FULL),
    (SharesAcrossLayers, SEGMENTS),
    (OverwritesAcrossLayers, FULL),
    (OverwritesAcrossLayers, SEGMENTS),
    (OverwritesAcrossLayers, SELECTIVE),
    (RunsTwice, FULL),
    (RunsTwice, SEGMENTS),
    (KernelByGradMode, FULL),
    (KernelByGradMode, REENTRANT),
    (KernelByGradMode, REENTRANT_SEGMENTS),
    (SkipsTheLast, FULL),
    (SkipsTheLast, REENTRANT),
    (KeywordTensor, FULL),
    (KeywordTensor, SEGMENTS),
    (Dictionaries, FULL),
    (Dictionaries, REENTRANT),
    (OneTuples, REENTRANT),
    (StateByKeyword, FULL),
    (StateByKeyword, REENTRANT),
    (StateByKeyword, SEGMENTS),
    (StateByKeyword, REENTRANT_SEGMENTS),
    (EditsItsInput, OFFLOADED),
    (ReadsBetween, FULL),
    (SharesWeights, FULL),
    (SharesWeights, SEGMENTS),
    (CountsItsCalls, OFFLOADED),
    (EditsAnAttribute, OFFLOADED),
    (OwnGenerator, OFFLOADED),
    (Numpy, OFFLOADED),
    (RandomActivation, FULL),
    (RandomActivation, OFFLOADED_INPUTS),
    (CutsTheGradient, FULL),
    (CutsTheGradient, CheckpointingConfig(policy=Policy.none, layers={"2": Policy.uniform}, reentrant=True)),
    (StartsWithoutGradient, REENTRANT),
    (CallsAPartial, FULL),
    (CallsAPartial, OFFLOADED),
    (CollectsInputs, FULL),
]


@pytest.mark.parametrize(("model", "cfg"), CARRIED)
def test_what_is_carried_is_bit_equal_and_the_replay_says_so(
    model: type[Model], cfg: CheckpointingConfig
) -> None:
    kept = run(model, CheckpointingConfig(policy=Policy.none), steps=2)
    found = run(model, cfg, steps=2)
    assert equal(found, kept)
    assert found[1].differences == found[1].notes == []
    assert found[1].compared and all(one["equal"] for one in found[1].compared)


REFUSED = [
    (SharesAcrossLayers, REENTRANT, "(layer 0) writes tensors to its argument shared['values']"),
    (SharesAcrossLayers, REENTRANT_SEGMENTS, "(layer 0) writes tensors to its argument shared['values']"),
    (RunsTwice, REENTRANT, "runs several times in one forward"),
    (RunsTwice, REENTRANT_SEGMENTS, "runs several times in one forward"),
    (SkipsTheLast, SEGMENTS, "the hidden state after layer 0 is not there"),
    (KeywordTensor, REENTRANT, "that carry a gradient in its argument bias"),
    (KeywordTensor, REENTRANT_SEGMENTS, "that carry a gradient in its argument bias"),
    (OneTuples, SEGMENTS, "the model uses it in aten.unbind"),
    (EditsItsInput, FULL, "edits its argument hidden_states in place"),
    (ReadsBetween, SEGMENTS, "the model uses it in aten.mean"),
    (DrawsBetween, SEGMENTS, "draws random numbers between layers 0 and 1"),
    (SharesWeights, REENTRANT, "weight up.weight of Layer (layer 0) is also used elsewhere"),
]


@pytest.mark.parametrize(("model", "cfg", "text"), REFUSED)
def test_what_is_not_carried_is_refused_by_name(
    model: type[Model], cfg: CheckpointingConfig, text: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        run(model, cfg)
    assert text in str(refusal.value)
    assert "use checkpointing=" in str(refusal.value)


def torchs_own(options: recompute.Recompute, fn: Any, *args: Any) -> Any:
    return checkpoint(fn, *args, use_reentrant=options.reentrant)


@pytest.fixture
def no_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mechanisms as they would be without what was built for the faults that are known."""
    monkeypatch.setattr(apply, "refuse_what_is_lost", lambda *_, **__: nullcontext())
    monkeypatch.setattr(apply, "refuse_second_call", lambda *_: None)
    monkeypatch.setattr(apply, "_refuse_shared_weights", lambda *_: None)
    monkeypatch.setattr(recompute.Recompute, "__call__", torchs_own)
    monkeypatch.setattr(recompute.Segment, "_check_order", lambda *_: None)
    monkeypatch.setattr(recompute.StandIn, "of", staticmethod(lambda hidden, *_: hidden))


SILENT = [
    (SharesAcrossLayers, REENTRANT, "way of the gradient from shared"),
    (RunsTwice, REENTRANT, "was handed over in 2 parts"),
    (KernelByGradMode, REENTRANT, "output differs from that of the pass that keeps everything by up to 0.0001"),
    (KernelByGradMode, REENTRANT_SEGMENTS, "output differs"),
    (SkipsTheLast, SEGMENTS, "layer 0 was called 1 times and ran 0 times"),
    (SharesWeights, REENTRANT, "was handed over in"),
]


@pytest.mark.parametrize(("model", "cfg", "text"), SILENT)
def test_the_replay_finds_each_silent_fault_without_its_guard(
    model: type[Model], cfg: CheckpointingConfig, text: str, no_guards: None
) -> None:
    found = run(model, cfg)
    assert any(text in difference for difference in found[1].differences), found[1]


UNFORESEEN = [
    (CountsItsCalls, FULL, "in the next run, by what this one left in attributes, output differs"),
    (CountsItsCalls, SELECTIVE, "in the next run, by what this one left in attributes, output differs"),
    (EditsAnAttribute, FULL, "buffer mean differs"),
    (OwnGenerator, FULL, "draws random numbers from a torch.Generator of its own"),
    (OwnGenerator, SELECTIVE, "draws random numbers from a torch.Generator of its own"),
    (Numpy, FULL, "draws random numbers from numpy"),
    (LeavesTraces, FULL, "draws random numbers from python's random"),
    (RandomActivation, OFFLOADED, "rrelu_with_noise draws into memory that autograd has saved before"),
    (CutsTheGradient, REENTRANT, "layers 2: no gradient comes back to the hidden state"),
    (CollectsInputs, SEGMENTS, "layers 0 begin segments, between whose layers the model uses tensors"),
]


@pytest.mark.parametrize(("model", "cfg", "text"), UNFORESEEN)
def test_what_only_the_first_micro_batch_shows_is_found(
    model: type[Model], cfg: CheckpointingConfig, text: str
) -> None:
    assert any(text in difference for difference in run(model, cfg)[1].differences)


def test_what_no_guard_knows_of_is_found() -> None:
    """A buffer that each run of a layer changes: the recomputation uses another value."""
    found = run(BufferThatCounts, FULL)
    assert any("buffer calls differs" in text for text in found[1].differences)
    assert any("gradient of hidden_states differs" in text for text in found[1].differences)


@pytest.mark.parametrize("cfg", [REENTRANT, REENTRANT_SEGMENTS])
def test_a_hidden_state_with_other_readers_is_not_for_the_reentrant_variant(cfg: CheckpointingConfig) -> None:
    """Its gradient would be added up in another order, which rounds otherwise."""
    found = run(ReadsAgain, cfg)[1].differences
    assert any(
        "layers 0: the hidden state that they are given is also used elsewhere" in text for text in found
    )
    assert run(ReadsAgain, FULL)[1].differences == []


def test_the_replay_leaves_no_trace() -> None:
    def traces(cfg: CheckpointingConfig) -> tuple[Any, Any]:
        random.seed(3)
        net = LeavesTraces().train()
        with after_backward(net, cfg) as recorder:
            before = random.getstate(), [layer.runs for layer in net.layers], torch.get_rng_state().tolist()
            assert recorder.replay(recorder.ready()).compared
        after = random.getstate(), [layer.runs for layer in net.layers], torch.get_rng_state().tolist()
        return before, after

    before, after = traces(OFFLOADED)
    assert before == after
    before, after = traces(FULL)
    assert before == after


@pytest.mark.parametrize("model", [SharesAcrossLayers, RunsTwice, KeywordTensor, SharesWeights])
def test_segments_under_zero3_fall_back_to_what_is_safe_and_say_so(model: type[Model]) -> None:
    with torch.device("meta"):
        net = model().train()
    decisions, because = dry_run.choose(net, SEGMENTS, [LAYERS], zero_stage=3)
    assert not any(decision.reentrant for decision in decisions)
    assert because.startswith("segments are not reentrant for this model: checkpointing: ")
    with pytest.raises(ConfigError):  # what was asked for by name is not changed
        dry_run.choose(net, REENTRANT_SEGMENTS, [LAYERS], zero_stage=3)


def test_segments_under_zero3_stay_reentrant_where_the_model_can() -> None:
    with torch.device("meta"):
        net = Model().train()
    decisions, because = dry_run.choose(net, SEGMENTS, [LAYERS], zero_stage=3)
    assert because == "" and all(decision.reentrant for decision in decisions)
    for model, text in (
        (ReadsBetween, "the model uses it in aten.mean"),
        (Dictionaries, "its layers are treated so"),
    ):
        with torch.device("meta"):
            other = model().train()
        with pytest.raises(ConfigError) as refusal:
            dry_run.choose(other, SEGMENTS, [LAYERS], zero_stage=3)
        assert text in str(refusal.value)


def test_ranks_that_share_a_layer_run_it_equally_often_whoever_finds_errors() -> None:
    """A rank that runs it once more by itself would wait for the others forever."""

    def runs(model: type[Model], *, wrong: bool) -> int:
        net, counted = model().train(), list[int]()
        with after_backward(net, FULL) as recorder:
            if wrong:
                next(iter(recorder._samples.values()))._outputs["output"].value.add_(1)
            net.layers[0].up.register_forward_pre_hook(lambda *_: counted.append(1))
            assert bool(recorder.replay(recorder.ready()).differences) == wrong
        return len(counted)

    assert [runs(Exchanges, wrong=wrong) for wrong in (False, True)] == [2, 2]
    assert [runs(Model, wrong=wrong) for wrong in (False, True)] == [1, 2]


def test_higher_order_operators_run_where_draws_are_recorded() -> None:
    """As flex attention, where it is not compiled: torch refuses them under other modes."""
    given = torch.randn(1, 2, 128, 16)
    whole = flex_attention(given, given, given)
    with Draws():
        assert torch.equal(flex_attention(given, given, given), whole)
