"""Write the record of a run, `metrics.jsonl`, and pass it to Weights & Biases (W&B) and TensorBoard.

Rank 0 alone writes the record, and writes it first. W&B and TensorBoard then get the same rows, each in its own thread.
That thread may fail, hang or be absent: training neither stops nor waits for it. The mode of W&B is chosen before
`wandb.init`, so an offline run opens no connection. No other module imports wandb.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from remat.config.metrics import read_rows
from remat.config.options import TrackingConfig, WandbMode
from remat.config.redact import redact, redact_text

FINISH_TIMEOUT_S = 15.0  # the longest time that the end of a run waits for W&B
LAST_WAIT_S = 1.0  # time for W&B to notice that its helper process has ended
# rows kept for a slow W&B or TensorBoard; when the queue is full, rows reach metrics.jsonl only
QUEUE_ROWS = 4096
TENSORBOARD = "tensorboard"  # the folder of events in the run directory
RECORD = "metrics.jsonl"


class Tracker:
    """A writer of rows to `run_dir/metrics.jsonl` and to W&B. On ranks other than 0 every method does nothing.

    `wandb_run_id` continues a W&B run across resumes (offline too: `wandb sync` joins the parts). `warn` receives at
    most one line about W&B, one about TensorBoard and one about the record.
    """

    def __init__(
        self,
        run_dir: Path,
        cfg: TrackingConfig,
        *,
        run_config: dict[str, Any],
        name: str,
        run_id: str,
        wandb_run_id: str | None,
        is_main: bool,
        warn: Callable[[str], None],
    ) -> None:
        self._path = run_dir / RECORD
        self._is_main = is_main
        self._warn: Callable[[str], None] | None = warn
        self._wandb: _WandbThread | None = None
        self._tensorboard: _TensorBoardThread | None = None
        if not is_main:
            return
        self._file = self._path.open("a", encoding="utf-8")
        if cfg.wandb is not WandbMode.disabled:
            init = {
                "dir": str(run_dir),
                "mode": str(cfg.wandb),
                "project": cfg.project,
                "entity": cfg.entity,
                "tags": list(cfg.tags),
                "name": f"{name}/{run_id}",
                "group": name,
                "id": wandb_run_id or secrets.token_hex(4),
                "resume": "allow",
                "config": run_config,
            }
            self._wandb = _WandbThread({**redact(init), "dir": str(run_dir)}, warn)
        if cfg.tensorboard:
            self._tensorboard = _TensorBoardThread(run_dir / TENSORBOARD, warn)

    @property
    def wandb_run_id(self) -> str | None:
        """Return the id of the W&B run, to continue it after a resume; None without W&B and on ranks other than 0."""
        return self._wandb.run_id if self._wandb else None

    def begin(self) -> None:
        """Open W&B and TensorBoard. Call this after the first step, so that it need not wait for their slow imports.

        Earlier rows are queued. `finish` opens both where no step was made.
        """
        for view in filter(None, (self._wandb, self._tensorboard)):
            view.begin()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Append one row. JSON has no numbers that are not finite: they become "NaN", "Infinity", "-Infinity"."""
        if not self._is_main:
            return
        row: dict[str, float | str] = {"step": step, "time_unix_s": round(time.time(), 3)}
        row |= {name: v if math.isfinite(v) else json.dumps(v) for name, v in metrics.items()}
        try:
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            self._warn_once(f"{self._path} cannot be written ({error}); rows are lost until it can be")
        for view in filter(None, (self._wandb, self._tensorboard)):
            view.put(step, dict(metrics))

    def summarise(self, figures: dict[str, float]) -> None:
        """Put figures of the whole run into W&B's summary. They are not written to the record."""
        if self._wandb:
            self._wandb.put(None, dict(figures))

    def rewind(self, step: int) -> None:
        """Drop rows after `step`, which a run resumed there writes again, and a row left incomplete by a crash."""
        if not self._is_main:
            return
        if self._tensorboard:
            self._tensorboard.purge_step = step + 1
        self._file.close()
        rows = [row for row in read_rows(self._path) if row["step"] <= step]
        part = self._path.with_suffix(".part")
        part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        part.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def finish_wandb_soon(self) -> None:
        """Let W&B write its rows and end while the run continues. Later rows reach the record only.

        Used when a stop is requested: W&B keeps rows in memory, and the run may be killed before its save is done.
        """
        if self._wandb:
            self._wandb.close(0)

    def finish(self, exit_code: int) -> None:
        """Close the record, then W&B and TensorBoard, each within FINISH_TIMEOUT_S + LAST_WAIT_S.

        May be called more than once.
        """
        if not self._is_main:
            return
        try:
            self._file.close()
        except OSError as error:  # closing writes the rows that a full disk did not take
            self._warn_once(f"{self._path} cannot be closed ({error}); its last rows are lost")
        for view in filter(None, (self._wandb, self._tensorboard)):
            view.finish(exit_code)

    def _warn_once(self, text: str) -> None:
        if self._warn is not None:
            self._warn(text)
            self._warn = None


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """Return the rows of a run's record in order; each has `step` and `time_unix_s`.

    A torn last row is left out. Raises FileNotFoundError without a record.
    """
    return [{name: float(value) for name, value in row.items()} for row in read_rows(run_dir / RECORD)]


