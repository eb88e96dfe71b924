"""The same promises on real GPUs: through the launcher on all of them. Skipped, with the reason, without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from remat.model import loss
from tests.support import tiny
from tests.support.launcher import deepspeed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch sees none"),
]
RUNS = {
    "bf16_zero2": ["deepspeed.config=zero2", "train.precision=bf16"],
    "bf16_zero3_offload": ["deepspeed.config=zero3_offload", "train.precision=bf16"],
    "bf16_zero3_offload_none": ["deepspeed.config=zero3_offload", "train.precision=bf16", "checkpointing=none"],
    "bf16_zero3_full_logits": ["deepspeed.config=zero3", "train.precision=bf16", "train.loss=full"],
    "fp16_zero3": ["deepspeed.config=zero3", "train.precision=fp16"],
    "bf16_zero2_adamw_8bit": ["deepspeed.config=zero2", "train.precision=bf16", "optim.name=adamw_8bit"],
    "bf16_zero3_paged": ["deepspeed.config=zero3", "train.precision=bf16", "optim.name=paged_adamw_8bit"],
    "fp32_zero2": ["deepspeed.config=zero2", "train.precision=fp32"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[float, float]]]:
    folder = tmp_path_factory.mktemp("gpu")
    model, data = tiny.make_model(folder / "model"), tiny.make_instructions(folder / "data.jsonl")
    ranks = torch.cuda.device_count() if 4 % torch.cuda.device_count() == 0 else 1
    spec = {
        name: tiny.overrides(model, data, folder / "out", name, "train.micro_batch_size=1", *more)
        for name, more in RUNS.items()
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    done = deepspeed(str(folder / "spec.json"), ranks=ranks, script="tests/support/many_runs.py", gpus=True)
    assert done.code == 0, done.out[-6000:]
    return folder / "out", tiny.plain_loop(tiny.overrides(model, data, folder / "out", "plain"))


@pytest.mark.parametrize("name", list(RUNS))
def test_losses_follow_the_plain_fp32_loop(name: str, runs: tuple[Path, list[tuple[float, float]]]) -> None:
    out, reference = runs
    rows = tiny.rows(out / name / "run")
    applied = [row["loss/train"] for row in rows if row["optim/skipped_steps"] == 0]
    assert applied == pytest.approx([value for value, _ in reference][: len(applied)], rel=3e-2)
    if name.startswith("fp16"):
        assert all(row["optim/loss_scale"] >= 1 for row in rows)


@pytest.mark.parametrize("name", list(RUNS))
def test_gpu_memory_is_measured(name: str, runs: tuple[Path, list[tuple[float, float]]]) -> None:
    row = tiny.rows(runs[0] / name / "run")[-1]
    assert row["memory/gpu_reserved_peak_gib"] >= row["memory/gpu_allocated_peak_gib"] > 0
    assert row["memory/gpu_alloc_retries"] >= 0
    assert "memory/host_pinned_gib" in row


def test_chunked_loss_equals_full_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 64 * 4096)
    torch.manual_seed(0)
    hidden = torch.randn(2, 96, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(4096, 64, device="cuda") * 0.1).to(torch.bfloat16).requires_grad_()
    targets = torch.randint(0, 4096, (2, 96), device="cuda")
    chunked = loss.chunked_loss(hidden, weight, None, targets)
    grads = torch.autograd.grad(chunked, (hidden, weight))
    logits = torch.nn.functional.linear(hidden, weight).float().flatten(0, 1)
    full = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
    expected = torch.autograd.grad(full, (hidden, weight))
    assert chunked.item() == pytest.approx(full.item(), rel=1e-4)
    for found, wanted in zip(grads, expected, strict=True):
        assert (found.float() - wanted.float()).norm() <= 2e-2 * wanted.float().norm()
