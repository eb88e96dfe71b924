"""Hold a run that is ready to train: everything that `build` made and the loop uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from remat.activation_checkpointing.apply import Applied
from remat.config.options import RunConfig
from remat.data.batches import ReadAhead
from remat.data.blocks import Blocks
from remat.data.cache import Splits
from remat.machine import distributed
from remat.machine.distributed import World
from remat.machine.memory import MemoryMonitor
from remat.model import hf_model, loss, packing
from remat.model.hf_model import Loaded
from remat.parallel.pipeline_parallel import PipelineParallel
from remat.parallel.sequence_parallel import SequenceParallel
from remat.planning.launch_plan import LaunchPlan
from remat.planning.strategy import Strategy
from remat.report.console import Console
from remat.report.run_dir import Ownership
from remat.report.tracking import Tracker
from remat.saving.save import PendingSave
from remat.training.profiling import Profiler, Snapshots
from remat.training.stopping import StopVote
from remat.training.throughput import PhaseTimer, Window
from remat.training.watchdog import Watchdog


@dataclass
class Saves:
    """The saves of a launch. At most one background save is pending at a time."""

    last: int = -1  # the step of the newest state, complete or pending
    begun: int = 0  # background saves that this launch began
    trial_due: bool = False  # a trial save and export is due after the next applied step
    pending: PendingSave | None = None

    @property
    def flushed(self) -> int:
        """Return how many background saves this rank has flushed its part of."""
        waiting = self.pending is not None and not self.pending.flushed
        return self.begun - waiting


@dataclass
class Progress:
    """The counters that a resumed run needs; every saved state has them."""

    step: int = 0
    tokens_seen: int = 0
    tokens_trained: int = 0
    positions: int = 0  # tokens seen, and padding
    seen_of: dict[str, int] = field(default_factory=dict)  # tokens seen of each source of a mixture
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    best_loss: float | None = None  # the lowest held-out loss after a step
    best_step: int = 0
    evals_since_best: int = 0
    to_evaluate: bool = False  # a stop came before or during the evaluation of this step


@dataclass(frozen=True)
class RunState:
    """The part of a saved state that is plain data: counters, losses, data position, the id of the W&B run."""

    progress: Progress
    losses: dict[str, Any] | None  # `LossWindow.state()`; None in older states
    data: dict[str, Any]  # `GlobalBatches.state()`
    data_key: str  # `Splits.key` of the data that the position is in
    wandb_run_id: str | None

    def record(self) -> dict[str, Any]:
        """Return plain JSON data, the manifest's `client_state`."""
        own = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "progress"}
        return asdict(self.progress) | own

    @classmethod
    def read(cls, client_state: Mapping[str, Any]) -> RunState:
        """Return the state that `record` wrote, or an older version of it."""
        counters = {item.name for item in fields(Progress)}
        progress = Progress(**{name: value for name, value in client_state.items() if name in counters})
        progress.positions = progress.positions or progress.tokens_seen  # older states had text alone, unpadded
        return cls(
            progress,
            client_state.get("losses"),
            client_state["data"],
            client_state["data_key"],
            client_state["wandb_run_id"],
        )


@dataclass
class Run:
    """A run ready to train. Its counters are in `Progress`, its data position in `batches`."""

    cfg: RunConfig
    strategy: Strategy
    plan: LaunchPlan
    world: World
    console: Console
    folder: Path
    ownership: Ownership
    engine: Any
    token_loss: Any  # loss.TokenLoss; None on a stage without the output layer
    losses: loss.LossWindow
    batches: ReadAhead
    splits: Splits
    padding_share: float  # of the positions of the first epoch
    applied: Applied
    tracker: Tracker
    stop: StopVote
    watchdog: Watchdog
    memory: MemoryMonitor
    snapshots: Snapshots
    profiler: Profiler
    timer: PhaseTimer
    window: Window
    tokenizer: PreTrainedTokenizerBase
    resumed: RunState | None
    swap_folder: Path | None
    sequence: SequenceParallel | None  # divides each sequence over ranks; None: sequences are whole
    pipeline: PipelineParallel | None  # the stage of this rank; None: it has all layers
    loaded: list[Loaded]  # how each rank read pretrained weights; [] where none were read
    saves: Saves = field(default_factory=Saves)
    peaks: dict[str, float] = field(default_factory=dict)  # memory maxima over the run

    @property
    def record_folder(self) -> Path:
        """Return the folder of this launch's own records. A resume does not overwrite those of the first launch."""
        step = self.resumed_step
        return self.folder if step is None else self.folder / f"resumed-at-{step:06d}"

    @property
    def resumed_step(self) -> int | None:
        """Return the step of the saved state that this launch went on from; None: it began the run."""
        return None if self.resumed is None else self.resumed.progress.step

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps of the whole run; with `train.epochs` it follows from the data."""
        assert self.cfg.train.steps is not None, "the data is open, so the steps are known"
        return self.cfg.train.steps

    @property
    def held_out(self) -> Blocks | None:
        return self.splits.held_out

    def inputs(self, micro_batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Return this rank's part of a micro-batch on the device, with what the model needs to keep documents apart."""
        packed, device = self.strategy.packed, self.world.device
        if self.sequence is not None:
            return self.sequence.inputs(micro_batch, device)
        ends = packing.ends(packed, self.cfg.model.attention, micro_batch)
        found = {
            name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for name, value in (micro_batch | ends).items()
        }
        return packing.given(packed, found, hf_model.model_of(self.engine.module))

    def take_memory_peaks(self) -> dict[str, float]:
        """Return memory figures since the last call, over all ranks; keep the maxima for the final table. Collective.

        Each call starts a new peak.
        """
        metrics = distributed.max_min(self.memory.sample(), self.world.device)
        for name, value in metrics.items():
            self.peaks[name] = max(value, self.peaks.get(name, value))
        self.memory.reset_peak()
        return metrics
