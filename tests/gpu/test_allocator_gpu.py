"""torch's real page-locked allocator: buffers take their own size, freed ones are never given out too small."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from remat.config.options import AllocatorConfig
from remat.config.units import MIB
from remat.machine import allocator
from remat.machine.allocator import VARIABLES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SIZES = [3 * MIB, 17 * MIB + 4096, 40 * MIB, 65 * MIB, 130 * MIB, 257 * MIB]
PROBE = """
import json, sys, torch
sizes = json.loads(sys.argv[1])
held = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
counted = torch.cuda.host_memory_stats()["allocated_bytes.current"]
del held[3]
larger = torch.full([127 * 2**20], 7, dtype=torch.uint8, pin_memory=True)
again = larger.cuda().eq(7).all().item()
grown = torch.cuda.host_memory_stats()["allocated_bytes.current"]
print(json.dumps([counted, grown, again, torch._C._accelerator_getAllocatorSettings()]))
"""


def probe(cfg: AllocatorConfig) -> list[int]:
    environ = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    allocator.settle(cfg, environ)
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(SIZES)],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[int] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("exact", [True, False])
def test_planned_and_counted_bytes_are_equal(exact: bool) -> None:
    cfg = AllocatorConfig(exact_pinned=exact)
    counted, grown, intact, _ = probe(cfg)
    expected = allocator.in_effect(cfg, {})
    assert counted == pytest.approx(sum(map(expected.pinned_bytes, SIZES)), rel=0.02)
    freed = 0 if expected.exact_above_bytes is None else SIZES[3]  # a rounded buffer is kept for the next
    added = 0 if expected.exact_above_bytes is None else 127 * MIB  # which fits into the 128 MiB
    assert grown == pytest.approx(counted - freed + added, rel=0.02)
    assert intact
