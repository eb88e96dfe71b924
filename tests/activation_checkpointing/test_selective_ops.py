"""Kept results change what is stored and re-run, never what is computed: also where torch's own contexts fail."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM

from remat.activation_checkpointing import apply, dry_run, policy, validation, verification
from remat.activation_checkpointing.apply import Applied
from remat.activation_checkpointing.mechanisms import operators, selective_ops
from remat.activation_checkpointing.mechanisms.counters import LayerCounters
from remat.activation_checkpointing.mechanisms.mechanism import Setting
from remat.activation_checkpointing.mechanisms.offload import HostOffload
from remat.activation_checkpointing.mechanisms.recompute import Recompute
from remat.activation_checkpointing.mechanisms.selective_ops import SelectiveCheckpoint
from remat.activation_checkpointing.op_tracer import OpTracer
from remat.config.options import (
    Attention,
    CheckpointingConfig,
    ConfigError,
    OffloadConfig,
    Policy,
    SelectiveOpsConfig,
)
from remat.model import meta_kernels
from remat.model.layers import decoder_layers
from tests.support import watched
from tests.support.pool import RankPool
from tests.support.small_models import ARCHITECTURES, build, gradients, same

aten = torch.ops.aten
STOCK = partial(
    create_selective_checkpoint_contexts,
    [
        aten.mm.default,
        aten.addmm.default,
        aten.topk.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    ],
)
CFG = CheckpointingConfig()
LISTS: dict[str, SelectiveOpsConfig] = {
    "attention": SelectiveOpsConfig(save=["attention"]),
    "matmul": SelectiveOpsConfig(save=["matmul", "attention"]),
    "every_other": SelectiveOpsConfig(save=["every_other_matmul", "attention"]),
    "linears": SelectiveOpsConfig(save=["attention"], save_linears=["q", "k", "v", "o"]),
    "operators": SelectiveOpsConfig(save=["aten::topk", "aten::mul", "aten::bmm", "aten::silu"]),
    "everything": SelectiveOpsConfig(save=["matmul", "aten::add", "aten::mul", "aten::tanh", "aten::mean"]),
}  # fmt: skip


class FakeOffload:
    """Moves every second tensor: the others are refused."""

    def __init__(self) -> None:
        self.moved: list[torch.Tensor | None] = []
        self.asked = 0

    def pack(self, tensor: torch.Tensor) -> int | None:
        self.asked += 1
        if self.asked % 2:
            return None
        self.moved.append(tensor.clone())
        return len(self.moved) - 1

    def unpack(self, handle: int) -> torch.Tensor:
        tensor, self.moved[handle] = self.moved[handle], None
        assert tensor is not None
        return tensor

    def edited(self, handle: int) -> bool:
        return False


def put_in_place(
    net: Any, cfg: SelectiveOpsConfig | None, *, zero_stage: int = 0, offload: OffloadConfig | None = None
) -> Applied:
    """`cfg` on every layer; None: nothing is recomputed."""
    whole = CheckpointingConfig(policy=Policy.none)
    if cfg is not None:
        whole = CheckpointingConfig(
            policy=Policy.selective_ops, selective_ops=cfg, offload=offload or OffloadConfig()
        )
    decisions = policy.decide_layers(whole, len(decoder_layers(net)), zero_stage=zero_stage)
    return apply.apply(net, decisions, whole, zero_stage=zero_stage)


def put_stock_in_place(net: Any, context_fn: Any = STOCK) -> None:
    """torch's own contexts, or others."""
    for layer in decoder_layers(net):
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = Recompute(CFG, context_fn=context_fn)


@pytest.mark.sample(one_in=5)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("save", list(LISTS))
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gpt2", "mixtral", "gemma", "phi", "deepseek_v3"])
def test_bit_equal_to_none(model_type: str, save: str, attention: str) -> None:
    expected = gradients(build(model_type, attention=attention))
    net = build(model_type, attention=attention)
    counts = put_in_place(net, LISTS[save]).counts
    assert same(gradients(net), expected)
    nothing = attention == "eager" and save == "attention"  # eager attention has no fused operation
    for layer in counts:
        assert layer.recomputations == 1
        assert (layer.kept_outputs >= layer.reused_outputs) and (layer.reused_outputs == 0) == nothing


