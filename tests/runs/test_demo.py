"""`make demo` as a user runs it, made short with options of its own: everything it promises is there afterwards."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.support import tiny
from tests.support.launcher import ROOT, Launched, run

pytestmark = [pytest.mark.launch, pytest.mark.exhaustive]  # tests/runs/test_tutorial.py goes the same way

SHORT = [
    "train.steps=8", "train.seq_len=64", "train.log_every=2", "train.eval_every=4", "train.eval_batches=2",
    "optim.warmup_steps=2", "save.every=0", "optim.lr=5e-3", "run_id=demo",
]  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Launched]:
    folder = tmp_path_factory.mktemp("demo")
    own = [f"output_dir={folder}/out", f"data.cache_dir={folder}/cache"]
    done = run([str(ROOT / "scripts" / "demo.sh"), *SHORT, *own], cwd=folder, timeout_s=900)
    assert done.code == 0, done.out[-6000:]
    return folder / "out" / "tiny_zero3_offload" / "demo", done


def test_it_stops_half_way_and_resumes(demo: tuple[Path, Launched]) -> None:
    folder, done = demo
    first, second = done.out.split("== 2 of 4")
    assert "stopped at step 4, resumable with resume=auto" in first
    assert "resumed      at step 4" in second and "tiny_zero3_offload finished" in second
    assert [row["step"] for row in tiny.rows(folder)] == [2, 4, 6, 8]
    assert "2 on cpu" in first and "16 blocks = 4 per rank x 2 accumulated x 2 ranks" in first


def test_it_learns(demo: tuple[Path, Launched]) -> None:
    folder, _ = demo
    losses = [row["loss/train"] for row in tiny.rows(folder)]
    assert losses[-1] < 0.8 * losses[0]
    held_out = {row["step"]: row["loss/eval"] for row in tiny.rows(folder, "loss/eval")}
    assert list(held_out) == [0, 4, 8]
    assert held_out[0] == pytest.approx(math.log(258), abs=0.2)
    assert held_out[8] < held_out[4] < held_out[0]


def test_it_leaves_states_export_and_report(demo: tuple[Path, Launched]) -> None:
    folder, _ = demo
    for step in (4, 8):
        manifest = json.loads((folder / f"saved/step-{step:06d}/manifest.json").read_text())
        assert manifest["step"] == step
    assert list((folder / "export").glob("*.safetensors"))
    assert "loss.png" in {path.name for path in (folder / "report").iterdir()}
    assert "<html" in (folder / "report" / "index.html").read_text()


def test_it_ends_with_a_text_by_the_model(demo: tuple[Path, Launched]) -> None:
    _, done = demo
    text = done.out.split("== 4 of 4")[1].split("\n", 1)[1]
    assert text.startswith("def read_") and len(text) > 100
    assert "Traceback" not in done.out and "WARNING" not in done.out
