"""The site: every page has its place, every link and every picture is there, the tables are those of plans."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from remat.config import compose
from remat.planning.plan import make_plan
from scripts import concept_figures, strategy_table

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
PAGES = {path.name: path.read_text() for path in DOCS.glob("*.md")}


def leaves(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [leaf for part in (nav.values() if isinstance(nav, dict) else nav) for leaf in leaves(part)]  # type: ignore[attr-defined]


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as Python-Markdown makes them."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page, flags=re.M | re.S), re.M)
    made = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}
    return made | set(re.findall(r'<a id="([^"]+)">', page))


def test_every_page_has_one_place_in_the_site() -> None:
    nav = leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(nav) == sorted(PAGES)


@pytest.mark.parametrize("name", sorted(PAGES))
def test_every_link_of_a_page_leads_somewhere(name: str) -> None:
    text = re.sub(r"^```.*?^```|^    .*$", "", PAGES[name], flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = link.partition("#")
        assert (DOCS / path).exists(), link
        if anchor:
            assert anchor in anchors(PAGES[path or name]), link


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs is not installed here: `make docs` builds the site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_tables_of_strategies_are_those_that_were_planned() -> None:
    page = PAGES["strategies.md"]
    assert strategy_table.renewed(page) == page, "run python scripts/strategy_table.py"
    cells = json.loads(strategy_table.FOUND.read_text())
    places = {(c["model"], c["method"], c["card_gib"], c["cards"]) for c in cells}
    assert len(places) == len(cells) > 200 and all(cell.get("fits", True) for cell in cells)


@pytest.mark.parametrize(
    ("model", "method", "card_gib", "count"),
    [
        ("1B", "all weights", 24, 1),
        pytest.param("8B", "LoRA", 80, 8, marks=pytest.mark.exhaustive),
        ("4B", "QLoRA", 24, 2),
    ],
)
def test_a_sample_of_the_tables_is_planned_again(model: str, method: str, card_gib: int, count: int) -> None:
    cells = json.loads(strategy_table.FOUND.read_text())
    key = (model, method, card_gib, count)
    (cell,) = (c for c in cells if (c["model"], c["method"], c["card_gib"], c["cards"]) == key)
    card = next(card for card in strategy_table.CARDS if card.gib == card_gib)
    words = [*strategy_table.fixed(model, method, card, count), *cell["overrides"]]
    planned = make_plan(compose.compose_run(words).run)
    assert planned.plan.fits and cell["fits"]
    figures = {name: cell[name] for name in ("gpu_gib", "host_gib", "tokens_per_s")}
    assert strategy_table.figures(planned) == pytest.approx(figures, rel=0.01)


def test_the_runs_of_the_concepts_page_are_those_that_were_planned() -> None:
    known = concept_figures.Recordings()
    for name in ("full", "full, zero3_offload"):
        assert concept_figures.row(name, concept_figures.plan(name, known)) in PAGES["concepts.md"]
    for picture in re.findall(r"\]\((figures/\w+\.png)\)", PAGES["concepts.md"]):
        assert (DOCS / picture).read_bytes()[:4] == b"\x89PNG"
