"""Every policy on six families, in one process: the same losses and gradients bit for bit, and in effect."""

from __future__ import annotations

import functools
import gc
import itertools
import tracemalloc
from typing import Any

import pytest
import torch

from remat.activation_checkpointing import apply, policy, verification
from remat.activation_checkpointing.op_tracer import OpTracer
from remat.config import compose
from remat.config.options import CheckpointingConfig, OffloadConfig, Policy, SelectiveOpsConfig
from tests.support import small_models, watched

FAMILIES = ("llama", "qwen2", "gpt2", "mixtral", "gemma", "phi")
SIZES = {"llama": {"num_key_value_heads": 2}, "phi": {"resid_pdrop": 0.1, "embd_pdrop": 0.1}}
LAYERS = 3
STRETCH = 12  # steps
MOVED = OffloadConfig(enabled=True, min_bytes=0)
LINEARS = SelectiveOpsConfig(save_linears=["all_but_down"])
OTHERS = {
    "selective_ops, matmul": CheckpointingConfig(
        policy=Policy.selective_ops, selective_ops=SelectiveOpsConfig(save=["attention", "matmul"])
    ),
    "selective_ops, every_other_matmul": CheckpointingConfig(
        policy=Policy.selective_ops, selective_ops=SelectiveOpsConfig(save=["every_other_matmul"])
    ),
    "core_attention": CheckpointingConfig(
        policy=Policy.selective_modules, recompute_modules=["core_attention"]
    ),
    "attention and norm": CheckpointingConfig(
        policy=Policy.selective_modules, recompute_modules=["attention", "norm"]
    ),
    "uniform + offload": CheckpointingConfig(policy=Policy.uniform, offload=MOVED),
    "selective_linears + offload": CheckpointingConfig(
        policy=Policy.selective_ops, selective_ops=LINEARS, offload=MOVED
    ),
    "selective_modules + offload": CheckpointingConfig(policy=Policy.selective_modules, offload=MOVED),
    "discard_output + offload": CheckpointingConfig(policy=Policy.discard_output, offload=MOVED),
    "none + offload": CheckpointingConfig(policy=Policy.none, offload=MOVED),
    "ranges": CheckpointingConfig(layers={0: Policy.none, "1-2": Policy.selective_ops}),
}


POLICIES = [*compose.group_choices()["checkpointing"], *OTHERS]
NEEDS_PROCESS_GROUP = {"deepspeed"}  # tests/activation_checkpointing/test_deepspeed_checkpointing.py


@functools.cache
def read(name: str) -> CheckpointingConfig:
    """A file of conf/checkpointing as it stands, only that nothing here is 1 MiB large; or one of OTHERS."""
    if name in OTHERS:
        return OTHERS[name]
    return compose.compose_run([f"checkpointing={name}", "checkpointing.offload.min_bytes=0"]).run.checkpointing


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[Any, watched.Watched]:
    net = small_models.build(request.param, num_hidden_layers=LAYERS, **SIZES.get(request.param, {}))
    return net, watched.run(net, watched.NONE)


@pytest.mark.sample(one_in=5)
@pytest.mark.parametrize("name", sorted(set(POLICIES) - NEEDS_PROCESS_GROUP))
def test_bit_equal_and_in_effect(name: str, family: tuple[Any, watched.Watched]) -> None:
    net, kept = family
    cfg = read(name)
    result = watched.run(net, cfg)
    assert watched.differences(result, kept) == []
    assert verification.unmet_expectations(result.applied, result.watch, cfg) == []
    assert result.replayed.differences == result.replayed.notes == []


@pytest.mark.sample(one_in=14)
@pytest.mark.parametrize("name", sorted(set(POLICIES) - NEEDS_PROCESS_GROUP))
def test_many_steps_hold_memory_flat(name: str) -> None:
    """Nothing that a step made outlives it: no storage, and no more of Python's own memory than noise."""
    cfg, layers = read(name), 3 if "ranges" in name else 2
    net = small_models.build("llama", num_hidden_layers=layers)
    applied = apply.apply(net, policy.decide_layers(cfg, layers), cfg)
    ids = torch.randint(0, 64, (2, 16))

    def steps(count: int) -> None:
        for _ in range(count):
            with applied.micro_batch():
                net(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            net.zero_grad()

    steps(5)
    with OpTracer(applied.scope, torch.device("cpu")) as watch:
        steps(2)
        storages = watch.live_bytes
        steps(3)
        assert watch.live_bytes == storages
    tracemalloc.start()
    steps(5)
    sizes = []
    for _ in range(3):
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
        steps(STRETCH)
    tracemalloc.stop()
    grown = min(after - before for before, after in itertools.pairwise(sizes))
    assert grown < STRETCH * 1024, "a KiB a step stays behind, in each stretch: not a cache that filled once"
