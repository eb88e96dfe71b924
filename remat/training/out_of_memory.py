"""Explain that memory ran out: in which phase, on which rank, planned against measured, and the cheapest remedies.

The remedies are the advice of `remat plan` for a machine that has less memory by the bytes that were missing. A
separate process plans them after the run has failed.
"""

from __future__ import annotations

import gc
import re
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist

from remat.activation_checkpointing.mechanisms.counters import PLACE
from remat.config.options import OnOutOfMemory, RunConfig
from remat.config.units import GIB, MIB, format_size
from remat.launch import retreat
from remat.launch.retreat import Smaller
from remat.machine import distributed
from remat.machine.host_memory import host_memory
from remat.planning.launch_plan import LaunchPlan
from remat.planning.plan import GPU_MEMORY, HOST_MEMORY, needed_bytes, overhead_bytes

ADVICE_S = 120  # time limit of planning the advice
NUM_ADVICE = 3
ROOM_BYTES = 1 << 28  # a GPU with more than this free has not run out
MARGIN = 0.05  # share of the plan that advice must save at least: more may be missing later on
KEY = "remat/out_of_memory"  # in the process group's store: how many ranks ran out of memory
PHASES = {"optimizer": "optimizer step"}  # phase of the timer -> its name in messages, where they differ
UNITS = {"bytes": 1, "B": 1, "KiB": 1024, "MiB": MIB, "GiB": GIB, "TiB": 1024 * GIB}
ASKED = re.compile(r"(?:[Tt]ried to allocate|Unable to allocate) ([\d.]+) (bytes|B|KiB|MiB|GiB|TiB)\b")
WORDS = re.compile(
    r"out of memory|_ALLOC_FAILED|not enough memory|can't allocate memory|Cannot allocate memory|Unable to allocate"
)


@dataclass(frozen=True)
class Measured:
    """The memory of one rank when memory ran out.

    GPU figures are None without a GPU. `asked_bytes` is None where the error does not say.
    """

    asked_bytes: int | None
    resident_bytes: int
    available_bytes: int
    gpu_allocated_bytes: int | None = None
    gpu_reserved_bytes: int | None = None
    gpu_free_bytes: int | None = None


class OutOfMemory(RuntimeError):
    """The error raised when memory ran out (exit 70).

    `place` is "GPU" or "host"; `layer` is None outside of the decoder layers.
    """

    def __init__(
        self, phase: str, plan: LaunchPlan, *, place: str, layer: int | None, measured: Measured, cause: str
    ) -> None:
        self.phase, self.plan, self.place, self.layer = phase, plan, place, layer
        self.measured, self.cause = measured, cause
        self.rank = distributed.rank_from_env()
        where = "" if layer is None else f", layer {layer}"
        super().__init__(f"out of {place} memory in {phase}{where} on rank {self.rank}")


@contextmanager
def named(phase: str | Callable[[], str], plan: LaunchPlan) -> Iterator[None]:
    """Raise OutOfMemory with this phase when memory runs out inside. The innermost name counts."""
    try:
        yield
    except OutOfMemory:
        raise
    except Exception as error:
        # no cause here: another rank ran out of memory, and this one failed because that one left
        cause = find(error) or (error if _told() else None)
        if cause is None:
            raise
        layer, recomputing = getattr(cause, PLACE, (None, False))
        name = phase if isinstance(phase, str) else phase()
        raise OutOfMemory(
            "recompute" if recomputing else PHASES.get(name, name),
            plan,
            place="GPU" if _on_gpu(cause) else "host",
            layer=None if layer is None else _first_layer(plan) + layer,
            measured=measure(str(cause)),
            cause=str(cause).strip().split("\n")[0],
        ) from error


