"""What becomes of each layer: the decision, apart from how it is carried out. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from remat.config.options import CheckpointingConfig, ConfigError, Policy


class Mechanism(StrEnum):
    """How a layer is carried out. Many policies differ only in which layers they choose."""

    keep = "keep"
    recompute = "recompute"
    selective_ops = "selective_ops"
    selective_modules = "selective_modules"
    discard_output = "discard_output"
    deepspeed = "deepspeed"


RUNS_AGAIN = {Mechanism.recompute, Mechanism.selective_ops, Mechanism.deepspeed}  # the layer as a whole


@dataclass(frozen=True)
class LayerDecision:
    """One decoder layer. Layers `first` to `last` are recomputed by one call, of which only the input is kept.

    `offload`: what the layer keeps lives in host memory until its backward. `entry`: the range of
    `checkpointing.layers` that decided; empty: none did.
    """

    policy: Policy
    mechanism: Mechanism
    first: int
    last: int
    reentrant: bool
    offload: bool
    entry: str = ""


DIRECT = {
    Policy.none: Mechanism.keep,
    Policy.full: Mechanism.recompute,
    Policy.selective_ops: Mechanism.selective_ops,
    Policy.selective_modules: Mechanism.selective_modules,
    Policy.discard_output: Mechanism.discard_output,
    Policy.deepspeed: Mechanism.deepspeed,
}


def plan(
    cfg: CheckpointingConfig,
    num_layers: int,
    *,
    zero_stage: int = 0,
    stacks: Sequence[int] = (),
    reentrant_segments: bool = True,
) -> list[LayerDecision]:
    """The decision for each of `num_layers` layers, first to last.

    `stacks`: how many of them each stack of the model has, where there are several: no segment crosses from one into
    the next. `reentrant_segments`: what is chosen for segments under ZeRO-3 where `cfg` leaves it open. Raises
    ConfigError for layer ranges that do not fit the model.
    """
    found = range_problems(cfg, num_layers)
    if found:
        raise ConfigError("\n".join(found))
    decisions: list[LayerDecision] = []
    for entry, first, last in _runs(cfg, num_layers):
        policy = cfg.policy if entry is None else cfg.layers[entry]
        for mechanism, start, end in _parts(cfg, policy, first, last, stacks):
            decisions += [
                LayerDecision(
                    policy=policy,
                    mechanism=mechanism,
                    first=start,
                    last=end,
                    reentrant=_reentrant(
                        cfg, mechanism, end - start + 1, zero_stage == 3 and reentrant_segments
                    ),
                    offload=cfg.offload.enabled and end < num_layers - cfg.offload.keep_last_layers,
                    entry="" if entry is None else str(entry),
                )
                for index in range(start, end + 1)
            ]
    return decisions


def without_engine(decisions: list[LayerDecision]) -> list[LayerDecision]:
    """DeepSpeed's function needs its process group; on meta tensors the reentrant variant, which it is, stands in."""
    return [
        replace(d, mechanism=Mechanism.recompute, reentrant=True) if d.mechanism is Mechanism.deepspeed else d
        for d in decisions
    ]


def policies(cfg: CheckpointingConfig) -> set[Policy]:
    """Every policy that some layer may have."""
    return {cfg.policy, *cfg.layers.values()}


def needs_layers(cfg: CheckpointingConfig) -> bool:
    """False when nothing is asked of the model: no recomputation, no offload."""
    return policies(cfg) != {Policy.none} or cfg.offload.enabled


def segment_layers(cfg: CheckpointingConfig, policy: Policy, num_layers: int) -> int:
    """Layers per segment. sqrt makes round(sqrt(L)) segments (Chen et al. 2016, Training Deep Nets with Sublinear
    Memory Cost)."""
    if policy is Policy.uniform:
        return cfg.segment_layers
    return math.ceil(num_layers / max(1, round(math.sqrt(num_layers))))


def range_problems(cfg: CheckpointingConfig, num_layers: int) -> list[str]:
    """Why `checkpointing.layers` does not fit a model of `num_layers` layers; each names the range."""
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
    """The decisions in words for the run's header: `full: layers 0-31, offloaded 0-30`."""
    if not decisions:
        return "none (every activation is kept)"
    by_policy: dict[Policy, list[int]] = {}
    for index, decision in enumerate(decisions):
        by_policy.setdefault(decision.policy, []).append(index)
    texts = []
    for policy, layers in by_policy.items():
        again = [i for i in layers if decisions[i].mechanism is not Mechanism.keep]
        where = "" if len(by_policy) == 1 else f" in layers {spans(layers)}"
        texts.append(f"{policy}{where} ({_what(decisions, again)})")
    moved = [i for i, decision in enumerate(decisions) if decision.offload]
    if moved:
        texts.append(f"what layers {spans(moved)} keep is in host memory")
    return "; ".join(texts)


def spans(indices: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    groups: list[list[int]] = []
    for index in indices:
        if groups and index == groups[-1][-1] + 1:
            groups[-1].append(index)
        else:
            groups.append([index])
    return ", ".join(str(g[0]) if len(g) == 1 else f"{g[0]}-{g[-1]}" for g in groups)


def _what(decisions: list[LayerDecision], again: list[int]) -> str:
    if not again:
        return "every activation is kept"
    mechanism = decisions[again[0]].mechanism
    whole = mechanism in (Mechanism.recompute, Mechanism.deepspeed)
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
    """Consecutive layers that one range, or the default (None), speaks of."""
    owner: list[object] = [None] * num_layers
    for key in cfg.layers:
        first, last = _range(key) or (0, -1)
        owner[first : last + 1] = [key] * (last + 1 - first)
    start = 0
    for index in range(1, num_layers + 1):
        if index == num_layers or owner[index] != owner[start]:
            yield owner[start], start, index - 1
            start = index


def _parts(
    cfg: CheckpointingConfig, policy: Policy, first: int, last: int, stacks: Sequence[int]
) -> Iterator[tuple[Mechanism, int, int]]:
    """Mechanism, first and last layer of each call that recomputes."""
    if policy in (Policy.uniform, Policy.sqrt):
        for begin, end in _cut(first, last, stacks):
            size = segment_layers(cfg, policy, end - begin + 1)
            for start in range(begin, end + 1, size):
                yield Mechanism.recompute, start, min(start + size - 1, end)
        return
    for index in range(first, last + 1):
        place = index - first
        if policy is Policy.interval:
            mechanism = Mechanism.keep if place % cfg.interval else Mechanism.recompute
        elif policy is Policy.block:
            mechanism = Mechanism.recompute if place < cfg.block_layers else Mechanism.keep
        else:
            mechanism = DIRECT[policy]
        yield mechanism, index, index


def _cut(first: int, last: int, stacks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The layers `first` to `last` of each stack."""
    borders = [border for border in itertools.accumulate(stacks) if first < border <= last]
    yield from ((begin, end - 1) for begin, end in itertools.pairwise([first, *borders, last + 1]))


def _reentrant(cfg: CheckpointingConfig, mechanism: Mechanism, layers: int, segments: bool) -> bool:
    """Segments under ZeRO-3 are reentrant: the other variant holds the weights of all their layers in backward.

    DeepSpeed's own function is reentrant: its other variant has no early stop, which ZeRO-3 does not survive.
    """
    if mechanism is Mechanism.recompute:
        return (segments and layers > 1) if cfg.reentrant is None else cfg.reentrant
    return mechanism is Mechanism.deepspeed and cfg.reentrant is not False
