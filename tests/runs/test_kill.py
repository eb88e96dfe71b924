"""kill -9 of a rank or of the node launcher while a step is computed, and the run that goes on from there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from remat.launch.processes import free_port
from remat.saving import load, manifest
from tests.support import tiny
from tests.support.launcher import ROOT, deepspeed
from tests.support.pool import CPU_ONLY
from tests.support.supervised import DEADLINE_S, Supervised, supervised, words_of

pytestmark = pytest.mark.launch
SCRIPT = str(ROOT / "tests/support/faulty_runs.py")
SAVING = ["save.every=2", "save.keep=3"]
WITHIN_S = 60.0  # promised from the fault to the end of the launch, with a core for each rank
FORWARD = {"what": "SIGKILL", "rank": 1, "at": "step 5 2"}
BACKWARD = {"what": "SIGKILL", "rank": 1, "at": "backward 5"}
REDUCTION = {"what": "SIGKILL", "rank": 0, "at": "backward 5 2"}
LAUNCHER = {"what": "node launcher killed", "rank": 0, "at": "step 5 2"}


def words(workshop: Path, name: str, strategy: str, *more: str) -> list[str]:
    """Six steps of two micro-batches a rank; ZeRO-3 gathers weights in backward anew, which it would keep if small."""
    run = [f"deepspeed.config={strategy}", "train.steps=6", "train.micro_batch_size=1"]
    zero = "deepspeed.overrides.zero_optimization.stage3"
    keeps_none = [
        f"{zero}_max_live_parameters=0",
        f"{zero}_max_reuse_distance=0",
        f"{zero}_prefetch_bucket_size=0",
    ]
    return tiny.words(workshop, name, *run, *(keeps_none if strategy == "zero3" else []), *more)


def spec(folder: Path, name: str, runs: list[tuple[str, list[str], dict[str, Any] | None]]) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps([{"name": n, "words": w, "fault": fault} for n, w, fault in runs]))
    return path


def losses(run: Path) -> list[float]:
    return [row["loss/train"] for row in tiny.rows(run)]


def killed(folder: Path, path: Path, whole: Path, code: int) -> Supervised:
    """Follow the launch of `path` to its end: the run at `whole`, then the one with the fault."""
    with supervised(folder, SCRIPT, str(path)) as launch:
        begun = whole / "metrics.jsonl"
        launch.until(lambda: begun.exists() or launch.process.poll() is not None, "first run")
        launch.watch()
        assert sum("faulty_runs.py" in words_of(p) for p in launch.seen) >= 2, launch.out[-4000:]
        assert launch.finish() == code, launch.out[-4000:]
        seconds = launch.after(path)
        assert launch.left() == [], launch.out[-4000:]
    assert seconds < within_s(), launch.out[-4000:]
    return launch


def within_s() -> float:
    """WITHIN_S, and up to three times that where processes wait for a core."""
    return WITHIN_S * min(3.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def states(run: Path, *steps: int) -> None:
    """The saved states of the run are those of `steps`, complete, and the newest is the one found."""
    saved = run / "saved"
    assert sorted(path.name for path in saved.iterdir()) == [f"step-{step:06d}" for step in steps]
    assert [manifest.verify(path) for path in saved.iterdir()] == [[] for _ in steps]
    found = load.find_newest(run)
    assert found.state is not None and found.state.step == steps[-1]


def where(path: Path) -> str:
    """The collective in which, or the place where, the fault of `path` happened."""
    return str(json.loads(path.with_suffix(".fault.json").read_text())["where"])


@pytest.mark.slow_fault
def test_a_rank_killed_as_others_wait_for_it_in_a_gather(tmp_path: Path) -> None:
    """In backward, where ZeRO-3 gathers weights: the other rank is in that collective, or about to enter it."""
    workshop = tiny.make_workshop(tmp_path)
    whole, run = (workshop / "out" / name / "run" for name in ("whole", "killed"))
    path = spec(
        workshop,
        "spec",
        [
            ("whole", words(workshop, "whole", "zero3"), None),
            ("killed", words(workshop, "killed", "zero3", *SAVING), BACKWARD),
        ],
    )
    launch = killed(tmp_path, path, whole, 137)
    assert "rank 1 was killed (SIGKILL)" in launch.out
    assert "gather" in where(path)
    states(run, 2, 4)
    resumed = deepspeed(*words(workshop, "killed", "zero3", *SAVING, "resume=auto"))
    assert resumed.code == 0, resumed.out[-4000:]
    assert losses(run) == losses(whole) and len(losses(run)) == 6
    states(run, 2, 4, 6)


# name: (strategy, fault, states the launch leaves, what it says)
CHAIN: dict[str, tuple[str, dict[str, Any], tuple[int, ...], str]] = {
    "forward": ("zero3_offload", FORWARD, (2, 4), "rank 1 was killed (SIGKILL)"),
    "reduction": ("zero2", REDUCTION, (2, 4), "rank 0 was killed (SIGKILL)"),
    "launcher": ("zero2_offload", LAUNCHER, (2, 4, 5), "the node launcher was killed"),
}


@pytest.mark.slow_fault
def test_a_kill_in_a_step_costs_no_saved_state(tmp_path: Path) -> None:
    """Each launch resumes the run that the one before lost, then loses another; the last is a plain train.py."""
    workshop = tiny.make_workshop(tmp_path)
    out, lost = workshop / "out", list[tuple[str, str]]()
    for name, (strategy, fault, left, said) in CHAIN.items():
        again = [(run, words(workshop, run, kind, *SAVING, "resume=auto"), None) for run, kind in lost[-1:]]
        whole = (f"whole_{name}", words(workshop, f"whole_{name}", strategy), None)
        path = spec(workshop, name, [*again, whole, (name, words(workshop, name, strategy, *SAVING), fault)])
        launch = killed(tmp_path, path, out / f"whole_{name}" / "run", 137)
        assert said in launch.out
        assert ("reduce" in where(path)) == (name == "reduction")
        states(out / name / "run", *left)
        lost.append((name, strategy))
    name, strategy = lost[-1]
    done = deepspeed(*words(workshop, name, strategy, *SAVING, "resume=auto"))
    assert done.code == 0, done.out[-4000:]
    for name in CHAIN:
        assert losses(out / name / "run") == losses(out / f"whole_{name}" / "run"), name
        assert len(losses(out / name / "run")) == 6


@pytest.mark.slow_fault
def test_a_killed_rank_under_plain_deepspeed(tmp_path: Path) -> None:
    """DeepSpeed's own end of it: another exit code, no word of which rank, and the others go too."""
    workshop = tiny.make_workshop(tmp_path)
    path = spec(workshop, "spec", [("killed", words(workshop, "killed", "zero2", *SAVING), FORWARD)])
    done = deepspeed(str(path), script="tests/support/faulty_runs.py", real=True)
    ended_at = time.monotonic()
    seconds = ended_at - json.loads(path.with_suffix(".fault.json").read_text())["monotonic_s"]
    assert done.code == 247, done.out[-4000:]
    assert [p.pid for p in psutil.process_iter() if str(path) in words_of(p)] == []
    assert seconds < within_s()
    states(workshop / "out" / "killed" / "run", 2, 4)


