"""Which state a run resumes from, and what a save leaves behind; the engine is a stand-in that writes one file."""

from __future__ import annotations

import datetime
import queue
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from remat.config.options import ConfigError, OptimStates, Precision
from remat.machine import rng
from remat.saving import disk_space, load, manifest
from remat.saving import save as saving
from remat.saving.manifest import SaveError


class Engine:
    """As much of a DeepSpeed engine at ZeRO stage 0 as saving touches."""

    def __init__(self) -> None:
        self.module = torch.nn.Linear(2, 3)
        self.optimizer = torch.optim.SGD(self.module.parameters())
        self.checkpoint_engine = SimpleNamespace(is_decoupled=lambda: False)
        self.broken = False
        self.config: dict[str, Any] = {}

    def save_checkpoint(self, folder: str, tag: str, **settings: Any) -> None:
        assert settings == {"save_latest": False, "exclude_frozen_parameters": False}
        (Path(folder) / tag).mkdir()
        torch.save(self.module.state_dict(), Path(folder) / tag / "mp_rank_00_model_states.pt")
        if self.broken:
            raise OSError(28, "No space left on device")

    def load_checkpoint(self, folder: str, tag: str, **settings: Any) -> tuple[str | None, dict[str, Any]]:
        if self.broken:
            return None, {}
        self.module.load_state_dict(torch.load(Path(folder) / tag / "mp_rank_00_model_states.pt"))
        return folder, {}

    def zero_optimization_stage(self) -> int:
        return 0

    def autotp_size(self) -> int:
        return 0

    def bfloat16_enabled(self) -> bool:
        return False

    def zero_nvme_offload_optimizer(self) -> bool:
        return False

    def fp16_enabled(self) -> bool:
        return False


def save(run: Path, step: int, *, keep: int = 5, engine: Engine | None = None) -> Path:
    client_state = {"step": step, "position": step * 10}
    return saving.save(engine or Engine(), run, step=step, client_state=client_state, keep=keep).path


def names(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "saved").iterdir())


def weights(state: Path) -> Path:
    return state / "engine" / "mp_rank_00_model_states.pt"


