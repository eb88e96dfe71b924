"""Several sources as one: their shares, their order, their cache, and what is refused."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remat.config import compose, validation
from remat.config.options import (
    ConfigError,
    DataConfig,
    DataFormat,
    DataSource,
    MixedSource,
    ModelConfig,
    Packing,
)
from remat.data.batches import GlobalBatches, eval_micro_batches, micro_batch
from remat.data.blocks import Blocks
from remat.data.cache import Splits, open_blocks, summary
from remat.data.first_look import look_first
from remat.data.mixture import Mixture
from remat.data.tokenizer import byte_tokenizer
from tests.support.chats import make_chats

SEQ_LEN = 128


def blocks(first: int, count: int, full: int = 4) -> Blocks:
    """Block i is all `first` + i, of which `full` tokens are no padding."""
    tokens = np.repeat(first + np.arange(count), 4).reshape(count, 4).astype(np.int32)
    return Blocks(tokens, lengths=np.full(count, full, dtype=np.int32))


def stream(mixture: Blocks, **more: Any) -> GlobalBatches:
    options = {
        "global_batch_size": 4,
        "micro_batch_size": 1,
        "rank": 0,
        "world_size": 1,
        "seed": 7,
        "shuffle": True,
    }
    return GlobalBatches(mixture, **(options | more))


def epoch(mixture: Mixture, number: int, shuffle: bool = True) -> list[int]:
    return mixture.tokens(mixture.order(7, number, shuffle))[:, 0].tolist()


def test_weights_are_shares_of_the_tokens_and_an_epoch_ends_with_the_first_source() -> None:
    """Blocks of the second source are half full, so it has twice as many of them."""
    mixture = Mixture({"a": blocks(100, 30), "b": blocks(200, 60, full=2)}, {"a": 3, "b": 2})
    assert mixture.blocks_of == {"a": 30, "b": 40}
    assert (mixture.epoch_length, len(mixture)) == (70, 90)
    assert mixture.shares() == {"a": 0.6, "b": 0.4}
    assert mixture.passes() == {"a": 1.0, "b": 40 / 60}
    assert mixture.seen_of(mixture.order(7, 0, True)) == {"a": 120, "b": 80}
    seen = Counter(epoch(mixture, 0))
    assert set(range(100, 130)) <= set(seen) and set(seen.values()) == {1}


def test_what_an_epoch_leaves_out_comes_in_the_next_one() -> None:
    mixture = Mixture({"a": blocks(100, 10), "b": blocks(200, 30)}, {"a": 1, "b": 2})
    seen: Counter[int] = Counter()
    for number in range(3):
        found = epoch(mixture, number)
        assert len(found) == 30
        seen.update(found)
    assert {seen[token] for token in range(100, 110)} == {3}
    assert {seen[token] for token in range(200, 230)} == {2}
    assert epoch(mixture, 0) != epoch(mixture, 1)


def test_the_order_of_a_source_does_not_depend_on_the_others() -> None:
    def of_a(parts: dict[str, Blocks], weights: dict[str, float]) -> list[int]:
        mixture = Mixture(parts, weights)
        own = epoch_of_a = [token for token in epoch(mixture, 0) if token < 200]
        assert sorted(own) == list(range(100, 110))
        order = mixture.order(7, 0, True)
        assert len(epoch_of_a) == (order < 10).sum()
        return own

    a = blocks(100, 10)
    alone = of_a({"a": a, "b": blocks(200, 40)}, {"a": 1, "b": 1})
    # Which places a source has follows from the mixture; which of its blocks an epoch takes does not.
    short = Mixture({"a": a, "b": blocks(200, 2)}, {"a": 2, "b": 1})
    other = Mixture({"a": a, "c": blocks(300, 4)}, {"a": 1, "c": 1})
    assert {token for token in epoch(short, 0) if token < 200} == {
        token for token in epoch(other, 0) if token < 200
    }
    assert sorted(alone) == list(range(100, 110))


def test_without_shuffling_the_sources_alternate_and_keep_their_order() -> None:
    mixture = Mixture({"a": blocks(100, 2), "b": blocks(200, 9)}, {"a": 1, "b": 3})
    assert epoch(mixture, 0, shuffle=False) == [200, 100, 201, 202, 203, 101, 204, 205]
    assert epoch(mixture, 1, shuffle=False)[:3] == [206, 100, 207]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_order_is_the_same_on_any_number_of_ranks_and_from_any_position(world: int) -> None:
    mixture = Mixture({"a": blocks(100, 7), "b": blocks(200, 16)}, {"a": 1, "b": 2})
    alone = stream(mixture)
    expected = [alone.next_step() for _ in range(12)]  # over two epochs
    for start in range(0, 12, 5):
        ranks = [stream(mixture, rank=rank, world_size=world, position=4 * start) for rank in range(world)]
        for step in expected[start:]:
            found = [rank.next_step() for rank in ranks]
            together = [m["input_ids"] for a in zip(*(f.micro_batches for f in found), strict=True) for m in a]
            assert [each.tolist() for each in together] == [m["input_ids"].tolist() for m in step.micro_batches]
            assert all(each.seen_of == step.seen_of for each in found)
    assert stream(mixture).state()["num_blocks"] == mixture.epoch_length


def test_a_bounded_evaluation_looks_at_every_source() -> None:
    held_out = Mixture({"a": blocks(100, 10), "b": blocks(200, 10)})
    options: dict[str, Any] = {"micro_batch_size": 1, "rank": 0, "world_size": 1}
    found = [b["input_ids"][0, 0].item() for b in eval_micro_batches(held_out, **options, max_batches=4)]
    assert found == [100, 200, 101, 201]
    assert len(list(eval_micro_batches(held_out, **options, max_batches=0))) == 20


@pytest.fixture
def mixed(tmp_path: Path) -> DataConfig:
    """Chats, and texts under a name of their own."""
    texts = [json.dumps({"body": f"{n} is a number. " * (1 + n % 5)}) + "\n" for n in range(900)]
    (tmp_path / "texts.jsonl").write_text("".join(texts))
    return DataConfig(
        source=DataSource.files,
        packing=Packing.documents,
        cache_dir=str(tmp_path / "cache"),
        mix={
            "chats": MixedSource(
                path=str(make_chats(tmp_path / "chats.jsonl", 200)), weight=2, eval_fraction=0.1
            ),
            "texts": MixedSource(path=str(tmp_path / "texts.jsonl"), text_field="body", eval_fraction=0.0),
        },
    )


def opened(cfg: DataConfig) -> Splits:
    return open_blocks(cfg, tokenizer=byte_tokenizer(), seq_len=SEQ_LEN, seed=1, show_progress=False)


def test_sources_of_different_formats_are_mixed_as_each_is_alone(mixed: DataConfig) -> None:
    splits = opened(mixed)
    sources = mixed.sources()
    alone = {name: opened(source) for name, source in sources.items()}
    assert isinstance(splits.train, Mixture) and splits.train.apart and splits.train.of_rows
    start = 0
    for name in ("chats", "texts"):
        own = alone[name].train
        ids = np.arange(len(own))
        expected, found = micro_batch(own, ids), micro_batch(splits.train, start + ids)
        assert found.keys() == expected.keys() == {"input_ids", "labels", "position_ids"}
        assert all(found[key].equal(expected[key]) for key in found)
        start += len(own)
    whole = splits.report["sources"]
    assert whole["chats"]["share"] == pytest.approx(2 / 3, abs=0.02)
    assert max(whole[name]["passes_per_epoch"] for name in whole) == 1
    assert splits.held_out is not None and len(splits.held_out) == len(alone["chats"].held_out or [])
    counts = splits.report["train"]
    assert counts["blocks"] == splits.train.epoch_length
    every = splits.train.order(1, 0, True)
    assert counts["tokens"] == pytest.approx(splits.train.lengths[every].sum(), rel=0.02)
    assert summary(splits.report) == "; ".join(
        f"{name}: {summary(each.report)}" for name, each in alone.items()
    )
    assert re.fullmatch(
        r"chats: 200 documents, \d+ cut at train\.seq_len; texts: 900 documents", summary(splits.report)
    )


def test_the_key_of_a_mixture_changes_with_its_sources_and_its_weights_alone(mixed: DataConfig) -> None:
    def key(**changes: Any) -> str:
        return opened(replace(mixed, mix=mixed.mix | changes)).key

    first = key()
    assert key() == first
    chats, texts = mixed.mix["chats"], mixed.mix["texts"]
    assert key(chats=replace(chats, weight=3.0)) != first
    assert key(chats=replace(chats, train_on_roles="all")) != first
    assert key(texts=replace(texts, eval_fraction=0.2)) != first
    path = Path(texts.path)
    path.write_text(path.read_text() + '{"body": "more"}\n')
    assert key() != first


def test_rows_and_text_cannot_be_mixed_where_documents_cannot_be_kept_apart(mixed: DataConfig) -> None:
    source = replace(mixed, packing=Packing.none)
    with pytest.raises(ConfigError, match=r"data\.mix joins plain text and rows"):
        opened(source)


def problems(mix: dict[str, MixedSource], **more: Any) -> str:
    return "\n".join(validation.data_problems(DataConfig(source=DataSource.files, mix=mix, **more)))


def test_mixtures_that_cannot_be_are_refused_by_the_names_of_their_options() -> None:
    a, b = MixedSource(path="a.jsonl"), MixedSource(path="b.jsonl")
    assert problems({"a": a, "b": b}) == ""
    assert "data.path=x with data.mix: a mixture names" in problems({"a": a, "b": b}, path="x")
    assert "data.mix has the one source a" in problems({"a": a})
    assert "data.mix.b.weight=0 must be above 0" in problems({"a": a, "b": replace(b, weight=0.0)})
    assert "data.mix.b.weight=nan" in problems({"a": a, "b": replace(b, weight=float("nan"))})
    assert "data.mix names a source 'b c'" in problems({"a": a, "b c": b})
    assert "data.mix.b.eval_fraction=2 must" in problems({"a": a, "b": replace(b, eval_fraction=2.0)})
    assert "data.mix: random tokens" in problems({"a": a, "b": MixedSource(source=DataSource.synthetic)})
    idle = replace(b, format=DataFormat.plain, train_on_roles="all")
    assert "data.mix.b.train_on_roles=all has no effect with data.mix.b.format=plain" in problems(
        {"a": a, "b": idle}
    )


def test_the_first_look_finds_each_format_and_a_file_that_two_sources_share(
    mixed: DataConfig, tmp_path: Path
) -> None:
    model = ModelConfig(tokenizer="bytes")
    looked = look_first(mixed, model)
    assert looked.problems == []
    assert {name: each.format for name, each in looked.data.mix.items()} == {"chats": "chat", "texts": "plain"}
    assert looked.data.has_rows and not mixed.has_rows
    both = replace(mixed, mix=mixed.mix | {"again": replace(mixed.mix["chats"], weight=1.0)})
    (problem,) = look_first(both, model).problems
    assert problem.startswith(
        f"data.mix.again.path and data.mix.chats.path both name {tmp_path / 'chats.jsonl'}"
    )
    wrong = replace(mixed, mix=mixed.mix | {"texts": MixedSource(path=mixed.mix["texts"].path)})
    (problem,) = look_first(wrong, model).problems
    assert "has the fields body" in problem and "data.mix.texts.text_field=body" in problem
    Path(wrong.mix["texts"].path).write_text('{"text": 1}\n')
    with pytest.raises(
        ConfigError, match=r"data\.mix\.texts: data\.mix\.texts\.on_bad_row=stop(.|\n)*texts\.jsonl:1"
    ):
        opened(wrong)


def test_a_mixture_is_written_in_one_word_or_option_by_option(tmp_path: Path) -> None:
    words = ["model=tiny_llama", "model.tokenizer=bytes", "recipe=tiny_zero3_offload", "data=files"]
    one = compose.compose_run(
        [*words, "data.mix={a: {path: a.jsonl, weight: 3}, b: {path: b.jsonl, format: chat}}"]
    )
    several = [
        "data.mix.a.path=a.jsonl",
        "data.mix.a.weight=3",
        "data.mix.b.path=b.jsonl",
        "data.mix.b.format=chat",
    ]
    assert compose.compose_run([*words, *several]).run == one.run
    assert one.run.data.mix["a"] == MixedSource(path="a.jsonl", weight=3.0)
    assert one.run.data.sources()["b"].format is DataFormat.chat
    (tmp_path / "config.yaml").write_text(one.yaml)
    assert "weight: 3" in one.yaml
    for word, told in (
        (
            "data.mix.a.wieght=3",
            "data.mix={a: {wieght: 3}}: Key 'wieght' not in 'MixedSource': a source has weight, path",
        ),
        ("data.mix.a.weight=much", "data.mix={a: {weight: much}}: much is not a number"),
        ("data.mix.a.format=chatty", "data.mix={a: {format: chatty}}: Invalid value 'chatty'"),
        ("data.mix=[a,b]", "data.mix=[a,b]"),
    ):
        with pytest.raises(ConfigError) as error:
            compose.compose_run([*words, *several, word])
        assert told in str(error.value), word
    with pytest.raises(ConfigError, match=r"data\.mix\.c\.path is missing"):
        validation.check_launch(compose.compose_run([*words, *several, "data.mix.c.weight=1"]).run)
