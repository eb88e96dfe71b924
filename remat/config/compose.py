"""Compose a command line into one checked `RunConfig` with Hydra. Only this module imports hydra and omegaconf.

Precedence, weakest first: dataclass default, `conf/` group, `conf/train.yaml`, a user's own
`local/default.yaml`, recipe, command line. With resume=FOLDER the run's own config.yaml takes the place of all but the
groups and options of the command line.
Hydra's compose API is used instead of `@hydra.main`: it writes no files, keeps one error path with our own exit
code, and serves `train.py` and every `remat` command alike.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import pickle
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

import remat
from remat.config import command_line, ds_config, hints, paths, reference, resumed, validation
from remat.config.options import NOT_FOLDERS, ConfigError, MixedSource, RunConfig
from remat.config.redact import redact

PACKAGE = Path(remat.__file__).resolve().parent
ROOT = PACKAGE if (PACKAGE / "conf").is_dir() else PACKAGE.parent  # as in a wheel, or in a checkout
CONF_DIR = ROOT / "conf"
NOT_OF_A_RUN = {"lab", "local"}  # folders of conf/ that are no groups: of remat compare, and a user's own
RECIPE_DIR = ROOT / "recipes"
OWN_DEFAULTS = "local/default.yaml"  # in conf/: a user's own defaults, weaker than a recipe
DS_CONFIG_DIR = ROOT / "ds_configs"
LENGTHS = ("train.steps", "train.epochs")  # a run has one of them
NO_CHOICE = ("Available options", "Could not find", "Could not load", "Got None", "must be a string or a list")
CHOSEN_BY_PLAN = ("train.micro_batch_size",)
Files = tuple[tuple[str, int, int], ...]
Value = tuple[str, str, Any, bool]  # the word, its option, the value, and whether it may be a new key

FIRST_RECIPE = """\
recipe=NAME is missing: it says what to train
  a first try, on any machine    deepspeed train.py recipe=tiny_zero3_offload
  a model and data of your own   deepspeed train.py recipe=finetune model.path=FOLDER_OR_HUB_NAME data.path=FILE
  to go on with a run            deepspeed train.py resume=outputs/RECIPE/RUN_ID
recipes: {recipes}"""
USAGE = """\
usage: deepspeed train.py recipe=NAME [group=choice] [option=value] ...

  recipe=NAME          one of: {recipes}
  group=choice         {groups}
  option=value         any option, for example train.steps=500

  --cfg                print the composed configuration and stop
  --config-dir DIR     also search DIR for groups and recipes (DIR/recipe/mine.yaml, DIR/data/mine.yaml)
  --help               this text; --help train lists the options of a section, --help train.steps one of them
  --version            the version of remat

Every choice and value above holds for `remat ds-config` too.
"""


@dataclass
class Composed:
    """A run, its YAML for the run directory, and the command-line arguments that it was composed from."""

    run: RunConfig
    # called on demand: it takes half of the time of composing, and a search over hundreds of runs reads no YAML
    write_yaml: Callable[[], str]
    words: list[str] = field(default_factory=list)

    @property
    def yaml(self) -> str:
        return self.write_yaml()


def from_command_line(argv: list[str]) -> Composed:
    """Compose and check the run that `argv` asks for; `--help` and `--cfg` print and exit 0.

    Raises ConfigError with every problem in one message.
    """
    args = command_line.take_apart(argv, option_names())
    is_main = os.environ.get("RANK", "0") == "0"
    if args.show_help or args.show_version:
        text = _help(args.overrides) if args.show_help else f"remat {remat.__version__}\n"
        print(text if is_main else "", end="")
        sys.exit(0)
    composed = compose_run(args.overrides, args.config_dirs, args.problems)
    if args.show_config:
        print(composed.yaml if is_main else "", end="")
        sys.exit(0)
    return composed


def compose_run(
    overrides: list[str], config_dirs: list[Path] | None = None, problems: Sequence[str] = ()
) -> Composed:
    """Compose and check one run from Hydra overrides.

    Raises ConfigError with all problems in one message, those found before (`problems`) first.
    """
    folders = config_dirs or []
    words = [*(f"--config-dir={folder}" for folder in folders), *overrides]
    kept, refused = command_line.split_refused(overrides, option_names(), _groups(), _own_groups(folders))
    kept = [_opened(word) for word in [*kept, *_replaced_length(kept)]]
    found = [*problems, *refused]
    resumes = resumed_folder(words)
    try:
        search = _search_path(folders)
        run, write_yaml = _compose_resumed(kept, search, resumes) if resumes else _compose([*search, *kept])
    except Exception as error:  # for odd values hydra raises ValueError, TypeError, AssertionError and others
        raise ConfigError("\n".join([*found, *_explain_each(kept, folders, error)])) from error
    if found := found or validation.problems(run):
        raise ConfigError("\n".join(found))
    return Composed(run, write_yaml, words)


def check_deepspeed(run: RunConfig, ranks: int | None) -> None:
    """Raise ConfigError for problems in DeepSpeed's config that any model would have. `ranks` None: not known yet."""
    values = ds_config.values_of(run, world_size=ranks, hidden_size=1)
    ds_config.render(ds_config.load(run.deepspeed.config, DS_CONFIG_DIR), run.deepspeed.overrides, values)


