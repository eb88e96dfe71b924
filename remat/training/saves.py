"""The saves of a run: at once or in the background, what a failure means, and how long training waited for them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from remat.config.choices import SaveFailure
from remat.config.units import format_size
from remat.machine import distributed
from remat.saving import save as saving
from remat.saving.manifest import SaveError
from remat.saving.unfinished import SaveResult, Unfinished
from remat.training import out_of_memory

if TYPE_CHECKING:
    from remat.training.loop import Progress
    from remat.training.run import Parts


@dataclass
class Saves:
    """At most one state is on its way at a time."""

    last: int = -1  # the step of the newest state, complete or on its way
    begun: int = 0  # in the background, by this launch
    on_its_way: Unfinished | None = None

    @property
    def flushed(self) -> int:
        """Of those begun in the background: how many this rank has done its part of."""
        waiting = self.on_its_way is not None and not self.on_its_way.flushed
        return self.begun - waiting


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
                parts.saves.on_its_way = saving.begin(parts.engine, parts.folder, **settings)
                parts.saves.on_its_way.in_background()
                parts.saves.begun += 1
            else:
                result = saving.save(parts.engine, parts.folder, **settings)
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
