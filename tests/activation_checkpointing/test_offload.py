"""What a layer keeps in host memory: exact bytes, layouts, sharing, order of the copies, and the pool of buffers."""

from __future__ import annotations

import random
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from remat.activation_checkpointing import verification
from remat.activation_checkpointing.mechanisms import offload
from remat.activation_checkpointing.mechanisms.counters import LayerCounters
from remat.activation_checkpointing.mechanisms.offload import HostOffload, HostPool, LayerOffload
from remat.activation_checkpointing.mechanisms.saved_tensors import SavedTensors
from remat.config.options import CheckpointingConfig, OffloadConfig, Policy, SelectiveOpsConfig, StorageDtype
from remat.machine.allocator import TORCH_DEFAULT, Allocators
from tests.support import small_models, watched

CPU = torch.device("cpu")
HIDDEN = 2 * 16 * 32 * 4
EVERYTHING = watched.offload_all()
CONFIGS = {
    "none": CheckpointingConfig(policy=Policy.none, offload=EVERYTHING),
    "full": CheckpointingConfig(offload=EVERYTHING),
    "full_reentrant": CheckpointingConfig(reentrant=True, offload=EVERYTHING),
    "discard_output": CheckpointingConfig(policy=Policy.discard_output, offload=EVERYTHING),
    "uniform": CheckpointingConfig(policy=Policy.uniform, offload=EVERYTHING),
    "selective_modules": CheckpointingConfig(
        policy=Policy.selective_modules, recompute_modules=["attention"], offload=EVERYTHING
    ),
    "selective_ops": CheckpointingConfig(
        policy=Policy.selective_ops, selective_ops=SelectiveOpsConfig(save=["matmul"]), offload=EVERYTHING
    ),
}


def host(
    min_bytes: int = 0, layers: int = 1, **more: Any
) -> tuple[HostOffload, list[LayerOffload], list[LayerCounters]]:
    owner = HostOffload(OffloadConfig(min_bytes=min_bytes, **more), CPU, layers)
    counts = [LayerCounters() for _ in range(layers)]
    return owner, [owner.layer(index, counts[index]) for index in range(layers)], counts


@pytest.fixture(scope="module", params=["llama", "qwen2", "gpt2", "mixtral", "gemma", "phi"])
def family(request: pytest.FixtureRequest) -> tuple[Any, watched.Watched]:
    net = small_models.build(request.param)
    return net, watched.run(net, watched.NONE)


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize("name", list(CONFIGS))
def test_bit_equal_and_in_effect(name: str, family: tuple[Any, watched.Watched]) -> None:
    net, kept = family
    result = watched.run(net, CONFIGS[name])
    assert watched.differences(result, kept) == []
    assert verification.unmet_expectations(result.applied, result.watch, CONFIGS[name]) == []
    assert result.applied.offload is not None
    assert result.applied.offload.pool.taken_bytes == 0


def test_kept_bytes_are_moved() -> None:
    """The device keeps nothing but the last layer's output, which no layer saved; every byte is counted once."""
    net = small_models.build("llama")
    kept = watched.run(net, watched.NONE).watch.kept_bytes
    result = watched.run(net, CONFIGS["none"])
    assert result.watch.kept_bytes.get(0, 0) == result.watch.kept_bytes.get(1, 0) == 0
    assert result.watch.kept_bytes[2] == HIDDEN
    rotary = 2 * 16 * 16 * 4  # cosine and sine [1, 16, 16]: all layers use them, the first one moves them
    assert [c.moved_bytes for c in result.applied.counts] == [kept[0] + rotary, kept[1], kept[2]]
    full = watched.run(net, CONFIGS["full"])
    assert [c.moved_bytes for c in full.applied.counts] == [HIDDEN] * 3
    assert [full.watch.kept_bytes.get(index, 0) for index in range(3)] == [0, 0, HIDDEN]


