"""Build AdamW for the place of its state, group parameters, and compute learning-rate schedules from the step alone."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from remat.config.options import OptimConfig, Schedule

KERNEL = ("fused", "foreach", "capturable")  # how torch's AdamW computes, not what it computes


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Put trainable parameters into two groups: matrices are decayed, vectors (norms, biases) are not.

    Under ZeRO-3 a parameter's own shape is empty; DeepSpeed keeps the real one in `ds_shape`.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            shape = getattr(parameter, "ds_shape", parameter.shape)
            (decayed if len(shape) >= 2 else plain).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay, "decayed": True},
        {"params": plain, "weight_decay": 0.0, "decayed": False},
    ]
    return [group for group in groups if group["params"]]


def build(
    model: nn.Module, cfg: OptimConfig, *, offloaded: bool, device: torch.device
) -> torch.optim.Optimizer:
    """Build AdamW where its state lives: DeepSpeedCPUAdam in host memory, fused on CUDA, plain torch otherwise."""
    groups = parameter_groups(model, cfg.weight_decay)
    settings: dict[str, Any] = {"lr": cfg.lr, "betas": (cfg.beta1, cfg.beta2), "eps": cfg.eps}
    if offloaded:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        with _cpu_vendor_at_once():
            return DeepSpeedCPUAdam(groups, adamw_mode=True, **settings)
    return torch.optim.AdamW(groups, fused=device.type == "cuda", **settings)


@contextlib.contextmanager
def held_still(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Make `optimizer.step` do nothing while DeepSpeed builds its engine around the optimizer.

    At stage 0 DeepSpeed's wrapper of 16-bit weights takes a step on zero gradients when it is built, to allocate the
    state (runtime/fp16/unfused_optimizer.py, initialize_optimizer_states). Weights would decay at the full rate before
    the first batch, and the moments' bias corrections would be one step ahead for the whole run. With this context the
    first real step allocates the state, as at the other stages.
    """
    vars(optimizer)["step"] = lambda *args, **settings: None
    try:
        yield
    finally:
        del vars(optimizer)["step"]


@contextlib.contextmanager
def _cpu_vendor_at_once(cpuinfo_file: Path = Path("/proc/cpuinfo")) -> Iterator[None]:
    """Answer DeepSpeedCPUAdam's question for the CPU vendor from /proc/cpuinfo.

    The vendor is all that it asks py-cpuinfo for, which takes a second per rank.
    """
    import cpuinfo

    lines = cpuinfo_file.read_text().splitlines() if cpuinfo_file.exists() else []
    vendors = [line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")]
    if not vendors:
        yield
        return
    whole = cpuinfo.get_cpu_info

    def vendor() -> dict[str, str]:
        cpuinfo.get_cpu_info = whole  # a build of the op reads more than the vendor
        return {"vendor_id_raw": vendors[0]}

    cpuinfo.get_cpu_info = vendor
    try:
        yield
    finally:
        cpuinfo.get_cpu_info = whole


def lr_at(step: int, cfg: OptimConfig, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (0-based) out of `total_steps`.

    Warm-up is linear and reaches `lr` at step `warmup_steps`. Then: constant; linear or cosine (Loshchilov and Hutter
    2017, without restarts) down to `min_lr_ratio * lr` at the last step; wsd (Hu et al. 2024, MiniCPM) stays at `lr`
    and falls linearly over the last `decay_steps`.
    """
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / (cfg.warmup_steps + 1)
    if cfg.schedule is Schedule.constant:
        return cfg.lr
    start = total_steps - cfg.decay_steps if cfg.schedule is Schedule.wsd else cfg.warmup_steps
    length = max(1, total_steps - 1 - start)
    progress = min(1.0, max(0.0, (step - start) / length))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if cfg.schedule is Schedule.cosine else 1 - progress
    return cfg.lr * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * shape)


def set_options(optimizer: Any, cfg: OptimConfig) -> None:
    """Apply this run's optimizer options after a resume, which restored the saved run's."""
    _as_own(getattr(optimizer, "optimizer", optimizer))
    for group in optimizer.param_groups:
        group["betas"], group["eps"] = (cfg.beta1, cfg.beta2), cfg.eps
        group["weight_decay"] = cfg.weight_decay if group["decayed"] else 0.0
    if hasattr(optimizer, "clip_grad"):
        optimizer.clip_grad = cfg.gradient_clipping
    _count_on(optimizer)


def set_lr(optimizer: Any, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def _as_own(adam: Any) -> None:
    """Adapt a state that the other AdamW saved, when offload was switched since.

    Adds options that the saved groups lack and converts `step` to the kind that this optimizer keeps.
    """
    for group in adam.param_groups:
        for name, value in adam.defaults.items():
            group.setdefault(name, value)
            if name in KERNEL:  # torch puts None where the saved group had none
                group[name] = value
    for parameter, state in adam.state.items():
        if "step" not in state:
            continue
        step = int(state["step"])
        if hasattr(adam, "ds_opt_adam"):
            state["step"] = step
        else:
            device = parameter.device if adam.defaults["fused"] else "cpu"
            state["step"] = torch.tensor(float(step), device=device)


def _count_on(optimizer: Any) -> None:
    """Make bias corrections equal, to the last bit, to those of a run that never stopped.

    DeepSpeedCPUAdam keeps beta ** step as a product that is multiplied once per step. No saved state holds it. A new
    optimizer computes the power at once (deepspeed/ops/csrc/includes/cpu_adam.h), which after many steps differs in
    the last bit. So the steps are counted again on a single number, some microseconds each.
    """
    adam = getattr(optimizer, "optimizer", optimizer)
    if not hasattr(adam, "ds_opt_adam"):
        return
    beta1, beta2 = adam.param_groups[0]["betas"]
    unused = [torch.zeros(1) for _ in range(4)]
    for step in range(1, 1 + max((int(state.get("step", 0)) for state in adam.state.values()), default=0)):
        adam.ds_opt_adam.adam_update(adam.opt_id, step, 0.0, beta1, beta2, 1.0, 0.0, True, *unused)
