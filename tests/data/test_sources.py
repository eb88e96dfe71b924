from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from remat.config.options import BadRows, ConfigError, DataConfig, DataFormat, DataSource, FileType
from remat.data import sources
from remat.data.rows import BadRowLog, Chat, Document
from remat.data.sources import open_corpus


def documents(cfg: DataConfig, path: Any, bad_rows: BadRowLog | None = None) -> Iterator[Document]:
    """The documents at `path`; unusable rows go to `bad_rows`, or to a log that follows data.on_bad_row."""
    log = bad_rows or BadRowLog(cfg.on_bad_row)
    yield from open_corpus(cfg, path).read(log)
    log.check()


def config(what: str, **options: object) -> DataConfig:
    """A configuration by the name of its YAML."""
    chosen = {"source": what} if what in list(DataSource) else {"source": "files", "file_type": what}
    source, file_type = DataSource(chosen["source"]), FileType(chosen.get("file_type", "auto"))
    return DataConfig(source=source, file_type=file_type, **options)  # type: ignore[arg-type]


def jsonl(path: Path, *rows: object) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


BROKEN = {
    2: ("{not json", "is not JSON"),
    3: ("[1, 2]", "is a list, not an object"),
    4: ('{"body": "x"}', "has no field 'text'"),
    5: ('{"text": 7}', "field 'text' is a number, not text"),
    6: ('{"text": null}', "field 'text' is null, not text"),
    7: ('{"text": "\\ud800"}', "lone surrogate"),
    8: ("[" * 100_000, "is not JSON"),
}


@pytest.mark.parametrize("line", BROKEN)
def test_each_kind_of_broken_row_is_named_with_file_and_line(tmp_path: Path, line: int) -> None:
    path = jsonl(tmp_path / "a.jsonl", *['{"text": "good"}'] * (line - 1), BROKEN[line][0], '{"text": "last"}')
    with pytest.raises(ConfigError) as error:
        list(documents(config("jsonl"), path))
    assert f"{path}:{line}: " in str(error.value)
    assert BROKEN[line][1] in str(error.value)
    assert "data.on_bad_row=skip" in str(error.value)


def test_skip_counts_the_broken_rows_and_keeps_the_others(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "a.jsonl", {"text": "one"}, *[text for text, _ in BROKEN.values()], {"text": "two"}, ""
    )
    log = BadRowLog(BadRows.skip)
    found = list(documents(config("jsonl", on_bad_row=BadRows.skip), path, log))
    assert [(d.content, d.origin) for d in found] == [("one", f"{path}:1"), ("two", f"{path}:9")]
    assert log.count == 7
    assert [row.split(": ")[0] for row in log.first] == [f"{path}:{line}" for line in range(2, 9)]


def test_stop_lists_several_rows_but_does_not_read_on_for_ever(tmp_path: Path) -> None:
    rows = [{"text": "x"}, "bad", {"text": "x"}, "bad", *[{"text": "x"}] * 5000, "bad"]
    path = jsonl(tmp_path / "a.jsonl", *rows)
    with pytest.raises(ConfigError) as error:
        list(documents(config("jsonl"), path))
    assert f"{path}:2:" in str(error.value)
    assert f"{path}:4:" in str(error.value)
    assert f"{path}:5005:" not in str(error.value)


