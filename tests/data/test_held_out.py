"""What is held out, with few documents and with many."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remat.config.options import ConfigError, DataConfig, DataFormat, DataSource
from remat.data import build
from remat.data import held_out as hold_out
from remat.data.blocks import Blocks
from remat.data.cache import Splits, open_blocks, summary
from remat.data.held_out import choose
from remat.data.rows import Document
from remat.data.tokenizer import byte_tokenizer

SEEDS = range(6)


def opened(folder: Path, pattern: str, *, seed: int, seq_len: int = 128, **options: Any) -> Splits:
    source = DataSource.files
    cfg = DataConfig(
        **{"source": source, "path": str(folder / pattern), "cache_dir": str(folder / "cache")} | options
    )
    return open_blocks(cfg, tokenizer=byte_tokenizer(), seq_len=seq_len, seed=seed, show_progress=False)


def lines_of(blocks: Blocks | None) -> set[str]:
    """Whole lines; each has its own number."""
    assert blocks is not None
    text = byte_tokenizer().decode(blocks.tokens(np.arange(len(blocks))).ravel().tolist())
    return {line for line in str(text).split("\n") if line.startswith("<") and line.endswith(">")}


def write_texts(folder: Path, count: int, size_bytes: int) -> None:
    for file in range(count):
        lines = (f"<{file} {number} {'y' * 20}>\n" for number in range(size_bytes))
        (folder / f"{file}.txt").write_text("".join(lines)[:size_bytes])


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.sample(one_in=5)
@pytest.mark.parametrize(("count", "size_bytes"), [(1, 4000), (2, 700), (2, 150_000), (10, 2000), (99, 3000)])
@pytest.mark.parametrize("seed", SEEDS)
def test_few_text_files_give_both_halves_near_the_fraction(
    tmp_path: Path, count: int, size_bytes: int, seed: int
) -> None:
    write_texts(tmp_path, count, size_bytes)
    train, held_out, report = opened(tmp_path, "*.txt", seed=seed)
    assert held_out is not None
    share = len(held_out) / (len(train) + len(held_out))
    assert abs(share - 0.05) < 0.01 or len(held_out) == 1
    assert len(train) + len(held_out) >= count * size_bytes // 128 - 1
    assert not lines_of(train) & lines_of(held_out)
    assert report["held_out_by"] == ("blocks" if count * size_bytes < 2000 else "documents")


def test_a_text_without_line_breaks_is_divided_in_blocks(tmp_path: Path) -> None:
    text = "".join(f"{number:05d}" for number in range(500))
    (tmp_path / "a.txt").write_text(text)
    train, held_out, report = opened(tmp_path, "a.txt", seed=1, eval_fraction=0.3)
    assert (len(train), len(held_out or [])) == (13, 6)
    assert held_out is not None
    blocks = np.concatenate([train.tokens(np.arange(13)), held_out.tokens(np.arange(6))])
    expected = np.frombuffer(text.encode(), dtype=np.uint8)[: 19 * 128].reshape(19, 128)
    assert sorted(blocks.tolist()) == sorted(expected.tolist())
    assert report["train"]["documents"] == 1
    assert report["train"]["dropped_tokens"] == 2501 - 19 * 128
    assert report["held_out"]["tokens"] == 6 * 128
    assert not list(Path(report["folder"]).glob("whole.*"))
    assert summary(report) == "1 document, too few to hold out whole ones, so single blocks are"
    other = opened(tmp_path, "a.txt", seed=2, eval_fraction=0.3).held_out
    again = opened(tmp_path, "*.txt", seed=1, eval_fraction=0.3, cache_dir=str(tmp_path / "b")).held_out
    assert other is not None
    assert again is not None
    assert again.tokens(np.arange(6)).tolist() == held_out.tokens(np.arange(6)).tolist()
    assert other.tokens(np.arange(6)).tolist() != held_out.tokens(np.arange(6)).tolist()


@pytest.mark.parametrize("count", [2, 3, 10])
@pytest.mark.parametrize("seed", SEEDS)
def test_few_rows_are_held_out_whole(tmp_path: Path, count: int, seed: int) -> None:
    write_rows(tmp_path / "a.jsonl", [{"text": f"{row}" * 400} for row in range(count)])
    train, held_out, report = opened(tmp_path, "a.jsonl", seed=seed)
    assert held_out is not None
    tokens = [set(half.tokens(np.arange(len(half))).ravel().tolist()) - {256} for half in (train, held_out)]
    assert len(tokens[1]) == 1
    assert len(tokens[0]) == count - 1
    assert not tokens[0] & tokens[1]
    assert report["held_out_by"] == "documents"
    assert (report["train"]["documents"], report["held_out"]["documents"]) == (count - 1, 1)


def test_one_long_row_is_divided_and_one_block_is_not(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [{"text": "x" * 300}])
    train, held_out, _ = opened(tmp_path, "a.jsonl", seed=1)
    assert (len(train), len(held_out or [])) == (1, 1)
    with pytest.raises(ConfigError, match=r"data\.path=.* for evaluation beside .* data\.eval_fraction=0"):
        opened(tmp_path, "a.jsonl", seed=1, seq_len=256)
    assert len(opened(tmp_path, "a.jsonl", seed=1, seq_len=256, eval_fraction=0.0).train) == 1


def test_two_usable_examples_are_one_for_each_half_whatever_else_is_dropped(tmp_path: Path) -> None:
    too_long = {"instruction": "x" * 300, "output": "never"}
    rows = [too_long, {"instruction": "a", "output": "b"}, too_long, {"instruction": "c", "output": "d"}]
    write_rows(tmp_path / "a.jsonl", rows)
    found = [
        opened(tmp_path, "a.jsonl", seed=seed, seq_len=200, format=DataFormat.alpaca, eval_fraction=0.2)
        for seed in SEEDS
    ]
    assert {splits.report["held_out_by"] for splits in found} == {"documents", "blocks"}
    for train, held_out, report in found:
        assert (len(train), len(held_out or [])) == (1, 1)
        assert held_out is not None
        assert train.trained_tokens.tolist() == held_out.trained_tokens.tolist() == [2]
        assert train.tokens(np.arange(1)).tolist() != held_out.tokens(np.arange(1)).tolist()
        assert report["train"]["documents"] + report["held_out"]["documents"] == 4
        assert report["train"]["dropped_documents"] + report["held_out"]["dropped_documents"] == 2


@pytest.mark.parametrize("eval_fraction", [1e-9, 0.999999])
def test_any_fraction_leaves_both_halves_a_block(tmp_path: Path, eval_fraction: float) -> None:
    write_rows(tmp_path / "a.jsonl", [{"text": f"<{row}>"} for row in range(200)])
    train, held_out, _ = opened(tmp_path, "a.jsonl", seed=1, seq_len=16, eval_fraction=eval_fraction)
    assert 1 in (len(train), len(held_out or []))
    assert held_out


@pytest.mark.parametrize("seed", SEEDS)
def test_the_standard_library_is_held_out_in_whole_files_near_the_fraction(seed: int) -> None:
    sizes = {f"{number}.py": 1000 + (number % 97) ** 3 for number in range(730)}
    chosen = choose(sizes, seed=seed, fraction=0.05)
    assert sum(sizes[name] for name in chosen) / sum(sizes.values()) == pytest.approx(0.05, abs=0.001)
    assert 15 < len(chosen) <= 73
    assert chosen == choose(dict(reversed(sizes.items())), seed=seed, fraction=0.05)
    assert chosen != choose(sizes, seed=seed + 1, fraction=0.05)


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.5, 0.99])
@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_units_are_chosen_for_both_halves_where_there_are_two(count: int, fraction: float) -> None:
    for seed in SEEDS:
        chosen = choose({str(unit): 100 for unit in range(count)}, seed=seed, fraction=fraction)
        expected = min(max(round(fraction * count), 1), count - 1)
        assert abs(len(chosen) - expected) <= (fraction * count % 1 == 0.5)


def test_a_large_unit_neither_is_held_out_nor_pushes_out_the_small_ones() -> None:
    sizes = {"large": 100_000} | {str(unit): 100 for unit in range(99)}
    for seed in SEEDS:
        chosen = choose(sizes, seed=seed, fraction=0.05)
        assert "large" not in chosen
        assert len(chosen) == 10


def test_of_many_documents_each_decides_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [Document("x" * 10, "", str(unit)) for unit in range(4000)]
    read: list[str] = []

    def reading(documents: list[Document]) -> Any:
        for document in documents:
            read.append(document.unit)
            yield document

    first = hold_out.rule(reading(many), seed=1, fraction=0.1)
    assert len(read) == hold_out.PLANNED_UNITS + 1
    held_out = {d.unit for d in many if first(d.unit)}
    assert 340 < len(held_out) < 460
    with_more = hold_out.rule([Document("new", "", "new"), *many], seed=1, fraction=0.1)
    assert {d.unit for d in many if with_more(d.unit)} == held_out


def test_held_out_tokens_are_bounded_wherever_the_data_lies(tmp_path: Path) -> None:
    """5 % of 3,000 rows of about 30 tokens are 4,500; 1,000 are held out when asked, the same in another folder."""
    write_rows(tmp_path / "a.jsonl", [{"text": f"<{row}>" + "x" * (row % 50)} for row in range(3000)])
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "b.jsonl").write_text((tmp_path / "a.jsonl").read_text())
    by_fraction, bounded, moved = (
        opened(folder, name, seed=1, seq_len=16, eval_tokens=most)
        for folder, name, most in (
            (tmp_path, "a.jsonl", 1_000_000),
            (tmp_path, "a.jsonl", 1000),
            (other, "b.jsonl", 1000),
        )
    )
    assert by_fraction.held_out is not None and bounded.held_out is not None and moved.held_out is not None
    assert 3500 < by_fraction.report["held_out"]["tokens"] < 5500
    assert 600 < bounded.report["held_out"]["tokens"] < 1300
    every = np.arange(len(bounded.held_out))
    assert moved.held_out.tokens(every).tolist() == bounded.held_out.tokens(every).tolist()
    unbounded = opened(tmp_path, "a.jsonl", seed=1, seq_len=16, eval_tokens=0)
    assert unbounded.report["held_out"]["tokens"] == by_fraction.report["held_out"]["tokens"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.csv.gz", "a.arrow"])
def test_held_out_tokens_are_bounded_where_rows_have_no_size(tmp_path: Path, name: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    rows = [{"text": f"<{row}>" + "x" * (row % 50)} for row in range(3000)]
    if name == "a.arrow":
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.ipc.new_file(str(tmp_path / name), table.schema) as file:
            file.write_table(table)
    else:
        lines = [json.dumps(row) if ".json" in name else row["text"] for row in rows]
        separator, begin, end = (",", "[", "]") if ".json." in name else ("\n", "text\n" * (".csv" in name), "")
        (tmp_path / name).write_bytes(gzip.compress(f"{begin}{separator.join(lines)}{end}".encode()))
    found = opened(tmp_path, name, seed=1, seq_len=16, eval_tokens=1000).report["held_out"]["tokens"]
    assert 900 < found < 1100
    assert opened(tmp_path, name, seed=1, seq_len=16).report["held_out"]["tokens"] > 3500


@pytest.mark.parametrize("count", [400, pytest.param(6000, marks=pytest.mark.exhaustive)])
def test_the_bound_holds_where_the_first_rows_are_a_poor_sample(tmp_path: Path, count: int) -> None:
    """They are short in a table whose sizes are not known before it is read: no more is held out once it is full."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"<{row}>" if row < count // 2 else "y" * 2000 for row in range(count)]
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    cfg = DataConfig(
        source=DataSource.files,
        path=str(tmp_path / "a.parquet"),
        cache_dir=str(tmp_path / "cache"),
        eval_tokens=5000,
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(build, "SAMPLE_CHARACTERS", 500)
        splits = open_blocks(cfg, tokenizer=byte_tokenizer(), seq_len=64, seed=1, show_progress=False)
    assert 0 < splits.report["held_out"]["tokens"] <= 5000 + 2 * 2001
