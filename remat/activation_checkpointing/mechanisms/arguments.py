"""Find what a call of a layer takes and changes: its tensors, wherever they are, and containers it may write to.

A layer's call is `call(*args)`; transformers binds its keyword arguments into `call` (a functools.partial).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Set
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from remat.config.options import ConfigError

Around = Callable[[int, Callable[[], dict[str, Any]]], AbstractContextManager[None]]
DEPTH = 6  # of containers inside containers
ONE_VALUE = (str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device, torch.Size)
NOT_LOOKED_INTO = (*ONE_VALUE, nn.Module, torch.Generator, FunctionType, MethodType, ModuleType)
LOSES = (
    "the reentrant variant of activation checkpointing does not carry their gradient; use checkpointing=full "
    "checkpointing.reentrant=false"
)
EDITS = (
    "It would run again on other values; use checkpointing=none for such layers, or a policy that recomputes no whole "
    "layer (selective_modules, discard_output)"
)
STATE = {"hidden_states", "hidden_state", "inputs_embeds", "input"}  # keywords of the hidden state


def name_arguments(call: Replayable, args: tuple[Any, ...]) -> dict[str, Any]:
    """Return the arguments of `call(*args)` by name, positional and bound ones."""
    names = _parameter_names(call.function)[len(call.bound) :]
    given = {names[i] if i < len(names) else f"argument {i}": value for i, value in enumerate(args)}
    return given | call.keywords


@cache
def _parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def find_tensors(value: Any, path: str = "", depth: int = DEPTH) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) of every tensor in `value`: in containers, and in attributes of plain objects.

    Parameters are left out: they belong to a module, not to a call.
    """
    if isinstance(value, torch.Tensor):
        if not isinstance(value, nn.Parameter):
            yield path, value
        return
    if depth:
        for key, inner in _parts(value):
            yield from find_tensors(inner, f"{path}[{key!r}]" if path else str(key), depth - 1)


def carry_gradient(value: Any) -> bool:
    """Return whether backward would reach a tensor in `value`."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for _, tensor in find_tensors(value))


def tell_of_gradient(value: Any, tell: Callable[[], None]) -> bool:
    """Call `tell` once when backward reaches a tensor in `value`. Returns whether it can."""
    if not carry_gradient(value):
        return False
    told = False

    def note(gradient: torch.Tensor | None) -> None:
        nonlocal told
        if not told and gradient is not None:
            told = True
            tell()

    for _, tensor in find_tensors(value):
        if tensor.requires_grad:
            tensor.register_hook(note)
    return True


def copy_containers(value: Any) -> Any:
    """Copy the containers of `value`, as deep as they go; its tensors stay the same objects."""
    return rebuild(value, lambda tensor: tensor, {})


def rebuild(
    value: Any, swap: Callable[[torch.Tensor], torch.Tensor], made: dict[int, Any], depth: int = DEPTH
) -> Any:
    """Copy `value` with `swap(tensor)` in the place of each tensor.

    `made` remembers the copy of each container by its id, so that what two calls share stays shared.
    """
    if isinstance(value, torch.Tensor):
        return value if isinstance(value, nn.Parameter) else swap(value)
    if depth == 0 or isinstance(value, NOT_LOOKED_INTO):
        return value
    if isinstance(value, tuple):
        inner = [rebuild(part, swap, made, depth - 1) for part in value]
        same = all(one is other for one, other in zip(inner, value, strict=True))
        return value if same else _make_like(value, inner)
    if isinstance(value, partial):  # its parts cannot be replaced in a copy
        args, named = (rebuild(part, swap, made, depth - 1) for part in (value.args, value.keywords))
        return partial(value.func, *args, **named)
    if id(value) in made:
        return made[id(value)]
    if not _is_container(value):
        return value
    try:
        copied = copy.copy(value)
    except Exception:  # an object that cannot be copied is handed on as it is
        return value
    made[id(value)] = copied
    for key, part in _parts(value):
        new = rebuild(part, swap, made, depth - 1)
        if new is not part:
            _put(copied, key, new)
    return copied


def find_changes(before: Any, now: Any, path: str = "", depth: int = DEPTH) -> Iterator[tuple[str, Any]]:
    """Yield (path, new value) of what came into the containers of `now` since `before = copy_containers(now)`."""
    if depth == 0 or isinstance(now, torch.Tensor):
        return
    known = dict(_parts(before))
    for key, value in _parts(now):
        place = f"{path}[{key!r}]" if path else str(key)
        if key not in known:
            yield place, value
        elif type(known[key]) is not type(value) or isinstance(value, torch.Tensor):
            if known[key] is not value:
                yield place, value
        elif isinstance(value, ONE_VALUE):
            if known[key] != value:
                yield place, value
        else:
            yield from find_changes(known[key], value, place, depth - 1)


def replace_changes(before: Any, now: Any, swap: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put `swap(tensor)` in the place of each tensor that came into the containers of `now` since `before`."""
    known = dict(_parts(before))
    for key, value in list(_parts(now)):
        old = known.get(key)
        if isinstance(value, (torch.Tensor, tuple)) and not isinstance(now, partial):
            if old is not value and not isinstance(now, tuple):
                _put(now, key, rebuild(value, swap, {}))
        elif old is not None:
            replace_changes(old, value, swap)


