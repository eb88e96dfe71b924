"""Save during a run: when, in the background or not, what a failure means, and how long training waited.

A large run saves and exports once after its first step, reads both back and removes them: no surprise at hour 20.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from remat.config.options import ConfigError, SaveFailure
from remat.config.units import format_size
from remat.machine import distributed
from remat.planning.launch_plan import rehearses
from remat.saving import export, load, manifest, read_back, save
from remat.saving.manifest import SaveError
from remat.saving.save import SaveResult
from remat.training import out_of_memory
from remat.training.run import Parts

if TYPE_CHECKING:
    from remat.training.run import Parts


def save_state(parts: Parts, progress: Progress, *, must: bool) -> None:
    """Save the training state, out of the step time; the one on its way is completed first.

    With save.in_background only its first part, unless it `must` be saved. A failure ends the run (SaveError) then, or
    if save.on_error says so.
    """
    cfg, step = parts.cfg.save, progress.step
    wait_for_save(parts, step)
    parts.console.progress(step, parts.cfg.train.steps, doing="saving")
    parts.watchdog.enter("save", step)
    result = None
    with parts.window.excluded(), out_of_memory.named("save", parts.plan):
        settings: dict[str, Any] = {
            "step": step,
            "client_state": client_state(parts, progress),
            "keep": cfg.keep,
        }
        try:
            if cfg.in_background and not must:
                parts.saves.on_its_way = save.begin(parts.engine, parts.folder, **settings)
                parts.saves.on_its_way.in_background()
                parts.saves.begun += 1
            else:
                result = save.save(parts.engine, parts.folder, **settings)
        except SaveError as error:
            _failed(parts, error, may_fail=cfg.on_error is not SaveFailure.stop and not must)
            return
    parts.saves.last = step
    parts.take_memory_peaks()
    if result is not None:
        _tell(parts, step, result)


def complete_save(parts: Parts, step: int) -> None:
    """After step `step`: complete the state on its way once all ranks have agreed that they flushed it."""
    if parts.saves.on_its_way is not None and parts.stop.flushed >= parts.saves.begun:
        wait_for_save(parts, step)


def wait_for_save(parts: Parts, step: int | None = None, *, may_fail: bool = False) -> None:
    """Complete the state on its way, if any, waiting for all ranks; `step` is where training is (None: at the state).

    A failure is as in `save`; or it `may_fail`.
    """
    unfinished = parts.saves.on_its_way
    if unfinished is None:
        return
    parts.saves.on_its_way = None
    parts.watchdog.enter("save", unfinished.step)
    with parts.window.excluded():
        try:
            result = unfinished.complete()
        except SaveError as error:
            parts.saves.last = -1
            _failed(parts, error, may_fail=may_fail or parts.cfg.save.on_error is not SaveFailure.stop)
            return
    _tell(parts, unfinished.step if step is None else step, result)


def client_state(parts: Parts, progress: Progress) -> dict[str, Any]:
    """What is kept of a run beside the engine's state; plain JSON data. Collective."""
    return {
        **asdict(progress),
        "losses": parts.losses.state(),
        "data": parts.batches.state(),
        "data_key": parts.data_key,
        "wandb_run_id": parts.tracker.wandb_run_id,
    }


def _failed(parts: Parts, error: SaveError, *, may_fail: bool) -> None:
    if not may_fail:
        raise error
    goes_on = (
        ". Training goes on (save.on_error=continue)" if parts.cfg.save.on_error is not SaveFailure.stop else ""
    )
    parts.console.warning(f"{error}{goes_on}")


def _tell(parts: Parts, step: int, result: SaveResult) -> None:
    """A row of the record, of step `step`, and a line on the terminal. One small collective."""
    times = {"time/save_s": result.seconds, "time/save_stall_s": result.stall_s}
    parts.tracker.log(step, distributed.max_min(times, parts.world.device))
    waited = f", {result.stall_s:.1f} s of them waited for" if result.stall_s < result.seconds else ""
    parts.console.note(f"saved {result.path} ({format_size(result.bytes)}, {result.seconds:.1f} s{waited})")


if TYPE_CHECKING:
    from remat.training.run import Progress
FOLDER = f"{manifest.TMP}rehearsal"  # in the run directory, where no saved state is looked for


def prepare(parts: Parts) -> None:
    """Whether this launch rehearses. What one that was killed has left is removed."""
    parts.to_rehearse = rehearses(parts.cfg, parts.strategy)
    _clean(parts)


def rehearse(parts: Parts, progress: Progress) -> None:
    """Save, export, read both back, remove them: out of the step time, and without a trace in training.

    Raises SaveError on every rank with what did not come back.
    """
    parts.to_rehearse = False
    started = time.monotonic()
    parts.console.progress(progress.step, parts.cfg.train.steps, doing="rehearsing the save and the export")
    with parts.window.excluded():
        try:
            sizes = _rehearse(parts, progress)
        except (SaveError, ConfigError) as error:
            raise SaveError(
                f"rehearsal after step {progress.step}: {error}. The run would have lost its work to this later: mend "
                "it and start again, or go on without the rehearsal with save.rehearse=false"
            ) from error
        finally:
            _clean(parts)
    parts.take_memory_peaks()
    seconds = time.monotonic() - started
    parts.tracker.log(progress.step, distributed.max_min({"time/rehearsal_s": seconds}, parts.world.device))
    parts.console.note(f"rehearsed: {sizes}, read back and the same ({seconds:.1f} s)")


def _clean(parts: Parts) -> None:
    if parts.world.is_main:
        manifest.remove(parts.folder / FOLDER)


def _rehearse(parts: Parts, progress: Progress) -> str:
    """What was saved and exported, in words."""
    folder, size, step = parts.folder / FOLDER, parts.cfg.save.max_shard_size, progress.step
    parts.watchdog.enter("save", step)
    with out_of_memory.named("save", parts.plan):
        state = client_state(parts, progress)
        saved = save.save(parts.engine, folder, step=step, client_state=state, keep=1)
    parts.watchdog.enter("export", step)
    with out_of_memory.named("export", parts.plan):
        exported = export.export(
            parts.engine, folder / "export", tokenizer=parts.tokenizer, max_shard_size=size
        )
    parts.watchdog.enter("load", step)
    found = load.find_newest(folder, lambda: parts.watchdog.enter("load", step))  # reads and hashes every file
    if found.state is None or found.notes:
        raise SaveError(f"the saved state is not whole: {'; '.join(found.notes)}")
    parts.watchdog.enter("load", step)
    problem, error = None, None
    try:
        problem = read_back.problem(
            parts.engine.module,
            exported.path,
            saved.path,
            parts.folder,
            max_shard_size=size,
            part=parts.world.rank,
            parts=parts.world.size,
        )
    except Exception as caught:
        error = caught
    manifest.agree(SaveError(problem) if problem else error, "reading back what was saved and exported")
    return f"{format_size(saved.bytes)} saved, {format_size(exported.bytes)} exported"
