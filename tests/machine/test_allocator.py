"""PYTORCH_ALLOC_CONF: what a run sets, what a user's own setting does, how page-locked buffers are rounded."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from remat.config.options import AllocatorConfig
from remat.config.units import MIB
from remat.machine import allocator
from remat.machine.allocator import Allocators

BOTH = "expandable_segments:True,pinned_max_round_threshold_mb:16,pinned_max_cached_size_mb:16"


@pytest.fixture
def torch_2_13(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "torch_version", lambda: "2.13.0+cu130")


@pytest.mark.usefixtures("torch_2_13")
@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        (AllocatorConfig(), BOTH),
        (AllocatorConfig(exact_pinned=False), "expandable_segments:True"),
        (AllocatorConfig(expandable_segments=False), BOTH.partition(",")[2]),
        (AllocatorConfig(expandable_segments=False, exact_pinned=False), None),
    ],
)
def test_a_run_sets_what_is_asked(cfg: AllocatorConfig, expected: str | None) -> None:
    environ: dict[str, str] = {}
    allocator.settle(cfg, environ)
    assert environ.get("PYTORCH_ALLOC_CONF") == expected
    found = allocator.in_effect(cfg, {})
    assert found == allocator.in_effect(cfg, environ), "a plan says what the run that follows does"
    assert found.expandable_segments is cfg.expandable_segments
    assert (found.exact_above_bytes == 16 * MIB) is cfg.exact_pinned


def test_an_older_torch_is_not_told_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "torch_version", lambda: "2.11.1")
    environ: dict[str, str] = {}
    allocator.settle(AllocatorConfig(), environ)
    assert environ == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert allocator.in_effect(AllocatorConfig(), {}).exact_above_bytes is None


@pytest.mark.parametrize("name", allocator.VARIABLES)
def test_a_users_variable_stays_and_is_what_counts(name: str) -> None:
    environ = {name: "max_split_size_mb:128, pinned_max_cached_size_mb:4"}
    allocator.settle(AllocatorConfig(), environ)
    assert environ == {name: "max_split_size_mb:128, pinned_max_cached_size_mb:4"}
    assert allocator.in_effect(AllocatorConfig(), environ) == Allocators(exact_above_bytes=4 * MIB)


def test_torch_reads_the_first_of_the_variables() -> None:
    """In a process of its own: torch reads them once."""
    environ = dict.fromkeys(allocator.VARIABLES, "expandable_segments:True") | {
        allocator.VARIABLES[0]: "pinned_max_cached_size_mb:4"
    }
    code = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == environ[allocator.VARIABLES[0]]
    assert allocator.in_effect(AllocatorConfig(), environ) == Allocators(exact_above_bytes=4 * MIB)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch does not know the keys")
def test_torch_knows_what_is_set() -> None:
    """It refuses a key that it does not know when it first looks."""
    code = f"import torch; torch._C._accelerator_setAllocatorSettings({BOTH!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("size", "rounded", "exact"),
    [(0, 0, 0), (1, 1, 1), (5, 8, 8), (16 * MIB, 16 * MIB, 16 * MIB), (17 * MIB + 3, 32 * MIB, 17 * MIB + 3)],
)
def test_what_a_page_locked_buffer_takes(size: int, rounded: int, exact: int) -> None:
    assert Allocators().pinned_bytes(size) == rounded
    assert Allocators(exact_above_bytes=16 * MIB).pinned_bytes(size) == exact
