"""Launch one point through `remat launch`, and write its result to a file atomically."""

from __future__ import annotations

import datetime
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from remat.config import command_line
from remat.lab import measure
from remat.lab.cache_key import Place
from remat.lab.experiment import Point
from remat.lab.measure import FAILED, FINISHED, Measured
from remat.launch import signals
from remat.report import run_dir

GRACE_S = 1.0  # ranks get no time to save: the result of a stopped launch is discarded
KEPT_OF_ENV = ("python", "torch", "deepspeed", "transformers", "commit", "started", "platform")


@dataclass(frozen=True)
class Result:
    """The result of one launch.

    `status`: finished, out of memory, does not fit, failed, not launched or refused. A refused result with a
    `key` was refused by this machine; without one its configuration was, and nothing was launched.
    """

    key: str
    point: str
    repeat: int
    status: str
    words: str = ""  # why the launch did not finish
    exit_code: int = 0
    seconds: float = 0.0  # the whole launch
    command: str = ""
    env: dict[str, Any] = field(default_factory=dict)
    measured: Measured | None = None

    @property
    def ran(self) -> bool:
        return bool(self.key)


@dataclass(frozen=True)
class Slot:
    """The files of one repeat of a point.

    `r1/` is its run directory, `r1.logs/` its output, `r1.json` its result.
    """

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


def stored(slot: Slot, key: str) -> Result | None:
    """Return the stored result of a launch with the same key; None when there is none."""
    try:
        content = json.loads(slot.result.read_text())
        found = Result(**content | {"measured": _measured(content["measured"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found if found.key == key else None


def from_here(path: Path) -> Path:
    """Return `path` relative to the current folder, in which launches start.

    So results contain no path of this machine.
    """
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def launch(slot: Slot, key: str, ranks: int, place: Place) -> Result:
    """Run a point to its end and store its result. KeyboardInterrupt ends it at once and stores nothing."""
    for old in (slot.run, slot.logs):
        shutil.rmtree(old, ignore_errors=True)
    slot.result.unlink(missing_ok=True)
    slot.logs.mkdir(parents=True)
    words = [
        *slot.point.words,
        f"name={slot.point.slug}",
        f"run_id={slot.run_id}",
        command_line.override("output_dir", str(from_here(slot.folder))),
    ]
    options = ["--log-dir", str(slot.logs), "--grace-s", f"{GRACE_S:g}", "--num_gpus", str(ranks)]
    began = time.monotonic()
    code = _run([sys.executable, "-m", "remat.cli", "launch", *options, *words], slot.logs, place)
    text = "\n".join(path.read_text(errors="replace") for path in sorted(slot.logs.glob("*.log")))
    end, found = measure.ended(code, text), None
    if end.status == FINISHED:
        try:
            found = measure.read(slot.run)
        except (OSError, ValueError, KeyError, TypeError) as error:
            end = measure.Ended(
                FAILED, f"finished, but its files cannot be read: {type(error).__name__}: {error}"
            )
    result = Result(
        key=key,
        point=slot.point.name,
        repeat=slot.repeat,
        status=end.status,
        words=end.words,
        exit_code=code,
        seconds=round(time.monotonic() - began, 1),
        command=f"remat launch --num_gpus {ranks} {shlex.join(words)}",
        env=_env(slot.run) | place.hardware,
        measured=found,
    )
    run_dir.write_json(slot.result, asdict(result))
    return result


def _run(command: Sequence[str], logs: Path, place: Place) -> int:
    """Run the command and return its exit code.

    The launcher's output goes to a file. The launcher stops when this process ends.
    """
    env = dict(os.environ) | {"OMP_NUM_THREADS": str(place.hardware["threads_per_rank"])}
    with (logs / "launch.log").open("w") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
            preexec_fn=signals.end_with_parent(signal.SIGTERM),
        )
        try:
            return process.wait()
        except BaseException:
            process.send_signal(signal.SIGTERM)  # the launcher stops its ranks, and kills them after GRACE_S
            process.wait()
            raise


def _env(run: Path) -> dict[str, Any]:
    """Read versions, commit and date from env.json; if it was never written, return only the date."""
    try:
        written = json.loads((run / "env.json").read_text())
    except (OSError, ValueError):
        return {"started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    return {name: written[name] for name in KEPT_OF_ENV if name in written}


def _measured(content: dict[str, Any] | None) -> Measured | None:
    if content is None:
        return None
    return Measured(**content | {"loss": [(int(step), value) for step, value in content["loss"]]})
