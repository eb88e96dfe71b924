"""Read documents from files, the hub or Python's standard library; generate random tokens."""

from __future__ import annotations

import codecs
import errno
import json
import re
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby, islice, pairwise
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from remat.config import paths
from remat.config.data_fields import REQUIRED
from remat.config.options import BadRows, ConfigError, DataConfig, DataFormat, DataSource, FileType
from remat.config.units import MIB, format_count
from remat.data.files import (
    ONE,
    ROWS,
    TEXTS,
    Hashes,
    SourceFile,
    bare_name,
    find_files,
    open_stream,
    stdlib_files,
    telling_damage,
)
from remat.data.readers import Row, count_rows, read_rows, without_nulls
from remat.data.rows import (
    FIRST_ROWS,
    BadRowLog,
    Document,
    content_of,
    fields_read,
    file_of,
    fits,
    recognise_format,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SYMBOLS = 256  # few enough that a short run sees each of them often
BRANCHES = 4
MOST_OPENED = 50  # files whose first rows are checked before any file is read in full


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


# Text is read in pieces, so that any size fits in memory. With many files, whole files are held out, but pieces of a
# file that is a large share of all. With few files, pieces are held out, small enough to come near data.eval_fraction.
MANY_FILES = 100
LARGEST_WHOLE_SHARE = 0.1
LARGEST_PIECE_BYTES, CUSTOMARY_PIECE_BYTES = MIB, 16 * 1024
PIECES, FEWEST_PIECES = 512, 64  # over all files: wanted while pieces keep their usual size, and the fewest
LONGEST_LINE_BYTES = MIB
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?(@[\w.\[\]:%+-]+)?")


Part = Callable[[BadRowLog], Iterator[Document]]


@dataclass(frozen=True)
class Corpus:
    """Documents that can be read more than once. `total` is in bytes of files, or in rows of a hub dataset.

    `kind` is what they are read from ("jsonl", "text", "hub"), `data_format` the format of rows; `found` describes
    both. `parts` are read one after another: a part is a file, or a piece of a hub dataset.
    """

    parts: Sequence[Part]
    identity: Callable[[], list[str]]  # equal lists mean equal data
    total: int
    kind: str
    data_format: DataFormat
    found: str
    files: frozenset[Path] = frozenset()

    def read(self, bad_rows: BadRowLog) -> Iterator[Document]:
        """Yield all documents; unusable rows go to `bad_rows`."""
        for part in self.parts:
            yield from part(bad_rows)


def open_corpus(cfg: DataConfig, path: Any, option: str = "data.path", hashes: Hashes | None = None) -> Corpus:
    """Find the documents at `path` and their format, and return them as a Corpus. Only first rows are read.

    `option` is the dotted name of `path` for errors. `hashes` gives the hashes of files; by default all are computed.
    Raises ConfigError when there is nothing to read, and when the rows have no known format or not `data.format`.
    """
    hashes = hashes or Hashes()
    if cfg.source == DataSource.python_stdlib:
        refuse_options(cfg, path, option)
        return _texts(cfg, stdlib_files(), "python_stdlib", hashes)
    if not path:
        raise ConfigError(f"data.source={cfg.source} needs {option}=FILE_FOLDER_OR_NAME, which is empty")
    if _is_of_the_hub(cfg, path):
        return _hub(cfg, path, option, hashes)
    files = find_files(path, option, file_type=cfg.file_type, split=cfg.split)
    if all(file.kind.file_type is FileType.text for file in files):
        if cfg.format not in (DataFormat.auto, DataFormat.plain):
            raise ConfigError(_text_has_no_rows(cfg, files[0]))
        return _texts(cfg, files, path, hashes)
    return _rows(cfg, files, path, option, hashes)


def local_files(cfg: DataConfig, path: Any, option: str) -> frozenset[Path]:
    """Return the files on this machine that `path` names; none for a dataset of the hub."""
    if not path or cfg.source is not DataSource.files or _is_of_the_hub(cfg, path):
        return frozenset()
    return frozenset(
        file.path.resolve() for file in find_files(path, option, file_type=cfg.file_type, split=cfg.split)
    )


def refuse_trained(cfg: DataConfig, corpus: Corpus, held_out: Corpus) -> None:
    """Raise ConfigError if files of `held_out`, or all of it, are trained too."""
    if problem := describe_trained(cfg, corpus.files & held_out.files):
        raise ConfigError(problem)
    if not corpus.files and corpus.identity() == held_out.identity():
        raise ConfigError(f"{cfg.eval_path} is {_in_both(cfg)}")


def describe_trained(cfg: DataConfig, held_out: Iterable[Path]) -> str:
    """Return what is wrong with `held_out` files that are trained too; "" if there are none."""
    both = sorted(held_out)
    more = f" and {len(both) - 1} more files are" if len(both) > 1 else " is"
    return f"{both[0]}{more} {_in_both(cfg)}" if both else ""


def _in_both(cfg: DataConfig) -> str:
    return (
        f"in data.path={cfg.path} and in data.eval_path={cfg.eval_path}: evaluation would be on training data. Keep "
        "them apart, or leave data.eval_path empty and set data.eval_fraction"
    )


def refuse_options(cfg: DataConfig, path: Any, option: str) -> None:
    """Raise ConfigError for a `path`, or a format of rows, beside a data.source that has neither."""
    if path:
        raise ConfigError(
            f"{option}={path} has no meaning with data.source={cfg.source}: choose data=files or hub, "
            f"or remove {option}"
        )
    if cfg.format not in (DataFormat.auto, DataFormat.plain):
        raise ConfigError(
            f"data.format={cfg.format} needs rows with fields, and data.source={cfg.source} has none: choose "
            "data=files or hub, or remove data.format"
        )


def _text_has_no_rows(cfg: DataConfig, file: SourceFile) -> str:
    return (
        f"data.format={cfg.format} needs rows with fields, but {file.path} of {file.option} is plain text: set "
        "data.format=plain, or data.file_type if it is something else"
    )


def _is_of_the_hub(cfg: DataConfig, path: Any) -> bool:
    """Return whether data.source is hub, or `path` has the form OWNER/NAME and is not on this machine."""
    if cfg.source == DataSource.hub:
        return True
    if cfg.source != DataSource.files or not isinstance(path, str) or not HUB_NAME.fullmatch(path):
        return False
    local = Path(path)
    return not local.exists() and not local.parent.exists() and not bare_name(local).endswith((*ROWS, *TEXTS))


def _texts(cfg: DataConfig, files: list[SourceFile], named: Any, hashes: Hashes) -> Corpus:
    total_bytes = sum(file.size_bytes for file in files)
    together = repositories(files) if cfg.join_files else {}

    def part(file: SourceFile, bad_rows: BadRowLog) -> Iterator[Document]:
        return _text(file, bad_rows, _divided_into(file, len(files), total_bytes))

    def identity() -> list[str]:
        # a header may have the file's own name, which is not in its hash
        return hashes.of(files, str(named)) + [file.path.name for file in files if cfg.join_files]

    count = format_count(len(files), "text file")
    return Corpus(
        [partial(_joined_texts, cfg, name, inside) for name, inside in together.items()]
        or [partial(part, file) for file in files],
        identity,
        total_bytes,
        "python_stdlib" if named == "python_stdlib" else "text",
        DataFormat.plain,
        "" if named == "python_stdlib" else f"{count}, plain",
        frozenset(file.path.resolve() for file in files),
    )


def _rows(cfg: DataConfig, files: list[SourceFile], path: Any, option: str, hashes: Hashes) -> Corpus:
    """Return the corpus of rows in `files`. Text files may be among them if the rows are plain text."""
    for file in files:
        if file.kind.file_type is FileType.parquet:
            count_rows(file)  # a file that is no parquet file is reported before anything is read
    tables = [file for file in files if file.kind.file_type is not FileType.text]
    first = (
        (f"{file.path}:{row.place}", row.content)
        for file in tables
        for row in islice(read_rows(file, rows_per_batch=FIRST_ROWS), FIRST_ROWS)
    )
    found = recognise_format(list(islice(first, FIRST_ROWS)), cfg, option, path)
    cfg = replace(cfg, format=found.data_format)
    if cfg.on_bad_row is BadRows.stop:
        _check_alike(tables, cfg, option)
    if found.data_format != DataFormat.plain and len(tables) < len(files):
        text = next(file for file in files if file.kind.file_type is FileType.text)
        raise ConfigError(_text_has_no_rows(cfg, text))
    total_bytes = sum(file.size_bytes for file in files)

    def part(file: SourceFile, bad_rows: BadRowLog) -> Iterator[Document]:
        if file.kind.file_type is FileType.text:
            return _text(file, bad_rows, _divided_into(file, len(files), total_bytes))
        return _documents(read_rows(file, fields_read(cfg)), str(file.path), file.name, cfg, bad_rows)

    def all_rows() -> Iterator[tuple[str, Row]]:
        for file in files:
            for row in read_rows(file, fields_read(cfg)):
                yield f"{file.path}:{row.place}", row

    if cfg.join_files:
        _check_joinable(cfg, len(files) - len(tables), option, path)

    types = ", ".join(
        dict.fromkeys(" in ".join(filter(None, (file.kind.file_type, file.kind.compression))) for file in files)
    )
    count = format_count(len(files), f"{types} file")
    return Corpus(
        [_SortedFiles(cfg, all_rows).read] if cfg.join_files else [partial(part, file) for file in files],
        lambda: hashes.of(files, str(path)),
        total_bytes,
        "+".join(sorted({str(file.kind.file_type) for file in files})),
        found.data_format,
        f"{count}, {found.line}",
        frozenset(file.path.resolve() for file in files),
    )


def _check_alike(tables: list[SourceFile], cfg: DataConfig, option: str) -> None:
    """Raise ConfigError for files whose first row has another format, before the others are read in vain."""
    others = []
    for file in tables[:MOST_OPENED]:
        row = next(iter(read_rows(file, rows_per_batch=1)), None)
        fitting = [each for each in REQUIRED if row and fits(row.content, each, cfg)]
        if fitting and cfg.format not in fitting:
            others.append(f"{file.path} is {fitting[0]}")
    if others:
        raise ConfigError(
            f"{option}: the first rows are of data.format={cfg.format}, but {', '.join(others[:5])}. Files of several "
            "formats are mixed as sources: data.mix.NAME.path=FILE for each"
        )


def _documents(
    rows: Iterable[Row], where: str, name: str, cfg: DataConfig, bad_rows: BadRowLog
) -> Iterator[Document]:
    """Yield the usable rows as documents; the others go to `bad_rows`."""
    for row in rows:
        origin = f"{where}:{row.place}"
        try:
            content = content_of(row.content, cfg)
        except ValueError as error:
            bad_rows.bad(origin, str(error))
            continue
        bad_rows.good()
        yield Document(content, origin, f"{name}:{row.number}", size=row.size_bytes)


def _divided_into(file: SourceFile, num_files: int, total_bytes: int) -> int | None:
    """Return the bytes of the pieces of `file` that are units of their own; None where the file is one unit."""
    if num_files >= MANY_FILES and file.size_bytes <= LARGEST_WHOLE_SHARE * total_bytes:
        return None
    customary = max(CUSTOMARY_PIECE_BYTES, total_bytes // PIECES)
    return max(1, min(LARGEST_PIECE_BYTES, customary, total_bytes // FEWEST_PIECES))


def _text(file: SourceFile, bad_rows: BadRowLog, piece_bytes: int | None) -> Iterator[Document]:
    """Yield a file as consecutive pieces. With `piece_bytes` None they are one unit, else each is a unit."""
    previous: Document | None = None
    decoded = _decoded(file, bad_rows, piece_bytes)
    for piece, following in pairwise(chain(decoded, [None])):
        if piece is not None:
            yield replace(piece, starts=previous is None, ends=following is None)
        previous = piece


def _decoded(file: SourceFile, bad_rows: BadRowLog, piece_bytes: int | None) -> Iterator[Document | None]:
    """Yield pieces of text, and None instead of a piece that is not UTF-8."""
    for raw, line in _pieces(file, piece_bytes or LARGEST_PIECE_BYTES):
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


def _pieces(file: SourceFile, piece_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield (bytes, number of their first line). Cuts are after a line, or between characters of a line over 1 MiB."""
    line, left = 1, b""
    with telling_damage(file.path, file.option), open_stream(file.path, file.kind.compression) as stream:
        while raw := left + stream.read(max(1, piece_bytes - len(left))):
            if not raw.endswith(b"\n"):
                raw += stream.readline(LONGEST_LINE_BYTES)
            unfinished = _unfinished_bytes(raw)
            # At the end of the file nothing completes the character: the piece is not text.
            whole = raw[: len(raw) - unfinished] if unfinished < len(raw) else raw
            left = raw[len(whole) :]
            yield whole, line
            line += whole.count(b"\n")


def _unfinished_bytes(raw: bytes) -> int:
    """Return the number of bytes at the end that are an incomplete UTF-8 character."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(raw[-4:])
    return len(decoder.getstate()[0])


# data.join_files: the files of a repository, or the chapters of a book, are one document.


def repositories(files: Sequence[SourceFile]) -> dict[str, list[SourceFile]]:
    """Group files by the first folder in their name; "" for files directly in the folder that the user named.

    Files keep their order, which is by name. Each path of a list is a repository, named by its number in it from 0.
    """
    found: dict[str, list[SourceFile]] = {}
    for file in files:
        folder, slash, _ = file.name.partition("/")
        found.setdefault(folder if slash else "", []).append(file)
    return found


def _joined_texts(
    cfg: DataConfig, repository: str, files: Sequence[SourceFile], bad_rows: BadRowLog
) -> Iterator[Document]:
    """Yield the pieces of `files` as one document, which is one unit. Each file begins with its header."""

    def pieces() -> Iterator[Document]:
        for file in files:
            inside = file.name.removeprefix(f"{repository}/")
            path = file.path.name if inside == ONE else inside
            header, begins = cfg.file_header.format(repo=repository, path=path), True
            for piece in _decoded(file, bad_rows, None):
                if piece is not None:
                    yield replace(piece, content=f"{header * begins}{piece.content}", starts=begins)
                    begins = False

    return _one_document(pieces(), f"{repository}/")


def _one_document(pieces: Iterable[Document], unit: str) -> Iterator[Document]:
    """Yield `pieces` as one document. A piece that starts a file begins on a new line."""
    before = ""
    for place, (piece, following) in enumerate(pairwise(chain(pieces, [None]))):
        assert piece is not None, "only the last has nothing"
        apart = "\n" * (piece.starts and before not in ("", "\n"))
        before = str(piece.content)[-1:]
        yield replace(
            piece, content=f"{apart}{piece.content}", unit=unit, starts=place == 0, ends=following is None
        )


def _check_joinable(cfg: DataConfig, texts: int, option: str, path: Any) -> None:
    """Raise ConfigError for rows that cannot be sorted into repositories."""
    problems = []
    if cfg.format is not DataFormat.plain:
        problems.append(
            f"data.join_files=true: the rows of {option}={path} are of data.format={cfg.format}, not files; set "
            "data.join_files=false"
        )
    if texts:
        problems.append(
            f"data.join_files=true: {option}={path} has {texts} text files beside its rows, which name no repository; "
            "name either, or make them two sources of data.mix"
        )
    if cfg.streaming:
        problems.append(
            "data.join_files=true with data.streaming=true: rows of a repository may lie anywhere in the data, so all "
            "of it is sorted first; leave one of them out"
        )
    if problems:
        raise ConfigError("\n".join(problems))


class _SortedFiles:
    """Rows that hold files, sorted by repository and path in a SQLite table on disk, so memory does not grow with them.

    The table is an unnamed file in `data.cache_dir`, so nothing is left behind however the process ends.
    """

    def __init__(self, cfg: DataConfig, rows: Callable[[], Iterator[tuple[str, Row]]]) -> None:
        """Keep `rows`, each with its place in the data; they are sorted when `read` is first called."""
        self._cfg, self._rows = cfg, rows
        self._bad = BadRowLog(cfg.on_bad_row)
        self._table: sqlite3.Connection | None = None

    def read(self, bad_rows: BadRowLog) -> Iterator[Document]:
        """Yield each repository as one document, a piece for each file."""
        if self._table is None:
            self._table = self._sorted()
        bad_rows.count += self._bad.count
        bad_rows.first += self._bad.first
        bad_rows.check()
        found = self._table.execute(
            "SELECT repo, path, content, origin, size FROM files ORDER BY repo, path, number"
        )
        for repo, files in groupby(found, key=itemgetter(0)):
            yield from _one_document(map(self._piece, files), f"{repo}/")

    def _piece(self, row: tuple[str, str, str, str, int]) -> Document:
        repo, path, content, origin, size = row
        header = self._cfg.file_header.format(repo=repo, path=path)
        return Document(f"{header}{content}", origin, repo, size=size)

    def _sorted(self) -> sqlite3.Connection:
        folder = paths.expand(self._cfg.cache_dir)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".sorted-") as file:
            table = sqlite3.connect(file.name, check_same_thread=False)
            table.execute("PRAGMA journal_mode=OFF")
            table.execute(
                "CREATE TABLE files (repo TEXT, path TEXT, number INTEGER, content TEXT, origin TEXT, size INTEGER)"
            )
            try:
                table.executemany("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?)", self._usable())
                table.execute("CREATE INDEX in_order ON files (repo, path, number)")
                table.commit()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                    raise
                raise OSError(errno.ENOSPC, "no room to sort the rows by repository and path") from error
        return table

    def _usable(self) -> Iterator[tuple[str, str, int, str, str, int]]:
        for number, (origin, row) in enumerate(self._rows()):
            try:
                repo, path, text = file_of(row.content, self._cfg)
            except ValueError as error:
                self._bad.bad(origin, str(error))
                continue
            self._bad.good()
            yield repo, path, number, text, origin, row.size_bytes


def find_format(cfg: DataConfig, path: Any, option: str) -> DataFormat:
    """Return the format of the data at `path` from its first rows. Of a hub dataset only these are downloaded.

    Raises ConfigError as `open_corpus` does.
    """
    if not path or not _is_of_the_hub(cfg, path):
        return open_corpus(cfg, path, option).data_format
    import datasets

    name, subset, split = _hub_name(cfg, path, option)
    try:
        rows = list(
            islice(datasets.load_dataset(name, subset or None, split=split, streaming=True), FIRST_ROWS)
        )
    except Exception:  # without a network only a downloaded dataset can be read, and it cannot be streamed
        return open_corpus(cfg, path, option).data_format
    first = [(f"{_where(name, subset, split)}:{number}", row) for number, row in enumerate(rows, 1)]
    return recognise_format(first, cfg, option, path).data_format


def _hub_name(cfg: DataConfig, path: Any, option: str) -> tuple[str, str, str]:
    """Return the name, the subset (or "") and the split of `name[:subset][@split]`."""
    if isinstance(path, list):
        raise ConfigError(
            f"{option}={path}: data.source=hub reads one dataset; name one, or files with data=files"
        )
    name, _, split = str(path).partition("@")
    name, _, subset = name.partition(":")
    return name, subset, split or cfg.split


def _where(name: str, subset: str, split: str) -> str:
    return f"{name}{subset and f':{subset}'}[{split}]"


def _hub(cfg: DataConfig, path: Any, option: str, hashes: Hashes) -> Corpus:
    """Load a hub dataset. `path` is `name[:subset][@split]`; without a split, `data.split` is used."""
    import datasets

    name, subset, split = _hub_name(cfg, path, option)
    try:
        table = datasets.load_dataset(name, subset or None, split=split, streaming=cfg.streaming)
    except Exception as error:  # datasets raises errors of its own, of fsspec, of the hub and of the network
        local = (
            "" if cfg.source == DataSource.hub else f" There is no such file or folder in {Path.cwd()} either."
        )
        raise ConfigError(
            f"{option}={path} could not be loaded as a dataset of the hub (dataset {name}, "
            f"subset {subset or 'default'}, split {split}): {type(error).__name__}: {error}\n"
            f"Check the name, name the subset and split as NAME:SUBSET@SPLIT, or log in for a gated dataset.{local}"
        ) from error
    if not cfg.streaming and not len(table):
        raise ConfigError(f"{option}={path} is empty: choose another split or subset")
    where = _where(name, subset, split)
    first = [(f"{where}:{number}", row) for number, row in enumerate(islice(table, FIRST_ROWS), 1)]
    found = recognise_format(first, cfg, option, path)
    cfg = replace(cfg, format=found.data_format)
    if cfg.join_files:
        _check_joinable(cfg, 0, option, path)
    if cfg.streaming:
        return _streamed_hub(cfg, table, where, first, found.line)
    kept = table.select_columns([name for name in fields_read(cfg) if name in table.column_names])

    def rows() -> Iterator[Row]:
        return (Row(str(number), number, without_nulls(row), 1) for number, row in enumerate(kept, 1))

    def read(bad_rows: BadRowLog) -> Iterator[Document]:
        return _documents(rows(), where, "row", cfg, bad_rows)

    joined = _SortedFiles(cfg, lambda: ((f"{where}:{row.place}", row) for row in rows()))

    def identity() -> list[str]:
        which = f"{subset}@{split} {len(kept)}"
        if paths.expand(name).exists():  # for local files the hash of datasets uses modification times
            return [which, *hashes.of(find_files(name, option, file_type=FileType.text), name)]
        return [f"{name}:{which} {kept._fingerprint}"]  # of the commit, the split and the columns

    return Corpus(
        [joined.read if cfg.join_files else read],
        identity,
        len(kept),
        "hub",
        found.data_format,
        f"hub dataset, {found.line}",
    )


def _streamed_hub(cfg: DataConfig, table: Any, where: str, first: list[tuple[str, Any]], found: str) -> Corpus:
    """Return the corpus of a hub dataset streamed during training. Its files are the parts; its size is unknown."""

    def part(index: int, bad_rows: BadRowLog) -> Iterator[Document]:
        shard = table.shard(num_shards=table.num_shards, index=index) if table.num_shards > 1 else table
        rows = (Row(f"{index}:{number}", number, without_nulls(row), 0) for number, row in enumerate(shard, 1))
        return _documents(rows, where, f"row {index}", cfg, bad_rows)

    return Corpus(
        [partial(part, index) for index in range(table.num_shards)],
        lambda: [where, str(table.num_shards), json.dumps(first, sort_keys=True, default=str)],
        0,
        "hub",
        cfg.format,
        f"hub dataset, {found}",
    )
