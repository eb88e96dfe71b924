"""Data that several processes encode: the same cache whatever their number, and nothing done twice after a kill."""

from __future__ import annotations

import errno
import os
import signal
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from remat.config.options import BadRows, ConfigError, DataConfig, DataFormat, DataSource
from remat.data import build
from remat.data.cache import Splits, open_blocks
from remat.data.tokenizer import byte_tokenizer
from tests.support.chats import make_chats

SEQ_LEN, BATCH = 128, 16
REFUSING = "{{ raise_exception('empty') if messages[1].content == 'refuse me' }}"


@pytest.fixture
def cfg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataConfig:
    monkeypatch.setattr(build, "BATCH_DOCUMENTS", BATCH)
    monkeypatch.setattr(build, "SHARDED_FROM", 0)
    path = make_chats(tmp_path / "chats.jsonl", 200)
    return DataConfig(
        source=DataSource.files,
        path=str(path),
        eval_fraction=0.1,
        cache_dir=str(tmp_path / "cache"),
        processes=2,
    )


def opened(cfg: DataConfig) -> Splits:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = REFUSING + str(tokenizer.chat_template)
    return open_blocks(cfg, tokenizer=tokenizer, seq_len=SEQ_LEN, seed=1, show_progress=False)


def files_of(splits: Splits) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(splits.report["folder"]).glob("*.bin")}


