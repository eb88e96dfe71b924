"""Keys, tokens and passwords do not get into what a run writes or prints.

Known by the name of their option, by their form (a hub token, user:password@ in a URL), or because the environment
holds them under such a name. Standard library only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
SECRET_NAME = re.compile(
    r"(^|_)(secret|password|passwd|credentials?|(api|access|private|secret)_?key)$|^((api|auth|access|hf|hub|wandb)_)?token$",
    re.IGNORECASE,
)
SECRET_VARIABLE = re.compile(
    r"(TOKEN|API_?KEY|SECRET|PASSWORD|PASSWD|ACCESS_?KEY|CREDENTIALS?)$", re.IGNORECASE
)
SHORTEST = 8  # a shorter value of such a variable would hide ordinary words
HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")
IN_URL = re.compile(r"(?<=:/)(/?)[^/@\s]+@")  # also where a path has joined the slashes
OVERRIDE = re.compile(r"(?<![\w.])((?:[\w-]+\.)*([\w-]+)=)(?!=)([^\s,}\]]+)")  # group.name=value
YAML_LINE = re.compile(r"^([ \t-]*([\w-]+):[ \t]+)(\S.*)$", re.MULTILINE)


def redact(content: Any) -> Any:
    """`content` with what is secret replaced by `***`, in nested dicts and lists, by name or by value."""
    if isinstance(content, Mapping):
        return {
            key: HIDDEN if value and SECRET_NAME.search(str(key)) else redact(value)
            for key, value in content.items()
        }
    if isinstance(content, (list, tuple)):
        return [redact(value) for value in content]
    return redact_text(content) if isinstance(content, str) else content


def redact_text(text: str, env: Mapping[str, str] = os.environ) -> str:
    """The same for text: YAML, a command line, a message. `env` is where secrets are known from."""
    for name, value in env.items():
        if len(value) >= SHORTEST and SECRET_VARIABLE.search(name):
            text = text.replace(value, HIDDEN)
    text = IN_URL.sub(rf"\1{HIDDEN}@", HUB_TOKEN.sub(HIDDEN, text))
    return YAML_LINE.sub(_by_name, OVERRIDE.sub(_by_name, text))


def _by_name(found: re.Match[str]) -> str:
    if not SECRET_NAME.search(found.group(2)) or found.group(3) in ("null", "None", "''", '""'):
        return found.group()
    return f"{found.group(1)}{HIDDEN}"
