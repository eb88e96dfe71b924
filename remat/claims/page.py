"""docs/claims.md: every claim with its verdict, the figures, the reason, and the runs that were planned."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from remat.claims import adapters, depth, measured, memory, recomputation, techniques
from remat.claims.claim import POINTS, TOLERANCE, Claim, Outcome, Verdict, verdict
from remat.claims.figures import Planning
from remat.config.options import ConfigError

CLAIMS = sorted(
    [*memory.CLAIMS, *adapters.CLAIMS, *recomputation.CLAIMS, *depth.CLAIMS, *techniques.CLAIMS],
    key=lambda claim: (claim.id[0], int(claim.id[1:])),
)
PARTS = {
    "A": "Model states and memory of whole runs",
    "B": "Activation checkpointing: memory against time",
    "D": "Other techniques",
}
INTRODUCTION = f"""\
# What people are told, and what a plan says

Public tutorials on activation checkpointing and memory give these figures. Here each stands beside what
`remat plan` says of the same run. The page is written by `remat claims --out docs/claims.md`: verdicts and figures are
computed, and a sentence that no longer follows from the figures stops the command.

- **Planned.** The real model runs forward and backward on tensors without memory, and DeepSpeed's model states are
  added. Verdicts follow from plans; where no plan decides, from a measurement.
- **Measured.** From committed results of the experiments in [lab.md](lab.md), where one measures that very figure.
  "CPU, reduced" is a share or a ratio at a smaller size, which its file states; no verdict follows from it. Shares of
  activations are those of the peak of a micro-batch, gradients included. Times on a CPU are those of its kernels. What
  is measured on a GPU is at the claim's size and names the GPU.
- **Units.** The sources write GB, taken as 1e9 bytes; plans are in GiB, 1024**3 bytes.
- **Verdicts.** A figure is confirmed within {TOLERANCE:.0%} of the claim (a share in percent: within {100 * POINTS:.0f}
  points). Where a claim leaves a setting open, several are planned, separated by a slash: confirmed when all agree,
  refuted when the claim lies outside of what they span, and else it depends on the setting.
- **Words.** The peak is what torch calls max_memory_allocated; whether a run fits counts the allocator's gaps and the
  CUDA context too. Activations are all that a micro-batch has besides model states, logits and loss included.
  Times are best cases from published rates of the GPU. `1 x 2048` is one sequence of 2048 tokens per micro-batch.
- **Runs.** The optimizer is Adam, the precision bf16 with fp32 master weights, the loss Hugging Face's over all logits,
  unless a command says otherwise; `zero_optimization.stage=0` is plain PyTorch without ZeRO.
"""


@dataclass(frozen=True)
class Row:
    """A claim as it stands on the page: its line of the summary, and its section."""

    id: str
    summary: str
    section: str


def rows(ids: Iterable[str] = (), shown: Callable[[str], None] = lambda text: None) -> list[Row]:
    """The claims named (all by default), planned; `shown` hears which is at work. Raises ConfigError, ClaimError."""
    wanted = set(ids) or {claim.id for claim in CLAIMS}
    unknown = sorted(wanted - {claim.id for claim in CLAIMS})
    if unknown:
        raise ConfigError(
            f"{', '.join(unknown)}: no such claim; the claims are {', '.join(claim.id for claim in CLAIMS)}"
        )
    planning, found = Planning(), []
    for claim in CLAIMS:
        if claim.id in wanted:
            shown(f"{claim.id} {claim.title}: {len(claim.runs)} runs")
            found.append(row(claim, planning))
    return found


def row(claim: Claim, planning: Planning) -> Row:
    """Plan the runs of one claim and write it."""
    runs = planning.of(claim.runs)
    outcomes = [measured.added(claim.id, part.outcome(runs)) for part in claim.compared]
    words = verdict(claim, outcomes)
    link = f"[{claim.id}](#{claim.id.lower()})"
    instead = "; ".join(_instead(o) for o in outcomes if o.verdict in (Verdict.refuted, Verdict.depends))
    summary = f"| {link} | {claim.title}: {claim.said} | {words} | {instead or 'as claimed'} |"
    reasons = " ".join(reason.sentence(runs) for reason in claim.why)
    table = [
        "| figure | claimed | planned | measured | verdict |",
        "|---|---|---|---|---|",
        *(f"| {o.what} | {o.claimed} | {o.planned} | {o.measured} | {o.verdict} |" for o in outcomes),
    ]
    parts = [
        f'### <a id="{claim.id.lower()}"></a>{claim.id}. {claim.title}',
        f"Claimed: {claim.said}.",
        f"**{words[0].upper()}{words[1:]}.** {reasons}",
        "\n".join(table),
    ]
    if claim.runs:
        parts.append("\n".join(f"    remat plan {overrides}" for overrides in claim.runs.values()))
    return Row(claim.id, summary, "\n\n".join(parts))


def _instead(outcome: Outcome) -> str:
    figure = outcome.planned if outcome.planned != "-" else outcome.measured.partition("; ")[0]
    return f"{outcome.what}: {figure}"


def page(found: list[Row]) -> str:
    """The whole document."""
    summary = ["| | claim | verdict | figures instead |", "|---|---|---|---|", *(row.summary for row in found)]
    parts = [INTRODUCTION, "\n".join(summary)]
    for letter, title in PARTS.items():
        sections = [row.section for row in found if row.id.startswith(letter)]
        parts += [f"## {letter}. {title}", *sections] if sections else []
    return "\n\n".join(parts) + "\n"
