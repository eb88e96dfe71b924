"""Make the run directory: one folder per run, made by rank 0 and shared by all ranks. Other tools rely on its layout.

One launch owns it. Meanwhile no other launch resumes from its saved states, deletes unfinished ones or writes its
record. Commands that only read (`remat report`, `remat export`) need not own it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remat.config import paths
from remat.config.metrics import read_rows
from remat.config.options import ConfigError
from remat.config.redact import redact
from remat.launch import exit_codes, retreat
from remat.machine import distributed
from remat.machine.allocator import VARIABLES
from remat.machine.owner_lock import STALE_S, Holder, OwnerLock, holder_of

OWNER = "owner.json"  # in the run directory, while a launch owns it


class Ownership:
    """The run directory that this launch owns, if any. Rank 0 holds the lock for all ranks."""

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        self._say = say
        self._lock: OwnerLock | None = None
        self.made: list[Path] = []  # folders that this launch made, the run's own first

    def take(self, folder: Path) -> None:
        """Own `folder` and give up any other; a folder that does not exist is not owned. Collective.

        Raises ConfigError on every rank when another launch owns it, naming that launch.
        """
        problem = None
        if distributed.rank_from_env() == 0:
            self.release()
            problem = self._take(folder)
        problem = distributed.broadcast(problem)
        if problem:
            raise ConfigError(problem)

    def release(self) -> None:
        """Give up the folder. Every end of a launch calls this, also from another thread. Raises nothing."""
        if self._lock is not None:
            self._lock.release()

    def remove_unused(self) -> None:
        """Remove the empty folders that this launch made, so that a refused run leaves nothing behind."""
        with contextlib.suppress(OSError):
            for folder in self.made:
                folder.rmdir()

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
    """End this process at once: another launch took it for dead and continues its run.

    It must write nothing more.
    """
    text = (
        f"{folder} now belongs to {holder.in_words()}: this launch gave no sign for {STALE_S:.0f} s, as when its node "
        "is suspended, and was taken for dead. It ends, without saving"
    )
    os.write(2, f"\nremat: {text}\n\n".encode())
    os._exit(exit_codes.FAILED)


def open_run_dir(
    output_dir: str, name: str, run_id: str | None, existing: Path | None, ownership: Ownership
) -> Path:
    """Return the run's folder on every rank, owned by this launch. Collective.

    `existing` is the folder of a resumed run, which this launch owns already. Raises ConfigError on all ranks when the
    folder of a new run exists.
    """
    if existing is not None:
        return existing
    folder, problem = None, None
    if distributed.rank_from_env() == 0:
        recipe = paths.expand(output_dir) / name
        try:
            folder = _new_folder(recipe, run_id, ownership.made)
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


def _new_folder(recipe: Path, run_id: str | None, made: list[Path]) -> Path:
    """Make the run's folder and add every folder that is new to `made`.

    Without a run_id the folder is named after the launch time, with a suffix when another launch has the same.
    """
    above = [folder for folder in (recipe, *recipe.parents) if not folder.exists()]
    names = (
        [run_id] if run_id else [f"{_launch_time()}{more}" for more in ("", *(f"-{n}" for n in range(2, 100)))]
    )
    for name in names:
        with contextlib.suppress(FileExistsError):
            (recipe / name).mkdir(parents=True)
            made += [recipe / name, *above]
            return recipe / name
    raise FileExistsError(recipe / names[-1])


def retreats(run_dir: Path) -> list[dict[str, Any]]:
    """Return each restart of a run with less memory: `time_unix_s`, `why`, `overrides`."""
    file = run_dir / retreat.RECORD
    return read_rows(file) if file.exists() else []


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically, with secrets removed."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(redact(content), indent=2, default=str) + "\n")
    part.replace(path)


def environment(world: distributed.World, formulas: str) -> dict[str, Any]:
    """Return versions, hardware and formulas, which are needed to interpret a figure."""
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
        "allocator": next((os.environ[name] for name in VARIABLES if name in os.environ), None),
        "command": sys.argv,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "formulas": formulas,
    }


def _launch_time() -> str:
    return datetime.datetime.now().strftime("%Y%m%d-%H%M%S")


def cpu_name() -> str:
    """Return the CPU's name from the kernel."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def commit() -> str | None:
    """Return the commit of this checkout, with -dirty when files differ; outside git, REMAT_COMMIT or None."""
    root = Path(__file__).resolve().parents[2]
    found = ""
    if (root / ".git").exists():  # else remat is installed: a repository around it is not remat's
        command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        with contextlib.suppress(OSError):  # git is not installed
            found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout
    return found.strip() or os.environ.get("REMAT_COMMIT")
