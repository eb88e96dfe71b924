"""Secrets are known by name, by form and from the environment; ordinary words stay."""

from __future__ import annotations

import json
import os
import random
import shlex
import string
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml
from omegaconf import OmegaConf

from remat.config import compose
from remat.config.redact import is_secret, redact, redact_text

ROOT = Path(__file__).resolve().parent.parent.parent


def test_by_name_and_by_value() -> None:
    config = {
        "hub_token": "abc",
        "api_key": "k",
        "password": "p",
        "tokenizer": "bytes",
        "bos_token": "<s>",
        "tokens": 5,
        "empty": {"secret": None},
        "list": [{"access_key": "x"}, "https://me:pw@host/repo"],
        "env": "hf_" + "a" * 30,
        "path": Path("/data/https:/me:pw@host/x"),
        "variables": [{"name": "DB_PASS", "value": "x"}, {"name": "LR", "value": "x"}],
        "command": ["curl", "--api-key", "x y", "--lr", "0.1"],
    }
    assert redact(config) == {
        "hub_token": "***",
        "api_key": "***",
        "password": "***",
        "tokenizer": "bytes",
        "bos_token": "<s>",
        "tokens": 5,
        "empty": {"secret": None},
        "list": [{"access_key": "***"}, "https://***@host/repo"],
        "env": "***",
        "path": "/data/https:/***@host/x",
        "variables": [{"name": "DB_PASS", "value": "***"}, {"name": "LR", "value": "x"}],
        "command": ["curl", "--api-key", "***", "--lr", "0.1"],
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://me:pw@host/x and s3://a@b", "https://***@host/x and s3://***@b"),
        ("/data/https:/me:pw@host/x", "/data/https:/***@host/x"),
        ("deepspeed.overrides.comet.api_key=abc train.steps=3", "deepspeed.overrides.comet.api_key=*** train.steps=3"),
        ("comet:\n  api_key: abc def\n  token: null\nend: 1", "comet:\n  api_key: ***\n  token: null\nend: 1"),
        ("FLOPs per token = 6 N; one token: five words", "FLOPs per token = 6 N; one token: five words"),
        ("model.tokenizer=bytes a@b.c train.steps=3", "model.tokenizer=bytes a@b.c train.steps=3"),
        ("W&B said: 401 for key 0123456789abcdef", "W&B said: 401 for key ***"),
        ("postgres://me:pa@ss@db/x", "postgres://***@db/x"),
        ("https://me@corp.com:pa/ss@host/x", "https://***@host/x"),
        ("https://h/x?a=1&X-Amz-Signature=abc&token=q&b=2", "https://h/x?a=1&X-Amz-Signature=***&token=***&b=2"),
        ("bucket/key?sv=2&sig=a%2Bb%3D other", "bucket/key?sv=2&sig=*** other"),
        ("github_token=ab data.path=/x", "github_token=*** data.path=/x"),
        ("a.pwd=two a.connection_string=Server=s;Pwd=p b=1", "a.pwd=*** a.connection_string=*** b=1"),
        ("Server=s;Password=p q=1", "Server=s;Password=*** q=1"),
        ("Authorization: Bearer abc.def\nnext", "Authorization: ***\nnext"),
        ('{"Authorization": "Basic bWU6cHc="}', '{"Authorization": "***"}'),
        ("sent bearer abcdefgh12 to it", "sent bearer *** to it"),
        ("it is sk-abcdefghij1234 and github_pat_11ABCDE0123456789xyz", "it is *** and ***"),
        ("glpat-abcdefghijklmnop1234, xoxb-12345-abcdef", "***, ***"),
        ("AKIAIOSFODNN7EXAMPLE eyJhbGciOiJI.eyJzdWIiOiIx.abc-_", "*** ***"),
        ("wrong password: hunter2, try again", "wrong password: ***, try again"),
        ("run '+x.password=two words' lr=1", "run '+x.password=***' lr=1"),
        ("p: 1\npassword:\n  - a\n  - b\nq: 2", "p: 1\npassword: ***\nq: 2"),
        ("key: |\nprivate_key: |\n  line\n\n  more\nq: 2\n", "key: |\nprivate_key: ***\n\nq: 2\n"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY----- x", "*** x"),
        ("dbPassword=x clientSecret: y, AccountKey=z==", "dbPassword=*** clientSecret: ***, AccountKey=***"),
    ],
)  # fmt: skip
def test_text(text: str, expected: str) -> None:
    env = {"WANDB_API_KEY": "0123456789abcdef", "HF_TOKEN": "short", "HOME": "FLOPs per"}
    assert redact_text(text, env) == expected


