"""Asked to stop, a run saves one state where all ranks agree, and goes on from it as if nothing had happened."""

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
from remat.saving import manifest
from tests.support import tiny
from tests.support.grids import cases, chosen
from tests.support.launcher import ROOT, deepspeed
from tests.support.pool import CPU_ONLY
from tests.support.supervised import DEADLINE_S, supervised
from tests.support.wandb_file import read_wandb

pytestmark = pytest.mark.launch

RUN = [  # 3 micro-batches an evaluation
    "train.steps=4", "train.eval_every=2", "data.eval_fraction=0.3", "data.packing=none",
]  # fmt: skip
ZERO2, ZERO3 = ["deepspeed.config=zero2"], ["deepspeed.config=zero3_offload"]
STOPS: dict[str, tuple[list[str], dict[str, Any] | None, int, str]] = {
    # name: (strategy and options, fault, the step after which it stops, why)
    "one_rank": (ZERO2, {"what": "SIGTERM", "rank": 1, "at": "step 1"}, 1, "SIGTERM on rank 1"),
    "all_ranks": (ZERO3, {"what": "SIGINT SIGINT", "rank": None, "at": "step 3"}, 3, "SIGINT on all ranks"),
    "evaluating": (ZERO3, {"what": "SIGUSR1", "rank": 1, "at": "evaluate 5"}, 2, "SIGUSR1 on rank 1"),
    "first_evaluation": (ZERO2, {"what": "SIGUSR1", "rank": 0, "at": "evaluate 1"}, 0, "SIGUSR1 on rank 0"),
    "saving": ([*ZERO2, "save.every=2"], {"what": "SIGTERM", "rank": 1, "at": "save"}, 2, "SIGTERM on rank 1"),
    "last_step": (ZERO2, {"what": "SIGTERM", "rank": 0, "at": "step 4"}, 4, "SIGTERM on rank 0"),
    "building": (ZERO3, {"what": "SIGTERM", "rank": 0, "at": "built"}, 0, "SIGTERM on rank 0"),
    "file": (
        [*ZERO2, "tracking.wandb=offline"],
        {"what": "stop file", "rank": 0, "at": "step 3"},
        3,
        "RUN/stop",
    ),
    "minutes": ([*ZERO2, "train.max_minutes=0.001"], None, 0, "train.max_minutes=0.001"),
}
RESUMED = list(STOPS)[:6]
MORE = {"all_ranks", "first_evaluation", "last_step"}  # each is between two others
REST = {*MORE, "evaluating"}  # of the runs that go on


Stopped = tuple[Path, dict[str, list[dict[str, Any]]], str]


def names(saved: Path) -> list[str]:
    return sorted(path.name for path in saved.iterdir())


def losses(folder: Path) -> list[tuple[float, str, float]]:
    return [
        (row["step"], key, row[key]) for key in ("loss/train", "loss/eval") for row in tiny.rows(folder, key)
    ]


@pytest.fixture(scope="module")
def stopped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """(folder of the runs, what became of each, output): one launch of all the runs, stopped and resumed."""
    workshop = tiny.make_workshop(tmp_path_factory.mktemp("stop"))
    going_on, stops = chosen(request, "resumed"), chosen(request)
    spec = [
        {"name": name, "words": tiny.words(workshop, name, *RUN, *strategy), "fault": None}
        for name, strategy in (("whole_zero2", ZERO2), ("whole_zero3", ZERO3))
        if any(strategy[0] in STOPS[each][0] for each in going_on)
    ]
    for name, (more, fault, _, _) in STOPS.items():
        if name not in stops | going_on | {"file"}:
            continue
        words = tiny.words(workshop, name, *RUN, *more, "save.keep=9")
        spec.append({"name": name, "words": words, "fault": fault})
        if name in going_on:
            spec.append({"name": name, "words": [*words, "resume=auto"], "fault": None})
    path = workshop / "spec.json"
    path.write_text(json.dumps(spec))
    done = deepspeed(str(path), script="tests/support/faulty_runs.py")
    assert done.code == 0, done.out[-6000:]
    found: dict[str, list[dict[str, Any]]] = {}
    for run in json.loads((workshop / "spec.done.json").read_text()):
        found.setdefault(run["name"], []).append(run)
    return workshop / "out", found, done.out


@pytest.mark.parametrize("name", cases(STOPS, MORE))
def test_a_stop_saves_one_state_where_all_ranks_agree(stopped: Stopped, name: str) -> None:
    out, found, text = stopped
    more, _, step, why = STOPS[name]
    assert found[name][0]["error"] is None and found[name][0]["finished"] is False
    folder = out / name / "run"
    later = [4] if "save.every=2" in more and len(found[name]) > 1 else []  # by the resumed run
    assert names(folder / "saved") == [f"step-{n:06d}" for n in sorted({step, *later})]
    assert manifest.verify(folder / "saved" / f"step-{step:06d}") == []
    saving = "" if name == "saving" else ": saving"
    assert f"stopping after step {step} ({why.replace('RUN', str(folder))}){saving}\n" in text
    assert f"resume with resume=auto ({folder})" in text
    assert not (folder / "stop").exists()
    assert "Traceback" not in text and "KeyboardInterrupt" not in text


