"""Write docs/claims.md from claims.yaml: `python docs/claims/render.py`. With ids (`A1 B7`) print these claims only.

claims.yaml says what was claimed, which runs decide it, and which figure of which run stands beside a claimed figure.
The figures come from plans of these runs and from committed results of `remat compare`; verdicts follow from them.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from remat.config import compose  # noqa: E402
from remat.config.units import GIB  # noqa: E402
from remat.lab.publish import ENVIRONMENTS, read_points  # noqa: E402
from remat.planning.plan import (  # noqa: E402
    Planned,
    Recordings,
    make_plan,
)
from remat.planning.simulation.timeline import LOSS  # noqa: E402
from remat.planning.simulation.types import Category, Phase  # noqa: E402
from scripts.generated import table  # noqa: E402

CLAIMS, INTRODUCTION, PAGE = HERE / "claims.yaml", HERE / "introduction.md", ROOT / "docs" / "claims.md"
LAB, GRID = ROOT / "benchmarks" / "results" / "lab", ROOT / "docs" / "granularity.json"
ALWAYS = (
    "data=synthetic train.loss=full"  # whole sequences and Hugging Face's loss, which is what the sources ran
)
PARTS = {
    "A": "Model states and memory of whole runs",
    "B": "Activation checkpointing: memory against time",
    "D": "Other techniques",
}
GIB_OF_A_GB = 1e9 / GIB
TOLERANCE, POINTS = 0.10, 0.03  # of a size; of a share
OPERATIONS = {  # from a run to another one
    "saved": lambda before, after: 1 - after / before,
    "left": lambda before, after: after / before,
    "more": lambda before, after: after / before - 1,
    "lost": lambda before, after: 1 - before / after,
    "speed": lambda before, after: before / after,
    "times": lambda before, after: after / before,
    "less": lambda before, after: before - after,
}
SHARES = {"saved", "left", "more", "lost", "speed"}
SHARE_FIGURES = {"recomputed", "slower", "speed_lost", "gpu_at_work", "loss_share"}
ON_A_CPU = {"micro_batch_bytes", "slower"}  # what a CPU measures that says something of a GPU


class Verdict(StrEnum):
    holds = "holds"
    fails = "does not hold"
    depends = "depends"
    unknown = "not measured"


class NotMeasured(LookupError):
    """No committed point has such a figure."""


@dataclass(frozen=True)
class Row:
    """One claimed figure. `planned` and `measured` are expressions; see the head of claims.yaml."""

    what: str
    claimed: str
    planned: str | list[str] = ""
    measured: Mapping[str, str | list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    title: str
    claimed: str
    rows: list[Row]
    reason: str
    common: str = ""
    runs: Mapping[str, str] = field(default_factory=dict)
    depends_on: str = ""
    within: str = ""

    def overrides(self, run: str) -> str:
        """Return the words of a run as one types them after `remat plan`."""
        return " ".join(f"{ALWAYS} {self.common} {self.runs[run] or ''}".split())


@dataclass(frozen=True)
class Term:
    """`NAME @ RUN`, or an operation on two runs: `saved NAME @ RUN -> RUN`."""

    operation: str
    name: str
    runs: tuple[str, ...]

    @property
    def unit(self) -> str:
        if self.operation in SHARES or self.name in SHARE_FIGURES:
            return "%"
        return "times" if self.operation == "times" else "GiB"


@dataclass(frozen=True)
class Answer:
    """What one source says: a number or a word that is held to the claim, and the text that is shown."""

    value: float | str
    shown: str


@dataclass(frozen=True)
class Outcome:
    """One line of a claim's table."""

    what: str
    claimed: str
    planned: str
    measured: str
    verdict: Verdict


def read_claims(path: Path = CLAIMS) -> dict[str, Claim]:
    """Return the claims by id. Raises TypeError for a key that a claim or row does not have."""
    found = yaml.safe_load(path.read_text())
    return {
        name: Claim(**entry | {"rows": [Row(**row) for row in entry["rows"]]}) for name, entry in found.items()
    }


def parse(expression: str | list[str]) -> list[Term | str]:
    """Return the terms of an expression. Words that name no run, such as `equal losses`, stay as they are."""
    if isinstance(expression, list):
        return [term for part in expression for term in parse(part)]
    found = re.fullmatch(rf"(?:({'|'.join(OPERATIONS)}) )?(\w+) @ (.+)", expression)
    if not found:
        return [expression] if expression else []
    operation, name, runs = found.groups(default="")
    return [Term(operation, name, tuple(pair.split(" -> "))) for pair in runs.split(" / ")]


def evaluate(term: Term, source: Plans | Lab) -> float:
    values = [source.value(run, term.name) for run in term.runs]
    return OPERATIONS[term.operation](*values) if term.operation else values[0]


