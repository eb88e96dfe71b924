"""Blocks of sequences: whose they are, what is lost at their edges (nothing), and what options are refused."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from remat.config import compose
from remat.config.options import Attention, ConfigError, Packing
from remat.data.batches import Part, own_part
from remat.data.blocks import Blocks
from remat.machine.distributed import World
from remat.model.packing import Packed, Way
from remat.parallel import sequence_trial
from remat.parallel.sequence_parallel import SequenceParallel
from remat.parallel.ulysses import RankGroup
from remat.planning import strategy
from tests.support import small_models

DOCUMENTS = Packed(Packing.documents, "", Way.positions)


def test_padding_of_packed_rows_is_a_document_of_its_own() -> None:
    """So the mask, which follows from where documents start, keeps it from the last document."""
    starts = np.packbits(np.array([[1, 0, 0, 1, 0]]), axis=1)
    row = Blocks(np.arange(5, dtype=np.int32)[None], starts=starts, restarts=np.array([1])).documents_apart()
    first, second = (own_part(row, np.array([0]), Part(rank, 2)) for rank in range(2))
    assert first["position_ids"].tolist() == [[0, 1, 2]] and second["position_ids"].tolist() == [[0, 1, 0]]
    net = small_models.build("llama")
    sequence = SequenceParallel(net, RankGroup(2, 1), DOCUMENTS, Attention.sdpa)
    mask = sequence.inputs(second, torch.device("cpu"))["attention_mask"]
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


def test_what_is_gathered_for_the_proof_is_the_row_from_its_first_trained_token_on() -> None:
    """Of a row of 24 tokens in three documents, on three ranks; the second row has more trained tokens."""
    tokens = np.arange(48, dtype=np.int32).reshape(2, 24)
    trained = np.zeros((2, 24), dtype=bool)
    trained[0, 20], trained[1, 11:20] = True, True
    starts = np.zeros((2, 24), dtype=bool)
    starts[:, [0, 7, 14]] = True
    trained[starts] = False
    rows = Blocks(tokens, trained, starts=np.packbits(starts, axis=1), restarts=np.array([2, 2]))
    group = sequence_trial._ThreadGroup(3)
    net, found = small_models.build("llama"), dict[int, Any]()
    sequence = SequenceParallel(net, group, DOCUMENTS, Attention.sdpa)

    def gather(rank: int) -> None:
        group.enter(rank)
        own = own_part(rows, np.arange(2), Part(rank, 3))
        whole = sequence.gather(own, 10, torch.device("cpu"))
        found[rank] = whole, sequence.take_own(whole), sequence.shorten(whole, 5)

    threads = [threading.Thread(target=gather, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    sequence.remove()
    for rank, (whole, own, short) in found.items():
        assert whole["input_ids"].tolist() == [
            list(range(24 + 10, 24 + 19))
        ]  # 10 to 18: the target at 10 is 11
        assert whole["targets"].tolist() == [[35, 36, 37, -100, 39, 40, 41, 42, 43]]
        assert whole["position_ids"].tolist() == [[3, 4, 5, 6, 0, 1, 2, 3, 4]]
        assert whole["documents"].tolist() == [0, 4, 9]
        assert own["input_ids"].tolist() == [[34 + 3 * rank, 35 + 3 * rank, 36 + 3 * rank]]
        assert short["input_ids"].tolist() == [[34, 35, 36]] and short["documents"].tolist() == [0, 3]
    assert sorted(found) == [0, 1, 2]


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
