"""Check the paths that options name, before heavy imports: whether they exist, are complete, and can be written.

Standard library only. Functions of os.path find nothing below a folder that this user may not enter, where those of
Path raise PermissionError. Weights are not read: a safetensors file says in its first bytes how long it is.
"""

from __future__ import annotations

import difflib
import glob
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from remat.config.options import NOT_FOLDERS, DataSource, ModelConfig, ModelInit, RunConfig

LONGEST_HEADER_BYTES = 100_000_000  # as safetensors itself refuses
OF_FILES = (  # endings of data files, which no hub name has
    *(".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".text", ".md"),
    *(".gz", ".zst", ".zstd"),
)
PLACEHOLDERS = {"FOLDER_OR_HUB_NAME", "FOLDER", "MODEL", "NAME"}  # from pages and messages, typed as they stand
LFS_POINTER = b"version https://git-lfs"
# names of folders: a run's saved states; the prefix of a state, and of a state that is not yet complete
SAVED, STEP, TMP = "saved", "step-", "tmp-"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_*.json",
    "vocab.*",
    "*.model",
    "*.tiktoken",
    "tekken.json",
)
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def expand(path: str) -> Path:
    """Return `path` with the home folder in place of ~; Path.expanduser raises where there is none."""
    return Path(os.path.expanduser(path))  # noqa: PTH111


def nearest(folder: str | Path) -> Path:
    """Return `folder`, absolute, or its nearest parent that exists and that this user may look at."""
    place = expand(str(folder)).absolute()
    return next((each for each in (place, *place.parents) if os.path.exists(each)), place)  # noqa: PTH110


def model_problems(model: ModelConfig) -> list[str]:
    """Return what is wrong with model.path: no such folder, or one without config.json. A hub name is not looked up."""
    if not model.path or (model.init is ModelInit.random and model.architecture):
        return []
    option = f"model.path={model.path}"
    try:
        return _model_problems(model.path, option)
    except PermissionError as error:
        return [_unreadable(option, error)]


def _model_problems(path: str, option: str) -> list[str]:
    place = Path(path)
    if path in PLACEHOLDERS and not place.exists():
        return [f"{option} stands for your own: give a folder with config.json, or a hub name"]
    if "://" in path:
        name = "/".join(path.partition("://")[2].split("/")[1:3])
        return [f"{option}: addresses are not read; write the hub name, model.path={name}, or a folder"]
    if path.startswith("~") and (full := expand(path)).exists():
        return [f"{option}: write the path in full, model.path={full}"]
    if place.is_file():
        return [f"{option} is a file: give the folder that holds it, with config.json"]
    if not place.is_dir():
        if not _is_local(path):
            return []  # a hub name
        return [f"{option} does not exist{near(path)}: give a folder with config.json, or a hub name"]
    if not (place / "config.json").is_file():
        return [f"{option} {_no_model(place)}"]
    return _pointer(place / "config.json", option) or _no_json(place / "config.json", option)


def near(path: str) -> str:
    """Return ` (there is ...)` with the name closest to a missing `path` in its folder; empty when none is close."""
    missing = expand(path)
    try:
        names = os.listdir(missing.parent)  # noqa: PTH208 - names alone
    except OSError:
        return ""
    alike = difflib.get_close_matches(missing.name, names, n=1)
    return f" (there is {missing.parent / alike[0]})" if alike else ""


def resume_problems(resume: str) -> list[str]:
    """Return a problem when resume=FOLDER names a folder that does not exist."""
    if resume in NOT_FOLDERS or not resume or os.path.exists(expand(resume)):  # noqa: PTH110
        return []
    newest = ""
    if resume.lower() in ("true", "latest", "last", "newest", "yes", "1"):
        newest = " (did you mean resume=auto, the newest run of the recipe?)"
    return [
        f"resume={resume}: no such folder{newest}; give the folder of a run, outputs/RECIPE/RUN_ID, or auto"
    ]


def state_problems(cfg: RunConfig) -> list[str]:
    """Return a problem when `resume` finds no saved state. Whether a state is complete is checked later."""
    if cfg.resume in ("none", "auto_or_start"):
        return []
    runs, place = expand(cfg.output_dir) / cfg.name, expand(cfg.resume)
    try:
        if cfg.resume in NOT_FOLDERS:
            place = runs / (cfg.run_id or "*")
            found = any(runs.glob(f"{cfg.run_id or '*'}/{SAVED}/*"))
        else:
            below = place / SAVED if (place / SAVED).is_dir() else place
            states = (child for child in below.glob("*") if child.name.startswith((STEP, TMP)))
            found = place.name.startswith(STEP) or any(states)
    except PermissionError as error:
        return [_unreadable(f"resume={cfg.resume}", error)]
    return [] if found else [no_state(cfg.resume, str(place), "nothing")]


