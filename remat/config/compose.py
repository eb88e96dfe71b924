"""Hydra composition: a command line becomes one checked `RunConfig`. The only importer of hydra and omegaconf.

Precedence, weakest first: dataclass default, `conf/` group, `conf/train.yaml`, recipe, command line.
Hydra's compose API is used instead of `@hydra.main`: it writes no files, keeps one error path with our own exit
code, and serves `train.py` and every `remat` command alike.
"""

from __future__ import annotations

import copy
import difflib
import functools
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from remat.config import ds_config, validation
from remat.config.options import ConfigError, RunConfig
from remat.config.redact import redact_text

ROOT = Path(__file__).resolve().parents[2]
CONF_DIR = ROOT / "conf"
NOT_OF_A_RUN = {
    "lab"
}  # folders of conf/ that hold something else than choices of a run: remat compare reads it
RECIPE_DIR = ROOT / "recipes"
DS_CONFIG_DIR = ROOT / "ds_configs"
OPEN_DICTS = (
    "deepspeed.overrides.",
    "model.architecture.",
    "meta.measured.",
    "checkpointing.layers=",
    "data.columns=",
    "data.columns.",
    "hardware.gpu_rates.",
)
LENGTHS = ("train.steps", "train.epochs")  # of which a run has one
Files = tuple[tuple[str, int, int], ...]

USAGE = """\
usage: deepspeed train.py recipe=NAME [group=choice] [option=value] ...

  recipe=NAME          one of: {recipes}
  group=choice         {groups}
  option=value         any option of remat/config/options.py, for example train.steps=500

  --cfg                print the composed configuration and stop
  --config-dir DIR     also search DIR for groups and recipes (DIR/recipe/mine.yaml, DIR/data/mine.yaml)
  --help               this text

Every choice and value above holds for `remat ds-config` too.
"""


@dataclass
class Arguments:
    """A command line taken apart: Hydra overrides, and the few options that are ours."""

    overrides: list[str] = field(default_factory=list)
    config_dirs: list[Path] = field(default_factory=list)
    show_config: bool = False
    show_help: bool = False


@dataclass
class Composed:
    """The run, the same as the YAML a person reads and the run directory keeps, and the words that ask for it."""

    run: RunConfig
    yaml: str
    words: list[str] = field(default_factory=list)


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


def parse(argv: list[str]) -> Arguments:
    """Take a command line apart. Raises ConfigError for flags that do not exist here."""
    args = Arguments()
    words = iter(without_local_rank(argv))
    for word in words:
        if "\0" in word or any("\ud800" <= letter <= "\udfff" for letter in word):
            raise ConfigError(f"{word!r} is not text in UTF-8: rename the file, or correct the option")
        if word in ("-m", "--multirun"):
            raise ConfigError(
                f"{word} is refused: two runs in one process group would share ZeRO state. "
                "Start one `deepspeed train.py` per point, for example in a shell loop"
            )
        if word in ("-h", "--help"):
            args.show_help = True
        elif word == "--cfg":
            args.show_config = True
        elif word == "--config-dir":
            args.config_dirs.append(Path(next(words, "")).resolve())
        elif word.startswith("--config-dir="):
            args.config_dirs.append(Path(word.split("=", 1)[1]).resolve())
        elif word.startswith("-"):
            raise ConfigError(f"{word} is not an option: overrides are written option=value (see --help)")
        else:
            args.overrides.append(word)
    for folder in args.config_dirs:
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {folder} is not a folder")
    return args


def from_command_line(argv: list[str]) -> Composed:
    """Compose and check the run that `argv` asks for; `--help` and `--cfg` print and exit 0.

    Raises ConfigError with every problem in one message.
    """
    args = parse(argv)
    is_main = os.environ.get("RANK", "0") == "0"
    if args.show_help:
        print(usage() if is_main else "", end="")
        sys.exit(0)
    composed = compose_run(args.overrides, args.config_dirs)
    if args.show_config:
        print(composed.yaml if is_main else "", end="")
        sys.exit(0)
    return composed


