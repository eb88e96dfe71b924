"""Print what a person sees during a run: a header, one line per logged step, a bar with the time left, a summary.

On a terminal the bar stays at the bottom and lines scroll above it. A file or a CI log gets plain lines without
control characters. Only rank 0 prints.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

import rich.console
from rich import box
from rich.panel import Panel
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from remat.config.metrics import (
    GPU_ALLOCATED_PEAK_GIB,
    GPU_RESERVED_PEAK_GIB,
    GRAD_NORM,
    HFU,
    HOST_PINNED_GIB,
    HOST_RSS_GIB,
    HOST_RSS_PEAK_GIB,
    LEARNING_RATE,
    LOSS_EVAL,
    LOSS_TRAIN,
    MFU,
    STEP_S,
    TOKENS_PER_S,
    lowest,
    phase_s,
    share_of,
)
from remat.config.redact import redact_text

PLAIN_WIDTH = 80
PANEL_WIDTH = 96
WIDE = 104  # terminal columns; from this width on, optional figures are shown too
HEADING_EVERY = 20  # lines between headings of the step table
PHASES = {"data": "data", "forward": "fwd", "backward": "bwd", "optimizer": "opt"}
NOISY_MODULES = r"(torch|deepspeed|transformers|datasets|huggingface_hub|accelerate|peft)(\.|$)"


class Console:
    """The terminal of rank 0; on other ranks (`is_main=False`) every method does nothing.

    Call `close` in every case, so that the bar leaves the terminal intact.
    """

    def __init__(self, is_main: bool, *, file: TextIO | None = None) -> None:
        self._file = file or sys.stdout
        self._is_main = is_main
        live = self._file.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
        self._rich = rich.console.Console(file=self._file, highlight=False) if live else None
        self._progress: Progress | None = None
        self._lines = 0

    def header(self, title: str, rows: Mapping[str, str]) -> None:
        """Print labels and values about the run, in the order given."""
        self._box(title, rows, style="cyan")

    def line(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Print one logged step from its row in `metrics.jsonl`. Absent figures are left out."""
        if not self._is_main:
            return
        left_s = (total - step) * metrics.get(STEP_S, math.nan)
        width = self._rich.width if self._rich else PLAIN_WIDTH
        cells = _cells(step, total, metrics, left_s=None if self._rich else left_s, width=width)
        gap = "  " if sum(cell.width + 2 for cell in cells) <= width else " "
        if self._lines % HEADING_EVERY == 0:
            self._print(Text(gap.join(cell.heading.rjust(cell.width) for cell in cells), style="dim"))
        self._lines += 1
        self._print(Text(gap).join(Text(cell.text.rjust(cell.width), style=cell.style) for cell in cells))
        if self._progress:
            self._progress.update(self._progress.task_ids[0], left_s=left_s, left_at=time.monotonic())

    def progress(self, step: int, total: int, doing: str = "training") -> None:
        """Advance the bar (terminal only). Call it every step and when evaluation or saving begins."""
        if not self._is_main or not self._rich:
            return
        if self._progress is None:
            self._progress = _bar(self._rich)
            self._progress.add_task(doing, total=total, completed=step, left_s=math.nan, left_at=0.0)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=step, total=total, description=doing)

    def eval_line(self, step: int, loss: float, seconds: float) -> None:
        """Print the result of an evaluation; the loss is in nats per token."""
        text = f"eval at step {step}: loss {loss:.4f}, {say_perplexity(loss)} in {_short(seconds)} s"
        self._say(text, style="bold magenta")

    def note(self, text: str) -> None:
        self._say(text, style="")

    def warning(self, text: str) -> None:
        self._say(f"warning: {text}", style="yellow")

    def final_table(self, title: str, rows: Mapping[str, str]) -> None:
        """Remove the bar and print the summary at the end of a run."""
        self.close()
        self._box(title, rows, style="green")

    def close(self) -> None:
        """Remove the bar. May be called more than once."""
        if self._progress:
            self._progress.stop()
            self._progress = None

    def _say(self, text: str, style: str) -> None:
        if self._is_main:
            self._print(Text(redact_text(text), style=style))

    def _print(self, text: Text) -> None:
        if self._rich:
            self._rich.print(text)  # rich wraps between words
        else:
            print(text.plain.rstrip(), file=self._file, flush=True)

    def _box(self, title: str, rows: Mapping[str, str], style: str) -> None:
        if not self._is_main:
            return
        rows = {label: redact_text(value) for label, value in rows.items()}
        if self._rich:
            self._rich.print(_panel(title, rows, style, self._rich.width))
            return
        label_width = max(map(len, rows), default=0)
        lines = [f"  {label:<{label_width}}  {value}" for label, value in rows.items()]
        print("\n".join([title, *lines]), file=self._file, flush=True)


