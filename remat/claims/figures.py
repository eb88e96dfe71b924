"""What a plan says, as the few figures that claims are about."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from remat.config import compose
from remat.planning.plan import Planned, make_plan
from remat.planning.recording import Recordings
from remat.planning.simulation.timeline import LOSS, Snapshot
from remat.planning.simulation.types import Category, Phase

GIB = 1024**3


@dataclass(frozen=True)
class Figures:
    """One run. Sizes in GiB, of one rank where they are on a GPU, of the node where they are in host memory.

    `weights`, `gradients` and `optimizer` are on the GPU after a backward. `layers` and `loss` are the most that a
    micro-batch has inside and outside of the decoder layers, `activations` the most of both at one instant. `peak` is
    what torch calls max_memory_allocated, `gpu` what a GPU must have for it. FLOPs and times (`compute_s` without,
    `again_s` only the recomputation) are of a micro-batch, `step_s` is the whole optimizer step.
    """

    num_params: int
    weights: float
    gradients: float
    optimizer: float
    passing: float  # at the peak: weights that were gathered, gradients and buckets on their way to the host
    layers: float
    loss: float
    activations: float
    peak: float
    peak_at_step: bool
    gpu: float
    gpu_found: float
    host: float
    fits: bool
    forward_flops: int
    again_flops: int
    backward_flops: int
    compute_s: float
    again_s: float
    step_s: float

    @property
    def states(self) -> float:
        """Weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer

    @property
    def again(self) -> float:
        """Recomputed FLOPs, as a share of those without recomputation."""
        return self.again_flops / (self.forward_flops + self.backward_flops)

    @property
    def slower(self) -> float:
        """What recomputation adds to the time of forward and backward, as a share of the time without."""
        return self.again_s / self.compute_s


class Planning:
    """Plans each run once, whichever claims ask for it."""

    def __init__(self) -> None:
        self._found = dict[str, Figures]()
        self._recordings = Recordings()

    def of(self, runs: Mapping[str, str]) -> Runs:
        """The runs of one claim. What was recorded for another is let go: it is large."""
        self._recordings = Recordings()
        return Runs(runs, self)

    def figures(self, overrides: str) -> Figures:
        """Raises ConfigError for a run that cannot be."""
        if overrides not in self._found:
            cfg = compose.compose_run(shlex.split(overrides)).run
            planned = make_plan(cfg, recordings=self._recordings)
            parts = self._recordings.get(cfg, planned.strategy).timeline.parts
            self._found[overrides] = _figures(planned, [part.peak for part in parts])
        return self._found[overrides]


class Runs(Mapping[str, Figures]):
    """The runs of one claim by name, each planned when it is first asked for."""

    def __init__(self, overrides: Mapping[str, str], planning: Planning) -> None:
        self._overrides, self._planning = overrides, planning

    def __getitem__(self, name: str) -> Figures:
        return self._planning.figures(self._overrides[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._overrides)

    def __len__(self) -> int:
        return len(self._overrides)


def saved(before: float, after: float) -> float:
    """The share of `before` that is no longer there."""
    return 1 - after / before


def _figures(planned: Planned, instants: list[Snapshot]) -> Figures:
    plan, time, flops = planned.plan, planned.time, planned.simulation.flops
    gpu, host = plan.resources[0], plan.resources[1]
    passing = (Category.gathered, Category.gradients, Category.buckets)
    accumulation = planned.strategy.ds["gradient_accumulation_steps"]
    return Figures(
        num_params=planned.strategy.facts.num_params,
        weights=plan.states.get(Category.weights, 0) / GIB,
        gradients=plan.states.get(Category.gradients, 0) / GIB,
        optimizer=plan.states.get(Category.optimizer_state, 0) / GIB,
        passing=sum(plan.gpu.get(category, 0) for category in passing) / GIB,
        layers=max(at.total - at.by_kind[LOSS] for at in instants) / GIB,
        loss=max(at.by_kind[LOSS] for at in instants) / GIB,
        activations=max(at.total for at in instants) / GIB,
        peak=plan.peak_bytes / GIB,
        peak_at_step=plan.peak.phase is Phase.step,
        gpu=gpu.needed_bytes / GIB,
        gpu_found=(gpu.found_bytes or 0) / GIB,
        host=host.needed_bytes / GIB,
        fits=plan.fits,
        forward_flops=flops[Phase.forward],
        again_flops=flops[Phase.recompute],
        backward_flops=flops[Phase.backward],
        compute_s=time.compute_s / accumulation,
        again_s=time.recompute_s / accumulation,
        step_s=time.total_s,
    )
