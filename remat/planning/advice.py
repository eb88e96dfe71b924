"""Find the nearest changes that make a run fit, each planned again: advice from the plan, not from folklore.

Candidates are single options and combinations of up to three. All are screened on a few layers
(remat.planning.screening). What is listed was planned whole, as the command line with its overrides would be.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from remat.config import compose
from remat.config.options import ConfigError
from remat.planning import advice_candidates
from remat.planning.advice_candidates import Kind, Option
from remat.planning.plan import Planned, make_plan, needed_bytes
from remat.planning.recording import Recordings
from remat.planning.screening import NO_ACTIVATIONS, Screen

# Up to these shares of the machine an estimate surely fits, and perhaps fits.
FITS_BELOW, MAY_FIT_BELOW = 0.97, 1.03
LARGEST = 3  # options in one combination
TRIED_FOR_CLOSEST = 3
Candidate = tuple[Option, ...]


@dataclass(frozen=True)
class Change:
    """A change to a run: overrides to add to the command line, and the plan of the run with them."""

    overrides: list[str]
    planned: Planned
    changes_training: bool


@dataclass(frozen=True)
class Advice:
    """Changes to a run that does not fit.

    All `changes` fit. If none of them keeps the machine, `closest` is the candidate that lacks least on it.
    """

    changes: list[Change]
    closest: Change | None


def advise(
    args: Sequence[str], planned: Planned, *, limit: int = 3, recordings: Recordings | None = None
) -> Advice:
    """Return advice for the run of `args`, whose plan is `planned`; empty when that fits.

    The changes come in this order:

    Up to `limit` changes that leave alone what is trained, cheapest in step time first (by bytes where times
    are not known). None of them contains a smaller change that would do. Different sets of options come before
    other values of the same set. Then the smallest change of the sequence length and of the adapters that would
    do. Then the smallest machine of conf/hardware that holds the run unchanged.
    """
    if planned.plan.fits:
        return Advice([], None)
    search = _Search(args, planned, recordings or Recordings())
    changes = [*search.same_training(limit), *search.training()]
    closest = None if changes else search.closest()
    return Advice([*changes, *search.machine()], closest)


def as_json(advice: Advice) -> dict[str, Any]:
    """Return the two keys that a plan's JSON gets.

    They are `advice`, a list, and `closest`, null or an entry like those of the list.
    """
    return {
        "advice": [change_as_json(change) for change in advice.changes],
        "closest": change_as_json(advice.closest) if advice.closest else None,
    }


def change_as_json(change: Change) -> dict[str, Any]:
    """Return a change as plain data: bytes of one GPU and of one node, seconds of a step.

    `unknown_times` are not part of the seconds.
    """
    planned = change.planned
    return {
        "overrides": change.overrides,
        "changes_training": change.changes_training,
        "fits": planned.plan.fits,
        "step_time_s": planned.time.total_s,
        "tokens_per_s": planned.time.tokens_per_s,
        "unknown_times": planned.time.unknown,
        "gpu_needed_bytes": needed_bytes(planned, "GPU memory"),
        "host_needed_bytes": needed_bytes(planned, "host memory per node"),
        "missing_bytes": missing_bytes(planned),
    }


def missing_bytes(planned: Planned) -> dict[str, int]:
    """Return the bytes missing of each resource that is too small."""
    return {r.name: -r.spare_bytes for r in planned.plan.resources if r.spare_bytes is not None and not r.fits}


class _Search:
    def __init__(self, args: Sequence[str], planned: Planned, recordings: Recordings) -> None:
        self._args, self._present, self._recordings = list(args), planned, recordings
        self._screen = Screen(recordings)
        self._estimates: dict[Candidate, Planned | None] = {}
        self._plans: dict[Candidate, Planned | None] = {}
        self._options = advice_candidates.of(args, planned.cfg)

    def same_training(self, limit: int) -> list[Change]:
        options = [option for option in self._options if option.kind is Kind.same_training]
        candidates: list[Candidate] = [(option,) for option in options]
        parts = self._useful(options)
        found: list[Candidate] = []
        for size in range(2, LARGEST + 1):
            candidates += self._combinations(parts if size == 2 else self._most_saving(parts), size)
            found = self._pick(sorted(candidates, key=self._cost), limit)
            if len(found) >= limit:
                break
        return self._changes(found)

    def training(self) -> list[Change]:
        """Return a change for each option that changes what is trained: the smallest one, alone or with few others."""
        found: list[Candidate] = []
        parts = self._useful(o for o in self._options if o.kind is Kind.same_training)
        for axis in dict.fromkeys(o.axis for o in self._options if o.kind is Kind.training):
            own = [(option,) for option in self._options if option.axis == axis]
            picked = self._pick(own, 1)
            for size in range(1, LARGEST):
                if not picked:
                    others = self._combinations(parts if size == 1 else self._most_saving(parts), size)
                    with_others = [(*c, *o) for c in others for o in own]
                    picked = self._pick(sorted(with_others, key=self._cost), 1)
            found += picked
        return self._changes(sorted(found, key=self._cost))

    def machine(self) -> list[Change]:
        for option in advice_candidates.machines(self._args, self._present.cfg):
            if self._plan_fits((option,)):
                return self._changes([(option,)])
        return []

    def closest(self) -> Change:
        """Return the screened candidate that exceeds the machine by the smallest factor.

        Without any candidate, return the run itself.
        """
        tried = [c for c, estimate in self._estimates.items() if estimate is not None]
        tried.sort(key=self._shortage)
        planned = [(c, p) for c in tried[:TRIED_FOR_CLOSEST] if (p := self._plan(c)) is not None]
        least, plan = min([((), self._present), *planned], key=lambda entry: _excess(entry[1]))
        return _change(least, plan)

    def _shortage(self, candidate: Candidate) -> tuple[bool, float]:
        """Return a sort key by how much the candidate lacks. Candidates that are only bounded from below come last."""
        estimate = self._estimate(candidate) or self._present
        return estimate.simulation is NO_ACTIVATIONS, _excess(estimate)

    def _combinations(self, parts: list[Option], size: int) -> Iterator[Candidate]:
        """Yield combinations of options that do not suffice alone, with at most one option of each axis."""
        for combination in itertools.combinations(parts, size):
            if len({option.axis for option in combination}) < size:
                continue
            if not any(self._surely(part) for part in _proper_parts(combination)):
                yield combination

    def _useful(self, options: Iterable[Option]) -> list[Option]:
        """Return the options worth combining: not enough alone, but lowering something that is too large.

        Of one axis, only those that no other one beats in bytes and time alike. Options of DeepSpeed's sizes
        are always kept: they count in combinations only.
        """
        short = set(missing_bytes(self._present))
        kept: list[tuple[Option, Planned | None]] = []
        for option in options:
            plan = self._estimate((option,), even_if_states_do_not_fit=True)
            if option.axis.startswith("deepspeed.overrides"):
                kept.append((option, None))
            elif plan and not self._surely((option,)) and _lower(plan, self._present, short):
                kept.append((option, plan))
        return [
            option
            for index, (option, plan) in enumerate(kept)
            if plan is None
            or not any(
                other is not option
                and other.axis == option.axis
                and better is not None
                and _beats(better, plan, first=place < index)
                for place, (other, better) in enumerate(kept)
            )
        ]

    def _most_saving(self, parts: list[Option]) -> list[Option]:
        """Return the two options of each axis that need least of what is short.

        The rest are dropped because combinations of three are many.
        """
        short = missing_bytes(self._present)

        def need(option: Option) -> float:
            plan = self._estimate((option,))
            return (
                max((needed_bytes(plan, name) / (1 + gap) for name, gap in short.items()), default=0)
                if plan
                else 0
            )

        kept: list[Option] = []
        for axis in dict.fromkeys(option.axis for option in parts):
            kept += sorted((option for option in parts if option.axis == axis), key=need)[:2]
        return kept

    def _pick(self, candidates: Iterable[Candidate], limit: int) -> list[Candidate]:
        """Return up to `limit` fitting candidates, skipping any with a subset that already fits.

        The first candidate of each set of options is taken first, then others until there are enough. The
        result is sorted by the cost of the whole plans.
        """
        possible = [candidate for candidate in candidates if self._possibly(candidate)]
        found: set[Candidate] = set()
        for again in (False, True):
            taken: set[frozenset[str]] = set()
            for candidate in possible:
                axes = frozenset(option.axis for option in candidate)
                if len(found) == limit or candidate in found or (axes in taken and not again):
                    continue
                if self._is_least(candidate):
                    found.add(candidate)
                    taken.add(axes)
        return sorted(found, key=self._planned_cost)

    def _planned_cost(self, candidate: Candidate) -> tuple[float, ...]:
        """Return the cost by the whole plan; the search itself is ordered by estimates."""
        plan = self._plan(candidate)
        return (3.0,) if plan is None else _cost_of(plan, candidate)

    def _is_least(self, candidate: Candidate) -> bool:
        """Return whether the candidate fits and no part of it does."""
        if any(self._surely(part) or self._plan_fits(part) for part in _proper_parts(candidate)):
            return False
        return self._plan_fits(candidate)

    def _estimate(self, candidate: Candidate, *, even_if_states_do_not_fit: bool = False) -> Planned | None:
        """Return the screened estimate of a candidate; None if it is refused."""
        known = self._estimates.get(candidate)
        if candidate not in self._estimates or (
            even_if_states_do_not_fit and known and known.simulation is NO_ACTIVATIONS
        ):
            cfg = self._present.cfg
            try:
                for option in candidate:
                    cfg = option.apply(cfg)
                self._estimates[candidate] = self._screen.estimate(
                    cfg, even_if_states_do_not_fit=even_if_states_do_not_fit
                )
            except ConfigError:
                self._estimates[candidate] = None
        return self._estimates[candidate]

    def _plan(self, candidate: Candidate) -> Planned | None:
        """Return the plan of the command line with the candidate's words; None if it is refused."""
        if candidate not in self._plans:
            try:
                cfg = compose.from_command_line([*self._args, *_words(candidate)]).run
                self._plans[candidate] = make_plan(cfg, recordings=self._recordings)
            except ConfigError:
                self._plans[candidate] = None
        return self._plans[candidate]

    def _plan_fits(self, candidate: Candidate) -> bool:
        if candidate[0].kind is not Kind.machine and not self._possibly(candidate):
            return False
        plan = self._plan(candidate)
        return plan is not None and plan.plan.fits

    def _possibly(self, candidate: Candidate) -> bool:
        estimate = self._estimate(candidate)
        return estimate is not None and _excess(estimate) <= MAY_FIT_BELOW

    def _surely(self, candidate: Candidate) -> bool:
        estimate = self._estimate(candidate)
        return estimate is not None and _excess(estimate) <= FITS_BELOW

    def _cost(self, candidate: Candidate) -> tuple[float, ...]:
        """Return a sort key: seconds per step where all times are known.

        Candidates with unknown times come after, by number of changes and bytes.
        """
        estimate = self._estimate(candidate)
        return (2.0,) if estimate is None else _cost_of(estimate, candidate)

    def _changes(self, found: list[Candidate]) -> list[Change]:
        return [_change(candidate, plan) for candidate in found if (plan := self._plan(candidate))]


