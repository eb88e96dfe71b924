from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from remat.config.options import ConfigError
from remat.data.batches import GlobalBatches, check_same_order, eval_micro_batches
from remat.data.blocks import Blocks

SEQ_LEN = 6


def make_blocks(count: int) -> Blocks:
    """Block i holds 100 i + 0..5; its trained positions follow from i, with position 0 among them."""
    tokens = (100 * np.arange(count)[:, None] + np.arange(SEQ_LEN)).astype(np.int32)
    trained = np.random.default_rng(0).random((count, SEQ_LEN)) < 0.5
    return Blocks(tokens, trained, lengths=np.full(count, SEQ_LEN - 1, dtype=np.int32))


def stream(
    blocks: Blocks, *, batch: int = 4, micro: int = 1, rank: int = 0, world: int = 1, **more: int
) -> GlobalBatches:
    return GlobalBatches(
        blocks,
        global_batch_size=batch,
        micro_batch_size=micro,
        rank=rank,
        world_size=world,
        seed=more.get("seed", 7),
        shuffle=bool(more.get("shuffle", 1)),
        position=more.get("position", 0),
    )


def ids_of(batch: dict[str, torch.Tensor]) -> list[int]:
    return (batch["input_ids"][:, 0] // 100).tolist()


@pytest.mark.parametrize(
    ("micro", "accumulation", "world"), [(4, 1, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)]
)
def test_a_step_has_the_same_samples_however_it_is_spread(micro: int, accumulation: int, world: int) -> None:
    blocks = make_blocks(10)
    alone = stream(blocks, micro=4)
    ranks = [stream(blocks, micro=micro, rank=rank, world=world) for rank in range(world)]
    for _ in range(6):
        expected = alone.next_step()
        steps = [rank.next_step() for rank in ranks]
        assert all(len(step.micro_batches) == accumulation for step in steps)
        together = [i for a in range(accumulation) for step in steps for i in ids_of(step.micro_batches[a])]
        assert together == expected.sample_ids.tolist()
        for step in steps:
            assert step.sample_ids.tolist() == expected.sample_ids.tolist()
            assert (step.trained_tokens, step.epoch) == (expected.trained_tokens, expected.epoch)


def test_tokens_labels_and_counts_are_those_of_the_blocks() -> None:
    blocks = make_blocks(10)
    step = stream(blocks, batch=8, micro=2).next_step()
    inputs = torch.cat([batch["input_ids"] for batch in step.micro_batches])
    labels = torch.cat([batch["labels"] for batch in step.micro_batches])
    assert inputs.dtype == labels.dtype == torch.int64
    assert inputs.shape == labels.shape == (8, SEQ_LEN)
    trained = torch.from_numpy(blocks.trained(step.sample_ids))
    assert torch.equal(labels, torch.where(trained, inputs, -100))
    assert step.trained_tokens == int((labels[:, 1:] != -100).sum())
    assert step.trained_tokens < int((labels != -100).sum())  # some position 0 is marked, and does not count
    assert step.seen_tokens == 8 * (SEQ_LEN - 1)


def test_every_epoch_has_every_sample_once_in_its_own_order() -> None:
    blocks = make_blocks(10)
    batches = stream(blocks, batch=4)
    steps = [batches.next_step() for _ in range(10)]
    ids = np.concatenate([step.sample_ids for step in steps]).reshape(4, 10)
    assert [sorted(epoch) for epoch in ids.tolist()] == [list(range(10))] * 4
    assert len({tuple(epoch) for epoch in ids.tolist()}) == 4
    assert [step.epoch for step in steps] == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]
    order = {"num_blocks": 10, "seed": 7, "shuffle": True, "documents_apart": False}
    assert batches.state() == {"epoch": 4, "index": 0, "position": 40, **order}
    other = stream(blocks, batch=10, seed=8).next_step().sample_ids.tolist()
    assert other != ids[0].tolist()


def test_the_order_is_the_same_for_good() -> None:
    """A saved run must go on with the order it began with, in later versions too."""
    assert stream(make_blocks(10), batch=10).next_step().sample_ids.tolist() == [6, 3, 4, 9, 0, 2, 8, 7, 5, 1]


def test_without_shuffling_the_blocks_come_in_order() -> None:
    batches = stream(make_blocks(3), batch=2, shuffle=0)
    assert [batches.next_step().sample_ids.tolist() for _ in range(3)] == [[0, 1], [2, 0], [1, 2]]


def test_a_batch_may_span_several_epochs() -> None:
    step = stream(make_blocks(3), batch=8).next_step()
    assert sorted(step.sample_ids[:3]) == sorted(step.sample_ids[3:6]) == [0, 1, 2]
    assert len(step.micro_batches) == 8


@pytest.mark.parametrize("position", range(0, 45, 4))
def test_resuming_anywhere_equals_going_on(position: int) -> None:
    blocks = make_blocks(10)
    uninterrupted, resumed = stream(blocks), stream(blocks, position=position)
    while uninterrupted.position < position:
        uninterrupted.next_step()
    for _ in range(5):
        expected, found = uninterrupted.next_step(), resumed.next_step()
        assert found.sample_ids.tolist() == expected.sample_ids.tolist()
        assert torch.equal(found.micro_batches[0]["labels"], expected.micro_batches[0]["labels"])
        assert uninterrupted.state() == resumed.state()