def check_plan(run: RunConfig) -> None:
    """Raise ConfigError for what cannot be planned on the machine that the options name."""
    validation.check_plan(run)
    check_deepspeed(run, run.hardware.ranks)


def check_launch(composed: Composed, ranks: int | None) -> None:
    """Raise ConfigError, in one message, for what cannot be launched: a launch needs more than a plan."""
    problems = []
    for check in (
        lambda: check_recipe(composed.words),
        lambda: validation.check_launch(composed.run),
        lambda: check_deepspeed(composed.run, ranks),
    ):
        try:
            check()
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))


def check_recipe(words: Sequence[str]) -> None:
    """Raise ConfigError unless `words` (of a `Composed`) name what to train, a recipe or a run to resume."""
    if any(word.startswith("recipe=") for word in words) or resumed_folder(words):
        return
    raise ConfigError(FIRST_RECIPE.format(recipes=", ".join(_recipe_files())))


def resumed_folder(words: Sequence[str]) -> str | None:
    """Return the folder of the run that `words` resume; its own configuration is then the base of the new one.

    None when `words` name no such folder, or name a recipe, which is then the base.
    """
    given = [word.partition("=")[2].strip("'\"") for word in words if word.startswith("resume=")]
    if not given or given[-1] in (*NOT_FOLDERS, "") or any(word.startswith("recipe=") for word in words):
        return None
    return given[-1]


def refuse_if_none(command_lines: Iterable[Sequence[str]], refusal: str) -> None:
    """Raise ConfigError, with `refusal` and all reasons, when none of the command lines gives a valid run."""
    reasons: list[str] = []
    for argv in command_lines:
        try:
            check_deepspeed(from_command_line(list(argv)).run, None)
            return
        except ConfigError as error:
            reasons.append(str(error))
    raise ConfigError("\n".join([refusal, *dict.fromkeys(reasons)]))


def recipe_names() -> list[str]:
    """Return the recipes that compose as they stand: each of one model, for one machine."""
    general = starting_points()
    return [name for name in _recipe_files() if name not in general]


def starting_points() -> list[str]:
    """Return the recipes for any model and machine: the user names the model."""
    return [name for name, path in _recipe_files().items() if "status: starting_point" in path.read_text()]


def _recipe_files() -> dict[str, Path]:
    return {path.stem: path for path in sorted(RECIPE_DIR.glob("*.yaml"))}


def group_choices() -> dict[str, list[str]]:
    folders = sorted(path for path in CONF_DIR.iterdir() if path.is_dir() and path.name not in NOT_OF_A_RUN)
    return {folder.name: sorted(p.stem for p in folder.glob("*.yaml")) for folder in folders}


@functools.cache
def option_names() -> tuple[str, ...]:
    """Return the dotted name of every option and of every section of options."""
    return tuple(name for name, _ in _options(RunConfig))


