"""The bytes that a real engine's tensors hold, by category, are those of the plan's model states."""

from __future__ import annotations

import pytest
import torch

from remat.config import compose, ds_config
from remat.config.options import OptimConfig, OptimStates, Precision
from remat.machine import ops
from remat.model import optimizer
from remat.planning import model_states
from remat.planning.plan import CATEGORY_OF
from remat.planning.simulation.types import Category
from remat.training import engine_memory
from tests.support import small_models
from tests.support.pool import RankPool

LARGEST = 512 * 64  # elements of the embedding
BUCKET = 200_000  # elements
CELLS = [
    ("zero2", Precision.bf16, OptimStates.fp32, 1),
    ("zero2_offload", Precision.bf16, OptimStates.fp32, 1),
    ("zero3", Precision.fp32, OptimStates.fp32, 1),
    ("zero3_offload", Precision.bf16, OptimStates.fp32, 1),
    ("zero2", Precision.bf16, OptimStates.bf16, 2),
    ("zero2_offload", Precision.bf16, OptimStates.bf16, 2),
    ("zero2_offload", Precision.bf16, OptimStates.bf16_master, 1),
    ("zero3", Precision.bf16, OptimStates.bf16, 1),
    ("zero3_offload_optimizer", Precision.bf16, OptimStates.bf16_master, 2),
    ("zero3_offload", Precision.bf16, OptimStates.bf16, 1),
]


def both(
    strategy: str, precision: Precision, states: OptimStates, steps: int
) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """Held and planned bytes of this rank by category, after a step of so many micro-batches; what is not in effect."""
    import deepspeed

    ops.ensure("cpu_adam", print)  # as a run does: torch alone would build it anew under another path
    values = ds_config.RunValues(
        world_size=2,
        micro_batch_size=1,
        global_batch_size=2 * steps,
        gradient_clipping=1.0,
        precision=precision,
        hidden_size=64,
        pin_memory_possible=False,
        states=states,
    )
    small = {"zero_optimization": {"reduce_bucket_size": BUCKET}}
    ds = ds_config.render(ds_config.load(strategy, compose.DS_CONFIG_DIR), small, values)
    net = small_models.build(
        "llama", num_hidden_layers=3, hidden_size=64, intermediate_size=160, vocab_size=512
    )
    net = net if precision is Precision.fp32 else net.to(torch.bfloat16)
    sizes = [p.numel() for p in net.parameters()]
    cfg, offloaded = OptimConfig(states=states), ds_config.optimizer_offload_device(ds) is not None
    optimizer.check(cfg, ds)
    adam = optimizer.build(net, cfg, offloaded=offloaded, device=torch.device("cpu"))
    engine, *_ = deepspeed.initialize(model=net, optimizer=adam, config=ds, dist_init_required=False)
    ids = torch.arange(32).view(1, 32)
    for _ in range(steps):
        engine.backward(engine(input_ids=ids, use_cache=False).logits.float().square().mean())
        found = engine_memory.measure_after_backward(engine)
        engine.step()
    found |= engine_memory.measure_after_step(engine)
    placed = engine_memory.find_placement(engine)
    unmet = engine_memory.unmet_expectations(placed, ds, ranks=2, device_type="cpu")
    engine.destroy()
    items = model_states.model_states(
        num_params=sum(sizes),
        largest_param=max(sizes),
        ds=ds,
        world_size=2,
        ranks_per_node=2,
        gas=steps,
        can_pin=False,
    )
    planned: dict[str, int] = {}
    extra = {"parameters on their way back": Category.weights}
    for item in items:
        category = str((CATEGORY_OF | extra).get(item.name, Category.buckets))
        planned[category] = planned.get(category, 0) + item.bytes_per_rank
    return {name: sum(places.values()) for name, places in found.items()}, planned, unmet


@pytest.mark.parametrize(("strategy", "precision", "states", "steps"), CELLS)
def test_held_bytes_are_planned_bytes(
    strategy: str, precision: Precision, states: OptimStates, steps: int, two_ranks: RankPool
) -> None:
    settings = {"strategy": strategy, "precision": precision, "states": states, "steps": steps}
    for found, planned, unmet in two_ranks.run(both, **settings):
        assert unmet == []
        assert found["weights"] == planned["weights"]
        assert found["optimizer state"] == pytest.approx(planned["optimizer state"], abs=64)  # step counters
        shared = (
            0 if strategy.startswith("zero3") else LARGEST * 2
        )  # a parameter of two shards is whole on one rank
        assert found["gradients"] == pytest.approx(planned.get("gradients", 0), rel=0.01, abs=max(512, shared))
        come_and_go = (
            0 if strategy.startswith("zero3") else 2 * 2 * BUCKET
        )  # reduction buckets, within a backward
        if "offload" in strategy or not come_and_go:
            assert found["communication buckets"] == planned["communication buckets"] - come_and_go
            assert sum(found.values()) == pytest.approx(sum(planned.values()) - come_and_go, rel=0.02)


def test_the_largest_of_each_rank() -> None:
    ranks = [{"weights": {"cpu": 3}}, {"weights": {"cpu": 2, "cuda": 5}, "gradients": {"cpu": 1}}]
    assert engine_memory.take_largest(ranks) == {"weights": {"cpu": 3, "cuda": 5}, "gradients": {"cpu": 1}}
