"""Offload on a real GPU: side stream, page-locked pool, allocator. Bit-equality under memory pressure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from remat.activation_checkpointing import apply, policy
from remat.activation_checkpointing.mechanisms.counters import LayerCounters
from remat.activation_checkpointing.mechanisms.offload import HostOffload, slab_bytes
from remat.config.options import CheckpointingConfig, OffloadConfig, Policy, StorageDtype
from tests.support import small_models, watched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 6,
}
EVERYTHING = watched.offload_all()
CONFIGS = {
    "none": CheckpointingConfig(policy=Policy.none, offload=EVERYTHING),
    "none, last layer stays": CheckpointingConfig(
        policy=Policy.none, offload=OffloadConfig(enabled=True, min_bytes=1 << 16)
    ),
    "full": CheckpointingConfig(offload=EVERYTHING),
    "full_reentrant": CheckpointingConfig(reentrant=True, offload=EVERYTHING),
    "discard_output": CheckpointingConfig(policy=Policy.discard_output, offload=EVERYTHING),
}


def train(net: Any, cfg: CheckpointingConfig, steps: int = 4) -> tuple[list[torch.Tensor], Any, int]:
    """Losses, the applied plan, and the peak of allocated bytes above the start. Gradients stay on the model."""
    applied = apply.apply(net, policy.decide_layers(cfg, 6), cfg, device=torch.device("cuda"))
    net.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    losses = []
    for step in range(steps):  # no synchronisation in between: the CPU runs ahead
        ids = torch.randint(0, 64, (4, 1024), generator=torch.Generator().manual_seed(step)).cuda()
        with applied.micro_batch():
            loss = net(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        losses.append(loss.detach())
    torch.cuda.synchronize()
    applied.remove()
    return losses, applied, torch.cuda.max_memory_allocated() - start


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def reference(
    request: pytest.FixtureRequest,
) -> Iterator[tuple[Any, list[torch.Tensor], list[torch.Tensor], int]]:
    """Eager attention: the fused kernels add in no fixed order in backward, in deterministic mode too."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    sizes = SIZES | ({"resid_pdrop": 0.0, "embd_pdrop": 0.0} if request.param == "gpt2" else {})
    net = small_models.build(request.param, attention="eager", max_position_embeddings=1024, **sizes)
    net = net.cuda().to(torch.bfloat16)
    losses, _, peak = train(net, watched.NONE)
    yield net, losses, [p.grad.clone() for p in net.parameters() if p.grad is not None], peak
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_bit_equal_with_less_memory(name: str, reference: Any) -> None:
    net, losses, gradients, peak = reference
    found, applied, used = train(net, CONFIGS[name])
    assert all(torch.equal(a, b) for a, b in zip(found, losses, strict=True))
    ours = [p.grad for p in net.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(ours, gradients, strict=True))
    assert used < peak
    assert applied.offload.pool.taken_bytes == 0
    assert all(counts.moved_bytes > 0 for counts in applied.counts[:-1])


def test_under_memory_pressure(reference: Any) -> None:
    """With hardly more memory than needed the allocator gives away every free block at once: a copy that still reads
    or writes one would show."""
    net, losses, gradients, _ = reference
    _, _, peak = train(net, CONFIGS["none"])
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    limit = (torch.cuda.memory_allocated() + int(1.5 * peak) + (64 << 20)) / total
    torch.cuda.set_per_process_memory_fraction(limit)
    try:
        for _ in range(5):
            found, _, _ = train(net, CONFIGS["none"])
            assert all(torch.equal(a, b) for a, b in zip(found, losses, strict=True))
            ours = [p.grad for p in net.parameters() if p.grad is not None]
            assert all(torch.equal(a, b) for a, b in zip(ours, gradients, strict=True))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_sources_and_targets_are_not_overwritten() -> None:
    """The compute stream fills every block it can get with garbage while copies are under way."""
    owner = HostOffload(OffloadConfig(min_bytes=0), torch.device("cuda"), 8)
    layers = [owner.layer(index, LayerCounters()) for index in range(8)]
    sums = []
    for _ in range(3):
        with owner.micro_batch():
            handles = []
            for index, layer in enumerate(layers):
                tensor = torch.full((8 << 20,), float(index), device="cuda")
                handles.append([layer.pack(tensor), layer.pack(tensor.view(-1, 8)[:, :4])])
                del tensor
                for _ in range(4):
                    torch.full((8 << 20,), -1.0, device="cuda").mul_(2)
            for index in reversed(range(8)):
                for handle in handles[index]:
                    value = layers[index].unpack(handle)
                    sums.append(((value - index).abs().max(), index))
                    del value
                handles[index] = []
                for _ in range(4):
                    torch.full((8 << 20,), -1.0, device="cuda").mul_(2)
        assert owner.pool.taken_bytes == 0
    assert all(difference.item() == 0 for difference, _ in sums)


def test_host_memory_is_page_locked_and_used_again() -> None:
    owner = HostOffload(OffloadConfig(min_bytes=0), torch.device("cuda"), 1)
    layer = owner.layer(0, counts := LayerCounters())
    for _ in range(3):
        with owner.micro_batch():
            handle = layer.pack(torch.randn(5 << 20, device="cuda"))
            assert handle is not None
            layer.unpack(handle)
            del handle
    assert counts.moved_bytes == 3 * (20 << 20)
    assert [storage.nbytes() for storage in owner.storages()] == [slab_bytes(20 << 20)] == [64 << 20]
    assert all(storage.is_pinned() for storage in owner.storages())


@pytest.mark.parametrize("dtype", [StorageDtype.fp8, StorageDtype.int8])
def test_low_precision_on_the_gpu(dtype: StorageDtype) -> None:
    owner = HostOffload(OffloadConfig(min_bytes=0, dtype=dtype), torch.device("cuda"), 1)
    layer = owner.layer(0, counts := LayerCounters())
    tensor = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    handle = layer.pack(tensor)
    assert handle is not None
    back = layer.unpack(handle)
    assert counts.moved_bytes == 512 * 1024 + 512 * 4
    assert (back - tensor).norm() < {StorageDtype.fp8: 0.04, StorageDtype.int8: 0.012}[dtype] * tensor.norm()
