"""The proof of the first step: every part of a policy is held to its promise, and what keeps it is not accused."""

from __future__ import annotations

import gc
import inspect
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from remat.activation_checkpointing import apply, verification
from remat.activation_checkpointing.mechanisms.tables.table import Table
from remat.activation_checkpointing.policy import decide_layers
from remat.config.options import CheckpointingConfig, OffloadConfig, Policy, SelectiveOpsConfig
from tests.support import small_models, watched

SMALL = small_models.SIZES


def model(model_type: str, *, attention: str = "sdpa", **more: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(SMALL | more))
    attention = "eager" if model_type in ("mamba2", "xglm") else attention
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()


def problems(net: Any, cfg: CheckpointingConfig, ids: torch.Tensor | None = None) -> list[str]:
    result = watched.run(net, cfg, ids)
    return verification.unmet_expectations(result.applied, result.watch, cfg)


def proven_equal(net: Any, cfg: CheckpointingConfig, ids: torch.Tensor | None = None) -> watched.Watched:
    kept, result = watched.run(net, watched.NONE, ids), watched.run(net, cfg, ids)
    assert watched.differences(result, kept) == []
    assert verification.unmet_expectations(result.applied, result.watch, cfg) == []
    return result


@pytest.mark.parametrize("policy", [Policy.full, Policy.budget])
def test_a_narrower_micro_batch_later_in_the_first_step_breaks_no_promise(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without packing the first micro-batch is the widest; what it keeps is held to its own results and tables."""
    monkeypatch.setattr(verification, "SLACK_BYTES", 0)
    net, cfg = model("llama"), CheckpointingConfig(policy=policy)
    table = Table(frozenset({"mlp: mul", "mlp.up_proj: mm"})) if policy is Policy.budget else None
    applied = apply.apply(net, [replace(decision, table=table) for decision in decide_layers(cfg, 3)], cfg)
    watch = applied.watch(torch.device("cpu"))
    for width in (16, 8):
        ids = torch.zeros(2, width, dtype=torch.long)
        with applied.micro_batch(), watch if width == 16 else nullcontext():
            loss = net(input_ids=ids, labels=ids, use_cache=False).loss
            if width == 16:
                watch.forward_done()
            loss.backward()
    assert verification.unmet_expectations(applied, watch, cfg) == []
    rows = verification.rows(applied, watch)
    assert [row["output_bytes"] for row in rows] == [2 * 16 * SMALL["hidden_size"] * 4] * 3
    assert all((row["table_bytes"] > 0) == (policy is Policy.budget) for row in rows)


MAMBA2 = {"num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 8, "expand": 2}
XGLM = {"d_model": 32, "num_layers": 3, "attention_heads": 2, "ffn_dim": 64, "activation_dropout": 0.1}


@pytest.mark.parametrize(("model_type", "more"), [("mamba2", MAMBA2), ("xglm", XGLM)])
def test_a_role_whose_outputs_are_never_discarded_is_named(model_type: str, more: dict[str, Any]) -> None:
    """Mamba-2 never calls its activation module; behind XGLM's there is a dropout, whose result is what is kept."""
    net = model(model_type, **more)
    (text,) = problems(net, CheckpointingConfig(policy=Policy.discard_output))
    assert text.startswith("checkpointing.discard_modules: activation did not take effect in layers 0-2")
    assert problems(net, CheckpointingConfig(policy=Policy.discard_output, discard_modules=["norm"])) == []


def ops(*save: str, linears: tuple[str, ...] = ()) -> CheckpointingConfig:
    selective = SelectiveOpsConfig(save=list(save), save_linears=list(linears))
    return CheckpointingConfig(policy=Policy.selective_ops, selective_ops=selective)


@pytest.mark.parametrize("other", ["attention", "matmul"])
def test_a_listed_operator_that_never_ran_is_named(other: str) -> None:
    net = model("llama")
    (text,) = problems(net, ops(other, "aten::bmm"))
    assert text.startswith("checkpointing.selective_ops.save: aten::bmm did not take effect in layers 0-2")
    assert problems(net, ops(other, "communication")) == []  # only ranks that share layers have any


def test_attention_that_never_ran_is_named_though_linears_were_kept() -> None:
    net = model("mamba2", **MAMBA2)
    (text,) = problems(net, ops("attention", linears=("in_proj",)))
    assert "attention did not take effect" in text
    assert problems(net, ops("matmul", linears=("in_proj",))) == []


def test_a_role_of_modules_that_never_run_is_named() -> None:
    net = model("mamba2", **MAMBA2)
    cfg = CheckpointingConfig(policy=Policy.selective_modules, recompute_modules=["norm", "activation"])
    (text,) = problems(net, cfg)
    assert text.startswith("checkpointing.recompute_modules: activation did not take effect")
    inside = CheckpointingConfig(policy=Policy.selective_modules, recompute_modules=["mlp", "activation"])
    assert problems(model("llama"), inside) == []  # with the mlp around it


def test_a_range_of_layers_where_nothing_happens_is_named() -> None:
    """The other layers do what their policy says; the range's own does nothing in its one layer."""
    net = model("llama")
    net.model.embed_tokens.requires_grad_(False)
    net.model.layers[0].requires_grad_(False)
    for policy in (Policy.selective_modules, Policy.full, Policy.discard_output):
        cfg = CheckpointingConfig(policy=policy, layers={0: policy})
        found = problems(net, cfg)
        assert found and all(
            "layers 0" in text and "1" not in text.partition("layers 0")[2][:2] for text in found
        )
        assert problems(net, CheckpointingConfig(policy=policy)) == []


@pytest.mark.parametrize("policy", [Policy.full, Policy.none, Policy.sqrt, Policy.selective_modules])
def test_offload_of_what_something_else_holds_is_found(policy: Policy) -> None:
    net = model("llama", num_hidden_layers=4)
    offload = OffloadConfig(enabled=True, min_bytes=0, keep_last_layers=1)
    cfg = CheckpointingConfig(policy=policy, offload=offload)
    assert problems(net, cfg) == []
    held: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda m, args: held.append(args[0])) for layer in net.model.layers
    ]
    (text,) = problems(net, cfg)
    assert text.startswith("checkpointing.offload frees nothing in layers ")
    for hook in hooks:
        hook.remove()
    net.config.output_hidden_states = True
    assert (
        problems(net, cfg) == []
    )  # the hidden states go with the outputs, of which only the loss is kept here


