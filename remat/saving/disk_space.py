"""Check before each save that the disk has room for a saved state: bytes needed against bytes free.

Measured with deepspeed 0.19.8: 12.0 bytes per trained parameter at ZeRO stage 3 (the fp32 master and Adam's two
moments). Lower stages save the module as well: 14.0 bytes in 16 bit, 16.0 in fp32. Plain fp32 without ZeRO has no
separate master: 12.0. Master weights and moments in 16 bit (optim.states) take half. For an optimizer other than AdamW
the bytes of its tensors are counted.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from remat.config import ds_config
from remat.config.options import OptimStates
from remat.config.units import GIB, MIB
from remat.machine import distributed
from remat.model import optimizer
from remat.saving import shares
from remat.saving.manifest import SaveError

MASTER = {OptimStates.fp32: 4, OptimStates.bf16_master: 2, OptimStates.bf16: 2}
MOMENTS = {OptimStates.fp32: 8, OptimStates.bf16_master: 8, OptimStates.bf16: 4}
PROBE_BYTES = MIB


def bytes_per_parameter(*, zero_stage: int, half: bool, states: OptimStates) -> int:
    """Return the bytes of one saved state, all ranks together, per trained parameter; `half`: bf16 or fp16 training."""
    module = 0 if zero_stage == 3 else 2 if half else 4
    master = 0 if zero_stage == 0 and not half else MASTER[states]
    return module + master + MOMENTS[states]


def needed_bytes(engine: Any) -> int:
    """Return the bytes of the next saved state of `engine`, the files of all ranks together. Collective."""
    states = ds_config.optimizer_states(engine.config)
    each = bytes_per_parameter(
        zero_stage=int(engine.zero_optimization_stage()),
        half=bool(engine.bfloat16_enabled() or engine.fp16_enabled()),
        states=states,
    )
    trained = (p for p in engine.module.parameters() if p.requires_grad)
    if engine.zero_optimization_stage() == 3:
        numel = sum(shares.whole_shape(p).numel() for p in trained)
    else:  # ranks that share layers also save the weights that are not cut
        own = sum(p.numel() for p in trained) * shares.group_size(engine)
        numel = sum(shares.of_stages(engine, own))
    if optimizer.kind_of(engine.optimizer) == "adamw":
        return each * numel
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    tensors = {id(t): t for state in base.state.values() for t in state.values() if isinstance(t, torch.Tensor)}
    ranks = distributed.place()[1] if engine.zero_optimization_stage() else 1
    return (each - MOMENTS[states]) * numel + ranks * sum(t.nbytes for t in tensors.values())


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the filesystem that `folder` is on."""
    return shutil.disk_usage(folder).free


def refuse_too_little(folder: Path, needed: int) -> None:
    """Raise SaveError when `folder` has no room for `needed` bytes."""
    free = free_bytes(folder)
    if needed > free:
        raise SaveError(
            f"{folder} has no room: {describe_size(needed)} needed, {describe_size(free)} free. Free some, or delete "
            "an older state (RUN_DIR/saved/step-...): those beyond save.keep go only when a new one is complete"
        )


def find_cause(error: Exception, folder: Path) -> Exception:
    """Return the disk's own error if a small write to it fails, else `error`.

    On a full disk torch only says "unexpected pos 640 vs 598".
    """
    if isinstance(error, OSError):
        return error
    probe = folder / f"probe-{os.getpid()}"
    try:
        probe.write_bytes(bytes(PROBE_BYTES))
    except OSError as found:
        found.__cause__ = error
        return found
    finally:
        probe.unlink(missing_ok=True)
    return error


def describe_size(size: int) -> str:
    return f"{size / GIB:.2f} GiB ({size:,} bytes)"
