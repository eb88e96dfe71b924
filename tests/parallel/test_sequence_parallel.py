"""Blocks of sequences: whose they are, what is lost at their edges (nothing), and what options are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from remat.config import compose
from remat.config.options import Attention, ConfigError, Packing
from remat.machine.distributed import World
from remat.model.loss import IGNORED, shifted
from remat.model.packing import Packed, Way
from remat.parallel.sequence_parallel import SequenceParallel
from remat.parallel.ulysses import RankGroup
from remat.planning import strategy
from tests.support import small_models

DOCUMENTS = Packed(Packing.documents, "", Way.positions)
STREAM = Packed(Packing.stream, "")


def blocks(batch: dict[str, torch.Tensor], ranks: int, packed: Packed) -> list[dict[str, torch.Tensor]]:
    """What each rank takes of a micro-batch."""
    found = []
    for rank in range(ranks):
        sequence = SequenceParallel(small_models.build("llama"), RankGroup(ranks, rank), packed, Attention.sdpa)
        found.append(sequence.take_own(batch))
        sequence.remove()
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("width", [12, 13])
def test_every_label_is_on_one_rank_and_padding_carries_no_loss(width: int, ranks: int) -> None:
    labels = torch.arange(2 * width).view(2, width)
    labels[1, : width - 2] = IGNORED  # some ranks have nothing to train in this row
    found = blocks({"input_ids": torch.arange(2 * width).view(2, width), "labels": labels}, ranks, STREAM)
    joined = {name: torch.cat([each[name] for each in found], dim=1) for name in found[0]}
    assert {each["input_ids"].shape for each in found} == {(2, -(-width // ranks))}
    assert torch.equal(joined["targets"][:, :width], shifted(labels))
    assert torch.equal(joined["input_ids"][:, :width], torch.arange(2 * width).view(2, width))
    assert (joined["targets"][:, width:] == IGNORED).all()
    assert torch.equal(joined["position_ids"][0], torch.arange(joined["position_ids"].shape[1]))


def test_padding_of_packed_rows_is_a_document_of_its_own() -> None:
    """So the mask, which follows from the positions, keeps it from the last document."""
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    ids = torch.arange(5).view(1, 5)
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions}
    first, second = blocks(batch, 2, DOCUMENTS)
    assert first["position_ids"].tolist() == [[0, 1, 2]] and second["position_ids"].tolist() == [[0, 1, 0]]
    net = small_models.build("llama")
    sequence = SequenceParallel(net, RankGroup(2, 1), DOCUMENTS, Attention.sdpa)
    mask = sequence.inputs(batch, torch.device("cpu"))["attention_mask"]
    sequence.remove()
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
    ]
    assert mask.shape == (1, 1, 6, 6)  # of the whole row, on every rank
    assert mask[0, 0].int().tolist() == [*expected, [0, 0, 0, 0, 0, 1]]


def test_ranks_of_a_group_read_the_same_rows_and_zero_shards_over_all() -> None:
    worlds = [World(rank, 4, rank, 4, torch.device("cpu"), sequence_parallel_size=2) for rank in range(4)]
    assert [world.data_rank for world in worlds] == [0, 0, 1, 1]
    assert {(world.data_size, world.zero_size) for world in worlds} == {(2, 4)}


def decide(*words: str, ranks: int = 8) -> strategy.Strategy:
    base = ["recipe=llama8b_full_8x80", "checkpointing=full", "train.sequence_parallel_size=4"]
    return strategy.decide(compose.compose_run([*base, *words]).run, world_size=ranks, can_pin=True)


REFUSED = {
    "layers": (["train.tensor_parallel_size=2"], "ranks share layers or sequences, not both"),
    "compiled": (["compile=layers"], "use compile=none"),
    "budget": (["checkpointing=budget"], "use checkpointing=selective_linears"),
    "noise": (["train.neftune_alpha=5"], "set train.neftune_alpha=0"),
    "none": (["train.sequence_parallel_size=0"], "train.sequence_parallel_size=0 is too small"),
    "ranks": (["train.sequence_parallel_size=3"], "8 ranks cannot be divided into groups of 3"),
    "heads": (
        ["train.sequence_parallel_size=6", "train.global_batch_size=60"],
        "train.sequence_parallel_size=6 does not divide num_attention_heads=32",
    ),
    "flex": (["model.attention=flex_attention", "data.packing=stream"], "use model.attention=sdpa"),
    "size": (["deepspeed.overrides.sequence_parallel_size=4"], "delete the key"),
    "batch": (["train.global_batch_size=7"], "train.global_batch_size=7"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_before_a_weight_is_read(name: str) -> None:
    words, reason = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        decide(*words, ranks=8 if name != "heads" else 12)
    assert reason in str(error.value)


def test_accumulation_follows_from_the_groups_and_states_from_all_ranks() -> None:
    shared, apart = decide(), decide("train.sequence_parallel_size=1")
    steps = [each.ds["gradient_accumulation_steps"] for each in (shared, apart)]
    assert steps[0] == 4 * steps[1] and "train_batch_size" not in shared.ds
    sizes: list[Any] = [
        [item.bytes_per_rank for item in each.model_states(data_ranks=8, ranks_per_node=8, can_pin=True)]
        for each in (shared, apart)
    ]
    assert sizes[0] == sizes[1]
