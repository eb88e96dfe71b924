"""Hide keys, tokens and passwords in all that a run writes or prints.

A secret is recognised by the name of its option, by its form (a vendor's token, credentials and signatures in a URL, a
header, a private key), or because the environment holds it under a secret name. Where the end of a secret is not clear,
too much is hidden rather than too little. Standard library only.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

HIDDEN = "***"
SHORTEST = 8  # characters of a variable's value; hiding a shorter one would hide ordinary words
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# last words of a name that do not count: db_password_prod
PLACES = {"prod", "production", "dev", "test", "staging", "main", "default", "value", "base"}

STRONG = {
    *("password", "passwords", "passwd", "passphrase", "pwd", "secret", "secrets", "credential", "credentials"),
    *("apikey", "apikeys", "authorization", "jwt", "dsn", "connstr", "connectionstring"),
}
STRONG_PAIRS = {("connection", "string"), ("connection", "str"), ("conn", "string"), ("conn", "str")}
ENDINGS = re.compile(
    r"(password|passwd|passphrase|api_?key|secret_?key|access_?key|private_?key|access_?token|auth_?token)$"
)
KEYS_OF = {  # words before `key` in the name of a secret
    *("access", "account", "api", "app", "application", "auth", "bot", "client", "consumer", "deploy"),
    *("encryption", "hmac", "license", "master", "private", "secret", "service", "shared", "signing", "ssh"),
    *("subscription", "webhook"),
    *("anthropic", "aws", "azure", "comet", "gcp", "github", "gitlab", "google", "hf", "neptune", "openai"),
    "wandb",
}
WEAK = {"auth", "bearer", "cookie", "cookies", "otp", "pat", "sas"}  # hidden unless the value is plainly none
TOKENS_OF = {"api", "auth", "access", "refresh", "session", "bearer"}
NO_TOKEN = {  # words before `token` in the name of a token of text, which is no secret
    *("bos", "eos", "pad", "unk", "sep", "cls", "mask", "boi", "eoi", "boa", "eoa"),
    *("image", "video", "audio", "vision", "decoder", "fim", "prefix", "suffix", "middle", "think", "tool"),
    *("start", "end", "begin", "stop", "special", "added", "extra", "trained", "class"),
    *("per", "a", "one", "each", "every", "any", "first", "last", "next", "new"),
}
NO_PASS = {  # words before `pass` where it is no password
    *("forward", "backward", "first", "second", "third", "last", "next", "one", "single", "per", "by"),
    *("low", "high"),
}
IN_QUERY = {"sig", "signature", "key", "code", "credential", "awsaccesskeyid", "googleaccessid", "policy"}

FORMS = re.compile(
    r"""(?<![A-Za-z0-9])(?:
    hf_[A-Za-z0-9]{20,} | api_org_[A-Za-z0-9]{20,}
    | sk-ant-[\w-]{8,} | (?:sk|pk|rk)-(?=[A-Za-z_-]*\d)[\w-]{12,} | [spr]k_(?:live|test)_\w{10,}
    | gh[opsur]_\w{16,} | github_pat_\w{16,} | gl[a-z]{2,6}-[\w-]{16,}
    | xox[a-z]-[\w-]{8,} | xapp-[\w-]{10,}
    | (?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16} | AIza[\w-]{30,} | ya29\.[\w-]{16,}
    | eyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*)?
    | npm_[A-Za-z0-9]{30,} | pypi-[\w-]{16,} | dop_v1_\w{30,} | SG\.[\w-]{16,}\.[\w-]{16,} | nvapi-[\w-]{20,}
    | gsk_\w{20,} | r8_\w{30,} | hvs\.[\w-]{20,} | dapi[0-9a-f]{32} | wandb_v\d+_\w{20,} | local-[0-9a-f]{40}
    )""",
    re.VERBOSE,
)
PRIVATE_KEY = re.compile(r"-----BEGIN ([A-Z ]*PRIVATE KEY)-----.*?(?:-----END \1-----|\Z)", re.DOTALL)
WEBHOOK = re.compile(r"(hooks\.slack\.com/\w+/|discord(?:app)?\.com/api/webhooks/)[^\s\"'<>]+")
BEARER = re.compile(r"\b(bearer[ \t]+)[\w.~+/=-]{8,}", re.IGNORECASE)
HEADER = re.compile(
    r"\b((?:proxy-)?authorization|x-api-key|x-auth-token|(?:set-)?cookie)"
    r"(?:([\"']?[ \t]*:[ \t]*[\"']?)[^\r\n\"']+|([ \t]*=[ \t]*[\"']?)(?:[A-Za-z]\w+[ \t]+)?[^\s\"']+)",
    re.IGNORECASE,
)
# user:password@, where the password may hold @ and /; token@; also after one slash, as Path writes a URL
IN_URL = re.compile(r"(?<=[A-Za-z0-9]:/)(/?)(?:[^\s/:\"'<>]*:[^\s\"'<>]*|[^\s/@\"'<>]+)@")
QUERY = re.compile(r"([?&](?:amp;)?([\w.%-]+)=)([^&\s\"'<>]+)")
NAME = r"(?:[\w-]+[./])*[\w-]+"
ASSIGNED = re.compile(rf"(?<![\w.?&%-])({NAME})([ \t]*=[ \t]*)(?!=)(?=\S)")
QUOTED_NAME = re.compile(rf"(?P<quote>[\"'])({NAME})(?P=quote)([ \t]*:[ \t]*)(?=\S)")
FLAG = re.compile(r"(?<![^\s\"'])(--?[A-Za-z][\w.-]*)([ \t]+|=)(?=[^\s-])")
INLINE = re.compile(rf"(?<![\w.?&%-])({NAME})([ \t]*:[ \t]*)(?!//)(?=\S)")
YAML_LINE = re.compile(r"^([ \t]*(?:- +)*)([\"']?)([\w.-]+)\2:(?:[ \t]+(.*))?$")
# To the next blank, over quoted parts: a "b c"d is one word. In YAML \'' is a backslash and a quote, in Python an end.
WORD = re.compile(r"""(?:"(?:[^"\\]|\\.)*"|'(?:\\''|[^'\\]|\\.)*'|\S)+""", re.DOTALL)
TO_QUOTE = {"'": re.compile(r"""[^']*(?:'"'"'[^']*)*"""), '"': re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)}
IN_BRACES = re.compile(r"(?:[^,{}\[\]\n]|\n +)*")  # blanks too
CLOSERS = re.compile(r"[,}\])]*\Z")
NOTHING = re.compile(r"(null|none|~|true|false|''|\"\"|\*\*\*|-?[\d_.]+(e[+-]?\d+)?)\Z", re.IGNORECASE)
SPECIAL = re.compile(r"[\"']?(<.*>|\[[A-Za-z_ ]+\])[\"']?\Z")