def _options(schema: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name of each option and section of `schema`, and its type; a section follows its options."""
    for name, kind in _type_hints(schema).items():
        if is_dataclass(kind):
            yield from _options(kind, f"{prefix}{name}.")
        yield f"{prefix}{name}", kind


def _groups() -> set[str]:
    return {*group_choices(), "recipe"}


def _own_groups(folders: Sequence[Path]) -> set[str]:
    """Return the groups that only a user's folders have; a file in them names by `# @package` the section it sets."""
    return {path.name for folder in folders for path in folder.iterdir() if path.is_dir()} - _groups()


def _help(words: list[str]) -> str:
    """Return the usage, or the description of the options and sections that `words` without `=` name."""
    named = [word for word in words if "=" not in word]
    for word in named:
        if not reference.matching([word]):
            raise ConfigError(f"--help {word}: no such option{hints.suggest(word, option_names())}")
    return reference.describe(named) if named else usage()


def usage() -> str:
    groups = [f"{name}={'|'.join(choices)}" for name, choices in group_choices().items()]
    return USAGE.format(recipes=", ".join(_recipe_files()), groups=f"\n{' ' * 23}".join(groups))


def _compose(overrides: list[str]) -> tuple[RunConfig, Callable[[], str]]:
    """Return the run and a function that writes its YAML; values that refer to others are resolved."""
    quick = _with_values(overrides)
    cfg = _loaded(overrides) if quick is None else quick
    _let_adapters_bring_lr(cfg, overrides)
    return _finished(cfg)


def _compose_resumed(words: list[str], search: list[str], place: str) -> tuple[RunConfig, Callable[[], str]]:
    """Return the configuration of the run at `place`, changed by `words`, and a function that writes its YAML.

    A choice of a group replaces that whole section. Raises ConfigError for a run without a readable configuration, and
    what `_with_values` raises.
    """
    file = resumed.find_config(paths.expand(place))
    content = resumed.read_config(file)
    sorted_words = _sort_words(words)
    if sorted_words is None:
        odd = next(word for word in words if _sort_words([word]) is None)
        _loaded([*search, odd])  # raises Hydra's error for an override that cannot be parsed
        raise ConfigError(f"{odd}: with resume=FOLDER write option=value or group=choice")
    chosen, values = sorted_words
    try:
        cfg = OmegaConf.merge(_schema(), content)
    except Exception as error:  # as varied as in compose_run
        raise ConfigError(
            f"{file}: {_first_cause(error)}; the run is of another version: give recipe=NAME and its options"
        ) from error
    assert isinstance(cfg, DictConfig)
    if chosen:
        choices = _loaded([*search, "~recipe", *chosen])
        for word in chosen:
            group = word.partition("=")[0]
            cfg[group] = choices[group]
    _set_all(cfg, values)
    _let_adapters_bring_lr(cfg, words)
    if secret := resumed.hidden(OmegaConf.to_container(cfg)):  # type: ignore[arg-type]
        raise ConfigError(
            f"{file} does not hold the value of {', '.join(secret)}, which is secret: give it again"
        )
    return _finished(cfg)


def _let_adapters_bring_lr(cfg: DictConfig, words: Sequence[str]) -> None:
    """Set optim.lr to peft.lr when `words` choose adapters and give no optim.lr; else clear a peft.lr they do not give.

    Adapters need ten times the learning rate of training all weights, for which a recipe without adapters is written.
    """
    asked = {word.lstrip("+").partition("=")[0] for word in words}
    if "optim.lr" not in asked and asked & {"peft", "peft.method", "peft.lr"} and cfg.peft.lr is not None:
        cfg.optim.lr = cfg.peft.lr
    elif "peft.lr" not in asked:
        cfg.peft.lr = None


def _finished(cfg: DictConfig) -> tuple[RunConfig, Callable[[], str]]:
    if "hydra" in cfg:
        cfg.name = cfg.name or str(cfg.hydra.runtime.choices.get("recipe"))
        OmegaConf.set_struct(cfg, False)
        del cfg["hydra"]
    if unknown := list(_unknown_keys(cfg, RunConfig)):
        known = option_names()
        raise ConfigCompositionException(
            "; ".join(f"{name}: no such option{hints.suggest(name, known)}" for name in unknown)
        )
    run = OmegaConf.to_object(cfg)
    assert isinstance(run, RunConfig)
    return run, functools.partial(_to_yaml, cfg)


def _to_yaml(cfg: DictConfig) -> str:
    # redacted value by value, so that *** is quoted and the file can be read again
    return OmegaConf.to_yaml(OmegaConf.create(redact(OmegaConf.to_container(cfg, enum_to_str=True))))


def _unknown_keys(cfg: Any, schema: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names in `cfg` that the schema does not have: nothing would read them."""
    kinds = _type_hints(schema)
    for name in cfg:
        if name not in kinds:
            yield f"{prefix}{name}"
        elif is_dataclass(kinds[name]):
            yield from _unknown_keys(cfg[name], kinds[name], f"{prefix}{name}.")


@functools.cache
def _type_hints(schema: Any) -> dict[str, Any]:
    return get_type_hints(schema)


def _loaded(overrides: Sequence[str]) -> DictConfig:
    """Let Hydra compose all of the overrides, which takes a fifth of a second."""
    files = _files()
    _register_schema()
    for name in _recipes_of(overrides):
        _register_recipe(name, files)
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(CONF_DIR), version_base="1.3"):
        cfg = compose(config_name="train", overrides=list(overrides), return_hydra_config=True)
    recipe = cfg.hydra.runtime.choices.get("recipe")
    with open_dict(cfg):  # keep only this of Hydra's own settings, which are copied with every run
        cfg.hydra = {"runtime": {"choices": {"recipe": recipe}}}
    return cfg


def _with_values(overrides: list[str]) -> DictConfig | None:
    """Compose quickly: set values in the cached composition of the same choices, which is Hydra's last step too.

    Returns None when an override is neither a choice of a known group nor a single value: Hydra must compose it. Raises
    `_RefusedValues`, with Hydra's errors, for values that cannot be set.
    """
    sorted_words = _sort_words(overrides)
    if sorted_words is None:
        return None
    chosen, values = sorted_words
    last = {word.partition("=")[0]: word for word in chosen}  # as Hydra: the last choice of a group holds
    try:
        cfg: DictConfig = pickle.loads(_of_choices(tuple(sorted(last.values())), _files()))
    except Exception:  # as varied as in compose_run
        return None
    try:
        _set_all(cfg, values)
    except _RefusedValues:
        _finished(cfg)  # raises where something else is wrong too: Hydra explains it all
        raise
    return cfg


def _sort_words(overrides: Sequence[str]) -> tuple[list[str], list[Value]] | None:
    """Sort overrides into choices of groups and values; None when one is neither or cannot be parsed."""
    groups = _groups()
    chosen, values = list[str](), list[Value]()
    try:
        for override in OverridesParser.create().parse_overrides(list(overrides)):
            key, plain = override.key_or_group, override.type is OverrideType.CHANGE
            if (
                not (plain or override.is_force_add())
                or override.is_sweep_override()
                or override.package
                or key.startswith("hydra")
            ):
                return None
            if key not in groups:
                values.append((str(override.input_line), key, override.value(), not plain))
            elif plain and isinstance(override.value(), str):
                chosen.append(str(override.input_line))
            else:
                return None
    except Exception:  # as varied as in compose_run
        return None
    return chosen, values


def _set_all(cfg: DictConfig, values: Sequence[Value]) -> None:
    """Set every value that can be set, then raise `_RefusedValues` with each override that cannot."""
    refused = []
    for word, option, value, add in values:
        try:
            _set(cfg, option, value, add=add)
        except Exception as error:
            refused.append((word, error))
    if refused:
        raise _RefusedValues(refused)


class _RefusedValues(Exception):
    """Failure to set values: each override that cannot be set, and why."""

    def __init__(self, found: list[tuple[str, Exception]]) -> None:
        super().__init__()
        self.found = found
        self.__cause__ = found[0][1]


def _set(cfg: DictConfig, option: str, value: Any, *, add: bool) -> None:
    """Set one value as Hydra does, with Hydra's error for an option that does not exist."""
    try:
        OmegaConf.update(cfg, option, value, merge=True, force_add=add)
    except (ConfigAttributeError, ConfigKeyError) as error:
        if add:
            raise
        raise ConfigCompositionException(f"Could not override '{option}'.") from error


@functools.lru_cache(maxsize=64)
def _of_choices(chosen: tuple[str, ...], files: Files) -> bytes:
    """Compose one choice of each group: compose the recipe, and replace its sections by the other choices.

    The result is pickled: unpickling makes a copy in a quarter of the time of `copy.deepcopy`.
    """
    recipe = tuple(word for word in chosen if word.startswith("recipe="))
    cfg = copy.deepcopy(_of_recipe(recipe, files))
    for word in (word for word in chosen if word not in recipe):
        group, _, name = word.partition("=")
        file = CONF_DIR / group / f"{name}.yaml"
        if not file.exists():
            return pickle.dumps(_loaded(chosen))
        cfg[group] = _section(group, file, str(cfg.hydra.runtime.choices.recipe), files)
    return pickle.dumps(cfg)


@functools.lru_cache(maxsize=64)
def _of_recipe(chosen: tuple[str, ...], _: Files) -> DictConfig:
    return _loaded(chosen)


def _section(group: str, file: Path, recipe: str, files: Files) -> DictConfig:
    """Return a group's section: `file`, overridden by conf/train.yaml, the user's own defaults and the recipe."""
    stronger = (CONF_DIR / "train.yaml", CONF_DIR / OWN_DEFAULTS, RECIPE_DIR / f"{recipe}.yaml")
    contents = [content[group] for path in stronger if group in (content := _read(path, files))]
    section = OmegaConf.merge(_schema()[group], _read(file, files), *contents)
    assert isinstance(section, DictConfig)
    return section


@functools.cache
def _schema() -> DictConfig:
    """Return the options with their defaults; a merge copies them."""
    return OmegaConf.structured(RunConfig)


@functools.lru_cache(maxsize=128)
def _read(path: Path, _: Files) -> Any:
    return OmegaConf.load(path) if path.exists() else {}


def _files() -> Files:
    """Return (path, size, modification time) of each YAML file, the key of all caches of these files."""
    files = sorted([*CONF_DIR.rglob("*.yaml"), *RECIPE_DIR.glob("*.yaml")])
    return tuple((str(file), (at := file.stat()).st_size, at.st_mtime_ns) for file in files)


def _recipes_of(overrides: Sequence[str]) -> list[str]:
    """Return the recipes to register with Hydra: the named ones, or all when another file may name one.

    Reading all of them takes as long as composing a run.
    """
    known = _recipe_files()
    named = [value for key, _, value in (word.partition("=") for word in overrides) if key == "recipe"]
    if named and not (CONF_DIR / OWN_DEFAULTS).exists() and not any("searchpath" in word for word in overrides):
        return [name for name in named if name in known]
    return list(known)


@functools.cache
def _register_schema() -> None:
    ConfigStore.instance().store(name="remat_schema", node=RunConfig)


@functools.lru_cache(maxsize=128)
def _register_recipe(name: str, _: Files) -> None:
    """Make a file of `recipes/` a choice of Hydra's group `recipe`: the folder has another name than the group."""
    node = OmegaConf.load(RECIPE_DIR / f"{name}.yaml")
    ConfigStore.instance().store(group="recipe", name=name, node=node, package="_global_")


def _search_path(config_dirs: list[Path]) -> list[str]:
    if not config_dirs:
        return []
    return [f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in config_dirs)}]"]