def test_each_linear_is_reused_once() -> None:
    counts = put_in_place(net := build("llama"), LISTS["matmul"]).counts
    gradients(net)
    # q k v o gate up down and attention; backward needs no result of down, where early stop ends the recomputation
    assert [(c.kept_outputs, c.reused_outputs) for c in counts] == [(8, 7)] * 3
    net = build("llama")
    counts = put_in_place(net, SelectiveOpsConfig(save=[], save_linears=["q", "up", "o_proj"])).counts
    gradients(net)
    assert [(c.kept_outputs, c.reused_outputs) for c in counts] == [(3, 3)] * 3


def test_a_second_backward_recomputes_everything() -> None:
    def twice(net: Any) -> list[torch.Tensor]:
        ids = torch.arange(32).reshape(2, 16)
        loss = net(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward(retain_graph=True)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in net.parameters())]

    expected = twice(build("qwen2"))
    counts = put_in_place(net := build("qwen2"), LISTS["matmul"]).counts
    assert same(twice(net), expected)
    assert [(c.recomputations, c.repeated, c.reused_outputs) for c in counts] == [(1, 1, 7)] * 3


def test_two_forwards_before_their_backwards() -> None:
    def both(net: Any) -> list[torch.Tensor]:
        ids = torch.arange(32).reshape(2, 16)
        losses = [net(input_ids=i, labels=i, use_cache=False).loss for i in (ids, ids.flip(1))]
        for loss in losses:
            loss.backward()
        return [*(loss.detach() for loss in losses), *(p.grad.clone() for p in net.parameters())]

    expected = both(build("mixtral"))
    put_in_place(net := build("mixtral"), LISTS["matmul"])
    assert same(both(net), expected)


def test_offload_holds_what_it_takes() -> None:
    expected = gradients(build("qwen2"))
    net = build("qwen2")
    offload = FakeOffload()
    put_stock_in_place(net, None)
    for layer in decoder_layers(net):
        kept = SelectiveCheckpoint(layer, LISTS["matmul"], LayerCounters(), offload)
        layer._gradient_checkpointing_func = Recompute(CFG, context_fn=kept.contexts)
    assert same(gradients(net), expected)
    assert len(offload.moved) == offload.asked // 2 > 9
    # two per layer are never asked back: the last Linear's, behind early stop, and the sums attention keeps
    assert sum(tensor is not None for tensor in offload.moved) <= 6


@pytest.mark.parametrize("model_type", ["qwen2", "gpt2", "mixtral"])
def test_bit_equal_with_everything_kept_on_the_host(model_type: str) -> None:
    expected = gradients(build(model_type))
    net = build(model_type)
    applied = put_in_place(
        net, LISTS["linears"], offload=OffloadConfig(enabled=True, min_bytes=0, keep_last_layers=0)
    )
    with applied.micro_batch():
        assert same(gradients(net), expected)
    assert all(count.moved_bytes > 4 * 2 * 16 * 32 * 4 and count.reused_outputs for count in applied.counts)


def test_an_interrupted_forward_leaves_no_trace() -> None:
    expected = gradients(build("qwen2"))
    put_in_place(net := build("qwen2"), LISTS["matmul"])
    broken = net.model.layers[1].self_attn.k_proj
    forward = broken.forward
    broken.forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        gradients(net)
    broken.forward = forward
    assert same(gradients(net), expected)


def test_close_removes_the_hooks() -> None:
    net = build("llama")
    kept = SelectiveCheckpoint(net.model.layers[0], LISTS["matmul"], LayerCounters(), None)
    linear = net.model.layers[0].mlp.up_proj
    assert not linear._forward_hooks  # before the first forward
    kept.contexts()
    once = len(linear._forward_hooks)
    kept.contexts()
    assert len(linear._forward_hooks) == len(linear._forward_pre_hooks) == once > 0
    kept.close()
    assert not linear._forward_hooks and not linear._forward_pre_hooks


