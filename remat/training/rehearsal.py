"""The first save and export of a launch, made after its first step, read back and removed: no surprise at hour 20."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from remat.config.options import ConfigError
from remat.config.units import format_size
from remat.machine import distributed
from remat.planning.launch_plan import rehearses
from remat.saving import export, manifest, read_back, save
from remat.saving.manifest import SaveError
from remat.training import out_of_memory, saves
from remat.training.run import Parts

if TYPE_CHECKING:
    from remat.training.loop import Progress

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
        state = saves.client_state(parts, progress)
        saved = save.save(parts.engine, folder, step=step, client_state=state, keep=1)
    parts.watchdog.enter("export", step)
    with out_of_memory.named("export", parts.plan):
        exported = export.export(
            parts.engine, folder / "export", tokenizer=parts.tokenizer, max_shard_size=size
        )
    parts.watchdog.enter("load", step)
    found = save.find(folder, lambda: parts.watchdog.enter("load", step))  # reads and hashes every file
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
