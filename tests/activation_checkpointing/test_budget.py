"""checkpointing=budget: a table per layer, carried out value by value: bit-equal, to the byte, every save checked."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from remat.activation_checkpointing import apply, policy, validation, verification
from remat.activation_checkpointing.mechanisms import budget, operators
from remat.activation_checkpointing.mechanisms.counters import PolicyNotApplied
from remat.activation_checkpointing.mechanisms.mechanism import KEEP, LayerDecision, Setting
from remat.activation_checkpointing.mechanisms.tables.frontier import Point, cut, frontier
from remat.activation_checkpointing.mechanisms.tables.graph import (
    Geometry,
    Graph,
    Op,
    Ref,
    Save,
    Value,
)
from remat.activation_checkpointing.mechanisms.tables.placement import Link, frontier_with_link
from remat.activation_checkpointing.mechanisms.tables.table import (
    Table,
    choose_kept,
    choose_moved,
    compile_table,
)
from remat.config.options import Attention, CheckpointingConfig, OffloadConfig, Policy, StorageDtype
from remat.model import adapters, layers
from tests.support import small_models, watched
from tests.support.grids import cases

BUDGET = CheckpointingConfig(policy=Policy.budget)
DROPS = {"gpt2": {}, "phi": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attention_dropout": 0.1}}
LEAST, MIDDLE, MOST = 0.0, 0.5, 0.9  # of the way along the frontier
PLACE = Geometry((4,), (1,), 0)


def graphs_of(net: Any, ids: torch.Tensor | None = None) -> dict[int, Graph]:
    return under(net, [None] * len(layers.decoder_layers(net)), ids)[0].applied.graphs()


def under(
    net: Any,
    tables: list[Table | None],
    ids: torch.Tensor | None = None,
    cfg: CheckpointingConfig = BUDGET,
) -> tuple[watched.Watched, list[LayerDecision]]:
    """One forward and backward with a table for each layer; None: nothing is kept that can be made again."""
    decisions = [
        replace(decision, table=table, offload=bool(table and table.offload))
        for decision, table in zip(policy.decide_layers(BUDGET, len(tables)), tables, strict=True)
    ]
    with mock.patch.object(policy, "decide_layers", lambda *_, **__: decisions):
        return watched.run(net, cfg, ids), decisions


def table_at(graph: Graph, share: float) -> Table:
    points = frontier(graph, [op.flops // 5 + op.moved_bytes for op in graph.ops])
    point = points[int(share * (len(points) - 1))]
    return Table(frozenset(graph.values[value].name for value in point.keep), point.bytes)


def moving(graph: Graph, share: float, every: int) -> Table:
    """A table that moves every so manieth of what can be moved of what it keeps, and of what it could keep."""
    table = table_at(graph, share)
    names = sorted(value.name for value in graph.values if value.can_be_moved and value.name)
    return Table(table.keep, offload=frozenset(names[::every]))


def moved_bytes(graph: Graph, table: Table) -> int:
    moved = choose_moved(graph, table, choose_kept(graph, table))
    return sum(graph.values[value].nbytes for value in moved)


@pytest.mark.sample(one_in=18)
@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", sorted(small_models.ARCHITECTURES))
def test_what_a_table_moves_comes_back_bit_equal_and_leaves_to_the_byte(
    family: str, dtype: torch.dtype, every: int
) -> None:
    net = small_models.build(family, **DROPS.get(family, {})).to(dtype)
    kept, graphs = watched.run(net, watched.NONE), graphs_of(net)
    tables = [moving(graphs[index], MIDDLE, every) for index in sorted(graphs)]
    found, _ = under(net, list(tables))
    assert watched.differences(found, kept) == []
    assert found.replayed.differences == found.replayed.notes == []
    assert verification.unmet_expectations(found.applied, found.watch, BUDGET) == []  # bytes among them
    for index, counts in enumerate(found.applied.counts):
        assert counts.moved_bytes == moved_bytes(graphs[index], tables[index]) > 0
    assert found.applied.offload is not None
    assert found.applied.offload.pool.taken_bytes == 0  # every buffer is free again


@pytest.mark.sample(one_in=13)
@pytest.mark.parametrize("share", [LEAST, MIDDLE, MOST])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", sorted(small_models.ARCHITECTURES))
def test_bit_equal_to_keeping_everything_and_kept_to_the_byte(
    family: str, dtype: torch.dtype, share: float
) -> None:
    net = small_models.build(family, **DROPS.get(family, {})).to(dtype)
    kept, graphs = watched.run(net, watched.NONE), graphs_of(net)
    tables = [table_at(graphs[index], share) for index in sorted(graphs)]
    found, _ = under(net, list(tables))
    assert watched.differences(found, kept) == []
    assert found.replayed.differences == found.replayed.notes == []
    assert verification.unmet_expectations(found.applied, found.watch, BUDGET) == []  # bytes among them
    for index, counts in enumerate(found.applied.counts):
        made = [graphs[index].values[v] for v in choose_kept(graphs[index], tables[index])]
        assert counts.table_bytes == sum(value.nbytes for value in made if value.kind == "op")
        assert counts.in_effect["operations made again"] > 0


def test_a_layer_that_keeps_something_else_than_its_table_is_not_in_effect() -> None:
    net = small_models.build("llama")
    found, _ = under(net, [None] * 3)
    found.watch.table_bytes[1] += 4
    assert "layer 1 keeps" in verification.unmet_expectations(found.applied, found.watch, BUDGET)[0]


def test_of_equal_layers_one_under_each_table_is_run_again() -> None:
    net = small_models.build("llama")
    graph = graphs_of(net)[0]
    found, _ = under(net, [table_at(graph, MIDDLE), table_at(graph, MOST), table_at(graph, MIDDLE)])
    assert [one["layers"] for one in found.replayed.compared] == ["0", "1"]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_the_choice_of_experts_is_always_kept(family: str) -> None:
    graphs = graphs_of(small_models.build(family))
    chosen = 0
    for graph in graphs.values():
        program = compile_table(graph, choose_kept(graph, Table()))
        again = {step.op.func for step in program.steps.values()}
        assert not {func for func in again if func._schema.name in operators.CHOICES}
        chosen += any(op.func._schema.name in operators.CHOICES for op in graph.ops)
    assert chosen >= 2
    found, _ = under(small_models.build(family), [None] * 3)
    choices = found.watch.choices.values()
    assert sum(bool(layer.made) for layer in choices) == chosen
    assert not any(layer.made_again for layer in choices)


def applied_to(net: Any, table: Table | None, **cfg: Any) -> apply.Applied:
    moves = bool(table and table.offload)
    decisions = [
        replace(decision, table=table, offload=moves)
        for decision in policy.decide_layers(BUDGET, len(layers.decoder_layers(net)))
    ]
    return apply.apply(net, decisions, replace(BUDGET, **cfg))


def many_ways(net: Any) -> list[torch.Tensor]:
    """Gradients: other lengths, padded, packed, two forwards before a backward, two backwards, with autocast."""
    found = []
    for length in (16, 9, 5, 16):
        ids = torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(length))
        padding = torch.ones_like(ids)
        padding[0, : length // 2] = 0
        restarts = torch.cat([torch.arange(length // 2), torch.arange(length - length // 2)]).expand(2, -1)
        ways: dict[str, dict[str, Any]] = {"whole": {}, "padded": {"attention_mask": padding}}
        ways["packed"] = {"position_ids": restarts}
        for given in ways.values():
            net.zero_grad()
            torch.manual_seed(7)
            loss = net(input_ids=ids, labels=ids, **given).loss
            with torch.no_grad():
                net.eval()(input_ids=ids)  # an evaluation between
            net.train()
            other = net(input_ids=ids.flip(0), labels=ids, **given).loss
            with torch.autocast("cpu", torch.bfloat16):
                third = net(input_ids=ids, labels=ids, **given).loss
            (loss + other + third).backward(retain_graph=True)
            loss.backward()
            found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
    return found


@pytest.mark.parametrize("family", cases(["llama", "gpt2", "mixtral"], {"gpt2", "mixtral"}))
def test_other_lengths_masks_and_orders_are_learnt_anew(family: str) -> None:
    net = small_models.build(family)
    truth = many_ways(net)
    graph = graphs_of(net)[1]
    for table in (None, table_at(graph, MIDDLE)):
        applied = applied_to(net, table)
        assert all(torch.equal(a, b) for a, b in zip(many_ways(net), truth, strict=True))
        applied.remove()


@pytest.mark.parametrize("family", ["phi", "gpt2"])
def test_what_hands_a_layer_its_input_may_change(family: str) -> None:
    """The proof of the first micro-batch stands between layers, where norms save their input itself."""
    net = small_models.build(family, **DROPS.get(family, {}))
    truth = small_models.gradients(net)
    applied = applied_to(net, None)
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(3))
    with applied.recording():
        net(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert small_models.same(small_models.gradients(net), truth)
    applied.remove()


def test_lengths_without_end_are_not_all_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MOST_SHAPES", 2)
    net = small_models.build("llama")
    applied = applied_to(net, None)
    for length in (3, 4, 5, 3):
        ids = torch.zeros(1, length, dtype=torch.long)
        net(input_ids=ids, labels=ids).loss.backward()
    assert len(applied.shared[budget.PROGRAMS]) == 2
    runner = net.model.layers[0]._gradient_checkpointing_func.__closure__
    assert [
        len(cell.cell_contents.programs)
        for cell in runner
        if isinstance(cell.cell_contents, budget.LayerRunner)
    ] == [2]
    applied.remove()


def test_another_save_than_the_learnt_one_stops_the_run() -> None:
    net = small_models.build("llama")
    applied = applied_to(net, None)
    ids = torch.zeros(1, 8, dtype=torch.long)
    net(input_ids=ids, labels=ids).loss.backward()
    net.model.layers[1].mlp.act_fn = nn.GELU()
    with pytest.raises(PolicyNotApplied, match=r"layer 1.*'GeluBackward0'.*'SiluBackward0'"):
        net(input_ids=ids, labels=ids)
    applied.remove()


def learners(net: Any) -> tuple[list[int], watched.Watched]:
    """Return the layers that learnt what they compute, and what one micro-batch found."""
    found: list[int] = []
    learn = budget.LayerRunner._learn

    def noting(self: budget.LayerRunner, *args: Any) -> Any:
        found.append(self.site.index)
        return learn(self, *args)

    with mock.patch.object(budget.LayerRunner, "_learn", noting):
        seen, _ = under(net, [None] * len(layers.decoder_layers(net)))
    return found, seen


def test_of_equal_layers_only_the_first_learns() -> None:
    """Other operations give the first two layers their input: the embedding, and the record of layer 0's replay."""
    assert learners(small_models.build("llama", num_hidden_layers=6))[0] == [0, 1, 2]


