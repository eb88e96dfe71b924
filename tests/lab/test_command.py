"""`remat compare`: what is launched, in which turns, what is known already. No launches here: those are played."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from remat import cli
from remat.config import command_line, compose
from remat.config.options import ConfigError
from remat.config.units import MIB
from remat.lab import cache_key, charts, command, experiment, figures, launch, measure, publish, schedule
from remat.lab.cache_key import Place
from remat.lab.experiment import Experiment
from remat.lab.launch import Result, Slot
from remat.lab.measure import Measured
from remat.launch import supervisor
from remat.machine.owner_lock import OwnerLock
from remat.planning.launch_plan import LaunchPlan
from remat.training.out_of_memory import Measured as Memory
from remat.training.out_of_memory import OutOfMemory

CPU = Place(
    "cpu", {"cpu": "a cpu", "cores": 2, "host_memory_gib": 8.0, "threads_per_rank": 1, "gpu": None, "gpus": 0}
)
WORDS = ["recipe=tiny_zero3_offload", "checkpointing=none,full"]
LAB = """
title: A title
question: A question?
claims: [B0]
base: [recipe=tiny_zero3_offload, train.steps=5]
cpu: {overrides: [train.seq_len=64], reduction: shorter}
gpu: {overrides: [train.seq_len=4096], ranks: 4}
points:
  - {name: one, overrides: [checkpointing=none], cpu: [train.micro_batch_size=1]}
  - {name: two, overrides: ["checkpointing=full,none", "train.seed=1,2"]}
