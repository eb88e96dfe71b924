"""zero3_nvme as it ships: the losses of host offload bit for bit, the planned bytes, and what faults leave."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from remat.saving import manifest
from tests.support import tiny
from tests.support.launcher import ROOT, deepspeed
from tests.support.supervised import supervised

pytestmark = pytest.mark.launch
# Llama 3.1 8B at a sixteenth of its width and vocabulary, with two layers.
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 8016,
}


@pytest.fixture(scope="module", autouse=True)
def async_io() -> None:
    import deepspeed.ops

    if not deepspeed.ops.__compatible_ops__.get("async_io"):
        pytest.skip("libaio's headers are not installed and could not be: async_io cannot be built")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.make_workshop(tmp_path_factory.mktemp("nvme"))
    tiny.make_model(folder / "shaped", **SHAPE)
    (folder / "nvme").mkdir()
    return folder


def words(workshop: Path, name: str, *more: str) -> list[str]:
    run = [f"model.path={workshop / 'shaped'}", "train.micro_batch_size=1", "train.global_batch_size=2"]
    return tiny.words(workshop, name, *run, f"hardware.nvme_path={workshop / 'nvme'}", *more)


@pytest.fixture(scope="module")
def runs(workshop: Path) -> Path:
    """The same run on one rank, swapping first: what it holds is not what another run left behind."""
    asked = {
        name: words(workshop, name, f"deepspeed.config={name}") for name in ("zero3_nvme", "zero3_offload")
    }
    (workshop / "runs.json").write_text(json.dumps(asked))
    done = deepspeed(str(workshop / "runs.json"), ranks=1, script="tests/support/many_runs.py")
    assert done.code == 0, done.out[-6000:]
    return workshop / "out"


def test_the_losses_are_those_of_host_offload(runs: Path) -> None:
    rows, expected = (tiny.rows(runs / name / "run") for name in ("zero3_nvme", "zero3_offload"))
    for key in ("loss/train", "optim/grad_norm"):
        assert [row[key] for row in rows] == [row[key] for row in expected]
    assert len(rows) == tiny.STEPS and rows[-1]["loss/train"] < rows[0]["loss/train"] / 2


def test_files_and_buffers_are_as_large_as_planned(runs: Path) -> None:
    rows = json.loads((runs / "zero3_nvme" / "run" / "ledger.json").read_text())["rows"]
    found = {row["category"]: row for row in rows}
    files = found["NVMe per node"]
    assert files["measured"] == files["planned"] and files["unit"] == "MiB" and files["planned"] > 50
    buffers = found["swap buffers in host memory"]
    assert buffers["measured"] == pytest.approx(buffers["planned"], rel=1e-4)  # rounded up to 1 KiB
    for category, row in found.items():
        if category.endswith("in host memory") and row["planned"]:
            assert row["measured"] == pytest.approx(row["planned"], abs=0.05), category


def test_nothing_is_left_on_the_disk(runs: Path, workshop: Path) -> None:
    assert list((workshop / "nvme").iterdir()) == []


def losses(run: Path) -> list[float]:
    return [row["loss/train"] for row in tiny.rows(run)]


def whole_states(run: Path) -> list[str]:
    found = sorted((run / "saved").iterdir())
    assert [manifest.verify(path) for path in found] == [[] for _ in found]
    return [path.name for path in found]


def test_a_killed_run_and_a_full_disk_cost_no_state(runs: Path, workshop: Path) -> None:
    """Killed in step 4 under a launcher that removes nothing; then there is no room; then it goes on, and tidies up."""
    asked = words(workshop, "lost", "deepspeed.config=zero3_nvme", "save.every=2", "resume=auto_or_start")
    spec, run = workshop / "lost.json", workshop / "out" / "lost" / "run"
    fault = {"what": "SIGKILL", "rank": 0, "at": "backward 4 2"}
    spec.write_text(json.dumps([{"name": "lost", "words": asked, "fault": fault}]))
    foreign = workshop / "nvme" / "remat-lost-run-of-another" / "launch-00000" / "moments.swp"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("another run's")
    done = deepspeed(str(spec), ranks=1, script="tests/support/faulty_runs.py")
    assert done.code != 0 and spec.with_suffix(".fault.json").exists(), done.out[-4000:]
    left = sorted(path for path in (workshop / "nvme").rglob("*.swp") if path != foreign)
    assert left and whole_states(run) == ["step-000002"]

    small = ["0", str(4 << 20), *asked]
    refused = deepspeed(*small, ranks=1, script="tests/support/small_files.py")
    assert refused.code == 70, refused.out[-4000:]
    said = " ".join(refused.out.split())
    assert f"remat: hardware.nvme_path={workshop / 'nvme'}/remat-lost-run-" in said
    assert (
        "no room for the swap file" in said
        and "bytes) needed, " in said
        and " free. Saved states are whole" in said
    )
    assert list((workshop / "nvme").rglob("*.swp")) == [foreign]
    assert whole_states(run) == ["step-000002"]

    again = deepspeed(*asked, ranks=1)
    assert again.code == 0, again.out[-4000:]
    assert losses(run) == losses(runs / "zero3_nvme" / "run")
    assert [path for path in (workshop / "nvme").rglob("*") if path.is_file()] == [foreign]
    shutil.rmtree(foreign.parent.parent)


@pytest.mark.slow_fault
def test_remat_launch_removes_the_swap_files_of_a_killed_rank(workshop: Path, tmp_path: Path) -> None:
    asked = words(workshop, "killed", "deepspeed.config=zero3_nvme", f"hardware.nvme_path={tmp_path / 'nvme'}")
    fault = {"what": "SIGKILL", "rank": 1, "at": "backward 2"}
    (tmp_path / "spec.json").write_text(json.dumps([{"name": "killed", "words": asked, "fault": fault}]))
    with supervised(
        tmp_path, str(ROOT / "tests/support/faulty_runs.py"), str(tmp_path / "spec.json")
    ) as launch:
        launch.until(
            lambda: any((tmp_path / "nvme").rglob("*.swp")) or launch.process.poll() is not None, "files"
        )
        assert launch.finish() == 137, launch.out[-4000:]
    assert (tmp_path / "spec.fault.json").exists(), launch.out[-4000:]
    assert list((tmp_path / "nvme").iterdir()) == []
