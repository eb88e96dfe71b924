"""Divide each sequence over a group of ranks: every rank trains a block of its tokens.

Groups are consecutive ranks, so a group stays within a node when its size divides the node's number of GPUs. Each rank
of a group reads its contiguous block of the same rows (`own_part` of remat/data/batches.py). It also knows where
documents start in the other blocks.

DeepSpeed is not told: it treats the ranks of a group as data-parallel ranks like all others. ZeRO then shards over all
ranks and averages gradients over all of them. At every stage this gives the gradient of the sum of all blocks.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.masking_utils import create_masks_for_generate

from remat.config.options import Attention, ModelConfig, TrainConfig
from remat.machine.distributed import World
from remat.model import loss, packing
from remat.model.packing import Packed
from remat.parallel.ulysses import Group, Installed, RankGroup

TOKENWISE = ("input_ids", "targets", "position_ids")  # tensors of a micro-batch with one value per token


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
    """Attention of a model over a group of ranks, and this rank's block of each micro-batch."""

    def __init__(self, net: Any, group: Group, packed: Packed, attention: Attention) -> None:
        """Replace the attention of `net` until `remove` is called. Works on the meta device too."""
        self.group = group
        self._config: PretrainedConfig = net.config
        self._packed, self._attention = packed, attention
        self._dtype: torch.dtype = net.get_input_embeddings().weight.dtype
        self._installed = Installed(net, group)

    @property
    def calls(self) -> int:
        """Return how often modules have called attention."""
        return self._installed.calls

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over the ranks of the group. Collective."""
        return self.group.sum(value)

    def remove(self) -> None:
        self._installed.remove()

    def inputs(self, own: Mapping[str, Tensor], device: torch.device) -> dict[str, Any]:
        """Return this rank's part of a micro-batch on `device`, with the mask that attention over whole rows needs.

        `own` is what `own_part` of remat/data/batches.py returns.
        """
        return self._with_beside(own, self.group.size, device)

    def run_whole(self, module: nn.Module, token_loss: loss.TokenLoss, whole: Mapping[str, Tensor]) -> Tensor:
        """Compute the summed loss of whole rows on this rank alone; `whole` is what `gather` returns."""
        self._installed.whole = True
        try:
            return token_loss(module, self._with_beside(whole, 1, whole["input_ids"].device))
        finally:
            self._installed.whole = False

    def gather(self, own: Mapping[str, Tensor], longest: int, device: torch.device) -> dict[str, Tensor]:
        """Gather at most `longest` tokens of one row on every rank, from the ranks' parts `own`. Collective.

        Takes the row with the most trained tokens, if possible from its first trained token on. Returns the same keys
        as `own`, with one row whose length is a multiple of the group's size.
        """
        size, rank, width = self.group.size, self.group.rank, own["input_ids"].shape[1]
        trained = own["targets"] != loss.IGNORED
        row = int(self.sum(trained.sum(1).to(device)).argmax())
        firsts = torch.zeros(size, dtype=torch.int64, device=device)
        firsts[rank] = rank * width + int(trained[row].int().argmax()) if trained[row].any() else size * width
        begin, length = _window(int(self.sum(firsts).min()), size * width, longest, size)
        found = torch.zeros((len(TOKENWISE), length), dtype=torch.int64, device=device)
        there, end = max(begin, rank * width), min(begin + length, (rank + 1) * width)
        if there < end:
            mine = torch.stack(
                [own[name][row, there - rank * width : end - rank * width] for name in TOKENWISE]
            )
            found[:, there - begin : end - begin] = mine.to(device)
        whole = dict(zip(TOKENWISE, self.sum(found)[:, None], strict=True))
        if "documents" in own:
            whole["documents"] = _within(own["documents"], row * size * width + begin, length)
        return whole

    def shorten(self, whole: Mapping[str, Tensor], longest: int) -> dict[str, Tensor]:
        """Return at most `longest` tokens of the row of `gather`, if possible from its first trained token on."""
        trained = whole["targets"][0] != loss.IGNORED
        begin, length = _window(int(trained.int().argmax()), len(trained), longest, self.group.size)
        found = {name: whole[name][:, begin : begin + length] for name in TOKENWISE}
        if "documents" in whole:
            found["documents"] = _within(whole["documents"], begin, length)
        return found

    def take_own(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's part of whole rows. Their length is a multiple of the group's size."""
        own = {name: whole[name].chunk(self.group.size, 1)[self.group.rank] for name in TOKENWISE}
        return own | {name: whole[name] for name in ("documents",) if name in whole}

    def _with_beside(self, batch: Mapping[str, Tensor], blocks: int, device: torch.device) -> dict[str, Any]:
        """Return `batch`, one of `blocks` equal blocks of its rows, on `device` with what attention needs beside it.

        That is the documents' ends for flash, and the masks for other kernels (None where causal is enough).
        """
        rows, width = batch["input_ids"].shape
        width *= blocks
        found: dict[str, Any] = {name: batch[name].to(device, non_blocking=True) for name in TOKENWISE}
        documents = batch.get("documents")
        positions = None
        if documents is not None and self._attention is Attention.flash_attention_2:
            found |= packing.varlen_of(documents, width, device)
        elif documents is not None:
            positions = _positions(documents.to(device, non_blocking=True), rows, width)
        shape = torch.empty((1, 1, 1), dtype=self._dtype, device=device).expand(rows, width, 1)
        masks = create_masks_for_generate(self._config, shape, None, None, position_ids=positions)
        return found | {"attention_mask": masks}


