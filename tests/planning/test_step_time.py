"""Step times by hand: every term alone, what hides it, and what happens when a rate is not known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from remat.config import compose
from remat.config.options import Precision
from remat.machine import gpus
from remat.machine.gpus import Machine
from remat.planning.simulation.types import Moment, OpCost, Phase, Simulation, ZeroSettings
from remat.planning.step_time import RANGES, StepTime, seconds_by_bound, step_time

MACHINE = Machine(
    name="round",
    gpus_per_node=4,
    num_nodes=2,
    matmul_tflops=100,
    attention_tflops=50,
    memory_gbs=1000,
    launch_us=10,
    pcie_h2d_gbs=20,
    pcie_d2h_gbs=10,
    gpu_link_gbs=200,
    nic_gbs=50,
    cpu_adam_gparams_s=2,
    nvme_read_gbs=4,
    nvme_write_gbs=2,
)
ZERO = ZeroSettings(stage=0, world_size=1, reduce_bucket_size=1, overlap_comm=False)
FORWARD = OpCost("matmul", 10**12, 10**6, Phase.forward)  # 10 ms
RECOMPUTE = replace(FORWARD, phase=Phase.recompute)
BACKWARD = OpCost("matmul", 2 * 10**12, 10**6, Phase.backward)  # 20 ms
LAUNCH = 1e-5


def simulation(*ops: OpCost, gathered: int = 0) -> Simulation:
    """`gathered` are elements of two bytes."""
    nothing = Moment(0, {}, Phase.forward, None, "")
    return Simulation(nothing, nothing, [], 0, {}, list(ops), 2 * gathered, [])


def time_of(
    *ops: OpCost, gathered: int = 0, moved_bytes: int = 0, zero: ZeroSettings = ZERO, **more: Any
) -> StepTime:
    given: dict[str, Any] = {"machine": MACHINE, "num_params": 0, "num_trained": 0, "accumulation": 1}
    simulated = replace(simulation(*ops, gathered=gathered), moved_bytes=moved_bytes)
    return step_time(simulated, zero=zero, tokens=1000, **{**given, **more})


def zero(stage: int, ranks: int, **more: Any) -> ZeroSettings:
    return replace(ZERO, stage=stage, world_size=ranks, **more)


def with_rate(name: str, value: float | None) -> Machine:
    changed: dict[str, Any] = {name: value}
    return replace(MACHINE, **changed)


@pytest.mark.parametrize(
    ("op", "seconds"),
    [
        (FORWARD, 0.01 + LAUNCH),
        (OpCost("matmul", 10**6, 10**9, Phase.forward), 0.001 + LAUNCH),  # bound by memory
        (OpCost("elementwise", 10**13, 2 * 10**9, Phase.forward), 0.002 + LAUNCH),
        (OpCost("attention", 10**12, 1, Phase.forward), 0.01 + LAUNCH),  # half of the square at 50 TFLOP/s
        (OpCost("elementwise", 0, 0, Phase.forward), 0.0),  # a view launches nothing
        (OpCost("elementwise", 0, 10**9, Phase.step), 0.0),
    ],
)
def test_an_operation_takes_the_longer_of_its_flops_and_its_bytes(op: OpCost, seconds: float) -> None:
    assert time_of(op).compute_s == pytest.approx(seconds)


def test_phases_are_told_apart_and_add_up() -> None:
    found = time_of(FORWARD, RECOMPUTE, BACKWARD, accumulation=3)
    assert found.compute_s == pytest.approx(3 * (0.03 + 2 * LAUNCH))
    assert found.recompute_s == pytest.approx(3 * (0.01 + LAUNCH))
    assert found.total_s == pytest.approx(found.compute_s + found.recompute_s)
    assert found.tokens_per_s == pytest.approx(3000 / found.total_s)
    assert found.unknown == []


@pytest.mark.parametrize(
    ("stage", "accumulation", "passes"),
    [(0, 1, 2), (0, 4, 2), (1, 4, 2), (2, 1, 2), (2, 4, 5), (3, 1, 1), (3, 4, 4)],
)
def test_gradients_and_weights_on_the_ring(stage: int, accumulation: int, passes: int) -> None:
    """4 ranks of a node: 10^9 16-bit gradients take 2e9 * 3/4 / 200e9 s a pass; ZeRO-3 gathers count apart."""
    found = time_of(zero=zero(stage, 4), num_trained=10**9, accumulation=accumulation)
    assert found.collectives_s == pytest.approx(passes * 0.0075)


def test_zero_3_gathers_as_counted_and_the_network_between_nodes() -> None:
    one_node = time_of(zero=zero(3, 4), gathered=3 * 10**9)
    assert one_node.collectives_s == pytest.approx(6e9 * 3 / 4 / 200e9)
    two_nodes = time_of(zero=zero(3, 8), gathered=3 * 10**9)
    assert two_nodes.collectives_s == pytest.approx(6e9 * 7 / 8 / 50e9)


def test_second_shards_keep_all_gathers_but_the_first_forward_within_their_ranks() -> None:
    """hpZ: of two micro-batches' gathers a quarter (half of one, nothing is recomputed) is of all ranks."""
    found = time_of(zero=zero(3, 8, second_shards=4), gathered=2 * 10**9, num_trained=10**9, accumulation=2)
    everywhere, near = (8e9 / 4 + 2 * 2e9) * 7 / 8, 8e9 * 3 / 4 * 3 / 4
    assert found.traffic_bytes == {
        "link of each GPU": round(everywhere + near),
        "network of each node": round(everywhere),
    }
    assert found.collectives_s == pytest.approx(everywhere / 50e9 + near / 200e9)
    plain = time_of(zero=zero(3, 8), gathered=2 * 10**9, num_trained=10**9, accumulation=2)
    assert plain.traffic_bytes["network of each node"] == round((8e9 + 2 * 2e9) * 7 / 8)
    assert time_of(zero=zero(3, 1), gathered=2 * 10**9).traffic_bytes == {}


