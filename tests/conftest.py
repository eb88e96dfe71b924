"""Shared fixtures. Environment first: nothing here may touch a network, a default port or the user's caches."""

from __future__ import annotations

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

from remat import ops  # noqa: E402

ops.use_environment_folder()

from tests.pool import RankPool  # noqa: E402


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
