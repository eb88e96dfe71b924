"""Decide when a run saves, save in the background or not, handle failures, and record how long training waited.

A large run saves and exports once after its first step, reads both back and removes them. So a broken save
shows at once and not after hours.

With save.best the model of the lowest held-out loss is exported. The lowest loss and the evaluations since then are
part of `Progress`, so a resumed run goes on counting.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remat.config.metrics import LOSS_EVAL, SAVE_S, SAVE_STALL_S, TRIAL_SAVE_S
from remat.config.options import ConfigError, OnOutOfMemory, PeftMethod, RunConfig, SaveFailure
from remat.config.units import format_size
from remat.machine import distributed
from remat.model import hf_model
from remat.planning.launch_plan import makes_trial_save
from remat.report import run_dir
from remat.saving import load, manifest, save
from remat.saving.exports import export, merge, read_back
from remat.saving.exports.export import ExportResult, Form
from remat.saving.manifest import SaveError
from remat.saving.save import SaveResult
from remat.training import out_of_memory
from remat.training.run import Progress, Run, RunState


def save_state(run: Run, progress: Progress, *, must: bool) -> None:
    """Save the training state; step times do not include it. A pending background save is finished first. Collective.

    With save.in_background only the first part is done here, unless the state `must` be saved. Raises SaveError
    on a failure if it must be saved or save.on_error says so.
    """
    cfg, step = run.cfg.save, progress.step
    wait_for_save(run, step)
    run.console.progress(step, run.steps, doing="saving")
    run.watchdog.enter("save", step)
    result = None
    with run.window.excluded(), out_of_memory.named("save", run.plan):
        settings: dict[str, Any] = {
            "step": step,
            "client_state": collect_state(run, progress).record(),
            "keep": cfg.keep,
        }
        try:
            if cfg.in_background and not must:
                run.saves.pending = save.begin(run.engine, run.folder, **settings)
                run.saves.pending.in_background()
                run.saves.begun += 1
            else:
                result = save.save(run.engine, run.folder, **settings)
        except SaveError as error:
            _failed(run, error, may_fail=cfg.on_error is not SaveFailure.stop and not must)
            return
    run.saves.last = step
    run.take_memory_peaks()
    if result is not None:
        _tell(run, step, result)


def write_model(run: Run, folder: Path, *, merged: bool = False) -> ExportResult:
    """Export the model, or its adapters, or with `merged` the base with the adapters merged into it. Collective."""
    from remat.report import model_card  # imports matplotlib, which takes each rank a second

    adapter = run.cfg.peft.method is not PeftMethod.none and not merged
    write = merge.export_merged if merged else export.export
    form = Form(
        run.cfg.save.max_shard_size,
        readme=lambda: model_card.compose(run.folder, run.record_folder, adapter=adapter),
    )
    return write(run.engine, folder, form, tokenizer=run.tokenizer)


def is_due(cfg: RunConfig, step: int, end: int) -> bool:
    """Return whether the state after `step` is saved; training ends at `end`.

    A run that may be started again with less memory saves its first step too, so that it loses little.
    """
    first = cfg.on_out_of_memory is OnOutOfMemory.retreat and step == 1
    last = step == end and (cfg.save.at_end or cfg.train.stop_at > 0)
    return first or last or (cfg.save.every > 0 and step % cfg.save.every == 0)


def complete_save(run: Run, step: int) -> None:
    """Complete the pending save after step `step`, once all ranks have agreed that they flushed it. Collective."""
    if run.saves.pending is not None and run.stop.flushed >= run.saves.begun:
        wait_for_save(run, step)


def wait_for_save(run: Run, step: int | None = None, *, may_fail: bool = False) -> None:
    """Finish the pending background save on all ranks. Raises SaveError unless it `may_fail`.

    `step` is the step that training is at; None: the step of the pending state.
    """
    unfinished = run.saves.pending
    if unfinished is None:
        return
    run.saves.pending = None
    run.watchdog.enter("save", unfinished.step)
    with run.window.excluded():
        try:
            result = unfinished.complete()
        except SaveError as error:
            run.saves.last = -1
            _failed(run, error, may_fail=may_fail or run.cfg.save.on_error is not SaveFailure.stop)
            return
    _tell(run, unfinished.step if step is None else step, result)


def collect_state(run: Run, progress: Progress) -> RunState:
    """Return what is saved of a run beside the engine's tensors. Collective."""
    return RunState(progress, run.losses.state(), run.batches.state(), run.splits.key, run.tracker.wandb_run_id)


def _failed(run: Run, error: SaveError, *, may_fail: bool) -> None:
    if not may_fail:
        raise error
    goes_on = run.cfg.save.on_error is not SaveFailure.stop and run.stop.reason is None
    run.console.warning(f"{error}{'. Training goes on (save.on_error=continue)' * goes_on}")


