"""`python -m benchmarks.suite.budget --minutes 9`: as many points as fit, most valuable first; see gpu_suite.sh.

Every finished point is a file of its own under --work, so a second start goes on where the first ended, and what is
there is gathered into one file per section under --results. A point that fails is a row with its error; a later start
tries it again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.environment import commit
from benchmarks.plan_accuracy import AGAIN, TIME_OVER, write
from benchmarks.suite.points import POINTS, SECTIONS, Point
from benchmarks.suite.training import folder_name, longest, measure, overrides
from remat.machine.start_up import available_cores

ROOT = Path(__file__).resolve().parent.parent.parent
OWN = ROOT / "benchmarks" / "results"
RESULTS = OWN / "gpu"
GRACE_S = 20  # for a point that took too long to write what it has
OWN_RESULTS = {"accuracy", "policies", "overhead", "lab", "ladder", "budget"}  # they write files of their own


def main() -> int:
    args = parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    folder = args.work / "points"
    folder.mkdir(parents=True, exist_ok=True)
    environment = environment_of(args.device)
    points = [point for point in POINTS if not args.only or point.section in args.only]
    run_all(points, folder, environment, args)
    gather(folder, args.results)
    done = sum(is_done(folder / f"{folder_name(point)}.json", point) for point in points)
    print(f"{done} of {len(points)} points are measured: {args.results}")
    return 0


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=9, help="no point is started that would end after that"
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--started", type=float, default=time.time(), help="unix time from which minutes count")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal, small shapes"
    )
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "gpu_suite", help="points, runs, data")
    parser.add_argument("--results", type=Path, help="default: benchmarks/results/gpu; on a CPU inside --work")
    args = parser.parse_args(words)
    args.work = args.work.resolve()
    args.results = args.results or (RESULTS if args.device == "cuda" else args.work / "results")
    return args


def run_all(points: list[Point], folder: Path, environment: dict[str, Any], args: argparse.Namespace) -> None:
    """Measure what has no file in `folder`, while what a point is expected to take is left."""
    ends = args.started + 60 * args.minutes
    for number, point in enumerate(points, 1):
        path = folder / f"{folder_name(point)}.json"
        if is_done(path, point):
            continue
        left = ends - time.time()
        if left < point.seconds:
            print(f"[{number}/{len(points)}] {point.section}: {point.name}: left out, {left:.0f} s are left")
            continue
        print(f"[{number}/{len(points)}] {point.section}: {point.name} ...", flush=True)
        started = time.monotonic()
        row = one(replace(point, limit_s=min(point.limit_s, left)), environment, args)
        spent = round(time.monotonic() - started, 1)
        head = {
            "section": point.section,
            "name": point.name,
            "point": identity(point),
            "environment": environment,
        }
        write(path, head | row | {"seconds": spent})
        gather(folder, args.results)
        print(f"    {row['status']}, {spent} s", flush=True)


def one(point: Point, environment: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    if point.kind == "train":
        return measure(point, args.work, args.device)
    if point.kind == "longest":
        return longest(point, args.work, args.device, environment)
    return script(point, args)


def identity(point: Point) -> list[Any]:
    """What a measured point must agree in with the one that is asked for."""
    return [list(point.words), point.shape, point.seq_len, point.micro_batch]


def is_done(path: Path, point: Point) -> bool:
    if not path.exists():
        return False
    row = json.loads(path.read_text())
    return bool(row["point"] == identity(point) and row["status"] not in AGAIN)


def script(point: Point, args: argparse.Namespace) -> dict[str, Any]:
    """A program of its own: a peer, which writes its row to --out, a benchmark with its own result file, or tests."""
    out = args.work / f"{folder_name(point)}.row.json"
    out.unlink(missing_ok=True)
    command = peer_command(point, out, args) if point.kind == "peer" else own_command(point, args)
    if point.kind == "script" and args.device == "cpu":
        return {"status": "left out", "said": "not part of the rehearsal: the script has one of its own"}
    code, said, over = run(command, surroundings(point, args), point.limit_s)
    row: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    row |= {"command": portable(command, args), "exit_code": code, "status": "ran" if code == 0 else "failed"}
    if point.kind == "tests":
        row["summary"] = "".join(said.strip().splitlines()[-1:])
    if code:
        ran_out = re.search(r"OutOfMemoryError|CUDA out of memory", said)
        ended = TIME_OVER if over else "out of memory" if ran_out else "failed"
        row |= {"status": ended, "said": said[-3000:]}
    return row


def surroundings(point: Point, args: argparse.Namespace) -> dict[str, str]:
    """The environment of a script, without the user's threads: a peer has as many as a lone rank of train.py takes."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if point.kind == "peer":
        env["PYTHONPATH"] = os.pathsep.join([env.get("PYTHONPATH", str(ROOT)), str(args.work / "site-peers")])
        env["OMP_NUM_THREADS"] = (
            str(available_cores()) if args.device == "cuda" else "1"
        )  # as tests.support.launcher
    return env