VARIABLES = [
    "DB_PASS",
    "GITHUB_PAT",
    "MYSQL_PWD",
    "PGPASSWORD",
    "HF_TOKEN",
    "APITOKEN",
    "AWS_SECRET_ACCESS_KEY",
]


@pytest.mark.parametrize("name", VARIABLES)
def test_environment(name: str, tmp_path: Path) -> None:
    assert redact_text("said tricky/pa$$'word.", {name: "tricky/pa$$'word"}) == "said ***."
    assert redact_text("said " + quote("tricky/pa$$'word", safe=""), {name: "tricky/pa$$'word"}) == "said ***"
    assert redact_text(f"in {tmp_path}", {name: str(tmp_path), "PWD": "/somewhere", "GPG_KEY": "in in in"}) == (
        f"in {tmp_path}"
    ), "a variable that names a file holds no secret"


def test_the_environment_is_asked_once_and_again_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: bool(asked.append(path)) or exists(path))
    monkeypatch.setenv("DB_PASS", "tricky-first")
    assert redact_text("a tricky-first b tricky-second") == "a *** b tricky-second"
    assert asked
    asked.clear()
    for _ in range(3):
        assert redact({"x": ["tricky-first"] * 5}) == {"x": ["***"] * 5}
    assert not asked
    monkeypatch.setenv("DB_PASS", "tricky-second")
    assert redact_text("a tricky-first b tricky-second") == "a tricky-first b ***"


HARD, PLAIN = "".join(set(string.punctuation)), string.ascii_letters + string.digits
NAMES = [
    "password",
    "db_password",
    "api_key",
    "apiKey",
    "OPENAI_API_KEY",
    "secret",
    "client_secret",
    "aws_secret_access_key",
    "token",
    "github_token",
    "hub_token",
    "accessToken",
    "pwd",
    "passwd",
    "DB_PASS",
    "GITHUB_PAT",
    "connection_string",
    "private_key",
    "x.comet.api_key",
    "credentials",
    "passphrase",
    "azure_account_key",
    "db_password_prod",
    "API_KEY_2",
]
CARRIERS: dict[str, tuple[str, Callable[[str, str], str]]] = {
    "override": (PLAIN + "!@#$%^&*,;:/?+=-_.{}[]()|~<>", lambda name, value: f"a=1 {name}={value} b=2"),
    "override in a dict": (PLAIN + "!@#$%^&*;/?+=-_.|~", lambda name, value: f"x={{lr:1,{name}:{value},b:2}}"),
    "quoted override": (
        PLAIN + HARD.replace('"', "").replace("\\", "") + " ",
        lambda name, value: f'{name}="{value}" b=2',
    ),
    "shell": (PLAIN + HARD + " ", lambda name, value: shlex.join(["remat", "plan", f"{name}={value}", "b=2"])),
    "flag": (PLAIN + "!@#%^*,:/?+=_.", lambda name, value: f"--{name} a{value} --lr 1"),
    "yaml": (PLAIN + HARD + " ", lambda name, value: yaml.safe_dump({"a": 1, name: value, "z": [1]})),
    "nested yaml": (
        PLAIN + HARD.replace("$", "") + " ",
        lambda name, value: OmegaConf.to_yaml(OmegaConf.create({"s": [{name: value}]})),
    ),
    "flow yaml": (
        PLAIN + HARD + " ",
        lambda name, value: yaml.safe_dump({"a": 1, name: value}, default_flow_style=True),
    ),
    "json": (PLAIN + HARD + " ", lambda name, value: json.dumps({"a": 1, name: value, "z": [1]})),
    "repr": (PLAIN + HARD + " ", lambda name, value: repr({"a": 1, name: value, "z": [1]})),
    "query": (PLAIN + "-._~%", lambda name, value: f"https://host/x?a=1&{name.rpartition('.')[2]}={value}&b=2"),
    "url": (PLAIN + "!@#$%^&*,;:/?+=-_.()", lambda name, value: f"see postgres://me:{value}@db.host/x now"),
    "header": (PLAIN + "-._~+/=", lambda name, value: f"curl -H 'Authorization: Bearer {value}' https://host"),
}


def words_of(secret: str) -> list[str]:
    """What would still tell it: itself, and any long part without a mark in it."""
    parts = "".join(c if c.isalnum() else " " for c in secret).split()
    return [part for part in parts if len(part) >= 6]


@pytest.mark.parametrize("carrier", CARRIERS)
def test_no_secret_survives(carrier: str) -> None:
    draw = random.Random(carrier)
    letters, write = CARRIERS[carrier]
    for _ in range(400):
        name = draw.choice(NAMES)
        secret = "Zq" + "".join(draw.choice(letters) for _ in range(draw.randint(8, 40))) + "7x"
        text = write(name, secret)
        found = redact_text(text, {})
        left = [part for part in [secret, *words_of(secret)] if part in found]
        assert not left, (text, found)
        assert "***" in found


