"""DeepSpeed's own function: what it computes is what no checkpointing computes, and it leaves nothing behind."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from remat.activation_checkpointing import apply, policy, verification
from remat.activation_checkpointing.apply import Applied
from remat.activation_checkpointing.mechanisms.counters import LayerCounters, Scope
from remat.activation_checkpointing.mechanisms.deepspeed import (
    BUFFERS,
    FRESH,
    MECHANISM,
    DeepSpeedCheckpointing,
)
from remat.activation_checkpointing.mechanisms.mechanism import Setting
from remat.activation_checkpointing.op_tracer import OpTracer
from remat.config.options import (
    Attention,
    CheckpointingConfig,
    ConfigError,
    DeepSpeedCheckpointingConfig,
    Policy,
)
from remat.model import layers
from tests.support.pool import RankPool

LAYERS, STEPS = 3, 3
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "gpt2": {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "gemma": {"num_key_value_heads": 2, "head_dim": 16},
    "phi": {"resid_pdrop": 0.1},
}
HIDDEN_BYTES = 2 * 16 * 32 * 4
PLAIN = DeepSpeedCheckpointingConfig()
PARTITION = DeepSpeedCheckpointingConfig(partition_activations=True)
CONTIGUOUS = DeepSpeedCheckpointingConfig(partition_activations=True, contiguous_memory_optimization=True)
PROFILE = DeepSpeedCheckpointingConfig(synchronize_checkpoint_boundary=True, profile=True)


def build(model_type: str) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
    }
    config = AutoConfig.for_model(model_type, use_cache=False, **(sizes | FAMILIES[model_type]))
    net = AutoModelForCausalLM.from_config(config)
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):  # zero biases hide wrong gradients
            torch.nn.init.normal_(parameter, std=0.02)
    return net.train()


class AllRanks:
    """A group of all ranks, which are given the same data."""

    get_tensor_model_parallel_rank = staticmethod(dist.get_rank)
    get_tensor_model_parallel_world_size = staticmethod(dist.get_world_size)
    get_tensor_model_parallel_group = staticmethod(lambda: dist.group.WORLD)


def put_in_place(
    net: torch.nn.Module, cfg: DeepSpeedCheckpointingConfig, *, reentrant: bool = True, group: Any = None
) -> tuple[DeepSpeedCheckpointing, list[int]]:
    """DeepSpeed's function in every layer; the list grows by the partitioned bytes of each call."""
    stack = layers.decoder_layers(net)
    engine = DeepSpeedCheckpointing(cfg, num_calls=len(stack), reentrant=reentrant, tensor_parallel=group)
    sliced: list[int] = []

    def run(layer_forward: Callable[..., Any], *args: Any) -> Any:
        counts = LayerCounters()
        output = engine.run(layer_forward, *args, counts=counts, layer="a layer")
        sliced.append(counts.partitioned_bytes)
        return output

    for layer in stack:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = run  # type: ignore[assignment]
    return engine, sliced


def batch(seed: int) -> torch.Tensor:
    return torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(seed))


def steps(net: torch.nn.Module, *, different_data: bool = False) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of a few SGD steps, and the gradients of the last."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    torch.manual_seed(7)
    for step in range(STEPS):
        ids = batch(step + (100 * dist.get_rank() if different_data else 0))
        optimizer.zero_grad()
        loss = net(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.grad.clone() for p in net.parameters() if p.grad is not None]


def both(model_type: str, cfg: DeepSpeedCheckpointingConfig, *, reentrant: bool, grouped: bool) -> list[int]:
    """Asserts that nothing differs from no checkpointing, bit for bit; the partitioned bytes of every call."""
    losses, grads = steps(build(model_type))
    net = build(model_type)
    engine, sliced = put_in_place(net, cfg, reentrant=reentrant, group=AllRanks if grouped else None)
    try:
        found, recomputed = steps(net)
    finally:
        engine.close()
    assert found == losses
    assert len(grads) == len(recomputed) > 0
    assert all(torch.equal(a, b) for a, b in zip(grads, recomputed, strict=True))
    assert left_behind() == []
    return sliced


