"""fp16 on GPUs, saved after a step that was skipped for overflow: the loss scale goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support import tiny
from tests.support.launcher import deepspeed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch sees none"),
]
FP16 = ["train.precision=fp16", "train.steps=6", "train.micro_batch_size=1"]
SCALE = "deepspeed.overrides.fp16.initial_scale_power=8"  # low enough for no overflow but those that are made
STRATEGIES = ["zero2", "zero2_offload", "zero3", "zero3_offload_optimizer"]


def overflow(step: int) -> dict[str, object]:
    return {"what": "inf gradient", "rank": 0, "at": f"step {step}"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each strategy without an end between, and in two parts: overflow in steps 2 and 4, saved after step 3."""
    workshop = tiny.make_workshop(tmp_path_factory.mktemp("fp16"))
    spec = []
    for strategy in STRATEGIES:
        common = [*FP16, SCALE, f"deepspeed.config={strategy}"]
        parts = tiny.words(workshop, f"parts_{strategy}", *common)
        spec += [
            {
                "name": f"whole_{strategy}",
                "words": tiny.words(workshop, f"whole_{strategy}", *common),
                "fault": [overflow(2), overflow(4)],
            },
            {"name": f"parts_{strategy}", "words": [*parts, "train.stop_at=3"], "fault": overflow(2)},
            {"name": f"parts_{strategy}", "words": [*parts, "resume=auto"], "fault": overflow(1)},
        ]
    path = workshop / "spec.json"
    path.write_text(json.dumps(spec))
    ranks = torch.cuda.device_count() if 4 % torch.cuda.device_count() == 0 else 1
    done = deepspeed(str(path), ranks=ranks, script="tests/support/faulty_runs.py", gpus=True)
    assert done.code == 0, done.out[-6000:]
    return workshop / "out"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fp16_goes_on_with_its_loss_scale(runs: Path, strategy: str) -> None:
    """Losses within 0.1 %: some CUDA kernels add in no fixed order. The scale halves at the second overflow only."""
    whole, parts = (tiny.rows(runs / f"{name}_{strategy}" / "run") for name in ("whole", "parts"))
    for key in ("optim/loss_scale", "optim/skipped_steps", "tokens/seen", "tokens/trained", "optim/lr"):
        assert [row[key] for row in parts] == [row[key] for row in whole], key
    assert [row["optim/skipped_steps"] for row in whole] == [0, 1, 1, 2, 2, 2]
    assert [row["optim/loss_scale"] for row in whole] == [256.0] * 3 + [128.0] * 3
    losses = [[row["loss/train"] for row in rows] for rows in (whole, parts)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3, nan_ok=True)
