"""Data that is read while it is trained on: the same rows, the same order on any number of ranks, from any position."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from remat.config import validation
from remat.config.options import (
    BadRows,
    ConfigError,
    DataConfig,
    DataSource,
    LongRows,
    MixedSource,
    Packing,
    RunConfig,
    TrainConfig,
)
from remat.data import cache, streaming
from remat.data.cache import Splits, open_blocks
from remat.data.streaming import FirstWindow, StreamedBatches
from remat.data.tokenizer import byte_tokenizer
from tests.support.chats import make_chats

SEQ_LEN, BATCH = 128, 4
KINDS = ["chats", "texts", "text files"]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "WINDOW_TOKENS", 3000)
    monkeypatch.setattr(streaming, "WINDOW_BLOCKS", 4)
    monkeypatch.setattr(streaming, "BATCH_DOCUMENTS", 5)


def config(folder: Path, kind: str, **more: Any) -> DataConfig:
    """Some 20,000 tokens of a kind, in two files."""
    cache, folder = folder / "cache", folder / "data"
    folder.mkdir()
    for part in (0, 1):
        if kind == "chats":
            make_chats(folder / f"{part}.jsonl", 100 + part)
        elif kind == "texts":
            rows = [json.dumps({"text": f"{part} {n} " * (1 + 7 * n % 40)}) + "\n" for n in range(120)]
            (folder / f"{part}.jsonl").write_text("".join(rows))
        else:
            (folder / f"{part}.txt").write_text("".join(f"{part} line {n}\n" for n in range(900)))
    options: dict[str, Any] = {"packing": Packing.documents, "eval_fraction": 0.0} | more
    return DataConfig(
        source=DataSource.files, path=str(folder), streaming=True, cache_dir=str(cache), **options
    )


def opened(cfg: DataConfig) -> Splits:
    return open_blocks(cfg, tokenizer=byte_tokenizer(), seq_len=SEQ_LEN, seed=7, show_progress=False)


def stream(splits: Splits, **more: Any) -> StreamedBatches:
    assert isinstance(splits.train, FirstWindow)
    options: dict[str, Any] = {"global_batch_size": BATCH, "micro_batch_size": 1, "rank": 0, "world_size": 1}
    return StreamedBatches(splits.train, **(options | {"seed": 7, "shuffle": True} | more))


def same(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


def documents(micro_batches: list[dict[str, torch.Tensor]]) -> list[tuple[int, ...]]:
    """The pieces of documents in blocks, without padding."""
    found = []
    for batch in micro_batches:
        for ids, positions in zip(batch["input_ids"].tolist(), batch["position_ids"].tolist(), strict=True):
            bounds = [*(place for place, position in enumerate(positions) if position == 0), SEQ_LEN]
            pieces = [tuple(ids[a:b]) for a, b in pairwise(bounds)]
            found += [piece for piece in pieces if set(piece) != {257}]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_has_every_row_once_as_the_cache_has(tmp_path: Path, kind: str) -> None:
    cfg = config(tmp_path, kind)
    cached = opened(replace(cfg, streaming=False)).train
    splits = opened(replace(cfg, shuffle=False))
    batches = stream(splits, global_batch_size=1)
    ids: list[dict[str, torch.Tensor]] = []
    while (step := batches.next_step()).epoch == 0:
        ids += step.micro_batches
    windows = batches.lost(), batches.state()["place"]["window"]
    assert windows[1] > 3
    every = np.arange(len(cached))
    if kind == "chats":
        whole = cached.tokens(every)
        expected = documents(
            [{"input_ids": torch.from_numpy(whole), "position_ids": torch.from_numpy(cached.positions(every))}]
        )
        assert sorted(documents(ids)) == sorted(expected)
        assert windows[0] == {"rows_cut": splits.report["train"]["truncated_documents"]} | windows[0]
    else:  # text is cut wherever a block is full, so windows change nothing at all
        assert np.array_equal(torch.cat([each["input_ids"] for each in ids]).numpy(), cached.tokens(every))
        starts = torch.cat([each["position_ids"] for each in ids]).numpy()
        assert np.array_equal(starts, cached.positions(every))
    again = stream(splits, global_batch_size=1)
    assert same(again.next_step().micro_batches, ids[:1])
    assert same(step.micro_batches, ids[:1]), "the second epoch begins as the first did"


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packing", [Packing.documents, None])
def test_steps_are_the_same_on_any_number_of_ranks_and_from_any_position(
    tmp_path: Path, kind: str, packing: Packing | None
) -> None:
    """Also in another process: what is saved is JSON. The last steps are of the second epoch."""
    unpacked = Packing.none if kind == "chats" else Packing.stream
    cfg = config(tmp_path, kind, packing=packing or unpacked)
    alone = stream(opened(cfg))
    expected, states = [], []
    while not expected or expected[-1].epoch == 0:
        states.append(json.dumps(alone.state()))
        expected.append(alone.next_step())
    assert len(expected) > 12
    for start in (0, 3, len(expected) // 2, len(expected) - 1):
        saved = json.loads(states[start])
        assert saved["position"] == BATCH * start
        for world in (1, 2):
            ranks = [
                stream(opened(cfg), rank=r, world_size=world, position=saved["position"], place=saved["place"])
                for r in range(world)
            ]
            for step, state in zip(expected[start : start + 3], states[start : start + 3], strict=False):
                assert [json.dumps(rank.state()) for rank in ranks] == [state] * world
                found = [rank.next_step() for rank in ranks]
                together = [
                    batch for each in zip(*(f.micro_batches for f in found), strict=True) for batch in each
                ]
                assert same(together, step.micro_batches)
                assert all(f.sample_ids.tolist() == step.sample_ids.tolist() for f in found)
                assert all(f.trained_tokens == step.trained_tokens for f in found)


def test_windows_are_shuffled_by_the_seed(tmp_path: Path) -> None:
    cfg = config(tmp_path, "texts")
    shuffled, plain = stream(opened(cfg)), stream(opened(replace(cfg, shuffle=False)))
    found = [[step.next_step().sample_ids.tolist() for _ in range(20)] for step in (shuffled, plain)]
    flat = [[block for step in steps for block in step] for steps in found]
    assert flat[1] == list(range(20 * BATCH))
    assert flat[0] != flat[1] and all(abs(block - place) < 60 for place, block in enumerate(flat[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_rows_are_held_out_by_count_and_never_trained(tmp_path: Path, kind: str) -> None:
    cfg = config(tmp_path, kind, eval_fraction=0.05, eval_rows=8)
    splits = opened(cfg)
    assert splits.held_out is not None and splits.report["held_out"]["documents"] == 8
    every = np.arange(len(splits.held_out))
    held_out = {tuple(block[:40]) for block in splits.held_out.tokens(every).tolist()}
    batches = stream(splits, global_batch_size=1)
    trained = set()
    while (step := batches.next_step()).epoch < 2:
        trained.add(tuple(step.micro_batches[0]["input_ids"][0, :40].tolist()))
    assert len(trained) > 50
    if kind != "chats":  # chats repeat their words
        assert not held_out & trained
    few = opened(replace(cfg, eval_rows=1000, eval_tokens=600))
    assert few.held_out is not None and few.held_out.lengths.sum() < 2000
    assert few.key != splits.key
    with pytest.raises(
        ConfigError, match=r"data\.eval_rows=100000: .* has \d+ rows, which leaves none to train"
    ):
        opened(replace(cfg, eval_rows=100_000))
    nothing = opened(replace(cfg, eval_rows=0))
    assert nothing.held_out is None


def test_held_out_data_of_its_own(tmp_path: Path) -> None:
    cfg = config(tmp_path, "texts")
    own = tmp_path / "own.jsonl"
    own.write_text(
        '{"text": "held out, and long enough for a block of one hundred and twenty-eight tokens"}\n' * 5
    )
    cfg = replace(cfg, eval_path=str(own))
    splits = opened(cfg)
    assert splits.held_out is not None and splits.report["held_out_by"] == "data.eval_path"
    assert splits.report["held_out"]["documents"] == 5
    with pytest.raises(ConfigError, match="evaluation would be on training data"):
        opened(replace(cfg, eval_path=f"{cfg.path}/0.jsonl"))


def test_a_hub_dataset_is_streamed_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    local = config(tmp_path, "chats")
    hub = replace(local, source=DataSource.hub)
    one, other = stream(opened(local)), stream(opened(hub))
    for _ in range(40):
        state = json.loads(json.dumps(other.state()))
        expected, found = one.next_step(), other.next_step()
        assert same(found.micro_batches, expected.micro_batches)
    resumed = stream(opened(hub), position=state["position"], place=state["place"])
    assert same(resumed.next_step().micro_batches, found.micro_batches)
    assert state["place"]["part"] == 1 or state["place"]["epoch"] == 1
    assert not list((tmp_path / "hub").glob("**/*.arrow")), "nothing is written to the disk"


def test_what_is_lost_is_counted_and_unusable_rows_are_told(tmp_path: Path) -> None:
    cfg = config(tmp_path, "chats", long_rows=LongRows.drop, on_bad_row=BadRows.skip)
    path = tmp_path / "data" / "1.jsonl"
    path.write_text(path.read_text() + "no json\n")
    splits = opened(cfg)
    batches = stream(splits, global_batch_size=1)
    while batches.next_step().epoch == 0:
        pass
    whole = opened(replace(cfg, streaming=False)).report
    assert batches.lost()["bad_rows"] == whole["bad_rows"]["count"] == 1
    assert batches.lost()["rows_left_out"] >= whole["train"]["long_documents"] > 0
    batches = stream(opened(replace(cfg, on_bad_row=BadRows.stop)), global_batch_size=1)
    with pytest.raises(ConfigError, match=r"1\.jsonl:102: is not JSON"):
        while batches.next_step().epoch == 0:
            pass


def write_chats(path: Path, lengths: list[int]) -> None:
    """A chat of some 20 tokens more than each of `lengths`."""
    turns = [[("user", "Hi"), ("assistant", "x" * length)] for length in lengths]
    rows = [{"messages": [{"role": role, "content": said} for role, said in chat]} for chat in turns]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_row_that_is_too_long_is_told_or_refused_wherever_it_is(tmp_path: Path) -> None:
    """Held out by number or by a path of its own, and in a window after the first."""
    short, long = tmp_path / "short.jsonl", tmp_path / "long.jsonl"
    write_chats(short, [40] * 400)
    write_chats(long, [400, *[40] * 9])
    lists = {"source": DataSource.files, "streaming": True, "packing": Packing.documents}
    first = DataConfig(path=[str(long), str(short)], eval_rows=10, **lists)  # type: ignore[arg-type]
    own = DataConfig(path=str(short), eval_path=str(long), eval_fraction=0, **lists)  # type: ignore[arg-type]
    for cfg in (first, own):
        report = opened(cfg).report
        assert report["train"]["truncated_documents"] == 0
        assert re.search(
            r"1 of \d+ rows are longer .*; the first: .*long\.jsonl:1: ", cache.loss_of_tokens(report)
        )
        with pytest.raises(
            ConfigError, match=r"(?s)refuse, and 1 rows are longer .*long\.jsonl:1: .*seq_len=4"
        ):
            opened(replace(cfg, long_rows=LongRows.refuse))
    later = replace(first, path=[str(short), str(long)], long_rows=LongRows.refuse)
    batches = stream(opened(later), global_batch_size=1)
    with pytest.raises(ConfigError, match=r"(?s)data\.long_rows=refuse, and 1 rows .*long\.jsonl:1: "):
        while batches.next_step().epoch == 0:
            pass
    assert batches.state()["place"]["window"] > 1


def test_an_unusable_row_that_would_be_held_out_stops_the_run(tmp_path: Path) -> None:
    cfg = config(tmp_path, "chats", eval_fraction=0.05, eval_rows=100)
    path = tmp_path / "data" / "0.jsonl"
    path.write_text("no json\n" + path.read_text())
    with pytest.raises(ConfigError, match=r"0\.jsonl:1: is not JSON"):
        opened(cfg)


@pytest.mark.parametrize("kind", ["chats", "texts"])
def test_a_resume_counts_no_unusable_row_twice(tmp_path: Path, kind: str) -> None:
    cfg = config(tmp_path, kind, on_bad_row=BadRows.skip)
    path = tmp_path / "data" / "0.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("no json\n".join(rows))
    batches = stream(opened(cfg), global_batch_size=1)
    states = [json.loads(json.dumps(batches.state()))]
    while batches.next_step().epoch < 2:
        states.append(json.loads(json.dumps(batches.state())))
    assert batches.lost()["bad_rows"] == 2 * (len(rows) - 1), "those of two epochs"
    for state in {state["place"]["block"]: state for state in states}.values():
        resumed = stream(opened(cfg), global_batch_size=1, position=state["position"], place=state["place"])
        while resumed.position < batches.position:
            resumed.next_step()
        assert resumed.lost() == batches.lost()


def test_the_key_changes_with_the_data_and_the_options(tmp_path: Path) -> None:
    cfg = config(tmp_path, "texts")
    first = opened(cfg).key
    assert opened(cfg).key == first
    assert opened(replace(cfg, packing=Packing.stream)).key == first, "text has the same blocks either way"
    assert opened(replace(cfg, eval_fraction=0.1, eval_rows=9)).key != first
    assert opened(replace(cfg, streaming=False)).key != first
    path = tmp_path / "data" / "0.jsonl"
    path.write_text(path.read_text().replace("0 3 ", "0 4 ", 1))
    assert opened(cfg).key != first


def test_what_a_stream_cannot_know_is_refused() -> None:
    def told(train: TrainConfig | None = None, **data: Any) -> str:
        given = DataConfig(**({"source": DataSource.files, "path": "a", "streaming": True} | data))
        return "\n".join(validation.problems(RunConfig(data=given, train=train or TrainConfig(steps=3))))

    assert "data." not in told()
    assert "train.epochs=3 with data.streaming=true: how long" in told(TrainConfig(epochs=3))
    assert "data.eval_fraction=0.1 with data.streaming=true" in told(eval_fraction=0.1)
    assert "data.streaming=true with data.mix" in told(
        mix={"a": MixedSource(path="a"), "b": MixedSource(path="b")}
    )
    assert "data.eval_rows=5 has no effect without" in told(streaming=False, eval_rows=5)
    assert "data.processes=2 has no effect" in told(processes=2)
    assert "data.streaming=true has no meaning" in told(source=DataSource.synthetic)
