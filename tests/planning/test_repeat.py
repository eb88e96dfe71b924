"""A recording of a few layers that is lengthened to all of them equals, item by item, a recording of all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from remat.activation_checkpointing.mechanisms.mechanism import KEEP
from remat.activation_checkpointing.mechanisms.offload import Taken
from remat.config import compose
from remat.config.options import RunConfig
from remat.model import loss, meta_kernels
from remat.planning import plan, strategy
from remat.planning.plan import Recordings, make_plan
from remat.planning.simulation import repeat, simulate
from remat.planning.simulation.repeat import NotRepeated, Repeat

SMALL = ("model=tiny_llama", "train.seq_len=64", "hardware=2x4090", "hardware.gpus_per_node=2")
DEPTH = 10
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "grouped_mm"}


def run_of(*words: str, depth: int = DEPTH, **fields: Any) -> RunConfig:
    cfg = compose.from_command_line([*SMALL, *words]).run
    architecture = {**cfg.model.architecture, "num_hidden_layers": depth, **fields}
    return replace(cfg, model=replace(cfg.model, architecture=architecture))


def record_short(cfg: RunConfig, decided: strategy.Strategy) -> simulate.Recording:
    moved = any(decision.offload for decision in decided.decisions)
    for reach in repeat.REACHES_OF_MOVES if moved else repeat.REACHES:
        short = strategy.shorten(cfg, decided.decisions, reach)
        assert short is not None
        try:
            return plan._record_layers(cfg, decided, short.decisions(decided.decisions), short, {}, on_gpu=True)
        except NotRepeated as error:
            why = error
    raise why


def record_whole(cfg: RunConfig, decided: strategy.Strategy) -> simulate.Recording:
    return plan._record_layers(cfg, decided, decided.decisions, None, {}, on_gpu=True)


def assert_repeats(cfg: RunConfig) -> None:
    decided = strategy.decide(cfg, world_size=2, can_pin=True)
    assert_same(record_short(cfg, decided), record_whole(cfg, decided))


def assert_same(short: simulate.Recording, whole: simulate.Recording) -> None:
    made, expected = short.timeline, whole.timeline
    assert made.parts == expected.parts
    assert made.backward_begins_at == expected.backward_begins_at
    assert made.ops == expected.ops
    assert dict(made.kept_bytes) == dict(expected.kept_bytes)
    assert {phase: n for phase, n in made.flops.items() if n} == {p: n for p, n in expected.flops.items() if n}
    assert (made.host_bytes, made.num_layers) == (expected.host_bytes, expected.num_layers)
    assert made.moved_bytes == expected.moved_bytes
    assert short.parameters == whole.parameters
    assert short.assumptions == whole.assumptions
    assert sorted(short.graphs) == sorted(whole.graphs)
    # What one event frees at once has no order of its own.
    assert _in_order(made.trace) == _in_order(expected.trace)


def _in_order(trace: Any) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    freed: list[tuple[int, int]] = []
    for entry in zip(trace[::2], trace[1::2], strict=True):
        if entry[0] >= 0 and entry[1] < 0:
            freed.append(entry)
            continue
        found += [*sorted(freed), entry]
        freed = []
    return found + sorted(freed)


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
@pytest.mark.parametrize(
    "words",
    [
        ("checkpointing=none",),
        ("checkpointing=full",),
        ("checkpointing=selective_ops",),
        ("checkpointing=discard_output",),
        ("checkpointing=budget",),
        ("checkpointing=full", "peft=lora"),
    ],
    ids=lambda words: " ".join(words).replace("checkpointing=", ""),
)
def test_a_few_layers_are_recorded_for_all(words: tuple[str, ...], stage: str) -> None:
    assert_repeats(run_of(*words, f"deepspeed.config={stage}"))


@pytest.mark.parametrize(
    ("words", "depth", "fields"),
    [
        (("checkpointing=interval",), 16, {}),  # a period of two layers
        (
            ("checkpointing=uniform", "checkpointing.segment_layers=2"),
            16,
            {},
        ),  # layers that are recomputed together
        (("checkpointing=full",), DEPTH, {"model_type": "mixtral", **EXPERTS}),
        (("checkpointing=full", "peft=qlora", "train.precision=bf16"), DEPTH, {}),
    ],
    ids=["interval", "uniform", "mixtral", "qlora"],
)
def test_longer_periods_experts_and_4_bit_weights_repeat_too(
    words: tuple[str, ...], depth: int, fields: Any
) -> None:
    assert_repeats(run_of(*words, "deepspeed.config=zero2", depth=depth, **fields))


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (("deepspeed.config=zero3", "checkpointing=full"), {}),
        (("deepspeed.config=zero2", "checkpointing=none"), {"model_type": "mixtral", **EXPERTS}),
    ],
    ids=["chunks of the loss", "experts"],
)
def test_results_that_are_remembered_by_their_shapes_change_no_recording(
    words: tuple[str, ...], fields: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 1 << 12)
    cfg = run_of(*words, "train.loss=chunked", depth=2, **fields)
    decided = strategy.decide(cfg, world_size=2, can_pin=True)
    remembered = record_whole(cfg, decided)
    monkeypatch.setattr(meta_kernels._Kernels, "_run", lambda self, func, args, kwargs: func(*args, **kwargs))
    assert_same(remembered, record_whole(cfg, decided))


def test_layers_of_other_kinds_are_told_apart() -> None:
    kinds = ["sliding_attention"] * 6 + ["full_attention"] * 8
    cfg = run_of("checkpointing=full", "deepspeed.config=zero2", depth=14, model_type="qwen3", use_sliding_window=True,
                 sliding_window=16, layer_types=kinds)  # fmt: skip
    decided = strategy.decide(cfg, world_size=2, can_pin=True)
    short = strategy.shorten(cfg, decided.decisions, 1)
    assert short is not None
    assert short.config.layer_types == ["sliding_attention"] * 4 + ["full_attention"] * 4
    assert [r.copies for r in short.repeats] == [2, 4]
    assert_repeats(cfg)


MOVES = {
    "inputs": ("checkpointing=offload",),
    "in 8 bits": ("checkpointing=offload", "checkpointing.offload.dtype=fp8"),
    "all but the last": ("checkpointing=offload", "checkpointing.offload.keep_last_layers=2"),
    "what operations keep": ("checkpointing=selective_ops", "checkpointing.offload.enabled=true"),
    "LoRA": ("checkpointing=offload", "peft=lora"),
    "shared sequences": ("checkpointing=offload", "train.sequence_parallel_size=2", "train.micro_batch_size=1"),
}


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize("stage", ["zero2", "zero3_offload"])
@pytest.mark.parametrize("name", MOVES)
def test_host_memory_of_all_layers_follows_from_what_a_few_take(name: str, stage: str) -> None:
    """Slabs are cut for sizes in their order, so their sum is not the sum of the layers'."""
    words = (*MOVES[name], "checkpointing.offload.min_bytes=0", f"deepspeed.config={stage}")
    assert_repeats(run_of(*words, depth=18))


