"""Make sure that the disk has room for swap files. Files that killed launches left count as free.

DeepSpeed (0.19) does not check the result of a write: on a full disk a file would be cut off without an error, and the
process would be aborted when it reads the file. So each file is allocated whole before its first write. Writing it
again needs no more room, unless the file system copies on write.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from remat.saving.disk_space import describe_size, free_bytes


class SwapError(RuntimeError):
    """The error raised when the disk lacks room for a swap file. The text names folder, bytes needed and bytes free."""


def bytes_in(folder: Path) -> int:
    """Return the bytes that the files below `folder` take on their disk; files may be deleted meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += 512 * path.lstat().st_blocks if path.is_file() else 0
        except OSError:  # removed since it was listed
            continue
    return total


def describe_lack(folder: Path, needed_bytes: int) -> str | None:
    """Return why the disk of `folder` cannot take `needed_bytes` more, None if it can."""
    free = free_bytes(folder)
    if needed_bytes <= free:
        return None
    return (
        f"hardware.nvme_path={folder}: {describe_size(needed_bytes)} needed for swap files, {describe_size(free)} "
        "free; free some, or choose another hardware.nvme_path"
    )


class Reserving:
    """A handle of DeepSpeed's asynchronous I/O that allocates each file below `folder` before its first write."""

    def __init__(self, handle: Any, folder: Path) -> None:
        self._handle, self._folder = handle, folder
        self._sizes: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def async_pwrite(self, buffer: Any, path: str, *more: Any) -> Any:
        """Write as the handle does. Raises SwapError when the disk has no room for the file."""
        self._reserve(path, buffer.nbytes)
        return self._handle.async_pwrite(buffer, path, *more)

    def sync_pwrite(self, buffer: Any, path: str, *more: Any) -> Any:
        self._reserve(path, buffer.nbytes)
        return self._handle.sync_pwrite(buffer, path, *more)

    def _reserve(self, path: str, size: int) -> None:
        if self._sizes.get(path, 0) >= size:
            return
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(file, 0, size)
            finally:
                os.close(file)
        except OSError as error:
            raise SwapError(
                f"hardware.nvme_path={self._folder}: no room for the swap file {path}: {error.strerror}, "
                f"{describe_size(size)} needed, {describe_size(free_bytes(self._folder))} free. Saved "
                "states are whole; free some, or choose another hardware.nvme_path, and resume"
            ) from error
        self._sizes[path] = size


def reserve_first(folder: Path) -> None:
    """Make DeepSpeed's swappers created from now on allocate each file in `folder` before its first write.

    DeepSpeed's op async_io must be built already (remat.machine.ops.ensure).
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder

    library = AsyncIOBuilder().load(verbose=False)
    make = getattr(library.aio_handle, "plain", library.aio_handle)

    def handle(*args: Any, **kwargs: Any) -> Reserving:
        return Reserving(make(*args, **kwargs), folder)

    handle.plain = make  # type: ignore[attr-defined]
    library.aio_handle = handle


def left_by(folders: Iterable[Path]) -> int:
    """Return the bytes in `folders` of killed launches, which the next launch of their run frees."""
    return sum(bytes_in(folder) for folder in folders)