def test_what_is_gathered_in_a_call_does_not_make_layers_differ() -> None:
    """ZeRO-3 gathers more or fewer weights in each first call: operations whose result the layer does not use."""
    net = small_models.build("llama", num_hidden_layers=6)
    for number, layer in enumerate(layers.decoder_layers(net)):
        layer.mlp.register_forward_pre_hook(partial(gather, number))
    _, seen = learners(net)
    assert len(seen.applied.shared[budget.PROGRAMS]) == 3
    graphs = seen.applied.graphs()
    assert {value.name for value in graphs[5].values} == {value.name for value in graphs[2].values}


def gather(times: int, *_: Any) -> None:
    for _ in range(times):
        torch.ones(4).mul(2)


@pytest.mark.parametrize("step", [0.5, 0.0], ids=["different", "equal"])
def test_a_layer_that_only_looks_like_another_runs_by_what_itself_does(step: float) -> None:
    net = small_models.build("phi", num_hidden_layers=5, **DROPS["phi"])
    for number, layer in enumerate(layers.decoder_layers(net)):
        scale, forward = 1.0 + number * step, layer.mlp.forward
        layer.mlp.forward = lambda x, scale=scale, forward=forward: forward(x) * scale
    kept = watched.run(net, watched.NONE)
    found, seen = learners(net)
    assert found == [0, 1, 2]
    assert watched.differences(seen, kept) == []
    assert seen.replayed.differences == seen.replayed.notes == []
    assert verification.unmet_expectations(seen.applied, seen.watch, BUDGET) == []
    assert len(seen.applied.shared[budget.PROGRAMS]) == (5 if step else 3)


