"""AdamW by placement, parameter groups, and learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from remat.config.options import OptimConfig, Schedule

KERNEL = ("fused", "foreach", "capturable")  # how torch's AdamW computes, not what


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: matrices are decayed, vectors (norms, biases) are not.

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
    """AdamW where its state lives: DeepSpeedCPUAdam in host memory, fused on CUDA, plain torch otherwise."""
    groups = parameter_groups(model, cfg.weight_decay)
    settings: dict[str, Any] = {"lr": cfg.lr, "betas": (cfg.beta1, cfg.beta2), "eps": cfg.eps}
    if offloaded:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        with _cpu_vendor_at_once():
            return DeepSpeedCPUAdam(groups, adamw_mode=True, **settings)
    return torch.optim.AdamW(groups, fused=device.type == "cuda", **settings)


@contextlib.contextmanager
def held_still(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While DeepSpeed builds its engine around `optimizer`, a step of it does nothing.

    DeepSpeed's wrapper of 16-bit weights at stage 0 steps once on zero gradients when it is built, to have the state
    allocated (runtime/fp16/unfused_optimizer.py, initialize_optimizer_states): weights decay at the full rate before
    the first batch, and the moments' corrections are one step ahead for the whole run. The state is allocated by the
    first real step, as at the other stages.
    """
    vars(optimizer)["step"] = lambda *args, **settings: None
    try:
        yield
    finally:
        del vars(optimizer)["step"]


@contextlib.contextmanager
def _cpu_vendor_at_once(cpuinfo_file: Path = Path("/proc/cpuinfo")) -> Iterator[None]:
    """Linux names the vendor, which is all that DeepSpeedCPUAdam asks py-cpuinfo for; that takes a second a rank."""
    import cpuinfo

    lines = cpuinfo_file.read_text().splitlines() if cpuinfo_file.exists() else []
    vendors = [line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")]
    if not vendors:
        yield
        return
    whole = cpuinfo.get_cpu_info

    def vendor() -> dict[str, str]:
        cpuinfo.get_cpu_info = whole  # a build of the op asks for more
        return {"vendor_id_raw": vendors[0]}

    cpuinfo.get_cpu_info = vendor
    try:
        yield
    finally:
        cpuinfo.get_cpu_info = whole


def lr_at(step: int, cfg: OptimConfig, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (0-based) out of `total_steps`.

    Warm-up is linear and reaches `lr` at step `warmup_steps`. Then: constant; linear or cosine (Loshchilov and
    Hutter 2017, without restarts) down to `min_lr_ratio * lr` at the last step; wsd (Hu et al. 2024, MiniCPM)
    stays at `lr` and falls linearly over the last `decay_steps`.
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
    """What the run asks for, after a resume: DeepSpeed restores the saved run's options with its state."""
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
    """A state that the other implementation saved (offload switched since): options it lacks, its kind of step."""
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
    """Bias corrections to the last bit those of a run that never stopped.

    DeepSpeedCPUAdam keeps beta ** step as a product that grows by a factor a step. No saved state holds it, and a new
    one takes the power at once (deepspeed/ops/csrc/includes/cpu_adam.h), which for many steps differs in the last
    bit. So the steps are counted again on one number, some microseconds each.
    """
    adam = getattr(optimizer, "optimizer", optimizer)
    if not hasattr(adam, "ds_opt_adam"):
        return
    beta1, beta2 = adam.param_groups[0]["betas"]
    unused = [torch.zeros(1) for _ in range(4)]
    for step in range(1, 1 + max((int(state.get("step", 0)) for state in adam.state.values()), default=0)):
        adam.ds_opt_adam.adam_update(adam.opt_id, step, 0.0, beta1, beta2, 1.0, 0.0, True, *unused)
