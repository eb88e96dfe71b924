"""The bytes that a real engine's tensors hold, by category, are those of the plan's model states."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from remat.config import compose, ds_config
from remat.config.options import Precision
from remat.machine import ops
from remat.planning import model_states
from remat.planning.plan import CATEGORY_OF
from remat.planning.simulation.types import Category
from remat.training import engine_memory
from tests.support import small_models
from tests.support.pool import RankPool

LARGEST = 512 * 64  # elements of the embedding
CELLS = [
    ("zero2", Precision.bf16),
    ("zero2_offload", Precision.bf16),
    ("zero3", Precision.fp32),
    ("zero3_offload", Precision.bf16),
]


def both(strategy: str, precision: Precision) -> tuple[dict[str, int], dict[str, int]]:
    """Held and planned bytes of this rank by category, after one step of a real engine."""
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    ops.ensure("cpu_adam", print)  # as a run does: torch alone would build it anew under another path
    values = ds_config.RunValues(
        world_size=2,
        micro_batch_size=1,
        global_batch_size=2,
        gradient_clipping=1.0,
        precision=precision,
        hidden_size=64,
        pin_memory_possible=False,
    )
    small = {"zero_optimization": {"reduce_bucket_size": 200_000}}
    ds = ds_config.render(ds_config.load(strategy, compose.DS_CONFIG_DIR), small, values)
    net = small_models.build(
        "llama", num_hidden_layers=3, hidden_size=64, intermediate_size=160, vocab_size=512
    )
    net = net if precision is Precision.fp32 else net.to(torch.bfloat16)
    sizes = [p.numel() for p in net.parameters()]
    adam: Any = DeepSpeedCPUAdam if ds_config.optimizer_offload_device(ds) else torch.optim.AdamW
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=adam(net.parameters()), config=ds, dist_init_required=False
    )
    ids = torch.arange(32).view(1, 32)
    engine.backward(engine(input_ids=ids, use_cache=False).logits.float().sum())
    found = engine_memory.measure_after_backward(engine)
    engine.step()
    found |= engine_memory.measure_after_step(engine)
    engine.destroy()
    items = model_states.model_states(
        num_params=sum(sizes),
        largest_param=max(sizes),
        ds=ds,
        world_size=2,
        ranks_per_node=2,
        gas=1,
        can_pin=False,
    )
    planned: dict[str, int] = {}
    extra = {"parameters on their way back": Category.weights}
    for item in items:
        category = str((CATEGORY_OF | extra).get(item.name, Category.buckets))
        planned[category] = planned.get(category, 0) + item.bytes_per_rank
    return {name: sum(places.values()) for name, places in found.items()}, planned


@pytest.mark.parametrize(("strategy", "precision"), CELLS)
def test_held_bytes_are_planned_bytes(strategy: str, precision: Precision, two_ranks: RankPool) -> None:
    for found, planned in two_ranks.run(both, strategy=strategy, precision=precision):
        assert found["weights"] == planned["weights"]
        assert found["optimizer state"] == pytest.approx(planned["optimizer state"], abs=64)  # step counters
        shared = (
            0 if strategy.startswith("zero3") else LARGEST * 2
        )  # a parameter of two shards is whole on one rank
        assert found["gradients"] == pytest.approx(planned.get("gradients", 0), rel=0.01, abs=max(512, shared))
        if strategy.startswith("zero3"):  # below stage 3 buckets come and go within a backward
            assert found["communication buckets"] == planned["communication buckets"]


def test_the_largest_of_each_rank() -> None:
    ranks = [{"weights": {"cpu": 3}}, {"weights": {"cpu": 2, "cuda": 5}, "gradients": {"cpu": 1}}]
    assert engine_memory.take_largest(ranks) == {"weights": {"cpu": 3, "cuda": 5}, "gradients": {"cpu": 1}}
