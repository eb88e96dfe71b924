from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from remat.config.options import AlpacaPrompt, BadRows, ConfigError, DataConfig, DataFormat, RewrittenTurns
from remat.data.blocks import Blocks, RowWriter, TextWriter
from remat.data.formats import (
    ALPACA_WITH_INPUT,
    ALPACA_WITHOUT_INPUT,
    Example,
    encode,
    mask_of,
    trained_mask,
)
from remat.data.rows import BadRowLog, Document, content_of
from remat.data.tokenizer import byte_tokenizer

CHAT = [
    {"role": "system", "content": "s\u00e9"},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "1 \U0001f600"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "bye"},
]
PLAIN_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As templates of reasoning models do: answers before the last question lose their thoughts; those after it have some.
REWRITING_TEMPLATE = (
    "{% set ns = namespace(asked=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>') %}{% if loop.index0 > ns.asked %}"
    "<think>{{ parts[0].removeprefix('<think>') if parts | length > 1 }}</think>{% endif %}{{ parts[-1] }}"
    "{% else %}{{ m.content }}{% endif %}</s>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
THOUGHTS = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "<think>hm</think>1"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "<think>look</think>call"},
    {"role": "tool", "content": "found"},
    {"role": "assistant", "content": "2"},
]


STANFORD = {"alpaca_prompt": AlpacaPrompt.stanford}
PLAIN = DataConfig(format=DataFormat.plain)


def log() -> BadRowLog:
    return BadRowLog(BadRows.skip)


def encode_one(row: Any, data_format: DataFormat, tokenizer: PreTrainedTokenizerFast, **more: Any) -> Example:
    cfg = DataConfig(format=data_format, **more)
    documents = [Document(content_of(row, cfg), "f.jsonl:7", "f.jsonl:7")]
    ((example,),) = encode(documents, cfg, tokenizer, log())
    return example


def trained_text(tokenizer: PreTrainedTokenizerFast, example: Example) -> str:
    assert example.trained is not None
    assert example.ids.shape == example.trained.shape
    return str(tokenizer.decode(example.ids[example.trained]))


def chat_tokenizer(template: str, trim_offsets: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    if trim_offsets:  # as GPT-2's tokenizer and its heirs do
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.chat_template = template
    return tokenizer


def test_plain_ends_documents_and_only_whole_ones() -> None:
    documents = [
        Document("ab", "f:1", "f:1", ends=False),
        Document("c", "f:2", "f:2", starts=False),
        Document("<|end|>d", "g:1", "g:1"),
    ]
    examples = [one for (one,) in encode(documents, PLAIN, byte_tokenizer(), log())]
    assert [e.ids.tolist() for e in examples] == [[97, 98], [99, 256], [256, 100, 256]]


def test_plain_opens_documents_where_the_tokenizer_does() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 258)]
    )
    documents = [Document("a", "f:1", "u", ends=False), Document("b", "f:2", "u", starts=False)]
    examples = [one for (one,) in encode(documents, PLAIN, tokenizer, log())]
    assert [e.ids.tolist() for e in examples] == [[258, 97], [98, 256]]
    alpaca = encode_one(
        {"instruction": "i", "input": "", "output": "o"}, DataFormat.alpaca, tokenizer, **STANFORD
    )
    assert alpaca.ids.tolist().count(258) == 1
    assert trained_text(tokenizer, alpaca) == "o<|end|>"


@pytest.mark.parametrize("given", ["", "some \u20ac"])
def test_alpaca_trains_the_output_and_its_end_only(given: str) -> None:
    tokenizer = byte_tokenizer()
    row = {"instruction": "say {output}", "input": given, "output": "\u00fcber\n"}
    example = encode_one(row, DataFormat.alpaca, tokenizer, **STANFORD)
    prompt = (ALPACA_WITH_INPUT if given else ALPACA_WITHOUT_INPUT).format(**row)
    assert tokenizer.decode(example.ids) == prompt + "\u00fcber\n<|end|>"
    assert prompt.endswith("### Response:\n")
    assert "say {output}" in prompt
    assert trained_text(tokenizer, example) == "\u00fcber\n<|end|>"
    assert not example.trained[: len(prompt.encode())].any()  # type: ignore[index]


