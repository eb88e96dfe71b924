"""Take a command line apart: the few options with dashes that are ours, and overrides. Standard library only.

What Hydra, other trainers or launchers write with dashes is refused with what to type here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from remat.config import hints
from remat.config.options import ConfigError

ONE_RUN = (
    "a launch trains one run. `remat compare {words} recipe=NAME` launches each and sets them side by side, "
    "`remat plan --sweep {words} recipe=NAME` plans each without launching"
)
NOT_HERE = {  # options of Hydra that do not exist here, and what does
    "--info": "--cfg prints the composed configuration, --help lists recipes, groups and choices",
    "--hydra-help": "--help lists recipes, groups and choices",
    "--config-name": "write recipe=NAME; a recipe of your own is DIR/recipe/NAME.yaml, found by --config-dir DIR",
    "--config-path": "write --config-dir DIR, which is searched beside the groups and recipes that are here",
    "--package": "--cfg prints the whole configuration",
    "--shell-completion": "`remat --install-completion` completes the commands of remat in your shell",
    "--experimental-rerun": "write resume=RUN_DIR, or give the words again: they are in RUN_DIR/env.json",
    "--run": "leave it out: a launch runs",
    "--resolve": "leave it out: what --cfg prints is resolved",
}
SHORT = {
    "-cd": "--config-dir",
    "-cn": "--config-name",
    "-cp": "--config-path",
    "-c": "--cfg",
    "-i": "--info",
    "-m": "--multirun",
    "-p": "--package",
    "-r": "--run",
    "-sc": "--shell-completion",
    "-h": "--help",
    "-V": "--version",
}
OWN = {"--help", "--version", "--cfg", "--config-dir"}
WITHOUT_VALUE = {"--info", "--hydra-help", "--resolve", "--run", "--shell-completion"}
SHELLS = ("install=", "uninstall=", "query=")  # what Hydra's --shell-completion is followed by
KINDS_OF_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
KINDS_OF_CFG = ("job", "hydra", "all")  # what Hydra's own --cfg may be followed by


SEARCHPATH = "hydra.searchpath="


@dataclass
class Arguments:
    """A command line taken apart: Hydra overrides, the few options that are ours, and what is wrong with it."""

    overrides: list[str] = field(default_factory=list)
    config_dirs: list[Path] = field(default_factory=list)
    show_config: bool = False
    show_help: bool = False
    show_version: bool = False
    problems: list[str] = field(default_factory=list)


def without_local_rank(argv: list[str]) -> list[str]:
    """`argv` without the `--local_rank=N` (or `--local-rank N`) that launchers insert before the overrides."""
    kept: list[str] = []
    skip_next = False
    for word in argv:
        if skip_next:
            skip_next = False
        elif word in ("--local_rank", "--local-rank"):
            skip_next = True
        elif not re.match(r"--local[_-]rank=", word):
            kept.append(word)
    return kept


def take_apart(argv: list[str], options: Sequence[str]) -> Arguments:
    """Take a command line apart. `options` are the dotted names of all options, for hints."""
    args = Arguments()
    words = without_local_rank(argv)[::-1]  # the next word is the last
    while words:
        word = words.pop()
        if "\0" in word or any("\ud800" <= letter <= "\udfff" for letter in word):
            args.problems.append(f"{word!r} is not text in UTF-8: rename the file, or correct the option")
        elif word.startswith("-"):
            _take_flag(word, words, args, options)
        elif word.startswith(SEARCHPATH):
            args.config_dirs += _searched(word.removeprefix(SEARCHPATH))
        else:
            args.overrides.append(word)
    missing = [folder for folder in args.config_dirs if not folder.is_dir()]
    args.problems += [f"--config-dir {folder} is not a folder" for folder in missing]
    args.config_dirs = [folder for folder in args.config_dirs if folder not in missing]
    return args


def _searched(value: str) -> list[Path]:
    """Return the folders of Hydra's own list of them: [file:///one,/two]."""
    listed = (entry.strip(" '\"").removeprefix("file://") for entry in value.strip("[]").split(","))
    return [Path(entry).expanduser().resolve() for entry in listed if entry]


def parse(argv: list[str], options: Sequence[str] = ()) -> Arguments:
    """The same. Raises ConfigError with every problem in one message."""
    args = take_apart(argv, options)
    if args.problems:
        raise ConfigError("\n".join(args.problems))
    return args


def _take_flag(word: str, words: list[str], args: Arguments, options: Sequence[str]) -> None:
    """Put the meaning of `word` into `args`; take its value from the end of `words` if it has one."""
    given, _, value = word.partition("=")
    flag = SHORT.get(given, given)
    if flag == "--help":
        args.show_help = True
    elif flag == "--version":
        args.show_version = True
    elif flag == "--multirun":
        listed = [other for other in words[::-1] if "," in other and "=" in other]
        args.problems.append(f"{given}: {ONE_RUN.format(words=' '.join(listed) or 'train.seq_len=1024,2048')}")
        args.overrides = [other for other in args.overrides if "," not in other]
        words[:] = [other for other in words if "," not in other]
    elif flag == "--cfg":
        kind = value or (words.pop() if words and words[-1] in KINDS_OF_CFG else "job")
        args.show_config = True
        if kind != "job":
            args.problems.append(
                f"{given} {kind}: {given} prints the configuration of the run, which is all there is"
            )
    elif flag == "--config-dir":
        folder = value or (words.pop() if words else "")
        if not folder:
            args.problems.append(f"{given} needs a folder: {given} DIR")
            return
        args.config_dirs.append(Path(folder).expanduser().resolve())
    else:
        if flag == "--shell-completion" and words and words[-1].startswith(SHELLS):
            value = words.pop()
        takes_next = not value and words and "=" not in words[-1] and words[-1][:1] != "-"
        if takes_next and (flag not in WITHOUT_VALUE or (flag == "--info" and words[-1] in KINDS_OF_INFO)):
            value = words.pop()
        args.problems.append(_unknown(given, flag, value, options))


def _unknown(given: str, flag: str, value: str, options: Sequence[str]) -> str:
    shown = f"{given} {value}".strip()
    if flag in NOT_HERE:
        return f"{shown} is not an option here: {NOT_HERE[flag]}"
    name = flag.lstrip("-").replace("-", "_")
    if name in options and f"{name}.config" in options:
        name = f"{name}.config"
    if name in options or flag.lstrip("-") in options:
        return f"{shown} is not an option: overrides are written without dashes, {name}={value or 'VALUE'}"
    hint = hints.suggest(name, [*options, *(own.lstrip("-") for own in OWN)])
    return f"{shown} is not an option{hint}: overrides are written option=value (see --help)"
