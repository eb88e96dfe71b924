"""Ranks that share sequences train what one rank trains that has whole ones: losses, gradient norms and weights."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from remat.activation_checkpointing import apply, policy
from remat.activation_checkpointing.mechanisms.counters import PolicyNotApplied
from remat.config.options import (
    Attention,
    CheckpointingConfig,
    LossKind,
    ModelConfig,
    Packing,
    Policy,
    SelectiveOpsConfig,
    TrainConfig,
)
from remat.data.batches import Part, own_part
from remat.data.blocks import Blocks
from remat.machine import distributed
from remat.model import loss
from remat.model.packing import Packed
from remat.parallel import sequence_parallel, sequence_trial, ulysses
from remat.parallel.sequence_parallel import SequenceParallel
from remat.planning.simulation import simulate
from remat.planning.simulation.types import Simulation, ZeroSettings
from remat.training import proof
from tests.support import shared_sequences, small_models, tiny
from tests.support.grids import cases
from tests.support.pool import RankPool
from tests.support.shared_sequences import Cell

pytestmark = pytest.mark.launch

SAMPLE = [  # each kind of choice; those of full, none and tiles are in the tests below and of one rank
    Cell("llama", "zero1", "none", "whole", "plain"),
    Cell("mixtral", "zero3", "budget", "whole", "packed"),
    Cell("gemma3_text", "zero2", "tiles", "lora", "packed"),
]
CELLS = [
    cell if cell in SAMPLE else pytest.param(cell, marks=pytest.mark.exhaustive)
    for cell in shared_sequences.every_cell()
]
LOSS, NORM = 5e-7, 5e-6  # relative: sums in another order, in float32
WEIGHTS = 2e-4  # of the largest weight of a matrix: Adam makes rounding of small gradients larger


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_sequences.make_workshop(tmp_path_factory.mktemp("shared_sequences"))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """Pools of their own: whole runs change more of a process than an engine does."""
    pools: dict[int, RankPool] = {}

    def of(size: int) -> RankPool:
        return pools.setdefault(size, pools.get(size) or RankPool(size))

    yield of
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="module")
def alone(workshop: Path, ranks: Callable[[int], RankPool]) -> Callable[[Cell], dict[str, Any]]:
    known: dict[str, dict[str, Any]] = {}

    def of(cell: Cell) -> dict[str, Any]:
        words = cell.alone(workshop)
        if str(words) not in known:
            (known[str(words)],) = ranks(1).run(shared_sequences.run, words=words)
        return known[str(words)]

    return of


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_ranks_that_share_sequences_train_what_one_rank_does(
    cell: Cell, workshop: Path, ranks: Callable[[int], RankPool], alone: Callable[[Cell], dict[str, Any]]
) -> None:
    expected = alone(cell)
    for found in ranks(cell.world).run(shared_sequences.run, words=cell.words(workshop)):
        assert found["losses"] == pytest.approx(expected["losses"], rel=LOSS)
        assert found["norms"] == pytest.approx(expected["norms"], rel=NORM)
        assert found["weights"].keys() == expected["weights"].keys()
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(
                found["weights"][name], weight, rtol=0, atol=WEIGHTS * float(weight.abs().max())
            )
    kept = json.loads((found["folder"] / "ledger.json").read_text())["kept_bytes_per_layer"]
    assert kept["measured"] == kept["planned"]


@pytest.mark.exhaustive  # of the layers alone: tests/runs/test_tiles_ranks.py
def test_proof_json_shows_that_no_slice_runs_a_third_time(
    workshop: Path, ranks: Callable[[int], RankPool]
) -> None:
    """The FLOPs that slices run again are those of whole MLPs; of one slice no more than its share exists."""
    found = {}
    for name in ("tiles", "full"):
        cell = Cell("llama", "zero3", name, "whole", "plain")
        words = [*cell.words(workshop), f"name=third_time_{name}", STEPS]
        folder = ranks(2).run(shared_sequences.run, words=words)[0]["folder"]
        found[name] = json.loads((folder / "proof.json").read_text())
    assert found["tiles"]["first_micro_batch_flops"] == found["full"]["first_micro_batch_flops"]
    for sliced, whole in zip(found["tiles"]["layers"], found["full"]["layers"], strict=True):
        assert sliced["slices"] == sliced["slices_run_again"] == 3 * whole["forwards"]
        assert sliced["slices_run_a_third_time"] == whole["slices"] == 0
        assert sliced["mlp_peak_bytes"] < whole["mlp_peak_bytes"] / 2
        assert sliced["kept_bytes"] == whole["kept_bytes"]


def train_with_even_noise(words: list[str]) -> dict[str, Any]:
    """Train with noise that is as large as it may be everywhere, in the place of random noise."""
    with mock.patch.object(torch.Tensor, "uniform_", lambda noise, _, most, **__: noise.fill_(most)):
        return shared_sequences.run(words)


@pytest.mark.exhaustive  # the scale of a block is held by tests/model/test_lora.py
def test_noise_on_embeddings_is_scaled_by_the_whole_sequence(
    workshop: Path, ranks: Callable[[int], RankPool], alone: Callable[[Cell], dict[str, Any]]
) -> None:
    cell, noise = SAMPLE[0], ["train.neftune_alpha=5"]
    (expected,) = ranks(1).run(train_with_even_noise, words=[*cell.alone(workshop), *noise, "name=noise_alone"])
    found = ranks(2).run(train_with_even_noise, words=[*cell.words(workshop), *noise, "name=noise"])[0]
    for each, within in (("losses", LOSS), ("norms", NORM)):
        assert found[each] == pytest.approx(expected[each], rel=within)
        assert found[each] != pytest.approx(alone(cell)[each], rel=1e-3)


STEPS = "train.steps=1"
APART, SHARED = "train.sequence_parallel_size=1", "train.sequence_parallel_size=2"
RESUMED = {  # the ranks that save after two steps, and those that go on
    "shared_then_apart": ((2, SHARED), (2, APART)),
    "apart_then_shared": ((2, APART), (2, SHARED)),
    "one_then_shared": ((1, APART), (2, SHARED)),
    "four_then_two": ((4, "train.sequence_parallel_size=4"), (2, SHARED)),
}


@pytest.fixture(scope="module")
def uninterrupted(workshop: Path, ranks: Callable[[int], RankPool]) -> Callable[..., dict[str, Any]]:
    """What one rank gives for words, once."""

    @functools.cache
    def of(*words: str) -> dict[str, Any]:
        (found,) = ranks(1).run(shared_sequences.run, words=[*words, "name=uninterrupted", APART])
        return dict(found)

    return of


@pytest.mark.parametrize("name", cases(RESUMED, {"shared_then_apart", "apart_then_shared"}))
def test_a_state_is_resumed_by_ranks_that_share_sequences_otherwise(
    name: str,
    workshop: Path,
    ranks: Callable[[int], RankPool],
    uninterrupted: Callable[..., dict[str, Any]],
) -> None:
    """A held-out loss and the export at the end are those of the resumed run too."""
    cell, ((before, first), (after, then)) = SAMPLE[0], RESUMED[name]
    held_out = ["deepspeed.config=zero2", "data.eval_fraction=0.2", "save.export=true"]
    plain = [*cell.alone(workshop), *held_out]
    words = [*plain, f"name={name}"]
    ranks(before).run(shared_sequences.run, words=[*words, first, "train.stop_at=2"])
    found = ranks(after).run(shared_sequences.run, words=[*words, then, "resume=auto"])[0]
    expected = uninterrupted(*plain)
    assert found["losses"] == pytest.approx(expected["losses"], rel=LOSS)
    assert found["evaluated"][-1:] == pytest.approx(expected["evaluated"][-1:], rel=LOSS)
    exported = load_file(found["folder"] / "export" / "model.safetensors")
    for weight_name, weight in expected["weights"].items():
        atol = WEIGHTS * float(weight.abs().max())
        torch.testing.assert_close(exported[weight_name], weight, rtol=0, atol=atol)


def test_the_proof_says_who_shares(workshop: Path, ranks: Callable[[int], RankPool]) -> None:
    """The runs of the sample leave them; a label that is lost, or another loss, ends a run."""
    cell = SAMPLE[0]
    folder = ranks(2).run(shared_sequences.run, words=[*cell.words(workshop), "name=proven"])[0]["folder"]
    found = json.loads((folder / "proof.json").read_text())["shared_sequences"]
    assert found["ranks"] == 2 and sum(found["trained_tokens_by_rank"]) == found["trained_tokens"] > 0
    assert proof.compare_shared(found) == []
    lost = found | {"trained_tokens_by_rank": [1, 2]}
    assert "the ranks' blocks have 3 trained tokens" in proof.compare_shared(lost)[0]
    other = found | {"loss_of_the_group": [value * 1.01 for value in found["loss_of_the_group"]]}
    assert [text[:6] for text in proof.compare_shared(other)] == ["rank 0", "rank 1"]
    assert found["gradient_norm_of_one_rank"][0] > 0
    rows, seq = 4, shared_sequences.LENGTH  # of two micro-batches
    assert found["tokens_held_by_rank"] == [rows * seq // 2] * 2
    assert found["tokens_gathered"] == seq  # once


def test_the_proof_costs_no_gathers(workshop: Path, ranks: Callable[[int], RankPool]) -> None:
    """Each weight is gathered once in a micro-batch, as planned: DeepSpeed does not learn the order of the proof."""
    cell = Cell("llama", "zero3", "full", "whole", "plain")
    words = [
        *cell.words(workshop),
        "name=gathers",
        "train.micro_batch_size=1",
        "train.global_batch_size=4",
        STEPS,
    ]
    folder = ranks(2).run(shared_sequences.run, words=words)[0]["folder"]
    rows = {row["category"]: row for row in json.loads((folder / "ledger.json").read_text())["rows"]}
    gathered = rows["gathered by ZeRO-3 per micro-batch"]
    assert gathered["measured"] == gathered["planned"] > 0


def train_with_a_fault(words: list[str], fault: str) -> str:
    """Train where a rank's part is not its own, attention gets no mask, or gradients come back twice; what ends it."""
    take, backward = SequenceParallel.take_own, ulysses._Exchange.backward
    beside = SequenceParallel._with_beside

    def neighbour(self: Any, whole: Any) -> Any:
        """Targets of the rank's part, moved by one."""
        found = take(self, whole)
        return found | {"targets": found["targets"].roll(1, 1)}

    def nothing(self: Any, *given: Any) -> Any:
        found = beside(self, *given)
        return found if self._installed.whole else found | {"attention_mask": None}

    def twice(ctx: Any, gradient: Any) -> Any:
        return 2 * backward(ctx, gradient)[0], None

    patches = {
        "targets": mock.patch.object(SequenceParallel, "take_own", neighbour),
        "mask": mock.patch.object(SequenceParallel, "_with_beside", nothing),
        "gradient": mock.patch.object(ulysses._Exchange, "backward", staticmethod(twice)),
    }
    with (
        patches[fault],
        mock.patch.object(sequence_trial, "_problem", lambda *_: ""),  # else it is found there
    ):
        try:
            shared_sequences.run(words)
        except PolicyNotApplied as error:
            return str(error)
    return ""