def final_rows(
    summary: Mapping[str, float], peaks: Mapping[str, float], files: Mapping[str, str]
) -> dict[str, str]:
    """Return rows for `final_table`: speed, the parts of a step, memory peaks of the run, the mixture and files.

    `summary` comes from `Window.summary()`. `peaks` has the maximum of each memory metric and the last value of others.
    """
    rows: dict[str, str] = {}
    if LOSS_EVAL in peaks:
        rows["held-out loss"] = f"{_loss(peaks[LOSS_EVAL])} (the last evaluation)"
    if TOKENS_PER_S in summary:
        rows["tokens/s"] = f"{summary[TOKENS_PER_S]:,.0f}"
        if MFU in summary:
            rows["tokens/s"] += f"  (MFU {summary[MFU]:.1%}"
            rows["tokens/s"] += f", HFU {summary[HFU]:.1%})" if HFU in summary else ")"
    if STEP_S in summary:
        split = ", ".join(f"{name} {part:.0%}" for name, part in _split(summary).items())
        rows["step time"] = f"{_short(summary[STEP_S])} s  ({split})"
    for label, name in (
        ("peak GPU", GPU_ALLOCATED_PEAK_GIB),
        ("reserved GPU", GPU_RESERVED_PEAK_GIB),
        ("peak host", HOST_RSS_PEAK_GIB),
        ("pinned host", HOST_PINNED_GIB),
    ):
        if name in peaks:
            low = peaks.get(lowest(name), peaks[name])
            spread = f"  ({low:.2f} on the lowest rank)" if f"{low:.2f}" != f"{peaks[name]:.2f}" else ""
            rows[label] = f"{peaks[name]:.2f} GiB per rank{spread}"
    start = share_of("")
    shares = [
        f"{name.removeprefix(start)} {part:.1%}" for name, part in peaks.items() if name.startswith(start)
    ]
    if shares:
        rows["mixture"] = f"{', '.join(shares)} of the tokens seen"
    return rows | dict(files)


