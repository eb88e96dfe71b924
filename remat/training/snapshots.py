"""Memory at five labelled moments of a launch: after load, engine, forward, backward, step. Always taken, once.

The last three are of the first optimizer step: its last forward, last backward, and its update. Reading costs no
synchronisation: the allocator's counters belong to the host.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from remat.machine import distributed
from remat.machine.distributed import World
from remat.report import run_dir
from remat.training.throughput import PhaseTimer

FILE = "snapshots.json"
LABELS = ("load", "engine", "forward", "backward", "step")
OF_PHASE = {"forward": "forward", "backward": "backward", "optimizer": "step"}


@dataclass(frozen=True)
class Snapshot:
    """This rank's memory at one moment. GPU figures are 0 without a GPU and then left out of the file."""

    label: str
    time_unix_s: float
    host_resident_bytes: int
    gpu_allocated_bytes: int = 0
    gpu_reserved_bytes: int = 0


class Snapshots:
    """Takes them in order; a label that comes again replaces the earlier one until `write` has been called."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._process = device, psutil.Process()
        self._taken: dict[str, Snapshot] = {}
        self._timer: PhaseTimer | None = None

    def take(self, label: str) -> None:
        gpu = (0, 0)
        if self._device.type == "cuda":
            gpu = (torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device))
        resident = self._process.memory_info().rss
        self._taken[label] = Snapshot(label, round(time.time(), 3), resident, *gpu)

    def follow(self, timer: PhaseTimer) -> None:
        """Take one at the end of each phase of the first step, until `write`."""
        self._timer = timer
        timer.ended = lambda phase: self.take(OF_PHASE[phase]) if phase in OF_PHASE else None

    def write(self, folder: Path, world: World) -> None:
        """FILE, the largest figures of any rank. Collective; once, after the first step."""
        if self._timer is None:
            return
        self._timer.ended = None
        self._timer = None
        every = distributed.gather([asdict(self._taken[name]) for name in LABELS if name in self._taken])
        if world.is_main:
            run_dir.write_json(folder / FILE, {"ranks": world.size, "snapshots": highest(every)})


def highest(every: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """Of the ranks' lists, one list: each figure's largest value; what is 0 on all ranks (no GPU) is left out."""
    found = []
    for moment in zip(*every, strict=True):
        sizes = {key: max(rank[key] for rank in moment) for key in moment[0] if key.endswith("_bytes")}
        kept = {key: size for key, size in sizes.items() if size}
        found.append({"label": moment[0]["label"], "time_unix_s": moment[0]["time_unix_s"]} | kept)
    return found
