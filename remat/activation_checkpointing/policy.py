"""Decide how each layer is treated: one row per policy, which mechanism it uses and on which layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from remat.activation_checkpointing.mechanisms import (
    budget,
    deepspeed,
    discard_output,
    recompute,
    selective_modules,
    selective_ops,
)
from remat.activation_checkpointing.mechanisms.mechanism import KEEP, LayerDecision, Mechanism, Tiling, spans
from remat.config.options import CheckpointingConfig, ConfigError, Policy


@dataclass(frozen=True)
class Rule:
    """One policy. `layers_option`: the option that counts layers, which must not exceed those of the model.

    treats(cfg, place): whether the mechanism treats the layer that is number `place` of those with this policy.
    segment(cfg, layers): how many of `layers` layers in a row are treated as one; segments end where a stack does.
    """

    mechanism: Mechanism
    layers_option: str = ""
    treats: Callable[[CheckpointingConfig, int], bool] = lambda cfg, place: True
    segment: Callable[[CheckpointingConfig, int], int] = lambda cfg, layers: 1


RULES = {
    Policy.none: Rule(KEEP),
    Policy.full: Rule(recompute.MECHANISM),
    Policy.interval: Rule(recompute.MECHANISM, "interval", treats=lambda cfg, place: place % cfg.interval == 0),
    Policy.uniform: Rule(recompute.MECHANISM, "segment_layers", segment=lambda cfg, layers: cfg.segment_layers),
    Policy.block: Rule(recompute.MECHANISM, "block_layers", treats=lambda cfg, place: place < cfg.block_layers),
    Policy.sqrt: Rule(recompute.MECHANISM, segment=lambda cfg, layers: sqrt_segment(layers)),
    Policy.selective_ops: Rule(selective_ops.MECHANISM),
    Policy.selective_modules: Rule(selective_modules.MECHANISM),
    Policy.discard_output: Rule(discard_output.MECHANISM),
    Policy.deepspeed: Rule(deepspeed.MECHANISM),
    Policy.budget: Rule(budget.MECHANISM),
}


SLICEABLE = (recompute.MECHANISM, selective_ops.MECHANISM)  # the recomputation of a layer can end at its MLP


def decide_layers(
    cfg: CheckpointingConfig,
    num_layers: int,
    *,
    zero_stage: int = 0,
    stacks: Sequence[int] = (),
    reentrant_segments: bool = True,
) -> list[LayerDecision]:
    """Decide for each of `num_layers` layers, first to last.

    `stacks`: the number of layers of each stack of the model, if it has several: no segment crosses from one into
    the next. `reentrant_segments`: whether segments under ZeRO-3 are reentrant if `cfg` leaves it open. Raises
    ConfigError for layer ranges that do not fit the model.
    """
    found = range_problems(cfg, num_layers)
    if found:
        raise ConfigError("\n".join(found))
    decisions: list[LayerDecision] = []
    for entry, first, last in _runs(cfg, num_layers):
        policy = cfg.policy if entry is None else cfg.layers[entry]
        rule = RULES[policy]
        for start, end in _cut(first, last, stacks, partial(rule.segment, cfg)):
            mechanism = rule.mechanism if rule.treats(cfg, start - first) else KEEP
            decisions += [
                LayerDecision(
                    policy=policy,
                    mechanism=mechanism,
                    first=start,
                    last=end,
                    reentrant=mechanism.is_reentrant is not None
                    and mechanism.is_reentrant(cfg, end - start + 1, zero_stage == 3 and reentrant_segments),
                    offload=cfg.offload.enabled
                    and end < num_layers - cfg.offload.keep_last_layers
                    and mechanism != budget.MECHANISM,  # which moves what its table says
                    entry="" if entry is None else str(entry),
                    tiling=_tiling(cfg) if mechanism in SLICEABLE else None,
                )
                for index in range(start, end + 1)
            ]
    return decisions


def _tiling(cfg: CheckpointingConfig) -> Tiling | None:
    return None if cfg.tiles == "1" else Tiling(0 if cfg.tiles == "auto" else int(cfg.tiles))


def without_engine(decisions: list[LayerDecision]) -> list[LayerDecision]:
    """Replace DeepSpeed's function, which needs a process group, by torch's reentrant variant: for meta tensors."""
    return [
        replace(d, mechanism=recompute.MECHANISM, reentrant=True) if d.mechanism == deepspeed.MECHANISM else d
        for d in decisions
    ]


def policies(cfg: CheckpointingConfig) -> set[Policy]:
    """Return every policy that some layer may have."""
    return {cfg.policy, *cfg.layers.values()}


def needs_layers(cfg: CheckpointingConfig) -> bool:
    """Return whether any layer is recomputed or offloaded."""
    return policies(cfg) != {Policy.none} or cfg.offload.enabled


def sqrt_segment(num_layers: int) -> int:
    """Return the layers per segment of sqrt, which makes round(sqrt(L)) segments.

    Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost.
    """
    return math.ceil(num_layers / max(1, round(math.sqrt(num_layers))))


def period(cfg: CheckpointingConfig, num_layers: int) -> int:
    """Return the number of layers after which the policy repeats. `block` treats only its first layers differently."""
    if cfg.policy is Policy.sqrt:
        return max(1, sqrt_segment(num_layers))
    option = RULES[cfg.policy].layers_option
    return max(1, getattr(cfg, option) + (cfg.policy is Policy.block) if option else 1)


def size_problems(cfg: CheckpointingConfig, num_layers: int, stacks: Sequence[int]) -> list[str]:
    """Tell which numbers of layers in the options exceed the model; a segment must lie within one of its `stacks`."""
    longest = max(stacks, default=num_layers)
    found = []
    for policy in sorted(policies(cfg), key=list(Policy).index):
        option = RULES[policy].layers_option
        most = longest if policy is Policy.uniform else num_layers
        where = "the model has" if most == num_layers else "its longest stack of layers has"
        if option and getattr(cfg, option) > most:
            found.append(
                f"checkpointing.{option}={getattr(cfg, option)}: {where} {most} layers; give at most that"
            )
    return found


def range_problems(cfg: CheckpointingConfig, num_layers: int) -> list[str]:
    """Tell why `checkpointing.layers` does not fit a model of `num_layers` layers; each text names the range."""
    found: list[str] = []
    taken: dict[int, object] = {}
    for key in cfg.layers:
        option = f"checkpointing.layers={{{key}: ...}}"
        limits = _range(key)
        if limits is None:
            found.append(f"{option}: not a range of layers; write 5 or 0-7")
            continue
        first, last = limits
        if first > last or last >= num_layers:
            found.append(f"{option}: the model has layers 0 to {num_layers - 1}, and a range rises")
            continue
        double = [index for index in range(first, last + 1) if index in taken]
        if double:
            found.append(f"{option}: layer {double[0]} is also in {taken[double[0]]}; give each layer once")
        taken |= dict.fromkeys(range(first, last + 1), key)
    return found


def describe(decisions: list[LayerDecision]) -> str:
    """Put the decisions in words for the run's header: `full (32 of 32 layers recomputed whole)`."""
    if not decisions:
        return "none (every activation is kept)"
    by_policy: dict[Policy, list[int]] = {}
    for index, decision in enumerate(decisions):
        by_policy.setdefault(decision.policy, []).append(index)
    texts = []
    for policy, layers in by_policy.items():
        again = [i for i in layers if decisions[i].mechanism != KEEP]
        where = "" if len(by_policy) == 1 else f" in layers {spans(layers)}"
        texts.append(f"{policy}{where} ({_what(decisions, again)})")
    moved = [i for i, decision in enumerate(decisions) if decision.offload]
    if moved:
        part = " in part" * any(decisions[i].table is not None for i in moved)
        texts.append(f"what layers {spans(moved)} keep is{part} in host memory")
    counts = {d.tiling.count for d in decisions if d.tiling is not None}
    for count in sorted(counts - {0, 1}):
        sliced = [i for i, d in enumerate(decisions) if d.tiling is not None and d.tiling.count == count]
        texts.append(f"MLPs of layers {spans(sliced)} in {count} slices of the tokens")
    return "; ".join(texts)