class Plans:
    """The runs of one claim, each planned when a figure of it is asked for."""

    known: ClassVar[dict[str, dict[str, float]]] = {}  # of all claims, by the words of the run

    def __init__(self, claim: Claim) -> None:
        self._claim, self._recordings = claim, Recordings()

    def value(self, run: str, name: str) -> float:
        words = self._claim.overrides(run)
        if words not in self.known:
            cfg = compose.compose_run(shlex.split(words)).run
            planned = make_plan(cfg, recordings=self._recordings)
            self.known[words] = collect_figures(planned, self._recordings.get(cfg, planned.strategy).timeline)
        return self.known[words][name]

    def answer(self, term: Term | str) -> Answer:
        if isinstance(term, str):
            return self._answer_words(term)
        if term.name == "fits":
            (run,) = term.runs
            shown = f"{self.value(run, 'gpu'):.1f} of {self.value(run, 'gpu_found'):.1f}"
            return Answer("fits" if self.value(run, "fits") else "does not fit", shown)
        value = evaluate(term, self)
        return Answer(value, show_number(value, term.unit))

    def _answer_words(self, words: str) -> Answer:
        """Of `least NAME`, or of `medium saves more of the NAME`: against small, both from none to full."""
        if words.startswith("least "):
            return find_least(words, list(self._claim.runs), self)
        name = words.removeprefix("medium saves more of the ")
        small, medium = (
            evaluate(Term("saved", name, (f"{size}, none", f"{size}, full")), self)
            for size in ("small", "medium")
        )
        answer = "yes" if medium > small else "no"
        return Answer(answer, answer)


def collect_figures(planned: Planned, timeline: Any) -> dict[str, float]:
    """Return what claims are about. Sizes in GiB: of a rank on a GPU, of the node in host memory.

    `layers` and `loss` are the most that a micro-batch has inside and outside of the decoder layers, `activations` the
    most of both at one instant. `passing` is what ZeRO gathers or sends at the peak. `gpu` is what a GPU must have.
    Times are of a micro-batch, `step_s` of a whole step.
    """
    plan, time, flops = planned.plan, planned.time, planned.simulation.flops
    gpu, host = plan.resources[0], plan.resources[1]
    instants = [part.peak for part in timeline.parts]
    steps = planned.strategy.ds["gradient_accumulation_steps"]
    states = [
        plan.states.get(name, 0) for name in (Category.weights, Category.gradients, Category.optimizer_state)
    ]
    moving = (Category.gathered, Category.gradients, Category.buckets)
    layers = max(at.total - at.by_kind[LOSS] for at in instants)
    loss, activations = max(at.by_kind[LOSS] for at in instants), max(at.total for at in instants)
    sizes = {
        "weights": states[0],
        "gradients": states[1],
        "optimizer": states[2],
        "states": sum(states),
        "passing": sum(plan.gpu.get(name, 0) for name in moving),
        "layers": layers,
        "loss": loss,
        "activations": activations,
        "peak": plan.peak_bytes,
        "gpu": gpu.needed_bytes,
        "gpu_found": gpu.found_bytes or 0,
        "host": host.needed_bytes,
    }
    work = time.compute_s + time.recompute_s
    return {name: size / GIB for name, size in sizes.items()} | {
        "fits": plan.fits,
        "loss_share": loss / activations,
        "recomputed": flops[Phase.recompute] / (flops[Phase.forward] + flops[Phase.backward]),
        "slower": time.recompute_s / time.compute_s,
        "speed_lost": time.recompute_s / work,
        "gpu_at_work": work / time.total_s,
        "compute_s": time.compute_s / steps,
        "work_s": work / steps,
        "step_s": time.total_s,
    }


