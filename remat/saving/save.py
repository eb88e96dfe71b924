"""Save the training state of all ranks, at once or while training goes on.

run_dir/saved/step-000100/ holds DeepSpeed's files (`engine/`), each rank's random states (`rng/`) and
`manifest.json`. It is written as `tmp-step-000100` and renamed when every rank's files are hashed and on disk, so
a state is complete or absent. The folder must be on a filesystem that all nodes share.

Each rank flushes and hashes its own files, and may do so in a thread. What the ranks do together (gather the hashes,
write the manifest, rename) stays in the main thread. So no thread enters a collective, and no state is complete before
every rank has said that its part is on disk.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from remat import __version__
from remat.config import ds_config
from remat.config.options import ConfigError, Precision
from remat.machine import distributed, rng
from remat.model import optimizer
from remat.saving import disk_space, frozen, manifest, shares
from remat.saving.manifest import ENGINE, SAVED, STEP, Manifest, SaveError


@dataclass(frozen=True)
class SaveResult:
    """A state just saved: its folder and the bytes of all ranks' files.

    `seconds` is the time on this rank until it was complete, `stall_s` the part of it in which training waited.
    """

    path: Path
    bytes: int
    seconds: float
    stall_s: float


@dataclass(eq=False)
class PendingSave:
    """A save in progress: the state in folder `tmp`, to become `final`; `info` is its manifest without the files.

    `what` names it in errors. `error` is an error of this rank that the others do not know of yet. `started` is the
    time.monotonic() at which the save began.
    """

    tmp: Path
    final: Path
    info: Manifest
    what: str
    keep: int
    started: float
    error: Exception | None
    _files: dict[str, manifest.FileEntry] | None = None  # this rank's files, once they are on disk
    _thread: threading.Thread | None = None
    _stalled_s: float = 0.0

    @property
    def step(self) -> int:
        return self.info.step

    def in_background(self) -> None:
        """Flush and hash this rank's files in a thread from now on. Raises nothing: `complete` does."""
        self._stalled_s = time.monotonic() - self.started
        thread = threading.Thread(target=self._flush, name="remat-save", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread can start; the other ranks learn of it in `complete`
            self.error = error
        else:
            self._thread = thread

    @property
    def flushed(self) -> bool:
        """Return whether this rank's thread is done, even with an error; `complete` then waits for other ranks only."""
        return self._thread is None or not self._thread.is_alive()

    def complete(self) -> SaveResult:
        """Flush (or wait for the thread), write the manifest, rename, and delete states beyond `keep`. Collective.

        Raises SaveError on every rank when any part failed; the folder is then gone, older states are untouched.
        """
        began = time.monotonic()
        if self._thread is None:
            self._flush()
        else:
            self._thread.join()
        is_main = distributed.place()[0] == 0
        try:
            if self._files is None and self.error is None:
                self.error = SaveError("the thread that flushes and hashes ended without a result")
            manifest.raise_together(self.error, self.what)
            every = {name: entry for part in distributed.gather(self._files) for name, entry in part.items()}
            size = manifest.run_on_main(lambda: self._publish(every), self.what)
        except SaveError:
            if is_main:
                manifest.remove(self.tmp)
            raise
        if is_main:
            _retain(self.final.parent, self.keep)
        now = time.monotonic()
        seconds = now - self.started
        stall_s = seconds if self._thread is None else self._stalled_s + now - began
        return SaveResult(path=self.final, bytes=size, seconds=seconds, stall_s=stall_s)

    def _flush(self) -> None:
        if self.error is not None:
            return
        try:
            rank = distributed.place()[0]
            names = manifest.files_in(self.tmp)
            own = [name for name in names if (self.info.rank_of(name) or 0) == rank]
            self._files = manifest.describe(self.tmp, own)
        except Exception as error:
            self.error = disk_space.find_cause(error, self.tmp)

    def _publish(self, files: dict[str, manifest.FileEntry]) -> int:
        unseen = [name for name in files if not (self.tmp / name).exists()]
        if unseen:
            raise SaveError(
                f"rank 0 does not see {unseen[0]} (and {len(unseen) - 1} more): output_dir must be on a filesystem "
                "that all nodes share"
            )
        earlier = [state.info.sequence for state in manifest.list_states(self.final.parent)[0]]
        info = replace(self.info, sequence=max(earlier, default=0) + 1, files=files)
        manifest.write(self.tmp, info)
        manifest.publish(self.tmp, self.final)
        return info.size_bytes


def _retain(saved: Path, keep: int) -> None:
    """Delete complete states beyond the `keep` newest; incomplete ones do not count and are kept for inspection."""
    complete = [state for state in manifest.list_states(saved)[0] if manifest.is_complete(state.path)]
    for state in complete[keep:]:
        manifest.remove(state.path)


def save(engine: Any, run_dir: Path, *, step: int, client_state: dict[str, Any], keep: int) -> SaveResult:
    """Save the state after `step` optimizer steps; call it on every rank. Keeps the `keep` newest states.

    `client_state` is plain JSON data (data position, counters). Raises SaveError on every rank when there is too
    little room or any rank fails; the unfinished folder is then gone and older states are untouched.
    """
    return begin(engine, run_dir, step=step, client_state=client_state, keep=keep).complete()


def begin(engine: Any, run_dir: Path, *, step: int, client_state: dict[str, Any], keep: int) -> PendingSave:
    """Write all files of a state; they are not yet synced to disk. Training waits for this part of `save` only.

    No other save may begin until this one is complete: a save deletes unfinished states.
    """
    if keep < 1:
        raise ConfigError(f"save.keep={keep} would delete the state just saved: give at least 1")
    if engine.checkpoint_engine.is_decoupled():
        raise ConfigError(
            "deepspeed.overrides.checkpoint.writer: a decoupled writer outlives the hashing; remove it"
        )
    json.dumps(client_state)  # not JSON: fail before anything is written
    started = time.monotonic()
    final = run_dir / SAVED / f"{STEP}{step:06d}"
    tmp = final.with_name(manifest.TMP + final.name)
    what, needed = f"saving {final}", disk_space.needed_bytes(engine)
    free = manifest.run_on_main(lambda: _prepare(tmp, needed), what)
    what += f" ({disk_space.describe_size(needed)} needed, {disk_space.describe_size(free)} free at its start)"
    try:
        manifest.raise_together(_write_engine(engine, tmp), what)
    except SaveError:
        if distributed.place()[0] == 0:
            manifest.remove(tmp)
        raise
    error = _write_rng(engine.module, tmp)
    info = _describe(engine, step, client_state)
    return PendingSave(tmp, final, info, what=what, keep=keep, started=started, error=error)


def _prepare(tmp: Path, needed: int) -> int:
    """Delete what killed saves left, check that there is room, and make an empty folder; return the bytes free."""
    tmp.parent.mkdir(parents=True, exist_ok=True)
    manifest.clean(tmp.parent)
    disk_space.refuse_too_little(tmp.parent, needed)
    (tmp / "rng").mkdir(parents=True)
    return disk_space.free_bytes(tmp)


def _write_engine(engine: Any, tmp: Path) -> Exception | None:
    """Write DeepSpeed's files. Return an error instead of raising it, after the collectives that all ranks run."""
    try:
        engine.save_checkpoint(
            str(tmp), tag=ENGINE, save_latest=False, exclude_frozen_parameters=frozen.present(engine.module)
        )
    except Exception as error:
        # save_checkpoint ends with these two calls on every rank; without this rank the others would wait for ever.
        if hasattr(engine.optimizer, "checkpoint_event_epilogue"):
            engine.optimizer.checkpoint_event_epilogue()
        distributed.barrier()
        return disk_space.find_cause(error, tmp)
    return None


def _write_rng(module: nn.Module, tmp: Path) -> Exception | None:
    """Write this rank's random states. Return an error instead of raising it, for all ranks to raise."""
    try:
        torch.save({"rng": rng.get(), "frozen": frozen.fingerprint(module)}, rng_file(tmp))
    except Exception as error:
        return disk_space.find_cause(error, tmp)
    return None


def _describe(engine: Any, step: int, client_state: dict[str, Any]) -> Manifest:
    """Return the manifest of a state, without its files and sequence: they are added when the save is complete."""
    return Manifest(
        step=step,
        sequence=0,
        world_size=distributed.place()[1],
        zero_stage=int(engine.zero_optimization_stage()),
        precision=str(engine_precision(engine)),
        layout=engine_layout(engine),
        frozen_excluded=frozen.present(engine.module),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=_versions(),
        client_state=client_state,
        files={},
        optimizer=optimizer.kind_of(engine.optimizer),
        states=str(ds_config.optimizer_states(engine.config)),
        tensor_parallel_size=shares.group_size(engine),
        cuts=shares.find_cuts(engine.module),
        pipeline_parallel_size=shares.stage_count(engine),
    )


def engine_precision(engine: Any) -> Precision:
    if engine.bfloat16_enabled():
        return Precision.bf16
    return Precision.fp16 if engine.fp16_enabled() else Precision.fp32


def engine_layout(engine: Any) -> str:
    """Return a digest of the optimizer's groups: DeepSpeed restores flat buffers by position and checks no names.

    The digest covers all stages; with several stages the call is collective.
    """
    if engine.zero_optimization_stage() == 0:
        groups = [[["", list(p.shape)] for p in group["params"]] for group in engine.optimizer.param_groups]
    else:
        shapes = engine._get_zero_param_shapes()
        groups = [[[name, list(shape)] for name, shape in group.items()] for group in shapes]
    every = shares.of_stages(engine, groups)
    return hashlib.sha256(json.dumps(every if len(every) > 1 else groups).encode()).hexdigest()


def rng_file(folder: Path) -> Path:
    return folder / "rng" / f"rank-{distributed.place()[0]:05d}.pt"


def _versions() -> dict[str, str]:
    import deepspeed
    import transformers

    return {
        "remat": __version__,
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "transformers": transformers.__version__,
    }