def test_overlap_hides_collectives_behind_compute_but_not_the_all_gather_after_the_step() -> None:
    wide = zero(2, 4, overlap_comm=True)
    found = time_of(FORWARD, BACKWARD, zero=wide, num_trained=10**9)
    assert found.collectives_s == pytest.approx(0.0075)
    assert found.hidden_s["collectives"] == pytest.approx(0.0075)
    longer = time_of(FORWARD, zero=wide, num_trained=4 * 10**9)
    assert longer.collectives_s == pytest.approx(0.03 - 0.01 - LAUNCH + 0.03)


def test_optimizer_on_the_gpu_streams_its_shard_through_memory() -> None:
    assert time_of(zero=zero(2, 4), num_trained=10**9).optimizer_s == pytest.approx(0.25e9 * 30 / 1e12)
    assert time_of(zero=zero(0, 4), num_trained=10**9).optimizer_s == pytest.approx(1e9 * 30 / 1e12)


def test_optimizer_on_the_cpu_is_shared_by_the_ranks_of_a_node() -> None:
    offload = zero(2, 8, offload_optimizer=True)
    found = time_of(zero=offload, num_trained=8 * 10**9)
    assert found.optimizer_s == pytest.approx(4 / 2)
    # 2 GB of gradients leave at 10 GB/s, the same size of weights returns at 20 GB/s
    assert found.pcie_s == pytest.approx(0.2 + 0.1)
    shared = time_of(zero=offload, num_trained=8 * 10**9, machine=replace(MACHINE, gpus_per_pcie_link=2))
    assert shared.pcie_s == pytest.approx(2 * (0.2 + 0.1))


