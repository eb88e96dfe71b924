"""How long `remat plan` takes for each shipped recipe, and how much memory: a fresh process each, imports included.

python benchmarks/plan_speed.py [--rounds 3]      # writes benchmarks/results/plan_speed.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULT = ROOT / "benchmarks" / "results" / "plan_speed.json"
MIB = 1024**2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    from benchmarks.environment import environment
    from remat.config import compose

    rows = []
    for recipe in compose.recipe_names():
        found = [planned(recipe) for _ in range(rounds)]
        rows.append(
            {
                "recipe": recipe,
                "median_s": statistics.median(run["wall_s"] for run in found),
                "median_cpu_s": statistics.median(run["cpu_s"] for run in found),
                "rounds": found,
                "peak_rss_bytes": max(run["peak_rss_bytes"] for run in found),
            }
        )
        print(
            f"{recipe:40} {rows[-1]['median_s']:6.1f} s  {rows[-1]['median_cpu_s']:6.1f} s of CPU  "
            f"{rows[-1]['peak_rss_bytes'] / MIB:7.0f} MiB",
            flush=True,
        )
    RESULT.parent.mkdir(exist_ok=True)
    around = environment("cpu") | {"machine": platform.machine(), "load_average": os.getloadavg()}
    RESULT.write_text(json.dumps({"environment": around, "recipes": rows}, indent=2) + "\n")


def planned(recipe: str) -> dict[str, Any]:
    """One `remat plan`: seconds on the clock, of processors, and peak resident bytes of its process tree's largest."""
    command = [sys.executable, "-m", "remat.cli", "plan", "--no-advice", "--json", f"recipe={recipe}"]
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said = process.stderr.read()
    _, code, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(code)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{said.decode()[-3000:]}")
    return {
        "wall_s": round(time.perf_counter() - began, 2),
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "peak_rss_bytes": used.ru_maxrss * 1024,
    }


if __name__ == "__main__":
    main()
