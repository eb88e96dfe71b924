"""Write the tables of docs/reliability.md: `python scripts/reliability_page.py [LINES.jsonl] [--check]`.

LINES is what the tests of tests/faults wrote to REMAT_FAULT_TABLE. The rows of each test file in it replace those that
file has in the result file, with this machine and commit beside them; so run whole files (`make reliability`).
"""

from __future__ import annotations

import ast
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.generated import between, update  # noqa: E402

PAGE = ROOT / "docs" / "reliability.md"
RESULT = ROOT / "benchmarks" / "results" / "faults.json"
MARK, END = "<!-- faults: written by scripts/reliability_page.py -->", "<!-- end of faults -->"
VERSIONS = ("torch", "deepspeed", "transformers")
GIB = 1024**3


def merged(result: dict[str, Any], rows: list[dict[str, Any]], where: dict[str, Any]) -> dict[str, Any]:
    """`result` with the rows of each test file that has some in `rows` replaced by those, measured at `where`."""
    measured_at = f"{where['commit'][:7]}{'+' if where['changed_files'] else ''} {where['date']}"
    tests = {row["test"] for row in rows}
    kept = [row for row in result["rows"] if row["test"] not in tests]
    every = [*kept, *({**row, "measured_at": measured_at} for row in rows)]
    places = {**result["environments"], measured_at: where} if rows else result["environments"]
    used = {row["measured_at"] for row in every}
    return {
        "environments": {name: place for name, place in places.items() if name in used},
        "rows": sorted(every, key=lambda row: row["test"]),
    }


def text(result: dict[str, Any]) -> str:
    """One section for each test file, titled by the first line of its docstring; then where it was measured."""
    tests = dict.fromkeys(row["test"] for row in result["rows"])
    parts = [f"{len(result['rows'])} faults, from {len(tests)} files of tests."]
    for test in tests:
        rows = [row for row in result["rows"] if row["test"] == test]
        measured_at = ", ".join(dict.fromkeys(row["measured_at"] for row in rows))
        table = ["| fault | outcome | seconds |", "|---|---|---:|", *(cells(row) for row in rows)]
        parts.append(f"## {title(test)}\n\n`{test}`, measured at {measured_at}\n\n" + "\n".join(table))
    places = "\n".join(f"- {name}: {words(place)}" for name, place in result["environments"].items())
    return "\n\n".join([*parts, f"## Where\n\n{places}"])


def title(test: str) -> str:
    docstring = ast.get_docstring(ast.parse((ROOT / test).read_text())) or test
    return docstring.splitlines()[0].rstrip(".")


def cells(row: dict[str, Any]) -> str:
    seconds = "-" if row["seconds"] is None else f"{row['seconds']:.1f}"
    return f"| {row['fault']} | {row['outcome']} | {seconds} |"


def words(place: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {place[name]}" for name in VERSIONS)
    state = f", with {place['changed_files']} files changed since" if place["changed_files"] else ""
    return (
        f"{place['cpu']}, {place['cpu_cores']} cores, {place['host_bytes'] / GIB:.0f} GiB, no GPU; python "
        f"{place['python']}, {versions}; load average {place['load_average']:.1f}; commit {place['commit'][:12]}{state}"
    )


def environment() -> dict[str, Any]:
    """Machine, versions, commit and date of the figures; how many files differ from the commit."""
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": cpu[0].partition(": ")[2] if cpu else platform.machine(),
        "cpu_cores": os.cpu_count(),
        "host_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": round(os.getloadavg()[2], 1),
        "python": platform.python_version(),
        **{name: version(name) for name in VERSIONS},
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": len(_git("status", "--porcelain", "--", "remat", "tests", "train.py").splitlines()),
        "date": time.strftime("%Y-%m-%d"),
    }


def renewed(page: str) -> str:
    """`page` with what lies between its marks replaced."""
    return between(page, MARK, END, text(json.loads(RESULT.read_text())))


def main(argv: list[str]) -> int:
    if argv and "--check" not in argv:
        rows = [json.loads(line) for line in Path(argv[0]).read_text().splitlines()]
        old = json.loads(RESULT.read_text()) if RESULT.exists() else {"environments": {}, "rows": []}
        RESULT.write_text(json.dumps(merged(old, rows, environment()), indent=2) + "\n")
    return update(PAGE, renewed)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
