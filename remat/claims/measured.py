"""Which figures of the claims committed experiments measure: `benchmarks/results/lab/NAME-cpu.json` and `-gpu.json`.

A figure is read only where the experiment measures that very thing. On a CPU experiments have a reduced size: what is
read there is a share of bytes, a ratio of times, or an equality, and no verdict follows from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from remat.claims.claim import POINTS, Outcome, Verdict
from remat.claims.figures import GIB
from remat.config import compose

RESULTS = compose.ROOT / "benchmarks" / "results" / "lab"
LINK = "../benchmarks/results/lab"  # from docs/
SUFFIX = {"cpu": "cpu", "cuda": "gpu"}


GPU = "cuda"


class NotThere(LookupError):
    """A point has no such figure: it did not run, its peak is planned, or it was timed in one launch only."""


@dataclass(frozen=True)
class Lab:
    """The points of one experiment on one kind of machine, `cpu` or `cuda`."""

    device: str
    gpu: str
    points: Mapping[str, Mapping[str, Any]]

    def micro_batch(self, name: str) -> float:
        """GiB of all that a micro-batch has besides model states, at its peak."""
        return float(self._of(name, "micro_batch_bytes")) / GIB

    def peak(self, name: str) -> float:
        """GiB. Raises NotThere for a peak in the optimizer step of a run without GPU, which is planned."""
        if self._of(name, "peak_in_update"):
            raise NotThere(name)
        return float(self._of(name, "peak_bytes")) / GIB

    def step(self, name: str) -> float:
        """Seconds, median."""
        return self._seconds(name, "step")

    def work(self, name: str) -> float:
        """Seconds of forward and backward, medians."""
        return self._seconds(name, "forward") + self._seconds(name, "backward")

    def slower(self, name: str) -> str:
        """`31 (28 to 35) %`: a step against that of the point's baseline, from quartile against quartile."""
        self.step(name)
        ratio = self._of(name, "ratio")
        median, low, high = (100 * (float(ratio[key]) - 1) for key in ("median", "low", "high"))
        return f"{median:.0f} ({low:.0f} to {high:.0f}) %"

    def losses(self, name: str) -> list[float]:
        return [value for _, value in self._of(name, "loss")]

    def _seconds(self, name: str, phase: str) -> float:
        """Raises NotThere for a single launch on a CPU: what drifts on the machine between points is not in it."""
        if self.device == "cpu" and self._of(name, "repeats") < 2:
            raise NotThere(name)
        return float(self._of(name, "times")[phase]["median"])

    def _of(self, name: str, key: str) -> Any:
        found = self.points.get(name, {}).get(key)
        if found in (None, {}, []):
            raise NotThere(name)
        return found


Values = Callable[[Lab], Sequence[float]]


@dataclass(frozen=True)
class Reading:
    """How an experiment measures a figure. `values` are fractions, GiB or plain ratios, as `unit` says.

    `only`: cpu or cuda, where the other kind of machine does not measure it. `note` says what is short of the figure.
    `claimed` decides a figure that no plan decides, on a GPU.
    """

    experiment: str
    values: Values
    unit: str = "%"
    only: str = ""
    note: str = ""
    words: Callable[[Lab], str] | None = None  # instead of numbers
    timed: tuple[str, ...] = ()  # points whose ratio to their baseline has its spread told, on a CPU
    claimed: tuple[float, float] | None = None

    def shown(self, lab: Lab) -> str:
        """Raises NotThere."""
        if self.words:
            text = self.words(lab)
        elif self.timed and lab.device == "cpu":
            text = " / ".join(lab.slower(name) for name in self.timed)
        else:
            text = f"{' / '.join(map(self._number, self.values(lab)))} {self.unit}"
        return f"{text.strip()}, {self.note}" if self.note else text.strip()

    def _number(self, value: float) -> str:
        if self.unit == "%":
            return f"{100 * value:.1f}" if 0 < abs(value) < 0.1 else f"{100 * value:.0f}"
        return f"{value:.3g}"


def added(claim: str, outcome: Outcome, folder: Path = RESULTS) -> Outcome:
    """`outcome` with what committed experiments measured of it; unchanged when none did."""
    texts, verdict = [], outcome.verdict
    for reading in READINGS.get((claim, outcome.what), ()):
        for lab in labs(reading.experiment, folder):
            if reading.only not in ("", lab.device):
                continue
            try:
                shown = reading.shown(lab)
            except NotThere:
                continue
            where = "CPU, reduced" if lab.device == "cpu" else lab.gpu
            texts.append(
                f"{where}: {shown} ([{reading.experiment}]({LINK}/{reading.experiment}-{SUFFIX[lab.device]}.json))"
            )
            if lab.device == "cuda" and reading.claimed and verdict is Verdict.open:
                verdict = _verdict(reading.values(lab), *reading.claimed)
    if not texts:
        return outcome
    if outcome.measured != Outcome("", "", "", Verdict.open).measured:
        texts.insert(0, outcome.measured)
    return replace(outcome, measured="; ".join(texts), verdict=verdict)


