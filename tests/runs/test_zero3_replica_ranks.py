"""ZeRO-3's gather schedule without an engine holds the bytes that the real engine's gathered storages hold."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Any

import pytest
import torch

from remat.activation_checkpointing import apply, policy
from remat.activation_checkpointing.op_tracer import OpTracer
from remat.config import compose, ds_config
from remat.config.options import CheckpointingConfig, Policy, Precision
from remat.model import meta_kernels
from remat.planning.simulation import zero3
from remat.planning.simulation.types import ZeroSettings
from remat.planning.simulation.zero3 import Event, Kind, Parameters
from tests.support import small_models
from tests.support.pool import RankPool

POLICIES = {
    "none": CheckpointingConfig(policy=Policy.none),
    "full": CheckpointingConfig(),
    "full_reentrant": CheckpointingConfig(reentrant=True),
}
DEFAULT = ZeroSettings(
    stage=3,
    world_size=2,
    reduce_bucket_size=10**6,
    overlap_comm=True,
    prefetch_bucket_size=10**9,
    max_live_parameters=10**9,
    max_reuse_distance=10**9,
)
NOTHING = replace(DEFAULT, prefetch_bucket_size=0, max_live_parameters=0, max_reuse_distance=0)
SETTINGS = {
    "default": DEFAULT,
    "nothing": NOTHING,
    "no reuse": replace(DEFAULT, max_reuse_distance=0),
    "near reuse": replace(DEFAULT, max_reuse_distance=9000, prefetch_bucket_size=0),
    "small prefetch": replace(DEFAULT, prefetch_bucket_size=5000, max_reuse_distance=0),
    "few live": replace(DEFAULT, max_live_parameters=12000, prefetch_bucket_size=4000, max_reuse_distance=6000),
    "persistent": replace(NOTHING, param_persistence_threshold=1100),
    "persistent and prefetch": replace(
        DEFAULT, param_persistence_threshold=50, prefetch_bucket_size=3000, max_reuse_distance=3000
    ),
    "all persistent": replace(DEFAULT, param_persistence_threshold=10**6),
}
IDS = torch.arange(32).view(1, 32)
LAYERS = 4
LEARNT = 2  # micro-batches until the engine knows the order
MICRO_BATCHES = 6  # gloo's own thread may hold a buffer a moment longer: the least of them counts


@dataclass
class Figures:
    """Gathered bytes of one micro-batch, and elements that its collectives gathered."""

    after_forward: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    elements: int = 0


class GatheredBytes(OpTracer):
    """Of the live storages, those that were gathered."""

    def __init__(self, scope: Any) -> None:
        super().__init__(scope, torch.device("cpu"))
        self.gathered_peak = 0

    @property
    def gathered_live(self) -> int:
        return sum(self._made[key][2] for key in self._gathered if key in self._made)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.gathered_peak = max(self.gathered_peak, self.gathered_live)
        return result


def model(frozen: bool) -> Any:
    net = small_models.build("llama", num_hidden_layers=LAYERS)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not (frozen and ("mlp" in name or "embed" in name)))
    return net


def real(name: str, settings: ZeroSettings, frozen: bool) -> Figures:
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
    zero = {
        "stage3_param_persistence_threshold": settings.param_persistence_threshold,
        "stage3_prefetch_bucket_size": settings.prefetch_bucket_size,
        "stage3_max_live_parameters": settings.max_live_parameters,
        "stage3_max_reuse_distance": settings.max_reuse_distance,
    }
    ds = ds_config.render(ds_config.load("zero3", compose.DS_CONFIG_DIR), {"zero_optimization": zero}, values)
    net, cfg = model(frozen), POLICIES[name]
    applied = apply.apply(net, policy.decide_layers(cfg, LAYERS, zero_stage=3), cfg, zero_stage=3)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=ds, dist_init_required=False)
    with GatheredBytes(applied.scope) as watch:
        seen = [micro_batch(engine, watch) for _ in range(LEARNT + MICRO_BATCHES)]
    engine.destroy()
    applied.remove()
    return Figures(*map(min, zip(*map(astuple, seen[LEARNT:]), strict=True)))


def micro_batch(engine: Any, watch: GatheredBytes) -> Figures:
    figures = Figures()
    watch.gathered_peak, before = watch.gathered_live, sum(watch.gathered_bytes.values())
    loss = engine(input_ids=IDS, use_cache=False).logits.sum()
    figures.after_forward, figures.forward_peak = watch.gathered_live, watch.gathered_peak
    watch.gathered_peak = watch.gathered_live
    engine.backward(loss)
    figures.backward_peak = watch.gathered_peak
    figures.elements = (sum(watch.gathered_bytes.values()) - before) // 4
    engine.step()
    return figures


def all_real(name: str, labels: list[str], frozen: bool) -> dict[str, Figures]:
    return {label: real(name, SETTINGS[label], frozen) for label in labels}


def record(name: str, frozen: bool, device: str) -> tuple[Parameters, list[Event], int]:
    """The events of one micro-batch, and how many of them are its forward's."""
    net, cfg = model(frozen).to(device), POLICIES[name]
    applied = apply.apply(net, policy.decide_layers(cfg, LAYERS, zero_stage=3), cfg, zero_stage=3)
    events: list[Event] = []
    ids = IDS.to(device)
    around = meta_kernels.as_in_a_run(3) if device == "meta" else meta_kernels.linear_of(3)
    with around, zero3.recorded(net, events.append), applied.micro_batch():
        loss = net(input_ids=ids, use_cache=False).logits.sum()
        in_forward = len(events)
        loss.backward()
    applied.remove()
    assert not any(module._forward_hooks for module in net.modules())
    return Parameters.of(net), [*events, Event(Kind.end)], in_forward


def replayed(parameters: Parameters, events: list[Event], in_forward: int, settings: ZeroSettings) -> Figures:
    seen: list[int] = []
    coordinator = zero3.steady(parameters, events, settings, seen.append)
    figures = Figures()
    seen.append(coordinator.bytes)
    for event in events[:in_forward]:
        coordinator.handle(event)
    figures.after_forward, figures.forward_peak = coordinator.bytes, max(seen)
    seen[:] = [coordinator.bytes]
    for event in events[in_forward:]:
        coordinator.handle(event)
    figures.backward_peak, figures.elements = max(seen), coordinator.elements
    return figures


SAMPLE = [  # each policy, frozen weights and each kind of setting
    ("none", False, ["few live"]),
    ("full", True, ["persistent and prefetch"]),
    ("full_reentrant", False, ["nothing"]),
]
WHOLE = [(name, frozen, list(SETTINGS)) for name, frozen, _ in (*SAMPLE, ("full", False, []))]


@pytest.mark.parametrize(
    ("name", "frozen", "labels"),
    [*SAMPLE, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in WHOLE)],
)
def test_gathered_bytes_are_the_engines(
    name: str, frozen: bool, labels: list[str], two_ranks: RankPool
) -> None:
    """Exactly: after forward, at the peak of forward and of backward; and the elements gathered."""
    device = "cpu" if name == "full_reentrant" else "meta"
    recorded = record(name, frozen, device)
    found = {label: replayed(*recorded, SETTINGS[label]) for label in labels}
    assert found == two_ranks.run(all_real, name=name, labels=labels, frozen=frozen)[0]
    if len(labels) > 1:
        different = {str(figures) for figures in found.values()}
        assert len(different) >= min(6, len(labels)), "the settings make a difference"