def no_state(resume: str, places: str, found: str) -> str:
    """Return that `places` hold no complete saved state, with what was found instead."""
    return (
        f"resume={resume}: no complete saved state in {places} (found: {found}). Give resume=FOLDER of a run that has "
        "one, or resume=none to start at step 0"
    )


def tokenizer_problems(model: ModelConfig) -> list[str]:
    """Return a problem when the tokenizer's folder holds no tokenizer."""
    option, name = ("model.tokenizer", model.tokenizer) if model.tokenizer else ("model.path", model.path)
    if not name or name == "bytes":
        return []
    if name.startswith("~") and os.path.exists(full := expand(name)):  # noqa: PTH110
        return [f"{option}={name}: write the path in full, {option}={full}"]
    if not os.path.isdir(name):  # noqa: PTH112
        return []
    if any(file for pattern in TOKENIZER_FILES for file in Path(name).glob(pattern)):
        return []
    return [
        f"{option}={name} has no tokenizer ({', '.join(TOKENIZER_FILES[:2])} or another): copy its files there, name a "
        "folder or hub name that has them with model.tokenizer, or set model.tokenizer=bytes"
    ]


def _no_model(folder: Path) -> str:
    """Return what a folder without config.json holds, and what to give instead."""
    names = sorted(file.name for file in folder.iterdir())
    held = f"has no config.json (it holds {', '.join(names[:8]) or 'nothing'})"
    if "adapter_config.json" in names:
        return f"{held}: these are adapters; give their base, or merge them into it with `remat export --merge`"
    if any(name.endswith(".gguf") for name in names):
        return f"{held}: GGUF is not trained; give the folder of the model it was made of, with safetensors"
    return f"{held}: give the folder of a Hugging Face model"


def _no_json(file: Path, option: str) -> list[str]:
    try:
        json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        return [f"{option}: {file.name} is not JSON ({error}): copy or download it again"]
    return []


def weight_problems(model: ModelConfig) -> list[str]:
    """Return what is wrong with the safetensors files of a pretrained model in a local folder, each file by name."""
    if model.init is not ModelInit.pretrained or not model.path or not os.path.isdir(model.path):  # noqa: PTH112
        return []
    folder, option = Path(model.path), f"model.path={model.path}"
    found: list[str] = []
    try:
        if not (folder / SINGLE).is_file() and not (folder / INDEX).is_file():
            found += _no_weights(folder, option, pickles=model.allow_pickle)
        for file in weight_files(folder, option, found):
            found += _pointer(file, option) or _unsound(file, option)
        for name in ("tokenizer.json", "tokenizer.model"):
            if (folder / name).is_file():
                found += _pointer(folder / name, option)
    except OSError as error:
        found.append(_unreadable(option, error))
    return found


def _unreadable(option: str, error: OSError) -> str:
    return f"{option}: {error.filename} cannot be read ({error.strerror}): make it readable"


def weight_files(folder: Path, option: str, problems: list[str]) -> Iterator[Path]:
    """Yield the files that transformers would read; add those that are missing to `problems`."""
    if (folder / SINGLE).is_file():
        yield folder / SINGLE
        return
    if not (folder / INDEX).is_file():
        return
    if pointer := _pointer(folder / INDEX, option):
        problems += pointer
        return
    try:
        names = sorted({str(name) for name in json.loads((folder / INDEX).read_text())["weight_map"].values()})
    except (ValueError, KeyError, AttributeError, OSError, TypeError) as error:
        problems.append(f"{option}: {INDEX} cannot be read ({error}): copy it again")
        return
    for name in names:
        if (folder / name).is_file():
            yield folder / name
        else:
            problems.append(f"{option}: {name} is missing, which {INDEX} names: copy or download it")


