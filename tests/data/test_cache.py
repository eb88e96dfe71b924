from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from remat.config.options import (
    AlpacaPrompt,
    BadRows,
    ConfigError,
    DataConfig,
    DataFormat,
    DataSource,
    MixedSource,
)
from remat.data import build, cache
from remat.data.blocks import Blocks, TextWriter
from remat.data.cache import Splits, open_blocks, summary
from remat.data.tokenizer import byte_tokenizer
from remat.machine.owner_lock import OwnerLock

ROWS = 200


@pytest.fixture
def cfg(tmp_path: Path) -> DataConfig:
    """Documents of different lengths, each with its own number in it."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"<{n}>" + "x" * (n % 13)}) + "\n" for n in range(ROWS)))
    return DataConfig(
        source=DataSource.files, path=str(data), eval_fraction=0.2, cache_dir=str(tmp_path / "cache")
    )


def opened(cfg: DataConfig, seq_len: int = 16, seed: int = 1) -> Splits:
    return open_blocks(cfg, tokenizer=byte_tokenizer(), seq_len=seq_len, seed=seed, show_progress=False)


def tokens(blocks: Blocks | None) -> list[int]:
    assert blocks is not None
    return blocks.tokens(np.arange(len(blocks))).ravel().tolist()


def text(blocks: Blocks | None) -> str:
    return str(byte_tokenizer().decode(tokens(blocks)))


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of the caches that were built, not only opened."""
    built: list[str] = []

    def write_blocks(plan: build.Plan, folder: Path, shards: Path, *, show_progress: bool) -> None:
        built.append(plan.key)
        build.write_blocks(plan, folder, shards, show_progress=show_progress)

    monkeypatch.setattr(cache, "write_blocks", write_blocks)
    return built


