"""The simulated micro-batch against real ones on a CPU: peak bytes and FLOPs; and what follows from sizes alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from remat.activation_checkpointing import apply, policy
from remat.activation_checkpointing.mechanisms.counters import Scope
from remat.activation_checkpointing.op_tracer import OpTracer
from remat.config import compose
from remat.config.options import Attention, CheckpointingConfig, ConfigError, LossKind, Packing
from remat.model import layers, loss, meta_kernels, packing
from remat.model.packing import Packed, Way
from remat.planning import policies
from remat.planning.plan import make_plan
from remat.planning.simulation import simulate
from remat.planning.simulation.timeline import Ready, Timeline, workspace_bytes
from remat.planning.simulation.types import Category, Phase, Simulation, ZeroSettings
from tests.support import small_models
from tests.support.live_bytes import LiveBytes

LAYERS, ROWS, SEQ, HIDDEN = 4, 2, 64, 64
WHOLE = Packed(None, "")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "gemma": {"head_dim": 32},
    "phi": {},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "mixtral": {"experts_implementation": "grouped_mm"},
}
POLICIES = ["none", "full", "selective_ops", "uniform"]
SINGLE = ZeroSettings(stage=0, world_size=1, reduce_bucket_size=10**6, overlap_comm=False)
OFFLOAD = ["checkpointing.offload.min_bytes=0", "checkpointing.offload.keep_last_layers=0"]
ROOT = Path(__file__).resolve().parent.parent.parent
# Attention's random state; norms' fp32 statistics, which a CPU keeps in bf16: one norm of Phi, two of GPT-2
ONLY_ON_A_GPU = dict.fromkeys(FAMILIES, 32) | {"phi": 32 + 2 * 2 * ROWS * SEQ, "gpt2": 32 + 2 * 4 * ROWS * SEQ}
TOLERANCE = 0.005  # largest: GPT-2 and Phi, whose norms keep fp32 statistics on a GPU, 0.2 %


def build(family: str, vocab_size: int = 512) -> Any:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 160, "vocab_size": vocab_size}
    net = small_models.build(family, num_hidden_layers=LAYERS, **sizes, **FAMILIES[family])
    return net.to(torch.bfloat16)


def checkpointing(name: str, *more: str) -> CheckpointingConfig:
    return compose.compose_run([f"checkpointing={name}", *more]).run.checkpointing


def put_on(net: Any, cfg: CheckpointingConfig, device: str, zero_stage: int) -> apply.Applied:
    plan = policy.decide_layers(cfg, len(layers.decoder_layers(net)), zero_stage=zero_stage)
    return apply.apply(net, plan, cfg, zero_stage=zero_stage, device=torch.device(device))


def recorded(
    net: Any,
    cfg: CheckpointingConfig,
    *,
    kind: LossKind = LossKind.full,
    stage: int = 0,
    seq_len: int = SEQ,
    on_gpu: bool = True,
    packed: Packed = WHOLE,
) -> simulate.Recording:
    net = net.to("meta")
    applied = put_on(net, cfg, "meta", stage)
    try:
        return simulate.record(
            net,
            loss=loss.TokenLoss(net, kind, verify=False, cross_entropy=meta_kernels.cross_entropy),
            scope=applied.scope,
            around=applied.micro_batch(),
            stage_3=stage == 3,
            micro_batch_size=ROWS,
            seq_len=seq_len,
            given=packing.planned(packed, Attention.sdpa, net),
            packed=packed.apart,
            ignored=applied.offload.storages if applied.offload else tuple,
            workspaces=False,  # a CPU's kernels have others
            on_gpu=on_gpu,
        )
    finally:
        applied.remove()


def simulated(net: Any, cfg: CheckpointingConfig, zero: ZeroSettings = SINGLE, **more: Any) -> Simulation:
    return recorded(net, cfg, stage=zero.stage, **more).under(zero)


def real(net: Any, cfg: CheckpointingConfig, packed: Packed = WHOLE) -> OpTracer:
    """A run on the CPU; packed rows hold documents that end at other places."""
    applied = put_on(net, cfg, "cpu", 0)
    ids = torch.randint(0, 512, (ROWS, SEQ), generator=torch.Generator().manual_seed(3))
    watch = applied.watch(torch.device("cpu"))
    token_loss = loss.TokenLoss(net, LossKind.full)
    batch = {"input_ids": ids, "labels": ids}
    if packed.apart:
        ends = ([20, 44], [50, 14])
        batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ends])
    with applied.micro_batch(), watch:
        inputs = packing.given(packed, batch, net)
        value = token_loss(net, inputs)
        watch.forward_done()
        value.backward()
        del value
    applied.remove()
    return watch


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_bytes_and_flops_are_those_of_a_cpu_run(family: str, name: str) -> None:
    net, cfg = build(family), checkpointing(name)
    watch = real(net, cfg)
    found = simulated(net, cfg)
    assert found.peak.total_bytes == pytest.approx(watch.peak_bytes, rel=TOLERANCE)
    assert {phase: found.flops[Phase(phase)] for phase in watch.flops} == {
        phase: watch.total_flops(phase) for phase in watch.flops
    }
    more = [planned - watch.kept_bytes.get(layer, 0) for layer, planned in enumerate(found.kept_bytes)]
    assert len(more) == LAYERS
    assert all(0 <= extra <= ONLY_ON_A_GPU[family] for extra in more), more


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("name", ["none", "full"])
@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma"])
def test_packed_documents_and_their_mask_are_those_of_a_cpu_run(family: str, way: Way, name: str) -> None:
    packed = Packed(Packing.documents, "", way)
    net, cfg = build(family), checkpointing(name)
    watch, alone = real(net, cfg, packed), real(net, cfg)
    found = simulated(net, cfg, packed=packed)
    assert found.peak.total_bytes == pytest.approx(watch.peak_bytes, rel=TOLERANCE)
    assert {phase: found.flops[Phase(phase)] for phase in watch.flops} == {
        phase: watch.total_flops(phase) for phase in watch.flops
    }
    more = [planned - watch.kept_bytes.get(layer, 0) for layer, planned in enumerate(found.kept_bytes)]
    assert all(0 <= extra <= ONLY_ON_A_GPU[family] for extra in more), more
    if name == "none":  # a mask in the type of the activations, in every layer
        assert watch.kept_bytes[0] >= alone.kept_bytes[0] + ROWS * SEQ * SEQ * 2


def test_a_moment_knows_its_categories_and_operations_their_phase() -> None:
    found = simulated(build("llama"), checkpointing("full"))
    for moment in (found.forward_peak, found.backward_peak):
        assert sum(moment.by_category.values()) == moment.total_bytes
    tokens = ROWS * SEQ
    # bf16 logits' gradient is not there yet: fp32 log-softmax, its gradient, and that of the fp32 logits.
    assert found.backward_peak.by_category[Category.loss] >= 12 * tokens * 512
    assert found.backward_peak.operation == "_log_softmax_backward_data"
    assert found.backward_peak.layer is None
    assert found.backward_peak.by_category[Category.activations] == (LAYERS - 1) * tokens * HIDDEN * 2
    by_phase = {phase: sum(op.flops for op in found.ops if op.phase is phase) for phase in Phase}
    assert by_phase == found.flops
    assert {op.kind for op in found.ops} == {"matmul", "attention", "elementwise"}
    assert all(op.bytes > 0 for op in found.ops)
    assert found.assumptions == [
        "attention runs torch's flash kernel; cuDNN's, which torch prefers on Hopper, is taken to need the same",
        "sequences are not packed: attention needs no mask of its own",
    ]


@pytest.mark.parametrize("name", ["none", "full"])
def test_backward_knows_its_layer_by_the_weight_it_reads(name: str) -> None:
    net = build("llama")
    names = [name for name, _ in net.named_parameters()]
    seen = {
        names[part.cut.parameter]: part.at_cut.layer
        for part in recorded(net, checkpointing(name)).timeline.parts
        if isinstance(part.cut, Ready)
    }
    assert seen.keys() == set(names)
    for parameter, layer in seen.items():
        if ".layers." in parameter:
            assert layer == int(parameter.split(".layers.")[1].split(".")[0]), parameter
    assert seen["lm_head.weight"] is seen["model.norm.weight"] is None


def test_one_recording_answers_for_many_settings() -> None:
    """ZeRO's sizes are laid over the record; stage 3 with the least prefetch and reuse holds least."""
    zero = replace(SINGLE, stage=3, world_size=2, max_live_parameters=10**9)
    recording = recorded(build("llama"), checkpointing("full"), stage=3)
    eager = recording.under(replace(zero, max_reuse_distance=10**9, prefetch_bucket_size=10**9))
    lazy = recording.under(zero)
    assert lazy.backward_peak.total_bytes < eager.backward_peak.total_bytes
    assert lazy.gathered_bytes > eager.gathered_bytes
    assert eager == recorded(build("llama"), checkpointing("full"), stage=3).under(
        replace(zero, max_reuse_distance=10**9, prefetch_bucket_size=10**9)
    )


