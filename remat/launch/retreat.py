"""Go on with less memory after a run ran out: what is asked of `remat launch`, and the words of the next launch.

The first rank that runs out writes which overrides need less. A rank that the kernel kills cannot: for it, rank 0 has
written beforehand what to plan, and the supervisor has it planned. Once all ranks have ended, the supervisor starts the
same run again, from its newest saved state. Standard library only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from remat.config.options import NOT_FOLDERS, ConfigError, OnOutOfMemory, RunConfig

FILE = "REMAT_RETREAT_FILE"  # environment of the ranks: where to ask
NUMBER = "REMAT_RETREATS"  # and how many retreats there were
RECORD = "retreats.jsonl"  # in the run directory: each time that it was started again with less memory
PLANNED_IN_S = 120  # the longest that choosing may take
NOTHING = "no retreat: the plan knows no checkpointing, loss and micro-batch that need less and train the same"


@dataclass(frozen=True)
class Retreat:
    """What a rank asks for: `overrides` that need less, and the run's `folder`, None where it was not made yet."""

    overrides: list[str]
    why: str
    folder: str | None = None


@dataclass(frozen=True)
class Smaller:
    """A run on a machine with less memory than its plan needs: `words` of `remat plan`, on a `device`, cuda or cpu.

    `before` are the overrides that strategy=auto added to the run in `folder`, `most` is its most_retreats.
    """

    device: str
    words: list[str]
    before: list[str]
    folder: str | None
    most: int


def check(cfg: RunConfig, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError for a run that asks for a retreat where nobody would start it again."""
    if cfg.on_out_of_memory is OnOutOfMemory.retreat and FILE not in environment:
        raise ConfigError(
            "on_out_of_memory=retreat: only `remat launch` on one node starts a run again. Type `remat launch` in the "
            "place of `deepspeed`, or leave on_out_of_memory=stop"
        )


def count_so_far() -> int:
    """Return how many times this run was started again so far."""
    return int(os.environ.get(NUMBER, "0"))


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


def too_many(most: int, done: int) -> str | None:
    """Return why there is no further retreat after `done` of `most`; else None."""
    return (
        None
        if done < most
        else f"no retreat: this run was started again {done} times already (most_retreats={most})"
    )


def choose(run: Smaller, why: str) -> Retreat | None:
    """Have the fastest setting planned that needs less, and note it in the run's folder; None where there is none."""
    command = [sys.executable, "-m", "remat.planning.settings.less_memory", run.device, *run.words]
    alone = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE")}
    try:
        done = subprocess.run(
            command,
            env=alone | {"CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=PLANNED_IN_S,
            check=False,
        )
        chosen = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError):
        return None
    if not chosen:
        return None
    if run.folder is not None:
        row = {"time_unix_s": time.time(), "why": why, "overrides": chosen}
        with (Path(run.folder) / RECORD).open("a", encoding="utf-8") as record:
            record.write(json.dumps(row) + "\n")
    return Retreat([*run.before, *chosen], why, run.folder)


def prepare(run: Smaller, environment: Mapping[str, str] = os.environ) -> None:
    """Write what to plan should the kernel kill a rank of `run`; nothing where nobody would read it."""
    if FILE in environment:
        _if_killed(Path(environment[FILE])).write_text(json.dumps(asdict(run)), encoding="utf-8")


def after_kill(file: Path, why: str, done: int, say: Callable[[str], None]) -> Retreat | None:
    """Return the retreat of a run of which the kernel killed a rank for memory; None where it did not ask for any."""
    try:
        run = Smaller(**json.loads(_if_killed(file).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    said = too_many(run.most, done)
    asked = None if said else choose(run, why)
    if asked is None:
        say(said or NOTHING)
    return asked


def forget(file: Path) -> None:
    """Remove what an earlier launch with this log folder had asked for."""
    file.unlink(missing_ok=True)
    _if_killed(file).unlink(missing_ok=True)


def _if_killed(file: Path) -> Path:
    return file.with_suffix(".if-killed.json")


def words_again(words: Sequence[str], asked: Retreat) -> list[str]:
    """Return the words of the next launch: those of the last one, in the same run, with less memory."""
    resume = next((word for word in reversed(words) if word.startswith("resume=")), "resume=none")
    kept = [word for word in words if not word.startswith(("resume=", "run_id=", "strategy=auto"))]
    if resume.partition("=")[2] not in NOT_FOLDERS:
        return [*kept, resume, *asked.overrides]
    same_run = [f"run_id={Path(asked.folder).name}"] if asked.folder else []
    return [*kept, *asked.overrides, *same_run, "resume=auto_or_start"]
