"""Folders of swap files that ranks name as they make them, for `remat launch` to remove once all ranks have ended.

A rank removes its own; one that is killed cannot. Without `remat launch` the next launch of the run does it. Standard
library only.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

FILE = "REMAT_SWAP_FOLDERS"  # environment of the ranks: where to name them


def name(folder: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Name a folder that only this launch uses; nobody is told where no supervisor asks."""
    if FILE in environment:
        with Path(environment[FILE]).open("a", encoding="utf-8") as named:
            named.write(f"{folder.absolute()}\n")


def remove(file: Path) -> None:
    """Remove what the ranks named in `file`, and the folder of its run above it where that is empty then."""
    if not file.exists():
        return
    for line in file.read_text(encoding="utf-8").splitlines():
        folder = Path(line)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.parent.rmdir()
        except OSError:  # another node's, or gone already
            continue