def compose_run(overrides: list[str], config_dirs: list[Path] | None = None) -> Composed:
    """One checked run from Hydra overrides. Raises ConfigError with every problem in one message."""
    words = [*(f"--config-dir={folder}" for folder in config_dirs or []), *overrides]
    overrides = [_opened(word) for word in [*overrides, *_replaced_length(overrides)]]
    search = [*_search_path(config_dirs or []), *overrides]
    try:
        run, yaml = _compose(search)
    except _RefusedValues as refused:
        raise ConfigError("\n".join(_explain(word, why) for word, why in refused.found)) from refused
    except (
        Exception
    ) as error:  # for odd values hydra also raises ValueError, TypeError, AssertionError and others
        raise ConfigError("\n".join(_explain_each(overrides, config_dirs or [], error))) from error
    validation.check(run)
    return Composed(run=run, yaml=yaml, words=words)


def check_deepspeed(run: RunConfig, ranks: int | None) -> None:
    """Raise ConfigError for what is wrong in DeepSpeed's config whatever the model. `ranks` None: not known yet."""
    ds_config.check(run, DS_CONFIG_DIR, ranks)


def check_plan(run: RunConfig) -> None:
    """The same for a run that is to be planned on the machine its options name."""
    validation.check_plan(run)
    check_deepspeed(run, run.hardware.ranks)


def check_launch(run: RunConfig, ranks: int | None) -> None:
    """The same for a run that is to be launched, which needs more than a plan."""
    validation.check_launch(run)
    check_deepspeed(run, ranks)


def refuse_if_none(command_lines: Iterable[Sequence[str]], refusal: str) -> None:
    """Raise ConfigError, `refusal` and the reasons, unless one of the command lines asks for a possible run."""
    reasons: list[str] = []
    for argv in command_lines:
        try:
            check_deepspeed(from_command_line(list(argv)).run, None)
            return
        except ConfigError as error:
            reasons.append(str(error))
    raise ConfigError("\n".join([refusal, *dict.fromkeys(reasons)]))


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPE_DIR.glob("*.yaml"))


def group_choices() -> dict[str, list[str]]:
    folders = sorted(path for path in CONF_DIR.iterdir() if path.is_dir() and path.name not in NOT_OF_A_RUN)
    return {folder.name: sorted(p.stem for p in folder.glob("*.yaml")) for folder in folders}


def usage() -> str:
    groups = [f"{name}={'|'.join(choices)}" for name, choices in group_choices().items()]
    return USAGE.format(recipes=", ".join(recipe_names()), groups=f"\n{' ' * 23}".join(groups))


def _compose(overrides: list[str]) -> tuple[RunConfig, str]:
    """The run and its YAML; values that refer to others are resolved."""
    quick = _with_values(overrides)
    return _finished(_loaded(overrides) if quick is None else quick)


def _finished(cfg: DictConfig) -> tuple[RunConfig, str]:
    recipe = cfg.hydra.runtime.choices.get("recipe")
    OmegaConf.set_struct(cfg, False)
    del cfg["hydra"]
    cfg.name = cfg.name or str(recipe)
    run = OmegaConf.to_object(cfg)
    assert isinstance(run, RunConfig)
    return run, redact_text(OmegaConf.to_yaml(cfg))


def _loaded(overrides: Sequence[str]) -> DictConfig:
    """What Hydra makes of all of them: a fifth of a second."""
    _register(_files())
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(CONF_DIR), version_base="1.3"):
        return compose(config_name="train", overrides=list(overrides), return_hydra_config=True)


def _with_values(overrides: list[str]) -> DictConfig | None:
    """The same by setting values in what Hydra made of the same choices before, as Hydra itself does after merging.

    None where an override is more than a choice of a known group or one value: that is left to Hydra. Raises
    `_RefusedValues`, with what Hydra would raise, where values cannot be set.
    """
    groups = {*group_choices(), "recipe"}
    chosen, values = [], []
    try:
        for override in OverridesParser.create().parse_overrides(overrides):
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
        cfg = copy.deepcopy(_of_choices(tuple(chosen), _files()))
    except Exception:  # as varied as in compose_run
        return None
    refused = []
    for word, option, value, add in values:
        try:
            _set(cfg, option, value, add=add)
        except Exception as error:
            refused.append((word, error))
    if refused:
        _finished(cfg)  # where something else is wrong too, Hydra explains it all
        raise _RefusedValues(refused)
    return cfg


