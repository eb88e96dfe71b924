"""The replica of torch's caching allocator: its segments by the rules, and a replay of a whole run."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from remat import cli
from remat.config import compose
from remat.config.units import GIB, MIB
from remat.planning import launch_plan
from remat.planning.plan import FRAGMENTATION, Planned, Recordings, Resource, Verdict, make_plan, plan_as_json
from remat.planning.settings import search
from remat.planning.simulation import reserved
from remat.planning.simulation.reserved import Block, CachingAllocator
from remat.planning.simulation.types import PEAKS

KNOWN = Recordings()
SMALL = ["model=gpt2_small", "data=synthetic", "hardware=1x4090", "train.seq_len=512", "checkpointing=full"]
SMALL += ["train.micro_batch_size=2", "train.global_batch_size=2"]


def plan(*words: str) -> Planned:
    return make_plan(compose.compose_run(list(words)).run, recordings=KNOWN)


@pytest.mark.parametrize(
    ("size", "fixed", "expandable"),
    [(1, 2, 2), (MIB, 2, 2), (MIB + 1, 20, 20), (10 * MIB, 10, 20), (11 * MIB + 1, 12, 20), (41 * MIB, 42, 60)],
)
def test_the_segment_of_one_tensor(size: int, fixed: int, expandable: int) -> None:
    for kind, expected in ((False, fixed), (True, expandable)):
        allocator = CachingAllocator(expandable=kind)
        allocator.malloc(size)
        assert allocator.reserved_bytes == expected * MIB


def test_a_freed_block_is_split_and_joins_its_neighbours() -> None:
    allocator = CachingAllocator(expandable=False)
    blocks = [allocator.malloc(5 * MIB) for _ in range(4)]
    assert allocator.reserved_bytes == 20 * MIB, "all four from one segment"
    for block in blocks[:3]:
        allocator.free(block)
    allocator.malloc(9 * MIB)
    allocator.malloc(6 * MIB)
    assert allocator.peak_bytes == 20 * MIB
    allocator.malloc(2 * MIB)
    assert allocator.peak_bytes == 40 * MIB


@pytest.mark.parametrize(("expandable", "expected"), [(False, 30 + 40 + 100), (True, 100)])
def test_only_expandable_segments_give_free_memory_to_a_larger_tensor(expandable: bool, expected: int) -> None:
    allocator = CachingAllocator(expandable=expandable)
    for block in [allocator.malloc(size * MIB) for size in (30, 40)]:
        allocator.free(block)
    allocator.malloc(100 * MIB)
    assert allocator.reserved_bytes == expected * MIB


def test_streams_do_not_share() -> None:
    allocator = CachingAllocator(expandable=True)
    allocator.free(allocator.malloc(20 * MIB, reserved.GATHERS))
    allocator.malloc(20 * MIB, reserved.COMPUTE)
    assert allocator.reserved_bytes == 40 * MIB


class _Counting(CachingAllocator):
    """Counts the bytes of live blocks too."""

    made: list[_Counting] = []  # noqa: RUF012

    def __init__(self, *, expandable: bool) -> None:
        super().__init__(expandable=expandable)
        self.live = self.most = 0
        self.made.append(self)

    def malloc(self, nbytes: int, stream: int = 0) -> Block:
        block = super().malloc(nbytes, stream)
        self.live += block.size
        self.most = max(self.most, self.live)
        return block

    def free(self, block: Block) -> None:
        super().free(block)
        self.live -= block.size


@pytest.mark.parametrize("config", ["zero2", "zero3"])
def test_a_replay_holds_what_the_plan_counts_and_frees_all_of_it(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The most that lives in the replay is the planned peak; after it only the model states are left."""
    monkeypatch.setattr(reserved, "CachingAllocator", _Counting)
    _Counting.made.clear()
    planned = plan(*SMALL, f"deepspeed.config={config}", "train.seq_len=1024", "train.micro_batch_size=2")
    states = sum(planned.plan.states.values()) if config == "zero3" else planned.plan.states_bytes
    for allocator in _Counting.made:
        assert allocator.most == pytest.approx(planned.plan.peak_bytes, rel=0.03)
        assert allocator.live == pytest.approx(states, rel=0.02)
    found = planned.plan.reserved_by_segments
    assert planned.plan.reserved_bytes == found["expandable"] and set(found) == {"expandable", "fixed"}
    assert planned.plan.peak_bytes <= found["expandable"] <= 1.3 * planned.plan.peak_bytes
    after = list(planned.plan.reserved_after.values())
    assert 0 < after[0] < after[1] < after[2] <= after[3] <= found["expandable"]
    assert after[3] >= planned.plan.states_bytes, "moments are there from the first update"


