"""Say for each well-known remedy what it would do for a run that does not fit, or why it does not help.

Each remedy is estimated alone (settings/screening.py), on top of the settings of the run. If that is not enough, it is
estimated with the options that save most activations, and then with model states in host memory too. None is applied.
To add a remedy, add an entry to REMEDIES.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from remat.config import ds_config
from remat.config.options import ConfigError, OptimStates, RunConfig
from remat.config.units import GIB
from remat.planning.plan import GPU_MEMORY, Planned, Recordings, Resource, needed_bytes
from remat.planning.settings.choices import composed, joined
from remat.planning.settings.screening import NO_ACTIVATIONS, Screen

SHRINKS_BELOW = 0.995  # share of the bytes without the remedy: a remedy that leaves more does not help


@dataclass(frozen=True)
class Remedy:
    """A change that is known to save memory. `words` returns its overrides for a planned run; None: the run has them.

    If the change is not enough, it is estimated with SAVING_MOST too, unless `alone`; then with OFFLOADING besides, if
    `offloads`.
    """

    name: str
    words: Callable[[Planned], Sequence[str] | None]
    changes_training: bool = False
    alone: bool = False
    offloads: bool = False


@dataclass(frozen=True)
class Found:
    """The result of a remedy, in words in `text`. `missing_bytes` has the bytes that each resource still lacks."""

    name: str
    overrides: list[str]
    changes_training: bool
    fits: bool
    text: str
    missing_bytes: dict[str, int]


def _optimizer_offload(planned: Planned) -> Sequence[str] | None:
    if ds_config.optimizer_offload_device(planned.strategy.ds):
        return None
    name = "zero3_offload_optimizer" if planned.strategy.zero_stage == 3 else "zero2_offload"
    return (f"deepspeed.config={name}",)


def _parameter_offload(planned: Planned) -> Sequence[str] | None:
    return None if ds_config.param_offload_device(planned.strategy.ds) else ("deepspeed.config=zero3_offload",)


def _slices(planned: Planned) -> Sequence[str] | None:
    return ("checkpointing=full", "checkpointing.tiles=8") if planned.cfg.checkpointing.tiles == "1" else None


def _nvme(planned: Planned) -> Sequence[str] | None:
    if ds_config.optimizer_offload_device(planned.strategy.ds) == "nvme":
        return None
    folder = [] if planned.cfg.hardware.nvme_path else ["hardware.nvme_path=/local_nvme"]
    return ("deepspeed.config=zero3_nvme", *folder)


def _sharded(planned: Planned) -> str:
    return f"deepspeed.config={'zero3' if planned.world_size > 1 else 'zero2'}"


def _in_16_bit(planned: Planned) -> Sequence[str] | None:
    return None if planned.cfg.optim.states is OptimStates.bf16 else ("optim.states=bf16",)


def _in_8_bit(planned: Planned) -> Sequence[str]:
    """Return the overrides for 8-bit states, which stay on the GPU."""
    offloaded = ds_config.optimizer_offload_device(planned.strategy.ds) is not None
    return ("optim.name=adamw_8bit", *([_sharded(planned)] if offloaded else []))


def _twice_the_gpus(planned: Planned) -> Sequence[str]:
    """Return the override that doubles the GPUs of a node; from eight GPUs on, the number of nodes."""
    machine = planned.cfg.hardware
    per_node = machine.gpus_per_node or 1
    if per_node < 8:
        return (f"hardware.gpus_per_node={2 * per_node}",)
    return (f"hardware.num_nodes={2 * machine.num_nodes}",)


SAVING_MOST = ("checkpointing=full", "train.micro_batch_size=1", "train.loss=chunked")
OFFLOADING = ("deepspeed.config=zero3_offload",)
REMEDIES = (
    Remedy("activation checkpointing", lambda _: SAVING_MOST[:1], alone=True),
    Remedy("a smaller micro-batch", lambda _: SAVING_MOST[1:2], alone=True),
    Remedy("chunked loss", lambda _: SAVING_MOST[2:], alone=True),
    Remedy("MLPs in slices", _slices),
    Remedy("offload of the optimizer", _optimizer_offload),
    Remedy("offload of parameters", _parameter_offload),
    Remedy("NVMe", _nvme),
    Remedy("more GPUs", _twice_the_gpus),
    Remedy("16-bit optimizer states", _in_16_bit, changes_training=True, offloads=True),
    Remedy("8-bit optimizer states", _in_8_bit, changes_training=True),
    Remedy("LoRA", lambda planned: ("peft=lora", _sharded(planned)), changes_training=True, offloads=True),
    Remedy(
        "4-bit weights with LoRA",
        lambda planned: ("peft=qlora", _sharded(planned)),
        changes_training=True,
        offloads=True,
    ),
)


def look_at(
    args: Sequence[str],
    planned: Planned,
    recordings: Recordings,
    *,
    until: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Found]:
    """Return the result of each remedy for the run of `args`, whose plan is `planned`.

    `until` is the time.process_time() after which no remedy is estimated; the results of the others say so.
    """
    screen, found = Screen(recordings), []
    for number, remedy in enumerate(REMEDIES, start=1):
        if time.process_time() < until:
            found.append(_try(remedy, args, planned, screen))
        else:
            found.append(_say(remedy, [], "not looked at: the time for advice was up"))
        progress(number, len(REMEDIES))
    return found


def _try(remedy: Remedy, args: Sequence[str], planned: Planned, screen: Screen) -> Found:
    words = remedy.words(planned)
    if words is None:
        return _say(remedy, [], "the run has it already")
    overrides = list(words)
    try:
        cfg = composed(args, overrides)
        if _same(cfg, planned.cfg):
            return _say(remedy, overrides, "the run has it already")
        found = _judge(remedy, overrides, planned, screen.estimate(cfg))
        if not (found.fits or remedy.alone):
            found = _try_with(SAVING_MOST, remedy, args, overrides, screen) or found
        if not found.fits and remedy.offloads:
            found = _try_with((*SAVING_MOST, *OFFLOADING), remedy, args, overrides, screen) or found
        return found
    except ConfigError as error:
        return _say(remedy, overrides, f"refused: {str(error).splitlines()[0]}")


def _try_with(
    more: Sequence[str], remedy: Remedy, args: Sequence[str], overrides: Sequence[str], screen: Screen
) -> Found | None:
    """Return the result of a remedy together with the overrides in `more`; None if they are refused."""
    both = list(joined(overrides, more))
    try:
        after = screen.estimate(composed(args, both))
    except ConfigError:
        return None
    together = " ".join(more)
    short = _short(after)
    if not short:
        return _say(remedy, both, f"with {together} it {_fits(after)}", fits=True)
    text = f"not enough, even with {together}: needs {_all_needs(short, after)}"
    return _say(remedy, both, text, missing=after.plan.missing_bytes)


def _same(one: RunConfig, other: RunConfig) -> bool:
    sections = ("model", "train", "deepspeed", "checkpointing", "peft", "optim", "hardware")
    return all(getattr(one, name) == getattr(other, name) for name in sections)


def _judge(remedy: Remedy, overrides: list[str], before: Planned, after: Planned) -> Found:
    """Compare `after`, the estimate of the run with the remedy, with `before`, its plan without.

    A remedy helps if it needs less of a resource that `before` is short of.
    """
    short = _short(after)
    changes = [(r.name, r.needed_bytes / GIB, needed_bytes(after, r.name) / GIB) for r in _short(before)]
    if not short:
        return _say(remedy, overrides, _fits(after), fits=True)
    needs, is_whole = _all_needs(short, after), after.simulation is not NO_ACTIVATIONS
    if is_whole and all(then > SHRINKS_BELOW * now for _, now, then in changes):
        return _say(remedy, overrides, f"does not help: needs {needs}", missing=after.plan.missing_bytes)
    gives = "".join(f"{name} {now:.1f} -> {then:.1f} GiB, " for name, now, then in changes if is_whole)
    return _say(remedy, overrides, f"not enough: {gives}needs {needs}", missing=after.plan.missing_bytes)


def _short(planned: Planned) -> list[Resource]:
    return [r for r in planned.plan.resources if not r.fits and r.found_bytes is not None]


def _fits(after: Planned) -> str:
    seconds = "" if after.time.unknown else f", step {after.time.total_s:.3g} s"
    if after.time.between:
        least, most = after.time.between
        seconds = f", step {least:.3g} to {most:.3g} s"
    return f"fits: needs {needed_bytes(after, GPU_MEMORY) / GIB:.1f} GiB of each GPU{seconds}"


def _all_needs(short: Sequence[Resource], after: Planned) -> str:
    least = "at least " * (after.simulation is NO_ACTIVATIONS)
    return ", ".join(f"{least}{_needs(r)}" for r in short)


def _needs(resource: Resource) -> str:
    found = (resource.found_bytes or 0) / GIB
    return f"{resource.needed_bytes / GIB:.1f} GiB of {resource.name}, {found:.1f} are there"


def _say(
    remedy: Remedy,
    overrides: list[str],
    text: str,
    *,
    fits: bool = False,
    missing: dict[str, int] | None = None,
) -> Found:
    return Found(remedy.name, overrides, remedy.changes_training, fits, text, missing or {})
