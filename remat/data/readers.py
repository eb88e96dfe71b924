"""Read the rows of JSONL, JSON, CSV, parquet and Arrow files one after another, in bounded memory.

`datasets` reads the same files, but its JSON reader holds a whole array in memory several times, its CSV reader turns
columns of digits into numbers, and none of them reports the line of an unusable row. So Python's `json` and `csv`
parse lines and arrays, and `pyarrow`, which `datasets` uses too, reads tables.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from remat.config.options import ConfigError, FileType
from remat.config.units import MIB
from remat.data.files import SourceFile, open_stream, telling_damage

ROWS_PER_BATCH = 1024
CHUNK_BYTES = MIB
LARGEST_ROW = 256 * MIB  # bytes or characters: an open quote must not read the rest of a file into memory
BLANK = " \t\r\n"


class Unusable(NamedTuple):
    """Replaces a row that cannot be read."""

    reason: str


class Row(NamedTuple):
    """One row. `place` follows the file's name in messages; `number` is different for each row of a file."""

    place: str
    number: int
    content: Any  # or Unusable
    size_bytes: int


def read_rows(
    file: SourceFile, columns: Sequence[str] | None = None, rows_per_batch: int = ROWS_PER_BATCH
) -> Iterator[Row]:
    """Yield the rows of a file. Of a table only `columns` are read, where they are given.

    The other columns of a table can be large and are never decoded. A table is read `rows_per_batch` rows at a time.
    Raises ConfigError at damage after which nothing in the file can be read.
    """
    reader = {
        FileType.jsonl: _lines,
        FileType.json: _array,
        FileType.csv: _csv,
        FileType.parquet: _parquet,
        FileType.arrow: _arrow,
    }[file.kind.file_type]
    with telling_damage(file.path, file.option):
        yield from reader(file, columns, rows_per_batch)


def count_rows(file: SourceFile) -> int:
    """Return the number of rows of a parquet file. Raises ConfigError when it is no parquet file."""
    import pyarrow
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.read_metadata(file.path).num_rows)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{file.option}: {file.path} is not a parquet file: {error}") from error


def _lines(file: SourceFile, *_: Any) -> Iterator[Row]:
    """Yield the rows of JSONL. An unusable line does not affect the others."""
    compressed = bool(file.kind.compression)
    with open_stream(file.path, file.kind.compression) as stream:
        for line, raw in enumerate(stream, 1):
            raw = raw.removeprefix(codecs.BOM_UTF8) if line == 1 else raw
            if raw.strip():  # files often end with blank lines
                yield Row(str(line), line, _parse(raw), 0 if compressed else len(raw))


def _parse(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode())
    except UnicodeDecodeError as error:
        return Unusable(f"is not UTF-8 (byte 0x{raw[error.start]:02X} at {error.start})")
    except (ValueError, RecursionError) as error:
        return Unusable(f"is not JSON ({_reason(error, str(error))})")


def _reason(error: Exception, told: str) -> str:
    """Return `told`, or the remedy where a row has Python's single quotes instead of JSON's double quotes."""
    if isinstance(error, json.JSONDecodeError) and error.doc[error.pos : error.pos + 1] == "'":
        return "single quotes are Python's, not JSON's: write each row with json.dumps"
    return told


class _ArrayText:
    """The text of a JSON file. It is read as far as the decoder needs it, and dropped once it is decoded."""

    def __init__(self, file: SourceFile, stream: Any) -> None:
        self._file, self._stream = file, stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder()
        self._text, self._at, self._more = "", 0, True
        self.line, self.row, self.read_bytes = 1, 0, 0

    def peek(self) -> str:
        """Skip white space and return the next character; "" at the end of the file."""
        while True:
            start = self._at
            while self._at < len(self._text) and self._text[self._at] in BLANK:
                self._at += 1
            self.line += self._text.count("\n", start, self._at)
            if self._at < len(self._text) or not self._read(CHUNK_BYTES):
                return self._text[self._at : self._at + 1]

    def skip(self) -> None:
        self._at += 1

    def value(self) -> Any:
        """Return the value that begins here, and move past it."""
        before: tuple[str, int] | None = None
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except RecursionError as error:
                raise self.broken("it is nested too deeply") from error
            except json.JSONDecodeError as error:
                now = (error.msg, error.pos - self._at)
                # An error that stays at its place with twice the text is not due to missing text, except in a string.
                settled = now == before and not error.msg.startswith("Unterminated string")
                if settled or len(self._text) - self._at > LARGEST_ROW or not self._read(len(self._text)):
                    raise self.broken(_reason(error, error.msg)) from error
                before = now
                continue
            # A number or a word may continue in text that is not read yet.
            if end < len(self._text) or isinstance(value, (dict, list, str)) or not self._read(CHUNK_BYTES):
                self.line += self._text.count("\n", self._at, end)
                self._at = end
                return value

    def broken(self, reason: str) -> ConfigError:
        return ConfigError(
            f"{self._file.option}: {self._file.path}:{self.line} (row {self.row}) is not JSON from here on ({reason}). "
            "What follows in an array cannot be read: correct the file, or write one object per line"
        )

    def _read(self, count: int) -> bool:
        """Read `count` bytes or more than CHUNK_BYTES; False at the end of the file."""
        if not self._more:
            return False
        if self._at > CHUNK_BYTES or self._at == len(self._text):
            self._text, self._at = self._text[self._at :], 0
        raw = self._stream.read(max(count, CHUNK_BYTES))
        self.read_bytes += len(raw)
        try:
            self._text += self._decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            raise self.broken(f"byte 0x{error.object[error.start]:02X} is not UTF-8") from error
        self._more = bool(raw)
        return self._more