def test_a_users_allocator_is_what_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*SMALL, "deepspeed.config=zero2"]
    usual = plan(*words).plan
    off = plan(*words, "allocator.expandable_segments=false").plan
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    users = plan(*words).plan
    assert off.reserved_bytes == users.reserved_bytes == usual.reserved_by_segments["fixed"]
    assert off.peak_bytes == usual.peak_bytes
    gaps = [found.resources[0].needed_bytes - found.outside_bytes - found.peak_bytes for found in (usual, off)]
    least = [int(share * usual.peak_bytes) for share in FRAGMENTATION.values()]
    assert gaps[0] >= least[0] and gaps[1] == least[1], "fixed segments left others up to 60 %"


@pytest.mark.parametrize(
    ("found", "expected"),
    [(None, "fits"), (12, "fits"), (11, "tight"), (10, "tight"), (9, "does not fit")],
)
def test_the_three_verdicts(found: int | None, expected: str) -> None:
    assert Resource("GPU memory", 12, found, least_bytes=10).verdict == expected
    assert Resource("host memory", 12, found).verdict == {"tight": Verdict.too_large}.get(expected, expected)


@pytest.mark.parametrize(
    ("spare", "verdict", "code"), [(0.01, "fits", 0), (-0.01, "tight", 0), (None, "does not fit", 3)]
)
def test_the_command_says_the_verdict_and_what_decides(
    spare: float | None, verdict: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "advise", lambda args, planned, **_: search.Advice([], None))
    words = [*SMALL, "deepspeed.config=zero2"]
    gpu = plan(*words).plan.resources[0]
    assert gpu.least_bytes is not None and gpu.least_bytes < gpu.needed_bytes
    found = gpu.needed_bytes / GIB + spare if spare is not None else gpu.least_bytes / GIB - 0.01
    result = CliRunner().invoke(cli.app, ["plan", *words, f"hardware.gpu_memory_gib={found}"])
    assert result.exit_code == code
    assert result.output.startswith(f"{verdict}: model=gpt2_small "), (
        "the verdict first, then what was asked for"
    )
    assert ("gaps of torch's allocator" in " ".join(result.output.split())) is (verdict == "tight")
    assert "GiB per node" not in result.output and "assumed:" not in result.output
    planned = plan(*words, f"hardware.gpu_memory_gib={found}")
    written: dict[str, Any] = plan_as_json(planned)
    assert written["verdict"] == verdict and written["fits"] is (verdict == "fits")
    assert bool(written["decided_by"]) is (verdict != "fits")
    refused_above = launch_plan._refused_above(planned.plan.resources[0])
    assert (refused_above > int(found * GIB)) is (verdict == "does not fit"), "a tight run may start"


def test_all_peaks_and_the_three_figures_are_told() -> None:
    words = [*SMALL, "deepspeed.config=zero2"]
    written = plan_as_json(plan(*words))
    assert list(written["peaks"]) == list(PEAKS)
    assert (
        max(peak["allocated_bytes"] for peak in written["peaks"].values())
        == written["gpu_allocated_peak_bytes"]
    )
    assert written["peaks"]["backward"]["layer"] is not None
    assert written["peaks"]["loss"]["layer"] is None
    assert written["peaks"]["backward"]["in_words"].split(" of ")[0] in ("backward", "recomputation")
    assert written["peaks"]["update"]["in_words"] == "update of the weights"
    order = [written[f"gpu_{name}_peak_bytes"] for name in ("allocated", "reserved", "process")]
    assert order == sorted(order) and written["resources"][0]["needed_bytes"] >= order[-1]
    said = " ".join(CliRunner().invoke(cli.app, ["plan", *words, "--explain", "--no-advice"]).output.split())
    for words_said in (
        "allocated",
        "reserved",
        "process, as nvidia-smi shows",
        "forward",
        "loss",
        "update",
        "assumed:",
    ):
        assert words_said in said
