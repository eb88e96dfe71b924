"""When a model's modules need their parameters and when they are done with them, as DeepSpeed's hooks see it.

`recorded` notes on a model of any device (meta included) what the hooks of ZeRO-3 would do
(deepspeed 0.19.8, runtime/zero/parameter_offload.py:316-510). It depends on no setting: see `planning.zero3`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map


class Kind(Enum):
    start = "a forward of the whole model begins"
    fetch = "a module needs its parameters"
    release = "a module is done with them"
    end = "backward is over"


class Event(NamedTuple):
    """`module` is an index into Parameters.owned; `again`: a forward inside of backward.

    `pinned` parameters have aliases: autograd would go on holding their memory if they were released now.
    """

    kind: Kind
    module: int = 0
    forward: bool = True
    again: bool = False
    pinned: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Parameters:
    """Of a model, in its own order; `owned` lists for each module the parameters it has itself."""

    elements: tuple[int, ...]
    item_bytes: tuple[int, ...]
    trained: tuple[bool, ...]
    owned: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Parameters:
        found = list(model.parameters())
        index = {id(p): i for i, p in enumerate(found)}
        return cls(
            elements=tuple(p.numel() for p in found),
            item_bytes=tuple(p.element_size() for p in found),
            trained=tuple(p.requires_grad for p in found),
            owned=tuple(
                tuple(sorted({index[id(p)] for p in m.parameters(recurse=False)})) for m in model.modules()
            ),
        )


@contextmanager
def recorded(model: nn.Module, on_event: Callable[[Event], None]) -> Iterator[None]:
    """Calls `on_event` at every fetch and release while entered, over any number of micro-batches."""
    recorder = _Recorder(model, on_event)
    try:
        yield
    finally:
        recorder.close()


class _Recorder:
    def __init__(self, model: nn.Module, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._parameters = list(model.parameters())
        self._owned = Parameters.of(model).owned
        self._uses = [_uses(p) for p in self._parameters]
        self._pinned: frozenset[int] = frozenset()
        self._handles: list[Any] = [model.register_forward_pre_hook(lambda *_: self._tell(Event(Kind.start)))]
        for index, module in enumerate(model.modules()):
            self._hook(module, index)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _tell(self, event: Event) -> None:
        """A new alias of a parameter was made by the module that used it; an old one may have died anywhere."""
        candidates = {*self._pinned, *self._owned[event.module]}
        pinned = {p for p in candidates if _uses(self._parameters[p]) > self._uses[p]}
        if pinned != self._pinned:
            self._pinned = frozenset(pinned)
        self._on_event(event._replace(pinned=self._pinned))

    def _hook(self, module: nn.Module, index: int) -> None:
        waiting = [0]  # inputs whose gradient is still to come

        def before_forward(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            self._tell(Event(Kind.fetch, index, again=torch._C._current_graph_task_id() != -1))
            waiting[0] = 0
            marked: tuple[Any, ...] = tree_map(lambda x: _mark(x, gradient_of_input, waiting), args)
            return marked

        def gradient_of_input() -> None:
            waiting[0] -= 1
            if waiting[0] == 0:
                self._tell(Event(Kind.release, index, forward=False))

        def gradient_of_output() -> None:
            self._tell(Event(Kind.fetch, index, forward=False))

        def after_forward(_: nn.Module, args: Any, output: Any) -> Any:
            self._tell(Event(Kind.release, index))
            return tree_map(lambda x: _mark(x, gradient_of_output), output)

        self._handles += [
            module.register_forward_pre_hook(before_forward),
            module.register_forward_hook(after_forward),
        ]


def _uses(parameter: torch.Tensor) -> int:
    """How many tensors share the parameter's memory, and a constant."""
    return int(torch._C._storage_Use_Count(parameter.untyped_storage()._cdata))


class _Mark(torch.autograd.Function):
    """The identity; calls back when the gradient passes."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, callback: Callable[[], None]) -> torch.Tensor:
        ctx.callback = callback
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.callback()
        return grads[0], None


def _mark(value: Any, callback: Callable[[], None], waiting: list[int] | None = None) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    if waiting is not None and value.requires_grad:
        waiting[0] += 1
    return _Mark.apply(value, callback)
