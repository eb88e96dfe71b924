"""What the scripts that write tables into pages share: a table, replace what lies between two marks, --check."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any


def between(page: str, mark: str, end: str, text: str) -> str:
    """`page` with `text` in place of what lies between `mark` and the next `end`."""
    before, found, rest = page.partition(mark)
    assert found, f"the page has no {mark}"
    _, _, after = rest.partition(end)
    return f"{before}{mark}\n\n{text}\n\n{end}{after}"


def table(head: Sequence[str], rows: Iterable[Iterable[Any]], right: Collection[int] = ()) -> str:
    """A Markdown table; the columns whose numbers are in `right` are set to the right."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    rule = "|".join("---:" if place in right else "---" for place in range(len(head)))
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def update(path: Path, renewed: Callable[[str], str]) -> int:
    """Write the page anew; with --check write nothing. The exit code: 1 when --check finds it out of date."""
    page = path.read_text() if path.exists() else ""
    if "--check" in sys.argv:
        return int(renewed(page) != page)
    path.write_text(renewed(page))
    return 0
