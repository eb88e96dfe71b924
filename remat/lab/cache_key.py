"""Compute the cache key of a launch's result from the composed configuration, the code that runs it and the machine."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from remat.config import command_line, compose, paths
from remat.config.units import GIB
from remat.machine.host_memory import host_memory
from remat.machine.start_up import available_cores
from remat.report import run_dir

FORMAT = 3  # version of stored results: raise it when what is measured changes
PACKAGE = Path(__file__).resolve().parent.parent
LIBRARIES = ("torch", "deepspeed", "transformers", "peft")


@dataclass(frozen=True)
class Place:
    """The properties of the machine that figures depend on. `device` is where a rank computes: cpu or cuda."""

    device: str
    hardware: dict[str, Any]


def here(ranks: int) -> Place:
    """Return this machine, with the threads that each rank will have."""
    gpus = torch.cuda.device_count() if os.environ.get("DS_ACCELERATOR") != "cpu" else 0
    hardware: dict[str, Any] = {
        "cpu": run_dir.cpu_name(),
        "cores": os.cpu_count(),
        "host_memory_gib": round(host_memory().limit_bytes / GIB, 1),
        "threads_per_rank": threads(ranks),
        "gpu": torch.cuda.get_device_name() if gpus else None,
        "gpus": gpus,
    }
    return Place("cuda" if gpus else "cpu", hardware)


def threads(ranks: int) -> int:
    """Return the threads of each rank on a CPU: OMP_NUM_THREADS, or its share of the available cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(asked) if asked.isdigit() and int(asked) else max(1, available_cores() // ranks)


def key(words: Sequence[str], ranks: int, place: Place) -> str:
    """Return the cache key of a launch. Launches with the same key share one result.

    The contents of the small files that a run names are part of it, those of data and weights are not, nor are the
    run's name and output folder. Raises ConfigError for invalid arguments.
    """
    asked = command_line.parse(list(words))
    made = compose.compose_run(asked.overrides, asked.config_dirs)
    cfg = made.run
    named = (cfg.deepspeed.config, cfg.checkpointing.table, cfg.data.chat_template)
    content = {
        "format": FORMAT,
        "config": made.yaml,
        "files": [paths.expand(name).read_text() for name in named if name and paths.expand(name).is_file()],
        "ranks": ranks,
        "code": code(),
        "device": place.device,
        "hardware": place.hardware,
        "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@cache
def code() -> str:
    """Return a digest of the source that a launch runs, uncommitted changes included.

    The files of remat/lab are left out: they only compare and draw.
    """
    digest = hashlib.sha256()
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE / "lab"]
    for path in [*files, *sorted(compose.DS_CONFIG_DIR.glob("*.json"))]:
        digest.update(f"{path.relative_to(PACKAGE.parent)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
