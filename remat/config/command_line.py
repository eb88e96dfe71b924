"""Parse a command line: the few options of this project with dashes, Hydra's overrides, and lists of values to sweep.

Options with dashes of Hydra, other trainers and launchers are refused, with what to type instead. So are overrides that
Hydra accepts but that no run would read: unknown keys added with `+`, options deleted with `~`, and Hydra's own
settings. Standard library only.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from remat.config import hints, paths, validation
from remat.config.options import ConfigError

MOST_POINTS = 500
PICTURES = (".png", ".svg", ".pdf")
OPENING, CLOSING, QUOTES = "[{(", "]})", "'\""
ONE_RUN = (
    "a launch trains one run. `remat compare {words} recipe=NAME` launches each and sets them side by side, "
    "`remat plan --sweep {words} recipe=NAME` plans each without launching"
)
NOT_HERE = {  # options of Hydra that do not exist here, and what to use instead
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
KINDS_OF_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
SHELLS = ("install=", "uninstall=", "query=")  # what Hydra's --shell-completion is followed by
KINDS_OF_CFG = ("job", "hydra", "all")  # what Hydra's own --cfg may be followed by
SEARCHPATH = "hydra.searchpath="
LONG_DASHES = ("\u2013", "\u2014", "\u2212")


@dataclass
class Arguments:
    """A parsed command line: Hydra overrides, the few options of this project, and the problems found."""

    overrides: list[str] = field(default_factory=list)
    config_dirs: list[Path] = field(default_factory=list)
    show_config: bool = False
    show_help: bool = False
    show_version: bool = False
    problems: list[str] = field(default_factory=list)


def without_local_rank(argv: list[str]) -> list[str]:
    """Return `argv` without the `--local_rank=N` (or `--local-rank N`) that launchers insert before the overrides."""
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
    """Parse a command line and collect its problems. `options` are the dotted names of all options, for hints."""
    args = Arguments()
    words = without_local_rank(argv)[::-1]  # the next word is the last
    while words:
        word = words.pop()
        if "\0" in word or any("\ud800" <= letter <= "\udfff" for letter in word):
            args.problems.append(f"{word!r} is not text in UTF-8: rename the file, or correct the option")
        elif word.startswith("-"):
            _take_flag(word, words, args, options)
        elif word.startswith(LONG_DASHES):
            meant = f"--{word.lstrip(''.join(LONG_DASHES))}"
            args.problems.append(f"{word} begins with a long dash, as text programs write it: write {meant}")
        elif word.startswith(SEARCHPATH):
            args.config_dirs += _searched(word.removeprefix(SEARCHPATH))
        else:
            args.overrides.append(word)
    missing = [folder for folder in args.config_dirs if not folder.is_dir()]
    args.problems += [f"--config-dir {folder} is not a folder" for folder in missing]
    args.config_dirs = [folder for folder in args.config_dirs if folder not in missing]
    return args


def _searched(value: str) -> list[Path]:
    """Return the folders in a value of hydra.searchpath: [file:///one,/two]."""
    listed = (entry.strip(" '\"").removeprefix("file://") for entry in value.strip("[]").split(","))
    return [paths.expand(entry).resolve() for entry in listed if entry]


def parse(argv: list[str], options: Sequence[str] = ()) -> Arguments:
    """Parse `argv`. Raises ConfigError with every problem in one message."""
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
        args.config_dirs.append(paths.expand(folder).resolve())
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


def read_values(word: str) -> list[str]:
    """Read the values of an override: `a=1,2` has [1, 2]. Commas in brackets, braces or quotes do not separate."""
    found, depth, quote, start = list[str](), 0, "", word.find("=") + 1
    for place, letter in enumerate(word[start:], start):
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


def split_points(args: Sequence[str], asker: str = "--sweep") -> tuple[list[str], list[tuple[str, ...]]]:
    """Return the arguments common to all points of a sweep, and those that each point adds.

    Raises ConfigError when nothing is swept. Errors begin with the name of the command, `asker`.
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
    """Leave out the choice of a checkpointing policy and the options that only some policies read."""
    prefixes = ("checkpointing=", *(f"checkpointing.{name}" for name in validation.OPTIONS_OF))
    return [word for word in overrides if not word.startswith(prefixes)]


HYDRA = {  # the beginning of a setting of Hydra, and what to type here; the first that fits
    "hydra.run.dir": "a run is written to output_dir/NAME/RUN_ID: set output_dir=FOLDER, name=NAME or run_id=RUN_ID",
    "hydra.output_subdir": "a run is written to output_dir/NAME/RUN_ID: set output_dir=FOLDER or name=NAME",
    "hydra.job.chdir": "a run never changes the folder it was started in: leave it out",
    "hydra.job.name": "set name=NAME",
    "hydra.searchpath": "write --config-dir DIR",
    "hydra.mode": "write `remat compare option=a,b recipe=NAME`, or `remat plan --sweep option=a,b recipe=NAME`",
    "hydra.sweep": "write `remat compare option=a,b recipe=NAME`, or `remat plan --sweep option=a,b recipe=NAME`",
    "hydra.launcher": "write `remat launch`, or a job as in scripts/slurm.sbatch",
    "hydra.verbose": "write log_level=debug",
    "hydra.job_logging": "write log_level=debug",
    "hydra.hydra_logging": "write log_level=debug",
    "hydra": "Hydra only composes the configuration here, and its own settings have no effect: leave it out",
}
LISTS = {  # options that take a list: a user who names several values does not mean a sweep
    "data.path",
    "data.eval_path",
    "data.train_on_roles",
    "peft.target_modules",
    "peft.modules_to_save",
    "tracking.tags",
    "checkpointing.recompute_modules",
    "checkpointing.discard_modules",
}
FUNCTIONS = re.compile(r"(choice|range|interval|glob|sort|shuffle|tag)\(.*\)\Z", re.DOTALL)


def split_refused(
    words: Sequence[str], options: Collection[str], groups: Collection[str], own_groups: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Return the overrides that may be composed, and what is wrong with each of the others.

    `options` are the dotted names of all options and sections, `groups` those of `conf/`, `own_groups` those of the
    user's folders.
    """
    kept, problems = list[str](), list[str]()
    for word in _rejoined(words, problems):
        problem = refusal(word, options, groups, own_groups)
        if problem is None:
            kept.append(word)
        else:
            problems.append(f"{word}: {problem}")
    return kept, problems


def _rejoined(words: Sequence[str], problems: list[str]) -> list[str]:
    """Return the arguments that the shell did not split at a space; add each that it did to `problems`, rejoined."""
    kept, left = list[str](), list(words)
    while left:
        word = left.pop(0)
        parts = [word]
        if left and left[0] == "=" and "=" not in word:
            parts += [left.pop(0), *left[:1]]
            left = left[1:]
        elif left and word.endswith("=") and word.count("=") == 1 and "=" not in left[0]:
            parts.append(left.pop(0))
        while _open_brackets("".join(parts)) > 0 and left:
            parts.append(left.pop(0))
        if len(parts) == 1:
            kept.append(word)
        elif "=" in parts or word.endswith("="):
            problems.append(f"{' '.join(parts)}: write {''.join(parts)}, without spaces")
        else:
            joined = " ".join(parts)
            problems.append(f"{joined}: the shell cuts this at its spaces: write {shlex.quote(joined)}")
    return kept


def _open_brackets(text: str) -> int:
    return sum(text.count(opening) for opening in "[{") - sum(text.count(closing) for closing in "]}")


def refusal(
    word: str, options: Collection[str], groups: Collection[str], own_groups: Collection[str] = ()
) -> str | None:
    """Return why an override is refused and what to type instead; None for one that may be composed."""
    sign = word[: len(word) - len(word.lstrip("+~"))]
    key, equals, value = word[len(sign) :].partition("=")
    if (dotted := key.replace("/", ".")).split(".")[0] == "hydra":
        return next(text for start, text in HYDRA.items() if dotted.startswith(start))
    if "~" in sign:
        return _deleted(key, options, groups)
    if not equals:
        return None  # composing reports that it is not an override
    if "@" in key:
        return f"a group has one place here: write {key.partition('@')[0]}={value}"
    free = is_free_form(key)
    if sign and (key in groups or (sign == "+" and key in options and not free)):
        return f"write {key}={value}, without {sign}"
    if sign and not (free or key in options or key in own_groups):
        return f"no such option{hints.suggest(key, sorted(options))}"
    if not (free or key in options or key in groups):
        return None  # composing reports that there is no such option
    values, function = read_values(word), FUNCTIONS.match(value)
    listed = len(values) > 1
    if listed and len([one for one in values if one]) == 1:
        return f"write {key}={''.join(values)}, without the comma"
    if listed and key in LISTS:
        return f"a list is written {key}=[{value}]"
    if listed or function:
        sweep = ONE_RUN.format(words=f"{key}={value if listed else 'FIRST,SECOND'}")
        return f"{sweep}. (A list is written [a,b]; text with such marks {quoted(key, value)})"
    return _whole_section(key, value, options, groups)


def quoted(key: str, value: str) -> str:
    """Return key=value for a shell, with the value in quotes, as Hydra needs it for anything but plain words."""
    return shlex.quote(override(key, value))


def override(key: str, value: str) -> str:
    """Return key=value with the value in quotes: an override for any text."""
    return f"{key}={_in_quotes(value)}"


def _in_quotes(text: str) -> str:
    doubled = re.sub(r'\\+(?="|\Z)', lambda slashes: 2 * slashes[0], text)  # others Hydra takes as they are
    inner = doubled.replace('"', '\\"')
    return f'"{inner}"'


def in_quotes(value: str, beginning: str = "") -> str:
    """Return a value in quotes if it has this beginning; of a list, [a,b], each such item. What is in quotes stays."""
    if value.startswith("[") and value.endswith("]"):
        items = read_values(f"={value[1:-1]}")
        return f"[{','.join(in_quotes(item.strip(), beginning) for item in items)}]"
    is_plain = value.startswith(beginning) and not value.startswith(tuple(QUOTES))
    return _in_quotes(value) if is_plain else value


def is_free_form(key: str) -> bool:
    """Return whether an option is a section that takes any key, or a part of one."""
    return any(key == section or key.startswith(f"{section}.") for section in hints.FREE_FORM)


def _deleted(key: str, options: Collection[str], groups: Collection[str]) -> str | None:
    """Say why an option cannot be deleted: only keys of a free-form section can, an option always has a value."""
    if is_free_form(key) and key not in hints.FREE_FORM:
        return None
    if key in groups:
        return f"a run has one choice of each group: write {key}=CHOICE, for example {key}=none"
    hint = "" if key in options else hints.suggest(key, sorted(options))
    return f"an option always has a value{hint}: write option=value, or leave it out for its default"


def _whole_section(key: str, value: str, options: Collection[str], groups: Collection[str]) -> str | None:
    """Return what to type when `key` is a whole section; None when it is an option or a group."""
    inside = [name for name in options if name.startswith(f"{key}.")]
    if not inside or key in groups or value.startswith("{"):
        return None
    usual = next((f"{key}.{own}" for own in ("config", "enabled") if f"{key}.{own}" in inside), "")
    if usual:
        return f"{key} is a section: write {usual}={value}"
    return f"{key} is a section: set an option of it, such as {', '.join(inside[:3])}"