def test_layers_that_stay() -> None:
    cfg = CheckpointingConfig(offload=OffloadConfig(enabled=True, min_bytes=0, keep_last_layers=2))
    result = watched.run(small_models.build("llama"), cfg)
    assert [c.moved_bytes for c in result.applied.counts] == [HIDDEN, 0, 0]
    assert [result.watch.kept_bytes.get(index, 0) for index in range(3)] == [HIDDEN, HIDDEN, HIDDEN]


LAYOUTS = {
    "whole": lambda: torch.randn(4, 6),
    "transposed": lambda: torch.randn(4, 6).t(),
    "heads": lambda: torch.randn(2, 5, 3, 4).transpose(1, 2),
    "expanded": lambda: torch.randn(4, 1).expand(4, 6),
    "every second": lambda: torch.randn(8, 6)[::2, 1::2],
    "part": lambda: torch.randn(100, 6)[10:20],
    "scalar": lambda: torch.randn(()),
    "half": lambda: torch.randn(6, 4).bfloat16()[:, 1:],
    "double": lambda: torch.randn(3, dtype=torch.float64),
}


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_layouts_survive(name: str) -> None:
    _, (layer,), _ = host()
    tensor = LAYOUTS[name]()
    handle = layer.pack(tensor)
    assert handle is not None
    for _ in range(2):
        back = layer.unpack(handle)
        assert torch.equal(back, tensor)
        assert (back.dtype, back.stride()) == (tensor.dtype, tensor.stride())
        assert back.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_what_stays() -> None:
    _, (layer,), counts = host(min_bytes=65)
    assert layer.pack(torch.randn(16)) is None  # 64 bytes
    assert layer.pack(torch.arange(100)) is None
    assert layer.pack(torch.randn(100, device="meta")) is None
    assert layer.pack(torch.randn(0, 100)) is None
    gone = torch.randn(100)
    gone.untyped_storage().resize_(0)
    assert layer.pack(gone) is None
    assert counts[0].moved_bytes == 0
    assert layer.pack(torch.randn(17)) is not None


def test_the_source_is_freed() -> None:
    _, (layer,), _ = host()
    tensor = torch.randn(100)
    storage = weakref.ref(tensor.untyped_storage())
    handle = layer.pack(tensor)
    del tensor
    assert handle is not None
    assert storage() is None


def test_saved_twice_is_moved_once() -> None:
    owner, layers, counts = host(layers=2)
    qkv = torch.randn(2, 5, 12)
    parts = [layers[0].pack(part) for part in qkv.split(4, -1)]  # each spans nearly all of the storage
    parts += [layers[0].pack(qkv), layers[1].pack(qkv.view(10, 12))]
    assert [count.moved_bytes for count in counts] == [qkv.nbytes, 0]
    values = [layers[0].unpack(part) for part in parts[:4] if part]
    assert all(torch.equal(a, b) for a, b in zip(values, [*qkv.split(4, -1), qkv], strict=True))
    assert len({value.untyped_storage().data_ptr() for value in values}) == 1
    assert parts[4] is not None
    assert torch.equal(layers[1].unpack(parts[4]), qkv.view(10, 12))
    del parts, values
    assert owner.pool.taken_bytes == 0


def test_an_edit_makes_another_tensor() -> None:
    _, (layer,), counts = host()
    tensor = torch.ones(10)
    before = layer.pack(tensor)
    tensor.add_(1)
    after = layer.pack(tensor)
    assert before is not None
    assert after is not None
    with pytest.raises(RuntimeError, match=r"checkpointing\.offload.*shape \[10\].*layer 0.*in-place"):
        layer.unpack(before)  # on a GPU the copy might have seen the edit
    assert layer.unpack(after).sum() == 20
    assert counts[0].moved_bytes == 80