def test_chat_with_generation_markers() -> None:
    tokenizer = byte_tokenizer()
    example = encode_one({"messages": CHAT, "tools": None}, DataFormat.chat, tokenizer)
    assert tokenizer.decode(example.ids) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert trained_text(tokenizer, example) == "1 \U0001f600<|end|>2<|end|>"


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_chat_spans_that_begin_and_end_with_spaces_or_wide_characters(trim_offsets: bool) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A: {%- generation %} {{ m.content }} "
        "{% endgeneration -%} \n{% else %}U: {{ m.content }}\n{% endif %}{% endfor %}"
    )
    tokenizer = chat_tokenizer(template, trim_offsets)
    example = encode_one({"messages": CHAT, "tools": None}, DataFormat.chat, tokenizer)
    assert trained_text(tokenizer, example) == " 1 \U0001f600  2 "
    ending_wide = template.replace(" {{ m.content }} ", "{{ m.content }}")
    tokenizer = chat_tokenizer(ending_wide, trim_offsets)
    example = encode_one({"messages": CHAT[:3], "tools": None}, DataFormat.chat, tokenizer)
    assert trained_text(tokenizer, example) == "1 \U0001f600"


MANY_WRITINGS = (
    "<s>U: caf\u00e9 e\u0301 \ufb01ne \U0001f600\U0001f44d\n\n  a  b <s>A:\t\u4f60\u597d, hello hello\n"
)
WRITTEN_BY = {  # normalizer, pre-tokenizer, post-processor
    "bytes": (None, pre_tokenizers.ByteLevel(add_prefix_space=False), None),
    "bytes, trimmed": (None, pre_tokenizers.ByteLevel(), processors.ByteLevel(trim_offsets=True)),
    "composed bytes": (normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=False), None),
    "metaspace": (None, pre_tokenizers.Metaspace(), None),
    "prepended": (
        normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
        None,
        None,
    ),
    "words": (
        normalizers.BertNormalizer(strip_accents=True),
        pre_tokenizers.BertPreTokenizer(),
        None,
    ),
}


@pytest.mark.parametrize("kind", WRITTEN_BY)
def test_the_ends_of_a_span_tell_the_same_tokens_as_all_offsets(kind: str) -> None:
    tokenizer = Tokenizer(models.BPE(unk_token="?", byte_fallback=kind == "prepended"))
    normalizer, splitter, processor = WRITTEN_BY[kind]
    if normalizer:
        tokenizer.normalizer = normalizer
    if splitter:
        tokenizer.pre_tokenizer = splitter
    if processor:
        tokenizer.post_processor = processor
    trainer = trainers.BpeTrainer(special_tokens=["?", "<s>"], vocab_size=300, show_progress=False)
    tokenizer.train_from_iterator([MANY_WRITINGS] * 3, trainer)
    encoding = tokenizer.encode(MANY_WRITINGS, add_special_tokens=False)
    offsets, ends = np.array(encoding.offsets), range(len(MANY_WRITINGS) + 1)
    found = [[(begin, end)] for begin in ends for end in ends[begin:]]
    assert all((mask_of(encoding, spans) == trained_mask(offsets, spans)).all() for spans in found)
    both = [(3, 9), (20, len(MANY_WRITINGS))]
    assert (mask_of(encoding, both) == trained_mask(offsets, both)).all()


def test_chat_without_markers_is_found_by_its_prefixes() -> None:
    tokenizer = chat_tokenizer(PLAIN_TEMPLATE)
    example = encode_one({"messages": CHAT, "tools": None}, DataFormat.chat, tokenizer)
    assert tokenizer.decode(example.ids).startswith("<system>s\u00e9</s>\n<user>one?</s>\n<assistant>1 ")
    assert trained_text(tokenizer, example) == "1 \U0001f600</s>\n2</s>\n"


