"""compile=layers under ZeRO-2 and ZeRO-3 on two ranks: the same training within rounding, no gathered weight held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from remat.activation_checkpointing import apply, policy
from remat.activation_checkpointing.compiled import CompiledLayers, make_whole
from remat.config.options import CheckpointingConfig, PeftConfig, PeftMethod, Policy
from remat.model import adapters, layers
from tests.support.grids import cases
from tests.support.pool import RankPool
from tests.support.small_models import build

STEPS = 3
FIRST, LATER = (
    1e-5,
    2e-4,
)  # relative, in fp32: fused kernels round in another order, and AdamW divides by what is small


def train(stage: int, policy_name: str, is_compiled: bool, lora: bool = False) -> dict[str, Any]:
    """Losses and gradient norms, how many gathered weights live from forward to backward, graphs of the compiler."""
    import deepspeed

    torch.manual_seed(0)
    net: nn.Module = build("llama")
    if lora:
        net = adapters.wrap(net, PeftConfig(method=PeftMethod.lora, r=4), layers.decoder_layers(net))
    stack, compiled = layers.decoder_layers(net), CompiledLayers() if is_compiled else None
    if compiled is not None:
        make_whole(stack)
    cfg = CheckpointingConfig(policy=Policy(policy_name))
    plan = policy.decide_layers(cfg, len(stack), zero_stage=stage)
    applied = apply.apply(net, plan, cfg, zero_stage=stage, compiled=compiled)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_reuse_distance": 0,
        },
        "zero_allow_untested_optimizer": True,
    }
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    engine = deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]
    gathered: dict[int, StorageWeakRef] = {}

    def note(layer: nn.Module, args: Any) -> None:
        for weight in layer.parameters() if stage == 3 else ():
            if weight.numel() > 1:
                gathered[id(weight)] = StorageWeakRef(weight.untyped_storage())

    handles = [layer.register_forward_pre_hook(note) for layer in stack]
    history, held = [], 0
    for step in range(STEPS):
        seed = 10 * step + torch.distributed.get_rank()
        ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(seed))
        with applied.micro_batch():
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            held = max(held, sum(not storage.expired() for storage in gathered.values()))
            engine.backward(loss)
        engine.step()
        history.append((loss.item(), float(engine.get_global_grad_norm())))
    for handle in handles:
        handle.remove()
    applied.remove()
    engine.destroy()
    return {"history": history, "held": held, "gathered": len(gathered), "compiled": compiled is not None}


@pytest.mark.parametrize("lora", cases([False, True], {True}))
@pytest.mark.parametrize("policy_name", cases(["none", "full"], {"none"}))
@pytest.mark.parametrize("stage", cases([2, 3], {2}))
def test_compiled_layers_train_the_same_under_zero(
    two_ranks: RankPool, stage: int, policy_name: str, lora: bool
) -> None:
    if lora and stage == 3:
        pytest.skip("refused: remat.model.adapters.check_compiled")
    plain = two_ranks.run(train, stage=stage, policy_name=policy_name, is_compiled=False, lora=lora)
    found = two_ranks.run(train, stage=stage, policy_name=policy_name, is_compiled=True, lora=lora)
    for ours, wanted in zip(found, plain, strict=True):
        for step, (one, other) in enumerate(zip(ours["history"], wanted["history"], strict=True)):
            assert one == pytest.approx(other, rel=LATER if step else FIRST)
        assert ours["held"] == 0 and (stage < 3 or ours["gathered"] > 0)
