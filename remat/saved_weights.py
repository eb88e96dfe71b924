"""The weights in DeepSpeed's files of a saved state, read one at a time without an engine.

Each rank's file holds its part of the fp32 master weights, flat; a weight is joined from the parts of all ranks.
ZeRO 1 and 2 cut each group of parameters, end to end, into equal parts for the ranks; ZeRO 3 cuts each parameter.
Files are mapped, not read: what stays in memory is the weight asked for, and at most WINDOW_BYTES of file pages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from remat.manifest import SaveError

WINDOW_BYTES = 512 * 1024**2  # then the files are mapped anew, which lets go of the pages read so far


class SavedWeights:
    """`names` are those that `read` knows: trained weights in fp32 (at stage 0 as the module holds them), buffers.

    Raises SaveError when the files do not hold what they describe.
    """

    def __init__(self, folder: Path, zero_stage: int) -> None:
        self._stage = zero_stage
        self._ranks = sorted(folder.glob("*_optim_states.pt"), key=_rank) if zero_stage else []
        first = "zero_pp_rank_0_mp_rank_00_model_states.pt" if zero_stage == 3 else "mp_rank_00_model_states.pt"
        self._module_file = folder / first
        self._open()
        model = _mapped(self._module_file)
        self._same: dict[str, str] = dict(model["shared_params"]) if zero_stage else {}
        self._whole = set(model["buffer_names"] if zero_stage else self._module)
        self._places = self._find(model) if zero_stage else {}
        self.names = self._whole | self._places.keys()
        self._same = {name: kept for name, kept in self._same.items() if kept in self.names}
        self.names |= self._same.keys()

    def read(self, name: str) -> torch.Tensor:
        """A copy of one weight, whole."""
        name = self._same.get(name, name)
        if self._read_bytes > WINDOW_BYTES:
            self._open()
        if name in self._whole:
            value = self._module[name].clone(memory_format=torch.contiguous_format)
            self._read_bytes += value.nbytes
            return value.float() if self._stage and value.is_floating_point() else value
        group, offset, shape = self._places[name]
        parts = self._parts_at_3(offset, shape) if self._stage == 3 else self._parts(group, offset, shape)
        self._read_bytes += sum(part.nbytes for part in parts)
        return torch.cat(parts)[: shape.numel()].view(shape)

    def _open(self) -> None:
        self._module: dict[str, torch.Tensor] = _mapped(self._module_file)["module"]
        key = "fp32_flat_groups" if self._stage == 3 else "single_partition_of_fp32_groups"
        optimizers = [_mapped(file)["optimizer_state_dict"] for file in self._ranks]
        self._flats: list[list[torch.Tensor]] = [optimizer[key] for optimizer in optimizers]
        self._gaps = optimizers[0].get("param_alignment_paddings") if optimizers else None
        self._read_bytes = 0

    def _find(self, model: dict[str, Any]) -> dict[str, tuple[int, int, torch.Size]]:
        """Name -> (group, offset, shape); the offset counts in the joined group, at stage 3 in a rank's own part."""
        places, ranks = {}, len(self._ranks)
        groups: list[dict[str, torch.Size]] = model["param_shapes"]
        if self._stage == 3:
            groups = [{name: shape for group in groups for name, shape in group.items()}]
        for index, group in enumerate(groups):
            offset = 0
            for number, (name, shape) in enumerate(group.items()):
                places[name] = (index, offset, shape)
                offset += -(-shape.numel() // ranks) if self._stage == 3 else shape.numel()
                offset += self._gaps[index][number] if self._gaps is not None else 0
            held = self._numel(index)
            if not offset <= held < offset + (1 if self._stage == 3 else 2 * ranks):
                raise SaveError(f"group {index} of {self._ranks[0].parent} holds {held} numbers, not {offset}")
        return places

    def _numel(self, group: int) -> int:
        if self._stage == 3:
            return sum(flat.numel() for flat in self._flats[0])
        return sum(flats[group].numel() for flats in self._flats)

    def _parts(self, group: int, offset: int, shape: torch.Size) -> list[torch.Tensor]:
        return _slices([flats[group] for flats in self._flats], offset, shape.numel())

    def _parts_at_3(self, offset: int, shape: torch.Size) -> list[torch.Tensor]:
        numel = -(-shape.numel() // len(self._ranks))
        return [part for flats in self._flats for part in _slices(flats, offset, numel)]


def _slices(flats: Sequence[torch.Tensor], offset: int, numel: int) -> list[torch.Tensor]:
    """Views of `numel` numbers from `offset` on, as if `flats` were one."""
    found = []
    for flat in flats:
        start, end = max(0, offset), min(flat.numel(), offset + numel)
        if start < end:
            found.append(flat[start:end])
        offset -= flat.numel()
    return found


def _mapped(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
    return content


def _rank(file: Path) -> int:
    match = re.search(r"pp_rank_(\d+)_", file.name)
    if match is None:
        raise SaveError(f"{file}: not a file of DeepSpeed's optimizer")
    return int(match.group(1))
