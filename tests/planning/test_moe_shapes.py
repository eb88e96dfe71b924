"""Mixtral 8x7B and Qwen3-30B-A3B at ZeRO-3 with offload, under every granularity: planned, and their bytes in order."""

from __future__ import annotations

import pytest

from remat.config import compose
from remat.config.units import GIB
from remat.planning.plan import GPU_MEMORY, Planned, Recordings, make_plan, needed_bytes
from remat.planning.settings import choices
from remat.planning.simulation.types import Category

RANKS, SEQ_LEN = 8, 4096
BASE = [
    "recipe=finetune", "strategy=given", "hardware=8xh200", "deepspeed.config=zero3_offload",
    f"train.seq_len={SEQ_LEN}", "train.global_batch_size=8", "train.micro_batch_size=1",
]  # fmt: skip
EXPERTS = {  # number, width of the model, width of one: two matrices in, one out
    "mixtral_8x7b": (8, 4096, 14336),
    "qwen3_30b_a3b": (128, 2048, 768),
}
BUDGETS_GIB = {"mixtral_8x7b": 10.0, "qwen3_30b_a3b": 7.0}  # between the least and keeping all, of four layers
FEW = ["model.architecture.num_hidden_layers=4"]
POLICIES = [*(name for name in choices.POLICIES if name not in ("none", choices.MOVING)), "deepspeed"]


def planned(model: str, policy: str, more: list[str], known: Recordings) -> Planned:
    words = [*BASE, f"model={model}", f"checkpointing={policy}", *more]
    return make_plan(compose.compose_run(words).run, recordings=known)


@pytest.mark.parametrize(
    ("layers", "apart"),
    [
        pytest.param(FEW, True, id="few in turn"),
        pytest.param(FEW, False, id="few", marks=pytest.mark.exhaustive),
        pytest.param([], False, id="all", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("model", EXPERTS)
def test_experts_are_planned_under_every_granularity(model: str, layers: list[str], apart: bool) -> None:
    known = Recordings()
    keeping = planned(model, "none", layers, known)
    number, width, inner = EXPERTS[model]
    experts_bytes = 2 * number * 3 * width * inner  # of one layer, in bf16
    params = keeping.strategy.facts.num_params
    on_host = sum({**keeping.plan.pinned, **keeping.plan.host}.values()) - 2.5 * GIB
    # weights and gradients in bf16, master copies of both and two moments in fp32
    assert on_host == pytest.approx((2 + 2 + 4 + 4 + 8) * params / RANKS, rel=0.02)
    turn = list(EXPERTS).index(model)
    for policy in POLICIES:
        if apart and policy != "budget" and POLICIES.index(policy) % len(EXPERTS) != turn:
            continue
        budget = [f"checkpointing.budget_gib={BUDGETS_GIB[model]}"] if policy == "budget" and layers else []
        plan = planned(model, policy, [*layers, *budget], known)
        gathered = plan.plan.gpu.get(Category.gathered, 0)
        assert gathered >= experts_bytes, policy
        assert sum(plan.simulation.kept_bytes) <= sum(keeping.simulation.kept_bytes), policy
        if budget:
            assert plan.table is not None and needed_bytes(plan, GPU_MEMORY) <= BUDGETS_GIB[model] * GIB
            assert sum(plan.simulation.kept_bytes) < sum(keeping.simulation.kept_bytes)
