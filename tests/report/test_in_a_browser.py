"""The report and the compare page in a real browser at the widths of a phone, a tablet and a desk: nothing is cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from remat.lab import charts, figures, page
from remat.report.run_report import draw
from tests.lab.test_command import CPU
from tests.lab.test_pages import POLICIES, compared
from tests.report.test_run_report import gpu, make
from tests.support import browser
from tests.support.grids import cases

pytestmark = pytest.mark.skipif(browser.CHROMIUM is None, reason="no chromium here: apt-get install chromium")

LONG = "/a/folder/with/a/very/long/name/" + "without_a_place_to_break_" * 6 + "model"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report with every table and long names, and a comparison of eight points of which one ran out of memory."""
    folder = tmp_path_factory.mktemp("pages")
    config = {"name": "a_recipe_with_a_long_name", "model": {"path": LONG}, "train": {"steps": 5}}
    categories = ("peak of a micro-batch, on top of the model states", "communication buckets in host memory")
    figures_of_each = {"planned": 12345.678, "measured": 12345.6, "unit": "MiB"}
    ledger = {"rows": [{"category": name} | figures_of_each for name in categories], "no_plan": None}
    run_dir = make(
        folder / "tiny" / "r1", [gpu(step) for step in range(1, 6)], config_yaml=config, ledger_json=ledger
    )
    draw(run_dir)
    made, found, rows = compared(*POLICIES, without=("full",))
    text = page.render(
        figures.as_json(made, found, rows, CPU), made, rows, list(charts.draw(made, rows).values())
    )
    (folder / "compare.html").write_text(text)
    return {"report": run_dir / "report" / "index.html", "compare": folder / "compare.html"}


@pytest.mark.parametrize("width_px", cases([*browser.WIDTHS_PX, 1100], {800, 1100}))
@pytest.mark.parametrize("name", ["report", "compare"])
def test_nothing_is_cut_and_nothing_overlaps(
    name: str, width_px: int, pages: dict[str, Path], tmp_path: Path
) -> None:
    found = browser.measure(pages[name], width_px, tmp_path)
    assert found["width"] == width_px and found["boxes"] > 50
    assert found["content"] <= found["width"] and found["cut"] == [] and found["overlap"] == []
    assert found["images"] >= 2, "each picture is seen, over more than half of the width"


def test_the_measure_finds_what_is_cut_and_what_overlaps(tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text(
        '<body><h1 style="margin:0">a</h1><div class="card" style="margin-top:-9px;white-space:nowrap;overflow:hidden">'
        + "word " * 99
        + "</div></body>"
    )
    found = browser.measure(bad, 360, tmp_path)
    assert len(found["cut"]) == 1 and len(found["overlap"]) == 1