def _cost_of(plan: Planned, candidate: Candidate) -> tuple[float, ...]:
    bytes_needed = float(needed_bytes(plan, "GPU memory"))
    if plan.time.unknown:
        return (1.0, len(candidate), bytes_needed)
    return (0.0, plan.time.total_s, len(candidate), bytes_needed)


def _change(candidate: Candidate, plan: Planned) -> Change:
    return Change(_words(candidate), plan, any(option.kind is Kind.training for option in candidate))


def _words(candidate: Candidate) -> list[str]:
    return [word for option in candidate for word in option.words]


def _proper_parts(candidate: Candidate) -> Iterator[Candidate]:
    for size in range(1, len(candidate)):
        yield from itertools.combinations(candidate, size)


def _excess(plan: Planned) -> float:
    """Return bytes needed over bytes found, of the resource that is shortest."""
    return max(
        (r.needed_bytes / max(1, r.found_bytes) for r in plan.plan.resources if r.found_bytes is not None),
        default=0.0,
    )


def _lower(plan: Planned, than: Planned, resources: set[str]) -> bool:
    return any(needed_bytes(plan, name) < needed_bytes(than, name) for name in resources)


def _beats(plan: Planned, other: Planned, *, first: bool) -> bool:
    """Return whether `plan` is no worse than `other` in any byte and in time. Of two equal plans, the first beats."""
    left, right = (
        [*(r.needed_bytes for r in p.plan.resources), 0 if p.time.unknown else p.time.total_s]
        for p in (plan, other)
    )
    if len(left) != len(right):
        return False
    return all(a <= b for a, b in zip(left, right, strict=True)) and (left != right or first)
