"""A plan: every byte of a run by place and category, the moment of the peak, and whether it all fits. No torch.

The peak of a GPU is what persists plus the largest sum of what is there at one instant: never a sum of maxima.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from remat.config.units import GIB
from remat.machine.node import CONTEXT_BYTES
from remat.planning.model_states import Item
from remat.planning.simulation.gradients import IN_BACKWARD
from remat.planning.simulation.types import Category, Moment, Phase, Simulation, ZeroSettings

COLLECTIVES_BYTES = int(0.5 * GIB)  # NCCL's channels, per communicator, when there is more than one rank
FRAGMENTATION = 0.06  # reserved over allocated in replays of the caching allocator: 1.06 to 1.12
CATEGORY_OF = {  # of the model states on the GPU, by the names in planning/states.py
    "parameters": Category.weights,
    "frozen parameters": Category.weights,
    "4-bit weights": Category.weights,
    "constants of 4-bit weights": Category.weights,
    "constants of the constants": Category.weights,
    "means of the constants": Category.weights,
    "tables of 4-bit values": Category.weights,
    "tables of 8-bit values": Category.weights,
    "gradients": Category.gradients,
    "accumulated gradients": Category.gradients,
    "gradient staging on the GPU": Category.buckets,
    "reduction bucket": Category.buckets,
    "reduction buckets": Category.buckets,
    "master parameters": Category.optimizer_state,
    "master gradients": Category.optimizer_state,
    "moments": Category.optimizer_state,
}


@dataclass(frozen=True)
class Resource:
    """Something a machine has so much of: `needed` and `found` in bytes; found None: not known."""

    name: str
    needed_bytes: int
    found_bytes: int | None

    @property
    def fits(self) -> bool:
        return self.found_bytes is None or self.needed_bytes <= self.found_bytes

    @property
    def spare_bytes(self) -> int | None:
        return None if self.found_bytes is None else self.found_bytes - self.needed_bytes


@dataclass(frozen=True)
class Capacity:
    """What the machine has: the GPU of one rank, host memory and NVMe of one node. None: unknown."""

    gpu_bytes: int | None
    host_bytes: int | None
    nvme_bytes: int | None = None


@dataclass(frozen=True)
class Plan:
    """Bytes of one rank, and of one node where a name says so.

    `gpu` is by category at the moment of the peak; `peak_bytes` is what torch would report as
    max_memory_allocated; `resources` begins with what the GPU must have for it, if there is one. `host`, `pinned` and
    `nvme` are by item. `states` is what the model states have on the GPU after a backward, whenever the peak is.
    """

    gpu: Mapping[Category, int]
    states: Mapping[Category, int]
    peak: Moment
    peak_bytes: int
    states_bytes: int  # on the GPU from the first micro-batch to the last
    host: Mapping[str, int]
    pinned: Mapping[str, int]
    nvme: Mapping[str, int]
    ranks_per_node: int
    saved_state_bytes: int
    resources: list[Resource]
    assumptions: list[str]

    @property
    def fits(self) -> bool:
        return all(resource.fits for resource in self.resources)


def assemble(
    items: Sequence[Item],
    simulation: Simulation,
    zero: ZeroSettings,
    capacity: Capacity,
    *,
    update_bytes: int,
    ranks_per_node: int,
    num_nodes: int,
    saved_state_bytes: int,
    extra_host_bytes: int,
    on_gpu: bool = True,
) -> Plan:
    """Put the model states and one simulated micro-batch together.

    `update_bytes` is what the optimizer's update adds on the GPU, `extra_host_bytes` what each process has in host
    memory besides (libraries, the data's page cache). Without a GPU (`on_gpu=False`) the bytes of `gpu` are
    host memory too, with no allocator or context around them.
    """
    simulated = IN_BACKWARD if zero.stage < 3 else ()  # counted from moment to moment there
    states = _persistent(item for item in items if item.name not in simulated)
    moments = [_with_states(moment, states) for moment in (simulation.forward_peak, simulation.backward_peak)]
    moments.append(_optimizer_step(_persistent(items), update_bytes))
    peak = max(moments, key=lambda moment: moment.total_bytes)
    gpu = dict(peak.by_category)
    overhead = overhead_bytes(peak.total_bytes, zero.world_size) if on_gpu else 0
    gpu[Category.overhead] = overhead
    host = _by_name(items, "host") | {"processes and libraries": extra_host_bytes}
    pinned = _by_name(items, "pinned")
    if simulation.host_bytes:
        pinned["offloaded activations"] = simulation.host_bytes
    nvme = _by_name(items, "nvme")
    per_rank = sum(host.values()) + sum(pinned.values()) + (0 if on_gpu else peak.total_bytes)
    resources = [Resource("host memory per node", ranks_per_node * per_rank, capacity.host_bytes)]
    if on_gpu:
        resources.insert(0, Resource("GPU memory", peak.total_bytes + overhead, capacity.gpu_bytes))
    if nvme:
        resources.append(Resource("NVMe per node", ranks_per_node * sum(nvme.values()), capacity.nvme_bytes))
    return Plan(
        gpu=gpu,
        states=_persistent(items),
        peak=peak,
        peak_bytes=peak.total_bytes,
        states_bytes=sum(states.values()),
        host=host,
        pinned=pinned,
        nvme=nvme,
        ranks_per_node=ranks_per_node,
        saved_state_bytes=saved_state_bytes,
        resources=resources,
        assumptions=[
            *simulation.assumptions,
            _overhead_in_words(zero.world_size)
            if on_gpu
            else "there is no GPU: what would be on it is host memory",
            f"{num_nodes} node(s) of {ranks_per_node} rank(s)",
        ],
    )


def overhead_bytes(peak_bytes: int, world_size: int) -> int:
    """What a GPU has besides the tensors of the peak: the allocator's gaps, the CUDA context, NCCL."""
    return int(FRAGMENTATION * peak_bytes) + CONTEXT_BYTES + (COLLECTIVES_BYTES if world_size > 1 else 0)


def _overhead_in_words(world_size: int) -> str:
    nccl = f", {COLLECTIVES_BYTES / GIB:.1f} GiB to NCCL" if world_size > 1 else ""
    context = f"{CONTEXT_BYTES / GIB:.1f} GiB to the CUDA context"
    return f"{FRAGMENTATION:.0%} of the peak goes to the allocator, {context}{nccl}"


def _persistent(items: Iterable[Item]) -> dict[Category, int]:
    """Model states on the GPU at the end of a backward."""
    found: dict[Category, int] = {}
    for item in items:
        if item.place == "gpu":
            category = CATEGORY_OF[item.name]
            found[category] = found.get(category, 0) + item.bytes_per_rank
    return found


def _with_states(moment: Moment, persistent: Mapping[Category, int]) -> Moment:
    """A moment of a micro-batch on top of what persists."""
    total = dict(persistent)
    for category, size in moment.by_category.items():
        total[category] = total.get(category, 0) + size
    return Moment(sum(total.values()), total, moment.phase, moment.layer, moment.operation)


def _optimizer_step(persistent: Mapping[Category, int], copies_bytes: int) -> Moment:
    """The update itself: copies of the gradients lie beside the states."""
    total = dict(persistent)
    total[Category.gradients] = total.get(Category.gradients, 0) + copies_bytes
    return Moment(sum(total.values()), total, Phase.step, None, "optimizer")


def _by_name(items: Iterable[Item], place: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for item in items:
        if item.place == place:
            found[item.name] = found.get(item.name, 0) + item.bytes_per_rank
    return found
