"""Read the configuration of a resumed run, that of its last launch, and find what a new launch changes in it.

Standard library and YAML only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from remat.config.hints import FREE_FORM
from remat.config.options import ConfigError
from remat.config.paths import SAVED, STEP
from remat.config.redact import HIDDEN

FILE = "config.yaml"
MANIFEST = "manifest.json"  # as remat.saving.manifest names it
OF_A_LAUNCH = ("resume", "run_id", "force", "train.stop_at")  # not options of the run: a resume gives them anew
NO_MATTER = (
    *OF_A_LAUNCH,
    "log_level",
    "on_out_of_memory",
    "most_retreats",
    "output_dir",
    "name",
    "meta",
    "hardware",
    "allocator",
    "data.cache_dir",
    "tracking",
    "peft.lr",
)
FREE = tuple(f"{section}." for section in FREE_FORM)


def run_folder(place: Path) -> Path:
    """Return the run directory that `place` is or is inside of: its `saved` folder, by any name, or one state."""
    if place.name.startswith(STEP):
        return place.absolute().parent.parent
    if (place / SAVED).is_dir() or (place / FILE).is_file():
        return place
    holds_states = place.name == SAVED or any(place.glob(f"{STEP}*"))
    return place.absolute().parent if holds_states else place


def find_config(place: Path) -> Path:
    """Return the file with the configuration of the launch that wrote the newest state at `place`.

    A resume at step N keeps its records in `resumed-at-N`; a state of step M > N is from it or from a later one. Raises
    ConfigError when there is no run at `place`.
    """
    folder = run_folder(place)
    if not (folder / FILE).is_file():
        raise ConfigError(
            f"resume={place}: {'no such folder' if not place.exists() else f'{folder} has no {FILE}'}; give the folder "
            "of a run, outputs/RECIPE/RUN_ID, or recipe=NAME and the options of the run"
        )
    states = [place] if place.name.startswith(STEP) else list((folder / SAVED).glob(f"{STEP}*/{MANIFEST}"))
    newest = max((_step(path) for path in states), default=0)
    launches = {_step(path.parent): path for path in folder.glob(f"resumed-at-*/{FILE}")}
    before = [step for step in launches if step < newest]
    return launches[max(before)] if before else folder / FILE


def _step(path: Path) -> int:
    found = re.findall(r"(?:step|resumed-at)-(\d+)", str(path))
    return int(found[-1]) if found else 0


def read_config(file: Path) -> dict[str, Any]:
    """Return the options in a run's config.yaml, without those that belong to a launch. Raises ConfigError."""
    try:
        content = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise ConfigError(
            f"{file} cannot be read ({str(error).splitlines()[0]}): give recipe=NAME and the options of the run"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds no options: give recipe=NAME and the options of the run")
    for name in OF_A_LAUNCH:
        *sections, leaf = name.split(".")
        inside: Any = content
        for section in sections:
            inside = inside.get(section)
        if isinstance(inside, dict):
            inside.pop(leaf, None)
    return content


def hidden(content: Mapping[str, Any]) -> list[str]:
    """Return the options whose values the file does not hold because they are secret."""
    return [name for name, value in flat(content).items() if isinstance(value, str) and HIDDEN in value]


def flat(content: Any, name: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by dotted name; an empty mapping and a list are leaves."""
    if not isinstance(content, Mapping) or not content:
        return {name: content}
    return {
        key: value
        for own, inside in content.items()
        for key, value in flat(inside, f"{name}.{own}" if name else str(own)).items()
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (option, before, now) for each option that differs and matters to the training or its memory."""
    old, new = flat(before), flat(now)
    names = [name for name in {**new, **old} if (name in old and name in new) or name.startswith(FREE)]
    return [
        (name, old.get(name), new.get(name))
        for name in names
        if str(old.get(name)) != str(new.get(name))
        and not any(f"{name}.".startswith(f"{other}.") for other in NO_MATTER)
    ]
