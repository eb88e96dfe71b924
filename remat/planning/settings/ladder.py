"""Find the longest sequence that a run can train, rung by rung: `remat plan --ladder`.

Each rung adds one option that saves memory to the rungs before it. An option that allows no longer sequence is reported
and left out of later rungs. All rungs have micro-batch 1 and recompute every layer. Lengths are searched by estimates
(settings/screening.py); the returned rungs have full plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remat.config.options import ConfigError, RunConfig, StorageDtype
from remat.planning.plan import Planned, Recordings, make_plan
from remat.planning.settings import search
from remat.planning.settings.choices import composed, joined
from remat.planning.settings.screening import NO_ACTIVATIONS, Screen

GRANULE = 1024  # tokens: lengths are multiples of it
SMALLER = 0.995  # largest factor on the limit of estimates, after a full plan that does not fit
USED_WELL = 0.98  # share of the memory from which on a length counts as the longest
TRIED = 12  # lengths of one rung, at most
SLICES = 8  # of an MLP: each slice of a long sequence is still long
FIRST = 8192  # tokens: where the search begins
GROWS_BY = 8  # times: how far a guess may go beyond the longest length that was tried
BASE = ("train.micro_batch_size=1", "checkpointing=full")
STORED_AS = "checkpointing.offload.dtype"


@dataclass(frozen=True)
class Rung:
    """One rung: its name, all overrides that reach it, and the plan of its longest sequence.

    `seq_len` is in tokens; 0: nothing fits, and `planned` is None. `bound_by` names the resource that is full at that
    length, or says why longer sequences, or all, are refused. `helps`: its sequence is longer than any before it.
    """

    name: str
    overrides: tuple[str, ...]
    seq_len: int
    planned: Planned | None
    bound_by: str
    helps: bool = False


def climb(
    args: Sequence[str],
    recordings: Recordings,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Rung]:
    """Return the rungs of the run of `args`, in the order of `steps`.

    `progress` gets the number of rungs done and of all. Raises ConfigError if the machine's speed or memory is unknown.
    """
    cfg = composed(args, BASE)
    if reason := search.explain_no_search(cfg):
        raise ConfigError(f"--ladder: {reason}")
    rungs = list(steps(cfg))
    found: list[Rung] = []
    taken, length = base(cfg), FIRST
    for done, (name, words) in enumerate(rungs):
        progress(done, len(rungs))
        if words and _is_so_already(args, taken, words):
            continue
        rung = _Search(args, joined(taken, words), recordings).longest(name, length)
        helps = rung.seq_len > max((earlier.seq_len for earlier in found), default=0)
        found.append(replace(rung, helps=helps))
        if helps:
            taken, length = joined(taken, words), rung.seq_len
    progress(len(rungs), len(rungs))
    return found


def _is_so_already(args: Sequence[str], taken: Sequence[str], words: Sequence[str]) -> bool:
    try:
        return composed(args, joined(taken, words)) == composed(args, taken)
    except ConfigError:  # the search of this rung reports it
        return False


def base(cfg: RunConfig) -> tuple[str, ...]:
    """Return the overrides that all rungs begin with. A storage type on the host is left to the rung that offloads."""
    stores = cfg.checkpointing.offload.dtype is not StorageDtype.same
    return (*BASE, f"{STORED_AS}={StorageDtype.same}") if stores else BASE


def steps(cfg: RunConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name and the overrides of each rung."""
    asked = cfg.checkpointing.offload.dtype
    stored = (f"{STORED_AS}={asked}",) if asked is not StorageDtype.same else ()
    yield "every layer recomputed", ()
    yield "flash attention: no mask", ("model.attention=flash_attention_2",)
    yield "loss in chunks", ("train.loss=chunked",)
    yield "model states in host memory", ("deepspeed.config=zero3_offload",)
    yield f"MLPs in {SLICES} slices", (f"checkpointing.tiles={SLICES}",)
    yield "layer inputs in host memory", ("checkpointing=offload", *stored)
    ranks = cfg.hardware.ranks
    for size in range(2, ranks + 1):
        if ranks % size == 0:
            yield f"{size} ranks share each sequence", (f"train.sequence_parallel_size={size}",)