@dataclass(frozen=True)
class Lab:
    """The points of one experiment on one kind of machine. `where` is what the page calls it."""

    machine: str
    where: str
    points: Mapping[str, Mapping[str, str]]

    def answers(self, terms: Sequence[Term | str]) -> list[Answer | None]:
        """Answer each term; None where this machine did not measure it."""
        found: list[Answer | None] = []
        for term in terms:
            try:
                found.append(self.answer(term))
            except NotMeasured:
                found.append(None)
        return found

    def value(self, point: str, name: str) -> float:
        """Raises NotMeasured, on a CPU also for times of a single launch: the machine drifts between points."""
        row = self.points.get(point, {})
        columns = {"work_s": ("forward_s", "backward_s"), "slower": ("ratio",)}.get(name, (name,))
        once = name == "slower" and row.get("repeats") == "1"
        if not all(row.get(column) for column in columns):
            raise NotMeasured(point)
        if self.machine == "cpu" and (name not in ON_A_CPU or once):
            raise NotMeasured(point)
        value = sum(float(row[column]) for column in columns)
        return value / GIB if name.endswith("_bytes") else value - 1 if name == "slower" else value

    def answer(self, term: Term | str) -> Answer:
        """Raises NotMeasured. Sizes are read on a GPU only: on a CPU an experiment is smaller than the claim."""
        if term == "-":
            raise NotMeasured(term)
        if term == "equal losses":
            return self._compare_losses()
        if isinstance(term, str):
            return find_least(
                term, [name for name, row in self.points.items() if row["status"] == "finished"], self
            )
        if term.unit == "GiB" and self.machine == "cpu":
            raise NotMeasured(term.name)
        value = evaluate(term, self)
        return Answer(value, self._show_ratio(term) if term.name == "slower" else show_number(value, term.unit))

    def _show_ratio(self, term: Term) -> str:
        row = self.points[term.runs[0]]
        median, low, high = (100 * (float(row[name]) - 1) for name in ("ratio", "ratio_low", "ratio_high"))
        return f"{median:.0f} ({low:.0f} to {high:.0f})"

    def _compare_losses(self) -> Answer:
        losses = {name: row["losses"] for name, row in self.points.items() if row["losses"]}
        first = losses.pop("none")
        equal = sum(found == first for found in losses.values())
        shown = f"{len(first.split())} steps bit-equal under {equal} of {len(losses)} policies"
        return Answer("equal" if equal == len(losses) else "different", shown)


def find_labs(experiment: str, folder: Path = LAB) -> list[Lab]:
    """Return what is committed of an experiment, a GPU's first; of `NAME-cpu` only what a CPU measured."""
    name, _, only = experiment.partition("-")
    known, found = json.loads((folder / ENVIRONMENTS).read_text()), []
    for machine in ("gpu", "cpu"):
        rows = [r for r in read_points(folder) if (r["experiment"], r["machine"]) == (name, machine)]
        if rows and only in ("", machine):
            where = known[f"{name}-gpu"]["gpu"] if machine == "gpu" else "CPU, reduced"
            found.append(Lab(machine, where, {row["point"]: row for row in rows}))
    return found


def find_least(words: str, runs: Sequence[str], source: Plans | Lab) -> Answer:
    """Return the run with the least of what `least NAME` names, and what it saves against the run `none`."""
    name = words.removeprefix("least ")
    best = min(runs, key=lambda run: source.value(run, name))
    saved = 1 - source.value(best, name) / source.value("none", name)
    return Answer(best, f"{best}: {100 * saved:.0f} %")


def count_equal_losses() -> Answer:
    """Return how many runs of docs/granularity.md are bit-equal; those in 8 bits are approximate by choice."""
    rows: dict[str, dict[str, str]] = json.loads(GRID.read_text())
    cells = [cell for name, row in rows.items() if "dtype=" not in name for cell in row.values()]
    ran = [cell for cell in cells if cell != "reference" and not cell.startswith("refused: ")]
    equal = ran.count("bit-equal")
    shown = f"bit-equal in {equal} of {len(ran)} runs (CPU, docs/granularity.md)"
    return Answer("equal" if equal == len(ran) else "different", shown)


def judge(claimed: str, answers: Sequence[float | str]) -> Verdict:
    """Hold figures to a claim. It holds when all agree; when some do, it depends on what tells them apart."""
    if not answers:
        return Verdict.unknown
    bounds = read_range(claimed)
    if bounds is None:
        agree = [answer == claimed for answer in answers]
        return Verdict.holds if all(agree) else Verdict.depends if any(agree) else Verdict.fails
    low, high = bounds
    agree = [low <= float(answer) <= high for answer in answers]
    if all(agree):
        return Verdict.holds
    values = [float(answer) for answer in answers]
    return Verdict.fails if high < min(values) or low > max(values) else Verdict.depends


def read_range(claimed: str) -> tuple[float, float] | None:
    """Return the range in which a planned figure agrees with `14 GB` or `10 to 20 %`; None for other words."""
    found = re.fullmatch(r"([\d.]+)(?: to ([\d.]+))? (GB|%|times)", claimed)
    if not found:
        return None
    low, high = float(found[1]), float(found[2] or found[1])
    if found[3] == "%":
        return low / 100 - POINTS, high / 100 + POINTS
    scale = GIB_OF_A_GB if found[3] == "GB" else 1
    return low * scale * (1 - TOLERANCE), high * scale * (1 + TOLERANCE)


def show_claimed(claimed: str) -> str:
    """Return `14 GB = 13.0 GiB`; other claims as they are."""
    if not claimed.endswith(" GB"):
        return claimed
    ends = claimed.removesuffix(" GB").split(" to ")
    return f"{claimed} = {' to '.join(show_number(float(end) * GIB_OF_A_GB, 'GiB') for end in ends)} GiB"


def show_number(value: float, unit: str) -> str:
    if unit == "%":
        return f"{100 * value:.1f}" if 0 < abs(value) < 0.1 else f"{100 * value:.0f}"
    return f"{value:.2f}" if abs(value) < 3 else f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"


