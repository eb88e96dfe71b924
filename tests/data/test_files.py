"""Files of every type are told by their bytes and give the same rows, with file and line of the unusable ones."""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from remat.config.options import BadRows, ConfigError, DataConfig, DataFormat, DataSource, FileType
from remat.data import readers
from remat.data.files import find_files
from remat.data.rows import BadRowLog, Instruction
from remat.data.sources import open_corpus
from tests.data.test_sources import documents

ROWS = [
    {
        "instruction": f'say {n},\n"{n}" \u00e9\U0001f600',
        "input": "" if n % 2 else "x;\ty",
        "output": "ab\n" * (n % 5),
    }
    for n in range(50)
]
EXPECTED = [Instruction(row["instruction"], row["input"], row["output"]) for row in ROWS]
FILES = DataConfig(source=DataSource.files)


def as_jsonl(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_csv(rows: list[dict[str, str]], separator: str) -> bytes:
    lines: list[str] = []
    out = csv.DictWriter(type("Out", (), {"write": lines.append}), list(rows[0]), delimiter=separator)  # type: ignore[arg-type]
    out.writeheader()
    out.writerows(rows)
    return "".join(lines).encode()


def as_zstd(raw: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(raw)
    return bytes(sink.getvalue())


TEXTS: dict[str, tuple[str, bytes]] = {
    "jsonl": ("a.jsonl", as_jsonl(ROWS)),
    "jsonl named json": ("a.json", as_jsonl(ROWS)),
    "jsonl without a name": ("rows", as_jsonl(ROWS)),
    "array": ("a.json", json.dumps(ROWS, indent=2).encode()),
    "array on one line": ("a.json", json.dumps(ROWS).encode()),
    "array named jsonl": ("a.jsonl", json.dumps(ROWS, indent=1).encode()),
    "array by lines": ("a.json", b"[" + b",\n".join(as_jsonl([row]).strip() for row in ROWS) + b"]"),
    "array with a mark": (
        "a.json",
        b"\xef\xbb\xbf \n" + json.dumps(ROWS, ensure_ascii=False).encode() + b"\n\n",
    ),
    "csv": ("a.csv", as_csv(ROWS, ",")),
    "csv of semicolons": ("a.csv", b"\xef\xbb\xbf" + as_csv(ROWS, ";")),
    "tsv": ("a.tsv", as_csv(ROWS, "\t")),
}


def found(path: Any, cfg: DataConfig = FILES) -> list[Any]:
    return [document.content for document in documents(cfg, path)]


@pytest.mark.parametrize("compression", ["", "gz", "two members", "zst"])
@pytest.mark.parametrize("kind", TEXTS)
def test_every_type_of_text_gives_the_same_rows(
    tmp_path: Path, kind: str, compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "CHUNK_BYTES", 7)  # tokens of JSON and characters of UTF-8 are cut everywhere
    name, raw = TEXTS[kind]
    half = len(raw) // 2
    content = {
        "": raw,
        "gz": gzip.compress(raw),
        "two members": gzip.compress(raw[:half]) + gzip.compress(raw[half:]),
        "zst": as_zstd(raw),
    }[compression]
    path = tmp_path / (name + {"": "", "zst": ".zst"}.get(compression, ".gz") * ("." in name))
    path.write_bytes(content)
    assert found(str(path)) == EXPECTED
    corpus = open_corpus(FILES, str(path))
    assert corpus.data_format == DataFormat.alpaca
    assert len({document.unit for document in corpus.read(BadRowLog(BadRows.stop))}) == len(ROWS)


def test_an_array_of_one_row_is_no_jsonl(tmp_path: Path) -> None:
    for text in ('[\n{"text": "a"}\n]', '[{"text": "a"}\n]', '[{"text": "a"}]\n', '[\n {"text":\n "a"}]'):
        (tmp_path / "a.json").write_text(text)
        assert found(str(tmp_path / "a.json")) == ["a"]


def test_tables_give_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, tmp_path / "no_suffix")
    assert found(str(tmp_path / "no_suffix")) == EXPECTED
    for name, make in (("file.arrow", pa.ipc.new_file), ("stream.arrow", pa.ipc.new_stream)):
        with pa.OSFile(str(tmp_path / name), "wb") as sink, make(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=20)
        assert found(str(tmp_path / name)) == EXPECTED
    saved = datasets.Dataset(table)
    saved.save_to_disk(tmp_path / "one", num_shards=3)
    assert found(str(tmp_path / "one")) == EXPECTED
    halves = datasets.DatasetDict(train=saved.select(range(10)), test=saved.select(range(10, 50)))
    halves.save_to_disk(tmp_path / "both")
    assert found(str(tmp_path / "both")) == EXPECTED[:10]
    assert found(str(tmp_path / "both"), replace(FILES, split="test")) == EXPECTED[10:]
    with pytest.raises(ConfigError, match=r"holds the splits train, test and not data\.split=dev"):
        found(str(tmp_path / "both"), replace(FILES, split="dev"))
    (tmp_path / "one" / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(ConfigError, match=r"data-00001-of-00003\.arrow is missing"):
        found(str(tmp_path / "one"))


def test_several_paths_are_one_corpus_whatever_each_is(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(ROWS[:10]))
    (tmp_path / "b.json").write_bytes(json.dumps(ROWS[10:20]).encode())
    (tmp_path / "c").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS[20:]), tmp_path / "c" / "z.parquet")
    (tmp_path / "c" / "README.md").write_text("not data, for there are rows beside it")
    (tmp_path / "c" / "dataset_infos.json").write_text("{}")
    paths = [str(tmp_path / name) for name in ("a.jsonl", "b.json", "c")]
    assert found(paths) == EXPECTED
    assert open_corpus(FILES, paths).found.startswith("3 jsonl, json, parquet files, alpaca by its fields")
    units = [document.unit for document in documents(FILES, paths)]
    assert len(set(units)) == len(ROWS)
    assert units[0] == "0/data:1" and units[-1] == "2/z.parquet:30"  # nothing of where the data lies
    assert open_corpus(FILES, paths).identity() != open_corpus(FILES, paths[:2]).identity()
    with pytest.raises(ConfigError, match=r"names .*b\.json twice"):
        found([*paths, str(tmp_path / "*.json")])
    with pytest.raises(ConfigError) as error:
        found([paths[0], str(tmp_path / "b.jsn"), str(tmp_path / "*.csv")])
    assert f"b.jsn does not exist (there is {tmp_path / 'b.json'})" in str(error.value)
    assert "*.csv matches no file" in str(error.value)


