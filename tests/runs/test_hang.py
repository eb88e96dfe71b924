"""A rank that stops or sleeps ends the run with a report of every live rank: phase, step and stack."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from remat.config.options import DeadlinesConfig
from remat.report import run_dir
from remat.training import watchdog
from tests.support import tiny
from tests.support.launcher import ROOT, deepspeed
from tests.support.supervised import supervised

SHORT = ["deepspeed.config=zero3", "data.eval_fraction=0.3", "save.every=1", "train.eval_every=2"]


def hang(folder: Path, script: str, fault: dict[str, Any], *more: str, real: bool = True) -> tuple[str, Path]:
    """Follow one run that hangs to its end, `real`ly launched by `remat launch`; return its output and directory."""
    workshop = tiny.make_workshop(folder)
    words = tiny.words(workshop, "hangs", *SHORT, *more)
    (workshop / "spec.json").write_text(json.dumps([{"name": "hangs", "words": words, "fault": fault}]))
    script, spec, run = (
        f"tests/support/{script}",
        str(workshop / "spec.json"),
        workshop / "out" / "hangs" / "run",
    )
    if not real:
        done = deepspeed(spec, script=script)
        assert done.code == 70, done.out[-4000:]
        return done.out, run
    with supervised(folder, str(ROOT / script), spec) as launched:
        launched.until(
            lambda: (run / "saved" / "step-000001").is_dir() or launched.process.poll() is not None, "save"
        )
        launched.watch()
        assert launched.finish() == 70, launched.out[-4000:]
        assert launched.left() == []
    return launched.out, run


REAL_TIME = pytest.param("faulty_runs.py", 30, marks=pytest.mark.slow_fault, id="real time")


@pytest.mark.launch
@pytest.mark.parametrize(("script", "step_s"), [pytest.param("hangs_soon.py", 5, id="soon"), REAL_TIME])
def test_a_stopped_rank_is_named_as_the_one_that_did_not_report(
    tmp_path: Path, script: str, step_s: int
) -> None:
    fault = {"what": "SIGSTOP", "rank": 1, "at": "step 2"}
    deadline = f"train.deadlines.step_s={step_s}"
    out, run = hang(tmp_path, script, fault, deadline, real=script == "faulty_runs.py")
    assert f"in step 2 of rank 0 (train.deadlines.step_s={step_s})" in out
    assert "rank 1: did not report: it was stopped or hangs itself, and is the suspect" in out
    assert [path.name for path in sorted((run / "hang").iterdir())] == ["rank-0.json", "rank-0.txt"]
    report = json.loads((run / "hang" / "rank-0.json").read_text())
    assert (report["phase"], report["step"]) == ("step", 2) and report["seconds"] >= step_s
    assert "loop.py" in (run / "hang" / "rank-0.txt").read_text()
    assert [path.name for path in (run / "saved").iterdir()] == ["step-000001"]


@pytest.mark.launch
@pytest.mark.slow_fault
def test_a_rank_asleep_reports_where_it_sleeps(tmp_path: Path) -> None:
    fault = {"what": "sleep", "rank": 0, "at": "evaluate 5"}
    several = "data.packing=none"  # three micro-batches in each evaluation
    out, run = hang(tmp_path, "faulty_runs.py", fault, "train.deadlines.evaluate_s=30", several)
    assert "(train.deadlines.evaluate_s=30)" in out
    reports = [json.loads((run / "hang" / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [(report["phase"], report["step"]) for report in reports] == [("evaluate", 2)] * 2
    assert "happen (faulty_runs.py" in reports[0]["where"]
    assert "happen (faulty_runs.py" not in reports[1]["where"]
    assert "did not report" not in out


class Ended(Exception):
    pass


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(watchdog, "POLL_S", 0.01)
    monkeypatch.setattr(watchdog, "REPORTS_S", 0.05)
    monkeypatch.setattr(watchdog, "FIRST_SPEAKS_S", 0.0)
    monkeypatch.setattr(watchdog.os, "_exit", leave)
    monkeypatch.setattr(watchdog, "_leave_alone", lambda mine: None)


def test_only_time_without_progress_counts_and_only_where_there_is_a_deadline() -> None:
    dog = watchdog.Watchdog(DeadlinesConfig(step_s=30, data_s=0), rank=0, size=1)
    now = iter(range(10_000))
    for micro_batch in range(10):
        dog.enter("step", micro_batch // 2)
        assert not any(dog.over(next(now)) for _ in range(30))
    assert dog.over(next(now))
    dog.enter("data")
    assert not any(dog.over(next(now)) for _ in range(3000))


def test_a_run_that_was_suspended_as_a_whole_goes_on() -> None:
    dog = watchdog.Watchdog(DeadlinesConfig(step_s=30), rank=0, size=1)
    dog.enter("step", 1)
    assert not dog.over(1.0) and not dog.over(2.0)
    assert not dog.over(10_000.0)


def test_reports_of_an_earlier_launch_are_no_sign_of_this_one(fast: None, tmp_path: Path) -> None:
    old = tmp_path / "hang" / "rank-1.json"
    old.parent.mkdir()
    old.write_text(json.dumps({"rank": 1}))
    dog = watchdog.Watchdog(DeadlinesConfig(), rank=0, size=2)
    dog.keep_in(tmp_path)
    assert dog._reports() == []
    (tmp_path / "hang" / "rank-3.json").write_text(json.dumps({"rank": 3}))
    assert dog._reports() == [{"rank": 3}]


def test_a_deadline_follows_the_bytes_of_its_phase(
    fast: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dog = watchdog.Watchdog(DeadlinesConfig(save_s=1.0, load_s=0.0), rank=0, size=1)
    dog.keep_in(tmp_path)
    dog.allow_for({"save": int(3 * watchdog.SLOWEST_DISK), "load": 10**15})
    for phase, deadline_s in (("save", 4.0), ("load", 0.0), ("step", DeadlinesConfig().step_s)):
        dog.enter(phase, 7)
        dog.over(0.0)
        assert dog._deadline_s() == deadline_s
    assert dog.longest_s == DeadlinesConfig().export_s
    dog.allow_for({"save": int(3 * watchdog.SLOWEST_DISK), "export": 10**13})
    assert dog.longest_s == DeadlinesConfig().export_s + 1e5
    dog.enter("save", 7)
    with pytest.raises(Ended):
        dog.run()
    assert "(train.deadlines.save_s=1, and 3 s for its bytes)" in capsys.readouterr().err


def test_a_rank_without_a_deadline_reports_when_another_does(
    fast: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dog = watchdog.Watchdog(DeadlinesConfig(), rank=0, size=3)
    dog.keep_in(tmp_path)
    dog.enter("save", 7)
    (tmp_path / "hang").mkdir()
    other = {
        "rank": 2,
        "phase": "step",
        "step": 8,
        "seconds": 31.0,
        "deadline_s": 30.0,
        "for_bytes_s": 0.0,
        "where": "wait (x.py:1)",
    }
    (tmp_path / "hang" / "rank-2.json").write_text(json.dumps(other))
    with pytest.raises(Ended):
        dog.run()
    said = capsys.readouterr().err
    assert "no progress for 31 s in step 8 of rank 2 (train.deadlines.step_s=30)" in said
    assert "rank 0: save at step 7" in said and "rank 1: did not report" in said
    assert json.loads((tmp_path / "hang" / "rank-0.json").read_text())["phase"] == "save"


def test_the_run_is_given_up_before_the_process_ends(fast: None, tmp_path: Path) -> None:
    """Nothing else runs after it: another launch would have to find out that this one is dead."""
    ownership = run_dir.Ownership()
    ownership.take(tmp_path)
    assert (tmp_path / run_dir.OWNER).exists()
    dog = watchdog.Watchdog(DeadlinesConfig(save_s=0.01), rank=0, size=1, let_go=ownership.release)
    dog.enter("save", 5)
    with pytest.raises(Ended):
        dog.run()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_no_longer_answers_does_not_keep_the_run_from_ending(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    codes, left, never = [], threading.Event(), threading.Event()

    def leave(code: int) -> None:
        codes.append(code)
        left.set()

    monkeypatch.setattr(watchdog, "POLL_S", 0.01)
    monkeypatch.setattr(watchdog, "REPORTS_S", 0.05)
    monkeypatch.setattr(watchdog, "FIRST_SPEAKS_S", 0.0)
    monkeypatch.setattr(watchdog.os, "_exit", leave)
    monkeypatch.setattr(watchdog.Watchdog, "_reports", lambda self: never.wait())
    monkeypatch.setattr(watchdog.Watchdog, "_write", lambda self, mine: never.wait())
    dog = watchdog.Watchdog(DeadlinesConfig(save_s=0.01), rank=1, size=2)
    dog.keep_in(tmp_path)
    dog.enter("save", 5)
    dog.start()
    assert left.wait(60) and codes == [70]
    assert "no progress in save at step 5 of rank 1, nor of its report" in capfd.readouterr().err
