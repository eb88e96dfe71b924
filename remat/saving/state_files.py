"""Read weights and the optimizer's moments from DeepSpeed's files of a state, one at a time and without an engine.

Each rank's file holds its part of the fp32 master weights, flat; a weight is joined from the parts of all ranks.
ZeRO 1 and 2 lay the parameters of a group end to end and cut the whole into equal parts for the ranks; ZeRO 3 cuts
each parameter. Where ranks share layers, there is a set of such files for each share. Files are memory-mapped:
memory holds only the weight asked for, and at most WINDOW_BYTES of file pages.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from remat.config.units import MIB
from remat.model.optimizer import WRAPPED
from remat.saving import safe_load
from remat.saving.manifest import SaveError

T = TypeVar("T")
WINDOW_BYTES = 512 * MIB  # after so many bytes the files are mapped anew, which frees the pages read so far
MASTER, MOMENTS = "fp32", ("exp_avg", "exp_avg_sq")  # DeepSpeed's and torch's names
MOMENTS_OF = {  # of the optimizers whose state is one number per weight, cut as DeepSpeed cuts weights
    "adamw": MOMENTS,
    "lion": MOMENTS[:1],
}


class SavedWeights:
    """Weights of a saved state. `names` are those that `read` accepts: trained weights and buffers.

    Trained weights are in fp32, at stage 0 as the module holds them. `read` also returns the `moments` of each trained
    weight, which exist from stage 1 on. `cuts` maps weights of which ranks hold shares to the dimension along which
    they are cut. With several pipeline `stages` each has weights of its own. Raises SaveError when the files do not
    hold what they describe.
    """

    def __init__(
        self,
        folder: Path,
        zero_stage: int,
        *,
        moments: Sequence[str] = (),
        cuts: Mapping[str, int] = MappingProxyType({}),
        stages: int = 1,
    ) -> None:
        self._cuts, count = cuts, count_shares(folder) if cuts else stages
        self._shares = [
            SavedShare(folder, zero_stage, moments=moments, cuts=cuts, share=share, count=count)
            for share in range(count)
        ]
        self.names = set().union(*(share.names for share in self._shares))

    @property
    def buffers(self) -> set[str]:
        return set().union(*(share.buffers for share in self._shares))

    @property
    def trained(self) -> dict[str, torch.Size]:
        """Name -> shape of each weight that the optimizer holds; empty at stage 0."""
        every = {name: shape for share in self._shares for name, shape in share.trained.items()}
        return {name: self._whole(name, shape) for name, shape in every.items()}

    @property
    def group_numels(self) -> list[int]:
        """Return the number of elements of each optimizer group; at stage 3 one entry, their sum."""
        trained = self.trained
        return [sum(trained[name].numel() for name in group) for group in self._shares[0].groups]

    def read(self, name: str, state: str = MASTER) -> torch.Tensor:
        """Return a copy of one whole weight, or of one of its MOMENTS, in the weight's shape and in fp32."""
        if name not in self._cuts:
            return next(share for share in self._shares if name in share.names).read(name, state)
        return torch.cat([share.read(name, state) for share in self._shares], dim=self._cuts[name])

    def _whole(self, name: str, shape: torch.Size) -> torch.Size:
        cut = self._cuts.get(name)
        return torch.Size(size * len(self._shares) if dim == cut else size for dim, size in enumerate(shape))


