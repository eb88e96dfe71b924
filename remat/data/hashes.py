"""What files hold, whatever their times say: each is read whole once, and remembered while nothing about it changes.

The memory is a file beside the cache for each path that a user names. A file is not read again while its size, its
times of modification and of change, and its inode are those at which it was read. Setting the modification time back
changes the time of change, so that an edit is seen all the same; not seen is one that leaves all four as they were,
which takes a clock that was set back, or a file system that does not keep them. A memory that is lost or damaged costs
reading, nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from remat.config.options import ConfigError
from remat.data.files import SourceFile

FOLDER = "hashes"  # in the cache
VERSION = 1
READ_BYTES = 8 * 1024**2
READERS = 4
SETTLED_S = (
    2.0  # a file changed later than this may change again within the same tick of its file system's clock
)

Signs = tuple[int, int, int, int]  # size, times of modification and of change in ns, inode


class Hashes:
    """`memory` is the cache folder, None: nothing is remembered.

    `advance` is called for every READ_BYTES read, and by whoever goes on to read the files: a sign of progress.
    """

    def __init__(self, memory: Path | None = None, advance: Callable[[], None] = lambda: None) -> None:
        self._memory, self.advance = memory, advance
        self._read: dict[Path, Signs] = {}

    def of(self, files: list[SourceFile], named: str) -> list[str]:
        """Name, size and content hash of each file: equal lists mean equal data. `named` is what the user named.

        Raises ConfigError when a file changes meanwhile, OSError when one cannot be read.
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
        """Raise ConfigError if a file is no longer what was hashed: blocks made of it would have a wrong name."""
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
            return {path: (_as_signs(signs), str(digest)) for path, (signs, digest) in content["files"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}

    def _remember(
        self, named: str, entries: dict[str, tuple[Signs, str]], known: dict[str, tuple[Signs, str]]
    ) -> None:
        if self._memory is None or entries == known:
            return
        place = self._place(named)
        part = place.with_name(f"{place.name}.{uuid.uuid4().hex}")
        with contextlib.suppress(OSError):  # a cache that can only be read
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                part.write_text(json.dumps({"version": VERSION, "files": entries}))
                part.replace(place)
            finally:
                part.unlink(missing_ok=True)

    def _place(self, named: str) -> Path:
        assert self._memory is not None
        name = hashlib.sha256(str(Path(named).expanduser().absolute()).encode()).hexdigest()
        return self._memory / FOLDER / f"{name[:32]}.json"


def _signs(status: os.stat_result) -> Signs:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _as_signs(values: list[int]) -> Signs:
    size, modified, changed, inode = (int(value) for value in values)
    return size, modified, changed, inode


def _key(path: Path) -> str:
    """A path may hold a password; its digest does not."""
    return hashlib.sha256(str(path.absolute()).encode()).hexdigest()


def _changed(path: Path) -> str:
    return (
        f"{path} changes while it is read: its blocks would belong to neither content. Start again once nobody writes "
        "to data.path and data.eval_path"
    )
