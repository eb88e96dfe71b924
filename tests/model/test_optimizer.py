"""Schedules against hand-computed values; parameter groups; AdamW by placement."""

from __future__ import annotations

import copy
import math
from typing import Any

import cpuinfo
import pytest
import torch

from remat.config.options import ConfigError, OptimConfig, OptimName, Schedule
from remat.machine import ops
from remat.model import optimizer


def rates(total: int = 10, **options: object) -> list[float]:
    cfg = OptimConfig(lr=1.0, min_lr_ratio=0.1, **options)
    return [optimizer.lr_at(step, cfg, total) for step in range(total)]


def test_warmup_is_linear_and_reaches_lr_at_its_last_step() -> None:
    assert rates(schedule=Schedule.constant, warmup_steps=4)[:6] == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]
    )


def test_warmup_follows_the_length_of_the_run_unless_it_is_given() -> None:
    """A starting point has it so: with 25 steps a run of 20 on few rows would never reach its learning rate."""
    found = {steps: OptimConfig(warmup_steps=None).warmup(steps) for steps in (1, 20, 33, 34, 1000)}
    assert found == {1: 1, 20: 1, 33: 1, 34: 2, 1000: 30}
    assert OptimConfig(warmup_steps=25).warmup(20) == 25
    assert rates(total=100, schedule=Schedule.constant, warmup_steps=None)[:4] == pytest.approx(
        [0.25, 0.5, 0.75, 1]
    )


def test_linear_ends_at_the_minimum() -> None:
    found = rates(schedule=Schedule.linear, warmup_steps=1)
    assert found[1] == pytest.approx(1.0)
    assert found[5] == pytest.approx(1.0 - 0.9 * 4 / 8)
    assert found[-1] == pytest.approx(0.1)


def test_cosine_is_half_way_in_the_middle() -> None:
    found = rates(total=11, schedule=Schedule.cosine)
    assert found[0] == pytest.approx(1.0)
    assert found[5] == pytest.approx(0.55)
    assert found[3] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(0.3 * math.pi)))
    assert found[-1] == pytest.approx(0.1)


def test_wsd_is_flat_then_falls_over_the_last_steps() -> None:
    found = rates(schedule=Schedule.wsd, decay_steps=4)
    assert found[:6] == pytest.approx([1.0] * 6)
    assert found[6:] == pytest.approx([1.0, 0.7, 0.4, 0.1])


def test_schedule_past_the_end_stays_at_the_minimum() -> None:
    cfg = OptimConfig(lr=1.0, schedule=Schedule.linear, min_lr_ratio=0.25)
    assert optimizer.lr_at(99, cfg, 10) == pytest.approx(0.25)


def test_matrices_are_decayed_and_vectors_are_not() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    decayed, plain = optimizer.parameter_groups(net, 0.3)
    assert [p.dim() for p in decayed["params"]] == [2]
    assert decayed["weight_decay"] == 0.3
    assert len(plain["params"]) == 3
    assert plain["weight_decay"] == 0.0


def test_a_sharded_parameter_is_grouped_by_its_whole_shape() -> None:
    net = torch.nn.Linear(4, 4, bias=False)
    net.weight.ds_shape = net.weight.shape
    net.weight.data = torch.empty(0)
    assert optimizer.parameter_groups(net, 0.3)[0]["weight_decay"] == 0.3


def test_frozen_parameters_get_no_state() -> None:
    net = torch.nn.Linear(4, 4)
    net.weight.requires_grad_(False)
    assert [len(g["params"]) for g in optimizer.parameter_groups(net, 0.1)] == [1]


def test_plain_adamw_on_cpu() -> None:
    built = optimizer.build(
        torch.nn.Linear(2, 2), OptimConfig(lr=0.5), offloaded=False, device=torch.device("cpu")
    )
    assert type(built) is torch.optim.AdamW
    assert built.param_groups[0]["lr"] == 0.5
    assert not built.param_groups[0]["fused"]


def test_options_asked_for_win_over_those_a_saved_state_brought_back() -> None:
    built = optimizer.build(torch.nn.Linear(2, 2), OptimConfig(), offloaded=False, device=torch.device("cpu"))
    for group in built.param_groups:
        group.update(betas=(0.1, 0.2), eps=1.0, weight_decay=0.7)
    optimizer.set_options(built, OptimConfig(beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3))
    assert [group["weight_decay"] for group in built.param_groups] == [0.3, 0.0]
    assert all(group["betas"] == (0.8, 0.9) and group["eps"] == 1e-6 for group in built.param_groups)


def cpu_adam_steps(count: int, saved: dict[str, Any] | None = None, value: torch.Tensor | None = None) -> Any:
    """(optimizer, weight) after `count` more steps of offloaded AdamW, on from `saved` and `value` if given."""
    ops.ensure("cpu_adam", print)  # as a run does: torch alone would build it anew under another path
    weight = torch.nn.Parameter(torch.ones(40, 5) if value is None else value.clone())
    net = torch.nn.ParameterDict({"weight": weight})
    cfg = OptimConfig(lr=0.1)
    built = optimizer.build(net, cfg, offloaded=True, device=torch.device("cpu"))
    if saved is not None:
        built.load_state_dict(saved)
        optimizer.set_options(built, cfg)
    start = int(built.state[weight]["step"]) if saved else 0
    for step in range(start, start + count):
        weight.grad = torch.randn(40, 5, generator=torch.Generator().manual_seed(step))
        built.step()
    return built, weight.data