def _opened(override: str) -> str:
    """Let free-form sections (DeepSpeed's JSON, a model's config) accept new keys without Hydra's `+`.

    An option of a source of data.mix is written as a part of data.mix: Hydra cannot tell that a new name is a source.
    """
    key, _, value = override.partition("=")
    if "~/" in value:  # the shell does not expand ~ after a =, and Hydra's grammar does not read it
        value = command_line.in_quotes(value, "~/")
        override = f"{key}={value}"
    if key.startswith("data.mix.") and key.count(".") == 3:
        _, _, source, option = key.split(".")
        return f"++data.mix={{{source}: {{{option}: {value}}}}}"
    return f"++{override}" if command_line.is_free_form(key) and "=" in override else override


def _replaced_length(overrides: Sequence[str]) -> list[str]:
    """Return the override that clears the recipe's train.steps when train.epochs is given, or the reverse."""
    given = {}
    for word in overrides:
        option, _, value = word.lstrip("+").partition("=")
        given[option] = value
    lengths = [name for name in LENGTHS if given.get(name, "null") not in ("null", "")]
    if len(lengths) != 1:
        return []
    return [f"{name}=null" for name in LENGTHS if name not in given]


def _explain_each(overrides: list[str], config_dirs: list[Path], error: Exception) -> list[str]:
    """Describe each override that cannot be set; else add them one by one, groups first, and describe what fails."""
    if isinstance(error, ConfigError):
        return [str(error)]
    if isinstance(error, _RefusedValues):
        return [_explain(word, why) for word, why in error.found]
    groups = _groups()
    ordered = sorted(overrides, key=lambda o: o.split("=")[0] not in groups)
    accepted = _search_path(config_dirs)
    found: list[str] = []
    for override in ordered:
        try:
            _compose([*accepted, override])
            accepted.append(override)
        except Exception as reason:
            found.append(_explain(override, reason))
    return found or [_first_cause(error)]