def data_problems(cfg: RunConfig) -> list[str]:
    """Return a problem for each data.path and data.eval_path, also of data.mix, that cannot be read."""
    return [
        f"{section}.{option}={path} {problem}"
        for name, data in cfg.data.sources().items()
        for section in ["data" if not name else f"data.mix.{name}"]
        for option, paths in (("path", data.path), ("eval_path", data.eval_path))
        for path in (paths if isinstance(paths, list) else [paths])
        if path and (problem := _problem_of(str(path), data.source))
    ]


def _problem_of(path: str, source: DataSource) -> str:
    """Return why data of `source` cannot be at `path`; "" where it can."""
    if source is DataSource.hub and os.path.isfile(expand(path)):  # noqa: PTH113
        return "is a file on this machine, and data.source=hub: choose data=files"
    if source is not DataSource.files or not _is_local(path) or _exists(path):
        return ""
    if "://" in path:
        return "is an address: download it and name the file"
    return f"does not exist{near(path)}: name a file, a folder or a glob"


def home_problems(cfg: RunConfig) -> list[str]:
    """Return a problem for each folder to write to that is below the home of a user who does not exist."""
    written = {"output_dir": cfg.output_dir, "data.cache_dir": cfg.data.cache_dir}
    written["hardware.nvme_path"] = cfg.hardware.nvme_path or ""
    return [
        f"{option}={folder}: there is no user {folder.split('/')[0]}; give a folder, or ./~ for that name"
        for option, folder in written.items()
        if str(expand(folder)).startswith("~")
    ]


def output_problems(cfg: RunConfig) -> list[str]:
    """Return a problem when output_dir cannot be written; try it by a folder in its nearest existing parent."""
    place = nearest(cfg.output_dir)
    try:
        Path(tempfile.mkdtemp(prefix=".remat-", dir=place)).rmdir()
    except OSError as error:
        return [
            f"output_dir={cfg.output_dir} cannot be written ({place}: {error.strerror}): choose a folder that this "
            "user may write to"
        ]
    return []


def _is_local(path: str) -> bool:
    """Return whether a path cannot be a hub name, which is NAME or OWNER/NAME."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or path.endswith(OF_FILES)


def _exists(path: str) -> bool:
    place = os.path.expanduser(path)  # noqa: PTH111 - a slash at its end is part of a glob
    return os.path.exists(place) or (glob.has_magic(place) and any(glob.iglob(place, recursive=True)))  # noqa: PTH110, PTH207


def _no_weights(folder: Path, option: str, *, pickles: bool) -> list[str]:
    """Return what is wrong with a folder that has neither model.safetensors nor its index."""
    if list(folder.glob("*.bin")):
        if pickles:
            return []
        return [
            f"{option} has weights in .bin files alone, which can run code: give a folder with {SINGLE}, or set "
            "model.allow_pickle=true if you trust them"
        ]
    names = ", ".join(sorted(file.name for file in folder.iterdir())[:8])
    return [
        f"{option} has no weights, {SINGLE} or {INDEX} (it holds {names}): copy or download them, or set "
        "model.init=random"
    ]


def _pointer(file: Path, option: str) -> list[str]:
    with file.open("rb") as opened:
        if opened.read(len(LFS_POINTER)) != LFS_POINTER:
            return []
    return [
        f"{option}: {file.name} is a git-lfs pointer of {file.stat().st_size} bytes, not the file itself: run "
        f"`git lfs pull` in {file.parent}, or download the model with `hf download`"
    ]


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file: the name of its dtype there, its shape, and the byte of its first value."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file: 8 bytes of header length, a header (JSON), values to its end.

    Raises ValueError with what is wrong with a file that is not whole.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 0 < length <= min(size - 8, LONGEST_HEADER_BYTES):
            raise ValueError(f"is cut off or no safetensors file ({size:,} bytes)")
        header = opened.read(length)
    found, end = {}, 8 + length
    try:
        for name, entry in json.loads(header).items():
            if name != "__metadata__":
                begin, after = entry["data_offsets"]
                found[name] = StoredTensor(str(entry["dtype"]), tuple(entry["shape"]), 8 + length + begin)
                end = max(end, 8 + length + after)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"has a damaged header ({type(error).__name__})") from error
    if size != end:
        raise ValueError(f"{'is cut off' if size < end else 'is too long'} ({size:,} of {end:,} bytes)")
    return found


def _unsound(file: Path, option: str) -> list[str]:
    try:
        read_header(file)
    except ValueError as error:
        return [f"{option}: {file.name} {error}: copy or download it again"]
    return []
