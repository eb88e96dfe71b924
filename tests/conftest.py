"""Shared fixtures. Environment first: nothing here may touch a network, a default port or the user's caches."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="offline", TOKENIZERS_PARALLELISM="false")
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

import pytest  # noqa: E402

from remat.machine import ops  # noqa: E402

ops.use_environment_folder()

from tests.support import fork_server  # noqa: E402
from tests.support.pool import RankPool  # noqa: E402

LONGEST = [  # in CPU time of their own and of what they start; the first two by their exhaustive cases; four sleep
    "runs/test_sequence_parallel_ranks.py",
    "planning/test_recipes_beaten.py",
    "runs/test_user_path.py",
    "runs/test_granularity_grid.py",
    "repository/test_fork_server.py",
    "runs/test_retreat.py",
    "config/test_compose.py",
    "planning/test_search.py",
    "planning/test_budget.py",
    "training/test_run_ranks.py",
    "runs/test_trajectories.py",
    "runs/test_lora_ranks.py",
    "runs/test_stop.py",
    "runs/test_installed.py",
    "machine/test_owner_lock.py",
    "runs/test_nvme.py",
    "runs/test_simulated_peaks_ranks.py",
    "activation_checkpointing/test_budget.py",
    "model/test_qlora.py",
    "machine/test_peers.py",
    "runs/test_tutorial.py",
    "runs/test_saving_ranks.py",
    "runs/test_tensor_parallel_ranks.py",
    "runs/test_saved_tensors_ranks.py",
    "runs/test_reshard_ranks.py",
    "runs/test_recipes_rehearsed.py",
    "runs/test_compiled_ranks.py",
    "runs/test_supervise.py",
    "planning/test_advice.py",
    "planning/test_repeat.py",
    "runs/test_resume_equality.py",
    "runs/test_zero3_replica_ranks.py",
    "runs/test_saves_on_the_way.py",
    "planning/test_plan.py",
]


def pytest_configure(config: pytest.Config) -> None:
    """One process to fork ranks from for all workers of pytest-xdist; without workers it starts when it is needed."""
    if config.getoption("tx", None) and fork_server.ADDRESS not in os.environ:
        os.environ[fork_server.ADDRESS] = fork_server.start()


def pytest_collection_finish() -> None:
    """Spare the collections of garbage what was imported: two million objects that stay."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what grids leave to `make test-all`; files that take longest come first, so that no worker ends alone.

    A sample of a grid is its diagonals: each value of a parameter is in it that meets `one_in` values of another.
    """
    values: dict[tuple[str, str], list[str]] = {}  # of each parameter of a test, in the order they come
    for item in items:
        if (sample := item.get_closest_marker("sample")) is None:
            continue
        diagonal = 0
        for name, value in item.callspec.params.items():  # type: ignore[attr-defined]
            known = values.setdefault((item.nodeid.partition("[")[0], name), [])
            if repr(value) not in known:
                known.append(repr(value))
            diagonal += known.index(repr(value))
        if diagonal % sample.kwargs["one_in"]:
            item.add_marker(pytest.mark.exhaustive)
    items.sort(key=lambda item: place_in_queue(str(item.path.relative_to(ROOT / "tests"))))


def place_in_queue(file: str) -> int:
    """Of a file in tests/; equals keep their order. Needs --no-loadscope-reorder under pytest-xdist."""
    if file in LONGEST:
        return LONGEST.index(file)
    return len(LONGEST) + (not file.startswith("runs/"))


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """Two persistent CPU ranks with a process group; about a second a case."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def one_rank() -> Iterator[RankPool]:
    """One persistent rank in a process of its own, for what needs an engine."""
    pool = RankPool(1)
    yield pool
    pool.close()
