"""Save the training state of all ranks, at once or while training goes on.

run_dir/saved/step-000100/ holds DeepSpeed's files (`engine/`), each rank's random states (`rng/`) and
`manifest.json`. It is written as `tmp-step-000100` and renamed when every rank's files are hashed and on disk, so
a state is complete or absent. The folder must be on a filesystem that all nodes share.

Flushing and hashing are each rank's own and may run in a thread. What the ranks do together (gather the hashes, write
the manifest, rename) stays in the main thread: no thread enters a collective, and no state is complete before every
rank has said that its part is on disk.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from remat import __version__
from remat.config.options import ConfigError, Precision
from remat.machine import distributed, rng
from remat.saving import disk_space, frozen, manifest, nvme, reshard, safe_load
from remat.saving.manifest import ENGINE, SAVED, STEP, Manifest, SavedState, SaveError


@dataclass(frozen=True)
class SaveResult:
    """A state just saved: its folder and the bytes of all ranks' files.

    On this rank: the seconds until it was complete, and those of them in which training waited.
    """

    path: Path
    bytes: int
    seconds: float
    stall_s: float


class Unfinished:
    """The state in folder `tmp`, to become `final`; `info` is its manifest without the files.

    `what` names it in errors; `error` is one of this rank that the others do not know yet; `started` is the
    time.monotonic() at which the save began.
    """

    def __init__(
        self,
        tmp: Path,
        final: Path,
        info: Manifest,
        *,
        what: str,
        keep: int,
        started: float,
        error: Exception | None,
    ) -> None:
        self._tmp, self._final, self._info = tmp, final, info
        self._what, self._keep, self._started = what, keep, started
        self._error = error
        self._files: dict[str, manifest.FileEntry] | None = None  # this rank's, once they are on disk
        self._thread: threading.Thread | None = None
        self._stalled_s = 0.0

    @property
    def step(self) -> int:
        return self._info.step

    def in_background(self) -> None:
        """Flush and hash this rank's files in a thread from now on. Raises nothing: `complete` does."""
        self._stalled_s = time.monotonic() - self._started
        thread = threading.Thread(target=self._flush, name="remat-save", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread is left; the other ranks learn of it in `complete`
            self._error = error
        else:
            self._thread = thread

    @property
    def flushed(self) -> bool:
        """In the background: whether this rank is done, well or not; `complete` then waits for other ranks only."""
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
        is_main = manifest.place()[0] == 0
        try:
            if self._files is None and self._error is None:
                self._error = SaveError("the thread that flushes and hashes ended without a result")
            manifest.agree(self._error, self._what)
            every = {name: entry for part in distributed.gather(self._files) for name, entry in part.items()}
            size = manifest.on_main(lambda: self._publish(every), self._what)
        except SaveError:
            if is_main:
                manifest.remove(self._tmp)
            raise
        if is_main:
            _retain(self._final.parent, self._keep)
        now = time.monotonic()
        seconds = now - self._started
        stall_s = seconds if self._thread is None else self._stalled_s + now - began
        return SaveResult(path=self._final, bytes=size, seconds=seconds, stall_s=stall_s)

    def _flush(self) -> None:
        if self._error is not None:
            return
        try:
            rank = manifest.place()[0]
            own = [name for name in manifest.files_in(self._tmp) if (manifest.rank_of(name) or 0) == rank]
            self._files = manifest.describe(self._tmp, own)
        except Exception as error:
            self._error = disk_space.cause(error, self._tmp)

    def _publish(self, files: dict[str, manifest.FileEntry]) -> int:
        unseen = [name for name in files if not (self._tmp / name).exists()]
        if unseen:
            raise SaveError(
                f"rank 0 does not see {unseen[0]} (and {len(unseen) - 1} more): output_dir must be on a filesystem "
                "that all nodes share"
            )
        earlier = [state.info.sequence for state in manifest.list_states(self._final.parent)[0]]
        info = replace(self._info, sequence=max(earlier, default=0) + 1, files=files)
        manifest.write(self._tmp, info)
        manifest.publish(self._tmp, self._final)
        return info.size_bytes


def _retain(saved: Path, keep: int) -> None:
    """Delete complete states beyond the `keep` newest; incomplete ones do not count and are left to look at."""
    complete = [state for state in manifest.list_states(saved)[0] if manifest.is_complete(state.path)]
    for state in complete[keep:]:
        manifest.remove(state.path)


log = logging.getLogger(__name__)

ROUND_S = 5.0  # between two reports of the ranks that verify a state


@dataclass(frozen=True)
class Found:
    """The newest complete state, if any, and a line on each folder that was passed over."""

    state: SavedState | None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on: the state, the run directory it belongs to, and what was passed over to find it."""

    state: SavedState
    run_dir: Path
    notes: list[str]


def save(engine: Any, run_dir: Path, *, step: int, client_state: dict[str, Any], keep: int) -> SaveResult:
    """Save the state after `step` optimizer steps; call it on every rank. Keeps the `keep` newest states.

    `client_state` is plain JSON data (data position, counters). Raises SaveError on every rank when there is too
    little room or any rank fails; the unfinished folder is then gone and older states are untouched.
    """
    return begin(engine, run_dir, step=step, client_state=client_state, keep=keep).complete()


def begin(engine: Any, run_dir: Path, *, step: int, client_state: dict[str, Any], keep: int) -> Unfinished:
    """The first part of `save`, for which training must wait: all files are written, none is on disk for certain.

    Nothing may be saved beside it until it is complete: a save deletes what others left unfinished.
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
    free = manifest.on_main(lambda: _prepare(tmp, needed), what)
    what += f" ({disk_space.words(needed)} needed, {disk_space.words(free)} free at its start)"
    try:
        manifest.agree(_write_engine(engine, tmp), what)
    except SaveError:
        if manifest.place()[0] == 0:
            manifest.remove(tmp)
        raise
    error = _write_rng(engine.module, tmp)
    info = _describe(engine, step, client_state)
    return Unfinished(tmp, final, info, what=what, keep=keep, started=started, error=error)


def find(path: Path, progress: Callable[[], object] = lambda: None) -> Found:
    """The newest complete state at `path`: a run directory, its `saved` folder, or one state folder. Collective.

    Every file is read and its hash compared, the ranks sharing the work; newest means saved last. `progress` is
    called every ROUND_S on all ranks as long as any of them reads on: a large state is no hang.
    """
    states, notes = distributed.broadcast(manifest.list_states(path) if manifest.place()[0] == 0 else None)
    for state in states:
        problems = _verify(state.path, progress)
        if not problems:
            return Found(state, notes)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        notes.append(f"{state.path.name}: {problems[0]}{more}")
    return Found(None, notes)


def _verify(path: Path, progress: Callable[[], object]) -> list[str]:
    """What all ranks find wrong with a state. Threads hash; the main threads tell each other how far they are."""
    rank, size = manifest.place()
    counts: list[int] = []  # appending is one step for all threads
    with ThreadPoolExecutor(1, "remat-verify") as pool:
        check = pool.submit(manifest.verify, path, part=rank, parts=size, hashed=counts.append)
        read_bytes = -1
        while True:
            wait([check], timeout=ROUND_S)
            reports = distributed.gather((check.done(), sum(counts)))
            if sum(count for _, count in reports) != read_bytes:
                progress()
            read_bytes = sum(count for _, count in reports)
            if all(done for done, _ in reports):
                break
    error = check.exception()  # the other ranks wait for this one's findings
    found = check.result() if error is None else [f"cannot be verified ({type(error).__name__}: {error})"]
    return list(dict.fromkeys(problem for part in distributed.gather(found) for problem in part))


def resolve_resume(
    resume: str,
    *,
    output_dir: str,
    name: str,
    run_id: str | None,
    own: Callable[[Path], None] = lambda run_dir: None,
    progress: Callable[[], object] = lambda: None,
) -> ResumePoint | None:
    """What `resume` means: None for "none", else the newest complete state. Collective, before the model exists.

    "auto" looks in outputs/<name>/<run_id>, or without run_id in the runs of that recipe, latest save first; a path
    names a run, its `saved` folder or one state. Each run is `own`ed before its states are looked at: they are
    another launch's to replace and delete until then. Raises ConfigError on every rank when nothing complete is
    there: a run that was asked to resume never starts at step 0. `progress` as in `find`.
    """
    if resume == "none":
        return None
    recipe = Path(output_dir).expanduser() / name
    if resume != "auto":
        places = [Path(resume).expanduser()]
    elif run_id is not None:
        places = [recipe / run_id]
    else:
        places = distributed.broadcast(_runs(recipe) if manifest.place()[0] == 0 else None)
    notes: list[str] = []
    for place in places:
        own(_run_dir(place))
        found = find(place, progress)
        notes += [f"{place.name}/{note}" for note in found.notes]
        if found.state is not None:
            return ResumePoint(found.state, found.state.path.parent.parent, notes)
    looked = ", ".join(str(place) for place in places) or f"{recipe}/*"
    raise ConfigError(
        f"resume={resume}: no complete saved state in {looked} (found: {'; '.join(notes) or 'nothing'}). "
        "Give resume=FOLDER of a run that has one, or resume=none to start at step 0"
    )


def check_compatible(
    state: SavedState, *, zero_stage: int, precision: Precision | None = None, also: Sequence[str] = ()
) -> None:
    """Raise ConfigError when this launch cannot load `state`; call it before the model is built.

    A saved state is in the layout of its ZeRO stage and precision. `also` are the problems of its number of ranks.
    """
    info, problems = state.info, [*also]
    if info.zero_stage != zero_stage:
        problems.append(
            f"it was saved at ZeRO stage {info.zero_stage} and deepspeed.config asks for {zero_stage}: "
            f"choose a stage-{info.zero_stage} config"
        )
    if precision is not None and info.precision != str(precision):
        problems.append(
            f"it was saved in {info.precision} and train.precision={precision}: "
            f"set train.precision={info.precision}"
        )
    if problems:
        raise ConfigError(
            f"resume: {state.path} cannot be loaded: {'; '.join(problems)}. To take over only the weights, run "
            "`remat export` on the run and start a new run with model.path=EXPORTED_FOLDER"
        )


def refuse_code(state: SavedState) -> None:
    """Raise UnsafeFile on every rank when a file of `state` is not data alone. Collective; reads no weight.

    Before the model is built, so that no rank is left waiting; what is read later is read the same way.
    """
    rank, size = manifest.place()
    try:
        found = safe_load.problem(safe_load.pickled(state.path)[rank::size])
    except OSError as error:  # the other ranks wait for this one's findings
        found = f"{state.path} cannot be read: {error}"
    problems = [text for text in distributed.gather(found) if text is not None]
    if problems:
        raise safe_load.UnsafeFile(f"resume: {problems[0]}")


def load(engine: Any, state: SavedState) -> dict[str, Any]:
    """Put `state` into a freshly built engine, random states last; returns the client state. Collective.

    Raises ConfigError when the parameters or frozen weights are not those of the saved run or a file is not data
    alone, SaveError when DeepSpeed loads nothing.
    """
    check_compatible(state, zero_stage=int(engine.zero_optimization_stage()), precision=_precision(engine))
    same_ranks = state.info.world_size == manifest.place()[1]
    if (same_ranks or state.info.zero_stage == 0) and _layout(engine) != state.info.layout:
        raise ConfigError(
            f"resume: {state.path} has other parameters, or the same in another order, than this run: the model, "
            "the optimizer's groups and zero_optimization (sub_group_size, round_robin_gradients) must be as saved"
        )
    if not same_ranks:
        return reshard.load(engine, state)
    own = safe_load.load(_rng_file(state.path))
    if state.info.frozen_excluded and own["frozen"] != frozen.fingerprint(engine.module):
        raise ConfigError(
            f"resume: {state.path} holds no frozen weights, and this model's differ from those of the saved run: "
            "build the model with model.init and model.path as in the saved run"
        )
    if nvme.in_use(engine):
        nvme.prepare(engine, state.path / ENGINE, manifest.place()[0])
    with safe_load.guarding():
        loaded, _ = engine.load_checkpoint(
            str(state.path),
            tag=ENGINE,
            load_module_strict=True,
            custom_load_fn=frozen.load_trainable if state.info.frozen_excluded else None,
        )
    if loaded is None:
        raise SaveError(f"DeepSpeed found nothing to load in {state.path / ENGINE}")
    rng.put(own["rng"])
    distributed.barrier()
    return state.client_state


def _prepare(tmp: Path, needed: int) -> int:
    """An empty folder to write to, once there is room for it; what killed saves left is gone. The bytes free."""
    tmp.parent.mkdir(parents=True, exist_ok=True)
    manifest.clean(tmp.parent)
    disk_space.refuse_too_little(tmp.parent, needed)
    (tmp / "rng").mkdir(parents=True)
    return disk_space.free_bytes(tmp)


def _write_engine(engine: Any, tmp: Path) -> Exception | None:
    """DeepSpeed's part. An error of one rank is returned, after the collectives that the others still run."""
    try:
        engine.save_checkpoint(
            str(tmp), tag=ENGINE, save_latest=False, exclude_frozen_parameters=frozen.present(engine.module)
        )
    except Exception as error:
        # save_checkpoint ends with these two on every rank; without this rank the others would wait for ever.
        if hasattr(engine.optimizer, "checkpoint_event_epilogue"):
            engine.optimizer.checkpoint_event_epilogue()
        distributed.barrier()
        return disk_space.cause(error, tmp)
    return None


def _write_rng(module: nn.Module, tmp: Path) -> Exception | None:
    """This rank's random states; an error is returned, for the others do not know of it yet."""
    try:
        torch.save({"rng": rng.get(), "frozen": frozen.fingerprint(module)}, _rng_file(tmp))
    except Exception as error:
        return disk_space.cause(error, tmp)
    return None


def _describe(engine: Any, step: int, client_state: dict[str, Any]) -> Manifest:
    """What the state is; its files and its place among the saves come when it is complete."""
    return Manifest(
        step=step,
        sequence=0,
        world_size=manifest.place()[1],
        zero_stage=int(engine.zero_optimization_stage()),
        precision=str(_precision(engine)),
        layout=_layout(engine),
        frozen_excluded=frozen.present(engine.module),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=_versions(),
        client_state=client_state,
        files={},
    )


def _run_dir(place: Path) -> Path:
    """The run that a run directory, its `saved` folder or one state folder belongs to, as in `list_states`."""
    if place.name.startswith(STEP):
        return place.absolute().parent.parent
    if (place / SAVED).is_dir():
        return place
    holds_states = place.name == SAVED or any(place.glob(f"{STEP}*"))
    return place.absolute().parent if holds_states else place


def _runs(recipe: Path) -> list[Path]:
    """Runs of a recipe that have saved something, latest save first."""
    latest: list[tuple[str, str, Path]] = []
    for saved in recipe.glob(f"*/{SAVED}"):
        states = manifest.list_states(saved)[0]
        latest.append((states[0].info.created if states else "", saved.parent.name, saved.parent))
    return [run for _, _, run in sorted(latest, reverse=True)]


def _precision(engine: Any) -> Precision:
    if engine.bfloat16_enabled():
        return Precision.bf16
    return Precision.fp16 if engine.fp16_enabled() else Precision.fp32


def _layout(engine: Any) -> str:
    """Digest of the optimizer's groups: DeepSpeed restores flat buffers by position and would not notice."""
    if engine.zero_optimization_stage() == 0:
        groups = [[["", list(p.shape)] for p in group["params"]] for group in engine.optimizer.param_groups]
    else:
        shapes = engine._get_zero_param_shapes()
        groups = [[[name, list(shape)] for name, shape in group.items()] for group in shapes]
    return hashlib.sha256(json.dumps(groups).encode()).hexdigest()


def _rng_file(folder: Path) -> Path:
    return folder / "rng" / f"rank-{manifest.place()[0]:05d}.pt"


def _versions() -> dict[str, str]:
    import deepspeed
    import transformers

    return {
        "remat": __version__,
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "transformers": transformers.__version__,
    }