def test_gradients_stay_below_stage_2_and_go_above() -> None:
    net = build("llama")
    recording = recorded(net, checkpointing("uniform"))  # its peak is late in backward
    bucket = replace(SINGLE, world_size=2, reduce_bucket_size=1000, param_persistence_threshold=10**6)
    found = {stage: recording.under(replace(bucket, stage=stage)).backward_peak for stage in (0, 1, 2)}
    assert not any(moment.by_category[Category.gathered] for moment in found.values())
    whole = 2 * sum(p.numel() for p in net.parameters())
    assert whole / 2 < found[0].by_category[Category.gradients] <= whole
    assert found[1].by_category[Category.buckets] == found[2].by_category[Category.buckets] == 2 * 1000
    largest = 2 * max(p.numel() for p in net.parameters())
    assert whole // 2 <= found[2].by_category[Category.gradients] <= whole // 2 + largest


def test_what_goes_to_the_host_is_not_on_the_gpu() -> None:
    stays, goes = checkpointing("full"), checkpointing("full", "checkpointing.offload.enabled=true", *OFFLOAD)
    before, after = (simulated(build("llama"), cfg) for cfg in (stays, goes))
    assert before.host_bytes == 0
    assert after.host_bytes >= sum(before.kept_bytes)
    assert sum(after.kept_bytes) < sum(before.kept_bytes)
    assert after.forward_peak.total_bytes < before.forward_peak.total_bytes