baseline: one
"""


def lab(tmp_path: Path, text: str = LAB) -> list[Path]:
    (tmp_path / "lab").mkdir(exist_ok=True)
    (tmp_path / "lab" / "mine.yaml").write_text(text)
    return [tmp_path]


def names(made: Experiment) -> list[str]:
    return [point.name for point in made.points]


# What is compared


def test_words_with_commas_are_points_and_the_first_is_the_baseline() -> None:
    made = experiment.written([*WORDS, "train.seq_len=64,128"], "cpu")
    assert names(made) == ["none, seq_len=64", "none, seq_len=128", "full, seq_len=64", "full, seq_len=128"]
    assert [p.baseline for p in made.points] == ["none, seq_len=64", "none, seq_len=128"] * 2
    assert made.name == "tiny_zero3_offload-checkpointing-seq_len"
    assert {"recipe=tiny_zero3_offload", "checkpointing=full", "train.seq_len=64", "save.at_end=false"} <= set(
        made.points[2].words
    )
    assert made.points[2].own == ("checkpointing=full", "train.seq_len=64")


@pytest.mark.parametrize(
    ("asked", "length"),
    [((), (8, None)), (("train.epochs=0.5",), (None, 0.5)), (("train.epochs=2", "train.steps=4"), (4, None))],
)
def test_the_length_that_is_given_last_replaces_the_eight_steps(
    asked: tuple[str, ...], length: tuple[int | None, float | None]
) -> None:
    found = experiment.written(
        ["checkpointing=none,full", "recipe=llama1b_full_1x24", "data.path=x", *asked], "cpu"
    )
    for point in found.points:
        train = compose.compose_run([*point.words]).run.train
        assert (train.steps, train.epochs) == length


def test_a_baseline_leaves_out_what_belongs_to_the_option() -> None:
    points = [
        ("plain", ["checkpointing=none"], []),
        ("every third", ["checkpointing=interval", "checkpointing.interval=3"], []),
    ]
    made = experiment._points(points, [], [], "checkpointing=none", [])
    assert [point.baseline for point in made] == ["plain", "plain"]


@pytest.mark.parametrize(
    ("baseline", "text"), [("nowhere", "points: none; full"), ("checkpointing=uniform", "no point is none")]
)
def test_a_baseline_that_is_no_point_is_refused(baseline: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        experiment.written(WORDS, "cpu", baseline=baseline)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ConfigError, match="remat compare: no word lists values"):
        experiment.written(["recipe=tiny_zero3_offload"], "cpu")
    with pytest.raises(ConfigError, match="run_id=3: remat compare chooses"):
        experiment.written([*WORDS, "run_id=3"], "cpu")
    with pytest.raises(ConfigError, match="two points are called none"):
        experiment.written(["checkpointing=none,none"], "cpu")


def test_a_named_experiment_at_the_size_of_the_machine(tmp_path: Path) -> None:
    small = experiment.named("mine", ["train.seed=9"], "cpu", lab(tmp_path))
    large = experiment.named("mine", [], "cuda", lab(tmp_path))
    assert names(small)[:2] == ["one", "two, full, seed=1"] and len(small.points) == 5
    words = small.points[0].words
    assert {"train.steps=5", "train.seq_len=64", "train.micro_batch_size=1", "train.seed=9"} <= set(words)
    assert "train.steps=8" not in words, "of two words for one option the last counts"
    assert "train.seed=9" in small.points[1].words and "train.seed=1" not in small.points[1].words
    assert (small.reduction, small.ranks, large.reduction, large.ranks) == ("shorter", 1, "", 4)
    assert "train.seq_len=4096" in large.points[0].words
    assert "train.micro_batch_size=1" not in large.points[0].words
    assert {point.baseline for point in small.points} == {"one"}
    assert small.points[0].own == ("checkpointing=none", "train.micro_batch_size=1")
    assert large.points[0].own == ("checkpointing=none",)


def test_points_that_differ_in_their_size_alone_have_baselines_of_their_own() -> None:
    axis = ["checkpointing=none,full", "train.seq_len=512"]
    points = [
        (f"{length}, {label}", words, [f"train.seq_len={length}"])
        for length in (64, 128)
        for label, words in experiment.axes(axis)
    ]
    made = experiment._points(points, [], [], "checkpointing=none", [])
    assert [point.baseline for point in made] == ["64, none", "64, none", "128, none", "128, none"]


def test_every_problem_of_a_file_in_one_message(tmp_path: Path) -> None:
    broken = "title: 3\npoints:\n  - {nmae: one, overrides: [1]}\nrepeat: 2\ncpu: {ranks: many}\n"
    with pytest.raises(ConfigError) as caught:
        experiment.named("mine", [], "cpu", lab(tmp_path, broken))
    for text in (
        "title=3",
        "question: missing",
        "points[0].nmae",
        "points[0].name: missing",
        "repeat:",
        "cpu.ranks",
    ):
        assert text in str(caught.value), text


def test_a_reduced_size_must_be_stated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cpu\.reduction: say in a sentence"):
        experiment.named("mine", [], "cpu", lab(tmp_path, LAB.replace(", reduction: shorter", "")))


def test_an_unknown_experiment_lists_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"lab=seed_b8x: .*did you mean seed_b8.*choices: .*seed_b8"):
        experiment.named("seed_b8x", [], "cpu")


@pytest.mark.sample(one_in=6)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", experiment.names())
def test_every_shipped_experiment_composes(name: str, device: str) -> None:
    made = experiment.named(name, [], device)
    assert made.question.endswith("?") and (device == "cuda" or made.reduction)
    for point in made.points:
        compose.compose_run(list(point.words))


def test_experiments_are_no_group_of_a_run() -> None:
    assert "lab" not in compose.group_choices()
    with pytest.raises(ConfigError, match="no such option"):
        compose.compose_run(["lab=seed_b8"])


@pytest.mark.parametrize(
    ("text", "folder"),
    [("small, none", "small-none"), ("512", "p-512"), ("null", "p-null"), ("{0: a}", "p-0-a")],
)
def test_folders_stay_text(text: str, folder: str) -> None:
    assert experiment.slug(text) == folder
    assert compose.compose_run([f"name={experiment.slug(text)}"]).run.name == folder


# What is launched


class Launches:
    """Plays launches, remembers their turns and stores their results; `endings` by point, `stop_at` a Ctrl-C."""

    def __init__(self) -> None:
        self.turns: list[tuple[str, int]] = []
        self.endings: dict[str, str] = {}
        self.stop_at = -1

    def __call__(self, slot: Slot, key: str, ranks: int, place: Place) -> Result:
        if len(self.turns) == self.stop_at:
            raise KeyboardInterrupt
        self.turns.append((slot.point.name, slot.repeat))
        status = self.endings.get(slot.point.name, "finished")
        measured = Measured(
            peak_bytes=2**20, steps={name: [1.0, 2.0] for name in measure.TIMES}, loss=[(1, 0.5)], kept_bytes=3
        )
        made = Result(
            key,
            slot.point.name,
            slot.repeat,
            status,
            "words",
            seconds=10.0,
            measured=measured if status == "finished" else None,
        )
        slot.result.parent.mkdir(parents=True, exist_ok=True)
        slot.result.write_text(json.dumps(dataclasses.asdict(made)))
        return made


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    played = Launches()
    monkeypatch.setattr(launch, "launch", played)
    monkeypatch.setattr(cache_key, "here", lambda ranks: CPU)
    return played


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pictures, which take a second each time, are of other tests."""
    monkeypatch.setattr(charts, "draw", lambda *_: {})


