"""Saved tensors under ZeRO-3 on two ranks: same losses and gradient norms, and no gathered weight held by autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from remat.activation_checkpointing import apply, policy, verification
from remat.activation_checkpointing.mechanisms import saved_tensors
from remat.config.options import CheckpointingConfig, OffloadConfig, Policy
from remat.model import layers
from tests.support.grids import cases
from tests.support.pool import RankPool
from tests.support.small_models import build
from tests.support.watched import offload_all

STEPS = 2
NONE = CheckpointingConfig(policy=Policy.none)
NORM = CheckpointingConfig(policy=Policy.discard_output, discard_modules=["norm"])
CONFIGS = {
    "discard norm": NORM,
    "discard norm and activation": CheckpointingConfig(policy=Policy.discard_output),
    "offload everything": CheckpointingConfig(policy=Policy.none, offload=offload_all()),
    "discard, offload the rest": CheckpointingConfig(policy=Policy.discard_output, offload=offload_all()),
    "full, offload": CheckpointingConfig(offload=offload_all()),
    "full, offload, all but the last": CheckpointingConfig(
        offload=OffloadConfig(enabled=True, min_bytes=0, keep_last_layers=1)
    ),
    "segments, offload": CheckpointingConfig(policy=Policy.uniform, offload=offload_all()),
}


def engine_for(model_type: str, **more: Any) -> Any:
    import deepspeed

    net = build(model_type, **more)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 20_000,
            "stage3_max_reuse_distance": 20_000,
        },
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]


def train(model_type: str, cfg: CheckpointingConfig, by_reference: bool = True, **more: Any) -> dict[str, Any]:
    """Losses and gradient norms of the steps, what the first one's watch saw, promises that were not kept."""
    engine = engine_for(model_type, **more)
    plan = policy.decide_layers(cfg, len(layers.decoder_layers(engine.module)), zero_stage=3)
    applied = apply.apply(engine.module, plan, cfg, zero_stage=3 if by_reference else 2)
    watch = applied.watch(torch.device("cpu"))
    history, problems = [], []
    for step in range(STEPS):
        seed = 10 * step + torch.distributed.get_rank()
        ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(seed))
        torch.manual_seed(seed)
        with applied.micro_batch(), watch:
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            watch.forward_done()
            engine.backward(loss)
        if step == 0:
            kept = dict(watch.kept_bytes)
            pinned = sum(watch.pinned_weight_bytes.get(index, 0) for index in range(len(applied.counts)))
            problems = verification.unmet_expectations(applied, watch, cfg)
        engine.step()
        history.append((loss.item(), float(engine.get_global_grad_norm())))
    applied.remove()
    engine.destroy()
    return {"history": history, "kept": kept, "pinned": pinned, "problems": problems}


SAMPLE = {
    "llama": ["discard norm and activation", "full, offload, all but the last", "segments, offload"],
    "mixtral": ["discard, offload the rest"],
}
WHOLE = {model_type: list(CONFIGS) for model_type in ("llama", "qwen2", "gpt2", "mixtral")}


@pytest.mark.parametrize(
    ("model_type", "names"),
    [*SAMPLE.items(), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in WHOLE.items())],
)
def test_trains_as_without_checkpointing(two_ranks: RankPool, model_type: str, names: list[str]) -> None:
    expected = two_ranks.run(train, model_type=model_type, cfg=NONE)
    for name, cfg in ((name, CONFIGS[name]) for name in names):
        found = two_ranks.run(train, model_type=model_type, cfg=cfg)
        for ours, wanted in zip(found, expected, strict=True):
            assert ours["history"] == wanted["history"], name
            assert ours["problems"] == [], name
            assert sum(ours["kept"].values()) < sum(wanted["kept"].values()), name


EXPERTS = {"num_local_experts": 8}
EXPERT_BYTES = 4 * 8 * 3 * 32 * 64  # of one layer: gate_up_proj and down_proj, fp32


@pytest.mark.parametrize("implementation", cases(["eager", "grouped_mm"], {"eager"}))
def test_experts_are_not_held_from_forward_to_backward(two_ranks: RankPool, implementation: str) -> None:
    """Without this, every layer's gathered experts stay until backward: ZeRO-3 would not shard them at all."""
    more = EXPERTS | {"experts_implementation": implementation}
    plain = two_ranks.run(train, model_type="mixtral", cfg=NONE, by_reference=False, **more)
    ours = two_ranks.run(train, model_type="mixtral", cfg=NONE, **more)
    for held, referred in zip(plain, ours, strict=True):
        assert held["pinned"] >= 2.9 * EXPERT_BYTES
        assert referred["pinned"] < 0.2 * EXPERT_BYTES
        assert referred["history"] == held["history"]
        assert referred["kept"] == held["kept"]


def weights_outside_the_hooks() -> list[bool]:
    """Whether a dense and a MoE layer get hooks under ZeRO-3 when nothing but weights is at stake."""
    from contextlib import nullcontext

    active = []
    for model_type in ("llama", "mixtral"):
        engine = engine_for(model_type)
        layer = layers.decoder_layers(engine.module)[0]
        saved = saved_tensors.SavedTensors(layer, by_reference=True, offload=None, discarded=None)
        active.append(not isinstance(saved.hooks(), nullcontext))
        engine.destroy()
    return active


def test_dense_layers_pay_nothing(two_ranks: RankPool) -> None:
    assert two_ranks.run(weights_outside_the_hooks) == [[False, True]] * 2
