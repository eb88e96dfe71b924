"""Saving, resuming and exporting with a real DeepSpeed engine on two CPU ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from remat.machine import ops
from remat.saving import manifest
from remat.saving.exports import export
from remat.saving.safe_load import UnsafeFile
from remat.saving.state_files import MASTER, MOMENTS, SavedWeights
from tests.support import saving_cases as cases
from tests.support.pool import RankPool

MORE = pytest.mark.exhaustive  # what differs from a neighbour in one respect
STRATEGIES = [
    pytest.param(0, False, "fp32", id="zero0-fp32", marks=MORE),
    pytest.param(0, False, "bf16", id="zero0-bf16"),
    pytest.param(1, False, "bf16", id="zero1-bf16"),
    pytest.param(2, False, "fp32", id="zero2-fp32", marks=MORE),
    pytest.param(2, False, "bf16", id="zero2-bf16", marks=MORE),
    pytest.param(2, True, "bf16", id="zero2-offload-bf16"),
    pytest.param(3, False, "fp32", id="zero3-fp32", marks=MORE),
    pytest.param(3, False, "bf16", id="zero3-bf16"),
    pytest.param(3, True, "fp32", id="zero3-offload-fp32"),
    pytest.param(3, True, "bf16", id="zero3-offload-bf16", marks=MORE),
]


@pytest.mark.parametrize(("stage", "offload", "precision"), STRATEGIES)
def test_resumed_training_is_bit_equal(
    two_ranks: RankPool, tmp_path: Path, stage: int, offload: bool, precision: str
) -> None:
    ranks = two_ranks.run(
        cases.resume_case, folder=tmp_path, stage=stage, offload=offload, precision=precision, tie=stage == 3
    )
    for rank in ranks:
        assert (
            rank["continued"] == rank["losses"] == rank["expected"]
        )  # saving disturbs nothing, resuming neither
        assert len(set(rank["digests"])) == 1
        assert rank["client_state"] == {"step": 2, "position": [0, 4]}
        assert rank["global_steps"] == 4
    assert len({loss for rank in ranks for loss in rank["losses"]}) == 8
    info = ranks[0]["info"]
    assert (info.step, info.world_size, info.zero_stage, info.precision) == (2, 2, stage, precision)
    on_disk = [p for p in (tmp_path / "saved" / "step-000002").rglob("*") if p.is_file()]
    assert ranks[0]["saved"].bytes == sum(p.stat().st_size for p in on_disk if p.name != manifest.FILE)
    assert len(info.files) == len(on_disk) - 1
    written = sum(entry.size_bytes for name, entry in info.files.items() if name.startswith("engine/"))
    assert (
        0 < written - ranks[0]["needed_bytes"] < 40_000
    )  # asked of the disk: all but names, steps and padding


OPTIMIZERS = [
    pytest.param("adamw_8bit", 0, False, "bf16", marks=MORE),
    ("adamw_8bit", 2, False, "bf16"),
    ("paged_adamw_8bit", 3, False, "fp32"),
    ("lion", 2, False, "bf16"),
    pytest.param("lion", 3, True, "fp32", marks=pytest.mark.exhaustive),  # builds an op, which takes minutes
    pytest.param("adafactor", 0, False, "fp32", marks=MORE),
    ("adafactor", 0, False, "bf16"),
]


@pytest.mark.parametrize(("optim", "stage", "offload", "precision"), OPTIMIZERS)
def test_another_optimizer_resumes_bit_equal(
    two_ranks: RankPool, tmp_path: Path, optim: str, stage: int, offload: bool, precision: str
) -> None:
    settings = {"stage": stage, "offload": offload, "precision": precision, "optim": optim}
    for rank in two_ranks.run(cases.resume_case, folder=tmp_path, **settings):
        assert rank["continued"] == rank["losses"] == rank["expected"]
        assert len(set(rank["digests"])) == 1
        assert rank["info"].optimizer == optim.removeprefix("paged_")
        files = rank["info"].files.items()
        written = sum(entry.size_bytes for name, entry in files if name.startswith("engine/"))
        assert abs(written - rank["needed_bytes"]) < 60_000


@pytest.mark.parametrize(
    ("states", "stage", "offload"),
    [
        ("bf16", 3, True),
        ("bf16_master", 2, True),
        pytest.param("bf16", 2, False, marks=MORE),
        pytest.param("bf16_master", 3, True, marks=MORE),
        pytest.param("bf16", 2, True, marks=MORE),
        pytest.param("bf16", 3, False, marks=MORE),
    ],
)
def test_16_bit_states_resume_bit_equal(
    two_ranks: RankPool, tmp_path: Path, states: str, stage: int, offload: bool
) -> None:
    """DeepSpeed alone rounds fp32 moments beside bf16 masters when it loads them."""
    settings = {"stage": stage, "offload": offload, "precision": "bf16", "optim": "adamw", "states": states}
    for rank in two_ranks.run(cases.resume_case, folder=tmp_path, **settings):
        assert rank["continued"] == rank["losses"] == rank["expected"]
        assert len(set(rank["digests"])) == 1
        assert rank["info"].states == states
        files = rank["info"].files.items()
        written = sum(entry.size_bytes for name, entry in files if name.startswith("engine/"))
        assert 0 < written - rank["needed_bytes"] < 60_000
    state = next((tmp_path / "saved").iterdir())
    weights = SavedWeights(state / "engine", stage, moments=MOMENTS)
    assert {weights.read(name, kind).dtype for name in weights.trained for kind in (MASTER, *MOMENTS)} == {
        torch.float32
    }


ASYNC_IO = ops.use_environment_folder() / "async_io" / "async_io.so"
needs_async_io = pytest.mark.skipif(not ASYNC_IO.exists(), reason="DeepSpeed's async_io is not built here")


@needs_async_io
@pytest.mark.parametrize(
    "params_on_cpu", [False, pytest.param(True, marks=MORE)], ids=["params-nvme", "params-cpu"]
)
def test_resume_from_nvme_is_bit_equal(two_ranks: RankPool, tmp_path: Path, params_on_cpu: bool) -> None:
    """DeepSpeed alone loses Adam's moments, its step counts and the groups too small to be swapped."""
    nvme = tmp_path / "nvme"
    settings = {"stage": 3, "precision": "bf16", "offload": params_on_cpu}
    for rank in two_ranks.run(cases.resume_case, folder=tmp_path, nvme=nvme, **settings):
        assert rank["continued"] == rank["losses"] == rank["expected"]
        assert len(set(rank["digests"])) == 1
        swapped = [name for name in rank["info"].files if "/offloaded_tensors/rank01/exp_avg-" in name]
        assert len(swapped) >= 2
    swap_files = (tmp_path / "saved" / "step-000002" / "engine" / "offloaded_tensors").rglob("*")
    assert not [path for path in swap_files if "gradient" in path.name]


