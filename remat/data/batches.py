"""Build the micro-batches of a step from blocks. Its samples are the same for any number of ranks.

A thread reads the next step's blocks while the current step is computed, so training does not wait for the disk.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from remat.config.options import ConfigError
from remat.data.blocks import Blocks, positions_within

NO_LOSS = -100  # PyTorch's and Hugging Face's ignore_index
LOOKED_AHEAD = 100_000  # most samples that `padding_share` looks at


@dataclass(frozen=True)
class Part:
    """The part of each row that a rank reads: number `rank` of `size` equal parts. The last may have padding."""

    rank: int = 0
    size: int = 1


WHOLE = Part()


@dataclass(frozen=True)
class StepBatch:
    """One rank's micro-batches of one optimizer step, and figures of the global batch.

    `micro_batches`: results of `micro_batch`, or of `own_part` where ranks share sequences. `sample_ids` int64 [global
    batch]: block indices of all ranks, in order. Over the global batch, `trained_tokens` counts targets that carry
    loss, `seen_tokens` tokens without padding, and `positions` tokens with padding. `epoch`: the epoch of the first
    sample. `seen_of`: tokens without padding of each source of a mixture; {} without a mixture.
    """

    micro_batches: list[dict[str, torch.Tensor]]
    sample_ids: np.ndarray
    trained_tokens: int
    seen_tokens: int
    positions: int
    epoch: int
    seen_of: dict[str, int] = field(default_factory=dict)


class GlobalBatches:
    """An endless stream of steps: each epoch is a permutation of the blocks, each step takes `global_batch_size`.

    Micro-step a on rank r of n takes samples [(a * n + r) * micro : + micro] of the step. So the number of ranks,
    the micro-batch size and gradient accumulation do not change a step's samples. The position is a single number.

    Where each row has its own block, a step's rows are sorted, the longest first. So the rows of a micro-batch, and the
    micro-batches that ranks compute at the same time, have about the same length.
    """

    def __init__(
        self,
        blocks: Blocks,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool,
        position: int = 0,
        part: Part = WHOLE,
    ) -> None:
        """Start at `position`, counted in samples since the start of training, and read `part` of each row.

        Raises ConfigError if the global batch size is not a multiple of the micro-batch size times the ranks.
        """
        if global_batch_size % (micro_batch_size * world_size):
            raise ConfigError(
                f"train.global_batch_size={global_batch_size} is not a multiple of train.micro_batch_size="
                f"{micro_batch_size} times {world_size} ranks: change one of the three"
            )
        if position < 0 or not 0 <= rank < world_size or not len(blocks):
            raise ValueError(f"position {position}, rank {rank} of {world_size}, {len(blocks)} blocks")
        self._blocks = blocks
        self._global_batch_size, self._micro_batch_size = global_batch_size, micro_batch_size
        self._rank, self._world_size, self._part = rank, world_size, part
        self._seed, self._shuffle = seed, shuffle
        self.of_rows = blocks.of_rows
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))
        self.position = position

    def next_step(self) -> StepBatch:
        found = self.read(self.position)
        self.position += self._global_batch_size
        return found

    def read(self, position: int) -> StepBatch:
        """Return the step that begins after `position` samples, without moving the stream."""
        ids = self._sample_ids(position, self._global_batch_size)
        return self._step(self._blocks, ids, ids, position // self._blocks.epoch_length)

    def _step(self, blocks: Blocks, ids: np.ndarray, sample_ids: np.ndarray, epoch: int) -> StepBatch:
        """Return the step with the blocks `ids` of `blocks`; `sample_ids` are their numbers for the record."""
        micro_batches = ids.reshape(-1, self._micro_batch_size)
        mine = micro_batches[self._rank :: self._world_size]
        return StepBatch(
            micro_batches=[read_micro_batch(blocks, micro_ids, self._part) for micro_ids in mine],
            sample_ids=sample_ids,
            trained_tokens=int(blocks.trained_tokens[ids].sum(dtype=np.int64)),
            seen_tokens=int(blocks.lengths[ids].sum(dtype=np.int64)),
            positions=int(blocks.widths(micro_batches).sum()) * self._micro_batch_size,
            epoch=epoch,
            seen_of=blocks.seen_of(ids),
        )

    def padding_share(self) -> float:
        """Return the share of padding in the first epoch, from at most LOOKED_AHEAD samples."""
        steps = min(self._blocks.epoch_length, LOOKED_AHEAD) // self._global_batch_size or 1
        seen = positions = 0
        for step in range(steps):
            ids = self._sample_ids(step * self._global_batch_size, self._global_batch_size)
            seen += int(self._blocks.lengths[ids].sum(dtype=np.int64))
            widths = self._blocks.widths(ids.reshape(-1, self._micro_batch_size))
            positions += int(widths.sum()) * self._micro_batch_size
        return 1 - seen / positions

    def state(self) -> dict[str, Any]:
        """Return the stream's state for a saved state.

        `position` restores the stream if the number of blocks, seed and shuffle are the same (`check_same_order`).
        Epoch and index give the same position for a human reader.
        """
        epoch, index = divmod(self.position, self._blocks.epoch_length)
        return {
            "epoch": epoch,
            "index": index,
            "position": self.position,
            "num_blocks": self._blocks.epoch_length,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "documents_apart": self._blocks.apart,
        }

    def lost(self) -> dict[str, int]:
        """Return the rows cut, left out, dropped or unusable since the start; {} for a cache, whose report has them."""
        return {}

    def _sample_ids(self, position: int, count: int) -> np.ndarray:
        parts = []
        while count:
            epoch, index = divmod(position, self._blocks.epoch_length)
            part = self._permutation(epoch)[index : index + count]
            parts.append(part)
            position += len(part)
            count -= len(part)
        ids = np.concatenate(parts)
        if self._blocks.one_each:
            ids = ids[np.argsort(-self._blocks.lengths[ids], kind="stable")]
        return ids

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._order[0] != epoch:
            self._order = (epoch, self._blocks.order(self._seed, epoch, self._shuffle))
        return self._order[1]


def check_same_order(saved: dict[str, Any], batches: GlobalBatches) -> list[str]:
    """Return why the position in `saved`, an earlier `GlobalBatches.state()`, would give other samples now.

    Each problem names the option, its values now and at the save, and the remedy; [] without problems. The world size
    and the batch sizes may differ, because they do not change the order.
    """
    now = batches.state()
    saved = {"documents_apart": False} | saved  # older saved states lack it: they did not keep documents apart
    missing = sorted(now.keys() - saved.keys())
    if missing:
        return [f"the order of the data was not saved ({', '.join(missing)} missing): resume from another save"]
    problems = []
    if saved["num_blocks"] != now["num_blocks"]:
        problems.append(
            f"data gives {now['num_blocks']} blocks for training, but gave {saved['num_blocks']} at the save: "
            "restore the data and its options, model.tokenizer and train.seq_len"
        )
    if bool(saved["shuffle"]) != bool(now["shuffle"]):
        was, is_now = (str(bool(state["shuffle"])).lower() for state in (saved, now))
        problems.append(f"data.shuffle={is_now}, but was {was} at the save: set data.shuffle={was}")
    # The seed also chooses what is held out, so it matters without shuffling too.
    if saved["seed"] != now["seed"]:
        problems.append(
            f"train.seed={now['seed']}, but was {saved['seed']} at the save: set train.seed={saved['seed']}"
        )
    if bool(saved["documents_apart"]) != bool(now["documents_apart"]):
        otherwise = "none" if batches.of_rows else "stream"
        was, is_now = ("documents" if state["documents_apart"] else otherwise for state in (saved, now))
        problems.append(f"data.packing={is_now}, but was {was} at the save: set data.packing={was}")
    return problems


def steps_of(epochs: float, blocks: int, global_batch_size: int) -> int:
    """Return the steps needed to see `blocks` blocks `epochs` times, rounded up."""
    return max(1, math.ceil(round(epochs * blocks, 6) / global_batch_size))


def read_micro_batch(blocks: Blocks, ids: np.ndarray, part: Part) -> dict[str, torch.Tensor]:
    """Return the blocks `ids` as a micro-batch: whole rows, or `part` of each."""
    return own_part(blocks, ids, part) if part.size > 1 else micro_batch(blocks, ids)


def micro_batch(blocks: Blocks, ids: np.ndarray) -> dict[str, torch.Tensor]:
    """Return {"input_ids", "labels"} int64 [len(ids), blocks.width(ids)]; a label of -100 carries no loss.

    Labels are not shifted (Hugging Face's convention). Where documents are kept apart there are also "position_ids" of
    that shape, which restart with every document.
    """
    width = blocks.width(ids)
    tokens = blocks.tokens(ids, 0, width).astype(np.int64)
    labels = np.where(blocks.trained(ids, 0, width), tokens, NO_LOSS)
    found = {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
    if blocks.apart:
        found["position_ids"] = torch.from_numpy(blocks.positions(ids))
    return found


def own_part(blocks: Blocks, ids: np.ndarray, part: Part) -> dict[str, torch.Tensor]:
    """Return {"input_ids", "targets", "position_ids"} int64 [len(ids), width / part.size]: `part` of each row.

    Rows are padded at their end to a multiple of `part.size`; padding carries no loss. Targets are labels shifted
    within the whole row, so the token after this part is read too. Positions count from the start of the row. Where
    documents are kept apart, positions restart with every document, and padding counts as a document. Then "documents"
    int32 [documents + 1] has the start of each document in the whole rows laid end to end, and the end of the last.
    """
    width = blocks.width(ids)
    own = -(-width // part.size)
    begin, end = part.rank * own, (part.rank + 1) * own
    there = min(begin, width), min(end + 1, width)
    tokens = blocks.tokens(ids, *there).astype(np.int64)
    labels = np.where(blocks.trained(ids, *there), tokens, NO_LOSS)[:, 1:]
    found = {
        "input_ids": np.pad(tokens[:, :own], ((0, 0), (0, own - min(own, tokens.shape[1])))),
        "targets": np.pad(labels, ((0, 0), (0, own - labels.shape[1])), constant_values=NO_LOSS),
        "position_ids": np.tile(np.arange(begin, end), (len(ids), 1)),
    }
    if blocks.apart:
        padded = own * part.size
        bounds = blocks.bounds(ids, padded)
        found["position_ids"] = np.stack(
            [positions_within(bounds, row * padded + begin, row * padded + end) for row in range(len(ids))]
        )
        found["documents"] = bounds.astype(np.int32)
    return {name: torch.from_numpy(value) for name, value in found.items()}


def eval_micro_batches(
    blocks: Blocks,
    *,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    max_batches: int,
    part: Part = WHOLE,
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this rank's micro-batches for an evaluation, in a fixed order and the same number on every rank.

    `max_batches` limits the number; 0 means no limit. They hold `part` of each row. Rows past the end of `blocks` fill
    the last ones and carry no loss.
    """
    count = -(-len(blocks) // (micro_batch_size * world_size))
    if max_batches:
        count = min(count, max_batches)
    order = blocks.order(0, 0, shuffle=False)
    for step in range(count):
        start = (step * world_size + rank) * micro_batch_size
        ids = np.arange(start, start + micro_batch_size)
        batch = read_micro_batch(blocks, order[np.minimum(ids, len(blocks) - 1)], part)
        batch["labels" if part.size == 1 else "targets"][torch.from_numpy(ids >= len(blocks))] = NO_LOSS
        yield batch


CLOSE_S = 5.0  # time for a read in progress to end; after it, a thread that hangs on a disk is abandoned


class ReadAhead:
    """Reads the stream `batches` one step ahead in a thread.

    With a GPU the tensors are in pinned memory, because only copies from pinned memory are asynchronous. Reading ahead
    changes neither the samples of a step nor the position in a saved state. An error in the thread is raised by the
    `next_step` that needs the step.
    """

    def __init__(self, batches: GlobalBatches, device: torch.device) -> None:
        self._batches, self._device = batches, device
        self._asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._read: queue.SimpleQueue[StepBatch | BaseException] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_ahead = False  # whether the thread reads or has read the step at `position`

    @property
    def position(self) -> int:
        """Return the samples consumed since the start of training, without those read ahead."""
        return self._batches.position

    def state(self) -> dict[str, Any]:
        return self._batches.state()

    def lost(self) -> dict[str, int]:
        return self._batches.lost()

    def next_step(self) -> StepBatch:
        """Return the step at `position` and start reading the next one."""
        self._ask()
        found = self._read.get()
        self._is_ahead = False
        if isinstance(found, BaseException):
            raise found
        self._batches.position += found.sample_ids.size
        self._ask()
        return found

    def close(self) -> None:
        """Stop reading, and end the thread."""
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join(CLOSE_S)
            self._thread = None

    def _ask(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="remat-read-ahead", daemon=True)
            self._thread.start()
        if not self._is_ahead:
            self._is_ahead = True
            self._asked.put(self._batches.position)

    def _run(self) -> None:
        if self._device.type == "cuda":
            # a new thread starts with the first GPU selected and would create a context on it
            torch.cuda.set_device(self._device)
        while (position := self._asked.get()) is not None:
            try:
                self._read.put(self._pinned(self._batches.read(position)))
            except BaseException as error:
                self._read.put(error)

    def _pinned(self, batch: StepBatch) -> StepBatch:
        if self._device.type != "cuda":
            return batch
        pinned = [{name: value.pin_memory() for name, value in each.items()} for each in batch.micro_batches]
        return replace(batch, micro_batches=pinned)
