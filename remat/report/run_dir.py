"""The run directory: one folder per run, made by rank 0, the same for all ranks. Its layout is a contract.

One launch owns it: no other reads its saved states to go on from them, deletes what is unfinished or writes its
record meanwhile. Whoever only reads (`remat report`, `remat export`) needs not own it.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remat.config.options import ConfigError
from remat.config.redact import redact
from remat.machine import distributed
from remat.machine.owner_lock import STALE_S, Holder, OwnerLock, holder_of

OWNER = "owner.json"  # in the run directory, while a launch owns it
EXIT_FAILED = 70


class Ownership:
    """The run directory that this launch owns, if any. Rank 0 holds the lock, for all ranks."""

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        self._say = say
        self._lock: OwnerLock | None = None

    def take(self, folder: Path) -> None:
        """Own `folder`, and no other any more; one that is not there is not owned. Collective.

        Raises ConfigError on every rank when another launch owns it, naming that.
        """
        problem = None
        if distributed.rank_from_env() == 0:
            self.release()
            problem = self._take(folder)
        problem = distributed.broadcast(problem)
        if problem:
            raise ConfigError(problem)

    def release(self) -> None:
        """For every end of a launch, also from another thread. Raises nothing."""
        if self._lock is not None:
            self._lock.release()

    def _take(self, folder: Path) -> str | None:
        if not folder.is_dir():
            return None
        lock = OwnerLock(folder / OWNER, on_lost=lambda holder: _end(folder, holder))
        try:
            holder = lock.take(self._say)
        except OSError as error:
            return (
                f"{folder}: cannot be owned ({error}): a run writes there, make it writable or choose another"
            )
        if holder is None:
            self._lock = lock
            return None
        return (
            f"{folder} belongs to {holder.in_words()}: one launch at a time may continue a run. Wait for its end, stop "
            f"it (touch {folder}/stop saves and stops it), or choose another run_id. If it is gone, start again: on "
            f"its own host that is seen at once, elsewhere once {OWNER} has not changed for {STALE_S:.0f} s"
        )


def _end(folder: Path, holder: Holder) -> None:
    """Nothing more is written by a launch that was taken for dead, for another has gone on with its run."""
    text = (
        f"{folder} now belongs to {holder.in_words()}: this launch gave no sign for {STALE_S:.0f} s, as when its node "
        "is suspended, and was taken for dead. It ends, without saving"
    )
    os.write(2, f"\nremat: {text}\n\n".encode())
    os._exit(EXIT_FAILED)


def open_run_dir(
    output_dir: str, name: str, run_id: str | None, existing: Path | None, ownership: Ownership
) -> Path:
    """The run's folder on every rank, owned; `existing` when a run is resumed, which is owned already. Collective.

    Raises ConfigError on all ranks when a new run's folder is there already.
    """
    if existing is not None:
        return existing
    folder, problem = None, None
    if distributed.rank_from_env() == 0:
        recipe = Path(output_dir).expanduser() / name
        try:
            folder = _new_folder(recipe, run_id)
        except FileExistsError:
            folder = recipe / str(run_id)
            holder = holder_of(folder / OWNER)
            problem = f"run_id={run_id}: {folder} exists" + (
                f" and belongs to {holder.in_words()}; choose another run_id, or continue it once that has ended"
                if holder
                else "; continue it with resume=auto, or choose another run_id"
            )
        except OSError as error:
            problem = (
                f"output_dir={output_dir}: cannot make {recipe}/... ({error.strerror}); choose another folder"
            )
    folder, problem = distributed.broadcast((folder, problem))
    if problem:
        raise ConfigError(problem)
    assert folder is not None
    ownership.take(folder)
    return folder


def _new_folder(recipe: Path, run_id: str | None) -> Path:
    """Made by this process. Without a run_id it is named after the launch time, which another may share."""
    names = (
        [run_id] if run_id else [f"{_launch_time()}{more}" for more in ("", *(f"-{n}" for n in range(2, 100)))]
    )
    for number, name in enumerate(names, 1):
        try:
            (recipe / name).mkdir(parents=True)
            return recipe / name
        except FileExistsError:
            if number == len(names):
                raise
    raise AssertionError("there is always a name")


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
