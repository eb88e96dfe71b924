"""Saves that meet a full disk: refused or failed by name, the ranks agree, older states stay, training goes on."""

from __future__ import annotations

import json
import resource
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from remat.launch.processes import free_port
from remat.saving import manifest, save
from tests.support import saving_cases, tiny
from tests.support.launcher import ROOT, run
from tests.support.pool import RankPool

DISK_BYTES = 3 * 1024**2  # a state of the tiny model takes 0.65 MiB
IN_NAMESPACE = 'mount -t tmpfs -o size="$2" tmpfs "$1/disk" && shift 2 && exec "$@"'


def small_disk(folder: Path, command: list[str]) -> list[str]:
    """`command` with a disk of DISK_BYTES at folder/disk, which it alone sees and which goes with it."""
    (folder / "disk").mkdir(exist_ok=True)
    return ["unshare", "-rm", "sh", "-c", IN_NAMESPACE, "sh", str(folder), str(DISK_BYTES), *command]


@pytest.mark.launch
@pytest.mark.slow_fault
def test_a_full_disk_costs_no_state_and_training_goes_on(tmp_path: Path) -> None:
    probe = subprocess.run(small_disk(tmp_path, ["true"]), capture_output=True, text=True)
    if probe.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {probe.stderr.strip()}")
    workshop = tiny.make_workshop(tmp_path)
    common = ["deepspeed.config=zero2", f"output_dir={tmp_path / 'disk'}", "save.every=1", "save.keep=1"]
    runs = [
        tiny.words(workshop, "continue", *common, "train.steps=6", "save.on_error=continue"),
        tiny.words(workshop, "large", *common, "save.keep=9", "train.steps=20"),
        tiny.words(workshop, "stop", *common, "train.steps=3"),
    ]
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    launcher = ["deepspeed", "--num_gpus", "2", "--master_port", str(free_port())]
    script = str(ROOT / "tests/support/fills_disk.py")
    done = run(small_disk(tmp_path, [*launcher, script, str(tmp_path)]))
    assert done.code == 70, done.out[-6000:]
    seen = json.loads((tmp_path / "seen.json").read_text())

    def after(step: int) -> tuple[list[str], list[str]]:
        state = seen[f"continue {step}"]
        assert state["errors"][0] == state["errors"][1], "the ranks do not agree"
        return state["left"], state["whole"]

    first, fourth, last = (f"step-{step:06d}" for step in (1, 4, 6))
    assert [after(step) for step in (1, 2, 3)] == [([first], [first])] * 3
    assert [after(step) for step in (4, 5)] == [([fourth], [fourth])] * 2
    assert after(6) == ([last], [last])
    refused, within = (seen[f"continue {step}"]["errors"][0] for step in (2, 3))
    assert "saved has no room: 0.00 GiB (561,664 bytes) needed, 0.00 GiB (0 bytes) free" in refused
    assert "step-000003 (0.00 GiB (561,664 bytes) needed, 0.00 GiB (" in within
    assert "rank 1: OSError: [Errno 28] No space left on device" in within
    assert "rank 0: OSError: [Errno 28] No space left on device" in seen["continue 5"]["errors"][0]
    assert "Training goes on (save.on_error=continue)" in " ".join(done.out.split())
    assert "disk: output_dir" in seen["large"]["error"] and "too small" in seen["large"]["error"]
    assert seen["stop 2"]["whole"] == [first] and seen["stop 2"]["errors"][0] in done.out
    assert "stop 3" not in seen


def limited_case(*, folder: Path) -> dict[str, Any]:
    """Rank 1 may write no file above 20 kB, so its file of the second save is cut short by the kernel."""
    target = saving_cases.engine(2)
    saving_cases.train(target, 0, 1)
    save.save(target, folder, step=1, client_state={}, keep=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    error = "none"
    try:
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        save.save(target, folder, step=2, client_state={}, keep=1)
    except manifest.SaveError as caught:
        error = str(caught)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()  # rank 0 has tidied up
    left = sorted(path.name for path in (folder / "saved").iterdir())
    losses = saving_cases.train(target, 1, 2)
    save.save(target, folder, step=3, client_state={}, keep=1)
    return {"error": error, "left": left, "losses": losses}


def test_a_rank_that_cannot_write_fails_all_and_deletes_nothing(two_ranks: RankPool, tmp_path: Path) -> None:
    """The kernel refuses a write in the middle of a file: all ranks agree."""
    ranks = two_ranks.run(limited_case, folder=tmp_path)
    assert ranks[0]["error"] == ranks[1]["error"]
    assert "failed on rank 1: OSError: [Errno 27] File too large" in ranks[0]["error"]
    assert "bytes) needed" in ranks[0]["error"]
    assert [rank["left"] for rank in ranks] == [["step-000001"]] * 2
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step-000003"]
