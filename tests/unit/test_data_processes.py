"""Processes that prepare the same data at the same time."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from remat.choices import DataSource
from remat.config import ConfigError, DataConfig
from remat.data.cache import Splits, open_blocks
from remat.data.tokenizer import byte_tokenizer


@pytest.fixture
def cfg(tmp_path: Path) -> DataConfig:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"<{n}>" + "x" * (n % 13)}) + "\n" for n in range(200)))
    return DataConfig(
        source=DataSource.jsonl, path=str(data), eval_fraction=0.2, cache_dir=str(tmp_path / "cache")
    )


def opened(cfg: DataConfig) -> Splits:
    return open_blocks(cfg, tokenizer=byte_tokenizer(), seq_len=16, seed=1, show_progress=False)


# A rank: says "building" once part of the data is written, goes on when told, and ends with what it got.
RANK = """
import json, logging, sys
from remat.choices import DataSource
from remat.config import ConfigError, DataConfig
from remat.data import build, cache
from remat.data.tokenizer import byte_tokenizer

logging.basicConfig(stream=sys.stdout, format="%(message)s")
logging.getLogger("remat").setLevel(logging.INFO)
build.BATCH_DOCUMENTS = 50
encode, calls = build.encode, []

def pausing(*arguments):
    calls.append(1)
    if len(calls) == 3:
        print("building", flush=True)
        sys.stdin.readline()
    return encode(*arguments)

build.encode = pausing
options = json.loads(sys.argv[1])
cfg = DataConfig(**{**options, "source": DataSource.jsonl})
print("ready", flush=True)
try:
    splits = cache.open_blocks(cfg, tokenizer=byte_tokenizer(), seq_len=16, seed=1, show_progress=False)
    print("done", len(splits.train), flush=True)
except ConfigError as error:
    print("error", str(error).replace(chr(10), " "), flush=True)
"""


@contextlib.contextmanager
def rank(cfg: DataConfig) -> Iterator[subprocess.Popen[str]]:
    options = {"path": cfg.path, "cache_dir": cfg.cache_dir, "eval_fraction": cfg.eval_fraction}
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", RANK, json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str], start: str) -> str:
    """The next line of output, which must begin with `start`."""
    assert process.stdout
    found = process.stdout.readline().strip()
    assert found.startswith(start), found
    return found


def tell_to_go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.write("\n")
    process.stdin.flush()


def test_of_two_processes_one_builds_and_the_other_waits(cfg: DataConfig) -> None:
    with rank(cfg) as first, rank(cfg) as second:
        line(second, "ready")  # its imports are behind it
        line(first, "ready")
        building, waiting = first, second
        started = [first.stdout.readline(), second.stdout.readline()]  # type: ignore[union-attr]
        if started[1].startswith("building"):
            building, waiting = second, first
            started.reverse()
        assert started[0].startswith("building")
        assert started[1].startswith("waiting for another process")
        tell_to_go_on(building)
        assert line(building, "done") == line(waiting, "done")  # with no "building" in between


def test_when_the_builder_is_killed_the_one_that_waits_builds(cfg: DataConfig) -> None:
    with rank(cfg) as first, rank(cfg) as second:
        line(first, "ready")
        line(second, "ready")
        started = [first.stdout.readline(), second.stdout.readline()]  # type: ignore[union-attr]
        building, waiting = (first, second) if started[0].startswith("building") else (second, first)
        assert list(Path(cfg.cache_dir).glob("*.tmp-*"))
        building.kill()
        line(waiting, "building")
        tell_to_go_on(waiting)
        done = line(waiting, "done")
    assert done == f"done {len(opened(cfg).train)}"
    assert not list(Path(cfg.cache_dir).glob("*.tmp-*"))


def test_those_who_waited_get_the_builders_error(cfg: DataConfig) -> None:
    path = Path(cfg.path or "")
    content = path.read_text()
    path.write_text(content + "broken\n")
    with pytest.raises(ConfigError):
        opened(cfg)  # an error of an earlier run is not taken for one of this run: "building" comes first
    with rank(cfg) as first, rank(cfg) as second:
        line(first, "ready")
        line(second, "ready")
        started = [first.stdout.readline(), second.stdout.readline()]  # type: ignore[union-attr]
        building, waiting = (first, second) if started[0].startswith("building") else (second, first)
        tell_to_go_on(building)
        assert line(building, "error") == line(waiting, "error")
    path.write_text(content)
    assert len(opened(cfg).train)
