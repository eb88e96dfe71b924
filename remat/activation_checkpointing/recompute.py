"""torch's activation checkpointing of one region, with the options of the run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from remat.config import CheckpointingConfig

ContextPair = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


@dataclass(frozen=True)
class Recompute:
    """`recompute(fn, *args)` keeps the tensors in `args`, runs `fn` now, and runs it again in backward.

    `context_fn` returns what is entered in forward and in the recomputation (torch's meaning). Tensors that carry a
    gradient must be positional in the reentrant variant.
    """

    cfg: CheckpointingConfig
    reentrant: bool = False
    context_fn: ContextPair | None = None

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        if self.reentrant:
            return checkpoint(fn, *args, use_reentrant=True, preserve_rng_state=self.cfg.preserve_rng_state)
        more: dict[str, Any] = {"context_fn": self.context_fn} if self.context_fn else {}
        return checkpoint(
            fn,
            *args,
            use_reentrant=False,
            preserve_rng_state=self.cfg.preserve_rng_state,
            determinism_check=str(self.cfg.determinism_check),
            early_stop=self.cfg.early_stop,
            **more,
        )


def carries_gradient(output: Any) -> bool:
    """Whether backward will come to what produced `output` (a tensor, or a tuple with some)."""
    parts = output if isinstance(output, (tuple, list)) else (output,)
    return torch.is_grad_enabled() and any(isinstance(p, torch.Tensor) and p.requires_grad for p in parts)
