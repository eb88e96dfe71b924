"""What autograd saves in a layer: nothing leaks, edits are noticed, other hooks go on working."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from remat.activation_checkpointing import apply, policy
from remat.activation_checkpointing.mechanisms import discard_output, offload, saved_tensors
from remat.activation_checkpointing.mechanisms.counters import LayerCounters
from remat.activation_checkpointing.mechanisms.offload import HostOffload
from remat.activation_checkpointing.mechanisms.saved_tensors import SavedTensors
from remat.config.options import CheckpointingConfig, OffloadConfig, Policy
from remat.model import layers
from tests.support import small_models, watched
from tests.support.grids import cases

HUGE = 1 << 40  # min_bytes above everything: the hooks are active and every tensor passes through


def passing(layer: nn.Module) -> SavedTensors:
    host = HostOffload(OffloadConfig(min_bytes=HUGE), torch.device("cpu"), 1)
    return SavedTensors(layer, by_reference=False, offload=host.layer(0, LayerCounters()), discarded=None)


def moving(layer: nn.Module) -> tuple[SavedTensors, HostOffload]:
    host = HostOffload(OffloadConfig(min_bytes=0), torch.device("cpu"), 1)
    return SavedTensors(layer, by_reference=False, offload=host.layer(0, LayerCounters()), discarded=None), host


def test_no_hooks_where_there_is_nothing_to_do() -> None:
    saved = SavedTensors(nn.Linear(2, 2), by_reference=True, offload=None, discarded=None)
    assert isinstance(saved.hooks(), nullcontext)


@pytest.mark.parametrize(
    "use",
    [
        lambda layer, x: layer(x.square()),
        lambda layer, x: x.exp(),
        lambda layer, x: (x * x).sigmoid(),
        lambda layer, x: torch.utils.checkpoint.checkpoint(torch.exp, x.square(), use_reentrant=False),
    ],
)
def test_nothing_outlives_its_graph(use: Any) -> None:
    """An output that its own grad_fn holds would be a cycle that no garbage collection finds."""
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    gc.disable()
    try:
        for saved in (passing(layer), moving(layer)[0]):
            with saved.hooks():
                y = use(layer, x)
            ref = weakref.ref(y.untyped_storage())
            del y
            assert ref() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("op", "saves_its_output"),
    [
        (torch.square, False),
        (torch.exp, True),
        (lambda t: nn.functional.softmax(t, -1), True),
        (lambda t: t @ t.T, False),
    ],
    ids=["square", "exp", "softmax", "matmul"],
)
def test_an_edit_in_place_is_noticed_as_without_hooks(op: Any, saves_its_output: bool) -> None:
    for context in (nullcontext(), passing(nn.Linear(2, 2)).hooks()):
        x = torch.randn(3, 3, requires_grad=True) * 1
        with context:
            y = op(x)
        with torch.no_grad():
            (y if saves_its_output else x).add_(1)
        with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
            y.sum().backward()


def test_weights_and_buffers_are_never_moved() -> None:
    layer = nn.Linear(16, 16)
    layer.register_buffer("mask", torch.rand(3, 16))
    x = torch.randn(3, 16, requires_grad=True)
    saved, host = moving(layer)
    with saved.hooks():
        loss = (layer(x) * layer.mask).sum()
    assert len(host.storages()) == 1
    assert host.pool.taken_bytes == 512  # one buffer: x
    loss.backward()
    assert host.pool.taken_bytes == 0


def test_hooks_around_see_what_stays() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    seen: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        seen.append(tensor.detach())
        return len(seen) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: seen[i] * 2), passing(layer).hooks():
        y = layer(x).square()
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert len(seen) == 3  # weight, input, what is squared
    assert torch.allclose(grad, 4 * 2 * layer(x).detach() @ layer.weight.detach())


def test_user_hooks_around_the_model() -> None:
    """torch's save_on_cpu around everything: what a policy keeps goes through it."""
    net = small_models.build("llama")
    kept = watched.run(net, watched.NONE)
    cfg = CheckpointingConfig(policy=Policy.discard_output)
    with torch.autograd.graph.save_on_cpu():
        assert watched.differences(watched.run(net, cfg), kept) == []


