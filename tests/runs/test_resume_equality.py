"""N steps = k steps, a save, a resume, N - k steps: the same data, losses to the last bit, and weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny
from tests.support.grids import cases, chosen
from tests.support.launcher import deepspeed

pytestmark = pytest.mark.launch
Ran = dict[str, dict[str, Any]]

STRATEGIES = ["zero2", "zero2_offload", "zero3", "zero3_offload_optimizer"]
METRICS = [
    "step",
    "loss/train",
    "loss/eval",
    "optim/lr",
    "optim/grad_norm",
    "optim/loss_scale",
    "optim/skipped_steps",
    "tokens/seen",
    "tokens/trained",
]
SPREAD = ["train.global_batch_size=8", "train.micro_batch_size=1"]  # four micro-batches a step and rank
ALL_ROWS = ["data.eval_fraction=0", "data.packing=none"]  # 40 samples an epoch


@dataclass(frozen=True)
class Point:
    """Where a run of `steps` is saved: after `at` of them. Faults are those of faulty_runs.py, steps of a launch."""

    words: str
    at: int
    steps: int
    options: list[str]
    asked: list[str] = field(default_factory=list)  # what ends the first part, if no fault does
    fault: list[dict[str, Any]] = field(default_factory=list)  # of the first part
    whole_fault: list[dict[str, Any]] = field(default_factory=list)
    rest_fault: list[dict[str, Any]] = field(default_factory=list)


EVALUATED = [*SPREAD, "data.eval_fraction=0.2", "train.eval_every=3"]
AFTER_EVALUATION = Point("directly after an evaluation", 3, 5, EVALUATED, ["train.stop_at=3"])
ASKED = {"what": "SIGTERM", "rank": 1, "at": "step 3 2"}
IN_ACCUMULATION = Point("stopped in the second of four micro-batches", 3, 5, EVALUATED, fault=[ASKED])
EPOCH_END = Point("at the end of an epoch", 5, 7, [*SPREAD, *ALL_ROWS], ["train.stop_at=5"])
WRAPS = Point(
    "before a step over two epochs",
    3,
    5,
    ["train.global_batch_size=12", "train.micro_batch_size=2", *ALL_ROWS],
    ["train.stop_at=3"],
)


BETWEEN_ROWS = Point(
    "between two rows of the record", 3, 6, [*SPREAD, "train.log_every=4"], ["train.stop_at=3"]
)


def overflow(step: int) -> dict[str, Any]:
    return {"what": "inf gradient", "rank": 1, "at": f"step {step}"}


FP16 = Point(
    "after a step skipped for overflow",
    3,
    6,
    ["train.precision=fp16", "train.micro_batch_size=1", "deepspeed.overrides.fp16.initial_scale_power=8"],
    ["train.stop_at=3"],
    fault=[overflow(2)],
    whole_fault=[overflow(2), overflow(4)],
    rest_fault=[overflow(1)],
)


SOURCES = "data.mix={rows: {path: WORKSHOP/data.jsonl}, texts: {path: WORKSHOP/texts.jsonl, format: plain, weight: 2}}"
MIXED = Point(
    "in a mixture of rows and text, before a step over two epochs",
    3,
    5,
    [*EVALUATED, "data.path=null", "data.format=auto", SOURCES],
    ["train.stop_at=3"],
)
STREAM = [*SPREAD, "train.eval_every=3", "data.streaming=true", "data.eval_fraction=0.05", "data.eval_rows=8"]
STREAMED = Point("in a stream, in its third epoch, in a second micro-batch", 3, 5, STREAM, fault=[ASKED])
POINTS = [AFTER_EVALUATION, IN_ACCUMULATION, EPOCH_END, WRAPS, FP16, BETWEEN_ROWS, MIXED, STREAMED]


def runs(workshop: Path, point: Point, strategy: str, part: str) -> dict[str, Any]:
    """The `whole` run, the `first` part of the other or the `rest` of it. Points of equal options share the whole."""
    as_point = [p.options for p in POINTS].index(point.options) if part == "whole" else POINTS.index(point)
    name = f"{'whole' if part == 'whole' else 'parts'}_{strategy}_{as_point}"
    words = [f"train.steps={point.steps}", f"deepspeed.config={strategy}", *point.options]
    words = [word.replace("WORKSHOP", str(workshop)) for word in words]
    more = {"whole": [], "first": point.asked, "rest": ["resume=auto"]}[part]
    fault = {"whole": point.whole_fault, "first": point.fault, "rest": point.rest_fault}[part]
    return {"name": name, "words": tiny.words(workshop, name, *words, *more), "fault": fault}


def launch(workshop: Path, spec: list[dict[str, Any]], script: str = "faulty_runs") -> list[dict[str, Any]]:
    """What became of each run of `spec`; one that is in it twice is run once."""
    path = workshop / "spec.json"
    asked = [json.dumps(run) for run in spec]
    path.write_text(f"[{', '.join(dict.fromkeys(asked))}]")
    done = deepspeed(str(path), script=f"tests/support/{script}.py")
    assert done.code == 0, done.out[-6000:]
    became = dict(zip(dict.fromkeys(asked), json.loads((workshop / "spec.done.json").read_text()), strict=True))
    return [became[run] for run in asked]


def record(folder: Path) -> list[str]:
    """The rows of a run's metrics.jsonl, without times and bytes; NaN is equal to NaN."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        json.dumps({key: row[key] for key in METRICS if key in row}, sort_keys=True)
        for row in found
        if "loss/train" in row or "loss/eval" in row
    ]