class SavedShare:
    """The part of a saved state of the tensor-parallel rank or stage `share` of `count`; see `SavedWeights`.

    ZeRO 3 shards a weight that is cut over the ranks with the same share of it, and any other over all ranks: the
    weights were sharded before AutoTP cut them.
    """

    def __init__(
        self,
        folder: Path,
        zero_stage: int,
        *,
        moments: Sequence[str],
        cuts: Collection[str],
        share: int,
        count: int,
    ) -> None:
        self._stage, self._states, self._cuts = zero_stage, (MASTER, *moments), cuts
        self._share, self._count, self._window_bytes = share, count, WINDOW_BYTES // count
        self._ranks = optimizer_files(folder, None if zero_stage == 3 else share) if zero_stage else []
        self._module_file = module_file(folder, zero_stage, share)
        self._open()
        model = mapped(self._module_file)
        self._same: dict[str, str] = dict(model["shared_params"]) if zero_stage else {}
        self._whole = set(model["buffer_names"] if zero_stage else self._module)
        self._places = self._find(model) if zero_stage else {}
        self.names = self._whole | self._places.keys()
        self._same = {name: kept for name, kept in self._same.items() if kept in self.names}
        self.names |= self._same.keys()

    @property
    def buffers(self) -> set[str]:
        return set(self._whole)

    @property
    def trained(self) -> dict[str, torch.Size]:
        """Name -> shape of each weight that the optimizer holds; empty at stage 0."""
        return {name: shape for name, (_, _, shape) in self._places.items()}

    @property
    def groups(self) -> list[list[str]]:
        """Return the names in each optimizer group; at stage 3 one group of all names."""
        found: dict[int, list[str]] = {}
        for name, (index, _, _) in self._places.items():
            found.setdefault(index, []).append(name)
        return list(found.values())

    def read(self, name: str, state: str = MASTER) -> torch.Tensor:
        """Return a copy of one weight's share, or of one of its MOMENTS, in fp32."""
        name = self._same.get(name, name)
        if self._read_bytes > self._window_bytes:
            self._open()
        if name in self._whole:
            value = self._module[name].clone(memory_format=torch.contiguous_format)
            self._read_bytes += value.nbytes
            return value.float() if self._stage and value.is_floating_point() else value
        group, offset, shape = self._places[name]
        flats = self._sharding(name, self._flats[state])
        if self._stage == 3:
            numel = -(-shape.numel() // len(flats))
            parts = [part for own in flats for part in _slices(own, offset, numel)]
        else:
            parts = _slices([own[group] for own in flats], offset, shape.numel())
        self._read_bytes += sum(part.nbytes for part in parts)
        return torch.cat(parts)[: shape.numel()].view(shape).float()

    def _open(self) -> None:
        self._module: dict[str, torch.Tensor] = mapped(self._module_file)["module"]
        optimizers = [mapped(file)["optimizer_state_dict"] for file in self._ranks]
        self._flats: dict[str, list[list[torch.Tensor]]] = {
            state: [self._own(optimizer, state) for optimizer in optimizers] for state in self._states
        }
        self._gaps = optimizers[0].get("param_alignment_paddings") if optimizers else None
        self._read_bytes = 0

    def _find(self, model: dict[str, Any]) -> dict[str, tuple[int, int, torch.Size]]:
        """Return name -> (group, offset, shape). The offset is in the joined group, at stage 3 in a rank's own part."""
        places = {}
        groups: list[dict[str, torch.Size]] = model["param_shapes"]
        if self._stage == 3:
            groups = [{name: shape for group in groups for name, shape in group.items()}]
        for index, group in enumerate(groups):
            offset = 0
            for number, (name, shape) in enumerate(group.items()):
                places[name] = (index, offset, shape)
                ranks = len(self._sharding(name, self._ranks))
                offset += -(-shape.numel() // ranks) if self._stage == 3 else shape.numel()
                offset += self._gaps[index][number] if self._gaps is not None else 0
            for flats in self._flats.values():
                parts = flats[0] if self._stage == 3 else [own[index] for own in flats]
                held = sum(part.numel() for part in parts)
                if not offset <= held < offset + (1 if self._stage == 3 else 2 * len(self._ranks)):
                    raise SaveError(
                        f"group {index} of {self._ranks[0].parent} holds {held} numbers, not {offset}"
                    )
        return places

    def _own(self, optimizer: dict[str, Any], state: str) -> list[torch.Tensor]:
        """Return one rank's flat tensors of `state` (the master or a moment), in the order of the groups."""
        if state == MASTER:
            key = "fp32_flat_groups" if self._stage == 3 else "single_partition_of_fp32_groups"
            masters: list[torch.Tensor] = optimizer[key]
            return masters
        groups, count = base_optimizer(optimizer, self._stage)["state"], len(self._own(optimizer, MASTER))
        held = [moments_in(groups.get(index, {})) for index in range(count)]
        if any(state not in own for own in held):
            raise SaveError(f"{self._module_file.parent} holds no {state}: no optimizer step was applied yet")
        return [own[state] for own in held]

    def _sharding(self, name: str, ranks: list[T]) -> list[T]:
        """Return those of `ranks` over which ZeRO shards a weight."""
        return ranks[self._share :: self._count] if self._stage == 3 and name in self._cuts else ranks


def moments_in(state: dict[str, Any]) -> dict[str, Any]:
    """Return a group's state with the first moment under its usual name, which bitsandbytes' Lion calls state1."""
    return {MOMENTS[0]: state[WRAPPED]["state1"]} if WRAPPED in state else state


def base_optimizer(optimizer: dict[str, Any], zero_stage: int) -> dict[str, Any]:
    """Return the optimizer's own state dict from one rank's "optimizer_state_dict" of DeepSpeed."""
    found: dict[str, Any] = optimizer["optimizer_state_dict" if zero_stage == 3 else "base_optimizer_state"]
    return found


def _slices(flats: Sequence[torch.Tensor], offset: int, numel: int) -> list[torch.Tensor]:
    """Return views of `numel` numbers from `offset` on, as if `flats` were one tensor."""
    found = []
    for flat in flats:
        start, end = max(0, offset), min(flat.numel(), offset + numel)
        if start < end:
            found.append(flat[start:end])
        offset -= flat.numel()
    return found


def count_shares(folder: Path) -> int:
    """Return how many ranks shared the layers when the state was saved."""
    return len(list(folder.glob("*zero_pp_rank_0_mp_rank_*_optim_states.pt")))


def optimizer_files(folder: Path, share: int | None = None) -> list[Path]:
    """Return the optimizer files of all ranks, or of those with one share of the layers, in rank order."""
    ranks = "*" if share is None else f"{share:02d}"
    return sorted(folder.glob(f"*_mp_rank_{ranks}_optim_states.pt"), key=_rank)


def module_file(folder: Path, zero_stage: int, share: int = 0) -> Path:
    """Return the file in which the first data rank saved the module's states, for one share of the layers."""
    first = "zero_pp_rank_0_" if zero_stage == 3 else ""
    return folder / f"{first}mp_rank_{share:02d}_model_states.pt"


def mapped(file: Path) -> dict[str, Any]:
    """Load a file of torch.save, its tensors memory-mapped. Raises UnsafeFile when it is not data alone."""
    content: dict[str, Any] = safe_load.load(file, mapped=True)
    return content


def _rank(file: Path) -> tuple[int, int]:
    """Return (data rank, tensor-parallel rank), which sorts files by rank, because consecutive ranks share layers."""
    match = re.search(r"pp_rank_(\d+)_mp_rank_(\d+)_", file.name)
    if match is None:
        raise SaveError(f"{file}: not a file of DeepSpeed's optimizer")
    return int(match.group(1)), int(match.group(2))
