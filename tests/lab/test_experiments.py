"""The named experiments in conf/lab: there is one for every claim, both sizes compose, and docs/lab.md lists them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from remat.config import compose
from remat.lab import experiment

DOCUMENT = (Path(__file__).resolve().parent.parent.parent / "docs" / "lab.md").read_text()
CLAIMS = [
    *(f"B{n}" for n in range(1, 11)),
    *(f"C{n}" for n in range(1, 5)),
    *(f"D{n}" for n in range(1, 6)),
    "A5",
]
NAMES = sorted(experiment.names())


def test_each_claim_has_one_experiment() -> None:
    found = [claim for path in experiment.names().values() for claim in experiment.read(path).claims]
    assert sorted(found) == sorted(CLAIMS)
    assert all(f"seed_{claim.lower()}" in NAMES for claim in CLAIMS if claim != "D5") and "profiling" in NAMES


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize("name", NAMES)
def test_a_launch_of_each_point_on_a_cpu_is_short(name: str) -> None:
    """At most about ten launches: each costs 10 to 15 s beside its steps."""
    made = experiment.named(name, [], "cpu")
    runs = [compose.compose_run(list(point.words)).run for point in made.points]
    assert len(made.points) * made.repeats <= 10
    assert all(run.train.steps <= 24 for run in runs)
    assert all(run.train.steps >= 8 for run in runs if "zero3" in run.deepspeed.config), "steady from step 5 on"


@pytest.mark.parametrize("name", NAMES)
def test_the_page_lists_each_experiment(name: str) -> None:
    content = experiment.read(experiment.names()[name])
    head = f"| [`{name}`](../conf/lab/{name}.yaml) | {', '.join(content.claims)} | {content.question} | "
    (row,) = [line for line in DOCUMENT.splitlines() if line.startswith(f"| [`{name}`]")]
    assert row.startswith(f"{head}{' '.join(content.cpu.reduction.split())} | "), (
        "docs/lab.md is another's list"
    )
    assert re.fullmatch(r"\d+|not run", row.removesuffix(" |").rpartition("| ")[2])


def test_the_page_lists_no_experiment_that_is_not_there() -> None:
    assert re.findall(r"^\| \[`(\w+)`\]", DOCUMENT, re.M) == NAMES
