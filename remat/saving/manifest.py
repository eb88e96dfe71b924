"""Make folders complete or absent: hash every file, sync it to disk, then rename the folder into place.

A saved state is trusted only through its `manifest.json`, which lists each file with its size and SHA-256 and has a
checksum of itself. `tmp-` folders are unfinished and never read. `tmp-old-` folders are whole states about to be
replaced or deleted; they are read only where a kill left no other copy.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from remat.config import paths
from remat.config.options import ConfigError
from remat.config.units import MIB
from remat.machine import distributed
from remat.machine.start_up import available_cores

log = logging.getLogger(__name__)
T = TypeVar("T")

FILE = "manifest.json"
SAVED, STEP, TMP = paths.SAVED, paths.STEP, paths.TMP
ENGINE = "engine"  # DeepSpeed's files inside a state folder
OLD = f"{TMP}old-"  # a whole state about to be replaced or deleted
UNFINISHED = ": unfinished"  # the end of the note on a folder that a kill left
FORMAT = 1
OWNER = re.compile(r"offloaded_tensors/rank(\d+)/|rng/rank-(\d+)\.pt")
SHARE = re.compile(r"(?:pp_rank_(\d+)_)?mp_rank_(\d+)_")  # DeepSpeed's data rank and tensor-parallel rank
MAX_THREADS = 8  # threads that hash
READ_BYTES = 8 * MIB
# pieces of a larger file are hashed in parallel, because a rank has few large files
PIECE_BYTES = 256 * MIB


class SaveError(RuntimeError):
    """Failure to write or read a saved state or a model. Raised on every rank; older states are untouched."""


@dataclass(frozen=True)
class FileEntry:
    """Size and SHA-256 of a file; with `piece_bytes` the SHA-256 of the digests of its pieces, in order."""

    size_bytes: int
    sha256: str
    piece_bytes: int = 0


@dataclass(frozen=True)
class Manifest:
    """Description of a saved state and its files. `files` maps relative paths to size and hash."""

    step: int
    sequence: int  # counts the saves of a run: the newest has the highest, also after a resume at an older step
    world_size: int
    zero_stage: int
    precision: str
    layout: str  # digest of names, shapes and order of the parameters in each optimizer group
    frozen_excluded: bool  # frozen parameters are not in the state; the model must be built with their values
    created: str  # UTC, ISO 8601
    versions: dict[str, str]
    client_state: dict[str, Any]
    files: dict[str, FileEntry]
    optimizer: str = "adamw"  # kind of the optimizer whose state it holds: KINDS in model/optimizer.py
    states: str = "fp32"  # number format of that state, a value of optim.states
    tensor_parallel_size: int = 1  # consecutive ranks that shared the layers
    # weight that they shared -> dimension along which it is cut
    cuts: dict[str, int] = field(default_factory=dict)
    pipeline_parallel_size: int = 1  # stages, each of consecutive ranks, that the layers were divided into

    def rank_of(self, name: str) -> int | None:
        """Return from a file's name the rank that wrote it and reads it again; None for a file that all ranks share.

        The first data rank writes the files that name only a share of the layers. With pipeline stages the number
        after `mp_rank` is the stage.
        """
        if match := OWNER.search(name):
            return int(next(number for number in match.groups() if number is not None))
        match = SHARE.search(name)
        shared_by, stages = self.tensor_parallel_size, self.pipeline_parallel_size
        if match is None or (match[1] is None and shared_by == stages == 1):
            return None
        data_rank = int(match[1] or 0)
        if stages > 1:
            return int(match[2]) * (self.world_size // stages) + data_rank
        return data_rank * shared_by + int(match[2])

    @property
    def on_nvme(self) -> bool:
        """Return whether parts are DeepSpeed's NVMe files, which only a running engine can read."""
        return any("/offloaded_tensors/" in name for name in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files.values())


@dataclass(frozen=True)
class SavedState:
    """A state folder with a readable manifest."""

    path: Path
    info: Manifest

    @property
    def step(self) -> int:
        return self.info.step

    @property
    def client_state(self) -> dict[str, Any]:
        return dict(self.info.client_state)


