"""Which layers a model calls, and which memory it hands to them and takes from them. For the first micro-batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from remat.activation_checkpointing.mechanisms import operators

DEEPEST = 4  # containers of the model's own classes, one inside another


class Calls:
    """Counts while it is entered. Hooks on modules, none of which is left behind."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._hooks = ExitStack()
        self.ran: set[int] = set()  # layers of which any module ran with gradients
        self._hidden: dict[int, set[int]] = defaultdict(set)  # storage: the layers whose hidden state it was
        self._beside: dict[int, set[int]] = defaultdict(
            set
        )  # storage: the layers that had it as another argument
        self._outputs: set[int] = set()
        self._seen: dict[int, StorageWeakRef] = {}  # the reference keeps an address from being used again

    def __enter__(self) -> Calls:
        for index, layer in enumerate(self._layers):
            before = layer.register_forward_pre_hook(self._given_to(index), with_kwargs=True)
            self._hooks.callback(before.remove)
            self._hooks.callback(layer.register_forward_hook(self._take).remove)
            for module in layer.modules():
                self._hooks.callback(module.register_forward_pre_hook(self._runs(index)).remove)
        return self

    def __exit__(self, *_: Any) -> None:
        self._hooks.close()

    def is_shared(self, storage: int, layer: int) -> bool:
        """Whether another layer than `layer` was given this memory beside its hidden state: shared K/V, for one."""
        return bool(self._beside.get(storage, set()) - {layer})

    def is_hidden_state(self, storage: int) -> bool:
        return storage in self._hidden

    def must_stay(self, storage: int, moving: set[int]) -> bool:
        """Whether the model itself needs this memory when all that the layers `moving` keep has been moved away.

        That is the case for what it gives to a layer that moves nothing, for what it gives to layers beside their
        hidden state, and for the output of the last layer.
        """
        given = self._hidden.get(storage, set())
        return bool(given - moving or storage in self._beside or (storage in self._outputs and not given))

    def _given_to(self, index: int) -> Any:
        def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            hidden = _hidden_state(args, kwargs)
            for tensor in tensors_in((args, kwargs)):
                where = self._hidden if tensor is hidden else self._beside
                where[self._storage(tensor)].add(index)

        return note

    def _runs(self, index: int) -> Any:
        def note(module: nn.Module, args: Any) -> None:
            if module.training and torch.is_grad_enabled():
                self.ran.add(index)

        return note

    def _take(self, module: nn.Module, args: Any, output: Any) -> None:
        self._outputs |= {self._storage(tensor) for tensor in tensors_in(output)}

    def _storage(self, tensor: torch.Tensor) -> int:
        key = operators.storage(tensor)
        if key and key not in self._seen:
            self._seen[key] = StorageWeakRef(tensor.untyped_storage())
        return key


def tensors_in(tree: Any, depth: int = DEEPEST) -> Iterator[torch.Tensor]:
    """All tensors in `tree`, also in objects of a model's own classes (a cache, say)."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif (
            depth
            and hasattr(leaf, "__dict__")
            and not isinstance(leaf, (nn.Module, type))
            and not callable(leaf)
        ):
            yield from tensors_in(vars(leaf), depth - 1)


def _hidden_state(args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """transformers' layers take it first, or by this name."""
    first = args[0] if args else kwargs.get("hidden_states")
    return next(tensors_in(first), None)