def test_texts_are_text_also_compressed_and_beside_rows_of_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one \xc3\xa9\n[two]\n"))
    (tmp_path / "b.txt").write_bytes(b'{"text": "not a row"}')
    assert "".join(found(str(tmp_path))) == 'one \u00e9\n[two]\n{"text": "not a row"}'
    (tmp_path / "c.jsonl").write_bytes(as_jsonl([{"text": "row"}]))
    assert found(str(tmp_path)) == ["row"]  # the texts of a folder with rows are about the rows
    assert found([str(tmp_path / "c.jsonl"), str(tmp_path / "b.txt")]) == ["row", '{"text": "not a row"}']
    (tmp_path / "d.jsonl").write_bytes(as_jsonl(ROWS))
    with pytest.raises(ConfigError, match=r"data\.format=alpaca needs rows .*b\.txt .*is plain text"):
        found([str(tmp_path / "d.jsonl"), str(tmp_path / "b.txt")])
    assert found(str(tmp_path / "d.jsonl"), replace(FILES, file_type=FileType.text))[0].startswith(
        '{"instruction"'
    )


BROKEN_ARRAYS = {
    "cut": (json.dumps(ROWS, indent=1)[:1500], "is not JSON from here on"),
    "cut between rows": (
        '[{"instruction": "a", "output": "b"},\n{"instruction": "a", "output": "b"}\n',
        ":3 (row 2)",
    ),
    "Python's quotes": ("{'instruction': 'a', 'output': 'b'}\n" * 3, "write each row with json.dumps"),
    "no comma": (
        '[{"instruction": "a", "output": "b"}\n{"instruction": "a"}]',
        "a comma or ] should stand before '{'",
    ),
    "comma at the end": ('[{"instruction": "a", "output": "b"},\n]', ":2 (row 2) is not JSON"),
    "open text": ('[{"instruction": "a", "output": "b"},\n{"instruction": "a}]', ":2 (row 2)"),
    "two arrays": ('[{"instruction": "a", "output": "b"}] [1', "text follows the end of the array"),
    "nested": ('[{"instruction": "a", "output": "b"},' + "[" * 200_000, "nested too deeply"),
}


@pytest.mark.parametrize("policy", list(BadRows))
@pytest.mark.parametrize("case", BROKEN_ARRAYS)
def test_an_array_that_breaks_off_is_never_skipped(tmp_path: Path, case: str, policy: BadRows) -> None:
    """What follows cannot be read, so skipping would lose rows that nobody counts."""
    text, reason = BROKEN_ARRAYS[case]
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        found(str(path), replace(FILES, on_bad_row=policy))
    assert f"data.path: {path}:" in str(error.value)
    assert reason in str(error.value)


