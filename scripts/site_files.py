"""Give the site a copy of each file outside docs/ that a page links to, so that every link leads somewhere.

A hook of mkdocs (mkdocs.yml): `../conf/lab/seed_a5.yaml` becomes `files/conf/lab/seed_a5.yaml`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = re.compile(r"(\]\()\.\./([^)#\s]+)")


def on_files(files: Any, config: Any) -> Any:
    """Add what the pages link to outside docs/. A file that does not exist is left to the strict check."""
    from mkdocs.structure.files import File

    linked = {
        name
        for page in files.documentation_pages()
        for _, name in OUTSIDE.findall(Path(page.abs_src_path).read_text(encoding="utf-8"))
    }
    for name in sorted(linked):
        if (ROOT / name).is_file():
            files.append(File.generated(config, f"files/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point the page's links to those copies."""
    return OUTSIDE.sub(r"\1files/\2", markdown)