def labs(experiment: str, folder: Path = RESULTS) -> list[Lab]:
    """What is committed of an experiment, a GPU's first."""
    found = []
    for device in ("cuda", "cpu"):
        path = folder / f"{experiment}-{SUFFIX[device]}.json"
        if path.exists():
            content = json.loads(path.read_text())
            points = {point["name"]: point for point in content["points"]}
            found.append(Lab(device, str(content["hardware"].get("gpu")), points))
    return found


def _verdict(values: Sequence[float], low: float, high: float) -> Verdict:
    agree = [low - POINTS <= value <= high + POINTS for value in values]
    return Verdict.confirmed if all(agree) else Verdict.depends if any(agree) else Verdict.refuted


def _saved(before: str, after: str) -> Values:
    return lambda lab: [1 - lab.micro_batch(after) / lab.micro_batch(before)]


def _remains(after: str) -> Values:
    return lambda lab: [lab.micro_batch(after) / lab.micro_batch("none")]


def _of_peak(before: str, after: str) -> Values:
    return lambda lab: [1 - lab.peak(after) / lab.peak(before)]


def _slower(*pairs: tuple[str, str]) -> Values:
    """Forward and backward, as a share of those of the first of each pair."""
    return lambda lab: [lab.work(after) / lab.work(before) - 1 for before, after in pairs]


def _longer(*pairs: tuple[str, str]) -> Values:
    """Whole steps."""
    return lambda lab: [lab.step(after) / lab.step(before) - 1 for before, after in pairs]


def _peak(name: str) -> Values:
    return lambda lab: [lab.peak(name)]


def _less(more: str, less: str) -> Values:
    return lambda lab: [lab.micro_batch(more) - lab.micro_batch(less)]


def _both(*parts: Values) -> Values:
    return lambda lab: [value for part in parts for value in part(lab)]


def _equal_losses(lab: Lab) -> str:
    none = lab.losses("none")
    others = [name for name in lab.points if name != "none"]
    equal = sum(lab.losses(name) == none for name in others)
    return f"{len(none)} steps bit-equal under {equal} of {len(others)} policies"


def _best_of_100(lab: Lab) -> str:
    best = min(lab.points, key=lab.micro_batch)
    return f"{best}: {100 * (1 - lab.micro_batch(best) / lab.micro_batch('none')):.0f} %"


def _growth(lab: Lab) -> str:
    kinds = {"fused": "sdpa", "eager": "eager"}
    grown = {
        name: lab.micro_batch(f"4096, attention={word}") / lab.micro_batch(f"2048, attention={word}")
        for name, word in kinds.items()
    }
    return ", ".join(f"{name} {value:.2f}" for name, value in grown.items())


def _nothing(lab: Lab) -> Sequence[float]:
    return []


