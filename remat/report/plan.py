"""Print plans and sweeps on a terminal: bytes by place, the peak, whether the run fits, and what would fit."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from remat.activation_checkpointing import policy
from remat.config.options import OptimStates, RunConfig
from remat.config.units import GIB, format_count, format_size
from remat.planning import tiling
from remat.planning.loading import Loading
from remat.planning.plan import (
    GPU_MEMORY,
    HOST_MEMORY,
    Plan,
    Planned,
    Resource,
    Verdict,
    needed_bytes,
    what_decides,
)
from remat.planning.retune import Retuned
from remat.planning.settings.ladder import Rung
from remat.planning.settings.search import Advice, Setting
from remat.planning.settings.sharding import Way
from remat.planning.simulation.types import PEAKS, Category
from remat.planning.step_time import NETWORK, StepTime
from remat.planning.sweep import Point

TIME_WAS_UP = "  (the time for advice was up: not every setting was looked at; --best looks at all)"
SHOWN_FROM = 0.001
STYLES = {Verdict.fits: "green", Verdict.tight: "yellow", Verdict.too_large: "red"}


def show(
    planned: Planned,
    console: Console,
    loading: Loading | None = None,
    *,
    title: str = "",
    explain: bool = False,
) -> None:
    """Print the plan: the verdict, a table of bytes, the peaks, and how weights are read where that is planned.

    `title` names the plan; `explain` adds assumptions.
    """
    plan, cfg = planned.plan, planned.cfg
    machine = f"{cfg.hardware.num_nodes} x " if cfg.hardware.num_nodes > 1 else ""
    ranks = format_count(planned.world_size, "rank")
    console.print(
        f"{plan.verdict}: {title or cfg.name} on {machine}{cfg.hardware.name}, {ranks}, "
        f"trained by {planned.strategy.optimizer}"
        + f" with optim.states={cfg.optim.states}"
        * (cfg.optim.states is not OptimStates.fp32),
        style=f"bold {STYLES[plan.verdict]}",
    )
    for resource in plan.resources:
        console.print(f"  {verdict(resource)}", style=STYLES[resource.verdict])
    if plan.verdict is Verdict.tight:
        console.print(f"  {what_decides(plan)}", style=STYLES[plan.verdict])
    _show_memory(planned, console)
    _show_stages(planned, console)
    _show_peaks(plan, console)
    decided = planned.strategy
    if planned.table is not None or tiling.chosen_count(decided.decisions) > 1:
        chosen = "; ".join(filter(None, [policy.describe(decided.decisions), decided.decided_because]))
        console.print(f"activations: {chosen}", highlight=False)
    console.print(f"saved states on disk: {plan.saved_state_bytes / GIB:.1f} GiB")
    if loading is not None:
        console.print(f"loading: {loading.line()}", highlight=False)
    _show_time(planned, console)
    for text in planned.strategy.warnings:
        console.print(text, style="yellow")
    assumptions = [*plan.assumptions, *planned.time.assumptions]
    if explain:
        for text in assumptions:
            console.print(f"assumed: {text}", style="dim")
    else:
        console.print(f"{len(assumptions)} assumptions: the same command with --explain", style="dim")


def name_asked(args: Sequence[str], cfg: RunConfig) -> str:
    """Return the name of the recipe or run that the arguments give; without one, the arguments themselves."""
    given = dict(word.split("=", 1) for word in args if "=" in word)
    if "recipe" in given or "name" in given or not given:
        return cfg.name
    words = [f"{option}={value}" for option, value in given.items() if option.split(".")[0] != "hardware"]
    return " ".join(words) or cfg.name


def _show_memory(planned: Planned, console: Console) -> None:
    """Print a table of bytes by place and category. A column per node is added where a node has several ranks.

    A category below the share SHOWN_FROM of its place has no row.
    """
    plan = planned.plan
    places = {
        "GPU at its peak": {str(name): size for name, size in plan.gpu.items()},
        "pinned host": plan.pinned,
        "host": plan.host,
        "NVMe": plan.nvme,
    }
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("where", no_wrap=True)
    table.add_column("what", overflow="fold")
    table.add_column("GiB per rank", justify="right", no_wrap=True)
    several = plan.ranks_per_node > 1
    if several:
        table.add_column("GiB per node", justify="right", no_wrap=True)
    for place, rows in places.items():
        least = SHOWN_FROM * sum(rows.values())
        shown = sorted(((name, size) for name, size in rows.items() if size > least), key=lambda row: -row[1])
        for number, (name, size) in enumerate(shown):
            table.add_row(place if number == 0 else "", name, *_gib(size, plan.ranks_per_node))
        if len(shown) > 1:
            total = _gib(sum(rows.values()), plan.ranks_per_node)
            table.add_row("", "sum", *total, style="bold", end_section=True)
    console.print(table)


def _show_stages(planned: Planned, console: Console) -> None:
    """Print a row for each pipeline stage. The rest of the plan shows the stage that needs most memory."""
    if not planned.stages:
        return
    table = Table(box=box.SIMPLE_HEAD)
    for name in (
        "stage",
        "layers",
        "micro-batches held",
        "kept of each",
        "made again",
        "states",
        "peak",
        "sent",
        "micro-batch",
    ):
        table.add_column(name, justify="right")
    for number, stage in enumerate(planned.stages):
        states = sum(size for name, size in stage.plan.states.items() if name is not Category.activations)
        sizes = [states, stage.plan.peak_bytes, stage.sent_bytes]
        table.add_row(
            str(number),
            f"{stage.first_layer}-{stage.last_layer}",
            str(stage.in_flight),
            format_size(stage.kept_bytes),
            f"{stage.recomputed_share:.1%}",
            *map(format_size, sizes),
            f"{stage.micro_batch_s:.3g} s" if stage.micro_batch_s else "not known",
        )
    console.print(table)
    stages, ds = planned.strategy.stages, planned.strategy.ds
    assert stages is not None
    for number in range(stages.size):
        chosen = policy.describe(planned.strategy.decisions_of(number))
        console.print(f"stage {number}: {chosen}", highlight=False)
    waiting = stages.bubble(ds["gradient_accumulation_steps"])
    console.print(
        "stages: bytes are of one rank, sent ones in a step; made again: FLOPs, of the stage's forward; with equal "
        f"stages each waits {waiting:.1%} of the step for others (1F1B)",
        highlight=False,
    )


def _gib(size: int, ranks_per_node: int) -> list[str]:
    """Return the cells of a size: GiB per rank and, where a node has several ranks, GiB per node."""
    counts = [1, ranks_per_node] if ranks_per_node > 1 else [1]
    return [f"{count * size / GIB:.2f}" for count in counts]


def _show_peaks(plan: Plan, console: Console) -> None:
    """Print the GPU's three figures, where its peak is, and the peak of each part of a step."""
    if plan.reserved_bytes:
        figures = {
            "allocated": plan.peak_bytes,
            "reserved": plan.reserved_bytes,
            "process, as nvidia-smi shows": plan.process_bytes,
        }
        console.print("GPU, GiB: " + ", ".join(f"{name} {size / GIB:.2f}" for name, size in figures.items()))
    console.print(f"the peak is in the {plan.peak.in_words()} ({plan.peak.operation})")
    parts = (
        f"{name} {plan.peaks[name].total_bytes / GIB:.2f}"
        + f" (layer {plan.peaks[name].layer})" * (name == "backward")
        for name in PEAKS
        if name in plan.peaks
    )
    console.print(f"peaks, GiB allocated: {', '.join(parts)}", highlight=False)