class _Search:
    """The search for the longest sequence of a run with `words`."""

    def __init__(self, args: Sequence[str], words: tuple[str, ...], recordings: Recordings) -> None:
        self._args, self._words, self._recordings = args, words, recordings
        self._screen = Screen(recordings)
        self._known: dict[int, float] = {}  # bytes needed over bytes found, by length
        self._why: dict[int, str] = {}  # what is full at a length, or why it is refused

    def longest(self, name: str, first: int) -> Rung:
        """Return the rung `name`. The search begins at `first` tokens."""
        limit = 1.0
        while length := largest(self._excess, self._known, first, limit):
            planned = make_plan(self._run(length), recordings=self._recordings)
            if planned.plan.fits:
                bound_by = self._why_no_longer(length) or search.fullest(planned)
                return Rung(name, self._all_words(length), length, planned, bound_by)
            limit *= min(SMALLER, 1 / search.excess(planned))
        return Rung(name, self._words, 0, None, self._why_no_longer(0))

    def _excess(self, length: int) -> float:
        """Return bytes needed over bytes found at a length; infinite where it is refused."""
        excess, self._why[length] = self._look_at(length)
        return excess

    def _look_at(self, length: int) -> tuple[float, str]:
        try:
            estimate = self._screen.estimate(self._run(length))
        except ConfigError as error:
            return math.inf, " ".join(str(error).split())
        states_fit = estimate.simulation is not NO_ACTIVATIONS
        return search.excess(estimate) if states_fit else math.inf, search.fullest(estimate)

    def _why_no_longer(self, length: int) -> str:
        """Return what is full, or why it is refused, at the shortest of the longer lengths that do not fit."""
        longer = [n for n, excess in self._known.items() if n > length and excess > 1]
        return self._why[min(longer)] if longer else ""

    def _run(self, length: int) -> RunConfig:
        return composed(self._args, self._all_words(length))

    def _all_words(self, length: int) -> tuple[str, ...]:
        return joined(self._words, (f"train.seq_len={length}",))


def largest(excess: Callable[[int], float], known: dict[int, float], first: int, limit: float = 1.0) -> int:
    """Return about the longest length at which `excess`, which grows with it, is at most `limit`; 0: there is none.

    `known` caches the values of `excess` by length. Memory grows nearly linearly with the length, so the next guess
    lies on a line through the two nearest values. If such a guess left most of the range open, the next halves it.
    """
    halve = 0.0  # where the next guess shall lie, if not on the line
    for _ in range(TRIED):
        fits = max((n for n, value in known.items() if value <= limit), default=0)
        fails = min((n for n, value in known.items() if value > limit), default=math.inf)
        if known.get(fits, 0.0) >= USED_WELL * limit or fails - fits <= max(GRANULE, (1 - USED_WELL) * fits):
            break
        guess = (
            first if not known else halve or _on_line(known, limit) or _without_line(known, fits, fails, limit)
        )
        guess = _between(guess, fits, fails) if known else _multiple(first)
        known[guess] = excess(guess)
        at_an_end = guess in (fits + GRANULE, fails - GRANULE)
        halve = (fits + fails) / 2 if at_an_end and not halve and fails < math.inf else 0.0
    return max((n for n, value in known.items() if value <= limit), default=0)


def _on_line(known: Mapping[int, float], limit: float) -> float | None:
    """Return the length of excess `limit` on a line through the two nearest values; None without such a line."""
    finite = sorted((n for n, value in known.items() if value < math.inf), key=lambda n: abs(known[n] - limit))
    if len(finite) < 2 or known[finite[0]] == known[finite[1]]:
        return None
    one, other = finite[:2]
    return one + (limit - known[one]) * (other - one) / (known[other] - known[one])


def _without_line(known: Mapping[int, float], fits: int, fails: float, limit: float) -> float:
    """Return the middle of the open range. If no length fails yet, scale the only known one to `limit`, or double."""
    if fails < math.inf:
        return (fits + fails) / 2
    return fits * limit / known[fits] if len(known) == 1 else 2.0 * fits


def _between(length: float, fits: int, fails: float) -> int:
    highest = fails - GRANULE if fails < math.inf else GROWS_BY * fits
    return _multiple(min(max(length, fits + GRANULE), highest))


def _multiple(length: float) -> int:
    return max(0, int(length) // GRANULE * GRANULE)


def as_json(rungs: Sequence[Rung]) -> list[dict[str, Any]]:
    """Return a record for each rung: lengths in tokens, bytes of one GPU and of one node, seconds of a step."""
    return [
        {
            "rung": rung.name,
            "seq_len": rung.seq_len,
            "bound_by": rung.bound_by,
            "helps": rung.helps,
            "overrides": list(rung.overrides),
            "plan": rung.planned and search.setting_as_json(search.Setting(list(rung.overrides), rung.planned)),
        }
        for rung in rungs
    ]
