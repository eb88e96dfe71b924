"""Measure where a step's time goes, and tokens and FLOPs per second.

No step waits for the GPU: phases are bracketed by CUDA events, which are read when a row is logged. That read
is the only synchronisation here, besides one after the first step and two around each excluded interval.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch.profiler import record_function

from remat.config.metrics import (
    HFU,
    MFU,
    STEP_S,
    TFLOPS_PER_GPU,
    TOKENS_PER_S,
    TOKENS_PER_S_PER_GPU,
    TRAINED_TOKENS_PER_S,
    phase_s,
)

PHASES = ("data", "forward", "backward", "optimizer")
MAX_PAIRS = 4096  # CUDA event pairs held between rows; beyond it, finished ones are read early

FORMULAS = (  # for env.json: figures can be compared only by their definitions
    "tokens_per_s = tokens of all ranks (padding excluded) / wall time; trained_tokens_per_s counts the tokens that "
    "enter the loss; tflops_per_gpu = model FLOPs per token * tokens_per_s / ranks / 1e12, those of padding left out "
    "and attention counted within the documents that are kept apart; mfu = tflops_per_gpu / "
    "peak dense TFLOP/s of the GPU, without recomputation; hfu = the same with recomputed FLOPs added; wall time "
    "runs from step end to step end without evaluation and saving"
)


class PhaseTimer:
    """A timer that sums the four phases of a step: `with timer.phase("forward"): ...`, as often as a step needs.

    On a GPU a phase lasts from the moment the GPU reaches its beginning to the moment it reaches its end, so
    work of the host counts exactly as far as the GPU waits for it. Phases do not nest: their sum is at most the
    step.
    """

    def __init__(self, device: torch.device) -> None:
        clock = _CudaClock() if device.type == "cuda" else _HostClock()
        self._clock = clock
        self._phases = {name: _Phase(name, clock, self) for name in PHASES}
        self.last = PHASES[0]  # the phase that was entered last
        self.named = False  # whether each phase is a range of torch's profiler
        self.ended: Callable[[str], object] | None = None  # called at the end of each phase

    def phase(self, name: str) -> _Phase:
        """Return the context of one of PHASES. Raises KeyError for any other name."""
        self.last = name
        return self._phases[name]

    def window(self) -> dict[str, float]:
        """Return the seconds of each of PHASES since the last call. Waits for the GPU."""
        return self._clock.read()


class Window:
    """Counter of time, steps and tokens between two logged rows, and over the run.

    Token counts are of one optimizer step over all ranks. FLOPs per token are of the whole model, forward and
    backward: `model_flops_per_token` without recomputation, `hardware_flops_per_token` with what every policy
    recomputes. `recomputes` adds what this policy recomputes, a share of `layers_forward_flops_per_token`. Without
    these figures, or without `peak_tflops` (dense TFLOP/s of one GPU at the run's precision), tflops, mfu and
    hfu are left out.
    """

    def __init__(
        self,
        timer: PhaseTimer,
        *,
        device: torch.device,
        world_size: int,
        model_flops_per_token: float | None = None,
        hardware_flops_per_token: float | None = None,
        layers_forward_flops_per_token: float = 0.0,
        peak_tflops: float | None = None,
    ) -> None:
        self._timer = timer
        self._device = device
        self._world_size = world_size
        self._model_flops = model_flops_per_token
        self._hardware_flops = hardware_flops_per_token
        self._layers_forward_flops = layers_forward_flops_per_token
        self._peak_tflops = peak_tflops
        self._new, self._row, self._run = _Totals(), _Totals(), _Totals()
        self._warm = False
        self._since = perf_counter()

    def start(self) -> None:
        """Start the clock now, right before a step. Forgets what was timed since the last row."""
        self._timer.window()
        self._wait()
        self._since = perf_counter()

    def recomputes(self, share: float) -> None:
        """Note that `share` of the layers' forward FLOPs runs again in backward."""
        if self._hardware_flops is not None:
            self._hardware_flops += share * self._layers_forward_flops

    def step_end(self, tokens_seen: int, tokens_trained: int) -> None:
        """Count one optimizer step."""
        self._new.steps += 1
        self._new.seen += tokens_seen
        self._new.trained += tokens_trained
        if not self._warm:
            self._collect()
            self._run = _Totals()
            self._warm = True

    def close(self) -> dict[str, float]:
        """Return means over the steps since the last call, under the metric names; {} when there was no step."""
        self._collect()
        row, self._row = self._row, _Totals()
        return self._metrics(row)

    def summary(self) -> dict[str, float]:
        """Return the same means over the whole run without its first step.

        The first step pays for compilation and first allocations.
        """
        self._collect()
        return self._metrics(self._run)

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Leave evaluation, saving and the like out of step time. Waits for the GPU at both ends."""
        self._collect()
        try:
            yield
        finally:
            self.start()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _collect(self) -> None:
        """Move time and tokens since the last collection into the row and into the run."""
        self._new.phases = self._timer.window()
        self._wait()
        now = perf_counter()
        self._new.wall_s, self._since = now - self._since, now
        self._row.add(self._new)
        self._run.add(self._new)
        self._new = _Totals()

    def _metrics(self, totals: _Totals) -> dict[str, float]:
        if totals.steps == 0:
            return {}
        tokens_per_s = totals.seen / totals.wall_s
        per_gpu = tokens_per_s / self._world_size
        figures = {STEP_S: totals.wall_s / totals.steps}
        figures |= {phase_s(name): seconds / totals.steps for name, seconds in totals.phases.items()}
        figures[TOKENS_PER_S] = tokens_per_s
        figures[TOKENS_PER_S_PER_GPU] = per_gpu
        figures[TRAINED_TOKENS_PER_S] = totals.trained / totals.wall_s
        if self._model_flops:
            figures[TFLOPS_PER_GPU] = self._model_flops * per_gpu / 1e12
        if self._model_flops and self._peak_tflops:
            figures[MFU] = figures[TFLOPS_PER_GPU] / self._peak_tflops
        if self._peak_tflops and self._hardware_flops:
            figures[HFU] = self._hardware_flops * per_gpu / 1e12 / self._peak_tflops
        return figures


@dataclass
class _Totals:
    steps: int = 0
    seen: int = 0
    trained: int = 0
    wall_s: float = 0.0
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def add(self, other: _Totals) -> None:
        self.steps += other.steps
        self.seen += other.seen
        self.trained += other.trained
        self.wall_s += other.wall_s
        for name, seconds in other.phases.items():
            self.phases[name] += seconds


class _Phase:
    """Context manager of one phase. A class, because it is entered thousands of times and a generator costs more."""

    __slots__ = ("_clock", "_name", "_range", "_timer")

    def __init__(self, name: str, clock: _HostClock | _CudaClock, timer: PhaseTimer) -> None:
        self._name = name
        self._clock = clock
        self._timer = timer
        self._range: record_function | None = None

    def __enter__(self) -> None:
        if self._timer.named:
            self._range = record_function(f"remat/{self._name}")
            self._range.__enter__()
        self._clock.begin(self._name)

    def __exit__(self, *_: object) -> None:
        self._clock.end()
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if self._timer.ended is not None:
            self._timer.ended(self._name)


class _HostClock:
    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._name = ""
        self._since = 0.0

    def begin(self, name: str) -> None:
        if self._name:
            raise RuntimeError(f"phase {name} inside phase {self._name}: time would count twice")
        self._name = name
        self._since = perf_counter()

    def end(self) -> None:
        self._seconds[self._name] += perf_counter() - self._since
        self._name = ""

    def read(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return seconds


class _CudaClock:
    """Event pairs in the order recorded. Events are reused because making one costs more than recording it."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._pairs: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._idle: list[torch.cuda.Event] = []
        self._name = ""
        self._begun: torch.cuda.Event | None = None

    def begin(self, name: str) -> None:
        if self._name:
            raise RuntimeError(f"phase {name} inside phase {self._name}: time would count twice")
        self._name, self._begun = name, self._record()

    def end(self) -> None:
        assert self._begun is not None
        self._pairs.append((self._name, self._begun, self._record()))
        self._name, self._begun = "", None
        while len(self._pairs) > MAX_PAIRS and self._pairs[0][2].query():
            self._settle()

    def read(self) -> dict[str, float]:
        while self._pairs:
            self._pairs[0][2].synchronize()
            self._settle()
        seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return seconds

    def _record(self) -> torch.cuda.Event:
        event = self._idle.pop() if self._idle else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _settle(self) -> None:
        name, begun, ended = self._pairs.popleft()
        self._seconds[name] += begun.elapsed_time(ended) / 1000
        self._idle += (begun, ended)
