"""How often ZeRO-3 gathers each parameter in a step, replayed on a model without an engine.

DeepSpeed 0.19.8 gathers a module's own parameters before its forward and releases them after it, and does the same
around its backward (runtime/zero/parameter_offload.py:358-535); a recomputation calls the same hooks again. Reuse
between uses (stage3_max_reuse_distance, stage3_max_live_parameters) is off here: what is counted is the upper limit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle


class GatherReplay:
    """`with GatherReplay(model) as gathers: forward and backward; gathers.elements`: elements gathered over all ranks.

    Parameters of at most `persistent_elements` stay gathered (stage3_param_persistence_threshold) and count once.
    Works on tensors of any device, also meta.
    """

    def __init__(self, model: nn.Module, *, persistent_elements: int = 0) -> None:
        self.elements = 0
        self._model, self._threshold = model, persistent_elements
        self._available: set[int] = set()
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> GatherReplay:
        for module in self._model.modules():
            if any(p is not None for p in module._parameters.values()):
                self._watch(module)
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _watch(self, module: nn.Module) -> None:
        waiting = [0]  # inputs whose gradient is still to come

        def before_forward(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            self._fetch(module)
            waiting[0] = 0
            return tree_map(lambda x: _mark(x, after_input, waiting), args)

        def after_input() -> None:
            waiting[0] -= 1
            if waiting[0] == 0:
                self._release(module)

        def after_forward(_: nn.Module, args: Any, output: Any) -> Any:
            self._release(module)
            return tree_map(lambda x: _mark(x, lambda: self._fetch(module)), output)

        self._handles += [
            module.register_forward_pre_hook(before_forward),
            module.register_forward_hook(after_forward),
        ]

    def _fetch(self, module: nn.Module) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in self._available:
                self._available.add(id(parameter))
                self.elements += parameter.numel()

    def _release(self, module: nn.Module) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and parameter.numel() > self._threshold:
                self._available.discard(id(parameter))


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
