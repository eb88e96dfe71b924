"""The commands of docs/start.md, as they stand there, in order: what a new user types works."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from remat import cli
from tests.support import tiny
from tests.support.launcher import ROOT, deepspeed

pytestmark = pytest.mark.launch

PAGE = (ROOT / "docs" / "start.md").read_text()
COMMANDS = [
    shlex.split(line)
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S)
    for line in block.replace("\\\n", " ").splitlines()
]


FEWER = ["train.epochs=1"]  # than the page says


def run(words: list[str], folder: Path, more: list[str]) -> str:
    """Run one command of the page in `folder`, with the cache of data there too; return what it says."""
    if words[0] == "python":
        runpy.run_path(str(ROOT / words[1]))["main"](*map(Path, words[2:]))
        return ""
    if words[0] == "remat":
        done = CliRunner().invoke(cli.app, words[1:])
        assert done.exit_code == 0, done.output
        return done.output
    assert words[:4] == ["deepspeed", "--num_gpus", "2", "train.py"], words
    launched = deepspeed(*words[4:], f"data.cache_dir={folder}/cache", *more, ranks=2, cwd=folder)
    assert launched.code == 0, launched.out[-6000:]
    return launched.out


@pytest.mark.parametrize("more", [FEWER, pytest.param([], marks=pytest.mark.exhaustive)], ids=["fewer", "all"])
def test_every_command_works_in_its_order(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["remat"])
    said = {words[1] if words[0] == "remat" else words[0]: run(words, tmp_path, more) for words in COMMANDS}
    assert list(said) == ["python", "plan", "deepspeed", "report", "sample", "export"]
    assert said["sample"].strip(), "an answer, whatever so small a model says"
    assert "fits with" in said["plan"] and "alpaca by its fields" in said["deepspeed"]
    folder = tmp_path / "tutorial" / "runs" / "finetune" / "first"
    losses = [row["loss/train"] for row in tiny.rows(folder)]
    assert losses[0] > 4 and losses[-1] < (4 if more else 1), "as the page says"
    assert "<html" in (folder / "report" / "index.html").read_text()
    for export in (folder / "export", tmp_path / "tutorial" / "exported"):
        model, tokenizer = AutoModelForCausalLM.from_pretrained(export), AutoTokenizer.from_pretrained(export)
        assert model.config.vocab_size == len(tokenizer) and tokenizer.chat_template
    assert json.loads((tmp_path / "tutorial" / "exported" / "config.json").read_text())["dtype"] == "float32"
