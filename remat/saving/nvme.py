"""Make a swap folder on NVMe for each launch, and restore what DeepSpeed omits when it resumes from NVMe.

The folder is NVME_PATH/remat-NAME-RUN_ID-IDENTITY/LAUNCH-RANK: one per run directory, in it one per launch and node.
DeepSpeed deletes none. The launch that owns the run directory knows that every other launch of the run has ended, so
their folders are removed; those of other runs are never touched. The identity tells apart runs of the same name in
several output folders.

`engine.load_checkpoint` (0.19) copies the swap files back and skips the rest of the optimizer: Adam's step counts,
groups too small to be swapped, and the fact that moments were swapped. Training would silently go on with fresh
moments. All of it is in each rank's `*_optim_states.pt`; `prepare` restores it.
"""

from __future__ import annotations

import hashlib
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from remat.config import paths
from remat.config.options import ConfigError
from remat.machine import distributed
from remat.machine.distributed import World
from remat.saving import safe_load


def prepare(engine: Any, folder: Path, rank: int) -> None:
    """Restore this rank's unswapped tensors, and register the saved files with the swapper.

    Call it before `engine.load_checkpoint`, which copies the files and sets the 16-bit weights from all masters.
    Raises ConfigError when the saved files are not those that this engine will read.
    """
    optimizer, swapper = engine.optimizer, engine.optimizer.optimizer_swapper
    file = next(folder.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
    saved = safe_load.load(file)["optimizer_state_dict"]
    for index, values in saved["optimizer_state_dict"]["state"].items():
        master = optimizer.fp32_partitioned_groups_flat[index]
        numel = optimizer.fp16_partitioned_groups_flat_numel[index]
        for name, value in values.items():
            is_swapped = isinstance(value, torch.Tensor) and value.numel() == 0
            optimizer.optimizer.state[master][name] = value.new_zeros(numel) if is_swapped else value
        if optimizer._swappable_optimizer_subgroup(index):
            info = swapper._get_param_swap_info(master)  # registers the moments
            info.release_memory()
        else:
            master.data.copy_(saved["fp32_flat_groups"][index])
    expected = {Path(t.swap_path).name for info in swapper.swap_params_info.values() for t in info.tensors}
    found = {path.name for path in (folder / "offloaded_tensors" / f"rank{rank:02d}").glob("*")}
    if expected - found:
        raise ConfigError(
            f"resume: {folder} has no NVMe file {min(expected - found)} (it has {sorted(found)[:3]}): the model and "
            "zero_optimization must be as saved"
        )


def own_folder(rendered: dict[str, Any], run_dir: Path, world: World) -> Path | None:
    """Make this launch's NVMe folder on this node, set it in DeepSpeed's config, return it; None without NVMe offload.

    The launch must own `run_dir`. Raises ConfigError on every rank when a node cannot make its folder. Collective.
    """
    sections = [rendered["zero_optimization"].get(name) for name in ("offload_optimizer", "offload_param")]
    swapping = [section for section in sections if section and section["device"] == "nvme"]
    if not swapping:
        return None
    mine = (_identity(run_dir), uuid.uuid4().hex[:8]) if world.is_main else None
    identity, launch = distributed.broadcast(mine)
    of_run = paths.expand(swapping[0]["nvme_path"]) / identity
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
    from deepspeed.runtime.zero.partition_parameters import Init

    Init.param_id = 0  # files are named by it: a resume in the same process has to find those of the first run
    return own


def left_folders(nvme_path: str | None, runs: Iterable[Path]) -> list[Path]:
    """Return the folders that other launches of these run directories have left on this node's NVMe."""
    if nvme_path is None:
        return []
    found = (paths.expand(nvme_path) / _identity(run) for run in runs if run.is_dir())
    return [folder for folder in found if folder.is_dir()]


def remove_folder(folder: Path | None, world: World) -> None:
    """Delete this node's swap folder, if it has one. Call it after the last read. Raises nothing."""
    if folder is None or world.local_rank != 0:
        return
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.rmdir()
    except OSError:  # another node of this launch shares the disk and is not done
        return


def _identity(run_dir: Path) -> str:
    """Return a readable folder name that is unique to this run directory."""
    found = run_dir.resolve()
    digest = hashlib.sha256(f"{found} {found.stat().st_ino}".encode()).hexdigest()
    return f"remat-{found.parent.name}-{found.name}-{digest[:12]}"


def _remove_others(of_run: Path, launch: str) -> None:
    """Delete the folders of other launches of this run, which have ended.

    Nodes of this launch that share the disk do the same, and leave each other's folders.
    """
    for folder in of_run.glob("*"):
        if not folder.name.startswith(f"{launch}-"):
            shutil.rmtree(folder, ignore_errors=True)