@pytest.mark.slow_fault
def test_a_killed_node_launcher_under_plain_deepspeed_leaves_its_ranks(tmp_path: Path) -> None:
    """DeepSpeed calls it a success, and the ranks train on: what `remat launch` is for. A stop file ends them."""
    endless = ["train.steps=100000", "optim.warmup_steps=0", "deepspeed.config=zero2"]
    asked = tiny.words(tiny.make_workshop(tmp_path), "left", *endless)
    run = tmp_path / "out" / "left" / "run"
    command = [
        "deepspeed",
        "--num_gpus",
        "2",
        "--master_port",
        str(free_port()),
        str(ROOT / "train.py"),
        *asked,
    ]
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | CPU_ONLY
    output, ranks = tmp_path / "terminal", []
    with output.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _until(lambda: process.poll() is not None or _rows(run) > 2, output)
        of_run = psutil.Process(process.pid).children(recursive=True)
        (node,) = (p for p in of_run if "deepspeed.launcher.launch" in words_of(p))
        ranks = [p for p in node.children() if "train.py" in words_of(p)]
        node.kill()
        assert process.wait(DEADLINE_S) == 0, output.read_text()[-4000:]
        before = _rows(run)
        _until(lambda: _rows(run) > before + 2, output)
        assert len(ranks) == 2 and all(rank.is_running() for rank in ranks)
        (run / "stop").touch()
        gone, alive = psutil.wait_procs(ranks, timeout=DEADLINE_S)
        assert len(gone) == 2 and alive == []
    finally:
        for left in ranks:
            if left.is_running():
                left.kill()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    states(run, _rows(run))


def _rows(run: Path) -> int:
    return len(tiny.rows(run)) if (run / "metrics.jsonl").exists() else 0


def _until(true: Callable[[], bool], output: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, output.read_text()[-4000:]
        time.sleep(0.05)