def test_tensors_too_small_to_move_break_no_promise_in_a_micro_batch_that_is_not_full() -> None:
    """A full one has larger ones; but what is large enough must move."""
    net = model("llama", num_hidden_layers=4)
    for min_bytes, full, found in ((1 << 30, True, 1), (1 << 30, False, 0), (0, False, 0)):
        cfg = CheckpointingConfig(offload=OffloadConfig(enabled=True, min_bytes=min_bytes))
        result = watched.run(net, cfg)
        texts = verification.unmet_expectations(result.applied, result.watch, cfg, full=full)
        assert len(texts) == found and all("min_bytes=1073741824 was moved" in text for text in texts)
        for counts in result.applied.counts:
            counts.moved_bytes = 0
        large_enough = replace(cfg, offload=replace(cfg.offload, min_bytes=8))
        (text,) = verification.unmet_expectations(result.applied, result.watch, large_enough, full=full)
        assert "min_bytes=8 was moved" in text


def test_offload_of_the_only_hidden_state_that_something_holds_is_found() -> None:
    """What the first layer is given may be needed before it; but where nothing else was moved, nothing was freed."""
    cfg = CheckpointingConfig(offload=OffloadConfig(enabled=True, min_bytes=0))
    for depth, found in ((2, 1), (3, 0)):
        net = model("llama", num_hidden_layers=depth)
        assert problems(net, cfg) == []
        held: list[torch.Tensor] = []
        net.model.layers[0].register_forward_pre_hook(lambda m, args, held=held: held.append(args[0]))
        assert len(problems(net, cfg)) == found


def test_a_first_hidden_state_that_the_model_uses_elsewhere_is_no_broken_promise() -> None:
    """Gemma-4 projects its embeddings for every layer."""
    cfg = CheckpointingConfig(offload=OffloadConfig(enabled=True, min_bytes=0))
    result = proven_equal(model("gemma4_text", **GEMMA4), cfg)
    assert result.watch.moved_input_bytes[0] > 0


