"""Step time over peak memory: tables of checkpointing=budget beside the policies of every peer, in one process.

Forward, loss and backward of one micro-batch without an engine, so that nothing but the policy differs. All points
share one set of weights; gradients are dropped as they come, as ZeRO with offload drops them. Points take turns, and
medians are compared; ratios are of the same round. A budget is set at the peak of each peer and at even distances
between the least and everything. On a GPU: CUDA events and the allocator's peak. On a CPU: seconds of the one thread
that computes, and the largest sum of live storages, counted in a pass of its own that is not timed. There the process
keeps freed memory, as a GPU's allocator does.

    python benchmarks/budget.py            # benchmarks/results/budget_DEVICE.csv, docs/figures/budget_DEVICE.png
    python benchmarks/budget.py --models gpt2    # the rows of the others stay
    python benchmarks/budget.py --near     # alone the budget at 1.02 x the peak of `full`: budget_near_DEVICE.csv
    python benchmarks/budget.py --draw     # the picture and the tables again, from the CSV
"""

from __future__ import annotations

import argparse
import copy
import csv
import itertools
import math
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "docs" / "figures"

import torch  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from benchmarks.peer_policies import PutOn, peers  # noqa: E402
from remat.activation_checkpointing import apply, policy  # noqa: E402
from remat.activation_checkpointing.mechanisms import operators  # noqa: E402
from remat.activation_checkpointing.mechanisms.counters import Scope  # noqa: E402
from remat.activation_checkpointing.mechanisms.mechanism import KEEP, LayerDecision  # noqa: E402
from remat.activation_checkpointing.op_tracer import OpTracer  # noqa: E402
from remat.config.options import CheckpointingConfig, ConfigError, Policy, SelectiveOpsConfig  # noqa: E402
from remat.config.units import GB, GIB, MIB  # noqa: E402
from remat.machine.gpus import Machine  # noqa: E402
from remat.model.flops import flop_formula  # noqa: E402
from remat.model.layers import decoder_layers  # noqa: E402
from remat.planning import budget  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MODELS: dict[str, dict[str, Any]] = {  # layers of the width at which a CPU's step is arithmetic, not Python
    "llama": {"hidden_size": 384, "intermediate_size": 1056, "num_attention_heads": 6, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 384, "n_head": 6, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "mixtral": {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
                "num_local_experts": 4, "router_aux_loss_coef": 0.0},
}  # fmt: skip
WIDTHS = {"hidden_size", "intermediate_size", "n_embd"}
HEADS = {"num_attention_heads", "num_key_value_heads", "n_head"}
DEPTH = {"gpt2": "n_layer"}
VOCAB = 512  # small, so that the loss is not the peak
NONE, FULL, BUDGET = "none", "remat: full", "budget"
LINEARS = SelectiveOpsConfig(save_linears=["all_but_down"])
NAMED = {  # remat's own
    FULL: CheckpointingConfig(policy=Policy.full),
    "remat: selective_ops": CheckpointingConfig(policy=Policy.selective_ops),
    "remat: selective_linears": CheckpointingConfig(policy=Policy.selective_ops, selective_ops=LINEARS),
    "remat: selective_modules": CheckpointingConfig(policy=Policy.selective_modules),
    "remat: discard_output": CheckpointingConfig(policy=Policy.discard_output),
}
TITAN = "after torchtitan: every second matmul"
NEAR = 1.02  # of the peak of `full`
BETWEEN = 8  # budgets at even distances
KEEPS_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
}  # glibc's, bytes
SAME = 0.005  # of the peak: budgets that differ by less are one
FULL_LIKE = ("torch checkpoint", "Hugging Face")
FAMILIES = {BUDGET: "budget", "torch.compile": "torch.compile's budget", "torch selective": "torch selective",
            "torchtitan": "after torchtitan", "Megatron": "after Megatron", "DeepSpeed": "DeepSpeed",
            "Hugging Face": "Hugging Face", "torch checkpoint": "torch checkpoint"}  # fmt: skip


