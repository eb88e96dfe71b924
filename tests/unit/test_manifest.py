from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from remat import manifest
from remat.config import ConfigError
from remat.manifest import Manifest, SaveError


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

    def broken(path: Path) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(manifest, "hash_file", broken)
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


def test_errors_keep_their_kind(tmp_path: Path) -> None:
    def fail(error: Exception) -> None:
        raise error

    with pytest.raises(SaveError, match=r"saving x failed on rank 0: OSError: disk"):
        manifest.on_main(lambda: fail(OSError("disk")), "saving x")
    with pytest.raises(ConfigError, match=r"^save.keep=0$"):
        manifest.on_main(lambda: fail(ConfigError("save.keep=0")), "saving x")
    with pytest.raises(SaveError, match=r"saving x failed on rank 0: ValueError: bad"):
        manifest.agree(ValueError("bad"), "saving x")
    manifest.agree(None, "saving x")
    assert manifest.on_main(lambda: 5, "counting") == 5