def write(folder: Path, info: Manifest) -> None:
    """Write and sync `folder/manifest.json`. The listed files must be on disk already."""
    content = {"format": FORMAT, **asdict(info)}
    content["checksum"] = _checksum(content)
    with (folder / FILE).open("w") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> Manifest:
    """Read the manifest of a state folder. Raises SaveError when it is missing, unreadable or altered."""
    try:
        content = json.loads((folder / FILE).read_text())
    except FileNotFoundError as error:
        raise SaveError(f"{FILE} is missing: the state was never finished") from error
    except OSError as error:
        raise SaveError(f"{FILE} cannot be read: {error}") from error
    except ValueError as error:
        raise SaveError(f"{FILE} is not readable: {error}") from error
    if not isinstance(content, dict) or content.pop("checksum", None) != _checksum(content):
        raise SaveError(f"{FILE} was changed after it was written")
    if content.pop("format") != FORMAT:
        raise SaveError(f"{FILE} has another format; this version reads format {FORMAT}")
    try:
        content["files"] = {name: FileEntry(**entry) for name, entry in content["files"].items()}
        return Manifest(**content)
    except TypeError as error:
        raise SaveError(f"{FILE} has other fields than this version of remat knows: {error}") from error


def verify(
    folder: Path, *, part: int = 0, parts: int = 1, hashed: Callable[[int], object] = lambda count: None
) -> list[str]:
    """Return the problems of a state folder, [] when it is complete. Reads and hashes every file, several at a time.

    Rank `part` of `parts` checks its `share`. `hashed` is called with each number of bytes read, from several threads.
    """
    try:
        info = read(folder)
    except SaveError as error:
        return [str(error)]

    mine = share(info, part, parts)
    found = {name: _size_problem(folder / name, info.files[name]) for name in mine}
    whole = [name for name in mine if found[name] is None]
    entries = {name: (info.files[name].size_bytes, info.files[name].piece_bytes) for name in whole}
    with _hashing(folder, entries, hashed) as digests:
        for name in whole:
            try:
                found[name] = (
                    None if digests[name]() == info.files[name].sha256 else "content changed (hash differs)"
                )
            except OSError as error:  # the other ranks wait for this one's findings
                found[name] = f"cannot be read ({error.strerror})"
    return [f"{name}: {problem}" for name, problem in found.items() if problem is not None]


def share(info: Manifest, part: int, parts: int) -> list[str]:
    """Return the files that rank `part` of `parts` hashes, sorted.

    They are its own files, which it reads next anyway, and a share of the common files that makes the bytes of all
    ranks about equal. When another number of ranks wrote the state, all files are shared out by bytes.
    """
    mine, load = [], [0] * parts
    own = {name: info.rank_of(name) if parts == info.world_size else None for name in info.files}
    largest_first = sorted(info.files, key=lambda name: (-info.files[name].size_bytes, name))
    # files of one rank first; sorting is stable
    for name in sorted(largest_first, key=lambda name: own[name] is None):
        rank = own[name]
        if rank is None or rank >= parts:
            rank = load.index(min(load))
        load[rank] += info.files[name].size_bytes
        if rank == part:
            mine.append(name)
    return sorted(mine)


def is_complete(folder: Path) -> bool:
    """Return whether every listed file is there with its size. Cheap: `verify` also compares hashes."""
    try:
        info = read(folder)
    except SaveError:
        return False
    return all(_size_problem(folder / name, entry) is None for name, entry in info.files.items())


def list_states(path: Path) -> tuple[list[SavedState], list[str]]:
    """Return the states with a readable manifest, last saved first, and a note on each folder without one.

    `path` is a run directory, its `saved` folder or one state folder. The states' files are not checked.
    """
    if path.name.startswith(STEP):
        folders = [path] if path.is_dir() else []
    else:
        saved = path / SAVED if (path / SAVED).is_dir() else path
        folders = sorted(p for p in saved.glob("*") if p.is_dir())
    states, notes = [], []
    for folder in folders:
        if folder.name.startswith(TMP) and not _is_only_copy(folder):
            notes.append(f"{folder.name}{UNFINISHED}")
        elif folder.name.startswith((STEP, TMP)):
            try:
                states.append(SavedState(folder.absolute(), read(folder)))
            except SaveError as error:
                notes.append(f"{folder.name}: {error}")
    return sorted(states, key=lambda state: state.info.sequence, reverse=True), notes


def describe(folder: Path, names: list[str]) -> dict[str, FileEntry]:
    """Sync the named files of `folder` to disk and return their sizes and hashes."""
    for name in names:
        sync(folder / name)
    sizes = {name: (folder / name).stat().st_size for name in names}
    entries = {name: (size, PIECE_BYTES if size > PIECE_BYTES else 0) for name, size in sizes.items()}
    with _hashing(folder, entries) as digests:
        return {name: FileEntry(size, digests[name](), piece) for name, (size, piece) in entries.items()}


