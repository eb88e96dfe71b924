"""What is said when memory runs out, and what `remat plan` is asked."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from remat.activation_checkpointing.mechanisms.counters import Scope
from remat.config.options import OnOutOfMemory, RunConfig
from remat.config.units import GIB
from remat.launch import retreat
from remat.machine.allocator import Allocators
from remat.parallel.pipeline_parallel import Stages
from remat.planning.launch_plan import LaunchPlan
from remat.planning.plan import Resource
from remat.planning.simulation.types import Moment, Phase
from remat.training import out_of_memory
from remat.training.out_of_memory import Measured, OutOfMemory

COMMAND = ["remat", "plan", "recipe=mine", "hardware.host_memory_gib=500.00", "hardware.gpu_memory_gib=79.10"]
CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 512.00 MiB"


def plan(**changes: Any) -> LaunchPlan:
    planned = SimpleNamespace(
        world_size=8,
        cfg=RunConfig(),
        strategy=SimpleNamespace(allocators=Allocators(expandable_segments=True)),
        plan=SimpleNamespace(
            peak_bytes=60 * GIB,
            peak=Moment(60 * GIB, {}, Phase.backward, 17, "mm.default"),
            host={"moments": 20 * GIB},
            pinned={"gradients": 4 * GIB},
            resources=[
                Resource("GPU memory", 65 * GIB, 79 * GIB),
                Resource("host memory per node", 200 * GIB, 500 * GIB),
            ],
        ),
    )
    values: dict[str, Any] = {
        "device": "cuda",
        "planned": planned,
        "reason": None,
        "states": [],
        "command": COMMAND,
        "strategy": SimpleNamespace(stages=None),
    }
    return LaunchPlan(**(values | changes))


def gpu_error(launch: LaunchPlan | None = None, free_bytes: int = GIB // 2) -> OutOfMemory:
    measured = Measured(2 * GIB, 30 * GIB, 100 * GIB, 75 * GIB, 77 * GIB, free_bytes)
    return OutOfMemory("backward", launch or plan(), place="GPU", layer=17, measured=measured, cause=CUDA)


def host_error(launch: LaunchPlan | None = None) -> OutOfMemory:
    measured = Measured(50 * GIB, 30 * GIB, 10 * GIB)
    return OutOfMemory("save", launch or plan(), place="host", layer=None, measured=measured, cause="Unable")


@pytest.mark.parametrize(
    ("error", "place", "asked"),
    [
        (torch.OutOfMemoryError(CUDA), "GPU", 2 * GIB),
        (MemoryError(), "host", None),
        (MemoryError("Unable to allocate 7.50 GiB for an array with shape"), "host", 7 * GIB + GIB // 2),
    ],
)
def test_what_says_that_memory_ran_out(error: Exception, place: str, asked: int | None) -> None:
    with pytest.raises(OutOfMemory) as caught, out_of_memory.named("load", plan()):
        raise error
    assert (caught.value.place, caught.value.phase) == (place, "load")
    assert caught.value.measured.asked_bytes == asked


@pytest.mark.parametrize(("rank", "layer"), [(1, 3), (2, 11)])
def test_a_layer_of_a_stage_is_told_by_its_place_in_the_model(
    rank: int, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks, two a stage; memory runs out in the fourth layer of one."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "4")
    launch = plan(strategy=SimpleNamespace(stages=Stages((0, 8, 16))))
    with (
        pytest.raises(OutOfMemory, match=f"layer {layer} on rank {rank}"),
        out_of_memory.named("forward", launch),
        Scope().inside(3),
    ):
        raise MemoryError


def test_the_allocator_of_a_cpu_says_so() -> None:
    with pytest.raises(OutOfMemory) as caught, out_of_memory.named("build", plan(device="cpu")):
        torch.empty(1 << 50)
    assert caught.value.place == "host"
    assert caught.value.measured.asked_bytes == 4 << 50
    assert caught.value.measured.resident_bytes > 0


def test_other_errors_pass() -> None:
    with pytest.raises(ValueError, match="shape"), out_of_memory.named("build", plan()):
        raise ValueError("shape")


def test_the_cause_of_another_error_counts_and_the_innermost_name() -> None:
    with (
        pytest.raises(OutOfMemory) as caught,
        out_of_memory.named("build", plan()),
        out_of_memory.named("load", plan()),
    ):
        try:
            raise MemoryError
        except MemoryError as error:
            raise RuntimeError("the weights could not be read") from error
    assert caught.value.phase == "load"


def test_layer_and_recomputation_are_known_and_the_timers_name_is_translated() -> None:
    scope = Scope()
    with (
        pytest.raises(OutOfMemory) as caught,
        out_of_memory.named("backward", plan()),
        scope.inside(5, recomputing=True),
    ):
        raise torch.OutOfMemoryError(CUDA)
    assert (caught.value.phase, caught.value.layer) == ("recompute", 5)
    assert (scope.layer, scope.recomputing) == (None, False)
    with pytest.raises(OutOfMemory) as caught, out_of_memory.named(lambda: "optimizer", plan()):
        raise MemoryError
    assert (caught.value.phase, caught.value.layer) == ("optimizer step", None)


def test_advice_is_asked_for_a_machine_without_what_was_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        assert "RANK" not in options["env"] and options["env"]["CUDA_VISIBLE_DEVICES"] == ""
        return subprocess.CompletedProcess(command, 3, json.dumps({"advice": [{"overrides": ["a=1"]}]}), "")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(subprocess, "run", run)
    assert out_of_memory.ask(gpu_error()) == [{"overrides": ["a=1"]}]
    command = [*COMMAND[:4], "hardware.gpu_memory_gib=62.0000"]  # 65 less 5 % of 60, more than 2 - 0.5
    assert asked[0][1:] == ["-m", "remat.cli", *command[1:], "--json"]
    for error, option in (
        (gpu_error(free_bytes=-8 * GIB), "hardware.gpu_memory_gib=55.0000"),
        (host_error(), "hardware.host_memory_gib=160.0000"),  # 40 are missing
    ):
        assert out_of_memory.build_command(error)[-1] == option
    on_cpus = plan(device="cpu")
    assert on_cpus.planned is not None
    for expandable, gaps in ((True, 0.06), (False, 0.6)):  # as `remat plan` counts them
        on_cpus.planned.strategy.allocators = Allocators(expandable_segments=expandable)  # type: ignore[misc]
        size_gib = 60 * (1 + gaps) + 1.1 - 30  # no less than without half of the peak
        assert out_of_memory.build_command(host_error(on_cpus))[-1] == f"hardware.gpu_memory_gib={size_gib:.4f}"


def test_without_advice_the_command_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*_: Any, **__: Any) -> Any:
        raise subprocess.TimeoutExpired("remat plan", 1)

    monkeypatch.setattr(subprocess, "run", hangs)
    assert out_of_memory.ask(gpu_error()) == []
    assert out_of_memory.compose_message(gpu_error(), []).endswith("hardware.gpu_memory_gib=62.0000")


def test_the_message() -> None:
    advice = [
        {
            "overrides": ["checkpointing=full"],
            "gpu_needed_bytes": 40 * GIB,
            "step_time_s": 12.5,
            "changes_training": False,
        },
        {
            "overrides": ["train.seq_len=2048"],
            "gpu_needed_bytes": None,
            "step_time_s": None,
            "changes_training": True,
        },
        {"overrides": ["three"], "fits": False},
        {"overrides": ["four"]},
    ]
    text = out_of_memory.compose_message(gpu_error(), advice)
    assert text.startswith("out of GPU memory in backward, layer 17 on rank 0\n")
    for row in (
        "GPU, allocated                    60.0 GiB      75.0 GiB",
        "GPU, needed and reserved          65.0 GiB      77.0 GiB",
        "GPU, free                                      512.0 MiB",
        "host, of this rank                24.0 GiB      30.0 GiB",
        "asked for                                        2.0 GiB",
    ):
        assert row in text, text
    assert "the plan's peak is in backward, layer 17 (mm.default)" in text
    assert f"the allocator said: {CUDA}" in text
    assert "checkpointing=full  (GPU 40.0 GiB, 12.5 s per step at best)" in text
    assert "train.seq_len=2048  (changes what is trained)" in text
    assert "three  (saves less than was missing, but nothing saves more)" in text and "four" not in text
    assert len(text.splitlines()) < 25


def test_the_message_without_a_plan() -> None:
    launch = plan(planned=None, reason="ValueError: the model reads a value from its data")
    error = gpu_error(launch)
    text = out_of_memory.compose_message(error, out_of_memory.ask(error))
    assert "there is no plan of this run: ValueError: the model reads a value" in text
    assert "75.0 GiB" in text
    assert text.endswith("remat plan recipe=mine hardware.host_memory_gib=500.00 hardware.gpu_memory_gib=79.10")


def test_one_rank_tells(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    waited: list[float] = []
    monkeypatch.setattr(out_of_memory.time, "sleep", waited.append)
    monkeypatch.setattr(out_of_memory, "ask", lambda error: [])
    monkeypatch.setenv("RANK", "3")
    assert out_of_memory.tell(gpu_error(), 70) == 70  # outside of a process group rank 0 tells
    assert waited and capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    assert out_of_memory.tell(gpu_error(), 70) == 70
    assert "out of GPU memory in backward" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "chosen", "advised", "said"),
    [
        ("0", ["checkpointing=full"], False, "remat: retreat 1 of 2: the run goes on with checkpointing=full"),
        ("0", None, True, "remat: no retreat: the plan knows no checkpointing, loss and micro-batch"),
        ("2", ["checkpointing=full"], True, "remat: no retreat: this run was started again 2 times already"),
    ],
)
def test_advice_is_for_a_run_that_does_not_go_on(
    before: str, chosen: list[str] | None, advised: bool, said: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:  # fmt: skip
    asked: list[OutOfMemory] = []
    monkeypatch.setattr(out_of_memory, "ask", lambda error: asked.append(error) or [])
    choice = None if chosen is None else retreat.Retreat(chosen, "out of memory")
    monkeypatch.setattr(out_of_memory.retreat, "choose", lambda smaller, why: choice)
    monkeypatch.setenv(retreat.FILE, str(tmp_path / "retreat.json"))
    monkeypatch.setenv(retreat.NUMBER, before)
    monkeypatch.setenv("RANK", "0")
    error = gpu_error()
    assert error.plan.planned is not None
    error.plan.planned.cfg = RunConfig(on_out_of_memory=OnOutOfMemory.retreat, most_retreats=2)
    assert out_of_memory.tell(error, 70) == 70
    assert said in capsys.readouterr().err
    assert bool(asked) is advised
    assert (retreat.take(tmp_path / "retreat.json") is None) is advised


def test_a_retreat_is_on_top_of_what_was_chosen_for_its_own_launch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Later launches have the first one's choice in their words: the first retreat's settings must come after it.

    A first launch may be killed before it has written strategy.json.
    """
    file = tmp_path / "retreat.json"
    monkeypatch.setenv(retreat.FILE, str(file))
    chosen, planned = ["train.micro_batch_size=8"], []
    monkeypatch.setattr(retreat, "choose", lambda run, why: planned.append(run.before))
    for number, of_launch in enumerate((chosen, [])):
        monkeypatch.setenv(retreat.NUMBER, str(number))
        launch = plan(folder=tmp_path, added=of_launch)
        assert launch.planned is not None
        launch.planned.cfg = RunConfig(on_out_of_memory=OnOutOfMemory.retreat)  # type: ignore[misc]
        out_of_memory.prepare_for_kill(launch.planned.cfg, launch)
        retreat.after_kill(file, "killed", number, lambda _: None)
        out_of_memory._ask_for_retreat(gpu_error(launch))
        (tmp_path / "strategy.json").write_text(json.dumps(chosen))
    assert planned == [chosen, chosen, [], []]


def test_a_store_that_has_left_does_not_hide_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 hosts the store: when it has left already, this rank's report is the one that there is."""

    class Gone:
        def add(self, key: str, count: int) -> int:
            raise torch.distributed.DistNetworkError("Connection reset by peer")

    monkeypatch.setattr(out_of_memory.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(out_of_memory, "_store", Gone)
    assert out_of_memory._is_first()
