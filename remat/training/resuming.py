"""Whether a run may go on from a saved state: found, checked against the launch and its data, before a model exists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from remat.config.options import ConfigError, RunConfig
from remat.data.batches import GlobalBatches, check_same_order
from remat.data.cache import Splits
from remat.machine.distributed import World
from remat.planning.preflight import DoesNotFit
from remat.planning.strategy import Strategy
from remat.report.console import Console
from remat.saving import disk_space, reshard, save, shared_folder
from remat.saving.manifest import FILE, SAVED, STEP, SavedState


def point(
    cfg: RunConfig,
    strategy: Strategy,
    world: World,
    console: Console,
    own: Callable[[Path], None] = lambda run_dir: None,
    progress: Callable[[], object] = lambda: None,
) -> save.ResumePoint | None:
    """The saved state to go on from, if one was asked for, checked against this launch. Collective.

    `own` takes the run directory for this launch before states are looked for; `progress` is called while the files
    of a state are read. Raises ConfigError when it cannot be loaded, DoesNotFit when the disk has no room to cut it
    for other ranks.
    """
    _check_shared(cfg)
    found = save.resolve_resume(
        cfg.resume, output_dir=cfg.output_dir, name=cfg.name, run_id=cfg.run_id, own=own, progress=progress
    )
    if found is not None:
        also = reshard.refusals(found.state, cfg.reshard, world_size=world.size, rendered=strategy.ds)
        save.check_compatible(
            found.state, zero_stage=strategy.zero_stage, precision=cfg.train.precision, also=also
        )
        save.refuse_code(found.state)
        for note in found.notes:
            console.warning(note)
        if found.state.info.world_size != world.size:
            _check_reshard(found.state, world, console)
    return found


def _check_shared(cfg: RunConfig) -> None:
    """Every node sees the states that rank 0 sees: else half of a state would count as damaged."""
    if cfg.resume == "none":
        return
    state = f"{STEP}*/{FILE}"
    if cfg.resume == "auto":
        runs = Path(cfg.output_dir).expanduser() / cfg.name
        patterns = [f"{cfg.run_id or '*'}/{SAVED}/{state}"]
        shared_folder.check_newest(runs, patterns, f"resume=auto output_dir={cfg.output_dir}")
    else:
        patterns = [FILE, state, f"{SAVED}/{state}"]
        shared_folder.check_newest(Path(cfg.resume).expanduser(), patterns, f"resume={cfg.resume}")


def check_same_data(saved: dict[str, Any], splits: Splits, batches: GlobalBatches, resume: str) -> None:
    """A data position means something only over the same blocks in the same order."""
    now = Path(splits.report["folder"]).name
    found = check_same_order(saved["data"], batches)
    if saved["data_key"] != now:
        found.append(
            f"the data, tokenizer or train.seq_len changed (now {now[:12]}, was {saved['data_key'][:12]})"
        )
    if found:
        raise ConfigError(
            f"resume={resume}: the saved data position means nothing now: {'; '.join(found)}. Or start a new run from "
            "the exported model: model=hf model.path=RUN_DIR/export"
        )


def _check_reshard(state: SavedState, world: World, console: Console) -> None:
    """Refuse a disk without room for the copy that is cut for other ranks; else say that it will be made."""
    needed, free = reshard.room(state, world.size)
    place, ranks = state.path.parent, f"{state.info.world_size} ranks for {world.size}"
    if needed > free:
        raise DoesNotFit(
            f"resume: cutting {state.path.name} of {ranks} needs {disk_space.words(needed)} in {place} while it is "
            f"loaded, and {disk_space.words(free)} are free: free some, or start {state.info.world_size} ranks"
        )
    console.note(
        f"cutting {state.path.name} of {ranks} ({disk_space.words(needed)} in {place} while it is loaded); random "
        "states start anew and sums are taken in another order: losses agree closely, not bit for bit"
    )
