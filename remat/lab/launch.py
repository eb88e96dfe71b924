"""One launch of one point, through `remat launch`, and its result as one file that is whole or absent."""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from remat.config import compose
from remat.lab import measure
from remat.lab.cache_key import Place
from remat.lab.experiment import Point
from remat.lab.measure import FAILED, FINISHED, Measured
from remat.launch import processes
from remat.report import run_dir

GRACE_S = 1.0  # a run that is stopped here is thrown away: its ranks need no time to save
KEPT_OF_ENV = ("python", "torch", "deepspeed", "transformers", "commit", "started", "platform")


@dataclass(frozen=True)
class Result:
    """Of one launch. `status`: finished, out of memory, does not fit, failed, or refused: by this machine, or (without
    a key) by composition, which nothing was launched for."""

    key: str
    point: str
    repeat: int
    status: str
    words: str = ""  # why, when it did not finish
    exit_code: int = 0
    seconds: float = 0.0  # the whole launch
    command: str = ""
    env: dict[str, Any] = field(default_factory=dict)
    measured: Measured | None = None

    @property
    def ran(self) -> bool:
        return bool(self.key)


@dataclass(frozen=True)
class Spot:
    """Where a repeat of a point lands: `r1/` is its run directory, `r1.logs/` what it said, `r1.json` its result."""

    folder: Path  # of the experiment
    point: Point
    repeat: int  # from 1

    @property
    def run_id(self) -> str:
        return f"r{self.repeat}"

    @property
    def run(self) -> Path:
        return self.folder / self.point.slug / self.run_id

    @property
    def logs(self) -> Path:
        return self.run.with_name(f"{self.run_id}.logs")

    @property
    def result(self) -> Path:
        return self.run.with_name(f"{self.run_id}.json")


def stored(spot: Spot, key: str) -> Result | None:
    """The result of an earlier launch that asked for the same; None when there is none, or of something else."""
    try:
        content = json.loads(spot.result.read_text())
        found = Result(**content | {"measured": _measured(content["measured"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found if found.key == key else None


def from_here(path: Path) -> Path:
    """As seen from the current folder, where launches start: no path of this machine in a result."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def quoted(value: str) -> str:
    """A value as Hydra reads it, whatever is in it."""
    if re.fullmatch(r"[\w./+-]+", value):
        return value
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def launch(spot: Spot, key: str, ranks: int, place: Place) -> Result:
    """Run it to its end and store what it shows. KeyboardInterrupt ends it at once and stores nothing."""
    for old in (spot.run, spot.logs):
        shutil.rmtree(old, ignore_errors=True)
    spot.result.unlink(missing_ok=True)
    spot.logs.mkdir(parents=True)
    words = [
        *spot.point.words,
        f"name={spot.point.slug}",
        f"run_id={spot.run_id}",
        f"output_dir={quoted(str(from_here(spot.folder)))}",
    ]
    options = ["--log-dir", str(spot.logs), "--grace-s", f"{GRACE_S:g}", "--num_gpus", str(ranks)]
    began = time.monotonic()
    script = str(compose.ROOT / "train.py")  # named, for --config-dir among the words is its option
    code = _run([sys.executable, "-m", "remat.cli", "launch", *options, script, *words], spot.logs, place)
    text = "\n".join(path.read_text(errors="replace") for path in sorted(spot.logs.glob("*.log")))
    end, found = measure.ended(code, text), None
    if end.status == FINISHED:
        try:
            found = measure.read(spot.run)
        except (OSError, ValueError, KeyError, TypeError) as error:
            end = measure.Ended(
                FAILED, f"finished, but its files cannot be read: {type(error).__name__}: {error}"
            )
    result = Result(
        key=key,
        point=spot.point.name,
        repeat=spot.repeat,
        status=end.status,
        words=end.words,
        exit_code=code,
        seconds=round(time.monotonic() - began, 1),
        command=f"remat launch --num_gpus {ranks} train.py {' '.join(words)}",
        env=_env(spot.run) | place.hardware,
        measured=found,
    )
    run_dir.write_json(spot.result, asdict(result))
    return result


def _run(command: Sequence[str], logs: Path, place: Place) -> int:
    """The exit code. What the launcher says goes to a file; when this process goes, it goes."""
    env = dict(os.environ) | {"OMP_NUM_THREADS": str(place.hardware["threads_per_rank"])}
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(processes.PR_SET_PDEATHSIG, signal.SIGTERM)

    with (logs / "launch.log").open("w") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
            preexec_fn=prepare,
        )
        try:
            return process.wait()
        except BaseException:
            process.send_signal(signal.SIGTERM)  # it ends its ranks, by force after GRACE_S
            process.wait()
            raise


def _env(run: Path) -> dict[str, Any]:
    """Versions, commit and date as the launch wrote them; of one that did not come so far the date alone."""
    try:
        written = json.loads((run / "env.json").read_text())
    except (OSError, ValueError):
        return {"started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    return {name: written[name] for name in KEPT_OF_ENV if name in written}


def _measured(content: dict[str, Any] | None) -> Measured | None:
    if content is None:
        return None
    return Measured(**content | {"loss": [(int(step), value) for step, value in content["loss"]]})