def test_bytes_that_are_not_utf8_are_a_broken_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "with a mark"}\n{"text": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: is not UTF-8 \(byte 0xFF"):
        list(documents(config("jsonl"), str(tmp_path)))
    (tmp_path / "a.txt").write_bytes(b"good\nbad \xc3(\n")
    with pytest.raises(ConfigError, match=r"a\.txt:2: is not UTF-8"):
        list(documents(config("text"), str(tmp_path / "a.txt")))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"output": "b"}, "has no field 'instruction'"),
        ({"instruction": "a", "output": ["b"]}, "field 'output' is a list"),
        ({"instruction": "a", "input": 3, "output": "b"}, "field 'input' is a number"),
    ],
)
def test_alpaca_fields_are_checked(tmp_path: Path, row: dict[str, object], reason: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"instruction": "a", "input": None, "output": "b"}, row)
    with pytest.raises(ConfigError) as error:
        list(documents(config("jsonl", format=DataFormat.alpaca), path))
    assert f"{path}:2: {reason}" in str(error.value)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "b"}, "has no field 'messages'"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"content": "b"}]}, "message 1 has no role"),
        ({"messages": [{"role": "user", "content": None}]}, "message 1: content is null, not text"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "lone surrogate"),
        ({"messages": [{"role": "user", "content": "b"}], "tools": "x"}, "field 'tools' is text, not a list"),
    ],
)
def test_chat_fields_are_checked(tmp_path: Path, row: dict[str, object], reason: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "b"}]}, row)
    with pytest.raises(ConfigError) as error:
        list(documents(config("jsonl", format=DataFormat.chat), path))
    assert f"{path}:2: " in str(error.value)
    assert reason in str(error.value)


def test_folder_glob_and_file(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    jsonl(tmp_path / "b" / "z.jsonl", {"text": "3"})
    jsonl(tmp_path / "a.jsonl", {"text": "1"})
    jsonl(tmp_path / "a2.ndjson", {"text": "2"})
    (tmp_path / ".hidden").mkdir()
    jsonl(tmp_path / ".hidden" / "x.jsonl", {"text": "no"})
    (tmp_path / "readme.txt").write_text("no")

    def found(path: Path) -> list[object]:
        return [d.content for d in documents(config("jsonl"), str(path))]

    assert found(tmp_path) == ["1", "2", "3"]
    assert found(tmp_path / "**" / "*.jsonl") == ["1", "3"]
    assert found(tmp_path / "b" / "z.jsonl") == ["3"]


@pytest.mark.parametrize(
    ("source", "name", "reason"),
    [
        ("jsonl", None, "data.path"),
        ("text", "missing", "data.path=.*missing does not exist"),
        ("jsonl", ".", "data.path=.* has no .jsonl or .ndjson file"),
        ("jsonl", "*.jsonl", "data.path=.* matches no file"),
        ("python_stdlib", ".", "data.path=.* has no meaning with data.source=python_stdlib"),
        ("parquet", "a.txt", "a.txt is not a parquet file"),
    ],
)
def test_nothing_to_read_names_the_option(tmp_path: Path, source: str, name: str | None, reason: str) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ConfigError, match=reason):
        list(documents(config(source), name and str(tmp_path / name)))


def test_plain_text_has_no_fields_for_instructions(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"data\.format=chat needs rows"):
        list(documents(config("text", format=DataFormat.chat), str(tmp_path)))


def test_pieces_of_a_text_file_give_the_file_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "FEWEST_PIECES", 20)
    monkeypatch.setattr(sources, "LONGEST_LINE_BYTES", 7)
    text = "first line\n" + "\u20ac\U0001f600" * 20 + "\nshort\r\n\n" + "last, without an end \u00e9"
    (tmp_path / "a.txt").write_bytes(text.encode())
    found = list(documents(config("text"), str(tmp_path / "a.txt")))
    assert len(found) > 5
    assert "".join(str(d.content) for d in found) == text
    assert [d.starts for d in found] == [True] + [False] * (len(found) - 1)
    assert [d.ends for d in found] == [False] * (len(found) - 1) + [True]
    assert [d.origin.rpartition(":")[2] for d in found[:2]] == ["1", "2"]
    assert found[-1].origin.endswith(":5")
    assert sum(d.size for d in found) == len(text.encode())


def test_a_broken_piece_parts_the_text_around_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"aaaa\nbb\xff\xff\ncccc\n\xe2\x82")
    log = BadRowLog(BadRows.skip)
    found = list(documents(config("text", on_bad_row=BadRows.skip), str(tmp_path / "a.txt"), log))
    assert [(d.content, d.starts, d.ends) for d in found] == [("aaaa\n", True, True), ("cccc\n", True, True)]
    assert [row.partition(": ")[0].rpartition(":")[2] for row in log.first] == ["2", "4"]


