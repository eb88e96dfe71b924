"""Choose the tables of a run again, with the seconds that its phases took: `remat retune RUN`.

Tables are chosen by the seconds of each operation, from rates of data sheets and of other machines. The measured
seconds of forward and backward correct these rates by two factors: one for operations bound by arithmetic, one for
memory traffic and launches. Two phases of similar work hardly tell the two apart, so each factor is drawn to their
common one (ridge regression: Hoerl and Kennard 1970). The time of copies and collectives is not corrected.
"""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy

from remat.config import command_line, compose, ds_config, resumed
from remat.config.metrics import phase_s, read_rows
from remat.config.options import ConfigError, HardwareConfig, Policy, RunConfig
from remat.machine import gpus
from remat.machine.gpus import GPU_RATES
from remat.planning import budget
from remat.planning.plan import Planned, Recordings, make_plan
from remat.planning.step_time import seconds_by_bound

PHASES = ("forward", "backward", "optimizer")
FILE = "checkpointing_table_retuned.json"  # in the folder of the run's table
DRAWN = 0.1  # weight of the common factor against the fit of a phase
SLOWEST_PART = 0.1  # no factor is less than this share of the common one
DIGITS = 4


@dataclass(frozen=True)
class Retuned:
    """The result of a retune. `planned` and `measured` are the seconds of a step of the run by phase.

    `before` is the plan of the run as it was carried out, `now` that of the tables chosen again. Both are priced at the
    corrected rates. `overrides` set the new tables and rates; the table is at `path`.
    """

    planned: Mapping[str, float]
    measured: Mapping[str, float]
    before: Planned
    now: Planned
    path: Path
    overrides: list[str]

    @property
    def tables_differ(self) -> bool:
        return self.before.strategy.decisions != self.now.strategy.decisions


@dataclass(frozen=True)
class _Record:
    """What a launch left: its options, with the machine that it ran on, and the measured seconds of its phases."""

    folder: Path
    cfg: RunConfig
    measured: dict[str, float]
    on_gpu: bool


def retune(run_dir: Path) -> Retuned:
    """Correct the rates by the measurements of the run, choose its tables again and write them beside the old ones.

    Raises ConfigError for a run without a budget, without measured phases, or on a machine whose rates are not known.
    """
    record = _read(run_dir)
    given = record.folder / budget.FILE
    as_it_was = _with_table(record.cfg, given)
    plan = partial(make_plan, recordings=Recordings(), on_gpu=record.on_gpu)
    planned = plan(as_it_was)
    if planned.time.unknown:
        remedy = "measure it by `remat calibrate`, and train with that hardware"
        if not record.on_gpu:
            names = ", ".join(GPU_RATES)
            remedy = f"it ran on CPUs, so give rates of those (hardware.gpu_rates.{names}) and train again"
        raise ConfigError(
            f"{run_dir}: its seconds were not planned, for {', '.join(planned.time.unknown)} is not known on the "
            f"machine of the run: {remedy}"
        )
    rates = _corrected(planned, record.measured)
    hardware = _with_rates(record.cfg.hardware, rates)
    before = plan(replace(as_it_was, hardware=hardware))
    now = plan(replace(_with_table(record.cfg, None), hardware=hardware))
    path = record.folder / FILE
    path.write_text(json.dumps(now.table, indent=2) + "\n")
    overrides = [budget.CHOICE, f"checkpointing.table={path}", *_words(rates)]
    return Retuned(planned.time.phases_s, record.measured, before, now, path, overrides)


def as_json(found: Retuned) -> dict[str, Any]:
    """Return the result as plain data."""
    return {
        "planned_s": dict(found.planned),
        "measured_s": dict(found.measured),
        "corrected_s": dict(found.before.time.phases_s),
        "step_time_s": {"before": found.before.time.total_s, "now": found.now.time.total_s},
        "tables_differ": found.tables_differ,
        "table": str(found.path),
        "overrides": found.overrides,
    }


def _read(run_dir: Path) -> _Record:
    folder = resumed.find_config(run_dir).parent
    cfg = compose.from_command_line([command_line.override("resume", str(run_dir))]).run
    if cfg.checkpointing.policy is not Policy.budget:
        raise ConfigError(
            f"{run_dir}: checkpointing={cfg.checkpointing.policy} has no table to choose again; train with "
            "checkpointing=budget"
        )
    if cfg.train.pipeline_parallel_size > 1:
        raise ConfigError(
            f"{run_dir}: its layers are divided into {cfg.train.pipeline_parallel_size} stages, and the seconds of a "
            "phase contain waits for other stages; retune a run with train.pipeline_parallel_size=1"
        )
    if not (folder / budget.FILE).is_file():
        raise ConfigError(f"{folder} has no {budget.FILE}: the run ended before its tables were chosen")
    plan = json.loads((folder / "plan.json").read_text())
    words = shlex.split(plan["command"])
    own = HardwareConfig().__dataclass_fields__
    machine = [
        word
        for word in words
        if word.startswith("hardware.") and word.partition("=")[0].removeprefix("hardware.") in own
    ]
    here = compose.from_command_line([command_line.override("resume", str(run_dir)), *machine]).run
    return _Record(folder, replace(cfg, hardware=here.hardware), _measured(folder), plan["device"] == "cuda")


