"""Render a comparison as one self-contained HTML page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from remat.config.redact import redact_text
from remat.lab import table
from remat.lab.experiment import Experiment
from remat.lab.figures import Row
from remat.lab.measure import TIMES
from remat.report.page import Page, Picture, Table
from remat.report.page import render as render_page


def render(
    content: Mapping[str, Any], experiment: Experiment, rows: Sequence[Row], pictures: list[Picture]
) -> str:
    """Return the HTML text. `content` is that of results.json."""
    tables = [_overview(rows), _states(rows), _times(rows), _plan(rows), _endings(rows)]
    made = Page(
        title=experiment.title,
        subtitle=_subtitle(content, experiment),
        summary=" ".join(filter(None, (experiment.question, experiment.reduction))),
        facts=_facts(content),
        figures=[],
        pictures=pictures,
        absent=[],
        tables=[found for found in tables if found.rows],
        sources=[*_sources(rows), ("results.json", redact_text(json.dumps(content, indent=2)))],
        facts_title="Where and what",
    )
    return render_page(made)


def _subtitle(content: Mapping[str, Any], experiment: Experiment) -> str:
    claims = f"claims {', '.join(experiment.claims)}, " if experiment.claims else ""
    started = content["env"].get("started", "")[:10]
    return f"{experiment.name}, {claims}{experiment.where}, {experiment.repeats} x each, {started}"


def _facts(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    hardware, env = content["hardware"], content["env"]
    versions = ", ".join(
        f"{name} {env[name]}" for name in ("torch", "deepspeed", "transformers", "python") if name in env
    )
    facts = {
        "machine": _machine(hardware),
        "host memory": f"{hardware['host_memory_gib']:g} GiB",
        "versions": versions,
        "commit": env.get("commit"),
        "peak memory is": content["peak_how"],
        "steady steps": f"from step {content['first_steady_step']} on; those before are watched op by op or warm up",
    }
    return [(name, str(value)) for name, value in facts.items() if value]


def _machine(hardware: Mapping[str, Any]) -> str:
    if hardware["gpu"]:
        return f"{hardware['gpus']} x {hardware['gpu']}"
    return f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['threads_per_rank']} threads per rank"


def _overview(rows: Sequence[Row]) -> Table:
    return Table(
        "Side by side",
        tuple(table.headings(rows)),
        [tuple(table.cells(row, rows)) for row in rows],
        note=(
            "planned: the plan of what was measured against it. s/step: median of all steady steps of all repeats, "
            "with quartiles. x baseline: median over median, from quartile against quartile. loss: of the last step. "
            + ". ".join(table.notes([row for row in rows if row.step]))
        ),
        wide=True,
    )


def _states(rows: Sequence[Row]) -> Table:
    name, scale = table.unit(rows)
    cells = [
        (
            row.name,
            f"{sum(row.states_bytes.values()) / scale:,.4g}",
            f"{row.off_gpu_bytes / scale:,.4g}",
            "" if row.micro_batch_bytes is None else f"{row.micro_batch_bytes / scale:,.4g}",
            f"{row.moved_bytes / scale:,.4g}",
            "" if row.recomputed_percent is None else f"{row.recomputed_percent:.1f}%",
        )
        for row in rows
        if row.states_bytes
    ]
    return Table(
        f"What is held, {name}",
        (
            "",
            "model states",
            "of these not on the GPU",
            "micro-batch on top",
            "activations moved",
            "FLOPs run again",
        ),
        cells,
        note="FLOPs run again: of the forward's products and attention, counted in the first step.",
        wide=True,
    )


def _times(rows: Sequence[Row]) -> Table:
    cells = [
        (row.name, *(f"{row.times[name].median:.3g}" for name in TIMES), str(row.step.count))
        for row in rows
        if row.step
    ]
    return Table("Seconds of a step, medians", ("", *TIMES, "steps"), cells, wide=True)


def _plan(rows: Sequence[Row]) -> Table:
    """Make the table of planned against measured bytes: every category of every point that has both figures."""
    categories = list(
        dict.fromkeys(
            line["category"]
            for row in rows
            for line in row.ledger
            if line["planned"] is not None and line["measured"] is not None
        )
    )
    cells = []
    for row in rows:
        known = {line["category"]: table.error(line["planned"], line["measured"]) for line in row.ledger}
        if known:
            cells.append((row.name, *(known.get(category, "") for category in categories)))
    return Table(
        "Plan against measured, by category",
        ("", *categories),
        cells,
        note="How far the plan is off what was measured; empty where one of both is nothing or not known.",
        wide=True,
    )


def _endings(rows: Sequence[Row]) -> Table:
    return Table(
        "What did not finish",
        ("", "ending", "in its own words"),
        [(row.name, row.status, row.words) for row in rows if row.words],
        wide=True,
    )


def _sources(rows: Sequence[Row]) -> list[tuple[str, str]]:
    commands = "\n\n".join(f"{row.name}\n{row.command}" for row in rows if row.command)
    return [("commands", redact_text(commands))] if commands else []
