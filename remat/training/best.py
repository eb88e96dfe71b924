"""Keep the model of the lowest held-out loss, and end training once that loss has not fallen for long.

The lowest loss and the evaluations since then are part of `Progress`, so a resumed run goes on counting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from remat.config.metrics import LOSS_EVAL
from remat.config.units import format_size
from remat.report import run_dir
from remat.training import out_of_memory, saves
from remat.training.run import Progress, Run

FOLDER, RECORD = "best", "best.json"  # in the run directory: the exported model, and its step and loss


def judge(run: Run, progress: Progress, metrics: Mapping[str, float]) -> None:
    """Count an evaluation; with `save.best` export the model if its loss is the lowest so far. Collective.

    An evaluation before the first step does not count: its model is the one that training began with.
    """
    loss = metrics.get(LOSS_EVAL)
    if loss is None or progress.step == 0:
        return
    if not math.isfinite(loss) or (progress.best_loss is not None and loss >= progress.best_loss):
        progress.evals_since_best += 1
        return
    progress.best_loss, progress.best_step, progress.evals_since_best = loss, progress.step, 0
    if run.cfg.save.best:
        _export(run, progress)


def is_over(run: Run, progress: Progress) -> bool:
    """Return whether `train.early_stopping_evals` evaluations in a row found no lower loss. The same on every rank."""
    patience = run.cfg.train.early_stopping_evals
    return 0 < patience <= progress.evals_since_best


def in_words(run: Run, progress: Progress) -> str:
    """Say why training ends early and where the best model is."""
    where = f"{run.folder / FOLDER}" if run.cfg.save.best else "not kept (save.best=true keeps it)"
    return (
        f"training ends at step {progress.step}: no lower held-out loss in {progress.evals_since_best} evaluations "
        f"(train.early_stopping_evals); the lowest was {progress.best_loss:.4g} at step {progress.best_step}, "
        f"its model is {where}"
    )


def _export(run: Run, progress: Progress) -> None:
    run.console.progress(progress.step, run.steps, doing="exporting the best model")
    run.watchdog.enter("export", progress.step)
    with run.window.excluded(), out_of_memory.named("export", run.plan):
        result = saves.write_model(run, run.folder / FOLDER)
    if run.world.is_main:
        run_dir.write_json(run.folder / RECORD, {"step": progress.step, LOSS_EVAL: progress.best_loss})
    run.take_memory_peaks()
    run.console.note(
        f"lowest held-out loss so far: exported {result.path} ({format_size(result.bytes)}, {result.seconds:.1f} s)"
    )
