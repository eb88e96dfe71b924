"""Find the fastest settings of a run that fit its machine: ZeRO stage, offload, checkpointing and micro-batch.

All settings train the same, with the same global batch. Candidates are estimated without a replay of torch's allocator
(settings/screening.py); returned settings have the full plan of the command line with their overrides. `advise` says
which changes make a run fit: the same training in less memory, other training, or a larger machine.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from remat.config.options import ConfigError, Policy, RunConfig
from remat.config.units import format_size
from remat.machine import gpus
from remat.planning import budget
from remat.planning.plan import (
    GPU_MEMORY,
    HOST_MEMORY,
    Planned,
    Recordings,
    capacity_of,
    make_plan,
    needed_bytes,
)
from remat.planning.preflight import DoesNotFit
from remat.planning.settings import choices, remedies
from remat.planning.settings.choices import OUTDONE_BY_TABLES, Option
from remat.planning.settings.screening import (
    MAY_FIT_BELOW,
    NO_ACTIVATIONS,
    SURELY_FITS_BELOW,
    Screen,
)

NEARLY_FITS_BELOW = 1.5  # bytes needed over bytes found, up to which other sizes of ZeRO's buffers are tried
SAME_TIME = 0.01  # relative difference of step times below which the setting with fewer changes is taken
NEARLY_ALL_KEPT = 1.1  # times the step of keeping all: if tables take no longer, OUTDONE_BY_TABLES are skipped
TRIED_FOR_CLOSEST = 3
FASTER = 0.03  # share of a step's time: for a run that fits, smaller gains are not reported
ADVICE_S = 20.0  # CPU seconds that advice may take; wall time would let other load change the advice
# shares of that time after which each part stops; the rest is for the last table of a plan
REMEDIES_SHARE, LOOK_SHARE, CHANGES_SHARE, PLAN_SHARE = 0.3, 0.5, 0.6, 0.8
Candidate = tuple[Option, ...]


@dataclass(frozen=True)
class Setting:
    """Overrides to add to a command line, and the plan of the run with them."""

    overrides: list[str]
    planned: Planned
    changes_training: bool = False

    @property
    def cost(self) -> tuple[bool, float, int]:
        """Return the sort key: complete step times before incomplete ones, then the shortest, then the fewest bytes."""
        return (*_time_of(self.planned), needed_bytes(self.planned, GPU_MEMORY))


def explain_no_search(cfg: RunConfig) -> str | None:
    """Return why the settings of `cfg` cannot be compared on its machine; None where they can."""
    if gpus.machine(cfg.hardware).matmul_tflops is None:
        return "no GPU whose speed is known: name one by hardware=NAME, or measure this machine by `remat calibrate`"
    if capacity_of(cfg.hardware).gpu_bytes is None:
        return "the memory of its GPU is not known: set hardware.gpu_memory_gib"
    return None


def choose(
    args: Sequence[str],
    cfg: RunConfig,
    limit: int,
    recordings: Recordings,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Setting]:
    """Return up to `limit` settings for strategy=auto, the fastest first. Options set by `args` keep their value.

    Raises ConfigError if the machine's speed or memory is not known, DoesNotFit if nothing fits it.
    """
    if reason := explain_no_search(cfg):
        raise ConfigError(f"strategy=auto: {reason}")
    search = Search(args, cfg, recordings, progress)
    if found := search.fastest(limit, pinned=set_by(args)):
        return found
    nearest = search.closest()
    lacks = f"; the nearest, {' '.join(nearest.overrides)}, lacks {_missing(nearest)}" if nearest else ""
    raise DoesNotFit(
        f"strategy=auto: no ZeRO stage, offload, checkpointing and micro-batch fits {cfg.hardware.name}{lacks}. "
        "`remat plan` without strategy=auto says what else would fit"
    )


def set_by(args: Sequence[str]) -> set[str]:
    """Return the axes on which the command line sets an option."""
    given = {word.lstrip("+~").partition("=")[0] for word in args}
    owners = {axis: axis.split(".")[0] if axis == "deepspeed.config" else axis for axis in choices.AXES}
    return {axis for axis, owner in owners.items() if any(f"{name}.".startswith(f"{owner}.") for name in given)}


def _missing(setting: Setting) -> str:
    return ", ".join(
        f"{format_size(size)} of {name}" for name, size in setting.planned.plan.missing_bytes.items()
    )


class Search:
    """A search for other settings of the run `cfg`, which `args` compose to.

    `progress` is called with the number of settings looked at and the number of all.
    """

    def __init__(
        self,
        args: Sequence[str],
        cfg: RunConfig,
        recordings: Recordings,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._args, self._recordings, self._progress = list(args), recordings, progress
        self._cfg = cfg
        self._axes = choices.same_training(args, cfg)
        self._in_slices = choices.policies(args, cfg, (choices.IN_SLICES,))
        self._keeping = choices.keep_everything(args, cfg)
        self._screen = Screen(recordings)
        self._estimates: dict[Candidate, Planned | None] = {}
        self.look_until = self.plan_until = math.inf  # times by time.process_time()
        self.stopped = False  # whether the time was up before the end

    @property
    def _time_is_up(self) -> bool:
        is_up = time.process_time() > self.look_until
        self.stopped |= is_up
        return is_up

    def may_plan(self) -> bool:
        """Return whether there is time for one more plan."""
        may = time.process_time() <= self.plan_until
        self.stopped |= not may
        return may

    def fastest(self, limit: int, *, pinned: Collection[str] = ()) -> list[Setting]:
        """Return up to `limit` settings that fit, the shortest step first: one for each pair of policy and strategy.

        checkpointing=budget gives one setting in all, and one more if its tables may move values to the host.

        Axes in `pinned` keep their value. If step times are not known, those with the shortest known part come first.
        If nothing fits, settings that compute MLPs in slices are searched, which changes the rounding.
        """
        axes = self._axes | {name: [None] for name in pinned}
        found = self._best_of(list(self._look(axes)), limit)
        if found or "checkpointing" in pinned:
            return found
        return self._best_of(list(self._look(axes | {"checkpointing": self._in_slices})), limit)

    def with_change(self, change: Option) -> Setting | None:
        """Return the fastest setting with `change` that fits, at micro-batch 1, with policies that save most memory."""
        axes = choices.saving_most(self._axes)
        return next(iter(self._best_of(list(self._look(axes, (change,))), 1)), None)

    def _best_of(self, seen: Sequence[Candidate], limit: int) -> list[Setting]:
        fits = [candidate for candidate in seen if self._excess(candidate) <= MAY_FIT_BELOW]
        if not fits:
            fits = [c for c in self._with_other_sizes(seen) if self._excess(c) <= MAY_FIT_BELOW]
        return self._plan_best(sorted(fits, key=self._rank), limit)

    def closest(self) -> Setting | None:
        """Return the setting, of those looked at, that exceeds the machine by the smallest factor."""
        known = [
            c
            for c, estimate in self._estimates.items()
            if estimate and estimate.simulation is not NO_ACTIVATIONS
        ]
        nearest = sorted(known, key=self._excess)[:TRIED_FOR_CLOSEST]
        return min(
            (setting for c in nearest if (setting := self.plan(_words(c)))),
            key=lambda setting: excess(setting.planned),
            default=None,
        )

    def plan(self, overrides: list[str]) -> Setting | None:
        """Plan the run with `overrides`; return None if they are refused."""
        try:
            cfg = choices.composed(self._args, overrides)
            made = make_plan(cfg, recordings=self._recordings, until=self.plan_until)
        except ConfigError:
            return None
        self.stopped |= made.is_cut_short
        return Setting(overrides, made)

    def _look(self, axes: dict[str, list[Option | None]], given: Candidate = ()) -> Iterator[Candidate]:
        """Estimate every setting that may be the fastest; yield those that are not refused."""
        strategies, policies = axes["deepspeed.config"], axes["checkpointing"]
        total, done, best_s = math.prod(len(values) for values in axes.values()), 0, math.inf
        for loss in axes["train.loss"]:
            known = _Known()
            for micro_batch in axes["train.micro_batch_size"]:
                fixed = (*given, *_changes(loss, micro_batch))
                if self._time_is_up:
                    self._progress(total, total)
                    return
                for least_s, keeping, strategy in self._by_least_time(fixed, strategies, known):
                    all_fits = keeping is not None and excess(keeping) <= 1 - budget.MARGIN
                    has_tables = nothing_to_spare = False
                    for policy in policies:
                        done += 1
                        self._progress(done, total)
                        if self._time_is_up or known.is_hopeless(strategy, policy, least_s, best_s):
                            continue
                        kind, moves = _policy_of(policy), self._moves(policy)
                        if (kind == Policy.budget and all_fits) or (has_tables and kind in OUTDONE_BY_TABLES):
                            continue
                        if moves and nothing_to_spare:
                            continue
                        candidate = (*fixed, *_changes(strategy, policy))
                        if (estimate := self._estimate(candidate)) is None:
                            known.refuse(strategy, policy)
                            continue
                        known.add(strategy, policy, estimate, least_s)
                        yield candidate
                        if moves:  # a best-case estimate: it says nothing about other settings
                            continue
                        has_tables |= (
                            kind == Policy.budget and estimate.time.total_s <= NEARLY_ALL_KEPT * least_s
                        )
                        # Tables are chosen to fit the budget, so an estimate with tables counts as one that fits.
                        fits = estimate.simulation is not NO_ACTIVATIONS and (
                            self._is_table(policy) or excess(estimate) <= SURELY_FITS_BELOW
                        )
                        nothing_to_spare |= fits and estimate.time.total_s <= (1 + SAME_TIME) * least_s
                        if fits and not estimate.time.unknown:
                            best_s = min(best_s, estimate.time.total_s)
        self._progress(total, total)

    def _by_least_time(
        self, fixed: Candidate, strategies: Sequence[Option | None], known: _Known
    ) -> list[tuple[float, Planned | None, Option | None]]:
        """Return (seconds of a step that recomputes and offloads nothing, its estimate, strategy), the shortest first.

        0 seconds: they are not known, or the command line excludes such a step, and there is no estimate.
        """
        found = []
        for strategy in strategies:
            estimate = None
            if self._keeping is not None and not (self._time_is_up or known.states_do_not_fit(strategy)):
                estimate = self._estimate((*fixed, *_changes(strategy, *self._keeping)))
            timed = estimate and estimate.simulation is not NO_ACTIVATIONS and not estimate.time.unknown
            found.append((estimate.time.total_s if estimate and timed else 0.0, estimate, strategy))
        return sorted(found, key=lambda entry: entry[0])

    def _with_other_sizes(self, seen: Sequence[Candidate]) -> Iterator[Candidate]:
        """Yield the settings that nearly fit with less gathered by ZeRO-3, with memory not pinned, and with both."""
        sizes = choices.zero_sizes()
        added = [combination for n in (1, 2) for combination in itertools.combinations(sizes, n)]
        for candidate in seen:
            if self._excess(candidate) <= NEARLY_FITS_BELOW and not self._time_is_up:
                for more in added:
                    if self._estimate((*candidate, *more)) is not None:
                        yield (*candidate, *more)

    def _plan_best(self, candidates: Sequence[Candidate], limit: int) -> list[Setting]:
        """Plan the candidates, best first, until `limit` fit; return the fastest of them.

        Settings whose tables may move values do not count: their estimates assume that moves cost nothing.
        """
        found: list[Setting] = []
        taken: set[tuple[str, ...]] = set()
        counted = 0
        for candidate in candidates:
            kind = tuple(_kind(o) for o in candidate if o.axis in ("deepspeed.config", "checkpointing"))
            policy = next((o for o in candidate if o.axis == "checkpointing"), None)
            moves = self._moves(policy)
            if moves or budget.CHOICE in kind:  # one setting is enough: tables take longest to plan
                kind = (budget.CHOICE, str(moves))
            if counted == limit:
                break
            if not self.may_plan():
                break
            if kind not in taken and (setting := self.plan(_words(candidate))) and setting.planned.plan.fits:
                found.append(setting)
                taken.add(kind)
                counted += not moves
        return sorted(found, key=lambda setting: setting.cost)[:limit]

    def _is_table(self, policy: Option | None) -> bool:
        """Return whether tables are chosen with this option of `checkpointing`; None: the present one."""
        cfg = policy.apply(self._cfg) if policy else self._cfg
        return cfg.checkpointing.policy is Policy.budget and cfg.checkpointing.table is None

    def _moves(self, policy: Option | None) -> bool:
        """Return whether tables are chosen, and these may move values to the host."""
        cfg = policy.apply(self._cfg) if policy else self._cfg
        return self._is_table(policy) and cfg.checkpointing.offload.enabled

    def _rank(self, candidate: Candidate) -> tuple[float, ...]:
        estimate = self._estimates[candidate]
        assert estimate is not None
        return rank(estimate, len(candidate))

    def _estimate(self, candidate: Candidate) -> Planned | None:
        """Return the estimate of a candidate; None if it is refused."""
        if candidate not in self._estimates:
            cfg = self._cfg
            try:
                for option in candidate:
                    cfg = option.apply(cfg)
                self._estimates[candidate] = self._screen.estimate(cfg)
            except ConfigError:
                self._estimates[candidate] = None
        return self._estimates[candidate]

    def _excess(self, candidate: Candidate) -> float:
        estimate = self._estimate(candidate)
        return math.inf if estimate is None else excess(estimate)


class _Known:
    """Results that rule out later settings: larger micro-batches need more memory and recompute the same share."""

    def __init__(self) -> None:
        self._too_large: set[tuple[Option | None, ...]] = set()
        # factor over a step that recomputes nothing
        self._slower: dict[tuple[Option | None, Option | None], float] = {}

    def add(self, strategy: Option | None, policy: Option | None, estimate: Planned, least_s: float) -> None:
        if estimate.simulation is NO_ACTIVATIONS:
            self._too_large.add((strategy,))
        elif excess(estimate) > MAY_FIT_BELOW:
            self._too_large.add((strategy, policy))
        if least_s and estimate.simulation is not NO_ACTIVATIONS:
            self._slower.setdefault((strategy, policy), estimate.time.total_s / least_s)

    def refuse(self, strategy: Option | None, policy: Option | None) -> None:
        self._too_large.add((strategy, policy))

    def states_do_not_fit(self, strategy: Option | None) -> bool:
        return (strategy,) in self._too_large

    def is_hopeless(
        self, strategy: Option | None, policy: Option | None, least_s: float, best_s: float
    ) -> bool:
        if self.states_do_not_fit(strategy) or (strategy, policy) in self._too_large:
            return True
        return least_s * self._slower.get((strategy, policy), 1.0) * (1 - SAME_TIME) > best_s


def _policy_of(option: Option | None) -> str | None:
    """Return the policy that an option of `checkpointing` changes to; None for the present one."""
    return option.words[0].partition("=")[2] if option else None


def _kind(option: Option) -> str:
    """Return the key by which options differ: all words of a strategy, the first word of any other option."""
    return " ".join(option.words) if option.axis == "deepspeed.config" else option.words[0]


def _changes(*options: Option | None) -> Candidate:
    return tuple(option for option in options if option is not None)


def _time_of(planned: Planned) -> tuple[bool, float]:
    return bool(planned.time.unknown), planned.time.total_s


def rank(estimate: Planned, changes: int) -> tuple[float, ...]:
    """Return the sort key of an estimate: the fastest first, and fewer changes first if times are about equal."""
    unknown, seconds = _time_of(estimate)
    steps = math.floor(math.log(seconds) / SAME_TIME) if seconds else 0
    return (unknown, steps, changes, seconds, needed_bytes(estimate, GPU_MEMORY))


def _words(candidate: Candidate) -> list[str]:
    return [word for option in candidate for word in option.words]


def excess(planned: Planned) -> float:
    """Return the largest share of a resource that is needed: bytes needed over bytes found."""
    return max(_shares(planned).values(), default=0.0)


def fullest(planned: Planned) -> str:
    """Return the name of the resource with the largest share of bytes needed over bytes found."""
    shares = _shares(planned)
    return max(shares, key=lambda name: shares[name])


def _shares(planned: Planned) -> dict[str, float]:
    resources = planned.plan.resources
    return {r.name: r.needed_bytes / max(1, r.found_bytes) for r in resources if r.found_bytes is not None}


@dataclass(frozen=True)
class Advice:
    """Changes to a run: faster ones for a run that fits, or those that make it fit.

    All `changes` fit. For a run that does not fit, `remedies` has the result of each well-known remedy. `closest` is
    the setting that lacks least on the run's machine, if no change fits there. `stopped` tells whether the time was up
    before all settings were looked at.
    """

    changes: list[Setting]
    closest: Setting | None
    remedies: list[remedies.Found] = field(default_factory=list)
    stopped: bool = False


def advise(
    args: Sequence[str],
    planned: Planned,
    *,
    limit: int = 3,
    recordings: Recordings,
    progress: Callable[[int, int], None] = lambda done, total: None,
    limit_s: float = math.inf,
) -> Advice:
    """Return advice for the run of `args`, whose plan is `planned`.

    It takes `limit_s` CPU seconds at most, but for the last table that it plans. If the time is up while tables are
    searched, the fastest so far are in the advice.

    For a run that fits, the changes are up to `limit` settings that train the same in less time. For another run they
    come in this order: up to `limit` settings that train the same, the fastest first; if there are none, smaller states
    of the optimizer, which train the same weights on another trajectory; then the smallest change of the sequence
    length and of the adapters that is enough, with what else it needs; then the smallest machine of conf/hardware that
    holds the run unchanged.
    """
    began = time.process_time()
    told: list[remedies.Found] = []
    if not planned.plan.fits:
        until = began + REMEDIES_SHARE * limit_s
        told = remedies.look_at(args, planned, recordings, until=until, progress=progress)
    search = Search(args, planned.cfg, recordings, progress)
    search.look_until, search.plan_until = began + LOOK_SHARE * limit_s, began + PLAN_SHARE * limit_s
    if planned.plan.fits:
        return Advice(_faster(search, planned, limit), None, stopped=search.stopped)
    changes = search.fastest(limit)
    search.look_until = began + CHANGES_SHARE * limit_s
    smaller = [] if changes else choices.smaller_states(planned.cfg)
    for axis in [*smaller, *choices.other_training(args, planned.cfg)]:
        fitting = (found for option in axis if (found := search.with_change(option)))
        changes += [replace(found, changes_training=True) for found in itertools.islice(fitting, 1)]
    # The run itself, if nothing else could be planned.
    closest = None if changes else search.closest() or Setting([], planned)
    moved = _machine(args, planned, search)
    return Advice([*changes, *moved], closest, told, search.stopped)


def _faster(search: Search, planned: Planned, limit: int) -> list[Setting]:
    """Return settings that are faster than `planned`; none if step times are not known."""
    if explain_no_search(planned.cfg) or planned.time.unknown:
        return []
    most_s = (1 - FASTER) * planned.time.total_s
    return [found for found in search.fastest(limit) if found.cost < (False, most_s, 0)]


def _machine(args: Sequence[str], planned: Planned, search: Search) -> list[Setting]:
    for option in choices.machines(args, planned.cfg):
        if not search.may_plan():
            break
        found = search.plan(list(option.words))
        if found and found.planned.plan.fits:
            return [found]
    return []


def advice_as_json(advice: Advice) -> dict[str, Any]:
    """Return the keys that advice adds to a plan's JSON.

    They are `advice`, a list; `closest`, null or an entry like those of the list; `remedies`, a list; and
    `advice_stopped`: whether its time was up before all settings were looked at.
    """
    return {
        "advice": [setting_as_json(change) for change in advice.changes],
        "closest": setting_as_json(advice.closest) if advice.closest else None,
        "remedies": [asdict(found) for found in advice.remedies],
        "advice_stopped": advice.stopped,
    }


def setting_as_json(setting: Setting) -> dict[str, Any]:
    """Return a setting as plain data: bytes of one GPU and of one node, seconds of a step.

    The seconds do not include `unknown_times`. `is_cut_short`: not all tables were tried, so a step may be shorter.
    """
    planned = setting.planned
    return {
        "overrides": setting.overrides,
        "changes_training": setting.changes_training,
        "fits": planned.plan.fits,
        "step_time_s": planned.time.total_s,
        "is_cut_short": planned.is_cut_short,
        "tokens_per_s": planned.time.tokens_per_s,
        "unknown_times": planned.time.unknown,
        "gpu_needed_bytes": needed_bytes(planned, GPU_MEMORY),
        "host_needed_bytes": needed_bytes(planned, HOST_MEMORY),
        "missing_bytes": planned.plan.missing_bytes,
    }
