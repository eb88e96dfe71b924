"""What a DeepSpeed engine holds between operations, counted from the storages of its tensors, on this rank.

Two moments together show every model state: gradients and reduction buffers when a backward is over, weights and
optimizer state when a step was applied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

Held = dict[str, dict[str, int]]  # category -> kind of device (cpu, cuda) -> bytes
DEPTH = 4  # of lists and dicts inside the optimizer's attributes
RETURNING = "param_buffer_of_bit16_for_cpu_offload_groups"  # updated weights on their way back to the GPU


def after_backward(engine: Any) -> Held:
    """Gradients and communication buckets; call it after the last backward of a step, before the step."""
    seen = _Storages()
    seen.take(_weights(engine))
    seen.take(_optimizer_state(engine))
    named = list(_named_tensors(engine.optimizer))
    buckets = seen.take(t for name, t in named if "ipg" in name or "temp_grad" in name)
    gradients = seen.take(
        [
            *(p.grad for p in engine.module.parameters() if p.grad is not None),
            *(t for name, t in named if "grad" in name and "ipg" not in name and "temp_grad" not in name),
        ]
    )
    return {"gradients": gradients, "communication buckets": buckets}


def after_step(engine: Any) -> Held:
    """Weights and optimizer state (master copy, its gradient, moments); call it after an applied step."""
    seen = _Storages()
    weights = seen.take(_weights(engine))
    return {"weights": weights, "optimizer state": seen.take(_optimizer_state(engine))}


def largest(ranks: Iterable[Mapping[str, Mapping[str, int]]]) -> Held:
    """Of each category and device the most that a rank holds."""
    found: Held = {}
    for rank in ranks:
        for category, places in rank.items():
            most = found.setdefault(category, {})
            for place, size in places.items():
                most[place] = max(size, most.get(place, 0))
    return found


class _Storages:
    """Counts each storage once, however many tensors look at it."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def take(self, tensors: Iterable[torch.Tensor]) -> dict[str, int]:
        """Bytes by device of what was not seen before."""
        sizes: dict[str, int] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen and storage.nbytes():
                self._seen.add(storage._cdata)
                sizes[tensor.device.type] = sizes.get(tensor.device.type, 0) + storage.nbytes()
        return sizes


def _weights(engine: Any) -> Iterator[torch.Tensor]:
    for parameter in engine.module.parameters():
        yield parameter.ds_tensor if hasattr(parameter, "ds_id") else parameter
    yield from _tensors(getattr(engine.optimizer, "fp16_partitioned_groups_flat", []), DEPTH)
    yield from _tensors(getattr(engine.optimizer, RETURNING, []), DEPTH)


def _optimizer_state(engine: Any) -> Iterator[torch.Tensor]:
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    masters = [p for group in base.param_groups for p in group["params"]]
    masters += _tensors(getattr(engine.optimizer, "fp32_partitioned_groups_flat", []), DEPTH)
    for master in masters:
        yield master
        if master.grad is not None and base is not engine.optimizer:
            yield master.grad
    for state in base.state.values():
        yield from _tensors(state, DEPTH)


def _named_tensors(optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in vars(optimizer).items():
        for tensor in _tensors(value, DEPTH):
            yield name, tensor


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth == 0:
        return
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner, depth - 1)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner, depth - 1)
    elif hasattr(value, "buffer"):  # DeepSpeed's buckets
        yield from _tensors(value.buffer, depth - 1)
