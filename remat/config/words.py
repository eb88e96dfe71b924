"""Words of a command line before they are composed: what they list, and what only some of them are for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from remat.config import validation
from remat.config.options import ConfigError

MOST_POINTS = 500
PICTURES = (".png", ".svg", ".pdf")
OPENING, CLOSING, QUOTES = "[{(", "]})", "'\""


def read_values(word: str) -> list[str]:
    """`a=1,2` -> [1, 2]. Commas inside brackets, braces, parentheses or quotes belong to one value."""
    found, depth, quote, start = list[str](), 0, "", word.find("=") + 1
    for place, letter in enumerate(word):
        if place < start:
            continue
        if quote:
            quote = "" if letter == quote else quote
        elif letter in QUOTES:
            quote = letter
        elif letter in OPENING:
            depth += 1
        elif letter in CLOSING:
            depth -= 1
        elif letter == "," and not depth:
            found.append(word[start:place])
            start = place + 1
    return [*found, word[start:]]


def split(args: Sequence[str], asker: str = "--sweep") -> tuple[list[str], list[tuple[str, ...]]]:
    """The words that stay, and the points: what is added to them. Raises ConfigError when nothing is swept.

    Errors begin with the name of the command, `asker`.
    """
    fixed: list[str] = []
    axes: list[list[str]] = []
    for word in args:
        option, sign, _ = word.partition("=")
        if sign and len(read_values(word)) > 1:
            axes.append([f"{option}={value}" for value in read_values(word)])
        else:
            fixed.append(word)
    if not axes:
        raise ConfigError(f"{asker}: no word lists values; write for example train.micro_batch_size=1,2,4")
    empty = [word for axis in axes for word in axis if word.endswith("=")]
    if empty:
        raise ConfigError(f"{asker}: {empty[0]} has an empty value between commas; leave the comma out")
    points = list(itertools.product(*axes))
    if len(points) > MOST_POINTS:
        raise ConfigError(f"{asker}: {len(points)} combinations; sweep fewer values, at most {MOST_POINTS}")
    return fixed, points


def check_picture(path: Path) -> None:
    """Raise ConfigError, before any work, when no picture can be drawn to `path`."""
    if path.suffix.lower() not in PICTURES:
        raise ConfigError(f"--plot {path}: give a file that ends in {', '.join(PICTURES)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.absolute().parent}")


def without_policy(overrides: Sequence[str]) -> list[str]:
    """Leave out the choice of a policy and what only some policies read."""
    prefixes = ("checkpointing=", *(f"checkpointing.{name}" for name in validation.OPTIONS_OF))
    return [word for word in overrides if not word.startswith(prefixes)]
