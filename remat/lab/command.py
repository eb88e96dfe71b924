"""Run `remat compare`: choose the points, launch those without a result, print the table, write files, draw."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from remat.config.options import ConfigError
from remat.lab import cache_key, charts, experiment, figures, launch, page, schedule, table
from remat.lab import publish as publishing
from remat.lab.cache_key import Place
from remat.lab.experiment import Experiment
from remat.lab.figures import Row
from remat.lab.measure import DOES_NOT_FIT, FINISHED, OUT_OF_MEMORY
from remat.lab.schedule import Outcome
from remat.machine.owner_lock import OwnerLock
from remat.report import run_dir

EXIT_NOTHING_RAN, EXIT_INTERRUPTED = 1, 130
ANSWERS = {FINISHED, OUT_OF_MEMORY, DOES_NOT_FIT}


@dataclass(frozen=True)
class Options:
    """The options of the command line. With 0 or "" the experiment's own value holds."""

    repeats: int = 0
    ranks: int = 0
    baseline: str = ""
    fresh: bool = False
    as_json: bool = False
    out: Path = Path("outputs/lab")
    publish: Path | None = None


def run(args: Sequence[str], options: Options) -> int:
    """Compare, and return the exit code: 0 when any point has a result, 1 when all failed, 130 when stopped.

    Running out of memory is a result. Before anything is launched, raises ConfigError for arguments that cannot be
    compared.
    """
    place = cache_key.here(options.ranks or 1)
    chosen = choose(args, options, place.device)
    place = cache_key.here(chosen.ranks)
    folder = (options.out / chosen.name).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    on_stderr = Console(stderr=True)
    with _owned(folder):
        outcome = schedule.run(
            chosen, folder, place, lambda total: schedule.on_terminal(total, on_stderr), fresh=options.fresh
        )
    if outcome.stopped:
        print("\nstopped; what is finished is kept: the same command goes on from there", file=sys.stderr)
        if not any(result.ran for result in outcome.results):
            return EXIT_INTERRUPTED
    rows = figures.rows(chosen, outcome.results)
    paths = write(folder, chosen, outcome, rows, place, options.publish)
    if options.as_json:
        print(paths[0].read_text(), end="")
    else:
        tell(chosen, outcome, rows, paths)
    if outcome.stopped:
        return EXIT_INTERRUPTED
    return 0 if any(row.status in ANSWERS for row in rows) else EXIT_NOTHING_RAN


@contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """Own the folder of an experiment: a launch removes what an earlier one left there. Raises ConfigError."""
    lock = OwnerLock(folder / run_dir.OWNER)
    if holder := lock.take(lambda text: print(text, file=sys.stderr, flush=True)):
        raise ConfigError(
            f"{folder} belongs to {holder.in_words()}: wait for the end of that comparison, or choose another --out"
        )
    try:
        yield
    finally:
        lock.release()


def choose(args: Sequence[str], options: Options, device: str) -> Experiment:
    """Return the experiment that the arguments ask for. Raises ConfigError."""
    found = experiment.choose(args, device, options.baseline)
    return replace(found, repeats=options.repeats or found.repeats, ranks=options.ranks or found.ranks)


def write(
    folder: Path, chosen: Experiment, outcome: Outcome, rows: Sequence[Row], place: Place, publish: Path | None
) -> list[Path]:
    """Write results.json first, then results.csv, the pictures and the page; return their paths."""
    content = figures.as_json(chosen, outcome.results, rows, place)
    paths = [folder / "results.json", folder / "results.csv"]
    run_dir.write_json(paths[0], content)
    paths[1].write_text(figures.as_csv(outcome.results))
    drawn = charts.draw(chosen, rows)
    for name, picture in drawn.items():
        paths.append(folder / f"{name}.png")
        paths[-1].write_bytes(picture.light)
    paths.append(folder / "index.html")
    paths[-1].write_text(page.render(content, chosen, rows, list(drawn.values())), encoding="utf-8")
    if publish is not None:
        paths += publishing.add(publish, content)
    return paths


def tell(chosen: Experiment, outcome: Outcome, rows: Sequence[Row], paths: Sequence[Path]) -> None:
    """Print the table, how many results are new, and where the files are."""
    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    table.show(chosen, rows, console)
    known = sum(result.ran for result in outcome.results) - outcome.launched
    if known and not outcome.launched:
        console.print(f"nothing was launched: all {known} results are from before (--fresh runs them again)")
    elif known:
        console.print(f"{outcome.launched} launched now, {known} from before (--fresh runs them again)")
    for path in paths:
        console.print(str(launch.from_here(path)), soft_wrap=True)
