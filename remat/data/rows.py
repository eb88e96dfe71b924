"""Documents and their origin; the check that a row is usable, and the log of rows that are not."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from remat.config.options import BadRows, ConfigError, DataConfig, DataFormat

FIRST_BAD_ROWS = 20  # kept in the cache's report
STOP_AFTER_BAD_ROWS = 5  # enough to see the pattern
STOP_AFTER_GOOD_ROWS = 1000  # rows still read after the first bad one, to list other bad ones with it


@dataclass(frozen=True)
class Document:
    """A document, or a piece of one. `content` is text (format plain) or a row (alpaca, chat).

    `origin` is "file:line" or "file:row".
    """

    content: str | dict[str, Any]
    origin: str
    unit: str  # what is held out as a whole: a name that does not depend on where the data lies
    starts: bool = True  # False: continues the document before it
    ends: bool = True  # False: the next document continues it
    size: int = 0  # its share of `Corpus.total`
    goes_on: bool = False  # ends here only because its continuation is in the other half


@dataclass
class BadRowLog:
    """Log of unusable rows. With `stop` it raises ConfigError once a few are known, so that one run shows several."""

    policy: BadRows
    count: int = 0
    first: list[str] = field(default_factory=list)
    _good_since: int = 0

    def bad(self, origin: str, reason: str) -> None:
        self.count += 1
        if len(self.first) < FIRST_BAD_ROWS:
            self.first.append(f"{origin}: {reason}")
        if self.count >= STOP_AFTER_BAD_ROWS:
            self.check()

    def good(self) -> None:
        if self.count:
            self._good_since += 1
            if self._good_since >= STOP_AFTER_GOOD_ROWS:
                self.check()

    def check(self) -> None:
        """Raise ConfigError if rows were bad and the policy is to stop. Call it at the end of the data too."""
        if self.count and self.policy == BadRows.stop:
            raise ConfigError(stop_text(self.first[:STOP_AFTER_BAD_ROWS]))


def stop_text(bad_rows: list[str]) -> str:
    listed = "\n".join(f"  {row}" for row in bad_rows)
    return (
        f"data.on_bad_row=stop, and these rows cannot be used (there may be more):\n{listed}\n"
        "Correct them, or skip and count such rows with data.on_bad_row=skip"
    )


def content_of(row: Any, cfg: DataConfig) -> str | dict[str, Any]:
    """Return what `cfg.format` needs of a row, checked. Raises ValueError with the reason when the row is unusable."""
    if not isinstance(row, dict):
        raise ValueError(f"is {_kind(row)}, not an object")
    if cfg.format == DataFormat.plain:
        return _text(row, cfg.text_field, " (see data.text_field)")
    if cfg.format == DataFormat.alpaca:
        content: dict[str, Any] = {name: _text(row, name) for name in ("instruction", "output")}
        content["input"] = "" if row.get("input") is None else _text(row, "input")
        return content
    return _chat(row)


def needed_columns(cfg: DataConfig, available: list[str], where: str) -> list[str]:
    """Return the columns of a table that `cfg.format` reads. Raises ConfigError when a required one is missing."""
    required, optional = {
        DataFormat.plain: ([cfg.text_field], []),
        DataFormat.alpaca: (["instruction", "output"], ["input"]),
        DataFormat.chat: (["messages"], ["tools"]),
    }[cfg.format]
    missing = [name for name in required if name not in available]
    if missing:
        remedy = (
            "set data.text_field to one of them" if cfg.format == DataFormat.plain else "choose data.format"
        )
        raise ConfigError(
            f"data.format={cfg.format} needs the column {', '.join(missing)}, but {where} has "
            f"{', '.join(available)}: {remedy}"
        )
    return required + [name for name in optional if name in available]


def _text(row: dict[str, Any], name: str, hint: str = "") -> str:
    if name not in row:
        raise ValueError(f"has no field {name!r}{hint}")
    value = row[name]
    if not isinstance(value, str):
        raise ValueError(f"field {name!r} is {_kind(value)}, not text{hint}")
    _check_unicode(value)
    return value


def _chat(row: dict[str, Any]) -> dict[str, Any]:
    messages = row.get("messages")
    if "messages" not in row:
        raise ValueError("has no field 'messages'")
    if not isinstance(messages, list) or not messages:
        raise ValueError("field 'messages' is not a list with at least one message")
    cleaned = []
    for place, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {place} has no role")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise ValueError(f"message {place}: content is {_kind(message.get('content'))}, not text")
        # Tables fill absent fields with null; templates ask whether a field is there.
        kept = {name: value for name, value in message.items() if value is not None}
        cleaned.append({**kept, "content": kept.get("content", "")})
    tools = row.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"field 'tools' is {_kind(tools)}, not a list")
    _check_unicode(json.dumps([cleaned, tools], ensure_ascii=False, default=str))
    return {"messages": cleaned, "tools": tools or None}


def _check_unicode(text: str) -> None:
    """Raise ValueError for half a surrogate pair: JSON escapes can spell it, but it has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"holds a lone surrogate at character {error.start}") from error


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number"}
    names |= {str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
