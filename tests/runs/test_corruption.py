"""A saved state that is damaged is found by its manifest, named, and the newest whole one is used; never step 0."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from remat.config.options import ConfigError
from remat.saving import load, manifest
from tests.support import tiny
from tests.support.launcher import deepspeed

pytestmark = pytest.mark.launch
MORE = ["deepspeed.config=zero2", "train.steps=6", "save.every=2", "save.keep=3"]
NEWEST, BEFORE = "step-000006", "step-000004"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run with three saved states."""
    folder = tiny.make_workshop(tmp_path_factory.mktemp("corruption"))
    done = deepspeed(*tiny.words(folder, "run", *MORE))
    assert done.code == 0, done.out[-4000:]
    assert sorted(p.name for p in (folder / "out/run/run/saved").iterdir()) == ["step-000002", BEFORE, NEWEST]
    return folder


def copy(workshop: Path, name: str) -> Path:
    """Another recipe's folder with the same run in it, to be damaged."""
    return Path(shutil.copytree(workshop / "out" / "run", workshop / "out" / name)) / "run"


def optimizer_file(state: Path, rank: int = 1) -> Path:
    return next((state / "engine").glob(f"*pp_rank_{rank}_*optim_states.pt"))


def truncate(state: Path) -> None:
    file = optimizer_file(state)
    file.write_bytes(file.read_bytes()[:-1])


def empty(state: Path) -> None:
    optimizer_file(state, rank=0).write_bytes(b"")


def lose(state: Path) -> None:
    (state / "rng" / "rank-00001.pt").unlink()


def flip(state: Path) -> None:
    """One bit, in the middle of a weight: nothing but a hash sees it."""
    file = state / "engine" / "mp_rank_00_model_states.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def lose_manifest(state: Path) -> None:
    (state / manifest.FILE).unlink()


def empty_manifest(state: Path) -> None:
    (state / manifest.FILE).write_bytes(b"")


def flip_manifest(state: Path) -> None:
    file = state / manifest.FILE
    file.write_bytes(file.read_bytes().replace(b'"step": 6', b'"step": 7'))


def unfinish(state: Path) -> None:
    state.rename(state.with_name(f"{manifest.TMP}{state.name}"))


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated file": (truncate, "optim_states.pt: "),
    "empty file": (empty, "optim_states.pt: empty"),
    "missing file": (lose, "rng/rank-00001.pt: missing"),
    "bit flip": (flip, "engine/mp_rank_00_model_states.pt: content changed (hash differs)"),
    "missing manifest": (lose_manifest, "manifest.json is missing: the state was never finished"),
    "empty manifest": (empty_manifest, "manifest.json is not readable"),
    "changed manifest": (flip_manifest, "manifest.json was changed after it was written"),
    "leftover tmp- folder": (unfinish, f"tmp-{NEWEST}: unfinished"),
}


def resolve(workshop: Path, run: Path) -> load.ResumePoint | None:
    return load.resolve_resume("auto", output_dir=str(workshop / "out"), name=run.parent.name, run_id=run.name)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_newest_whole_state_is_used_and_the_damage_named(workshop: Path, fault: str) -> None:
    damage, expected = FAULTS[fault]
    run = copy(workshop, fault)
    damage(run / "saved" / NEWEST)
    point = resolve(workshop, run)
    assert point is not None and point.state.path == run / "saved" / BEFORE
    assert point.state.client_state["step"] == 4
    assert len(point.notes) == 1 and expected in point.notes[0] and NEWEST in point.notes[0]
    for state in (run / "saved").glob("step-*"):  # the same in all states: nothing is left to go on from
        if state.name != NEWEST:
            damage(state)
    if fault == "changed manifest":  # its step is another
        assert resolve(workshop, run) is not None
    else:
        with pytest.raises(ConfigError, match="no complete saved state in"):
            resolve(workshop, run)


@pytest.mark.parametrize("pointer", ["", "global_step99", None], ids=["empty", "wrong", "missing"])
def test_no_pointer_file_is_trusted_or_needed(workshop: Path, pointer: str | None) -> None:
    """DeepSpeed resumes from what `latest` names, and starts at step 0 without it."""
    run = copy(workshop, f"pointer-{pointer}")
    assert list(run.rglob("latest")) == []
    if pointer is not None:
        for folder in (run, run / "saved", run / "saved" / NEWEST):
            (folder / "latest").write_text(pointer)
    point = resolve(workshop, run)
    assert point is not None and (point.state.path.name, point.notes) == (NEWEST, [])


@pytest.mark.slow_fault
def test_a_run_resumes_before_a_flipped_bit_and_ends_the_same(workshop: Path) -> None:
    run = copy(workshop, "flipped")
    flip(run / "saved" / NEWEST)
    done = deepspeed(*tiny.words(workshop, "flipped", *MORE, "resume=auto"))
    assert done.code == 0, done.out[-4000:]
    said = " ".join(done.out.split())  # long lines are wrapped
    assert f"{NEWEST}: engine/mp_rank_00_model_states.pt: content changed (hash differs)" in said
    losses = [row["loss/train"] for row in tiny.rows(run)]
    assert losses == [row["loss/train"] for row in tiny.rows(workshop / "out/run/run")]
    assert manifest.verify(run / "saved" / NEWEST) == []  # written anew


def test_nothing_whole_is_an_error_never_step_0(workshop: Path) -> None:
    run = copy(workshop, "lost")
    for state, damage in zip(sorted((run / "saved").iterdir()), (truncate, flip, lose_manifest), strict=True):
        damage(state)
    record = (run / "metrics.jsonl").read_text()
    done = deepspeed(*tiny.words(workshop, "lost", *MORE, "resume=auto"))
    assert done.code == 2, done.out[-4000:]
    assert "resume=auto: no complete saved state in" in done.out
    for state in (
        "step-000002: engine/",
        f"{BEFORE}: engine/mp_rank_00",
        f"{NEWEST}: manifest.json is missing",
    ):
        assert state in done.out
    assert "proven:" not in done.out and (run / "metrics.jsonl").read_text() == record
