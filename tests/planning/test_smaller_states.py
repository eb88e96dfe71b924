"""16-bit states in plans: 8 B parameters on one 24 GB card and on one H200, and advice that names them last."""

from __future__ import annotations

import pytest

from remat.config import compose
from remat.planning.plan import HOST_MEMORY, Planned, Recordings, Verdict, make_plan, needed_bytes
from remat.planning.settings import choices, search

LLAMA_8B = [
    "recipe=llama8b_zero3_offload_optimizer",
    "train.micro_batch_size=1",
    "train.global_batch_size=8",
    "checkpointing=full",
]
CARD = ["hardware=1x4090", "hardware.host_memory_gib=125", "deepspeed.config=zero3_offload"]
H200 = ["hardware=1xh200", "hardware.host_memory_gib=128"]
PARAMETERS = 8_030_261_248


@pytest.fixture(scope="module")
def known() -> Recordings:
    return Recordings()


def plan(known: Recordings, *words: str) -> Planned:
    return make_plan(compose.from_command_line([*LLAMA_8B, *words]).run, recordings=known)


def test_8b_full_fits_a_24_gb_card_with_125_gib_of_host_memory(known: Recordings) -> None:
    """Of 20 bytes per parameter on the host 12 are left: weights, flat gradients, masters, their gradients, moments."""
    assert plan(known, *CARD).plan.verdict is Verdict.too_large
    mixed, small = (plan(known, *CARD, f"optim.states={states}") for states in ("bf16_master", "bf16"))
    assert mixed.plan.verdict is small.plan.verdict is Verdict.fits
    assert needed_bytes(mixed, HOST_MEMORY) - needed_bytes(small, HOST_MEMORY) == pytest.approx(
        4 * PARAMETERS, rel=1e-3
    )
    assert small.plan.saved_state_bytes == pytest.approx(3 * 6 * PARAMETERS, rel=1e-3)  # two are kept


def test_8b_full_fits_one_h200_with_128_gib_of_host_memory(known: Recordings) -> None:
    """On the GPU alone; with the optimizer on the host, whose fp32 states need 137 GiB, too."""
    offloaded = "deepspeed.config=zero3_offload_optimizer"
    assert plan(known, *H200, "deepspeed.config=zero2").plan.verdict is Verdict.too_large
    assert plan(known, *H200, offloaded).plan.verdict is Verdict.too_large
    assert plan(known, *H200, "deepspeed.config=zero2", "optim.states=bf16").plan.verdict is Verdict.fits
    assert plan(known, *H200, offloaded, "optim.states=bf16_master").plan.verdict is Verdict.fits


SHORT = [  # 60 M parameters on a GPU and a host that hold 16-bit states of it, and no others
    "recipe=tiny_zero3_offload",
    "hardware=1x4090",
    "model.architecture.num_hidden_layers=2",
    "model.architecture.hidden_size=1536",
    "model.architecture.intermediate_size=4096",
    "model.architecture.num_attention_heads=12",
    "deepspeed.config=zero2",
    "train.seq_len=256",
    "train.micro_batch_size=1",
    "train.global_batch_size=1",
    "hardware.gpu_memory_gib=1.45",
    "hardware.host_memory_gib=2.7",
]


def test_advice_names_smaller_states_as_other_training_where_nothing_else_fits() -> None:
    made = make_plan(compose.from_command_line(SHORT).run)
    assert made.plan.verdict is Verdict.too_large
    found = search.advise(SHORT, made, recordings=Recordings()).changes[:2]
    assert [change.overrides for change in found] == [["optim.name=adamw_8bit"], ["optim.states=bf16"]]
    assert all(change.changes_training and change.planned.plan.fits for change in found)


def test_smaller_states_are_offered_from_fp32_states_of_adamw_alone() -> None:
    def offered(*words: str) -> list[list[str]]:
        cfg = compose.from_command_line([*SHORT, *words]).run
        return [[option.words[0] for option in axis] for axis in choices.smaller_states(cfg)]

    assert offered() == [["optim.name=adamw_8bit"], ["optim.states=bf16_master", "optim.states=bf16"]]
    assert offered("train.precision=fp32") == [["optim.name=adamw_8bit"]]
    assert offered("optim.states=bf16") == offered("optim.name=adamw_8bit") == []
    same = choices.same_training(SHORT, compose.from_command_line(SHORT).run)
    assert not [axis for axis in same if axis.startswith("optim")], "strategy=auto never takes them"
