"""Say what a resumed launch changes in its run, and what that does, for example to the next learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from remat.config import resumed
from remat.config.options import ConfigError, OptimConfig, RunConfig, Schedule
from remat.model import optimizer
from remat.saving.manifest import SavedState

BITS = "it changes what training computes from here on, not only where things live"
EFFECTS = {  # the beginning of an option, and what changing it does
    "train.precision": "a state of another precision cannot be loaded",
    "train.micro_batch_size": "accumulation follows; sums are taken in another order",
    "train.loss": "the same loss, in another order of sums",
    "optim.": BITS,
    "peft.": BITS,
    "model.": BITS,
    "data.": BITS,
    "deepspeed.": "where states live; the ZeRO stage must stay",
    "checkpointing.": "memory and speed, not the losses",
}


def describe(state: SavedState, cfg: RunConfig) -> list[str]:
    """Return a line for each option that differs from the launch which wrote `state`, and one for the learning rate.

    Empty where nothing differs, or where the run has no configuration to compare with.
    """
    try:
        before = resumed.read_config(resumed.find_config(state.path))
    except ConfigError:
        return []
    changed = resumed.changes(before, asdict(cfg))
    lines = [f"changed: {name}: {_shown(old)} -> {_shown(new)}{_effect(name)}" for name, old, new in changed]
    if any(name == "train.steps" or name.startswith("optim.") for name, _, _ in changed):
        lines += _learning_rate(before, cfg, state.step)
    return lines


def _effect(name: str) -> str:
    text = next((text for start, text in EFFECTS.items() if name.startswith(start)), "")
    return f" ({text})" if text else ""


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else "nothing" if value is None else str(value)


def _learning_rate(before: Mapping[str, Any], cfg: RunConfig, step: int) -> list[str]:
    """Return the learning rate of the next step under both schedules; `step` counts those that are done."""
    known = {item.name for item in fields(OptimConfig)}
    options = {name: value for name, value in before.get("optim", {}).items() if name in known}
    try:
        if "schedule" in options:
            options["schedule"] = Schedule(options["schedule"])
        old = optimizer.lr_at(step, OptimConfig(**options), int(before["train"]["steps"]))
    except (KeyError, TypeError, ValueError):  # a configuration of another version
        return []
    assert cfg.train.steps is not None, "the data is open, so the steps are known"
    new = optimizer.lr_at(step, cfg.optim, cfg.train.steps)
    if old == new:
        return [f"lr at step {step + 1}: {new:.3g}, as before"]
    longer = before["train"]["steps"] != cfg.train.steps and cfg.optim.schedule is not Schedule.constant
    why = f" (optim.schedule={cfg.optim.schedule} spans train.steps={cfg.train.steps})" if longer else ""
    return [f"lr at step {step + 1}: {old:.3g} -> {new:.3g}{why}"]
