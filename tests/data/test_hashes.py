"""The identity of data is what it holds: not its times, not its place, and never an older content."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from remat.config.options import ConfigError, DataConfig, DataSource
from remat.data import build, cache, files
from remat.data.cache import open_blocks
from remat.data.files import FOLDER, READ_BYTES, Hashes, find_files
from remat.data.tokenizer import byte_tokenizer


@pytest.fixture
def cfg(tmp_path: Path) -> DataConfig:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": f"{name}{n}" * 9}) + "\n" for n in range(60))
        )
    return DataConfig(
        source=DataSource.files, path=str(folder), eval_fraction=0.2, cache_dir=str(tmp_path / "cache")
    )


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for each time that a part of a file is hashed; what was just written counts as settled."""
    monkeypatch.setattr(files, "SETTLED_S", -1.0)
    parts: list[int] = []

    class Counting:
        def __init__(self, **options: int) -> None:
            self._digest = hashlib.blake2b(**options)

        def update(self, data: bytes) -> None:
            parts.append(len(data))
            self._digest.update(data)

        def hexdigest(self) -> str:
            return str(self._digest.hexdigest())

    monkeypatch.setattr(files, "hashlib", SimpleNamespace(blake2b=Counting, sha256=hashlib.sha256))
    return parts


def key(cfg: DataConfig) -> str:
    splits = open_blocks(cfg, tokenizer=byte_tokenizer(), seq_len=16, seed=1, show_progress=False)
    return Path(splits.report["folder"]).name


def paths(cfg: DataConfig) -> list[Path]:
    return sorted(Path(str(cfg.path)).iterdir())


def test_a_touched_or_copied_file_is_the_same_data(
    cfg: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds: list[str] = []
    write = build.write_blocks
    monkeypatch.setattr(
        cache, "write_blocks", lambda plan, *a, **b: builds.append(plan.key) or write(plan, *a, **b)
    )
    first = key(cfg)
    os.utime(paths(cfg)[0], ns=(1, 1))
    assert key(cfg) == first
    for path in paths(cfg):  # as cp, rsync and a restored backup do: another inode, another time
        path.write_bytes(path.read_bytes())
        shutil.copy(path, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
    assert key(cfg) == first
    moved = Path(shutil.copytree(str(cfg.path), tmp_path / "elsewhere"))
    assert key(replace(cfg, path=str(moved))) == first
    assert builds == [first]
    one = key(replace(cfg, path=str(moved / "a.jsonl")))
    (moved / "a.jsonl").rename(tmp_path / "renamed.jsonl")
    assert key(replace(cfg, path=str(tmp_path / "renamed.jsonl"))) == one
    assert builds == [first, one]


@pytest.mark.parametrize("size", [100, 3 * READ_BYTES + 5])
def test_an_edited_byte_is_other_data_even_with_its_time_put_back(
    tmp_path: Path, read: list[int], size: int
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * size)
    status = path.stat()

    def identity() -> list[str]:
        return Hashes(tmp_path / "cache").of(find_files(str(path), "data.path"), str(path))

    first = identity()
    with path.open("r+b") as stream:
        stream.seek(size // 2)
        stream.write(b"y")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (size, status.st_mtime_ns)
    assert identity() != first
    with path.open("r+b") as stream:
        stream.seek(size // 2)
        stream.write(b"x")
    assert identity() == first


def test_a_file_is_read_once_while_nothing_about_it_changes(cfg: DataConfig, read: list[int]) -> None:
    first = key(cfg)
    assert len(read) == 3
    assert key(cfg) == first and len(read) == 3
    with paths(cfg)[1].open("a") as stream:
        stream.write('{"text": "more"}\n')
    second = key(cfg)
    assert second != first and len(read) == 4, "only the file that changed is read"
    paths(cfg)[2].unlink()
    assert key(cfg) not in (first, second) and len(read) == 4


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"version": 1}', '{"version": 1, "files": {"%s": ["x", "y"]}}', '{"version": 99}', "\0"],
)
def test_a_damaged_memory_costs_reading_and_nothing_else(
    cfg: DataConfig, read: list[int], content: str
) -> None:
    first = key(cfg)
    (memory,) = (Path(cfg.cache_dir) / FOLDER).iterdir()
    good = memory.read_text()
    memory.write_text(content.replace("%s", str(paths(cfg)[0])))
    assert key(cfg) == first and len(read) == 6
    assert json.loads(memory.read_text()) == json.loads(good)
    assert [path.name for path in memory.parent.iterdir()] == [memory.name]


def test_what_was_just_written_is_not_remembered(
    cfg: DataConfig, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within one tick of the file system's clock a file may change twice and show the same time."""
    monkeypatch.setattr(files, "SETTLED_S", 1000.0)
    first = key(cfg)
    assert key(cfg) == first and len(read) == 6


def test_data_that_changes_while_it_is_prepared_is_refused(
    cfg: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its blocks would be found under the name of a content that they do not have."""
    encode = build.encode

    def append(*arguments: object) -> object:
        with paths(cfg)[0].open("a") as stream:
            stream.write('{"text": "late"}\n')
        return encode(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(build, "encode", append)
        with pytest.raises(ConfigError, match=r"a\.jsonl changes while it is read.*data\.path"):
            key(cfg)
    assert list(Path(cfg.cache_dir).glob("*/report.json")) == []
    assert key(cfg)


def test_a_local_folder_read_by_the_hub_library_goes_by_content_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "some words and more"}\n' * 40)
    cfg = DataConfig(
        source=DataSource.hub, path=str(folder), eval_fraction=0.0, cache_dir=str(tmp_path / "cache")
    )
    first = key(cfg)
    os.utime(folder / "train.jsonl", ns=(1, 1))
    assert key(cfg) == first
    (folder / "train.jsonl").write_text('{"text": "some words and less"}\n' * 40)
    assert key(cfg) != first