@contextmanager
def silent(total: int) -> Iterator[schedule.Lines]:
    yield schedule.Lines(total, lambda text: None)


def test_points_take_turns(launches: Launches, tmp_path: Path) -> None:
    made = dataclasses.replace(experiment.written(WORDS, "cpu"), repeats=2)
    outcome = schedule.run(made, tmp_path, CPU, silent)
    assert launches.turns == [("none", 1), ("full", 1), ("none", 2), ("full", 2)]
    assert outcome.launched == 4 and [r.repeat for r in outcome.results] == [1, 1, 2, 2]


def test_what_is_known_is_not_launched_again(launches: Launches, tmp_path: Path) -> None:
    launches.endings = {"none": "out of memory"}
    made = experiment.written(WORDS, "cpu")

    def launched(how: Experiment = made, place: Place = CPU, fresh: bool = False) -> int:
        return schedule.run(how, tmp_path, place, silent, fresh=fresh).launched

    assert launched() == 4
    assert launched() == 0, "running out of memory is a result"
    assert launched(dataclasses.replace(made, repeats=3)) == 2, "the new repeats alone"
    assert launched(fresh=True) == 4
    assert launched(experiment.written([*WORDS, "train.seed=7"], "cpu")) == 4, "another configuration"
    assert launched(place=dataclasses.replace(CPU, hardware=CPU.hardware | {"cores": 64})) == 4, (
        "another machine"
    )


@pytest.mark.parametrize("ending", ["failed", "refused", "does not fit"])
def test_what_failed_or_did_not_fit_is_tried_again(launches: Launches, tmp_path: Path, ending: str) -> None:
    launches.endings = {"full": ending}
    made = dataclasses.replace(experiment.written(WORDS, "cpu"), repeats=1)
    schedule.run(made, tmp_path, CPU, silent)
    launches.endings = {}
    outcome = schedule.run(made, tmp_path, CPU, silent)
    assert launches.turns[2:] == [("full", 1)] and [r.status for r in outcome.results] == ["finished"] * 2


def test_another_version_of_the_code_has_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    words = experiment.written(WORDS, "cpu").points[0].words
    before = cache_key.key(words, 1, CPU)
    assert before == cache_key.key(words, 1, CPU) != cache_key.key(words, 2, CPU)
    monkeypatch.setattr(cache_key, "code", lambda: "changed")
    assert cache_key.key(words, 1, CPU) != before


