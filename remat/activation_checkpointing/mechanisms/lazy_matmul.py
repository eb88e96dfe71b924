"""Defer the last matrix product of a recomputation. Usually nothing needs it, and it never runs.

torch ends a recomputation when it has the last tensor that backward needs. ZeRO-3's Linear saves its input only after
its product (deepspeed/runtime/zero/linear.py), so every layer would compute its last product, a fifth of a Llama's
forward, although nothing uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from remat.activation_checkpointing.mechanisms import operators
from remat.model.flops import Mode

# matrix products whose result has the dtype of the left matrix
OVERLOADS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
PRODUCTS = {"aten::mm": 0, "aten::addmm": 1}  # position of the left matrix
ONLY_VIEWS = {"aten::_unsafe_view"}  # reads no value, though its schema does not say that it is a view
SAVES = "aten::detach"  # by this view torch's recomputation takes what backward needs: it counts as a use


class DeferredMatmul:
    """One deferred product at most. Its memory is allocated at once; its value is computed before the next operation.

    Waiting for an operation that reads it would be unsafe: a Triton kernel's reads are not seen, only its allocations.
    A kernel that allocates nothing is not seen at all, so the value is computed at the latest when the Linear returns.
    """

    def __init__(self) -> None:
        self._storage = 0
        self._compute: Callable[[], Any] | None = None

    def put_off(self, func: Any, operator: operators.Operator, args: Any, kwargs: Any) -> torch.Tensor:
        """Return an empty result of the product `func(*args, **kwargs)`, to be filled later or never."""
        left = args[PRODUCTS[operator.name]]
        right = args[PRODUCTS[operator.name] + 1]
        result = left.new_empty(left.shape[0], right.shape[1])
        self._storage = operators.storage(result)
        self._compute = lambda: result.copy_(func(*args, **kwargs))
        return result

    def before(self, func: Any, operator: operators.Operator, args: Any) -> None:
        """Compute before `func` runs, unless it only makes a view, or takes another tensor for backward."""
        if self._compute is None:
            return
        is_view = operator.name in ONLY_VIEWS or getattr(func, "is_view", False)
        is_taken = operator.name == SAVES and operators.storage(args[0]) == self._storage
        if is_taken or not is_view:
            self.compute()

    def compute(self) -> None:
        """Compute the deferred product now, if there is one."""
        compute, self._compute = self._compute, None
        if compute is not None:
            # From a hook this is an operation of its own: autograd must not see it, nor count it as an edit.
            with (
                torch.no_grad(),
                torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, True),
            ):
                compute()

    def forget(self) -> None:
        self._storage, self._compute = 0, None


class SkipLastMatmul:
    """Defers the product of the last Linear in each recomputation of one region (a layer, or a module in it).

    `contexts()` is a context_fn for torch's non-reentrant checkpoint. The region is watched only from its last
    Linear on.
    """

    def __init__(self, region: nn.Module) -> None:
        self._hooks = ExitStack()
        self._calls = 0  # of Linears in this pass
        self._last = 0  # which of them is the last; 0: this is a forward
        self._mode: _DeferMode | None = None
        self._to_watch: nn.Module | None = region

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        region, self._to_watch = self._to_watch, None
        # Now, and not earlier: AutoTP replaces Linears after the policy is in place.
        for module in region.modules() if region else ():
            if isinstance(module, nn.Linear):
                self._hooks.callback(module.register_forward_pre_hook(self._before_linear).remove)
                self._hooks.callback(module.register_forward_hook(self._after_linear).remove)
        calls: list[int] = []
        return self._forward(calls), _Again(self, calls)

    def close(self) -> None:
        self._hooks.close()

    @contextmanager
    def _forward(self, calls: list[int]) -> Iterator[None]:
        self._calls, self._last = 0, 0
        yield
        calls.append(self._calls)

    def begin(self, last: int) -> None:
        self._calls, self._last = 0, last

    def end(self) -> None:
        self._last = 0
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)

    def _before_linear(self, *_: Any) -> None:
        self._calls += 1
        if self._last and self._calls == self._last:
            self._mode = _DeferMode()
            self._mode.__enter__()

    def _after_linear(self, *_: Any) -> None:
        if self._mode is not None:
            self._mode.postponed.compute()


class _Again:
    """The context of each recomputation of one call: there are several if a layer takes a gradient inside."""

    def __init__(self, owner: SkipLastMatmul, calls: list[int]) -> None:
        self._owner, self._calls = owner, calls

    def __enter__(self) -> None:
        self._owner.begin(self._calls[0] if self._calls else 0)  # none: its forward has not ended

    def __exit__(self, *_: Any) -> None:
        self._owner.end()


class _DeferMode(Mode):
    """Defers the first product."""

    def __init__(self) -> None:
        super().__init__()
        self.postponed = DeferredMatmul()
        self._done = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, operator = kwargs or {}, operators.describe(func)
        if func in OVERLOADS and not self._done:
            self._done = True
            return self.postponed.put_off(func, operator, args, kwargs)
        self.postponed.before(func, operator, args)
        return func(*args, **kwargs)
