"""Read documents from text files, jsonl, parquet, the hub or Python's standard library; generate random tokens."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from remat.config.options import ConfigError, DataConfig, DataFormat, DataSource
from remat.data.files import Hashes, SourceFile, find_files, stdlib_files
from remat.data.rows import BadRowLog, Document, content_of, needed_columns

SYMBOLS = 256  # few enough that a short run meets each of them often
BRANCHES = 4


def synthetic_blocks(
    start: int, count: int, *, tokenizer: PreTrainedTokenizerBase, seq_len: int, seed: int
) -> np.ndarray:
    """Return blocks `start` to `start + count` of an endless stream: int32 [count, seq_len].

    The stream is a Markov chain in which every symbol has 4 equally likely successors. So the lowest possible loss is
    ln 4 = 1.386 nats per token; a model that learned nothing has ln(vocabulary). Special tokens do not occur. A block
    depends on the seed and its own index alone.
    """
    special = set(tokenizer.all_special_ids)
    ids = np.array(
        [i for i in range(min(len(tokenizer), SYMBOLS + len(special))) if i not in special][:SYMBOLS]
    )
    shuffled = np.random.Generator(np.random.PCG64(seed)).permutation(ids)
    blocks = np.empty((count, seq_len), dtype=np.int32)
    for row in range(count):
        random = np.random.Generator(np.random.PCG64([seed, 1 + start + row]))
        steps = random.integers(1, 1 + BRANCHES, size=seq_len)
        steps[0] = random.integers(len(ids))
        blocks[row] = shuffled[np.cumsum(steps) % len(ids)]
    return blocks


# Text is read in pieces, so that any size fits in memory. With many files, whole files are held out, except that pieces
# are held out of a file that is too large a share of them. With few files, pieces are held out, small enough to come
# near to data.eval_fraction.
MANY_FILES = 100
LARGEST_WHOLE_SHARE = 0.1
LARGEST_PIECE_BYTES, CUSTOMARY_PIECE_BYTES = 1024**2, 16 * 1024
PIECES, FEWEST_PIECES = 512, 64  # of all files together: wanted if pieces stay of customary size, and at least
LONGEST_LINE_BYTES = 1024**2
ROWS_PER_BATCH = 1024


@dataclass(frozen=True)
class Corpus:
    """Documents that can be read more than once. `total` is in bytes of files, or rows of a table."""

    read: Callable[[BadRowLog], Iterator[Document]]
    identity: Callable[[], list[str]]  # equal lists mean equal data
    total: int
    files: frozenset[Path] = field(default_factory=frozenset)


def documents(cfg: DataConfig, path: str | None, bad_rows: BadRowLog | None = None) -> Iterator[Document]:
    """Yield the documents at `path` (or of the standard library), in a fixed order.

    A row that cannot be used goes to `bad_rows`, by default a log that follows `data.on_bad_row`. Raises ConfigError
    for bad rows under `stop`, and when there is nothing to read.
    """
    log = bad_rows or BadRowLog(cfg.on_bad_row)
    yield from open_corpus(cfg, path).read(log)
    log.check()


def open_corpus(
    cfg: DataConfig, path: str | None, option: str = "data.path", hashes: Hashes | None = None
) -> Corpus:
    """Find the documents at `path` and return them as a Corpus. Raises ConfigError when there is nothing to read.

    `option` is the dotted name of `path` in errors. `hashes` gives the hashes of files; by default it reads them all.
    """
    hashes = hashes or Hashes()
    if cfg.source == DataSource.synthetic:
        raise ConfigError("data.source=synthetic has no documents: it is random tokens")
    _check_combination(cfg, path, option)
    if cfg.source == DataSource.hub:
        return _hub(cfg, str(path), option, hashes)
    bundled = cfg.source == DataSource.python_stdlib
    files = stdlib_files() if bundled else find_files(str(path), cfg.source, option)
    total_bytes = total = sum(file.size_bytes for file in files)
    if cfg.source == DataSource.parquet:
        total = sum(_parquet_rows(file) for file in files)

    def read(bad_rows: BadRowLog) -> Iterator[Document]:
        for file in files:
            if cfg.source == DataSource.jsonl:
                yield from _jsonl(file, cfg, bad_rows)
            elif cfg.source == DataSource.parquet:
                yield from _parquet(file, cfg, bad_rows)
            else:
                yield from _text(file, bad_rows, _divided_into(file, len(files), total_bytes))

    named = "python_stdlib" if bundled else str(path)
    paths = frozenset(file.path.resolve() for file in files)
    return Corpus(read, lambda: hashes.of(files, named), total, paths)


def _check_combination(cfg: DataConfig, path: str | None, option: str) -> None:
    if cfg.source == DataSource.python_stdlib:
        if path:
            raise ConfigError(
                f"{option}={path} has no meaning with data.source=python_stdlib: "
                f"choose data=text, jsonl, parquet or hub, or remove {option}"
            )
    elif not path:
        raise ConfigError(f"data.source={cfg.source} needs data.path=FILE_FOLDER_OR_NAME, which is empty")
    if cfg.source in (DataSource.text, DataSource.python_stdlib) and cfg.format != DataFormat.plain:
        raise ConfigError(
            f"data.format={cfg.format} needs rows with fields, but data.source={cfg.source} is plain text: "
            "set data.format=plain, or data.source=jsonl, parquet or hub"
        )


def _divided_into(file: SourceFile, num_files: int, total_bytes: int) -> int | None:
    """Return the bytes of the pieces of `file`, each held out or not by itself; None: the file is one unit."""
    if num_files >= MANY_FILES and file.size_bytes <= LARGEST_WHOLE_SHARE * total_bytes:
        return None
    customary = max(CUSTOMARY_PIECE_BYTES, total_bytes // PIECES)
    return max(1, min(LARGEST_PIECE_BYTES, customary, total_bytes // FEWEST_PIECES))


def _text(file: SourceFile, bad_rows: BadRowLog, piece_bytes: int | None) -> Iterator[Document]:
    """Yield a file as pieces that continue one another. With `piece_bytes` None they are one unit, else each is one."""
    previous: Document | None = None
    decoded = _decoded(file, bad_rows, piece_bytes)
    for piece, following in pairwise(chain(decoded, [None])):
        if piece is not None:
            yield Document(
                piece.content,
                piece.origin,
                piece.unit,
                starts=previous is None,
                ends=following is None,
                size=piece.size,
            )
        previous = piece


def _decoded(file: SourceFile, bad_rows: BadRowLog, piece_bytes: int | None) -> Iterator[Document | None]:
    """Yield pieces of text; None in the place of a piece that is not UTF-8."""
    for raw, line in _pieces(file.path, piece_bytes or LARGEST_PIECE_BYTES):
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            bad_line = line + raw.count(b"\n", 0, error.start)
            bad_rows.bad(f"{file.path}:{bad_line}", f"is not UTF-8 (byte 0x{raw[error.start]:02X})")
            yield None
            continue
        bad_rows.good()
        unit = file.name if piece_bytes is None else f"{file.name}:{line}"
        yield Document(
            text.removeprefix("\ufeff") if line == 1 else text, f"{file.path}:{line}", unit, size=len(raw)
        )


def _pieces(path: Path, piece_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield (bytes, number of their first line), cut after a line, or between characters of a line over 1 MiB."""
    line = 1
    with path.open("rb") as stream:
        while raw := stream.read(piece_bytes):
            if not raw.endswith(b"\n"):
                raw += stream.readline(LONGEST_LINE_BYTES)
            unfinished = _unfinished_bytes(raw)
            if unfinished < len(raw):
                stream.seek(-unfinished, 1)
                raw = raw[: len(raw) - unfinished]
            yield raw, line
            line += raw.count(b"\n")