def test_no_mode_after_the_first_call_and_no_hooks_where_all_is_kept() -> None:
    net = small_models.build("llama")
    decisions = policy.decide_layers(BUDGET, 3)
    decisions[2] = replace(decisions[2], mechanism=KEEP)
    applied = apply.apply(net, decisions, BUDGET)
    seen: dict[int, tuple[int, bool]] = {}

    def look(index: int) -> Callable[..., None]:
        def note(*_: Any) -> None:
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
            seen[index] = len(_get_current_dispatch_mode_stack()), hooks is not None

        return note

    for index, layer in enumerate(net.model.layers):
        layer.mlp.register_forward_pre_hook(look(index))
    ids = torch.zeros(1, 8, dtype=torch.long)
    net(input_ids=ids, labels=ids).loss.backward()
    assert {index: modes for index, (modes, _) in seen.items()} == {0: 1, 1: 1, 2: 0}
    net(input_ids=ids, labels=ids).loss.backward()
    assert seen == {0: (0, True), 1: (0, True), 2: (0, False)}
    applied.remove()


class Views(TorchDispatchMode):
    """Counts the views that are made by geometry."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made += func is torch.ops.aten.as_strided.default
        return func(*args, **(kwargs or {}))


def test_a_view_is_made_once_for_all_its_readers() -> None:
    net = small_models.build("llama")
    applied = applied_to(net, None)
    ids = torch.zeros(1, 8, dtype=torch.long)
    net(input_ids=ids, labels=ids).loss.backward()
    loss = net(input_ids=ids, labels=ids).loss
    with Views() as views:
        loss.backward()
    weights = {"weight"}  # those are had as they are saved
    most = max(
        sum(program.graph.values[ref.value].kind not in weights for ref in program.slots)
        for program in applied.shared[budget.PROGRAMS].values()
    )
    assert 0 < views.made <= len(net.model.layers) * most
    applied.remove()


def test_an_argument_edited_after_it_was_kept_is_an_error() -> None:
    net = small_models.build("llama")
    applied = applied_to(net, None)
    ids = torch.zeros(1, 8, dtype=torch.long)
    hidden: list[torch.Tensor] = []
    hook = net.model.layers[1].register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    loss = net(input_ids=ids, labels=ids).loss
    hook.remove()
    with torch.no_grad():
        hidden[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an in-place operation"):
        loss.backward()
    applied.remove()


class Scaled(nn.Module):
    """An activation with a buffer, which it may change."""

    def __init__(self, *, grows: bool) -> None:
        super().__init__()
        self.grows = grows
        self.register_buffer("scale", torch.full((), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = nn.functional.silu(x * self.scale.clone())
        if self.grows:
            self.scale.mul_(1.25)
        return scaled


@pytest.mark.parametrize("grows", [False, True])
def test_a_buffer_that_stays_as_it_is_is_read_again(grows: bool) -> None:
    def build() -> Any:
        net = small_models.build("llama")
        net.model.layers[1].mlp.act_fn = Scaled(grows=grows)
        return net

    kept = watched.run(build(), watched.NONE)
    found, _ = under(build(), [None] * 3)
    assert watched.differences(found, kept) == []
    graph = found.applied.graphs()[1]
    again = {graph.values[number].name for number in compile_table(graph, choose_kept(graph, Table())).steps}
    assert ("mlp.act_fn: clone" in again) != grows


def test_a_buffer_edited_before_backward_is_an_error() -> None:
    net = small_models.build("llama")
    net.model.layers[1].mlp.act_fn = Scaled(grows=False)
    applied = applied_to(net, None)
    ids = torch.zeros(1, 8, dtype=torch.long)
    loss = net(input_ids=ids, labels=ids).loss
    net.model.layers[1].mlp.act_fn.scale.mul_(2)
    with pytest.raises(RuntimeError, match="layer 1 needs a buffer in backward"):
        loss.backward()
    applied.remove()


@pytest.mark.parametrize("flat", [False, True], ids=["", "as ZeRO-3 shards them"])
def test_products_with_4_bit_weights_are_made_again(flat: bool) -> None:
    net = small_models.build("llama", hidden_size=128, num_key_value_heads=2)
    layers_of_net = layers.decoder_layers(net)
    adapters.quantise(net, layers_of_net, torch.float32, torch.device("cpu"), flat=flat)
    net = get_peft_model(net, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).train()
    kept = watched.run(net, watched.NONE)
    found, _ = under(net, [None] * 3)
    assert watched.differences(found, kept) == []
    assert verification.unmet_expectations(found.applied, found.watch, BUDGET) == []
    graph = found.applied.graphs()[1]
    assert "gemm_4bit" in {op.label for op in graph.ops}
    assert {graph.values[number].kind for number in choose_kept(graph, Table())} == {"arg"}  # its input alone


def test_what_it_cannot_do_is_refused() -> None:
    net = small_models.build("llama")
    setting = Setting(
        zero_stage=2, tensor_parallel_size=2, has_gpu=False, attention=Attention.sdpa, lora_dropout=0.0,
        fields={}, activation_elements=1, element_bytes=4,
    )  # fmt: skip
    found = "\n".join(validation.problems(BUDGET, layers.decoder_layers(net), setting))
    assert "train.tensor_parallel_size=2 with checkpointing=budget" in found


def test_a_value_that_is_moved_is_stored_in_8_bits_where_that_is_asked_for() -> None:
    """A byte for each number and a scale for each row; statistics as they are; gradients within 3 %."""
    net = small_models.build("llama")
    kept, graph = watched.run(net, watched.NONE), graphs_of(net)[1]
    names = ("input 0", "mlp.up_proj: mm", "input_layernorm: rsqrt")
    table = Table(frozenset({"mlp.gate_proj: mm"}), offload=frozenset(names))
    cfg = replace(BUDGET, offload=OffloadConfig(enabled=True, dtype=StorageDtype.fp8))
    found, _ = under(net, [table] * 3, cfg=cfg)
    rows = 2 * 16
    assert [counts.moved_bytes for counts in found.applied.counts] == [rows * (32 + 4 + 64 + 4 + 4)] * 3
    sizes = {value.name: budget.host_bytes(value, StorageDtype.fp8) for value in graph.values}
    assert sum(sizes[name] for name in names) == rows * (32 + 4 + 64 + 4 + 4)
    assert verification.unmet_expectations(found.applied, found.watch, cfg) == []
    assert torch.equal(found.loss, kept.loss)
    for name, exact in kept.gradients.items():
        assert (found.gradients[name] - exact).norm() < 0.06 * exact.norm() + 1e-7


def test_a_layer_that_moves_something_else_than_its_table_is_not_in_effect() -> None:
    net = small_models.build("llama")
    found, _ = under(net, [Table(offload=frozenset({"input 0"}))] * 3)
    found.applied.counts[2].moved_bytes -= 4
    (text,) = verification.unmet_expectations(found.applied, found.watch, BUDGET)
    assert "not in effect in layers 2: layer 2 moved" in text


def test_tables_that_move_learn_other_lengths_and_orders_too() -> None:
    net = small_models.build("llama")
    truth, graph = many_ways(net), graphs_of(net)[1]
    applied = applied_to(net, moving(graph, MIDDLE, 2), offload=OffloadConfig(enabled=True))
    with applied.micro_batch():
        assert all(torch.equal(a, b) for a, b in zip(many_ways(net), truth, strict=True))
    assert applied.offload is not None
    assert applied.offload.pool.taken_bytes == 0
    applied.remove()


# The frontier


def chain(sizes: list[int], saved: list[int], fixed: set[int]) -> Graph:
    """An argument, and operations of which each reads the two values before it."""
    graph = Graph()
    for number, size in enumerate(sizes):
        value = Value(number, size, "op" if number else "arg", torch.float32, PLACE, number - 1)
        value.taps["in", "", 0, number] = PLACE
        graph.values.append(value)
        if number:
            inputs = tuple(range(max(0, number - 2), number))
            args = [Ref(value, torch.float32, PLACE) for value in inputs]
            func, why = torch.ops.aten.add.Tensor, "fixed" if number - 1 in fixed else ""
            graph.ops.append(Op(func, args, None, inputs, [(0, number)], {}, "", why, 0, 0))
    graph.saves = [Save(Ref(number, torch.float32, PLACE), "") for number in saved]
    return graph


def every_choice(graph: Graph, costs: list[int]) -> list[Point]:
    found = []
    for bits in itertools.product([False, True], repeat=len(graph.values)):
        keep = frozenset(number for number, bit in enumerate(bits) if bit)
        try:
            steps = compile_table(graph, keep).steps
        except ValueError:
            continue
        again = {graph.ops.index(step.op) for step in steps.values()}
        size = sum(graph.values[number].nbytes for number in keep)
        found.append(Point(keep, size, sum(costs[number] + 1 for number in again)))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_the_frontier_is_that_of_every_choice(seed: int) -> None:
    """The corners of the convex hull, by trying all 512 choices."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 40, (9,), generator=draw).tolist()
    costs = torch.randint(1, 30, (8,), generator=draw).tolist()
    graph = chain(sizes, [3, 5, 8], {seed})
    choices = every_choice(graph, costs)
    points = frontier(graph, costs)
    assert points[0].bytes == min(choice.bytes for choice in choices)
    assert points[-1].cost == min(choice.cost for choice in choices) == 0
    assert [p.bytes for p in points] == sorted(p.bytes for p in points)
    for low, high in itertools.pairwise(points):
        width, height = high.bytes - low.bytes, low.cost - high.cost
        assert min(height * c.bytes + width * c.cost for c in choices) == height * low.bytes + width * low.cost
    for price in (1, 3, 10):
        best = cut(graph, costs, byte_price=1000 * price, cost_price=1000)
        assert price * best.bytes + best.cost == min(price * c.bytes + c.cost for c in choices)


