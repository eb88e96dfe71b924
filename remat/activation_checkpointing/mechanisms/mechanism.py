"""Define what a mechanism is: how it treats a layer, what it refuses beforehand, what the first step must show.

Each mechanism is one module of this folder, which ends with its `MECHANISM`. The rows of `policy.py` name them; nothing
else needs to know them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from remat.activation_checkpointing.mechanisms.arguments import Replayable, tell_of_gradient
from remat.activation_checkpointing.mechanisms.counters import LayerCounters, Scope
from remat.activation_checkpointing.mechanisms.tables.table import Table
from remat.config.options import Attention, CheckpointingConfig, Policy
from remat.config.units import MIB
from remat.model.layers import Modules

SLACK_BYTES = MIB  # small things a layer may keep beside its output: masks, random states, routing indices
LayerForward = Callable[..., Any]  # fn(call, *args) -> the layer's output
# finds a part that every layer must have; raises ConfigError where it is missing
Need = Callable[[nn.Module], Modules]


@dataclass(frozen=True)
class Setting:
    """The circumstances of a run that a policy may depend on. `fields` is the transformers config as plain data."""

    zero_stage: int
    tensor_parallel_size: int
    has_gpu: bool
    attention: Attention
    lora_dropout: float
    fields: Mapping[str, Any]
    activation_elements: int  # of one layer's input: micro-batch x sequence x hidden
    element_bytes: int
    stacks: Sequence[int] = ()  # layers of each stack of the model, where there are several
    layerdrop: str = ""  # the field by which the model skips layers at random, with its value
    one_width: bool = True  # every micro-batch has train.seq_len positions a row


@dataclass(frozen=True)
class Mechanism:
    """How a layer is carried out. Many policies differ only in which layers they choose.

    treat: returns the function that runs in the place of the layer's forward.
    is_reentrant(cfg, layers, segments): whether `layers` layers that are recomputed together use the reentrant variant;
        `segments`: whether layers recomputed together are reentrant when the options do not say. None: there is no
        such variant.
    refuse: tells what cannot work, before a weight is read.
    needs: the parts that a layer must have.
    unmet: tells what the mechanism promised for its layers and the first step did not do.
    runs_layer_again: backward runs the whole layer again. keeps_only_input: only its input lives until backward.
    stops_early: torch ends its recomputation when backward has all it needs.
    restores_random_state: a recomputation gets torch's random state of the first run.
    remedy: what to do when the replay of a layer differs.
    """

    name: str
    treat: Callable[[Site], LayerForward]
    is_reentrant: Callable[[CheckpointingConfig, int, bool], bool] | None = None
    refuse: Callable[[CheckpointingConfig, Treated, Setting], list[str]] = lambda *_: []
    needs: Callable[[CheckpointingConfig], list[Need]] = lambda _: []
    unmet: Callable[[CheckpointingConfig, Observed], list[str]] = lambda *_: []
    runs_layer_again: bool = False
    keeps_only_input: bool = False
    stops_early: bool = False
    restores_random_state: bool = True
    remedy: str = "; give such layers another policy (checkpointing=none keeps everything)"

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Tiling:
    """How a layer's MLP is computed, in `count` slices of the tokens; 0: the plan chooses the number.

    `mlp`, and the norms `before` and `after` it that are sliced with it, are modules of the layer; empty: none.
    """

    count: int
    mlp: str = ""
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class LayerDecision:
    """One decoder layer. Layers `first` to `last` are recomputed by one call, of which only the input is kept.

    `offload`: what the layer keeps lives in host memory until its backward. `entry`: the range of
    `checkpointing.layers` that decided; empty: none did. `table`: what the layer keeps, if that was chosen by value.
    `tiling`: of its MLP; None: the MLP is computed whole.
    """

    policy: Policy
    mechanism: Mechanism
    first: int
    last: int
    reentrant: bool
    offload: bool
    entry: str = ""
    table: Table | None = None
    tiling: Tiling | None = None


Treated = Sequence[tuple[LayerDecision, nn.Module]]  # the layers of one mechanism


class Mover(Protocol):
    """Moves a layer's tensors elsewhere until backward. `pack` returns None for one that stays; `move` moves any."""

    def pack(self, tensor: torch.Tensor) -> Any | None: ...

    def move(self, tensor: torch.Tensor, row: int) -> Any: ...

    def unpack(self, handle: Any) -> torch.Tensor: ...

    def edited(self, handle: Any) -> bool: ...


