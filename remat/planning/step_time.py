"""Estimate the time of one optimizer step: a roofline of the simulated operations, plus traffic that is not hidden.

A term whose rate is not known is left out and named in `StepTime.unknown`: the total is then a lower bound.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remat.config.options import Precision
from remat.config.units import GB
from remat.machine.gpus import ADAM_BYTES, Machine
from remat.planning.simulation.types import OpCost, Phase, Simulation, ZeroSettings

# Slowest and fastest of the machines in conf/hardware, for rates that a machine with a known GPU does not state.
RANGES = {
    "pcie_h2d_gbs": (25.1, 375.0),
    "pcie_d2h_gbs": (27.1, 297.0),
    "gpu_link_gbs": (11.2, 720.0),
    "nic_gbs": (170.0, 340.0),
    "cpu_adam_gparams_s": (41.0 / ADAM_BYTES, 573.4 / ADAM_BYTES),  # of dram_gbs
    "nvme_read_gbs": (7.45, 7.45),
    "nvme_write_gbs": (6.9, 6.9),
}
GPU_LINK, NETWORK = "link of each GPU", "network of each node"
TERA = 1e12
TINY_S = 1e-12  # avoids a division by zero where no time is known
# fp32 parameter, two moments and gradient: bytes that go to NVMe and back for each trained parameter
STATE_BYTES = 16
CAUSAL = 0.5  # a causal kernel computes half of the attention matrix (Dao 2023, FlashAttention-2, section 4.1)
ROOFLINE = (
    "each operation takes the longer of its FLOPs and its bytes at achievable rates, plus a launch; the host launches "
    "ahead of the GPU and nothing else delays it: a best case"
)
OVERLAP = (
    "reductions{gathers} run beside the compute and the copies of their micro-batch, on links of their own, and cost "
    "only what is longer than both"
)
NO_OVERLAP = "overlap_comm=false: collectives wait for compute and compute for them"
PCIE = (
    "copies over PCIe go both ways at once, beside compute; a third of the gathered weights (half without "
    "recomputation) comes in forward, activations leave in forward and return in backward, gradients leave in backward"
)
STAGES = (
    "stages wait for each other as in 1F1B, where the slowest one's time counts for each micro-batch; what is sent "
    "between them is not hidden"
)
AFTER = (
    "the optimizer, its NVMe traffic, and the return of the weights follow one another after the last backward"
)


@dataclass(frozen=True)
class LinkRoom:
    """Room for activations on the link to the host, beside all that ZeRO moves over it.

    `free_bytes` can leave and return at no cost while a micro-batch computes, recomputation not counted. Each further
    byte costs `s_per_byte` seconds. `forward_s` has the seconds of the micro-batch's forward. If a rate of compute is
    not known, `free_bytes` is underestimated.
    """

    free_bytes: int
    s_per_byte: float
    forward_s: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on each rank, by cause. They add up to `total_s`.

    `compute_s` is forward and backward. `hidden_s` is traffic that runs beside compute and costs nothing. `phases_s` is
    the same total by phase, as a run measures them: forward, backward (with recomputation) and optimizer.
    `traffic_bytes` is what the collectives of the step send through each GPU's link and each node's network.
    `between` has the least and the most seconds of the step if some rates are not known and RANGES has all of them.
    `link` is the room for activations; None if the link's rates are not known.
    """

    compute_s: float
    recompute_s: float
    pcie_s: float
    optimizer_s: float
    collectives_s: float
    nvme_s: float
    tokens: int
    hidden_s: Mapping[str, float]
    phases_s: Mapping[str, float]
    traffic_bytes: Mapping[str, int]
    unknown: list[str]
    assumptions: list[str]
    between: tuple[float, float] | None = None
    link: LinkRoom | None = None
    pipeline_s: float = 0.0  # waits for other stages, and what is sent between them

    @property
    def total_s(self) -> float:
        """Return the seconds of the step; a lower bound when something is unknown."""
        exposed = self.pcie_s + self.optimizer_s + self.collectives_s + self.nvme_s + self.pipeline_s
        return self.compute_s + self.recompute_s + exposed

    @property
    def tokens_per_s(self) -> float | None:
        """Return the tokens per second of all ranks together.

        It is an upper bound when something is unknown, and None when no time is known.
        """
        return self.tokens / self.total_s if self.total_s > 0 else None


