"""The GPU suite without a GPU: its points can be composed, its budget is kept, its page shows what was measured."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.suite import budget, training
from benchmarks.suite.points import POINTS, SECTIONS, Point
from remat import compose
from scripts import benchmarks_page

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


def test_every_experiment_is_there() -> None:
    for point in POINTS:
        if point.section == "lab":
            assert (budget.ROOT / "conf" / "lab" / f"{point.name}.yaml").is_file()


def test_the_promised_sections_are_there() -> None:
    assert {"mfu", "accuracy", "policies", "peers", "offload", "overhead", "lab", "longest"} == set(SECTIONS)
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


def test_the_page_is_what_the_results_say() -> None:
    assert benchmarks_page.renewed(benchmarks_page.PAGE.read_text()) == benchmarks_page.PAGE.read_text()


def test_the_page_shows_figures_errors_and_gaps(tmp_path: Path) -> None:
    (tmp_path / "gpu").mkdir()
    names = [point.name for point in POINTS if point.section == "peers"]
    rows = [
        {"name": names[0], "status": "ran", "step_s": 0.5, "tokens_per_s": 32768.0, "allocated_bytes": 3 * 2**30,
         "reserved_bytes": 4 * 2**30, "differs": "nothing", "environment": ENVIRONMENT},
        {"name": names[1], "status": "failed", "said": "Traceback\nImportError: no | such thing",
         "environment": ENVIRONMENT},
    ]  # fmt: skip
    (tmp_path / "gpu" / "peers.json").write_text(json.dumps(rows))
    page = benchmarks_page.text(tmp_path)
    assert f"| {names[0]} | 0.500 | 32,768 | 3.00 | 4.00 | nothing |" in page
    assert f"| {names[1]} | failed: ImportError: no / such thing |" in page
    assert f"| {names[2]} | not yet measured |" in page
    assert "Measured on A GPU; torch 2.13" in page


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
    code, said = budget.run([sys.executable, "-c", child], dict(os.environ), limit_s=5)
    assert code == -1 and "ended after 5 s" in said
    found = [psutil.Process(int(pid)) for pid in pids.read_text().split() if psutil.pid_exists(int(pid))]
    _, alive = psutil.wait_procs(found, timeout=10)
    assert len(alive) == 0