def left_behind() -> list[str]:
    from deepspeed.runtime.activation_checkpointing import checkpointing

    changed = [name for name, value in FRESH.items() if getattr(checkpointing, name) is not value]
    return changed + [name for name in BUFFERS if getattr(checkpointing, name) != []]


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_plain_is_bit_equal_to_none(one_rank: RankPool, model_type: str, reentrant: bool) -> None:
    (sliced,) = one_rank.run(both, model_type=model_type, cfg=PLAIN, reentrant=reentrant, grouped=False)
    assert sliced == [0] * LAYERS * STEPS


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_profile_and_synchronize_are_bit_equal_to_none(one_rank: RankPool, model_type: str) -> None:
    one_rank.run(both, model_type=model_type, cfg=PROFILE, reentrant=True, grouped=False)


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize("cfg", [PARTITION, CONTIGUOUS], ids=["partition", "contiguous"])
@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_partition_over_replicas_is_bit_equal_to_none(
    two_ranks: RankPool, model_type: str, cfg: DeepSpeedCheckpointingConfig
) -> None:
    for sliced in two_ranks.run(both, model_type=model_type, cfg=cfg, reentrant=True, grouped=True):
        assert sliced == [HIDDEN_BYTES // 2] * LAYERS * STEPS


@pytest.mark.parametrize("cfg", [PARTITION, CONTIGUOUS], ids=["partition", "contiguous"])
def test_partition_without_reentrance(two_ranks: RankPool, cfg: DeepSpeedCheckpointingConfig) -> None:
    for sliced in two_ranks.run(both, model_type="qwen2", cfg=cfg, reentrant=False, grouped=True):
        assert sliced == [HIDDEN_BYTES // 2] * LAYERS * STEPS


def kept_bytes(cfg: DeepSpeedCheckpointingConfig, reentrant: bool) -> int:
    """What lives between forward and backward of the layers."""
    net = build("llama")
    engine, _ = put_in_place(net, cfg, reentrant=reentrant, group=AllRanks)
    try:
        body: Any = net.get_submodule("model")
        with OpTracer(Scope(), torch.device("cpu")) as live:
            output = body(input_ids=batch(0), use_cache=False).last_hidden_state
        assert output.requires_grad
        return live.live_bytes
    finally:
        engine.close()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("cfg", [PARTITION, CONTIGUOUS], ids=["partition", "contiguous"])
def test_half_of_each_input_is_really_freed(
    two_ranks: RankPool, cfg: DeepSpeedCheckpointingConfig, reentrant: bool
) -> None:
    plain = two_ranks.run(kept_bytes, cfg=PLAIN, reentrant=reentrant)
    sliced = two_ranks.run(kept_bytes, cfg=cfg, reentrant=reentrant)
    for before, after in zip(plain, sliced, strict=True):
        assert before - after == pytest.approx(LAYERS * HIDDEN_BYTES // 2, abs=LAYERS * 64)


def gradients_of_different_data(check: bool) -> str | float:
    """Relative error of the gradients when each rank has its own data, or the refusal."""
    _, expected = steps(build("llama"), different_data=True)
    net = build("llama")
    engine, _ = put_in_place(net, PARTITION, group=AllRanks)
    engine._same_checked = not check
    try:
        _, found = steps(net, different_data=True)
    except ConfigError as error:
        return str(error)
    finally:
        engine.close()
    return max(float((a - b).norm() / a.norm()) for a, b in zip(expected, found, strict=True))


def test_partition_over_ranks_with_different_data_is_wrong_and_found_out(two_ranks: RankPool) -> None:
    """Without the check it trains on wrong gradients and says nothing."""
    errors = two_ranks.run(gradients_of_different_data, check=False)
    assert max(errors) > 0.1
    assert all(
        "different activations" in text for text in two_ranks.run(gradients_of_different_data, check=True)
    )


def hidden_states_and_frozen_input() -> None:
    net = build("llama")
    expected = net(input_ids=batch(0), output_hidden_states=True, use_cache=False).hidden_states
    engine, _ = put_in_place(net, CONTIGUOUS, group=AllRanks)
    net.get_submodule("model.embed_tokens").get_parameter("weight").requires_grad_(False)
    try:
        found = net(input_ids=batch(0), output_hidden_states=True, use_cache=False).hidden_states
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        found[-1].sum().backward()
        assert all(p.grad is not None for p in layers.decoder_layers(net)[0].parameters())
    finally:
        engine.close()


def test_hidden_states_stay_whole_and_a_frozen_embedding_trains_the_layers(two_ranks: RankPool) -> None:
    """DeepSpeed empties its argument in place: it must be an alias of ours."""
    two_ranks.run(hidden_states_and_frozen_input)


def forwards_without_backward() -> dict[str, int]:
    from deepspeed.runtime.activation_checkpointing import checkpointing

    net = build("llama")
    engine, sliced = put_in_place(net, CONTIGUOUS, group=AllRanks)
    counts = {}
    try:
        with torch.no_grad():
            net(input_ids=batch(0), use_cache=False)
        counts["no_grad"] = sum(sliced) + len(checkpointing.data_offsets)
        for _ in range(2):
            net(input_ids=batch(0), use_cache=False)
            counts["filled"] = checkpointing.data_offsets[0]
            engine.reset()
        counts["after_reset"] = len(checkpointing.data_offsets)
        net(input_ids=batch(0), use_cache=False)
        try:
            net(input_ids=batch(0), use_cache=False)
        except IndexError:
            counts["overfilled"] = 1
    finally:
        engine.close()
    assert left_behind() == []
    return counts


def test_forwards_without_backward_need_a_reset(two_ranks: RankPool) -> None:
    expected = {"no_grad": 0, "filled": LAYERS, "after_reset": 0, "overfilled": 1}
    assert two_ranks.run(forwards_without_backward) == [expected, expected]


def bytes_by_kind() -> list[tuple[int, int]]:
    """(partitioned, in the list of buffers) of each layer."""
    net = build("llama")
    cfg = CheckpointingConfig(policy=Policy.deepspeed, deepspeed=CONTIGUOUS)
    plan = policy.decide_layers(cfg, LAYERS)
    applied = apply.apply(net, plan, cfg, tensor_parallel=AllRanks)
    try:
        with applied.micro_batch(), applied.watch(torch.device("cpu")) as watch:
            loss = net(input_ids=batch(0), labels=batch(0), use_cache=False).loss
            watch.forward_done()
            loss.backward()
        assert verification.unmet_expectations(applied, watch, cfg) == []
        return [(c.partitioned_bytes, c.contiguous_bytes) for c in applied.counts]
    finally:
        applied.remove()


def test_the_list_of_buffers_is_counted(two_ranks: RankPool) -> None:
    half = HIDDEN_BYTES // 2
    assert two_ranks.run(bytes_by_kind) == [[(half, half)] * LAYERS] * 2


def proof(counts: list[LayerCounters], **switches: bool) -> list[str]:
    cfg = CheckpointingConfig(policy=Policy.deepspeed, deepspeed=DeepSpeedCheckpointingConfig(**switches))
    applied = Applied(policy.decide_layers(cfg, len(counts)), counts=counts)
    return verification.unmet_expectations(applied, OpTracer(Scope(), torch.device("cpu")), cfg)


def ran(**more: int) -> LayerCounters:
    return LayerCounters(forwards=1, expected=1, recomputations=1, **more)


def test_switches_are_proven() -> None:
    """On what a GPU would count: the engine keeps the last layer's input, a partition leaves with every layer."""
    every = {"partition_activations": True, "cpu_checkpointing": True, "contiguous_memory_optimization": True}
    whole = {"partitioned_bytes": 8, "moved_bytes": 8, "contiguous_bytes": 8}
    assert proof([ran(moved_bytes=8), ran(moved_bytes=8), ran()], cpu_checkpointing=True) == []
    assert proof([ran(**whole)] * 3, **every) == []
    (text,) = proof([ran(moved_bytes=8), ran(), ran()], cpu_checkpointing=True)
    assert text == "checkpointing.deepspeed.cpu_checkpointing: nothing was moved to host memory (layers 1)"
    for switch, name in zip(every, whole, strict=True):
        (text,) = proof([ran(**whole), ran(**whole), ran(**(whole | {name: 0}))], **every)
        assert text.startswith(f"checkpointing.deepspeed.{switch}:") and text.endswith("(layers 2)")


def a_second_argument_with_a_gradient() -> list[str]:
    engine = DeepSpeedCheckpointing(PLAIN, num_calls=1, reentrant=True, tensor_parallel=None)
    hidden, weight = torch.randn(2, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    texts = []
    try:
        for rest in ((torch.ones(4), weight), ((torch.ones(4), weight * 1), None)):
            try:
                engine.run(lambda state, *_: state, hidden, *rest, counts=LayerCounters(), layer="layer 7")
            except ConfigError as error:
                texts.append(str(error))
        engine.run(
            lambda state, *_: state, hidden, torch.ones(4), None, counts=LayerCounters(), layer="layer 7"
        )
        with torch.no_grad():
            engine.run(lambda state, *_: state, hidden, weight, counts=LayerCounters(), layer="layer 7")
    finally:
        engine.close()
    return texts


def test_a_second_argument_with_a_gradient_is_refused(one_rank: RankPool) -> None:
    ((second, nested),) = one_rank.run(a_second_argument_with_a_gradient)
    assert "layer 7" in second and "as argument 2" in second and "checkpointing=full" in second
    assert "layer 7" in nested and "as argument 1" in nested


def printed_profile() -> str:
    net = build("llama")
    engine, _ = put_in_place(net, PROFILE)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        steps(net)
    engine.close()
    return printed.getvalue()


def test_profile_times_each_forward_and_backward(one_rank: RankPool) -> None:
    (printed,) = one_rank.run(printed_profile)
    for name in ("fwd", "backward"):
        times_ms = [float(ms) for ms in re.findall(rf"time \(ms\) \| {name}: ([0-9.]+)", printed)]
        assert len(times_ms) == LAYERS * STEPS and all(ms > 0 for ms in times_ms)


def hooks_without_reentrance() -> int:
    net = build("llama")
    engine, _ = put_in_place(net, PROFILE, reentrant=False)
    steps(net)
    engine.close()
    return max(len(p._backward_hooks or ()) for p in net.parameters())


def test_profile_without_reentrance_piles_up_hooks(one_rank: RankPool) -> None:
    """Why it is refused."""
    assert one_rank.run(hooks_without_reentrance)[0] >= STEPS


def two_at_a_time() -> str:
    engine = DeepSpeedCheckpointing(PLAIN, num_calls=1, reentrant=True, tensor_parallel=None)
    try:
        DeepSpeedCheckpointing(PLAIN, num_calls=1, reentrant=True, tensor_parallel=None)
    except RuntimeError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def test_one_at_a_time(one_rank: RankPool) -> None:
    (text,) = one_rank.run(two_at_a_time)
    assert "close the earlier one" in text


def engine_losses(model_type: str, stage: int, cfg: DeepSpeedCheckpointingConfig | None) -> list[float]:
    """Losses and gradient norms of a ZeRO engine whose two ranks have the same data."""
    import deepspeed

    net = build(model_type)
    checkpointing = put_in_place(net, cfg, group=AllRanks)[0] if cfg else None
    zero = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 20_000,
        "stage3_max_reuse_distance": 20_000,
    }
    ds = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "zero_optimization": zero}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=optimizer,
        config=ds | {"zero_allow_untested_optimizer": True},
        dist_init_required=False,
    )
    torch.manual_seed(7)
    found = []
    try:
        for step in range(2 * STEPS):
            ids = batch(step)
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            found += [loss.item(), float(engine.get_global_grad_norm() or 0)]
    finally:
        engine.destroy()
        if checkpointing:
            checkpointing.close()
    return found


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("cfg", [PLAIN, CONTIGUOUS], ids=["plain", "contiguous"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("model_type", ["qwen2", "gpt2", "mixtral"])
def test_under_zero(
    two_ranks: RankPool, model_type: str, stage: int, cfg: DeepSpeedCheckpointingConfig
) -> None:
    expected = two_ranks.run(engine_losses, model_type=model_type, stage=stage, cfg=None)
    assert two_ranks.run(engine_losses, model_type=model_type, stage=stage, cfg=cfg) == expected
    assert expected[0] == expected[1]
    assert len({*expected[0]}) > 2 * STEPS


REFUSED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    ({}, {"partition_activations": True}, {}, "partition_activations=true: there is no group"),
    ({}, {"cpu_checkpointing": True}, {}, "cpu_checkpointing=true: there is no GPU"),
    ({}, {"contiguous_memory_optimization": True}, {}, "contiguous_memory_optimization=true: DeepSpeed has buffers"),
    ({}, {"number_checkpoints": 4}, {}, "number_checkpoints=4: it has no effect"),
    (
        {},
        {"number_checkpoints": 3, "partition_activations": True, "contiguous_memory_optimization": True},
        {"tensor_parallel_size": 2},
        "number_checkpoints=3: 4 layers",
    ),
    ({}, {"partition_activations": True}, {"tensor_parallel_size": 2, "activation_elements": 63}, "63 elements"),
    (
        {},
        {"partition_activations": True, "contiguous_memory_optimization": True},
        {"tensor_parallel_size": 2, "one_width": False},
        "are for micro-batches of one width, and without packing",
    ),
    ({"reentrant": False}, {}, {"zero_stage": 3}, "reentrant=false: DeepSpeed's non-reentrant"),
    ({"reentrant": False}, {"profile": True}, {}, "profile=true: with checkpointing.reentrant=false"),
    ({"reentrant": False}, {"synchronize_checkpoint_boundary": True}, {}, "synchronize_checkpoint_boundary=true"),
    ({"preserve_rng_state": False}, {}, {}, "preserve_rng_state=false: it has no effect"),
]  # fmt: skip


def problems(cfg: CheckpointingConfig, **facts: Any) -> list[str]:
    """What is refused for four layers."""
    usual: dict[str, Any] = {
        "zero_stage": 2, "tensor_parallel_size": 1, "has_gpu": False, "attention": Attention.sdpa,
        "lora_dropout": 0.0, "fields": {}, "activation_elements": 64, "element_bytes": 4,
    }  # fmt: skip
    setting = Setting(**usual | facts)
    return MECHANISM.refuse(cfg, [(d, torch.nn.Identity()) for d in policy.decide_layers(cfg, 4)], setting)


@pytest.mark.parametrize(("more", "switches", "run", "text"), REFUSED, ids=[row[3][:30] for row in REFUSED])
def test_what_is_refused(
    more: dict[str, Any], switches: dict[str, Any], run: dict[str, Any], text: str
) -> None:
    cfg = CheckpointingConfig(deepspeed=DeepSpeedCheckpointingConfig(**switches), **more)
    found = problems(cfg, **run)
    assert len(found) == 1
    assert text in found[0]
    assert found[0].startswith("checkpointing.")


def test_what_is_allowed() -> None:
    every = DeepSpeedCheckpointingConfig(
        partition_activations=True,
        cpu_checkpointing=True,
        contiguous_memory_optimization=True,
        number_checkpoints=4,
        synchronize_checkpoint_boundary=True,
        profile=True,
    )
    cfg = CheckpointingConfig(deepspeed=every)
    assert problems(cfg, zero_stage=3, tensor_parallel_size=2, has_gpu=True) == []
    assert problems(CheckpointingConfig(reentrant=False), tensor_parallel_size=2, has_gpu=True) == []