def verdict(resource: Resource) -> str:
    """Return a line like `GPU memory: needs 61.2 GiB of 79.1: fits with 17.9 GiB to spare`."""
    needs = f"{resource.name}: needs {resource.needed_bytes / GIB:.1f} GiB"
    if resource.found_bytes is None or resource.spare_bytes is None:
        return f"{needs}; the machine's is not known (hardware=NAME)"
    spare = resource.spare_bytes / GIB
    ending = {
        Verdict.fits: f"fits with {spare:.1f} GiB to spare",
        Verdict.tight: f"tight, {-spare:.1f} GiB short",
        Verdict.too_large: f"does not fit, by {-spare:.1f} GiB",
    }[resource.verdict]
    return f"{needs} of {resource.found_bytes / GIB:.1f}: {ending}"


def show_advice(advice: Advice, planned: Planned, console: Console) -> None:
    """Print what to add to the command line of `planned`, one set of overrides per line."""
    if planned.plan.fits:
        _show_faster(advice, planned, console)
        return
    groups = {
        "what is trained stays the same": [c for c in advice.changes if not (c.changes_training or _moves(c))],
        "changes what is trained": [c for c in advice.changes if c.changes_training],
        "another machine, nothing else changed": [c for c in advice.changes if _moves(c)],
    }
    console.print(
        "\nthe nearest changes that make it fit, each planned; add one line to the command", style="bold"
    )
    if any(change.planned.time.unknown for change in advice.changes):
        console.print("(some times are not known on this machine: those are sorted by bytes, and come last)")
    for title, changes in groups.items():
        if changes:
            console.print(f"  {title}:")
        for change in changes:
            _show_change(change, planned, console)
    if advice.closest is not None:
        console.print("  nothing found that fits on this machine; closest:", style="red")
        _show_change(advice.closest, planned, console)
    if advice.stopped:
        console.print(TIME_WAS_UP)
    if advice.remedies:
        console.print("well-known remedies, estimated one at a time; none is taken by itself", style="bold")
    for remedy in advice.remedies:
        marked = ", changes what is trained" * remedy.changes_training
        style = "green" if remedy.fits else None
        console.print(f"  {remedy.name}{marked}: {remedy.text}", style=style, soft_wrap=True)
        if remedy.fits:
            console.print(f"    {shlex.join(remedy.overrides)}", style="cyan", soft_wrap=True)


