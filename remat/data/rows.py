"""Documents and their origin; the check that a row is usable, and the log of rows that are not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from remat.config.data_fields import OPTIONAL, REQUIRED
from remat.config.options import BadRows, ConfigError, DataConfig, DataFormat
from remat.data.chats import Chat, chat_of, check_unicode, kind

FIRST_BAD_ROWS = 20  # kept in the cache's report
STOP_AFTER_BAD_ROWS = 5  # enough to see the pattern
STOP_AFTER_GOOD_ROWS = 1000  # rows still read after the first bad one, to list other bad ones with it


@dataclass(frozen=True)
class Instruction:
    """An alpaca row. `given` is its `input`; `history` are earlier turns, asked and answered."""

    instruction: str
    given: str
    output: str
    system: str = ""
    history: list[tuple[str, str]] = field(default_factory=list)


class Pair(NamedTuple):
    """A prompt and what follows it, which is trained."""

    prompt: str
    completion: str


Content = str | Chat | Instruction | Pair


@dataclass(frozen=True)
class Document:
    """A document, or a piece of one. `content` is text (format plain) or a row.

    `origin` is "file:line" or "file:row".
    """

    content: Content
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


def content_of(row: Any, cfg: DataConfig) -> Content:
    """Return what `cfg.format` makes of a row, checked. Raises ValueError with the reason when the row is unusable."""
    if not isinstance(row, dict):
        raise ValueError(f"is {kind(row)}, not an object")
    row = with_our_names(row, cfg)
    if missing := [name for name in REQUIRED[cfg.format] if name not in row]:
        raise ValueError(_lacks(row, cfg, missing[0]))
    if cfg.format == DataFormat.plain:
        return _text(row, "text", cfg)
    if cfg.format == DataFormat.alpaca:
        return _instruction(row, cfg)
    if cfg.format == DataFormat.prompt_completion:
        return _completion(row, cfg)
    name = "messages" if cfg.format == DataFormat.chat else "conversations"
    system = _optional_text(row, "system", cfg) if cfg.format == DataFormat.sharegpt else ""
    return chat_of(
        _with_system(row[name], system), row.get("tools"), cfg.trained_roles(), name=_theirs(name, cfg)
    )


def with_our_names(row: dict[str, Any], cfg: DataConfig) -> dict[str, Any]:
    """Return the row with the fields that `data.columns` and `data.text_field` name under the names used here."""
    names = {"text": cfg.text_field} | cfg.columns if cfg.text_field != "text" else cfg.columns
    if not names:
        return row
    kept = {name: value for name, value in row.items() if name not in names}
    return kept | {ours: row[theirs] for ours, theirs in names.items() if theirs in row}


def fits(row: Any, data_format: DataFormat, cfg: DataConfig) -> bool:
    """Return whether a row has what `data_format` needs."""
    return isinstance(row, dict) and all(name in with_our_names(row, cfg) for name in REQUIRED[data_format])


def fields_read(cfg: DataConfig) -> list[str]:
    """Return the fields that `cfg.format` reads, in the data's words."""
    return [_theirs(name, cfg) for name in (*REQUIRED[cfg.format], *OPTIONAL[cfg.format])]


def _theirs(name: str, cfg: DataConfig) -> str:
    return cfg.columns.get(name, cfg.text_field if name == "text" else name)


def _lacks(row: dict[str, Any], cfg: DataConfig, name: str) -> str:
    theirs, others = _theirs(name, cfg), [other for other in REQUIRED if fits(row, other, cfg)]
    text = f"has no field {theirs!r}"
    if others:
        return f"{text}, which data.format={cfg.format} needs; its fields are those of data.format={others[0]}"
    return f"{text} (see data.text_field)" if name == "text" else text


def _text(row: dict[str, Any], name: str, cfg: DataConfig) -> str:
    value, theirs = row[name], _theirs(name, cfg)
    if not isinstance(value, str):
        hint = " (see data.text_field)" if name == "text" else ""
        raise ValueError(f"field {theirs!r} is {kind(value)}, not text{hint}")
    check_unicode(value)
    return value


def _optional_text(row: dict[str, Any], name: str, cfg: DataConfig) -> str:
    return "" if row.get(name) is None else _text(row, name, cfg)


def _check_roles(cfg: DataConfig) -> None:
    """Raise ValueError where nothing of a prompt and its answer is trained."""
    roles = cfg.trained_roles()
    if roles is not None and not {"user", "assistant"} & set(roles):
        raise ValueError(
            f"has no turn to train on: its roles are user, assistant, and data.train_on_roles is [{','.join(roles)}]"
        )


def _instruction(row: dict[str, Any], cfg: DataConfig) -> Instruction:
    _check_roles(cfg)
    earlier = row.get("history") or []
    if not isinstance(earlier, list) or not all(
        isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)
        for turn in earlier
    ):
        raise ValueError("field 'history' is not a list of pairs of texts")
    for text in (text for turn in earlier for text in turn):
        check_unicode(text)
    return Instruction(
        instruction=_text(row, "instruction", cfg),
        given=_optional_text(row, "input", cfg),
        output=_text(row, "output", cfg),
        system=_optional_text(row, "system", cfg),
        history=[(asked, answered) for asked, answered in earlier],
    )


def _completion(row: dict[str, Any], cfg: DataConfig) -> Content:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        _check_roles(cfg)
        return Pair(_text(row, "prompt", cfg), _text(row, "completion", cfg))
    if not isinstance(prompt, list):
        raise ValueError(
            f"field 'prompt' is {kind(prompt)} and 'completion' {kind(completion)}: both text, or both messages"
        )
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    if not isinstance(completion, list):
        raise ValueError(f"field 'completion' is {kind(completion)}, not messages")
    return chat_of(
        [*prompt, *completion], row.get("tools"), cfg.trained_roles(), name="prompt", start=len(prompt)
    )


def _with_system(messages: Any, system: str) -> Any:
    return (
        [{"role": "system", "content": system}, *messages]
        if system and isinstance(messages, list)
        else messages
    )
