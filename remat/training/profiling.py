"""Profile a few steps (`profile=memory|trace|summary`), and take five labelled memory snapshots of every launch.

torch's tools write to RUN_DIR/profile on each rank: the allocator's history (`torch.cuda.memory`, for
memory_viz), and `torch.profiler`, for a Chrome trace or for tables. None of them changes what is computed.
Times of profiled steps are not those of other steps. The snapshots are taken after load, after the engine is
built, and after the last forward, last backward and update of the first optimizer step. Taking them costs no
synchronisation.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.profiler import ProfilerActivity

from remat.config.options import ConfigError, ProfileConfig
from remat.machine import distributed, memory
from remat.machine.distributed import World
from remat.report import run_dir
from remat.training.throughput import PhaseTimer, Window

FILE = "snapshots.json"
LABELS = ("load", "engine", "forward", "backward", "step")
OF_PHASE = {"forward": "forward", "backward": "backward", "optimizer": "step"}

log = logging.getLogger(__name__)

MAX_ENTRIES = 200_000  # allocations and frees in the history; the oldest are dropped
TOP = 40  # rows of a table
FOLDER = "profile"


def check(cfg: ProfileConfig, device: torch.device) -> None:
    """Raise ConfigError when this machine lacks a tool that `cfg` asks for."""
    if cfg.memory and device.type != "cuda":
        raise ConfigError(
            "profile.memory=true: the allocator's history exists on a GPU only, and torch sees none; "
            "profile=summary counts what operations take on a CPU too"
        )
    if cfg.nvml_interval_s:
        memory.find_nvml(device)


class Profiler:
    """The tools that `cfg` asks for, around steps of this launch. Does nothing when it asks for none."""

    def __init__(
        self,
        cfg: ProfileConfig,
        run_dir: Path,
        timer: PhaseTimer,
        window: Window,
        device: torch.device,
        rank: int,
    ) -> None:
        self._cfg, self._folder, self._timer, self._window = cfg, run_dir / FOLDER, timer, window
        self._device, self._rank = device, rank
        self._steps = 0
        self._profiler: Any = None
        self._sampler: memory.NvmlSampler | None = None
        self._wanted = cfg.memory or cfg.trace or cfg.summary
        if self._wanted:
            self._folder.mkdir(exist_ok=True)
        if cfg.nvml_interval_s:
            path = self._folder / f"nvml-rank-{rank}.jsonl"
            self._sampler = memory.NvmlSampler(path, memory.find_nvml(device), cfg.nvml_interval_s)
        if cfg.memory:
            _record(True)  # from the start, so that running out of memory early is explained too

    def step_begins(self) -> None:
        """Start the tools before the first of the chosen steps. Call it before each optimizer step."""
        if self._wanted and self._steps == self._cfg.after:
            with self._window.excluded():
                self._begin()

    def step_ended(self) -> None:
        """Write the results after the last of the chosen steps. Call it after each optimizer step.

        The time this takes is left out of step times.
        """
        self._steps += 1
        if self._wanted and self._steps == self._cfg.after + self._cfg.steps:
            with self._window.excluded():
                self._end()

    def out_of_memory(self) -> Path | None:
        """Write the history up to the failure and return its path.

        None when `profile.memory` is off or the history cannot be written.
        """
        if not self._cfg.memory:
            return None
        path = self._path("out-of-memory", "pickle")
        try:
            torch.cuda.memory._dump_snapshot(str(path))
        except Exception as error:  # raising it would hide why the run failed
            log.warning("no memory snapshot: %s: %s", type(error).__name__, error)
            return None
        return path

    def close(self) -> None:
        """End the tools that are still on: the run was shorter than the chosen steps, or failed in one."""
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)
            self._profiler = None
        self._timer.named = False
        if self._cfg.memory:
            _record(False)
        if self._sampler is not None:
            self._sampler.close()

    def _begin(self) -> None:
        if self._cfg.memory:
            _record(False)  # forget what came before the chosen steps
            _record(True)
        if self._cfg.trace or self._cfg.summary:
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(
                activities=activities, record_shapes=True, profile_memory=True, acc_events=True
            )
            self._profiler.__enter__()
            self._timer.named = True

    def _end(self) -> None:
        self._timer.named = False
        if self._profiler is not None:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            finished, self._profiler = self._profiler, None
            finished.__exit__(None, None, None)
            if self._cfg.trace:
                finished.export_chrome_trace(str(self._path("trace", "json.gz")))
            if self._cfg.summary:
                self._path("summary", "txt").write_text(self._tables(finished), encoding="utf-8")
        if self._cfg.memory:
            torch.cuda.memory._dump_snapshot(str(self._path("memory", "pickle")))

    def _tables(self, finished: Any) -> str:
        """Return tables by memory and by time, and the allocator's own summary on a GPU."""
        on_gpu = self._device.type == "cuda"
        place = "device" if on_gpu else "cpu"
        averages = finished.key_averages()
        parts = [
            f"Steps {self._cfg.after + 1} to {self._cfg.after + self._cfg.steps} of this launch, rank {self._rank}.",
            f"By memory that an operation itself takes ({place}):",
            averages.table(sort_by=f"self_{place}_memory_usage", row_limit=TOP),
            f"By time that an operation itself takes ({place}):",
            averages.table(sort_by=f"self_{place}_time_total", row_limit=TOP),
        ]
        if on_gpu:
            parts += ["The allocator:", torch.cuda.memory_summary(self._device)]
        return "\n\n".join(parts) + "\n"

    def _path(self, what: str, ending: str) -> Path:
        return self._folder / f"{what}-rank-{self._rank}.{ending}"


def _record(on: bool) -> None:
    if on:
        torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES)
    else:
        torch.cuda.memory._record_memory_history(enabled=None)


class Snapshots:
    """Snapshots of this rank's memory by label. A label that comes again replaces the earlier one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._taken: dict[str, dict[str, Any]] = {}

    def take(self, label: str) -> None:
        found = {
            "label": label,
            "time_unix_s": round(time.time(), 3),
            "host_resident_bytes": psutil.Process().memory_info().rss,
        }
        if self._device.type == "cuda":
            found["gpu_allocated_bytes"] = torch.cuda.memory_allocated(self._device)
            found["gpu_reserved_bytes"] = torch.cuda.memory_reserved(self._device)
        self._taken[label] = found

    def follow(self, timer: PhaseTimer) -> None:
        """Take a snapshot at the end of each phase of the first step, until `write`."""
        timer.ended = lambda phase: self.take(OF_PHASE[phase]) if phase in OF_PHASE else None

    def write(self, timer: PhaseTimer, folder: Path, world: World) -> None:
        """Follow `timer` no more, and write the largest figures of any rank to FILE. Collective."""
        timer.ended = None
        every = distributed.gather([self._taken[name] for name in LABELS if name in self._taken])
        if world.is_main:
            run_dir.write_json(folder / FILE, {"ranks": world.size, "snapshots": highest(every)})


def highest(every: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """Return each figure's largest value over the ranks' lists; figures that are 0 on all are left out."""
    found = []
    for moment in zip(*every, strict=True):
        sizes = {key: max(rank[key] for rank in moment) for key in moment[0] if key.endswith("_bytes")}
        kept = {key: size for key, size in sizes.items() if size}
        found.append({"label": moment[0]["label"], "time_unix_s": moment[0]["time_unix_s"]} | kept)
    return found
