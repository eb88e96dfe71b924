"""Files of a repository, or chapters of a book, are one document: in order of path, each under its header."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from remat.config import validation
from remat.config.options import BadRows, ConfigError, DataConfig, DataFormat, DataSource, FileType
from remat.data import sources
from remat.data.build import NoRoom
from remat.data.cache import open_blocks
from remat.data.rows import BadRowLog
from tests.data.test_cache import byte_tokenizer
from tests.data.test_sources import documents

FILES = {
    "one/src/b.py": "b = 1",
    "one/src/a.py": "a = 1\n",
    "one/README": "read me",
    "two/z.md": "zet\n",
    "two/a/deep/c.txt": "deep\n",
    "alone.txt": "alone",
}
JOINED = {
    "": "# alone.txt\nalone",
    "one": "# README\nread me\n# src/a.py\na = 1\n# src/b.py\nb = 1",
    "two": "# a/deep/c.txt\ndeep\n# z.md\nzet\n",
}


def config(**options: Any) -> DataConfig:
    return DataConfig(source=DataSource.files, join_files=True, **options)


def folder_of_files(root: Path) -> Path:
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def rows_of_files(root: Path) -> list[dict[str, str]]:
    """The files as rows, those of a repository far apart."""
    found = []
    for name, text in FILES.items():
        repo, slash, path = name.partition("/")
        found.append({"repo": repo if slash else "", "path": path or name, "text": text})
    return found


def joined(cfg: DataConfig, path: Any) -> dict[str, str]:
    """The text of each document, by what is held out as a whole; all pieces but the first continue it."""
    found: dict[str, str] = {}
    for document in documents(cfg, path):
        name = document.unit.removesuffix("/")
        assert document.starts == (name not in found)
        found[name] = found.get(name, "") + str(document.content)
    return found


def test_files_of_a_folder_are_one_document(tmp_path: Path) -> None:
    cfg = config(file_type=FileType.text)
    assert joined(cfg, str(folder_of_files(tmp_path))) == JOINED
    parts = joined(cfg, [str(tmp_path / "one"), str(tmp_path / "two")])
    assert parts == {"0": JOINED["one"], "1": JOINED["two"]}  # each path that is named is a repository
    named = [tmp_path / "one" / "README", tmp_path / "two" / "z.md"]
    headed = config(file_type=FileType.text, file_header="<{repo} {path}>")
    assert joined(headed, [str(path) for path in named]) == {"0": "<0 README>read me", "1": "<1 z.md>zet\n"}


@pytest.mark.parametrize("several", [False, True])
def test_a_file_under_another_name_has_another_header_and_another_cache(tmp_path: Path, several: bool) -> None:
    (tmp_path / "a.py").write_text("a = 1\n")
    (tmp_path / "b.py").write_text("a = 1\n")
    (tmp_path / "c.py").write_text("c = 1\n")
    cfg, more = config(file_type=FileType.text), [str(tmp_path / "c.py")] * several
    one, other = (
        sources.open_corpus(cfg, [str(tmp_path / name), *more]).identity() for name in ("a.py", "b.py")
    )
    assert one != other


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hub"])
def test_rows_of_a_repository_are_one_document_wherever_they_lie(kind: str, tmp_path: Path) -> None:
    rows, path = rows_of_files(tmp_path), tmp_path / f"files.{kind}"
    cfg = config(cache_dir=str(tmp_path / "cache"))
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path = tmp_path / "data" / "train.parquet"
        path.parent.mkdir()
        pq.write_table(pa.Table.from_pylist(rows), path)
    if kind == "hub":
        cfg = DataConfig(source=DataSource.hub, join_files=True, cache_dir=str(tmp_path / "cache"))
        path = path.parent
    assert joined(cfg, str(path)) == JOINED
    assert list((tmp_path / "cache").iterdir()) == []  # the sorted rows have no name


def test_a_header_has_the_repository_and_the_path_and_fields_may_have_other_names(tmp_path: Path) -> None:
    rows = [{"repo_name": "r", "file": name, "content": f"in {name}"} for name in ("b.py", "a.py")]
    (tmp_path / "files.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = config(
        file_header="<{repo}:{path}>",
        text_field="content",
        columns={"repo": "repo_name", "path": "file"},
        cache_dir=str(tmp_path),
    )
    assert validation.data_problems(cfg) == []
    assert joined(cfg, str(tmp_path / "files.jsonl")) == {"r": "<r:a.py>in a.py\n<r:b.py>in b.py"}


def test_a_joined_document_is_cut_at_the_length_and_keeps_its_positions(tmp_path: Path) -> None:
    """A document longer than a block fills several; one that begins in a block has positions of its own."""
    cfg = config(path=str(folder_of_files(tmp_path / "in")), file_type=FileType.text, eval_fraction=0.0)
    cfg.cache_dir = str(tmp_path / "cache")
    tokenizer = byte_tokenizer()
    blocks = open_blocks(
        cfg, tokenizer=tokenizer, seq_len=24, seed=1, show_progress=False
    ).train.documents_apart()
    every = np.arange(len(blocks))
    text = tokenizer.decode(blocks.tokens(every).ravel().tolist(), skip_special_tokens=True)
    assert "".join(JOINED.values()).startswith(text)
    assert blocks.starts(every).sum() == 3


def test_rows_that_name_no_file_are_bad_rows_each_time_they_are_read(tmp_path: Path) -> None:
    good = [{"repo": "r", "path": f"{n}", "text": "x"} for n in range(3)]
    bad = [{"repo": "r", "text": "no path"}, {"repo": 7, "path": "p", "text": "no text"}]
    path = tmp_path / "files.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*good, *bad]))
    cfg = config(cache_dir=str(tmp_path), on_bad_row=BadRows.skip)
    corpus = sources.open_corpus(cfg, str(path))
    for _ in range(2):
        log = BadRowLog(BadRows.skip)
        assert len(list(corpus.read(log))) == 3
        assert log.count == 2 and "has no field 'path'" in log.first[0] and "is a number" in log.first[1]
    with pytest.raises(ConfigError, match=r"has no field 'path', which data\.join_files=true needs"):
        list(documents(config(cache_dir=str(tmp_path)), str(path)))


def test_a_disk_that_fills_up_while_rows_are_sorted_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "files.jsonl", sqlite3.connect
    path.write_text(json.dumps({"repo": "r", "path": "p", "text": "x" * 100_000}) + "\n")

    def small(*given: Any, **more: Any) -> sqlite3.Connection:
        table = real(*given, **more)
        table.execute("PRAGMA max_page_count=4")
        return table

    monkeypatch.setattr(sources.sqlite3, "connect", small)
    cfg = config(path=str(path), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(NoRoom, match=r"(?s)data\.cache_dir=.* no room to sort the rows .*has room"):
        open_blocks(cfg, tokenizer=byte_tokenizer(), seq_len=24, seed=1, show_progress=False)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"file_header": "{name}"}, "only {repo} and {path} are known"),
        ({"join_files": False, "file_header": "x"}, "has no effect without data.join_files=true"),
        ({"format": DataFormat.chat}, "conversations are no files"),
        ({"source": DataSource.synthetic}, "has no files"),
    ],
)
def test_what_cannot_be_joined_is_refused(options: dict[str, Any], reason: str) -> None:
    given: dict[str, Any] = {"source": DataSource.files, "join_files": True} | options
    assert reason in "\n".join(validation.data_problems(DataConfig(**given)))


def test_rows_that_are_streamed_or_of_chats_are_refused_together(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"instruction": "a", "output": "b"}) + "\n")
    with pytest.raises(ConfigError) as error:
        sources.open_corpus(config(streaming=True), str(path))
    assert "are of data.format=alpaca" in str(error.value) and "data.streaming=true" in str(error.value)
