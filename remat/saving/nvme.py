"""What DeepSpeed (0.19) leaves out when it restores a state whose optimizer lives on NVMe.

`engine.load_checkpoint` then copies the swap files back and skips the rest of the optimizer: Adam's step counts,
groups too small to be swapped, and the very knowledge that moments were swapped, so that training would silently
go on with fresh ones. All of it is in each rank's `*_optim_states.pt`; this puts it back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from remat.config.options import ConfigError
from remat.saving import safe_load


def in_use(engine: Any) -> bool:
    return bool(engine.zero_nvme_offload_optimizer())


def prepare(engine: Any, folder: Path, rank: int) -> None:
    """Restore this rank's unswapped tensors, and make the swapper expect the saved files.

    Call it before `engine.load_checkpoint`, which copies the files and renews the 16-bit weights from all masters.
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
            swapper._get_param_swap_info(
                master
            ).release_memory()  # registers the moments, then frees their memory
        else:
            master.data.copy_(saved["fp32_flat_groups"][index])
    expected = {Path(t.swap_path).name for info in swapper.swap_params_info.values() for t in info.tensors}
    found = {path.name for path in (folder / "offloaded_tensors" / f"rank{rank:02d}").glob("*")}
    if expected - found:
        raise ConfigError(
            f"resume: {folder} has no NVMe file {min(expected - found)} (it has {sorted(found)[:3]}): the model and "
            "zero_optimization must be as saved, and the model the first one built in its process"
        )
