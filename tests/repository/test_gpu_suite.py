"""The GPU suite without a GPU: its points can be composed, its budget is kept, its rows say what was measured."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import policies, save_stall
from benchmarks.suite import budget, training
from benchmarks.suite.points import POINTS, SECTIONS, TOKENS, Point
from remat.config import compose
from remat.config.options import LossKind
from remat.model import loss
from tests.support import small_models

ENVIRONMENT = {
    "gpu": "A GPU", "torch": "2.13", "deepspeed": "0.19.8", "transformers": "5.23", "cuda": "13.0",
    "commit": "0123456789abcdef", "date": "2026-01-02",
}  # fmt: skip


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_point_is_a_run_that_can_be_composed(device: str, tmp_path: Path) -> None:
    for point in POINTS:
        if point.kind in ("train", "longest"):
            compose.compose_run(training.overrides(point, tmp_path, device))
    files = [training.folder_name(point) for point in POINTS]
    assert len(set(files)) == len(files)


def test_the_wheels_are_what_the_project_needs_beyond_a_machine_with_torch(tmp_path: Path) -> None:
    """The packages a bare machine has are in the script; W&B is off in the suite, torch is never carried."""
    path = budget.ROOT / "benchmarks" / "gpu_wheels.sh"
    done = subprocess.run([path, tmp_path / "w", "--list"], capture_output=True, text=True, check=True)
    carried = {line.partition("==")[0] for line in done.stdout.split()}
    there = set(
        re.findall(r"[\w.-]+", " ".join(re.findall(r"^there\+?='(.*)'$", path.read_text(), re.MULTILINE)))
    )
    project = tomllib.loads((budget.ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[<>=]", name)[0] for name in project["dependencies"]}
    assert needed - there - {"torch", "wandb"} <= carried
    assert not {"ruff", "mypy", "pytest", "torch", "numpy"} & carried
    assert "peers/trl" in carried and not (tmp_path / "w").exists()


def test_every_experiment_is_there() -> None:
    for point in POINTS:
        if point.section == "lab":
            assert (budget.ROOT / "conf" / "lab" / f"{point.name}.yaml").is_file()


def test_the_promised_sections_are_there() -> None:
    assert set(SECTIONS) == {
        "mfu", "accuracy", "policies", "peers", "offload", "overhead", "budget", "lab", "longest", "ladder", "tests",
    }  # fmt: skip
    files = {word for point in POINTS if point.kind == "tests" for word in point.words}
    assert files == {f"tests/gpu/{path.name}" for path in (budget.ROOT / "tests" / "gpu").glob("test_*.py")}
    scripts = {point.words[0] for point in POINTS if point.kind == "peer"}
    for name in scripts:
        assert (budget.ROOT / "benchmarks" / "peers" / f"{name}.py").is_file()


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the points that were measured, in order; nothing is launched."""
    ran: list[str] = []

    def measure(point: Point, work: Path, device: str) -> dict[str, Any]:
        ran.append(point.name)
        return {"status": "failed" if point.name == "llama-1b none" and len(ran) < 7 else "ran", "step_s": 1.0}

    monkeypatch.setattr(budget, "measure", measure)
    monkeypatch.setattr(budget, "environment_of", lambda device: ENVIRONMENT)
    return ran


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(
        "sys.argv", ["budget", "--work", str(tmp_path), "--results", str(tmp_path / "r"), *words]
    )
    assert budget.main() == 0


def test_what_is_measured_is_not_measured_again_and_a_failure_is(
    suite: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, monkeypatch, "--only", "mfu", "--minutes", "60")
    assert suite == [point.name for point in POINTS if point.section == "mfu"]
    run(tmp_path, monkeypatch, "--only", "mfu", "--minutes", "60")
    assert suite[6:] == ["llama-1b none"]
    rows = json.loads((tmp_path / "r" / "mfu.json").read_text())
    assert [row["status"] for row in rows] == ["ran"] * 6
    assert rows[0]["environment"] == ENVIRONMENT


def test_no_point_is_started_that_would_not_end_in_time(
    suite: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, monkeypatch, "--only", "mfu", "--minutes", str(40 / 60))
    longer = [point.name for point in POINTS if point.section == "mfu" and point.seconds > 40]
    assert longer and not set(longer) & set(suite)
    assert suite