READINGS: dict[tuple[str, str], tuple[Reading, ...]] = {
    ("A5", "none: peak of the GPU at 1 x 2048"): (Reading("seed_a5", _peak("none"), "GiB", GPU),),
    ("A5", "optimizer: peak of the GPU"): (Reading("seed_a5", _peak("optimizer"), "GiB", GPU),),
    ("A5", "everything: peak of the GPU"): (Reading("seed_a5", _peak("everything"), "GiB", GPU),),
    ("B1", "saved, 1 x 512"): (Reading("seed_b1", _less("1 x 512, none", "1 x 512, full"), "GiB", GPU),),
    ("B1", "what a second sequence adds"): (
        Reading("seed_b1", _less("2 x 512, full", "1 x 512, full"), "GiB", GPU),
    ),
    ("B1", "what 2048 tokens add to 512"): (
        Reading("seed_b1", _less("1 x 2048, full", "1 x 512, full"), "GiB", GPU),
    ),
    ("B1", "forward and backward slower by, 1 x 512 / 1 x 2048"): (
        Reading("seed_b1", _slower(*((f"1 x {n}, none", f"1 x {n}, full") for n in (512, 2048))), only=GPU),
    ),
    ("B2", "remains, every 4 layers"): (Reading("seed_b2", _remains("every 4 layers")),),
    ("B2", "remains, every 8 layers"): (Reading("seed_b2", _remains("every 8 layers")),),
    ("B2", "remains, sqrt(L) segments"): (Reading("seed_b2", _remains("sqrt(L) segments")),),
    ("B3", "saved by sqrt(L) segments, 100 layers"): (Reading("seed_b3", _saved("none", "sqrt(L) segments")),),
    ("B3", "nothing saves more"): (Reading("seed_b3", _nothing, words=_best_of_100),),
    ("B4", "saved by segments of 4, of activations and loss / of the peak with model states"): (
        Reading("seed_b4", _saved("none", "segments of 4"), note="of activations and loss"),
        Reading("seed_b4", _of_peak("none", "segments of 4"), only=GPU, note="of the peak"),
    ),
    ("B4", "forward and backward slower by, segments of 4"): (
        Reading("seed_b4", _slower(("none", "segments of 4")), only=GPU),
    ),
    ("B5", "non-reentrant slower on the GPU, ZeRO-2 / ZeRO-3"): (
        Reading(
            "seed_b5",
            _slower(*((f"{n}, full_reentrant", f"{n}, full") for n in ("ZeRO-2", "ZeRO-3"))),
            only=GPU,
        ),
    ),
    ("B6", "activations saved, 7B at 1 x 2048 / GPT-2 medium at 2 x 256"): (
        Reading("seed_b6", _both(*(_saved(f"{n}, none", f"{n}, full") for n in ("7B", "GPT-2 medium")))),
    ),
    ("B6", "slower by: forward and backward of both / step of 7B with the optimizer on the host"): (
        Reading(
            "seed_b6",
            _slower(*((f"{n}, none", f"{n}, full") for n in ("7B", "GPT-2 medium"))),
            only=GPU,
            note="forward and backward",
        ),
        Reading("seed_b6", _longer(("7B, none", "7B, full")), only=GPU, note="step of 7B"),
    ),
    ("B7", "saved of the peak, vocabulary 1000 / 30522"): (
        Reading("seed_b7", _of_peak("none", "full"), only=GPU, note="vocabulary 1000"),
    ),
    ("B7", "time of 50 steps"): (
        Reading("seed_b7", _longer(("none", "full")), claimed=(0.108, 0.108), timed=("full",)),
    ),
    ("B7", "losses with and without"): (Reading("seed_b7", _nothing, words=_equal_losses),),
    **{
        ("B8", f"{size}: saved of the peak / of the activations"): (
            Reading("seed_b8", _of_peak(f"{size}, none", f"{size}, full"), only=GPU, note="of the peak"),
            Reading("seed_b8", _saved(f"{size}, none", f"{size}, full"), note="of the activations"),
        )
        for size in ("small", "medium")
    },
    ("B8", "time of a step"): (
        Reading(
            "seed_b8",
            _longer(*((f"{size}, none", f"{size}, full") for size in ("small", "medium"))),
            note="small / medium",
            claimed=(0.20, 0.30),
            timed=("small, full", "medium, full"),
        ),
    ),
    **{
        ("B9", f"{depth} layers: saved inside the layers"): (
            Reading("seed_b9", _saved(f"{depth} layers, none", f"{depth} layers, sqrt"), only="cpu"),
        )
        for depth in (12, 24, 48, 96)
    },
    **{
        ("B9", f"{depth} layers: saved of the peak, batch 2 / 16"): (
            Reading(
                "seed_b9", _of_peak(f"{depth} layers, none", f"{depth} layers, sqrt"), only=GPU, note="batch 16"
            ),
        )
        for depth in (12, 24, 48, 96)
    },
    ("B10", "losses and gradient norms of three steps on two ranks"): (
        Reading("seed_b10", _nothing, words=_equal_losses),
    ),
    **{
        ("D2", what): (Reading("seed_d2", _peak(f"{size} at once"), "GiB", GPU, note="1024 tokens"),)
        for size, what in (
            (4, "peak with micro-batch 4, at 1024 / 2048 tokens"),
            (2, "peak with 2"),
            (1, "peak with 1"),
        )
    },
    ("D3", "faster at 512, batch 1 / 2"): (
        Reading(
            "seed_d3", _slower(("512, attention=sdpa", "512, attention=eager")), only=GPU, note="batch 1, LoRA"
        ),
    ),
    ("D3", "activations at 4096 tokens over those at 2048"): (Reading("seed_d3", _nothing, words=_growth),),
    ("D4", "accumulation: saved by micro-batch 1 instead of 4 / 16"): (
        Reading("seed_d2", _both(*(_of_peak(f"{n} at once", "1 at once") for n in (4, 16))), only=GPU),
    ),
    ("D4", "QLoRA: slower by"): (
        Reading(
            "seed_d4",
            lambda lab: [1 - lab.step("none of them") / lab.step("QLoRA")],
            only=GPU,
            claimed=(0.10, 0.10),
        ),
    ),
}