def test_a_token_over_the_border_of_prompt_and_answer_is_not_trained() -> None:
    # ">h" is one token here; the model is never asked to produce it after a prompt that ends with ">".
    words = ["<user>", "q</s>\n", "<assistant", ">h", "i</s>\n"]
    tokenizer = Tokenizer(
        models.WordLevel({word: place for place, word in enumerate([*words, "?"])}, unk_token="?")
    )
    pieces = [pre_tokenizers.Split(word, "isolated") for word in words]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="?", chat_template=PLAIN_TEMPLATE)
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "hi"}]
    example = encode_one({"messages": chat, "tools": None}, DataFormat.chat, fast)
    assert example.ids.tolist() == [0, 1, 2, 3, 4]
    assert example.trained is not None
    assert example.trained.tolist() == [False, False, False, False, True]


def rows_of(messages: list[dict[str, str]], template: str, **more: Any) -> list[tuple[str, str]]:
    """(whole text, trained text) of each row that a chat becomes."""
    tokenizer, cfg = chat_tokenizer(template), DataConfig(format=DataFormat.chat, **more)
    documents = [Document(content_of({"messages": messages}, cfg), "f.jsonl:7", "f.jsonl:7")]
    (found,) = encode(documents, cfg, tokenizer, log())
    return [(str(tokenizer.decode(one.ids)), trained_text(tokenizer, one)) for one in found]


def test_turns_that_the_template_rewrites_are_trained_as_they_are_said() -> None:
    """What a row trains is what the model sees when it answers there, and each turn is trained once."""
    tokenizer = chat_tokenizer(REWRITING_TEMPLATE)
    asked = tokenizer.apply_chat_template(THOUGHTS[:1], tokenize=False, add_generation_prompt=True)
    first, second = rows_of(THOUGHTS, REWRITING_TEMPLATE)
    assert first == (f"{asked}<think>hm</think>1</s>\n", "<think>hm</think>1</s>\n")
    assert second[0] == "<user>one?</s>\n<assistant>1</s>\n<user>two?</s>\n" + (
        "<assistant><think>look</think>call</s>\n<tool>found</s>\n<assistant><think></think>2</s>\n"
    )
    assert second[1] == "<think>look</think>call</s>\n<think></think>2</s>\n", "both follow the last question"
    # After the last question nothing is rewritten; a chat that ends with a question trains the turns before it.
    assert rows_of(THOUGHTS[2:], REWRITING_TEMPLATE) == [(second[0].partition("1</s>\n")[2], second[1])]
    assert rows_of(THOUGHTS[:3], REWRITING_TEMPLATE) == [first]
    everything = [text for _, text in rows_of(THOUGHTS, REWRITING_TEMPLATE, train_on_roles="all")]
    assert everything == [
        first[1],
        "one?</s>\ntwo?</s>\n<think>look</think>call</s>\nfound</s>\n<think></think>2</s>\n",
    ]


def test_only_the_turns_that_stay_as_they_were_said_are_trained_where_asked() -> None:
    last: dict[str, Any] = {"rewritten_turns": RewrittenTurns.last}
    assert rows_of(THOUGHTS, REWRITING_TEMPLATE, **last) == rows_of(THOUGHTS, REWRITING_TEMPLATE)[1:]
    assert rows_of(CHAT, PLAIN_TEMPLATE, **last) == rows_of(CHAT, PLAIN_TEMPLATE)
    cfg = DataConfig(format=DataFormat.chat, **last)
    documents = [Document(content_of({"messages": THOUGHTS}, cfg), "f.jsonl:7", "f.jsonl:7")]
    ((example,),) = encode(documents, cfg, chat_tokenizer(REWRITING_TEMPLATE), log())
    assert example.turns_left_out == 1


def test_a_turn_that_opens_otherwise_than_its_generation_prompt_is_refused() -> None:
    template = PLAIN_TEMPLATE.replace("<assistant>{% endif %}", "<assistant><think>{% endif %}")
    with pytest.raises(ConfigError, match=r"f\.jsonl:7 .*assistant message 5 .*generation"):
        rows_of(CHAT, template)


def test_what_the_template_refuses_is_a_broken_row() -> None:
    tokenizer = chat_tokenizer("{{ raise_exception('no system role') if messages[0].role == 'system' }}x")
    bad_rows = log()
    cfg = DataConfig(format=DataFormat.chat)
    chats = [Document(content_of({"messages": CHAT[n:]}, cfg), f"f.jsonl:{n + 1}", "u") for n in (0, 1)]
    first, (second,) = encode(chats, cfg, tokenizer, bad_rows)
    assert first == []
    assert trained_text(tokenizer, second) == ""  # this template leaves out what the assistant said
    assert bad_rows.first[0] == "f.jsonl:1: the chat template refuses it: no system role"