def _what(decisions: list[LayerDecision], again: list[int]) -> str:
    if not again:
        return "every activation is kept"
    mechanism = decisions[again[0]].mechanism
    whole = mechanism.keeps_only_input
    segments = {(decisions[i].first, decisions[i].last) for i in again}
    grouped = f" in {len(segments)} segments" if whole and len(segments) < len(again) else ""
    variant = ", reentrant" if decisions[again[0]].reentrant else ""
    return f"{len(again)} of {len(decisions)} layers recomputed{' whole' if whole else ' in part'}{grouped}{variant}"


def _range(key: object) -> tuple[int, int] | None:
    first, dash, last = str(key).partition("-")
    if not first.strip().isdigit() or (dash and not last.strip().isdigit()):
        return None
    return int(first), int(last if dash else first)


def _runs(cfg: CheckpointingConfig, num_layers: int) -> Iterator[tuple[object, int, int]]:
    """Yield (range, first, last) of consecutive layers that one range of the options, or none (None), decides."""
    owner: list[object] = [None] * num_layers
    for key in cfg.layers:
        first, last = _range(key) or (0, -1)
        owner[first : last + 1] = [key] * (last + 1 - first)
    for key, run in itertools.groupby(range(num_layers), owner.__getitem__):
        indices = list(run)
        yield key, indices[0], indices[-1]


def _cut(
    first: int, last: int, stacks: Sequence[int], size_of: Callable[[int], int]
) -> Iterator[tuple[int, int]]:
    """Cut the layers `first` to `last` into segments; none crosses from one stack into the next."""
    borders = [border for border in itertools.accumulate(stacks) if first < border <= last]
    for begin, behind in itertools.pairwise([first, *borders, last + 1]):
        size = size_of(behind - begin)
        yield from ((start, min(start + size, behind) - 1) for start in range(begin, behind, size))