@contextmanager
def _hashing(
    folder: Path, entries: Mapping[str, tuple[int, int]], hashed: Callable[[int], object] = lambda count: None
) -> Iterator[dict[str, Callable[[], str]]]:
    """Hash files in threads; yield for each a function that waits for its SHA-256 and returns it in hexadecimal.

    `entries` maps a file's name to its bytes and the bytes of a piece (0: hashed whole). `hashed` is called with the
    bytes of each read, at most READ_BYTES, from several threads. The functions raise OSError when a read fails.
    """
    threads = max(1, min(MAX_THREADS, available_cores() // distributed.local_size_from_env()))
    with ThreadPoolExecutor(threads, "remat-hash") as pool:  # hashing releases the GIL

        def start(name: str) -> Callable[[], str]:
            size, length = entries[name]
            places = range(0, size, length) if length else [0]
            parts = [pool.submit(_hash_piece, folder / name, place, length or size, hashed) for place in places]

            def wait() -> str:
                digests = [part.result() for part in parts]
                return (hashlib.sha256(b"".join(digests)).digest() if length else digests[0]).hex()

            return wait

        yield {name: start(name) for name in entries}


def _hash_piece(path: Path, start: int, length: int, hashed: Callable[[int], object]) -> bytes:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(READ_BYTES, length)))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while length and (count := file.readinto(buffer[: min(len(buffer), length)])):
            digest.update(buffer[:count])
            length -= count
            hashed(count)
    return digest.digest()


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def files_in(folder: Path) -> list[str]:
    """Return the relative paths of all files below `folder`, sorted, without the manifest."""
    names = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return sorted(name for name in names if name != FILE)


def publish(tmp: Path, final: Path) -> None:
    """Rename a finished `tmp` folder to `final`; an older `final` is put aside, and deleted only afterwards."""
    for path in [p for p in tmp.rglob("*") if p.is_dir()]:
        sync(path)
    sync(tmp)
    old = final.with_name(f"{OLD}{final.name}")
    if final.exists():
        if old.exists():  # a killed publish left it
            remove(old)
        final.rename(old)
    tmp.rename(final)
    sync(final.parent)
    remove(old)


def clean(saved: Path) -> None:
    """Delete what killed saves left in `saved`. A complete state that they had put aside gets its name back."""
    for leftover in sorted(saved.glob(f"{TMP}*")):
        if _is_only_copy(leftover) and is_complete(leftover):
            leftover.rename(_own_name(leftover))
        else:
            remove(leftover)


def _own_name(folder: Path) -> Path:
    return folder.with_name(folder.name.removeprefix(OLD))


def _is_only_copy(folder: Path) -> bool:
    """Return whether `folder` is a state put aside by a save that was killed before the new one took its name."""
    return folder.name.startswith(OLD) and not _own_name(folder).exists()


def remove(folder: Path) -> None:
    """Delete a folder if it is there. A failure is logged, not raised: nothing depends on the deletion."""
    try:
        if folder.exists() and not folder.name.startswith(TMP):
            # Rename first: a kill in the middle must not leave a half-deleted folder under its own name.
            folder = folder.rename(folder.with_name(f"{OLD}{folder.name}"))
        if folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        log.warning("could not delete %s: %s", folder, error)


def raise_together(error: Exception | None, what: str) -> None:
    """Raise SaveError on every rank when any rank passes an `error`. Collective."""
    texts = distributed.gather(None if error is None else _text(error))
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
    if failed:
        raise SaveError(f"{what} failed on {'; '.join(failed)}") from error


def run_on_main(action: Callable[[], T], what: str) -> T:
    """Run `action` on rank 0, and return its result on every rank. Collective.

    When it fails, every rank raises: a ConfigError as it is, anything else as SaveError.
    """
    outcome: list[T] = []
    error: Exception | None = None
    if distributed.place()[0] == 0:
        try:
            outcome = [action()]
        except Exception as caught:
            error = caught
    text = None if error is None else _text(error)
    outcome, text, is_config = distributed.broadcast((outcome, text, isinstance(error, ConfigError)))
    if is_config:
        raise ConfigError(str(text).partition(": ")[2]) from error
    if text is not None:
        raise SaveError(f"{what} failed on rank 0: {text}") from error
    return outcome[0]


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, SaveError) else f"{type(error).__name__}: {error}"


def _size_problem(path: Path, entry: FileEntry) -> str | None:
    try:
        size = path.stat().st_size
    except OSError:
        return "missing"
    if size == entry.size_bytes:
        return None
    return "empty" if size == 0 else f"{size} bytes of {entry.size_bytes}"


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
