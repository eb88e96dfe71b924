"""Find the files that a path names, tell what each is, open it decompressed, and hash its content.

Each file is read once in full. Its hash is stored in the cache folder, and the file is not read again while its size,
mtime, ctime and inode stay the same. Setting the mtime back changes the ctime, so such an edit is noticed too. An edit
is missed only if all four stay the same, which needs a clock that was set back or a file system that does not keep
these times. If the stored hashes are lost, the files are read again.
"""

from __future__ import annotations

import codecs
import contextlib
import glob
import gzip
import hashlib
import io
import json
import os
import sysconfig
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from remat.config import paths
from remat.config.options import ConfigError, DataConfig, FileType
from remat.config.paths import near
from remat.config.units import MIB

HEAD_BYTES = 64 * 1024
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
TABLES = {b"PAR1": FileType.parquet, b"ARROW1": FileType.arrow, b"\xff\xff\xff\xff": FileType.arrow}
REFUSED = {
    b"PK\x03\x04": "a zip archive or a workbook: unpack it, or save it as CSV",
    b"BZh": "compressed with bzip2: recompress it with gzip or zstd",
    b"\xfd7zXZ": "compressed with xz: recompress it with gzip or zstd",
    codecs.BOM_UTF16_LE: "text in UTF-16: save it as UTF-8",
    codecs.BOM_UTF16_BE: "text in UTF-16: save it as UTF-8",
    b"version https://git-lfs": "a git-lfs pointer, not the data: run git lfs pull",
}
COMPRESSED_SUFFIXES = (".gz", ".zst", ".zstd")
# Which files of a folder are data; a file or a glob that the user names is taken as it is.
SUFFIXES = {
    FileType.jsonl: (".jsonl", ".ndjson"),
    FileType.json: (".json",),
    FileType.csv: (".csv", ".tsv"),
    FileType.parquet: (".parquet",),
    FileType.arrow: (".arrow",),
    FileType.text: ("",),
}
ROWS = tuple(dict.fromkeys(suffix for suffixes in SUFFIXES.values() for suffix in suffixes if suffix))
TEXTS = (".txt", ".text", ".md")


class Kind(NamedTuple):
    """The type of a file; `compression` is "", "gzip" or "zstd"."""

    file_type: FileType
    compression: str


def bare_name(path: Path) -> str:
    """Return the file name in lower case, without the suffix of a compression."""
    name = path.name.lower()
    for suffix in COMPRESSED_SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def recognise(path: Path, asked: FileType, option: str) -> Kind:
    """Return the kind of `path`. `asked` overrides what bytes and name say, except for a compression.

    Raises ConfigError, naming `option`, for a file that is damaged or of an unsupported kind.
    """
    with path.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    compression = "gzip" if head.startswith(GZIP) else "zstd" if head.startswith(ZSTD) else ""
    if compression:
        with telling_damage(path, option), open_stream(path, compression) as stream:
            head = stream.read(HEAD_BYTES)
    if asked is not FileType.auto:
        return Kind(asked, compression)
    for start, remedy in REFUSED.items():
        if head.startswith(start):
            raise ConfigError(f"{option}: {path} is {remedy}")
    if head[257:262] == b"ustar":
        raise ConfigError(f"{option}: {path} is a tar archive: unpack it")
    tables = [file_type for start, file_type in TABLES.items() if head.startswith(start)]
    if tables and compression:
        raise ConfigError(f"{option}: {path} is a {tables[0]} file in {compression}: decompress it first")
    return Kind(tables[0] if tables else _of_text(bare_name(path), head), compression)


