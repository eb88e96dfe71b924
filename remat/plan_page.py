"""A plan on a terminal: where every GiB goes, when the peak is and who owns it, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.table import Table

from remat.planner import GIB, Planned
from remat.planning.plan import Resource


def show(planned: Planned, console: Console) -> None:
    """Print the plan."""
    plan, cfg = planned.plan, planned.cfg
    machine = f"{cfg.hardware.num_nodes} x " if cfg.hardware.num_nodes > 1 else ""
    console.print(
        f"remat plan: {cfg.name} on {machine}{cfg.hardware.name}, {planned.world_size} rank(s)", style="bold"
    )
    _table("GPU, per rank, at its peak", {str(name): size for name, size in plan.gpu.items()}, console)
    where = f"layer {plan.peak.layer}" if plan.peak.layer is not None else "outside the layers"
    console.print(f"peak in {plan.peak.phase}, {where}, {plan.peak.operation}")
    for title, rows in (("pinned host memory", plan.pinned), ("host memory", plan.host), ("NVMe", plan.nvme)):
        if sum(rows.values()):
            _table(f"{title}, per rank (x {plan.ranks_per_node} per node)", rows, console)
    console.print(f"saved states on disk: {plan.saved_state_bytes / GIB:.1f} GiB")
    _show_time(planned, console)
    for resource in plan.resources:
        console.print(verdict(resource), style="green" if resource.fits else "red")
    for text in [*plan.assumptions, *planned.time.assumptions]:
        console.print(f"assumed: {text}", style="dim", highlight=False)


def verdict(resource: Resource) -> str:
    """`GPU memory: needs 61.2 GiB of 79.1: fits with 17.9 GiB to spare`."""
    needs = f"{resource.name}: needs {resource.needed_bytes / GIB:.1f} GiB"
    if resource.found_bytes is None or resource.spare_bytes is None:
        return f"{needs}; the machine's is not known (hardware=NAME)"
    spare = resource.spare_bytes / GIB
    ending = f"fits with {spare:.1f} GiB to spare" if resource.fits else f"does not fit, by {-spare:.1f} GiB"
    return f"{needs} of {resource.found_bytes / GIB:.1f}: {ending}"


def _table(title: str, rows: Mapping[str, int], console: Console) -> None:
    console.print(f"\n{title}")
    table = _empty()
    table.add_column("what", footer="sum")
    table.add_column("GiB", justify="right", footer=f"{sum(rows.values()) / GIB:.2f}")
    for name, size in sorted(rows.items(), key=lambda row: -row[1]):
        if size:
            table.add_row(name, f"{size / GIB:.2f}")
    console.print(table)


def _show_time(planned: Planned, console: Console) -> None:
    """Seconds of an optimizer step by cause; a best case, and unknown terms are named."""
    time = planned.time
    rate = f"{time.tokens_per_s:,.0f} tokens/s" if time.tokens_per_s else "not known"
    title = f"\nstep time at best: {time.total_s:.3g} s, {rate}"
    if time.unknown:
        title += f" (without what is not known: {', '.join(time.unknown)})"
    console.print(title)
    table = _empty()
    table.add_column("what")
    table.add_column("s", justify="right")
    rows = {
        "compute": time.compute_s,
        "recompute": time.recompute_s,
        "PCIe": time.pcie_s,
        "optimizer": time.optimizer_s,
        "collectives": time.collectives_s,
        "NVMe": time.nvme_s,
    }
    for name, seconds in rows.items():
        if seconds:
            table.add_row(name, f"{seconds:.3g}")
    if table.row_count:
        console.print(table)


def _empty() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_footer=True)
