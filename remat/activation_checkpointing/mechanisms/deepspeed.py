"""Recompute layers by DeepSpeed's own activation checkpointing function, with all six of its switches, safely.

`deepspeed.checkpointing` keeps its settings in module globals, empties its tensor arguments in place and checks nothing
else. Here it is given one positional tensor, an alias that nobody else holds; `close` restores its globals; and
`_refuse` names beforehand what it would compute wrongly without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from remat.activation_checkpointing.mechanisms.arguments import (
    Alias,
    Replayable,
    carry_gradient,
    name_arguments,
)
from remat.activation_checkpointing.mechanisms.counters import LayerCounters
from remat.activation_checkpointing.mechanisms.mechanism import (
    LayerForward,
    Mechanism,
    Observed,
    Setting,
    Setup,
    Site,
    Treated,
    spans,
)
from remat.activation_checkpointing.mechanisms.recompute import FlatRegion
from remat.config.options import CheckpointingConfig, ConfigError, DeepSpeedCheckpointingConfig

OPTION = "checkpointing.deepspeed"
SAMPLED = 4096  # elements that are compared between ranks, once
BUFFERS = ("contiguous_data_buffers", "data_offsets", "contiguous_size_buffers", "size_offsets")
FRESH: dict[str, Any] = {  # the values of a process that never called deepspeed.checkpointing.configure
    "deepspeed_checkpointing_enabled": False,
    "mpu": None,
    "mp_rank": 0,
    "mp_size": 1,
    "mp_group": None,
    "num_layers": None,
    "timers": None,
    "PARTITION_ACTIVATIONS": False,
    "CPU_CHECKPOINT": False,
    "CONTIGUOUS_CHECKPOINTING": False,
    "SYNCHRONIZE": False,
    "PROFILE_TIME": False,
    "_cpu_offload_engine": None,
    "_checkpoint_grad_enabled": True,
}


def _switches(ds: DeepSpeedCheckpointingConfig, setting: Setting, num_calls: int) -> list[str]:
    """Tell which switches cannot work or have no effect. `num_calls`: checkpointed layers."""
    found = []
    if ds.partition_activations and setting.tensor_parallel_size < 2:
        found.append(
            f"{OPTION}.partition_activations=true: there is no group of ranks with the same activations "
            "(train.tensor_parallel_size=1), and slices of different data would train on wrong gradients; set "
            "train.tensor_parallel_size=2 or more, or the switch to false"
        )
    if ds.cpu_checkpointing and not setting.has_gpu:
        found.append(
            f"{OPTION}.cpu_checkpointing=true: there is no GPU to move activations from, and DeepSpeed fails on CPU "
            "tensors; set it to false"
        )
    if ds.contiguous_memory_optimization and not ds.partition_activations:
        found.append(
            f"{OPTION}.contiguous_memory_optimization=true: DeepSpeed has buffers for partitioned activations only; "
            f"set {OPTION}.partition_activations=true too, or this to false"
        )
    if ds.contiguous_memory_optimization and not setting.one_width:
        found.append(
            f"{OPTION}.contiguous_memory_optimization=true: DeepSpeed's buffers are for micro-batches of one width, "
            "and without packing each is as wide as its longest row; set it to false, or data.packing=documents"
        )
    if ds.number_checkpoints is not None and not ds.contiguous_memory_optimization:
        found.append(
            f"{OPTION}.number_checkpoints={ds.number_checkpoints}: it has no effect without "
            f"{OPTION}.contiguous_memory_optimization=true; leave it out"
        )
    elif ds.number_checkpoints is not None and ds.number_checkpoints < num_calls:
        found.append(
            f"{OPTION}.number_checkpoints={ds.number_checkpoints}: {num_calls} layers are checkpointed, and DeepSpeed "
            "runs out of buffers; leave it out, it is derived"
        )
    return found


def _division(ds: DeepSpeedCheckpointingConfig, setting: Setting) -> list[str]:
    elements, size = setting.activation_elements, setting.tensor_parallel_size
    if not ds.partition_activations or elements % size == 0:
        return []
    return [
        f"{OPTION}.partition_activations=true: a layer's input has {elements} elements, which do not divide by "
        f"train.tensor_parallel_size={size}; change train.micro_batch_size or train.seq_len"
    ]


def _variant(cfg: CheckpointingConfig, zero_stage: int) -> list[str]:
    found = []
    if cfg.reentrant is False and zero_stage == 3:
        found.append(
            "checkpointing.reentrant=false: DeepSpeed's non-reentrant function has no early stop, and ZeRO-3 lets go "
            "of a layer's weights before its backward is done; leave it out, or use checkpointing=full"
        )
    if cfg.reentrant is False:
        timed = {
            "profile": cfg.deepspeed.profile,
            "synchronize_checkpoint_boundary": cfg.deepspeed.synchronize_checkpoint_boundary,
        }
        found += [
            f"{OPTION}.{name}=true: with checkpointing.reentrant=false DeepSpeed adds hooks to every parameter in "
            "every step and removes none; leave checkpointing.reentrant out"
            for name, wanted in timed.items()
            if wanted
        ]
    if not cfg.preserve_rng_state:
        found.append(
            "checkpointing.preserve_rng_state=false: it has no effect with checkpointing=deepspeed, which always "
            "replays the random state; leave it out, or use checkpointing=full"
        )
    return found


class DeepSpeedCheckpointing:
    """`run(fn, hidden, ...)` in place of `fn(hidden, ...)`: the layer's input is kept, in the way `cfg` says.

    `num_calls`: calls of `run` between two backwards; `tensor_parallel`: an object with
    `get_tensor_model_parallel_{rank,world_size,group}` (deepspeed.utils.groups has them), whose ranks hold the same
    activations. Only one may be open in a process, because DeepSpeed's settings are global; `close` resets them.
    """

    def __init__(
        self, cfg: DeepSpeedCheckpointingConfig, *, num_calls: int, reentrant: bool, tensor_parallel: Any | None
    ) -> None:
        """Raises RuntimeError while another one is open."""
        from deepspeed.runtime.activation_checkpointing import checkpointing
        from deepspeed.utils.timer import SynchronizedWallClockTimer

        if checkpointing.is_configured():
            raise RuntimeError("deepspeed.checkpointing is configured already: close the earlier one first")
        self._module: Any = checkpointing
        self._cfg, self._reentrant = cfg, reentrant
        self._same_checked = False
        # of the call before: DeepSpeed moves an input when the next one comes
        self._previous: LayerCounters | None = None
        self._restore()
        checkpointing.configure(
            mpu_=tensor_parallel,
            partition_activations=cfg.partition_activations,
            contiguous_checkpointing=cfg.contiguous_memory_optimization,
            num_checkpoints=num_calls if cfg.number_checkpoints is None else cfg.number_checkpoints,
            checkpoint_in_cpu=cfg.cpu_checkpointing,
            synchronize=cfg.synchronize_checkpoint_boundary,
            profile=cfg.profile,
        )
        self._profile = SynchronizedWallClockTimer() if cfg.profile else None
        checkpointing.timers = self._profile

    def run(self, fn: Callable[..., Any], *args: Any, counts: LayerCounters, layer: str) -> Any:
        """Run fn(hidden, *rest), and again in backward. `hidden` [batch, seq, hidden] is not changed.

        DeepSpeed keeps, slices and moves only `hidden`; `rest` is bound to `fn`, and must carry no gradient.
        Without gradients `fn` is simply called. `counts` grows by the bytes of `hidden` that went to the other ranks
        and to host memory. Raises ConfigError, naming `layer` and the argument, when another one does carry a gradient.
        """
        if not torch.is_grad_enabled():
            return fn(*args)
        if not args or not isinstance(args[0], torch.Tensor):
            raise ConfigError(
                f"checkpointing=deepspeed: {layer} does not take the hidden state as its first argument; use "
                "checkpointing=full"
            )
        hidden, rest = args[0], args[1:]
        named = name_arguments(fn, args) if isinstance(fn, Replayable) else dict(enumerate(args))
        for name, value in list(named.items())[1:]:  # all after the hidden state
            if carry_gradient(value):
                raise ConfigError(
                    f"checkpointing=deepspeed: {layer} is given a tensor that carries a gradient as argument {name}, "
                    "and DeepSpeed's function passes one back to the hidden state only; use checkpointing=full"
                )
        self._check_same_on_all_ranks(hidden)
        alias = self._alias(hidden)
        variant = self._module.checkpoint if self._reentrant else self._module.non_reentrant_checkpoint
        before = self._offloaded_bytes()
        region = FlatRegion(lambda state: fn(state, *rest))
        output = region.rebuild(variant(region, alias))
        if self._previous is not None:
            self._previous.moved_bytes += self._offloaded_bytes() - before
        self._previous = counts
        _count(hidden, alias, counts, self._newest_buffers())
        return output

    def reset(self) -> None:
        """Forget buffers of forwards that had no backward. Do not call it between a forward and its backward."""
        offload = self._module._cpu_offload_engine
        # else the reset would wait for copies in vain
        if offload is None or offload._tracker or offload._keep_last:
            self._module.reset()
        # a forward that raised leaves its timer running: the next could not start it
        if self._profile is not None:
            for timer in self._profile.get_timers().values():
                timer.reset()

    def close(self) -> None:
        """Give DeepSpeed's module the values of a process that never used it."""
        self._module.reset()
        self._restore()

    def _offloaded_bytes(self) -> int:
        engine = self._module._cpu_offload_engine
        return 0 if engine is None else int(engine.stats.offloaded_bytes)

    def _newest_buffers(self) -> set[int]:
        """Return the addresses of the contiguous buffers that the last call filled."""
        filled = zip(self._module.contiguous_data_buffers, self._module.data_offsets, strict=True)
        return {buffers[offset - 1].data_ptr() for buffers, offset in filled if offset}

    def _restore(self) -> None:
        for name, value in FRESH.items():
            setattr(self._module, name, value)
        for name in BUFFERS:
            setattr(self._module, name, [])

    def _alias(self, hidden: torch.Tensor) -> torch.Tensor:
        """Put `hidden` into a tensor object of its own, for DeepSpeed to empty.

        The reentrant variant sees only gradients of its argument: where nothing below is trained, the alias asks for
        one, so that the layer's own parameters get theirs.
        """
        if self._reentrant and not hidden.requires_grad:
            return hidden.detach().requires_grad_()
        return Alias.apply(hidden)

    def _check_same_on_all_ranks(self, hidden: torch.Tensor) -> None:
        """Compare the ranks once: slices of different activations, put together, would be wrong without an error."""
        if self._same_checked or not self._cfg.partition_activations:
            return
        self._same_checked = True
        flat = hidden.detach().flatten()
        sample = flat[:: max(1, flat.numel() // SAMPLED)].double()
        both = torch.cat([sample, -sample])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._module.mp_group)
        difference = (both[: sample.numel()] + both[sample.numel() :]).max().item()
        if difference > 0.01 * both.max().item():  # ranks of a group may round differently
            raise ConfigError(
                f"{OPTION}.partition_activations=true: the ranks of the tensor-parallel group hold different "
                f"activations (by up to {difference:.3g}, the largest being {both.max().item():.3g}); set it to false"
            )


def _count(hidden: torch.Tensor, alias: torch.Tensor, counts: LayerCounters, buffers: set[int]) -> None:
    """Count what DeepSpeed left in `alias`: a slice or a host copy (or both), or everything."""
    kept: torch.Tensor | None = getattr(alias, "saved_data", None)
    if kept is not None:
        counts.moved_bytes += kept.nbytes if kept.device != hidden.device else 0
        counts.partitioned_bytes += hidden.nbytes - kept.nbytes
        counts.contiguous_bytes += kept.nbytes if kept.data_ptr() in buffers else 0


def _treat(site: Site) -> LayerForward:
    engine = site.setup.shared.get("deepspeed")
    if engine is None:
        engine = site.setup.shared["deepspeed"] = _start(site.setup)
    return site.expect_recomputation(partial(engine.run, counts=site.counts, layer=site.name))


def _start(setup: Setup) -> DeepSpeedCheckpointing:
    engine = DeepSpeedCheckpointing(
        setup.cfg.deepspeed,
        num_calls=sum(decision.mechanism == MECHANISM for decision in setup.decisions),
        reentrant=setup.cfg.reentrant is not False,
        tensor_parallel=setup.tensor_parallel,
    )
    setup.cleanup.callback(engine.close)
    setup.before_micro_batch.append(engine.reset)
    return engine


def _is_reentrant(cfg: CheckpointingConfig, layers: int, segments: bool) -> bool:
    """Return true unless the option says false: the other variant has no early stop, which ZeRO-3 needs."""
    return cfg.reentrant is not False


def _refuse(cfg: CheckpointingConfig, treated: Treated, setting: Setting) -> list[str]:
    """Tell why DeepSpeed's function cannot run with these options, or which switch has no effect, and the remedy."""
    found = [
        *_switches(cfg.deepspeed, setting, len(treated)),
        *_division(cfg.deepspeed, setting),
        *_variant(cfg, setting.zero_stage),
    ]
    if cfg.offload.enabled:
        found.append(
            "checkpointing.offload.enabled=true with checkpointing=deepspeed: it has its own, "
            "checkpointing.deepspeed.cpu_checkpointing; use one of the two"
        )
    return found


def _unmet(cfg: CheckpointingConfig, observed: Observed) -> list[str]:
    """Tell which switches did nothing. They treat all layers alike.

    Without partition_activations the last input is never moved.
    """
    ds, calls = cfg.deepspeed, list(observed)
    leaving = calls if ds.partition_activations else calls[:-1]
    promised = (
        (
            ds.partition_activations,
            calls,
            "partitioned_bytes",
            "partition_activations: nothing was partitioned",
        ),
        (ds.cpu_checkpointing, leaving, "moved_bytes", "cpu_checkpointing: nothing was moved to host memory"),
        (
            ds.contiguous_memory_optimization,
            calls,
            "contiguous_bytes",
            "contiguous_memory_optimization: nothing was kept in the list of buffers",
        ),
    )
    found = []
    for wanted, asked, name, text in promised:
        without = [index for index in asked if getattr(observed[index].counts, name) == 0]
        if wanted and without:
            found.append(f"{OPTION}.{text} (layers {spans(without)})")
    return found


MECHANISM = Mechanism(
    "deepspeed",
    _treat,
    is_reentrant=_is_reentrant,
    refuse=_refuse,
    unmet=_unmet,
    runs_layer_again=True,
    keeps_only_input=True,
    remedy="; use checkpointing=full checkpointing.reentrant=false",
)
