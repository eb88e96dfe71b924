"""Turn rows into documents: find their format, check each row, and log rows that are unusable.

Chats in OpenAI's and in ShareGPT's form become messages of one form. A message is {"role", "content"} and, if it has
any, "tool_calls". Their arguments are objects, as chat templates expect; OpenAI writes them as text. The fields of a
file's first rows determine its format.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from remat.config.data_fields import OF_FILES, OPTIONAL, REQUIRED
from remat.config.options import BadRows, ConfigError, DataConfig, DataFormat
from remat.data.readers import Unusable

ROLES = {  # name in ShareGPT and its successors -> role
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
}
ROLE_FIELDS, CONTENT_FIELDS = ("role", "from"), ("content", "value")
READ_FIELDS = {*ROLE_FIELDS, *CONTENT_FIELDS, "weight", "function_call"}


@dataclass(frozen=True)
class Chat:
    """Messages in order, the tools that they may call, and for each message whether it is trained."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    trained: list[bool]


def chat_of(messages: Any, tools: Any, roles: list[str] | None, *, name: str, start: int = 0) -> Chat:
    """Return messages in one form. Those of `roles` (None: all) from `start` on are trained.

    `name` is the field of the messages, for errors. Raises ValueError with the reason for a chat that is unusable or
    has nothing to train on.
    """
    messages = _from_text(messages)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"field {name!r} is not a list with at least one message")
    cleaned = [_message(message, place) for place, message in enumerate(messages, 1)]
    tools = _from_text(tools)
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"field 'tools' is {kind(tools)}, not a list")
    check_unicode(json.dumps([cleaned, tools], ensure_ascii=False, default=str))
    trained = [
        place >= start and (roles is None or message["role"] in roles) and not _weightless(given)
        for place, (message, given) in enumerate(zip(cleaned, messages, strict=True))
    ]
    if not any(trained):
        found = ", ".join(dict.fromkeys(message["role"] for message in cleaned))
        wanted = "every role" if roles is None else f"[{','.join(roles)}]"
        raise ValueError(
            f"has no turn to train on: its roles are {found}, and data.train_on_roles is {wanted}"
            + " (turns of weight 0 are not trained)" * any(map(_weightless, messages))
        )
    return Chat(cleaned, tools or None, trained)


def _message(message: Any, place: int) -> dict[str, Any]:
    role_field = _first(message, ROLE_FIELDS)
    role = message[role_field] if role_field else None
    if not isinstance(role, str):
        raise ValueError(f"message {place} has no role")
    if role_field == "from" and role not in ROLES:
        raise ValueError(f"message {place} is from {role!r}, which is none of {', '.join(ROLES)}")
    content = _text_of(message.get(_first(message, CONTENT_FIELDS) or "content"), place)
    # Tables fill absent fields with null; templates ask whether a field is there.
    kept = {name: value for name, value in message.items() if value is not None and name not in READ_FIELDS}
    if role == "function_call":
        kept["tool_calls"], content = _calls(content, place), ""
    elif message.get("function_call"):
        kept["tool_calls"] = [{"type": "function", "function": message["function_call"]}]
    if "tool_calls" in kept:
        kept["tool_calls"] = _listed_calls(kept["tool_calls"], place)
    if content is None and not kept.get("tool_calls"):
        raise ValueError(f"message {place}: content is null, not text")
    return {"role": ROLES.get(role, role), **kept, "content": content or ""}


def _first(message: Any, names: tuple[str, ...]) -> str | None:
    if not isinstance(message, dict):
        return None
    for name in names:  # runs twice per message: a generator takes three times as long
        if message.get(name) is not None:
            return name
    return None


