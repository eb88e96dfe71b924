"""QLoRA: what is quantised, its bytes, and that policies and plans see the model that trains."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import PretrainedConfig

from remat.activation_checkpointing import apply, policy
from remat.config import compose
from remat.config.options import (
    CheckpointingConfig,
    ConfigError,
    ModelConfig,
    ModelInit,
    PeftConfig,
    PeftMethod,
    Policy,
    Precision,
)
from remat.model import adapters, hf_model, meta_kernels
from remat.model.four_bits import layout_4bit, sharded_4bit
from remat.model.layers import decoder_layers
from remat.planning import model_states, plan, strategy
from remat.planning.simulation import simulate
from remat.planning.simulation.types import Category
from tests.planning.test_model_states import rendered
from tests.support import small_models

CPU, META, BF16 = torch.device("cpu"), torch.device("meta"), torch.bfloat16
LAYERS = 4
GPU_ONLY_BYTES = {"llama": 24, "gpt2": 280}  # statistics in fp32 and the seed of dropout, as for any training
ZERO3, ZERO = "deepspeed.config=zero3", "+deepspeed.overrides.zero_optimization"
NAMES = sorted(set(compose.group_choices()["checkpointing"]) - {"deepspeed"})  # it needs a process group
QUANTISED = ("4-bit weights", "constants of 4-bit weights", "constants of the constants")
QUANTISED += ("means of the constants", "tables of 4-bit values", "tables of 8-bit values")


def adapted(
    method: PeftMethod,
    device: torch.device,
    family: str = "llama",
    *,
    dtype: torch.dtype = BF16,
    flat: bool = False,
    **sizes: Any,
) -> Any:
    """Four layers with adapters that do something. `flat`: the 4-bit weights are as ZeRO-3 shards them."""
    net = small_models.build(family, **({"num_hidden_layers": LAYERS} | sizes)).to(dtype).to(device)
    if method is PeftMethod.qlora:
        adapters.quantise(net, decoder_layers(net), dtype, device, flat=flat)
    wrapped = adapters.wrap(net, PeftConfig(method=method, r=4), decoder_layers(net)).to(dtype).train()
    torch.manual_seed(3)
    for parameter in wrapped.parameters():
        if parameter.requires_grad and not parameter.is_meta:
            torch.nn.init.normal_(parameter, std=0.05)
    return wrapped


def pretrained(folder: Path, *, while_reading: bool, family: str = "llama") -> Any:
    small_models.build(family).save_pretrained(folder)
    cfg = ModelConfig(init=ModelInit.pretrained, path=str(folder))
    config = hf_model.load_config(cfg)
    skeleton = hf_model.skeleton(config, cfg)
    loading = (
        adapters.loading_quantised(skeleton, decoder_layers(skeleton), BF16, CPU) if while_reading else None
    )
    net = hf_model.build(
        cfg, config, precision=Precision.bf16, ds_config={}, zero_stage=2, seed=1, loading=loading
    )
    assert while_reading == any(p.dtype is torch.uint8 for p in net.parameters())
    adapters.quantise(net, decoder_layers(net), BF16, CPU)
    return net


def constants(parameter: Any) -> list[torch.Tensor]:
    """Beside the packed values of a 4-bit weight, in the order of QUANTISED."""
    state = parameter.quant_state
    return [state.absmax, state.state2.absmax, state.offset, state.code, state.state2.code]


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi"])
def test_weights_quantised_while_reading_are_those_quantised_later(family: str, tmp_path: Path) -> None:
    """And they are every linear module of the decoder layers, nothing else."""
    ours, theirs = (
        dict(pretrained(tmp_path, while_reading=way, family=family).named_parameters()) for way in (False, True)
    )
    assert ours.keys() == theirs.keys()
    inside = r".h." if family == "gpt2" else ".layers."
    for name, parameter in ours.items():
        quantised = inside in name and name.endswith(".weight") and "norm" not in name and ".ln_" not in name
        assert (parameter.dtype is torch.uint8) == quantised, name
        assert quantised or parameter.dtype is BF16
        assert torch.equal(parameter, theirs[name]), name
        if quantised:
            assert all(map(torch.equal, constants(parameter), constants(theirs[name])))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_planned_bytes_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    sizes = adapters.find_quantised(decoder_layers(small_models.build(family)))
    net = pretrained(tmp_path, while_reading=True, family=family)
    held = [p for p in net.parameters() if p.dtype is torch.uint8]
    whole = [p for p in net.parameters() if p.dtype is not torch.uint8]
    kinds = zip(*([p, *constants(p)] for p in held), strict=True)
    expected = dict(zip(QUANTISED, (sum(t.nbytes for t in kind) for kind in kinds), strict=True))
    expected["frozen parameters"] = sum(p.nbytes for p in whole)
    items = model_states.model_states(
        num_params=sum(sizes) + sum(p.numel() for p in whole) + 10,
        largest_param=10,
        num_trainable_params=10,
        largest_trainable_param=10,
        quantised_weights=sizes,
        ds=rendered("zero2"),
        world_size=2,
        ranks_per_node=2,
        gas=1,
    )
    assert {item.name: item.bytes_per_rank for item in items if item.name in expected} == expected
    meta = small_models.build(family).to(BF16).to(META)
    adapters.quantise(meta, decoder_layers(meta), BF16, META)
    shapes = [tuple(t.shape) for p in held for t in [p, *constants(p)]]
    planned = [p for p in meta.parameters() if p.dtype is torch.uint8]
    assert [tuple(t.shape) for p in planned for t in [p, *constants(p)]] == shapes


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("config", ["zero3", "zero3_offload"])
def test_planned_bytes_of_shards_are_those_of_the_flat_weights(config: str, family: str) -> None:
    net = adapted(PeftMethod.qlora, CPU, family, flat=True)
    held = [p for p in net.parameters() if p.dtype is torch.uint8]
    sizes = adapters.find_quantised(decoder_layers(small_models.build(family, num_hidden_layers=LAYERS)))
    assert [layout_4bit.flat_bytes(size) for size in sizes] == [p.nbytes for p in held]
    items = model_states.model_states(
        num_params=sum(sizes) + 20,
        largest_param=10,
        num_trainable_params=10,
        largest_trainable_param=10,
        quantised_weights=sizes,
        ds=rendered(config),
        world_size=4,
        ranks_per_node=4,
        gas=1,
        can_pin=False,
    )
    (item,) = [item for item in items if item.name == "4-bit weights"]
    assert item.bytes_per_rank == sum(p.nbytes for p in held) / 4
    assert item.place == ("host" if config == "zero3_offload" else "gpu")
    assert not any("constants" in item.name for item in items)


@pytest.fixture
def compiled_in_fp32(dtype: torch.dtype) -> Iterator[None]:
    """What bitsandbytes does where no kernel of its own takes a width is compiled, for ten seconds: in fp32 alone."""
    with nullcontext() if dtype is torch.float32 else torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.usefixtures("compiled_in_fp32")
@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize("shape", [(64, 64), (33, 100), (1000, 33), (3, 2)])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_flat_bytes_are_those_of_bitsandbytes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    linear = torch.nn.Linear(shape[1], shape[0]).to(dtype)
    whole, flat = adapters.quantised(linear, dtype, CPU), sharded_4bit.quantise_whole(linear, dtype)
    assert isinstance(whole, type(flat).__base__)
    packed, state = sharded_4bit.opened(flat.weight, flat.layout_4bit)
    found = [packed, state.absmax, state.state2.absmax, state.offset, state.state2.code]
    expected = [whole.weight, *constants(whole.weight)]
    del expected[4]  # the table of 4-bit values, which no kernel reads
    assert all(map(torch.equal, found, expected))
    assert torch.equal(adapters.dequantise(flat), adapters.dequantise(whole))
    rows = torch.randn(3, shape[1], dtype=dtype, requires_grad=True)
    outputs = [module(rows) for module in (whole, flat)]
    assert torch.equal(*outputs)
    assert torch.equal(*(torch.autograd.grad(out.sum(), rows)[0] for out in outputs))


def micro_batch(net: Any, cfg: CheckpointingConfig, device: torch.device) -> tuple[Any, list[torch.Tensor]]:
    """What it kept, moved and recomputed; and logits and gradients, on a CPU."""
    decisions = policy.decide_layers(cfg, LAYERS, zero_stage=2)
    applied = apply.apply(net, decisions, cfg, zero_stage=2, device=device)
    watch = applied.watch(device)
    found = []
    torch.manual_seed(7)  # dropout
    if device.type == "meta":
        with meta_kernels.as_in_a_run(2, on_gpu=False), applied.micro_batch(), watch:
            simulate.step(net, micro_batch_size=2, seq_len=16, forward_done=watch.forward_done)
    else:
        with applied.micro_batch(), watch:
            logits = net(input_ids=torch.arange(32).view(2, 16), use_cache=False).logits
            watch.forward_done()
            logits.backward(torch.arange(64).expand_as(logits).to(logits) / 64)
        found = [logits.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
    applied.remove()
    net.zero_grad()
    kept = [watch.kept_bytes.get(index, 0) for index in range(LAYERS)]
    flops = [watch.total_flops(phase) for phase in ("forward", "recompute", "backward")]
    return (kept, [c.moved_bytes for c in applied.counts], flops), found


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("method", "family", "flat"),
    [
        pytest.param(PeftMethod.lora, "llama", False, marks=pytest.mark.exhaustive),
        pytest.param(PeftMethod.qlora, "llama", False, marks=pytest.mark.exhaustive),
        (PeftMethod.qlora, "llama", True),
        pytest.param(PeftMethod.qlora, "gpt2", False, marks=pytest.mark.exhaustive),
        pytest.param(PeftMethod.qlora, "gpt2", True, marks=pytest.mark.exhaustive),
    ],
)
def test_every_policy_keeps_the_trajectory_and_what_the_plan_says(
    method: PeftMethod, family: str, flat: bool, name: str
) -> None:
    net, skeleton, expected = trained(method, family, flat)
    words = [f"checkpointing={name}", "checkpointing.offload.min_bytes=0"]
    cfg = compose.compose_run(words).run.checkpointing
    (kept, *others), found = micro_batch(net, cfg, CPU)
    (planned, *planned_others), _ = micro_batch(skeleton, cfg, META)
    assert small_models.same(found, expected)
    assert planned_others == others
    more = [a - b for a, b in zip(planned, kept, strict=True)]
    assert all(0 <= extra <= GPU_ONLY_BYTES[family] for extra in more), more


@functools.cache
def trained(method: PeftMethod, family: str, flat: bool) -> tuple[Any, Any, list[torch.Tensor]]:
    """A model, its skeleton, and what it gives where all is kept and 4-bit weights are not flat."""
    _, expected = micro_batch(adapted(method, CPU, family), CheckpointingConfig(policy=Policy.none), CPU)
    assert len(expected) == 1 + 2 * LAYERS * (7 if family == "llama" else 4)
    return adapted(method, CPU, family, flat=flat), adapted(method, META, family, flat=flat), expected


def allocated_peak(run: Any) -> int:
    """Most bytes that torch's CPU allocator gave out on top of what there was: also what operators hold within."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        run()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize("name", [Policy.none, Policy.full])