def has_containers(value: Any) -> bool:
    """Return whether a call could write into `value`."""
    if isinstance(value, tuple):
        return any(has_containers(part) for part in value)
    return _is_container(value)


class Alias(torch.autograd.Function):
    """Makes a tensor on the same storage that is no view: a view would hold its base, even when it is emptied."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)  # no gradient stays none
        return tensor.new_empty(0).set_(tensor.detach())  # type: ignore[call-overload]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> torch.Tensor | None:
        return gradients[0]


class Replayable:
    """A layer's `call` that may run again, each time with its containers as they were before the first run.

    Otherwise a layer that runs again would read what later layers wrote, and would write a second time.
    """

    def __init__(self, call: Callable[..., Any], around: Around) -> None:
        """`around(earlier, values)` returns the context for a run after `earlier` other runs; `values()` returns the
        arguments by name.
        """
        self.function: Callable[..., Any] = call
        self.bound: tuple[Any, ...] = ()
        self.keywords: dict[str, Any] = {}
        self.around = around
        self._runs = 0
        if isinstance(call, partial):
            self.function, self.bound, self.keywords = call.func, call.args, dict(call.keywords)
        self._positional: dict[int, Any] | None = None  # containers as they were, once it ran
        self._named: dict[str, Any] = {}

    def __call__(self, *args: Any, **named: Any) -> Any:
        """`named` takes the place of keyword arguments of the same name."""
        given = self.keywords | named
        if self._positional is None:
            self._positional = _containers_of(dict(enumerate(args)))
            self._named = _containers_of(given)
        elif self._positional or self._named:
            before = copy_containers(self._positional)
            args = tuple(before.get(i, value) for i, value in enumerate(args))
            given = given | copy_containers(self._named)
        earlier, self._runs = self._runs, self._runs + 1
        with self.around(earlier, lambda: name_arguments(self, args) | named):
            return self.function(*self.bound, *args, **given)

    def put_state_first(self, args: tuple[Any, ...]) -> tuple[Replayable, tuple[Any, ...]]:
        """Return a call with the hidden state as first positional argument, if it was given by keyword."""
        name = next(
            (n for n in self.keywords if n in STATE and isinstance(self.keywords[n], torch.Tensor)), None
        )
        if args or name is None:
            return self, args
        rest = {key: value for key, value in self.keywords.items() if key != name}
        function, bound = self.function, self.bound  # and not self, which holds the state

        def run(state: torch.Tensor, *others: Any, **named: Any) -> Any:
            return function(*bound, *others, **{name: state}, **named)

        return Replayable(partial(run, **rest), self.around), (self.keywords[name],)


@contextmanager
def refuse_what_is_lost(values: Mapping[str, Any], layer: str, *, reentrant: bool) -> Iterator[None]:
    """Check the first pass of a layer that will run again. `values` are its arguments: its state, then the rest.

    Raises ConfigError, naming `layer` and the argument, for a tensor that the layer edits in place. If `reentrant`, it
    also raises for tensors beside the state that carry a gradient, and for tensors written to a container.
    """
    rest = dict(list(values.items())[1:]) if reentrant else {}
    for name, value in rest.items():
        if carry_gradient(value):
            raise ConfigError(
                f"checkpointing: {layer} is given, besides the hidden state, tensors that carry a gradient in its "
                f"argument {name}, and {LOSES}"
            )
    containers = {name: value for name, value in rest.items() if has_containers(value)}
    before = {name: copy_containers(value) for name, value in containers.items()}
    given = [(path, tensor, tensor._version) for path, tensor in find_tensors(values)]
    try:
        yield
    except RuntimeError as error:
        if "in-place operation" in str(error):  # autograd's own refusal, where the argument is a leaf
            raise ConfigError(f"checkpointing: {layer} edits one of its arguments in place. {EDITS}") from error
        raise
    edited = [path for path, tensor, version in given if tensor._version != version]
    if edited:
        raise ConfigError(f"checkpointing: {layer} edits its argument {edited[0]} in place. {EDITS}")
    written = [path for path, new in find_changes(before, containers) if any(True for _ in find_tensors(new))]
    if written:
        raise ConfigError(f"checkpointing: {layer} writes tensors to its argument {written[0]}, and {LOSES}")


def _containers_of(values: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: copy_containers(value) for key, value in values.items() if has_containers(value)}


def _is_container(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, tuple, frozenset, *NOT_LOOKED_INTO)):
        return False
    return isinstance(value, (MutableMapping, MutableSequence, Set, Iterator)) or hasattr(value, "__dict__")


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (key or position or attribute, value) one level down; nothing for what is not looked into."""
    if isinstance(value, (torch.Tensor, *NOT_LOOKED_INTO)):
        return
    if isinstance(value, Mapping):
        yield from list(value.items())
    elif isinstance(value, (tuple, list, MutableSequence)):
        yield from list(enumerate(value))
    elif isinstance(value, partial):
        yield from [("args", value.args), ("keywords", value.keywords)]
    elif hasattr(value, "__dict__") and not isinstance(value, Set):
        yield from list(vars(value).items())


def _put(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, (MutableMapping, MutableSequence)):
        container[key] = value
    else:
        object.__setattr__(container, key, value)


def _make_like(value: tuple[Any, ...], parts: list[Any]) -> Any:
    """Return a tuple of the kind of `value`, perhaps a named one, that has these `parts`."""
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