def test_a_kernels_workspace_counts_where_it_runs() -> None:
    net = build("llama").to("meta")
    token_loss = loss.TokenLoss(net, LossKind.full, verify=False)
    applied = put_on(net, checkpointing("uniform"), "meta", 0)
    recording = simulate.record(
        net,
        loss=token_loss,
        scope=applied.scope,
        around=applied.micro_batch(),
        stage_3=False,
        micro_batch_size=ROWS,
        seq_len=512,
    )
    assert recording.under(SINGLE).backward_peak.total_bytes > 0
    query = torch.empty(1, 4, 100, 80, dtype=torch.bfloat16, device="meta")
    key = torch.empty(1, 2, 100, 80, dtype=torch.bfloat16, device="meta")
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    fp32, grouped = 4 * 4 * 128 * (96 + 1), 2 * 4 * 100 * 80 * 2
    assert workspace_bytes(backward, (None, query, key)) == fp32 + grouped
    assert workspace_bytes(backward, (None, query, query)) == fp32


def test_gradients_of_one_tensor_are_summed_in_place() -> None:
    """Without a dispatch mode autograd needs memory for two of them, not three: a bare run's use counts say when."""
    weight = torch.nn.Parameter(torch.empty(64, 64, device="meta"))
    rows = torch.empty(2, 64, device="meta")
    scope = Scope()
    peaks = {}
    for workspaces in (False, True):
        timeline = Timeline(scope, weight_holder(weight), workspaces=workspaces)
        with timeline.gradients_taken(), timeline:
            value = (rows @ weight).sum() + (rows @ weight).sum()
            timeline.forward_done()
            value.backward()
        peaks[workspaces] = max(part.peak.total for part in timeline.parts) // weight.nbytes
    assert peaks == {False: 3, True: 2}


def weight_holder(weight: torch.nn.Parameter) -> torch.nn.Module:
    module = torch.nn.Module()
    module.weight = weight
    return module