@pytest.mark.parametrize("fault", cases(["targets", "mask", "gradient"], {"mask"}))
def test_a_run_that_shares_wrongly_ends_before_its_first_step(
    fault: str, workshop: Path, ranks: Callable[[int], RankPool]
) -> None:
    cell = Cell("gemma3_text", "zero2", "none", "whole", "packed")
    words = [*cell.words(workshop), f"name=wrong_{fault}"]
    for text in ranks(2).run(train_with_a_fault, words=words, fault=fault):
        assert "train.sequence_parallel_size=1 trains this model" in text
        assert ("the loss of 2 ranks" in text) == (fault != "gradient")
        assert "the gradient norm of 2 ranks" in text
    written = json.loads((workshop / "out" / f"wrong_{fault}" / "run" / "proof.json").read_text())
    assert written["problems"] and not tiny.rows(workshop / "out" / f"wrong_{fault}" / "run")


ROWS, SEQ, HEADS = 2, 64, 4
POLICIES = {
    "none": CheckpointingConfig(policy=Policy.none),
    "full": CheckpointingConfig(),
    "selective_linears": CheckpointingConfig(
        policy=Policy.selective_ops,
        selective_ops=SelectiveOpsConfig(save=["attention"], save_linears=["q", "k", "v"]),
    ),
    "attention_again": CheckpointingConfig(
        policy=Policy.selective_modules, recompute_modules=["core_attention"]
    ),
}
FAMILIES = ["llama", "qwen3", "gemma3_text"]
PACKED = {"plain": Packed(Packing.stream, ""), "packed": Packed(Packing.documents, "")}
PEAK = 0.02  # in models of 0.6 MB, of which a mask is 1 %
CPU = torch.device("cpu")
EXCHANGE = ulysses.RankGroup.exchange


