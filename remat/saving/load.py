"""Resume: find the newest complete saved state, check it against the launch, and load it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remat.config import ds_config, paths, resumed
from remat.config.options import NOT_FOLDERS, ConfigError, OptimStates, Precision
from remat.machine import distributed, rng
from remat.saving import frozen, manifest, nvme, reshard, safe_load, shares
from remat.saving.manifest import ENGINE, SAVED, UNFINISHED, SavedState
from remat.saving.save import engine_layout, engine_precision, rng_file

ROUND_S = 5.0  # between two reports of the ranks that verify a state


@dataclass(frozen=True)
class Found:
    """The newest complete state, if any, and a note on each folder that was skipped."""

    state: SavedState | None
    notes: list[str]


@dataclass(frozen=True)
class ResumePoint:
    """The state that a run resumes from, its run directory, and a note on each folder that was skipped."""

    state: SavedState
    run_dir: Path
    notes: list[str]


Progress = Callable[[int, int], object]  # gets the bytes read by all ranks, and those of the state


def find_newest(path: Path, progress: Progress = lambda done, total: None) -> Found:
    """Find the newest complete state at `path`: a run directory, its `saved` folder, or one state folder. Collective.

    Every file is read and its hash compared; the ranks share the work. Newest means saved last. `progress` is called on
    all ranks: at the beginning of a state, and after every ROUND_S in which more was read.
    """
    states, notes = distributed.broadcast(manifest.list_states(path) if distributed.place()[0] == 0 else None)
    for state in states:
        problems = _verify(state, progress)
        if not problems:
            return Found(state, notes)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        notes.append(f"{state.path.name}: {problems[0]}{more}")
    return Found(None, notes)


def _verify(state: SavedState, progress: Progress) -> list[str]:
    """Return the problems of a state that all ranks find. A thread hashes; the main thread exchanges progress."""
    rank, size = distributed.place()
    counts: list[int] = []  # appending is atomic between threads
    progress(0, state.info.size_bytes)
    with ThreadPoolExecutor(1, "remat-verify") as pool:
        check = pool.submit(manifest.verify, state.path, part=rank, parts=size, hashed=counts.append)
        read_bytes = 0
        while True:
            wait([check], timeout=ROUND_S)
            reports = distributed.gather((check.done(), sum(counts)))
            now_bytes = sum(count for _, count in reports)
            if now_bytes != read_bytes:
                progress(now_bytes, state.info.size_bytes)
            read_bytes = now_bytes
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
    progress: Progress = lambda done, total: None,
) -> ResumePoint | None:
    """Find the newest complete state that `resume` names. Collective; call it before the model exists.

    Returns None for "none", and for "auto_or_start" when nothing was saved yet.

    "auto" looks in outputs/<name>/<run_id>, or without run_id in the runs of that recipe, latest save first. A path
    names a run, its `saved` folder or one state. `own` is called for each run before its states are read: until then
    another launch may replace and delete them. Raises ConfigError on every rank when no state is complete: a run
    that was asked to resume never starts at step 0. `progress` is as in `find_newest`.
    """
    if resume == "none":
        return None
    recipe = paths.expand(output_dir) / name
    if resume not in NOT_FOLDERS:
        places = [paths.expand(resume)]
    elif run_id is not None:
        places = [recipe / run_id]
    else:
        places = distributed.broadcast(_runs(recipe) if distributed.place()[0] == 0 else None)
    notes: list[str] = []
    for place in places:
        own(resumed.run_folder(place))
        found = find_newest(place, progress)
        notes += [f"{place.name}/{note}" for note in found.notes]
        if found.state is not None:
            return ResumePoint(found.state, found.state.path.parent.parent, notes)
    if resume == "auto_or_start" and all(note.endswith(UNFINISHED) for note in notes):
        return None  # killed before its first state was complete, or never started: there is nothing to lose
    looked = ", ".join(str(place) for place in places) or f"{recipe}/*"
    raise ConfigError(paths.no_state(resume, looked, "; ".join(notes) or "nothing"))


def check_compatible(
    state: SavedState,
    *,
    zero_stage: int,
    precision: Precision | None = None,
    optimizer: str | None = None,
    states: OptimStates | None = None,
    also: Sequence[str] = (),
) -> None:
    """Raise ConfigError when this launch cannot load `state`; call it before the model is built.

    The layout of a saved state depends on its ZeRO stage, precision, `optimizer` (`model.optimizer.kind_of`) and
    `states` (optim.states). `also` are problems with its world size.
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
    if optimizer is not None and info.optimizer != optimizer:
        problems.append(
            f"it holds the optimizer state of {info.optimizer} and optim.name asks for {optimizer}: "
            f"set optim.name={info.optimizer}"
        )
    if states is not None and info.states != states:
        problems.append(
            f"its optimizer state is in the format {info.states} and optim.states={states}: set "
            f"optim.states={info.states}"
        )
    if problems:
        raise ConfigError(
            f"resume: {state.path} cannot be loaded: {'; '.join(problems)}. To take over only the weights, run "
            "`remat export` on the run and start a new run with model.path=EXPORTED_FOLDER"
        )


