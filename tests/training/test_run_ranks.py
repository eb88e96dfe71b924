"""What two ranks agree on before a model exists: who owns the run, who prepares the data, where they swap to."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remat.config.options import ConfigError, DataConfig, DataSource
from remat.data import cache
from remat.data.tokenizer import byte_tokenizer
from remat.machine import distributed, owner_lock
from remat.machine.owner_lock import OwnerLock
from remat.report import run_dir
from remat.saving.nvme import own_folder, remove_folder
from tests.support.pool import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    ranks = RankPool(2)
    yield ranks
    ranks.close()


def open_run(folder: str, run_id: str | None) -> tuple[str, str]:
    """What a launch does for a new run: (error, its folder)."""
    ownership = run_dir.Ownership()
    try:
        found = run_dir.open_run_dir(folder, "recipe", run_id, None, ownership)
    except ConfigError as error:
        return str(error), ""
    finally:
        ownership.release()
    return "", str(found)


def take(folder: str) -> str:
    ownership = run_dir.Ownership()
    try:
        ownership.take(Path(folder))
    except ConfigError as error:
        return str(error)
    finally:
        ownership.release()
    return ""


def test_no_rank_goes_on_when_another_launch_owns_the_run(pool: RankPool, tmp_path: Path) -> None:
    run = tmp_path / "recipe" / "a"
    run.mkdir(parents=True)
    lock = OwnerLock(run / run_dir.OWNER)
    assert lock.take() is None
    since = json.loads((run / run_dir.OWNER).read_text())["since"]
    (told,) = set(pool.run(take, folder=str(run)))
    host = owner_lock.current_process().host
    assert told.startswith(
        f"{run} belongs to process {os.getpid()} on {host}, since {since}: one launch at a time"
    )
    assert f"touch {run}/stop" in told and "another run_id" in told
    (error,) = {error for error, _ in pool.run(open_run, folder=str(tmp_path), run_id="a")}
    assert f"run_id=a: {run} exists and belongs to process {os.getpid()}" in error
    lock.release()
    assert pool.run(take, folder=str(run)) == ["", ""]
    (error,) = {error for error, _ in pool.run(open_run, folder=str(tmp_path), run_id="a")}
    assert "exists; continue it with resume=auto" in error
    assert list(run.iterdir()) == []


def test_launches_of_the_same_second_get_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_dir, "_launch_time", lambda: "20261122-101500")
    names = [Path(open_run(str(tmp_path), None)[1]).name for _ in range(3)]
    assert names == ["20261122-101500", "20261122-101500-2", "20261122-101500-3"]


def prepare(cache_dir: str, data: str, nodes: int, slow_s: float = 0.0, hangs: bool = False) -> dict[str, Any]:
    """`open_blocks` of a rank on one of `nodes`; {rank} in a path is this one's. What it saw and did."""
    rank, _ = distributed.place()
    os.environ.update(LOCAL_SIZE=str(2 // nodes), LOCAL_RANK=str(rank if nodes == 1 else 0))
    write, hashed, built, heard = cache.write_blocks, cache.Hashes.of, [], []
    of: list[str] = []

    def write_blocks(plan: Any, folder: Path, shards: Path, *, show_progress: bool) -> None:
        built.append(plan.key)
        for _ in range(round(slow_s / 0.1)):
            time.sleep(0.1)
            if not hangs:
                plan.hashes.advance()
        write(plan, folder, shards, show_progress=show_progress)

    cache.write_blocks = write_blocks  # type: ignore[assignment]
    cache.Hashes.of = lambda *arguments: of.append("") or hashed(*arguments)  # type: ignore[func-returns-value, method-assign, assignment]
    cfg = DataConfig(source=DataSource.files, path=data.format(rank=rank), eval_fraction=0.0)
    cfg.cache_dir = cache_dir.format(rank=rank)
    error, blocks = "", 0
    try:
        splits = cache.open_blocks(
            cfg,
            tokenizer=byte_tokenizer(),
            seq_len=8,
            seed=1,
            show_progress=False,
            on_progress=lambda: heard.append(1),
        )
        blocks = len(splits.train)
    except (ConfigError, RuntimeError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    finally:
        cache.write_blocks, cache.Hashes.of = write, hashed  # type: ignore[method-assign]
        os.environ.update(LOCAL_SIZE="2", LOCAL_RANK=str(rank))
    return {"built": len(built), "looked": len(of), "heard": len(heard), "blocks": blocks, "error": error}


def test_one_rank_looks_where_the_cache_is_shared_and_one_per_node_where_it_is_not(
    pool: RankPool, tmp_path: Path
) -> None:
    data = tmp_path / "a.txt"
    data.write_text("words " * 100)
    shared, local = str(tmp_path / "shared"), str(tmp_path / "node-{rank}")
    for nodes in (1, 2):
        first = pool.run(prepare, cache_dir=f"{shared}-{nodes}", data=str(data), nodes=nodes)
        assert [(r["looked"], r["built"], r["error"]) for r in first] == [(1, 1, ""), (0, 0, "")]
        again = pool.run(prepare, cache_dir=f"{shared}-{nodes}", data=str(data), nodes=nodes)
        assert [(r["looked"], r["built"], r["error"]) for r in again] == [(1, 0, ""), (0, 0, "")]
        assert {r["blocks"] for r in first + again} == {75}
        assert not list(Path(f"{shared}-{nodes}").glob(".seen-*"))
    apart = pool.run(prepare, cache_dir=local, data=str(data), nodes=2)
    assert [(r["looked"], r["built"], r["error"], r["blocks"]) for r in apart] == [(1, 1, "", 75)] * 2


def test_those_who_wait_hear_of_progress_and_of_failure(pool: RankPool, tmp_path: Path) -> None:
    data = tmp_path / "a.txt"
    data.write_text("words " * 100)
    _, waited = pool.run(prepare, cache_dir=str(tmp_path / "cache"), data=str(data), nodes=1, slow_s=1.5)
    assert waited["heard"] >= 4, "each is progress for the watchdog"
    _, hung = pool.run(
        prepare, cache_dir=str(tmp_path / "other"), data=str(data), nodes=1, slow_s=3.0, hangs=True
    )
    assert hung["heard"] <= 3, "waiting alone is none: train.deadlines.data_s ends it"
    missing = pool.run(prepare, cache_dir=str(tmp_path / "cache"), data=str(tmp_path / "none"), nodes=1)
    (error,) = {r["error"] for r in missing}
    assert error.startswith("ConfigError: data.path=") and "does not exist" in error


def test_nodes_with_other_data_are_refused(pool: RankPool, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"{rank}.txt").write_text(f"{rank} words " * 100)
    data = str(tmp_path / "{rank}.txt")
    found = pool.run(prepare, cache_dir=str(tmp_path / "node-{rank}"), data=data, nodes=2)
    for error in (r["error"] for r in found):
        assert "(rank 1) is other data than on" in error and "give every node the same" in error


def swap(nvme: str, run: str, nodes: int, *, keep: bool) -> str:
    world = distributed.current()
    local = SimpleNamespace(rank=world.rank, local_rank=world.rank if nodes == 1 else 0, is_main=world.is_main)
    rendered = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": nvme}}}
    own = own_folder(rendered, Path(run), local)  # type: ignore[arg-type]
    assert own is not None and rendered["zero_optimization"]["offload_optimizer"]["nvme_path"] == str(own)
    distributed.barrier()
    if local.local_rank == 0:
        (own / "state.swp").write_text("live")
    distributed.barrier()
    if not keep:
        remove_folder(own, local)  # type: ignore[arg-type]
    return str(own)


def test_swap_files_belong_to_one_launch_of_one_run(pool: RankPool, tmp_path: Path) -> None:
    """Two output folders have a run of the same name: neither touches the other's. Killed launches are cleaned up."""
    nvme = str(tmp_path / "nvme")
    runs = [tmp_path / output / "recipe" / "run" for output in ("a", "b")]
    for run in runs:
        run.mkdir(parents=True)
    one = set(pool.run(swap, nvme=nvme, run=str(runs[0]), nodes=1, keep=True))
    assert len(one) == 1
    two = set(pool.run(swap, nvme=nvme, run=str(runs[1]), nodes=2, keep=True))
    assert len(two) == 2, "nodes that share the disk have folders of their own"
    left = {str(path.parent) for path in Path(nvme).rglob("state.swp")}
    assert left == one | two
    (tmp_path / "link").symlink_to(tmp_path / "a")
    again = set(pool.run(swap, nvme=nvme, run=str(tmp_path / "link" / "recipe" / "run"), nodes=1, keep=True))
    assert {str(path.parent) for path in Path(nvme).rglob("state.swp")} == again | two
    pool.run(swap, nvme=nvme, run=str(runs[0]), nodes=1, keep=False)
    pool.run(swap, nvme=nvme, run=str(runs[1]), nodes=2, keep=False)
    assert list(Path(nvme).iterdir()) == []
