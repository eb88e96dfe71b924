"""Which files a path means."""

from __future__ import annotations

import glob
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from remat.config.choices import DataSource
from remat.config.options import ConfigError

# In a folder; a file or a glob named by the user is taken as it is.
SUFFIXES = {DataSource.jsonl: (".jsonl", ".ndjson"), DataSource.parquet: (".parquet",)}
ONE = "data"  # what a file named by itself is called, so that a copy under another name is the same data
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class SourceFile:
    path: Path
    name: str  # relative to what the user named, with forward slashes; ONE for a file that was named itself
    size_bytes: int


def find_files(path: str, source: DataSource, option: str) -> list[SourceFile]:
    """Files of a file, a folder (recursive, hidden ones left out) or a glob, sorted by name.

    `option` is the dotted name for errors. Raises ConfigError when there is nothing to read.
    """
    root = Path(path).expanduser()
    if root.is_file():
        return [SourceFile(root, ONE, root.stat().st_size)]
    if root.is_dir():
        suffixes = SUFFIXES.get(source, ("",))
        inside = [file for file in root.rglob("*") if file.name.endswith(suffixes)]
        shown = [
            f
            for f in inside
            if not any(part.startswith(".") for part in f.relative_to(root).parts) and f.is_file()
        ]
        if not shown:
            kind = " or ".join(suffixes) if source in SUFFIXES else "visible"
            raise ConfigError(
                f"{option}={path} has no {kind} file in it: name a folder with data, a file or a glob"
            )
        return sorted((_source_file(file, root) for file in shown), key=lambda file: file.name)
    if not glob.has_magic(str(root)):
        raise ConfigError(f"{option}={path} does not exist: name a file, a folder or a glob")
    matches = [Path(match) for match in glob.glob(str(root), recursive=True)]  # noqa: PTH207 - absolute patterns
    files = [match for match in matches if match.is_file()]
    if not files:
        raise ConfigError(f"{option}={path} matches no file: correct the glob, and quote it for the shell")
    base = Path(os.path.commonpath([file.parent for file in files]))
    return sorted((_source_file(file, base) for file in files), key=lambda file: file.name)


def stdlib_files() -> list[SourceFile]:
    """The .py files of this Python's standard library that are UTF-8: real text, about 12 MB, without a download.

    Installed packages and tests are left out. Raises ConfigError where Python was installed without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_LIBRARY]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    found = sorted((_source_file(f, root) for f in files if _is_utf8(f)), key=lambda file: file.name)
    if not found:
        raise ConfigError(
            f"data.source=python_stdlib found no .py file in {root}: set data.source and data.path"
        )
    return found


def _source_file(path: Path, base: Path) -> SourceFile:
    return SourceFile(path, path.relative_to(base).as_posix(), path.stat().st_size)


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    return True