def test_offload_with_hidden_states_in_the_outputs_is_found() -> None:
    net = model("llama", num_hidden_layers=4)
    outputs: list[Any] = []
    net.register_forward_hook(lambda m, args, output: outputs.append(output))
    cfg = CheckpointingConfig(offload=OffloadConfig(enabled=True, min_bytes=0))
    assert problems(net, cfg) == []
    net.config.output_hidden_states = True
    (text,) = problems(net, cfg)
    assert "output_hidden_states" in text


@pytest.mark.parametrize("role", ["core_attention", "attention"])
def test_attention_weights_that_something_keeps_are_found(role: str) -> None:
    net = model("llama", attention="eager")
    cfg = CheckpointingConfig(policy=Policy.selective_modules, recompute_modules=[role])
    assert problems(net, cfg) == []  # eager attention returns weights, and nobody keeps them
    outputs: list[Any] = []
    net.register_forward_hook(lambda m, args, output: outputs.append(output))
    net.config.output_attentions = True
    (text,) = problems(net, cfg)
    assert text.startswith("checkpointing.recompute_modules is not in effect in layers 0-2")


def test_what_something_takes_from_inside_a_recomputed_module_is_found() -> None:
    net = model("llama")
    cfg = CheckpointingConfig(policy=Policy.selective_modules, recompute_modules=["mlp"])
    assert problems(net, cfg) == []
    held: list[torch.Tensor] = []
    net.model.layers[1].mlp.up_proj.register_forward_hook(lambda m, args, output: held.append(output))
    (text,) = problems(net, cfg)
    assert "in layers 1:" in text


GEMMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 128,
    "global_head_dim": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "num_global_key_value_heads": 2,
}


def test_keys_and_values_that_later_layers_share_are_theirs() -> None:
    """More than the slack: 2 x 300 tokens x 2 heads x 128 x 4 bytes, keys and values."""
    net = model("gemma4_text", **GEMMA4)
    result = proven_equal(net, CheckpointingConfig(), torch.zeros(2, 300, dtype=torch.long))
    shared = [result.watch.shared_bytes.get(index, 0) for index in range(4)]
    assert shared[:2] == [2 * 300 * 2 * 128 * 4 * 2] * 2 and shared[2:] == [0, 0]
    assert shared[0] > verification.SLACK_BYTES
    held: list[torch.Tensor] = []  # and what nobody shares is still found
    net.model.layers[1].mlp.register_forward_hook(lambda m, a, out: held.append(out.detach().repeat(16, 1, 1)))
    (text,) = problems(net, CheckpointingConfig(), torch.zeros(2, 300, dtype=torch.long))
    assert "layer 1 keeps" in text


OPT = {"ffn_dim": 64, "word_embed_proj_dim": 32, "num_hidden_layers": 4}


@pytest.mark.parametrize(
    "cfg",
    [
        CheckpointingConfig(),
        CheckpointingConfig(offload=OffloadConfig(enabled=True, min_bytes=0)),
        CheckpointingConfig(policy=Policy.discard_output, discard_modules=["norm"]),
        CheckpointingConfig(policy=Policy.selective_modules, recompute_modules=["attention"]),
    ],
    ids=lambda cfg: f"{cfg.policy} {cfg.offload.enabled}",
)
def test_a_layer_that_is_skipped_in_the_first_step_breaks_no_promise(cfg: CheckpointingConfig) -> None:
    result = proven_equal(model("opt", layerdrop=0.4, **OPT), cfg)
    idle = [index for index, counts in enumerate(result.applied.counts) if counts.forwards == 0]
    assert 0 < len(idle) < 4
    assert f"layers {idle[0]}" in verification.line(result.applied, result.watch)


def test_a_layer_that_runs_around_its_hook_is_found_though_others_run() -> None:
    net = model("llama")
    inner = net.model.layers[1]

    net.model.layers[1].forward = lambda hidden, **more: hidden + inner.mlp(hidden)
    (text,) = problems(net, CheckpointingConfig())
    assert "layers 1 never ran through their hook" in text