def test_blocks_hold_every_document_in_order(cfg: DataConfig) -> None:
    cfg.eval_fraction = 0
    train, held_out, report = opened(cfg)
    documents = [f"<{n}>" + "x" * (n % 13) + "<|end|>" for n in range(ROWS)]
    ids = byte_tokenizer()("".join(documents))["input_ids"]
    lengths = [len(document) for document in byte_tokenizer()(documents)["input_ids"]]
    starts = [place for place in accumulate([0, *lengths[:-1]]) if place < len(ids) // 16 * 16]
    assert held_out is None
    everywhere = np.arange(len(train))
    assert np.flatnonzero(train.starts(everywhere)).tolist() == starts
    assert report["held_out"] is None
    assert tokens(train) == ids[: len(ids) // 16 * 16]
    assert report["train"] == {
        "documents": ROWS,
        "blocks": len(ids) // 16,
        "tokens": len(ids) // 16 * 16,
        "trained_tokens": len(ids) // 16 * 15,
        "restarts": sum(place % 16 != 0 for place in starts),
        "squared_lengths": sum(
            (b - a) ** 2 for a, b in pairwise(sorted({*starts, *range(0, len(ids) // 16 * 16 + 1, 16)}))
        ),
        "rows_more": 0,
        "turns_left_out": 0,
        "truncated_documents": 0,
        "truncated_tokens": 0,
        "truncated_trained_tokens": 0,
        "dropped_documents": 0,
        "dropped_tokens": len(ids) % 16,
        "long_documents": 0,
        "long_tokens": 0,
        "long_trained_tokens": 0,
    }
    assert json.loads((Path(report["folder"]) / "report.json").read_text())["train"] == report["train"]


def test_batches_do_not_change_the_result(
    cfg: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = opened(cfg)
    monkeypatch.setattr(build, "BATCH_CHARACTERS", 20)
    small = opened(replace(cfg, cache_dir=str(tmp_path / "other")))
    assert tokens(small.train) == tokens(whole.train)
    assert tokens(small.held_out) == tokens(whole.held_out)


def test_the_same_data_and_settings_are_not_built_again(
    cfg: DataConfig, builds: list[str], tmp_path: Path
) -> None:
    first = opened(cfg)
    moved = tmp_path / "moved"
    moved.mkdir()
    path = Path(cfg.path or "").rename(moved / "data.jsonl")
    again = opened(replace(cfg, path=str(path), shuffle=False, on_bad_row=BadRows.skip))
    assert len(builds) == 1
    assert again.report["folder"] == first.report["folder"]
    assert tokens(again.train) == tokens(first.train)


def test_other_content_or_settings_are_built(cfg: DataConfig, builds: list[str]) -> None:
    opened(cfg)
    opened(cfg, seq_len=8)
    opened(cfg, seed=2)
    opened(replace(cfg, eval_fraction=0.3))
    path = Path(cfg.path or "")
    content = path.read_text()
    path.write_text(content.replace("<7>", "<8>"))  # same size, and perhaps the same time
    opened(cfg)
    path.write_text(content)
    opened(cfg)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "other"
    open_blocks(cfg, tokenizer=tokenizer, seq_len=16, seed=1, show_progress=False)
    assert len(builds) == len(set(builds)) == 6


def test_the_seed_matters_only_to_what_is_held_out(cfg: DataConfig, builds: list[str]) -> None:
    cfg.eval_fraction = 0
    opened(cfg, seed=1)
    opened(cfg, seed=2)
    assert len(builds) == 1


def numbers(blocks: Blocks | None) -> set[str]:
    return set(re.findall(r"<(\d+)>", text(blocks)))


def test_held_out_documents_are_disjoint_deterministic_and_about_the_fraction(
    cfg: DataConfig, tmp_path: Path
) -> None:
    first = opened(cfg)
    again = opened(replace(cfg, cache_dir=str(tmp_path / "other")))
    assert tokens(again.held_out) == tokens(first.held_out)
    assert not numbers(first.train) & numbers(first.held_out)
    assert len(numbers(first.train) | numbers(first.held_out)) > ROWS - 5
    assert 20 <= first.report["held_out"]["documents"] <= 60
    assert first.report["held_out"]["documents"] + first.report["train"]["documents"] == ROWS
    assert numbers(opened(cfg, seed=2).held_out) != numbers(first.held_out)


def test_one_text_file_is_divided_and_its_pieces_are_closed(tmp_path: Path) -> None:
    lines = "".join(f"<{n}> {'y' * 60}\n" for n in range(8000))
    (tmp_path / "a.txt").write_text(lines)
    cfg = DataConfig(source=DataSource.files, path=str(tmp_path / "a.txt"), cache_dir=str(tmp_path / "cache"))
    cfg.eval_fraction = 0.3
    train, held_out, report = opened(cfg)
    assert not numbers(train) & numbers(held_out)
    assert len(numbers(train) | numbers(held_out)) >= 7999
    ends = tokens(train).count(256) + tokens(held_out).count(256)
    # One end at each change between the halves and one for the file, which may be in what is dropped.
    assert ends >= 4
    assert report["train"]["documents"] + report["held_out"]["documents"] == 1
    opening = byte_tokenizer()
    opening.add_special_tokens({"bos_token": "<s>"})
    opening.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 258)]
    )
    halves = open_blocks(cfg, tokenizer=opening, seq_len=16, seed=1, show_progress=False)
    for half in (halves.train, halves.held_out):
        # What follows an end is an opening, and nothing else is.
        ids = [258, *tokens(half)]
        assert [place for place, token in enumerate(ids) if token == 256 and place + 1 < len(ids)] == [
            place - 1 for place, token in enumerate(ids) if token == 258 and place > 1
        ]
    whole = opened(replace(cfg, eval_fraction=0.0))
    assert byte_tokenizer().decode(tokens(whole.train)) == lines[: len(whole.train) * 16]


def test_a_path_of_its_own_is_held_out_whole(cfg: DataConfig, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "held out text"}\n' * 3)
    train, held_out, report = opened(replace(cfg, eval_path=str(other)))
    assert report["train"]["documents"] == ROWS
    assert text(held_out) == ("held out text<|end|>" * 3)[: len(text(held_out))]
    assert "held" not in text(train)
    with pytest.raises(ConfigError, match=r"data\.eval_path=.* evaluation would be on training data"):
        opened(replace(cfg, eval_path=cfg.path))
    with pytest.raises(ConfigError, match=r"data\.eval_path=.*nowhere does not exist"):
        opened(replace(cfg, eval_path=str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    ("eval_fraction", "seq_len", "reason"),
    [
        (
            0.05,
            1600,
            r"leaves no block .* for evaluation beside .* data\.eval_fraction=0 .* or name data\.eval_path",
        ),
        (0.05, 100_000, r"leaves no block of train\.seq_len=100000 .* for training.* smaller train\.seq_len$"),
        (0.0, 100_000, r"leaves no block of train\.seq_len=100000 .* for training.* smaller train\.seq_len$"),
    ],
)
def test_data_for_less_than_the_needed_blocks_is_an_error_with_a_remedy(
    cfg: DataConfig, eval_fraction: float, seq_len: int, reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"data\.path=.*data\.jsonl {reason}"):
        opened(replace(cfg, eval_fraction=eval_fraction), seq_len)
    assert not [*Path(cfg.cache_dir).glob("*.tmp-*"), *Path(cfg.cache_dir).glob("*/report.json")]


def test_skipped_rows_are_in_the_report_and_stop_remembers_them(
    cfg: DataConfig, builds: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(cfg.path or "")
    path.write_text(path.read_text() + "broken\n" * 30 + '{"text": ""}\n')
    with pytest.raises(ConfigError, match=rf"data\.jsonl:{ROWS + 1}: is not JSON"):
        opened(cfg)
    _, _, report = opened(replace(cfg, on_bad_row=BadRows.skip))
    assert report["bad_rows"]["count"] == 30
    assert len(report["bad_rows"]["first"]) == 20
    assert report["bad_rows"]["first"][0].startswith(f"{path}:{ROWS + 1}: ")
    assert report["empty_documents"] == 1
    listed = Path(report["folder"]) / "report.json"
    assert summary(report) == f"{ROWS} documents, 1 empty, 30 bad rows skipped, listed in {listed}"
    assert not caplog.records  # every rank opens the cache, and only one has to say it
    assert len(builds) == 2
    with pytest.raises(ConfigError, match=rf"data\.jsonl:{ROWS + 1}: is not JSON"):
        opened(cfg)
    assert len(builds) == 2  # the report of the cache was enough


def test_instruction_data(tmp_path: Path) -> None:
    rows = [{"instruction": "say", "output": str(n) * n} for n in range(1, 9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = DataConfig(source=DataSource.files, path=str(tmp_path / "a.jsonl"), format=DataFormat.alpaca)
    cfg.eval_fraction, cfg.alpaca_prompt = 0.0, AlpacaPrompt.stanford
    cfg.cache_dir = str(tmp_path / "cache")
    train, _, report = opened(cfg, seq_len=200)
    every = np.arange(8)
    ids, trained = train.tokens(every), train.trained(every)
    assert [byte_tokenizer().decode(i[t]) for i, t in zip(ids, trained, strict=True)] == [
        f"{row['output']}<|end|>" for row in rows
    ]
    assert train.trained_tokens.tolist() == [n + 1 for n in range(1, 9)] == trained[:, 1:].sum(1).tolist()
    assert report["train"]["trained_tokens"] == sum(range(2, 10))
    assert (ids[np.arange(200) >= train.lengths[:, None]] == 257).all()
    # Room for three tokens after the prompt: two characters and their end, or three characters of a longer answer.
    short = int(train.lengths[0]) + 1
    cut = opened(cfg, seq_len=short)
    assert cut.report["train"]["truncated_documents"] == 6
    assert cut.train.trained_tokens.tolist() == [2, 3, 3, 3, 3, 3, 3, 3]
    assert summary(report) == "8 documents"
    assert summary(cut.report) == "8 documents, 6 cut at train.seq_len"
    shorter = opened(replace(cfg, eval_fraction=0.4), seq_len=short)
    assert summary(shorter.report) == "8 documents, 6 cut at train.seq_len"  # both halves together
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write(json.dumps({"instruction": "x" * 200, "output": "never"}) + "\n")
    dropped = summary(opened(cfg, seq_len=short).report)
    assert dropped == "9 documents, 7 cut at train.seq_len, 1 dropped (no trained token left)"
    none_left = opened_error(cfg, seq_len=short - 3)
    assert "9 with nothing to train on" in none_left
    assert "a larger train.seq_len" in none_left


def opened_error(cfg: DataConfig, seq_len: int) -> str:
    with pytest.raises(ConfigError) as error:
        opened(cfg, seq_len)
    return str(error.value)


def test_synthetic_blocks_have_the_promised_number_and_structure(tmp_path: Path) -> None:
    cfg = DataConfig(source=DataSource.synthetic, synthetic_blocks=300, cache_dir=str(tmp_path))
    train, held_out, report = opened(cfg, seq_len=64)
    assert summary(report) == ""
    assert held_out is not None
    assert (len(train), len(held_out)) == (300, 15)
    ids = train.tokens(np.arange(300))
    assert set(ids.ravel().tolist()) == set(range(256))  # bytes, and no special token
    successors = np.unique(np.stack([ids[:, :-1].ravel(), ids[:, 1:].ravel()]), axis=1)
    assert np.bincount(successors[0]).max() == 4
    unseen = np.stack(
        [held_out.tokens(np.arange(15))[:, :-1].ravel(), held_out.tokens(np.arange(15))[:, 1:].ravel()]
    )
    assert np.unique(np.hstack([successors, unseen]), axis=1).shape == successors.shape  # the same chain
    assert len(np.unique(np.vstack([ids, held_out.tokens(np.arange(15))]), axis=0)) == 315
    assert tokens(opened(replace(cfg, cache_dir=str(tmp_path / "b")), seq_len=64).train) == ids.ravel().tolist()
    assert tokens(opened(cfg, seq_len=64, seed=2).train) != ids.ravel().tolist()
    assert opened(replace(cfg, eval_fraction=0.0), seq_len=64).held_out is None


@pytest.mark.parametrize("options", [{"path": "x"}, {"eval_path": "x"}, {"format": DataFormat.chat}])
def test_synthetic_refuses_what_it_would_ignore(tmp_path: Path, options: dict[str, str]) -> None:
    cfg = DataConfig(source=DataSource.synthetic, cache_dir=str(tmp_path), **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"data.{next(iter(options))}"):
        opened(cfg)


def test_a_cache_that_cannot_be_written_names_the_option(cfg: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"data\.cache_dir=.*file/cache"):
        opened(replace(cfg, cache_dir=str(tmp_path / "file" / "cache")))


@pytest.mark.parametrize(("form", "expected"), [(DataFormat.plain, 8_200), (DataFormat.alpaca, 1_280_000)])
def test_a_disk_without_room_is_refused_before_anything_is_written(
    cfg: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: DataFormat, expected: int
) -> None:
    """200 documents of about 10 tokens at 4 bytes; and as rows that each have a block of 1280 tokens, at 5 bytes."""
    rows = [{"text": f"<{n:03d}>xxxx", "instruction": "x", "output": str(n)} for n in range(ROWS)]
    Path(cfg.path or "").write_text("".join(json.dumps(row) + "\n" for row in rows))
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(build.shutil, "disk_usage", lambda folder: disk._replace(free=expected // 2))
    with pytest.raises(
        build.NoRoom, match=r"data\.cache_dir=.* free, and the blocks of data\.path=.* need about "
    ):
        opened(replace(cfg, format=form, eval_fraction=0.0), seq_len=1280)
    assert not [*Path(cfg.cache_dir).glob("*.tmp-*"), *Path(cfg.cache_dir).glob("*/report.json")]
    monkeypatch.setattr(build.shutil, "disk_usage", lambda folder: disk._replace(free=expected))
    assert (
        opened(replace(cfg, format=form, eval_fraction=0.0), seq_len=1280).report["train"]["documents"] == ROWS
    )


def test_a_disk_that_fills_up_is_no_bad_option(cfg: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "write_blocks", full)
    with pytest.raises(build.NoRoom, match=r"data\.cache_dir=.*No space left on device"):
        opened(cfg)
    with pytest.raises(build.NoRoom, match=r"data\.mix\.a: "):
        opened(DataConfig(mix={"a": MixedSource(path=cfg.path)}, cache_dir=cfg.cache_dir))


def test_what_killed_builds_left_is_removed_after_a_week(cfg: DataConfig, tmp_path: Path) -> None:
    root = Path(cfg.cache_dir)
    for name, age_s in {"old": 8 * 24 * 3600, "new": 3600, "held": 8 * 24 * 3600}.items():
        (root / f"{name}.shards").mkdir(parents=True)
        (root / f"{name}.shards" / "00000000.npz").write_text("")
        os.utime(root / f"{name}.shards", (time.time() - age_s,) * 2)
    held = OwnerLock(root / "held.lock")
    assert held.take() is None
    opened(cfg)
    held.release()
    assert {path.name for path in root.glob("*.shards")} == {"new.shards", "held.shards"}


def test_an_unexpected_failure_leaves_nothing_and_the_next_call_builds(
    cfg: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(TextWriter, "flush", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            opened(cfg)
    assert not [*Path(cfg.cache_dir).glob("*.tmp-*"), *Path(cfg.cache_dir).glob("*/report.json")]
    assert len(opened(cfg).train)