def test_linears_that_are_replaced_after_the_policy_is_in_place_are_kept() -> None:
    class LinearLayer(torch.nn.Module):
        """As AutoTP's: it takes the weights of the Linear whose place it takes."""

        def __init__(self, linear: Any) -> None:
            super().__init__()
            self.weight, self.bias = linear.weight, linear.bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.matmul(x, self.weight.transpose(-1, -2))
            return y if self.bias is None else y + self.bias

    def replace_linears(net: Any) -> Any:
        for layer in decoder_layers(net):
            for path, module in list(layer.named_modules()):
                if isinstance(module, torch.nn.Linear):
                    layer.set_submodule(path, LinearLayer(module))
        return net

    expected = gradients(replace_linears(build("qwen2")))
    applied = put_in_place(
        net := build("qwen2"), SelectiveOpsConfig(save=["attention"], save_linears=["q", "gate"])
    )
    assert same(gradients(replace_linears(net)), expected)
    assert [c.reused_outputs for c in applied.counts] == [3] * 3
    applied.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


KEPT_LINEARS = CheckpointingConfig(
    policy=Policy.selective_ops, selective_ops=SelectiveOpsConfig(save_linears=["all_but_down"])
)


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_something_is_kept_of_every_named_linear(model_type: str) -> None:
    only = SelectiveOpsConfig(save=[], save_linears=["all_but_down"])  # some have no fused attention on a CPU
    cfg = CheckpointingConfig(policy=Policy.selective_ops, selective_ops=only)
    result = watched.run(build(model_type), cfg)
    assert all(min(count.kept_linears.values()) > 0 for count in result.applied.counts)
    assert verification.unmet_expectations(result.applied, result.watch, cfg) == []


def test_a_named_linear_of_which_nothing_is_kept_is_a_broken_promise() -> None:
    net = build("llama")
    net.model.layers[1].self_attn.q_proj.register_forward_hook(lambda module, args, out: out.mul_(1.0))
    result = watched.run(net, KEPT_LINEARS)
    (text,) = verification.unmet_expectations(result.applied, result.watch, KEPT_LINEARS)
    assert (
        "save_linears=['all_but_down']: nothing was kept of self_attn.q_proj" in text and "(layers 1)" in text
    )
    result.applied.counts[1].kept_linears.clear()
    (text,) = verification.unmet_expectations(result.applied, result.watch, KEPT_LINEARS)
    assert "none of them ran (layers 1)" in text


@pytest.mark.parametrize("by_name", [False, True])
def test_bit_equal_under_lora_with_dropout(by_name: bool) -> None:
    def lora() -> Any:
        torch.manual_seed(4)
        targets = ["q_proj", "up_proj", "down_proj"]
        net = get_peft_model(
            build("qwen2"), LoraConfig(r=2, target_modules=targets, lora_dropout=0.2, init_lora_weights=False)
        )
        return net.train()

    expected = gradients(lora())
    net = lora()
    cfg = SelectiveOpsConfig(save=["attention"], save_linears=["q", "up"]) if by_name else LISTS["matmul"]
    counts = put_in_place(net, cfg).counts
    assert same(gradients(net), expected)
    assert len(expected) == 1 + 2 * 3 * 3  # the loss, two matrices per target and layer
    # 7 Linears, 3 adapters of two and attention; early stop ends before the last adapter's second matrix
    assert all(count.reused_outputs == (3 if by_name else 13) for count in counts)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_bit_equal_in_bf16_with_autocast(attention: str) -> None:
    def run(cfg: SelectiveOpsConfig | None) -> list[torch.Tensor]:
        put_in_place(net := build("phi", attention=attention), cfg)
        with torch.autocast("cpu", torch.bfloat16):
            return gradients(net)

    expected = run(None)
    assert same(run(LISTS["matmul"]), expected)
    assert same(run(LISTS["linears"]), expected)


# What is written to after it was made.