def every_choice_of_three(graph: Graph, costs: list[int], link: Link) -> list[Point]:
    found = []
    for point in every_choice(graph, costs):
        movable = sorted(link.host_bytes.keys() & point.keep)
        for count in range(len(movable) + 1):
            for move in map(frozenset, itertools.combinations(movable, count)):
                there = sum(graph.values[value].nbytes for value in move)
                if sum(link.host_bytes[value] for value in move) <= link.most_bytes:
                    cost = point.cost + link.cost(move)
                    found.append(Point(point.keep, point.bytes - there, cost, move))
    return found


@pytest.mark.parametrize("cost_per_byte", [0, 1, 100])
@pytest.mark.parametrize("seed", range(4))
def test_the_frontier_with_a_link_is_that_of_every_choice(seed: int, cost_per_byte: int) -> None:
    """The corners of the convex hull, by trying all choices of the device, the host, and making again."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.randint(10, 40, (9,), generator=draw).tolist()
    costs = torch.randint(100, 3000, (8,), generator=draw).tolist()
    graph = chain(sizes, [3, 5, 8], {seed})
    values = {number: graph.values[number].nbytes for number in (2, 3, 5, 7, 8)}
    link = Link(values, free_bytes=45, most_bytes=90, cost_per_byte=cost_per_byte)
    choices, points = every_choice_of_three(graph, costs, link), frontier_with_link(graph, costs, link)
    fewest = min(choice.bytes for choice in choices)
    assert points[0].bytes == fewest
    assert points[0].cost == min(choice.cost for choice in choices if choice.bytes == fewest)
    assert (points[-1].cost, points[-1].move) == (0, frozenset())
    for low, high in itertools.pairwise(points):
        width, height = high.bytes - low.bytes, low.cost - high.cost
        assert width > 0
        assert height > 0
        assert min(height * c.bytes + width * c.cost for c in choices) == height * low.bytes + width * low.cost
    assert any(point.move for point in points)
