"""Find out what a data file is, by its first bytes and its name, and open it decompressed."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from remat.config.options import ConfigError, FileType

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
    """What a file is: `compression` is "", "gzip" or "zstd"."""

    file_type: FileType
    compression: str


def bare_name(path: Path) -> str:
    """Return the name in lower case, without the suffix of a compression."""
    name = path.name.lower()
    for suffix in COMPRESSED_SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def recognise(path: Path, asked: FileType, option: str) -> Kind:
    """Return what `path` is. `asked` decides over what its bytes and its name say, except for a compression.

    Raises ConfigError, naming `option`, for a file that is damaged or of a kind that is not read.
    """
    with path.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    compression = "gzip" if head.startswith(GZIP) else "zstd" if head.startswith(ZSTD) else ""
    if compression:
        try:
            with open_stream(path, compression) as stream:
                head = stream.read(HEAD_BYTES)
        except Exception as error:
            if not is_damage(error):
                raise
            raise ConfigError(tell_damaged(path, option, error)) from error
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
        return FileType.parquet  # its reader says what is wrong with it
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


def is_damage(error: Exception) -> bool:
    """Return whether `error` says that a file's bytes are not what its kind asks for."""
    if isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile)) or type(error).__module__.startswith(
        "pyarrow"
    ):
        return True
    return isinstance(error, OSError) and error.errno is None  # pyarrow's for what cannot be decompressed


def tell_damaged(path: Path, option: str, error: BaseException) -> str:
    return f"{option}: {path} is damaged or incomplete ({error}): copy or download it again"