@pytest.mark.parametrize(
    "edit", [lambda t: t.zero_(), lambda t: t.view(-1)[:3].mul_(2)], ids=["itself", "a view"]
)
def test_an_edit_between_forward_and_backward_is_found(edit: Any) -> None:
    """As autograd finds it without offload: of an input, and of an output that its own backward needs."""
    _, (layer,), _ = host()
    saved = SavedTensors(nn.Identity(), by_reference=False, offload=layer, discarded=None)
    weight = torch.randn(4, 4, requires_grad=True)
    for operation in (torch.square, torch.exp):
        hidden = weight * 2
        with saved.hooks():
            output = operation(hidden)
        loss = output.sum()
        with torch.no_grad():
            edit(hidden if operation is torch.square else output)
        with pytest.raises(RuntimeError, match=r"layer 0.*in-place"):
            loss.backward()


def test_an_address_that_is_used_again_is_another_tensor() -> None:
    """Storages come and go at the same address; what is held is told apart."""
    _, (layer,), counts = host()
    handles = [layer.pack(torch.full((10,), float(value))) for value in range(200)]
    assert counts[0].moved_bytes == 200 * 40
    for value, handle in enumerate(handles):
        assert handle is not None
        assert layer.unpack(handle)[0] == value


def test_the_layer_below_is_fetched_with_the_first_tensor_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    bring = offload._Transfers.bring

    def noted(self: Any, sources: Any, device: Any) -> Any:
        order.append(int(sources[0][0]))
        return bring(self, sources, device)

    monkeypatch.setattr(offload._Transfers, "bring", noted)
    owner = HostOffload(OffloadConfig(min_bytes=0), CPU, 4)
    layers = {index: owner.layer(index, LayerCounters()) for index in (0, 1, 3)}  # layer 2 stays
    handles = {
        index: [layer.pack(torch.full((2,), 10.0 * index + save)) for save in range(2)]
        for index, layer in layers.items()
    }
    for index, expected in ((3, [31, 30, 11, 10]), (1, [1, 0]), (0, [])):
        order.clear()
        for handle in reversed(handles[index]):
            assert handle is not None
            layers[index].unpack(handle)
        assert order == expected


def test_device_memory_is_freed_with_the_last_use() -> None:
    """After a handle is gone nothing holds its tensor: the peak of backward is that of a run without offload."""
    _, (layer,), _ = host()
    handles = [layer.pack(torch.randn(10)) for _ in range(2)]
    assert handles[0] is not None
    storage = weakref.ref(layer.unpack(handles[0]).untyped_storage())
    assert storage() is not None
    handles[0] = None
    assert storage() is None


def test_on_meta_bytes_are_counted_and_no_memory_is_used() -> None:
    """A simulation runs the same code on tensors without values."""
    owner = HostOffload(OffloadConfig(min_bytes=0), torch.device("meta"), 1)
    layer = owner.layer(0, counts := LayerCounters())
    tensor = torch.empty(1 << 20, 1 << 20, device="meta").t()
    handle = layer.pack(tensor)
    assert handle is not None
    assert counts.moved_bytes == 4 << 40
    back = layer.unpack(handle)
    assert (back.shape, back.stride(), back.device.type) == (tensor.shape, tensor.stride(), "meta")
    assert all(storage.device.type == "meta" for storage in owner.storages())


def test_low_precision_spares_what_is_no_activation() -> None:
    """The statistics of attention and norms decide over everything else, and carry no gradient."""
    _, (layer,), counts = host(dtype=StorageDtype.fp8)
    activation = torch.randn(4, 32, requires_grad=True)
    heads = (torch.randn(2, 5, 3, 16, requires_grad=True) * 1).transpose(1, 2)
    statistic, narrow = torch.randn(4, 32), torch.randn(32, 4, requires_grad=True)
    handles = []
    for tensor, nbytes in (
        (activation, 4 * 32 + 4 * 4),
        (heads, 480 + 4 * 30),
        (statistic, 512),
        (narrow, 512),
    ):
        counts[0].clear()
        handle = layer.pack(tensor)
        assert handle is not None
        handles.append(handle)
        assert counts[0].moved_bytes == nbytes
        back = layer.unpack(handle)
        assert back.stride() == tensor.stride()
        assert torch.allclose(back, tensor, rtol=1 / 14, atol=1e-2)
        assert torch.equal(back, tensor) == (nbytes == 512)
    counts[0].clear()
    assert layer.pack(activation.t()) is not None  # a view of what is stored already
    assert counts[0].moved_bytes == 0