def _text_of(content: Any, place: int) -> str | None:
    """Return the text of `content`; a list of OpenAI's text parts is joined."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"message {place}: content is {kind(content)}, not text")
    texts = [part.get("text") if isinstance(part, dict) else part for part in content]
    kinds = {part.get("type", "text") for part in content if isinstance(part, dict)} - {"text"}
    if kinds or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"message {place}: content holds {', '.join(map(str, kinds)) or 'a part'}, not text alone"
        )
    return "".join(map(str, texts))


def _calls(content: str | None, place: int) -> list[dict[str, Any]]:
    calls = _from_text(content)
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise ValueError(f"message {place}: a function_call is not a JSON object with name and arguments")
    return [{"type": "function", "function": call} for call in calls]


def _listed_calls(given: Any, place: int) -> list[Any]:
    calls = _from_text(given) or []
    if not isinstance(calls, list):
        raise ValueError(f"message {place}: tool_calls is {kind(calls)}, not a list")
    return [_with_arguments(call) for call in calls]


def _with_arguments(call: Any) -> Any:
    """Return a tool call with its arguments as an object, because a template would quote text again."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _from_text(value: Any) -> Any:
    """Parse JSON text of a list or an object, as CSV and tables hold them; "" is None; else return `value`."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return None if value == "" else value


def _weightless(message: Any) -> bool:
    """Return whether a message has OpenAI's `weight` of 0."""
    return message.get("weight") == 0


def kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number"}
    names |= {str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def check_unicode(text: str) -> None:
    """Raise ValueError for half a surrogate pair, which JSON escapes can spell but UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"holds a lone surrogate at character {error.start}") from error


FIRST_BAD_ROWS = 20  # listed in the cache's report
STOP_AFTER_BAD_ROWS = 5  # enough to see the pattern
STOP_AFTER_GOOD_ROWS = 1000  # good rows read after the first bad one, to list further bad ones in one error


@dataclass(frozen=True)
class Instruction:
    """An alpaca row. `given` is its field `input`; `history` are earlier turns: (question, answer)."""

    instruction: str
    given: str
    output: str
    system: str = ""
    history: list[tuple[str, str]] = field(default_factory=list)


class Pair(NamedTuple):
    """A prompt and its completion, which is trained."""

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
    unit: str  # documents of one unit are held out together; the name does not depend on the data's location
    starts: bool = True  # False: continues the document before it
    ends: bool = True  # False: the next document continues it
    size: int = 0  # its share of `Corpus.total`
    goes_on: bool = False  # True: ends here only because its continuation is in the other half


@dataclass
class BadRowLog:
    """Log of unusable rows. With the policy `stop` it raises ConfigError once it can list several in one error."""

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
        """Raise ConfigError if there were bad rows and the policy is `stop`. Also call this at the end of the data."""
        if self.count and self.policy == BadRows.stop:
            raise ConfigError(stop_text(self.first))


def stop_text(bad_rows: list[str]) -> str:
    """Return the error that lists the first of `bad_rows`."""
    listed = "\n".join(f"  {row}" for row in bad_rows[:STOP_AFTER_BAD_ROWS])
    return (
        f"data.on_bad_row=stop, and these rows cannot be used (there may be more):\n{listed}\n"
        "Correct them, or skip and count such rows with data.on_bad_row=skip"
    )


def content_of(row: Any, cfg: DataConfig) -> Content:
    """Return the checked content of a row of `cfg.format`. Raises ValueError with the reason for an unusable row."""
    if not isinstance(row, dict):
        raise ValueError(_no_object(row))
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
    messages = _from_text(row[name])
    system = _optional_text(row, "system", cfg) if cfg.format == DataFormat.sharegpt else ""
    if system and isinstance(messages, list):
        messages = [{"role": "system", "content": system}, *messages]
    return chat_of(messages, row.get("tools"), cfg.trained_roles(), name=_theirs(name, cfg))


def _no_object(row: Any) -> str:
    return row.reason if isinstance(row, Unusable) else f"is {kind(row)}, not an object"


def with_our_names(row: dict[str, Any], cfg: DataConfig) -> dict[str, Any]:
    """Rename the fields that `data.columns` and `data.text_field` name to the names used here."""
    names = {"text": cfg.text_field} | cfg.columns if cfg.text_field != "text" else cfg.columns
    if not names:
        return row
    kept = {name: value for name, value in row.items() if name not in names}
    return kept | {ours: row[theirs] for ours, theirs in names.items() if theirs in row}


def fits(row: Any, data_format: DataFormat, cfg: DataConfig) -> bool:
    """Return whether a row has the fields that `data_format` needs."""
    return isinstance(row, dict) and all(name in with_our_names(row, cfg) for name in REQUIRED[data_format])


def fields_read(cfg: DataConfig) -> list[str]:
    """Return the fields that `cfg.format` reads, by their names in the data."""
    names = (*REQUIRED[cfg.format], *OPTIONAL[cfg.format], *(OF_FILES if cfg.join_files else ()))
    return [_theirs(name, cfg) for name in names]


def file_of(row: Any, cfg: DataConfig) -> tuple[str, str, str]:
    """Return the repository, path and text of a row that holds a file. Raises ValueError as `content_of` does."""
    text = content_of(row, cfg)
    assert isinstance(text, str), "rows of files are plain text"
    row = with_our_names(row, cfg)
    for name in OF_FILES:
        if name not in row:
            raise ValueError(
                f"has no field {_theirs(name, cfg)!r}, which data.join_files=true needs (see data.columns.{name})"
            )
    repo, path = (_text(row, name, cfg) for name in OF_FILES)
    return repo, path, text


def _theirs(name: str, cfg: DataConfig) -> str:
    return cfg.columns.get(name, cfg.text_field if name == "text" else name)


def _lacks(row: dict[str, Any], cfg: DataConfig, name: str) -> str:
    theirs, others = _theirs(name, cfg), [other for other in REQUIRED if fits(row, other, cfg)]
    text = f"has no field {theirs!r}"
    if others:
        known = f"its fields are those of data.format={others[0]} (files of several formats go into data.mix)"
        return f"{text}, which data.format={cfg.format} needs; {known}"
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
    """Raise ValueError if neither a prompt nor its answer would be trained."""
    roles = cfg.trained_roles()
    if roles is not None and not {"user", "assistant"} & set(roles):
        raise ValueError(
            f"has no turn to train on: its roles are user, assistant, and data.train_on_roles is [{','.join(roles)}]"
        )


def _instruction(row: dict[str, Any], cfg: DataConfig) -> Instruction:
    _check_roles(cfg)
    earlier = _from_text(row.get("history")) or []
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


FIRST_ROWS = 20  # read to find the format: that of the first usable row
OFTEN = {  # other common names of the fields of a format
    "prompt": ("prompt", "question", "query", "input", "instruction", "problem", "user", "source"),
    "completion": ("completion", "answer", "response", "output", "solution", "chosen", "assistant", "target"),
    "messages": ("dialogue", "dialog", "conversation", "chat", "turns"),
    "text": ("content", "body", "document", "article", "raw_content"),
}
MOST_FIELDS, IN_HEADER = 30, 8  # fields listed in an error, and in the header's line


class Found(NamedTuple):
    """A format, and a line for the header that says why it was chosen."""

    data_format: DataFormat
    line: str


def recognise_format(rows: list[tuple[str, Any]], cfg: DataConfig, option: str, path: Any) -> Found:
    """Return the format of (origin, row) pairs: `data.format`, or the first format whose fields a row has.

    Formats whose fields `data.columns` or `data.text_field` name are tried first. When no row fits, raises ConfigError
    with the fields found and the fields that each format needs.
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
    listed = "\n".join(f"  {origin}: {_no_object(row)}" for origin, row in rows[:5])
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
    """Return a value of data.columns for fields of `row` with other common names; "" where there are none."""
    named = {
        ours: next((name for name in row if str(name).lower() in often), None) for ours, often in OFTEN.items()
    }
    for ours in (("prompt", "completion"), ("messages",), ("text",)):
        if all(named[name] for name in ours):
            return "data.columns={" + ", ".join(f"{name}: {named[name]}" for name in ours) + "}"
    return ""


def _needs(each: DataFormat, cfg: DataConfig) -> str:
    needed = " and ".join(_theirs(name, cfg) for name in REQUIRED[each])
    optional = ", ".join(_theirs(name, cfg) for name in OPTIONAL[each])
    return f"{needed} (optional: {optional})" if optional else needed