def check(out: Path, point: Point, whole: dict[str, Any], first: dict[str, Any], rest: dict[str, Any]) -> None:
    assert [run["error"] for run in (whole, first, rest)] == [None] * 3
    assert [run["finished"] for run in (whole, first, rest)] == [True, False, True]
    assert len(first["sample_ids"]) == point.at and len(whole["sample_ids"]) == point.steps
    assert first["sample_ids"] + rest["sample_ids"] == whole["sample_ids"]
    for rank in range(2):
        parts = first["micro_batches"][rank] + rest["micro_batches"][rank]
        assert parts == whole["micro_batches"][rank]
        assert len(parts) % point.steps == 0 and len(parts) > point.steps, (
            "one micro-batch a step shows nothing"
        )
    rows = record(out / whole["name"] / "run")
    found = record(out / first["name"] / "run")
    if point is BETWEEN_ROWS:  # the stop's own row is one more; those after it hold the steps before it
        assert [json.loads(row)["step"] for row in rows] == [4, 6]
        assert json.loads(found.pop(0))["step"] == point.at
    else:
        assert sum("loss/train" in row for row in rows) == point.steps
    assert found == rows
    if point.options in (EVALUATED, STREAM):  # before step 1, after steps 3 and 5, each once
        assert sum("loss/eval" in row for row in rows) == 3
    assert rest["weights"] == whole["weights"]
    assert first["weights"] != whole["weights"]
    states = [path.name for path in (out / first["name"] / "run" / "saved").iterdir()]
    assert states == [f"step-{point.at:06d}"]


HERE = {
    f"{strategy} {point.words}": (point, strategy)
    for point, strategy in (
        (IN_ACCUMULATION, "zero2_offload"),
        (AFTER_EVALUATION, "zero3"),
        (BETWEEN_ROWS, "zero2_offload"),
        (MIXED, "zero3"),
        (STREAMED, "zero2_offload"),
    )
}
REST = {f"zero3 {AFTER_EVALUATION.words}"} | {
    f"zero2_offload {p.words}" for p in (IN_ACCUMULATION, BETWEEN_ROWS)
}


@pytest.fixture(scope="module")
def in_one_process(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    workshop = tiny.make_workshop(tmp_path_factory.mktemp("resume"))
    names = sorted(chosen(request))
    done = launch(
        workshop, [runs(workshop, *HERE[name], part) for name in names for part in ("whole", "first", "rest")]
    )
    return workshop / "out", {name: done[3 * at : 3 * at + 3] for at, name in enumerate(names)}


@pytest.mark.parametrize("name", cases(HERE, REST))
def test_k_steps_and_the_rest_are_n_steps(
    in_one_process: tuple[Path, dict[str, list[dict[str, Any]]]], name: str
) -> None:
    out, done = in_one_process
    check(out, HERE[name][0], *done[name])


FRESH = [(point, s) for point in (AFTER_EVALUATION, IN_ACCUMULATION, EPOCH_END, WRAPS) for s in STRATEGIES]


@pytest.mark.slow_fault
def test_in_a_fresh_process_everywhere(tmp_path: Path) -> None:
    workshop = tiny.make_workshop(tmp_path)
    begun = launch(workshop, [runs(workshop, *cell, part) for cell in FRESH for part in ("whole", "first")])
    rests = launch(workshop, [runs(workshop, *cell, "rest") for cell in FRESH])
    for (point, _), whole, first, rest in zip(FRESH, begun[::2], begun[1::2], rests, strict=True):
        check(tmp_path / "out", point, whole, first, rest)
        if point in (EPOCH_END, WRAPS):
            steps = whole["sample_ids"]
            within = 40 // len(
                steps[0]
            )  # the steps of the first epoch alone; the next may begin the second one too
            seen = [one for ids in steps[:within] for one in ids]
            missing = set(range(40)) - set(seen)
            assert len(seen) + len(missing) == 40, "the first epoch has no sample twice"
            assert missing <= set(steps[within]), "the first epoch has each sample"
            assert (sum(map(len, first["sample_ids"])) == 40) == (point is EPOCH_END)


@pytest.mark.slow_fault
def test_fp16_goes_on_with_its_loss_scale(tmp_path: Path) -> None:
    """The second overflow halves the scale only if the one before the save is remembered (DeepSpeed's hysteresis)."""
    workshop = tiny.make_workshop(tmp_path)
    parts = ("whole", "first")
    begun = launch(workshop, [runs(workshop, FP16, s, part) for s in STRATEGIES for part in parts], "fp16_runs")
    rests = launch(workshop, [runs(workshop, FP16, strategy, "rest") for strategy in STRATEGIES], "fp16_runs")
    for whole, first, rest in zip(begun[::2], begun[1::2], rests, strict=True):
        check(tmp_path / "out", FP16, whole, first, rest)
        rows = tiny.rows(tmp_path / "out" / first["name"] / "run")
        assert [row["optim/skipped_steps"] for row in rows] == [0, 1, 1, 2, 2, 2]
        assert [row["optim/loss_scale"] for row in rows] == [256.0] * 3 + [128.0] * 3