@pytest.mark.parametrize("method", [PeftMethod.lora, PeftMethod.qlora])
def test_the_planned_peak_is_the_allocators(method: PeftMethod, name: Policy) -> None:
    """Large weights, few tokens: the dequantised copy of one weight is much of it.

    In fp32 and with plain attention, where a CPU's kernels allocate nothing themselves; gradients are taken at once.
    """
    sizes = {"hidden_size": 128, "intermediate_size": 1024, "attention": "eager", "dtype": torch.float32}
    cfg = CheckpointingConfig(policy=name, preserve_rng_state=False)
    net, skeleton = adapted(method, CPU, **sizes), adapted(method, META, **sizes)

    def step(trained: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        value: torch.Tensor = trained(input_ids=batch["input_ids"], use_cache=False).logits.sum()
        return value

    decisions = policy.decide_layers(cfg, LAYERS, zero_stage=2)
    applied = apply.apply(net, decisions, cfg, zero_stage=2)
    for parameter in net.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    def real() -> None:
        with applied.micro_batch(), applied.watch(CPU):  # gradients are not summed in place where one watches
            step(net, {"input_ids": torch.zeros(1, 32, dtype=torch.long)}).backward()

    real()
    found = allocated_peak(real)
    applied = apply.apply(skeleton, decisions, cfg, zero_stage=2, device=META)
    recording = simulate.record(
        skeleton,
        loss=step,
        scope=applied.scope,
        around=applied.micro_batch(),
        stage_3=False,
        micro_batch_size=1,
        seq_len=32,
        workspaces=False,
    )
    planned = max(part.peak.total for part in recording.timeline.parts)
    assert planned == pytest.approx(found, rel=0.001)


def test_the_dequantised_copy_is_in_the_peak() -> None:
    """Of forward too, where it lives inside one operation."""
    layer = decoder_layers(adapted(PeftMethod.qlora, META, hidden_size=128, intermediate_size=1024))[0]
    product = layer.mlp.up_proj.base_layer
    recording = simulate.record(
        product,
        loss=lambda net, batch: net(torch.empty(1, 8, 128, dtype=BF16, device=META, requires_grad=True)).sum(),
        scope=SimpleNamespace(layer=None, recomputing=False),
        around=nullcontext(),
        stage_3=False,
        micro_batch_size=1,
        seq_len=8,
        workspaces=False,
    )
    forward = max(part.peak.total for part in recording.timeline.parts[: recording.timeline.backward_begins_at])
    weight = 128 * 1024
    assert forward == 2 * 8 * 128 + 2 * 8 * 1024 + 2 * weight + 4 * weight // 64
    assert recording.timeline.flops["forward"] == 2 * 8 * weight


def test_an_evaluation_leaves_the_weights_as_they_are() -> None:
    """bitsandbytes would repack them on some CPUs, for a kernel without a gradient."""
    net = adapted(PeftMethod.qlora, CPU)
    before = [p.clone() for p in net.parameters()]
    with torch.no_grad():
        net.eval()(input_ids=torch.arange(8)[None])
    assert all(map(torch.equal, before, net.parameters()))
    assert not any("absmax" in name or "quant" in name for name in net.state_dict())
    assert not any(getattr(m, "support_avx512bf16_for_cpu", False) for m in net.modules())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            [ZERO3, f"{ZERO}.stage3_use_all_reduce_for_fetch_params=true"],
            r"all_reduce_for_fetch_params=True.*false",
        ),
        ([ZERO3, f"{ZERO}.zero_quantized_weights=true"], r"zero_quantized_weights=True.*set it to false"),
        (
            [ZERO3, f"{ZERO}.zero_quantized_nontrainable_weights=true"],
            r"nontrainable_weights=True.*set it to false",
        ),
        (
            [ZERO3, f"{ZERO}.stage3_allgather_sequential=true"],
            r"stage3_allgather_sequential=True.*set it to false",
        ),
        ([ZERO3, f"{ZERO}.zero_hpz_partition_size=2"], r"zero_hpz_partition_size=2.*leave it at 1"),
        ([ZERO3, "+deepspeed.overrides.torch_autocast.enabled=true"], r"torch_autocast.*train\.precision"),
        (["deepspeed.config=zero3_nvme", "hardware.nvme_path=/tmp"], r"NVMe.*deepspeed\.config=zero3_offload"),
        (["train.tensor_parallel_size=2"], r"peft\.method=qlora with train\.tensor_parallel_size=2"),
        (["model=mixtral_8x7b", "deepspeed.config=zero2"], r"peft\.method=qlora would quantise .*peft=lora"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_before_weights_are_read(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        strategy.decide(compose.compose_run(["peft=qlora", *words]).run, world_size=2, can_pin=False)


def test_a_missing_library_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"bitsandbytes.*pip install 'remat\[qlora\]'"):
        adapters.check_quantised(rendered("zero2"), None)


def test_weights_that_are_in_4_bits_already_are_not_sharded() -> None:
    held = PretrainedConfig(
        quantization_config={"quant_method": "bitsandbytes"}, name_or_path="ours/llama-4bit"
    )
    adapters.check_quantised(rendered("zero2"), held)
    with pytest.raises(ConfigError, match=r"model\.path=ours/llama-4bit .*16 bits.*deepspeed\.config=zero2"):
        adapters.check_quantised(rendered("zero3"), held)


def test_a_7b_is_planned() -> None:
    words = ["peft=qlora", "model=llama2_7b", "hardware=1x4090", "deepspeed.config=zero2"]
    planned = plan.make_plan(compose.compose_run(words).run)
    facts = planned.strategy.facts
    assert len(facts.quantised_weights) == 32 * 7
    assert sum(facts.quantised_weights) == 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    rest = facts.num_params - sum(facts.quantised_weights)
    assert planned.plan.gpu[Category.weights] == pytest.approx(
        sum(facts.quantised_weights) * (1 / 2 + 1 / 64 + 4 / 64 / 256) + 2 * rest, rel=0.001
    )
    assert planned.plan.gpu[Category.optimizer_state] == 12 * facts.num_trainable_params