def _explain(override: str, error: Exception) -> str:
    option, _, value = override.lstrip("+~").partition("=")
    if "=" not in override:
        return f"{override}: {_explain_word(override)}"
    cause = _first_cause(error)
    if "override_grammar" in cause:
        return f"{option}={value}: this cannot be read; {_explain_quotes(option, value)}"
    if "'local/default'" in cause:
        return f"local/default.yaml, your own defaults: {cause.partition(';')[2].strip()}; correct that file"
    choices = list(_recipe_files()) if option == "recipe" else group_choices().get(option, [])
    if choices and any(text in cause for text in NO_CHOICE):
        near = hints.suggest_choice(option, value, choices)
        return f"{option}={value}: no such choice{near}; choices: {', '.join(choices)}"
    if option == "recipe":
        return f"recipe={value}: {_explain_recipe(cause)}"
    unknown = any(f"'{part}'" in cause for part in option.split("."))
    if "Could not override" in cause or ("not in" in cause and unknown):
        return f"{option}={value}: no such option{hints.suggest(option, option_names())}"
    if known := ", ".join(item.name for item in fields(MixedSource)) * ("MixedSource" in cause):
        return f"{option}={value}: {cause}: a source has {known}"
    return f"{option}={value}: {_explain_value(option, value, cause)}"