def _measured(folder: Path) -> dict[str, float]:
    """Return the seconds of each phase: the mean in the ledger, or else the median of the logged rows after the first.

    The ledger of a launch that resumed for a single step has no such means.
    """
    ledger = folder / "ledger.json"
    files = (place / "metrics.jsonl" for place in (folder, folder.parent))  # of all launches there is one
    rows = next((file for file in files if file.is_file()), None)
    found: dict[str, float | None] = {}
    if rows is not None:
        later = read_rows(rows)[1:]
        for phase in PHASES:
            logged = [row[phase_s(phase)] for row in later if phase_s(phase) in row]
            found[phase] = statistics.median(logged) if logged else None
    if ledger.is_file():
        mean = {row["category"]: row["measured"] for row in json.loads(ledger.read_text())["rows"]}
        found |= {phase: mean[phase] for phase in PHASES if mean.get(phase)}
    measured = {phase: seconds for phase in PHASES if (seconds := found.get(phase))}
    if len(measured) < len(PHASES):
        raise ConfigError(
            f"{folder} has no measured seconds of {', '.join(p for p in PHASES if p not in measured)}: the first step "
            "is not counted, so train at least two, or log a second row"
        )
    return measured


def _with_table(cfg: RunConfig, path: Path | None) -> RunConfig:
    table = None if path is None else str(path)
    return replace(cfg, checkpointing=replace(cfg.checkpointing, table=table))


def _corrected(planned: Planned, measured: Mapping[str, float]) -> dict[str, float]:
    """Return the rates, named as in HardwareConfig and gpu_rates, at which planned times match the measured ones."""
    machine = gpus.machine(planned.cfg.hardware)
    steps = planned.strategy.ds["gradient_accumulation_steps"]
    parts = seconds_by_bound(planned.simulation, machine)
    rows, wanted = [], []
    for phase in ("forward", "backward"):
        arithmetic, traffic = (steps * seconds for seconds in parts[phase])
        waits = planned.time.phases_s[phase] - arithmetic - traffic
        own = max(measured[phase] - waits, SLOWEST_PART * (arithmetic + traffic))
        rows.append([arithmetic / own, traffic / own])
        wanted.append(1.0)
    common = len(rows) / sum(map(sum, rows))
    rows += [[DRAWN / common, 0.0], [0.0, DRAWN / common]]
    fitted, *_ = numpy.linalg.lstsq(numpy.array(rows), numpy.array([*wanted, DRAWN, DRAWN]), rcond=None)
    slower = [max(float(factor), SLOWEST_PART * common) for factor in fitted]
    factors = dict(zip(GPU_RATES, (1 / slower[0], 1 / slower[0], 1 / slower[1], slower[1]), strict=True))
    found = {name: factor * getattr(machine, name) for name, factor in factors.items()}
    if machine.cpu_adam_gparams_s and ds_config.optimizer_offload_device(planned.strategy.ds):
        others = planned.time.phases_s["optimizer"] - planned.time.optimizer_s
        own = max(measured["optimizer"] - others, SLOWEST_PART * planned.time.optimizer_s)
        found["cpu_adam_gparams_s"] = machine.cpu_adam_gparams_s * planned.time.optimizer_s / own
    return {name: float(f"{rate:.{DIGITS}g}") for name, rate in found.items()}


def _with_rates(cfg: HardwareConfig, rates: Mapping[str, float]) -> HardwareConfig:
    adam = rates.get("cpu_adam_gparams_s", cfg.cpu_adam_gparams_s)
    own = {name: rate for name, rate in rates.items() if name in GPU_RATES}
    return replace(cfg, gpu_rates={**cfg.gpu_rates, **own}, cpu_adam_gparams_s=adam)


def _words(rates: Mapping[str, float]) -> list[str]:
    return [
        f"++hardware.gpu_rates.{name}={rate:g}" if name in GPU_RATES else f"hardware.{name}={rate:g}"
        for name, rate in rates.items()
    ]