def test_buffers_are_used_again() -> None:
    pool = HostPool(CPU)
    first = pool.take(1000)
    assert (first.numel(), pool.taken_bytes) == (1024, 1024)
    pool.give(first)
    assert pool.take(900).data_ptr() == first.data_ptr()
    assert pool.take(900).data_ptr() != first.data_ptr()
    pool.give(first)
    assert pool.take(100).data_ptr() == first.data_ptr()  # the smallest place that holds it
    assert pool.take(100).data_ptr() == first.data_ptr() + 512  # and what that one left
    assert len(pool.storages()) == 1
    assert all(pool.take(n).data_ptr() % 512 == first.data_ptr() % 512 for n in (1, 513, 5))


@pytest.mark.parametrize("mebibytes", [1, 3, 5, 33, 48, 63, 65, 100, 176, 300, 513, 1100])
def test_little_of_a_slab_is_lost_to_powers_of_two(mebibytes: int) -> None:
    size = mebibytes << 20
    slab = offload.slab_bytes(size)
    assert slab & (slab - 1) == 0
    assert slab % size <= slab / 8
    assert slab <= max(offload.SMALLEST_SLAB_BYTES, 32 * size)


EXACT = Allocators(exact_above_bytes=16 << 20)


@pytest.mark.parametrize("mebibytes", [17, 20, 33, 48, 100, 513])
def test_nothing_of_a_slab_is_lost_where_page_locked_memory_is_exact(mebibytes: int) -> None:
    assert offload.slab_bytes(mebibytes << 20, EXACT) == mebibytes << 20
    assert offload.slab_bytes(1 << 20, EXACT) == offload.SMALLEST_SLAB_BYTES


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("allocators", [TORCH_DEFAULT, EXACT], ids=["powers_of_two", "exact"])
@pytest.mark.parametrize("lengths", ["rising", "falling", "random"])
@pytest.mark.parametrize("policy", [Policy.full, Policy.none])
def test_sequences_of_many_lengths_do_not_let_the_pool_grow(
    policy: Policy, lengths: str, allocators: Allocators
) -> None:
    """32 layers 4096 wide; once the longest was there, not more than an eighth above what it needed."""
    steps = list(range(64, 4096, 64))
    if lengths == "falling":
        steps.reverse()
    if lengths == "random":
        random.Random(0).shuffle(steps)
    pool, most = HostPool(torch.device("meta"), allocators), 0
    for tokens in steps:
        widths = [4096] if policy is Policy.full else [4096] * 4 + [11008] * 3 + [1024, 64]
        held = [pool.take(2 * tokens * width) for _ in range(32) for width in widths]
        most = max(most, pool.taken_bytes)
        assert pool.slab_bytes <= 2 * most + offload.SMALLEST_SLAB_BYTES
        while held:
            pool.give(held.pop())
    assert pool.slab_bytes <= most * 9 / 8
    assert all(slab.is_unused for slab in pool._slabs.values())


