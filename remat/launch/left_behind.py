"""Remove the folders of swap files that killed ranks leave behind. Ranks record the folders they make in a file.

A rank removes its own folder at its end, unless it is killed. `remat launch` removes what is left once all ranks have
ended; without it the next launch of the run does. Standard library only.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

FILE = "REMAT_SWAP_FOLDERS"  # environment variable of the ranks: the file that lists the folders


def name(folder: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Record a folder that only this launch uses; do nothing without a supervisor."""
    if FILE in environment:
        with Path(environment[FILE]).open("a", encoding="utf-8") as named:
            named.write(f"{folder.absolute()}\n")


def remove(file: Path) -> None:
    """Remove the folders listed in `file`. Remove the parent of each, its run's folder, if it is then empty."""
    if not file.exists():
        return
    for line in file.read_text(encoding="utf-8").splitlines():
        folder = Path(line)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.parent.rmdir()
        except OSError:  # it holds folders of another node, or is gone already
            continue
