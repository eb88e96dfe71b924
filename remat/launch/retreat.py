"""Go on with less memory after a run ran out: what a rank asks of `remat launch`, and the words of the next launch.

The first rank that runs out writes which overrides need less. Once all ranks have ended, the supervisor starts the same
run again with them, from its newest saved state. Standard library only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from remat.config.options import NOT_FOLDERS, ConfigError, OnOutOfMemory, RunConfig

FILE = "REMAT_RETREAT_FILE"  # environment of the ranks: where to ask
NUMBER = "REMAT_RETREATS"  # and how many retreats there were
# What a run may change and still go on from its saved state, with the same training.
MAY_CHANGE = ("checkpointing", "train.micro_batch_size", "train.loss")


@dataclass(frozen=True)
class Retreat:
    """What a rank asks for: `overrides` that need less, and the run's `folder`, None where it was not made yet."""

    overrides: list[str]
    why: str
    folder: str | None = None


def check(cfg: RunConfig, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError for a run that asks for a retreat where nobody would start it again."""
    if cfg.on_out_of_memory is OnOutOfMemory.retreat and FILE not in environment:
        raise ConfigError(
            "on_out_of_memory=retreat: only `remat launch` on one node starts a run again. Type `remat launch` in the "
            "place of `deepspeed`, or leave on_out_of_memory=stop"
        )


def keeps_the_run(overrides: Sequence[str]) -> bool:
    """Whether a saved state of the run fits the run with these overrides."""
    return all(word.lstrip("+").startswith(MAY_CHANGE) for word in overrides)


def number(environment: Mapping[str, str] = os.environ) -> int:
    """How many times this run was started again so far."""
    return int(environment.get(NUMBER, "0"))


def leave(asked: Retreat, environment: Mapping[str, str] = os.environ) -> None:
    """Write what is asked for where the supervisor looks."""
    Path(environment[FILE]).write_text(json.dumps(asdict(asked)), encoding="utf-8")


def take(file: Path) -> Retreat | None:
    """Read what a rank asked for, and forget it; None where nothing was asked, or not to its end."""
    try:
        asked = Retreat(**json.loads(file.read_text(encoding="utf-8")))
        file.unlink()
    except (OSError, ValueError, TypeError):
        return None
    return asked


def words_again(words: Sequence[str], asked: Retreat) -> list[str]:
    """The words of the next launch: those of the last one, in the same run, with less memory."""
    resume = next((word for word in reversed(words) if word.startswith("resume=")), "resume=none")
    kept = [word for word in words if not word.startswith(("resume=", "run_id=", "strategy=auto"))]
    if resume.partition("=")[2] not in NOT_FOLDERS:
        return [*kept, resume, *asked.overrides]
    same_run = [f"run_id={Path(asked.folder).name}"] if asked.folder else []
    return [*kept, *asked.overrides, *same_run, "resume=auto_or_start"]
