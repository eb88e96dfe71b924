"""Start a run that ran out of memory again with less: the request to `remat launch`, and the next launch's arguments.

The first rank that runs out of memory writes the overrides that need less. A rank that the kernel kills cannot write:
for that case rank 0 writes beforehand what to plan, and the supervisor has it planned. Once all ranks have ended, the
supervisor starts the same run again, from its newest saved state. Standard library only.
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
from typing import Any

from remat.config.options import NOT_FOLDERS, ConfigError, OnOutOfMemory, RunConfig

FILE = "REMAT_RETREAT_FILE"  # environment variable of the ranks: the file for a request
NUMBER = "REMAT_RETREATS"  # environment variable of the ranks: how many retreats there were
RECORD = "retreats.jsonl"  # in the run directory: one row per retreat
PLANNED_IN_S = 120  # time limit of planning
NOTHING = "no retreat: the plan knows no checkpointing, loss and micro-batch that need less and train the same"


@dataclass(frozen=True)
class Retreat:
    """Request to start the run in `folder` (None: not made yet) again with `overrides` that need less memory."""

    overrides: list[str]
    why: str
    folder: str | None = None


@dataclass(frozen=True)
class Smaller:
    """What to plan after the kernel killed a rank: `words`, arguments of `remat plan` for a machine with less memory.

    `device` is cuda or cpu. `before` are the overrides that strategy=auto added to this launch of the run in `folder`,
    `most` is its most_retreats.
    """

    device: str
    words: list[str]
    before: list[str]
    folder: str | None
    most: int


def check(cfg: RunConfig, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError for on_out_of_memory=retreat without a supervisor that starts the run again."""
    if cfg.on_out_of_memory is OnOutOfMemory.retreat and FILE not in environment:
        raise ConfigError(
            "on_out_of_memory=retreat: only `remat launch` on one node starts a run again. Type `remat launch` in the "
            "place of `deepspeed`, or leave on_out_of_memory=stop"
        )


def count_so_far() -> int:
    """Return how many times this run was started again so far."""
    return int(os.environ.get(NUMBER, "0"))


def leave(asked: Retreat, environment: Mapping[str, str] = os.environ) -> None:
    """Write the request to the file that the supervisor reads."""
    Path(environment[FILE]).write_text(json.dumps(asdict(asked)), encoding="utf-8")


def take(file: Path) -> Retreat | None:
    """Read a rank's request and delete its file; None when there is no request or it is incomplete."""
    try:
        asked = Retreat(**json.loads(file.read_text(encoding="utf-8")))
        file.unlink()
    except (OSError, ValueError, TypeError):
        return None
    return asked


def too_many(most: int, done: int) -> str | None:
    """Return the reason when `done` retreats reach the limit `most`, else None."""
    if done < most:
        return None
    return f"no retreat: this run was started again {done} times already (most_retreats={most})"


def choose(run: Smaller, why: str) -> Retreat | None:
    """Plan the fastest setting that needs less memory and record it in the run's folder; None if there is none."""
    chosen = plan_alone(["remat.planning.settings.less_memory", run.device, *run.words], PLANNED_IN_S)
    if not chosen:
        return None
    if run.folder is not None:
        row = {"time_unix_s": time.time(), "why": why, "overrides": chosen}
        with (Path(run.folder) / RECORD).open("a", encoding="utf-8") as record:
            record.write(json.dumps(row) + "\n")
    return Retreat([*run.before, *chosen], why, run.folder)


def plan_alone(module: Sequence[str], limit_s: float) -> Any:
    """Run a module with its arguments in a process that is no rank and sees no GPU; return the JSON that it prints.

    None when it fails or takes longer than `limit_s`.
    """
    no_rank = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE")
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", *module],
            env=no_rank | {"CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=limit_s,
            check=False,
        )
        return json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError):
        return None


def prepare(run: Smaller, environment: Mapping[str, str] = os.environ) -> None:
    """Write `run`, to be planned if the kernel kills one of its ranks; do nothing without a supervisor."""
    if FILE in environment:
        _if_killed(Path(environment[FILE])).write_text(json.dumps(asdict(run)), encoding="utf-8")


def after_kill(file: Path, why: str, done: int, say: Callable[[str], None]) -> Retreat | None:
    """Return the retreat after the kernel killed a rank for memory; None when the run wants none or none is left."""
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
    """Remove requests of an earlier launch with this log folder."""
    file.unlink(missing_ok=True)
    _if_killed(file).unlink(missing_ok=True)


def _if_killed(file: Path) -> Path:
    return file.with_suffix(".if-killed.json")


def words_again(words: Sequence[str], asked: Retreat) -> list[str]:
    """Return the next launch's arguments: the last launch's, for the same run, and the overrides that need less."""
    resume = next((word for word in reversed(words) if word.startswith("resume=")), "resume=none")
    kept = [word for word in words if not word.startswith(("resume=", "run_id=", "strategy="))]
    # a recipe's own strategy=auto would take the first launch's settings again
    less = [*asked.overrides, "strategy=given"]
    if resume.partition("=")[2] not in NOT_FOLDERS:
        return [*kept, resume, *less]
    same_run = [f"run_id={Path(asked.folder).name}"] if asked.folder else []
    return [*kept, *less, *same_run, "resume=auto_or_start"]