def is_secret(name: str, value: Any = None) -> bool:
    """Return whether an option of this (dotted) name hides `value`. `value` None: an unknown text.

    Names that are often used for other things count unless the value is plainly no secret: a number, a flag, `<s>`.
    """
    *groups, own = name.replace("/", ".").split(".")
    if _is_strong(own) or any(_is_strong(group) for group in groups):
        return value is not False and value != ""
    if not _is_weak(own):
        return False
    if isinstance(value, str):
        return bool(value) and not NOTHING.match(value.strip()) and not SPECIAL.match(value.strip())
    return value is None


def redact(content: Any, env: Mapping[str, str] | None = None) -> Any:
    """Return `content` with what is secret replaced by `***`, in nested dicts and lists, by name or by value.

    Values that `env` (default: this process's environment) holds under secret names are hidden too.
    """
    env = dict(os.environ) if env is None else env  # read once: each reading decodes every variable
    if isinstance(content, Mapping):
        named = content.get("name") if "value" in content else None  # {"name": "API_KEY", "value": ...}
        return {
            redact_text(key, env) if isinstance(key, str) else key: _redact_value(
                named if key == "value" and isinstance(named, str) and is_secret(named) else str(key),
                value,
                env,
            )
            for key, value in content.items()
        }
    if isinstance(content, (list, tuple)):
        return [
            HIDDEN if isinstance(value, str) and at and _is_flag(content[at - 1]) else redact(value, env)
            for at, value in enumerate(content)
        ]
    return redact_text(os.fspath(content), env) if isinstance(content, (str, os.PathLike)) else content


def redact_text(text: str, env: Mapping[str, str] = os.environ) -> str:
    """Replace secrets in text: YAML, JSON, a command line, a message. `env` is as in `redact`."""
    text = redact_forms(text, env)
    text = QUERY.sub(_in_query, IN_URL.sub(rf"\1{HIDDEN}@", WEBHOOK.sub(rf"\1{HIDDEN}", text)))
    text = BEARER.sub(rf"\1{HIDDEN}", HEADER.sub(rf"\1\2\3{HIDDEN}", text))
    text = _yaml(text)
    for pattern in (QUOTED_NAME, ASSIGNED, FLAG, INLINE):
        text = _by_name(pattern, text)
    return text


def redact_forms(text: str, env: Mapping[str, str] = os.environ) -> str:
    """Replace secrets recognised by form or from `env`, not by name: for files such as a tokenizer's vocabulary."""
    for value in _from_environment(tuple(env.items())):
        text = text.replace(value, HIDDEN)
    return FORMS.sub(HIDDEN, PRIVATE_KEY.sub(HIDDEN, text))


def _redact_value(name: str, value: Any, env: Mapping[str, str]) -> Any:
    if value and value is not True and is_secret(name, value if not isinstance(value, (list, dict)) else 0):
        return HIDDEN
    return redact(value, env)


def _words(name: str) -> list[str]:
    """Return the words of a name after two empty ones, so that each name has a last word and one before it."""
    words = [word.lower() for word in WORDS.findall(name)]
    while len(words) > 1 and (words[-1].isdigit() or words[-1] in PLACES):
        words.pop()
    return ["", "", *words]


