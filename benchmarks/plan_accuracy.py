"""Planned against measured: GPU memory of real runs beside what the planner says of them, misses included.

Each point is one fresh launch of train.py on one GPU: random weights, synthetic tokens, a few steps. Its plan is made
in this process from the same options. What is measured is the largest max_memory_allocated of any step, after
loading, and the largest max_memory_reserved; and how much more of the whole device was in use while it ran. A run that
runs out of memory is a row, and so is one that this machine cannot plan. Every finished point is a file of its own, so
a second start goes on where the first ended; the result is written after each.

    python benchmarks/plan_accuracy.py --minutes 9                 # as many points as fit, most telling first
    python benchmarks/plan_accuracy.py --plan-only                 # renew what is planned, keep what was measured
    python benchmarks/plan_accuracy.py --device cpu --only NAME    # a rehearsal: small shapes, no GPU to measure
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULT = ROOT / "benchmarks" / "results" / "plan_accuracy.json"
WORK = ROOT / "outputs" / "plan_accuracy"

from benchmarks.accuracy_points import POINTS, Point, overrides, portable  # noqa: E402
from benchmarks.environment import commit, environment  # noqa: E402
from remat.config import compose  # noqa: E402
from remat.config.options import ConfigError  # noqa: E402
from remat.config.units import GIB  # noqa: E402
from remat.machine.host_memory import host_memory  # noqa: E402
from remat.planning.plan import make_plan, needed_bytes  # noqa: E402
from remat.report.tracking import RECORD  # noqa: E402

LIMIT_S = 180  # for one point; advice after an out-of-memory takes long
REFUSED, OUT_OF_MEMORY = 3, 70  # exit codes of train.py
NOT_YET, TIME_OVER = "not yet measured", "time was over"
AGAIN = {"failed", TIME_OVER}  # what may pass the next time
PLANNED = [
    "planned_allocated_bytes", "planned_total_bytes", "planned_host_bytes", "planned_by_category", "planned_peak"
]  # fmt: skip
MEDIAN_BAR, WORST_BAR = 0.03, 0.08
MUST_AGREE = ["gpu", "gpu_bytes", "cuda", "driver", "attention", "torch", "deepspeed", "transformers"]
NONE_MEASURED = {"allocated_bytes": None, "reserved_bytes": None, "device_bytes": None}
ALLOCATED, RESERVED = "memory/gpu_allocated_peak_gib", "memory/gpu_reserved_peak_gib"


def main() -> None:
    args = parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    points = [point for point in POINTS if not args.only or point.name in args.only]
    result = args.result or (RESULT if args.device == "cuda" else args.work / "plan_accuracy_cpu.json")
    if args.plan_only:
        renew(result, points, args)
        return
    if args.device == "cuda":
        require_gpu()
    folder = args.work / "points"
    folder.mkdir(parents=True, exist_ok=True)
    result.parent.mkdir(parents=True, exist_ok=True)
    found = Rows(result, folder, args)
    try:
        run_all(points, folder, found, args)
        found.write({point.name: not_measured(point, args) for point in found.missing(points)})
    except KeyboardInterrupt:
        print("stopped; what is finished is written: start it again to go on")
    asked = {point.name for point in points}
    done = sum(was_run(row) for row in found.all() if row["name"] in asked)
    print(f"{done} of {len(points)} points: {result}")
    print(summarize([row for row in found.all() if row["name"] in asked]))


class Rows:
    """What is known of every point: measured under --work, else the row of the same run in the result file."""

    def __init__(self, result: Path, folder: Path, args: argparse.Namespace) -> None:
        self._result, self._folder, self._args = result, folder, args
        self._environment = environment(args.device)
        old = json.loads(result.read_text()) if result.exists() else {"environment": None, "points": []}
        same = on_the_same(old["environment"], self._environment)
        self._rows = {row["name"]: row if same else only_planned(row) for row in old["points"]}

    def all(self, more: Mapping[str, dict[str, Any]] | None = None) -> list[dict[str, Any]]:
        """In the order of POINTS. `more`: of points that nothing is known of."""
        rows = []
        for point in POINTS:
            path = self._folder / f"{point.name}.json"
            words = portable(overrides(point, self._args))
            known = [json.loads(path.read_text())] if path.exists() else []
            known += [self._rows[point.name]] if point.name in self._rows else []
            known += [more[point.name]] if more and point.name in more else []
            rows += [row for row in known if row["words"] == words][:1]
        return rows

    def missing(self, points: list[Point]) -> list[Point]:
        known = {row["name"] for row in self.all()}
        return [point for point in points if point.name not in known]

    def write(self, more: Mapping[str, dict[str, Any]] | None = None) -> None:
        write(self._result, {"environment": self._environment, "points": self.all(more)})


def on_the_same(old: dict[str, Any] | None, new: dict[str, Any]) -> bool:
    """Figures of the same GPU and libraries stand in one table, whatever the rest of the machine, and the day."""
    return old is not None and all(old.get(name) == new[name] for name in MUST_AGREE)


def only_planned(row: dict[str, Any]) -> dict[str, Any]:
    if not was_run(row):
        return row
    kept = {key: value for key, value in row.items() if key in ("name", "words") or key.startswith("planned_")}
    return kept | {"status": NOT_YET, **NONE_MEASURED}


def run_all(points: list[Point], folder: Path, found: Rows, args: argparse.Namespace) -> None:
    """Measure what has no file in `folder`, until the minutes are over; the result is written after each point."""
    ends = time.monotonic() + 60 * args.minutes
    for point in points:
        path = folder / f"{point.name}.json"
        if is_done(path, overrides(point, args)):
            continue
        if time.monotonic() > ends:
            print(f"{args.minutes} minutes are over; start again to go on")
            break
        row = measure(point, args)
        write(path, row)
        found.write()
        print(line(row), flush=True)
    found.write()


def renew(result: Path, points: list[Point], args: argparse.Namespace) -> None:
    """Plan every point again, and keep what was measured of exactly the same run."""
    old = json.loads(result.read_text()) if result.exists() else {"environment": None, "points": []}
    known = {tuple(portable(row["words"])): row for row in old["points"]}
    rows = []
    for point in points:
        new = not_measured(point, args)
        before = known.get(tuple(portable(new["words"])), {})
        kept = before if was_run(before) else {}
        rows.append(new | {key: value for key, value in kept.items() if not key.startswith("planned_")})
        print(line(rows[-1]), flush=True)
    write(result, {"environment": old["environment"], "points": rows})


def not_measured(point: Point, args: argparse.Namespace) -> dict[str, Any]:
    """The row of a point that is only planned, or cannot be on this machine."""
    row = {"name": point.name, "words": portable(overrides(point, args)), "status": NOT_YET}
    return row | NONE_MEASURED | plan(point, args)


def was_run(row: Mapping[str, Any]) -> bool:
    """It was launched, whatever became of it."""
    return "exit_code" in row


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="no point is started after that many")
    parser.add_argument("--only", nargs="+", choices=[point.name for point in POINTS], metavar="NAME")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--plan-only", action="store_true", help="run nothing")
    parser.add_argument("--work", type=Path, default=WORK, help="finished points, runs and data")
    parser.add_argument("--result", type=Path, help="default: benchmarks/results/plan_accuracy.json of a GPU")
    return parser.parse_args(words)


def require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        sys.exit(
            "torch sees no GPU: nothing can be measured. --plan-only plans the points, --device cpu rehearses one"
        )


def plan(point: Point, args: argparse.Namespace) -> dict[str, Any]:
    """What the planner says of the point on one rank; made in this process from the run's own options.

    Where this machine cannot have such a run (no bitsandbytes, say), no figures, and why.
    """
    try:
        run = compose.compose_run(overrides(point, args)).run
        made = make_plan(run, world_size=1, on_gpu=args.device == "cuda")
    except ConfigError as error:
        return dict.fromkeys(PLANNED) | {"status": "refused", "said": str(error).splitlines()[0]}
    needed = needed_bytes(made, "GPU memory") if args.device == "cuda" else made.plan.peak_bytes
    peak = made.plan.peak
    figures = (
        made.plan.peak_bytes,
        needed,
        needed_bytes(made, "host memory per node"),
        {str(name): size for name, size in made.plan.gpu.items()},
        f"{peak.phase}, layer {peak.layer}, {peak.operation}",
    )
    return dict(zip(PLANNED, figures, strict=True))


def measure(point: Point, args: argparse.Namespace) -> dict[str, Any]:
    """Plan it, run it, read what it held. What cannot be planned is not run: train.py would refuse it as well."""
    row = not_measured(point, args)
    if row["status"] == "refused":
        return row
    run_folder = args.work / "runs" / "plan_accuracy" / point.name
    shutil.rmtree(run_folder, ignore_errors=True)
    fits_host = row["planned_host_bytes"] < host_memory().available_bytes
    force = ["force=true"] if fits_host else []  # a miss on the GPU must show
    with device_memory(args.device) as device:
        row |= launch([*overrides(point, args), *force], LIMIT_S, args.device)
    return row | read(run_folder) | device | {"commit": commit()}


def launch(words: list[str], limit_s: float, device: str, ranks: int = 1) -> dict[str, Any]:
    """One launch of train.py, whatever becomes of it: status, exit code, seconds, and what it said."""
    from tests.support.launcher import deepspeed

    started = time.monotonic()
    try:
        done = deepspeed(*words, ranks=ranks, gpus=device == "cuda", timeout_s=limit_s)
        code, out, ended = done.code, done.out, status(done.code, done.out)
    except AssertionError as error:  # it took too long and was ended
        code, out, ended = -1, str(error), TIME_OVER
    row = {"status": ended, "exit_code": code, "wall_s": round(time.monotonic() - started, 1)}
    return row if ended == "ran" else row | {"said": out[-3000:]}


def status(code: int, out: str) -> str:
    """Of one run, from its exit code and what it said."""
    if code == 0:
        return "ran"
    if code == REFUSED:
        return "refused"
    ran_out = code == OUT_OF_MEMORY and re.search(r"out of (GPU|host) memory in", out)
    return "out of memory" if ran_out else "failed"


def read(run_folder: Path) -> dict[str, Any]:
    """The largest peak of any step, in bytes, and each step's; None where there was no GPU or no step."""
    record = run_folder / RECORD
    rows = [json.loads(text) for text in record.read_text().splitlines()] if record.exists() else []
    steps = [row for row in rows if "loss/train" in row]
    allocated = [int(row[ALLOCATED] * GIB) for row in steps if ALLOCATED in row]
    reserved = [int(row[RESERVED] * GIB) for row in steps if RESERVED in row]
    return {
        "steps": len(steps),
        "allocated_bytes": max(allocated, default=None),
        "allocated_bytes_by_step": allocated,
        "reserved_bytes": max(reserved, default=None),
    }


