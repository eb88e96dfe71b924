"""16-bit states of AdamW: what is refused and with which words, what is built, what a resume keeps, what is told."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from remat.config import compose
from remat.config.options import ConfigError, OptimConfig, OptimStates
from remat.machine import ops
from remat.model import optimizer, optimizer_state
from remat.planning import strategy
from remat.planning.plan import make_plan, plan_as_json

MODEL = ["recipe=tiny_zero3_offload", "hardware=1x4090"]
ZERO = "deepspeed.overrides.zero_optimization"
REFUSED = {  # words -> the option that stands in the way, and a remedy
    "fp32": (["optim.states=bf16", "train.precision=fp32"], "train.precision=fp32", "set train.precision=bf16"),
    "fp16": (["optim.states=bf16", "train.precision=fp16"], "train.precision=fp16", "set train.precision=bf16"),
    "8 bits": (
        ["optim.states=bf16", "optim.name=adamw_8bit", "deepspeed.config=zero2"],
        "optim.name=adamw_8bit",
        "set optim.name=adamw",
    ),
    "lion": (["optim.states=bf16_master", "optim.name=lion"], "optim.name=lion", "set optim.name=adamw"),
    "a slow second moment": (
        ["optim.states=bf16", "optim.beta2=0.999"],
        "optim.beta2=0.999",
        "at most 0.9961",
    ),
    "shared layers": (
        ["optim.states=bf16", "deepspeed.config=zero2", "train.tensor_parallel_size=2"],
        "train.tensor_parallel_size=2",
        "set train.tensor_parallel_size=1",
    ),
    "no ZeRO": (
        ["optim.states=bf16", "deepspeed.config=zero1", f"{ZERO}.stage=0"],
        "zero_optimization.stage=0",
        "choose deepspeed.config=zero1",
    ),
    "fp32 moments on the GPU": (
        ["optim.states=bf16_master", "deepspeed.config=zero2"],
        "without zero_optimization.offload_optimizer",
        "choose deepspeed.config=zero2_offload",
    ),
    "NVMe": (
        ["optim.states=bf16", "deepspeed.config=zero3_nvme", "hardware.nvme_path=/tmp/none"],
        "offload_optimizer.device=nvme",
        "choose device=cpu",
    ),
    "a share on the GPU": (
        ["optim.states=bf16", f"{ZERO}.offload_optimizer.ratio=0.5"],
        "offload_optimizer.ratio=0.5",
        "set ratio=1.0",
    ),
    "gradients in fp32": (
        ["optim.states=bf16", "deepspeed.overrides.data_types.grad_accum_dtype=fp32"],
        "data_types.grad_accum_dtype=fp32",
        "delete it",
    ),
    "DeepSpeed's own key": (
        ["deepspeed.overrides.bf16.bf16_master_weights_and_grads=true"],
        "bf16.bf16_master_weights_and_grads=true contradicts optim.states=fp32",
        "drop the override",
    ),
    "DeepSpeed's other key": (
        ["optim.states=bf16_master", "deepspeed.overrides.bf16.bf16_optimizer_states=true"],
        "bf16.bf16_optimizer_states=true contradicts optim.states=bf16_master",
        "drop the override",
    ),
}


def decide(*words: str) -> strategy.Strategy:
    return strategy.decide(compose.from_command_line([*MODEL, *words]).run, world_size=2, can_pin=False)


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_deepspeed_cannot_do_is_refused_with_option_value_and_remedy(name: str) -> None:
    words, option, remedy = REFUSED[name]
    with pytest.raises(ConfigError) as refused:
        decide(*words)
    (line,) = [text for text in str(refused.value).splitlines() if option in text and "optim.states" in text]
    assert remedy in line


@pytest.mark.parametrize("config", ["zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"])
@pytest.mark.parametrize("states", list(OptimStates))
def test_deepspeeds_keys_follow_from_the_option(config: str, states: OptimStates) -> None:
    if states is OptimStates.bf16_master and "offload" not in config:
        return
    decided = decide(f"deepspeed.config={config}", f"optim.states={states}")
    found = decided.ds["bf16"]["bf16_master_weights_and_grads"], decided.ds["bf16"]["bf16_optimizer_states"]
    assert found == (states is not OptimStates.fp32, states is OptimStates.bf16)
    told = [text for text in decided.warnings if text.startswith(f"optim.states={states} changes the training")]
    assert len(told) == (states is not OptimStates.fp32)


def test_largest_beta2_is_the_first_that_a_bf16_moment_does_not_follow() -> None:
    """Every moment falls under the largest that is allowed; under 0.999 none of these does."""
    moments = torch.linspace(1, 2, 129)[:-1].bfloat16()
    assert ((moments.float() * (1 - 2**-8)).bfloat16() < moments).all()
    assert torch.equal((moments.float() * 0.999).bfloat16(), moments)


def test_moments_on_the_device_are_in_bf16_and_rounded_once() -> None:
    """Each step equals that of fp32 arithmetic on the stored values, rounded at its end."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 64).bfloat16())
    cfg = OptimConfig(states=OptimStates.bf16, lr=1e-2)
    built = optimizer.build(
        torch.nn.ParameterDict({"w": weight}), cfg, offloaded=False, device=torch.device("cpu")
    )
    exact = torch.nn.Parameter(weight.detach().float())
    plain = torch.optim.AdamW([exact], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    for _ in range(3):
        gradient = torch.randn(64, 64).bfloat16()
        weight.grad, exact.grad = gradient, gradient.float()
        built.step()
        plain.step()
        state, own = built.state[weight], plain.state[exact]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
        torch.testing.assert_close(weight.detach(), exact.detach().bfloat16(), rtol=2**-7, atol=0)
        with torch.no_grad():  # go on from what was stored
            exact.copy_(weight)
            for name in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(state[name], own[name].bfloat16(), rtol=2**-7, atol=0)
                own[name].copy_(state[name])


@pytest.mark.parametrize("states", [OptimStates.bf16_master, OptimStates.bf16])
def test_the_kernel_on_the_host_goes_on_bit_for_bit(states: OptimStates) -> None:
    """torch rounds fp32 moments to the format of bf16 weights when it loads them."""
    ops.ensure("cpu_adam", print)

    def steps(first: int, last: int, value: torch.Tensor, saved: dict[str, Any] | None = None) -> Any:
        weight, cfg = torch.nn.Parameter(value.clone()), OptimConfig(states=states, lr=1e-2)
        net = torch.nn.ParameterDict({"w": weight})
        built = optimizer.build(net, cfg, offloaded=True, device=torch.device("cpu"))
        if saved is not None:
            built.load_state_dict(saved)
            optimizer.set_options(built, cfg)
        for step in range(first, last):
            weight.grad = torch.randn(40, 5, generator=torch.Generator().manual_seed(step)).bfloat16()
            built.step()
        return built, weight.detach()

    whole, expected = steps(0, 6, torch.ones(40, 5).bfloat16())
    begun, value = steps(0, 3, torch.ones(40, 5).bfloat16())
    resumed, found = steps(3, 6, value, copy.deepcopy(begun.state_dict()))
    assert torch.equal(found, expected)
    form = torch.bfloat16 if states is OptimStates.bf16 else torch.float32
    for own, same in zip(resumed.state.values(), whole.state.values(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert own[name].dtype == same[name].dtype == form
            assert torch.equal(own[name], same[name])


def test_a_step_streams_half_the_bytes() -> None:
    name = OptimConfig().name
    assert optimizer_state.streamed_bytes(name, OptimStates.fp32) == 28
    assert optimizer_state.streamed_bytes(name, OptimStates.bf16) == 14


def test_a_plan_says_that_the_training_changes() -> None:
    made = plan_as_json(make_plan(compose.from_command_line([*MODEL, "optim.states=bf16"]).run))
    assert made["optimizer_states"] == "bf16"
    assert any("changes the training" in text for text in made["warnings"])
    assert any("takes as long as one of fp32 states" in text for text in made["assumptions"])


def test_the_losses_of_the_documentation_are_those_that_were_measured() -> None:
    root = Path(__file__).resolve().parents[2]
    result = json.loads((root / "benchmarks" / "results" / "optimizer_states.json").read_text())
    measured = result["losses"]
    page = (root / "docs" / "optimizers.md").read_text()
    number = r"(\d\.\d{4}|not measured)"
    rows = re.findall(rf"^\| ([^|]+) \| {number} \| [-+\d.]* ?\| {number} \| [-+\d.]* ?\|$", page, re.MULTILINE)
    written = {f"from scratch: {name}": first for name, first, _ in rows}
    written |= {f"go on: {name}": second for name, _, second in rows if second != "not measured"}
    assert written == {key: f"{found['held_out']:.4f}" for key, found in measured.items()}
    assert {"from scratch: bf16", "from scratch: bf16_master", "go on: bf16", "go on: adamw"} <= written.keys()
    gained, kept = (
        measured["from scratch: adamw"]["held_out"] - measured[f"go on: {name}"]["held_out"]
        for name in ("adamw", "bf16")
    )
    assert f"by {gained:.4f}; 16-bit states lowered it by {100 * kept / gained:.0f} % of that" in " ".join(
        page.split()
    )
    assert not any("dirty" in found["commit"] for found in measured.values())