def region(
    fn: Any, save: list[str], module: torch.nn.Module | None = None, linears: list[str] | None = None
) -> Any:
    """Loss and input gradient of `fn` recomputed with kept results, and without; the counts."""
    found = []
    counts = LayerCounters()
    for keep in (False, True):
        torch.manual_seed(1)
        x = torch.randn(4, 8, requires_grad=True)
        cfg = SelectiveOpsConfig(save=save, save_linears=linears or [])
        results = SelectiveCheckpoint(module or torch.nn.Identity(), cfg, counts, None) if keep else None
        out = Recompute(CFG, context_fn=results.contexts if results else None)(fn, x)
        out.sum().backward()
        found.append((out.detach(), x.grad))
    (a, da), (b, db) = found
    assert torch.equal(a, b) and torch.equal(da, db)
    return counts


def test_a_result_written_to_later_is_dropped() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        values, _ = torch.topk(x.exp(), 3)
        values /= values.sum(-1, keepdim=True)
        return (values.sin() * 2).cos()

    counts = region(fn, ["aten::topk"])
    assert (counts.kept_outputs, counts.reused_outputs) == (0, 0)


@pytest.mark.parametrize(
    "view", [lambda y: y, lambda y: y[1:], lambda y: y.reshape(2, 16), lambda y: aten._unsafe_view(y, [2, 16])]
)
def test_so_is_one_written_to_through_a_view(view: Any) -> None:
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() @ weight
        z = y.clone()
        view(z).add_(1.0)
        return (z.sin() * z).cos()

    counts = region(fn, ["aten::clone", "aten::mm"])
    assert (counts.kept_outputs, counts.reused_outputs) == (1, 1)


@pytest.mark.parametrize("moved", [False, True])
def test_a_result_that_the_model_edits_after_the_layer_is_not_used(moved: bool) -> None:
    """Neither is its copy in host memory: on a GPU it may have been made after the edit."""
    counts = LayerCounters()
    host = HostOffload(OffloadConfig(min_bytes=0), torch.device("cpu"), 1) if moved else None
    x = torch.randn(4, 8, requires_grad=True)
    results = SelectiveCheckpoint(
        torch.nn.Identity(), SelectiveOpsConfig(save=["aten::mul"]), counts, host and host.layer(0, counts)
    )
    out = Recompute(CFG, context_fn=results.contexts)(lambda t: t.sin() * t.cos(), x)
    with torch.no_grad():
        out.add_(1.0)
    out.sum().backward()
    assert (counts.kept_outputs, counts.reused_outputs) == (1, 0)
    assert counts.moved_bytes == (out.nbytes if moved else 0)
    y = x.detach().requires_grad_()
    (y.sin() * y.cos()).sum().backward()
    assert torch.equal(x.grad, y.grad)


class AddsBiasInPlace(torch.nn.Linear):
    """As DeepSpeed's Linear under ZeRO-3; `peek` looks at the product before the bias is in it."""

    peek = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = aten._unsafe_view(torch.mm(x, self.weight.t()), [2, 2, 8])
        seen = out.sum() if self.peek else None
        out += self.bias
        return out if seen is None else out + seen


@pytest.mark.parametrize(("peek", "later", "reused"), [(False, False, 1), (True, False, 0), (False, True, 0)])
@pytest.mark.parametrize("by_name", [True, False])
def test_a_bias_added_inside_the_linear_is_part_of_the_result(
    peek: bool, later: bool, reused: int, by_name: bool
) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Sequential(AddsBiasInPlace(8, 8))
    layer[0].peek = peek

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = layer(x.sin())
        if later:
            y.add_(1.0)
        return (y.sin() * y).cos()

    counts = region(fn, [] if by_name else ["matmul"], layer, ["0"] if by_name else [])
    assert counts.reused_outputs == reused


