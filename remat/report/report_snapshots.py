"""The labelled snapshots of a launch as bars, and what the driver said of the GPU over time."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from remat.config.units import GIB
from remat.report.charts import DPI, WIDTH_IN, Theme, style

BARS = {  # key: what the legend calls it, and the theme's colour
    "gpu_reserved_bytes": ("GPU reserved", "purple"),
    "gpu_allocated_bytes": ("GPU allocated", "blue"),
    "host_resident_bytes": ("host resident", "green"),
}
AFTER = {"load": "after load", "engine": "engine built", "forward": "after forward", "backward": "after backward",
         "step": "after step"}  # fmt: skip
SNAPSHOT_ALT = {
    "snapshots": "Memory after loading, building the engine, the first forward, backward and step",
    "nvml": "Memory in use on the GPU, load and power over time, as the driver says",
}


def pictures(run_dir: Path, theme: Theme) -> dict[str, bytes]:
    """PNG bytes of those of `snapshots` and `nvml` that the run has files for."""
    found: dict[str, Figure] = {}
    images: dict[str, bytes] = {}
    path, sampled = run_dir / "snapshots.json", run_dir / "profile" / "nvml-rank-0.jsonl"
    with matplotlib.rc_context(style(theme)):
        if path.exists():
            found["snapshots"] = _bars(json.loads(path.read_text()), theme)
        rows = samples(sampled)
        if len(rows) > 1:
            found["nvml"] = _over_time(rows, theme)
        for name, figure in found.items():
            image = io.BytesIO()
            figure.savefig(image, format="png", dpi=DPI)
            images[name] = image.getvalue()
    return images


def samples(path: Path) -> list[dict[str, float]]:
    """The rows of the driver's figures; a torn last row and an error of the driver are left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "used_bytes" in row:
            rows.append(row)
    return rows


def _bars(content: dict[str, Any], theme: Theme) -> Figure:
    moments = content["snapshots"]
    kinds = [key for key in BARS if any(key in moment for moment in moments)]
    figure = Figure(figsize=(WIDTH_IN, 3.4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(kinds)
    for index, key in enumerate(kinds):
        label, color = BARS[key]
        places = [place + (index - (len(kinds) - 1) / 2) * width for place in range(len(moments))]
        sizes = [moment.get(key, 0) / GIB for moment in moments]
        bars = axes.bar(places, sizes, 0.92 * width, label=label, color=getattr(theme, color))
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=8.5, color=theme.text)
    axes.set_xticks(range(len(moments)), [AFTER[moment["label"]] for moment in moments])
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.14)
    axes.set_title("Memory of the highest rank")
    axes.set_ylabel("GiB")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(kinds), borderaxespad=0.55)
    return figure


def _over_time(rows: list[dict[str, float]], theme: Theme) -> Figure:
    seconds = [row["time_unix_s"] - rows[0]["time_unix_s"] for row in rows]
    figure = Figure(figsize=(WIDTH_IN, 5.4), layout="constrained")
    memory, busy, power = figure.subplots(3, 1, sharex=True, height_ratios=(1.6, 1.0, 1.0))
    memory.plot(seconds, [row["used_bytes"] / GIB for row in rows], color=theme.blue)
    memory.set_title("The GPU of rank 0, as the driver says (NVML)")
    memory.set_ylabel("GiB in use")
    busy.plot(seconds, [row["busy_percent"] / 100 for row in rows], color=theme.green)
    busy.set_ylabel("busy")
    busy.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
    power.plot(seconds, [row["power_w"] for row in rows], color=theme.orange)
    power.set_ylabel("watts")
    power.set_xlabel("seconds")
    for axes in (memory, busy, power):
        axes.set_ylim(bottom=0)
    figure.align_ylabels([memory, busy, power])
    return figure
