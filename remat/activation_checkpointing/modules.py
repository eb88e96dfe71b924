"""Recompute parts of a layer: modules by role, and the inner function of attention."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from remat.activation_checkpointing import roles as layer_roles
from remat.activation_checkpointing.arguments import Replayable, carry_gradient
from remat.activation_checkpointing.counts import Counts, Scope
from remat.activation_checkpointing.recompute import Lifted, Recompute

Region = Callable[..., Any]


def recompute_inside(
    layer: nn.Module,
    roles: list[str],
    recompute_of: Callable[[nn.Module], Recompute],
    index: int,
    counts: Counts,
    scope: Scope,
) -> Callable[[], None]:
    """Each module of `layer` with one of `roles` keeps its inputs and runs again in backward. Returns the undo.

    Of nested modules the outer one is recomputed. Raises ConfigError when a role is missing.
    """

    def region_of(module: nn.Module) -> Callable[[Region, Any, Any], Any]:
        recompute = recompute_of(module)

        def region(fn: Region, args: Any, kwargs: Any) -> Any:
            return _run(fn, args, kwargs, recompute, index, counts, scope)

        return region

    found = {role: layer_roles.find(layer, role) for role in roles}
    core = found.pop(layer_roles.CORE_ATTENTION, [])
    whole = layer_roles.outermost([one for several in found.values() for one in several])
    undo = ExitStack()
    for _, module in whole:
        undo.callback(_wrap_forward(module, region_of(module)))
    for name, module in core:
        if name not in {outer for outer, _ in whole}:
            undo.callback(_wrap_core_attention(module, region_of(nn.Module())))  # no Linear inside
    return undo.close


def _run(
    fn: Region, args: Any, kwargs: Any, recompute: Recompute, index: int, counts: Counts, scope: Scope
) -> Any:
    """`fn(*args, **kwargs)` as one recomputed region.

    Every tensor becomes a positional argument of the region: only those pass the saved-tensor hooks around the layer.
    """
    if scope.keeping or not torch.is_grad_enabled():
        return fn(*args, **kwargs)

    @contextmanager
    def around(again: bool, _: Any) -> Iterator[None]:
        counts.recomputations += again
        with scope.inside(index, recomputing=again):
            yield

    lifted = Lifted(Replayable(partial(fn, **kwargs), around), args)
    output = recompute(lifted, *lifted.tensors)
    counts.expected += carry_gradient(output)
    return output


def _wrap_forward(module: nn.Module, region: Callable[[Region, Any, Any], Any]) -> Callable[[], None]:
    """On the instance: hooks stay outside, names and classes as they are."""
    before = module.__dict__.get("forward")
    forward = module.forward

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return region(forward, args, kwargs)

    module.forward = wrapped

    def undo() -> None:
        if before is None:
            del module.forward
        else:
            module.forward = before

    return undo


class _Name(str):
    """Reads as the implementation's own name; in the registry it is a key of its own."""

    def __hash__(self) -> int:
        return id(self)


def _wrap_core_attention(attention: Any, region: Callable[[Region, Any, Any], Any]) -> Callable[[], None]:
    """Give this one module a copy of its config whose attention is a registered wrapper around the real one.

    Masks are made from the model's config, which is not touched. What the module itself asks of the name (eager or
    not, flash or not) must get the true answer, and so must the real function: it runs with the config of before.
    """
    config = attention.config
    name = _Name(config._attn_implementation)
    default = inspect.unwrap(type(attention).forward).__globals__.get("eager_attention_forward")
    interface = ALL_ATTENTION_FUNCTIONS.get_interface(str(name), default)

    def original(module: Any, *args: Any, **kwargs: Any) -> Any:
        copied, module.config = module.config, config
        try:
            return interface(module, *args, **kwargs)
        finally:
            module.config = copied

    def wrapped(module: Any, *args: Any, **kwargs: Any) -> Any:
        def fn(*given: Any, **named: Any) -> Any:
            return original(module, *given, **named)

        return region(fn, args, kwargs)

    own = copy.copy(config)
    own.__dict__["_attn_implementation_internal"] = (
        name  # the property would also rename sub-configs, which are shared
    )
    ALL_ATTENTION_FUNCTIONS[name] = wrapped
    attention.config = own

    def undo() -> None:
        attention.config = config
        del ALL_ATTENTION_FUNCTIONS[name]

    return undo
