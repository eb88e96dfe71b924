"""What ZeRO-3 gathers under each policy: the replay without an engine holds what the real engine's collectives move."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from remat.activation_checkpointing import apply, policy
from remat.config import compose, ds_config
from remat.config.options import CheckpointingConfig, Policy, Precision
from remat.model import meta_kernels
from remat.planning.simulation import zero3
from remat.planning.simulation.zero3 import Event, Parameters
from tests.support import small_models
from tests.support.pool import RankPool

LAYERS = 4
POLICIES = {
    "none": CheckpointingConfig(policy=Policy.none),
    "full": CheckpointingConfig(),
    "full_reentrant": CheckpointingConfig(reentrant=True),
    "sqrt": CheckpointingConfig(policy=Policy.sqrt, reentrant=True),
    "selective_ops": CheckpointingConfig(policy=Policy.selective_ops),
    "selective_modules": CheckpointingConfig(policy=Policy.selective_modules),
    "core_attention": CheckpointingConfig(
        policy=Policy.selective_modules, recompute_modules=["core_attention"]
    ),
    "discard_output": CheckpointingConfig(policy=Policy.discard_output),
    "budget": CheckpointingConfig(policy=Policy.budget),  # the fewest bytes
}
NO_REUSE = {
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}
IDS = torch.arange(32).view(1, 32)


def model() -> Any:
    return small_models.build("llama", num_hidden_layers=LAYERS, num_key_value_heads=2)


def engine_counts(name: str) -> tuple[int, int]:
    """(gathered bytes, recomputed FLOPs) of one micro-batch; of the second, because the first also learns the order."""
    import deepspeed

    values = ds_config.RunValues(
        world_size=2,
        micro_batch_size=1,
        global_batch_size=2,
        gradient_clipping=0.0,
        precision=Precision.fp32,
        hidden_size=32,
        pin_memory_possible=False,
    )
    ds = ds_config.render(
        ds_config.load("zero3", compose.DS_CONFIG_DIR), {"zero_optimization": NO_REUSE}, values
    )
    net, cfg = model(), POLICIES[name]
    applied = apply.apply(net, policy.decide_layers(cfg, LAYERS, zero_stage=3), cfg, zero_stage=3)
    optimizer = torch.optim.AdamW(net.parameters())
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=ds, dist_init_required=False)
    counts = (0, 0)
    for _ in range(2):
        with applied.micro_batch(), applied.watch(torch.device("cpu")) as watch:
            loss = engine(input_ids=IDS, use_cache=False).logits.sum()
            watch.forward_done()
            engine.backward(loss)
        engine.step()
        counts = sum(watch.gathered_bytes.values()), watch.total_flops("recompute")
    engine.destroy()
    applied.remove()
    return counts


def replayed(name: str) -> tuple[int, int]:
    """(gathered elements, recomputed FLOPs) without an engine."""
    net, cfg = model(), POLICIES[name]
    applied = apply.apply(net, policy.decide_layers(cfg, LAYERS, zero_stage=3), cfg, zero_stage=3)
    watch, events = applied.watch(torch.device("cpu")), list[Event]()
    with meta_kernels.linear_of(3), zero3.recorded(net, events.append), applied.micro_batch(), watch:
        net(input_ids=IDS, use_cache=False).logits.sum().backward()
    applied.remove()
    assert not any(module._forward_hooks for module in net.modules())
    return zero3.elements_without_reuse(Parameters.of(net), events), watch.total_flops("recompute")


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("name", list(POLICIES))
def test_the_replay_gathers_and_recomputes_what_the_engine_does(name: str, two_ranks: RankPool) -> None:
    norms_again = (
        2 * LAYERS * 32 if name == "discard_output" else 0
    )  # only an engine's norms have weights to gather
    elements, flops = replayed(name)
    assert two_ranks.run(engine_counts, name=name)[0] == (4 * (elements + norms_again), flops)


def test_policies_differ_as_advised() -> None:
    size = sum(p.numel() for p in model().parameters())
    volume = {name: replayed(name)[0] / size for name in POLICIES}
    assert volume["none"] == volume["core_attention"] == volume["discard_output"] == 2
    assert (
        2
        < volume["selective_modules"]
        < volume["full"]
        == volume["selective_ops"]
        < volume["full_reentrant"]
        < 3
    )
