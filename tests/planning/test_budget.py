"""The tables of a budget: within it, the fastest, refused with the least that would do; the same bytes as in a run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from remat.activation_checkpointing import apply, policy
from remat.activation_checkpointing.mechanisms.budget import MECHANISM as TABLES
from remat.activation_checkpointing.mechanisms.counters import LayerCounters
from remat.activation_checkpointing.mechanisms.mechanism import KEEP, LayerDecision
from remat.activation_checkpointing.mechanisms.tables.table import Table
from remat.config import compose
from remat.config.options import CheckpointingConfig, ConfigError, Policy, RunConfig, StorageDtype
from remat.config.units import GIB
from remat.machine.gpus import Machine
from remat.planning import budget
from remat.planning import plan as plan_module
from remat.planning.plan import Planned, Recordings, make_plan
from remat.planning.simulation import simulate
from remat.planning.simulation.types import Phase, ZeroSettings
from tests.support import small_models, tiny

BUDGET = CheckpointingConfig(policy=Policy.budget)
KEEPABLE = [f"{name}: mm" for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj")] + [
    "mlp.act_fn: silu",
    "mlp: mul",
]
KNOWN = Recordings()
USED = 0.95  # of a budget


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("budget")
    tiny.make_model(folder / "model", num_hidden_layers=3)
    tiny.make_instructions(folder / "data.jsonl")
    return folder


def plan(folder: Path, *more: str) -> Planned:
    return make_plan(
        compose.compose_run(tiny.words(folder, "x", *more)).run, world_size=2, on_gpu=False, recordings=KNOWN
    )


def gib(size: float) -> str:
    return f"checkpointing.budget_gib={size / GIB:.12f}"


@pytest.mark.parametrize("count", [3, pytest.param(10, marks=pytest.mark.exhaustive)])
def test_budgets_are_kept_used_and_each_more_is_no_slower(folder: Path, count: int) -> None:
    least, most = (plan(folder, f"checkpointing={name}").plan.peak_bytes for name in ("full", "none"))
    again, seen = [], set()
    for share in range(count):
        limit = least + (most - least) * (share + 0.5) / count
        found = plan(folder, "checkpointing=budget", gib(limit))
        assert found.plan.peak_bytes <= limit
        assert found.plan.peak_bytes >= USED * limit or limit - found.plan.peak_bytes < largest_made_again(
            found
        )
        again.append(found.time.total_s or found.simulation.flops[Phase.recompute])
        seen.add(found.plan.peak_bytes)
    assert again == sorted(again, reverse=True)
    assert len(seen) > count / 2


def largest_made_again(planned: Planned) -> int:
    """Bytes of a value for which there may have been no room."""
    assert planned.table is not None
    entries = planned.table["layers"].values()
    return max(size for entry in entries for size in entry.get("made_again", {"": 0}).values())


def test_all_that_there_is_keeps_everything_and_too_little_is_refused_with_what_would_do(folder: Path) -> None:
    most = plan(folder, "checkpointing=none").plan.peak_bytes
    whole = plan(folder, "checkpointing=budget", gib(2 * most))
    assert {decision.mechanism for decision in whole.strategy.decisions} == {KEEP}
    with pytest.raises(ConfigError, match=r"the least that this run needs is [0-9.]+ GiB") as refused:
        plan(folder, "checkpointing=budget", "checkpointing.budget_gib=0.00001")
    assert "checkpointing=full checkpointing.tiles=auto may need less" in str(refused.value)
    would_do = str(refused.value).partition("set ")[2].partition(",")[0]
    assert plan(folder, "checkpointing=budget", would_do).plan.fits
    with pytest.raises(ConfigError, match="budget_gib=auto: there is no GPU"):
        plan(folder, "checkpointing=budget")


def test_where_no_table_is_faster_full_is_taken_and_said(folder: Path) -> None:
    """A budget of what `full` needs: no layer can keep a value more."""
    least = plan(folder, "checkpointing=full").plan.peak_bytes
    found = plan(folder, "checkpointing=budget", gib(least + 1))
    assert found.strategy.decided_because == "no table is faster than checkpointing=full here, which is taken"
    assert found.simulation == plan(folder, "checkpointing=full").simulation


def middle(folder: Path) -> Planned:
    least, most = (plan(folder, f"checkpointing={name}").plan.peak_bytes for name in ("full", "none"))
    return plan(folder, "checkpointing=budget", gib((least + most) / 2))


@pytest.mark.parametrize("needs_bytes", [0, 1])
def test_the_last_layer_keeps_all_where_that_needs_no_memory(needs_bytes: int) -> None:
    def plan_of(tried: list[LayerDecision]) -> budget.Trial:
        return budget.Trial(100 + needs_bytes, 1.0, 0, {}, None)

    before = budget.Trial(100, 2.0, 0, {}, None), policy.decide_layers(BUDGET, 3)
    trial, decisions = budget._keep_last(before, plan_of)
    last = TABLES if needs_bytes else KEEP
    assert [d.mechanism for d in decisions] == [TABLES, TABLES, last]
    assert trial.seconds == (2.0 if needs_bytes else 1.0)


@pytest.mark.parametrize("until", [math.inf, 0.0])
def test_when_the_time_is_up_the_fastest_table_so_far_is_taken(until: float) -> None:
    graphs = few_values().graphs()
    asked: list[int] = []

    def plan_of(tried: list[LayerDecision]) -> budget.Trial:
        asked.append(sum(d.table.saved_bytes for d in tried if d.table))
        return budget.Trial(10**6 + asked[-1], 0.0, 10**6 - asked[-1], graphs, None)

    def choose(limit: int) -> budget.Choice:
        cfg = replace(BUDGET, budget_gib=str(limit / GIB))
        decisions = policy.decide_layers(BUDGET, 3)
        return budget.choose(cfg, decisions, plan_of, RATES, gpu_bytes=None, on_gpu=False, until=until)

    trial, _, because = choose(10**6 + 60_000)
    assert trial.needed_bytes == (
        10**6 if until == 0 else max(10**6 + size for size in asked if size <= 60_000)
    )
    assert because == (budget.CUT_SHORT if until == 0 else "")
    assert len(asked) == 1 if until == 0 else len(asked) > 2
    with pytest.raises(budget.TimeIsUp if until == 0 else budget.NoRoom):
        choose(10**6 - 1)


RATES = Machine(name="any", matmul_tflops=1.0, attention_tflops=0.001, memory_gbs=10.0)


def few_values() -> Any:
    """Return layers of three whose values a forward and a backward have told."""
    net, decisions = small_models.build("llama"), policy.decide_layers(BUDGET, 3)
    applied = apply.apply(net, decisions, BUDGET, device=torch.device("cpu"))
    with applied.micro_batch():
        net(input_ids=torch.zeros(2, 16, dtype=torch.long), use_cache=False).logits.sum().backward()
    return applied


@pytest.mark.parametrize("share", [0.04, 0.5])
def test_a_peak_that_falls_with_more_bytes_is_met(share: float) -> None:
    """What is dear to make again needs room of its own in the backward of a layer that does not keep it."""
    decisions, graphs = policy.decide_layers(BUDGET, 3), few_values().graphs()
    frontiers = budget.Prices(RATES, {}, on_gpu=False).frontiers(graphs)

    def plan_of(tried: list[LayerDecision]) -> budget.Trial:
        dear = any(d.table is None or "self_attn: attention" not in d.table.keep for d in tried)
        kept = sum(d.table.saved_bytes for d in tried if d.table)
        return budget.Trial(10**6 + kept + int(share * 10**6) * dear, 0.0, 1000 - kept // 1000, graphs, None)

    least = plan_of(decisions)
    limit = 10**6 + 40_000 - 1  # a byte less than the fewest bytes need, or far less
    slopes = budget._Slopes(decisions, least, plan_of, frontiers, StorageDtype.same)
    found = budget._climb(slopes, limit)
    if share > budget.WORKSPACE:  # so far away that plans are not spent on it
        assert found is None
        return
    assert found is not None
    assert found[0].needed_bytes <= limit < least.needed_bytes
    assert all(d.table and "self_attn: attention" in d.table.keep for d in found[1])


@pytest.mark.parametrize("in_stages", [False, True])
def test_gaps_that_come_and_go_do_not_end_the_climb_of_a_stage(in_stages: bool) -> None:
    """A climb that does not fit stands below others that do."""
    added = list(range(101))

    def at(count: int) -> tuple[budget.Trial, list[LayerDecision]]:
        gaps = 30 if 20 <= count < 40 else 0
        return budget.Trial(100 + count // 2 + gaps, 0.0, 100 - count, {}, None), []

    climb = budget._climb_on if in_stages else budget._bisect
    (trial, _), count = climb(at, 0, at(0), added, 136)
    assert trial.needed_bytes <= 136
    assert (count >= 70) == in_stages


@pytest.mark.parametrize("depth", [3, budget.FEW_LAYERS + 1])
def test_of_few_layers_the_last_keeps_more_where_what_it_makes_again_is_the_peak(depth: int) -> None:
    """Its workspace lives beside all that the layers before it keep."""
    net, decisions = small_models.build("llama"), policy.decide_layers(BUDGET, depth)
    applied = apply.apply(net, policy.decide_layers(BUDGET, 3), BUDGET, device=torch.device("cpu"))
    with applied.micro_batch():
        net(input_ids=torch.zeros(2, 16, dtype=torch.long), use_cache=False).logits.sum().backward()
    graphs = dict.fromkeys(range(depth), applied.graphs()[1])
    rates = Machine(name="any", matmul_tflops=1.0, attention_tflops=1.0, memory_gbs=10.0)
    frontiers = budget.Prices(rates, {}, on_gpu=False).frontiers(graphs)
    most = frontiers[0][-1]

    def plan_of(tried: list[LayerDecision]) -> budget.Trial:
        kept = [d.table.saved_bytes if d.table else 0 if d.mechanism == TABLES else most.bytes for d in tried]
        peak = sum(kept[:-1]) + max(kept[-1], 2 * (most.bytes - kept[-1]))
        return budget.Trial(peak, 0.0, depth * most.bytes - sum(kept), graphs, None)

    least = plan_of(decisions)
    limit = 2 * most.bytes
    slopes = budget._Slopes(decisions, least, plan_of, frontiers, StorageDtype.same)
    together = budget._climb(slopes, limit)
    assert together is not None
    apart = budget._set_last_apart(together, slopes, limit)
    assert apart is not None
    if depth > budget.FEW_LAYERS:
        assert apart == together
        return
    assert apart[0].needed_bytes <= limit
    assert apart[0].recomputed_flops < together[0].recomputed_flops


def test_a_table_can_be_written_edited_and_given_back(folder: Path) -> None:
    found = middle(folder)
    assert found.table is not None
    path = folder / "table.json"
    path.write_text(json.dumps(found.table))
    given = plan(folder, "checkpointing=budget", f"checkpointing.table={path}")
    assert given.strategy.decisions == found.strategy.decisions
    assert given.simulation == found.simulation
    first = next(key for key, entry in found.table["layers"].items() if entry["policy"] == "budget")
    edited = json.loads(path.read_text())
    edited["layers"][first] = {"keep": [*edited["layers"][first]["keep"], *KEEPABLE]}
    path.write_text(json.dumps(edited))
    kept = plan(folder, "checkpointing=budget", f"checkpointing.table={path}")
    assert sum(kept.simulation.kept_bytes) > sum(found.simulation.kept_bytes)
    edited["layers"][first]["keep"] = ["self_attn.q_proj: nm"]
    path.write_text(json.dumps(edited))
    with pytest.raises(
        ConfigError, match=r"'self_attn.q_proj: nm' that can be kept; did you mean .*q_proj: mm"
    ):
        plan(folder, "checkpointing=budget", f"checkpointing.table={path}")
    path.write_text(json.dumps({"layers": {"0": {"policy": "none"}}}))
    with pytest.raises(ConfigError, match="it is for layers 0, and the model has 3"):
        plan(folder, "checkpointing=budget", f"checkpointing.table={path}")
    path.write_text("no table")
    with pytest.raises(ConfigError, match="no table can be read there"):
        plan(folder, "checkpointing=budget", f"checkpointing.table={path}")


@pytest.mark.sample(one_in=5)
@pytest.mark.parametrize("family", sorted(small_models.ARCHITECTURES))
def test_what_is_kept_on_meta_tensors_is_what_a_run_keeps(family: str) -> None:
    """The table, the simulation and the run agree to the byte, under tables of two sizes."""
    net = small_models.build(family)
    with torch.device("meta"):
        bare = type(net)(net.config).train()
    for table in (None, Table(frozenset({"input_layernorm: rsqrt", "mlp: mul", "mlp.up_proj: mm"}))):
        decisions = [replace(d, table=table) for d in policy.decide_layers(BUDGET, 3)]
        simulated, _ = kept(bare, decisions)
        real, counts = kept(net, decisions)
        assert simulated == real
        for layer, count in enumerate(counts):
            assert real.get(layer, 0) - count.table_bytes in (0, count.output_bytes)


def kept(net: Any, decisions: list[LayerDecision]) -> tuple[dict[int, int], list[LayerCounters]]:
    applied = apply.apply(net, decisions, BUDGET, device=next(net.parameters()).device)
    recording = (
        simulate.record(
            net,
            loss=lambda net, batch: net(input_ids=batch["input_ids"] % 64, use_cache=False).logits.sum(),
            scope=applied.scope,
            around=applied.micro_batch(),
            stage_3=False,
            micro_batch_size=2,
            seq_len=16,
            workspaces=False,
            on_gpu=False,
        )
        if next(net.parameters()).is_meta
        else None
    )
    if recording is not None:
        return {k: v for k, v in recording.timeline.kept_bytes.items() if v}, applied.counts
    watch = applied.watch(torch.device("cpu"))
    with applied.micro_batch(), watch:
        loss = net(input_ids=torch.zeros(2, 16, dtype=torch.long), use_cache=False).logits.sum()
        watch.forward_done()
        loss.backward()
    applied.remove()
    return {k: v for k, v in watch.kept_bytes.items() if v and k >= 0}, applied.counts


def test_only_the_first_of_equal_layers_needs_more_in_the_first_micro_batch() -> None:
    """And a plan, which records a later micro-batch, counts it."""
    learning, steady = micro_batch(learnt=False), micro_batch(learnt=True)
    first, later = forward_peaks(learning), forward_peaks(steady)
    assert [layer for layer in range(6) if first[layer] != later[layer]] == [0] and first[0] > later[0]
    counted = forward_peaks(simulate.with_first_calls(steady, {0: steady.first_bytes[0]}))
    assert counted == first
    assert simulate.with_first_calls(steady, {}).timeline.parts == steady.timeline.parts


def micro_batch(*, learnt: bool) -> simulate.Recording:
    """Record six layers that keep the fewest bytes. `learnt`: after a forward in which they learn what they compute."""
    net = small_models.build("llama", num_hidden_layers=6).to("meta")
    decisions = policy.decide_layers(BUDGET, 6, zero_stage=3)
    applied = apply.apply(net, decisions, BUDGET, zero_stage=3, device=torch.device("meta"))
    return simulate.record(
        net,
        loss=lambda net, batch: net(input_ids=batch["input_ids"], use_cache=False).logits.sum(),
        scope=applied.scope,
        around=applied.micro_batch(),
        stage_3=True,
        micro_batch_size=2,
        seq_len=16,
        first=applied.first_forward() if learnt else None,
    )


def forward_peaks(recording: simulate.Recording) -> dict[int, int]:
    """Return the most bytes in the forward of each layer."""
    record, found = recording.timeline, dict.fromkeys(range(6), 0)
    for part in record.parts[: record.backward_begins_at]:
        if part.peak.layer is not None:
            found[part.peak.layer] = max(found[part.peak.layer], part.peak.total)
    return found


@pytest.mark.parametrize("value", ["0", "-3", "much", "nan", "inf"])
def test_a_budget_that_is_no_size_is_refused(folder: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"checkpointing.budget_gib={value}: give the GiB"):
        plan(folder, "checkpointing=budget", f"checkpointing.budget_gib='{value}'")


def test_a_budget_with_a_policy_that_reads_none_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="budget_gib is set, but has no effect with checkpointing=full"):
        plan(folder, "checkpointing=full", "checkpointing.budget_gib=20")


def test_a_laptop_says_what_a_budget_would_do_on_a_gpu() -> None:
    """Of Qwen3 0.6B: within the budget of each GPU, all of the run; faster than full; most of the room used."""
    words = ["model=qwen3_0.6b", "hardware=1xh100-80", "data=synthetic", "train.seq_len=2048"]
    words += ["model.architecture.num_hidden_layers=4", "train.micro_batch_size=2", "train.global_batch_size=2"]
    own = Recordings()

    def of(*more: str) -> Planned:
        return make_plan(compose.compose_run([*words, *more]).run, recordings=own)

    full, none = of("checkpointing=full"), of("checkpointing=none")
    limit = (full.plan.resources[0].needed_bytes + none.plan.resources[0].needed_bytes) / 2
    found = of("checkpointing=budget", gib(limit))
    assert 0.95 * limit < found.plan.resources[0].needed_bytes <= limit
    assert none.time.total_s < found.time.total_s < full.time.total_s
    automatic = of("checkpointing=budget")
    assert automatic.plan.resources[0].needed_bytes <= 80 * GIB * (1 - budget.MARGIN)
    assert automatic.time.total_s == none.time.total_s


# Values that go to the host

GPU = [
    "model=llama8b",
    "hardware=1xh100-80",
    "data=synthetic",
    "train.seq_len=4096",
    "deepspeed.config=zero2_offload",
]
GPU += ["model.architecture.vocab_size=2048", "train.micro_batch_size=2", "train.global_batch_size=2"]
MAY_MOVE = ["checkpointing=budget", "checkpointing.offload.enabled=true"]
ON_GPU = Recordings()


def of_layers(depth: int, *more: str) -> RunConfig:
    return compose.compose_run([*GPU, f"model.architecture.num_hidden_layers={depth}", *more]).run


def on_gpu(*more: str, depth: int = 4) -> Planned:
    return make_plan(of_layers(depth, *more), recordings=ON_GPU)


def needed(planned: Planned) -> int:
    return planned.plan.resources[0].needed_bytes


def moved(planned: Planned) -> int:
    return sum(decision.table.moved_bytes for decision in planned.strategy.decisions if decision.table)


@pytest.fixture(scope="module")
def between() -> str:
    """A budget a third of the way from full to none."""
    full, none = needed(on_gpu("checkpointing=full")), needed(on_gpu("checkpointing=none"))
    return gib(full + (none - full) / 3)


def test_a_free_link_is_used_and_a_busy_one_is_not(between: str) -> None:
    stays, moves = on_gpu("checkpointing=budget", between), on_gpu(*MAY_MOVE, between)
    assert moved(moves) > 0
    assert moves.time.total_s < stays.time.total_s
    assert moves.simulation.flops[Phase.recompute] < stays.simulation.flops[Phase.recompute]
    assert needed(moves) <= float(between.partition("=")[2]) * GIB
    assert moves.plan.pinned["offloaded activations"] >= moved(moves)
    assert moves.time.link is not None
    assert moved(moves) <= moves.time.link.free_bytes
    slow = ["hardware.pcie_d2h_gbs=0.01", "hardware.pcie_h2d_gbs=0.01"]
    assert moved(on_gpu(*MAY_MOVE, between, *slow)) == 0


def test_more_of_a_budget_that_may_move_is_no_slower_and_all_of_it_moves_nothing() -> None:
    full, none = needed(on_gpu("checkpointing=full")), needed(on_gpu("checkpointing=none"))
    sizes = [full + (none - full) * share for share in (1 / 3, 2 / 3, 1.01)]
    found = [on_gpu(*MAY_MOVE, gib(size)) for size in sizes]
    seconds = [planned.time.total_s for planned in found]
    assert seconds == sorted(seconds, reverse=True)
    assert [moved(planned) > 0 for planned in found] == [True, True, False]
    assert {decision.mechanism for decision in found[-1].strategy.decisions} == {KEEP}


@pytest.mark.exhaustive
def test_a_budget_below_the_fewest_bytes_is_met_where_values_may_move() -> None:
    full = needed(on_gpu("checkpointing=full", depth=12))
    with pytest.raises(ConfigError, match=r"offload\.enabled=true lets tables move"):
        on_gpu("checkpointing=budget", gib(0.98 * full), depth=12)
    found = on_gpu(*MAY_MOVE, gib(0.98 * full), depth=12)
    assert needed(found) <= 0.98 * full
    assert moved(found) > 0
    inputs_alone = on_gpu(*MAY_MOVE, gib(0.94 * full), depth=12)
    assert needed(inputs_alone) <= 0.94 * full
    assert 0 < moved(inputs_alone) < moved(found) / 2


def test_host_memory_bounds_what_moves(between: str) -> None:
    most = on_gpu(*MAY_MOVE, between)
    host = next(resource for resource in most.plan.resources if resource.name.startswith("host"))
    room = moved(most) * 9 // 10
    size = host.needed_bytes - most.plan.pinned["offloaded activations"] + room
    less = on_gpu(*MAY_MOVE, between, f"hardware.host_memory_gib={size / GIB:.9f}")
    assert 0 < moved(less) <= room
    assert less.plan.fits


def test_a_link_of_unknown_rates_is_refused_and_a_table_by_hand_is_not(folder: Path, between: str) -> None:
    with pytest.raises(ConfigError, match=r"pcie_d2h_gbs and hardware\.pcie_h2d_gbs are not known"):
        plan(folder, *MAY_MOVE, "checkpointing.budget_gib=1")
    path = folder / "moves.json"
    written = on_gpu(*MAY_MOVE, between)
    path.write_text(json.dumps(written.table))
    given = on_gpu("checkpointing=budget", f"checkpointing.table={path}")
    assert given.strategy.decisions == written.strategy.decisions
    assert needed(given) == needed(written)
    table = {"layers": {"0-2": {"keep": ["mlp.up_proj: mm"], "offload": ["mlp.gate_proj: mm"]}}}
    path.write_text(json.dumps(table))
    tiny_run = plan(folder, "checkpointing=budget", f"checkpointing.table={path}")
    decisions = tiny_run.strategy.decisions
    assert all(decision.offload and decision.table and decision.table.moved_bytes for decision in decisions)
    table["layers"]["0-2"]["keep"] = ["mlp.gate_proj: mm"]
    path.write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=r"has 'mlp.gate_proj: mm' in keep and in offload"):
        plan(folder, "checkpointing=budget", f"checkpointing.table={path}")
    table["layers"]["0-2"] = {"keep": [], "offload": ["mlp.gate_proj: nm"]}
    path.write_text(json.dumps(table))
    with pytest.raises(
        ConfigError, match=r"no 'mlp.gate_proj: nm' that can be moved to the host; did you mean"
    ):
        plan(folder, "checkpointing=budget", f"checkpointing.table={path}")


def test_what_tables_move_is_recorded_of_a_few_layers_for_all(tmp_path: Path) -> None:
    """And the peak, the host memory and the operations are those of the whole model."""
    path = tmp_path / "moves.json"
    entry = {"keep": ["mlp.up_proj: mm"], "offload": ["input 0", "mlp.gate_proj: mm"]}
    path.write_text(json.dumps({"layers": {"0-13": entry}}))
    cfg = of_layers(14, "checkpointing=budget", f"checkpointing.table={path}")
    short = make_plan(cfg, recordings=Recordings())
    assert moved(short) == 14 * 2 * 4096 * (4096 + 14336) * 2
    decided = short.strategy
    whole = plan_module._record_layers(cfg, decided, decided.decisions, None, {}, on_gpu=True)
    simulated = whole.under(ZeroSettings.of(decided.ds, 1))
    assert simulated.peak == short.simulation.peak
    assert simulated.kept_bytes == short.simulation.kept_bytes
    assert simulated.host_bytes == short.simulation.host_bytes
    assert simulated.moved_bytes == short.simulation.moved_bytes == moved(short)
    assert sorted(map(repr, simulated.ops)) == sorted(map(repr, short.simulation.ops))
