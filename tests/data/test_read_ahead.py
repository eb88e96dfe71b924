"""Reading ahead changes neither what a step has nor where a saved state goes on; its errors come where they belong."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from remat.data.batches import GlobalBatches, ReadAhead, StepBatch
from tests.data.test_batches import make_blocks, stream

CPU = torch.device("cpu")


@pytest.fixture
def made() -> Iterator[list[ReadAhead]]:
    readers: list[ReadAhead] = []
    yield readers
    for reader in readers:
        reader.close()


def ahead(made: list[ReadAhead], batches: GlobalBatches) -> ReadAhead:
    made.append(ReadAhead(batches, CPU))
    return made[-1]


def same(one: StepBatch, other: StepBatch) -> bool:
    tensors = zip(one.micro_batches, other.micro_batches, strict=True)
    return (
        np.array_equal(one.sample_ids, other.sample_ids)
        and (one.trained_tokens, one.seen_tokens, one.epoch)
        == (other.trained_tokens, other.seen_tokens, other.epoch)
        and all(
            torch.equal(left[name], right[name])
            for left, right in tensors
            for name in left.keys() | right.keys()
        )
    )


def test_steps_and_saved_positions_are_those_of_the_stream(made: list[ReadAhead]) -> None:
    blocks = make_blocks(10)
    plain, read = stream(blocks), ahead(made, stream(blocks))
    for _ in range(12):
        assert same(plain.next_step(), read.next_step())
        assert plain.state() == read.state() and plain.position == read.position
    resumed = ahead(made, stream(blocks, position=read.position))
    assert same(resumed.next_step(), plain.next_step())


def test_the_next_step_is_read_while_the_present_one_is_computed_and_none_after_it(
    made: list[ReadAhead], monkeypatch: pytest.MonkeyPatch
) -> None:
    positions: list[tuple[int, int]] = []
    read_by = GlobalBatches.read

    def noted(self: GlobalBatches, position: int) -> StepBatch:
        positions.append((position, threading.get_ident()))
        return read_by(self, position)

    monkeypatch.setattr(GlobalBatches, "read", noted)
    reader = ahead(made, stream(make_blocks(10)))
    reader.next_step()
    end = time.monotonic() + 30
    while len(positions) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.1)
    assert [position for position, _ in positions] == [0, 4]
    assert threading.get_ident() not in {thread for _, thread in positions}
    reader.next_step()
    assert reader.position == 8


def test_what_fails_while_reading_is_raised_by_the_step_that_needs_it(
    made: list[ReadAhead], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_by, broken = GlobalBatches.read, [True]

    def fails(self: GlobalBatches, position: int) -> StepBatch:
        if position == 8 and broken:
            raise OSError(5, "Input/output error")
        return read_by(self, position)

    monkeypatch.setattr(GlobalBatches, "read", fails)
    reader = ahead(made, stream(make_blocks(10)))
    reader.next_step()
    reader.next_step()
    with pytest.raises(OSError, match="Input/output"):
        reader.next_step()
    assert reader.position == 8
    broken.clear()
    assert reader.next_step().sample_ids.size == 4 and reader.position == 12


def test_closing_ends_the_thread_and_a_read_that_hangs_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = ReadAhead(stream(make_blocks(10)), CPU)
    reader.next_step()
    thread: Any = reader._thread
    reader.close()
    assert not thread.is_alive()
    reader.close()
    hung = ReadAhead(stream(make_blocks(10)), CPU)
    never, read_by = threading.Event(), GlobalBatches.read
    monkeypatch.setattr("remat.data.batches.CLOSE_S", 0.05)
    monkeypatch.setattr(
        GlobalBatches,
        "read",
        lambda self, position: read_by(self, position) if position == 0 else never.wait(60),
    )
    hung.next_step()
    began = time.monotonic()
    hung.close()
    assert time.monotonic() - began < 10
    never.set()


def test_a_reader_that_was_never_asked_has_no_thread() -> None:
    before = threading.active_count()
    reader = ReadAhead(stream(make_blocks(10)), CPU)
    reader.close()
    assert threading.active_count() == before
    del reader
    gc.collect()