class _RefusedValues(Exception):
    """Each word that cannot be set, and why."""

    def __init__(self, found: list[tuple[str, Exception]]) -> None:
        super().__init__()
        self.found = found
        self.__cause__ = found[0][1]


def _set(cfg: DictConfig, option: str, value: Any, *, add: bool) -> None:
    """Set one value as Hydra does, with its words for an option that does not exist."""
    try:
        OmegaConf.update(cfg, option, value, merge=True, force_add=add)
    except (ConfigAttributeError, ConfigKeyError) as error:
        if add:
            raise
        raise ConfigCompositionException(f"Could not override '{option}'.") from error


@functools.lru_cache(maxsize=64)
def _of_choices(chosen: tuple[str, ...], _: Files) -> DictConfig:
    return _loaded(chosen)


def _files() -> Files:
    """(path, size, time of change) of each YAML: what was made of them before holds as long as this is equal."""
    paths = sorted([*CONF_DIR.rglob("*.yaml"), *RECIPE_DIR.glob("*.yaml")])
    return tuple((str(path), (at := path.stat()).st_size, at.st_mtime_ns) for path in paths)


@functools.lru_cache(maxsize=1)
def _register(_: Files) -> None:
    """Recipes live in `recipes/` but are Hydra's group `recipe`; the config store bridges the two names."""
    store = ConfigStore.instance()
    store.store(name="remat_schema", node=RunConfig)
    for path in RECIPE_DIR.glob("*.yaml"):
        store.store(group="recipe", name=path.stem, node=OmegaConf.load(path), package="_global_")


def _search_path(config_dirs: list[Path]) -> list[str]:
    if not config_dirs:
        return []
    return [f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in config_dirs)}]"]


def _opened(override: str) -> str:
    """Free-form sections (DeepSpeed's JSON, a model's config) accept new keys without Hydra's `+`."""
    return f"++{override}" if override.startswith(OPEN_DICTS) else override


def _replaced_length(overrides: Sequence[str]) -> list[str]:
    """Return what takes the recipe's train.steps out where the command line gives train.epochs, or the reverse."""
    given = {}
    for word in overrides:
        option, _, value = word.lstrip("+").partition("=")
        given[option] = value
    lengths = [name for name in LENGTHS if given.get(name, "null") not in ("null", "")]
    if len(lengths) != 1:
        return []
    return [f"{name}=null" for name in LENGTHS if name not in given]


def _explain_each(overrides: list[str], config_dirs: list[Path], error: Exception) -> list[str]:
    """Add the overrides one by one, groups first, and describe each that cannot be added."""
    groups = {*group_choices(), "recipe"}
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
        return f"{override}: not an override; write option=value"
    cause = _first_cause(error)
    choices = recipe_names() if option == "recipe" else group_choices().get(option, [])
    if choices and ("Available options" in cause or "Could not find" in cause):
        return f"{option}={value}: no such choice{_close(value, choices)}; choices: {', '.join(choices)}"
    if option == "recipe":
        return f"recipe={value}: {cause}; a recipe of your own begins with the line `# @package _global_`"
    unknown = any(f"'{part}'" in cause for part in option.split("."))
    if "Could not override" in cause or ("not in" in cause and unknown):
        return f"{option}={value}: no such option{_close(option, _option_names(RunConfig))}"
    return f"{option}={value}: {cause}"


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


def _close(word: str, choices: list[str]) -> str:
    near = difflib.get_close_matches(word, choices, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _option_names(schema: Any, prefix: str = "") -> list[str]:
    hints = get_type_hints(schema)
    names: list[str] = []
    for item in fields(schema):
        kind = hints[item.name]
        if is_dataclass(kind):
            names += [*_option_names(kind, f"{prefix}{item.name}."), f"{prefix}{item.name}"]
        else:
            names.append(f"{prefix}{item.name}")
    return names
