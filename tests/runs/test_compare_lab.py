"""`remat compare`: two points of a tiny model, then nothing; slow: real launches give the same bytes again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from remat.lab import command, launch
from tests.support import launcher
from tests.support.pool import CPU_ONLY

pytestmark = pytest.mark.launch

WORDS = [
    "recipe=gpt2_medium_lab",
    "checkpointing=none,full",
    "model=gpt2_small",
    "model.architecture.n_embd=32",
    "model.architecture.n_head=2",
    "model.architecture.n_layer=2",
    "model.architecture.vocab_size=258",
    "model.architecture.attn_pdrop=0",
    "train.seq_len=64",
    "train.steps=3",
    "data.synthetic_blocks=16",
]
EXACT = (
    "peak_bytes",
    "counted_bytes",
    "kept_bytes",
    "kept_bytes_per_layer",
    "micro_batch_bytes",
    "states_bytes",
    "loss",
)


def points(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "gpt2_medium_lab-checkpointing" / "results.json").read_text())
    return {point["name"]: point for point in content["points"]}


@pytest.fixture(autouse=True)
def cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CPU_ONLY.items():
        monkeypatch.setenv(name, value)


def test_two_points_then_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = command.Options(out=tmp_path, repeats=1)
    monkeypatch.setattr(launch, "_run", launcher.of_the_lab)
    assert command.run(WORDS, options) == 0
    first = points(tmp_path)
    none, full = first["none"], first["full"]
    assert none["status"] == full["status"] == "finished", (none["words"], full["words"])
    assert full["kept_bytes"] == 2 * (2 * 64 * 32 * 4), (
        "the output of each of 2 layers: batch, sequence, width, fp32"
    )
    assert none["kept_bytes"] > 10 * full["kept_bytes"] and none["peak_bytes"] > full["peak_bytes"]
    assert none["kept_bytes"] == pytest.approx(none["kept_planned_bytes"], rel=1e-3)
    assert none["counted_bytes"] == pytest.approx(none["counted_planned_bytes"], rel=0.01)
    assert none["loss"] == full["loss"], "recomputation changes no value"
    assert len(none["loss"]) == 3 and none["times"]["step"]["count"] == 2
    assert full["ratio"]["low"] <= full["ratio"]["median"] <= full["ratio"]["high"]
    made = tmp_path / "gpt2_medium_lab-checkpointing"
    assert {path.name for path in made.iterdir()} >= {"panels.png", "pareto.png", "index.html", "results.csv"}

    def no_launch(*_: object) -> None:
        raise AssertionError("launched what is known")

    monkeypatch.setattr(launch, "launch", no_launch)
    assert command.run(WORDS, options) == 0
    assert "nothing was launched: all 2 results are from before" in capfd.readouterr().out
    assert points(tmp_path) == first


@pytest.mark.slow_fault
def test_fresh_launches_give_the_same_bytes(tmp_path: Path) -> None:
    assert command.run(WORDS, command.Options(out=tmp_path, repeats=1)) == 0
    first = points(tmp_path)
    assert command.run(WORDS, command.Options(out=tmp_path, repeats=1, fresh=True)) == 0
    again = points(tmp_path)
    for name in first:
        assert {key: again[name][key] for key in EXACT} == {key: first[name][key] for key in EXACT}
        assert again[name]["times"] != first[name]["times"], "it ran again"
        made = tmp_path / "gpt2_medium_lab-checkpointing" / name
        assert (made / "r1.logs" / "rank-0.log").exists()
