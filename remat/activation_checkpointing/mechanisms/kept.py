"""What one forward of a layer keeps for its recomputation: results of operations, by the place they ran at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils._pytree import TreeSpec

from remat.activation_checkpointing.mechanisms import operators

Key = tuple[str, str, int]  # the Linear or "", the operator, how often it ran before


class Mover(Protocol):
    """Where kept results may live until backward."""

    def pack(self, tensor: torch.Tensor) -> Any | None: ...

    def unpack(self, handle: Any) -> torch.Tensor: ...

    def edited(self, handle: Any) -> bool: ...


@dataclass
class Entry:
    """The result of one operation, as leaves: detached tensors, handles of moved ones, anything else."""

    call: int  # of a Linear; 0: outside of them
    leaves: list[Any]
    spec: TreeSpec
    random_state: torch.Tensor | None
    device: torch.device | None
    storages: set[int]
    versions: list[int] = field(default_factory=list)
    moved: set[int] = field(default_factory=set)
    read: bool = False  # used by another operation of the same call: a later write may not be absorbed
    absorbed: int = 0  # writes whose result this value already contains

    def tensors(self) -> Iterator[torch.Tensor]:
        return (
            leaf
            for index, leaf in enumerate(self.leaves)
            if isinstance(leaf, torch.Tensor) and index not in self.moved
        )

    def untouched(self, offload: Mover | None) -> bool:
        """False when something wrote to it after the layer's forward."""
        if offload is not None and any(offload.edited(self.leaves[index]) for index in self.moved):
            return False
        return [tensor._version for tensor in self.tensors()] == self.versions


class Store:
    """What one forward keeps for its recomputation. While it holds a tensor, its storage's address is its identity."""

    def __init__(self) -> None:
        self.entries: dict[Key, Entry] = {}
        self.products = 0  # that ran in forward
        self._by_storage: dict[int, Key] = {}

    def add(self, key: Key, entry: Entry) -> None:
        self.entries[key] = entry
        self._by_storage |= dict.fromkeys(entry.storages, key)

    def owner(self, tensor: torch.Tensor) -> tuple[Key, Entry] | None:
        """The entry that holds `tensor`'s memory."""
        key = self._by_storage.get(operators.storage(tensor))
        return None if key is None or key not in self.entries else (key, self.entries[key])

    def drop(self, key: Key) -> None:
        self.entries.pop(key, None)
        self._by_storage = {storage: other for storage, other in self._by_storage.items() if other != key}

    def clear(self) -> None:
        self.entries.clear()
        self._by_storage.clear()

    def forward_done(self, offload: Mover | None) -> None:
        """Nothing in the layer writes any more: only now may results be moved."""
        self._by_storage.clear()
        for entry in self.entries.values():
            for index, leaf in enumerate(entry.leaves):
                handle = offload.pack(leaf) if offload and isinstance(leaf, torch.Tensor) else None
                if handle is not None:
                    entry.leaves[index] = handle
                    entry.moved.add(index)
            entry.versions = [tensor._version for tensor in entry.tensors()]


def detached(leaf: Any) -> Any:
    """Without this guard the alias would have a version counter of its own, and hide later writes."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return leaf.detach()


def finishes(operator: operators.Operator, args: Any) -> torch.Tensor | None:
    """What this operation edits in place, if it may be the last part of a Linear; None: it is another operation.

    ZeRO-3's Linear adds its bias so (deepspeed/runtime/zero/linear.py), and a tensor-parallel one sums its product over
    the ranks (RowParallel in deepspeed/module_inject/layers.py).
    """
    if operator.name == "aten::add_":
        return args[0]
    if operator.name == "c10d::allreduce_" and len(args[0]) == 1:
        return args[0][0]
    return None


def finished(operator: operators.Operator, target: torch.Tensor) -> Any:
    """What the operation returns, without running it."""
    if operator.name == "aten::add_":
        return target
    from torch._C._distributed_c10d import FakeWork  # torch without collectives has none

    return [target], FakeWork().boxed()  # work that is done
