"""docs/reliability.md says what the committed results say, and grows with them."""

from __future__ import annotations

import json
from typing import Any

from scripts import reliability_page as page

PLACE: dict[str, Any] = {
    "cpu": "a CPU", "cpu_cores": 2, "host_bytes": 24 * 2**30, "load_average": 1.5, "python": "3.11.1", "torch": "2",
    "deepspeed": "0.19", "transformers": "5", "commit": "0123456789abcdef", "changed_files": 0, "date": "2026-01-31",
}  # fmt: skip
THIS = "tests/unit/test_reliability.py"
KILL = "tests/faults/test_kill.py"


def row(test: str, fault: str, seconds: float | None = None) -> dict[str, Any]:
    return {"test": test, "fault": fault, "outcome": "ends", "seconds": seconds}


def test_the_reliability_page_is_up_to_date() -> None:
    text = page.PAGE.read_text()
    assert page.renewed(text) == text, "run python scripts/reliability_page.py"


def test_every_committed_row_is_of_a_test_that_records_and_says_where_it_ran() -> None:
    result = json.loads(page.RESULT.read_text())
    assert {row["measured_at"] for row in result["rows"]} == set(result["environments"])
    for test in {row["test"] for row in result["rows"]}:
        assert "fault_record" in (page.ROOT / test).read_text(), test
    assert all(row["seconds"] is None or row["seconds"] > 0 for row in result["rows"])
    assert len({(row["test"], row["fault"]) for row in result["rows"]}) == len(result["rows"])
    kills = [row for row in result["rows"] if row["test"] == KILL and row["seconds"] is not None]
    assert kills and all(row["seconds"] < 60 for row in kills)


def test_a_new_run_replaces_the_rows_of_its_files_and_no_others() -> None:
    first = page.merged(
        {"environments": {}, "rows": []}, [row(THIS, "a", 1.0), row(THIS, "b"), row(KILL, "c")], PLACE
    )
    later = PLACE | {"commit": "fedcba9876543210", "changed_files": 3}
    second = page.merged(first, [row(THIS, "a", 2.0)], later)
    assert [(found["fault"], found["seconds"]) for found in second["rows"]] == [("c", None), ("a", 2.0)]
    assert list(second["environments"]) == ["0123456 2026-01-31", "fedcba9+ 2026-01-31"]
    assert page.merged(second, [row(KILL, "d")], later)["environments"].keys() == {"fedcba9+ 2026-01-31"}


def test_the_page_has_a_section_for_each_file_and_a_dash_where_a_run_went_on() -> None:
    text = page.text(
        page.merged({"environments": {}, "rows": []}, [row(THIS, "a", 1.26), row(THIS, "b")], PLACE)
    )
    assert f"## {page.title(THIS)}\n\n`{THIS}`, measured at 0123456 2026-01-31" in text
    assert page.title(THIS) == "docs/reliability.md says what the committed results say, and grows with them"
    assert "| a | ends | 1.3 |\n| b | ends | - |" in text and "2 faults, from 1 files" in text
    assert "commit 0123456789ab" in text and "torch 2, deepspeed 0.19" in text