def _array(file: SourceFile, *_: Any) -> Iterator[Row]:
    """Yield the elements of one array. Only a few MiB around the element are in memory."""
    with open_stream(file.path, file.kind.compression) as stream:
        text = _ArrayText(file, stream)
        opening = text.peek()
        if opening != "[":
            if not opening:
                return
            raise _not_an_array(file, text)
        text.skip()
        told_bytes, closing = 0, text.peek()
        if closing == "]":
            text.skip()
        while closing != "]":
            text.peek()
            text.row += 1
            line = text.line
            value = text.value()
            size = 0 if file.kind.compression else text.read_bytes - told_bytes
            told_bytes += size
            yield Row(f"{line} (row {text.row})", text.row, value, size)
            closing = text.peek()
            if closing not in (",", "]"):
                raise text.broken(
                    "the file ends" if not closing else f"a comma or ] should stand before {closing!r}"
                )
            text.skip()
        if text.peek():
            raise text.broken("text follows the end of the array")


def _not_an_array(file: SourceFile, text: _ArrayText) -> ConfigError:
    value = text.value()
    what = (
        f"one object with the fields {', '.join(list(value)[:8])}" if isinstance(value, dict) else "one value"
    )
    if text.peek():
        what = "neither one array nor one object per line"
    return ConfigError(
        f"{file.option}: {file.path} is {what}: give an array of rows, or one row per line "
        f"(jq -c '.ROWS[]' writes them so)"
    )


def _csv(file: SourceFile, *_: Any) -> Iterator[Row]:
    """Yield a dict of strings per record. The first record names the fields."""
    csv.field_size_limit(LARGEST_ROW)
    compressed = bool(file.kind.compression)
    with open_stream(file.path, file.kind.compression) as stream:
        # Bytes that are not UTF-8 become lone surrogates, which `_record` finds: only their row is unusable.
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        first = text.readline()
        separator = max(",;\t", key=first.count)
        header = next(csv.reader([first], delimiter=separator), [])
        if len(set(header)) < len(header):
            raise ConfigError(f"{file.option}: {file.path} names a column twice: {', '.join(header)}")
        records = csv.reader(text, delimiter=separator, strict=True)
        number, line = 0, 2
        while True:
            try:
                record = next(records, None)
            except csv.Error as error:
                record = []
                content: Any = Unusable(f"is not CSV ({error})")
            else:
                if record is None:
                    return
                content = _record(header, record)
            if content is not None:
                number += 1
                size = 0 if compressed else sum(len(cell) + 1 for cell in record)
                yield Row(str(line), number, content, size)
            line = records.line_num + 2  # line_num does not count the header


def _record(header: list[str], cells: list[str]) -> Any:
    """Return a dict, Unusable, or None for a blank line."""
    if not cells:
        return None
    if len(cells) != len(header):
        return Unusable(f"has {len(cells)} cells, and the header has {len(header)}")
    if any("\udc80" <= letter <= "\udcff" for cell in cells if not cell.isascii() for letter in cell):
        return Unusable("is not UTF-8")
    return dict(zip(header, cells, strict=True))


def _parquet(file: SourceFile, columns: Sequence[str] | None, rows_per_batch: int) -> Iterator[Row]:
    import pyarrow.parquet

    total = count_rows(file)
    with pyarrow.parquet.ParquetFile(file.path) as table:
        kept = _kept(table.schema_arrow.names, columns)
        batches = table.iter_batches(batch_size=rows_per_batch, columns=kept)
        yield from _numbered((row for batch in batches for row in batch.to_pylist()), file, total)


def _kept(names: list[str], columns: Sequence[str] | None) -> list[str]:
    return [name for name in names if columns is None or name in columns]


def _arrow(file: SourceFile, columns: Sequence[str] | None, rows_per_batch: int) -> Iterator[Row]:
    import pyarrow

    with pyarrow.memory_map(str(file.path)) as mapped:
        if mapped.read(6) == b"ARROW1":
            reader = pyarrow.ipc.open_file(mapped)
            tables = (reader.get_batch(place) for place in range(reader.num_record_batches))
        else:
            mapped.seek(0)
            tables = iter(pyarrow.ipc.open_stream(mapped))
        kept = (table.select(_kept(table.schema.names, columns)) for table in tables)
        parts = (
            table.slice(start, rows_per_batch)
            for table in kept
            for start in range(0, len(table), rows_per_batch)
        )
        yield from _numbered((row for part in parts for row in part.to_pylist()), file, None)


def _numbered(rows: Iterator[Any], file: SourceFile, total: int | None) -> Iterator[Row]:
    """Yield rows numbered from 1. Where `total` is known, each gets an equal share of the file's bytes."""
    size = file.size_bytes
    for number, row in enumerate(rows, 1):
        share = size * number // total - size * (number - 1) // total if total else 0
        yield Row(str(number), number, without_nulls(row), share)


def without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Return a table's row without nested nulls, which a table has where a JSON object has no field."""
    return {name: _pruned(value) for name, value in row.items()}


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _pruned(inner) for name, inner in value.items() if inner is not None}
    return [_pruned(inner) for inner in value] if isinstance(value, list) else value
