"""Divide each sequence over a group of ranks: every rank trains a block of its tokens.

Groups are consecutive ranks, so a group stays within a node when its size divides the node's number of GPUs. The ranks
of a group read the same rows. Rows are padded to a multiple of the group, labels are shifted before they are cut, and
each rank takes its contiguous block.

DeepSpeed is not told: to it, the ranks of a group are data-parallel ranks like all others. ZeRO then shards over all
ranks and averages gradients over all of them, which is the gradient of the sum of all blocks at every stage.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.masking_utils import create_masks_for_generate

from remat.config.options import Attention, ModelConfig, TrainConfig
from remat.machine.distributed import World
from remat.model import loss, packing
from remat.model.packing import Packed
from remat.parallel.ulysses import Group, Installed, RankGroup


def rendered(ds: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return the DeepSpeed dict without the global batch, which DeepSpeed would check against all ranks."""
    return {key: value for key, value in ds.items() if size == 1 or key != "train_batch_size"}


def join(world: World, size: int, *, timeout_minutes: float) -> tuple[World, RankGroup | None]:
    """Divide `world` into groups of `size` ranks; return it with this rank's group, None for size 1. Collective."""
    if size == 1:
        return world, None
    mine = None
    for first in range(0, world.size, size):
        ranks = list(range(first, first + size))
        made: Any = dist.new_group(ranks, timeout=datetime.timedelta(minutes=timeout_minutes))
        if world.rank in ranks:
            mine = RankGroup(size, world.rank - first, made.group_name)
    return replace(world, sequence_parallel_size=size), mine


class SequenceParallel:
    """The attention of a model over a group of ranks, and the block of each micro-batch that a rank takes."""

    def __init__(self, net: Any, group: Group, packed: Packed, attention: Attention) -> None:
        """Change the modules of `net` until `remove`. Also for a model on the meta device."""
        self.group = group
        self._config: PretrainedConfig = net.config
        self._packed, self._attention = packed, attention
        self._dtype: torch.dtype = net.get_input_embeddings().weight.dtype
        self._installed = Installed(net, group)

    @property
    def calls(self) -> int:
        """Return how often a module has asked for attention."""
        return self._installed.calls

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over the ranks of the group. Collective."""
        return self.group.sum(value)

    def remove(self) -> None:
        self._installed.remove()

    def take_own(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's block of a micro-batch: "input_ids", "targets" and "position_ids" [batch, seq / n].

        Targets are labels that were shifted in the whole rows. Positions are those in the row or the document.
        """
        return self._own(pad(batch, self.group.size))

    def inputs(self, batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Any]:
        """Return this rank's block on `device`, with the mask that attention over whole sequences needs."""
        whole = pad(batch, self.group.size)
        return self._own(whole, device) | self._beside(whole, device)

    def run_whole(self, module: nn.Module, token_loss: loss.TokenLoss, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the summed loss of a micro-batch that this rank computes by itself, all blocks of it."""
        device = next(iter(batch.values())).device
        whole = pad(batch, self.group.size)
        self._installed.whole = True
        try:
            return token_loss(module, whole | self._beside(whole, device))
        finally:
            self._installed.whole = False

    def _own(self, whole: Mapping[str, Tensor], device: torch.device | None = None) -> dict[str, Tensor]:
        found = {name: value.chunk(self.group.size, 1)[self.group.rank] for name, value in whole.items()}
        return {name: value.to(device, non_blocking=True) for name, value in found.items()}

    def _beside(self, whole: Mapping[str, Tensor], device: torch.device) -> dict[str, Any]:
        """Return what keeps attention within documents and windows; {} or None where it is causal alone."""
        positions = whole["position_ids"] if self._packed.apart else None
        ends = packing.ends(self._packed, self._attention, whole) if positions is not None else {}
        ends = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in ends.items()}
        shape = torch.empty((*whole["input_ids"].shape, 1), dtype=self._dtype, device=device)
        if positions is not None:
            positions = positions.to(device, non_blocking=True)
        masks = create_masks_for_generate(self._config, shape, None, None, position_ids=positions)
        return ends | {"attention_mask": masks}


def pad(batch: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """Return whole rows of a multiple of `size` tokens: "input_ids", "targets" and "position_ids", all [batch, seq].

    Padding comes last, so that no token of a row sees it, and carries no loss. In a row of several documents it is
    another one.
    """
    ids, targets = batch["input_ids"], loss.shifted(batch["labels"])
    rows, width = ids.shape
    more = -width % size
    apart = batch.get("position_ids")
    positions = torch.arange(width, device=ids.device).expand(rows, -1) if apart is None else apart
    found = {"input_ids": ids, "targets": targets, "position_ids": positions}
    if not more:
        return found
    begin = width if apart is None else 0
    after = torch.arange(begin, begin + more, device=ids.device).expand(rows, -1)
    return {
        "input_ids": F.pad(ids, (0, more)),
        "targets": F.pad(targets, (0, more), value=loss.IGNORED),
        "position_ids": torch.cat([positions, after], dim=1),
    }


@contextmanager
def planned(
    train: TrainConfig, model: ModelConfig, packed: Packed, net: Any
) -> Iterator[Callable[[dict[str, Tensor]], dict[str, Any]] | None]:
    """Let `net`, on meta tensors, compute what one rank of the run computes, while the context is entered.

    It yields a function that turns a micro-batch on meta into the inputs of `net`; None when it already is.
    """
    if train.sequence_parallel_size == 1:
        yield packing.planned(packed, model.attention, net)
        return
    sequence = SequenceParallel(net, RankGroup(train.sequence_parallel_size), packed, model.attention)
    try:
        yield lambda batch: sequence.inputs(batch, torch.device("meta"))
    finally:
        sequence.remove()


def tokens_of_rank(train: TrainConfig) -> int:
    """Return the tokens of a rank in a full micro-batch, padding included."""
    return train.micro_batch_size * -(-train.seq_len // train.sequence_parallel_size)
