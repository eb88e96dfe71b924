"""Build the optimizer for the device of its state, group parameters, and compute learning rates from the step."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from remat.config import ds_config
from remat.config.options import ConfigError, OptimConfig, OptimName, OptimStates, Schedule

IN_8_BIT = (OptimName.adamw_8bit, OptimName.paged_adamw_8bit)
FROM_BITSANDBYTES = (*IN_8_BIT, OptimName.lion)
ON_HOST = (OptimName.adamw, OptimName.lion)  # optimizers for which DeepSpeed has a CPU kernel
KINDS = {  # class -> kind of its state, if it is not AdamW's; states of the same kind can be exchanged
    "AdamW8bit": "adamw_8bit",
    "PagedAdamW8bit": "adamw_8bit",
    "Lion32bit": "lion",
    "DeepSpeedCPULion": "lion",
    "Adafactor": "adafactor",
}
WRAPPED = "__bnb_optimizer_quant_state__"  # key under which bitsandbytes saves its tensors
KERNEL = ("fused", "foreach", "capturable")  # choose the kernel of torch's AdamW, not its result


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Put trainable parameters into two groups: matrices with weight decay, vectors (norms, biases) without.

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


def check(cfg: OptimConfig, ds: Mapping[str, Any], tensor_parallel_size: int = 1) -> None:
    """Raise ConfigError for settings in the rendered DeepSpeed dict `ds` that this optimizer does not support."""
    stage, device = ds_config.zero_stage(ds), ds_config.optimizer_offload_device(ds)
    asked, found = f"optim.name={cfg.name}", []
    if cfg.name is OptimName.adafactor and stage:
        found.append(
            f"{asked} with zero_optimization.stage={stage}: ZeRO trains flat pieces, and Adafactor's means of rows and "
            "columns need whole matrices; choose deepspeed.config=zero1 "
            "deepspeed.overrides.zero_optimization.stage=0, or optim.name=adamw_8bit"
        )
    ratio = ds_config.offload_ratio(ds)
    if device and cfg.name not in ON_HOST:
        found.append(
            f"{asked} with zero_optimization.offload_optimizer.device={device}: DeepSpeed steps on the host with "
            "AdamW and Lion alone; choose a deepspeed.config without it (zero2, zero3), or optim.name=adamw"
        )
    elif cfg.name is OptimName.lion and (device == "nvme" or ratio < 1):
        what = "device=nvme" if device == "nvme" else f"ratio={ratio}, whose share on the GPU is AdamW's"
        found.append(
            f"{asked} with zero_optimization.offload_optimizer.{what}: Lion is offloaded to the CPU and whole; "
            "choose device=cpu and ratio=1.0, or optim.name=adamw"
        )
    if cfg.name is not OptimName.adamw and tensor_parallel_size > 1:
        found.append(
            f"{asked} with train.tensor_parallel_size={tensor_parallel_size}: layers shared by ranks are trained by "
            "AdamW alone; choose optim.name=adamw, or train.tensor_parallel_size=1"
        )
    found += _refuse_states(cfg.states, ds)
    missing = cfg.name in FROM_BITSANDBYTES and not (cfg.name is OptimName.lion and device)
    if missing and importlib.util.find_spec("bitsandbytes") is None:
        found.append(f"{asked} needs bitsandbytes, which is not installed: pip install 'remat[qlora]'")
    if found:
        raise ConfigError("\n".join(found))


def describe_states(states: OptimStates) -> str:
    """Describe how 16-bit states change the training, for a plan and a run; "" for fp32 states."""
    if states is OptimStates.fp32:
        return ""
    rounded = {
        OptimStates.bf16_master: "master weights and their gradients, but not the moments,",
        OptimStates.bf16: "master weights, their gradients and both moments",
    }[states]
    return (
        f"optim.states={states} changes the training: {rounded} are rounded to bf16, and a step smaller than about "
        "1/500 of a weight is lost; docs/optimizers.md has the losses that were measured"
    )


def _refuse_states(states: OptimStates, ds: Mapping[str, Any]) -> list[str]:
    """Return why DeepSpeed cannot keep these states under `ds` (runtime/config.py:706, runtime/base_optimizer.py:502).

    On NVMe its swapper uses one number format for all states of a group and was never tried with 16 bits.
    """
    if states is OptimStates.fp32:
        return []
    stage, device = ds_config.zero_stage(ds), ds_config.optimizer_offload_device(ds)
    asked, found = f"optim.states={states}", []
    if stage == 0:
        found.append(
            f"{asked} with zero_optimization.stage=0: 16-bit states need ZeRO stage 1, 2 or 3; choose "
            "deepspeed.config=zero1, zero2 or zero3, or optim.states=fp32"
        )
    elif states is OptimStates.bf16_master and device is None:
        found.append(
            f"{asked} without zero_optimization.offload_optimizer: fp32 moments beside bf16 weights are stepped by "
            "DeepSpeed's kernel on the host alone; choose deepspeed.config=zero2_offload, zero3_offload_optimizer or "
            "zero3_offload, or optim.states=bf16"
        )
    if device == "nvme":
        found.append(
            f"{asked} with zero_optimization.offload_optimizer.device=nvme: states on NVMe are in fp32; choose "
            "device=cpu, or optim.states=fp32"
        )
    ratio = ds_config.offload_ratio(ds)
    if ratio < 1:
        found.append(
            f"{asked} with zero_optimization.offload_optimizer.ratio={ratio}: the share on the GPU has states of its "
            "own; set ratio=1.0, or optim.states=fp32"
        )
    accumulated = ds.get("data_types", {}).get("grad_accum_dtype", "bf16")
    if accumulated != "bf16":
        found.append(
            f"{asked} with data_types.grad_accum_dtype={accumulated}: gradients would be summed in "
            f"{accumulated} and rounded to bf16; delete it, or set optim.states=fp32"
        )
    return found


def build(
    model: nn.Module, cfg: OptimConfig, *, offloaded: bool, device: torch.device
) -> torch.optim.Optimizer:
    """Build the optimizer: DeepSpeed's CPU kernel if its state is offloaded to host memory, else one for `device`."""
    groups = parameter_groups(model, cfg.weight_decay)
    settings = {"lr": cfg.lr} | _group_options(cfg)
    if offloaded:
        with _cpu_vendor_at_once():
            return _on_host(groups, cfg, settings)
    if cfg.name is OptimName.adafactor:
        from transformers.optimization import Adafactor

        return Adafactor(groups, scale_parameter=False, relative_step=False, **settings)
    if cfg.name in FROM_BITSANDBYTES:
        from bitsandbytes import optim as bnb

        of_bnb: dict[OptimName, Any] = {
            OptimName.adamw_8bit: bnb.AdamW8bit,
            OptimName.paged_adamw_8bit: bnb.PagedAdamW8bit,
            OptimName.lion: bnb.Lion32bit,
        }
        built: torch.optim.Optimizer = of_bnb[cfg.name](groups, **settings)
        return built
    # The fused kernel computes in fp32 and rounds each state once, also on a CPU. The plain one rounds each operation.
    fused = device.type == "cuda" or cfg.states is not OptimStates.fp32
    return torch.optim.AdamW(groups, fused=fused, **settings)