def test_a_peer_that_cannot_run_is_a_row_with_its_error(tmp_path: Path) -> None:
    args = budget.parse_args(["--work", str(tmp_path), "--device", "cpu"])
    row = budget.script(Point("peers", "none of it", "peer", ("does_not_exist",)), args)
    assert row["status"] == "failed"
    assert "No module named benchmarks.peers.does_not_exist" in row["said"]
    assert str(tmp_path) not in " ".join(row["command"])


def test_a_point_that_takes_too_long_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither it nor what it started in a session of its own: the next point needs the GPU."""
    monkeypatch.setattr(budget, "GRACE_S", 0.2)
    pids = tmp_path / "pids"
    deaf = "import signal, threading; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    grandchild = f"{deaf}threading.Event().wait()"
    child = (
        f"import os, subprocess, sys; {deaf}p = subprocess.Popen([sys.executable, '-c', {grandchild!r}], "
        f"start_new_session=True); open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{p.pid}}'); p.wait()"
    )
    code, said, over = budget.run([sys.executable, "-c", child], dict(os.environ), limit_s=5)
    assert code == -1 and "ended after 5 s" in said and over
    found = [psutil.Process(int(pid)) for pid in pids.read_text().split() if psutil.pid_exists(int(pid))]
    _, alive = psutil.wait_procs(found, timeout=10)
    assert len(alive) == 0


MACHINE = {"gpu": "NVIDIA H200", "gpu_bytes": 139 << 30, "host_bytes": 125 << 30}
LADDERS = {point.name: point for point in POINTS if point.kind == "longest"}


def climb(
    monkeypatch: pytest.MonkeyPatch, ladder: list[training.Rung], answers: dict[int, str], limit_s: float = 240
) -> tuple[dict[str, Any], list[int]]:
    """The row of a ladder whose rungs answer so, and the lengths that were launched."""
    asked: list[int] = []

    def launch(words: list[str], *_: Any) -> dict[str, Any]:
        asked.append(int(next(word for word in words if word.startswith("train.seq_len=")).partition("=")[2]))
        return {"status": answers[asked[-1]], "said": "why"}

    monkeypatch.setattr(training, "launch", launch)
    monkeypatch.setattr(training, "planned_ladder", lambda *_: ladder)
    point = Point("longest", "p", "longest", ("checkpointing=full",), limit_s=limit_s)
    return training.longest(point, Path("w"), "cuda", MACHINE), asked


def test_the_ladder_begins_where_the_plan_says_and_goes_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    ladder = [training.Rung(tokens, tokens <= 65536, 1.0) for tokens in TOKENS]
    above = {65536: "ran", 131072: "ran", 262144: "out of memory"}
    row, asked = climb(monkeypatch, ladder, above)
    assert asked == list(above) and (row["longest_seq_len"], row["ended"]) == (131072, "out of memory")
    row, asked = climb(monkeypatch, ladder, {65536: "out of memory", 32768: "failed", 16384: "ran"})
    assert asked == [65536, 32768, 16384] and (row["longest_seq_len"], row["ended"]) == (16384, "failed")
    row, asked = climb(monkeypatch, ladder, dict.fromkeys(TOKENS, "ran"))
    assert asked[-1] == TOKENS[-1] and row["ended"] == "the ladder ended"
    row, _ = climb(monkeypatch, [training.Rung(8192, False, 1.0)], {8192: "out of memory"})
    assert row["status"] == "out of memory" and row["said"] == "why"


def test_a_rung_without_time_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ladder = [training.Rung(8192, True, 1.0), training.Rung(16384, True, 500.0)]
    row, asked = climb(monkeypatch, ladder, {8192: "ran"})
    assert asked == [8192] and row["status"] == "ran" and row["ended"] == "time was over"
    row, _ = climb(monkeypatch, ladder, {8192: "time was over"})
    assert row["status"] == row["ended"] == "time was over"

    def slow(*_: Any, **__: Any) -> Any:
        raise AssertionError("took longer than 1 s")

    monkeypatch.undo()
    monkeypatch.setattr("tests.support.launcher.deepspeed", slow)
    assert training.launch([], tmp_path / "run", 1, "cpu")["status"] == "time was over"
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"point": budget.identity(POINTS[0]), "status": "time was over"}))
    assert not budget.is_done(path, POINTS[0])


def test_ladders_are_planned_without_a_gpu(tmp_path: Path) -> None:
    """Without activation checkpointing 64Ki tokens need nearly all of an H200, so that the climb begins below."""
    ladder = training.planned_ladder(LADDERS["none"], tmp_path, "cuda", MACHINE)
    assert [rung.seq_len for rung in ladder] == list(TOKENS)
    assert ladder[training.first_rung(ladder, 240)].seq_len == 32768
    assert training.first_rung([training.Rung(8192, False, 0.0)], 240) == 0
    slow = [training.Rung(8192, True, 20.0), training.Rung(16384, True, 160.0)]
    assert training.first_rung(slow, 240) == 0
    assert LADDERS["llama-8b, LoRA, activations offloaded"].most_tokens == 262144


def test_what_scripts_finish_lies_under_the_suites_folder(tmp_path: Path) -> None:
    args = budget.parse_args(["--work", str(tmp_path)])
    for point in POINTS:
        if point.section in ("accuracy", "lab"):
            words = budget.own_command(point, args)
            option = words[words.index("--work" if point.section == "accuracy" else "--out") + 1]
            assert option == str(tmp_path / ("plan_accuracy" if point.section == "accuracy" else "lab"))
            assert "WORK/" in " ".join(budget.portable(words, args)) and str(tmp_path) not in str(point)


def test_a_peer_has_the_threads_of_a_lone_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setattr(budget, "available_cores", lambda: 16)
    peer, own = Point("peers", "p", "peer", ("trl_sft",)), Point("policies", "p", "script")
    for device, threads in (("cuda", "16"), ("cpu", "1")):
        args = budget.parse_args(["--work", str(tmp_path), "--device", device])
        assert budget.surroundings(peer, args)["OMP_NUM_THREADS"] == threads
        assert "OMP_NUM_THREADS" not in budget.surroundings(own, args)


def test_a_gpus_save_stall_leaves_that_of_the_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert save_stall.result_path("cpu").name == "save_stall.json"
    assert save_stall.result_path("cuda").name == "save_stall_cuda.json"
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert "--ranks 1" in str(save_stall.too_few_gpus(2)) and save_stall.too_few_gpus(1) is None
    monkeypatch.setattr("sys.argv", ["save_stall.py", "--ranks", "2"])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="1 GPU"):
        save_stall.main()


def test_stalls_are_compared_by_their_medians() -> None:
    rows = {
        kind: [{"time/save_stall_s": stall, "time/save_s": 4.0} for stall in (most, most / 2, most)]
        for kind, most in (("at once", 4.0), ("in the background", 1.0))
    }
    found = save_stall.figures(rows, {"alone": [1.0, 3.0, 2.0], "beside a save": []}, 7, 9)
    assert found["stall_in_the_background_to_at_once"] == 0.25
    assert found["step_s"] == {"alone": {"median": 2.0, "steps": 3}} and found["at once"]["ratio"] == 1.0


def test_no_check_of_the_loss_is_in_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the GPU: once, in the pass before the clock."""
    net, args = small_models.build("llama"), policies.parse_args(["--layers", "3", "--seq-len", "16"])
    token_loss, checks, clock = loss.TokenLoss(net, LossKind.chunked), list[str](), []
    same = loss._same
    monkeypatch.setattr(loss, "_same", lambda *both: checks.append("check") or same(*both))
    monkeypatch.setattr(policies.time, "perf_counter", lambda: clock.append(len(checks)) or 0.0)
    cfg = compose.compose_run(["checkpointing=full"]).run.checkpointing
    policies.seconds(net, cfg, token_loss, args, policies.torch.device("cpu"))
    assert clock == [1, 1]


def test_a_file_of_tests_is_a_row_with_pytests_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = next(point for point in POINTS if point.kind == "tests")
    monkeypatch.setattr(budget, "run", lambda *_: (1, "F.\nsaid\n=== 1 failed, 1 passed in 2.00s ===\n", False))
    row = budget.script(point, budget.parse_args(["--work", str(tmp_path)]))
    assert row["command"][:3] == ["python", "-m", "pytest"] and row["command"][-1] == point.words[0]
    assert row["status"] == "failed" and "said" in row["said"]