def test_resuming_with_other_ranks_goes_on_where_the_run_stopped() -> None:
    blocks = make_blocks(10)
    one = stream(blocks, micro=2)
    for _ in range(3):
        one.next_step()
    two = stream(blocks, micro=1, rank=1, world=2, position=one.state()["position"])
    assert two.next_step().sample_ids.tolist() == one.next_step().sample_ids.tolist()


def test_the_saved_order_is_compared_with_the_present_one() -> None:
    batches = stream(make_blocks(10))
    batches.next_step()
    saved = json.loads(json.dumps(batches.state()))
    assert saved == batches.state()
    assert check_same_order(saved, stream(make_blocks(10), batch=8, micro=2, rank=1, world=2, position=4)) == []
    (seed,) = check_same_order(saved, stream(make_blocks(10), seed=8))
    assert seed == "train.seed=8, but was 7 at the save: set train.seed=7"
    (shuffle,) = check_same_order(saved, stream(make_blocks(10), shuffle=0))
    assert shuffle == "data.shuffle=false, but was true at the save: set data.shuffle=true"
    (count,) = check_same_order(saved, stream(make_blocks(11)))
    assert count.startswith("data gives 11 blocks for training, but gave 10 at the save: restore the data")
    assert len(check_same_order(saved, stream(make_blocks(9), seed=8, shuffle=0))) == 3


def packed_blocks(count: int) -> Blocks:
    """Blocks in which a second document starts at position 2."""
    tokens = (100 * np.arange(count)[:, None] + np.arange(SEQ_LEN)).astype(np.int32)
    starts = np.packbits(np.tile(np.isin(np.arange(SEQ_LEN), (0, 2)), (count, 1)), axis=1)
    return Blocks(tokens, starts=starts, restarts=np.ones(count, dtype=np.int32))


def test_documents_apart_change_labels_and_positions_and_not_the_order() -> None:
    together, apart = packed_blocks(10), packed_blocks(10).documents_apart()
    for _ in range(3):
        one, other = stream(together, micro=2), stream(apart, micro=2)
        before, after = one.next_step(), other.next_step()
        assert after.sample_ids.tolist() == before.sample_ids.tolist()
        assert (before.trained_tokens, after.trained_tokens) == (4 * 5, 4 * 4)
        for plain, packed in zip(before.micro_batches, after.micro_batches, strict=True):
            assert plain.keys() == {"input_ids", "labels"}
            assert torch.equal(packed["input_ids"], plain["input_ids"])
            assert packed["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3]] * 2
            assert (packed["labels"] != plain["labels"]).nonzero()[:, 1].tolist() == [2, 2]
            assert (packed["labels"][:, 2] == -100).all()
    (held_out,) = eval_micro_batches(apart, micro_batch_size=10, rank=0, world_size=1, max_batches=0)
    assert int((held_out["labels"][:, 1:] != -100).sum()) == int(apart.trained_tokens.sum()) == 40
    assert held_out["position_ids"].shape == (10, SEQ_LEN)


def test_a_resume_keeps_the_packing() -> None:
    together, apart = stream(packed_blocks(10)), stream(packed_blocks(10).documents_apart())
    assert check_same_order(apart.state(), apart) == check_same_order(together.state(), together) == []
    (problem,) = check_same_order(apart.state(), together)
    assert problem == "data.packing=stream, but was documents at the save: set data.packing=documents"
    older = {name: value for name, value in together.state().items() if name != "documents_apart"}
    assert check_same_order(older, together) == []
    assert len(check_same_order(older, apart)) == 1


def test_a_save_without_its_order_is_refused() -> None:
    old = {"epoch": 0, "index": 4, "position": 4}
    (problem,) = check_same_order(old, stream(make_blocks(10)))
    assert "num_blocks, seed, shuffle missing" in problem


def test_a_batch_that_does_not_divide_names_all_three() -> None:
    with pytest.raises(
        ConfigError, match=r"train\.global_batch_size=4 .*train\.micro_batch_size=1 times 3 ranks"
    ):
        stream(make_blocks(10), world=3)


@pytest.mark.parametrize("count", [1, 7, 8, 9])
@pytest.mark.parametrize("limit", [0, 1, 2])
def test_evaluation_has_as_many_batches_on_every_rank_and_every_block_once(count: int, limit: int) -> None:
    blocks = make_blocks(count)
    expected = min(-(-count // 4), limit or 99)
    per_rank = [
        list(eval_micro_batches(blocks, micro_batch_size=2, rank=rank, world_size=2, max_batches=limit))
        for rank in (0, 1)
    ]
    assert [len(batches) for batches in per_rank] == [expected, expected]
    batches = [batches[step] for step in range(expected) for batches in per_rank]
    labels = torch.cat([batch["labels"] for batch in batches])
    assert labels.shape == (expected * 4, SEQ_LEN)
    evaluated = min(count, expected * 4)
    assert [i for batch in batches for i in ids_of(batch)][:evaluated] == list(range(evaluated))
    assert (labels[evaluated:] == -100).all()
    assert int((labels[:, 1:] != -100).sum()) == int(blocks.trained_tokens[:evaluated].sum())
