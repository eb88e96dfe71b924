"""Turn documents into token ids, and mark which of them carry the loss.

plain               text, closed by the end token; every token is trained
alpaca              the chat template over instruction and output, or the Stanford prompt; only the output is trained
prompt_completion   the chat template where there is one, else both joined; only the completion is trained
chat, sharegpt      the chat template over the messages; only turns of data.train_on_roles are trained

The trained parts of a rendered chat are spans of characters, which the tokenizer's offsets map to tokens. There are two
ways to find the spans:
1. The template marks the assistant's turns with {% generation %} ... {% endgeneration %}.
2. The chat is rendered up to each turn, without it and with it. This works only if both texts are prefixes of the
   whole. A template that rewrites earlier turns breaks it; Qwen3's, for example, drops their thinking. Then a turn is
   trained in a row of its own: the chat up to this turn, which is what the model sees when it answers.

transformers' `apply_chat_template(return_assistant_tokens_mask=True)` is not used: in 5.23 it drops every later turn,
or trains to the end of the chat, when a span begins or ends with a space that the tokenizer strips.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jinja2 import TemplateError, TemplateSyntaxError

from remat.config import paths
from remat.config.data_fields import OF_FILES
from remat.config.options import AlpacaPrompt, ConfigError, DataConfig, DataFormat, RewrittenTurns
from remat.data.rows import BadRowLog, Chat, Document, Instruction, Pair

if TYPE_CHECKING:  # a wrong file is reported before transformers is imported
    from tokenizers import Encoding
    from transformers import BatchEncoding, PreTrainedTokenizerBase

log = logging.getLogger(__name__)
NO_TEMPLATE = "none"  # value of data.chat_template
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
REMEDY = (
    "Surround what the assistant says with {% generation %} and {% endgeneration %} in a copy of the template, and "
    "name it with data.chat_template"
)
PROBE = "PROBE OF CONTENT"  # replaces the content of a turn; any text that no template writes
WITHOUT_TEMPLATE = (
    "chats need a chat template, and this tokenizer has none: name one with data.chat_template=FILE_OR_FOLDER, "
    "or an instruct model's tokenizer with model.tokenizer (alpaca rows go without one too: "
    "data.alpaca_prompt=stanford)"
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
    """Tokens of one row of training: `ids` int32 [length], and `trained` bool [length] or None for all.

    `turns_left_out` counts the turns of its chat that data.rewritten_turns=last does not train.
    """

    ids: np.ndarray
    trained: np.ndarray | None = None
    turns_left_out: int = 0


class Rendered(NamedTuple):
    """A chat, or its beginning, as text, with the trained spans of characters and `Example.turns_left_out`."""

    text: str
    spans: Spans
    turns_left_out: int = 0


def encode(
    documents: list[Document], cfg: DataConfig, tokenizer: PreTrainedTokenizerBase, bad_rows: BadRowLog
) -> list[list[Example]]:
    """Return the examples of each document. A chat that the template refuses has none and goes to `bad_rows`.

    A chat gives several examples where the template rewrites earlier turns. Raises ConfigError when the chat template
    makes it impossible to find the trained parts.
    """
    if cfg.format == DataFormat.plain:
        return [[example] for example in _plain(documents, tokenizer)]
    forms = [_form(document, cfg, tokenizer) for document in documents]
    chats = [
        (form, document.origin)
        for form, document in zip(forms, documents, strict=True)
        if isinstance(form, Chat)
    ]
    from_chats = iter(encode_chats(chats, tokenizer, bad_rows, cfg) if chats else [])
    from_pairs = iter(_pairs([form for form in forms if isinstance(form, Pair)], cfg, tokenizer))
    return [[next(from_pairs)] if isinstance(form, Pair) else next(from_chats) for form in forms]


def what_is_read(cfg: DataConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the options that, with the tokenizer, determine the tokens of rows of `cfg.format`."""
    if cfg.format == DataFormat.plain:
        found: dict[str, Any] = {"text_field": cfg.columns.get("text", cfg.text_field)}
        if cfg.join_files:
            found["joined"] = [cfg.file_header, *(cfg.columns.get(name, name) for name in OF_FILES)]
        return found
    found = {"columns": dict(cfg.columns)} if cfg.columns else {}
    if cfg.format == DataFormat.alpaca:
        found["alpaca_prompt"] = str(
            AlpacaPrompt.template if _by_template(cfg, tokenizer) else AlpacaPrompt.stanford
        )
    if cfg.format == DataFormat.sharegpt:
        found["system"] = "also beside conversations in text"  # blocks made before had lost it
    roles = cfg.trained_roles()
    if roles != ["assistant"]:
        found["train_on_roles"] = "all" if roles is None else sorted(roles)
    if not cfg.train_on_end_token:
        found["train_on_end_token"] = False
    if cfg.rewritten_turns is not RewrittenTurns.each:
        found["rewritten_turns"] = str(cfg.rewritten_turns)
    return found


