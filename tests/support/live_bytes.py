"""Count live tensor bytes op by op: every storage made inside the mode, until it is freed."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`with LiveBytes() as live: ...; live.peak_bytes`. Storages of the ops' inputs from outside are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._outside: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._sizes and storage._cdata not in self._outside:
                self._outside.add(storage._cdata)  # until it is freed: a new storage may get its address
                weakref.finalize(storage, self._outside.discard, storage._cdata).atexit = False
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._track(tensor.untyped_storage())
        return result

    def _track(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes or key in self._outside:
            return
        self._sizes[key] = storage.nbytes()
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key, 0)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
