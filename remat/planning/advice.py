"""Say which changes make a run fit: the same training in less memory, other training, or a larger machine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from remat.planning import choices
from remat.planning.plan import Planned, needed_bytes
from remat.planning.recording import Recordings
from remat.planning.search import Search, Setting


@dataclass(frozen=True)
class Change:
    """A change to a run: overrides to add to the command line, and the plan of the run with them."""

    overrides: list[str]
    planned: Planned
    changes_training: bool = False


@dataclass(frozen=True)
class Advice:
    """Changes to a run that does not fit.

    All `changes` fit. If none of them keeps the machine, `closest` is the setting that lacks least on it.
    """

    changes: list[Change]
    closest: Change | None


def advise(
    args: Sequence[str],
    planned: Planned,
    *,
    limit: int = 3,
    recordings: Recordings | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Advice:
    """Return advice for the run of `args`, whose plan is `planned`; empty when that fits.

    The changes come in this order: up to `limit` that leave alone what is trained, the fastest first; then the
    smallest change of the sequence length and of the adapters that would do, with what else it needs; then the
    smallest machine of conf/hardware that holds the run unchanged.
    """
    if planned.plan.fits:
        return Advice([], None)
    search = Search(args, planned.cfg, recordings or Recordings(), progress)
    changes = [Change(found.overrides, found.planned) for found in search.fastest(limit)]
    for axis in choices.other_training(args, planned.cfg):
        fitting = (found for option in axis if (found := search.with_change(option)))
        changes += [Change(found.overrides, found.planned, True) for found in itertools.islice(fitting, 1)]
    closest = None if changes else _nearer(search.closest(), planned)
    return Advice([*changes, *_machine(args, planned, search)], closest)


def _nearer(closest: Setting | None, planned: Planned) -> Change:
    """Return the run itself where nothing else could be planned."""
    return Change(closest.overrides, closest.planned) if closest else Change([], planned)


def _machine(args: Sequence[str], planned: Planned, search: Search) -> list[Change]:
    for option in choices.machines(args, planned.cfg):
        found = search.plan(list(option.words))
        if found and found.planned.plan.fits:
            return [Change(found.overrides, found.planned)]
    return []


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
