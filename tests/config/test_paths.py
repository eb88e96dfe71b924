"""Paths are looked at before anything slow: each problem names the option, the file and the remedy."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from remat.config import compose, paths
from remat.config.options import ConfigError, DataSource, ModelConfig, ModelInit, Precision, RunConfig
from remat.machine import node
from remat.model import hf_model
from remat.saving import shared_folder
from tests.support import tiny

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 4977698672\n"


def pretrained(folder: Path) -> ModelConfig:
    return ModelConfig(init=ModelInit.pretrained, path=str(folder))


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose.check_launch(compose.compose_run(["recipe=finetune", "data=python_stdlib", *words]), 1)
    return str(caught.value)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model in two files, whole."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    values = {"a": torch.arange(100.0), "b": torch.ones(3, 5, dtype=torch.bfloat16)}
    for number, (name, value) in enumerate(values.items()):
        save_file({name: value}, folder / f"model-{number}.safetensors", metadata={"format": "pt"})
    index = {"weight_map": {"a": "model-0.safetensors", "b": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_whole_model_is_fine(model: Path, tmp_path: Path) -> None:
    assert paths.model_problems(pretrained(model)) == paths.weight_problems(pretrained(model)) == []
    for file in model.glob("model*"):
        file.unlink()
    save_file({}, model / "model.safetensors")
    assert paths.weight_problems(pretrained(model)) == []
    composed = compose.compose_run(["recipe=finetune", "data=python_stdlib", f"model.path={model}"])
    compose.check_launch(composed, 1)


def test_a_folder_without_a_tokenizer_is_told_beside_what_else_is_wrong(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "model-1.safetensors").unlink()
    text = refusal(f"model.path={model}")
    assert (
        f"model.path={model} has no tokenizer (tokenizer.json" in text
        and "model-1.safetensors is missing" in text
    )
    assert "no tokenizer" not in refusal(f"model.path={model}", "model.tokenizer=bytes")
    assert f"model.tokenizer={model} has no tokenizer" in refusal(
        f"model.path={model}", f"model.tokenizer={model}"
    )


def test_the_home_folder_in_the_path_of_a_tokenizer_is_told_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for option, more in (("model.tokenizer", f"model.path={model}"), ("model.path", "model.tokenizer=null")):
        told = f"{option}=~/model: write the path in full, {option}={model}"
        assert refusal(f"{option}=~/model", more).splitlines().count(told) == 1


def test_a_folder_in_which_nothing_was_saved_is_told(tmp_path: Path) -> None:
    run = tmp_path / "tiny_zero3_offload" / "a"
    (run / "saved").mkdir(parents=True)
    words = ["recipe=tiny_zero3_offload", f"output_dir={tmp_path}"]

    def problems(*more: str) -> list[str]:
        return paths.state_problems(compose.compose_run([*words, *more]).run)

    asked = {"auto": f"{run.parent}/*", str(run): str(run), str(run / "saved"): str(run / "saved")}
    for resume, place in asked.items():
        (text,) = problems(f"resume={resume}")
        assert text.startswith(f"resume={resume}: no complete saved state in {place} (found: nothing)")
    assert problems("resume=none") == problems("resume=auto_or_start") == []
    (run / "saved" / "tmp-step-000001").mkdir()  # what was not finished is told when states are read
    assert [problems(f"resume={resume}") for resume in asked] == [[], [], []]
    assert problems("resume=auto", "run_id=b") and not problems("resume=auto", "run_id=a")


@pytest.mark.parametrize("kept", [0, 5, 8, 60, -1])
def test_a_file_that_is_cut_off_is_named(model: Path, kept: int) -> None:
    file = model / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    text = refusal(f"model.path={model}")
    assert "model-1.safetensors" in text and "cut off" in text and "again" in text
    assert "model-0" not in text


@pytest.mark.parametrize(
    "name", ["model-0.safetensors", "model.safetensors.index.json", "tokenizer.json", "config.json"]
)
def test_a_git_lfs_pointer_is_named(model: Path, name: str) -> None:
    (model / name).write_text(LFS)
    text = refusal(f"model.path={model}")
    assert f"{name} is a git-lfs pointer" in text and "git lfs pull" in text


def test_what_is_no_safetensors_file_is_named(model: Path) -> None:
    (model / "model-0.safetensors").write_bytes(b"\x10" + bytes(7) + b"no json at all!!" + bytes(40))
    assert "model-0.safetensors has a damaged header" in refusal(f"model.path={model}")
    (model / "model-1.safetensors").unlink()
    assert "model-1.safetensors is missing" in refusal(f"model.path={model}")
    (model / "model.safetensors.index.json").write_text("{")
    assert "model.safetensors.index.json cannot be read" in refusal(f"model.path={model}")


def test_weights_are_not_looked_at_where_none_is_read(model: Path, tmp_path: Path) -> None:
    (model / "model-0.safetensors").write_text(LFS)
    for more in (["model.init=random"], ["resume=auto"]):
        composed = compose.compose_run(["recipe=finetune", "data=python_stdlib", f"model.path={model}", *more])
        compose.check_launch(composed, 1)
    assert "pointer" in refusal(f"model.path={model}", "resume=auto", "peft=lora")


def test_reading_a_damaged_file_names_it_where_nobody_looked_before(tmp_path: Path) -> None:
    tiny.make_model(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    cfg = pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.safetensors is cut off"):
        hf_model.build(
            cfg, hf_model.load_config(cfg), precision=Precision.fp32, ds_config={}, zero_stage=0, seed=0
        )


@pytest.mark.parametrize("command", ["launch", "plan"])
@pytest.mark.parametrize(("path", "told"), [
    ("/no/such/model", "does not exist"),
    ("./model", "does not exist"),
    ("models/llama/8b", "does not exist"),
])  # fmt: skip
def test_a_model_that_does_not_exist_is_told_so(command: str, path: str, told: str) -> None:
    if command == "launch":
        text = refusal(f"model.path={path}")
    else:
        with pytest.raises(ConfigError) as caught:
            compose.check_plan(compose.compose_run(["recipe=finetune", f"model.path={path}"]).run)
        text = str(caught.value)
    assert f"model.path={path} {told}" in text and "hub name" in text


def test_a_model_path_that_is_no_model(tmp_path: Path, model: Path) -> None:
    (tmp_path / "readme.txt").write_text("x")
    assert "has no config.json (it holds model, readme.txt)" in refusal(f"model.path={tmp_path}")
    assert "is a file" in refusal(f"model.path={model}/config.json")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        hf_model.load_config(pretrained(tmp_path))


def test_hub_names_are_not_looked_up() -> None:
    for name in ("gpt2", "meta-llama/Llama-3.1-8B"):
        assert paths.model_problems(ModelConfig(init=ModelInit.pretrained, path=name)) == []


@pytest.mark.parametrize(
    "path", ["/no/such.jsonl", "my.jsonl", "my.csv", "my.jsonl.gz", "/no/*.jsonl", "data/a/b"]
)
def test_data_that_does_not_exist_is_told_before_memory_is_planned(path: str, model: Path) -> None:
    text = refusal(
        f"model.path={model}", "data=jsonl", f"data.path={path}", f"data.eval_path={model}/none.jsonl"
    )
    assert f"data.path={path} does not exist" in text
    assert "data.eval_path=" in text


def test_a_slip_of_a_path_is_told_with_what_is_there(model: Path, tmp_path: Path) -> None:
    (tmp_path / "alpaca.csv").write_text("text\na\n")
    text = refusal("data=files", f"model.path={model}s", f"data.path={tmp_path}/alpca.csv")
    assert f"alpca.csv does not exist (there is {tmp_path / 'alpaca.csv'}): name a file" in text
    assert f"does not exist (there is {model}): give a folder" in text


def test_an_output_folder_that_cannot_be_written_is_told_so(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in ("/proc/nope", f"{tmp_path}/file", f"{tmp_path}/file/below"):
        assert f"output_dir={place} cannot be written" in refusal(f"model.path={model}", f"output_dir={place}")
    for option in ("output_dir", "data.cache_dir", "hardware.nvme_path"):
        assert f"{option}=~nobody-here/runs: there is no user ~nobody-here" in refusal(
            f"model.path={model}", f'{option}="~nobody-here/runs"'
        )


@pytest.fixture
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that this user may not enter; the tests' own user may be root, who may."""
    folder, stat = tmp_path / "closed", os.stat
    folder.mkdir()

    def refuse(path: Any, *args: Any, **how: Any) -> os.stat_result:
        if str(path).startswith(f"{folder}/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *args, **how)

    monkeypatch.setattr(os, "stat", refuse)
    return folder


def test_a_folder_that_may_not_be_entered_is_told_as_one_that_cannot_be_read(closed: Path, model: Path) -> None:
    text = refusal("data=files", f"model.path={closed}/model", f"data.path={closed}/a.jsonl")
    assert (
        f"model.path={closed}/model: {closed}/model cannot be read (Permission denied): make it readable"
        in text
    )
    assert f"data.path={closed}/a.jsonl does not exist" in text
    assert "no such folder" in refusal(f"model.path={model}", f"resume={closed}/run")
    assert "/run/saved cannot be read" in paths.state_problems(RunConfig(resume=f"{closed}/run"))[0]
    assert paths._problem_of(f"{closed}/x", DataSource.hub) == ""


def test_the_nearest_parent_is_one_that_may_be_looked_at(closed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert paths.nearest(closed / "a" / "b") == paths.nearest(closed) == closed
    monkeypatch.chdir(closed.parent)
    assert paths.nearest("none/below") == closed.parent
    assert node.disk(f"{closed}/a").filesystem == closed.parent.stat().st_dev
    assert shared_folder.is_local(closed / "a") == shared_folder.is_local(closed.parent)
    assert paths.output_problems(RunConfig(output_dir=f"{closed}/runs")) == []


def test_looking_at_the_output_folder_leaves_nothing(model: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    composed = compose.compose_run(
        ["recipe=finetune", "data=python_stdlib", f"model.path={model}", f"output_dir={tmp_path}/a/b"]
    )
    compose.check_launch(composed, 1)
    assert sorted(tmp_path.iterdir()) == before
