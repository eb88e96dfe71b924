"""Get and restore the random states that a training step draws from, as plain values for a saved state."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def get() -> dict[str, Any]:
    """Return the states of torch (CPU and this rank's GPU), numpy and python, in types for weights-only torch.load."""
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
    """Seed a rank that has no saved states of its own, from another rank's `get`, the step and this rank's number."""
    digest = hashlib.sha256(saved["torch"].numpy().tobytes() + f" step {step} rank {rank}".encode()).digest()
    seed(int.from_bytes(digest[:4]))


def seed(value: int) -> None:
    """Seed torch, numpy and python as `transformers.set_seed` does.

    That function is not imported: it would bring peft, bitsandbytes and torch's compiler into every rank.
    """
    torch.manual_seed(value)  # GPUs too
    np.random.seed(value)
    random.seed(value)
