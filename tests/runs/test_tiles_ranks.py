"""MLPs in slices on the real engine, two ranks: the training of whole MLPs within rounding, no gather or FLOP more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from remat.activation_checkpointing import apply, policy, verification
from remat.activation_checkpointing.mechanisms import tiles
from remat.config import compose, ds_config
from remat.config.options import CheckpointingConfig, OffloadConfig, PeftConfig, PeftMethod, Policy, Precision
from remat.model import adapters, layers
from tests.support import small_models
from tests.support.grids import cases
from tests.support.pool import RankPool

STEPS = 3
SLICES = 4
NOTHING_PERSISTENT = {
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 5000,
    "stage3_max_live_parameters": 5000,
    "stage3_max_reuse_distance": 5000,
}
STRATEGIES = ("zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")
MODELS = (
    "llama",
    "gemma3_text",
    "mixtral",
    "llama, LoRA",
    "llama, LoRA in MLPs",
    "llama, QLoRA",
    "llama, activations moved",
    "llama, attention kept",
)
GRID = [f"{strategy}, {model}" for strategy in STRATEGIES for model in MODELS]
SAMPLE = {
    "zero3, llama",
    "zero3_offload, llama, LoRA in MLPs",
    "zero1, mixtral",
    "zero2_offload, llama, activations moved",
}
ROUNDING = 1e-5  # fp32


@dataclass(frozen=True)
class Found:
    """Of a run: per step loss and gradient norm; of its second micro-batch FLOPs, gathers and peaks of MLPs."""

    steps: list[tuple[float, float]]
    recomputed: dict[int, int]
    gathered: int
    mlp_peaks: dict[int, int]
    slices: list[tuple[int, int, int]]
    unmet: list[str]
    differences: list[str]


def build(model: str, stage: int) -> Any:
    family, _, adapted = model.partition(", ")
    net = small_models.build(family)
    if adapted == "QLoRA":
        cpu = torch.device("cpu")
        adapters.quantise(net, layers.decoder_layers(net), torch.float32, cpu, flat=stage == 3)
    if "LoRA" in adapted:
        method = PeftMethod.qlora if adapted == "QLoRA" else PeftMethod.lora
        mlp_alone = ["gate_proj", "down_proj"] if adapted.endswith("MLPs") else []
        peft = PeftConfig(method=method, r=4, target_modules=mlp_alone)
        net = adapters.wrap(net, peft, layers.decoder_layers(net))
        for name, parameter in net.named_parameters():
            if "lora_B" in name:  # zeros hide wrong gradients
                torch.nn.init.normal_(parameter, std=0.1)
    return net


def train(strategy: str, model: str, count: int) -> Found:
    import deepspeed

    values = ds_config.RunValues(
        world_size=2,
        micro_batch_size=2,
        global_batch_size=8,
        gradient_clipping=1.0,
        precision=Precision.fp32,
        hidden_size=32,
        pin_memory_possible=False,
    )
    changes: dict[str, Any] = {"zero_force_ds_cpu_optimizer": False}
    changes |= {"zero_optimization": NOTHING_PERSISTENT} if "3" in strategy else {}
    ds = ds_config.render(ds_config.load(strategy, compose.DS_CONFIG_DIR), changes, values)
    stage = ds_config.zero_stage(ds)
    moved = OffloadConfig(enabled=model.endswith("moved"), min_bytes=0, keep_last_layers=1)
    kept = Policy.selective_ops if model.endswith("kept") else Policy.full
    cfg, net = CheckpointingConfig(policy=kept, tiles=str(count), offload=moved), build(model, stage)
    ids = torch.randint(
        0, 64, (STEPS, 2, 2, 18), generator=torch.Generator().manual_seed(torch.distributed.get_rank())
    )
    decisions = policy.decide_layers(cfg, len(layers.decoder_layers(net)), zero_stage=stage)
    decisions = tiles.find_tilings(net, decisions, lambda: net(input_ids=ids[0, 0], use_cache=False))
    applied = apply.apply(net, decisions, cfg, zero_stage=stage)
    trained = [p for p in net.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=torch.optim.AdamW(trained, lr=1e-2), config=ds, dist_init_required=False
    )
    steps, differences, unmet = [], list[str](), list[str]()
    watch = applied.watch(torch.device("cpu"))
    for step in range(STEPS):
        total = 0.0
        for part in range(2):
            watch = applied.watch(torch.device("cpu"))
            with applied.recording() as recorder, applied.micro_batch(), watch:
                loss = engine(input_ids=ids[step, part], labels=ids[step, part], use_cache=False).loss
                watch.forward_done()
                recorder.forward_done(loss)
                engine.backward(loss)
            if (step, part) == (0, 0):
                differences = recorder.replay(recorder.ready()).differences
                unmet = verification.unmet_expectations(applied, watch, cfg)
            engine.step()
            total += loss.item()
        steps.append((total, float(engine.get_global_grad_norm())))
    found = Found(
        steps,
        dict(watch.flops["recompute"]),
        sum(watch.gathered_bytes.values()),
        dict(watch.mlp_peak_bytes),
        [(c.slices, c.slices_again, c.slices_thrice) for c in applied.counts],
        unmet,
        differences,
    )
    engine.destroy()
    applied.remove()
    return found


@pytest.mark.parametrize("name", cases(GRID, set(GRID) - SAMPLE))
def test_slices_train_as_whole_mlps(name: str, two_ranks: RankPool) -> None:
    strategy, model = name.split(", ", 1)
    whole, sliced = (
        two_ranks.run(train, strategy=strategy, model=model, count=count)[0] for count in (1, SLICES)
    )
    for ours, theirs in zip(sliced.steps, whole.steps, strict=True):
        assert ours == pytest.approx(theirs, rel=ROUNDING)
    assert whole.steps[0] != whole.steps[-1]
    assert sliced.recomputed == whole.recomputed
    assert sliced.gathered <= whole.gathered
    assert whole.unmet == sliced.unmet == whole.differences == sliced.differences == []
    runs = 2 * STEPS * SLICES
    assert sliced.slices == [(runs, runs, 0)] * 3
    if model == "llama":
        assert {layer: size * SLICES for layer, size in sliced.mlp_peaks.items()} == whole.mlp_peaks
