"""Time per phase and tokens per second against hand sums, with a clock that only moves when told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from remat.training import throughput
from remat.training.throughput import PhaseTimer, Window

CPU = torch.device("cpu")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(throughput, "perf_counter", clock)
    yield clock


def spend(clock: Clock, timer: PhaseTimer, **seconds: float) -> None:
    for name, duration in seconds.items():
        with timer.phase(name):
            clock.now += duration


def test_phases_add_up_over_micro_batches(clock: Clock) -> None:
    timer = PhaseTimer(CPU)
    for _ in range(4):
        spend(clock, timer, data=0.5, forward=1.0, backward=2.0)
    spend(clock, timer, optimizer=3.0)
    assert timer.window() == {"data": 2.0, "forward": 4.0, "backward": 8.0, "optimizer": 3.0}
    assert timer.window() == dict.fromkeys(throughput.PHASES, 0.0)


def test_phases_do_not_nest_and_unknown_names_fail() -> None:
    timer = PhaseTimer(CPU)
    with pytest.raises(RuntimeError, match="forward inside phase data"), timer.phase("data"):
        timer.phase("forward").__enter__()
    with pytest.raises(KeyError):
        timer.phase("sleep")


def test_a_phase_that_raises_is_closed(clock: Clock) -> None:
    timer = PhaseTimer(CPU)
    with pytest.raises(ValueError), timer.phase("forward"):
        clock.now += 1
        raise ValueError
    spend(clock, timer, backward=2.0)
    times = timer.window()
    assert (times["forward"], times["backward"]) == (1.0, 2.0)


def test_row_by_hand(clock: Clock) -> None:
    timer = PhaseTimer(CPU)
    window = Window(
        timer,
        device=CPU,
        world_size=4,
        model_flops_per_token=6e9,
        hardware_flops_per_token=7e9,
        layers_forward_flops_per_token=2e9,
        peak_tflops=2.0,
    )
    window.recomputes(0.5)
    window.start()
    for _ in range(2):
        spend(clock, timer, data=1, forward=2, backward=4, optimizer=2)
        clock.now += 1  # what no phase covers is inside the step
        window.step_end(1000, 900)
    row = window.close()
    assert row == {
        "time/step_s": 10.0,
        "time/data_s": 1.0,
        "time/forward_s": 2.0,
        "time/backward_s": 4.0,
        "time/optimizer_s": 2.0,
        "throughput/tokens_per_s": 100.0,
        "throughput/tokens_per_s_per_gpu": 25.0,
        "throughput/trained_tokens_per_s": 90.0,
        "throughput/tflops_per_gpu": pytest.approx(0.15),
        "throughput/mfu": pytest.approx(0.075),
        "throughput/hfu": pytest.approx(0.1),
    }


def test_unknown_peak_gives_no_utilisation(clock: Clock) -> None:
    window = Window(
        PhaseTimer(CPU), device=CPU, world_size=1, model_flops_per_token=6e9, hardware_flops_per_token=8e9
    )
    window.start()
    clock.now += 2
    window.step_end(10, 10)
    figures = window.close()
    assert figures["throughput/tflops_per_gpu"] == pytest.approx(6e9 * 5 / 1e12)  # needs no peak
    assert not {"throughput/mfu", "throughput/hfu"} & set(figures)


def test_logging_between_rows_counts_into_the_next_row(clock: Clock) -> None:
    window = Window(PhaseTimer(CPU), device=CPU, world_size=1)
    window.start()
    clock.now += 1
    window.step_end(10, 10)
    window.close()
    clock.now += 0.5  # logging
    clock.now += 1
    window.step_end(10, 10)
    assert window.close()["time/step_s"] == 1.5


def test_summary_leaves_out_the_first_step_and_rows_do_not(clock: Clock) -> None:
    timer = PhaseTimer(CPU)
    window = Window(timer, device=CPU, world_size=1)
    window.start()
    spend(clock, timer, forward=50)
    window.step_end(100, 100)
    for _ in range(4):
        spend(clock, timer, forward=1, backward=1)
        window.step_end(100, 80)
    assert window.close()["time/step_s"] == (50 + 8) / 5
    summary = window.summary()
    assert summary["time/step_s"] == 2.0
    assert summary["time/forward_s"] == 1.0
    assert summary["throughput/tokens_per_s"] == 50.0
    assert summary["throughput/trained_tokens_per_s"] == 40.0


def test_excluded_intervals_are_in_neither_time_nor_phases(clock: Clock) -> None:
    timer = PhaseTimer(CPU)
    window = Window(timer, device=CPU, world_size=1)
    window.start()
    for _ in range(2):
        spend(clock, timer, forward=3)
        window.step_end(30, 30)
    with window.excluded():
        spend(clock, timer, forward=100)
        clock.now += 1000
    spend(clock, timer, forward=3)
    window.step_end(30, 30)
    row = window.close()
    assert (row["time/step_s"], row["time/forward_s"], row["throughput/tokens_per_s"]) == (3.0, 3.0, 10.0)
    assert window.summary()["time/step_s"] == 3.0


def test_no_steps_no_row(clock: Clock) -> None:
    window = Window(PhaseTimer(CPU), device=CPU, world_size=1)
    window.start()
    assert window.close() == {}
    assert window.summary() == {}


class Gpu:
    """A GPU that finishes what is queued only when waited for; events carry its own time in milliseconds."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.waits = 0
        self.made = 0

    def event(self, enable_timing: bool) -> Event:
        assert enable_timing
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._at = 0.0

    def record(self) -> None:
        self._at = self._gpu.clock.now

    def synchronize(self) -> None:
        self._gpu.waits += 1

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return (end._at - self._at) * 1000


@pytest.fixture
def gpu(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu(clock)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    return gpu


def test_gpu_phases_wait_only_when_read_and_reuse_events(clock: Clock, gpu: Gpu) -> None:
    timer = PhaseTimer(torch.device("cuda"))
    for _ in range(3):
        spend(clock, timer, forward=1.0, backward=2.0)
    assert gpu.waits == 0
    times = timer.window()
    assert (times["forward"], times["backward"]) == (3.0, 6.0)
    made = gpu.made
    spend(clock, timer, forward=1.0, backward=2.0)
    assert (timer.window()["forward"], gpu.made) == (1.0, made)


def test_gpu_events_are_bounded_without_waiting(
    clock: Clock, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throughput, "MAX_PAIRS", 8)
    timer = PhaseTimer(torch.device("cuda"))
    for _ in range(100):
        spend(clock, timer, forward=1.0)
    assert gpu.waits == 0
    assert gpu.made <= 2 * 10
    assert timer.window()["forward"] == 100.0


def test_gpu_steps_are_not_waited_for_between_rows(
    clock: Clock, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    device = torch.device("cuda")
    window = Window(PhaseTimer(device), device=device, world_size=1)
    window.start()
    window.step_end(1, 1)
    after_first_step = len(waits)
    for _ in range(5):
        clock.now += 1
        window.step_end(1, 1)
    assert len(waits) == after_first_step
    window.close()
    assert len(waits) == after_first_step + 1
