"""Where DeepSpeed swaps to on NVMe: a folder of this launch alone, for DeepSpeed cleans nothing and never asks.

NVME_PATH/remat-NAME-RUN_ID-IDENTITY/LAUNCH-RANK: one folder per run directory, one in it per launch and node. The
identity tells apart runs of one name in several output folders. Whoever owns the run directory knows that every other
launch of the run has ended, so their folders are removed; those of other runs are never touched.
"""

from __future__ import annotations

import hashlib
import shutil
import uuid
from pathlib import Path
from typing import Any

from remat.config.options import ConfigError
from remat.machine import distributed
from remat.machine.distributed import World


def own_folder(rendered: dict[str, Any], run_dir: Path, world: World) -> Path | None:
    """Give NVMe offload in DeepSpeed's config a fresh folder of this launch and node; None without. Collective.

    `run_dir` is owned by this launch. Raises ConfigError on every rank when a node cannot make its folder.
    """
    sections = [rendered["zero_optimization"].get(name) for name in ("offload_optimizer", "offload_param")]
    swapping = [section for section in sections if section and section["device"] == "nvme"]
    if not swapping:
        return None
    mine = (_identity(run_dir), uuid.uuid4().hex[:8]) if world.is_main else None
    identity, launch = distributed.broadcast(mine)
    of_run = Path(swapping[0]["nvme_path"]).expanduser() / identity
    own = of_run / f"{launch}-{world.rank - world.local_rank:05d}"  # the node's first rank
    problem = None
    if world.local_rank == 0:
        try:
            _remove_others(of_run, launch)
            own.mkdir(parents=True)
        except OSError as error:
            problem = (
                f"hardware.nvme_path={of_run.parent}: cannot make {own} on rank {world.rank} ({error.strerror})"
            )
    problems = [text for text in distributed.gather(problem) if text]
    if problems:
        raise ConfigError("\n".join(problems))
    for section in swapping:
        section["nvme_path"] = str(own)
    return own


def remove(folder: Path | None, world: World) -> None:
    """What this node swapped to `folder`, if anything; after the last read. Raises nothing."""
    if folder is None or world.local_rank != 0:
        return
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.rmdir()
    except OSError:  # another node of this launch shares the disk and is not done
        return


def _identity(run_dir: Path) -> str:
    """A name of the run directory: readable, and of this one alone."""
    found = run_dir.resolve()
    digest = hashlib.sha256(f"{found} {found.stat().st_ino}".encode()).hexdigest()
    return f"remat-{found.parent.name}-{found.name}-{digest[:12]}"


def _remove_others(of_run: Path, launch: str) -> None:
    """Launches of this run that have ended. Nodes of this one that share the disk do the same, and keep each other."""
    for folder in of_run.glob("*"):
        if not folder.name.startswith(f"{launch}-"):
            shutil.rmtree(folder, ignore_errors=True)
