"""Add an experiment to the committed results: `points.csv` (a row per point) and `environments.json` (the machines).

All measurements of a launch stay in its folder under outputs/. Only what the documentation reads is committed.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remat.config.redact import redact
from remat.lab.measure import TIMES
from remat.report import run_dir

POINTS, ENVIRONMENTS = "points.csv", "environments.json"
PLAIN = (
    "status",
    "words",
    "repeats",
    "same_bytes",
    "peak_bytes",
    "peak_in_update",
    "counted_bytes",
    "counted_planned_bytes",
    "kept_bytes",
    "kept_planned_bytes",
    "micro_batch_bytes",
    "moved_bytes",
    "off_gpu_bytes",
    "recomputed_percent",
    "eval_loss",
)
ABOUT = ("reduction", "ranks", "repeats", "peak_how", "first_steady_step")  # beside versions and machine


def add(folder: Path, content: Mapping[str, Any]) -> list[Path]:
    """Replace the experiment's rows of this kind of machine; return the files.

    `content` is that of results.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = redact(content)
    points, environments = folder / POINTS, folder / ENVIRONMENTS
    mine = {"experiment": content["name"], "machine": "cpu" if content["device"] == "cpu" else "gpu"}
    others = [row for row in read_points(folder) if any(row[key] != value for key, value in mine.items())]
    rows = [*others, *(mine | flatten(point) for point in content["points"])]
    rows.sort(key=lambda row: (row["experiment"], row["machine"]))
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with points.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    known = json.loads(environments.read_text()) if environments.exists() else {}
    environment = {key: content[key] for key in ABOUT} | content["env"] | content["hardware"]
    known[f"{mine['experiment']}-{mine['machine']}"] = environment
    run_dir.write_json(environments, dict(sorted(known.items())))
    return [points, environments]


def read_points(folder: Path) -> list[dict[str, str]]:
    """Return the rows of points.csv as text; no rows without the file."""
    path = folder / POINTS
    return list(csv.DictReader(path.open(newline=""))) if path.exists() else []


def flatten(point: Mapping[str, Any]) -> dict[str, Any]:
    """Return a point as one row: bytes, seconds (medians over all repeats) and nats per token.

    `ratio` is the step time over the baseline's; `ratio_low` and `ratio_high` compare quartiles. `losses` has every
    step.
    """
    times, ratio, rate = point["times"], point["ratio"] or {}, point["tokens_per_s"] or {}
    return {
        "point": point["name"],
        "baseline": point["baseline"],
        **{key: point[key] for key in PLAIN},
        "states_bytes": sum(point["states_bytes"].values()) or None,
        **{f"{name}_s": times.get(name, {}).get("median") for name in TIMES},
        "steady_steps": times.get("step", {}).get("count"),
        "ratio": ratio.get("median"),
        "ratio_low": ratio.get("low"),
        "ratio_high": ratio.get("high"),
        "tokens_per_s": rate.get("median"),
        "losses": " ".join(str(loss) for _, loss in point["loss"]),
        "command": point["command"],
    }
