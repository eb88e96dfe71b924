"""Launch all points once, then all again, so that drift of the machine affects all. Stored results are reused."""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from remat.config.options import ConfigError
from remat.config.units import MIB
from remat.lab import cache_key, launch
from remat.lab.cache_key import Place
from remat.lab.experiment import Experiment
from remat.lab.launch import Result, Slot
from remat.lab.measure import FINISHED, NOT_LAUNCHED, OUT_OF_MEMORY, REFUSED


@dataclass(frozen=True)
class Outcome:
    """The `results` in launch order. `launched` of them are new; the others were stored earlier."""

    results: list[Result]
    launched: int

    @property
    def stopped(self) -> bool:
        """Return whether Ctrl-C stopped the experiment before every point was launched."""
        return any(result.status == NOT_LAUNCHED for result in self.results)


def asked_keys(experiment: Experiment, place: Place) -> dict[str, str | ConfigError]:
    """Return for each point the cache key of its results, or the error that refuses it.

    Raises ConfigError when every point is refused.
    """
    found: dict[str, str | ConfigError] = {}
    for point in experiment.points:
        try:
            found[point.name] = cache_key.key(point.words, experiment.ranks, place)
        except ConfigError as error:
            found[point.name] = error
    if all(isinstance(answer, ConfigError) for answer in found.values()):
        reasons = dict.fromkeys(str(answer) for answer in found.values())
        raise ConfigError("remat compare: every point is refused\n" + "\n".join(reasons))
    return found


def run(
    experiment: Experiment,
    folder: Path,
    place: Place,
    open_report: Callable[[int], AbstractContextManager[Lines]],
    *,
    fresh: bool = False,
) -> Outcome:
    """Launch every point that has no stored result, or with `fresh` every point. All go once, then all again.

    `open_report` takes the number of launches. Stored are points that finished or ran out of memory. Others are
    launched again: whether a plan fits depends on the memory and disk that are free now.
    """
    asked = asked_keys(experiment, place)
    repeats = range(1, experiment.repeats + 1)
    turns = [Slot(folder, point, repeat) for repeat in repeats for point in experiment.points]
    known: dict[Slot, Result] = {}
    for slot in turns:
        answer = asked[slot.point.name]
        if isinstance(answer, ConfigError):
            known[slot] = Result("", slot.point.name, slot.repeat, REFUSED, " ".join(str(answer).split()))
        elif (
            not fresh
            and (found := launch.stored(slot, answer)) is not None
            and found.status in (FINISHED, OUT_OF_MEMORY)
        ):
            known[slot] = replace(found, point=slot.point.name)
    to_do = [slot for slot in turns if slot not in known]
    done = 0
    with contextlib.suppress(KeyboardInterrupt), open_report(len(to_do)) as progress:
        for slot in to_do:
            key = asked[slot.point.name]
            assert isinstance(key, str)
            progress.begins(done, slot, _left_s(known.values(), to_do[done:]))
            known[slot] = launch.launch(slot, key, experiment.ranks, place)
            done += 1
            progress.ended(done, known[slot], _left_s(known.values(), to_do[done:]) or 0.0)
    return Outcome([known.get(slot) or _not_launched(slot) for slot in turns], done)


def _not_launched(slot: Slot) -> Result:
    return Result("", slot.point.name, slot.repeat, NOT_LAUNCHED, "stopped before its turn or within it")


def _left_s(known: Iterable[Result], to_do: Sequence[Slot]) -> float | None:
    """Return the estimated seconds for `to_do`, from how long known launches took; None before the first launch.

    A point that never ran is assumed to take as long as the others.
    """
    took: dict[str, list[float]] = {}
    for result in known:
        if result.ran:
            took.setdefault(result.point, []).append(result.seconds)
    if not took:
        return None
    usual = statistics.median(value for values in took.values() for value in values)
    return sum(statistics.median(took.get(slot.point.name, [usual])) for slot in to_do)


class Lines:
    """A reporter of progress that prints one line at the end of each launch."""

    def __init__(self, total: int, say: Callable[[str], None]) -> None:
        self._total, self._say = total, say

    def begins(self, done: int, slot: Slot, left_s: float | None) -> None:
        """Take note that a launch begins."""

    def ended(self, done: int, result: Result, left_s: float) -> None:
        """Take note that a launch has ended."""
        left = f", about {clock(left_s)} left" if done < self._total else ""
        self._say(f"[{done}/{self._total}] {in_a_line(result)} ({result.seconds:.0f} s{left})")


class Bar(Lines):
    """A reporter with a bar and the time left, below the lines."""

    def __init__(self, total: int, progress: Progress) -> None:
        super().__init__(total, lambda text: progress.console.print(text, highlight=False))
        self._progress = progress
        self._task = progress.add_task("", total=total, left="", what="")

    def begins(self, done: int, slot: Slot, left_s: float | None) -> None:
        left = "" if left_s is None else f"about {clock(left_s)} left"
        self._progress.update(self._task, completed=done, left=left, what=f"{slot.point.name}, {slot.run_id}")

    def ended(self, done: int, result: Result, left_s: float) -> None:
        super().ended(done, result, left_s)
        self._progress.update(self._task, completed=done, what="")


@contextmanager
def on_terminal(total: int, console: Console) -> Iterator[Lines]:
    """Return a reporter: a bar on a terminal, plain lines elsewhere."""
    if not total or not console.is_terminal:
        yield Lines(total, lambda text: print(text, file=sys.stderr, flush=True))
        return
    columns = (
        BarColumn(24),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.fields[what]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield Bar(total, progress)


def in_a_line(result: Result) -> str:
    """Describe a result: `small, none, r1: 0.83 s per step, peak 812.3 MiB`, or what went wrong."""
    name = f"{result.point}, r{result.repeat}"
    if result.measured is None:
        return f"{name}: {result.status}: {result.words}"
    steps = result.measured.steps.get("step", [])
    timed = f"{statistics.median(steps):.3g} s per step" if steps else "no steady step"
    peak = result.measured.peak_bytes
    return f"{name}: {timed}" + ("" if peak is None else f", peak {peak / MIB:,.1f} MiB")


def clock(seconds: float) -> str:
    """Format seconds as `1:05` or `2:03:00`."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