def _on_host(groups: list[dict[str, Any]], cfg: OptimConfig, settings: dict[str, Any]) -> torch.optim.Optimizer:
    if cfg.name is OptimName.lion:
        from deepspeed.ops.lion import DeepSpeedCPULion

        return DeepSpeedCPULion(groups, **settings)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    in_fp32 = cfg.states is not OptimStates.bf16
    adam = DeepSpeedCPUAdam(groups, adamw_mode=True, fp32_optimizer_states=in_fp32, **settings)
    if cfg.states is OptimStates.bf16_master:
        _load_moments_as_saved(adam)
    return adam


def _load_moments_as_saved(adam: torch.optim.Optimizer) -> None:
    """Make `adam.load_state_dict` keep fp32 moments. torch would round them to the weight's format, bf16 here."""
    saved: list[dict[str, Any]] = []

    def note(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        saved[:] = [state_dict["state"].get(key, {}) for key in keys]

    def put_back(_: torch.optim.Optimizer) -> None:
        weights = [weight for group in adam.param_groups for weight in group["params"]]
        for weight, state in zip(weights, saved, strict=True):
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    adam.state[weight][name] = value.to(weight.device, copy=True)
        saved.clear()

    adam.register_load_state_dict_pre_hook(note)
    adam.register_load_state_dict_post_hook(put_back)


def _group_options(cfg: OptimConfig) -> dict[str, Any]:
    """Return the options of every group of this optimizer, besides its learning rate and weight decay."""
    if cfg.name is OptimName.adafactor:
        return {}
    betas = {"betas": (cfg.beta1, cfg.beta2)}
    return betas if cfg.name is OptimName.lion else betas | {"eps": cfg.eps}


def kind_of(optimizer: Any) -> str:
    """Return the kind of state of an optimizer, or of the one in DeepSpeed's wrapper: adamw or a value of KINDS."""
    return KINDS.get(type(getattr(optimizer, "optimizer", optimizer)).__name__, "adamw")


def kind_named(name: OptimName) -> str:
    return "adamw_8bit" if name in IN_8_BIT else str(name)


@contextlib.contextmanager
def held_still(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Make `optimizer.step` do nothing while DeepSpeed builds its engine around the optimizer.

    At stage 0 DeepSpeed's wrapper of 16-bit weights takes a step on zero gradients when it is built, to allocate the
    state (runtime/fp16/unfused_optimizer.py, initialize_optimizer_states). Weights would decay at the full rate before
    the first batch, and the moments' bias corrections would be one step ahead for the whole run. With this context the
    first real step allocates the state, as at the other stages.
    """
    with mock.patch.object(optimizer, "step", lambda *args, **settings: None):
        yield


@contextlib.contextmanager
def _cpu_vendor_at_once() -> Iterator[None]:
    """Give DeepSpeedCPUAdam the CPU vendor from /proc/cpuinfo.

    It would ask py-cpuinfo for the vendor alone, which takes a second per rank.
    """
    import cpuinfo

    cpuinfo_file = Path("/proc/cpuinfo")
    lines = cpuinfo_file.read_text().splitlines() if cpuinfo_file.exists() else []
    vendors = [line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")]
    if not vendors:
        yield
        return
    whole = cpuinfo.get_cpu_info

    def vendor() -> dict[str, str]:
        cpuinfo.get_cpu_info = whole  # a build of the op reads more than the vendor
        return {"vendor_id_raw": vendors[0]}

    with mock.patch.object(cpuinfo, "get_cpu_info", vendor):
        yield


@contextlib.contextmanager
def muon_left_eager() -> Iterator[None]:
    """Let DeepSpeed's engine import its Muon, which remat does not use, without torch's compiler.

    To check whether ZeRO supports the optimizer, the engine imports Muon's module, which compiles three functions
    (runtime/zero/utils.py). That takes 0.8 s per rank, nearly all of it imports of torch's Inductor.
    """
    from deepspeed.runtime import compiler

    with mock.patch.object(compiler, "compile", lambda: lambda function: function):
        yield


def lr_at(step: int, cfg: OptimConfig, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (0-based) out of `total_steps`.

    Warm-up is linear and reaches `lr` at step `cfg.warmup(total_steps)`. Then: constant; linear or cosine (Loshchilov
    and Hutter 2017, without restarts) down to `min_lr_ratio * lr` at the last step; wsd (Hu et al. 2024, MiniCPM)
    stays at `lr` and falls linearly over the last `decay_steps`.
    """
    warmup = cfg.warmup(total_steps)
    if step < warmup:
        return cfg.lr * (step + 1) / (warmup + 1)
    if cfg.schedule is Schedule.constant:
        return cfg.lr
    start = total_steps - cfg.decay_steps if cfg.schedule is Schedule.wsd else warmup
    length = max(1, total_steps - 1 - start)
    progress = min(1.0, max(0.0, (step - start) / length))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if cfg.schedule is Schedule.cosine else 1 - progress
    return cfg.lr * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * shape)


def set_options(optimizer: Any, cfg: OptimConfig) -> None:
    """Apply this run's optimizer options after a resume, which restored the saved run's."""
    own = getattr(optimizer, "optimizer", optimizer)
    adapt = {"adamw": _adam_as_own, "adamw_8bit": _page_again, "lion": _lion_as_own}.get(kind_of(own))
    if adapt is not None:  # Adafactor's state has the same form in every launch
        adapt(own)
    for group in optimizer.param_groups:
        group |= _group_options(cfg)
        group["weight_decay"] = cfg.weight_decay if group["decayed"] else 0.0
    if hasattr(optimizer, "clip_grad"):
        optimizer.clip_grad = cfg.gradient_clipping
    if hasattr(own, "ds_opt_adam"):
        _count_on(own)


def set_lr(optimizer: Any, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def _page_again(adam: Any) -> None:
    """Move a loaded state back into paged memory. bitsandbytes loads it as plain tensors on the GPU."""
    for weight, state in adam.state.items() if adam.is_paged else ():
        for name in ("state1", "state2"):
            if weight.device.type == "cuda" and not getattr(state[name], "is_paged", False):
                paged = adam.get_state_buffer(weight, dtype=state[name].dtype)
                torch.cuda.synchronize()  # wait until the GPU has filled it with zeros
                state[name] = paged.copy_(state[name])


def _lion_as_own(lion: Any) -> None:
    """Adapt a state that the other Lion saved, if offload was switched since.

    DeepSpeed's Lion keeps a second moment, which it never reads.
    """
    on_host = hasattr(lion, "ds_opt_lion")
    for group in lion.param_groups if not on_host else ():
        group.setdefault("eps", lion.defaults["eps"])  # bitsandbytes' kernel takes eps without using it
    for state in lion.state.values():
        if on_host and WRAPPED in state:
            state["exp_avg"] = state.pop(WRAPPED)["state1"]
            state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
        elif not on_host and "exp_avg" in state:
            state["state1"] = state.pop("exp_avg")
            state.pop("exp_avg_sq", None)


def _adam_as_own(adam: Any) -> None:
    """Adapt a state that the other AdamW saved, if offload was switched since.

    Adds options that the saved groups lack, and converts `step` to this optimizer's type.
    """
    for group in adam.param_groups:
        for name, value in adam.defaults.items():
            group.setdefault(name, value)
            if name in KERNEL:  # torch sets None where the saved group lacks it
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


def _count_on(adam: Any) -> None:
    """Make bias corrections equal, to the last bit, to those of a run that never stopped.

    DeepSpeedCPUAdam computes beta ** step by one multiplication per step and does not save the product. A new optimizer
    computes the power directly (deepspeed/ops/csrc/includes/cpu_adam.h), which after many steps differs in the last
    bit. So the steps are repeated on a single number, some microseconds each.
    """
    beta1, beta2 = adam.param_groups[0]["betas"]
    unused = [torch.zeros(1) for _ in range(4)]
    for step in range(1, 1 + max((int(state.get("step", 0)) for state in adam.state.values()), default=0)):
        adam.ds_opt_adam.adam_update(adam.opt_id, step, 0.0, beta1, beta2, 1.0, 0.0, True, *unused)
