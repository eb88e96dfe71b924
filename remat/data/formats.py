"""Turn documents into token ids, and mark which of them carry the loss.

plain   text, closed by the end token; every token is trained
alpaca  a fixed prompt from `instruction` and `input`; only `output` and the end token are trained
chat    the tokenizer's own template over `messages`; only what the assistant says is trained

In a rendered chat the assistant's text is found as spans of characters, which the tokenizer's offsets map to tokens.
There are two ways to find the spans:
1. the template marks them with {% generation %} ... {% endgeneration %};
2. the conversation is rendered up to each assistant turn and with it. This holds only if each of these texts is a
   prefix of the whole; a template that rewrites earlier turns breaks it, and then nothing is trained at all.

transformers' `apply_chat_template(return_assistant_tokens_mask=True)` is not used: in 5.23 it drops every later turn,
or trains to the end of the chat, when a span begins or ends with a space that the tokenizer strips.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from remat.config.options import ConfigError, DataFormat
from remat.data.rows import BadRowLog, Document

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
REMEDY = (
    "Surround what the assistant says with {% generation %} and {% endgeneration %} in chat_template.jinja of a copy "
    "of the tokenizer, and point model.tokenizer at that folder"
)
Spans = list[tuple[int, int]]

# Source: tatsu-lab/stanford_alpaca, train.py (PROMPT_DICT), with a line break after "Response:".
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


class Example(NamedTuple):
    """Tokens of one document: `ids` int32 [length], and `trained` bool [length] or None for all."""

    ids: np.ndarray
    trained: np.ndarray | None = None


def encode(
    documents: list[Document], data_format: DataFormat, tokenizer: PreTrainedTokenizerBase, bad_rows: BadRowLog
) -> list[Example | None]:
    """Return one Example per document; None for a chat that the template refuses, which is then in `bad_rows`.

    Raises ConfigError when the chat template makes it impossible to tell the assistant's tokens from the others.
    """
    if data_format == DataFormat.plain:
        return _plain(documents, tokenizer)
    if data_format == DataFormat.alpaca:
        return _alpaca([_row(document) for document in documents], tokenizer)
    chats = encode_chats([(_row(document), document.origin) for document in documents], tokenizer, bad_rows)
    return [None if chat is None else Example(*chat) for chat in chats]


def tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the ids of each text, without the special tokens that a tokenizer puts around it."""
    if not texts:
        return []
    encoded = tokenizer(
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # documents are meant to be longer than a model's context
    )
    return encoded["input_ids"]


def opening_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return [bos] for a tokenizer that by itself opens every text with it, as Llama's does; else []."""
    bare, dressed = tokenize(["a"], tokenizer)[0], tokenizer("a")["input_ids"]
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and dressed[:1] == [bos] and bare[:1] != [bos] else []


def _plain(documents: list[Document], tokenizer: PreTrainedTokenizerBase) -> list[Example | None]:
    opening, end = opening_ids(tokenizer), [tokenizer.eos_token_id]
    texts = [str(document.content) for document in documents]
    return [
        Example(
            np.array(
                (opening if document.starts else []) + ids + (end if document.ends else []),
                dtype=np.int32,
            )
        )
        for document, ids in zip(documents, tokenize(texts, tokenizer), strict=True)
    ]