def test_gradients_leave_beside_backward() -> None:
    offload = zero(2, 1, offload_optimizer=True)
    found = time_of(FORWARD, BACKWARD, zero=offload, num_trained=10**8)  # 20 ms out, 10 ms back
    assert found.pcie_s == pytest.approx(0.02 - 0.02 - LAUNCH + 0.01, abs=2e-5)
    assert found.hidden_s["pcie"] == pytest.approx(0.02, abs=2e-5)


def test_offloaded_weights_come_with_each_gather_and_do_not_return_after_the_step() -> None:
    offload = zero(3, 4, offload_optimizer=True, offload_param=True)
    found = time_of(zero=offload, gathered=4 * 10**9)
    assert found.pcie_s == pytest.approx(2e9 / 20e9)


def test_activations_are_hidden_as_long_as_they_are_faster_than_compute() -> None:
    hidden = time_of(FORWARD, BACKWARD, moved_bytes=9 * 10**7)  # 9 ms out of 10, 4.5 ms back
    assert hidden.pcie_s == 0
    assert hidden.hidden_s["pcie"] == pytest.approx(0.0135)
    exposed = time_of(FORWARD, BACKWARD, moved_bytes=3 * 10**8)  # 30 ms out, 15 ms back
    assert exposed.pcie_s == pytest.approx(0.02 - LAUNCH)


def test_nvme_is_read_and_written_by_all_ranks_of_a_node() -> None:
    offload = zero(3, 4, offload_optimizer=True, offload_param=True)
    states = time_of(zero=offload, num_trained=10**9, num_params=10**9, optimizer_on_nvme=True)
    assert states.nvme_s == pytest.approx(16e9 / 4e9 + 16e9 / 2e9)
    weights = time_of(
        zero=offload,
        num_trained=10**9,
        num_params=10**9,
        gathered=2 * 10**9,
        params_on_nvme=True,
        accumulation=2,
    )
    assert weights.nvme_s == pytest.approx(2 * 4e9 / 4e9 + 2e9 / 2e9)


@pytest.mark.parametrize(
    "rate",
    [
        *("matmul_tflops", "attention_tflops", "memory_gbs", "launch_us", "pcie_h2d_gbs", "pcie_d2h_gbs"),
        *("gpu_link_gbs", "nic_gbs", "cpu_adam_gparams_s", "nvme_read_gbs", "nvme_write_gbs"),
    ],
)
def test_a_rate_that_is_not_known_is_named_and_a_faster_one_never_slows_a_step(rate: str) -> None:
    ops = (FORWARD, RECOMPUTE, BACKWARD, replace(FORWARD, kind="attention"))
    case: dict[str, Any] = {
        "zero": zero(3, 8, overlap_comm=True, offload_optimizer=True, offload_param=True),
        "gathered": 3 * 10**9,
        "num_params": 10**9,
        "num_trained": 10**9,
        "moved_bytes": 10**9,
        "optimizer_on_nvme": True,
        "params_on_nvme": True,
    }
    known = time_of(*ops, **case)
    assert known.unknown == []
    without = time_of(*ops, **case, machine=with_rate(rate, None))
    assert without.unknown == [f"{rate} of round"]
    factor = 0.5 if rate == "launch_us" else 2.0
    faster = time_of(*ops, **case, machine=with_rate(rate, factor * getattr(MACHINE, rate)))
    assert faster.total_s <= known.total_s


def test_rates_that_are_not_known_give_a_range() -> None:
    """It holds the time of every machine between the slowest and the fastest, and is not there without a GPU."""
    case: dict[str, Any] = {"zero": zero(2, 4), "num_trained": 10**9}
    unknown = replace(with_rate("gpu_link_gbs", None), gpu="H100")
    found = time_of(FORWARD, **case, machine=unknown)
    slow, fast = (
        time_of(FORWARD, **case, machine=with_rate("gpu_link_gbs", r)) for r in RANGES["gpu_link_gbs"]
    )
    assert found.unknown == ["gpu_link_gbs of round"]
    assert found.between == (fast.total_s, slow.total_s)
    assert found.total_s < fast.total_s < slow.total_s
    assert time_of(FORWARD, **case).between is None  # all is known
    assert time_of(FORWARD, **case, machine=replace(unknown, gpu=None)).between is None
    assert time_of(FORWARD, **case, machine=replace(unknown, matmul_tflops=None)).between is None


