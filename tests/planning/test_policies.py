"""`remat compare policies`: what it counts on meta tensors is what a real run keeps and recomputes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from remat import cli
from remat.activation_checkpointing import apply, policy
from remat.config import compose
from remat.config.options import CheckpointingConfig
from remat.model import meta_kernels
from remat.planning import policies
from remat.planning.simulation import simulate
from tests.support import small_models

FAMILIES = {
    "llama": {},
    "qwen2": {},
    "gemma": {},
    "phi": {},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "mixtral": {"experts_implementation": "grouped_mm"},
}
LAYERS = 4
NEEDS_PROCESS_GROUP = {"deepspeed"}
NAMES = sorted(set(compose.group_choices()["checkpointing"]) - NEEDS_PROCESS_GROUP)
SMALL = "checkpointing.offload.min_bytes=0"
ONE_LAYER = "model.architecture.num_hidden_layers=1"


def counted(
    net: Any, cfg: CheckpointingConfig, device: str, zero_stage: int
) -> tuple[list[int], list[int], int]:
    """Kept bytes per layer, moved bytes per layer, recomputed FLOPs."""
    applied = apply.apply(
        net,
        policy.decide_layers(cfg, LAYERS, zero_stage=zero_stage),
        cfg,
        zero_stage=zero_stage,
        device=torch.device(device),
    )
    watch = applied.watch(torch.device(device))
    if device == "meta":
        with meta_kernels.as_in_a_run(zero_stage, on_gpu=False), applied.micro_batch(), watch:
            simulate.step(net, micro_batch_size=2, seq_len=16, forward_done=watch.forward_done)
    else:
        with meta_kernels.linear_of(zero_stage), applied.micro_batch(), watch:
            logits = net(input_ids=torch.zeros(2, 16, dtype=torch.long), use_cache=False).logits
            watch.forward_done()
            logits.backward(torch.zeros_like(logits))
    applied.remove()
    kept = [watch.kept_bytes.get(index, 0) for index in range(LAYERS)]
    return kept, [counts.moved_bytes for counts in applied.counts], watch.total_flops("recompute")


@pytest.mark.sample(one_in=7)
@pytest.mark.parametrize("zero_stage", [2, 3])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_meta_counts_what_a_cpu_run_does(family: str, name: str, zero_stage: int) -> None:
    words = [f"checkpointing={name}", "checkpointing.offload.min_bytes=0"]
    cfg = compose.compose_run(words).run.checkpointing
    net = small_models.build(family, num_hidden_layers=LAYERS).to(torch.bfloat16)
    real = counted(net, cfg, "cpu", zero_stage)
    planned = counted(net.to("meta"), cfg, "meta", zero_stage)
    assert planned == real


OF_A_LLAMA = ["train.micro_batch_size=2", SMALL]


@pytest.fixture(scope="module")
def of_a_llama() -> list[policies.PolicyRow]:
    return list(policies.rows(OF_A_LLAMA))


def test_the_table_of_a_llama(of_a_llama: list[policies.PolicyRow]) -> None:
    """What follows from the policies alone, whatever the sizes."""
    rows = {row.name: row for row in of_a_llama}
    assert [row.name for row in rows.values() if row.refused] == ["budget"]  # has no one figure
    assert rows["none"].recomputed_of_forward == rows["discard_output"].recomputed_of_forward == 0
    assert (
        rows["full"].hidden_states == rows["full_reentrant"].hidden_states == 0.75
    )  # the last output is not kept
    assert rows["uniform"].hidden_states == 0.25
    assert rows["offload"].hidden_states == 0.25  # the last layer's stays where it is
    assert rows["offload"].moved_bytes == rows["full"].kept_bytes > 0
    assert rows["none"].zero3_gathers == rows["discard_output"].zero3_gathers == 2
    assert rows["selective_linears"].recomputed_of_forward == 0
    order = ["sqrt", "full", "selective_ops", "selective_linears", "discard_output", "none"]
    kept = [rows[name].kept_bytes for name in order]
    assert kept == sorted(kept)


def test_a_policy_that_cannot_work_is_a_row_with_its_reason() -> None:
    rows = {row.name: row for row in policies.rows([ONE_LAYER, "checkpointing.recompute_modules=[moe]"])}
    assert "has no moe" in rows["selective_modules"].refused
    assert "nothing would be moved" in rows["offload"].refused
    assert not rows["full"].refused


def test_adapters_are_counted() -> None:
    full, adapted = (next(policies.rows([SMALL, *more])) for more in ([], ["peft=lora", "peft.r=8"]))
    assert full.name == adapted.name == "block"
    assert adapted.kept_bytes != full.kept_bytes
    assert adapted.zero3_gathers == 0, "not held to an engine with frozen weights, so not shown"


def test_layers_that_ranks_share_are_counted() -> None:
    words = [SMALL, "hardware=2x4090", "model.architecture.num_attention_heads=6"]
    words += ["model.architecture.num_key_value_heads=2", "checkpointing=none"]
    alone, shared = (next(policies.rows([*words, f"train.tensor_parallel_size={n}"])) for n in (1, 2))
    assert 0.4 * alone.kept_bytes < shared.kept_bytes < 0.9 * alone.kept_bytes, "norms and sums stay whole"


def test_the_command_prints_a_table_and_json(
    of_a_llama: list[policies.PolicyRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(policies, "rows", lambda words: asked.append(words) or iter(of_a_llama))
    words = ["compare", "policies", *OF_A_LLAMA]
    table = CliRunner().invoke(cli.app, words).output
    assert "kept MiB/layer" in table
    assert len([line for line in table.splitlines() if line.startswith("selective_")]) == 3
    found = json.loads(CliRunner().invoke(cli.app, [*words, "--json"]).output)
    assert {row["name"] for row in found} == set(compose.group_choices()["checkpointing"])
    assert asked == [OF_A_LLAMA] * 2
