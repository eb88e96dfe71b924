"""One claim: what was said, the runs that decide it, and the rule that turns figures into a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from remat.claims.figures import GIB, Runs

GB = 1e9
TOLERANCE = 0.10  # of the claimed figure
POINTS = 0.03  # of a share


class ClaimError(AssertionError):
    """A sentence about a claim no longer follows from the plans."""


class Verdict(StrEnum):
    confirmed = "confirmed"
    refuted = "refuted"
    depends = "depends"
    open = "open: needs a GPU"


class Unit(StrEnum):
    gb = "GB"
    share = "%"


@dataclass(frozen=True)
class Outcome:
    """One line of a claim's table. `measured` is text: where nothing was, it says so."""

    what: str
    claimed: str
    planned: str
    verdict: Verdict
    measured: str = "not yet measured"


class Compared(Protocol):
    """A part of a claim that figures decide."""

    def outcome(self, runs: Runs) -> Outcome: ...


@dataclass(frozen=True)
class Figure:
    """A number or range that was claimed, in `unit` (shares as fractions), against one or several planned settings.

    `planned` is in GiB or a fraction. Several settings are those that the claim leaves open: it is confirmed
    when it holds in all, refuted when it lies outside of what they span, and else it depends on them.
    """

    what: str
    unit: Unit
    low: float
    high: float
    planned: Callable[[Runs], float | Sequence[float]]

    def outcome(self, runs: Runs) -> Outcome:
        found = self.planned(runs)
        values = list(found) if isinstance(found, Sequence) else [found]
        ends = [self.low, self.high] if self.low != self.high else [self.low]
        planned = " / ".join(self._number(value) for value in values)
        if self.unit is Unit.gb:
            gib = " to ".join(self._number(end * GB / GIB) for end in ends)
            claimed = f"{' to '.join(f'{end:g}' for end in ends)} GB = {gib} GiB"
        else:
            claimed = f"{' to '.join(self._number(end) for end in ends)}{self._suffix()}"
        return Outcome(self.what, claimed, f"{planned}{self._suffix()}", self._verdict(values))

    def _verdict(self, values: list[float]) -> Verdict:
        scale = GB / GIB if self.unit is Unit.gb else 1.0
        low, high = sorted((self.low * scale, self.high * scale))
        if self.unit is Unit.share:
            low, high = low - POINTS, high + POINTS
        else:
            low, high = low * (1 - TOLERANCE), high * (1 + TOLERANCE)
        agree = [low <= value <= high for value in values]
        if all(agree):
            return Verdict.confirmed
        apart = high < min(values) or low > max(values)
        return Verdict.refuted if apart else Verdict.depends

    def _number(self, value: float) -> str:
        if self.unit is Unit.share:
            return f"{100 * value:.1f}" if 0 < abs(value) < 0.1 else f"{100 * value:.0f}"
        return f"{value:.2f}" if abs(value) < 3 else f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"

    def _suffix(self) -> str:
        return {Unit.gb: " GiB", Unit.share: " %"}[self.unit]


@dataclass(frozen=True)
class Statement:
    """Something that is true or not of each setting; `shown` says what the runs say about it."""

    what: str
    claimed: str
    holds: Callable[[Runs], bool | Sequence[bool]]
    shown: Callable[[Runs], str]

    def outcome(self, runs: Runs) -> Outcome:
        found = self.holds(runs)
        answers = list(found) if isinstance(found, Sequence) else [found]
        verdict = Verdict.confirmed if all(answers) else Verdict.depends if any(answers) else Verdict.refuted
        return Outcome(self.what, self.claimed, self.shown(runs), verdict)


@dataclass(frozen=True)
class Measured:
    """Something that a committed measurement decides. `by` names the machine in words."""

    what: str
    claimed: str
    holds: Callable[[], bool]
    shown: Callable[[], str]
    by: str

    def outcome(self, runs: Runs) -> Outcome:
        verdict = Verdict.confirmed if self.holds() else Verdict.refuted
        return Outcome(self.what, self.claimed, "-", verdict, f"{self.shown()} ({self.by})")


@dataclass(frozen=True)
class Unplanned:
    """Something that no plan decides: it waits for a measurement."""

    what: str
    claimed: str

    def outcome(self, runs: Runs) -> Outcome:
        return Outcome(self.what, self.claimed, "-", Verdict.open)


@dataclass(frozen=True)
class Because:
    """A sentence with `figures` filled in, and what must hold for it to be true."""

    text: str
    holds: Callable[[Runs], bool] | None = None
    figures: Callable[[Runs], Mapping[str, float]] = lambda runs: {}

    def sentence(self, runs: Runs) -> str:
        """Raises ClaimError when the figures no longer bear the sentence."""
        if self.holds is not None and not self.holds(runs):
            raise ClaimError(f"no longer true: {self.text.format(**self.figures(runs))}")
        return self.text.format(**self.figures(runs))


@dataclass(frozen=True, kw_only=True)
class Claim:
    """`said` is the claim in short words; `runs` are the overrides of each run by name, as one types them.

    `depends_on` completes "depends on ..." for a claim whose figures differ between settings.
    """

    id: str
    title: str
    said: str
    runs: Mapping[str, str]
    compared: Sequence[Compared]
    why: Sequence[Because]
    depends_on: str = ""
    within: str = ""


def verdict(claim: Claim, outcomes: Sequence[Outcome]) -> str:
    """Of the whole claim, in words, from those of its figures; what waits for a measurement has no say."""
    decided = [o.verdict for o in outcomes if o.verdict is not Verdict.open]
    refuted = decided.count(Verdict.refuted)
    if refuted:
        part = "" if refuted == len(decided) else f" in {refuted} of {len(decided)} figures"
        found = f"refuted{part}"
    elif Verdict.depends in decided:
        found = f"depends on {claim.depends_on}"
    else:
        found = "confirmed"
    return f"{found}, {claim.within}" if claim.within else found


def run(
    model_and_machine: str,
    strategy: str,
    batch: int,
    seq_len: int,
    *more: str,
    policy: str = "none",
    ranks: int = 1,
    accumulation: int = 1,
) -> str:
    """Overrides of one run as one types them; the loss is Hugging Face's, which is what the sources ran."""
    words = [
        model_and_machine,
        "data=synthetic",  # whole sequences, as in the sources: packed documents would have a mask
        f"deepspeed.config={strategy}",
        f"train.micro_batch_size={batch}",
        f"train.global_batch_size={batch * ranks * accumulation}",
        f"train.seq_len={seq_len}",
        "train.loss=full",
        f"checkpointing={policy}",
    ]
    return " ".join([*words, *more])


def gb(
    what: str, claimed: float | tuple[float, float], planned: Callable[[Runs], float | Sequence[float]]
) -> Figure:
    """A size as a source gives it: GB of 1e9 bytes."""
    return _figure(what, Unit.gb, claimed, planned)


def share(
    what: str, claimed: float | tuple[float, float], planned: Callable[[Runs], float | Sequence[float]]
) -> Figure:
    """A share in percent as a source gives it; planned as a fraction."""
    low, high = claimed if isinstance(claimed, tuple) else (claimed, claimed)
    return _figure(what, Unit.share, (low / 100, high / 100), planned)


def _figure(
    what: str,
    unit: Unit,
    claimed: float | tuple[float, float],
    planned: Callable[[Runs], float | Sequence[float]],
) -> Figure:
    low, high = claimed if isinstance(claimed, tuple) else (claimed, claimed)
    return Figure(what, unit, low, high, planned)