def describe(cfg: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """Describe how rows become text and which part is trained; "" for plain text."""
    if cfg.format == DataFormat.plain:
        return "files joined by repository" if cfg.join_files else ""
    if cfg.format in (DataFormat.chat, DataFormat.sharegpt) or _by_template(cfg, tokenizer):
        form = "in the chat template"
    else:
        form = "in the Stanford prompt" if cfg.format == DataFormat.alpaca else "prompt and completion joined"
    roles = cfg.trained_roles()
    trained = "all turns" if roles is None else ", ".join(roles)
    return f"{form}, trained: {trained}" + ", not the end tokens" * (not cfg.train_on_end_token)


def _by_template(cfg: DataConfig, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether instructions and completions go through the chat template."""
    if cfg.format == DataFormat.alpaca and cfg.alpaca_prompt is not AlpacaPrompt.auto:
        return cfg.alpaca_prompt is AlpacaPrompt.template
    return bool(tokenizer.chat_template)


def _form(document: Document, cfg: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Chat | Pair:
    """Return a row in the form to encode: a chat for the template, or a prompt and its completion."""
    content = document.content
    if isinstance(content, Chat):
        return content
    by_template = _by_template(cfg, tokenizer)
    if isinstance(content, Pair):
        return _as_chat([("user", content.prompt)], content.completion, cfg) if by_template else content
    assert isinstance(content, Instruction)
    if by_template:
        asked = f"{content.instruction}\n\n{content.given}" if content.given else content.instruction
        turns = [("system", content.system)] if content.system else []
        for earlier, answer in content.history:
            turns += [("user", earlier), ("assistant", answer)]
        return _as_chat([*turns, ("user", asked)], content.output, cfg)
    if content.system or content.history:
        name = "system" if content.system else "history"
        raise ConfigError(
            f"data.alpaca_prompt={cfg.alpaca_prompt}: {document.origin} has a field {name!r}, which has no place in "
            "the Stanford prompt: use data.alpaca_prompt=template with a tokenizer that has a chat template, or remove "
            "the field"
        )
    prompt = ALPACA_WITH_INPUT if content.given else ALPACA_WITHOUT_INPUT
    return Pair(prompt.format(instruction=content.instruction, input=content.given), content.output)


def _as_chat(turns: list[tuple[str, str]], answer: str, cfg: DataConfig) -> Chat:
    roles = cfg.trained_roles()
    messages = [{"role": role, "content": text} for role, text in [*turns, ("assistant", answer)]]
    return Chat(messages, None, [roles is None or message["role"] in roles for message in messages])


def tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of each text, without the special tokens that a tokenizer adds."""
    return _encoded(texts, tokenizer)["input_ids"] if texts else []


def _encoded(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> BatchEncoding:
    return tokenizer(
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # documents are meant to be longer than a model's context
    )


def opening_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return [bos] if the tokenizer begins every text with it, as Llama's does; else []."""
    bare, dressed = tokenize(["a"], tokenizer)[0], tokenizer("a")["input_ids"]
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and dressed[:1] == [bos] and bare[:1] != [bos] else []


def _plain(documents: list[Document], tokenizer: PreTrainedTokenizerBase) -> list[Example]:
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


def _pairs(pairs: list[Pair], cfg: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """Encode prompts and completions. They are tokenised separately, as at inference, so no token spans both."""
    opening, end = opening_ids(tokenizer), [tokenizer.eos_token_id]
    roles = cfg.trained_roles()
    of_prompt, of_answer = (roles is None or role in roles for role in ("user", "assistant"))
    examples = []
    prompts = tokenize([pair.prompt for pair in pairs], tokenizer)
    answers = tokenize([pair.completion for pair in pairs], tokenizer)
    for prompt, answer in zip(prompts, answers, strict=True):
        trained = [of_prompt] * (len(opening) + len(prompt)) + [of_answer] * len(answer)
        trained.append(of_answer and cfg.train_on_end_token)
        ids = np.array(opening + prompt + answer + end, dtype=np.int32)
        examples.append(Example(ids, np.array(trained, dtype=bool)))
    return examples


def encode_chats(
    chats: list[tuple[Chat, str]],
    tokenizer: PreTrainedTokenizerBase,
    bad_rows: BadRowLog,
    cfg: DataConfig,
) -> list[list[Example]]:
    """Return the examples of each (chat, origin); a chat that the template refuses has none.

    Raises ConfigError when the tokenizer has no chat template or no offsets, or when turns cannot be told apart.
    """
    check_template(tokenizer)
    found: list[list[Rendered]] = []
    for chat, origin in chats:
        try:
            _check_calls(chat, tokenizer)
            found.append(_rendered(chat, origin, tokenizer, cfg.rewritten_turns))
        except (TemplateError, TypeError) as error:  # TypeError: the template joins text and another type
            bad_rows.bad(origin, f"the chat template refuses it: {error}")
            found.append([])
    encoded = iter(_tokens([one for each in found for one in each], tokenizer, cfg.train_on_end_token))
    return [[next(encoded) for _ in each] for each in found]


def _check_calls(chat: Chat, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise TemplateError if the template leaves out trained tool calls, because the turn would be empty."""
    if not any("tool_calls" in message and chat.trained[place] for place, message in enumerate(chat.messages)):
        return
    without = [
        {name: value for name, value in message.items() if name != "tool_calls"} for message in chat.messages
    ]
    shown = _Prefixes(chat, tokenizer).render(len(chat.messages))
    try:
        bare = _Prefixes(replace(chat, messages=without), tokenizer).render(len(without))
    except (TemplateError, TypeError):
        return  # the template uses tool calls
    if shown == bare:
        raise TemplateError(
            "it does not write calls of tools: name a template that does with data.chat_template, or give the messages "
            'that call "weight": 0'
        )


def read_template(named: str) -> str:
    """Return the chat template in a Jinja file or in a tokenizer's folder. Raises ConfigError."""
    path = paths.expand(named)
    if path.is_dir():
        inside = path / "chat_template.jinja"
        found = inside.read_text() if inside.is_file() else _in_settings(path / "tokenizer_config.json", named)
    elif path.is_file():
        try:
            found = path.read_text()
        except UnicodeDecodeError as error:
            raise ConfigError(f"data.chat_template={named} is not text in UTF-8: {error}") from error
    else:
        raise ConfigError(
            f"data.chat_template={named} does not exist: name a Jinja file or a folder with chat_template.jinja"
            f" ({NO_TEMPLATE}: use no template)"
        )
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template([[{"role": "user", "content": "a"}]], chat_template=found)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"data.chat_template={named} is no Jinja template (line {error.lineno}: {error.message}): correct it"
        ) from error
    except Exception as error:  # a refusal of this one chat is no error of the template
        log.debug("data.chat_template=%s refuses a chat of one question: %s", named, error)
    return found


def _in_settings(file: Path, named: str) -> str:
    try:
        found = json.loads(file.read_text()).get("chat_template")
    except (OSError, ValueError, AttributeError):
        found = None
    if isinstance(found, list):  # several templates, by name
        found = {str(each.get("name")): each.get("template") for each in found}.get("default")
    if not isinstance(found, str):
        raise ConfigError(
            f"data.chat_template={named} is a folder without chat_template.jinja, and its tokenizer_config.json has no "
            "chat_template either: name a Jinja file"
        )
    return found


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError for a tokenizer that cannot encode chats."""
    if not tokenizer.chat_template:
        raise ConfigError(WITHOUT_TEMPLATE)
    if not tokenizer.is_fast:
        raise ConfigError(
            "chats need a tokenizer with offsets (a 'fast' one), and "
            f"{type(tokenizer).__name__} has none: name another with model.tokenizer"
        )


def needs_template(cfg: DataConfig) -> bool:
    """Return whether rows of `cfg.format` need a chat template."""
    by_name = cfg.format in (DataFormat.chat, DataFormat.sharegpt)
    return by_name or (cfg.format is DataFormat.alpaca and cfg.alpaca_prompt is AlpacaPrompt.template)


def _rendered(
    chat: Chat, origin: str, tokenizer: PreTrainedTokenizerBase, rewritten: RewrittenTurns
) -> list[Rendered]:
    """Return the texts to train for `chat`: one, or several where the template rewrites earlier turns."""
    template = tokenizer.get_chat_template(tools=chat.tools)
    if not GENERATION.search(template):
        return _by_prefixes(chat, chat.trained, origin, tokenizer, rewritten)
    variables: dict[str, Any] = {"tools": chat.tools, "chat_template": template, **tokenizer.special_tokens_map}
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template([chat.messages], return_assistant_tokens_mask=True, **variables)
    (text,), (marked,) = rendered
    said = [message["role"] == "assistant" for message in chat.messages]
    if chat.trained == said:
        return [Rendered(text, marked)]
    if len(marked) != sum(said):  # a turn with several marked spans or none: owners are unknown
        return _by_prefixes(chat, chat.trained, origin, tokenizer, rewritten)
    owners = [place for place, is_said in enumerate(said) if is_said]
    spans = [span for span, place in zip(marked, owners, strict=True) if chat.trained[place]]
    others = [trained and not is_said for trained, is_said in zip(chat.trained, said, strict=True)]
    if not any(others):
        return [Rendered(text, spans)]
    *more, last = _by_prefixes(chat, others, origin, tokenizer, rewritten)
    if last.text == text:
        return [*more, last._replace(spans=[*spans, *last.spans])]
    return [*more, last, Rendered(text, spans)]


def _by_prefixes(
    chat: Chat,
    trained: list[bool],
    origin: str,
    tokenizer: PreTrainedTokenizerBase,
    rewritten: RewrittenTurns,
) -> list[Rendered]:
    """Return the whole chat with the spans of its `trained` turns, after shorter beginnings of the chat where needed.

    A turn that the template rewrites once other turns follow is trained in a beginning of the chat where it is not yet
    rewritten; with RewrittenTurns.last it is not trained.
    """
    places = [place for place, is_trained in enumerate(trained) if is_trained]
    prefix = _Prefixes(chat, tokenizer)
    found: list[Rendered] = []
    last = len(chat.messages)
    while places:
        whole = prefix.render(last)
        spans = {place: prefix.span(place, whole) for place in places}
        if spans[places[-1]] is None and last == places[-1] + 1:
            raise ConfigError(
                f"data.format: in {origin} the tokens of {chat.messages[places[-1]]['role']} message {places[-1] + 1} "
                "cannot be told from the others, because the tokenizer's chat template opens that turn otherwise than "
                f"its generation prompt. {REMEDY}"
            )
        kept = [span for span in spans.values() if span is not None]
        if kept:
            found.append(Rendered(whole, kept))
        places = [place for place, span in spans.items() if span is None]
        if places and found and rewritten is RewrittenTurns.last:
            found[0] = found[0]._replace(turns_left_out=len(places))
            break
        last = places[-1] + 1 if places else 0
    return found[::-1]


class _Prefixes:
    """The beginnings of a chat as its template renders them."""

    def __init__(self, chat: Chat, tokenizer: PreTrainedTokenizerBase) -> None:
        self._chat, self._tokenizer = chat, tokenizer
        self._known: dict[tuple[int, bool], str] = {}

    def render(self, count: int, prompt: bool = False) -> str:
        """Return the first `count` messages as text, with `prompt` followed by the generation prompt."""
        if (count, prompt) not in self._known:
            self._known[count, prompt] = self._text(self._chat.messages[:count], prompt)
        return self._known[count, prompt]

    def span(self, place: int, whole: str) -> tuple[int, int] | None:
        """Return the span of characters of turn `place` in `whole`; None where `whole` does not contain it unchanged.

        An assistant's turn begins after its generation prompt. Turns of other roles, and a first turn, begin where
        their content begins, which is found by rendering PROBE instead. If PROBE is not found, the whole turn is the
        span. Each span ends with the turn.
        """
        message = self._chat.messages[place]
        by_assistant = message["role"] == "assistant" and place > 0  # a first turn has no generation prompt
        before, after = self.render(place, prompt=by_assistant), self.render(place + 1)
        continues = after.startswith(before)
        if not whole.startswith(after) or (by_assistant and not continues):
            return None
        if by_assistant:
            return len(before), len(after)
        probe = self._text([*self._chat.messages[:place], {**message, "content": PROBE}])
        at = probe.find(PROBE, len(before) if continues else 0)
        if at >= 0 and whole.startswith(probe[:at]):
            return at, len(after)
        if not continues:
            return None
        if place == 0:
            raise TemplateError(
                f"its first turn is {message['role']}'s, whose content cannot be told from what the template adds"
            )
        return len(before), len(after)

    def _text(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        if not messages:
            return ""
        return str(
            self._tokenizer.apply_chat_template(
                messages, tools=self._chat.tools, tokenize=False, add_generation_prompt=prompt
            )
        )


def _tokens(rendered: list[Rendered], tokenizer: PreTrainedTokenizerBase, with_end: bool) -> list[Example]:
    if not rendered:
        return []
    encoded = _encoded([each.text for each in rendered], tokenizer)  # the template writes the special tokens
    special = np.array(sorted(_special_ids(tokenizer)))
    result = []
    for (text, spans, left_out), ids, encoding in zip(
        rendered, encoded["input_ids"], encoded.encodings or [], strict=True
    ):
        tokens = np.array(ids, dtype=np.int32)
        if with_end:
            mask = mask_of(encoding, spans)
        else:
            is_special, places = np.isin(tokens, special), _offsets(encoding)
            mask = np.zeros(len(tokens), dtype=bool)
            for span in spans:
                mask |= without_end(trained_mask(places, [span]), is_special, places, text)
        result.append(Example(tokens, mask, left_out))
    return result


def _offsets(encoding: Encoding) -> np.ndarray:
    return np.array(encoding.offsets).reshape(-1, 2)


def mask_of(encoding: Encoding, spans: Spans) -> np.ndarray:
    """Return the `trained_mask` of a text's tokens. Where possible, looks up only the tokens at the ends of the spans.

    The offsets of all tokens would take a quarter of the time of the encoding.
    """
    mask = np.zeros(len(encoding), dtype=bool)
    for begin, end in spans:
        first, behind = _first_token_at(encoding, begin), _first_token_at(encoding, end)
        if first is None or behind is None:
            return trained_mask(_offsets(encoding), spans)
        mask[first:behind] = True
    return mask


def _first_token_at(encoding: Encoding, place: int) -> int | None:
    """Return the first token that begins at character `place` or later; None where all offsets are needed to find it.

    That is so where a token spans `place`, or a token beside it is reported as empty.
    """
    token = encoding.char_to_token(place)
    if token is None:
        last = encoding.token_to_chars(len(encoding) - 1) if len(encoding) else None
        return len(encoding) if last and last[0] < last[1] <= place else None
    before = encoding.token_to_chars(token - 1) if token else (-1, 0)
    here = encoding.token_to_chars(token)
    is_clear = before and here and before[0] < before[1] and here[0] == place
    return token if is_clear else None


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    added = {place for place, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def without_end(mask: np.ndarray, is_special: np.ndarray, offsets: np.ndarray, text: str) -> np.ndarray:
    """Return `mask` of one turn, bool [length], without the special tokens that end it and the white space after them.

    `is_special` bool [length]; `offsets` int [length, 2]: begin and end of each token in `text`. A turn that does not
    end with a special token is returned unchanged.
    """
    places = np.flatnonzero(mask)
    specials = places[is_special[places]]
    if not len(specials) or text[offsets[specials[-1], 1] : offsets[places[-1], 1]].strip():
        return mask
    end = int(specials[-1])
    while end > places[0] and is_special[end - 1]:
        end -= 1
    kept = mask.copy()
    kept[end:] = False
    return kept


def trained_mask(offsets: np.ndarray, spans: Spans) -> np.ndarray:
    """Return bool [length]: whether a token begins inside a span.

    `offsets` int [length, 2]: begin and end of each token in characters. Tokenizers may report a token of white space
    as empty, at its end; it begins where the token before it ended.
    """
    starts, ends = offsets[:, 0], offsets[:, 1]
    before = np.concatenate([[0], ends[:-1]])
    starts = np.where(starts == ends, before, starts)
    mask = np.zeros(len(offsets), dtype=bool)
    for begin, end in spans:
        mask |= (starts >= begin) & (starts < end)
    return mask