def test_the_way_back_begins_in_the_layers_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the kept layer above is in backward; without one, with the gradient of the top layer's output."""
    net = small_models.build("llama", num_hidden_layers=5)
    order: list[str] = []
    for index, layer in enumerate(net.model.layers):
        layer.mlp.down_proj.register_full_backward_hook(
            lambda *_, index=index: order.append(f"backward {index}")
        )
    fetch = LayerOffload.fetch

    def noted(self: LayerOffload) -> None:
        if not order or order[-1] != f"fetch {self._index}":
            order.append(f"fetch {self._index}")
        fetch(self)

    monkeypatch.setattr(LayerOffload, "fetch", noted)
    offloaded = OffloadConfig(enabled=True, min_bytes=0, keep_last_layers=2)
    watched.run(net, CheckpointingConfig(policy=Policy.none, offload=offloaded))
    assert order[:4] == ["backward 4", "fetch 2", "backward 3", "fetch 2"]
    assert order.index("fetch 1") < order.index("backward 2") and order.index("fetch 0") < order.index(
        "backward 1"
    )
    order.clear()
    watched.run(net, CheckpointingConfig(policy=Policy.none, offload=EVERYTHING))
    assert order[:3] == ["fetch 4", "fetch 3", "backward 4"]


class Stream:
    """Writes down who waits for whom. An event is the number of copies that were on the side stream."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.log.append(f"event {len(self.log)}")
        return self.log[-1]

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


def test_streams_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would be told, on a machine without one: the CUDA calls are written down, copies done at once."""
    log: list[str] = []
    compute, side = Stream("compute", log), Stream("side", log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(log.append(f"copy on {stream.name}")))
    owner, layers, _ = host(layers=4)
    owner.transfers._side = side  # type: ignore[assignment]
    handles, storages = [], []
    for layer in layers:
        log.append("layer")
        tensor = torch.randn(10)
        storages.append(weakref.ref(tensor.untyped_storage()))
        handles.append(layer.pack(tensor))
        del tensor
        # Of the sources, those of this layer and of the one before are still there.
        assert [ref() is not None for ref in storages] == [False] * (len(storages) - 2) + [True] * len(
            storages[-2:]
        )
    sent = ["side waits for compute", "copy on side"]
    assert log == [
        *("layer", *sent),
        *("layer", "event 4", *sent),
        *("layer", "event 8", "compute waits for event 4", *sent),
        *("layer", "event 13", "compute waits for event 8", *sent),
    ]
    log.clear()
    assert handles[3] is not None
    layers[3].unpack(handles[3])
    assert [ref() for ref in storages] == [None] * 4
    assert log == [
        *("event 0", "compute waits for event 13", "compute waits for event 0"),  # all that left may be freed
        *("side waits for compute", "copy on side", "event 5"),  # this layer
        *("side waits for compute", "copy on side", "event 8"),  # the one below
        "compute waits for event 5",
    ]
    log.clear()
    handles[2] = None  # never used: its memory is given away only behind its copy
    assert log == ["compute waits for event 8"]


def test_a_micro_batch_ends_with_nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    compute = Stream("compute", log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    owner, (layer,), _ = host()
    owner.transfers._side = Stream("side", log)  # type: ignore[assignment]
    with owner.micro_batch():
        handle = layer.pack(torch.randn(10))
    assert log == ["side waits for compute", "event 1", "compute waits for event 1", "compute waits for side"]
    assert owner.pool.taken_bytes == 0
    assert handle is not None
    with pytest.raises(RuntimeError, match="micro-batch was over"):
        layer.unpack(handle)


def test_a_plan_for_a_gpu_counts_what_is_on_its_way_to_the_host() -> None:
    """A layer that leaves is there until the layer after the next begins, and the last two until backward."""
    owner = HostOffload(OffloadConfig(min_bytes=0), torch.device("meta"), 4)
    owner.transfers.simulates_gpu = True
    layers = [owner.layer(index, LayerCounters()) for index in range(4)]
    storages, handles = [], []
    alive = []
    for layer in layers:
        tensor = torch.empty(1 << 20, device="meta")
        storages.append(StorageWeakRef(tensor.untyped_storage()))
        handles.append(layer.move(tensor, 0))
        del tensor
        alive.append([not storage.expired() for storage in storages])
    assert alive == [[True], [True, True], [False, True, True], [False, False, True, True]]
    owner.transfers.forward_is_over()
    assert all(storage.expired() for storage in storages)
    assert layers[3].unpack(handles[3]).shape == (1 << 20,)
    owner.transfers.finish()