def _module() -> Any:
    """Import W&B without its telemetry, which would open connections and wait at exit. The import takes seconds."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    return wandb


class _View(threading.Thread):
    """A daemon thread that takes rows from a bounded queue and passes them on; base of W&B's and TensorBoard's threads.

    `label` is its name in warnings, `remedy` ends each warning.
    """

    def __init__(self, label: str, remedy: str, warn: Callable[[str], None]) -> None:
        super().__init__(name=f"remat-{label}", daemon=True)
        self._label = label
        self._remedy = remedy
        self._warn = warn
        self._warned = threading.Lock()
        self._failed = False
        self._closed = False
        self._exit_code = 0
        self._rows: queue.Queue[tuple[int | None, dict[str, float]] | None] = queue.Queue(maxsize=QUEUE_ROWS)

    def put(self, step: int | None, metrics: dict[str, float]) -> None:
        """Queue a row of `step`; with None, queue figures of the whole run."""
        if not (self._failed or self._closed):
            self._add((step, metrics))

    def close(self, exit_code: int) -> None:
        """Queue the end behind the waiting rows. Does not block."""
        if self._closed:
            return
        self._closed, self._exit_code = True, exit_code
        self._add(None)
        self.begin()

    def _add(self, item: tuple[int | None, dict[str, float]] | None) -> None:
        try:
            self._rows.put_nowait(item)
        except queue.Full:
            self._give_up("it has not taken a row for too long")

    def begin(self) -> None:
        if self.ident is None and not self._failed:
            self.start()

    def finish(self, exit_code: int) -> None:
        self.close(exit_code)
        if not self._failed:
            self.join(FINISH_TIMEOUT_S)
        if self.is_alive():
            self._give_up(f"it did not finish within {FINISH_TIMEOUT_S:.0f} s")
            self._abandon()
            self.join(LAST_WAIT_S)

    def _abandon(self) -> None:
        """End helpers that still run after the thread was given up."""

    def _next(self) -> tuple[int | None, dict[str, float]] | None:
        """Return the next item; None ends the thread.

        After the thread was given up no item is added, so only waiting ones are returned.
        """
        try:
            return self._rows.get(block=not self._failed)
        except queue.Empty:
            return None

    def _give_up(self, reason: str) -> None:
        self._failed = True
        if self._warned.acquire(blocking=False):
            first_line = redact_text(reason.splitlines()[0])
            self._warn(
                f"{self._label} is off for the rest of this run ({first_line}); {RECORD} has every row{self._remedy}"
            )


class _WandbThread(_View):
    def __init__(self, init: dict[str, Any], warn: Callable[[str], None]) -> None:
        remedy = f", and what W&B wrote is uploaded by: wandb sync {init['dir']}/wandb/*run-*"
        super().__init__("W&B", remedy, warn)
        self.run_id: str = init["id"]
        self._init = init

    def _abandon(self) -> None:
        """End W&B's helper process, which would keep retrying and delay the exit of this process."""
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if child.name().startswith("wandb-core"):
                    child.kill()

    def run(self) -> None:
        wandb: Any = None
        try:
            wandb = _module()
            run = self._open(wandb)
            while (item := self._next()) is not None:
                step, metrics = item
                if step is None:
                    run.summary.update(metrics)
                else:
                    run.log(metrics, step=step)
            run.finish(exit_code=self._exit_code)
        except BaseException as error:  # wandb raises KeyboardInterrupt and SystemExit too
            self._give_up(f"{type(error).__name__}: {error}")
        with contextlib.suppress(BaseException):  # here: W&B's exit hook would do it and block the interpreter
            wandb.teardown(self._exit_code)

    def _open(self, wandb: Any) -> Any:
        settings = wandb.Settings(
            silent=True,  # also prevents a prompt for the key
            console="off",
            x_disable_stats=True,
            x_save_requirements=False,
            x_disable_meta=True,  # it would copy the command line
            disable_git=True,
            disable_code=True,
            init_timeout=30,
            finish_timeout=FINISH_TIMEOUT_S - 3,  # bounds W&B's own wait at interpreter exit too
        )
        wandb.setup(settings=settings)  # without it, W&B's login would print a line
        return wandb.init(**self._init, settings=settings)


class _TensorBoardThread(_View):
    """Writes TensorBoard events. Before it begins, a resume may set `purge_step`."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        super().__init__("TensorBoard", "", warn)
        self.purge_step: int | None = None  # events of earlier launches from this step on are hidden
        self._folder = folder

    def run(self) -> None:
        writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(self._folder), purge_step=self.purge_step)
            while (item := self._next()) is not None:
                step, metrics = item
                for name, value in metrics.items():
                    writer.add_scalar(name, value, step)
                writer.flush()
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")
        with contextlib.suppress(Exception):
            writer.close()