def test_unusable_rows_of_arrays_and_csv_are_named_by_line_and_counted(tmp_path: Path) -> None:
    array = tmp_path / "a.json"
    array.write_text('[\n {"instruction": "a",\n "output": "b"},\n 7, {"output": "c"},\n\n "x"\n]')
    table = tmp_path / "a.csv"
    table.write_bytes(b'instruction,output\n"a\nb",c\nonly one\na,b,c\n\n\xff,d\na"x,"b"y\nlast,"e"\n')
    skipping = replace(FILES, on_bad_row=BadRows.skip)
    log = BadRowLog(BadRows.skip)
    assert len(list(documents(skipping, str(array), log))) == 1
    assert [reason.removeprefix(f"{array}:") for reason in log.first] == [
        "4 (row 2): is a number, not an object",
        "4 (row 3): has no field 'instruction'",
        "6 (row 4): is text, not an object",
    ]
    log = BadRowLog(BadRows.skip)
    rows = list(documents(skipping, str(table), log))
    assert [row.content for row in rows] == [Instruction("a\nb", "", "c"), Instruction("last", "", "e")]
    assert [reason.removeprefix(f"{table}:") for reason in log.first] == [
        "4: has 1 cells, and the header has 2",
        "5: has 3 cells, and the header has 2",
        "7: is not UTF-8",
        "8: is not CSV (',' expected after '\"')",
    ]
    with pytest.raises(ConfigError, match=r"a\.csv:4: has 1 cells.*(.|\n)*data\.on_bad_row=skip"):
        found(str(table))
    table.write_bytes(b'instruction,output\na"x,"b"y\nlast,e\n')  # the first row is the broken one
    assert found(str(table), skipping) == [Instruction("last", "", "e")]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (
            "a.json",
            b'{\n "data": [\n  {"instruction": "a"}\n ]\n}',
            "is one object with the fields data: give an array",
        ),
        ("a.json", b'{\n "a": 1\n}\n{\n "a": 2\n}\n', "neither one array nor one object per line"),
        ("a.jsonl.gz", gzip.compress(as_jsonl(ROWS))[:-200], "is damaged or incomplete"),
        ("a.jsonl.zst", as_zstd(as_jsonl(ROWS))[:60] + b"noise" * 20, "is damaged or incomplete"),
        ("a.zip", b"PK\x03\x04rest", "a zip archive or a workbook: unpack it, or save it as CSV"),
        ("a.json", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("a.csv", "\ufeffa,b\n1,2".encode("utf-16"), "UTF-16: save it as UTF-8"),
        ("a.csv", b"instruction,output,output\na,b,c\n", "names a column twice"),
        ("a.parquet", b"PAR1 and no table", "is not a parquet file"),
        ("a.parquet", b"", "is not a parquet file"),
        ("a.jsonl", b"\n\n", "holds no row"),
        ("a.json", b"[]", "holds no row"),
        ("a.csv", b"", "holds no row"),
        ("a.jsonl", b"<html>\nnot found\n", "none of the first 2 rows can be read"),
    ],
)
def test_what_is_no_data_says_so_with_the_option(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as error:
        found(str(tmp_path / name))
    assert str(error.value).startswith("data.path")
    assert reason in str(error.value)


def test_a_folder_without_data_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("x")
    with pytest.raises(ConfigError, match=r"has no \.jsonl or .* file in it, only train\.py.*data=text reads"):
        find_files(str(tmp_path), "data.path")


def test_a_name_of_the_hub_is_told_from_a_path_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for missing in ("data/train", "owner/train.json", "./owner/set", "missing", str(tmp_path / "a")):
        with pytest.raises(ConfigError, match="does not exist"):
            found(missing)
    datasets = pytest.importorskip("datasets")
    asked: list[Any] = []

    def load_dataset(*words: Any, **more: Any) -> Any:
        asked.append((words, more))
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        ConfigError, match=r"data\.path=owner/set:sub@test could not be .*no network(.|\n)*in .* either"
    ):
        found("owner/set:sub@test")
    assert asked == [(("owner/set", "sub"), {"split": "test", "streaming": False})]


MEMORY = """
import resource, sys
from remat.config.options import BadRows, DataConfig, DataSource
from remat.data.rows import BadRowLog
from remat.data.sources import open_corpus
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
cfg = DataConfig(source=DataSource.files, join_files=len(sys.argv) > 2)
count = sum(1 for _ in open_corpus(cfg, sys.argv[1]).read(BadRowLog(BadRows.stop)))
print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_an_array_is_read_in_memory_that_does_not_grow_with_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    row = json.dumps({"instruction": "x" * 500, "output": "y" * 500})
    path.write_text("[" + ",".join([row] * 30_000) + "]")
    assert path.stat().st_size > 30e6
    done = subprocess.run([sys.executable, "-c", MEMORY, str(path)], capture_output=True, text=True, check=True)
    count, grown_kib = map(int, done.stdout.split())
    assert count == 30_000
    assert grown_kib * 1024 < 15e6


@pytest.mark.exhaustive
def test_a_joined_document_is_read_in_memory_that_does_not_grow_with_it(tmp_path: Path) -> None:
    """Books of three chapters, one document: pieces of at most 1 MiB."""
    for chapter in range(3):
        (tmp_path / f"{chapter}.txt").write_text(("a line of some words\n" * 500 + "\n") * 1000)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) > 30e6
    command = [sys.executable, "-c", MEMORY, str(tmp_path), "joined"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    count, grown_kib = map(int, done.stdout.split())
    assert count >= 30
    assert grown_kib * 1024 < 15e6
