"""Instruction data packed: how full blocks are, and that training on them is training on the rows."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from remat.config.options import (
    ConfigError,
    DataConfig,
    DataFormat,
    DataSource,
    LongRows,
    LossKind,
    Packing,
)
from remat.data import blocks as data_blocks
from remat.data import build
from remat.data.batches import GlobalBatches, micro_batch
from remat.data.blocks import Blocks
from remat.data.cache import Splits, loss_of_tokens, open_blocks, summary
from remat.data.tokenizer import byte_tokenizer
from remat.model import packing
from remat.model.loss import TokenLoss
from remat.model.packing import Packed, Way
from tests.support import small_models
from tests.support.chats import make_chats

SEQ_LEN = 512
Rows = list[tuple[tuple[int, ...], tuple[bool, ...]]]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    folder = tmp_path_factory.mktemp("chats")
    return DataConfig(
        source=DataSource.files,
        format=DataFormat.chat,
        path=str(make_chats(folder / "chats.jsonl")),
        packing=Packing.documents,
        cache_dir=str(folder / "cache"),
    )


def opened(cfg: DataConfig, seq_len: int = SEQ_LEN) -> Splits:
    return open_blocks(cfg, tokenizer=byte_tokenizer(), seq_len=seq_len, seed=1, show_progress=False)


def rows_of(blocks: Blocks | None) -> Rows:
    """The tokens of each row, and which are targets; sorted."""
    assert blocks is not None
    found = []
    every = np.arange(len(blocks))
    tokens, trained, starts = blocks.tokens(every), blocks.trained(every), blocks.starts(every)
    for block, length in enumerate(blocks.lengths):
        bounds = [*np.flatnonzero(starts[block]), length]
        for a, b in pairwise(bounds):
            assert not trained[block, a] or not blocks.apart, "the first token of a row follows another row"
            found.append((tuple(tokens[block, a:b]), (False, *trained[block, a + 1 : b])))
        assert not trained[block, length:].any()
    return sorted(found)


def test_at_least_97_percent_of_the_positions_of_real_chats_are_tokens(chats: DataConfig) -> None:
    packed, alone = opened(chats), opened(replace(chats, packing=Packing.none))
    for half, other in ((packed.train, alone.train), (packed.held_out, alone.held_out)):
        assert half is not None and other is not None
        assert half.apart and not other.apart and other.one_each
        assert rows_of(half) == rows_of(other), "every row once, whole, with its own targets"
        assert half.trained_tokens.sum() == other.trained_tokens.sum()
    assert packed.train.lengths.mean() / SEQ_LEN >= 0.97
    assert len(packed.train) < len(alone.train) / 4
    assert packed.report["train"]["documents"] == alone.report["train"]["documents"]
    for name in ("tokens", "trained_tokens", "squared_lengths", "truncated_trained_tokens"):
        assert packed.report["train"][name] == alone.report["train"][name]
    lengths = alone.train.lengths.astype(np.int64)
    assert packed.context == alone.context == round(int((lengths**2).sum()) / int(lengths.sum()))


def test_windows_bound_the_memory_and_neither_they_nor_batches_change_what_is_packed(
    chats: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = opened(chats).train
    monkeypatch.setattr(data_blocks, "WINDOW_TOKENS", 0)
    monkeypatch.setattr(data_blocks, "WINDOW_BLOCKS", 40)
    monkeypatch.setattr(build, "BATCH_DOCUMENTS", 8)
    windows = opened(replace(chats, cache_dir=str(tmp_path))).train
    assert rows_of(windows) == rows_of(whole)
    assert windows.tokens(np.arange(40)).tolist() != whole.tokens(np.arange(40)).tolist()
    assert windows.lengths.mean() / SEQ_LEN >= 0.95


def test_positions_restart_with_each_row_and_with_the_padding(chats: DataConfig) -> None:
    blocks = opened(chats).train
    shortest = int(np.argmin(blocks.lengths))
    batch = micro_batch(blocks, np.array([shortest]))
    (positions,) = batch["position_ids"].tolist()
    starts = [*np.flatnonzero(blocks.starts(np.array([shortest]))[0]), int(blocks.lengths[shortest]), SEQ_LEN]
    assert positions == [place for a, b in pairwise(starts) for place in range(b - a)]
    assert blocks.lengths[shortest] < SEQ_LEN


def loss_and_gradients(net: Any, batches: list[dict[str, torch.Tensor]], trained: int) -> list[torch.Tensor]:
    packed = Packed(Packing.documents, "", Way.positions)
    net.zero_grad()
    total = torch.zeros(())
    for batch in batches:
        loss = TokenLoss(net, LossKind.full)(net, packing.given(packed, batch, net)) / trained
        loss.backward()
        total += loss.detach()
    return [total, *(p.grad.clone() for p in net.parameters())]


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_the_loss_per_token_and_the_gradients_are_those_of_the_rows_alone(
    chats: DataConfig, model_type: str
) -> None:
    """The same rows in the same step: packed, padded to their longest, and each by itself, in fp32."""
    net = small_models.build(model_type, vocab_size=258)
    packed, alone = opened(chats).train, opened(replace(chats, packing=Packing.none)).train
    step = np.arange(4)
    wanted = rows_of(
        Blocks(
            packed.tokens(step),
            packed.trained(step),
            lengths=packed.lengths[step],
            starts=np.packbits(packed.starts(step), axis=1),
        )
    )
    place = {row: index for index, row in enumerate(_in_order(alone))}
    ids = np.array([place[row] for row in wanted])
    ids = ids[np.argsort(-alone.lengths[ids], kind="stable")]
    trained = int(packed.trained_tokens[step].sum())
    assert trained == int(alone.trained_tokens[ids].sum())
    together = loss_and_gradients(net, [micro_batch(packed, step)], trained)
    padded = loss_and_gradients(net, [micro_batch(alone, ids)], trained)
    singly = loss_and_gradients(net, [micro_batch(alone, ids[i : i + 1]) for i in range(len(ids))], trained)
    assert micro_batch(alone, ids)["input_ids"].shape[1] < SEQ_LEN
    torch.testing.assert_close(together, singly, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(padded, singly, rtol=1e-4, atol=1e-6)


def _in_order(blocks: Blocks) -> Rows:
    every = np.arange(len(blocks))
    tokens, trained = blocks.tokens(every), blocks.trained(every)
    return [
        (tuple(tokens[i, :length]), (False, *trained[i, 1:length])) for i, length in enumerate(blocks.lengths)
    ]


def test_another_row_before_it_changes_nothing_of_a_row(chats: DataConfig) -> None:
    """The logits and gradients of the second row are, bit for bit, those after another first row."""
    net = small_models.build("llama", vocab_size=258)
    blocks = opened(chats).train
    which = np.flatnonzero(blocks.starts(np.arange(len(blocks)))[:, 1:].sum(axis=1) >= 2)[:2]
    batch = micro_batch(blocks, which)
    bounds = [np.flatnonzero(starts)[1:3] for starts in blocks.starts(which)]
    for row, (begin, end) in enumerate(bounds):  # only the second rows are trained
        batch["labels"][row, :begin], batch["labels"][row, end:] = -100, -100
    found = []
    for seed in (1, 2):
        ids = batch["input_ids"].clone()
        for row, (begin, _) in enumerate(bounds):
            ids[row, :begin] = torch.randint(0, 256, (begin,), generator=torch.Generator().manual_seed(seed))
        inputs = packing.given(Packed(Packing.documents, "", Way.positions), batch | {"input_ids": ids}, net)
        logits = net(**{name: v for name, v in inputs.items() if name != "labels"}, use_cache=False).logits
        seen = [logits[row, begin:end].detach() for row, (begin, end) in enumerate(bounds)]
        found.append([*seen, *loss_and_gradients(net, [inputs], 1)])
    assert small_models.same(*found)
    assert float(found[0][2]) > 0


@pytest.mark.parametrize("world", [1, 2, 4])
def test_packed_batches_are_the_same_on_any_number_of_ranks(chats: DataConfig, world: int) -> None:
    for cfg in (chats, replace(chats, packing=Packing.none)):
        blocks = opened(cfg).train

        def step(rank: int, size: int, of: Blocks = blocks) -> Any:
            batches = GlobalBatches(
                of, global_batch_size=16, micro_batch_size=2, rank=rank, world_size=size, seed=3, shuffle=True
            )
            return [batches.next_step() for _ in range(3)][-1]

        alone, ranks = step(0, 1), [step(rank, world) for rank in range(world)]
        for index, expected in enumerate(alone.micro_batches):
            found = ranks[index % world].micro_batches[index // world]
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in found)
        totals = {(each.trained_tokens, each.seen_tokens, each.positions) for each in [alone, *ranks]}
        assert len(totals) == 1
        shapes = [batch["input_ids"].shape for each in ranks for batch in each.micro_batches]
        assert sum(rows * width for rows, width in shapes) == alone.positions


def test_without_packing_micro_batches_are_even_and_as_wide_as_their_longest_row(chats: DataConfig) -> None:
    blocks = opened(replace(chats, packing=Packing.none)).train
    batches = GlobalBatches(
        blocks, global_batch_size=32, micro_batch_size=4, rank=0, world_size=1, seed=3, shuffle=True
    )
    step = batches.next_step()
    assert sorted(step.sample_ids) == sorted(batches._permutation(0)[:32]), "the same rows as ever"
    widths = [batch["input_ids"].shape[1] for batch in step.micro_batches]
    assert widths == sorted(widths, reverse=True)
    for ids, batch in zip(step.sample_ids.reshape(-1, 4), step.micro_batches, strict=True):
        longest = int(blocks.lengths[ids].max())
        width = batch["input_ids"].shape[1]
        assert width % 8 == 0 and longest <= width < longest + 8
        labels = np.where(blocks.trained(ids), blocks.tokens(ids), -100)
        assert (labels[:, width:] == -100).all()
        assert batch["labels"].tolist() == labels[:, :width].tolist()
    assert step.seen_tokens < step.positions == 4 * sum(widths) < 32 * SEQ_LEN / 2
    assert 0.02 < batches.padding_share() < 0.3
    packed = GlobalBatches(
        opened(chats).train,
        global_batch_size=32,
        micro_batch_size=4,
        rank=0,
        world_size=1,
        seed=3,
        shuffle=True,
    )
    assert packed.padding_share() < 0.03


ROW = 25  # tokens of a chat of a one-letter question and answer, in the byte tokenizer's template


def short_chats(path: Path, answers: list[int]) -> DataConfig:
    rows = [
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * answer}]}
        for answer in answers
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(
        source=DataSource.files,
        format=DataFormat.chat,
        path=str(path),
        packing=Packing.documents,
        eval_fraction=0.0,
        cache_dir=str(path.parent / "cache"),
    )


def test_long_rows_are_cut_dropped_or_refused_as_asked(tmp_path: Path) -> None:
    cfg = short_chats(tmp_path / "a.jsonl", [1, 31, 2, 61])
    cut = opened(cfg, ROW + 9)
    counts = cut.report["train"]
    assert (counts["documents"], len(rows_of(cut.train))) == (4, 4)
    assert counts["truncated_documents"] == 2
    assert counts["truncated_tokens"] == 21 + 51
    assert counts["truncated_trained_tokens"] == 20 + 50  # a line break follows the answer's end
    assert summary(cut.report) == "4 documents, 2 cut at train.seq_len"
    said = loss_of_tokens(cut.report)
    assert said.startswith(
        f"2 of 4 rows are longer than train.seq_len={ROW + 9} and were cut (data.long_rows=cut): 72 tokens are "
        f"missing, 70 of them trained ones. The longest has {ROW + 60} tokens; the first: {tmp_path}/a.jsonl:2: "
    )
    dropped = opened(replace(cfg, long_rows=LongRows.drop), ROW + 9)
    counts = dropped.report["train"]
    assert (counts["documents"], len(rows_of(dropped.train)), counts["truncated_documents"]) == (4, 2, 0)
    assert (counts["long_documents"], counts["long_tokens"]) == (2, ROW + 30 + ROW + 60)
    assert counts["long_trained_tokens"] == 32 + 62
    assert summary(dropped.report) == "4 documents, 2 left out as longer than train.seq_len"
    assert "2 of 4 rows are longer" in loss_of_tokens(dropped.report)
    with pytest.raises(ConfigError) as refused:
        opened(replace(cfg, long_rows=LongRows.refuse), ROW + 9)
    for part in (
        "data.long_rows=refuse, and 2 rows",
        "a.jsonl:2: ",
        f"train.seq_len={ROW + 60}.",
        "a.jsonl:4: ",
    ):
        assert part in str(refused.value)
    fits = opened(replace(cfg, long_rows=LongRows.refuse), ROW + 60)
    assert fits.report["train"]["truncated_documents"] == 0
    assert loss_of_tokens(fits.report) == ""


def test_dropping_all_rows_is_an_error_that_says_so(tmp_path: Path) -> None:
    cfg = replace(short_chats(tmp_path / "a.jsonl", [30, 40]), long_rows=LongRows.drop)
    with pytest.raises(ConfigError, match=r"2 documents, .* 2 longer than a block, .* a larger train\.seq_len"):
        opened(cfg, ROW)