@pytest.mark.parametrize("policy", [Policy.full, Policy.sqrt])
def test_a_layer_that_keeps_nothing_has_nothing_to_recompute(policy: Policy) -> None:
    net = model("llama", num_hidden_layers=4)
    kind = type(net.model.layers[0])

    class Idle(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: torch.Tensor, **more: Any) -> torch.Tensor:
            return hidden_states

    net.model.layers[1].__class__ = Idle
    result = proven_equal(net, CheckpointingConfig(policy=policy))
    assert [counts.empty for counts in result.applied.counts] == [0, 1, 0, 0]


@pytest.mark.parametrize(
    "cfg", [CheckpointingConfig(), CheckpointingConfig(reentrant=True)], ids=["full", "reentrant"]
)
def test_a_layer_with_a_checkpoint_of_its_own(cfg: CheckpointingConfig) -> None:
    net = model("llama")
    mlp = net.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda hidden: checkpoint(forward, hidden, use_reentrant=False)
    result = proven_equal(net, cfg)
    assert [counts.recomputations for counts in result.applied.counts] == [1, 1, 1]


@pytest.mark.parametrize("policy", [Policy.full, Policy.sqrt, Policy.selective_modules])
def test_a_result_that_no_gradient_comes_to_need_not_run_again(policy: Policy) -> None:
    """Everything below a layer that detaches its input; a module whose result is dropped."""
    net = model("llama", num_hidden_layers=4)
    kind = type(net.model.layers[0])
    plain = inspect.unwrap(kind.forward)

    class Layer(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: torch.Tensor, **more: Any) -> torch.Tensor:
            detached = hidden_states.detach() if self is net.model.layers[2] else hidden_states
            output: torch.Tensor = plain(self, detached, **more)
            self.mlp(output)
            return output

    for layer in net.model.layers:
        layer.__class__ = Layer
    proven_equal(net, CheckpointingConfig(policy=policy))


def test_offload_of_recomputed_modules_leaves_nothing_on_the_device() -> None:
    roles = ["attention", "mlp", "norm"]
    offload = watched.offload_all()
    cfg = CheckpointingConfig(policy=Policy.selective_modules, recompute_modules=roles, offload=offload)
    result = proven_equal(model("llama"), cfg)
    assert result.watch.moved_hidden_bytes == {}


def test_a_reference_cycle_of_the_model_is_not_taken_for_a_holder() -> None:
    net = model("llama")

    def cycle(module: Any, args: Any, output: torch.Tensor) -> None:
        knot: list[Any] = [output]
        knot.append(knot)

    for layer in net.model.layers:
        layer.register_forward_hook(cycle)
    gc.disable()
    try:
        proven_equal(net, CheckpointingConfig(offload=watched.offload_all()))
    finally:
        gc.enable()


def test_a_layer_whose_own_hooks_keep_everything_is_found() -> None:
    net = model("llama")
    kind = type(net.model.layers[0])
    plain = inspect.unwrap(kind.forward)

    class Layer(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: torch.Tensor, **more: Any) -> Any:
            with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                return plain(self, hidden_states, **more)

    for layer in net.model.layers:
        layer.__class__ = Layer
    (text,) = problems(net, CheckpointingConfig())
    assert "counted [0, 0, 0] (saved-tensor hooks of the layer's own keep what backward needs" in text


@pytest.mark.parametrize("policy", [Policy.full, Policy.selective_ops])
def test_choices_of_routers_that_run_again_are_counted(policy: Policy) -> None:
    result = proven_equal(small_models.build("mixtral"), CheckpointingConfig(policy=policy))
    rows = verification.rows(result.applied, result.watch)
    assert all(row["router_choices"] == row["router_choices_made_again"] > 0 for row in rows)
    assert "choices of routers made again, the same" in verification.line(result.applied, result.watch)


def test_a_router_that_chooses_other_experts_when_it_runs_again_is_found() -> None:
    net = small_models.build("mixtral")
    router, runs = net.model.layers[1].mlp.gate, []

    def turn(module: Any, args: Any) -> Any:
        runs.append(1)
        return (args[0] if len(runs) == 1 else -args[0],)

    router.register_forward_pre_hook(turn)
    cfg = CheckpointingConfig(policy=Policy.full)
    result = watched.run(net, cfg)
    (text,) = verification.unmet_expectations(result.applied, result.watch, cfg)
    assert text.startswith("checkpointing changes what the model computes in layers 1: a router that ran again")