def join(shown: Sequence[str], terms: Sequence[Term | str]) -> str:
    """Return `1.5 / 2.5 GiB`."""
    units = {term.unit for term in terms if isinstance(term, Term)}
    return " ".join([" / ".join(shown), *sorted(units)])


def compare_row(row: Row, plans: Plans, folder: Path = LAB) -> Outcome:
    """Plan, read what was measured, and judge: by plans; where none decides, by a GPU or by equal losses."""
    terms = parse(row.planned)
    answers = [plans.answer(term) for term in terms]
    planned = join([answer.shown for answer in answers], terms) if answers else "-"
    measured, decisive = measure_row(row, folder)
    values = [answer.value for answer in answers] or decisive
    shown = "; ".join(measured) or "not measured"
    return Outcome(row.what, show_claimed(row.claimed), planned, shown, judge(row.claimed, values))


def measure_row(row: Row, folder: Path = LAB) -> tuple[list[str], list[float | str]]:
    """Return what was measured, in words, and the values that a verdict may follow from."""
    texts: list[str] = []
    decisive: list[float | str] = []
    for experiment, expression in row.measured.items():
        if experiment == "granularity":
            answer = count_equal_losses()
            texts.append(answer.shown)
            decisive.append(answer.value)
            continue
        terms = parse(expression)
        for lab in find_labs(experiment, folder):
            answers = lab.answers(terms)
            values = [answer.value for answer in answers if answer]
            if values:
                shown = [answer.shown if answer else "-" for answer in answers]
                texts.append(f"{lab.where}: {join(shown, terms)} (`{experiment.partition('-')[0]}`)")
                decisive += values if lab.machine == "gpu" else []
    return texts, decisive


def sum_up(claim: Claim, verdicts: Sequence[Verdict]) -> str:
    """Return the verdict of a whole claim; figures that nobody measured have no say."""
    decided = [verdict for verdict in verdicts if verdict is not Verdict.unknown]
    wrong = decided.count(Verdict.fails)
    if wrong:
        words = "does not hold" + ("" if wrong == len(decided) else f" in {wrong} of {len(decided)} figures")
    elif Verdict.depends in decided:
        words = f"depends on {claim.depends_on}"
    else:
        words = "holds" if decided else "not measured"
    return f"{words}, {claim.within}" if claim.within else words


def fill_in(reason: str, plans: Plans) -> str:
    """Replace each `{figure @ run}` of a reason by its number."""
    return re.sub(r"\{(.+?)\}", lambda found: plans.answer(parse(found[1])[0]).shown, reason.strip())


def render_claim(name: str, claim: Claim) -> tuple[str, str]:
    """Plan the runs of a claim; return its line of the summary and its section."""
    plans = Plans(claim)
    outcomes = [compare_row(row, plans) for row in claim.rows]
    verdict = sum_up(claim, [outcome.verdict for outcome in outcomes])
    other = [outcome for outcome in outcomes if outcome.verdict in (Verdict.fails, Verdict.depends)]
    instead = "; ".join(f"{o.what}: {o.planned if o.planned != '-' else o.measured}" for o in other)
    head = f"[{name}](#{name.lower()}) | {claim.title}: {claim.claimed}"
    section = [
        f'### <a id="{name.lower()}"></a>{name}. {claim.title}',
        f"Claimed: {claim.claimed}.",
        f"**{verdict[0].upper()}{verdict[1:]}.** {fill_in(claim.reason, plans)}",
        table(
            ["figure", "claimed", "planned", "measured", "verdict"], [astuple(outcome) for outcome in outcomes]
        ),
        "\n".join(f"    remat plan {claim.overrides(run)}" for run in claim.runs),
    ]
    return f"| {head} | {verdict} | {instead or 'as claimed'} |", "\n\n".join(filter(None, section))


def render_page(claims: Mapping[str, Claim]) -> str:
    found = {}
    for name, claim in claims.items():
        print(f"{name} {claim.title}: {len(claim.runs)} runs", file=sys.stderr, flush=True)
        found[name] = render_claim(name, claim)
    summary = [
        "| | claim | verdict | figures instead |",
        "|---|---|---|---|",
        *(line for line, _ in found.values()),
    ]
    parts = [INTRODUCTION.read_text().strip(), "\n".join(summary)]
    for letter, title in PARTS.items():
        parts += [f"## {letter}. {title}", *(text for name, (_, text) in found.items() if name[0] == letter)]
    return "\n\n".join(parts) + "\n"


def main(ids: Sequence[str]) -> None:
    claims = read_claims()
    if ids:
        print("\n\n".join(render_claim(name, claims[name])[1] for name in ids))
    else:
        PAGE.write_text(render_page(claims))


if __name__ == "__main__":
    main(sys.argv[1:])