def _is_strong(name: str) -> bool:
    words = _words(name)
    of, last = words[-2:]
    return (
        last in STRONG
        or (of, last) in STRONG_PAIRS
        or (last in ("key", "keys") and of in KEYS_OF)
        or (last in ("token", "tokens") and of in TOKENS_OF)
        or ENDINGS.search("_".join(words)) is not None
    )


def _is_weak(name: str) -> bool:
    of, last = _words(name)[-2:]
    if last.endswith("token"):
        return of not in NO_TOKEN
    return last in WEAK or (last == "pass" and of not in NO_PASS)


def _is_flag(word: Any) -> bool:
    return isinstance(word, str) and word.startswith("-") and "=" not in word and is_secret(word.lstrip("-"))


@functools.lru_cache(maxsize=4)
def _from_environment(variables: tuple[tuple[str, str], ...]) -> list[str]:
    """Return the environment's secrets, plain and escaped, longest first because one may be part of another.

    Cached while the environment stays the same: asking whether each value is a path costs more than the rest.
    """
    found: set[str] = set()
    for name, value in variables:
        is_path = os.path.exists(value)  # noqa: PTH110 (Path.exists raises for a long value)
        ordinary = name in ("PWD", "OLDPWD") or len(value) < SHORTEST or is_path
        if not ordinary and is_secret(name, value):
            found |= {value, quote(value, safe=""), json.dumps(value)[1:-1], repr(value)[1:-1]}
            found |= {value.replace("'", "''"), value.replace("'", "'\"'\"'")}
    return sorted(found, key=len, reverse=True)


def _by_name(pattern: re.Pattern[str], text: str) -> str:
    """Return `text` with the values hidden that follow the secret names that `pattern` finds."""
    parts, at = [], 0
    while (found := pattern.search(text, at)) is not None:
        *_, name, between = found.groups()
        name_at = found.start(pattern.groups - 1)
        start = text[max(0, name_at - 8) : name_at].rstrip("+~ ")[-1:]
        word = WORD.match(text, found.end())
        if start in TO_QUOTE and pattern is not QUOTED_NAME:
            word = TO_QUOTE[start].match(text, found.end())
        value = word[0] if word is not None else ""
        if pattern is QUOTED_NAME or (pattern is INLINE and value[:1] not in TO_QUOTE):
            value = value[: CLOSERS.search(value).start()]  # type: ignore[union-attr]
        if pattern is INLINE and start in ("{", ",") and value[:1] not in TO_QUOTE:
            value = max(value, IN_BRACES.match(text, found.end())[0], key=len)  # type: ignore[index]
        parts.append(text[at : found.end()])
        at = found.end()
        if value and _hides(pattern, name.lstrip("-"), f"{start}{between}", value):
            whole = len(value) > 1 and value[0] in TO_QUOTE and value[-1] == value[0]
            parts.append(f"{value[0]}{HIDDEN}{value[0]}" if whole else HIDDEN)
            at += len(value)
    return "".join([*parts, text[at:]])


def _hides(pattern: re.Pattern[str], name: str, around: str, value: str) -> bool:
    """Return whether a name in running text hides its value; "token = tokens of all ranks" does not.

    `around` is the mark before the name and what stands between it and the value.
    """
    if NOTHING.match(value) and not value[:1].isdigit():
        return False
    if (pattern is INLINE and around[0] not in "{,") or (pattern is ASSIGNED and around[-2:] in ("= ", "=\t")):
        return is_secret(name, 0)
    return is_secret(name, value)


def _yaml(text: str) -> str:
    """Hide lines `name: value` whose name is secret, with the value's further lines, which are indented or items."""
    lines: list[str] = []
    hidden: tuple[int, bool] | None = None  # the indent of the name, and whether items may stand below it
    for line in text.split("\n"):
        if hidden is not None and line.strip():
            indent, bare = len(line) - len(line.lstrip(" ")), line.lstrip()
            if indent > hidden[0] or (hidden[1] and indent == hidden[0] and bare.startswith("- ")):
                if lines[-1].endswith(":"):
                    lines[-1] += f" {HIDDEN}"
                continue
            hidden = None
        found = YAML_LINE.match(line)
        value = (found[4] or "").strip() if found is not None else "null"
        if found is not None and (value[:1].isdigit() or not NOTHING.match(value)):
            in_more_lines = value in ("", "|", ">", "|-", ">-")
            if is_secret(found[3], None if in_more_lines else value):
                hidden = (len(found[1]), not value)
                line = line if not value else f"{found[1]}{found[2]}{found[3]}{found[2]}: {HIDDEN}"
        lines.append(line)
    return "\n".join(lines)


def _in_query(found: re.Match[str]) -> str:
    name = found[2]
    if is_secret(name, found[3]) or _words(name)[-1] in IN_QUERY or name.lower() in IN_QUERY:
        return f"{found[1]}{HIDDEN}"
    return found[0]