CONFIGS = {
    "discard": CheckpointingConfig(policy=Policy.discard_output),
    "offload": CheckpointingConfig(policy=Policy.none, offload=watched.offload_all()),
    "discard + offload": CheckpointingConfig(policy=Policy.discard_output, offload=watched.offload_all()),
    "full + offload": CheckpointingConfig(offload=watched.offload_all()),
}


@pytest.mark.parametrize("name", cases(CONFIGS, {"discard", "offload", "full + offload"}))
def test_fifty_steps_hold_memory_flat(name: str) -> None:
    net, cfg = small_models.build("llama"), CONFIGS[name]
    applied = apply.apply(net, policy.decide_layers(cfg, len(layers.decoder_layers(net))), cfg)
    ids = torch.randint(0, 64, (2, 16))

    def steps(count: int) -> tuple[int, int, int]:
        for _ in range(count):
            with applied.micro_batch():
                net(input_ids=ids, labels=ids).loss.backward()
            if applied.offload:
                assert applied.offload.pool.taken_bytes == 0
        net.zero_grad()
        gc.collect()
        things = [type(thing) for thing in gc.get_objects()]
        assert not [
            kind
            for kind in things
            if kind in (offload.Handle, offload._Moved, discard_output.Handle, discard_output.Region)
        ]
        tensors = sum(issubclass(kind, torch.Tensor) for kind in things)
        pool = applied.offload.pool if applied.offload else None
        return (
            tensors,
            tracemalloc.get_traced_memory()[0],
            sum(s.nbytes() for s in pool.storages()) if pool else 0,
        )

    tracemalloc.start()
    try:
        steps(5)
        found = [steps(5), *(steps(17) for _ in range(3))]
    finally:
        tracemalloc.stop()
    tensors, traced, pooled = zip(*found, strict=True)
    assert len(set(tensors)) == len(set(pooled)) == 1
    grown = min(after - before for before, after in itertools.pairwise(traced))
    assert grown < 20_000, "more stays behind in each stretch than free lists take: no cache that filled once"


def test_leftovers_of_an_exception_are_dropped() -> None:
    net, cfg = small_models.build("llama"), CONFIGS["offload"]
    applied = apply.apply(net, policy.decide_layers(cfg, 3), cfg)
    ids = torch.randint(0, 64, (2, 16))
    losses = []
    with pytest.raises(ZeroDivisionError), applied.micro_batch():
        losses.append(net(input_ids=ids, labels=ids).loss)
        assert applied.offload is not None
        assert applied.offload.pool.taken_bytes > 0
        raise ZeroDivisionError
    assert applied.offload.pool.taken_bytes == 0
    with pytest.raises(RuntimeError, match=r"checkpointing.offload: backward came after its micro-batch"):
        losses[0].backward()
    del losses
    with applied.micro_batch():
        net(input_ids=ids, labels=ids).loss.backward()
    assert applied.offload.pool.taken_bytes == 0


class Status:
    def __init__(self, name: str) -> None:
        self.name = name


