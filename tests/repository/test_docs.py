"""Generated tables of the documentation are what their generators write now."""

from __future__ import annotations

import json
import re
import shlex
from itertools import islice
from pathlib import Path

import pytest

from remat.config import compose, metrics
from remat.config.command_line import split_points
from remat.planning import policies
from scripts import granularity_table, reference_pages
from scripts.generated import between

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"


def test_the_grid_of_the_granularity_page_and_its_first_counts_are_up_to_date() -> None:
    page = granularity_table.PAGE.read_text()
    grid = granularity_table.grid(json.loads(granularity_table.GRID.read_text()))
    renewed = between(page, granularity_table.MARKS["grid"], granularity_table.END, grid)
    assert renewed == page, "run python scripts/granularity_table.py"
    for row in islice(policies.rows(granularity_table.COUNTED_ON), 2):
        assert f"| {' | '.join(policies.cells(row))} |" in page


@pytest.mark.exhaustive
def test_the_granularity_page_is_up_to_date() -> None:
    page = granularity_table.PAGE.read_text()
    assert granularity_table.renewed(page) == page, "run python scripts/granularity_table.py"


def test_the_pages_of_options_and_commands_are_what_the_code_says() -> None:
    assert reference_pages.OPTIONS.read_text() == reference_pages.option_page(), (
        "run scripts/reference_pages.py"
    )
    assert reference_pages.COMMANDS.read_text() == reference_pages.command_page(), (
        "run scripts/reference_pages.py"
    )


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
    words = [
        word
        for word in shlex.split(command.partition(" --plot")[0])
        if word not in ("--best", "--curve", "--ladder")
    ]
    if "--sweep" in words:
        words.remove("--sweep")
        fixed, points = split_points(words)
        words = [*fixed, *points[0]]
    compose.from_command_line(words)


@pytest.mark.parametrize("page", ["troubleshooting.md", "reliability.md"])
def test_each_row_names_a_test_that_exists(page: str) -> None:
    """Of troubleshooting.md some say instead that they were only reported."""
    rows = [line.split(" | ") for line in (DOCS / page).read_text().splitlines() if line[:2] == "| "]
    rows = [cells for cells in rows if cells[0] not in ("| symptom", "| fault")]
    assert len(rows) > 30
    for cells in rows:
        assert len(cells) == 4, cells
        shown = cells[3].removesuffix(" |").strip("`")
        if page == "troubleshooting.md" and shown == "reported":
            continue
        name, _, function = shown.partition("::")
        (path,) = (DOCS.parent / "tests").rglob(name)
        assert f"def {function}(" in path.read_text(), shown


def test_the_cost_of_the_loop_is_what_was_measured() -> None:
    root = DOCS.parent
    result = json.loads((root / "benchmarks" / "results" / "loop_overhead.json").read_text())
    page, readme = (DOCS / "benchmarks.md").read_text(), (root / "README.md").read_text()
    for name, found in result["ratio"].items():
        shown = [f"{found[key]:.3f}" for key in ("median", "lowest", "highest")]
        assert f"| {name.removeprefix('remat/')} | {' | '.join(shown)} |" in page
    bare = result["ratio"]["remat/bare"]
    assert f"from {bare['lowest']:.2f} to {bare['highest']:.2f}" in " ".join(readme.split())
    assert f"commit {result['environment']['commit']}" in " ".join(page.split())


def test_every_file_that_contributing_names_is_there() -> None:
    """Paths without a first folder are of the package; `torch_selective` is an example, which is not there."""
    text = (DOCS.parent / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`([\w./]+\.py)`", text))
    assert len(named) > 15
    room = "remat/activation_checkpointing"
    places = [DOCS.parent / place for place in ("", "remat", room, f"{room}/mechanisms")]
    lost = [name for name in named if not any((place / name).exists() for place in places)]
    assert not [name for name in lost if name != "utils.py" and "torch_selective" not in name]


def test_the_page_of_metrics_names_every_metric() -> None:
    page = (DOCS / "metrics.md").read_text()
    names = {text for name, text in vars(metrics).items() if name.isupper() and not text.endswith("/")}
    assert len(names) > 20
    assert not [name for name in names if f"`{name}`" not in page]
    sections = {name.partition("/")[0] for name in (*names, metrics.lost_rows("x"))}
    assert not [section for section in sections if f"| `{section}` |" not in page]