def _show_faster(advice: Advice, planned: Planned, console: Console) -> None:
    if not advice.changes:
        console.print("\nno setting that fits and trains the same is found to be faster", style="bold")
    else:
        console.print("\nfaster, fits, and trains the same; add one line to the command", style="bold")
    for change in advice.changes:
        _show_change(change, planned, console)
    if advice.stopped:
        console.print(TIME_WAS_UP)


def show_ways(ways: Sequence[Way], console: Console) -> None:
    """Print what each way to shard model states costs on several nodes, and which one to take."""
    if not ways:
        return
    nodes = ways[0].setting.planned.cfg.hardware.num_nodes
    console.print(f"ZeRO on {nodes} nodes, nothing else changed, estimated", style="bold")
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for title in ("s/step", "GPU GiB", "network of a node, GiB"):
        table.add_column(title, justify="right")
    table.add_column("")
    for way in ways:
        planned = way.setting.planned
        lacks = [f"{name} lacks {size / GIB:.1f} GiB" for name, size in planned.plan.missing_bytes.items()]
        table.add_row(
            way.name,
            _seconds(planned.time.total_s) if way.is_timed else "not known",
            f"{needed_bytes(planned, GPU_MEMORY) / GIB:.1f}",
            f"{planned.time.traffic_bytes.get(NETWORK, 0) / GIB:.0f}" if way.is_timed else "",
            ", ".join(lacks) or ("fits, the one to take" if way.is_taken else "fits"),
            style="green" if way.is_taken else "dim" if lacks else None,
        )
    console.print(table)
    for way in ways:
        words = shlex.join(way.setting.overrides) or "(this run)"
        console.print(f"  {way.name}: {words}", style="cyan", soft_wrap=True)


def show_best(settings: Sequence[Setting], console: Console) -> None:
    """Print the fastest setting, and the next ones with what they would cost."""
    fastest = settings[0].planned
    console.print(
        f"fastest on {fastest.cfg.hardware.name} with a global batch of {fastest.cfg.train.global_batch_size}; add "
        "the line to the command",
        style="bold",
    )
    for number, setting in enumerate(settings):
        if number == 1:
            console.print("  next:")
        _show_change(setting, fastest, console)


