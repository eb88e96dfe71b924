"""The replay of torch's allocator beside what it reserves on a GPU, by the end of each part of the first step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from remat.config.units import GIB, MIB
from tests.support import tiny
from tests.support.launcher import deepspeed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch sees none"),
]
CONFIGS = ("zero2", "zero3", "zero2_offload")
SEGMENTS = {"expandable": "true", "fixed": "false"}
MOMENTS = {"engine": "states", "forward": "forward", "backward": "backward", "step": "step"}
SHARE, WORKSPACES_BYTES = 0.1, 64 * MIB  # cuBLAS's workspaces are no part of a replay


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six runs of a 124 M parameter model on one rank: three strategies, with both kinds of segments."""
    workshop = tiny.make_workshop(tmp_path_factory.mktemp("reserved"))
    for kind, on in SEGMENTS.items():  # the allocator of a process is of one kind
        spec = {
            f"{config}_{kind}": tiny.words(
                workshop, f"{config}_{kind}", "model=gpt2_small", "model.path=null", "model.init=random",
                "model.tokenizer=bytes", "data=synthetic", "train.seq_len=1024", "train.micro_batch_size=4",
                "train.global_batch_size=4", "checkpointing=full", "train.precision=bf16",
                f"deepspeed.config={config}", f"allocator.expandable_segments={on}",
            )
            for config in CONFIGS
        }  # fmt: skip
        for name, words in spec.items():  # and what one run leaves reserved is no part of the next
            done = deepspeed(*words, ranks=1, gpus=True)
            assert done.code == 0, f"{name}: {done.out[-6000:]}"
    return workshop / "out"


@pytest.mark.parametrize("kind", list(SEGMENTS))
@pytest.mark.parametrize("config", CONFIGS)
def test_reserved_memory_is_the_replays_in_each_part(config: str, kind: str, runs: Path) -> None:
    run = runs / f"{config}_{kind}" / "run"
    planned = json.loads((run / "plan.json").read_text())["planned"]
    snapshots = json.loads((run / "snapshots.json").read_text())["snapshots"]
    found = {
        moment["label"]: moment["gpu_reserved_bytes"] for moment in snapshots if moment["label"] in MOMENTS
    }
    expected = planned["gpu_reserved_after_bytes"]
    far = {
        label: (expected[MOMENTS[label]] / MIB, size / MIB)
        for label, size in found.items()
        if size != pytest.approx(expected[MOMENTS[label]], rel=SHARE, abs=WORKSPACES_BYTES)
    }
    assert found.keys() == MOMENTS.keys() and not far, f"planned and reserved MiB: {far}"
    most = max(row["memory/gpu_reserved_peak_gib"] for row in tiny.rows(run)) * GIB
    assert planned["gpu_reserved_by_segments_bytes"][kind] == planned["gpu_reserved_peak_bytes"]
    assert most >= planned["gpu_allocated_peak_bytes"] * 0.97
    assert most <= planned["resources"][0]["needed_bytes"] + WORKSPACES_BYTES