def test_the_cache_is_the_same_for_any_number_of_processes(
    cfg: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for processes in (1, 2, 3):
        here = replace(cfg, cache_dir=str(tmp_path / f"cache-{processes}"), processes=processes)
        found[processes] = opened(here)
        assert {path.name for path in Path(here.cache_dir).iterdir()} - {"hashes"} == {found[processes].key}
    monkeypatch.setattr(build, "SHARDED_FROM", 10**9)
    alone = opened(replace(cfg, cache_dir=str(tmp_path / "cache-0")))
    assert len(files_of(alone)) == 8
    for splits in found.values():
        assert files_of(splits) == files_of(alone)
        assert splits.key == alone.key
        left_out = ("build_s", "folder")
        assert {k: v for k, v in splits.report.items() if k not in left_out} == {
            k: v for k, v in alone.report.items() if k not in left_out
        }


@pytest.mark.parametrize("data_format", [DataFormat.chat, DataFormat.plain])
def test_rows_that_a_template_refuses_are_the_same_bad_rows(
    cfg: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_format: DataFormat
) -> None:
    path = tmp_path / "rows.jsonl"
    turns = '{"role": "user", "content": "a"}, {"role": "assistant", "content": "refuse me"}'
    short = '{"messages": [' + turns + '], "text": ""}\n'
    path.write_text(short * 3 + short.replace("refuse me", "no").replace('""', '"words of a text"') * 200)
    cfg = replace(cfg, path=str(path), format=data_format, on_bad_row=BadRows.skip)
    found = opened(cfg)
    bad_rows = found.report["bad_rows"]
    if data_format is DataFormat.plain:
        assert (bad_rows["count"], found.report["empty_documents"]) == (0, 3)
    else:
        assert bad_rows["count"] == 3
        assert bad_rows["first"][2] == f"{path}:3: the chat template refuses it: empty"
        with pytest.raises(ConfigError, match=r"rows\.jsonl:2: the chat template refuses it"):
            opened(replace(cfg, on_bad_row=BadRows.stop))
        assert not list(Path(cfg.cache_dir).glob("*.shards"))


def builder(cfg: DataConfig) -> int:
    """Fork a process that builds and hangs in its fifth batch; return its id."""
    pid = os.fork()
    if pid:
        return pid
    real = build._write_shard

    def hanging(folder: Path, index: int, *more: Any) -> None:
        if index >= 4:
            time.sleep(600)
        real(folder, index, *more)

    try:
        build._write_shard = hanging
        opened(cfg)
    finally:
        os._exit(1)


class Inline:
    """Stands in the place of the pool, and counts what it is given."""

    given: list[int] = []  # noqa: RUF012

    def __init__(self, count: int, context: Any, begin: Any, arguments: Any) -> None:
        build._work = arguments[:3]

    def submit(self, work: Any, index: int, documents: Any) -> Future[None]:
        self.given.append(index)
        work(index, documents)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def shutdown(self, cancel_futures: bool) -> None:
        pass


def test_after_a_kill_what_was_encoded_is_kept_and_checked(
    cfg: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = opened(replace(cfg, cache_dir=str(tmp_path / "whole")))
    pid = builder(cfg)
    deadline = time.monotonic() + 60
    while len(done := sorted(Path(cfg.cache_dir).glob("*.shards/*.npz"))) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    workers = psutil.Process(pid).children(recursive=True)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    _, left = psutil.wait_procs(workers, timeout=30)
    assert workers and not left, "nobody is left behind"
    assert [path.name for path in done] == [f"{index:08d}.npz" for index in range(4)]
    damaged = bytearray(done[2].read_bytes())
    damaged[-100] ^= 1
    done[2].write_bytes(damaged)
    (done[0].with_name("00000006.npz")).write_bytes(done[0].read_bytes())  # whole, but of other rows
    monkeypatch.setattr(build, "ProcessPoolExecutor", Inline)
    Inline.given.clear()
    found = opened(cfg)
    assert Inline.given == [2, *range(4, 13)]
    assert files_of(found) == files_of(whole)
    assert {path.name for path in Path(cfg.cache_dir).iterdir()} - {"hashes"} == {found.key}


def test_what_was_encoded_before_the_disk_filled_up_needs_no_room_again(
    cfg: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, check, needed = build._write_shard, build._check_room, list[float]()
    room = build.shutil.disk_usage(cfg.path)

    def full(folder: Path, index: int, *more: Any) -> None:
        if index == 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(folder, index, *more)

    def watched(plan: build.Plan, folder: Path, needed_bytes: float) -> None:
        needed.append(needed_bytes)
        check(plan, folder, needed_bytes)

    monkeypatch.setattr(build, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(build, "_check_room", watched)
    with monkeypatch.context() as patched:
        patched.setattr(build, "_write_shard", full)
        with pytest.raises(build.NoRoom, match="No space left on device"):
            opened(cfg)
    monkeypatch.setattr(build.shutil, "disk_usage", lambda _: room._replace(free=0))
    with pytest.raises(build.NoRoom, match="free some"):
        opened(cfg)
    assert needed[1] < needed[0]
    free = int(build.SURE * needed[1]) + 1
    monkeypatch.setattr(build.shutil, "disk_usage", lambda _: room._replace(free=free))
    Inline.given.clear()
    opened(cfg)
    assert Inline.given == [10, 11, 12]


def test_what_is_divided_in_blocks_at_last_is_not_encoded_twice(
    cfg: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a text in both halves, the batches with an end that was only between the halves are."""
    monkeypatch.setattr(build, "BATCH_CHARACTERS", 100)
    (tmp_path / "a.txt").write_text("".join(f"<{number:03d} {'y' * 20}>\n" for number in range(50)))
    cfg = replace(cfg, path=str(tmp_path / "a.txt"), eval_fraction=0.05)
    monkeypatch.setattr(build, "ProcessPoolExecutor", Inline)
    Inline.given.clear()
    found = opened(cfg)
    batches = max(Inline.given) + 1
    assert found.report["held_out_by"] == "blocks" and batches > 8
    assert Inline.given[:batches] == [*range(batches)]
    assert 0 < len(Inline.given[batches:]) < batches // 2
    monkeypatch.setattr(build, "SHARDED_FROM", 10**9)
    assert files_of(found) == files_of(opened(replace(cfg, cache_dir=str(tmp_path / "alone"))))


def test_a_disk_without_room_for_blocks_and_shards_is_told_before_anything_is_written(
    cfg: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = build.shutil.disk_usage(cfg.path)
    tokens = 27_000
    monkeypatch.setattr(
        build.shutil, "disk_usage", lambda _: room._replace(free=6 * tokens)
    )  # the blocks alone fit
    with pytest.raises(
        ConfigError, match=r"data\.cache_dir=.* free, and the blocks .* need about 2\d\d\.. KiB while"
    ):
        opened(cfg)
    monkeypatch.setattr(build, "SHARDED_FROM", 10**9)
    assert len(opened(cfg).train)
