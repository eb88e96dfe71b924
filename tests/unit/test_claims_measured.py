"""The measured column of docs/claims.md: from committed experiments, only what they measure, and marked as such."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from remat.claims import measured, page
from remat.claims.claim import Outcome, Verdict
from remat.claims.measured import Lab, Reading
from remat.lab import experiment

DOCUMENT = (Path(__file__).resolve().parent.parent.parent / "docs" / "claims.md").read_text()
ALL = [(claim, what, reading) for (claim, what), found in measured.READINGS.items() for reading in found]
TIME = Outcome("time of 50 steps", "+10.8 %", "-", Verdict.open)


def ids(case: tuple[str, str, Reading]) -> str:
    return f"{case[0]}-{case[2].experiment}-{case[2].only or 'both'}"


def point(name: str, step_s: float = 1.0, mib: int = 64, **more: Any) -> dict[str, Any]:
    times = {
        phase: {"median": step_s / 3, "low": 0, "high": 9, "count": 7} for phase in ("forward", "backward")
    }
    return {
        "name": name,
        "status": "finished",
        "repeats": 2,
        "ratio": {"median": step_s, "low": step_s - 0.1, "high": step_s + 0.1, "count": 7},
        "peak_bytes": 3 * mib << 20,
        "peak_in_update": False,
        "micro_batch_bytes": mib << 20,
        "times": times | {"step": {"median": step_s, "low": 0, "high": 9, "count": 7}},
        "loss": [[1, 5.5], [2, 5.25]],
    } | more


def commit(folder: Path, name: str, device: str, *points: dict[str, Any]) -> None:
    content = {"points": list(points), "hardware": {"gpu": "NVIDIA X1" if device == "gpu" else None}}
    (folder / f"{name}-{device}.json").write_text(json.dumps(content))


def test_every_reading_is_of_a_figure_of_its_claim() -> None:
    known = {(claim.id, part.what) for claim in page.CLAIMS for part in claim.compared}  # type: ignore[attr-defined]
    assert measured.READINGS.keys() <= known


@pytest.mark.parametrize("case", ALL, ids=ids)
def test_every_reading_names_points_of_its_experiment(case: tuple[str, str, Reading]) -> None:
    claim, _, reading = case
    for device in ("cpu", "cuda"):
        if reading.only in ("", device):
            made = experiment.named(reading.experiment, [], device)
            assert claim in made.claims or (claim, reading.experiment) == ("D4", "seed_d2")
            reading.shown(Lab(device, "NVIDIA X1", {p.name: point(p.name) for p in made.points}))


@pytest.mark.parametrize("case", [case for case in ALL if case[2].only != "cuda"], ids=ids)
def test_what_a_cpu_measures_is_committed_and_on_the_page(case: tuple[str, str, Reading]) -> None:
    claim, what, reading = case
    section = DOCUMENT[DOCUMENT.index(f"</a>{claim}.") :].partition("\n### ")[0]
    (row,) = [line for line in section.splitlines() if line.startswith(f"| {what} |")]
    outcome = measured.added(claim, Outcome(what, "", "", Verdict.open))
    found = [lab for lab in measured.labs(reading.experiment) if lab.device == "cpu"]
    if not found:
        assert reading.experiment not in row, "no result of it is committed"
        return
    (lab,) = found
    shown = reading.shown(lab)
    assert f"CPU, reduced: {shown} (" in outcome.measured and outcome.measured in row, (
        "run remat claims --out docs/claims.md"
    )


def test_a_share_is_read_from_the_file_and_named_with_its_machine(tmp_path: Path) -> None:
    commit(tmp_path, "seed_b2", "cpu", point("none", mib=100), point("every 4 layers", mib=15))
    found = measured.added("B2", Outcome("remains, every 4 layers", "40 %", "14 %", Verdict.refuted), tmp_path)
    link = "[seed_b2](../benchmarks/results/lab/seed_b2-cpu.json)"
    assert found.measured == f"CPU, reduced: 15 % ({link})"
    assert found.verdict is Verdict.refuted


def test_no_verdict_follows_from_a_cpu_and_one_does_from_a_gpu(tmp_path: Path) -> None:
    points = (point("none"), point("full", step_s=1.5))
    commit(tmp_path, "seed_b7", "cpu", *points)
    assert measured.added("B7", TIME, tmp_path).verdict is Verdict.open
    commit(tmp_path, "seed_b7", "gpu", *points)
    found = measured.added("B7", TIME, tmp_path)
    assert found.verdict is Verdict.refuted
    assert (
        found.measured.startswith("NVIDIA X1: 50 % ([seed_b7]")
        and "; CPU, reduced: 50 (40 to 60) % (" in found.measured
    )
    commit(tmp_path, "seed_b7", "gpu", point("none"), point("full", step_s=1.11))
    assert measured.added("B7", TIME, tmp_path).verdict is Verdict.confirmed


def test_what_did_not_run_or_was_planned_is_not_shown(tmp_path: Path) -> None:
    commit(tmp_path, "seed_b7", "gpu", point("none"), {"name": "full", "status": "out of memory"})
    assert measured.added("B7", TIME, tmp_path) == TIME
    planned = Lab("cpu", "", {"none": point("none", peak_in_update=True)})
    with pytest.raises(measured.NotThere):
        planned.peak("none")
    once = {"none": point("none", repeats=1)}
    with pytest.raises(measured.NotThere):
        Lab("cpu", "", once).step("none")
    assert Lab("cuda", "", once).step("none") == 1.0


def test_sizes_in_gib_are_read_on_gpus_only() -> None:
    assert all(reading.only == "cuda" for _, _, reading in ALL if reading.unit == "GiB")


def test_losses_that_differ_are_told(tmp_path: Path) -> None:
    other = point("full") | {"loss": [[1, 5.5], [2, 5.25000001]]}
    commit(tmp_path, "seed_b10", "cpu", point("none"), other, point("sqrt"))
    what = "losses and gradient norms of three steps on two ranks"
    outcome = Outcome(what, "coincide", "-", Verdict.confirmed, "bit-equal in 192 runs")
    found = measured.added("B10", outcome, tmp_path).measured
    assert found.startswith("bit-equal in 192 runs; CPU, reduced: 2 steps bit-equal under 1 of 2 policies (")
