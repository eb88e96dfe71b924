"""The run directory: one folder per run, made by rank 0, the same for all ranks. Its layout is a contract."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from remat import distributed
from remat.config import ConfigError
from remat.redact import redact


def open_run_dir(output_dir: str, name: str, run_id: str | None, *, existing: Path | None) -> Path:
    """The run's folder on every rank; `existing` when a run is resumed.

    Raises ConfigError on all ranks when a new run's folder is there already.
    """
    if existing is not None:
        return existing
    folder, problem = None, None
    if distributed.rank_from_env() == 0:
        folder = Path(output_dir).expanduser() / name / (run_id or _launch_time())
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            problem = (
                f"run_id={run_id}: {folder} exists; continue it with resume=auto, or choose another run_id"
            )
        except OSError as error:
            problem = f"output_dir={output_dir}: cannot make {folder} ({error.strerror}); choose another folder"
    folder, problem = distributed.broadcast((folder, problem))
    if problem:
        raise ConfigError(problem)
    assert folder is not None
    return folder


def write_json(path: Path, content: Any) -> None:
    """Write whole or not at all, without secrets."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(redact(content), indent=2, sort_keys=False, default=str) + "\n")
    part.replace(path)


def environment(world: distributed.World, formulas: str) -> dict[str, Any]:
    """Versions, hardware and formulas: what a figure needs beside it to mean anything."""
    import deepspeed
    import torch
    import transformers

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "world_size": world.size,
        "ranks_per_node": world.local_size,
        "commit": commit(),
        "command": sys.argv,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "formulas": formulas,
    }


def _launch_time() -> str:
    return datetime.datetime.now().strftime("%Y%m%d-%H%M%S")


def cpu_name() -> str:
    """As the kernel names it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def commit() -> str | None:
    """The commit of this checkout, with -dirty when files differ; REMAT_COMMIT or None outside git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=Path(__file__).resolve().parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # there is no git
        return os.environ.get("REMAT_COMMIT")
    return done.stdout.strip() or os.environ.get("REMAT_COMMIT")