def _window(first: int, width: int, longest: int, size: int) -> tuple[int, int]:
    """Return the first token and the length of a window of at most `longest` of `width` tokens, near `first`.

    The length is a multiple of `size`.
    """
    length = min(longest, width) // size * size
    return min(first, width - length), length


def _within(documents: Tensor, begin: int, length: int) -> Tensor:
    """Return the starts of documents within the `length` tokens from `begin` on, and their end; int32."""
    inside = documents[(documents > begin) & (documents < begin + length)] - begin
    return torch.cat([documents.new_tensor([0]), inside, documents.new_tensor([length])])


def _positions(documents: Tensor, rows: int, width: int) -> Tensor:
    """Return int64 [rows, width]: tokens since the start of the document, for masks of whole rows."""
    places = torch.arange(rows * width, dtype=documents.dtype, device=documents.device)
    begins = documents[torch.bucketize(places, documents[1:], right=True)]
    return (places - begins).long().view(rows, width)


@contextmanager
def planned(
    train: TrainConfig, model: ModelConfig, packed: Packed, net: Any
) -> Iterator[Callable[[dict[str, Tensor]], dict[str, Any]] | None]:
    """Make `net`, on meta tensors, compute one rank's part while the context is entered.

    Yields a function that turns a micro-batch on meta into the inputs of `net`; None when no change is needed.
    """
    if train.sequence_parallel_size == 1:
        yield packing.planned(packed, model.attention, net)
        return
    size = train.sequence_parallel_size
    sequence = SequenceParallel(net, RankGroup(size), packed, model.attention)
    try:
        yield lambda batch: sequence.inputs(_own_on_meta(batch, size, packed), torch.device("meta"))
    finally:
        sequence.remove()


def _own_on_meta(batch: Mapping[str, Tensor], size: int, packed: Packed) -> dict[str, Tensor]:
    """Return a rank's part of `batch` on meta. Assumes one document per row, because meta tensors have no values."""
    rows, width = batch["input_ids"].shape
    own = torch.empty((rows, -(-width // size)), dtype=torch.int64, device="meta")
    found = dict.fromkeys(TOKENWISE, own)
    return found | (
        {"documents": torch.empty(rows + 1, dtype=torch.int32, device="meta")} if packed.apart else {}
    )


def tokens_of_rank(train: TrainConfig) -> int:
    """Return the tokens of a rank in a full micro-batch, padding included."""
    return train.micro_batch_size * -(-train.seq_len // train.sequence_parallel_size)
