from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from remat.config.options import ConfigError
from remat.saving import manifest
from remat.saving.manifest import Manifest, SaveError


def make(folder: Path) -> Manifest:
    (folder / "engine").mkdir(parents=True)
    (folder / "engine" / "weights.pt").write_bytes(bytes(range(256)) * 40)
    (folder / "rank-00000.pt").write_bytes(b"random state")
    info = Manifest(
        step=7,
        sequence=3,
        world_size=2,
        zero_stage=3,
        precision="bf16",
        layout="abc",
        frozen_excluded=False,
        created="2026-01-01T00:00:00+00:00",
        versions={"torch": "2.13.0"},
        client_state={"position": 12, "wandb_run_id": None},
        files=manifest.describe(folder, manifest.files_in(folder)),
    )
    manifest.write(folder, info)
    return info


def test_round_trip(tmp_path: Path) -> None:
    info = make(tmp_path / "state")
    assert manifest.read(tmp_path / "state") == info
    assert list(info.files) == ["engine/weights.pt", "rank-00000.pt"]
    assert info.size_bytes == 256 * 40 + 12
    digest = "793490b11e76c14366c90ea30a6a6041b27c97226db28b7860efb96b293c5702"  # sha256sum of "random state"
    assert info.files["rank-00000.pt"].sha256 == digest
    assert manifest.verify(tmp_path / "state") == []
    assert manifest.is_complete(tmp_path / "state")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "problem", "seen_by_size"),
    [
        (lambda p: p.unlink(), "engine/weights.pt: missing", True),
        (lambda p: p.write_bytes(b""), "engine/weights.pt: empty", True),
        (lambda p: p.write_bytes(p.read_bytes()[:-1]), "engine/weights.pt: 10239 bytes of 10240", True),
        (flip, "engine/weights.pt: content changed (hash differs)", False),
    ],
    ids=["missing", "empty", "truncated", "bit-flip"],
)
def test_damage_is_named(
    tmp_path: Path, damage: Callable[[Path], None], problem: str, seen_by_size: bool
) -> None:
    make(tmp_path)
    damage(tmp_path / "engine" / "weights.pt")
    assert manifest.verify(tmp_path) == [problem]
    assert manifest.is_complete(tmp_path) != seen_by_size
    # Two ranks share the files; the damaged one is first in order, so part 0 finds it.
    assert manifest.verify(tmp_path, part=0, parts=2) == [problem]
    assert manifest.verify(tmp_path, part=1, parts=2) == []


def test_a_file_that_cannot_be_read_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raised on one rank, it would leave the others waiting for that rank's findings."""
    make(tmp_path)

    def broken(*_: Any) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(manifest, "_hash_piece", broken)
    assert manifest.verify(tmp_path)[0] == "engine/weights.pt: cannot be read (Input/output error)"


def test_a_changed_or_absent_manifest_is_no_manifest(tmp_path: Path) -> None:
    make(tmp_path)
    path = tmp_path / manifest.FILE
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"step": 8}))
    assert manifest.verify(tmp_path) == ["manifest.json was changed after it was written"]
    path.write_text(path.read_text()[:50])
    assert "not readable" in manifest.verify(tmp_path)[0]
    assert not manifest.is_complete(tmp_path)
    path.unlink()
    assert manifest.verify(tmp_path) == ["manifest.json is missing: the state was never finished"]