def test_chat_needs_a_template() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="chat template"):
        encode_one({"messages": CHAT, "tools": None}, DataFormat.chat, tokenizer)


def test_packing_is_exact(tmp_path: Path) -> None:
    writer = TextWriter(tmp_path, "train", seq_len=4)
    for length, start in ((3, 0), (6, 3), (1, 9), (0, 10), (4, 10)):
        writer.add(np.arange(start, start + length, dtype=np.int32))
        writer.flush()
    counts = writer.close()
    blocks = Blocks.open(tmp_path, "train", 4)
    assert blocks.tokens(np.arange(3)).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert blocks.trained(np.arange(3)).all()
    assert blocks.trained_tokens.tolist() == [3, 3, 3]
    assert (counts.documents, counts.blocks, counts.tokens, counts.trained_tokens) == (5, 3, 12, 9)
    assert counts.dropped_tokens == 2


def test_a_block_knows_where_its_documents_start(tmp_path: Path) -> None:
    """Whatever the tokens are: the third document holds the end token of the others, 9, as text may."""
    writer = TextWriter(tmp_path, "train", seq_len=4)
    pieces = [
        (True, [1, 9]),
        (True, []),
        (False, [2, 3, 9]),
        (True, [9, 9, 4]),
        (False, [5]),
        (True, [6, 7, 8, 9]),
    ]
    for starts, ids in pieces:
        if starts:
            writer.begin()
        writer.add(np.array(ids, dtype=np.int32))
        writer.flush()
    counts = writer.close()
    stream = Blocks.open(tmp_path, "train", 4)
    apart, every = stream.documents_apart(), np.arange(3)
    assert apart.tokens(every).tolist() == [[1, 9, 2, 3], [9, 9, 9, 4], [5, 6, 7, 8]]
    assert apart.positions(every).tolist() == [[0, 1, 0, 1], [0, 0, 1, 2], [0, 0, 1, 2]]
    assert apart.trained(every).tolist() == [
        [1, 1, 0, 1],
        [1, 0, 1, 1],
        [1, 0, 1, 1],
    ]  # position 0 never counts
    assert apart.trained_tokens.tolist() == apart.trained(every)[:, 1:].sum(1).tolist() == [2, 2, 2]
    assert stream.trained(every).all()
    assert stream.trained_tokens.tolist() == [3, 3, 3]
    assert (counts.restarts, counts.trained_tokens, counts.blocks) == (3, 9, 3)


def test_examples_are_padded_truncated_dropped_and_counted(tmp_path: Path) -> None:
    writer = RowWriter(tmp_path, "train", seq_len=4, packed=False, pad_id=9)

    def add(ids: list[int], trained: list[int]) -> None:
        writer.add(np.array(ids, dtype=np.int32), np.array(trained, dtype=bool))

    add([1, 2, 3], [0, 1, 1])
    add([1, 2, 3, 4, 5], [0, 0, 0, 1, 1])  # truncated
    add([1, 2, 3, 4, 5], [0, 0, 0, 0, 1])  # truncated, and nothing is left to train
    add([1, 2], [1, 0])  # position 0 is never a target
    add([5], [1])
    counts = writer.close()
    blocks = Blocks.open(tmp_path, "train", 4)
    both = np.arange(2)
    assert blocks.tokens(both).tolist() == [[1, 2, 3, 9], [1, 2, 3, 4]]
    assert blocks.trained(both).tolist() == [[False, True, True, False], [False, False, False, True]]
    assert blocks.trained_tokens.tolist() == [2, 1]
    assert blocks.lengths.tolist() == [3, 4]
    assert (counts.documents, counts.blocks, counts.tokens, counts.trained_tokens) == (5, 2, 7, 3)
    assert (counts.truncated_documents, counts.truncated_tokens, counts.dropped_documents) == (2, 2, 3)