def test_a_backslash_before_a_quote_of_yaml_ends_no_secret() -> None:
    text = yaml.safe_dump({"a": 1, "apiKey": "Zq\\'!0?dC kx)C5sAxgu92"}, default_flow_style=True)
    assert "\\''" in text and "gu92" not in redact_text(text, {})


@pytest.mark.parametrize("name", NAMES)
def test_no_secret_survives_in_records(name: str) -> None:
    assert "Zq7" not in json.dumps(redact({"a": [{name.rpartition(".")[2]: "Zq7 x", "b": 1}]}))
    assert "Zq7" not in redact_text(f"variable {name} is Zq7abcdefgh", {name.rpartition(".")[2]: "Zq7abcdefgh"})


FORMS = {
    "sk-": 24, "sk-proj-": 40, "sk-ant-api03-": 40, "ghp_": 36, "gho_": 36, "ghs_": 36, "github_pat_": 60, "glpat-": 20,
    "hf_": 34, "xoxb-": 40, "xoxp-": 40, "AIza": 35, "npm_": 36, "pypi-": 60, "nvapi-": 60, "hvs.": 24, "sk_live_": 24,
}  # fmt: skip


@pytest.mark.parametrize("start", FORMS)
@pytest.mark.parametrize(
    "text", ["error: {} is no key", "x={}", "['{}']", "/tmp/{}/y", "{}.", "u:{}", "a\t{}\n"]
)
def test_forms_of_vendors(start: str, text: str) -> None:
    draw = random.Random(start)
    token = start + "".join(draw.choice(PLAIN) for _ in range(FORMS[start] - 1)) + "5"
    found = redact_text(text.format(token), {})
    assert token not in found and token[len(start) :] not in found


@pytest.mark.sample(one_in=8)
@pytest.mark.parametrize("recipe", sorted(p.stem for p in (ROOT / "recipes").glob("*.yaml")))
def test_nothing_of_a_recipe_is_hidden(recipe: str) -> None:
    composed = compose.compose_run([f"recipe={recipe}", "model.path=/m", "data.path=/data/x@2/k.jsonl"])
    assert "***" not in composed.yaml
    assert redact_text(composed.yaml, {}) == composed.yaml


ORDINARY = [
    "train.lr=1e-3 model.path=/data/models/llama-3@v1 data.path=s3://bucket/a/b@c.jsonl optim.beta1=0.9",
    "https://huggingface.co/org/name/resolve/main/x?download=true&revision=abc",
    "bos_token: hello\neos_token: </s>\npad_token_id: 0\ntokens_per_s: 5.0\nbytes_per_token: 3",
    "forward_pass=2 first_pass: yes data_key: 793490b11e76c14366c90ea30a6a6041b27c97226db28b7860efb96b293c5702",
    "model.tokenizer=org/name-sk-8b commit 7721d3f6a1b2c3d4e5f60718293a4b5c6d7e8f90",
    "time: 12:30:05, step 3/8: loss 2.1 (key: value) token=<|endoftext|> mask_token=[MASK]",
    "zero_optimization.stage3_prefetch_bucket_size=5e7 num_key_value_heads=8 passes=3 author=me",
    "docker.io/org/image:tag a@b.c user@host.example.org:/path git@github.com:org/repo.git",
    "risk-adjusted task-1234567890123 desk-lamp-number-42 sk-learn-pipeline-model",
    '{"tokenizer_class": "LlamaTokenizer", "image_token": "<image>", "attention": "sdpa", "keys": ["a"], "token": 5}',
    "Traceback (most recent call last):\n  File x, line 3, in <module>\n    token = tokenizer.next()",
]


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_stays(text: str) -> None:
    assert redact_text(text, {}) == text


def test_a_long_text_takes_no_long_time() -> None:
    for piece in (
        "a" * 200_000,
        "a.b-" * 50_000,
        "'\"" * 100_000,
        "://:" * 50_000,
        "x: y\n" * 40_000,
        "password=" * 5_000,
    ):
        began = time.process_time()
        redact_text(piece, {})
        assert time.process_time() - began < 5, piece[:20]


def test_options_of_other_libraries_have_ordinary_names() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for kind in ("llama", "gpt2", "qwen3_moe", "gemma3_text", "deepseek_v3", "mixtral"):
        config: Any = CONFIG_MAPPING[kind]().to_dict()
        assert [name for name, value in config.items() if is_secret(name, value)] == []
        assert redact(config) == config