def test_the_ranges_are_those_of_the_shipped_machines() -> None:
    found: dict[str, set[float]] = {name: set() for name in RANGES}
    for name in compose.group_choices()["hardware"]:
        shipped = gpus.machine(compose.compose_run([f"hardware={name}"]).run.hardware)
        for rate, values in found.items():
            if shipped.gpu and (value := getattr(shipped, rate)) is not None:
                values.add(value)
    assert {rate: (min(values), max(values)) for rate, values in found.items()} == RANGES


def test_what_is_not_needed_is_not_missed() -> None:
    lonely = Machine(name="lonely", matmul_tflops=100, memory_gbs=1000, launch_us=10)
    assert time_of(FORWARD, num_trained=10**9, machine=lonely).unknown == []


def test_without_any_rate_there_is_no_throughput() -> None:
    found = time_of(FORWARD, machine=Machine(name="dark"))
    assert found.tokens_per_s is None
    assert found.unknown == ["launch_us of dark", "matmul_tflops of dark", "memory_gbs of dark"]


def test_fp32_has_no_rate_and_moves_twice_the_bytes() -> None:
    found = time_of(FORWARD, zero=zero(2, 4), num_trained=10**9, precision=Precision.fp32)
    assert found.unknown == ["matmul_tflops in fp32: it depends on whether TF32 is allowed"]
    assert found.collectives_s == pytest.approx(2 * 0.015)


def test_copies_and_collectives_run_beside_one_another() -> None:
    case: dict[str, Any] = {"gathered": 4 * 10**9, "moved_bytes": 0}
    offload = zero(3, 4, overlap_comm=True, offload_param=True)  # 30 ms of gathers, 100 ms of copies
    found = time_of(FORWARD, RECOMPUTE, BACKWARD, zero=offload, **case)
    assert found.collectives_s == 0
    assert found.hidden_s["collectives"] == pytest.approx(0.03)
    assert found.pcie_s == pytest.approx(0.1 - 0.04 - 3 * LAUNCH)
    serial = time_of(FORWARD, RECOMPUTE, BACKWARD, zero=replace(offload, overlap_comm=False), **case)
    assert serial.collectives_s == pytest.approx(0.03)
    assert serial.pcie_s == found.pcie_s


def test_assumptions_say_what_overlaps() -> None:
    serial = time_of(FORWARD).assumptions
    assert any("overlap_comm=false" in text for text in serial)
    wide = time_of(FORWARD, zero=zero(3, 4, overlap_comm=True), moved_bytes=1).assumptions
    assert any("reductions and gathers" in text for text in wide)
    assert any("PCIe" in text for text in wide)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("offload", [True, False])
def test_the_phases_are_the_whole_step(stage: int, overlap: bool, offload: bool) -> None:
    settings = zero(
        stage, 8, overlap_comm=overlap, offload_optimizer=offload, offload_param=offload and stage == 3
    )
    found = time_of(
        FORWARD,
        RECOMPUTE,
        BACKWARD,
        zero=settings,
        gathered=10**10,
        num_params=10**9,
        num_trained=10**9,
        accumulation=3,
        moved_bytes=10**9,
        optimizer_on_nvme=offload,
    )
    assert sum(found.phases_s.values()) == pytest.approx(found.total_s)
    assert all(seconds > 0 for seconds in found.phases_s.values())