@dataclass
class Point:
    """One policy on a model of its own that shares its weights with the others."""

    name: str
    net: Any
    peak_bytes: int = 0
    bit_equal: bool = False
    seconds: list[float] = field(default_factory=list)
    applied: apply.Applied | None = None


@dataclass(frozen=True)
class Shape:
    layers: int = 4
    seq_len: int = 256
    wide: float = 1.0  # times the widths of `MODELS`; above 1 the heads are more, not wider


SHAPES = {"cpu": Shape(), "cuda": Shape(seq_len=4096, wide=8)}


class Bench:
    """The points of one model in one precision."""

    def __init__(self, kind: str, dtype: torch.dtype, shape: Shape, device: torch.device) -> None:
        self.device, self.dtype = device, dtype
        torch.manual_seed(0)
        widths = {name: int(size * shape.wide) for name, size in MODELS[kind].items() if name in WIDTHS}
        heads = {
            name: int(number * max(1, shape.wide)) for name, number in MODELS[kind].items() if name in HEADS
        }
        sizes = MODELS[kind] | widths | heads
        depth = {DEPTH.get(kind, "num_hidden_layers"): shape.layers}
        config = AutoConfig.for_model(kind, **(sizes | depth | {"vocab_size": VOCAB, "use_cache": False}))
        with device:
            self.net = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
            self.ids = torch.randint(0, VOCAB, (1, shape.seq_len))
        self.machine = self._measure_rates()
        self.points: list[Point] = []
        self._known: dict[Any, tuple[budget.Trial, Point]] = {}

    def twin(self) -> Any:
        """Return a model of its own with the same weights."""
        weights = [*self.net.parameters(), *self.net.buffers()]
        return copy.deepcopy(self.net, {id(weight): weight for weight in weights})

    def one_pass(self, net: Any) -> torch.Tensor:
        loss: torch.Tensor = net(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        return loss.detach()

    def gradients(self, net: Any) -> list[torch.Tensor]:
        net.zero_grad(set_to_none=True)
        found = [self.one_pass(net), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        net.zero_grad(set_to_none=True)
        return found

    def peak(self, net: Any, scope: Scope | None = None) -> tuple[int, int]:
        """Return the bytes above the weights at the peak of a pass, and the FLOPs that `scope` saw run again."""
        with dropped_gradients(net):
            if self.device.type == "cuda":
                self.one_pass(net)
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                base = torch.cuda.memory_allocated()
                self.one_pass(net)
                torch.cuda.synchronize()
                measured = torch.cuda.max_memory_allocated() - base
            tracer = OpTracer(scope or Scope(), self.device, weights=net.parameters)
            with tracer:
                self.one_pass(net)
        return (measured if self.device.type == "cuda" else tracer.peak_bytes), tracer.total_flops("recompute")

    def add(self, point: Point, expected: list[torch.Tensor]) -> None:
        """Warm it up, hold its gradients against those of keeping everything, and count its peak."""
        found = [self.gradients(point.net) for _ in range(2)][-1]
        point.bit_equal = len(found) == len(expected) and all(map(torch.equal, found, expected))
        point.peak_bytes, _ = self.peak(point.net)
        self.points.append(point)
        print(
            f"  {point.peak_bytes / MIB:8.2f} MiB  {'equal' if point.bit_equal else 'not equal':9}  {point.name}"
        )

    def collect(self, chosen: Mapping[str, PutOn], between: int) -> None:
        """Make the points: keeping everything, `chosen` peers, remat's named policies, and budgets."""
        expected = self.gradients(self.net)
        self.add(Point(NONE, self.twin()), expected)
        own = {name: partial(self._put_on, cfg) for name, cfg in NAMED.items()}
        for name, put_on in {**chosen, **own}.items():
            net = self.twin()
            try:
                put_on(net)
                self.add(Point(name, net), expected)
            except Exception as error:  # what a peer cannot do is a result
                print(f"  {name}: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
        for limit in self._limits(between):
            if point := self._table(limit):
                self.add(point, expected)

    def collect_near(self) -> None:
        """Make the points of `full`, of torch and Hugging Face too, and the budget at `NEAR` of its peak."""
        expected = self.gradients(self.net)
        known = peers(self.device, compiled=False)
        own = {FULL: partial(self._put_on, NAMED[FULL])}
        self.add(Point(NONE, self.twin()), expected)
        for name, put_on in {**{name: known[name] for name in FULL_LIKE}, **own}.items():
            net = self.twin()
            put_on(net)
            self.add(Point(name, net), expected)
        if point := self._table(int(NEAR * self.points[-1].peak_bytes)):
            self.add(point, expected)

    def _put_on(self, cfg: CheckpointingConfig, net: Any) -> None:
        apply.apply(net, policy.decide_layers(cfg, len(decoder_layers(net))), cfg, device=self.device)

    def _limits(self, between: int) -> list[int]:
        """Return budgets: the peaks of the others, and even distances from the least to everything."""
        peaks = [point.peak_bytes for point in self.points]
        least = self._trial(self._decisions())[0].needed_bytes
        even = [least + (max(peaks) - least) * number // between for number in range(between + 1)]
        full = next(point.peak_bytes for point in self.points if point.name == FULL)
        found = [least, int(NEAR * full)]
        for limit in sorted([*peaks, *even]):
            if limit > least and all(abs(limit - other) > SAME * other for other in found):
                found.append(limit)
        return sorted(found)

    def _decisions(self) -> list[LayerDecision]:
        return policy.decide_layers(CheckpointingConfig(policy=Policy.budget), len(decoder_layers(self.net)))

    def _table(self, limit: int) -> Point | None:
        """Return the fastest tables within `limit` bytes; None: a point has them already, or there are none."""
        cfg = CheckpointingConfig(policy=Policy.budget, budget_gib=str(limit / GIB))
        try:
            _, decisions, _ = budget.choose(
                cfg, self._decisions(), lambda tried: self._trial(tried)[0], self.machine,
                gpu_bytes=None, on_gpu=self.device.type == "cuda",
            )  # fmt: skip
        except ConfigError:
            return None
        point = self._known[tuple((d.mechanism.name, d.table) for d in decisions)][1]
        if point in self.points:
            return None
        kept = sum(decision.mechanism == KEEP for decision in decisions)
        point.name = f"{BUDGET}: {kept} layers keep all"
        return point

    def _trial(self, decisions: list[LayerDecision]) -> tuple[budget.Trial, Point]:
        key = tuple((decision.mechanism.name, decision.table) for decision in decisions)
        if key not in self._known:
            net = self.twin()
            cfg = CheckpointingConfig(policy=Policy.budget)
            applied = apply.apply(net, decisions, cfg, device=self.device)
            with dropped_gradients(net):
                self.one_pass(net)  # layers are written down
            needed, again = self.peak(net, applied.scope)
            trial = budget.Trial(needed, 0.0, again, applied.graphs(), None)
            self._known[key] = trial, Point("", net, applied=applied)
        return self._known[key]

    def _measure_rates(self) -> Machine:
        """Measure what the prices of operations are made of, on this model's operations."""
        net = self.twin()
        with dropped_gradients(net):
            self.one_pass(net)
            rates = Rates(self.device)
            with rates:
                self.one_pass(net)
        found = {kind: rates.amounts[kind] / max(rates.seconds[kind], 1e-9) for kind in rates.seconds}
        return Machine(
            name="measured here",
            matmul_tflops=found.get("matmul", 0.0) / 1e12 or None,
            attention_tflops=found.get("attention", 0.0) / 1e12 or None,
            memory_gbs=found.get("elementwise", 0.0) / GB or None,
        )

    def time(self, rounds: int) -> None:
        """Take turns, in another order each round, so that nobody always follows the same neighbour."""
        for number in range(rounds):
            for point in random.Random(number).sample(self.points, len(self.points)):
                with dropped_gradients(point.net):
                    point.seconds.append(self.seconds(partial(self.one_pass, point.net)))

    def seconds(self, run: Callable[[], Any]) -> float:
        if self.device.type == "cpu":
            started = time.thread_time()
            run()
            return time.thread_time() - started
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000


class Rates(TorchDispatchMode):
    """Seconds and amounts of the operations that run: FLOPs of products and attention, bytes of the others."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.amounts: defaultdict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        started = self._now()
        result = func(*args, **kwargs)
        spent = self._now() - started
        if getattr(func, "is_view", False):
            return result
        formula = flop_formula(func)
        attention = operators.FUSED_ATTENTION.fullmatch(operators.describe(func).name)
        kind = "attention" if attention else "matmul" if formula else "elementwise"
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        amount = formula(*args, **kwargs, out_val=result) if formula else sum(t.nbytes for t in tensors)
        self.seconds[kind] += spent
        self.amounts[kind] += amount * (0.5 if attention else 1)  # half of the square is masked
        return result

    def _now(self) -> float:
        if self.device.type == "cpu":
            return time.thread_time()
        torch.cuda.synchronize()
        return time.perf_counter()


@contextmanager
def dropped_gradients(net: Any) -> Iterator[None]:
    """Drop each gradient as soon as it is whole."""

    def drop(weight: torch.Tensor) -> None:
        weight.grad = None

    weights = [weight for weight in net.parameters() if weight.requires_grad]
    handles = [weight.register_post_accumulate_grad_hook(drop) for weight in weights]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def measure(
    kinds: Sequence[str],
    dtypes: Sequence[str],
    shape: Shape,
    chosen: Mapping[str, PutOn],
    *,
    rounds: int,
    between: int,
    near: bool = False,
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each model in each precision, a row a point. `near`: of `Bench.collect_near` alone."""
    device = find_device()
    around = surroundings(device)
    for kind in kinds:
        for dtype in dtypes:
            print(f"{kind}, {dtype}", flush=True)
            bench = Bench(kind, DTYPES[dtype], shape, device)
            if near:
                bench.collect_near()
            else:
                bench.collect(chosen, between)
            bench.time(rounds)
            base = bench.points[0].seconds
            yield [
                {
                    "model": kind, "dtype": dtype, "point": point.name, "peak_bytes": point.peak_bytes,
                    "seconds": round(statistics.median(point.seconds), 6),
                    "time_of_none": round(middle_ratio(point.seconds, base), 4),
                    "bit_equal": point.bit_equal, "rounds": rounds,
                    "load_average": round(os.getloadavg()[0], 1), **around,
                }
                for point in bench.points
            ]  # fmt: skip


def middle_ratio(mine: list[float], base: list[float]) -> float:
    """Return the median of the ratios within a round."""
    return statistics.median(one / other for one, other in zip(mine, base, strict=True))


def find_device() -> torch.device:
    torch.set_num_threads(1)  # one thread computes, and its time is taken
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure_overhead(rounds: int) -> list[dict[str, Any]]:
    """Measure what a layer costs in Python: one that keeps all, and one whose table keeps the least.

    On a model so small that operations are short. `operations_us` are those that the table runs again, called one
    after another with nothing around.
    """
    device = find_device()
    bench = Bench("llama", torch.float32, Shape(layers=8, seq_len=16, wide=0.25), device)
    decisions = bench._decisions()
    nets, cfg = {NONE: bench.twin()}, CheckpointingConfig(policy=Policy.budget)
    tables = {
        "keeps all": [replace(decision, mechanism=KEEP) for decision in decisions],
        "keeps least": decisions,
    }
    for name, chosen in tables.items():
        nets[name] = bench.twin()
        applied = apply.apply(nets[name], chosen, cfg, device=device)
    for net in nets.values():
        bench.one_pass(net)
    with Again(applied.scope) as again:
        bench.one_pass(nets["keeps least"])
    seconds: dict[str, list[float]] = {name: [] for name in [*nets, "operations"]}
    for _ in range(rounds):
        for name, net in nets.items():
            with dropped_gradients(net):
                seconds[name].append(bench.seconds(partial(bench.one_pass, net)))
        seconds["operations"].append(bench.seconds(again.run))

    def extra_us(name: str) -> float:
        pairs = zip(seconds[name], seconds[NONE], strict=True)
        return statistics.median(mine - none for mine, none in pairs) / len(decisions) * 1e6

    operations = statistics.median(seconds["operations"]) / len(decisions) * 1e6
    shared = {"none_us": statistics.median(seconds[NONE]) / len(decisions) * 1e6, "rounds": rounds,
              "load_average": os.getloadavg()[0]}  # fmt: skip
    rows = [
        {"layer": "keeps all", "extra_us": extra_us("keeps all"), "operations_us": 0.0},
        {"layer": "keeps least", "extra_us": extra_us("keeps least"), "operations_us": operations},
    ]
    for row in rows:
        row["overhead_us"] = row["extra_us"] - row["operations_us"]
    around = surroundings(device)
    return [
        {
            key: round(value, 1) if isinstance(value, float) else value
            for key, value in (row | shared | around).items()
        }
        for row in rows
    ]


class Again(TorchDispatchMode):
    """The operations that layers run again in a backward, with their arguments; views of what is there are none."""

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self.scope = scope
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.scope.recomputing and not func.is_view:
            self.calls.append((func, args, kwargs))
        return func(*args, **kwargs)

    @torch.no_grad()
    def run(self) -> None:
        for func, args, kwargs in self.calls:
            func(*args, **kwargs)


def surroundings(device: torch.device) -> dict[str, Any]:
    from benchmarks.environment import environment

    found = environment(device.type)
    name = found["gpu"] or f"CPU, {found['cpu_cores']} cores"
    versions = ("torch", "deepspeed", "transformers", "commit", "date")
    return {"device": name, "threads": torch.get_num_threads()} | {key: found[key] for key in versions}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[Any]:
    return list(csv.DictReader(path.open())) if path.is_file() else []


@dataclass(frozen=True)
class Verdict:
    """What the budgets of one model reach, against its other points. Shares of one; None: there is no such point.

    `beaten`: peers at whose peak, or below, a budget is at least as fast. `titan_spared`: of torchtitan's extra time,
    at its peak or below. `full_spared`: of the step of the fastest `full`, at `NEAR` of its peak or below.
    """

    peers: int
    beaten: int
    unbeaten: tuple[str, ...]
    titan_spared: float | None
    full_spared: float | None


def judge(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """Hold the budgets among `rows`, of one model, against the peers."""
    budgets = [
        (int(row["peak_bytes"]), float(row["time_of_none"])) for row in rows if row["point"].startswith(BUDGET)
    ]
    others = {row["point"]: (int(row["peak_bytes"]), float(row["time_of_none"])) for row in rows
              if not row["point"].startswith((BUDGET, NONE, "remat"))}  # fmt: skip

    def fastest(peak: float) -> float | None:
        return min((time for size, time in budgets if size <= peak), default=None)

    lost = tuple(name for name, (peak, time) in others.items() if (fastest(peak) or math.inf) > time)
    titan = full = None
    if TITAN in others and (at := fastest(others[TITAN][0])) is not None:
        titan = 1 - (at - 1) / (others[TITAN][1] - 1)
    whole = min(
        (other for name, other in others.items() if name in FULL_LIKE), key=lambda other: other[1], default=None
    )
    if whole is not None and (at := fastest(NEAR * whole[0])) is not None:
        full = 1 - at / whole[1]
    return Verdict(len(others), len(others) - len(lost), lost, titan, full)


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw extra time over peak memory, a panel for each model and precision."""
    groups = group(rows)
    columns = list(dict.fromkeys(dtype for _, dtype in groups))
    height = 2.6 * (len(groups) // len(columns))
    figure = Figure(figsize=(9.2, height + 0.9), layout="constrained")
    panels = figure.subplots(len(groups) // len(columns), len(columns), squeeze=False)
    for axes, ((kind, dtype), members) in zip(panels.flat, groups.items(), strict=True):
        points: dict[str, list[tuple[float, float]]] = {family: [] for family in FAMILIES}
        for row in members:
            place = int(row["peak_bytes"]) / MIB, 100 * (float(row["time_of_none"]) - 1)
            family = next(
                (name for name in points if row["point"].removeprefix("after ").startswith(name)), None
            )
            if family:
                points[family].append(place)
        axes.plot(
            *zip(*sorted(points.pop(BUDGET)), strict=True),
            color="#d9691f",
            marker="o",
            markersize=3,
            label="budget",
        )
        for (family, places), marker in zip(points.items(), "sDv^P*X", strict=False):
            if places:
                axes.plot(*zip(*places, strict=True), marker, markersize=5, alpha=0.8, label=FAMILIES[family])
        axes.set_title(f"{kind}, {dtype}", fontsize=9)
        axes.grid(color="#e3e7ec")
    for axes in panels[-1]:
        axes.set_xlabel("peak of forward and backward, MiB")
    for axes in panels[:, 0]:
        axes.set_ylabel("extra time, %")
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)


def group(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["dtype"]), []).append(row)
    return groups


def print_tables(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print every point, and a line of Markdown for each model."""
    verdicts = []
    for (kind, dtype), members in group(rows).items():
        print(f"\n{kind}, {dtype}")
        for row in sorted(members, key=lambda row: int(row["peak_bytes"])):
            size, extra = int(row["peak_bytes"]) / MIB, 100 * (float(row["time_of_none"]) - 1)
            print(f"{size:8.2f} MiB {extra:+6.1f} %  {row['point']}")
        found = judge(members)
        shares = [
            f"{share:.0%}" if share is not None else "-" for share in (found.titan_spared, found.full_spared)
        ]
        verdicts.append(f"| {kind}, {dtype} | {found.beaten} of {found.peers} | {' | '.join(shares)} | "
                        f"{'; '.join(found.unbeaten) or '-'} |")  # fmt: skip
    print("\n".join(["", *verdicts]))


def print_near(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write the rows of `--near`, and print how much shorter a step is than that of the fastest `full`."""
    found = list(rows)
    write(path, found)
    for (kind, dtype), members in group(found).items():
        print(
            f"{kind}, {dtype}: {judge(members).full_spared or 0:.1%} shorter than full, at {NEAR} x its peak at most"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--near", action="store_true", help="nothing but the budget near the peak of full")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if not KEEPS_MEMORY.items() <= os.environ.items():  # read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | KEEPS_MEMORY)
    device = find_device()
    if args.near:
        found = measure(
            args.models, list(DTYPES), SHAPES[device.type], {}, rounds=args.rounds, between=0, near=True
        )
        print_near(RESULTS / f"budget_near_{device.type}.csv", itertools.chain.from_iterable(found))
        return
    result, overhead = (RESULTS / f"{name}_{device.type}.csv" for name in ("budget", "budget_overhead"))
    if not args.draw:
        write(overhead, measure_overhead(50))
        rows: list[Any] = [row for row in read(result) if row["model"] not in args.models]
        shape = SHAPES[device.type]
        for more in measure(
            args.models, list(DTYPES), shape, peers(device), rounds=args.rounds, between=BETWEEN
        ):
            rows += more
            write(result, sorted(rows, key=lambda row: list(MODELS).index(row["model"])))
    for row in read(overhead):
        print(
            f"a layer that {row['layer']}: {row['overhead_us']} us, and {row['operations_us']} us of operations"
        )
    rows = read(result)
    print_tables(rows)
    draw(rows, FIGURES / f"budget_{device.type}.png")


if __name__ == "__main__":
    main()