def test_a_changed_file_that_a_run_names_has_another_key(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    words = [*experiment.written(WORDS, "cpu").points[0].words, f"data.chat_template={template}"]
    template.write_text("{{ messages[0].content }}")
    before = cache_key.key(words, 1, CPU)
    template.write_text("{{ messages[-1].content }}")
    assert cache_key.key(words, 1, CPU) != before


def test_an_experiment_that_another_process_runs_is_left_alone(launches: Launches, tmp_path: Path) -> None:
    options = command.Options(out=tmp_path, repeats=1)
    folder = tmp_path / experiment.written(WORDS, "cpu").name
    folder.mkdir()
    lock = OwnerLock(folder / "owner.json")
    assert lock.take() is None
    with pytest.raises(ConfigError, match=f"{folder} belongs to process .* choose another --out"):
        command.run(WORDS, options)
    assert not launches.turns
    lock.release()


def test_a_damaged_result_is_none(launches: Launches, tmp_path: Path) -> None:
    made = experiment.written(WORDS, "cpu")
    slot = Slot(tmp_path, made.points[0], 1)
    result = launches(slot, "key", 1, CPU)
    assert launch.stored(slot, "key") == result
    assert launch.stored(slot, "other") is None
    slot.result.write_text(slot.result.read_text()[:-30])
    assert launch.stored(slot, "key") is None


def test_a_refused_point_is_a_row_and_all_refused_an_error(launches: Launches, tmp_path: Path) -> None:
    made = experiment.written(["recipe=tiny_zero3_offload", "train.micro_batch_size=4,5"], "cpu")
    outcome = schedule.run(dataclasses.replace(made, repeats=1), tmp_path, CPU, silent)
    assert len(outcome.results) == 2
    made = experiment.written(["recipe=tiny_zero3_offload", "train.micro_batch_size=0,-1"], "cpu")
    with pytest.raises(ConfigError, match="every point is refused"):
        schedule.run(made, tmp_path, CPU, silent)
    made = experiment.written(["recipe=tiny_zero3_offload", "train.micro_batch_size=4,-1"], "cpu")
    outcome = schedule.run(dataclasses.replace(made, repeats=1), tmp_path, CPU, silent)
    assert [r.status for r in outcome.results] == ["finished", "refused"]
    assert "micro_batch_size=-1" in outcome.results[1].words


@pytest.mark.usefixtures("undrawn")
def test_ctrl_c_keeps_what_is_finished(
    launches: Launches, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launches.stop_at = 3
    options = command.Options(out=tmp_path, repeats=2)
    assert command.run(WORDS, options) == command.EXIT_INTERRUPTED
    assert "the same command goes on" in capsys.readouterr().err
    launches.stop_at = -1
    so_far = json.loads(next(tmp_path.glob("*/results.json")).read_text())["points"]
    assert [(row["name"], row["repeats"]) for row in so_far] == [("none", 2), ("full", 1)]
    assert "1 of 2 launches: not launched" in so_far[1]["words"]
    assert command.run(WORDS, options) == 0
    assert launches.turns[3:] == [("full", 2)]
    assert "1 launched now, 3 from before" in capsys.readouterr().out
    assert command.run(WORDS, options) == 0
    assert "nothing was launched: all 4 results are from before" in capsys.readouterr().out


@pytest.mark.usefixtures("undrawn")
def test_ctrl_c_publishes_what_is_finished_but_not_nothing(launches: Launches, tmp_path: Path) -> None:
    options = command.Options(out=tmp_path / "out", publish=tmp_path / "published")
    launches.stop_at = 0
    assert command.run(WORDS, options) == command.EXIT_INTERRUPTED
    assert not (tmp_path / "published").exists()
    launches.stop_at = 1
    assert command.run(WORDS, options) == command.EXIT_INTERRUPTED
    rows = publish.read_points(tmp_path / "published")
    assert [row["status"] for row in rows] == ["finished", "not launched"]


def test_exit_code_when_nothing_ran(launches: Launches, tmp_path: Path) -> None:
    launches.endings = {"none": "failed", "full": "failed"}
    assert command.run(WORDS, command.Options(out=tmp_path)) == command.EXIT_NOTHING_RAN
    launches.endings = {"none": "out of memory", "full": "failed"}
    assert command.run(WORDS, command.Options(out=tmp_path)) == 0


def test_how_long_the_rest_takes(launches: Launches, tmp_path: Path) -> None:
    made, said = experiment.written(WORDS, "cpu"), list[str]()

    @contextmanager
    def heard(total: int) -> Iterator[schedule.Lines]:
        yield schedule.Lines(total, said.append)

    schedule.run(made, tmp_path, CPU, heard)
    assert said[0] == "[1/4] none, r1: 1.5 s per step, peak 1.0 MiB (10 s, about 0:30 left)"
    assert said[3] == "[4/4] full, r2: 1.5 s per step, peak 1.0 MiB (10 s)"


def test_the_command_line(launches: Launches, tmp_path: Path) -> None:
    run = CliRunner().invoke
    listed = " ".join(run(cli.app, ["compare", "--list"]).output.split())
    assert "seed_b8 What does activation checkpointing save" in listed
    words = [
        "compare",
        *WORDS,
        "--out",
        str(tmp_path),
        "--repeats",
        "1",
        "--json",
        "--publish",
        str(tmp_path / "kept"),
    ]
    result = run(cli.app, words)
    assert result.exit_code == 0
    content = json.loads(result.stdout)
    assert [point["name"] for point in content["points"]] == ["none", "full"] and content["repeats"] == 1
    kept = publish.read_points(tmp_path / "kept")
    assert [row["point"] for row in kept] == ["none", "full"] and {row["machine"] for row in kept} == {"cpu"}
    assert [int(row["peak_bytes"]) for row in kept] == [point["peak_bytes"] for point in content["points"]]


def test_published_results_replace_those_of_the_same_experiment_and_machine(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    content = {"name": "b", "device": "cpu", "env": {"commit": "1"}, "hardware": {"cpu": "a CPU"}}
    content |= {"reduction": "", "ranks": 1, "repeats": 2, "peak_how": "", "first_steady_step": 2}
    point = {
        **dataclasses.asdict(figures.Row(name="none", own=(), baseline="none", status="refused")),
        "loss": [(1, 5.5), (2, 5.25)],
    }
    publish.add(folder, content | {"points": [point, point | {"name": "full"}]})
    publish.add(folder, content | {"name": "a", "points": [point]})
    publish.add(folder, content | {"points": [point], "env": {"commit": "2"}})
    publish.add(folder, content | {"points": [point], "device": "cuda"})
    found = [(row["experiment"], row["machine"], row["point"]) for row in publish.read_points(folder)]
    assert found == [("a", "cpu", "none"), ("b", "cpu", "none"), ("b", "gpu", "none")]
    assert publish.read_points(folder)[0]["losses"] == "5.5 5.25"
    where = json.loads((folder / publish.ENVIRONMENTS).read_text())
    assert list(where) == ["a-cpu", "b-cpu", "b-gpu"] and where["b-cpu"]["commit"] == "2"


# How a launch ended


def out_of_memory() -> str:
    plan = LaunchPlan("cuda", None, None, [], [], None)
    return str(OutOfMemory("backward", plan, place="GPU", layer=3, measured=Memory(1, 1, 1), cause="no room"))


KILLED = supervisor.killed(0, peak_bytes=1, together_bytes=1, limit_bytes=1, oom_kills=1)


@pytest.mark.parametrize(
    ("code", "text", "status", "words"),
    [
        (0, "all well", "finished", ""),
        (
            70,
            f"\nremat: {out_of_memory()}\n\ntable",
            "out of memory",
            "out of GPU memory in backward, layer 3 on rank 0",
        ),
        (70, "\nremat: training failed: NaN\n", "failed", "exit code 70: training failed: NaN"),
        (2, "\nremat: profile.memory=true: torch sees no GPU\n", "refused", "profile.memory=true: torch sees"),
        (137, f"remat launch: {KILLED}", "out of memory", KILLED),
        (
            137,
            f"remat launch: {KILLED.replace('counts 1', 'counts 0')}",
            "failed",
            "exit code 137, without a word",
        ),
        (
            3,
            "\nremat: this machine cannot hold the run\n\nGPU 9 8\n\n- GPU memory: too little\n\n"
            "Start anyway with force=true. What",
            "does not fit",
            "GPU memory: too little",
        ),
        (
            3,
            "\nremat: the launch has 8 ranks and this machine 4 GPUs. Start anyway with force=true",
            "failed",
            "exit code 3: the launch has 8",
        ),
        (3, "\nremat: cpu_adam cannot be built\n", "failed", "exit code 3: cpu_adam cannot be built"),
    ],
)
def test_endings_in_words(code: int, text: str, status: str, words: str) -> None:
    found = measure.ended(code, text)
    assert found.status == status and found.words.startswith(words)


# What a launch shows


def leave_files(
    folder: Path,
    stage: int,
    *,
    items: list[tuple[str, str, int]],
    accumulated: int = 1,
    phase: str = "backward",
    planned_mib: int = 0,
) -> Path:
    """What a run on a CPU leaves: 40 MiB weights, 60 optimizer state, 7 gradients, 2 buckets, 100 per micro-batch."""
    folder.mkdir(parents=True)
    held = {"weights": 40.0, "optimizer state": 60.0, "gradients": 7.0, "communication buckets": 2.0}
    rows = [("peak of a micro-batch, on top of the model states", 99.0, 100.0, "MiB")]
    rows += [(f"{name} in host memory", size, size, "MiB") for name, size in held.items()]
    rows += [
        ("kept activations, all layers", 0.5, 0.25, "GiB"),
        ("recomputed FLOPs, of forward", 70.0, 80.0, "%"),
    ]
    files: dict[str, Any] = {
        "ledger": {
            "rows": [dict(zip(("category", "planned", "measured", "unit"), row, strict=True)) for row in rows],
            "kept_bytes_per_layer": {"measured": [128 * MIB, 128 * MIB]},
        },
        "plan": {
            "device": "cpu",
            "planned": {
                "gpu_allocated_peak_bytes": planned_mib * MIB,
                "micro_batch_peak_bytes": 99 * MIB,
                "peak": {"phase": phase},
            },
            "model_states": [{"name": n, "place": p, "bytes_per_rank": size * MIB} for n, p, size in items],
        },
        "proof": {"zero_stage": stage, "in_words": "full", "layers": [{"moved_bytes": 40, "forwards": 4}]},
        "ds_config": {"gradient_accumulation_steps": accumulated},
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    times = {f"time/{name}_s": 1.0 for name in measure.TIMES} | {"throughput/tokens_per_s": 5.0}
    lines = [
        {"step": step, "loss/train": 1 / step} | times | {"time/step_s": float(step)} for step in range(1, 7)
    ]
    lines.append({"step": 6, "loss/eval": 0.1})
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return folder


ON_GPU = [("parameters", "gpu", 40), ("moments", "gpu", 60)]
OFFLOADED = [("parameters", "gpu", 40), ("moments", "host", 60), ("gradients", "host", 7)]


@pytest.mark.parametrize(
    ("stage", "items", "peak_mib", "off_mib"),
    [(1, ON_GPU, 200, 0), (3, ON_GPU, 209, 0), (2, OFFLOADED, 140, 67), (3, OFFLOADED, 142, 67)],
)
def test_the_counted_peak(tmp_path: Path, stage: int, items: list[Any], peak_mib: int, off_mib: int) -> None:
    """Below stage 3 gradients are a part of the micro-batch; what the strategy offloads is not on the GPU."""
    found = measure.read(leave_files(tmp_path / "run", stage, items=items))
    assert (found.peak_bytes, found.off_gpu_bytes) == (peak_mib * MIB, off_mib * MIB)
    assert found.peak_how.startswith("counted peak, CPU") and not found.peak_in_update
    on_gpu = sum(size for _, place, size in items if place == "gpu")
    assert found.counted_planned_bytes == (on_gpu + 99) * MIB
    assert (found.kept_bytes, found.kept_bytes_per_layer) == (256 * MIB, [128 * MIB] * 2)
    assert (found.moved_bytes, found.eval_loss, found.loss[1]) == (10, 0.1, (2, 0.5))


@pytest.mark.parametrize(
    ("phase", "planned_mib", "peak_mib"),
    [("optimizer step", 250, 250), ("optimizer step", 150, 200), ("backward", 250, 200)],
)
def test_an_optimizer_step_that_needs_more_is_planned(
    tmp_path: Path, phase: str, planned_mib: int, peak_mib: int
) -> None:
    found = measure.read(leave_files(tmp_path / "run", 1, items=ON_GPU, phase=phase, planned_mib=planned_mib))
    assert (found.peak_bytes, found.counted_bytes) == (peak_mib * MIB, 200 * MIB)
    assert found.peak_in_update == (peak_mib == 250)


@pytest.mark.parametrize(("stage", "accumulated", "first"), [(1, 1, 2), (3, 1, 5), (3, 2, 3), (3, 8, 2)])
def test_watched_steps_are_not_steady(tmp_path: Path, stage: int, accumulated: int, first: int) -> None:
    """The first step, and under ZeRO-3 the one with the fourth micro-batch, are counted op by op."""
    found = measure.read(leave_files(tmp_path / "run", stage, items=ON_GPU, accumulated=accumulated))
    assert found.first_steady_step == first
    assert found.steps["step"] == [float(step) for step in range(first, 7)]


def test_a_gpu_has_the_allocators_peak(tmp_path: Path) -> None:
    folder = leave_files(tmp_path / "run", 1, items=ON_GPU)
    plan = json.loads((folder / "plan.json").read_text()) | {"device": "cuda"}
    (folder / "plan.json").write_text(json.dumps(plan))
    row = {"step": 2, "memory/gpu_allocated_peak_gib": 1.5}
    (folder / "metrics.jsonl").write_text(json.dumps(row))
    assert measure.read(folder).peak_bytes == 1536 * MIB


def stand_in(folder: Path) -> Callable[..., int]:
    def run(command: list[str], logs: Path, place: Place) -> int:
        leave_files(folder, 1, items=ON_GPU)
        (logs / "launch.log").write_text("well")
        return 0

    return run


def test_a_launch_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = Slot(tmp_path, experiment.written(WORDS, "cpu").points[1], 1)
    monkeypatch.setattr(launch, "_run", stand_in(slot.run))
    result = launch.launch(slot, "key", 1, CPU)
    assert launch.stored(slot, "key") == result and result.status == "finished"
    assert shlex.split(result.command)[-2:] == ["run_id=r1", f'output_dir="{tmp_path}"']
    again = launch.launch(slot, "key", 1, CPU)  # over the folder of the first
    assert again.measured == result.measured


def test_a_step_that_was_skipped_has_no_loss(tmp_path: Path) -> None:
    folder = leave_files(tmp_path / "run", 1, items=ON_GPU)
    record = folder / "metrics.jsonl"
    before = measure.read(folder)
    last = json.loads(record.read_text().splitlines()[-1])
    skipped = json.dumps(last | {"loss/train": "NaN", "loss/eval": "NaN"})
    record.write_text(f"{record.read_text()}\n{skipped}\n")
    found = measure.read(folder)
    assert found.loss == before.loss and found.eval_loss == before.eval_loss


def test_a_run_without_its_files_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = Slot(tmp_path, experiment.written(WORDS, "cpu").points[1], 1)
    monkeypatch.setattr(launch, "_run", lambda command, logs, place: 0)
    result = launch.launch(slot, "key", 1, CPU)
    assert result.status == "failed" and "cannot be read: FileNotFoundError" in result.words


def test_a_row_that_holds_a_watched_step_is_not_steady() -> None:
    """Rows are means since the row before: with train.log_every=10 the first one holds the first step."""
    rows = [{"step": step, "time/step_s": 1.0} for step in (10.0, 20.0, 30.0)]
    assert [row["step"] for row in measure._steady(rows, 2, 1)[0]] == [20, 30]


@pytest.mark.parametrize(("asked", "expected"), [("3", 3), ("4,2", 4), ("", 8), (None, 8)])
def test_threads_are_those_asked_for_or_a_share_of_the_cores(
    asked: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_key, "available_cores", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert cache_key.threads(2) == expected


def test_any_folder_is_a_word_that_hydra_reads() -> None:
    for folder in ("outputs/lab", "out (1)", "a,b=c", "it's", "résultats", 'a "b"', "a\\b"):
        run = compose.compose_run(
            ["recipe=tiny_zero3_offload", command_line.override("output_dir", folder)]
        ).run
        assert run.output_dir == folder
