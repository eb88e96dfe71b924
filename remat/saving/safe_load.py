"""Read saved states as data: tensors, numbers, text, and the few DeepSpeed types in ALLOWED. No code runs.

A pickle names functions that are called while it is read. Hashes do not protect: whoever writes a folder writes its
manifest too. So every file is read by torch's weights-only reader, which calls only what rebuilds tensors and what is
listed here. DeepSpeed reads with pickle; inside `guarding` its reads go through `load`.
"""

from __future__ import annotations

import importlib
import pickle
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import EnumType
from pathlib import Path
from typing import Any

import torch

from remat.config.options import ConfigError

# The constructors of these types only keep their arguments, and none has a __reduce__ or __setstate__.
ALLOWED = (
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
)
ZIP = b"PK\x03\x04"  # first bytes of what torch.save writes; its older format cannot be memory-mapped
NAMED = re.compile(r"GLOBAL (\S+) (?:was not|whose module)|unrecognized function (.+)")


class UnsafeFile(ConfigError):
    """Refusal of a saved state's file that holds more than data; nothing in it was run (exit 2)."""


def load(file: Path, *, mapped: bool = False, map_location: Any = "cpu") -> Any:
    """Load what torch.save wrote to `file`; `mapped` memory-maps its tensors, which stay on the disk.

    Raises UnsafeFile when the file holds anything but data, OSError when it cannot be read.
    """
    with file.open("rb") as opened:
        mappable = opened.read(len(ZIP)) == ZIP
    with _only_allowed():
        try:
            return _torch_load(file, map_location=map_location, mmap=mapped and mappable, weights_only=True)
        except (OSError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a crafted pickle can raise any error
            raise UnsafeFile(_refusal(file, error)) from error


def problem(files: Iterable[Path]) -> str | None:
    """Return why one of `files` is refused, else None. Reads what describes the tensors, not their values."""
    for file in files:
        try:
            load(file, mapped=True)
        except UnsafeFile as error:
            return str(error)
    return None


def pickled(folder: Path) -> list[Path]:
    """Return the files of a state folder that torch reads, listed in its manifest or not."""
    return sorted(folder.rglob("*.pt"))


@contextmanager
def guarding() -> Iterator[None]:
    """Replace torch.load by `load` while inside: DeepSpeed calls it with weights_only=False."""

    def guarded(f: Any, map_location: Any = None, pickle_module: Any = None, **settings: Any) -> Any:
        return load(Path(f), mapped=bool(settings.get("mmap")), map_location=map_location)

    torch.load = guarded
    try:
        yield
    finally:
        torch.load = _torch_load


_torch_load = torch.load


@contextmanager
def _only_allowed() -> Iterator[None]:
    """Allow only the types in ALLOWED while inside, not those that other libraries have declared safe."""
    serialization = torch.serialization
    types = [getattr(importlib.import_module(module), name) for module, name in ALLOWED]
    before = serialization.get_safe_globals()
    serialization.clear_safe_globals()
    serialization.add_safe_globals([*types, (_member, "builtins.getattr")])
    try:
        yield
    finally:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(before)


def _member(kind: Any, name: Any) -> Any:
    """Return the member `name` of an enumeration in ALLOWED: Python 3.11.0 to 3.11.3 write members as a `getattr`."""
    listed = isinstance(kind, EnumType) and (kind.__module__, kind.__name__) in ALLOWED
    if not listed or name not in kind.__members__:
        raise pickle.UnpicklingError("unrecognized function getattr")
    return kind[name]


def _refusal(file: Path, error: Exception) -> str:
    named = NAMED.search(str(error))
    if named is not None:
        what = f"it names {named[1] or named[2]}, which would be called"
    elif isinstance(error, pickle.UnpicklingError):
        what = "it holds instructions that data does not need"
    else:
        first = (str(error).splitlines() or [""])[0][:200]
        what = f"it cannot be read as data ({type(error).__name__}: {first})"
    return (
        f"{file} is refused: {what}, and nothing in it was run. Saved states are tensors, numbers and text: this file "
        "was not written by this program and its DeepSpeed, or was changed; give a state of which you know the origin"
    )
