"""Refuse words that Hydra takes but no run keeps, before anything is composed. Standard library only.

Hydra adds any key after `+`, deletes after `~`, and has settings of its own, which mean nothing where a run has a
folder of its own and one process group.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence

from remat.config import hints
from remat.config.flags import ONE_RUN
from remat.config.words import read_values

HYDRA = {  # the beginning of an option of Hydra, and what is typed here; the first that fits
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
LISTS = {  # options of which a user names several, and does not mean to sweep over them
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


def split(
    words: Sequence[str], options: Collection[str], groups: Collection[str], own_groups: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Return the words that may be composed, and what is wrong with each of the others.

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
    """Return the words that the shell did not cut at a space; what it cut is told as the one word that was meant."""
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
    """Return why a word is refused and what to type instead; None for one that may be composed."""
    sign = word[: len(word) - len(word.lstrip("+~"))]
    key, equals, value = word[len(sign) :].partition("=")
    if (dotted := key.replace("/", ".")).split(".")[0] == "hydra":
        return next(text for start, text in HYDRA.items() if dotted.startswith(start))
    if "~" in sign:
        return _deleted(key, options, groups)
    if not equals:
        return None  # composing says that it is not an override
    if "@" in key:
        return f"a group has one place here: write {key.partition('@')[0]}={value}"
    if sign and key in groups:
        return f"write {key}={value}, without {sign}"
    if sign == "+" and key in options and not _is_free_form(key):
        return f"write {key}={value}, without {sign}"
    if sign and key not in options and key not in own_groups and not _is_free_form(key):
        return f"no such option{hints.suggest(key, sorted(options))}"
    if key not in options and key not in groups and not _is_free_form(key):
        return None  # composing says that there is none
    listed, function = len(read_values(word)) > 1, FUNCTIONS.match(value)
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
    inner = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{key}="{inner}"'


def _is_free_form(key: str) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in hints.FREE_FORM)


def _deleted(key: str, options: Collection[str], groups: Collection[str]) -> str | None:
    """Only keys of a free-form section can be deleted: an option always has a value."""
    if _is_free_form(key) and key not in hints.FREE_FORM:
        return None
    if key in groups:
        return f"a run has one choice of each group: write {key}=CHOICE, for example {key}=none"
    hint = "" if key in options else hints.suggest(key, sorted(options))
    return f"an option always has a value{hint}: write option=value, or leave it out for its default"


def _whole_section(key: str, value: str, options: Collection[str], groups: Collection[str]) -> str | None:
    """A section is no option: name one of those in it."""
    inside = [name for name in options if name.startswith(f"{key}.")]
    if not inside or key in groups or value.startswith("{"):
        return None
    usual = next((f"{key}.{own}" for own in ("config", "enabled") if f"{key}.{own}" in inside), "")
    if usual:
        return f"{key} is a section: write {usual}={value}"
    return f"{key} is a section: set an option of it, such as {', '.join(inside[:3])}"