def step_time(
    simulation: Simulation,
    *,
    machine: Machine,
    zero: ZeroSettings,
    num_params: int,
    num_trained: int,
    accumulation: int,
    tokens: int,
    precision: Precision = Precision.bf16,
    optimizer_on_nvme: bool = False,
    params_on_nvme: bool = False,
    optimizer_bytes: int = ADAM_BYTES,
    sequence_ranks: int = 1,
) -> StepTime:
    """Return the time of an optimizer step of `accumulation` micro-batches like the simulated one.

    Each micro-batch has `tokens` tokens a rank. `num_params` may include frozen parameters. `optimizer_bytes` is what
    the optimizer reads and writes on a GPU for each trained parameter. `sequence_ranks` ranks share each sequence. The
    sources of the formulas are given at the methods of `_Terms`.
    """
    gathered, moved = simulation.gathered_bytes, simulation.moved_bytes

    def timed(rates: Machine) -> StepTime:
        terms = _Terms(rates, zero, precision, num_params, num_trained)
        times, exchanges = dict.fromkeys(Phase, 0.0), dict.fromkeys(Phase, 0.0)
        for op in simulation.ops:
            if op.kind == "exchange":  # attention waits for it
                exchanges[op.phase] += terms.exchange(op.bytes // 2, sequence_ranks)
            elif op.kind == "sum":  # the layer waits for it
                exchanges[op.phase] += terms.sum(op.bytes // 2)
            else:
                times[op.phase] += terms.op(op)
        exchanged = sum(exchanges.values())
        forward = times[Phase.forward]
        backward = times[Phase.recompute] + times[Phase.backward]
        early = 1 / 3 if times[Phase.recompute] > 0 else 1 / 2
        collectives = terms.collectives(gathered, early / accumulation)
        inside, boundary = sum(map(terms.ring, collectives.inside)), terms.ring(collectives.boundary)
        copied, *waits = terms.copies(gathered, early, moved, forward, backward)
        exposed_copies, exposed_inside = sum(waits), inside
        if zero.overlap_comm:
            # collectives and copies use different links: the step waits only for the slower of them
            exposed_inside = max(0.0, inside - forward - backward)
            if exposed_inside > exposed_copies:
                exposed_copies, waits = 0.0, [0.0, 0.0]
            else:
                exposed_inside = 0.0
        hidden = {
            "collectives": accumulation * (inside - exposed_inside),
            "pcie": accumulation * (copied - exposed_copies),
        }
        nvme = terms.nvme(gathered, optimizer_on_nvme, params_on_nvme, accumulation)
        gathers = " and gathers" if zero.stage == 3 else ""
        assumptions = [ROOFLINE, OVERLAP.format(gathers=gathers) if zero.overlap_comm else NO_OVERLAP]
        if zero.offload_optimizer or zero.offload_param or moved:
            assumptions.append(PCIE)
        optimizer = terms.optimizer(optimizer_bytes)
        # Share of the exposed collectives that is in forward. Below ZeRO-3 all of them reduce gradients.
        share = forward / max(TINY_S, forward + backward) if zero.stage == 3 else 0.0
        early_s = exchanges[Phase.forward]
        in_forward = forward + early_s + waits[0] + share * exposed_inside
        in_backward = backward + exchanged - early_s + waits[1] + (1 - share) * exposed_inside
        return StepTime(
            compute_s=accumulation * (forward + times[Phase.backward]),
            recompute_s=accumulation * times[Phase.recompute],
            pcie_s=accumulation * exposed_copies + terms.weights_back(),
            optimizer_s=optimizer,
            collectives_s=accumulation * (exposed_inside + exchanged) + boundary,
            nvme_s=nvme,
            tokens=tokens * accumulation * zero.world_size,
            phases_s={
                "forward": accumulation * in_forward,
                "backward": accumulation * in_backward,
                "optimizer": optimizer + terms.weights_back() + boundary + nvme,
            },
            hidden_s={name: seconds for name, seconds in hidden.items() if seconds > 0},
            traffic_bytes=terms.traffic(collectives, accumulation, simulation.summed_bytes),
            unknown=sorted(terms.unknown),
            assumptions=[*assumptions, AFTER],
            link=terms.link_room(gathered, early, forward, times[Phase.backward]),
        )

    made = timed(machine)
    if not made.unknown or machine.gpu is None:
        return made
    missing = [name for name in RANGES if getattr(machine, name) is None]
    slow, fast = (timed(_with_rates(machine, missing, end)) for end in (0, 1))
    return made if slow.unknown else replace(made, between=(fast.total_s, slow.total_s))


def through_stages(
    times: Sequence[StepTime], accumulation: int, sent_bytes: Sequence[int], machine: Machine
) -> StepTime:
    """Return the time of a step through pipeline stages, given each stage's own time and the bytes its ranks send.

    The slowest stage computes all its micro-batches one after another, and waits once for each other stage: 1F1B,
    Narayanan et al. 2021, section 2.2.1. Sends are not hidden.
    """
    alone = [(time.compute_s + time.recompute_s) / accumulation for time in times]
    slowest = max(range(len(times)), key=alone.__getitem__)
    made, unknown = times[slowest], set(times[slowest].unknown)
    waits = sum(alone) - alone[slowest]
    if machine.gpu_link_gbs is None:
        unknown.add(f"gpu_link_gbs of {machine.name}")
    else:
        waits += max(sent_bytes) / (machine.gpu_link_gbs * GB)
    forward = made.phases_s["forward"] / max(TINY_S, made.phases_s["forward"] + made.phases_s["backward"])
    phases = dict(made.phases_s)
    phases["forward"] += forward * waits
    phases["backward"] += (1 - forward) * waits
    return replace(
        made,
        pipeline_s=waits,
        phases_s=phases,
        traffic_bytes={**made.traffic_bytes, GPU_LINK: made.traffic_bytes.get(GPU_LINK, 0) + max(sent_bytes)},
        unknown=sorted(unknown),
        between=made.between and (made.between[0] + waits, made.between[1] + waits),
        assumptions=[*made.assumptions, STAGES],
    )


def _with_rates(machine: Machine, names: list[str], end: int) -> Machine:
    """Return the machine with the slowest (0) or fastest (1) known rates of these names."""
    values: dict[str, Any] = {name: RANGES[name][end] for name in names}
    return replace(machine, **values)


NOMINAL = {  # rates for comparisons if none are known, on a GPU (True) and on a CPU: TFLOP/s, TFLOP/s, GB/s, us
    True: {"matmul_tflops": 300.0, "attention_tflops": 200.0, "memory_gbs": 2000.0, "launch_us": 5.0},
    False: {"matmul_tflops": 0.05, "attention_tflops": 0.03, "memory_gbs": 10.0, "launch_us": 5.0},
}


def price(op: OpCost, machine: Machine, *, on_gpu: bool) -> float:
    """Return the seconds of an operation by the roofline of `step_time`, to compare operations on one machine.

    NOMINAL replaces rates that are not known.
    """
    rates = {name: getattr(machine, name) or nominal for name, nominal in NOMINAL[on_gpu].items()}
    seconds = op.bytes / (rates["memory_gbs"] * GB)
    if op.kind != "elementwise":
        share = CAUSAL if op.kind == "attention" else 1.0
        seconds = max(seconds, share * op.flops / (rates[f"{op.kind}_tflops"] * TERA))
    return seconds + rates["launch_us"] / 1e6


def seconds_by_bound(simulation: Simulation, machine: Machine) -> dict[str, tuple[float, float]]:
    """Return the seconds bound by arithmetic, and those bound by memory traffic, in forward and in backward.

    An operation counts for what bounds it; its launch always counts as memory traffic. Rates are those of `price`.
    """
    found = {"forward": [0.0, 0.0], "backward": [0.0, 0.0]}
    no_arithmetic = replace(machine, matmul_tflops=math.inf, attention_tflops=math.inf)
    for op, count in Counter(simulation.ops).items():
        if op.phase is Phase.step or op.kind in ("exchange", "sum") or not (op.flops or op.bytes):
            continue  # exchanges and sums wait for a link, which `price` does not know
        both, launch = found["forward" if op.phase is Phase.forward else "backward"], machine.launch_us or 0.0
        seconds = price(op, machine, on_gpu=True)
        bound_by_arithmetic = seconds > price(op, no_arithmetic, on_gpu=True)
        traffic = launch / 1e6 if bound_by_arithmetic else seconds
        both[0] += count * (seconds - traffic)
        both[1] += count * traffic
    return {phase: (arithmetic, traffic) for phase, (arithmetic, traffic) in found.items()}


@dataclass(frozen=True)
class _Ring:
    """Reduce-scatters or all-gathers of `size_bytes` in total over `ranks` consecutive ranks."""

    size_bytes: float = 0.0
    ranks: int = 1

    @property
    def sent_bytes(self) -> float:
        """Return the bytes that each rank sends; with several nodes, each node sends as many."""
        return self.size_bytes * (self.ranks - 1) / self.ranks


@dataclass(frozen=True)
class _Collectives:
    """Collectives `inside` each micro-batch, and those once a step, at the `boundary` of the accumulation."""

    inside: tuple[_Ring, ...]
    boundary: _Ring = _Ring()


class _Terms:
    """The terms of a step time, in seconds. A needed rate that is not known goes into `unknown`, and its term is 0."""

    def __init__(
        self, machine: Machine, zero: ZeroSettings, precision: Precision, num_params: int, num_trained: int
    ) -> None:
        self.machine, self.zero, self.trained, self.unknown = machine, zero, num_trained, set[str]()
        self.precision = precision
        self.width = 4 if precision is Precision.fp32 else 2
        self.ranks = zero.world_size
        # consecutive ranks share layers (tensor parallelism); a ring of ZeRO has one rank of each such group
        self.sharing = zero.tensor_ranks
        self.ranks_per_node = min(machine.gpus_per_node, self.ranks * self.sharing)
        self.per_node = max(1, self.ranks_per_node // self.sharing)
        self.per_pcie_link = min(machine.gpus_per_pcie_link, self.ranks_per_node)
        self.shard = num_trained / (self.ranks if zero.stage else 1)
        self.param_shard = num_params / (self.ranks if zero.stage == 3 else 1)

    def op(self, op: OpCost) -> float:
        """Return the roofline time of an operation (Williams et al. 2009): the longer of arithmetic and traffic.

        Operations of the optimizer step are timed elsewhere and return 0.
        """
        if op.phase is Phase.step or not (op.flops or op.bytes):
            return 0.0
        seconds = self._over(op.bytes, "memory_gbs", GB)
        if op.kind != "elementwise":
            share = CAUSAL if op.kind == "attention" else 1.0
            seconds = max(seconds, self._arithmetic(share * op.flops, f"{op.kind}_tflops"))
        return seconds + (self._rate("launch_us") or 0.0) / 1e6

    def collectives(self, gathered_bytes: int, first: float) -> _Collectives:
        """Return the collectives inside a micro-batch, and at the boundary of the accumulation.

        ZeRO-3 all-gathers weights as counted, and reduce-scatters the gradients, in every micro-batch. With hpZ the
        share `first` of the gathers, those of a step's first forward, is over all ranks; the others are over the ranks
        that hold one second copy of the weights (Wang et al. 2023, ZeRO++, section 3.2). ZeRO-2
        does the reduce-scatter in every micro-batch, and an all-gather of the new weights after the step
        (Rajbhandari et al. 2020, ZeRO, section 7). ZeRO-1 and 0 reduce once; 0 all-reduces.
        """
        gradients, group = self.width * self.trained, self.zero.second_shards
        if self.zero.stage == 3 and group > 1:
            near = _Ring(gathered_bytes * (1 - first), group)
            return _Collectives((_Ring(gathered_bytes * first + gradients, self.ranks), near))
        if self.zero.stage == 3:
            return _Collectives((_Ring(gathered_bytes + gradients, self.ranks),))
        if self.zero.stage == 2:
            return _Collectives((_Ring(gradients, self.ranks),), _Ring(gradients, self.ranks))
        # an all-reduce is a reduce-scatter and an all-gather
        return _Collectives((), _Ring(2 * gradients, self.ranks))

    def traffic(self, collectives: _Collectives, accumulation: int, summed_bytes: int) -> dict[str, int]:
        """Return the bytes that a step sends through each GPU's link and each node's network, without zeros."""
        rings = [*collectives.inside * accumulation, collectives.boundary]
        sums = accumulation * self._sum(summed_bytes).sent_bytes
        beyond = [ring.sent_bytes for ring in rings if ring.ranks > self.per_node]
        found = {
            GPU_LINK: (sum(ring.sent_bytes for ring in rings) if self.per_node > 1 else 0.0)
            + (sums if self.ranks_per_node > 1 else 0.0),
            NETWORK: min(self.sharing, self.ranks_per_node) * sum(beyond)
            + (sums if self.sharing > self.ranks_per_node else 0.0),
        }
        return {name: round(size) for name, size in found.items() if size}

    def exchange(self, size: int, ranks: int) -> float:
        """Return the time of an all-to-all, in which each of `ranks` consecutive ranks divides `size` bytes among all.

        Between nodes, all GPUs of a node send through its network at the same time.
        """
        beyond = max(0, ranks - self.per_node)
        network = self._over(self.per_node * size * beyond / ranks, "nic_gbs", GB)
        return max(network, self._over(size * (ranks - 1) / ranks, "gpu_link_gbs", GB))

    def sum(self, size: int) -> float:
        """Return the time of an all-reduce of `size` bytes over the ranks that share a layer, at the bus bandwidth."""
        rate = "gpu_link_gbs" if self.sharing <= self.ranks_per_node else "nic_gbs"
        return self._over(self._sum(size).sent_bytes, rate, GB)

    def _sum(self, size: int) -> _Ring:
        return _Ring(2 * size, self.sharing)  # an all-reduce is a reduce-scatter and an all-gather

    def copies(
        self, gathered_bytes: int, early: float, moved_bytes: int, forward: float, backward: float
    ) -> tuple[float, float, float]:
        """Return the seconds of PCIe traffic in one micro-batch, and those that forward and backward do not hide.

        Each rank copies its part of the offloaded weights with every gather, the share `early` of them in
        forward. Gradients for a CPU optimizer leave once (Ren et al. 2021, ZeRO-Offload, section 4).
        """
        weights, gradients = self._of_zero(gathered_bytes)
        leaving, returning = self._gpu_to_host(moved_bytes), self._host_to_gpu(moved_bytes)
        first = max(weights * early, leaving)
        second = max(weights * (1 - early) + returning, gradients)
        return first + second, max(0.0, first - forward), max(0.0, second - backward)

    def _of_zero(self, gathered_bytes: int) -> tuple[float, float]:
        """Return the seconds of ZeRO's copies in a micro-batch: of weights to the GPU, of gradients to the host."""
        weights = self._host_to_gpu(gathered_bytes / self.ranks if self.zero.offload_param else 0)
        return weights, self._gpu_to_host(self.width * self.shard if self.zero.offload_optimizer else 0)

    def link_room(self, gathered_bytes: int, early: float, forward: float, backward: float) -> LinkRoom | None:
        """Return how much can be copied at no cost while forward and backward compute; None: rates are unknown.

        Activations leave in forward, against the direction of the weights, and return in backward, after the weights.
        """
        if self.machine.pcie_d2h_gbs is None or self.machine.pcie_h2d_gbs is None:
            return None
        weights, gradients = self._of_zero(gathered_bytes)
        out_s, back_s = self._gpu_to_host(1.0), self._host_to_gpu(1.0)
        leaving = max(forward, weights * early)
        returning = max(backward, gradients, weights * (1 - early)) - weights * (1 - early)
        return LinkRoom(int(min(leaving / out_s, returning / back_s)), out_s + back_s, forward)

    def weights_back(self) -> float:
        """Return the time to copy the new 16-bit weights to the GPU after a CPU step; 0 if they stay on the host."""
        if not self.zero.offload_optimizer or self.zero.offload_param:
            return 0.0
        return self._host_to_gpu(self.width * self.shard)

    def optimizer(self, streamed_bytes: int) -> float:
        """Return the time of the optimizer, which streams `streamed_bytes` for each parameter.

        On the CPU it runs at the node's rate, shared by its ranks; on the GPU at the rate of its memory.
        """
        if self.zero.offload_optimizer:
            return self._over(self.shard * self.ranks_per_node, "cpu_adam_gparams_s", GB)
        return self._over(self.shard * (streamed_bytes + self.width), "memory_gbs", GB)

    def nvme(self, gathered_bytes: int, optimizer: bool, params: bool, accumulation: int) -> float:
        """Return the time of NVMe traffic: state read and written once per step, weights read with every gather.

        Reading, computing and writing follow one another (pipeline_read and pipeline_write are off).
        Rajbhandari et al. 2021, ZeRO-Infinity, section 5.
        """
        read = STATE_BYTES * self.shard if optimizer else 0.0
        written = read
        if params:
            read += accumulation * gathered_bytes / self.ranks
            written += self.width * self.param_shard * (self.trained > 0)
        reading = self._over(self.ranks_per_node * read, "nvme_read_gbs", GB)
        return reading + self._over(self.ranks_per_node * written, "nvme_write_gbs", GB)

    def ring(self, ring: _Ring) -> float:
        """Return the time of a reduce-scatter or all-gather.

        Its bytes move at the bus bandwidth: NCCL tests, doc/PERFORMANCE.md. Between nodes all ports work together, so
        the bus is the slower of a GPU's link and a node's network.
        """
        if not ring.sent_bytes:
            return 0.0
        rates = [self._rate("gpu_link_gbs")] if self.per_node > 1 else []
        if ring.ranks > self.per_node:
            network = self._rate("nic_gbs")  # shared by the rings of all tensor-parallel ranks of the node
            rates.append(network and network / min(self.sharing, self.ranks_per_node))
        if None in rates:
            return 0.0
        return ring.sent_bytes / (min(rate for rate in rates if rate is not None) * GB)

    def _host_to_gpu(self, size: float) -> float:
        return self._over(size * self.per_pcie_link, "pcie_h2d_gbs", GB)

    def _gpu_to_host(self, size: float) -> float:
        return self._over(size * self.per_pcie_link, "pcie_d2h_gbs", GB)

    def _arithmetic(self, flops: float, name: str) -> float:
        if flops and self.precision is Precision.fp32:
            self.unknown.add(f"{name} in fp32: it depends on whether TF32 is allowed")
            return 0.0
        return self._over(flops, name, TERA)

    def _over(self, amount: float, name: str, unit: float) -> float:
        """Return the time of `amount` at the machine's rate `name`."""
        if not amount:
            return 0.0
        rate = self._rate(name)
        return 0.0 if rate is None else amount / (rate * unit)

    def _rate(self, name: str) -> float | None:
        value: float | None = getattr(self.machine, name)
        if value is None:
            self.unknown.add(f"{name} of {self.machine.name}")
        return value