def quiet_libraries(debug: bool, is_main: bool = True) -> None:
    """Silence what libraries print on every normal start, unless `debug`. Imports none of them.

    Call this before importing them. Errors are always printed. Progress bars stay on rank 0 in a terminal.
    """
    if debug:
        return
    for category in (FutureWarning, DeprecationWarning, UserWarning):
        warnings.filterwarnings("ignore", category=category, module=NOISY_MODULES)
    for name in ("compilers", "distutils", "py.warnings", "torch.distributed", "filelock", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # A filter, because DeepSpeed sets its logger's level and warns while it is imported.
    logger = logging.getLogger("DeepSpeed")
    if _errors_only not in logger.filters:
        logger.addFilter(_errors_only)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else each closed store or socket prints 30 lines
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DATASETS_VERBOSITY", "error")
    for name in ("transformers", "datasets"):
        if name in sys.modules:
            logging.getLogger(name).setLevel(logging.ERROR)
    if not (is_main and sys.stderr.isatty()):
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def _errors_only(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


@dataclass(frozen=True)
class _Cell:
    heading: str
    text: str
    width: int
    style: str = ""


def _cells(
    step: int, total: int, metrics: Mapping[str, float], *, left_s: float | None, width: int
) -> list[_Cell]:
    """Return the cells of one row. The total number of steps is left out where it does not fit `width` columns."""
    loss, norm = metrics.get(LOSS_TRAIN, math.nan), metrics.get(GRAD_NORM, math.nan)
    digits = len(str(total))
    cells = [
        _Cell("step", f"{step}/{total}", max(4, 2 * digits + 1), "cyan"),
        _Cell("loss", _loss(loss), 7, "bold" if math.isfinite(loss) else "bold red"),
        _Cell("lr", _exponent(metrics.get(LEARNING_RATE, math.nan)), 6),
        _Cell("grad", _short(norm), 6, "" if math.isfinite(norm) else "red"),
        _Cell("tok/s", _count(metrics.get(TOKENS_PER_S, math.nan)), 6, "green"),
        _Cell("s/step", _short(metrics.get(STEP_S, math.nan)), 6),
        *(_Cell(name, f"{100 * part:.0f}%", 4, "dim") for name, part in _split(metrics).items()),
    ]
    memory = [
        _Cell(heading, f"{metrics[name]:.{2 if metrics[name] < 100 else 1}f}", 7)
        for heading, name in (("GPU GiB", GPU_ALLOCATED_PEAK_GIB), ("RSS GiB", HOST_RSS_GIB))
        if name in metrics
    ]
    if width >= WIDE:
        cells += memory
        if MFU in metrics:
            cells.append(_Cell("MFU", f"{100 * metrics[MFU]:.1f}%", 5))
    else:
        cells += memory[:1]
    if left_s is not None:
        cells.append(_Cell("left", _duration(left_s), 7))
    if sum(cell.width + 1 for cell in cells) > width:
        cells[0] = _Cell("step", str(step), max(4, digits), "cyan")
    return cells


def _split(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return each phase's share of the step.

    Maxima over ranks can sum to more than the step; the shares are then scaled to sum to 1.
    """
    seconds = {short: metrics[phase_s(name)] for name, short in PHASES.items() if phase_s(name) in metrics}
    whole = max(metrics.get(STEP_S, 0.0), sum(seconds.values()))
    return {short: value / whole for short, value in seconds.items()} if whole > 0 else {}


def say_perplexity(loss: float) -> str:
    """Say the perplexity of a loss in nats per token: `perplexity 20.09`."""
    return f"perplexity {math.exp(loss):.4g}" if loss < 700 else "perplexity inf"


def _loss(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.4g}"


def _exponent(value: float) -> str:
    """Format like 3.0e-4, shorter than Python's 3.0e-04."""
    if not math.isfinite(value) or value == 0:
        return "-" if math.isnan(value) else f"{value:g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _short(value: float) -> str:
    """Format with three significant digits in at most six columns."""
    if math.isnan(value):
        return "-"
    if abs(value) >= 1e5 or 0 < abs(value) < 1e-3:
        return _exponent(value)
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:.{min(4, max(0, 3 - whole))}f}" if abs(value) >= 0.1 else f"{value:.4f}"


def _count(value: float) -> str:
    if math.isnan(value):
        return "-"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.{1 if value >= 100 * size else 2}f}{unit}"
    return f"{value:.0f}"


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-"
    minutes, s = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours // 24}d{hours % 24:02d}h"
    return f"{hours}:{minutes:02d}:{s:02d}"


class _TimeLeft(ProgressColumn):
    """A column with the time left: steps left times the mean step of the last row.

    It counts down between rows. rich's own estimate would jump.
    """

    def render(self, task: Task) -> Text:
        left = task.fields["left_s"] - (time.monotonic() - task.fields["left_at"])
        return Text(f"{_duration(left)} left", style="cyan")


def _bar(console: rich.console.Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", style="bold"),
        BarColumn(bar_width=None),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.percentage:.0f}%"),
        TimeElapsedColumn(),
        _TimeLeft(),
        console=console,
        expand=True,
        refresh_per_second=4,
        transient=True,
    )


def _panel(title: str, rows: Mapping[str, str], style: str, width: int) -> Panel:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in rows.items():
        grid.add_row(Text(label), Text(value))
    heading = Text(f" {title} ", style=f"bold {style}")
    return Panel(
        grid,
        title=heading,
        title_align="left",
        border_style=style,
        box=box.ROUNDED,
        padding=(0, 1),
        width=min(width, PANEL_WIDTH),
    )
