"""The README tells the truth: its table, its commands, its files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from remat.config import compose
from scripts import recipe_table

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text()


def test_the_recipe_table_is_up_to_date() -> None:
    assert recipe_table.renewed(README) == README, "run python scripts/recipe_table.py"


def test_the_two_commands_are_make_targets_and_ci_runs_the_second() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "make demo" in README and re.search(r"^demo:", makefile, re.M)
    assert "make test" in README and re.search(r"^test:", makefile, re.M)
    assert "make test" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("command", re.findall(r"^    (deepspeed .*train\.py .*)$", README, re.M))
def test_every_training_command_composes(command: str) -> None:
    words = shlex.split(command, comments=True)
    compose.from_command_line(words[words.index("train.py") + 1 :])


@pytest.mark.parametrize("options", re.findall(r"^\| [^|]* \| (`.*`)", README, re.M))
def test_every_option_in_the_table_composes(options: str) -> None:
    for alternative in re.findall(r"`([^`]+)`", options):
        words = shlex.split(alternative)
        if "=" in alternative and not alternative.startswith(("outputs", "remat")):
            compose.from_command_line(words)


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http)([^)#]+)\)", README))
def test_every_link_leads_somewhere(link: str) -> None:
    assert (ROOT / link).exists(), link
