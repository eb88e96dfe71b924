"""Rates corrected by the seconds of a run's phases, tables chosen again by them, and runs that cannot be used."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from remat import cli
from remat.config import compose
from remat.config.metrics import phase_s
from remat.config.options import ConfigError
from remat.machine import gpus
from remat.planning import budget, retune
from remat.planning.plan import Recordings, make_plan
from remat.planning.step_time import seconds_by_bound

WORDS = [
    "recipe=tiny_zero3_offload",
    "hardware=1x4090",
    "model.architecture.num_hidden_layers=4",
    "deepspeed.config=zero2_offload",
    "train.seq_len=2048",
    "train.micro_batch_size=2",
    "checkpointing=budget",
    "checkpointing.budget_gib=1.06",
]
MACHINE = ["hardware.gpus_per_node=1", "hardware.gpu='NVIDIA GeForce RTX 4090'", "hardware.gpu_memory_gib=23.5"]
Measured = Mapping[str, float] | None


KNOWN = Recordings()


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> Recordings:
    """What all plans of this file record, those of `retune` too."""
    monkeypatch.setattr(retune, "Recordings", lambda: KNOWN)
    return KNOWN


@functools.cache
def table_of(words: tuple[str, ...], *, on_gpu: bool) -> str:
    return json.dumps(make_plan(compose.from_command_line(words).run, recordings=KNOWN, on_gpu=on_gpu).table)


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    def write(
        measured: Measured, *, words: list[str] = WORDS, device: str = "cuda", table: bool = True
    ) -> Path:
        composed = compose.from_command_line(words)
        (tmp_path / "config.yaml").write_text(composed.yaml)
        machine = MACHINE if device == "cuda" else MACHINE[:1]
        command = " ".join(["remat", "plan", *words, *machine])
        (tmp_path / "plan.json").write_text(json.dumps({"device": device, "command": command}))
        if table:
            (tmp_path / budget.FILE).write_text(table_of(tuple(words), on_gpu=device == "cuda"))
        if measured is not None:
            rows = [{"category": phase, "measured": seconds} for phase, seconds in measured.items()]
            (tmp_path / "ledger.json").write_text(json.dumps({"rows": rows}))
        return tmp_path

    return write


def on_a_slower_machine(known: Recordings, *, arithmetic: float, traffic: float) -> dict[str, float]:
    """Return what the phases take where arithmetic and traffic are so many times slower, and the CPU half as fast."""
    cfg = compose.compose_run(WORDS).run
    machine = gpus.machine(cfg.hardware)
    slower = {name: getattr(machine, name) / arithmetic for name in ("matmul_tflops", "attention_tflops")}
    slower |= {
        "memory_gbs": (machine.memory_gbs or 0) / traffic,
        "launch_us": (machine.launch_us or 0) * traffic,
    }
    hardware = replace(cfg.hardware, gpu_rates=slower, cpu_adam_gparams_s=(machine.cpu_adam_gparams_s or 0) / 2)
    return dict(make_plan(replace(cfg, hardware=hardware), recordings=known).time.phases_s)


@pytest.mark.parametrize(
    ("arithmetic", "traffic"),
    [
        pytest.param(1.0, 1.0, marks=pytest.mark.exhaustive),
        pytest.param(2.0, 2.0, marks=pytest.mark.exhaustive),
        (1.5, 3.0),
        (3.0, 1.2),
    ],
)
def test_the_corrected_plan_takes_what_was_measured(
    arithmetic: float, traffic: float, write_run: Callable[..., Path], known: Recordings
) -> None:
    measured = on_a_slower_machine(known, arithmetic=arithmetic, traffic=traffic)
    found = retune.retune(write_run(measured))
    for phase, seconds in measured.items():
        assert found.before.time.phases_s[phase] == pytest.approx(seconds, rel=0.08)
    assert found.now.time.total_s <= 1.001 * found.before.time.total_s
    assert found.now.plan.resources[0].needed_bytes <= 1.06 * 2**30


def test_what_is_printed_carries_out_the_new_tables(
    write_run: Callable[..., Path], known: Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command and what it prints are planned from nothing."""
    run = write_run(on_a_slower_machine(known, arithmetic=1.0, traffic=6.0))
    with monkeypatch.context() as alone:
        alone.setattr(retune, "Recordings", Recordings)
        done = CliRunner().invoke(cli.app, ["retune", "--json", str(run)], catch_exceptions=False)
    found = json.loads(done.stdout)
    plain = [word for word in WORDS if not word.startswith("checkpointing.budget_gib")]
    again = make_plan(compose.compose_run([*plain, *found["overrides"]]).run)
    assert again.time.total_s == pytest.approx(found["step_time_s"]["now"], rel=0.001)
    assert again.table is not None
    assert again.table["layers"] == json.loads(Path(found["table"]).read_text())["layers"]
    text = CliRunner().invoke(cli.app, ["retune", str(run)], catch_exceptions=False).stdout
    assert "backward" in text and "checkpointing.table=" in text