def own_command(point: Point, args: argparse.Namespace) -> list[str]:
    """A script's own, with the folder that is WORK in its words; pytest for tests."""
    if point.kind == "tests":
        return [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *point.words]
    return [sys.executable, *(re.sub(r"^WORK(?=/)", lambda _: str(args.work), word) for word in point.words)]


def run(command: list[str], env: dict[str, str], limit_s: float) -> tuple[int, str, bool]:
    """Exit code, output, and whether its time was over.

    After `limit_s` it is interrupted, and 20 s later all that it started is killed.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        said, _ = process.communicate(timeout=limit_s)
        return process.returncode, said, False
    except subprocess.TimeoutExpired:
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)  # what keeps finished points does so now
    try:
        said, _ = process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        said = ""
    for child in [*started, process]:
        with contextlib.suppress(psutil.Error):
            child.kill()
    said = said or process.communicate()[0]
    return -1, f"{said}\nended after {limit_s:.0f} s", True


def peer_command(point: Point, out: Path, args: argparse.Namespace) -> list[str]:
    """The peer's script with the same shape, tokens and device as the project's own points."""
    name, *more = point.words
    words = [
        "--seq-len", str(point.seq_len), "--micro-batch", str(point.micro_batch), "--device", args.device,
        "--out", str(out), *more,
    ]  # fmt: skip
    shape = overrides(point, args.work, args.device)
    architecture = [word for word in shape if word.startswith(("model=", "model.architecture."))]
    return [sys.executable, "-m", f"benchmarks.peers.{name}", *words, "--shape", *architecture]


def portable(command: list[str], args: argparse.Namespace) -> list[str]:
    """Without the folders of this machine."""
    short = {sys.executable: "python", str(args.work): "WORK", str(ROOT): "."}
    for long, instead in short.items():
        command = [word.replace(long, instead) for word in command]
    return command


def environment_of(device: str) -> dict[str, Any]:
    """Hardware, versions, commit and date, found in a process of its own, which takes its GPU context with it."""
    code = f"import json; from benchmarks.environment import environment; print(json.dumps(environment({device!r})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"this machine cannot run the suite:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"commit": commit()}


def gather(folder: Path, results: Path) -> None:
    """One file per section, its points in the order of POINTS."""
    results.mkdir(parents=True, exist_ok=True)
    for section in SECTIONS:
        paths = [folder / f"{folder_name(point)}.json" for point in POINTS if point.section == section]
        rows = [json.loads(path.read_text()) for path in paths if path.exists()]
        if rows and section not in OWN_RESULTS:
            write(results / f"{section}.json", rows)
    if results != RESULTS:  # the scripts write to their own place
        made = {path.name: path for path in (*OWN.glob("*_cuda.*"), OWN / "plan_accuracy.json")}
        made |= {f"lab-{path.name}": path for path in (OWN / "lab").iterdir()}
        for name, path in made.items():
            if path.exists():
                shutil.copyfile(path, results / name)


if __name__ == "__main__":
    sys.exit(main())