@dataclass
class Setup:
    """What the layers of `model` share while a plan is in place."""

    model: nn.Module
    decisions: Sequence[LayerDecision]
    counts: list[LayerCounters]
    scope: Scope
    cfg: CheckpointingConfig
    zero_stage: int
    tensor_parallel: Any  # the group object that DeepSpeed's partitioning wants
    cleanup: ExitStack
    before_micro_batch: list[Callable[[], None]] = field(default_factory=list)
    compiled: bool = False  # layers run as one graph each
    shared: dict[Any, Any] = field(default_factory=dict)  # what a mechanism makes once for several layers


@dataclass
class Site:
    """One layer, and what its mechanism may use."""

    index: int
    layer: nn.Module
    setup: Setup
    offload: Mover | None
    discarded: Any = None  # set by a mechanism that takes tensors away from autograd (OutputDiscarding)

    @property
    def decision(self) -> LayerDecision:
        return self.setup.decisions[self.index]

    @property
    def counts(self) -> LayerCounters:
        return self.setup.counts[self.index]

    @property
    def name(self) -> str:
        return f"{type(self.layer).__name__} (layer {self.index})"

    def expect_recomputation(self, run: LayerForward) -> LayerForward:
        """Wrap `run` to count one expected recomputation per forward, for all layers that are recomputed together."""
        expecting = self.setup.counts[self.decision.first : self.decision.last + 1]

        def reached() -> None:
            for counts in expecting:
                counts.is_reached()

        def counting(call: Replayable, *args: Any) -> Any:
            output = run(call, *args)
            if tell_of_gradient(output, reached):
                for counts in expecting:
                    counts.expected += 1
            return output

        return counting


@dataclass(frozen=True)
class ObservedLayer:
    """What the first step showed of one layer that ran. Bytes are of the first micro-batch, when its forward ended."""

    decision: LayerDecision
    counts: LayerCounters
    own_bytes: int  # kept by the layer, without what the model hands from it to other layers (shared K/V)
    output_bytes: int  # of the layer's own result
    table_bytes: int  # what its table says that it keeps, without its result
    region_bytes: int  # made in parts of the layer that are recomputed
    region_kept_bytes: int  # and still there, though nothing but the part's result should be
    moved_hidden_bytes: int  # hidden states that were moved to the host and did not leave the device
    moved_input_bytes: int  # the same of what was made before the first layer
    moved_kept_bytes: int  # anything else that was moved and did not leave


Observed = dict[int, ObservedLayer]  # by the layer's index


@dataclass(frozen=True)
class Listed:
    """A list in the options, every entry of which must take effect; `otherwise`: why one may not."""

    option: str
    names: list[str]
    otherwise: str


def find_idle_entries(lists: list[Listed], layers: Observed) -> list[str]:
    """Tell which entries of a mechanism's lists did nothing in any of its `layers`.

    In each range of `checkpointing.layers` at least one entry must have had an effect. A single layer may have nothing
    that a gradient needs.
    """
    found = []
    asked = list(layers)
    for entries in by_range(layers):
        if not any(sum(layers[index].counts.in_effect.values()) for index in entries):
            named = " and ".join(f"{one.option}={one.names}" for one in lists)
            reason = "; ".join(one.otherwise for one in lists if one.names)
            found.append(f"{named}: nothing on the list took effect in layers {spans(entries)}: {reason}")
            asked = [index for index in asked if index not in entries]
    return found + [
        f"{one.option}: {name} did not take effect in layers {spans(asked)}: {one.otherwise}; leave it off the list"
        for one in lists
        for name in one.names
        if asked and not any(layers[index].counts.in_effect.get(name) for index in asked)
    ]


def by_range(layers: Observed) -> list[list[int]]:
    """Group `layers` by the range of `checkpointing.layers` that decided over them."""
    ranges: dict[str, list[int]] = {}
    for index, layer in layers.items():
        ranges.setdefault(layer.decision.entry, []).append(index)
    return list(ranges.values())


def spans(indices: list[int]) -> str:
    """Write indices as ranges: [0, 1, 2, 5] becomes "0-2, 5"."""
    groups: list[list[int]] = []
    for index in indices:
        if groups and index == groups[-1][-1] + 1:
            groups[-1].append(index)
        else:
            groups.append([index])
    return ", ".join(str(g[0]) if len(g) == 1 else f"{g[0]}-{g[-1]}" for g in groups)


def run_as_it_is(call: Replayable, *args: Any) -> Any:
    """Run a layer whose treatment lies elsewhere: around its saved tensors, or in its modules."""
    return call(*args)


KEEP = Mechanism("keep", lambda site: run_as_it_is)