def _unfinished_bytes(raw: bytes) -> int:
    """Return how many bytes at the end begin a UTF-8 character without finishing it."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(raw[-4:])
    return len(decoder.getstate()[0])


def _jsonl(file: SourceFile, cfg: DataConfig, bad_rows: BadRowLog) -> Iterator[Document]:
    with file.path.open("rb") as stream:
        for line, raw in enumerate(stream, 1):
            raw = raw.removeprefix(codecs.BOM_UTF8) if line == 1 else raw
            if not raw.strip():
                continue  # blank lines are customary at the end
            origin = f"{file.path}:{line}"
            try:
                content = content_of(_parse(raw), cfg)
            except ValueError as error:
                bad_rows.bad(origin, str(error))
                continue
            bad_rows.good()
            yield Document(content, origin, f"{file.name}:{line}", size=len(raw))


def _parse(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte 0x{raw[error.start]:02X} at {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({error})") from error


def _parquet_rows(file: SourceFile) -> int:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_metadata(file.path).num_rows
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ConfigError(f"data.source=parquet, but {file.path} is not a parquet file: {error}") from error


def _parquet(file: SourceFile, cfg: DataConfig, bad_rows: BadRowLog) -> Iterator[Document]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file.path) as table:
        columns = needed_columns(cfg, table.schema_arrow.names, str(file.path))
        batches = table.iter_batches(batch_size=ROWS_PER_BATCH, columns=columns)
        rows = (row for batch in batches for row in batch.to_pylist())
        yield from _table_rows(rows, str(file.path), file.name, cfg, bad_rows)


def _table_rows(
    rows: Iterable[Any], where: str, name: str, cfg: DataConfig, bad_rows: BadRowLog
) -> Iterator[Document]:
    """Yield the usable rows of a table as documents. Rows are numbered from 1, as lines are."""
    for number, row in enumerate(rows, 1):
        try:
            content = content_of(row, cfg)
        except ValueError as error:
            bad_rows.bad(f"{where}:{number}", str(error))
            continue
        bad_rows.good()
        yield Document(content, f"{where}:{number}", f"{name}:{number}", size=1)


def _hub(cfg: DataConfig, path: str, option: str, hashes: Hashes) -> Corpus:
    """Load a hub dataset. `path` is `name[:subset][@split]`; the split is `data.split` where the path names none."""
    import datasets

    name, _, split = path.partition("@")
    name, _, subset = name.partition(":")
    split = split or cfg.split
    try:
        table = datasets.load_dataset(name, subset or None, split=split)
    except Exception as error:  # the library raises its own, fsspec's, the hub's and the network's errors
        raise ConfigError(
            f"data.source=hub could not load {option}={path} (dataset {name}, subset {subset or 'default'}, "
            f"split {split}): {type(error).__name__}: {error}\n"
            "Check the name, name the subset and split as NAME:SUBSET@SPLIT, or log in for a gated dataset"
        ) from error
    if not len(table):
        raise ConfigError(f"{option}={path} is empty: choose another split or subset")
    table = table.select_columns(needed_columns(cfg, table.column_names, path))

    def read(bad_rows: BadRowLog) -> Iterator[Document]:
        return _table_rows(table, f"{name}[{split}]", "row", cfg, bad_rows)

    def identity() -> list[str]:
        which = f"{subset}@{split} {len(table)}"
        if Path(name).expanduser().exists():  # for local files the library's own hash uses modification times
            return [which, *hashes.of(find_files(name, cfg.source, option), name)]
        return [f"{name}:{which} {table._fingerprint}"]  # its own hash of the commit, the split and the columns

    return Corpus(read, identity, len(table))