def test_retention_counts_complete_states_only(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    weights(tmp_path / "saved" / "step-000003").unlink()
    save(tmp_path, 4, keep=2)
    # 3 is damaged: it is neither counted nor deleted; 2 and 4 are the two complete ones.
    assert names(tmp_path) == ["step-000002", "step-000003", "step-000004"]


def test_leftovers_of_a_killed_save_go_with_the_next(tmp_path: Path) -> None:
    save(tmp_path, 1)
    leftover = tmp_path / "saved" / "tmp-step-000002"
    leftover.mkdir()
    (leftover / "half").write_text("x")
    assert load.find_newest(tmp_path).notes == ["tmp-step-000002: unfinished"]
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-000001", "step-000002"]
    assert load.find_newest(tmp_path).notes == []


def test_going_back_makes_the_later_save_the_newest(tmp_path: Path) -> None:
    """After a resume from step 1, the abandoned step 9 must not win over the new step 2."""
    for step in (1, 9, 2):
        save(tmp_path, step)
    state = load.find_newest(tmp_path).state
    assert state is not None and state.step == 2
    save(tmp_path, 3, keep=2)
    assert names(tmp_path) == ["step-000002", "step-000003"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    engine = Engine()
    save(tmp_path, 1, engine=engine)
    with torch.no_grad():
        engine.module.weight.fill_(7)
    path = save(tmp_path, 1, engine=engine)
    assert names(tmp_path) == ["step-000001"]
    assert torch.load(weights(path))["weight"].eq(7).all()
    assert manifest.verify(path) == []


def test_a_failed_save_raises_and_leaves_the_older_state(tmp_path: Path) -> None:
    engine = Engine()
    save(tmp_path, 1, engine=engine)
    engine.broken = True
    with pytest.raises(
        SaveError,
        match=r"saving .*step-000002 \(0\.00 GiB \(108 bytes\) needed, .* free at its start\) failed on rank 0: "
        r"OSError: \[Errno 28\] No space left",
    ):
        save(tmp_path, 2, engine=engine)
    assert names(tmp_path) == ["step-000001"]
    assert load.find_newest(tmp_path).state is not None


def test_a_save_without_room_is_refused_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    monkeypatch.setattr(disk_space, "free_bytes", lambda folder: 107)
    with pytest.raises(SaveError) as error:
        save(tmp_path, 2, keep=1)
    assert "saved has no room: 0.00 GiB (108 bytes) needed, 0.00 GiB (107 bytes) free" in str(error.value)
    assert "delete an older state (RUN_DIR/saved/step-...)" in str(error.value)
    assert names(tmp_path) == ["step-000001"]
    monkeypatch.setattr(disk_space, "free_bytes", lambda folder: 108)
    save(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["step-000002"]


def test_retention_waits_for_a_complete_new_state(tmp_path: Path) -> None:
    engine = Engine()
    save(tmp_path, 1, engine=engine)
    engine.broken = True
    with pytest.raises(SaveError):
        save(tmp_path, 2, keep=1, engine=engine)
    assert names(tmp_path) == ["step-000001"]
    engine.broken = False
    save(tmp_path, 3, keep=1, engine=engine)
    assert names(tmp_path) == ["step-000003"]


@pytest.mark.parametrize("when", ["old-aside", "old-half-deleted"])
def test_a_kill_while_a_state_is_replaced_loses_nothing(
    tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two renames put the new state in the place of the old one; a kill may come before, between or after them."""

    class Killed(BaseException):
        pass

    def killed(*args: object) -> None:
        raise Killed

    save(tmp_path, 1)
    if when == "old-aside":
        rename = Path.rename

        def between(self: Path, target: Path) -> Path:
            return killed() if self.name == "tmp-step-000001" else rename(self, target)  # type: ignore[return-value]

        monkeypatch.setattr(Path, "rename", between)
    else:
        monkeypatch.setattr(manifest, "remove", killed)
    with pytest.raises(Killed):
        save(tmp_path, 1)
    monkeypatch.undo()
    assert "tmp-old-step-000001" in names(tmp_path)
    found = load.find_newest(tmp_path).state
    assert found is not None and found.step == 1
    engine = Engine()
    engine.broken = True
    with pytest.raises(SaveError):  # a save that fails in between must not take the only state away
        save(tmp_path, 2, engine=engine)
    assert names(tmp_path) == ["step-000001"]
    assert manifest.verify(tmp_path / "saved" / "step-000001") == []


def begin(run: Path, step: int, *, keep: int = 5) -> saving.PendingSave:
    started = saving.begin(Engine(), run, step=step, client_state={"step": step}, keep=keep)
    started.in_background()
    return started


def test_a_state_in_the_background_is_unfinished_until_it_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    go, real = threading.Event(), manifest.describe

    def when_told(folder: Path, files: list[str]) -> Any:
        assert go.wait(60)
        return real(folder, files)

    monkeypatch.setattr(manifest, "describe", when_told)
    state = begin(tmp_path, 2, keep=1)
    assert not state.flushed and names(tmp_path) == ["step-000001", "tmp-step-000002"]
    assert load.find_newest(tmp_path).notes == ["tmp-step-000002: unfinished"]
    go.set()
    result = state.complete()
    assert state.flushed and names(tmp_path) == ["step-000002"]  # the older one goes only now
    assert manifest.verify(result.path) == [] and 0 < result.stall_s < result.seconds
    found = load.find_newest(tmp_path).state
    assert found is not None and found.client_state == {"step": 2}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("what", ["disk full", "thread dead", "no thread"])
def test_a_failure_in_the_background_is_raised_when_the_state_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fails(*args: Any) -> Any:
        raise OSError(28, "No space left on device") if what == "disk full" else SystemExit

    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    save(tmp_path, 1)
    if what == "no thread":
        monkeypatch.setattr(threading.Thread, "start", no_thread)
    else:
        monkeypatch.setattr(manifest, "describe", fails)
    state = begin(tmp_path, 2, keep=1)
    text = {"disk full": "No space left", "thread dead": "ended without a result", "no thread": "new thread"}[
        what
    ]
    with pytest.raises(SaveError, match=rf"saving .*step-000002 .* failed on rank 0: .*{text}"):
        state.complete()
    assert names(tmp_path) == ["step-000001"]
    monkeypatch.undo()
    begin(tmp_path, 3, keep=1).complete()
    assert names(tmp_path) == ["step-000003"]


def test_bad_arguments_fail_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"save.keep=0"):
        save(tmp_path, 1, keep=0)
    with pytest.raises(TypeError, match="not JSON serializable"):
        saving.save(Engine(), tmp_path, step=1, client_state={"x": torch.ones(1)}, keep=1)
    late = Engine()
    late.checkpoint_engine = SimpleNamespace(is_decoupled=lambda: True)
    with pytest.raises(ConfigError, match=r"checkpoint.writer"):
        save(tmp_path, 1, engine=late)
    assert not (tmp_path / "saved").exists()


def test_load_gives_back_weights_and_random_states_and_the_manifest_the_client_state(tmp_path: Path) -> None:
    engine = Engine()
    save(tmp_path, 1, engine=engine)
    expected = (torch.rand(3).tolist(), np.random.rand(), random.random())
    state = load.find_newest(tmp_path).state
    assert state is not None
    fresh = Engine()
    assert not torch.equal(fresh.module.weight, engine.module.weight)
    load.load(fresh, state)
    assert state.client_state == {"step": 1, "position": 10}
    assert torch.equal(fresh.module.weight, engine.module.weight)
    assert (torch.rand(3).tolist(), np.random.rand(), random.random()) == expected
    fresh.broken = True
    with pytest.raises(SaveError, match="nothing to load"):
        load.load(fresh, state)
    fresh.optimizer = torch.optim.SGD(torch.nn.Linear(2, 4).parameters())
    with pytest.raises(ConfigError, match="other parameters"):
        load.load(fresh, state)


@pytest.mark.parametrize("damage", ["truncate", "delete", "empty", "flip", "no-manifest", "edit-manifest"])
def test_find_passes_over_a_damaged_state_and_names_it(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    file = newest / manifest.FILE if "manifest" in damage else weights(newest)
    content = file.read_bytes()
    if damage in ("delete", "no-manifest"):
        file.unlink()
    else:
        changed = {
            "truncate": content[:-1],
            "empty": b"",
            "flip": content[:200] + bytes([content[200] ^ 4]) + content[201:],
            "edit-manifest": content.replace(b'"step": 2', b'"step": 5'),
        }
        file.write_bytes(changed[damage])
    found = load.find_newest(tmp_path)
    assert found.state is not None and found.state.step == 1
    assert len(found.notes) == 1 and found.notes[0].startswith("step-000002: ")


def test_find_takes_a_run_its_saved_folder_or_a_state(tmp_path: Path) -> None:
    first = save(tmp_path, 1)
    save(tmp_path, 2)
    steps = [load.find_newest(path).state.step for path in (tmp_path, tmp_path / "saved", first)]  # type: ignore[union-attr]
    assert steps == [2, 2, 1]
    assert load.find_newest(tmp_path / "saved" / "step-000009") == load.Found(None, [])
    assert load.find_newest(tmp_path / "elsewhere") == load.Found(None, [])


def resolve(tmp_path: Path, resume: str, run_id: str | None = None) -> load.ResumePoint | None:
    return load.resolve_resume(resume, output_dir=str(tmp_path), name="recipe", run_id=run_id)


def test_resume_none_looks_at_nothing(tmp_path: Path) -> None:
    save(tmp_path / "recipe" / "a", 1)
    assert resolve(tmp_path, "none") is None


def test_resume_auto_takes_the_run_that_saved_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for run, step, day in (("b", 10, 3), ("c", 99, 2), ("a", 50, 1)):
        clock = SimpleNamespace(now=lambda zone, day=day: datetime.datetime(2026, 1, day, tzinfo=zone))
        monkeypatch.setattr(saving, "datetime", SimpleNamespace(datetime=clock, UTC=datetime.UTC))
        save(tmp_path / "recipe" / run, step)
    (tmp_path / "recipe" / "d").mkdir()  # a run that never saved
    point = resolve(tmp_path, "auto")
    assert point is not None
    assert (point.run_dir, point.state.step, point.notes) == (tmp_path / "recipe" / "b", 10, [])
    weights(point.state.path).unlink()
    point = resolve(tmp_path, "auto")
    assert point is not None and point.run_dir == tmp_path / "recipe" / "c"
    assert point.notes == ["b/step-000010: engine/mp_rank_00_model_states.pt: missing"]
    chosen = resolve(tmp_path, "auto", run_id="a")
    assert chosen is not None and chosen.state.step == 50


@pytest.mark.parametrize("way", ["run_id", "newest", "run", "saved", "step", "saved is the run's name"])
def test_a_run_is_owned_before_its_states_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    run = tmp_path / "recipe" / ("saved" if way.startswith("saved is") else "a")
    save(run, 3)
    place = {"saved": run / "saved", "step": run / "saved" / "step-000003"}.get(way, run)
    resume = "auto" if way in ("run_id", "newest") else str(place)
    asked = {"output_dir": str(tmp_path), "name": "recipe", "run_id": "a" if way == "run_id" else None}
    owned: list[Path] = []
    point = load.resolve_resume(resume, own=owned.append, **asked)  # type: ignore[arg-type]
    assert point is not None and owned == [run] == [point.run_dir]

    def refuse(run_dir: Path) -> None:
        raise ConfigError("it belongs to another")

    monkeypatch.setattr(manifest, "verify", lambda *arguments, **more: pytest.fail("was read"))
    with pytest.raises(ConfigError, match="it belongs to another"):
        load.resolve_resume(resume, own=refuse, **asked)  # type: ignore[arg-type]


def test_resume_from_a_path(tmp_path: Path) -> None:
    run = tmp_path / "other" / "x"
    state = save(run, 3)
    save(run, 4)
    for path, step in ((run, 4), (state, 3)):
        point = resolve(tmp_path, str(path))
        assert point is not None and (point.state.step, point.run_dir) == (step, run)


@pytest.mark.parametrize("resume", ["auto", "path"])
def test_resume_with_nothing_complete_is_an_error_never_step_0(tmp_path: Path, resume: str) -> None:
    run = tmp_path / "recipe" / "a"
    weights(save(run, 1)).unlink()
    (run / "saved" / "tmp-step-000002").mkdir()
    value = resume if resume == "auto" else str(run)
    with pytest.raises(ConfigError) as error:
        resolve(tmp_path, value)
    text = str(error.value)
    assert text.startswith(f"resume={value}: no complete saved state in {run}")
    assert "a/step-000001: engine/mp_rank_00_model_states.pt: missing" in text
    assert "a/tmp-step-000002: unfinished" in text
    assert "resume=none to start at step 0" in text


def test_resume_with_no_run_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"resume=auto: no complete saved state in .*recipe/\* \(found: nothing\)"
    ):
        resolve(tmp_path, "auto")


@pytest.mark.parametrize("run_id", [None, "a"])
def test_auto_or_start_starts_where_nothing_was_saved_and_resumes_where_something_was(
    tmp_path: Path, run_id: str | None
) -> None:
    run = tmp_path / "recipe" / "a"
    assert resolve(tmp_path, "auto_or_start", run_id) is None
    run.mkdir(parents=True)  # killed before its first save
    assert resolve(tmp_path, "auto_or_start", run_id) is None
    (run / "saved" / "tmp-step-000001").mkdir(parents=True)  # killed in it
    assert resolve(tmp_path, "auto_or_start", run_id) is None
    save(run, 2)
    point = resolve(tmp_path, "auto_or_start", run_id)
    assert point is not None and (point.run_dir, point.state.step) == (run, 2)


def test_auto_or_start_never_starts_over_what_was_saved_and_is_damaged(tmp_path: Path) -> None:
    run = tmp_path / "recipe" / "a"
    weights(save(run, 1)).unlink()
    with pytest.raises(ConfigError, match=r"resume=auto_or_start: no complete saved state .*missing"):
        resolve(tmp_path, "auto_or_start")


def test_compatibility_names_every_difference(tmp_path: Path) -> None:
    save(tmp_path, 1)
    state = load.find_newest(tmp_path).state
    assert state is not None
    load.check_compatible(state, zero_stage=0, precision=Precision.fp32)
    load.check_compatible(state, zero_stage=0)
    with pytest.raises(ConfigError) as error:
        load.check_compatible(
            state, zero_stage=3, precision=Precision.bf16, states=OptimStates.bf16, also=["too few ranks"]
        )
    for part in ("too few ranks", "stage-0", "train.precision=fp32", "set optim.states=fp32"):
        assert part in str(error.value)


def test_random_states_survive_a_weights_only_file(tmp_path: Path) -> None:
    np.random.normal()  # leaves a cached second value, which must come back too
    torch.save(rng.get(), tmp_path / "rng.pt")
    expected = (torch.rand(2).tolist(), np.random.normal(size=3).tolist(), random.random())
    rng.put(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert (torch.rand(2).tolist(), np.random.normal(size=3).tolist(), random.random()) == expected


def test_a_state_that_is_read_for_long_makes_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog's deadline is for standing still: a round in which something was read counts, another does not."""
    save(tmp_path, 1)
    rounds, marks = [100, 100, 0, 0, 100], list[tuple[int, int]]()
    begin: queue.Queue[int] = queue.Queue()
    end: queue.Queue[None] = queue.Queue()

    def verify(path: Path, *, part: int, parts: int, hashed: Any) -> list[str]:
        for _ in rounds:
            count = begin.get(timeout=60)
            if count:
                hashed(count)
            end.put(None)
        return []

    original, number = load.wait, 0

    def wait(checks: Any, timeout: float) -> Any:
        nonlocal number
        number += 1
        if number > len(rounds):
            return original(checks, timeout=60)
        begin.put(rounds[number - 1])
        return end.get(timeout=60)

    monkeypatch.setattr(manifest, "verify", verify)
    monkeypatch.setattr(load, "wait", wait)
    found = load.find_newest(tmp_path, lambda done, total: marks.append((number, done))).state
    assert found is not None and marks == [(0, 0), (1, 100), (2, 200), (5, 300)]


def test_one_that_cannot_verify_says_so_to_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)

    def broken(*args: Any, **settings: Any) -> list[str]:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(manifest, "verify", broken)
    assert load.find_newest(tmp_path).notes == [
        "step-000001: cannot be verified (RuntimeError: can't start new thread)"
    ]
