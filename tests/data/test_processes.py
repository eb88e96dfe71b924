"""Processes that prepare the same data at the same time."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from remat.config.options import ConfigError, DataConfig, DataSource
from remat.data import cache
from remat.data.cache import Splits, open_blocks
from remat.data.tokenizer import byte_tokenizer
from remat.machine import owner_lock
from tests.support import fork_server


@pytest.fixture
def cfg(tmp_path: Path) -> DataConfig:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"<{n}>" + "x" * (n % 13)}) + "\n" for n in range(200)))
    return DataConfig(
        source=DataSource.files, path=str(data), eval_fraction=0.2, cache_dir=str(tmp_path / "cache")
    )


def opened(cfg: DataConfig) -> Splits:
    return open_blocks(cfg, tokenizer=byte_tokenizer(), seq_len=16, seed=1, show_progress=False)


# A rank: says "building" once part of the data is written, goes on when told, and ends with what it got.
RANK = """
import json, logging, sys
from remat.machine import owner_lock
from remat.config.options import DataSource
from remat.config.options import ConfigError, DataConfig
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
flock, host = options.pop("flock"), options.pop("host")
if flock == "none":
    def refuse(handle, how):
        raise OSError(38, "Function not implemented")
    owner_lock.fcntl.flock = refuse
elif flock == "not seen":
    cache.OwnerLock.take = lambda self: setattr(self, "token", "mine")
if host:
    owner_lock.socket.gethostname = lambda: host
cfg = DataConfig(**{**options, "source": DataSource.files})
print("ready", flush=True)
try:
    splits = cache.open_blocks(cfg, tokenizer=byte_tokenizer(), seq_len=16, seed=1, show_progress=False)
    print("done", len(splits.train), flush=True)
except ConfigError as error:
    print("error", str(error).replace(chr(10), " "), flush=True)
