"""From a document to token ids and which of them carry the loss.

plain   text, closed by the end token; every token is trained
alpaca  a fixed prompt from `instruction` and `input`; only `output` and the end token are trained
chat    the tokenizer's own template over `messages`; only what the assistant says is trained
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from remat.config.choices import DataFormat
from remat.data.chat import encode_chats
from remat.data.rows import BadRowLog, Document

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
    """int32 ids [length], and bool trained [length]; trained None: all of them."""

    ids: np.ndarray
    trained: np.ndarray | None = None


def encode(
    documents: list[Document], data_format: DataFormat, tokenizer: PreTrainedTokenizerBase, bad_rows: BadRowLog
) -> list[Example | None]:
    """One Example per document; None for a chat that the template refuses, which is then in `bad_rows`.

    Raises ConfigError when a chat template does not allow to tell the assistant's tokens from the others.
    """
    if data_format == DataFormat.plain:
        return _plain(documents, tokenizer)
    if data_format == DataFormat.alpaca:
        return _alpaca([_row(document) for document in documents], tokenizer)
    chats = encode_chats([(_row(document), document.origin) for document in documents], tokenizer, bad_rows)
    return [None if chat is None else Example(*chat) for chat in chats]


def tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Ids of each text without the tokens a tokenizer puts around it."""
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
    """[bos] for a tokenizer that itself opens every text with it, as Llama's does; else []."""
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
    """Prompt and output are tokenised apart, as they are when the model answers: no token spans both."""
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