def assert_reloads(found: list[str | None], *, index: bool) -> None:
    """Nothing is wrong; then a weight is infinite; then it is gone, and only an index still promises it."""
    assert found[0] is None
    assert found[1] == f"{cases.NORM} was exported with numbers that are not finite"
    lost = "File does not contain tensor" if index else f"the export lacks {cases.NORM} (and 0 more)"
    assert found[2] is not None and lost in found[2]


@needs_async_io
def test_export_from_nvme(two_ranks: RankPool, tmp_path: Path) -> None:
    settings = {"stage": 3, "precision": "bf16", "offload": False, "tie": False, "max_shard_size": "1GB"}
    ranks = two_ranks.run(cases.export_case, folder=tmp_path, nvme=tmp_path / "nvme", **settings)
    assert all(rank["same_training"] for rank in ranks)
    assert ranks[0]["same_logits"] and ranks[0]["masters_kept"] and ranks[0]["fp32_is_finer"]
    assert_reloads(ranks[0]["reloaded"], index=False)


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=MORE)])  # of stage 3: test_lora_ranks.py
def test_frozen_weights_stay_out_of_the_state(two_ranks: RankPool, tmp_path: Path, stage: int) -> None:
    settings = {"stage": stage, "offload": False, "precision": "fp32"}
    full = two_ranks.run(cases.resume_case, folder=tmp_path / "full", **settings)[0]
    ranks = two_ranks.run(cases.resume_case, folder=tmp_path / "part", frozen=True, **settings)
    for rank in ranks:
        assert (
            rank["continued"] == rank["losses"] == rank["expected"]
        )  # saving disturbs nothing, resuming neither
        assert len(set(rank["digests"])) == 1
        assert rank["info"].frozen_excluded
    assert ranks[0]["saved"].bytes < 0.7 * full["saved"].bytes


