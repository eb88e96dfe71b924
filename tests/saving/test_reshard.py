"""Cutting a state for another number of ranks: what is refused and when, what is written, what is left behind.

The states are small files in DeepSpeed's layout; tests/runs/test_reshard_ranks.py does the same with engines.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from remat.config import compose
from remat.config.options import ConfigError, OptimName, OptimStates, Reshard
from remat.machine import rng
from remat.model.optimizer import WRAPPED, kind_named
from remat.planning.preflight import DoesNotFit
from remat.saving import load, manifest, reshard, state_files
from remat.saving.manifest import Manifest, SavedState
from remat.training import build

SHAPES = [{"a": torch.Size([3, 4]), "b": torch.Size([5])}, {"c": torch.Size([7])}]
CPU: dict[str, Any] = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


ALL = ("fp32", "exp_avg", "exp_avg_sq")


def value(name: str, state: str) -> torch.Tensor:
    shape = next(group[name] for group in SHAPES if name in group)
    start = 100 * "abc".index(name) + 1000 * ("fp32", "exp_avg", "exp_avg_sq").index(state)
    return torch.arange(start, start + shape.numel(), dtype=torch.float32).view(shape)


def flat(group: dict[str, torch.Size], state: str, rank: int, stage: int) -> torch.Tensor:
    """What one of two ranks holds: below stage 3 half of the group, at 3 half of each weight, padded."""

    def half(whole: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(whole, (0, whole.numel() % 2))
        return padded.chunk(2)[rank]

    if stage == 3:
        return torch.cat([half(value(name, state).flatten()) for name in group])
    return half(torch.cat([value(name, state).flatten() for name in group]))


def save(
    run: Path, stage: int, *, steps: tuple[int, int] = (4, 4), stepped: bool = True, more: str = ""
) -> SavedState:
    """A state of two ranks at step 4."""
    path = run / "saved" / "step-000004"
    engine = path / "engine"
    engine.mkdir(parents=True)
    (path / "rng").mkdir()
    for rank in (0, 1):
        moments = {
            index: {state: flat(group, state, rank, stage) for state in ("exp_avg", "exp_avg_sq")}
            | {"step": torch.tensor(float(steps[index]))}
            for index, group in enumerate(SHAPES)
            if stepped
        }
        base = {"state": moments, "param_groups": [{"params": [0], "lr": 1.0}, {"params": [1], "lr": 1.0}]}
        masters = [flat(group, "fp32", rank, stage) for group in SHAPES]
        keys = (
            ("fp32_flat_groups", "optimizer_state_dict")
            if stage == 3
            else (
                "single_partition_of_fp32_groups",
                "base_optimizer_state",
            )
        )
        content = {"optimizer_state_dict": dict(zip(keys, (masters, base), strict=True)) | {"loss_scaler": 2.0}}
        torch.save(content, engine / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    model = {"module": {}, "buffer_names": [], "param_shapes": SHAPES, "shared_params": {}, "global_steps": 4}
    torch.save(model, engine / name)
    if more:
        (path / more).parent.mkdir(parents=True)
        (path / more).write_text("swapped")
    info = Manifest(
        step=4,
        sequence=1,
        world_size=2,
        zero_stage=stage,
        precision="fp32",
        layout="",
        frozen_excluded=False,
        created="2026-01-01T00:00:00+00:00",
        versions={},
        client_state={"step": 4},
        files=manifest.describe(path, manifest.files_in(path)),
    )
    manifest.write(path, info)
    return SavedState(path, info)


def test_as_many_ranks_are_never_refused(tmp_path: Path) -> None:
    state = save(tmp_path, 3, more="engine/offloaded_tensors/rank00/x")
    assert reshard.find_refusals(state, Reshard.refuse, world_size=2, rendered=CPU) == []


def test_the_option_refuses_or_allows(tmp_path: Path) -> None:
    state = save(tmp_path, 3)
    assert reshard.find_refusals(state, Reshard.auto, world_size=1, rendered=CPU) == []
    (line,) = reshard.find_refusals(state, Reshard.refuse, world_size=1, rendered=CPU)
    assert line == "it was saved by 2 ranks and this launch has 1: start 2 ranks, or set reshard=auto"


def test_nvme_and_loading_in_turn_are_refused_by_name(tmp_path: Path) -> None:
    swapped = save(tmp_path / "nvme", 3, more="engine/offloaded_tensors/rank00/x")
    (line,) = reshard.find_refusals(swapped, Reshard.auto, world_size=1, rendered=CPU)
    assert "NVMe files, one set per rank: start 2 ranks" in line
    rendered = {"zero_optimization": {"offload_param": {"device": "nvme"}, "pipeline_loading_checkpoint": True}}
    lines = reshard.find_refusals(save(tmp_path / "cpu", 3), Reshard.auto, world_size=1, rendered=rendered)
    assert len(lines) == 2
    assert "choose a config without NVMe" in lines[0] and "pipeline_loading_checkpoint" in lines[1]


@pytest.mark.parametrize(
    "optimizer", [kind for kind in map(kind_named, OptimName) if kind not in ("adamw", "lion")]
)
def test_only_a_state_of_one_number_per_weight_is_cut_anew(tmp_path: Path, optimizer: str) -> None:
    state = save(tmp_path, 3)
    other = SavedState(state.path, dataclasses.replace(state.info, optimizer=optimizer))
    (line,) = reshard.find_refusals(other, Reshard.auto, world_size=1, rendered=CPU)
    assert f"only the state of adamw and lion can be cut anew, not that of {optimizer}" in line
    assert line.endswith(": start 2 ranks")
    assert reshard.find_refusals(other, Reshard.auto, world_size=2, rendered=CPU) == []
    lion = SavedState(state.path, dataclasses.replace(state.info, optimizer="lion"))
    assert reshard.find_refusals(lion, Reshard.auto, world_size=1, rendered=CPU) == []


@pytest.mark.parametrize("wrapped", [True, False], ids=["bitsandbytes", "deepspeed"])
@pytest.mark.parametrize("stage", [2, 3])
def test_the_one_moment_of_lion_is_cut_in_either_form(tmp_path: Path, stage: int, wrapped: bool) -> None:
    state = save(tmp_path, stage)
    key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    for file in state_files.optimizer_files(state.path / "engine"):
        content = torch.load(file)
        for group in content["optimizer_state_dict"][key]["state"].values():
            del group["exp_avg_sq"]
            if wrapped:
                group[WRAPPED] = {"state1": group.pop("exp_avg")}
        torch.save(content, file)
    lion = SavedState(state.path, dataclasses.replace(state.info, optimizer="lion"))
    assert reshard.convert(lion, tmp_path / "universal") is None
    for name in "abc":
        found = {key: torch.load(tmp_path / f"universal/zero/{name}/{key}.pt")["param"] for key in ALL}
        assert torch.equal(found["fp32"], value(name, "fp32"))
        assert torch.equal(found["exp_avg"], value(name, "exp_avg"))
        assert not found["exp_avg_sq"].any() and found["exp_avg_sq"].shape == found["fp32"].shape


def test_another_optimizer_is_refused_with_the_one_that_saved(tmp_path: Path) -> None:
    state = save(tmp_path, 3)
    load.check_compatible(state, zero_stage=3, optimizer="adamw")
    with pytest.raises(
        ConfigError, match=r"state of adamw and optim\.name asks for lion: set optim\.name=adamw"
    ):
        load.check_compatible(state, zero_stage=3, optimizer="lion")


def test_fp32_moments_beside_bf16_masters_are_not_cut_anew(tmp_path: Path) -> None:
    state = save(tmp_path, 3)
    mixed = SavedState(state.path, dataclasses.replace(state.info, states="bf16_master"))
    (line,) = reshard.find_refusals(mixed, Reshard.auto, world_size=1, rendered=CPU)
    assert "would round its fp32 moments" in line and line.endswith(": start 2 ranks")
    assert reshard.find_refusals(mixed, Reshard.auto, world_size=2, rendered=CPU) == []
    in_bf16 = SavedState(state.path, dataclasses.replace(state.info, states="bf16"))
    assert reshard.find_refusals(in_bf16, Reshard.auto, world_size=1, rendered=CPU) == []
    load.check_compatible(in_bf16, zero_stage=3, states=OptimStates.bf16)
    with pytest.raises(ConfigError, match=r"in the format bf16 and optim\.states=fp32: set optim\.states=bf16"):
        load.check_compatible(in_bf16, zero_stage=3, states=OptimStates.fp32)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_folder_holds_each_weight_and_moment_whole(tmp_path: Path, stage: int) -> None:
    state = save(tmp_path, stage)
    target = tmp_path / "universal"
    assert reshard.convert(state, target) is None
    for name in "abc":
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            found = torch.load(target / "zero" / name / f"{key}.pt")["param"]
            assert torch.equal(found, value(name, key)), (name, key)
        assert torch.load(target / "zero" / name / "step.pt") == 4
    rest = torch.load(target / "zero" / "optimizer_state.pt")
    assert rest["loss_scaler"] == 2.0
    assert rest["optimizer_state_dict"]["state"] == {0: {"step": 4}}
    assert rest["param_groups"] == [{"params": []}] * 2, "Adam's options are those of the run"
    (file,) = target.glob("*model_states.pt")
    assert "module" not in torch.load(file, weights_only=False)
    assert manifest.verify(state.path) == []


@pytest.mark.parametrize("stage", [2, 3])
def test_room_is_asked_for_what_is_written_and_leftovers_go_first(tmp_path: Path, stage: int) -> None:
    state = save(tmp_path, stage)
    left = tmp_path / "saved" / reshard.UNIVERSAL
    (left / "engine").mkdir(parents=True)
    assert manifest.list_states(tmp_path)[1] == [f"{reshard.UNIVERSAL}: unfinished"]
    needed, free = reshard.measure_room(state, 1)
    assert not left.exists() and free > needed
    assert reshard.convert(state, left) is None
    written = sum(path.stat().st_blocks * 512 for path in left.rglob("*") if path.is_file())
    assert 12 * 24 < written <= needed


def test_a_save_removes_what_a_killed_resume_left(tmp_path: Path) -> None:
    state = save(tmp_path, 2)
    (tmp_path / "saved" / reshard.UNIVERSAL / "engine").mkdir(parents=True)
    manifest.clean(tmp_path / "saved")
    assert [path.name for path in (tmp_path / "saved").iterdir()] == [state.path.name]


@pytest.mark.parametrize(
    ("stage", "ranks", "settings", "said"),
    [
        (2, 1, {"stepped": False}, "holds no exp_avg: no optimizer step was applied yet"),
        (3, 1, {"steps": (4, 3)}, r"groups at the optimizer steps \[3, 4\]"),
        (2, 4, {}, "a group of the optimizer has 7 numbers and must have 32"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_a_model(
    tmp_path: Path, stage: int, ranks: int, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=rf"resume: .*step-000004 cannot be cut for {ranks} ranks.*{said}"):
        reshard.measure_room(save(tmp_path, stage, **settings), ranks)


def test_small_groups_do_not_matter_at_stage_3(tmp_path: Path) -> None:
    needed, _ = reshard.measure_room(save(tmp_path, 3), 4)
    assert needed > 0


def point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, *words: str) -> list[str]:
    """`resuming.point` of one rank for a state of two; what it tells."""
    save(tmp_path / "recipe" / "run", 3)
    monkeypatch.setattr(reshard.disk_space, "free_bytes", lambda folder: free)
    cfg = compose.compose_run(
        ["recipe=tiny_zero3_offload", f"output_dir={tmp_path}", "name=recipe", "resume=auto", *words]
    ).run
    cfg.train.precision = "fp32"  # type: ignore[assignment]
    told: list[str] = []
    found = build.find_resume_point(
        cfg,
        SimpleNamespace(ds=CPU, zero_stage=3),  # type: ignore[arg-type]
        SimpleNamespace(size=1, tensor_parallel_size=1),  # type: ignore[arg-type]
        SimpleNamespace(note=told.append, warning=told.append),  # type: ignore[arg-type]
    )
    assert found is not None
    return told


def test_a_resume_says_that_it_cuts_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (told,) = point(tmp_path, monkeypatch, 10**9)
    assert told.startswith("resharding step-000004 of 2 ranks for 1 (")
    assert "not bit for bit" in told


def test_a_full_disk_is_refused_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        DoesNotFit, match=r"step-000004 of 2 ranks for 1 needs .* bytes\).*\(1,000 bytes\) are free"
    ):
        point(tmp_path, monkeypatch, 1000)


def test_reshard_refuse_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match="saved by 2 ranks and this launch has 1: start 2 ranks, or set reshard=auto"
    ):
        point(tmp_path, monkeypatch, 10**9, "reshard=refuse")


def test_a_failure_names_its_rank_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = save(tmp_path, 3)
    torch.save({"rng": rng.get(), "frozen": ""}, state.path / "rng" / "rank-00000.pt")
    shapes = {name: shape for group in SHAPES for name, shape in group.items()}
    engine = SimpleNamespace(
        zero_optimization_stage=lambda: 3,
        autotp_size=lambda: 0,
        bfloat16_enabled=lambda: False,
        fp16_enabled=lambda: False,
        config={},
        _get_zero_param_shapes=lambda: [shapes],
        module=torch.nn.ParameterDict({name: torch.zeros(shape) for name, shape in shapes.items()}),
    )

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(reshard.torch, "save", full)
    with pytest.raises(manifest.SaveError, match=r"for 1 ranks in .* rank 0: OSError: .* No space left"):
        load.load(engine, state)
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step-000004"]
    shapes["d"] = torch.Size([1])
    engine.module["d"] = torch.zeros(1)
    with pytest.raises(ConfigError, match=r"has other parameters than this run \(d and 0 more\)"):
        load.load(engine, state)


def test_random_states_start_anew_by_step_and_rank() -> None:
    def draws(step: int, rank: int) -> tuple[float, float, float]:
        torch.manual_seed(7)
        rng.start_anew(rng.get(), step=step, rank=rank)
        return torch.rand(1).item(), float(np.random.rand()), random.random()

    assert draws(1, 0) == draws(1, 0)
    for other in (draws(1, 1), draws(2, 0)):
        assert all(a != b for a, b in zip(draws(1, 0), other, strict=True))


def test_a_launch_with_another_optimizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"optim\.name asks for adamw_8bit: set optim\.name=adamw\. To take over only"
    ):
        point(tmp_path, monkeypatch, 10**9, "optim.name=paged_adamw_8bit")