def _alpaca(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[Example | None]:
    """Encode alpaca rows. Prompt and output are tokenised apart, as when the model answers: no token spans both."""
    opening, end = opening_ids(tokenizer), [tokenizer.eos_token_id]
    prompts = [(ALPACA_WITH_INPUT if row["input"] else ALPACA_WITHOUT_INPUT).format_map(row) for row in rows]
    examples: list[Example | None] = []
    encoded = zip(
        tokenize(prompts, tokenizer), tokenize([row["output"] for row in rows], tokenizer), strict=True
    )
    for prompt, output in encoded:
        ids = np.array(opening + prompt + output + end, dtype=np.int32)
        examples.append(Example(ids, np.arange(len(ids)) >= len(opening) + len(prompt)))
    return examples


def _row(document: Document) -> dict[str, Any]:
    assert isinstance(document.content, dict)
    return document.content


def encode_chats(
    chats: list[tuple[dict[str, Any], str]], tokenizer: PreTrainedTokenizerBase, bad_rows: BadRowLog
) -> list[tuple[np.ndarray, np.ndarray] | None]:
    """Return (int32 ids, bool trained) of each (row, origin); None for a row the template refuses.

    Raises ConfigError when the tokenizer has no chat template or no offsets, or breaks the prefix property.
    """
    if not tokenizer.chat_template:
        raise ConfigError(
            "data.format=chat needs a chat template, and this tokenizer has none: name an instruct model's "
            "tokenizer with model.tokenizer, or use data.format=alpaca"
        )
    if not tokenizer.is_fast:
        raise ConfigError(
            "data.format=chat needs a tokenizer with offsets (a 'fast' one), and "
            f"{type(tokenizer).__name__} has none: name another with model.tokenizer"
        )
    found: list[tuple[str, Spans] | None] = []
    for row, origin in chats:
        try:
            found.append(_rendered(row, origin, tokenizer))
        except (TemplateError, TypeError) as error:  # TypeError: the template joins text with something else
            bad_rows.bad(origin, f"the chat template refuses it: {error}")
            found.append(None)
    usable = [item for item in found if item is not None]
    encoded = iter(_tokens(usable, tokenizer))
    return [None if item is None else next(encoded) for item in found]


def _rendered(row: dict[str, Any], origin: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, Spans]:
    """Return the whole text, and the spans of characters in it that the assistant said."""
    messages, tools = row["messages"], row["tools"]
    template = tokenizer.get_chat_template(tools=tools)
    if not GENERATION.search(template):
        return _by_prefixes(messages, tools, origin, tokenizer)
    variables: dict[str, Any] = {"tools": tools, "chat_template": template, **tokenizer.special_tokens_map}
    rendered: Any = render_jinja_template([messages], return_assistant_tokens_mask=True, **variables)
    (text,), (spans,) = rendered
    return text, spans


def _by_prefixes(
    messages: list[dict[str, Any]], tools: Any, origin: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, Spans]:
    def render(count: int, prompt: bool = False) -> str:
        text = tokenizer.apply_chat_template(
            messages[:count], tools=tools, tokenize=False, add_generation_prompt=prompt
        )
        return str(text)

    whole = render(len(messages))
    spans: Spans = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if place == 0:
            raise TemplateError(
                "the chat begins with the assistant, and the template has no generation markers"
            )
        before, after = render(place, prompt=True), render(place + 1)
        if not after.startswith(before) or not whole.startswith(after):
            raise ConfigError(
                f"data.format=chat: in {origin} the tokens of assistant message {place + 1} cannot be told from the "
                "others, because the tokenizer's chat template renders earlier turns differently once others "
                f"follow, or opens the assistant's turn otherwise than its generation prompt. {REMEDY}"
            )
        spans.append((len(before), len(after)))
    return whole, spans


def _tokens(
    rendered: list[tuple[str, Spans]], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[np.ndarray, np.ndarray]]:
    if not rendered:
        return []
    encoded = tokenizer(
        [text for text, _ in rendered],
        add_special_tokens=False,  # the template writes them
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    result = []
    for (_, spans), ids, offsets in zip(rendered, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        result.append((np.array(ids, dtype=np.int32), trained_mask(np.array(offsets).reshape(-1, 2), spans)))
    return result


def trained_mask(offsets: np.ndarray, spans: Spans) -> np.ndarray:
    """Return bool [length]: whether a token begins inside a span.

    `offsets` is int [length, 2], the characters from and to. A token of white space alone may be reported as empty, at
    its end: it begins where the token before it ended.
    """
    starts, ends = offsets[:, 0], offsets[:, 1]
    before = np.concatenate([[0], ends[:-1]])
    starts = np.where(starts == ends, before, starts)
    mask = np.zeros(len(offsets), dtype=bool)
    for begin, end in spans:
        mask |= (starts >= begin) & (starts < end)
    return mask