def exchange(group: ulysses.RankGroup, blocks: torch.Tensor) -> torch.Tensor:
    """Exchange blocks, and wait until gloo's thread has let go of them too, as a stream of a GPU has."""
    found = EXCHANGE(group, blocks)
    time.sleep(0.002)
    return found


def model(family: str) -> Any:
    return small_models.build(family, num_attention_heads=HEADS, num_key_value_heads=1)


def counted(family: str, name: str, data: str) -> tuple[list[int], int]:
    """What each layer keeps on this rank, and the peak of a micro-batch; two ranks share the sequence."""
    _, group = sequence_parallel.join(distributed.current(), 2, timeout_minutes=5)
    assert group is not None
    net, cfg = model(family), POLICIES[name]
    sequence = SequenceParallel(net, group, PACKED[data], Attention.sdpa)
    decisions = policy.decide_layers(cfg, small_models.SIZES["num_hidden_layers"], zero_stage=0)
    applied = apply.apply(net, decisions, cfg, zero_stage=0)
    starts = np.zeros((ROWS, SEQ), dtype=bool)
    starts[:, [0, 20]] = True
    ids = (np.arange(ROWS * SEQ, dtype=np.int32) % 60).reshape(ROWS, SEQ)
    blocks = Blocks(ids, starts=np.packbits(starts, axis=1), restarts=np.ones(ROWS, dtype=np.int32))
    blocks = blocks.documents_apart() if data == "packed" else blocks
    own = own_part(blocks, np.arange(ROWS), Part(group.rank, group.size))
    watch, token_loss = applied.watch(CPU), loss.TokenLoss(net, LossKind.full)
    waiting = mock.patch.object(ulysses.RankGroup, "exchange", exchange)
    with waiting, applied.micro_batch(), watch:
        value = token_loss(net, sequence.inputs(own, CPU))
        watch.forward_done()
        value.backward()
        del value
    applied.remove()
    sequence.remove()
    return [watch.kept_bytes.get(layer, 0) for layer in range(len(decisions))], watch.peak_bytes