def test_other_frozen_weights_are_refused(two_ranks: RankPool, tmp_path: Path) -> None:
    for rank in two_ranks.run(cases.frozen_mismatch_case, folder=tmp_path):
        assert rank["error"].startswith("ConfigError: resume:")
        assert "frozen weights" in rank["error"]


def test_other_parameters_are_refused(two_ranks: RankPool, tmp_path: Path) -> None:
    for rank in two_ranks.run(cases.layout_mismatch_case, folder=tmp_path):
        assert rank["error"].startswith("ConfigError: resume:")
        assert "other parameters" in rank["error"]


@pytest.mark.parametrize(
    ("failing_rank", "where"),
    [
        (1, "engine"),
        (0, "manifest"),
        pytest.param(0, "engine", marks=MORE),
        pytest.param(1, "hash", marks=MORE),
    ],
)
def test_one_failing_rank_fails_all_and_keeps_older_states(
    two_ranks: RankPool, tmp_path: Path, failing_rank: int, where: str
) -> None:
    for rank in two_ranks.run(cases.failure_case, folder=tmp_path, failing_rank=failing_rank, where=where):
        assert rank["error"].startswith("SaveError: saving")
        assert f"rank {failing_rank}: OSError: [Errno 28] No space left on device" in rank["error"]
        assert rank["after_failure"] == ["step-000001"]
        assert rank["problems"] == []
        assert rank["after_retry"] == ["step-000001", "step-000003"]


def test_frozen_weights_are_known_again_by_another_number_of_ranks(two_ranks: RankPool) -> None:
    assert two_ranks.run(cases.fingerprint_case)[0] == (True, True, False)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=MORE), 3])
def test_no_file_of_a_state_runs_code(two_ranks: RankPool, tmp_path: Path, stage: int) -> None:
    for rank in two_ranks.run(cases.code_case, folder=tmp_path, stage=stage):
        assert len(rank["refused"]) == (6 if stage == 3 else 5)
        for name, error in rank["refused"].items():
            assert error.startswith("UnsafeFile: resume: ") and f"{name} is refused: it names" in error
        for kind in ("model_states", "optim_states", "rank-0000"):
            assert rank["loading"][kind].startswith("UnsafeFile: ") and kind in rank["loading"][kind]
        assert not rank["ran"]


def test_all_ranks_pass_over_a_damaged_state(two_ranks: RankPool, tmp_path: Path) -> None:
    for rank in two_ranks.run(cases.damage_case, folder=tmp_path):
        assert rank["before"] == ["step-000002", "step-000003"]  # keep=2 of three saves
        assert rank["step"] == 2
        assert len(rank["notes"]) == 1
        assert "step-000003: engine/" in rank["notes"][0]
        assert "pp_rank_1_mp_rank_00_optim_states.pt" in rank["notes"][0]


