"""The memory tools: the right steps, named phases, tables, snapshots of all ranks, the driver's samples."""

from __future__ import annotations

import gzip
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from remat.config import compose
from remat.config.options import ConfigError, ProfileConfig
from remat.machine import memory
from remat.report import charts
from remat.report.charts import LIGHT
from remat.training import profiling
from remat.training.profiling import Profiler, check
from remat.training.throughput import PhaseTimer, Window

CPU = torch.device("cpu")


def run(folder: Path, cfg: ProfileConfig, steps: int) -> tuple[PhaseTimer, Window]:
    """Steps of a matrix product whose size tells which step it is: [n, n] in the nth."""
    timer = PhaseTimer(CPU)
    window = Window(timer, device=CPU, world_size=1)
    profiler = Profiler(cfg, folder, timer, window, CPU, rank=0)
    for number in range(1, steps + 1):
        profiler.step_begins()
        with timer.phase("forward"):
            torch.ones(number, number) @ torch.ones(number, number)
        window.step_end(1, 1)
        profiler.step_ended()
    profiler.close()
    return timer, window


def trace(folder: Path) -> list[dict[str, Any]]:
    with gzip.open(folder / "profile" / "trace-rank-0.json.gz", "rt") as file:
        return json.load(file)["traceEvents"]


def test_a_trace_holds_the_chosen_steps_and_no_other_with_phases_as_ranges(tmp_path: Path) -> None:
    timer, _ = run(tmp_path, ProfileConfig(trace=True, after=2, steps=2), steps=6)
    events = trace(tmp_path)
    assert sum(event.get("name") == "remat/forward" for event in events) == 2
    products = [event["args"]["Input Dims"][0] for event in events if event.get("name") == "aten::mm"]
    assert products == [[3, 3], [4, 4]]
    assert not timer.named
    assert not (tmp_path / "profile" / "summary-rank-0.txt").exists()


def test_a_summary_names_operations_by_memory_and_by_time(tmp_path: Path) -> None:
    run(tmp_path, ProfileConfig(summary=True, after=0, steps=1), steps=1)
    text = (tmp_path / "profile" / "summary-rank-0.txt").read_text()
    assert text.startswith("Steps 1 to 1 of this launch, rank 0.")
    assert text.count("aten::mm") == 2
    assert not (tmp_path / "profile" / "trace-rank-0.json.gz").exists()


def test_what_the_tools_take_is_no_step_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)

    def tick() -> float:
        clock.now += 0.001
        return clock.now

    monkeypatch.setattr("remat.training.throughput.perf_counter", tick)
    original = torch.profiler.profile.export_chrome_trace

    def slow(self: Any, path: str) -> Any:
        clock.now += 100
        return original(self, path)

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", slow)
    _, window = run(tmp_path, ProfileConfig(trace=True, after=0, steps=1), steps=3)
    assert clock.now > 100
    assert 0 < window.close()["time/step_s"] < 1


def test_nothing_is_written_when_nothing_is_asked_for_and_a_short_run_ends_clean(tmp_path: Path) -> None:
    run(tmp_path, ProfileConfig(), steps=3)
    assert list(tmp_path.iterdir()) == []
    timer, _ = run(tmp_path, ProfileConfig(trace=True, after=1, steps=5), steps=3)
    assert not timer.named
    assert list((tmp_path / "profile").iterdir()) == []


def test_an_allocators_history_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"profile.memory=true.*profile=summary"):
        check(ProfileConfig(memory=True), CPU)
    with pytest.raises(ConfigError, match=r"profile.nvml_interval_s.*set profile.nvml_interval_s=0"):
        check(ProfileConfig(nvml_interval_s=0.5), CPU)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("profile.steps=0", "profile.steps=0"),
        ("profile.after=-1", "profile.after=-1"),
        ("profile.nvml_interval_s=-1", "profile.nvml_interval_s=-1"),
    ],
)
def test_impossible_values_are_refused(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compose.compose_run(["recipe=tiny_zero3_offload", "profile=trace", word])


def test_each_choice_turns_on_its_tool() -> None:
    for choice in ("memory", "trace", "summary"):
        cfg = compose.compose_run(["recipe=tiny_zero3_offload", f"profile={choice}"]).run.profile
        assert [name for name in ("memory", "trace", "summary") if getattr(cfg, name)] == [choice]


def test_snapshots_are_the_largest_of_any_rank_in_order() -> None:
    def rank(resident: int, allocated: int) -> list[dict[str, Any]]:
        return [
            {"label": label, "time_unix_s": 1.0, "host_resident_bytes": resident + index,
             "gpu_allocated_bytes": allocated, "gpu_reserved_bytes": 0}
            for index, label in enumerate(("load", "engine"))
        ]  # fmt: skip

    found = profiling.highest([rank(10, 7), rank(20, 5)])
    assert [moment["label"] for moment in found] == ["load", "engine"]
    assert [moment["host_resident_bytes"] for moment in found] == [20, 21]
    assert [moment["gpu_allocated_bytes"] for moment in found] == [7, 7]
    assert "gpu_reserved_bytes" not in found[0]


def test_each_phase_of_the_first_step_leaves_a_snapshot(tmp_path: Path) -> None:
    timer, taken = PhaseTimer(CPU), profiling.Snapshots(CPU)
    taken.take("load")
    taken.take("engine")
    taken.follow(timer)
    for phase in ("data", "forward", "backward", "optimizer"):
        with timer.phase(phase):
            pass
    taken.write(timer, tmp_path, SimpleNamespace(is_main=True, size=1))
    content = json.loads((tmp_path / profiling.FILE).read_text())
    assert [moment["label"] for moment in content["snapshots"]] == list(profiling.LABELS)
    assert all(moment["host_resident_bytes"] > 1e6 for moment in content["snapshots"])
    assert timer.ended is None


class FakeNvml:
    """Stands in for NVIDIA's binding: three samples, then the driver fails."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.reads = 0
        self.failed = threading.Event()

    def nvmlDeviceGetMemoryInfo(self, handle: object) -> SimpleNamespace:
        self.reads += 1
        if self.reads > 3:
            self.failed.set()
            raise self.NVMLError("the GPU is lost")
        return SimpleNamespace(used=self.reads * 2**30)

    def nvmlDeviceGetUtilizationRates(self, handle: object) -> SimpleNamespace:
        return SimpleNamespace(gpu=50)

    def nvmlDeviceGetPowerUsage(self, handle: object) -> int:
        return 400_000


def test_the_driver_is_sampled_beside_training_and_its_failure_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    path = tmp_path / "profile" / "nvml-rank-0.jsonl"
    sampler = memory.NvmlSampler(path, object(), interval_s=0.001)
    assert fake.failed.wait(30)
    sampler.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row.get("used_bytes") for row in rows] == [2**30, 2**31, 3 * 2**30, None]
    assert rows[0]["power_w"] == 400
    assert rows[-1]["error"] == "the GPU is lost"
    assert len(charts.samples(path)) == 3
    assert set(charts.draw_snapshots(tmp_path, LIGHT)) == {"nvml"}
