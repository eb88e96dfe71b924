"""List every option of a run as a person reads it: name, type, default, unit and a sentence.

The sentence is the comment beside the option's field in `remat/config/options.py`, or the lines of comment above it;
`[steps]` at its beginning is the unit. A unit that the name ends in (`_gib`, `_s`) need not be said. Standard library
only.
"""

from __future__ import annotations

import ast
import functools
import inspect
import io
import tokenize
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Any, get_args, get_origin, get_type_hints

from remat.config import options

UNITS = {  # by the ending of an option's name
    "_bytes": "bytes",
    "_gib": "GiB",
    "_gbs": "GB/s",
    "_gparams_s": "1e9 parameters/s",
    "_s": "s",
    "_minutes": "minutes",
}
KINDS = {str: "text", bool: "true or false", int: "integer", float: "number", list: "list", dict: "mapping"}


@dataclass(frozen=True)
class Option:
    """One option. `choices` are the values that it may have, each with what it means or ""; empty where any is."""

    name: str
    type: str
    default: str
    unit: str
    sentence: str
    choices: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """The options of one dataclass. `name` is "" for those of the run itself."""

    name: str
    sentence: str
    options: list[Option]


def sections() -> list[Section]:
    """Return all options, in the order of options.py, those of the run itself first."""
    return list(_sections(options.RunConfig, ""))


def matching(words: list[str]) -> list[Option]:
    """Return the options that the words name: a whole section (`train`), or single ones (`train.steps`)."""
    return [
        option
        for section in sections()
        for option in section.options
        if any(option.name == word or option.name.startswith(f"{word}.") for word in words)
    ]


def describe(words: list[str]) -> str:
    """Return the options that the words name as lines for a terminal; "" where they name none."""
    lines = []
    for option in matching(words):
        unit = f" {option.unit}" * bool(option.unit)
        lines += [f"{option.name}={option.default}{unit}", f"    {option.sentence}"]
        lines += [f"    {value:18} {meaning}".rstrip() for value, meaning in option.choices.items()]
    return "".join(f"{line}\n" for line in lines)


def _sections(schema: Any, name: str) -> Iterator[Section]:
    kinds = get_type_hints(schema)
    own, inner = list[Option](), list[tuple[Any, str]]()
    for each in fields(schema):
        dotted = f"{name}.{each.name}".lstrip(".")
        if is_dataclass(kinds[each.name]):
            inner.append((kinds[each.name], dotted))
        else:
            comment = _comments().get((schema.__name__, each.name), "")
            own.append(_option(dotted, kinds[each.name], each, comment))
    yield Section(name, " ".join((schema.__doc__ or "").split()), own)
    for kind, dotted in inner:
        yield from _sections(kind, dotted)


def _option(name: str, kind: Any, each: Any, comment: str) -> Option:
    unit, sentence = "", comment
    if comment.startswith("["):
        unit, _, sentence = comment[1:].partition("]")
    unit = unit or next((said for ending, said in UNITS.items() if name.endswith(ending)), "")
    sentence = sentence.strip().rstrip(".")
    shown = sentence if "_" in sentence.partition(" ")[0] else sentence[:1].upper() + sentence[1:]
    default = each.default if each.default is not MISSING else each.default_factory()
    return Option(name, _type(kind), _value(default), unit, shown, _choices(kind))


def _type(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return "choice"
    if known := KINDS.get(get_origin(kind) or kind):
        return known
    parts = [part for part in get_args(kind) if part is not type(None)]  # of `X | None`
    return _type(parts[0]) if parts else "text or list"


def _value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return '""' if value == "" else f"{value}"


def _choices(kind: Any) -> dict[str, str]:
    for each in (kind, *get_args(kind)):
        if isinstance(each, type) and issubclass(each, StrEnum):
            return {str(one.value): _comments().get((each.__name__, one.name), "") for one in each}
    return {}


@functools.cache
def _comments() -> dict[tuple[str, str], str]:
    """Return the comment of every field of options.py by class and name."""
    source, found = inspect.getsource(options), dict[tuple[str, str], str]()
    on_line = {
        token.start[0]: (token.string.lstrip("# "), token.line.lstrip().startswith("#"))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    for made in classes:
        for entry in made.body:
            target = entry.target if isinstance(entry, ast.AnnAssign) else getattr(entry, "targets", [None])[0]
            if isinstance(target, ast.Name):
                found[made.name, target.id] = _beside(entry, on_line)
    return found


def _beside(entry: ast.stmt, on_line: dict[int, tuple[str, bool]]) -> str:
    """Return the comments on the lines of `entry`; where there is none, those of the lines directly above it."""
    last = entry.end_lineno or entry.lineno
    own = [on_line[line][0] for line in range(entry.lineno, last + 1) if line in on_line]
    if own:
        return " ".join(own)
    above, line = list[str](), entry.lineno - 1
    while on_line.get(line, ("", False))[1]:
        above.insert(0, on_line[line][0])
        line -= 1
    return " ".join(above)