def test_host_memory_that_is_taken_again_is_recorded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = run_of(
        "checkpointing=offload", "checkpointing.offload.min_bytes=0", "deepspeed.config=zero2", depth=18
    )
    expected = make_plan(cfg, recordings=Recordings()).plan
    monkeypatch.setattr(Taken, "in_a_row", False, raising=False)
    monkeypatch.setattr(Taken, "add", lambda *_: None)
    monkeypatch.setattr(Taken, "__init__", lambda self: vars(self).update(by_layer={}))
    decided = strategy.decide(cfg, world_size=2, can_pin=True)
    with pytest.raises(NotRepeated):
        record_short(cfg, decided)
    assert make_plan(cfg, recordings=Recordings()).plan == expected


def test_layers_that_do_not_do_the_same_are_recorded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal layers of which one gets another treatment behind the back of what compares them."""
    cfg = run_of("checkpointing=full", "deepspeed.config=zero2")
    expected = make_plan(cfg).plan
    decided = strategy.decide(cfg, world_size=2, can_pin=True)
    assert_same(record_short(cfg, decided), record_whole(cfg, decided))
    right = strategy.shorten

    class Wrong(strategy.Shortened):
        def decisions(self, whole: Any) -> Any:
            found = super().decisions(whole)
            place = len(found) // 2
            return [*found[:place], replace(found[place], mechanism=KEEP), *found[place + 1 :]]

    def shorten(*args: Any) -> Any:
        found = right(*args)
        return found and Wrong(found.config, found.layers, found.repeats)

    monkeypatch.setattr(strategy, "shorten", shorten)
    with pytest.raises(NotRepeated):
        record_short(cfg, decided)
    assert make_plan(cfg, recordings=Recordings()).plan == expected


@pytest.mark.parametrize(
    ("keys", "layers", "repeats"),
    [
        ("aaaa", [0, 1, 2, 3], []),
        ("a" * 9, [0, 1, 7, 8], [Repeat(0, 1, 5)]),
        ("b" + "a" * 9, [0, 1, 2, 8, 9], [Repeat(1, 1, 5)]),
        ("ab" * 8, [0, 1, 2, 3, 12, 13, 14, 15], [Repeat(0, 2, 4)]),
        ("a" * 9 + "b" * 8, [0, 1, 7, 8, 9, 10, 15, 16], [Repeat(0, 1, 5), Repeat(4, 1, 4)]),
        ("abcdefgh", list(range(8)), []),
    ],
)
def test_runs_of_equal_layers_are_found(keys: str, layers: list[int], repeats: list[Repeat]) -> None:
    assert repeat.shorten(keys) == (layers, repeats)
    like = repeat.sources(repeats, len(layers)) if repeats else list(range(len(keys)))
    assert [keys[layers[place]] for place in like] == list(keys)