def test_a_linear_called_twice_is_told_apart() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8))
    first: list[torch.Tensor] = []

    def reaches_back(module: Any, args: Any) -> None:
        if len(first) % 2:
            first[-1].add_(1.0)  # inside the second call, to the result of the first

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = layer(x.sin())
        first.append(y)
        used = y.exp()
        z = layer(x.cos())
        first.append(z)
        return (used.sin() * z).cos()

    def run(save: bool) -> list[torch.Tensor]:
        first.clear()
        x = torch.ones(4, 8, requires_grad=True)
        results = SelectiveCheckpoint(layer, SelectiveOpsConfig(save=[], save_linears=["0"]), counts, None)
        handle = layer[0].register_forward_pre_hook(reaches_back)  # after ours: the Linear runs already
        out = Recompute(CFG, context_fn=results.contexts if save else None)(fn, x)
        out.sum().backward()
        handle.remove()
        results.close()
        return [out.detach(), x.grad]

    counts = LayerCounters()
    assert same(run(False), run(True))
    assert (counts.kept_outputs, counts.reused_outputs) == (1, 1)


# Random numbers and operators that are not torch's.


@torch.library.custom_op("remat_test_flash_attn::_flash_attn_forward", mutates_args=())
def noisy_flash(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with dropout, in form: several results, of which one is not the output, and random numbers."""
    mask = torch.rand(x.shape) > 0.5
    return x * mask, mask.to(x.dtype)


noisy_flash.register_autograd(
    lambda ctx, grad, _: grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


def test_flash_attention_is_known_by_name_and_dropout_after_it_does_not_change() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = noisy_flash(x.sin())[0]
        return torch.nn.functional.dropout(y * 2, 0.3).sin()

    counts = region(fn, ["attention"])
    assert (counts.kept_outputs, counts.reused_outputs) == (1, 1)


NAMES = {
    "aten::_scaled_dot_product_flash_attention": "attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "aten::_scaled_dot_product_efficient_attention": "attention",
    "aten::_scaled_dot_product_cudnn_attention": "attention",
    "aten::_scaled_dot_product_fused_attention_overrideable": "attention",
    "flash_attn::_flash_attn_forward": "attention",
    "flash_attn::_flash_attn_varlen_forward": "attention",
    "flash_attn_3::fwd": "attention",
    "_flash_attn2_588b404::varlen_fwd": "attention",
    "flex_attention": "attention",
    "_c10d_functional::all_reduce": "communication",
    "_c10d_functional::reduce_scatter_tensor": "communication",
    "_c10d_functional::all_to_all_single": "communication",
    "_c10d_functional_autograd::all_to_all_single": "communication",
    "aten::_scaled_dot_product_flash_attention_backward": None,
    "flash_attn::_flash_attn_backward": None,
    "flash_attn_3::bwd": None,
    "_c10d_functional::wait_tensor": None,
    "_c10d_functional::all_reduce_": None,
    "c10d::_allgather_base_": None,
    "c10d::allgather_into_tensor_coalesced_": None,
}


@pytest.mark.parametrize("name", list(NAMES))
def test_groups(name: str) -> None:
    hits = [group for group in ("attention", "communication") if operators.GROUPS[group](name)]
    assert hits == ([NAMES[name]] if NAMES[name] else [])


def test_flex_attention_is_a_higher_order_operator_with_a_name() -> None:
    described = operators.describe(torch.ops.higher_order.flex_attention)
    assert described.name == "flex_attention" and described.writes == ()


@pytest.mark.parametrize("attention", [Attention.eager, Attention.flex_attention])
def test_attention_that_is_no_operation_is_told_before_the_run(attention: Attention) -> None:
    def problems(save: list[str], kind: Attention) -> list[str]:
        cfg = CheckpointingConfig(policy=Policy.selective_ops, selective_ops=SelectiveOpsConfig(save=save))
        setting = Setting(
            zero_stage=0,
            tensor_parallel_size=1,
            has_gpu=True,
            attention=kind,
            lora_dropout=0.0,
            fields={},
            activation_elements=1024,
            element_bytes=2,
        )
        return validation.problems(cfg, decoder_layers(build("llama")), setting)

    (text,) = problems(["attention"], attention)
    assert f"model.attention={attention}" in text
    assert problems(["matmul"], attention) == problems(["attention"], Attention.sdpa) == []


@pytest.mark.parametrize(
    ("model", "more", "fused"),
    [("llama", {}, True), ("gpt2", {"attn_pdrop": 0.0}, True), ("gpt2", {"attn_pdrop": 0.1}, False)],
)
def test_attention_that_no_layer_runs_fused_on_a_cpu_is_told_before_the_run(
    model: str, more: dict[str, float], fused: bool
) -> None:
    """What is told is what happens: the proof of a real step says the same."""
    with torch.device("meta"):
        skeleton = build(model, **more)
    cfg = CheckpointingConfig(policy=Policy.selective_ops)
    choose = partial(
        dry_run.choose,
        skeleton,
        cfg,
        [len(decoder_layers(skeleton))],
        zero_stage=0,
        around=lambda: meta_kernels.as_in_a_run(0, on_gpu=False),
    )
    assert choose(has_gpu=True)[1] == ""  # which kernels a GPU has is known there
    result = watched.run(build(model, **more), cfg)
    unmet = verification.unmet_expectations(result.applied, result.watch, cfg)
    if fused:
        assert choose(has_gpu=False)[1] == "" and unmet == []
    else:
        assert "the operator never ran in a forward" in unmet[0]
        with pytest.raises(ConfigError, match="no layer of this model runs a fused attention operation"):
            choose(has_gpu=False)


@pytest.mark.parametrize(
    ("save", "text"),
    [
        (["atention"], "there is no operator atention; did you mean attention"),
        (["aten::tokp"], "did you mean aten::topk"),
        (["topk"], "did you mean aten::topk"),
        (["aten::view"], "aten::view returns a view"),
        (["aten::add_"], "aten::add_ returns a view of its input or writes to it"),
        (["aten::scaled_dot_product_attention"], "is made of other operators"),
        (["matmul", "every_other_matmul"], "name one of the two"),
        ([], "use checkpointing=full"),
    ],
)
def test_lists_that_cannot_work(save: list[str], text: str) -> None:
    found = selective_ops.problems(SelectiveOpsConfig(save=save))
    assert len(found) == 1 and text in found[0] and found[0].startswith("checkpointing.selective_ops.save")
    with pytest.raises(ConfigError, match=r"checkpointing\.selective_ops"):
        SelectiveCheckpoint(torch.nn.Identity(), SelectiveOpsConfig(save=save), LayerCounters(), None)


def test_an_operator_of_a_library_that_is_not_loaded_is_allowed() -> None:
    assert (
        selective_ops.problems(SelectiveOpsConfig(save=["my_kernels::attention", "aten::bmm", "matmul"])) == []
    )


# Bytes and FLOPs, exactly: hidden 256, feed-forward 704, 8 heads of which 4 for keys and values, 2 x 128 tokens.

HIDDEN = 2 * 128 * 256 * 4
KEPT = {
    "none": (None, 20.04, 0.0),
    "attention": (SelectiveOpsConfig(save=["attention"]), 2.03, None),
    "matmul": (SelectiveOpsConfig(save=["matmul"]), 10.50, None),
    "matmul and attention": (SelectiveOpsConfig(save=["matmul", "attention"]), 11.53, 0.0),
    "every other matmul": (SelectiveOpsConfig(save=["every_other_matmul", "attention"]), 7.28, 37.8),
    "q to up": (
        SelectiveOpsConfig(save=["attention"], save_linears=["q", "k", "v", "o", "gate", "up"]),
        10.53,
        0.0,
    ),
    "all but o": (
        SelectiveOpsConfig(save=["attention"], save_linears=["q", "k", "v", "gate", "up"]),
        9.53,
        8.9,
    ),
}


@pytest.mark.parametrize("name", list(KEPT))
def test_kept_bytes_and_recomputed_flops(name: str) -> None:
    cfg, hidden_states, percent = KEPT[name]
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 4}
    net = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **(sizes | {"vocab_size": 64, "num_hidden_layers": 3}))
    ).train()
    scope = put_in_place(net, cfg).scope
    ids = torch.randint(0, 64, (2, 128))
    with OpTracer(scope, torch.device("cpu"), weights=net.parameters) as watch:
        loss = net(input_ids=ids, labels=ids, use_cache=False).loss
        watch.forward_done()
        loss.backward()
    assert watch.kept_bytes[1] / HIDDEN == pytest.approx(hidden_states, abs=0.006)
    again, forward = watch.flops["recompute"][1], watch.flops["forward"][1]
    matmuls = 2 * 2 * 128 * (256 * 256 * 2 + 2 * 256 * 128 + 3 * 256 * 704)
    attention = forward - matmuls
    assert attention > 0
    if percent is not None:
        assert 100 * again / matmuls == pytest.approx(percent, abs=0.05)
    elif name == "matmul":
        assert again == attention
    else:
        assert 100 * again / matmuls == pytest.approx(75.6, abs=0.05)


# Where torch's own contexts fail.


def test_stock_contexts_refuse_what_mixtral_does_to_topk() -> None:
    put_stock_in_place(net := build("mixtral"))
    with pytest.raises(RuntimeError, match="mutated"):
        gradients(net)
    expected = gradients(build("mixtral"))
    net = build("mixtral")
    counts = put_in_place(net, SelectiveOpsConfig(save=["aten::topk", "matmul", "attention"])).counts
    assert same(gradients(net), expected)
    assert all(c.reused_outputs == 8 for c in counts)  # 4 of attention, itself, the router, two of the experts


def steps(model_type: str, cfg: SelectiveOpsConfig | None, *, stock: bool = False) -> dict[str, Any]:
    """Losses and gradient norms of a ZeRO engine on different data per rank; or how it failed."""
    import deepspeed

    net = build(model_type)
    applied = put_in_place(net, cfg, zero_stage=3)
    if stock:
        put_stock_in_place(net)
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 20_000,
        "stage3_max_reuse_distance": 20_000,
    }
    ds = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=1e-2),
        config=ds,
        dist_init_required=False,
    )
    torch.manual_seed(7)
    draw = torch.Generator().manual_seed(torch.distributed.get_rank())
    found: list[float] = []
    error = ""
    try:
        for _ in range(4):
            ids = torch.randint(0, 64, (2, 16), generator=draw)
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            found += [loss.item(), float(engine.get_global_grad_norm())]
    except (RuntimeError, AssertionError) as raised:
        error = str(raised)
    finally:
        engine.destroy()
        applied.remove()
    reused = [count.reused_outputs for count in applied.counts]
    return {"values": found, "error": error, "reused": reused}


# Layer-wise results that are reused in 4 steps: with all Linears, but the last one of the layer where early stop ends.
UNDER_ZERO3 = {
    "qwen2": (SelectiveOpsConfig(save=["attention"], save_linears=["q", "k", "v", "o", "gate", "up"]), 7),
    "phi": (SelectiveOpsConfig(save=["attention"], save_linears=["q", "k", "v", "o", "up", "down"]), 7),
    "mixtral": (SelectiveOpsConfig(save=["attention", "aten::topk"], save_linears=["q", "k", "v", "o"]), 5),
}


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("model_type", list(UNDER_ZERO3))
def test_equal_to_none_under_zero3_where_stock_contexts_are_not(two_ranks: RankPool, model_type: str) -> None:
    expected = two_ranks.run(steps, model_type=model_type, cfg=None)
    assert len(expected[0]["values"]) == 8 and not expected[0]["error"]
    assert expected[0]["values"] != expected[1]["values"]
    linears, reused = UNDER_ZERO3[model_type]
    for cfg in (linears, LISTS["matmul"], LISTS["every_other"]):
        found = two_ranks.run(steps, model_type=model_type, cfg=cfg)
        assert [f["error"] for f in found] == ["", ""]
        assert [f["values"] for f in found] == [e["values"] for e in expected]
        if cfg is linears:
            assert found[0]["reused"] == [reused * 4] * 3
    stock = two_ranks.run(steps, model_type=model_type, cfg=None, stock=True)
    assert [s["values"] for s in stock] != [e["values"] for e in expected]
