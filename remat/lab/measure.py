"""Read a launch's measurements from its files: memory, time, loss, and planned against measured bytes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from remat.config.metrics import GPU_ALLOCATED_PEAK_GIB, LOSS_EVAL, LOSS_TRAIN, STEP_S, TOKENS_PER_S, phase_s
from remat.config.units import GIB, MIB
from remat.launch import exit_codes
from remat.planning.plan import CATEGORY_OF
from remat.planning.simulation.peaks import IN_BACKWARD
from remat.planning.simulation.types import Category, Phase
from remat.report.tracking import read_metrics
from remat.training.ledger import KEPT, MICRO_BATCH, OFF_GPU
from remat.training.proof import LEARNT

UNITS = {"GiB": GIB, "MiB": MIB, "%": 1, "s": 1, "tokens/s": 1}
IN_HOST_MEMORY = " in host memory"
HELD = {  # rows of the ledger that are model states
    f"{category}{place}"
    for category in (Category.weights, Category.gradients, Category.buckets, Category.optimizer_state)
    for place in (" on the GPU", IN_HOST_MEMORY)
}
RECOMPUTED = "recomputed FLOPs, of forward"
PEAK_CUDA = "torch.cuda.max_memory_allocated, highest rank"
PEAK_CPU = (
    "counted peak, CPU: the model states that a GPU would hold, from the storages of the engine's tensors, and the "
    "most that was alive of what a micro-batch allocates, counted op by op; where the optimizer step needs more, that "
    "as planned, for it is not counted"
)
UPDATE = str(Phase.step)
TIMES = ("step", "data", "forward", "backward", "optimizer")
FINISHED, OUT_OF_MEMORY, DOES_NOT_FIT, FAILED = "finished", "out of memory", "does not fit", "failed"
REFUSED, NOT_LAUNCHED = "refused", "not launched"
RAN_OUT = re.compile(r"out of (?:GPU|host) memory in .+ on rank \d+")
KILLED = re.compile(r"rank \d+ was killed \(SIGKILL\).*counts [1-9]\d* out-of-memory kill.*")
SAYS = re.compile(r"^remat(?: \(rank \d+\))?: (.+)$", re.MULTILINE)
# ends the message of a run that is refused because its plan does not fit
STILL = "Start anyway with force=true"


@dataclass(frozen=True)
class Ended:
    """How a launch ended: finished, out of memory, does not fit, refused or failed; and its message."""

    status: str
    words: str = ""


@dataclass(frozen=True)
class Figures:
    """Bytes of the rank with the most, losses in nats per token; None is unknown.

    `counted_bytes` is the measured peak, `counted_planned_bytes` was planned for the same moment. `peak_bytes` is
    higher where the optimizer step needs more (`peak_in_update`): on CPUs that excess is planned, not measured.
    """

    peak_bytes: int | None = None
    counted_bytes: int | None = None
    counted_planned_bytes: int | None = None
    peak_in_update: bool = False
    kept_bytes: int | None = None
    kept_planned_bytes: int | None = None
    kept_bytes_per_layer: list[int] = field(default_factory=list)
    moved_bytes: int = 0
    micro_batch_bytes: int | None = None
    states_bytes: dict[str, int] = field(default_factory=dict)  # measured, by category and place
    off_gpu_bytes: int = 0  # model states that the strategy keeps off the GPU
    recomputed_percent: float | None = None
    loss: list[tuple[int, float]] = field(default_factory=list)
    eval_loss: float | None = None
    ledger: list[dict[str, Any]] = field(default_factory=list)
    in_words: str = ""


@dataclass(frozen=True)
class Measured(Figures):
    """The figures of one launch. `steps` has the seconds of each steady step, in all and of its parts (`TIMES`)."""

    peak_how: str = ""
    steps: dict[str, list[float]] = field(default_factory=dict)
    first_steady_step: int = 0
    tokens_per_s: list[float] = field(default_factory=list)


def ended(code: int, text: str) -> Ended:
    """Classify a launch by exit code and output; for failures also return the first line of the error.

    `text` is the whole output of the launch.
    """
    said = SAYS.findall(text)
    first = said[0] if said else f"exit code {code}, without a word of remat's own"
    if code == 0:
        return Ended(FINISHED)
    if code == exit_codes.FAILED and (ran_out := RAN_OUT.search(text)):
        return Ended(OUT_OF_MEMORY, ran_out.group())
    if code == exit_codes.KILLED and (killed := KILLED.search(text)):
        return Ended(OUT_OF_MEMORY, killed.group())
    if code == exit_codes.CONFIG:
        return Ended(REFUSED, first)
    if code == exit_codes.NOT_ABLE and STILL in text and (short := _refusal(text)):
        return Ended(DOES_NOT_FIT, short)
    return Ended(FAILED, f"exit code {code}: {first}" if said else first)


def _refusal(text: str) -> str:
    """Return what is too small and by how much: the lines of a refusal that begin with a dash."""
    return "; ".join(dict.fromkeys(re.findall(r"^- (.+)$", text.partition(STILL)[0], re.MULTILINE)))


def read(folder: Path) -> Measured:
    """Read the folder of a finished run. Raises ValueError when the run did not finish."""
    ledger, plan, proof = (_json(folder / name) for name in ("ledger.json", "plan.json", "proof.json"))
    rows = read_metrics(folder)
    figures = {row["category"]: (_plain(row, "planned"), _plain(row, "measured")) for row in ledger["rows"]}
    accumulated = int(_json(folder / "ds_config.json")["gradient_accumulation_steps"])
    steady, first = _steady(rows, proof["zero_stage"], accumulated)
    evals = _finite(rows, LOSS_EVAL)
    return replace(
        _peak(figures, plan, rows, proof["zero_stage"]),
        kept_bytes=_whole(figures[KEPT][1]),
        kept_planned_bytes=_whole(figures[KEPT][0]),
        kept_bytes_per_layer=ledger["kept_bytes_per_layer"]["measured"] or [],
        moved_bytes=sum(layer["moved_bytes"] // max(1, layer["forwards"]) for layer in proof["layers"]),
        micro_batch_bytes=_whole(figures[MICRO_BATCH][1]),
        states_bytes=_held(figures),
        off_gpu_bytes=sum(_off_gpu(plan).values()),
        recomputed_percent=figures[RECOMPUTED][1],
        steps={name: [row[phase_s(name)] for row in steady] for name in TIMES},
        first_steady_step=first,
        tokens_per_s=[row[TOKENS_PER_S] for row in steady],
        loss=_finite(rows, LOSS_TRAIN),
        eval_loss=evals[-1][1] if evals else None,
        ledger=ledger["rows"],
        in_words=proof["in_words"],
    )


def _peak(
    figures: Mapping[str, tuple[float | None, float | None]],
    plan: Mapping[str, Any],
    rows: list[dict[str, float]],
    zero_stage: int,
) -> Measured:
    """Return the fields of the peak."""
    planned = plan["planned"] or {}
    if plan["device"] == "cuda":
        peaks = [row[GPU_ALLOCATED_PEAK_GIB] for row in rows if GPU_ALLOCATED_PEAK_GIB in row]
        highest = _whole(GIB * max(peaks)) if peaks else None
        expected = planned.get("gpu_allocated_peak_bytes")
        return Measured(highest, highest, expected, peak_how=PEAK_CUDA)
    counted = _counted(figures, plan, zero_stage)
    states = sum(
        item["bytes_per_rank"]
        for item in plan["model_states"]
        if item["place"] == "gpu" and (zero_stage == 3 or item["name"] not in IN_BACKWARD)
    )
    expected = states + planned["micro_batch_peak_bytes"] if planned else None
    update = planned["gpu_allocated_peak_bytes"] if planned and planned["peak"]["phase"] == UPDATE else 0
    if counted is not None and update > counted:
        return Measured(update, counted, expected, peak_in_update=True, peak_how=PEAK_CPU)
    return Measured(counted, counted, expected, peak_how=PEAK_CPU)


def _counted(
    figures: Mapping[str, tuple[float | None, float | None]], plan: Mapping[str, Any], zero_stage: int
) -> int | None:
    """Return the counted peak: model states that a GPU would hold plus the peak of a micro-batch.

    Below stage 3 gradients exist only during backward, so they count to the micro-batch.
    """
    held, off, micro_batch = _held(figures), _off_gpu(plan), figures[MICRO_BATCH][1]
    if micro_batch is None or not held:
        return None
    categories = {Category.weights, Category.optimizer_state}
    if zero_stage == 3:
        categories |= {Category.gradients, Category.buckets}
    on_gpu = sum(
        max(0, held.get(f"{category}{IN_HOST_MEMORY}", 0) - off.get(str(category), 0))
        for category in categories
    )
    return on_gpu + int(micro_batch)


def _held(figures: Mapping[str, tuple[float | None, float | None]]) -> dict[str, int]:
    """Return the measured bytes of the model states by category and place."""
    return {
        name: int(measured) for name, (_, measured) in figures.items() if measured is not None and name in HELD
    }


def _off_gpu(plan: Mapping[str, Any]) -> dict[str, int]:
    """Return the planned bytes of the model states that the strategy keeps in host memory, by category."""
    found: dict[str, int] = {}
    for item in plan["model_states"]:
        if item["place"] != "gpu":
            category = str((CATEGORY_OF | OFF_GPU).get(item["name"], Category.buckets))
            found[category] = found.get(category, 0) + item["bytes_per_rank"]
    return found


def _steady(
    rows: list[dict[str, float]], zero_stage: int, micro_batches: int
) -> tuple[list[dict[str, float]], int]:
    """Return the rows after the last step that is traced op by op, and the number of the first steady step.

    The first step is traced, and under ZeRO-3 also the step of the fourth micro-batch.
    """
    watched = math.ceil((LEARNT + 1) / micro_batches) if zero_stage == 3 else 1
    timed = [row for row in rows if STEP_S in row]
    before = [0.0, *(row["step"] for row in timed)]  # a row's times are means since the row before
    return [row for row, since in zip(timed, before, strict=False) if since >= watched], watched + 1


def _finite(rows: list[dict[str, float]], name: str) -> list[tuple[int, float]]:
    """Return steps and values of a metric. A step that was skipped has the loss NaN and is left out."""
    return [(int(row["step"]), row[name]) for row in rows if math.isfinite(row.get(name, math.nan))]


def _plain(row: Mapping[str, Any], side: str) -> float | None:
    """Return the figure `side` of a ledger row, in bytes where its unit is one of memory."""
    value = row[side]
    return None if value is None else value * UNITS[row["unit"]]


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not what a run writes")
    return content