def _of_text(name: str, head: bytes) -> FileType:
    if name.endswith(SUFFIXES[FileType.parquet]):
        return FileType.parquet  # the parquet reader says what is wrong
    if name.endswith(SUFFIXES[FileType.csv]):
        return FileType.csv
    if name.endswith(TEXTS):
        return FileType.text
    start = head.removeprefix(codecs.BOM_UTF8).lstrip()
    line = start.split(b"\n", 1)[0].strip()
    if name.endswith((*SUFFIXES[FileType.jsonl], *SUFFIXES[FileType.json])):
        # A row that is a list is a bad row of JSONL, not the whole file; an array on one line is the whole file.
        following = start[len(line) :].lstrip().split(b"\n", 1)[0]
        if start[:1] == b"[":
            return FileType.jsonl if following and _is_json(line) else FileType.json
        over_lines = start[:1] == b"{" and following and not _is_json(line) and not _is_json(following)
        return FileType.json if over_lines else FileType.jsonl
    if start[:1] == b"{" and _is_json(line):
        return FileType.jsonl
    return FileType.json if start[:1] == b"[" and start[1:].lstrip()[:1] == b"{" else FileType.text


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def open_stream(path: Path, compression: str) -> BinaryIO:
    """Open a file for reading its decompressed bytes, front to back."""
    if compression == "gzip":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if compression == "zstd":
        import pyarrow

        return cast(BinaryIO, io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd")))
    return path.open("rb")


@contextlib.contextmanager
def telling_damage(path: Path, option: str) -> Iterator[None]:
    """Raise ConfigError for an error inside which means that the bytes of `path` do not match its kind."""
    try:
        yield
    except Exception as error:
        if not _is_damage(error):
            raise
        told = f"{option}: {path} is damaged or incomplete ({error}): copy or download it again"
        raise ConfigError(told) from error


def _is_damage(error: Exception) -> bool:
    known = (EOFError, zlib.error, gzip.BadGzipFile)
    if isinstance(error, known) or type(error).__module__.startswith("pyarrow"):
        return True
    return isinstance(error, OSError) and error.errno is None  # pyarrow: it cannot decompress the data


FOLDER = "hashes"  # in the cache
VERSION = 1
READ_BYTES = 8 * MIB
READERS = 4
SKETCHED_BYTES = 64 * 1024  # read at the beginning and at the end of a file
# a file changed more recently may change again within the same clock tick of its file system
SETTLED_S = 2.0
Signs = tuple[int, int, int, int]  # size, mtime and ctime in ns, inode

ONE = "data"  # stands for the name of a single file, so that a copy under another name is the same data
# as datasets writes
ABOUT_DATA = "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class SourceFile:
    path: Path
    name: str  # relative to the folder that the user named, with forward slashes; ONE for a single file
    size_bytes: int
    kind: Kind
    option: str  # the option that names the file


def find_files(
    path: Any, option: str, *, file_type: FileType = FileType.auto, split: str = "train"
) -> list[SourceFile]:
    """Return the files of a path, or of a list of paths, with the kind of each.

    A path is a file, a folder (recursive, without hidden files), a glob, or a folder that `datasets.save_to_disk`
    wrote, of which `split` is taken. Its files are sorted by name. `option` is the dotted name of the option for
    errors. Raises ConfigError, with every problem, when there is nothing to read or a file is named twice.
    """
    paths = [str(entry) for entry in path] if isinstance(path, list) else [str(path)]
    found: list[SourceFile] = []
    problems: list[str] = []
    for place, entry in enumerate(paths):
        try:
            named = _find(entry, option, file_type, split)
        except ConfigError as error:
            problems.append(str(error))
            continue
        found += named if len(paths) == 1 else [replace(file, name=f"{place}/{file.name}") for file in named]
    seen: set[Path] = set()
    for file in found:
        real = file.path.resolve()
        if real in seen:
            problems.append(f"{option}={path} names {file.path} twice: its rows could be trained and held out")
        seen.add(real)
    if problems:
        raise ConfigError("\n".join(problems))
    return found


def _find(path: str, option: str, file_type: FileType, split: str) -> list[SourceFile]:
    root = paths.expand(path)
    may_be_saved = root.is_dir() and file_type in (FileType.auto, FileType.arrow)
    if may_be_saved and (tables := _saved_tables(root, option, split)):
        return [_source_file(file, root, FileType.arrow, option) for file in tables]
    if split != DataConfig().split and (root.is_file() or root.is_dir()):
        raise ConfigError(
            f"data.split={split} has no effect on {option}={path}, which holds no splits by name: leave it out, and "
            "name the files of that split"
        )
    if root.is_file():
        return [_source_file(root, None, file_type, option)]
    if root.is_dir():
        shown = _data_files(root, option, file_type)
        return sorted((_source_file(f, root, file_type, option) for f in shown), key=lambda file: file.name)
    if not glob.has_magic(str(root)):
        raise ConfigError(f"{option}={path} does not exist{near(path)}: name a file, a folder or a glob")
    matches = [Path(match) for match in glob.glob(str(root), recursive=True)]  # noqa: PTH207 - absolute patterns
    files = [match for match in matches if match.is_file()]
    if not files:
        raise ConfigError(f"{option}={path} matches no file: correct the glob, and quote it for the shell")
    base = Path(os.path.commonpath([file.parent for file in files]))
    return sorted((_source_file(f, base, file_type, option) for f in files), key=lambda file: file.name)


def _data_files(root: Path, option: str, file_type: FileType) -> list[Path]:
    """Return the data files of a folder. With `auto`, text files are data only where no file has rows."""
    inside = [file for file in root.rglob("*") if file.is_file() and file.name not in ABOUT_DATA]
    shown = [f for f in inside if not any(part.startswith(".") for part in f.relative_to(root).parts)]
    wanted: list[tuple[str, ...]] = [ROWS, TEXTS] if file_type is FileType.auto else [SUFFIXES[file_type]]
    for suffixes in wanted:
        if chosen := [file for file in shown if bare_name(file).endswith(suffixes)]:
            return chosen
    kind = "visible" if file_type is FileType.text else " or ".join(name for names in wanted for name in names)
    there = ", ".join(sorted(file.relative_to(root).as_posix() for file in shown)[:5])
    remedy = "; data=text reads files of any name as text" if shown and file_type is FileType.auto else ""
    raise ConfigError(
        f"{option}={root} has no {kind} file in it{f', only {there}' * bool(there)}: "
        f"name a folder with data, a file or a glob{remedy}"
    )


def _saved_tables(root: Path, option: str, split: str) -> list[Path]:
    """Return the tables of a folder that `datasets.save_to_disk` wrote, in order; [] for any other folder."""
    if (root / "dataset_dict.json").is_file():
        splits = _json(root / "dataset_dict.json", option).get("splits", [])
        if split not in splits:
            raise ConfigError(
                f"{option}={root} holds the splits {', '.join(map(str, splits))} and not data.split={split}: "
                "choose one of them"
            )
        root = root / split
    if not ((root / "state.json").is_file() and (root / "dataset_info.json").is_file()):
        return []
    named = [root / entry["filename"] for entry in _json(root / "state.json", option).get("_data_files", [])]
    missing = [file.name for file in named if not file.is_file()]
    if missing or not named:
        raise ConfigError(
            f"{option}={root} is incomplete: {', '.join(missing[:3]) or 'every table'} is missing; save it again"
        )
    return named


def _json(path: Path, option: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{option}: {path} is not JSON ({error}): save the dataset again") from error
    return content if isinstance(content, dict) else {}


def stdlib_files() -> list[SourceFile]:
    """Return the UTF-8 .py files of this Python's standard library: real text, about 12 MB, without a download.

    Installed packages and tests are left out. Raises ConfigError where Python was installed without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_LIBRARY]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    found = sorted(
        (_source_file(f, root, FileType.text, "data.path") for f in files if _is_utf8(f)),
        key=lambda file: file.name,
    )
    if not found:
        raise ConfigError(
            f"data.source=python_stdlib found no .py file in {root}: set data.source and data.path"
        )
    return found


def _source_file(path: Path, base: Path | None, file_type: FileType, option: str) -> SourceFile:
    name = ONE if base is None else path.relative_to(base).as_posix()
    return SourceFile(path, name, path.stat().st_size, recognise(path, file_type, option), option)


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    return True


class Hashes:
    """Hashes of files, stored in the cache folder `memory`; None stores nothing.

    `advance` reports progress: it is called after each READ_BYTES, and by later readers of the files.
    """

    def __init__(self, memory: Path | None = None, advance: Callable[[], None] = lambda: None) -> None:
        self._memory, self.advance = memory, advance
        self._read: dict[Path, Signs] = {}

    def of(self, files: list[SourceFile], named: str) -> list[str]:
        """Return name, size and content hash of each file; equal lists mean equal data. `named` is the user's path.

        Raises ConfigError when a file changes while it is read, OSError when one cannot be read.
        """
        known = self._remembered(named)
        with ThreadPoolExecutor(READERS) as pool:
            found = list(pool.map(lambda file: self._hash(file, known.get(_key(file.path))), files))
        entries = {_key(file.path): entry for file, entry in zip(files, found, strict=True)}
        settled = time.time_ns() - int(SETTLED_S * 1e9)
        self._remember(
            named, {path: entry for path, entry in entries.items() if max(entry[0][1:3]) < settled}, known
        )
        return [
            f"{file.name} {file.size_bytes} {digest}" for file, (_, digest) in zip(files, found, strict=True)
        ]

    def refuse_changed(self) -> None:
        """Raise ConfigError if a file has changed since it was hashed, because its blocks would have a wrong key."""
        for path, signs in self._read.items():
            if _signs(path.stat()) != signs:
                raise ConfigError(_changed(path))

    def _hash(self, file: SourceFile, known: tuple[Signs, str] | None) -> tuple[Signs, str]:
        with file.path.open("rb", buffering=0) as stream:
            signs = _signs(os.fstat(stream.fileno()))
            self._read[file.path] = signs
            if known is not None and known[0] == signs:
                return known
            digest, buffer = hashlib.blake2b(digest_size=32), bytearray(min(READ_BYTES, file.size_bytes + 1))
            while count := stream.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
                self.advance()
            if _signs(os.fstat(stream.fileno())) != signs or signs[0] != file.size_bytes:
                raise ConfigError(_changed(file.path))
        return signs, digest.hexdigest()

    def _remembered(self, named: str) -> dict[str, tuple[Signs, str]]:
        if self._memory is None:
            return {}
        try:
            content = json.loads(self._place(named).read_text())
            if content["version"] != VERSION:
                return {}
            return {
                path: (cast(Signs, tuple(signs)), str(digest))
                for path, (signs, digest) in content["files"].items()
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}

    def _remember(
        self, named: str, entries: dict[str, tuple[Signs, str]], known: dict[str, tuple[Signs, str]]
    ) -> None:
        if self._memory is None or entries == known:
            return
        place = self._place(named)
        part = place.with_name(f"{place.name}.{uuid.uuid4().hex}")
        with contextlib.suppress(OSError):  # the cache may be read-only
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                part.write_text(json.dumps({"version": VERSION, "files": entries}))
                part.replace(place)
            finally:
                part.unlink(missing_ok=True)

    def _place(self, named: str) -> Path:
        assert self._memory is not None
        name = hashlib.sha256(str(paths.expand(named).absolute()).encode()).hexdigest()
        return self._memory / FOLDER / f"{name[:32]}.json"


class Sketches(Hashes):
    """Identity of files that are too large to read twice: name, size, and a hash of their first and last bytes."""

    def of(self, files: list[SourceFile], named: str) -> list[str]:
        return [f"{file.name} {file.size_bytes} {self._sketch(file)}" for file in files]

    def _sketch(self, file: SourceFile) -> str:
        with file.path.open("rb") as stream:
            ends = stream.read(SKETCHED_BYTES)
            stream.seek(max(0, file.size_bytes - SKETCHED_BYTES))
            return hashlib.blake2b(ends + stream.read(SKETCHED_BYTES), digest_size=32).hexdigest()


def _signs(status: os.stat_result) -> Signs:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _key(path: Path) -> str:
    """Return a digest of the path, because the path may contain a password."""
    return hashlib.sha256(str(path.absolute()).encode()).hexdigest()


def _changed(path: Path) -> str:
    return (
        f"{path} changes while it is read: its blocks would belong to neither content. Start again once nobody writes "
        "to data.path and data.eval_path"
    )
