"""`remat claims`: docs/claims.md says what the plans say now, and no sentence outlives its figures."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from remat import cli
from remat.claims import page
from remat.claims.claim import (
    Because,
    Claim,
    ClaimError,
    Statement,
    Unplanned,
    Verdict,
    gb,
    run,
    share,
    verdict,
)
from remat.claims.figures import GIB, Planning, Runs
from remat.config import compose

DOCUMENT = (Path(__file__).resolve().parent.parent.parent / "docs" / "claims.md").read_text()
CHEAP = ("A3", "A9", "B4", "B7", "B10")
IDS = [*(f"A{n}" for n in range(1, 10)), *(f"B{n}" for n in range(1, 11)), "D2", "D3", "D4", "D6"]
TINY = {
    policy: run("model=tiny_llama hardware=1x4090", "zero2", 2, 64, policy=policy)
    for policy in ("none", "full")
}


@pytest.fixture(scope="module")
def tiny() -> Runs:
    return Planning().of(TINY)


def test_every_claim_is_there_once_and_in_order() -> None:
    assert [claim.id for claim in page.CLAIMS] == IDS
    assert re.findall(r"^### .*</a>(\w+)\.", DOCUMENT, re.M) == IDS
    assert re.findall(r"^\| \[(\w+)\]", DOCUMENT, re.M) == IDS


@pytest.mark.parametrize("claim_id", CHEAP)
def test_the_page_says_what_the_plans_say(claim_id: str) -> None:
    """Rows that are quick to plan; `remat claims --out docs/claims.md` renews all."""
    (row,) = page.rows([claim_id])
    assert row.summary in DOCUMENT.splitlines(), "run remat claims --out docs/claims.md"
    assert f"{row.section}\n" in DOCUMENT, "run remat claims --out docs/claims.md"


def test_introduction_said_and_commands_are_those_of_the_page() -> None:
    assert DOCUMENT.startswith(page.INTRODUCTION)
    for claim in page.CLAIMS:
        assert f"Claimed: {claim.said}." in DOCUMENT
        for overrides in claim.runs.values():
            assert f"    remat plan {overrides}\n" in DOCUMENT


@pytest.mark.parametrize("claim", page.CLAIMS, ids=lambda claim: claim.id)
def test_every_command_composes(claim: Claim) -> None:
    assert claim.runs or claim.id == "B10"
    for overrides in claim.runs.values():
        compose.compose_run(shlex.split(overrides))


@pytest.mark.parametrize("claim", page.CLAIMS, ids=lambda claim: claim.id)
def test_a_sentence_with_figures_is_checked_against_them(claim: Claim) -> None:
    for reason in claim.why:
        assert "{" not in reason.text or reason.holds is not None, reason.text


def test_the_decision_tree_gives_way_to_the_advice_of_a_plan() -> None:
    section = DOCUMENT[DOCUMENT.index("</a>D6.") :]
    assert "`remat plan` takes the place of a tree" in section and "advises" in section


def test_a_figure_is_confirmed_near_refuted_far_and_depends_between(tiny: Runs) -> None:
    claimed = 2 * GIB / 1e9  # GB that are 2 GiB
    for planned, expected in (
        ([2.1], Verdict.confirmed),
        ([2.1, 1.9], Verdict.confirmed),
        ([2.3], Verdict.refuted),
        ([1.0, 1.5], Verdict.refuted),
        ([1.0, 4.0], Verdict.depends),
        ([2.0, 4.0], Verdict.depends),
    ):
        outcome = gb("x", claimed, lambda r, p=planned: p).outcome(tiny)  # type: ignore[misc]
        assert outcome.verdict is expected, planned
    assert share("x", (25, 30), lambda r: 0.225).outcome(tiny).verdict is Verdict.confirmed
    assert share("x", (25, 30), lambda r: 0.215).outcome(tiny).verdict is Verdict.refuted
    assert gb("x", 14, lambda r: 12.55).outcome(tiny).claimed == "14 GB = 13.0 GiB"


def test_the_verdict_of_a_claim_counts_its_figures(tiny: Runs) -> None:
    def claim(*answers: list[bool]) -> str:
        parts = [Statement("x", "y", lambda r, a=a: a, lambda r: "z") for a in answers]  # type: ignore[misc]
        made = Claim(
            id="A1",
            title="",
            said="",
            runs={},
            compared=[*parts, Unplanned("time", "5 %")],
            why=[],
            depends_on="it",
        )
        return verdict(made, [part.outcome(tiny) for part in made.compared])

    assert claim([True], [True]) == "confirmed"
    assert claim([False]) == "refuted"
    assert claim([True], [False], [True, False]) == "refuted in 1 of 3 figures"
    assert claim([True], [True, False]) == "depends on it"


def test_a_sentence_that_no_longer_follows_stops_the_page(tiny: Runs) -> None:
    saves = Because(
        "{little:.3f} GiB are less", lambda r: r["full"].layers < r["none"].layers, lambda r: {"little": 1}
    )
    assert saves.sentence(tiny) == "1.000 GiB are less"
    costs = Because("more", lambda r: r["full"].layers > r["none"].layers)
    with pytest.raises(ClaimError, match="no longer true: more"):
        costs.sentence(tiny)


def test_figures_are_those_of_the_plan(tiny: Runs) -> None:
    """By hand: bf16 weights and gradients, 12 bytes of optimizer state; recomputation costs forward FLOPs only."""
    none, full = tiny["none"], tiny["full"]
    assert none.weights * GIB == none.gradients * GIB == 2 * none.num_params
    assert none.optimizer * GIB == 12 * none.num_params
    assert none.again == 0 < full.again < full.forward_flops / (full.forward_flops + full.backward_flops)
    assert full.forward_flops == none.forward_flops
    assert full.activations < none.activations <= none.layers + none.loss


def test_plain_fp32_is_updated_without_a_copy_of_the_gradients() -> None:
    """Without ZeRO there is no master copy; ZeRO-2 makes its bf16 gradients flat, then fp32, at the step."""
    planning, more = Planning(), ("train.precision=fp32", "deepspeed.overrides.zero_optimization.stage=0")
    model = "model=gpt2_small hardware=1x4090"
    mixed = planning.figures(run(model, "zero2", 1, 8, policy="full"))
    plain = planning.figures(run(model, "zero2", 1, 8, *more, policy="full"))
    assert mixed.peak_at_step and mixed.peak * GIB == pytest.approx(22 * mixed.num_params, rel=0.01)
    assert plain.states * GIB == 16 * plain.num_params
    assert not plain.peak_at_step and plain.peak * GIB < 18 * plain.num_params


def test_a_claim_by_name_and_a_claim_that_is_not(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["claims", "B10"])
    assert result.exit_code == 0 and "bit-equal in 192 of 192 runs" in result.output
    for words, said in (
        (["C9"], "no such claim"),
        (["B10", "--out", str(tmp_path / "x.md")], "leave the ids away"),
    ):
        refused = CliRunner().invoke(cli.app, ["claims", *words])
        assert refused.exit_code != 0 and said in str(refused.exception)