def test_of_many_files_whole_ones_are_held_out_and_of_few_or_large_ones_pieces(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / f"{number}.txt").write_text("line\n" * 100)
    many = [d.unit for d in documents(config("text"), str(tmp_path))]
    assert set(many) == {f"{number}.txt" for number in range(100)}
    (tmp_path / "large.txt").write_text("line\n" * 2000)
    with_large = {d.unit for d in documents(config("text"), str(tmp_path))} - set(many)
    assert len(with_large) > 10
    assert {unit.partition(":")[0] for unit in with_large} == {"large.txt"}
    few = [d.unit for d in documents(config("text"), str(tmp_path / "1?.txt"))]
    assert len(few) == len(set(few)) > 40


def test_parquet_rows_are_numbered_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one", None, "three"], "other": [1, 2, 3]}), path)
    with pytest.raises(ConfigError, match=r"a\.parquet:2: field 'text' is null"):
        list(documents(config("parquet"), str(path)))
    skipped = list(documents(config("parquet", on_bad_row=BadRows.skip), str(path)))
    assert [(d.content, d.origin) for d in skipped] == [("one", f"{path}:1"), ("three", f"{path}:3")]
    with pytest.raises(ConfigError, match=r"(?s)a\.parquet:1 has the fields text, other\n.*plain needs body"):
        list(documents(config("parquet", text_field="body"), str(path)))


def test_chats_from_parquet_lose_the_nulls_of_absent_fields(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": ["f"]}]
    pq.write_table(pa.table({"messages": [messages]}), tmp_path / "a.parquet")
    (found,) = documents(config("parquet", format=DataFormat.chat), str(tmp_path))
    assert found.content == Chat(
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": ["f"]}],
        None,
        [False, True],
    )


def test_hub_loads_a_split_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    jsonl(folder / "train.jsonl", {"text": "a", "n": 1}, {"text": "b", "n": 2})
    jsonl(folder / "test.jsonl", {"text": "c", "n": 3})
    found = list(documents(config("hub"), str(folder)))
    assert [(d.content, d.origin) for d in found] == [("a", f"{folder}[train]:1"), ("b", f"{folder}[train]:2")]
    assert [d.content for d in documents(config("hub"), f"{folder}@test")] == ["c"]
    assert [d.content for d in documents(config("hub", split="test"), str(folder))] == ["c"]
    with pytest.raises(ConfigError, match=r"data\.path=.*split none"):
        list(documents(config("hub"), f"{folder}@none"))
    with pytest.raises(ConfigError, match=r"(?s)has the fields text, n\n.*plain needs body"):
        list(documents(config("hub", text_field="body"), str(folder)))
    identity = [open_corpus(config("hub"), f"{folder}@{s}").identity() for s in ("train", "test", "train")]
    assert identity[0] == identity[2] != identity[1]


def test_the_standard_library_is_megabytes_of_source_without_tests_or_packages() -> None:
    found = list(documents(config("python_stdlib"), None))
    assert sum(d.size for d in found) > 4_000_000
    names = {d.unit for d in found}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not [n for n in names if {"site-packages", "dist-packages", "test", "tests"} & set(n.split("/"))]


def test_the_config_group_holds_values_of_real_options() -> None:
    folder = Path(__file__).parents[2] / "conf" / "data"
    values = {path.stem: yaml.safe_load(path.read_text()) for path in folder.glob("*.yaml")}
    assert {str(source) for source in DataSource} <= set(values)
    for name, options in values.items():
        assert name in (options["source"], options.get("format"), options.get("file_type"))
        DataSource(options["source"])
        DataFormat(DataConfig(**options).format)
        FileType(DataConfig(**options).file_type)
