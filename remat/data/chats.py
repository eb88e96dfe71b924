"""Chats in OpenAI's and ShareGPT's words become messages of one form, with what of them is trained.

A message is {"role", "content"} and, where there are any, "tool_calls", as chat templates read them: their arguments
are objects, where OpenAI writes them as text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

ROLES = {  # by the names of ShareGPT and its heirs
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
}
ROLE_FIELDS, CONTENT_FIELDS = ("role", "from"), ("content", "value")


@dataclass(frozen=True)
class Chat:
    """Messages in order, the tools they may call, and for each message whether it is trained."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    trained: list[bool]


def chat_of(
    messages: Any, tools: Any, roles: list[str] | None, *, name: str = "messages", start: int = 0
) -> Chat:
    """Return messages in one form; of those from `start` on, the ones of `roles` (None: all) are trained.

    `name` is the field of the messages in errors. Raises ValueError with the reason for a chat that cannot be used or
    has nothing to train on.
    """
    messages = _from_text(messages)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"field {name!r} is not a list with at least one message")
    cleaned = [_message(message, place) for place, message in enumerate(messages, 1)]
    tools = _from_text(tools)
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"field 'tools' is {kind(tools)}, not a list")
    check_unicode(json.dumps([cleaned, tools], ensure_ascii=False, default=str))
    trained = [
        place >= start and (roles is None or message["role"] in roles) and not _weightless(given)
        for place, (message, given) in enumerate(zip(cleaned, messages, strict=True))
    ]
    if not any(trained):
        found = ", ".join(dict.fromkeys(message["role"] for message in cleaned))
        wanted = "every role" if roles is None else f"[{','.join(roles)}]"
        raise ValueError(
            f"has no turn to train on: its roles are {found}, and data.train_on_roles is {wanted}"
            + " (turns of weight 0 are not trained)" * any(map(_weightless, messages))
        )
    return Chat(cleaned, tools or None, trained)


def _message(message: Any, place: int) -> dict[str, Any]:
    role_field = _first(message, ROLE_FIELDS)
    role = message[role_field] if role_field else None
    if not isinstance(role, str):
        raise ValueError(f"message {place} has no role")
    if role_field == "from" and role not in ROLES:
        raise ValueError(f"message {place} is from {role!r}, which is none of {', '.join(ROLES)}")
    content = _text_of(message.get(_first(message, CONTENT_FIELDS) or "content"), place)
    # Tables fill absent fields with null; templates ask whether a field is there.
    left_out = (*ROLE_FIELDS, *CONTENT_FIELDS, "weight", "function_call")
    kept = {name: value for name, value in message.items() if value is not None and name not in left_out}
    if role == "function_call":
        kept["tool_calls"], content = _calls(content, place), ""
    elif message.get("function_call"):
        kept["tool_calls"] = [{"type": "function", "function": message["function_call"]}]
    if kept.get("tool_calls"):
        kept["tool_calls"] = [_with_arguments(call) for call in kept["tool_calls"]]
    elif content is None:
        raise ValueError(f"message {place}: content is null, not text")
    return {"role": ROLES.get(role, role), **kept, "content": content or ""}


def _first(message: Any, names: tuple[str, ...]) -> str | None:
    if not isinstance(message, dict):
        return None
    return next((name for name in names if message.get(name) is not None), None)


def _text_of(content: Any, place: int) -> str | None:
    """Return text; a list of OpenAI's text parts is joined."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"message {place}: content is {kind(content)}, not text")
    texts = [part.get("text") if isinstance(part, dict) else part for part in content]
    kinds = {part.get("type", "text") for part in content if isinstance(part, dict)} - {"text"}
    if kinds or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"message {place}: content holds {', '.join(map(str, kinds)) or 'a part'}, not text alone"
        )
    return "".join(map(str, texts))


def _calls(content: str | None, place: int) -> list[dict[str, Any]]:
    calls = _from_text(content)
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise ValueError(f"message {place}: a function_call is not a JSON object with name and arguments")
    return [{"type": "function", "function": call} for call in calls]


def _with_arguments(call: Any) -> Any:
    """Return a call with its arguments as an object: a template would quote text once more."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _from_text(value: Any) -> Any:
    """Return what a text in JSON says: CSV has no lists, and tables hold such lists as text; else the value itself."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return None if value == "" else value


def _weightless(message: Any) -> bool:
    """Whether it has OpenAI's `weight` of 0."""
    return message.get("weight") == 0


def kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number"}
    names |= {str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def check_unicode(text: str) -> None:
    """Raise ValueError for half a surrogate pair: JSON escapes can spell it, but it has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"holds a lone surrogate at character {error.start}") from error
