"""Tell the format of rows by the fields of the first ones, or say which fields each known format would need."""

from __future__ import annotations

import shlex
from typing import Any, NamedTuple

from remat.config.data_fields import OPTIONAL, REQUIRED
from remat.config.options import ConfigError, DataConfig, DataFormat
from remat.data.chats import kind
from remat.data.readers import Unusable
from remat.data.rows import fits

FIRST_ROWS = 20  # looked at; the format is that of the first usable one
OFTEN = {  # what others call the fields of a format
    "prompt": ("prompt", "question", "query", "input", "instruction", "problem", "user", "source"),
    "completion": ("completion", "answer", "response", "output", "solution", "chosen", "assistant", "target"),
    "messages": ("dialogue", "dialog", "conversation", "chat", "turns"),
    "text": ("content", "body", "document", "article", "raw_content"),
}
MOST_FIELDS, IN_HEADER = 30, 8  # listed in an error, and in the line that says what was found


class Found(NamedTuple):
    """A format, and a line for the header that says by what it was found."""

    data_format: DataFormat
    line: str


def recognise_format(rows: list[tuple[str, Any]], cfg: DataConfig, option: str, path: Any) -> Found:
    """Return the format of (origin, row) pairs: `data.format`, or the first known one that a row has the fields of.

    Formats whose fields `data.columns` or `data.text_field` name come first. Raises ConfigError, naming the fields
    that were found and those that each format needs, when no row fits.
    """
    usable = [(origin, row) for origin, row in rows if isinstance(row, dict)]
    if not usable:
        raise ConfigError(_no_rows(rows, option, path))
    asked = None if cfg.format is DataFormat.auto else cfg.format
    for _, row in usable:
        fitting = [each for each in _in_order(cfg) if fits(row, each, cfg)]
        chosen = asked or (fitting[0] if fitting else None)
        if chosen is not None and chosen in fitting:
            others = [str(each) for each in fitting if each is not chosen]
            also = f", which would fit {', '.join(others)} too" * bool(others)
            return Found(chosen, f"{chosen} by its fields {', '.join(_fields(row, IN_HEADER))}{also}")
    raise ConfigError(_nothing_fits(*usable[0], cfg, option, path))


def _in_order(cfg: DataConfig) -> list[DataFormat]:
    named = {*cfg.columns, *(["text"] if cfg.text_field != DataConfig().text_field else [])}
    read = {each: {*REQUIRED[each], *OPTIONAL[each]} for each in REQUIRED}
    return sorted(REQUIRED, key=lambda each: -len(named & read[each]))


def _fields(row: dict[str, Any], most: int) -> list[str]:
    shown = [str(name)[:60] for name in list(row)[:most]]
    return [*shown, "..."] if len(row) > most else shown


def _no_rows(rows: list[tuple[str, Any]], option: str, path: Any) -> str:
    if not rows:
        return f"{option}={path} holds no row: give a file with data"
    listed = "\n".join(
        f"  {origin}: {row.reason if isinstance(row, Unusable) else f'is {kind(row)}, not an object'}"
        for origin, row in rows[:5]
    )
    return (
        f"{option}={path}: none of the first {len(rows)} rows can be read:\n{listed}\n"
        "Give one JSON object per line, a JSON array of objects, CSV with a header, or a table; or say what the file "
        "is with data.file_type (text for plain text)"
    )


def _nothing_fits(origin: str, row: dict[str, Any], cfg: DataConfig, option: str, path: Any) -> str:
    fitting = [each for each in _in_order(cfg) if fits(row, each, cfg)]
    asked = "of no known format" if cfg.format is DataFormat.auto else f"not of data.format={cfg.format}"
    needs = [f"  data.format={each} needs {_needs(each, cfg)}" for each in REQUIRED]
    there = ", ".join(_fields(row, MOST_FIELDS))
    theirs = ", ".join(f"{ours} is {name}" for ours, name in cfg.columns.items())
    if option == "data.eval_path":  # `cfg.format` is what the training data was found to be
        remedy = f"Held-out data is read as data.path is: give rows of data.format={cfg.format}"
    else:
        remedy = _remedy(fitting, row)
    return (
        f"{option}={path}: the rows are {asked}. {origin} has the fields {there or '(none)'}"
        f"{f' (data.columns: {theirs})' * bool(theirs)}\n" + "\n".join(needs) + f"\n{remedy}"
    )


def _remedy(fitting: list[DataFormat], row: dict[str, Any]) -> str:
    if fitting:
        return f"The fields are those of {fitting[0]}: set data.format={fitting[0]}, or leave data.format out"
    for name, value in row.items():
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            lines = f"jq -c {shlex.quote(f'.{name}[]')} FILE > rows.jsonl"
            return f"The field {name} holds rows itself: write them to a file, {lines}, and name that"
    usual = "data.columns={messages: dialogue}", "data.columns={prompt: question, completion: answer}"
    named = _columns(row)
    shown = " ".join(shlex.quote(each) for each in ([named] if named else usual))
    return f"Name your fields for one of them: {shown}, data.text_field=body"


def _columns(row: dict[str, Any]) -> str:
    """Return data.columns for the fields of `row` that often go by other names; empty where none is known."""
    named = {
        ours: next((name for name in row if str(name).lower() in often), None) for ours, often in OFTEN.items()
    }
    for ours in (("prompt", "completion"), ("messages",), ("text",)):
        if all(named[name] for name in ours):
            return "data.columns={" + ", ".join(f"{name}: {named[name]}" for name in ours) + "}"
    return ""


def _needs(each: DataFormat, cfg: DataConfig) -> str:
    def name(ours: str) -> str:
        return cfg.columns.get(ours, cfg.text_field if ours == "text" else ours)

    needed = " and ".join(map(name, REQUIRED[each]))
    optional = ", ".join(map(name, OPTIONAL[each]))
    return f"{needed} (optional: {optional})" if optional else needed