def test_seconds_by_bound_are_the_compute_of_both_phases() -> None:
    copy = OpCost("elementwise", 0, 10**9, Phase.backward)
    parts = seconds_by_bound(simulation(FORWARD, BACKWARD, RECOMPUTE, copy), MACHINE)
    assert parts["forward"] == pytest.approx((0.01, LAUNCH))
    assert parts["backward"] == pytest.approx((0.03, 1e-3 + 3 * LAUNCH))


EXCHANGE = OpCost("exchange", 0, 2 * 10**9, Phase.forward)  # a rank gives 1 GB and gets as much


@pytest.mark.parametrize(
    ("ranks", "seconds"),
    [
        (4, 1e9 * 3 / 4 / 200e9),  # within a node, by the link of a GPU
        (16, 8 * 1e9 * 8 / 16 / 50e9),  # half of what eight GPUs give leaves the node by its network
    ],
)
def test_exchanges_are_waited_for_within_a_node_and_beyond(ranks: int, seconds: float) -> None:
    machine = replace(MACHINE, gpus_per_node=8)
    without, found = (
        time_of(FORWARD, *more, zero=zero(0, 16), machine=machine, sequence_ranks=ranks)
        for more in ([], [EXCHANGE])
    )
    assert found.collectives_s - without.collectives_s == pytest.approx(seconds)
    assert found.phases_s["forward"] - without.phases_s["forward"] == pytest.approx(seconds)
    assert found.compute_s == without.compute_s


def test_activations_may_take_of_the_link_what_zero_leaves_of_it() -> None:
    """10 ms out and 20 ms back of an idle link; with weights that come, less of the way back; shared links, less."""
    idle = time_of(FORWARD, BACKWARD).link
    assert idle is not None
    out, back = MACHINE.pcie_d2h_gbs, MACHINE.pcie_h2d_gbs
    assert out is not None
    assert back is not None
    forward, backward = 0.01 + LAUNCH, 0.02 + LAUNCH
    assert idle.free_bytes == pytest.approx(min(out * forward, back * backward) * 1e9, rel=1e-6)
    assert idle.s_per_byte == pytest.approx((1 / out + 1 / back) / 1e9)
    gathered = int(back * 1e9 * 0.03 / 2)  # 30 ms, of which half in forward
    busy = time_of(FORWARD, BACKWARD, gathered=gathered, zero=zero(3, 1, offload_param=True)).link
    assert busy is not None
    assert busy.free_bytes == pytest.approx(min(out * 0.015, back * (backward - 0.015)) * 1e9, rel=1e-3)
    full = time_of(FORWARD, BACKWARD, gathered=2 * gathered, zero=zero(3, 1, offload_param=True)).link
    assert full is not None
    assert full.free_bytes == 0
    shared = time_of(
        FORWARD, BACKWARD, machine=replace(MACHINE, gpus_per_node=2, gpus_per_pcie_link=2), zero=zero(2, 2)
    ).link
    assert shared is not None
    assert shared.free_bytes == pytest.approx(idle.free_bytes / 2, rel=1e-6)
    again = time_of(FORWARD, BACKWARD, RECOMPUTE).link
    assert again == idle  # what runs again is no time to count on
    assert time_of(FORWARD, machine=with_rate("pcie_d2h_gbs", None)).link is None


@pytest.mark.parametrize("gathered", [0, 10**8])
def test_what_the_link_has_left_is_hidden_and_a_byte_more_is_not(gathered: int) -> None:
    setting = {"gathered": gathered, "zero": zero(3, 1, offload_param=True)}
    before = time_of(FORWARD, BACKWARD, **setting)
    assert before.link is not None
    room = before.link.free_bytes
    assert time_of(FORWARD, BACKWARD, moved_bytes=room, **setting).total_s == pytest.approx(before.total_s)
    beyond = time_of(FORWARD, BACKWARD, moved_bytes=room + 10**7, **setting).total_s - before.total_s
    assert 0 < beyond <= 10**7 * before.link.s_per_byte * 1.001
