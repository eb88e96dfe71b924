"""Generated tables of the documentation are what their generators write now."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from remat.config import compose
from remat.planning import sweep
from scripts import granularity_table

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"


def test_the_granularity_page_is_up_to_date() -> None:
    page = granularity_table.PAGE.read_text()
    assert granularity_table.renewed(page) == page, "run python scripts/granularity_table.py"


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_named_files_exist(path: Path) -> None:
    """Paths into the repository, in backticks, as the docs name them."""
    root = DOCS.parent
    for word in path.read_text().replace("\n", " ").split("`")[1::2]:
        if (
            word.startswith(("tests/", "remat/", "benchmarks/", "scripts/", "conf/"))
            and " " not in word
            and "NAME" not in word
        ):
            assert (root / word).exists(), word


@pytest.mark.parametrize(
    "command",
    re.findall(r"^    remat plan (.*)$", (DOCS / "planning.md").read_text().replace("\\\n", " "), re.MULTILINE),
)
def test_every_plan_in_the_docs_composes(command: str) -> None:
    words = shlex.split(command.partition(" --plot")[0])
    if "--sweep" in words:
        words.remove("--sweep")
        fixed, points = sweep.split(words)
        words = [*fixed, *points[0]]
    compose.from_command_line(words)


def test_troubleshooting_names_tests_that_exist() -> None:
    """Each entry is shown by a test, or says that it was only reported."""
    root = DOCS.parent / "tests"
    rows = [
        line.split(" | ") for line in (DOCS / "troubleshooting.md").read_text().splitlines() if line[:2] == "| "
    ]
    entries = [cells for cells in rows if cells[0] != "| symptom"]
    assert len(entries) > 30
    for cells in entries:
        assert len(cells) == 4, cells
        shown = cells[3].removesuffix(" |").strip("`")
        if shown == "reported":
            continue
        name, _, function = shown.partition("::")
        (path,) = root.rglob(name)
        assert f"def {function}(" in path.read_text(), shown
