"""A wheel in another folder, as a stranger has it: its commands, and the first hour with it, in one launch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from remat import cli
from remat.data.tokenizer import byte_tokenizer
from tests.support import tiny
from tests.support.launcher import ROOT, Launched, environment

pytestmark = pytest.mark.launch
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `site`, where the wheel is installed, and nothing of this repository."""
    folder = tmp_path_factory.mktemp("elsewhere")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    for name in listed.stdout.split("\0"):
        if name.startswith(("remat/", "conf/", "recipes/", "ds_configs/")) or name in (
            "setup.py", "pyproject.toml", "README.md", "LICENSE",
        ):  # fmt: skip
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    wheel = [*PIP, "wheel", str(folder / "source"), "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run(wheel, check=True)
    shutil.rmtree(folder / "source")
    (built,) = folder.glob("*.whl")
    more = ["--no-deps", "--no-index", "--no-compile", "--target", str(folder / "site")]
    subprocess.run([*PIP, "install", *more, str(built)], check=True)
    return folder


def run(place: Path, *command: str) -> Launched:
    """Run a command of the installed package there."""
    path = f"{place / 'site' / 'bin'}:{os.environ['PATH']}"
    env = environment() | {"PYTHONPATH": str(place / "site"), "PATH": path}
    done = subprocess.run(
        command, cwd=place, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600
    )
    return Launched(done.returncode, done.stdout)


def test_the_wheel_holds_recipes_and_configurations_and_nothing_else(place: Path) -> None:
    (built,) = place.glob("*.whl")
    names = set(zipfile.ZipFile(built).namelist())
    for folder in ("conf", "recipes", "ds_configs"):
        there = {
            f"remat/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.*") if path.suffix != ".md"
        }
        listed = {name for name in names if name.startswith(f"remat/{folder}/")}
        assert listed == {name for name in there if not name.startswith("remat/conf/local/")}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names} == {"remat", "remat-0.1.0.dist-info"}


MORE = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("recipes", 0, "qwen3_4b_lora_1x24"),
        ("launch --cfg recipe=tiny_zero3_offload", 0, "name: tiny_zero3_offload"),
        pytest.param("plan recipe=tiny_zero3_offload", 0, "GiB", marks=MORE),  # a launch plans too
        pytest.param("launch recipe=lora train.stepz=3", 2, "did you mean train.steps?", marks=MORE),
    ],
)
def test_commands_work_from_anywhere(place: Path, line: str, code: int, said: str) -> None:
    done = run(place, "remat", *line.split())
    assert done.code == code and said in done.out, done.out


def test_one_command_from_an_alpaca_file_to_a_merged_model_that_answers(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A JSON array and a model's folder; the model at the end is plain, and is the adapted one to fp32 rounding."""
    model = tiny.make_model(place / "model")
    byte_tokenizer().save_pretrained(model)
    rows = [json.loads(line) for line in tiny.make_instructions(place / "rows.jsonl").open()]
    (place / "alpaca.json").write_text(json.dumps(rows))
    short = [
        "train.steps=4",
        "train.seq_len=256",
        "train.global_batch_size=4",
        "optim.lr=1e-2",
        "optim.warmup_steps=1",
    ]
    here = ["train.precision=fp32", "run_id=run", f"data.cache_dir={place}/cache", "tracking=wandb_disabled"]
    words = ["recipe=lora", "model.path=model", "data.path=alpaca.json", "save.merge=true"]
    done = run(place, "remat", "launch", "--num_gpus", "1", *words, *short, *here)
    assert done.code == 0, done.out[-6000:]
    said = " ".join(done.out.split())
    assert "alpaca by its fields" in said and "held-out loss" in said
    assert "merged model" in said
    folder = place / "outputs" / "lora" / "run"
    merged, report = AutoModelForCausalLM.from_pretrained(folder / "merged", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    monkeypatch.chdir(place)  # adapters name their base as it was given
    adapted = AutoPeftModelForCausalLM.from_pretrained(folder / "export")
    plain = AutoModelForCausalLM.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(folder / "merged")
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "Count to 3"}], return_tensors="pt")
    ids = asked["input_ids"]
    with torch.no_grad():
        found, expected, before = (net.eval()(ids).logits for net in (merged, adapted, plain))
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)
    assert (before - expected).abs().max() > 1e-2, "it has learnt something"
    done_again = CliRunner().invoke(cli.app, ["export", str(folder), "--merge", "--out", str(place / "again")])
    assert done_again.exit_code == 0, done_again.output
    again = AutoModelForCausalLM.from_pretrained(place / "again").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in merged.state_dict().items()), "from the state"
    for name in ("export", "merged"):
        card = (folder / name / "README.md").read_text()
        assert "alpaca.json" in card and "| train loss, nats per token |" in card
        assert str(place) not in card
    drawn = ["--prompt", "Count to 3", "--temperature", "0", "--max-new-tokens", "12"]
    answer = run(place, "remat", "sample", str(folder), *drawn)
    assert answer.code == 0, answer.out
    other = CliRunner().invoke(cli.app, ["sample", str(folder / "export"), *drawn])
    assert other.exit_code == 0, other.output
    assert answer.out.splitlines()[-1] == other.stdout.splitlines()[-1]
