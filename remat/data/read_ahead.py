"""Read the next step's blocks while the present step is computed: one step ahead, in one thread.

So training does not wait for the disk. With a GPU the tensors are in pinned memory: from other memory no copy is
asynchronous. Which samples a step has, and the position in a saved state, are those of the stream itself.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import replace
from typing import Any

import torch

from remat.data.batches import GlobalBatches, StepBatch

CLOSE_S = 5.0  # time for a read in progress to end; one that hangs on a disk is left behind


class ReadAhead:
    """The stream `batches`, read one step ahead. An error there is raised by the `next_step` that needs the step."""

    def __init__(self, batches: GlobalBatches, device: torch.device) -> None:
        self._batches, self._device = batches, device
        self._asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._read: queue.SimpleQueue[tuple[int, StepBatch | BaseException]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ahead: int | None = None  # the position that is being read, or has been

    @property
    def position(self) -> int:
        """Samples consumed since the start; those only read ahead do not count."""
        return self._batches.position

    def state(self) -> dict[str, Any]:
        return self._batches.state()

    def lost(self) -> dict[str, int]:
        return self._batches.lost()

    def next_step(self) -> StepBatch:
        """Return the step at `position`, and start to read the one after it."""
        self._ask(self._batches.position)
        position, found = self._read.get()
        self._ahead = None
        if isinstance(found, BaseException):
            raise found
        self._batches.position = position + found.sample_ids.size
        self._ask(self._batches.position)
        return found

    def close(self) -> None:
        """Stop reading, and end the thread."""
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join(CLOSE_S)
            self._thread = None

    def _ask(self, position: int) -> None:
        if self._ahead is not None and self._ahead != position:  # somebody moved the stream
            self._read.get()
            self._ahead = None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="remat-read-ahead", daemon=True)
            self._thread.start()
        if self._ahead is None:
            self._ahead = position
            self._asked.put(position)

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(
                self._device
            )  # a new thread starts on the first GPU, and would create a context there
        while (position := self._asked.get()) is not None:
            try:
                self._read.put((position, self._pinned(self._batches.read(position))))
            except BaseException as error:
                self._read.put((position, error))

    def _pinned(self, batch: StepBatch) -> StepBatch:
        if self._device.type != "cuda":
            return batch
        pinned = [{name: value.pin_memory() for name, value in each.items()} for each in batch.micro_batches]
        return replace(batch, micro_batches=pinned)