@contextmanager
def device_memory(device: str) -> Iterator[dict[str, Any]]:
    """Fills `device_bytes`: the most that was in use on the whole GPU, less what was in use before. None: no GPU.

    What torch does not allocate (context, kernels, NCCL) is in it. This process has a context of its own by then,
    which is part of what was in use before. Read fifty times a second.
    """
    found: dict[str, Any] = {"device_bytes": None}
    if device != "cuda":
        yield found
        return
    import torch

    def used() -> int:
        free, total = torch.cuda.mem_get_info(0)
        return total - free

    before, most, over = used(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.02):
            most = max(most, used())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        over.set()
        watcher.join()
        found["device_bytes"] = max(0, most - before)


def is_done(path: Path, words: list[str]) -> bool:
    """There is a result of exactly this run, and not one of a failure that may pass; a refused plan may."""
    if not path.exists():
        return False
    row = json.loads(path.read_text())
    return bool(row["words"] == portable(words)) and was_run(row) and row["status"] not in AGAIN


def error_of(row: dict[str, Any]) -> float | None:
    """Return the error of the planned peak, as a share of the measured one; None where no run ended on a GPU."""
    if row["status"] != "ran" or None in (row["allocated_bytes"], row["planned_allocated_bytes"]):
        return None
    return float(row["planned_allocated_bytes"] / row["allocated_bytes"] - 1)


