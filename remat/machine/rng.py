"""The random states a training step draws from, as plain values: taken, kept with a saved state, put back."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def get() -> dict[str, Any]:
    """States of torch (CPU and this rank's GPU), numpy and python, in types that torch.load reads weights-only."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": (str(name), np.asarray(keys).tolist(), *rest),
        "python": random.getstate(),
    }


def put(states: dict[str, Any]) -> None:
    """Restore what `get` returned."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    random.setstate(states["python"])


def start_anew(saved: dict[str, Any], *, step: int, rank: int) -> None:
    """Fresh states for a rank that has none of its own: from another rank's `get`, the step and this rank's number."""
    digest = hashlib.sha256(saved["torch"].numpy().tobytes() + f" step {step} rank {rank}".encode()).digest()
    seed(int.from_bytes(digest[:4]))


def seed(value: int) -> None:
    """As `transformers.set_seed`, whose import brings peft, bitsandbytes and torch's compiler into every rank."""
    torch.manual_seed(value)  # GPUs too
    np.random.seed(value)
    random.seed(value)