def _first_layer(plan: LaunchPlan) -> int:
    """Return the index, in the whole model, of the first layer of this rank's stage, from which its layers count."""
    stages = plan.strategy.stages
    if stages is None:
        return 0
    ranks = distributed.world_size_from_env() // stages.size  # of a stage
    return stages.borders[distributed.rank_from_env() // ranks]


def find(error: BaseException | None) -> BaseException | None:
    """Return the first exception in the chain of causes that says that GPU or host memory ran out; else None."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or WORDS.search(str(error)):
            return error
        error = error.__cause__
    return None


def measure(text: str) -> Measured:
    """Measure this rank's memory now; `text` is what the allocator said."""
    asked = ASKED.search(text)
    resident, available = psutil.Process().memory_info().rss, host_memory().available_bytes
    asked_bytes = int(float(asked[1]) * UNITS[asked[2]]) if asked else None
    gpu: tuple[int, ...] = ()
    if torch.cuda.is_available():
        gpu = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    return Measured(asked_bytes, resident, available, *gpu)


def tell(error: OutOfMemory, exit_code: int) -> int:
    """Print what happened and what helps, and return `exit_code`.

    Of several ranks only the first to come here prints; the others wait for the end.
    """
    if not _is_first():
        # the launcher ends all ranks when the printing one has left
        time.sleep(ADVICE_S + retreat.PLANNED_IN_S + 30)
        return exit_code
    _let_go(error)
    goes_on, said = _ask_for_retreat(error)
    advice = [] if goes_on else ask(error)  # a run that goes on needs none, and it takes another search
    print(f"\nremat: {compose_message(error, advice)}\n", file=sys.stderr, flush=True)
    if said:
        print(f"remat: {said}\n", file=sys.stderr, flush=True)
    return exit_code


def prepare_for_kill(cfg: RunConfig, plan: LaunchPlan) -> None:
    """Tell `remat launch` what to plan if the kernel kills a rank for memory: a killed rank cannot ask for it."""
    if cfg.on_out_of_memory is OnOutOfMemory.retreat and plan.planned is not None:
        retreat.prepare(_on_smaller(plan, "host", 0, cfg.most_retreats))


def _ask_for_retreat(error: OutOfMemory) -> tuple[bool, str]:
    """Ask `remat launch` for the fastest setting that needs less and trains the same, if the run is to go on.

    Return whether the run goes on, and a line that says why not or how.
    """
    planned = error.plan.planned
    if planned is None or planned.cfg.on_out_of_memory is not OnOutOfMemory.retreat:
        return False, ""
    most, done = planned.cfg.most_retreats, retreat.count_so_far()
    if said := retreat.too_many(most, done):
        return False, said
    asked = retreat.choose(_on_smaller(error.plan, error.place, _missing_bytes(error), most), str(error))
    if asked is None:
        return False, retreat.NOTHING
    retreat.leave(asked)
    return True, f"retreat {done + 1} of {most}: the run goes on with {' '.join(asked.overrides)}"


def _on_smaller(plan: LaunchPlan, place: str, missing_bytes: int, most: int) -> Smaller:
    folder = None if plan.folder is None else str(plan.folder)
    words = _smaller(plan, place, missing_bytes)[2:]
    return Smaller(plan.device, words, list(plan.added), folder, most)


def compose_message(error: OutOfMemory, advice: list[dict[str, Any]]) -> str:
    """Return the whole text; `advice` is as in `remat plan --json`."""
    lines = [str(error), "", *_table(error), ""]
    if error.plan.planned is not None:
        lines.append(f"the plan's peak is {error.plan.where()}")
    else:
        lines.append(f"there is no plan of this run: {error.plan.reason}")
    lines += [f"the allocator said: {error.cause}", ""]
    if advice:
        lines.append("the cheapest changes that need less, by the plan:")
        lines += [f"  {_advice_line(item, error.plan.device)}" for item in advice[:NUM_ADVICE]]
        lines += ["", "more of them:"]
    else:
        lines.append("what needs less, ask:")
    return "\n".join([*lines, f"  {shlex.join(build_command(error))}"])


def ask(error: OutOfMemory) -> list[dict[str, Any]]:
    """Return `remat plan`'s advice for a machine with less memory by the missing bytes; [] when the command fails."""
    if error.plan.planned is None:
        return []
    found = retreat.plan_alone(["remat.cli", *build_command(error)[1:], "--json"], ADVICE_S) or {}
    closest = [found["closest"]] if found.get("closest") else []
    return found.get("advice") or closest


def build_command(error: OutOfMemory) -> list[str]:
    """Return the `remat plan` command for a machine with less memory by the missing bytes."""
    return _smaller(error.plan, error.place, _missing_bytes(error))


def _missing_bytes(error: OutOfMemory) -> int:
    free = error.measured.gpu_free_bytes if error.place == "GPU" else error.measured.available_bytes
    return (error.measured.asked_bytes or 0) - (free or 0)


def _smaller(plan: LaunchPlan, place: str, missing_bytes: int) -> list[str]:
    """Return the `remat plan` command for less memory than the plan needs: by `missing_bytes`, at least by MARGIN."""
    planned = plan.planned
    if planned is None:
        return plan.command
    option, needed = _needed(plan, place)
    whole = needed if option == "hardware.host_memory_gib" else planned.plan.peak_bytes
    at_most = needed - whole // 2  # the smallest memory for which advice stays possible
    target = max(needed - max(missing_bytes, int(MARGIN * whole)), at_most)
    kept = [word for word in plan.command if not word.startswith(f"{option}=")]
    return [*kept, f"{option}={target / GIB:.4f}"]


def _needed(plan: LaunchPlan, place: str) -> tuple[str, int]:
    """Return the option for the size of the memory that ran out, and the bytes of it that the plan needs.

    Ranks on CPUs hold in host memory what a GPU would hold. Advice is about that part, and calls it GPU memory.
    """
    planned = plan.planned
    assert planned is not None
    if plan.device == "cpu":
        peak, expandable = planned.plan.peak_bytes, planned.strategy.allocators.expandable_segments
        overhead = overhead_bytes(peak, planned.world_size, expandable=expandable)
        return "hardware.gpu_memory_gib", peak + overhead
    if place == "GPU":
        return "hardware.gpu_memory_gib", needed_bytes(planned, GPU_MEMORY)
    return "hardware.host_memory_gib", needed_bytes(planned, HOST_MEMORY)


def _table(error: OutOfMemory) -> list[str]:
    planned, measured = error.plan.planned, error.measured
    peak = planned.plan.peak_bytes if planned else None
    host = sum(planned.plan.host.values()) + sum(planned.plan.pinned.values()) if planned else None
    rows: list[tuple[str, int | None, int | None]] = []
    if measured.gpu_allocated_bytes is not None:
        needed = _needed(error.plan, error.place)[1] if planned and error.place == "GPU" else None
        rows += [
            ("GPU, allocated", peak, measured.gpu_allocated_bytes),
            ("GPU, needed and reserved", needed, measured.gpu_reserved_bytes),
            ("GPU, free", None, measured.gpu_free_bytes),
        ]
    elif host is not None and peak is not None:
        host += peak
    rows += [
        ("host, of this rank", host, measured.resident_bytes),
        ("host, still available", None, measured.available_bytes),
        ("asked for", None, measured.asked_bytes),
    ]
    cells = [
        (name, *("" if value is None else format_size(value) for value in values)) for name, *values in rows
    ]
    return [f"{name:<28}{left:>14}{right:>14}" for name, left, right in [("", "planned", "measured"), *cells]]


def _advice_line(item: dict[str, Any], device: str) -> str:
    notes = []
    if device == "cuda" and item.get("gpu_needed_bytes"):
        notes.append(f"GPU {format_size(item['gpu_needed_bytes'])}")
    if item.get("step_time_s"):
        notes.append(f"{item['step_time_s']:.3g} s per step at best")
    if item.get("changes_training"):
        notes.append("changes what is trained")
    if not item.get("fits", True):
        notes.append("saves less than was missing, but nothing saves more")
    overrides = " ".join(item["overrides"])
    return f"{overrides}  ({', '.join(notes)})" if notes else overrides


def _is_first() -> bool:
    """Return whether this rank is the first of those that fail.

    The process group's store answers even while other ranks hang in a collective.
    """
    if not dist.is_initialized():
        return distributed.rank_from_env() == 0
    try:
        return int(_store().add(KEY, 1)) == 1
    except RuntimeError:  # the store's rank has left, so that several ranks may print
        return True


def _told() -> bool:
    """Return whether a rank has reported that its memory ran out."""
    try:
        return dist.is_initialized() and bool(_store().check([KEY]))
    except RuntimeError:  # the store's rank has left
        return False


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _let_go(error: BaseException | None) -> None:
    """Free the memory of the failed run for planning: tracebacks keep the local variables of every frame."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__
    gc.collect()


def _on_gpu(error: BaseException) -> bool:
    """Return whether the memory that ran out is a GPU's.

    A failed cudaHostAlloc says "CUDA error: out of memory" too. Then the GPU has room left, and pinned memory
    has none.
    """
    if isinstance(error, torch.OutOfMemoryError) or "_ALLOC_FAILED" in str(error):
        return True
    if "CUDA" not in str(error):
        return False
    return not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < ROOM_BYTES