def test_a_run_that_has_not_ended_is_measured_by_its_rows(write_run: Callable[..., Path]) -> None:
    """A kill may leave the last row incomplete."""
    run = write_run(None)
    rows = [{phase_s(phase): seconds for phase in retune.PHASES} for seconds in (9.0, 0.03, 0.02, 0.04)]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"time/forward_s": 0.')
    assert retune.retune(run).measured == dict.fromkeys(retune.PHASES, 0.03)


ON_CPU = [*WORDS[:1], *WORDS[2:3], *WORDS[4:-1], "deepspeed.config=zero2", "checkpointing.budget_gib=2"]
RATES = {"matmul_tflops": 0.05, "attention_tflops": 0.03, "memory_gbs": 10.0, "launch_us": 5.0}


def test_a_run_on_cpus_whose_rates_were_given_is_planned_by_measured_seconds(
    write_run: Callable[..., Path],
) -> None:
    rates = [f"++hardware.gpu_rates.{name}={rate}" for name, rate in RATES.items()]
    run = write_run({"forward": 2.0, "backward": 5.0, "optimizer": 0.1}, words=[*ON_CPU, *rates], device="cpu")
    found = retune.retune(run)
    for phase in ("forward", "backward"):
        assert found.before.time.phases_s[phase] == pytest.approx(found.measured[phase], rel=0.2)
        assert found.planned[phase] != pytest.approx(found.measured[phase], rel=0.2)


PHASES_S = {"forward": 0.01, "backward": 0.03, "optimizer": 0.001}


def test_runs_that_cannot_be_used_are_refused_with_the_reason(write_run: Callable[..., Path]) -> None:
    def refuse(text: str, run: Path) -> None:
        with pytest.raises(ConfigError, match=text):
            retune.retune(run)

    full = [*WORDS[:-2], "checkpointing=full"]
    refuse("checkpointing=full has no table to choose again", write_run(PHASES_S, words=full, table=False))
    refuse("has no checkpointing_table.json", write_run(PHASES_S, table=False))
    staged = [*WORDS, "deepspeed.config=zero1", "train.pipeline_parallel_size=2"]
    refuse("divided into 2 stages, .* contain waits", write_run(PHASES_S, words=staged, table=False))
    refuse("it ran on CPUs, so give rates of those", write_run(PHASES_S, words=ON_CPU, device="cpu"))
    refuse("no measured seconds of forward, backward, optimizer", write_run({}))
    fp32 = [*WORDS, "train.precision=fp32", "checkpointing.budget_gib=2"]
    refuse("its seconds were not planned", write_run(PHASES_S, words=fp32))


def test_exchanges_between_ranks_are_waits(known: Recordings) -> None:
    """Arithmetic and traffic are those of one rank's own operations."""
    words = [
        *(word for word in WORDS if "budget" not in word),
        "checkpointing=full",
        "train.global_batch_size=2",
    ]
    words = [*words, "hardware=2x4090", "train.sequence_parallel_size=2", "model.attention=eager"]
    planned = make_plan(compose.from_command_line(words).run, recordings=known)
    assert any(operation.kind == "exchange" for operation in planned.simulation.ops)
    parts = seconds_by_bound(planned.simulation, gpus.machine(planned.cfg.hardware))
    for phase, (arithmetic, traffic) in parts.items():
        assert 0 < arithmetic + traffic < planned.time.phases_s[phase]