def refuse_code(state: SavedState) -> None:
    """Raise UnsafeFile on every rank when a file of `state` holds more than data. Collective; reads no weight.

    Call it before the model is built, so that no rank is left waiting. Later reads make the same check.
    """
    rank, size = distributed.place()
    try:
        found = safe_load.problem(safe_load.pickled(state.path)[rank::size])
    except OSError as error:  # the other ranks wait for this one's findings
        found = f"{state.path} cannot be read: {error}"
    problems = [text for text in distributed.gather(found) if text is not None]
    if problems:
        raise safe_load.UnsafeFile(f"resume: {problems[0]}")


def load(engine: Any, state: SavedState) -> None:
    """Load `state` into a freshly built engine, random states last. Collective.

    Raises ConfigError when the parameters or frozen weights are not those of the saved run, or a file holds more
    than data. Raises SaveError when DeepSpeed loads nothing.
    """
    check_compatible(
        state,
        zero_stage=int(engine.zero_optimization_stage()),
        precision=engine_precision(engine),
        states=ds_config.optimizer_states(engine.config),
    )
    divided = shares.group_size(engine), shares.stage_count(engine)
    same_ranks = reshard.same_ranks(state, distributed.place()[1], *divided)
    if same_ranks and (other := sorted(state.info.cuts.items() ^ shares.find_cuts(engine.module).items())):
        raise ConfigError(
            f"resume: {state.path} has {other[0][0]} divided over the ranks that share layers in another way than this "
            "run: set train.loss and peft.modules_to_save as in the saved run, which decide on the output layer"
        )
    if (same_ranks or state.info.zero_stage == 0) and engine_layout(engine) != state.info.layout:
        raise ConfigError(
            f"resume: {state.path} has other parameters, or the same in another order, than this run: the model, "
            "the optimizer's groups and zero_optimization (sub_group_size, round_robin_gradients) must be as saved"
        )
    if not same_ranks:
        reshard.load(engine, state)
        return
    own = safe_load.load(rng_file(state.path))
    frozen.check_same(state, own["frozen"], frozen.fingerprint(engine.module))
    if engine.zero_nvme_offload_optimizer():
        nvme.prepare(engine, state.path / ENGINE, distributed.place()[0])
    frozen.load_engine(engine, state.path, state.info)
    rng.put(own["rng"])
    distributed.barrier()


def _runs(recipe: Path) -> list[Path]:
    """Return the runs of a recipe that have saved something, latest save first."""
    latest: list[tuple[str, str, Path]] = []
    for saved in recipe.glob(f"*/{SAVED}"):
        states = manifest.list_states(saved)[0]
        latest.append((states[0].info.created if states else "", saved.parent.name, saved.parent))
    return [run for _, _, run in sorted(latest, reverse=True)]
