"""What a run that is out of memory goes on with: planned, training the same, and a state that was saved fits it."""

from __future__ import annotations

import pytest

from remat.config import compose
from remat.config.units import GIB
from remat.planning.plan import GPU_MEMORY, Recordings, make_plan, needed_bytes
from remat.planning.settings import less_memory
from tests.support import tiny


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tiny.make_workshop(tmp_path_factory.mktemp("less"))
    model = tiny.make_model(folder / "deep", num_hidden_layers=3, hidden_size=256, intermediate_size=1024)
    more = ["train.precision=bf16", "train.seq_len=4096", "train.loss=chunked", "train.micro_batch_size=1"]
    return tiny.words(
        folder, "less", f"model.path={model}", "hardware=1x4090", "deepspeed.config=zero2", *more, "force=true"
    )


def on(words: list[str], gib: float) -> list[str]:
    return [*words, f"hardware.gpu_memory_gib={gib:.4f}"]


KNOWN = Recordings()


def needed_gib(words: list[str], *more: str) -> float:
    planned = make_plan(compose.compose_run([*words, *more]).run, recordings=KNOWN)
    return needed_bytes(planned, GPU_MEMORY) / GIB


@pytest.fixture
def known() -> Recordings:
    """What the searches and plans of this file have recorded of the same model."""
    return KNOWN


@pytest.fixture(scope="module")
def ends(words: list[str]) -> tuple[float, float]:
    """GiB that the run needs when it keeps all activations, and when it recomputes all."""
    return needed_gib(words, "checkpointing=none"), needed_gib(words, "checkpointing=full")


def test_only_what_a_saved_state_fits_may_change(
    words: list[str], ends: tuple[float, float], known: Recordings
) -> None:
    """Offload by ZeRO-3 would need least; it shards the state in another way."""
    most, least = ends
    chosen = less_memory.choose(on([*words, "checkpointing=none"], (most + least) / 2), known, on_gpu=True)
    assert chosen is not None and all(
        word.startswith(("checkpointing", "train.micro_batch_size")) for word in chosen
    )
    assert needed_gib([*words, "checkpointing=none"], *chosen) <= (most + least) / 2
    assert less_memory.choose(on([*words, "checkpointing=none"], least / 10), known, on_gpu=True) is None


GIVEN = pytest.param(["checkpointing.budget_gib={most}"], id="given", marks=pytest.mark.exhaustive)


@pytest.mark.parametrize("own", [pytest.param([], id="auto"), GIVEN])
def test_a_budget_becomes_a_smaller_one(
    words: list[str], ends: tuple[float, float], own: list[str], known: Recordings
) -> None:
    """The same policy on the same GPU would choose the same tables again."""
    most, least = ends
    room = least + 0.7 * (most - least)
    run = [*words, "checkpointing=budget", *(word.format(most=f"{most:.4f}") for word in own)]
    chosen = less_memory.choose(on(run, room), known, on_gpu=True)
    assert chosen is not None
    policy = [word for word in chosen if word.startswith("checkpointing=")]
    assert policy in ([], ["checkpointing=budget"])
    (size,) = (float(word.partition("=")[2]) for word in chosen if word.startswith(less_memory.OPTION))
    assert least * 0.9 < size <= room
    assert needed_gib(run, *chosen) <= room


def test_a_budget_on_cpus_counts_what_a_rank_holds(
    words: list[str], ends: tuple[float, float], known: Recordings
) -> None:
    on_cpu = [word for word in words if not word.startswith("hardware=")] + ["hardware=1x4090"]
    run = [*on_cpu, "checkpointing=budget", "checkpointing.budget_gib=20"]
    most, least = ends
    as_gpu, as_cpu = (
        less_memory.choose(on(run, (most + least) / 2), known, on_gpu=gpu) for gpu in (True, False)
    )
    assert as_gpu is not None and as_cpu is not None
    sizes = [float(found[-1].partition("=")[2]) for found in (as_gpu, as_cpu)]
    assert sizes[1] < sizes[0], "without a context and an allocator's gaps"