def _tell(run: Run, step: int, result: SaveResult) -> None:
    """Log a row of the record, at step `step`, and print a line on the terminal. One small collective."""
    times = {SAVE_S: result.seconds, SAVE_STALL_S: result.stall_s}
    run.tracker.log(step, distributed.max_min(times, run.world.device))
    waited = f", {result.stall_s:.1f} s of them waited for" if result.stall_s < result.seconds else ""
    run.console.note(f"saved {result.path} ({format_size(result.bytes)}, {result.seconds:.1f} s{waited})")


FOLDER = f"{manifest.TMP}rehearsal"  # in the run directory, outside the folder searched for saved states


def prepare(run: Run, step: int) -> None:
    """Prepare for the first step: note the state that a run was resumed from at `step`, and schedule the trial save.

    The trial save that a killed launch left is removed.
    """
    run.saves.last = step if run.resumed else -1
    run.saves.trial_due = makes_trial_save(run.cfg, run.strategy)
    _clean(run)


def make_trial_save(run: Run, progress: Progress) -> None:
    """Save, export, read both back, and remove them. Neither step times nor training are affected. Collective.

    Raises SaveError on every rank when saving, exporting or reading back fails.
    """
    run.saves.trial_due = False
    started = time.monotonic()
    run.console.progress(progress.step, run.steps, doing="rehearsing the save and the export")
    with run.window.excluded():
        try:
            sizes = _save_and_read_back(run, progress)
        except (SaveError, ConfigError) as error:
            raise SaveError(
                f"rehearsal after step {progress.step}: {error}. The run would have lost its work to this later: mend "
                "it and start again, or go on without the rehearsal with save.rehearse=false"
            ) from error
        finally:
            _clean(run)
    run.take_memory_peaks()
    seconds = time.monotonic() - started
    run.tracker.log(progress.step, distributed.max_min({TRIAL_SAVE_S: seconds}, run.world.device))
    run.console.note(f"rehearsed: {sizes}, read back and the same ({seconds:.1f} s)")


def _clean(run: Run) -> None:
    if run.world.is_main:
        manifest.remove(run.folder / FOLDER)


def _save_and_read_back(run: Run, progress: Progress) -> str:
    """Save and export, read both back, and return in words what was saved and exported."""
    folder, size, step = run.folder / FOLDER, run.cfg.save.max_shard_size, progress.step
    run.watchdog.enter("save", step)
    with out_of_memory.named("save", run.plan):
        state = collect_state(run, progress).record()
        saved = save.save(run.engine, folder, step=step, client_state=state, keep=1)
    run.watchdog.enter("export", step)
    with out_of_memory.named("export", run.plan):
        exported = write_model(run, folder / "export")
    run.watchdog.enter("load", step)
    found = load.find_newest(folder, lambda done, total: run.watchdog.enter("load", step))  # hashes every file
    if found.state is None or found.notes:
        raise SaveError(f"the saved state is not whole: {'; '.join(found.notes)}")
    run.watchdog.enter("load", step)
    problem, error = None, None
    try:
        problem = read_back.verify_export(
            hf_model.model_of(run.engine.module),
            exported.path,
            saved.path,
            run.folder,
            max_shard_size=size,
            part=run.world.rank,
            parts=run.world.size,
        )
    except Exception as caught:
        error = caught
    manifest.raise_together(
        SaveError(problem) if problem else error, "reading back what was saved and exported"
    )
    return f"{format_size(saved.bytes)} saved, {format_size(exported.bytes)} exported"


BEST, BEST_RECORD = "best", "best.json"  # in the run directory: the exported model, and its step and loss


def count_evaluation(run: Run, progress: Progress, metrics: Mapping[str, float]) -> None:
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
        _export_best(run, progress)


def is_over(run: Run, progress: Progress) -> bool:
    """Return whether `train.early_stopping_evals` evaluations in a row found no lower loss. The same on every rank."""
    patience = run.cfg.train.early_stopping_evals
    return 0 < patience <= progress.evals_since_best


def explain_end(run: Run, progress: Progress) -> str:
    """Say why training ends early and where the best model is."""
    where = f"{run.folder / BEST}" if run.cfg.save.best else "not kept (save.best=true keeps it)"
    return (
        f"training ends at step {progress.step}: no lower held-out loss in {progress.evals_since_best} evaluations "
        f"(train.early_stopping_evals); the lowest was {progress.best_loss:.4g} at step {progress.best_step}, "
        f"its model is {where}"
    )


def _export_best(run: Run, progress: Progress) -> None:
    run.console.progress(progress.step, run.steps, doing="exporting the best model")
    run.watchdog.enter("export", progress.step)
    with run.window.excluded(), out_of_memory.named("export", run.plan):
        result = write_model(run, run.folder / BEST)
    if run.world.is_main:
        run_dir.write_json(run.folder / BEST_RECORD, {"step": progress.step, LOSS_EVAL: progress.best_loss})
    run.take_memory_peaks()
    run.console.note(
        f"lowest held-out loss so far: exported {result.path} ({format_size(result.bytes)}, {result.seconds:.1f} s)"
    )
