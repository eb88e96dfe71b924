"""Ranks that share sequences read their part of each row: nothing is lost between parts, and nothing else is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from remat.data.batches import GlobalBatches, Part, eval_micro_batches, micro_batch, own_part
from remat.data.blocks import Blocks, RowWriter, TextWriter
from remat.data.mixture import Joined

IGNORED = -100
LENGTHS = [5, 17, 1, 30, 9, 13, 22, 4, 19]  # of documents


def text(folder: Path, seq_len: int) -> Blocks:
    """Documents that follow one another, kept apart."""
    return written(TextWriter(folder, "text", seq_len=seq_len), folder).documents_apart()


def packed_rows(folder: Path, seq_len: int) -> Blocks:
    return written(RowWriter(folder, "rows", seq_len=seq_len, packed=True, pad_id=0), folder)


def single_rows(folder: Path, seq_len: int) -> Blocks:
    return written(RowWriter(folder, "one", seq_len=seq_len, packed=False, pad_id=0), folder)


def written(writer: Any, folder: Path) -> Blocks:
    name = next(iter(folder.glob("*.tokens.bin"))).name.partition(".")[0]
    first = 1
    for place, length in enumerate(LENGTHS):
        writer.begin()
        trained = np.arange(length) % 3 != place % 3
        writer.add(np.arange(first, first + length, dtype=np.int32), trained)
        first += length
    writer.close()
    return Blocks.open(folder, name, writer.seq_len)


def stream(folder: Path, seq_len: int) -> Blocks:
    """The same as one text."""
    return written(TextWriter(folder, "stream", seq_len=seq_len), folder)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("kind", [text, packed_rows, single_rows, stream])
@pytest.mark.parametrize("seq_len", [30, 32])
def test_the_parts_of_a_row_are_the_row(kind: Any, seq_len: int, size: int, tmp_path: Path) -> None:
    """Targets are shifted in the whole rows, so none is lost at an edge; padding carries no loss."""
    blocks = kind(tmp_path, seq_len)
    ids = np.array([2, 0])
    for rows in (blocks, Joined([blocks, blocks])):
        whole = micro_batch(rows, ids)
        width = whole["input_ids"].shape[1]
        parts = [own_part(rows, ids, Part(rank, size)) for rank in range(size)]
        assert {part["input_ids"].shape for part in parts} == {(2, -(-width // size))}
        joined = {
            name: torch.cat([part[name] for part in parts], dim=1)
            for name in ("input_ids", "targets", "position_ids")
        }
        assert torch.equal(joined["input_ids"][:, :width], whole["input_ids"])
        assert torch.equal(joined["targets"][:, : width - 1], whole["labels"][:, 1:])
        assert (joined["targets"][:, width - 1 :] == IGNORED).all()
        positions = joined["position_ids"]
        if not rows.apart:
            assert torch.equal(positions, torch.arange(positions.shape[1]).expand(2, -1))
            continue
        assert torch.equal(positions[:, :width], whole["position_ids"])
        starts = torch.nonzero(positions.flatten() == 0).flatten().tolist()
        assert all(part["documents"].tolist() == [*starts, positions.numel()] for part in parts)


@pytest.mark.parametrize("kind", [text, single_rows])
def test_steps_and_evaluations_have_the_parts_of_their_rows(kind: Any, tmp_path: Path) -> None:
    blocks = kind(tmp_path, 30)
    options: dict[str, Any] = {"micro_batch_size": 2, "rank": 0, "world_size": 1}
    steps = [
        GlobalBatches(
            blocks, **options, global_batch_size=2, seed=1, shuffle=True, part=Part(rank, 2)
        ).next_step()
        for rank in range(2)
    ]
    assert steps[0].sample_ids.tolist() == steps[1].sample_ids.tolist()
    targets = sum(int((step.micro_batches[0]["targets"] != IGNORED).sum()) for step in steps)
    assert targets == steps[0].trained_tokens
    evaluated = [list(eval_micro_batches(blocks, **options, max_batches=0, part=Part(r, 2))) for r in range(2)]
    trained = sum(int((batch["targets"] != IGNORED).sum()) for each in evaluated for batch in each)
    assert trained == blocks.trained_tokens.sum()


BLOCKS, SEQ_LEN, RANKS = 2, 2**23, 4
AROUND = 2 * 2**21  # bytes: the kernel maps large pages, whose ends are others' tokens


def resident_bytes(path: Path) -> int:
    """The bytes of a file that this process has mapped and touched."""
    maps = Path("/proc/self/smaps").read_text()
    return sum(1024 * int(kib) for kib in re.findall(rf"{path.name}\n(?:.*\n)*?Rss: +(\d+)", maps))


def test_a_rank_reads_and_holds_its_part_alone(tmp_path: Path) -> None:
    """Of the tokens of a row a quarter is read; held are 24 bytes for each, and where documents start."""
    np.arange(BLOCKS * SEQ_LEN, dtype=np.int32).tofile(tmp_path / "train.tokens.bin")
    starts = np.zeros((BLOCKS, SEQ_LEN // 8), dtype=np.uint8)
    starts[:, :: SEQ_LEN // 64] = np.packbits([True])
    starts.tofile(tmp_path / "train.starts.bin")
    np.full(BLOCKS, 7, dtype=np.int32).tofile(tmp_path / "train.restarts.bin")
    for rank in range(RANKS):
        blocks = Blocks.open(tmp_path, "train", SEQ_LEN).documents_apart()
        own = own_part(blocks, np.array([1]), Part(rank, RANKS))
        part = SEQ_LEN // RANKS
        assert 4 * part <= resident_bytes(tmp_path / "train.tokens.bin") <= 4 * part + AROUND
        assert sum(value.untyped_storage().nbytes() for value in own.values()) == 3 * 8 * part + 4 * 9
        assert int(own["input_ids"][0, 0]) == SEQ_LEN + rank * part
        del blocks