def sharded(*shapes: tuple[int, ...]) -> tuple[list[Any], torch.Tensor]:
    """Parameters as ZeRO-3 gathers them, several in one buffer; `partition` and `all_gather` move them elsewhere."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    values = torch.randn(sum(sizes))
    weights: list[Any] = []
    for shape, part in zip(shapes, values.split(sizes), strict=True):
        weight: Any = nn.Parameter(torch.empty(0))
        weight.ds_id, weight.ds_shape, weight.ds_status = len(weights), shape, Status("AVAILABLE")
        weight.data = part.view(shape)
        whole = part.clone().view(shape)

        def partition(weight: Any = weight) -> None:
            weight.data, weight.ds_status = torch.empty(0), Status("NOT_AVAILABLE")

        def all_gather(weight: Any = weight, whole: torch.Tensor = whole) -> None:
            weight.data, weight.ds_status = whole.clone(), Status("AVAILABLE")

        weight.partition, weight.all_gather = partition, all_gather
        weights.append(weight)
    return weights, values


@pytest.mark.parametrize("gathered_in_time", [True, False])
def test_gathered_weights_are_referred_to(gathered_in_time: bool) -> None:
    """Views of two weights in one buffer: the buffer goes, backward reads the new ones."""
    (experts, other), buffer = sharded((4, 3, 5), (5, 2))
    layer = nn.Module()
    layer.experts, layer.other = experts, other
    x = torch.randn(6, 5, requires_grad=True)

    def forward() -> torch.Tensor:
        return ((x @ experts[2].t()) ** 2).sum() + (x @ other).sum()

    (wanted,) = torch.autograd.grad(forward(), x)
    saved = SavedTensors(layer, by_reference=True, offload=None, discarded=None)
    with saved.hooks():
        loss = forward()
    storage = weakref.ref(buffer.untyped_storage())
    del buffer
    for weight in (experts, other):
        weight.partition()
    assert storage() is None
    if gathered_in_time:
        for weight in (experts, other):
            weight.all_gather()
    (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, wanted)
    assert experts.ds_status.name == ("AVAILABLE" if gathered_in_time else "NOT_AVAILABLE")


def test_a_weight_that_is_under_way_is_waited_for() -> None:
    """Prefetched for backward: DeepSpeed has asked for it, and its values come when its handle is waited for."""
    (experts,), _ = sharded((4, 3, 5))
    model, layer = nn.Module(), nn.Module()
    layer.experts = experts
    x = torch.randn(6, 5, requires_grad=True)
    (wanted,) = torch.autograd.grad(((x @ experts[2].t()) ** 2).sum(), x)
    saved = SavedTensors(layer, by_reference=True, offload=None, discarded=None, model=model)
    with saved.hooks():
        loss = ((x @ experts[2].t()) ** 2).sum()

    class Handle:
        waited = 0

        def wait(self) -> None:
            self.waited += 1
            experts.all_gather()

    experts.partition()
    experts.ds_status = Status("INFLIGHT")
    handle = Handle()
    model.ds_inflight_param_registry = {experts: handle}
    (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, wanted)
    assert handle.waited == 1 and not model.ds_inflight_param_registry
    assert experts.ds_status.name == "AVAILABLE"  # DeepSpeed wanted it there


def test_many_weights_are_not_all_looked_at_for_every_saved_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that is gathered when its module runs is known from then on, by the address of its memory."""
    looked: list[int] = []
    view_of = saved_tensors._view_of
    monkeypatch.setattr(
        saved_tensors, "_view_of", lambda weights, t: looked.append(len(list(weights))) or view_of(weights, t)
    )

    class Expert(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight[0]).tanh()

    weights, _ = sharded(*[(1, 4, 4)] * 64)
    layer = nn.Module()
    layer.experts = nn.ModuleList(Expert() for _ in weights)
    for expert, weight in zip(layer.experts, weights, strict=True):
        expert.weight = weight
        weight.partition()
        expert.register_forward_pre_hook(lambda module, args: module.weight.all_gather())
        expert.register_forward_hook(lambda module, args, output: module.weight.partition())
    saved = SavedTensors(layer, by_reference=True, offload=None, discarded=None)
    x = torch.randn(3, 4, requires_grad=True)
    with saved.hooks():
        loss = sum(expert(x).sum() for expert in layer.experts)
    assert len(looked) == 64 * 3 and max(looked) <= 1
    assert sum(looked) >= 64  # each weight was found; a result may lie where a weight was before
    (found,) = torch.autograd.grad(loss, x)
    for weight in weights:
        weight.all_gather()
    (wanted,) = torch.autograd.grad(sum(expert(x).sum() for expert in layer.experts), x)
    assert torch.equal(found, wanted)
    saved.close()
    assert all(len(expert._forward_pre_hooks) == 1 for expert in layer.experts)


def test_gathered_weights_are_not_moved_to_the_host() -> None:
    (weight,), _ = sharded((8, 8))
    layer = nn.Module()
    layer.weight = weight
    host = HostOffload(OffloadConfig(min_bytes=0), torch.device("cpu"), 1)
    moved = host.layer(0, counts := LayerCounters())
    x = torch.randn(3, 8, requires_grad=True)
    with SavedTensors(layer, by_reference=True, offload=moved, discarded=None).hooks():
        y = x @ weight
    assert counts.moved_bytes == x.nbytes
    y.sum().backward()