def test_publish_replaces_and_leaves_one_folder(tmp_path: Path) -> None:
    final = tmp_path / "step-000001"
    for text in ("old", "new"):
        tmp = tmp_path / "tmp-step-000001"
        tmp.mkdir()
        (tmp / "file").write_text(text)
        manifest.publish(tmp, final)
    assert (final / "file").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_what_a_killed_publish_left_stops_no_later_one(tmp_path: Path) -> None:
    """Beside an export nothing cleans up, as `clean` does among saved states."""
    for name in ("tmp-old-best", "best", "tmp-best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    manifest.publish(tmp_path / "tmp-best", tmp_path / "best")
    assert (tmp_path / "best" / "file").read_text() == "tmp-best"
    assert [p.name for p in tmp_path.iterdir()] == ["best"]


def test_errors_keep_their_kind(tmp_path: Path) -> None:
    def fail(error: Exception) -> None:
        raise error

    with pytest.raises(SaveError, match=r"saving x failed on rank 0: OSError: disk"):
        manifest.run_on_main(lambda: fail(OSError("disk")), "saving x")
    with pytest.raises(ConfigError, match=r"^save.keep=0$"):
        manifest.run_on_main(lambda: fail(ConfigError("save.keep=0")), "saving x")
    with pytest.raises(SaveError, match=r"saving x failed on rank 0: ValueError: bad"):
        manifest.raise_together(ValueError("bad"), "saving x")
    manifest.raise_together(None, "saving x")
    assert manifest.run_on_main(lambda: 5, "counting") == 5


def test_ranks_hash_what_they_read_next(tmp_path: Path) -> None:
    """Own files where the ranks are those of the save, shared ones to who has least; else equal bytes."""
    sizes = {f"engine/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": 100 for rank in range(4)}
    sizes |= {f"rng/rank-{rank:05d}.pt": 1 for rank in range(4)} | {"engine/mp_rank_00_model_states.pt": 70}
    files = {name: manifest.FileEntry(size, "") for name, size in sizes.items()}
    info = replace(make(tmp_path), world_size=4, files=files)
    shares = [manifest.share(info, rank, 4) for rank in range(4)]
    assert sorted(name for names in shares for name in names) == sorted(files)
    for rank, names in enumerate(shares):
        assert {info.rank_of(name) for name in names} <= {rank, None}
    for parts in (1, 2, 3, 7):
        shares = [manifest.share(info, rank, parts) for rank in range(parts)]
        assert sorted(name for names in shares for name in names) == sorted(files)
        loads = [sum(sizes[name] for name in names) for names in shares]
        assert max(loads) - min(loads) <= 100


def test_bytes_are_told_while_they_are_read(tmp_path: Path) -> None:
    info = make(tmp_path)
    (tmp_path / "large").write_bytes(bytes(20 * 1024**2))
    files = info.files | manifest.describe(tmp_path, ["large"])
    assert files["large"].sha256 == hashlib.sha256(bytes(20 * 1024**2)).hexdigest()
    manifest.write(tmp_path, replace(info, files=files))
    told: list[int] = []
    assert manifest.verify(tmp_path, hashed=told.append) == []
    assert sum(told) == 256 * 40 + 12 + 20 * 1024**2 and max(told) == 8 * 1024**2


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_ranks_share_the_check_and_read_each_byte_once(tmp_path: Path, parts: int) -> None:
    """Whatever the number of ranks that wrote the state."""
    info = make(tmp_path)
    reads = []
    for part in range(parts):
        told: list[int] = []
        assert manifest.verify(tmp_path, part=part, parts=parts, hashed=told.append) == []
        reads.append(sum(told))
    assert sum(reads) == info.size_bytes
    assert max(reads) <= info.size_bytes / parts + max(entry.size_bytes for entry in info.files.values())


@pytest.mark.parametrize("damaged", [0, 1000, 2999])
def test_pieces_of_a_large_file_are_hashed_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: int
) -> None:
    """The last piece is shorter. A state of whole hashes is read as before."""
    info = make(tmp_path)
    content = bytearray(os.urandom(3000))
    (tmp_path / "large").write_bytes(content)
    monkeypatch.setattr(manifest, "PIECE_BYTES", 700)
    monkeypatch.setattr(manifest, "READ_BYTES", 64)
    entry = manifest.describe(tmp_path, ["large"])["large"]
    pieces = [hashlib.sha256(content[place : place + 700]).digest() for place in range(0, 3000, 700)]
    assert entry == manifest.FileEntry(3000, hashlib.sha256(b"".join(pieces)).hexdigest(), 700)
    whole = manifest.FileEntry(3000, hashlib.sha256(content).hexdigest())
    for each in (entry, whole):
        manifest.write(tmp_path, replace(info, files=info.files | {"large": each}))
        assert manifest.verify(tmp_path) == []
    content[damaged] ^= 1
    (tmp_path / "large").write_bytes(content)
    for each in (entry, whole):
        manifest.write(tmp_path, replace(info, files=info.files | {"large": each}))
        assert manifest.verify(tmp_path) == ["large: content changed (hash differs)"]


@pytest.mark.parametrize("large", [False, True])
def test_files_and_pieces_are_read_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    make(tmp_path)
    both = threading.Barrier(2, timeout=60)
    original = manifest._hash_piece

    def meeting(*given: Any) -> bytes:
        both.wait()
        return original(*given)

    monkeypatch.setattr(manifest, "_hash_piece", meeting)
    monkeypatch.setattr(manifest, "available_cores", lambda: 2)
    if large:
        monkeypatch.setattr(manifest, "PIECE_BYTES", 600)
        (tmp_path / "large").write_bytes(bytes(1200))
        assert manifest.describe(tmp_path, ["large"])["large"].piece_bytes == 600
    else:
        assert manifest.verify(tmp_path) == []


class Disk:
    """What was flushed and renamed, in order; paths relative to `root`."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str]] = []
        fsync, rename = os.fsync, Path.rename

        def flush(handle: int) -> None:
            path = Path(f"/proc/self/fd/{handle}").readlink()
            self.events.append(("fsync", path.relative_to(root).as_posix()))
            fsync(handle)

        def move(path: Path, target: Path) -> Path:
            self.events.append(("rename", Path(target).relative_to(root).as_posix()))
            return rename(path, target)

        monkeypatch.setattr(os, "fsync", flush)
        monkeypatch.setattr(Path, "rename", move)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks Linux which file a handle is of")
def test_everything_is_on_disk_before_the_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure at any point leaves a state whole or without its name."""
    disk = Disk(tmp_path, monkeypatch)
    tmp, final = tmp_path / "saved" / "tmp-step-000001", tmp_path / "saved" / "step-000001"
    make(tmp)
    manifest.publish(tmp, final)
    named = disk.events.index(("rename", "saved/step-000001"))
    before = [path for what, path in disk.events[:named] if what == "fsync"]
    inside = ["engine/weights.pt", "rank-00000.pt", "manifest.json", "engine", ""]
    assert sorted(before) == sorted(f"saved/tmp-step-000001/{name}".rstrip("/") for name in inside)
    assert before.index("saved/tmp-step-000001/manifest.json") > before.index(
        "saved/tmp-step-000001/rank-00000.pt"
    )
    assert ("fsync", "saved") in disk.events[named:]
