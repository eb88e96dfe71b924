"""Which files a path means, and what they are, as far as a cache must know."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from remat.choices import DataSource
from remat.config import ConfigError

# In a folder; a file or a glob named by the user is taken as it is.
SUFFIXES = {DataSource.jsonl: (".jsonl", ".ndjson"), DataSource.parquet: (".parquet",)}
HASH_WHOLE_BYTES = 64 * 1024**2
HASH_ENDS_BYTES = 1024**2
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class SourceFile:
    path: Path
    name: str  # relative to what the user named, with forward slashes
    size_bytes: int


def find_files(path: str, source: DataSource, option: str) -> list[SourceFile]:
    """Files of a file, a folder (recursive, hidden ones left out) or a glob, sorted by name.

    `option` is the dotted name for errors. Raises ConfigError when there is nothing to read.
    """
    root = Path(path).expanduser()
    if root.is_file():
        return [_source_file(root, root.parent)]
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


def identity(files: list[SourceFile]) -> list[str]:
    """Name, size and content hash of each file: equal lists mean equal data.

    Files over 64 MiB are not read whole: their hash covers size, modification time, first and last MiB.
    """
    return [f"{file.name} {file.size_bytes} {_content_hash(file)}" for file in files]


def _content_hash(file: SourceFile) -> str:
    digest = hashlib.blake2b(digest_size=32)
    with file.path.open("rb") as stream:
        if file.size_bytes <= HASH_WHOLE_BYTES:
            while chunk := stream.read(HASH_ENDS_BYTES):
                digest.update(chunk)
        else:
            digest.update(f"{file.size_bytes} {file.path.stat().st_mtime_ns}".encode())
            digest.update(stream.read(HASH_ENDS_BYTES))
            stream.seek(-HASH_ENDS_BYTES, os.SEEK_END)
            digest.update(stream.read(HASH_ENDS_BYTES))
    return digest.hexdigest()


def _source_file(path: Path, base: Path) -> SourceFile:
    return SourceFile(path, path.relative_to(base).as_posix(), path.stat().st_size)


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    return True
