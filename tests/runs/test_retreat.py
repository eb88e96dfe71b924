"""Out of memory is not the end: the run goes on from its newest saved state with less, and trains the same."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from remat.launch import retreat
from remat.machine import host_memory
from remat.report import run_report
from tests.support import tiny
from tests.support.launcher import ROOT, deepspeed
from tests.support.limited import GROUP, LIMIT
from tests.support.supervised import supervised

pytestmark = pytest.mark.launch
RUN = ["deepspeed.config=zero2", "checkpointing=none", "save.at_end=false"]
# Only checkpointing can be changed, so that choosing is short; deep and long enough that it halves the peak.
FIXED = [*tiny.NO_CHOICE, "train.global_batch_size=2", "train.seq_len=512"]
LAYERS = 8


def test_a_run_out_of_memory_goes_on_from_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 runs out in step 2, in layer 1; both ranks go on with other checkpointing, after step 1."""
    workshop = tiny.make_workshop(tmp_path)
    fixed = [*RUN, *FIXED, f"model.path={tiny.make_model(tmp_path / 'deep', num_hidden_layers=LAYERS)}"]
    plain = deepspeed(*tiny.words(workshop, "plain", *fixed))
    assert plain.code == 0, plain.out[-4000:]
    words = tiny.words(workshop, "edge", *fixed, "on_out_of_memory=retreat", "most_retreats=1")
    file = tmp_path / "retreat.json"
    monkeypatch.setenv(retreat.FILE, str(file))
    first = deepspeed(str(LAYERS + 2), *words, script="tests/support/fails_in.py")
    assert first.code == 70, first.out[-4000:]
    assert "remat: retreat 1 of 1: the run goes on with " in first.out
    asked = retreat.take(file)
    assert asked is not None
    run = workshop / "out" / "edge" / "run"
    assert [path.name for path in (run / "saved").iterdir()] == ["step-000001"]

    monkeypatch.setenv(retreat.NUMBER, "1")
    again = deepspeed(*retreat.words_again(words, asked))
    assert again.code == 0, again.out[-4000:]
    rows, expected = tiny.rows(run), tiny.rows(workshop / "out" / "plain" / "run")
    for key in ("loss/train", "optim/grad_norm", "tokens/seen"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected], rel=1e-6), key
    assert [row["memory/retreats"] for row in tiny.rows(run, "memory/retreats")] == [1]
    run_report.draw(run)
    page = (run / "report" / "index.html").read_text()
    assert (
        "Started again with less memory" in page and "out of host memory in forward, layer 1 on rank 1" in page
    )


@pytest.mark.slow_fault
def test_wherever_one_rank_runs_out_the_trajectory_is_the_same_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third step begins with the 17th call of an MLP."""
    workshop = tiny.make_workshop(tmp_path)
    model = tiny.make_model(tmp_path / "deep", num_hidden_layers=LAYERS)
    fixed = [*RUN, *FIXED, f"model.path={model}", "save.every=2"]
    plain = deepspeed(*tiny.words(workshop, "plain", *fixed))
    assert plain.code == 0, plain.out[-4000:]
    expected = tiny.rows(workshop / "out" / "plain" / "run")
    for which in ("20", "backward 20", "update 3"):
        name = which.replace(" ", "_")
        words = tiny.words(workshop, name, *fixed, "on_out_of_memory=retreat")
        file = tmp_path / f"retreat-{name}.json"
        monkeypatch.setenv(retreat.FILE, str(file))
        monkeypatch.delenv(retreat.NUMBER, raising=False)
        first = deepspeed(which, *words, script="tests/support/fails_in.py")
        assert first.code == 70 and "out of " in first.out, first.out[-4000:]
        asked = retreat.take(file)
        assert asked is not None, first.out[-4000:]
        assert [word.partition("=")[0] for word in asked.overrides] == ["checkpointing"]
        run = workshop / "out" / name / "run"
        assert (run / "saved" / "step-000002").is_dir()
        monkeypatch.setenv(retreat.NUMBER, "1")
        again = deepspeed(*retreat.words_again(words, asked))
        assert again.code == 0, again.out[-4000:]
        for key in ("loss/train", "optim/grad_norm"):
            assert [row[key] for row in tiny.rows(run)] == [row[key] for row in expected], (which, key)


@pytest.mark.slow_fault
def test_a_limit_of_the_system_is_kept_by_the_second_launch(tmp_path: Path) -> None:
    """Each rank gets, beside what it holds before its first step, the mean of what keeping all and `full` need."""
    workshop = tiny.make_workshop(tmp_path)
    model = tiny.make_model(tmp_path / "deep", num_hidden_layers=12)
    words = tiny.words(
        workshop, "limited", *RUN, "on_out_of_memory=retreat", f"model.path={model}", "train.seq_len=2048",
        "train.global_batch_size=8", "train.micro_batch_size=4",
    )  # fmt: skip
    with supervised(tmp_path, str(ROOT / "tests/support/limited.py"), *words) as launch:
        assert launch.finish(launches=2) == 0, launch.out[-6000:]
    assert launch.out.count("starting the run again with less memory, ") == 1
    run = workshop / "out" / "limited" / "run"
    assert len(tiny.rows(run)) == tiny.STEPS
    assert len((run / "retreats.jsonl").read_text().splitlines()) == 1
    assert json.loads((run / "proof.json").read_text())["policy"] != "none"


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group of memory below the one of this process; skips where this user may make none."""
    for base, path, _ in host_memory._memberships(Path("/")):
        folder = base / path.lstrip("/") / f"remat-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        if any((folder / name).exists() for name in LIMIT):
            yield folder
            empty(folder)
            return
        folder.rmdir()
    pytest.skip("no control group of memory can be made here")


def empty(folder: Path) -> None:
    """Remove the group once the last process of it is reaped."""
    deadline = time.monotonic() + 30
    while (folder / "cgroup.procs").read_text().split() and time.monotonic() < deadline:
        time.sleep(0.1)
    folder.rmdir()


@pytest.mark.slow_fault
def test_a_rank_that_the_kernel_kills_is_followed_by_a_launch_with_less(
    tmp_path: Path, memory_group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks share the limit of a control group; the kernel kills one at the first step after step 1."""
    workshop = tiny.make_workshop(tmp_path)
    model = tiny.make_model(tmp_path / "deep", num_hidden_layers=12)
    monkeypatch.setenv(GROUP, str(memory_group))
    words = tiny.words(
        workshop, "killed", *RUN, "on_out_of_memory=retreat", f"model.path={model}", "train.seq_len=2048",
        "train.global_batch_size=8", "train.micro_batch_size=4", "save.every=1",
    )  # fmt: skip
    with supervised(tmp_path, str(ROOT / "tests/support/limited.py"), *words) as launch:
        (memory_group / "cgroup.procs").write_text(str(launch.process.pid))
        assert launch.finish(launches=2) == 0, launch.out[-6000:]
    assert launch.out.count("starting the run again with less memory, ") == 1
    run = workshop / "out" / "killed" / "run"
    assert len(tiny.rows(run)) == tiny.STEPS
    assert json.loads((run / "proof.json").read_text())["policy"] != "none"
