"""Tokens against peak bytes: each rung of `remat plan --ladder` planned, then run, at several lengths.

Each point is one launch on two ranks, with four micro-batches of one sequence before the update. All plans are made
before the first run. Compared is the peak of a micro-batch beside the model states, which the run counts op by op and
writes to ledger.json. A point that was run with the same options is not run again.

    python benchmarks/long.py                     # benchmarks/results/long_cpu.json, and its table and picture
    python benchmarks/long.py --plan-only         # the plans alone, and what was measured before
    python benchmarks/long.py --write             # the table and the picture alone
    python benchmarks/long.py --climb 600         # on a GPU: the longest sequence of each rung, planned and measured
    python benchmarks/long.py --climb 120 --device cpu --cap-mib 60      # the same climb under a cap on the peak

A climb starts at FIRST tokens, doubles the length until memory is full, and then halves what is open.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import plan_accuracy  # noqa: E402
from benchmarks.accuracy_points import LLAMA_1B, portable  # noqa: E402
from benchmarks.environment import environment  # noqa: E402
from benchmarks.plan_accuracy import NOT_YET, TIME_OVER, write  # noqa: E402
from remat.config import compose  # noqa: E402
from remat.config.options import ConfigError  # noqa: E402
from remat.config.units import GIB, MIB  # noqa: E402
from remat.planning.plan import make_plan  # noqa: E402
from remat.planning.settings import ladder, search  # noqa: E402
from remat.planning.settings.choices import joined  # noqa: E402
from remat.report.charts import LIGHT, style  # noqa: E402
from remat.training.ledger import MICRO_BATCH  # noqa: E402
from scripts import generated  # noqa: E402

RESULTS, WORK = ROOT / "benchmarks" / "results", ROOT / "outputs" / "long"
RESULT = RESULTS / "long_cpu.json"
PAGE, PICTURE = ROOT / "docs" / "long-sequences.md", ROOT / "docs" / "figures" / "long_cpu.png"
MARK, END = "<!-- measured: written by benchmarks/long.py -->", "<!-- end of measured -->"
LENGTHS = (1024, 2048, 4096)  # tokens of a sequence
RANKS, ACCUMULATION = 2, 4  # ZeRO-3 has learnt the order of its gathers in the fourth micro-batch
BAR = 0.03
FIRST, NEAR = 1024, 0.05  # tokens where a climb begins; it ends where so little of the length is open
LIMIT_S = 400  # for one launch
ON_CPU = [
    "model=llama8b", "model.architecture.hidden_size=128", "model.architecture.intermediate_size=1024",
    "model.architecture.num_hidden_layers=4", "model.architecture.num_attention_heads=4",
    "model.architecture.num_key_value_heads=2", "train.precision=fp32",
    "checkpointing.offload.min_bytes=65536", "checkpointing.offload.keep_last_layers=0",
]  # fmt: skip
VOCABULARY, LARGE_VOCABULARY = 384, 65536  # a chunk of logits is 1,024 tokens of the large one
LOSS, REFUSED = "loss in chunks", "refused"
MEMORY = ("ran", "out of memory", REFUSED)  # outcomes after which a climb goes on
NO_FLASH = "flash attention: no mask"  # its kernels are for GPUs


@dataclass(frozen=True)
class Rung:
    """A rung of the ladder: its name, and all overrides that reach it."""

    name: str
    words: tuple[str, ...]


def main() -> int:
    args = parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if args.climb:
        climb_all(args)
        return 0
    if not args.write:
        measure_all(args)
    draw(json.loads(RESULT.read_text())["points"], PICTURE)
    sys.argv = sys.argv[:1]
    return generated.update(PAGE, renewed)


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--write", action="store_true", help="run nothing")
    parser.add_argument("--plan-only", action="store_true", help="run nothing, plan what was not run yet")
    parser.add_argument("--climb", type=float, metavar="SECONDS", help="of all rungs together")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of a climb")
    parser.add_argument("--cap-mib", type=float, help="of a climb on a CPU: what a micro-batch may need")
    parser.add_argument("--work", type=Path, default=WORK, help="runs and data")
    args = parser.parse_args(words)
    if args.climb and (args.device == "cpu") != (args.cap_mib is not None):
        parser.error("--cap-mib belongs to --climb with --device cpu: a GPU has a limit of its own")
    return args


def rungs(device: str, work: Path) -> list[Rung]:
    """Every rung that the device can run; each has the words of those before it, as the ladder adds them."""
    cfg = compose.compose_run([*base(device, work), *ladder.BASE, "train.seq_len=1024"]).run
    taken, found = tuple[str, ...](ladder.BASE), []
    for name, words in ladder.steps(cfg):
        if device == "cpu" and name == NO_FLASH:
            continue
        if device == "cpu" and name == LOSS:
            found += of_the_loss(taken, joined(taken, words))
            continue
        taken = joined(taken, words)
        found.append(Rung(name, taken))
    return found


def of_the_loss(before: tuple[str, ...], after: tuple[str, ...]) -> list[Rung]:
    """The rung of the loss and the one before it, with a vocabulary that needs more than one chunk.

    One chunk of logits would hide what the layers of so small a model need: the rungs above go without both.
    """
    large = f"model.architecture.vocab_size={LARGE_VOCABULARY}"
    return [
        Rung(f"{LARGE_VOCABULARY:,} words, all logits at once", (*before, large)),
        Rung(f"{LARGE_VOCABULARY:,} words, {LOSS}", (*after, large)),
    ]


def ranks_of(device: str) -> int:
    return RANKS if device == "cpu" else 1


def base(device: str, work: Path) -> list[str]:
    """The options that all rungs share: random weights, synthetic tokens, one update, no evaluation, no saves."""
    shape = [*ON_CPU, f"model.architecture.vocab_size={VOCABULARY}"] if device == "cpu" else LLAMA_1B
    return [
        "recipe=tiny_zero3_offload", "name=long", f"output_dir={work}/runs", *shape, "model.init=random",
        "model.path=null", "model.tokenizer=bytes", "model.architecture.max_position_embeddings=4194304",
        "model.attention=sdpa", "data=synthetic", f"data.cache_dir={work}/data", "data.eval_fraction=0",
        "data.synthetic_blocks=8", "data.packing=stream", "deepspeed.config=zero3", "train.loss=full",
        f"hardware.gpus_per_node={ranks_of(device)}", "train.steps=1", "train.log_every=1", "train.eval_every=0",
        "optim.warmup_steps=0", "save.every=0", "save.at_end=false", "save.export=false",
        "tracking=wandb_disabled", "force=true",
    ]  # fmt: skip


def overrides(rung: Rung, tokens: int, device: str, work: Path) -> list[str]:
    sharing = next((int(w.partition("=")[2]) for w in rung.words if "sequence_parallel_size" in w), 1)
    name = "".join(letter if letter.isalnum() else "-" for letter in rung.name)
    return [
        *base(device, work), *rung.words, f"train.seq_len={tokens}",
        f"train.global_batch_size={ACCUMULATION * ranks_of(device) // sharing}", f"run_id={name}_{tokens}",
    ]  # fmt: skip


def plan(words: Sequence[str], device: str) -> dict[str, Any]:
    """What the planner says before the run: bytes of a micro-batch beside the model states, and what its peak is."""
    cfg = compose.compose_run(list(words)).run
    made = make_plan(cfg, world_size=ranks_of(device), on_gpu=device == "cuda")
    peak = made.simulation.peak
    return {
        "planned_bytes": peak.total_bytes,
        "planned_peak": f"{peak.phase}, {peak.operation}",
        "excess": search.excess(made) if device == "cuda" else None,
    }


def run(words: list[str], device: str, work: Path, limit_s: float) -> dict[str, Any]:
    """One launch, and what its ledger says of the peak of a micro-batch."""
    run_id = next(word.partition("=")[2] for word in words if word.startswith("run_id="))
    folder = work / "runs" / "long" / run_id
    shutil.rmtree(folder, ignore_errors=True)
    row = plan_accuracy.launch(words, limit_s, device, ranks_of(device))
    return row | {"measured_bytes": measured_bytes(folder / "ledger.json")}


def measured_bytes(ledger: Path) -> int | None:
    """The measured peak of a micro-batch, in bytes; None where the run got no further."""
    lines = json.loads(ledger.read_text())["rows"] if ledger.exists() else []
    found = next((line for line in lines if line["category"] == MICRO_BATCH), None)
    if found is None or found["measured"] is None:
        return None
    return round(found["measured"] * {"MiB": MIB, "GiB": GIB}[found["unit"]])


def measure_all(args: argparse.Namespace) -> None:
    """Plan every rung at every length, then run each; the result is written after the plans and after each run."""
    old = json.loads(RESULT.read_text()) if RESULT.exists() else {"environment": None, "points": []}
    known = {tuple(row["words"]): row for row in old["points"] if row["status"] == "ran"}
    asked = [
        (rung.name, overrides(rung, tokens, "cpu", args.work))
        for tokens in args.lengths
        for rung in rungs("cpu", args.work)
    ]
    points = [known.get(tuple(portable(words))) or planned_row(name, words) for name, words in asked]
    found = old["environment"] if args.plan_only else environment("cpu")
    write(RESULT, {"environment": found, "points": points})
    for row, (_, words) in zip(points, asked, strict=True):
        if not args.plan_only and row["status"] != "ran":
            row |= run(words, "cpu", args.work, LIMIT_S)
            write(RESULT, {"environment": found, "points": points})
        print(line(row), flush=True)


def planned_row(name: str, words: list[str]) -> dict[str, Any]:
    """The row of a point that was not run yet."""
    tokens = next(int(word.partition("=")[2]) for word in words if word.startswith("train.seq_len="))
    row = {"rung": name, "seq_len": tokens, "words": portable(words), "status": NOT_YET, "measured_bytes": None}
    return row | plan(words, "cpu")


def error_of(row: Mapping[str, Any]) -> float | None:
    """The error of the plan as a share of what was measured; None where nothing was."""
    return row["planned_bytes"] / row["measured_bytes"] - 1 if row.get("measured_bytes") else None


def line(row: Mapping[str, Any]) -> str:
    error = error_of(row)
    found = (
        f"measured {row['measured_bytes'] / MIB:8.2f} MiB  {error:+6.1%}"
        if error is not None
        else row["status"]
    )
    return f"{row['seq_len']:7,} {row['rung']:32} planned {row['planned_bytes'] / MIB:8.2f} MiB  {found}"


# A climb


def climb_all(args: argparse.Namespace) -> None:
    """Climb every rung; each has an equal share of the time that is left."""
    ends, rows = time.monotonic() + args.climb, []
    result = RESULTS / "long_climb_cuda.json" if args.device == "cuda" else args.work / "long_climb_cpu.json"
    result.parent.mkdir(parents=True, exist_ok=True)
    found, todo = environment(args.device), rungs(args.device, args.work)
    for place, rung in enumerate(todo):
        left = max(0.0, ends - time.monotonic())
        rows.append(climb(rung, time.monotonic() + left / (len(todo) - place), args))
        print({name: value for name, value in rows[-1].items() if name != "tried"}, flush=True)
        write(result, {"environment": found, "cap_mib": args.cap_mib, "rungs": rows})


def climb(rung: Rung, ends: float, args: argparse.Namespace) -> dict[str, Any]:
    """Find the longest sequence that runs before `ends`, beside the longest that is planned to fit."""
    tried: list[dict[str, Any]] = []
    row: dict[str, Any] = {"rung": rung.name, "planned_seq_len": planned_longest(rung, args)}
    tokens = FIRST
    while tokens:
        left = ends - time.monotonic()
        if left <= 0:
            break
        words = overrides(rung, tokens, args.device, args.work)
        tried.append({"seq_len": tokens} | run_or_refuse(words, args, left))
        tokens = next_length([(each["seq_len"], outcome(each, args.cap_mib)) for each in tried])
    ran = [each["seq_len"] for each in tried if outcome(each, args.cap_mib) == "ran"]
    last = outcome(tried[-1], args.cap_mib) if tried and not tokens else TIME_OVER
    return row | {
        "measured_seq_len": max(ran, default=0),
        "ended": "found" if last in MEMORY else last,
        "tried": tried,
    }


def run_or_refuse(words: list[str], args: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """Run a length; options that are refused for it are no end of the climb."""
    try:
        return run(words, args.device, args.work, limit_s)
    except ConfigError as error:
        return {"status": REFUSED, "said": str(error), "measured_bytes": None}


def outcome(row: Mapping[str, Any], cap_mib: float | None) -> str:
    """What became of a length; over the cap counts as out of memory."""
    if cap_mib is not None and (row.get("measured_bytes") or 0) > cap_mib * MIB:
        return "out of memory"
    return str(row["status"])


def next_length(tried: Sequence[tuple[int, str]]) -> int:
    """The length to try after these; 0: the longest is found, or a run ended for another reason than memory."""
    if any(outcome not in MEMORY for _, outcome in tried):
        return 0
    ran = max((tokens for tokens, outcome in tried if outcome == "ran"), default=0)
    full = min((tokens for tokens, outcome in tried if outcome != "ran"), default=0)
    if not full:
        return 2 * ran
    middle = (ran + full) // 2 // ladder.GRANULE * ladder.GRANULE
    return middle if middle > ran and full - ran > NEAR * full else 0


def planned_longest(rung: Rung, args: argparse.Namespace) -> int:
    """The longest sequence that is planned to fit in the GPU, or under the cap, in tokens."""
    return ladder.largest(partial(planned_excess, rung, args), {}, FIRST)


def planned_excess(rung: Rung, args: argparse.Namespace, tokens: int) -> float:
    """Bytes needed over bytes found, as planned; infinite where the run is refused."""
    try:
        found = plan(overrides(rung, tokens, args.device, args.work), args.device)
    except ConfigError:
        return float("inf")
    return float(found["planned_bytes"] / (args.cap_mib * MIB) if args.cap_mib else found["excess"])


# The page


def table(points: Sequence[Mapping[str, Any]]) -> str:
    """Lengths across, rungs down: measured MiB, and the error of the plan."""
    lengths = sorted({row["seq_len"] for row in points})
    by_place = {(row["rung"], row["seq_len"]): row for row in points}
    head = ["rung", *(f"{tokens:,} tokens" for tokens in lengths)]
    rows = [
        (rung, *(cell(by_place.get((rung, tokens))) for tokens in lengths))
        for rung in dict.fromkeys(row["rung"] for row in points)
    ]
    return "\n".join([generated.table(head, rows, range(1, len(head))), "", closing(points)])


def closing(points: Sequence[Mapping[str, Any]]) -> str:
    """Say what the cells are, and how many plans are within the bar."""
    what = (
        "MiB of a micro-batch beside the model states. Each rung has the options of those above it; the large "
        "vocabulary is that of its two rows alone."
    )
    errors = [error for row in points if (error := error_of(row)) is not None]
    if not errors:
        return f"{what} All are planned; none was measured yet."
    within, worst = sum(abs(error) <= BAR for error in errors), max(errors, key=abs)
    return (
        f"{what} In brackets is the error of the plan, which was made before the run. {within} of {len(points)} plans "
        f"are within {BAR:.0%} of what was measured; the worst is {worst:+.1%} off."
    )


def cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "not measured"
    error = error_of(row)
    if error is None:
        return f"planned {row['planned_bytes'] / MIB:,.1f}, {row['status']}"
    return f"{row['measured_bytes'] / MIB:,.1f} ({error:+.1%})"


def draw(points: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Measured MiB are points, planned ones lines, both over tokens."""
    import matplotlib

    with matplotlib.rc_context(style(LIGHT)):
        figure = Figure(figsize=(9.2, 4.6), layout="constrained")
        axes = figure.subplots()
        for place, rung in enumerate(dict.fromkeys(row["rung"] for row in points)):
            rows, color = [row for row in points if row["rung"] == rung], f"C{place}"
            planned = [(row["seq_len"], row["planned_bytes"] / MIB) for row in rows]
            measured = [(row["seq_len"], row["measured_bytes"] / MIB) for row in rows if row["measured_bytes"]]
            dashes = ("-", (0, (4, 4)))[place % 2]  # two rungs may need the same
            axes.plot(*zip(*planned, strict=True), color=color, linestyle=dashes, label=rung)
            if measured:
                axes.plot(*zip(*measured, strict=True), "o", color=color)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        lengths = sorted({row["seq_len"] for row in points})
        axes.set_xticks(lengths, [short(tokens) for tokens in lengths])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda mib, _: f"{mib:,.0f}")
        axes.set_xlabel("tokens of a sequence")
        axes.set_ylabel("MiB of a micro-batch, beside the model states")
        axes.legend(title="lines: planned, points: measured")
        figure.savefig(path, dpi=110)


def short(tokens: int) -> str:
    """4096 as `4K`, 1500 as `1,500`."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"


def renewed(page: str) -> str:
    """Return `page` with the table replaced."""
    return generated.between(page, MARK, END, table(json.loads(RESULT.read_text())["points"]))


if __name__ == "__main__":
    sys.exit(main())