@pytest.mark.parametrize(
    ("stage", "offload", "precision", "tie", "max_shard_size"),
    [
        pytest.param(0, False, "bf16", True, "1GB", id="zero0-bf16-tied-single", marks=MORE),
        pytest.param(0, False, "fp32", False, "20KB", id="zero0-fp32-untied-sharded", marks=MORE),
        pytest.param(2, False, "bf16", False, "20KB", id="zero2-bf16-untied-sharded"),
        pytest.param(2, True, "bf16", True, "1GB", id="zero2-offload-bf16-tied-single", marks=MORE),
        pytest.param(3, False, "bf16", True, "20KB", id="zero3-bf16-tied-sharded", marks=MORE),
        pytest.param(3, False, "fp32", False, "1GB", id="zero3-fp32-untied-single", marks=MORE),
        pytest.param(3, True, "bf16", False, "20KB", id="zero3-offload-bf16-untied-sharded", marks=MORE),
        pytest.param(3, True, "fp32", True, "1GB", id="zero3-offload-fp32-tied-single"),
    ],
)
def test_export_is_the_live_model(
    two_ranks: RankPool,
    tmp_path: Path,
    stage: int,
    offload: bool,
    precision: str,
    tie: bool,
    max_shard_size: str,
) -> None:
    ranks = two_ranks.run(
        cases.export_case,
        folder=tmp_path,
        stage=stage,
        offload=offload,
        precision=precision,
        tie=tie,
        max_shard_size=max_shard_size,
    )
    assert all(rank["same_training"] for rank in ranks)
    report = ranks[0]
    assert report["dtype"] == {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[precision]
    assert report["same_logits"] and report["same_keys"] and report["same_values"]
    assert report["masters_kept"] and report["use_cache"]
    assert_reloads(report["reloaded"], index=max_shard_size != "1GB")
    assert report["fp32_is_finer"] == (precision == "bf16")
    single = max_shard_size == "1GB"
    assert (report["result"].files == ["model.safetensors"]) == single
    assert {"config.json", "generation_config.json", *report["result"].files} <= set(report["names"])
    assert ("model.safetensors.index.json" in report["names"]) != single
    keys = cases.tensors(tmp_path / "own").keys()
    assert ("lm_head.weight" in keys) != tie and "model.embed_tokens.weight" in keys
    wrote = [rank["wrote"] for rank in ranks]
    assert sorted(name for files in wrote for name in files) == sorted(report["result"].files)
    loads = [sum(files.values()) for files in wrote]
    assert sum(loads) == report["result"].bytes
    assert abs(loads[0] - loads[1]) <= max(max(files.values(), default=0) for files in wrote)
    sizes = [(tmp_path / "own" / name).stat().st_size for name in report["result"].files]
    assert single or max(sizes) < 20_000 + 2_000  # header


def test_export_of_a_mixture_of_experts_at_zero3(two_ranks: RankPool, tmp_path: Path) -> None:
    settings = {"stage": 3, "offload": False, "precision": "fp32", "tie": False, "max_shard_size": "20KB"}
    ranks = two_ranks.run(cases.export_case, folder=tmp_path, moe=True, **settings)
    assert all(rank["same_training"] for rank in ranks)
    assert ranks[0]["same_logits"] and ranks[0]["same_keys"] and ranks[0]["same_values"]
    assert_reloads(ranks[0]["reloaded"], index=True)
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in cases.tensors(tmp_path / "own")


def test_export_that_fails_leaves_nothing_and_hangs_nobody(two_ranks: RankPool, tmp_path: Path) -> None:
    for rank in two_ranks.run(cases.export_failure_case, folder=tmp_path):
        assert "rank 0: OSError: [Errno 28] No space left on device" in rank["error"]
        assert rank["left"] == []
        assert rank["after_retry"] == ["out"]


@pytest.mark.parametrize(
    ("stage", "precision", "tie"),
    [
        (0, "bf16", False),
        pytest.param(0, "fp32", True, marks=MORE),
        pytest.param(1, "bf16", False, marks=MORE),
        pytest.param(2, "bf16", True, marks=MORE),
        pytest.param(3, "bf16", False, marks=MORE),
        (3, "fp32", True),
    ],
)
def test_offline_export_equals_the_live_one(
    two_ranks: RankPool, tmp_path: Path, stage: int, precision: str, tie: bool
) -> None:
    state = two_ranks.run(cases.offline_case, folder=tmp_path, stage=stage, precision=precision, tie=tie)[0][
        "state"
    ]
    result = export.export_saved_state(state, tmp_path / "run", tmp_path / "offline", export.Form("40KB"))
    assert sorted(p.name for p in result.path.iterdir()) == sorted(
        p.name for p in (tmp_path / "live").iterdir()
    )
    _assert_same(tmp_path / "live", tmp_path / "offline")
    assert json.loads((tmp_path / "live" / "config.json").read_text()) == json.loads(
        (tmp_path / "offline" / "config.json").read_text()
    )

    def in_fp32() -> Path:
        out = tmp_path / "offline32"
        return export.export_saved_state(state, tmp_path / "run", out, export.Form(dtype=torch.float32)).path

    if stage == 0 and precision == "bf16":
        with pytest.raises(ValueError, match="export in bf16"):
            in_fp32()
        return
    in_fp32()
    _assert_same(tmp_path / "live32", tmp_path / "offline32")
    for file in sorted(state.rglob("*.pt")):
        kept, out = file.read_bytes(), tmp_path / "poisoned"
        torch.save({"module": cases.Evil(tmp_path / "ran")}, file)
        with pytest.raises(UnsafeFile, match=f"{file.name} is refused"):
            export.export_saved_state(state, tmp_path / "run", out, export.Form(), verified=True)
        assert not (tmp_path / "ran").exists() and not out.exists()
        file.write_bytes(kept)


def _assert_same(one: Path, other: Path) -> None:
    first, second = cases.tensors(one), cases.tensors(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype, name
        assert torch.equal(value, second[name]), name