def test_the_fused_loss_keeps_the_logits_and_a_number_per_row() -> None:
    logits = torch.randn(64, 1000).to(torch.bfloat16).requires_grad_()
    targets = torch.zeros(64, dtype=torch.long)
    with LiveBytes() as live:
        value = meta_kernels.cross_entropy(logits, targets)
        assert live.live_bytes <= 3 * 64 * 4  # beside the logits
        value.backward()
    assert logits.grad is not None
    assert logits.grad.dtype is torch.bfloat16
    assert logits.nbytes <= live.peak_bytes <= logits.nbytes + 6 * 64 * 4


def test_the_chunked_loss_lowers_the_peak_of_a_large_vocabulary() -> None:
    vocab_size, seq_len = 128_000, 1024  # four chunks
    full, chunked = (
        simulated(build("llama", vocab_size), checkpointing("full"), kind=kind, seq_len=seq_len)
        for kind in (LossKind.full, LossKind.chunked)
    )
    assert full.peak.by_category[Category.loss] >= 12 * ROWS * seq_len * vocab_size
    logits = 2 * loss.CHUNK_ELEMENTS
    assert 2 * logits < chunked.peak.by_category[Category.loss] < 3 * logits  # one chunk and its gradient


SEVENTY = """
import resource, sys
import torch
from remat.config import compose
from remat.model import loss, hf_model
from remat.activation_checkpointing import apply, policy
from remat.model import layers
from remat.activation_checkpointing.mechanisms.counters import Scope
from remat.activation_checkpointing.op_tracer import OpTracer
from remat.config.options import LossKind
from remat.planning.simulation import simulate
from remat.planning.simulation.types import ZeroSettings
cfg = compose.compose_run(["model=llama70b", "checkpointing=full"]).run
net = hf_model.skeleton(hf_model.shape_config(cfg.model), cfg.model).to(torch.bfloat16).train()
decided = policy.decide_layers(cfg.checkpointing, len(layers.decoder_layers(net)), zero_stage=3)
applied = apply.apply(net, decided, cfg.checkpointing, zero_stage=3, device=torch.device("meta"))
recording = simulate.record(
    net, loss=loss.TokenLoss(net, LossKind.full, verify=False), scope=applied.scope,
    around=applied.micro_batch(), stage_3=True, micro_batch_size=1, seq_len=4096,
)
found = recording.under(
    ZeroSettings(stage=3, world_size=8, reduce_bucket_size=5 * 10**8, overlap_comm=True,
        prefetch_bucket_size=5 * 10**7, param_persistence_threshold=10**5, max_live_parameters=10**9,
        max_reuse_distance=10**9)
)
assert len(found.kept_bytes) == 80, found.kept_bytes
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.exhaustive
def test_seventy_billion_parameters_need_no_memory() -> None:
    """A laptop plans them: the process stays below 3 GiB."""
    done = subprocess.run(
        [sys.executable, "-c", SEVENTY], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 3 * 2**30


DROPOUT: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("gpt_neox", {"hidden_dropout": 0.1}),
    "gpt_neox, attention": ("gpt_neox", {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "gpt2, attention": ("gpt2", {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}),
    "phi": ("phi", {"resid_pdrop": 0.1}),
    "phi, attention": ("phi", {"resid_pdrop": 0.1, "attention_dropout": 0.1}),
    "opt": ("opt", {"dropout": 0.1}),
    "opt, attention": ("opt", {"dropout": 0.1, "attention_dropout": 0.1}),
    "deepseek_v3": ("deepseek_v3", {}),
    "mixtral": ("mixtral", {"experts_implementation": "grouped_mm"}),
}


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("policy_name", ["none", "full"])
@pytest.mark.parametrize("case", list(DROPOUT))
def test_a_plan_for_a_cpu_is_what_a_cpu_keeps(case: str, policy_name: str, dtype: torch.dtype) -> None:
    """To the byte: dropout's masks, the kernel that attention with dropout runs, norms' statistics."""
    family, more = DROPOUT[case]
    net = small_models.build(family, vocab_size=512, **more).to(dtype)
    cfg = checkpointing(policy_name)
    watch = real(net, cfg)
    planned = recorded(net, cfg, on_gpu=False).under(SINGLE)
    assert planned.kept_bytes == [watch.kept_bytes.get(layer, 0) for layer in range(len(planned.kept_bytes))]
    assert planned.flops[Phase.forward] == watch.total_flops("forward")
    assert planned.peak.total_bytes == pytest.approx(watch.peak_bytes, rel=TOLERANCE)


def test_a_gpu_keeps_one_byte_per_element_of_dropout() -> None:
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": 160, "vocab_size": 512}
    kept = {}
    for p in (0.0, 0.1):
        net = small_models.build("phi", **sizes, resid_pdrop=p).to(torch.bfloat16)
        kept[p] = simulated(net, checkpointing("none")).kept_bytes
    masks = {more - less for more, less in zip(kept[0.1], kept[0.0], strict=True)}
    assert masks == {2 * ROWS * SEQ * HIDDEN * 1}, "of attention's and of the MLP's output"


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "gpt_oss", "diffllama"])
def test_latent_attention_and_experts_are_planned_in_every_precision(family: str, precision: str) -> None:
    words = [
        f"train.precision={precision}",
        "train.seq_len=32",
        "train.micro_batch_size=1",
        "checkpointing=none",
    ]
    cfg = compose.compose_run([*words, "model.attention=eager"] if family == "gpt_oss" else words).run
    fields = small_models.SIZES | small_models.ARCHITECTURES.get(
        family, {"head_dim": 16, "num_local_experts": 4}
    )
    cfg = replace(cfg, model=replace(cfg.model, architecture={"model_type": family, **fields}))
    planned = make_plan(cfg)
    assert planned.plan.peak_bytes > 0 and len(planned.simulation.kept_bytes) == fields["num_hidden_layers"]
    assert policies.count(cfg, "none").kept_bytes > 0


def test_experts_are_gathered_for_one_layer_at_a_time_in_a_plan_too() -> None:
    """A run under ZeRO-3 holds no views of gathered experts (tests/runs/test_saved_tensors_ranks.py)."""
    words = ["train.seq_len=32", "train.micro_batch_size=1", "checkpointing=none", "deepspeed.config=zero3"]
    sizes = ("max_reuse_distance", "prefetch_bucket_size", "param_persistence_threshold")
    words += [f"deepspeed.overrides.zero_optimization.stage3_{name}=0" for name in sizes]
    cfg, gathered = compose.compose_run(words).run, []
    for layers_ in (2, 6):
        fields = small_models.SIZES | {"head_dim": 16, "num_local_experts": 8, "num_hidden_layers": layers_}
        model = replace(cfg.model, architecture={"model_type": "mixtral", **fields})
        planned = make_plan(replace(cfg, model=model), world_size=8)
        gathered.append(planned.simulation.forward_peak.by_category[Category.gathered])
    assert gathered[1] == gathered[0]


def test_what_cannot_be_planned_is_one_sentence() -> None:
    cfg = compose.compose_run(["train.seq_len=32", "checkpointing=none"]).run
    for family, words in (
        ("xmod", "XmodForCausalLM cannot be planned: .* Input language unknown"),
        ("blt", "no one hidden_size"),
    ):
        fields = {} if family == "blt" else small_models.SIZES
        broken = replace(cfg, model=replace(cfg.model, architecture={"model_type": family, **fields}))
        with pytest.raises(ConfigError, match=words):
            make_plan(broken)


def plan_with(attention: str, *more: str) -> Any:
    words = ["model=tiny_llama", "hardware=1xh100-80", "train.precision=bf16", "train.seq_len=2048", *more]
    return make_plan(compose.compose_run([*words, f"model.attention={attention}"]).run)


def test_flash_attention_needs_no_mask_for_packed_documents() -> None:
    masked, flash = plan_with("sdpa"), plan_with("flash_attention_2")
    rows = masked.cfg.train.micro_batch_size
    mask = rows * 2048 * 2048  # one byte for each pair of tokens
    assert flash.plan.peak_bytes < masked.plan.peak_bytes - mask
    assert any("flash-attn package" in text for text in flash.plan.assumptions)
    whole = plan_with("sdpa", "data.packing=stream"), plan_with("flash_attention_2", "data.packing=stream")
    assert whole[0].plan.peak_bytes == whole[1].plan.peak_bytes  # torch's own flash kernel needs the same
    assert whole[0].simulation.flops == whole[1].simulation.flops


def test_flash_attention_takes_no_fp32() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.attention=flash_attention_2 with train\.precision=fp32: .*sdpa"
    ):
        plan_with("flash_attention_2", "train.precision=fp32")