WIDEST_WORD = len("recomputed")  # longest word in the name of a rung


def show_ladder(rungs: Sequence[Rung], console: Console, *, title: str = "") -> None:
    """Print the longest sequence of each rung, what limits it, and the overrides for the longest of all."""
    console.print(
        f"longest sequence of {title}, micro-batch 1, as planned; each rung adds to those above", style="bold"
    )
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("rung", "tokens", "bound by", "GPU\nGiB", "host\nGiB", "s/step", "tokens\n/s", "mostly"):
        if name in ("rung", "bound by", "mostly"):
            table.add_column(name, overflow="fold", min_width=WIDEST_WORD if name == "rung" else None)
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for rung in rungs:
        if (planned := rung.planned) is None:
            table.add_row(rung.name, "none", rung.bound_by, style="red")
            continue
        time = planned.time
        table.add_row(
            rung.name,
            f"{rung.seq_len:,}",
            rung.bound_by,
            *(f"{needed_bytes(planned, name) / GIB:.1f}" for name in (GPU_MEMORY, HOST_MEMORY)),
            _seconds(time.total_s) if not time.unknown else "not known",
            f"{time.tokens_per_s:,.0f}" if time.tokens_per_s and not time.unknown else "not known",
            _largest_part(time),
            style=None if rung.helps else "dim",
        )
    console.print(table)
    if any(rung.seq_len and not rung.helps for rung in rungs):
        console.print("A grey rung reaches no further than one above it: the rungs below are without it.")
    longest = max(rungs, key=lambda rung: rung.seq_len)
    if longest.planned is not None:
        console.print(f"The longest, {longest.seq_len:,} tokens; add to the command:")
        console.print(f"    {shlex.join(longest.overrides)}", style="cyan", soft_wrap=True)
        for text in longest.planned.strategy.warnings:
            console.print(text, style="yellow")


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _largest_part(time: StepTime) -> str:
    """Return the cause that takes most of a step, with its share."""
    name, seconds = max(split_by_cause(time).items(), key=lambda part: part[1])
    return f"{name} {seconds / time.total_s:.0%}" if time.total_s else ""


def _show_change(change: Setting, planned: Planned, console: Console) -> None:
    words = shlex.join(change.overrides) or "(no change)"
    console.print(f"    {words}", style="cyan", soft_wrap=True)
    time, before = change.planned.time, planned.time
    at_most = "at most " * change.planned.is_cut_short  # a faster table may fit
    seconds = f"{at_most}{time.total_s:.3g} s" if not time.unknown else "time not known"
    if time.between:
        seconds = f"{time.between[0]:.3g} to {time.between[1]:.3g} s"
    if before.tokens_per_s and time.tokens_per_s and not (time.unknown or before.unknown):
        seconds += f", {time.tokens_per_s:,.0f} tokens/s ({time.tokens_per_s / before.tokens_per_s - 1:+.0%})"
    missing = [f"{name} lacks {size / GIB:.1f} GiB" for name, size in change.planned.plan.missing_bytes.items()]
    needs = ", ".join(f"{r.name} {r.needed_bytes / GIB:.1f} GiB" for r in change.planned.plan.resources)
    console.print(f"      step {seconds}; {needs}", soft_wrap=True)
    if missing:
        console.print(f"      {'; '.join(missing)}", style="red", soft_wrap=True)


def _moves(change: Setting) -> bool:
    return any(word.startswith("hardware=") for word in change.overrides)