def test_offloaded_adam_knows_the_vendor_without_the_whole_of_cpuinfo(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = cpuinfo.get_cpu_info()["vendor_id_raw"].lower()
    cpu_adam_steps(0)  # loads the op, whose build asks for more
    asked: list[str] = []
    monkeypatch.setattr(cpuinfo, "get_cpu_info", lambda: asked.append("all") or {})
    before = cpuinfo.get_cpu_info
    built, _ = cpu_adam_steps(0)
    assert built.cpu_vendor == expected
    assert cpuinfo.get_cpu_info is before and asked == []


@pytest.mark.parametrize("first", [1, 2, 5, 9, 30])
def test_offloaded_adam_goes_on_bit_for_bit_after_any_number_of_steps(first: int) -> None:
    _, expected = cpu_adam_steps(first + 4)
    begun, value = cpu_adam_steps(first)
    _, found = cpu_adam_steps(4, copy.deepcopy(begun.state_dict()), value)
    assert torch.equal(found, expected)


def test_deepspeed_does_not_give_back_what_was_there_before_a_step_that_it_undoes() -> None:
    """So no optimizer steps beside backward: SuperOffload undoes steps that turn out wrong (docs/decisions.md)."""
    ops.ensure("cpu_adam", print)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    made = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(1_000_000, generator=made) * 0.02)
    adam = DeepSpeedCPUAdam([weight], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.01)

    def step() -> None:
        weight.grad = torch.randn(weight.shape, generator=made) * 1e-3
        adam.step_subgroup(0)

    def held() -> list[torch.Tensor]:
        return [weight.data, adam.state[0]["exp_avg"], adam.state[0]["exp_avg_sq"]]

    for _ in range(3):
        step()
    before = [each.clone() for each in held()]
    step()
    adam.rollback_subgroup(0)
    differ = [(found != each).float().mean().item() for found, each in zip(held(), before, strict=True)]
    assert min(differ) > 0.1, differ


@pytest.mark.parametrize("fused", [True, False])
def test_a_state_of_offloaded_adam_is_taken_over_with_the_kernel_of_this_run(fused: bool) -> None:
    begun, value = cpu_adam_steps(3)
    weight = torch.nn.Parameter(value.clone())
    own = torch.optim.AdamW([{"params": [weight], "decayed": True}], fused=fused)
    own.load_state_dict(copy.deepcopy(begun.state_dict()))
    optimizer.set_options(own, OptimConfig(lr=0.1))
    assert own.param_groups[0]["fused"] is fused
    weight.grad = torch.ones(40, 5)
    own.step()
    assert own.state[weight]["step"].item() == 4


def asked(name: str, stage: int, **section: Any) -> str:
    """What is refused of this optimizer at this stage, with `section` as offload_optimizer."""
    zero = {"stage": stage} | ({"offload_optimizer": section} if section else {})
    try:
        optimizer.check(OptimConfig(name=OptimName(name)), {"zero_optimization": zero})
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_adafactor_is_refused_where_weights_are_cut(stage: int) -> None:
    assert asked("adafactor", 0) == ""
    text = asked("adafactor", stage)
    assert f"zero_optimization.stage={stage}" in text and "overrides.zero_optimization.stage=0" in text


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_8bit", "adafactor"])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_only_adamw_and_lion_step_on_the_host(name: str, device: str) -> None:
    assert f"offload_optimizer.device={device}: DeepSpeed steps on the host" in asked(name, 3, device=device)
    assert asked("adamw", 3, device=device) == ""


def test_lion_is_offloaded_to_the_cpu_and_whole() -> None:
    assert asked("lion", 3, device="cpu", ratio=1.0) == ""
    assert "offload_optimizer.device=nvme" in asked("lion", 3, device="nvme")
    assert "offload_optimizer.ratio=0.5" in asked("lion", 3, device="cpu", ratio=0.5)


def test_without_bitsandbytes_its_optimizers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'remat[qlora]'" in asked("adamw_8bit", 2) and "bitsandbytes" in asked("lion", 2)
    assert asked("lion", 2, device="cpu") == asked("adafactor", 0) == asked("adamw", 3) == ""


def test_shared_layers_are_trained_by_adamw_alone() -> None:
    with pytest.raises(ConfigError, match=r"optim\.name=lion with train\.tensor_parallel_size=2"):
        optimizer.check(OptimConfig(name=OptimName.lion), {"zero_optimization": {"stage": 1}}, 2)


def lion(saved: dict[str, Any] | None = None, *, offloaded: bool, value: torch.Tensor, steps: range) -> Any:
    """(optimizer, weight) of Lion after `steps`, on from `saved` if given."""
    weight = torch.nn.Parameter(value.clone())
    net, cfg = torch.nn.ParameterDict({"weight": weight}), OptimConfig(name=OptimName.lion, lr=0.1)
    built = optimizer.build(net, cfg, offloaded=offloaded, device=torch.device("cpu"))
    if saved is not None:
        built.load_state_dict(copy.deepcopy(saved))
        optimizer.set_options(built, cfg)
    for step in steps:
        weight.grad = torch.randn(40, 5, generator=torch.Generator().manual_seed(step))
        built.step()
    return built, weight.data


@pytest.mark.exhaustive  # builds an op, which takes minutes
@pytest.mark.parametrize("offloaded", [True, False])
def test_each_lion_takes_over_the_others_state(offloaded: bool) -> None:
    ops.ensure("cpu_lion", print)
    start = torch.ones(40, 5)
    _, expected = lion(offloaded=False, value=start, steps=range(5))
    begun, value = lion(offloaded=not offloaded, value=start, steps=range(3))
    _, found = lion(begun.state_dict(), offloaded=offloaded, value=value, steps=range(3, 5))
    torch.testing.assert_close(found, expected)