def _explain_quotes(option: str, value: str) -> str:
    """Return what to put in quotes in a value that Hydra's grammar cannot read."""
    if value.startswith("{"):
        return "put each text in it in quotes"
    if value.startswith("[") and value.endswith("]"):
        return f"put each item in quotes: {shlex.quote(f'{option}={command_line.in_quotes(value)}')}"
    return f"put the value in quotes: {command_line.quoted(option, value)}"


def _explain_word(word: str) -> str:
    """Return what to type instead of an argument without `=`."""
    if word.endswith((".yaml", ".yml")):
        name = Path(word).stem
        return f"a file of options is a recipe, DIR/recipe/{name}.yaml: write --config-dir DIR recipe={name}"
    if word.endswith(".json"):
        return f"not an override; DeepSpeed's configuration is named by deepspeed.config={word}"
    if any(name.startswith(f"{word}.") for name in option_names()):
        choice = f"{word}=CHOICE or " * (word in _groups())
        return f"{word} is a section: write {choice}{word}.OPTION=value; `--help {word}` lists its options"
    return "not an override; write option=value"


def _explain_recipe(cause: str) -> str:
    """Return what is wrong with a user's own recipe."""
    if "no such option" in cause:
        return cause
    if found := re.search(r"Key '(\w+)' not in '(\w+)'", cause):
        name, section = found.groups()
        if section != RunConfig.__name__:
            sections = {getattr(kind, "__name__", ""): dotted for dotted, kind in _options(RunConfig)}
            option = f"{sections.get(section, '')}.{name}"
            return f"{option}: no such option{hints.suggest(option, option_names())}; correct the file"
        return f"{cause}; a recipe of your own begins with the line `# @package _global_`"
    return f"{cause}; correct the file"


def _explain_value(option: str, value: str, cause: str) -> str:
    """Return what kind of value an option takes, in plain words."""
    if found := re.search(
        r"(?:Value '(.*?)' (?:of type .* )?)?could not be converted to (Integer|Float|Boolean)",
        cause,
        re.DOTALL,
    ):
        value, asked = value if found[1] is None else found[1], found[2]  # of a mapping that one of its values
        kind = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}[asked]
        with contextlib.suppress(ValueError, OverflowError):
            if asked == "Integer" and (number := float(value)).is_integer():
                return f"give a whole number, {option}={int(number)}"
        chosen = "; strategy=auto chooses it by the plan" * (value == "auto" and option in CHOSEN_BY_PLAN)
        return f"{value or 'nothing'} is not {kind}: give one, or leave the option out for its default{chosen}"
    if found := re.search(r"Invalid value '.*', expected one of \[(.*)\]", cause, re.DOTALL):
        return f"{cause}{hints.suggest_value(option, value, found.group(1).split(', '))}"
    if "is not a ListConfig, list or tuple" in cause:
        every = "; every linear layer is the default: leave it out" * (option == "peft.target_modules")
        return f"give a list, {option}=[{value},...]{every}"
    return cause


def _first_cause(error: BaseException) -> str:
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    lines = [line.strip() for cause in causes for line in str(cause).splitlines()]
    skip = ("full_key:", "reference_type=", "object_type=", "Error merging override")
    text = "; ".join(dict.fromkeys(line for line in lines if line and not line.startswith(skip)))
    return text.replace(
        "See https://hydra.cc/docs/1.2/upgrades/1.0_to_1.1/automatic_schema_matching", ""
    ).strip()
