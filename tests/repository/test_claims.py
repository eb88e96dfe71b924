"""docs/claims: the data is well formed, the page says what it says, and a claim can be wrong."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest

from docs.claims import render
from docs.claims.render import Claim, Row, Term, Verdict
from remat.config import compose
from remat.lab import experiment, publish

CLAIMS = render.read_claims()
PAGE = render.PAGE.read_text()
CHEAP = ("B7", "B8", "B10")  # quick to plan; the others are planned by `make test-all`
EACH = [pytest.param(name, marks=[] if name in CHEAP else pytest.mark.exhaustive) for name in CLAIMS]
COLUMNS = {*publish.read_points(render.LAB)[0], "work_s", "slower"}
RENEW = "run python docs/claims/render.py"
TIME = Row("time", "10.8 %", measured={"seed_b7": "slower @ full"})


@pytest.fixture(scope="module")
def tiny() -> render.Plans:
    common = "model=tiny_llama hardware=1x4090 deepspeed.config=zero2 train.seq_len=64"
    runs = {
        name: f"train.micro_batch_size=2 train.global_batch_size=2 checkpointing={name}"
        for name in ("none", "full")
    }
    return render.Plans(Claim("", "", [], "", common=common, runs=runs))


def terms_of(claim: Claim) -> list[Term | str]:
    """Return what a claim asks of plans, in its rows and in its reason."""
    inline = re.findall(r"\{(.+?)\}", claim.reason)
    return [term for text in [*(row.planned for row in claim.rows), *inline] for term in render.parse(text)]


@pytest.mark.parametrize("name", CLAIMS)
def test_every_run_composes_and_every_figure_is_of_a_run(name: str, tiny: render.Plans) -> None:
    claim = CLAIMS[name]
    for run in claim.runs:
        compose.compose_run(shlex.split(claim.overrides(run)))
    tiny.value("none", "peak")
    figures = next(iter(tiny.known.values())).keys()
    for term in terms_of(claim):
        if isinstance(term, Term):
            assert set(term.runs) <= set(claim.runs) and term.name in figures, term
            assert len(term.runs) == (2 if term.operation else 1), term
        else:
            assert term.startswith(("least layers", "medium saves more of the ")), term
    assert all(row.planned or row.measured for row in claim.rows)


@pytest.mark.parametrize("name", CLAIMS)
def test_every_measured_figure_is_of_a_point_of_an_experiment(name: str) -> None:
    for row in CLAIMS[name].rows:
        for source, expression in row.measured.items():
            if source == "granularity":
                continue
            lab, _, only = source.partition("-")
            points = {point.name for point in experiment.named(lab, [], only or "cuda").points}
            for term in render.parse(expression):
                if isinstance(term, Term):
                    assert set(term.runs) <= points and term.name in COLUMNS, term
                else:
                    assert term in ("-", "equal losses", "least micro_batch_bytes"), term


def test_the_page_has_every_claim_once_and_says_what_was_claimed_and_measured() -> None:
    assert (
        re.findall(r"^### .*</a>(\w+)\.", PAGE, re.M)
        == list(CLAIMS)
        == re.findall(r"^\| \[(\w+)\]", PAGE, re.M)
    )
    assert PAGE.startswith(render.INTRODUCTION.read_text()), RENEW
    for name, claim in CLAIMS.items():
        section = PAGE[PAGE.index(f"</a>{name}.") :].partition("\n### ")[0]
        assert section.startswith(f"</a>{name}. {claim.title}\n\nClaimed: {claim.claimed}.\n"), RENEW
        commands = re.findall(r"^    remat plan (.*)$", section, re.M)
        assert commands == [claim.overrides(run) for run in claim.runs], RENEW
        lines = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
        for row, cells in zip(claim.rows, lines, strict=True):
            measured = "; ".join(render.measure_row(row)[0]) or "not measured"
            assert cells[:2] == [f"| {row.what}", render.show_claimed(row.claimed)], RENEW
            assert cells[3] == measured, RENEW


@pytest.mark.parametrize("name", EACH)
def test_the_page_says_what_plans_say_now(name: str) -> None:
    line, section = render.render_claim(name, CLAIMS[name])
    assert line in PAGE.splitlines() and f"{section}\n" in PAGE, RENEW


def test_another_claimed_figure_turns_the_verdict(tiny: render.Plans) -> None:
    row = Row("weights", f"{tiny.value('none', 'weights') / render.GIB_OF_A_GB:.9f} GB", "weights @ none")
    assert render.compare_row(row, tiny).verdict is Verdict.holds
    wrong = dataclasses.replace(row, claimed="14 GB")
    assert render.compare_row(wrong, tiny).verdict is Verdict.fails
    least = Row("what saves most", "full", "least layers")
    assert render.compare_row(least, tiny).verdict is Verdict.holds
    assert render.compare_row(dataclasses.replace(least, claimed="none"), tiny).verdict is Verdict.fails


@pytest.mark.parametrize(
    ("claimed", "found", "expected"),
    [
        ("14 GB", [12.0], Verdict.holds),
        ("14 GB", [14.5], Verdict.fails),
        ("14 GB", [13.0, 11.0], Verdict.depends),
        ("14 GB", [10.0, 20.0], Verdict.depends),
        ("25 to 30 %", [0.225, 0.325], Verdict.holds),
        ("25 to 30 %", [0.215], Verdict.fails),
        ("2 times", [2.1], Verdict.holds),
        ("fits", ["fits", "does not fit"], Verdict.depends),
        ("equal", ["different"], Verdict.fails),
        ("14 GB", [], Verdict.unknown),
    ],
)
def test_a_verdict_follows_from_the_figures(claimed: str, found: list[float | str], expected: Verdict) -> None:
    assert render.judge(claimed, found) is expected


def test_the_verdict_of_a_claim_counts_its_figures() -> None:
    claim = Claim("", "", [], "", depends_on="it", within="so far")
    assert render.sum_up(claim, [Verdict.holds, Verdict.unknown]) == "holds, so far"
    assert render.sum_up(claim, [Verdict.holds, Verdict.depends]) == "depends on it, so far"
    assert render.sum_up(claim, [Verdict.fails, Verdict.depends]) == "does not hold in 1 of 2 figures, so far"


def commit(folder: Path, machine: str, *points: dict[str, str]) -> None:
    """Add points of seed_b7 to the committed results in `folder`."""
    rows = [
        *publish.read_points(folder),
        *({"experiment": "seed_b7", "machine": machine} | row for row in points),
    ]
    with (folder / publish.POINTS).open("w", newline="") as file:
        writer = csv.DictWriter(file, sorted(COLUMNS))
        writer.writeheader()
        writer.writerows(rows)
    (folder / publish.ENVIRONMENTS).write_text(json.dumps({"seed_b7-gpu": {"gpu": "NVIDIA X1"}}))


def test_a_gpu_decides_what_no_plan_does_and_a_cpu_does_not(tiny: render.Plans, tmp_path: Path) -> None:
    slower = {"point": "full", "repeats": "2", "ratio": "1.5", "ratio_low": "1.4", "ratio_high": "1.6"}
    commit(tmp_path, "cpu", slower)
    found = render.compare_row(TIME, tiny, tmp_path)
    assert (found.measured, found.verdict) == ("CPU, reduced: 50 (40 to 60) % (`seed_b7`)", Verdict.unknown)
    commit(tmp_path, "gpu", slower)
    found = render.compare_row(TIME, tiny, tmp_path)
    assert found.measured.startswith("NVIDIA X1: 50 (40 to 60) % (`seed_b7`); CPU, reduced: ")
    assert found.verdict is Verdict.fails


def test_what_says_nothing_of_a_gpu_is_not_shown(tiny: render.Plans, tmp_path: Path) -> None:
    """On a CPU: sizes, times of one launch, peaks; anywhere: what did not run."""
    point = {"point": "full", "repeats": "1", "ratio": "1.5", "micro_batch_bytes": "9", "peak_bytes": "9"}
    commit(tmp_path, "cpu", point, point | {"point": "none"})
    for expression in ("slower @ full", "micro_batch_bytes @ full", "saved peak_bytes @ none -> full"):
        row = dataclasses.replace(TIME, measured={"seed_b7": expression})
        assert render.measure_row(row, tmp_path) == ([], []), expression
    commit(tmp_path, "gpu", {"point": "full"})
    assert render.measure_row(TIME, tmp_path) == ([], [])


def test_losses_that_differ_are_told(tmp_path: Path) -> None:
    points = [
        {"point": name, "losses": f"5.5 {last}"} for name, last in (("none", 5), ("full", 5), ("sqrt", 6))
    ]
    commit(tmp_path, "cpu", *points)
    row = dataclasses.replace(TIME, measured={"seed_b7": "equal losses"})
    assert render.measure_row(row, tmp_path)[0] == [
        "CPU, reduced: 2 steps bit-equal under 1 of 2 policies (`seed_b7`)"
    ]
