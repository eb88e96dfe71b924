"""The memory tools, background saves and rehearsals where there is a GPU: the files are there and say something."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from tests.support import tiny
from tests.support.launcher import deepspeed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch sees none"),
]
WORDS = [
    "deepspeed.config=zero2", "train.precision=bf16", "train.micro_batch_size=1", "profile=memory",
    "profile.summary=true", "profile.trace=true", "profile.after=1", "profile.steps=1", "profile.nvml_interval_s=0.05",
    "save.in_background=true", "save.rehearse=true", "save.every=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workshop = tiny.make_workshop(tmp_path_factory.mktemp("tools"))
    (workshop / "spec.json").write_text(json.dumps({"tools": tiny.words(workshop, "tools", *WORDS)}))
    done = deepspeed(str(workshop / "spec.json"), ranks=1, script="tests/support/many_runs.py", gpus=True)
    assert done.code == 0, done.out[-6000:]
    return workshop / "out" / "tools" / "run"


def test_the_allocators_history_is_a_snapshot_with_events(run: Path) -> None:
    with (run / "profile" / "memory-rank-0.pickle").open("rb") as file:
        snapshot = pickle.load(file)
    assert snapshot["segments"] and any(snapshot["device_traces"])


def test_tables_and_driver_samples_are_of_the_gpu(run: Path) -> None:
    assert "CUDA memory summary" in (run / "profile" / "summary-rank-0.txt").read_text()
    samples = [json.loads(line) for line in (run / "profile" / "nvml-rank-0.jsonl").read_text().splitlines()]
    assert max(sample["used_bytes"] for sample in samples) > 100 * 2**20


def test_snapshots_know_the_allocator(run: Path) -> None:
    moments = json.loads((run / "snapshots.json").read_text())["snapshots"]
    assert all(moment["gpu_reserved_bytes"] >= moment["gpu_allocated_bytes"] > 0 for moment in moments[1:])


def test_states_saved_on_the_way_are_complete(run: Path) -> None:
    assert list((run / "saved").glob("step-*/manifest.json"))
    assert not list(run.glob("tmp-*")) and not list((run / "saved").glob("tmp-*"))