@pytest.mark.parametrize("resumed", cases(RESUMED, REST))
def test_the_run_that_goes_on_from_there_is_the_uninterrupted_one(stopped: Stopped, resumed: str) -> None:
    name, (out, found, _) = resumed, stopped
    assert found[name][1]["error"] is None and found[name][1]["finished"] is True
    whole = out / ("whole_zero2" if "deepspeed.config=zero2" in STOPS[name][0] else "whole_zero3") / "run"
    assert losses(out / name / "run") == losses(whole)
    assert len(losses(whole)) == 4 + 3


def test_a_stopped_run_keeps_its_rows_in_wandb(stopped: Stopped) -> None:
    """W&B is finished before the save, which whoever stops a run may not wait for: its time is in the record alone."""
    folder = stopped[0] / "file" / "run"
    (file,) = folder.glob("wandb/*run-*/*.wandb")
    history, _, exit_code = read_wandb(file)
    recorded = {int(row["step"]): row["loss/train"] for row in tiny.rows(folder)}
    assert {step: row["loss/train"] for step, row in history.items() if "loss/train" in row} == recorded
    assert len(recorded) == 3 and exit_code == 0
    assert len(tiny.rows(folder, "time/save_s")) == 1
    assert not any("time/save_s" in row for row in history.values())


ENDLESS = ["train.steps=100000", "optim.warmup_steps=0", "train.log_every=1", "deepspeed.config=zero2"]


def trains(folder: Path) -> Callable[[], bool]:
    return lambda: (folder / "metrics.jsonl").is_file() and len(tiny.rows(folder)) > 2


def one_state(folder: Path) -> None:
    (state,) = (folder / "saved").iterdir()
    assert manifest.verify(state) == []
    assert state.name == f"step-{int(tiny.rows(folder)[-1]['step']):06d}"


@pytest.mark.slow_fault  # ranks that are told to stop are above, a supervisor that tells them is in test_supervise.py
def test_sigterm_to_the_supervisor_ends_in_75_and_a_saved_state(tmp_path: Path) -> None:
    words = tiny.words(tiny.make_workshop(tmp_path), "signalled", *ENDLESS)
    folder = tmp_path / "out" / "signalled" / "run"
    with supervised(tmp_path, *words) as launch:  # no script named: train.py
        launch.until(lambda: trains(folder)() or launch.process.poll() is not None, "steps")
        launch.watch()
        launch.signal(signal.SIGTERM)
        assert launch.finish() == 75, launch.out[-4000:]
        assert launch.left() == []
    for text in (launch.out, (tmp_path / "logs" / "rank-0.log").read_text()):
        assert "(SIGTERM on" in text and f"resume with resume=auto ({folder})" in text
        assert "Traceback" not in text
    one_state(folder)


@pytest.mark.slow_fault
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGUSR1], ids=["ctrl_c", "usr1_to_ranks"])
def test_plain_deepspeed_stops_with_75_too(tmp_path: Path, signum: signal.Signals) -> None:
    """Ctrl-C reaches the launcher and each rank, as from a terminal; SIGUSR1 each rank."""
    words = tiny.words(tiny.make_workshop(tmp_path), "plain", *ENDLESS)
    folder = tmp_path / "out" / "plain" / "run"
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | CPU_ONLY
    command = [
        "deepspeed",
        "--num_gpus",
        "2",
        "--master_port",
        str(free_port()),
        str(ROOT / "train.py"),
        *words,
    ]
    output, ranks = tmp_path / "terminal", []
    with output.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job of `&` ignores it
        )
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not trains(folder)():
            assert process.poll() is None and time.monotonic() < deadline, output.read_text()[-4000:]
            time.sleep(0.05)
        ranks = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if any(word.endswith("train.py") for word in child.cmdline()[:4])
            and "deepspeed.launcher.launch" not in child.cmdline()
        ]
        if signum is signal.SIGINT:
            os.killpg(process.pid, signum)
        else:
            for rank in ranks:
                rank.send_signal(signum)
        code = process.wait(DEADLINE_S)
        code = 128 - code if code < 0 else code  # as a shell says it
        psutil.wait_procs(ranks, timeout=DEADLINE_S)
        assert not any(rank.is_running() for rank in ranks)
    finally:
        for rank in ranks:
            if rank.is_running():
                rank.kill()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    text = output.read_text()
    assert "stopping after step" in text and "resume with resume=auto" in text, text[-4000:]
    one_state(folder)
    expected = 75 if signum is signal.SIGUSR1 else 130  # DeepSpeed's own answer to Ctrl-C
    assert code == expected, text[-4000:]
