"""Chats: which tokens of a rendered conversation the assistant said.

Spans of characters are found first, then mapped to tokens by the tokenizer's offsets. Two ways to find spans:
1. the template marks them with {% generation %} ... {% endgeneration %};
2. the conversation is rendered up to each assistant turn and with it. This holds only if each of these texts is
   a prefix of the whole; a template that rewrites earlier turns breaks it, and then nothing is trained at all.

`apply_chat_template(return_assistant_tokens_mask=True)` is not used for the mapping: in transformers 5.23 it drops
every later turn, or trains to the end of the chat, when a span begins or ends with a space that the tokenizer
leaves out of its offsets, and misses the last bytes of a character made of several tokens.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from remat.config.options import ConfigError
from remat.data.rows import BadRowLog

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
REMEDY = (
    "Surround what the assistant says with {% generation %} and {% endgeneration %} in chat_template.jinja of a copy "
    "of the tokenizer, and point model.tokenizer at that folder"
)
Spans = list[tuple[int, int]]


def encode_chats(
    chats: list[tuple[dict[str, Any], str]], tokenizer: PreTrainedTokenizerBase, bad_rows: BadRowLog
) -> list[tuple[np.ndarray, np.ndarray] | None]:
    """(int32 ids, bool trained) of each (row, origin); None for a row the template refuses.

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
        except (TemplateError, TypeError) as error:  # TypeError: text joined with what is not text
            bad_rows.bad(origin, f"the chat template refuses it: {error}")
            found.append(None)
    usable = [item for item in found if item is not None]
    encoded = iter(_tokens(usable, tokenizer))
    return [None if item is None else next(encoded) for item in found]


def _rendered(row: dict[str, Any], origin: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, Spans]:
    """The whole text, and the spans of characters in it that the assistant said."""
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
    """bool [length]: the token begins inside a span. `offsets` is int [length, 2], characters from and to.

    A token of white space alone may be reported empty, at its end: it begins where the token before it ended.
    """
    starts, ends = offsets[:, 0], offsets[:, 1]
    before = np.concatenate([[0], ends[:-1]])
    starts = np.where(starts == ends, before, starts)
    mask = np.zeros(len(offsets), dtype=bool)
    for begin, end in spans:
        mask |= (starts >= begin) & (starts < end)
    return mask