def show_sweep(points: Sequence[Point], console: Console) -> None:
    """Print a row for each point. Points on the Pareto front of memory and time are marked."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("overrides", overflow="fold")
    for title in ("GPU GiB", "host GiB", "s/step", "tokens/s"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("verdict")
    reasons = list(dict.fromkeys(point.refused for point in points if point.refused))
    for point in points:
        words = " ".join(point.overrides)
        if point.planned is None:
            table.add_row(words, "", "", "", "", f"refused ({reasons.index(point.refused) + 1})", style="dim")
            continue
        time = point.planned.time
        marks = "~" if time.unknown else ""
        missing = point.planned.plan.missing_bytes
        lacks = ", ".join(f"{name.split()[0]} lacks {size / GIB:.1f}" for name, size in missing.items())
        ending = lacks or ("fits, Pareto front" if point.on_pareto_front else "fits")
        if point.planned.plan.verdict is Verdict.tight:
            ending = f"tight, {lacks}"
        table.add_row(
            words,
            *(f"{needed_bytes(point.planned, name) / GIB:.1f}" for name in (GPU_MEMORY, HOST_MEMORY)),
            f"{marks}{time.total_s:.3g}" if time.total_s else "not known",
            f"{marks}{time.tokens_per_s:,.0f}" if time.tokens_per_s else "not known",
            ending,
            style="bold" if point.on_pareto_front else None,
        )
    console.print(table)
    for number, reason in enumerate(reasons, start=1):
        console.print(f"({number}) {reason}")
    console.print("Pareto front: nothing else that fits needs less GPU memory and less time for a token")
    unknown = sorted({name for point in points if point.planned for name in point.planned.time.unknown})
    if unknown:
        console.print(f"~ without what is not known, and so not on the Pareto front: {', '.join(unknown)}")


def show_retuned(found: Retuned, console: Console) -> None:
    """Print the seconds of each phase, planned and measured, and what to add to the command."""
    console.print(f"{found.now.cfg.name}: seconds of a step by phase", style="bold")
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("phase")
    for title in ("planned", "measured", "planned with the rates corrected"):
        table.add_column(title, justify="right")
    for phase, seconds in found.measured.items():
        after = found.before.time.phases_s[phase]
        table.add_row(phase, f"{found.planned[phase]:.3g}", f"{seconds:.3g}", f"{after:.3g}")
    console.print(table)
    before, now = found.before.time.total_s, found.now.time.total_s
    gain = f"step {now:.3g} s where the run's take {before:.3g} ({now / before - 1:+.1%})"
    chosen = f"other tables: {gain}" if found.tables_differ else "the tables stay as they are"
    console.print(f"{chosen}; written to {found.path}. Add to the command:")
    console.print(f"    {shlex.join(found.overrides)}", style="cyan", soft_wrap=True)
    console.print("the same rates with `remat plan ... --best` look at all other settings", style="dim")


def split_by_cause(time: StepTime) -> dict[str, float]:
    """Return the seconds of a step by the names of their causes."""
    return {
        "compute": time.compute_s,
        "recompute": time.recompute_s,
        "PCIe": time.pcie_s,
        "optimizer": time.optimizer_s,
        "collectives": time.collectives_s,
        "NVMe": time.nvme_s,
        "waits for stages": time.pipeline_s,
    }


def _show_time(planned: Planned, console: Console) -> None:
    """Print the seconds of an optimizer step by cause. They are a best case; unknown terms are named."""
    time = planned.time
    line = "step time: not known"
    if time.between:
        least, most = time.between
        line = f"step time: {least:.3g} to {most:.3g} s, "
        line += f"{time.tokens / most:,.0f} to {time.tokens / least:,.0f} tokens/s"
    elif time.tokens_per_s:
        line = f"step time at best: {time.total_s:.3g} s, {time.tokens_per_s:,.0f} tokens/s"
    parts = [f"{name} {seconds:.3g} s" for name, seconds in split_by_cause(time).items() if seconds]
    console.print(line + f": {', '.join(parts)}" * bool(parts), highlight=False)
    if time.traffic_bytes:
        sent = [f"{format_size(size)} through the {name}" for name, size in time.traffic_bytes.items()]
        console.print(f"collectives of a step: {', '.join(sent)}", highlight=False)
    if time.between:
        console.print(
            "  not known, taken from the slowest to the fastest of the machines in conf/hardware: "
            + ", ".join(time.unknown)
        )
    elif time.unknown:
        console.print(f"  what is not known counts nothing: {', '.join(time.unknown)}")
