"""Compile each decoder layer by torch.compile (compile=layers), as one graph that equal layers share.

Only the layer's own forward is compiled; the policy and ZeRO-3's hooks act around it. The hooks then gather a layer
whole (DeepSpeed's leaf modules), because a graph cannot wait for its weights part by part. In micro-batches that are
traced operation by operation, for the proof, layers run without the compiled graph.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from remat.config.options import ConfigError
from remat.config.units import format_count

# With this, dropout draws the same numbers as without compilation.
OPTIONS: dict[str, Any] = {"fallback_random": True}


class CompiledLayers:
    """Compiles layers when they are first called, one graph for all layers of a class.

    `seconds`: spent in the compiler, on this rank. `graphs`: number that it made, one for each shape and kind of layer.
    """

    def __init__(self) -> None:
        self.seconds, self.graphs = 0.0, 0
        self._made: dict[Any, Callable[..., Any]] = {}
        self._began_s: float | None = None
        self._told = 0, 0.0

    def take(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call`, a layer's forward with its arguments bound, compiled."""
        if torch._C._len_torch_dispatch_stack():
            return call
        given = call if isinstance(call, partial) else partial(call)
        if given.func not in self._made:
            self._made[given.func] = self._compile(given.func)
        return partial(self._made[given.func], *given.args, **given.keywords)

    def _compile(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        from torch._dynamo import callback, exc  # takes a second to import

        if not self._made:
            callback.on_compile_start(self._start)
            callback.on_compile_end(self._end)
        compiled = torch.compile(forward, fullgraph=True, options=OPTIONS)

        @wraps(forward)  # its signature names arguments in messages
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return compiled(*args, **kwargs)
            except (exc.TorchDynamoException, exc.FailOnRecompileLimitHit) as error:
                raise ConfigError(
                    f"compile=layers: {type(args[0]).__name__} cannot be compiled as one graph that its layers share; "
                    f"use compile=none. torch says: {_first_line(error)}"
                ) from error

        return run

    def news(self) -> str:
        """Return in words what the compiler cost since the last call; empty if it made nothing."""
        graphs, seconds = self.graphs - self._told[0], self.seconds - self._told[1]
        self._told = self.graphs, self.seconds
        if not graphs:
            return ""
        return (
            f"compile=layers: torch.compile took {seconds:.1f} s for {format_count(graphs, 'graph')}, once for "
            "each kind of layer and each shape of its inputs"
        )

    def _start(self, _: Any) -> None:
        self._began_s = time.perf_counter()

    def _end(self, _: Any) -> None:
        if self._began_s is not None:
            self.seconds += time.perf_counter() - self._began_s
            self.graphs += 1
        self._began_s = None

    def close(self) -> None:
        from torch._dynamo.callback import callback_handler

        if self._made:
            callback_handler.remove_start_callback(self._start)
            callback_handler.remove_end_callback(self._end)
            self._made.clear()


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def lacking(device_type: str) -> str:
    """Return what torch.compile lacks on this machine for a "cuda" or "cpu" device; empty: nothing."""
    if device_type == "cuda":
        from torch.utils._triton import has_triton

        return "" if has_triton() else "Triton, which comes with torch for CUDA: `pip install triton`"
    from torch._inductor import cpp_builder, exc

    try:
        found = shutil.which(cpp_builder.get_cpp_compiler())
    except exc.InvalidCxxCompiler:
        found = None
    return "" if found else "a C++ compiler: install g++, or name one in the environment variable CXX"


def make_whole(layers: Iterable[nn.Module]) -> None:
    """Have ZeRO-3 gather each of `layers` whole; called before the engine is made, and on the model of a plan."""
    from deepspeed.utils import set_z3_leaf_module

    for layer in layers:
        set_z3_leaf_module(layer, True)
