"""Define experiments. Named ones (`conf/lab/NAME.yaml`) and those of a command line share one schema."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from remat.config import command_line, compose
from remat.config.command_line import read_values, split_points
from remat.config.options import ConfigError
from remat.config.units import format_count

FOLDER = compose.CONF_DIR / "lab"
MOST_POINTS = 64
STEPS = 8
LEAN = (  # first arguments of each launch: a row per step, a short evaluation, nothing saved; others override them
    f"train.steps={STEPS}",
    "train.log_every=1",
    "train.eval_every=0",
    "train.eval_batches=2",
    "save.every=0",
    "save.at_end=false",
    "save.export=false",
    "save.best=false",
    "train.early_stopping_evals=0",
    "tracking=wandb_disabled",
)
MEMORY = ("peak", "kept", "micro_batch")  # figures the trade-off picture can show against time
# options that this room sets itself, so no experiment may give them
OWN_WORDS = "name", "run_id", "output_dir", "resume"
AMBIGUOUS = {"null", "true", "false", "nan", "inf"}  # names that YAML does not read as strings


@dataclass(frozen=True, kw_only=True)
class PointFile:
    """A point, or several: an argument with commas gives one point per value.

    The arguments in `cpu` or `gpu` are added after `overrides`.
    """

    name: str
    overrides: list[str] = field(default_factory=list)
    cpu: list[str] = field(default_factory=list)
    gpu: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class ScaleFile:
    """Overrides for CPUs or for GPUs. `reduction` is a sentence on what is smaller here than in the claim."""

    overrides: list[str] = field(default_factory=list)
    reduction: str = ""
    ranks: int = 0  # 0: as many as the experiment says


@dataclass(frozen=True, kw_only=True)
class ExperimentFile:
    """The content of `conf/lab/NAME.yaml`."""

    title: str
    question: str
    points: list[PointFile]
    claims: list[str] = field(default_factory=list)
    base: list[str] = field(default_factory=list)
    cpu: ScaleFile = field(default_factory=ScaleFile)
    gpu: ScaleFile = field(default_factory=ScaleFile)
    # a point's name; option=value: the point that differs only in that option; "": the first
    baseline: str = ""
    repeats: int = 2
    ranks: int = 1
    tradeoff: str = "peak"


@dataclass(frozen=True)
class Point:
    """One configuration.

    `words` are all arguments, `own` those that differ from other points. `baseline` is the name of a point.
    """

    name: str
    slug: str
    own: tuple[str, ...]
    words: tuple[str, ...]
    baseline: str


@dataclass(frozen=True)
class Experiment:
    """What to run on this kind of machine (`device`: cpu or cuda)."""

    name: str
    title: str
    question: str
    claims: tuple[str, ...]
    reduction: str
    device: str
    points: tuple[Point, ...]
    repeats: int
    ranks: int
    tradeoff: str

    @property
    def where(self) -> str:
        """Return for example `2 ranks on cpu`."""
        return f"{format_count(self.ranks, 'rank')} on {self.device}"


def names(folders: Sequence[Path] = ()) -> dict[str, Path]:
    """Return every named experiment with its file. A file in the user's folders replaces a shipped one."""
    found: dict[str, Path] = {}
    for folder in (FOLDER, *(path / "lab" for path in folders)):
        found |= {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    return found


def read(path: Path) -> ExperimentFile:
    """Read an experiment file. Raises ConfigError with every problem in it."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    problems: list[str] = []
    made = _typed(ExperimentFile, content, "", problems)
    if not problems:
        problems = _problems(made)
    if problems:
        raise ConfigError("\n".join(f"{path}: {text}" for text in problems))
    assert isinstance(made, ExperimentFile)
    return made


def describe_all(folders: Sequence[Path] = ()) -> str:
    """Write a line for each named experiment: its name, its question, the claims it answers."""
    lines = []
    known = names(folders)
    width = max((len(name) for name in known), default=0)
    for name, path in sorted(known.items()):
        content = read(path)
        claims = f"  [{', '.join(content.claims)}]" if content.claims else ""
        lines.append(f"{name:{width}}  {content.question}{claims}")
    return "\n".join(lines)


def check(args: Sequence[str], baseline: str = "") -> None:
    """Raise ConfigError for arguments that name no experiment, and where no machine could launch any of its points."""
    chosen = {device: choose(args, device, baseline) for device in ("cpu", "cuda")}
    words = dict.fromkeys(point.words for found in chosen.values() for point in found.points)
    compose.refuse_if_none(words, "remat compare: every point is refused")
    for point in words:
        compose.check_recipe(point)


def choose(args: Sequence[str], device: str, baseline: str = "") -> Experiment:
    """Return the experiment that a command line asks for. Raises ConfigError."""
    asked = command_line.parse(list(args), compose.option_names())
    labs = [word.partition("=")[2] for word in asked.overrides if word.startswith("lab=")]
    rest = [word for word in asked.overrides if not word.startswith("lab=")]
    if len(labs) > 1:
        raise ConfigError(f"lab={labs[1]}: one experiment at a time")
    if labs:
        return named(labs[0], rest, device, asked.config_dirs, baseline)
    return written(rest, device, asked.config_dirs, baseline)


def named(
    name: str, more: Sequence[str], device: str, folders: Sequence[Path] = (), baseline: str = ""
) -> Experiment:
    """Return the experiment `name`; `more` is added as the last arguments of every point. Raises ConfigError."""
    known = names(folders)
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        near = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError(f"lab={name}: no such experiment{near}; choices: {', '.join(known) or 'none'}")
    content = read(known[name])
    scale = content.cpu if device == "cpu" else content.gpu
    expanded: list[tuple[str, list[str], list[str]]] = []
    for point in content.points:
        sized = point.cpu if device == "cpu" else point.gpu
        for label, words in axes(point.overrides):
            expanded.append((", ".join(filter(None, (point.name, label))), words, sized))
    return Experiment(
        name=name,
        title=content.title,
        question=content.question,
        claims=tuple(content.claims),
        reduction=scale.reduction,
        device=device,
        points=_points(
            expanded, [*content.base, *scale.overrides], more, baseline or content.baseline, folders
        ),
        repeats=content.repeats,
        ranks=scale.ranks or content.ranks,
        tradeoff=content.tradeoff,
    )


def written(args: Sequence[str], device: str, folders: Sequence[Path] = (), baseline: str = "") -> Experiment:
    """Return the experiment of a command line. Arguments with commas are axes; the others hold for all points."""
    fixed, swept = split_points(args, asker="remat compare")
    expanded = [(_label(words), list(words), list[str]()) for words in swept]
    options = list(dict.fromkeys(word.partition("=")[0] for words in swept for word in words))
    recipe = next((word.partition("=")[2] for word in fixed if word.startswith("recipe=")), "train")
    return Experiment(
        name=slug("-".join([recipe, *(option.split(".")[-1] for option in options)])),
        title=" ".join(args),
        question="",
        claims=(),
        reduction="",
        device=device,
        points=_points(expanded, fixed, (), baseline or swept[0][0], folders),
        repeats=2,
        ranks=1,
        tradeoff="peak",
    )


def axes(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return (label, arguments) of every combination of values that are listed with commas.

    The label names the values of the combination.
    """
    lists = [
        [f"{word.partition('=')[0]}={value}" for value in read_values(word)] if "=" in word else [word]
        for word in words
    ]
    swept = [len(values) > 1 for values in lists]
    return [
        (_label([word for word, is_axis in zip(found, swept, strict=True) if is_axis]), list(found))
        for found in itertools.product(*lists)
    ]


def slug(text: str) -> str:
    """Return a folder name that YAML does not read as a number or a constant.

    `small, none` -> small-none, `512` -> p-512.
    """
    short = re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-.")
    return short if short[:1].isalpha() and short.lower() not in AMBIGUOUS else f"p-{short}"


def merged(words: Sequence[str]) -> list[str]:
    """Keep only the last argument of each option. train.steps and train.epochs count as one option."""
    options = [word.partition("=")[0] for word in words]
    meant = ["length" if option in compose.LENGTHS else option for option in options]
    last = dict(zip(meant, words, strict=True))
    return [word for option, word in zip(meant, words, strict=True) if last[option] is word]


def _label(words: Sequence[str]) -> str:
    """Return a label: only the choice for a config group, short name and value for an option."""
    parts = []
    for word in words:
        option, _, value = word.partition("=")
        parts.append(f"{option.split('.')[-1]}={value}" if "." in option else value)
    return ", ".join(parts)


def _points(
    expanded: Sequence[tuple[str, list[str], list[str]]],
    before: Sequence[str],
    after: Sequence[str],
    baseline: str,
    folders: Sequence[Path],
) -> tuple[Point, ...]:
    """Return the points, each with all its arguments.

    Raises ConfigError for a name used twice and for an unknown baseline.
    """
    if len(expanded) > MOST_POINTS:
        raise ConfigError(f"remat compare: {len(expanded)} points, at most {MOST_POINTS}; compare fewer values")
    search = [f"--config-dir={folder}" for folder in folders]
    made = []
    for name, own, sized in expanded:
        words = merged([*LEAN, *before, *own, *sized, *after])
        taken = [word for word in words if word.lstrip("+~").partition("=")[0] in OWN_WORDS]
        if taken:
            raise ConfigError(f"{taken[0]}: remat compare chooses where each run lands; leave it out")
        made.append(Point(name, slug(name), tuple(merged([*own, *sized])), (*search, *words), ""))
    for key in ("name", "slug"):
        called = [getattr(point, key) for point in made]
        twice = [name for name in called if called.count(name) > 1]
        if twice:
            raise ConfigError(f"remat compare: two points are called {twice[0]}; give each a name of its own")
    return tuple(replace(point, baseline=_baseline(point, made, baseline)) for point in made)


def _baseline(point: Point, points: Sequence[Point], baseline: str) -> str:
    """Return the name of the point that `point` is measured against."""
    known = [p.name for p in points]
    if not baseline:
        return known[0]
    if baseline in known:
        return baseline
    if "=" not in baseline:
        raise ConfigError(f"baseline={baseline}: no such point; points: {'; '.join(known)}")
    option = baseline.partition("=")[0]

    def rest(words: Sequence[str]) -> set[str]:
        return {
            word for word in words if word.partition("=")[0] != option and not word.startswith(f"{option}.")
        }

    found = [p for p in points if baseline in p.own and rest(p.own) == rest(point.own)]
    if not found:
        raise ConfigError(f"baseline={baseline}: no point is {point.name} with {baseline}")
    return found[0].name


def _problems(content: ExperimentFile) -> list[str]:
    found = []
    if not content.points:
        found.append("points: there are none")
    if content.repeats < 1 or content.ranks < 1:
        found.append("repeats and ranks: at least 1")
    if content.tradeoff not in MEMORY:
        found.append(f"tradeoff={content.tradeoff}: choose {', '.join(MEMORY)}")
    if content.cpu.overrides and not content.cpu.reduction:
        found.append("cpu.reduction: say in a sentence what is smaller than in the claim")
    return found


def _typed(kind: Any, content: Any, place: str, problems: list[str]) -> Any:
    """Return `content` as the dataclass `kind`.

    Entries that are unknown, missing or of another type are added to `problems`.
    """
    if not isinstance(content, dict):
        problems.append(f"{place or 'the file'}: needs {', '.join(item.name for item in fields(kind))}")
        return None
    hints = get_type_hints(kind)
    known = {item.name for item in fields(kind)}
    problems += [
        f"{place}{key}: no such entry; entries: {', '.join(sorted(known))}" for key in set(content) - known
    ]
    values = {}
    for item in fields(kind):
        hint = hints[item.name]
        if item.name not in content:
            if item.default is MISSING and item.default_factory is MISSING:
                problems.append(f"{place}{item.name}: missing")
            continue
        value = content[item.name]
        if is_dataclass(hint):
            values[item.name] = _typed(hint, value, f"{place}{item.name}.", problems)
        elif hint == list[PointFile] and isinstance(value, list):
            values[item.name] = [
                _typed(PointFile, entry, f"{place}{item.name}[{number}].", problems)
                for number, entry in enumerate(value)
            ]
        elif (hint in (str, int) and type(value) is hint) or (hint == list[str] and _are_words(value)):
            values[item.name] = value
        else:
            shown = getattr(hint, "__name__", hint) if hint in (str, int) else "a list of words"
            problems.append(f"{place}{item.name}={value!r}: needs {shown}")
    return None if problems else kind(**values)


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)