"""


class Rank:
    """A process that runs RANK, a fork of one that has imported everything."""

    def __init__(self, options: dict[str, object]) -> None:
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        job = {
            "do": "run_source",
            "with": {"source": RANK, "argv": [json.dumps(options)]},
            "environment": fork_server.environment(
                dict(os.environ) | fork_server.CPU_ONLY | {"OMP_NUM_THREADS": "1"}
            ),
            "folder": str(fork_server.ROOT),
        }
        self._forked = fork_server.ask(job, theirs_in, theirs_out)
        os.close(theirs_in)
        os.close(theirs_out)
        self.stdin, self.stdout = os.fdopen(ours_in, "w"), os.fdopen(ours_out)

    def kill(self) -> None:
        self._forked.kill()

    def close(self) -> None:
        self.kill()
        self.stdin.close()
        self.stdout.close()


@contextlib.contextmanager
def rank(cfg: DataConfig, flock: str = "", host: str = "") -> Iterator[Rank]:
    """`flock`: "none", or "not seen" where each believes to have the lock; `host`: another name for this one."""
    options = {"path": cfg.path, "cache_dir": cfg.cache_dir, "eval_fraction": cfg.eval_fraction}
    with contextlib.closing(Rank(options | {"flock": flock, "host": host})) as process:
        yield process


def line(process: Rank, start: str) -> str:
    """The next line of output, which must begin with `start`."""
    found = process.stdout.readline().strip()
    assert found.startswith(start), found
    return found


def tell_to_go_on(process: Rank) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def test_of_two_processes_one_builds_and_the_other_waits(cfg: DataConfig) -> None:
    with rank(cfg) as first, rank(cfg) as second:
        line(second, "ready")  # its imports are behind it
        line(first, "ready")
        building, waiting = first, second
        started = [first.stdout.readline(), second.stdout.readline()]
        if started[1].startswith("building"):
            building, waiting = second, first
            started.reverse()
        assert started[0].startswith("building")
        assert started[1].startswith("waiting for another process")
        tell_to_go_on(building)
        assert line(building, "done") == line(waiting, "done")  # with no "building" in between


@pytest.mark.parametrize("flock", ["", "none"])
def test_when_the_builder_is_killed_the_one_that_waits_builds(cfg: DataConfig, flock: str) -> None:
    """Also where there is no flock: what a killed builder leaves stops nobody."""
    with rank(cfg, flock) as first, rank(cfg, flock) as second:
        line(first, "ready")
        line(second, "ready")
        started = [first.stdout.readline(), second.stdout.readline()]
        building, waiting = (first, second) if started[0].startswith("building") else (second, first)
        assert list(Path(cfg.cache_dir).glob("*.tmp-*"))
        building.kill()
        line(waiting, "building")
        tell_to_go_on(waiting)
        done = line(waiting, "done")
    assert done == f"done {len(opened(cfg).train)}"
    assert not list(Path(cfg.cache_dir).glob("*.tmp-*"))
    assert not list(Path(cfg.cache_dir).glob("*.lock*"))


def test_two_builders_that_do_not_see_each_other_both_end_well(cfg: DataConfig) -> None:
    """As on two hosts whose locks are their own: neither deletes the other's work, and the first one's is used."""
    with rank(cfg, "not seen", "host-a") as first:
        line(first, "ready")
        line(first, "building")
        with rank(cfg, "not seen", "host-b") as second:
            line(second, "ready")
            assert "is another builder's: delete it if that is gone" in line(second, str(Path(cfg.cache_dir)))
            line(second, "building")
            assert len(list(Path(cfg.cache_dir).glob("*.tmp-*"))) == 2
            tell_to_go_on(first)
            done = line(first, "done")
            (folder,) = (path for path in Path(cfg.cache_dir).glob("*") if (path / "report.json").exists())
            inode = folder.stat().st_ino
            tell_to_go_on(second)
            assert line(second, "done") == done
    assert folder.stat().st_ino == inode
    assert not list(Path(cfg.cache_dir).glob("*.tmp-*"))


def test_only_what_is_surely_dead_is_deleted(cfg: DataConfig) -> None:
    """Of another host's builder, or another version's, nobody here knows whether it lives."""
    here = owner_lock.current_process()
    child = subprocess.Popen(["true"])
    child.wait()
    with rank(cfg) as building:
        line(building, "ready")
        line(building, "building")
        (live,) = Path(cfg.cache_dir).glob("*.tmp-*")
        start = live.name.partition(".tmp-")[0] + ".tmp-"
        names = [replace(here, host="elsewhere").label(), replace(here, boot="before").label(), here.label()]
        kept = [live.with_name(f"{start}{name}-01234567") for name in [*names, "4711"]]
        dead = live.with_name(f"{start}{replace(here, pid=child.pid).label()}-01234567")
        for folder in [*kept, dead]:
            folder.mkdir()
            (folder / "train.tokens.bin").write_text("work")
        cache._remove_dead(live.with_name(live.name.partition(".tmp-")[0]))
        left = set(Path(cfg.cache_dir).glob("*.tmp-*"))
        assert left == {live, *kept}
        assert all(list(folder.iterdir()) for folder in left)
        tell_to_go_on(building)
        line(building, "done")


def test_those_who_waited_get_the_builders_error(cfg: DataConfig) -> None:
    path = Path(cfg.path or "")
    content = path.read_text()
    path.write_text(content + "broken\n")
    with pytest.raises(ConfigError):
        opened(cfg)  # an error of an earlier run is not taken for one of this run: "building" comes first
    with rank(cfg) as first, rank(cfg) as second:
        line(first, "ready")
        line(second, "ready")
        started = [first.stdout.readline(), second.stdout.readline()]
        building, waiting = (first, second) if started[0].startswith("building") else (second, first)
        tell_to_go_on(building)
        assert line(building, "error") == line(waiting, "error")
    path.write_text(content)
    assert len(opened(cfg).train)