def planned(family: str, name: str, data: str, ranks: int) -> Simulation:
    net, cfg = model(family).to("meta"), POLICIES[name]
    train = TrainConfig(sequence_parallel_size=ranks)
    given = sequence_parallel.planned(train, ModelConfig(), PACKED[data], net)
    decisions = policy.decide_layers(cfg, small_models.SIZES["num_hidden_layers"], zero_stage=0)
    with given as inputs:
        applied = apply.apply(net, decisions, cfg, zero_stage=0, device=torch.device("meta"))
        recording = simulate.record(
            net,
            loss=loss.TokenLoss(net, LossKind.full, verify=False),
            scope=applied.scope,
            around=applied.micro_batch(),
            stage_3=False,
            micro_batch_size=ROWS,
            seq_len=SEQ,
            given=inputs,
            packed=data == "packed",
            workspaces=False,
            on_gpu=False,
        )
        applied.remove()
    return recording.under(ZeroSettings(stage=0, world_size=1, reduce_bucket_size=0, overlap_comm=False))


@pytest.mark.sample(one_in=4)
@pytest.mark.parametrize("data", list(PACKED))
@pytest.mark.parametrize("name", list(POLICIES))
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_rank_keeps_is_what_was_planned(family: str, name: str, data: str, two_ranks: RankPool) -> None:
    found = planned(family, name, data, 2)
    for kept, peak in two_ranks.run(counted, family=family, name=name, data=data):
        assert kept == found.kept_bytes
        assert peak == pytest.approx(found.peak.total_bytes, rel=PEAK)


def test_a_rank_keeps_its_share_of_the_sequence() -> None:
    alone, shared = (planned("llama", "full", "plain", ranks) for ranks in (1, 2))
    assert [2 * kept for kept in shared.kept_bytes] == alone.kept_bytes


@pytest.mark.parametrize(("name", "passes"), [("none", 2), ("full", 3)])
def test_exchanged_bytes_are_those_of_queries_keys_values_and_results(name: str, passes: int) -> None:
    """Once in forward, once in backward, and once more where the layer runs again. Each rank gets a head of keys."""
    layers, hidden = small_models.SIZES["num_hidden_layers"], small_models.SIZES["hidden_size"]
    token = (
        hidden + 2 * 2 * hidden // HEADS + hidden
    ) * 4  # queries, two heads of keys and values, results; in fp32
    assert planned("llama", name, "plain", 2).exchanged_bytes == passes * layers * ROWS * SEQ // 2 * token