def summarize(rows: list[dict[str, Any]]) -> str:
    """Return median and worst error against the bar, and what could not be compared."""
    bar = f"The bar: median error at most {MEDIAN_BAR:.0%}, worst at most {WORST_BAR:.0%}."
    errors = {row["name"]: abs(error) for row in rows if (error := error_of(row)) is not None}
    if not errors:
        return f"None of {len(rows)} runs was measured: nothing is known of the error. {bar}"
    median, worst = statistics.median(errors.values()), max(errors, key=lambda name: errors[name])
    met = "Met" if median <= MEDIAN_BAR and errors[worst] <= WORST_BAR else "Missed"
    other = [f"{row['name']}: {row['status']}" for row in rows if row["name"] not in errors]
    found = f"median error {median:.1%}, worst {errors[worst]:.1%} ({worst})"
    return f"{len(errors)} of {len(rows)} runs measured: {found}. {bar} {met}." + (
        f" Not compared: {'; '.join(other)}." if other else ""
    )


def line(row: dict[str, Any]) -> str:
    if row["planned_allocated_bytes"] is None:
        return f"{row['name']:60} {row['status']}: {row['said']}"
    planned = f"planned {row['planned_allocated_bytes'] / GIB:6.2f} GiB"
    if row["allocated_bytes"] is None:
        return f"{row['name']:60} {planned}  {row['status']}"
    error = row["planned_allocated_bytes"] / row["allocated_bytes"] - 1
    measured = f"measured {row['allocated_bytes'] / GIB:6.2f} GiB"
    return f"{row['name']:60} {planned}  {measured}  {error:+6.1%}  {row['status']}  ({row['wall_s']} s)"


def write(path: Path, content: Any) -> None:
    """Whole or not at all: a point that was cut off is measured again."""
    part = path.with_suffix(".part")
    part.write_text(in_lines(content) + "\n")
    part.replace(path)


def in_lines(content: Any) -> str:
    """Return `content` as JSON, in which each entry of a list, a point, is one line."""
    if isinstance(content, dict):
        return (
            "{\n"
            + ",\n".join(f"{json.dumps(name)}: {in_lines(part)}" for name, part in content.items())
            + "\n}"
        )
    if isinstance(content, list):
        return "[\n" + ",\n".join(map(json.dumps, content)) + "\n]"
    return json.dumps(content)


if __name__ == "__main__":
    main()
